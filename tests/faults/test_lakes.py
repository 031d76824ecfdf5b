"""A lake on a disk that is full, read-only or forbidden, or in a store on a bad day, while runs go on."""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from sluice.pipelines.errors import (
    EntriesLost,
    ForeignMarks,
    LakeFull,
    LakeUnavailable,
    NotAuthorized,
    Terminal,
    Unknown,
)
from sluice.pipelines.lake import paths
from sluice.resources.lake import open_lake
from tests.checker.producers import Noting
from tests.faults.account import SEED
from tests.faults.field import TRIES, Field, Run, Running
from tests.faults.nemeses.groups import committed
from tests.faults.nemeses.lakes import (
    REFUSALS,
    REQUESTS,
    disk_full,
    drawn,
    in_store,
    ledger_loses,
    mounted,
    no_inodes,
    read_all_the_time,
    read_only,
    rights_taken,
    rule,
    store_away,
    without_privileges,
)
from tests.faults.nemeses.logs import accepted
from tests.resources.lake.s3_faults import Proxy, Rule

pytestmark = pytest.mark.faults
BROKERS = 1
LATE_S = 3.0
_numbers = itertools.count(1)


@pytest.fixture
def draw() -> random.Random:
    return random.Random(SEED)


# -- a lake that is gone


@pytest.mark.parametrize("killed", ["", "before intent", "before record"])
def test_a_lake_is_lost_while_kafka_stays(field: Field, killed: str) -> None:
    """Lost after a clean run, between publishing and committing, and between Kafka's commit and its entry."""
    with field.producing():
        field.normal()
        if killed:
            field.run(killed)
        shutil.rmtree(field.feed().lake)
        field.observed.clear()  # entries of a ledger that is no more
        field.account.did("the lake is gone")
        before = committed(field)
        for _ in range(2):
            field.run().stopped_by(ForeignMarks, says="sluice accept")
        assert committed(field) == before
        accepted(field, "group", "--begin", "start")
        field.recovered()
    field.proven()


def test_a_second_lake_on_the_group_is_refused(field: Field, tmp_path: Path) -> None:
    other = field.with_settings(lake=str(tmp_path / "other"), policies="{on_group_moved: overwrite}")
    with field.producing():
        for point in ("before publish", "before intent", "before record"):
            field.normal(1)
            field.run(point)
            before = committed(field)
            other.run().stopped_by(ForeignMarks, says="sluice accept")
            assert committed(field) == before
        field.recovered()
    field.proven()
    assert not list(other.folder.entries())


# -- a folder


@pytest.fixture
def disk(field: Field, tmp_path: Path) -> Iterator[Field]:
    """A feed whose lake has a small file system to itself."""
    place = tmp_path / "disk"
    block = mounted(place)
    try:
        block.__enter__()
    except OSError as error:
        pytest.skip(f"a file system of its own needs the right to mount one: {error.strerror}")
    yield field.with_settings(lake=str(place / "lake"))
    block.__exit__(None, None, None)


Wrong = Callable[[Field], AbstractContextManager[None]]


def wrong_at(field: Field, point: str, wrong: Wrong) -> Run:
    """A run during which it goes wrong at the point; it is put right when the run has ended. "": before the run."""
    running = field.paused(point) if point else None
    with wrong(field):
        if running is None:
            return field.run()
        running.process.send_signal(signal.SIGCONT)
        return field.ended(running)


FULL_AT = ("", "before stage", "before receipt", "before publish", "before show", "before intent", "before record")


def test_disk_fills_up_before_and_within_runs(disk: Field, draw: random.Random) -> None:
    """Whatever there is no room for is not there, nor half of it, and the next run goes on."""
    with disk.producing(), read_all_the_time(disk):
        disk.normal(1)
        for point in draw.sample(FULL_AT, len(FULL_AT)):
            ran = wrong_at(disk, point, draw.choice((disk_full, no_inodes)))
            if not ran.clean:
                ran.stopped_by(LakeFull, says="free space or raise the quota")
            disk.recovered()
    disk.proven()


def test_file_system_is_mounted_read_only(disk: Field, draw: random.Random) -> None:
    with disk.producing():
        disk.normal(1)
        for point in ("", *draw.sample(("before publish", "before show", "before intent", "before record"), 2)):
            wrong_at(disk, point, read_only).stopped_by(Terminal, says="mount it writable")
            disk.recovered()
    disk.proven()


def test_right_to_write_is_taken_away(field: Field) -> None:
    with field.producing():
        field.normal(1)
        with rights_taken(field):
            field.ended(without_privileges(field)).stopped_by(Terminal, says="give this user the right")
        field.recovered()
    field.proven()


# -- a store


def large(field: Field) -> None:
    """Records of 6 MB for the first partition: they are uploaded in two parts."""
    producer = Noting(field.noted("large"), f"large{next(_numbers)}", field.arena.kafka.bootstrap)
    producer.send(field.topic, 0, 40, [{"text": "x" * 150_000}])
    producer.close()


def requests_of(field: Field, store: Proxy) -> int:
    """How many requests a run makes while nothing is wrong."""
    store.seen.clear()
    field.normal(1)
    return len(store.seen)


def test_store_is_disturbed_no_more_often_than_it_is_asked(remote: Field, store: Proxy, draw: random.Random) -> None:
    """Throttling, resets, lost and late answers to every kind of request: nobody notices."""
    remote = in_store(remote, store.endpoint, retries=12, read_timeout_ms=int(LATE_S * 800))
    with remote.producing():
        remote.normal(1)
        store.rules = [rule(r, f, draw.choice((1, 1, 2, 3)), LATE_S) for r, f in drawn(remote)]
        remote.account.did("; ".join(f"{request} is {fault}" for request, fault in drawn(remote)))
        for _ in range(TRIES):
            large(remote)
            assert remote.run().clean
            if not any(r.times for r in store.rules):
                break
        assert [r for r in store.rules if r.times] == [], "all were played"
    remote.proven()


def test_store_is_disturbed_more_often_than_it_is_asked(remote: Field, store: Proxy, draw: random.Random) -> None:
    """A kind of request that never gets through: the run says so, and the next one goes on."""
    first_faults = dict(reversed(drawn(remote)))
    remote = in_store(remote, store.endpoint, read_timeout_ms=1000)
    with remote.producing():
        remote.normal(1)
        for request in draw.sample(sorted(first_faults), 4):
            fault = first_faults[request]
            large(remote)
            store.rules = [rule(request, fault, -1, 1.2)]
            remote.account.did(f"{request} is {fault}, always")
            ran = remote.run()
            store.rules = []
            if not ran.clean:
                ran.stopped_by(LakeUnavailable, Unknown, says="run again")
            remote.recovered()
    remote.proven()


def test_store_goes_away_in_mid_run(remote: Field, store: Proxy, draw: random.Random) -> None:
    with remote.producing():
        count = requests_of(remote, store)
        for share in (draw.uniform(0.05, 0.5), draw.uniform(0.5, 0.95)):
            with store_away(remote, store, int(count * share)):
                ran = remote.run()
            if not ran.clean:
                ran.stopped_by(LakeUnavailable, Unknown, says="run again")
            remote.recovered()
    remote.proven()


SAYS = {"forbidden": (NotAuthorized, "grant "), "expired": (NotAuthorized, "renew them"),
        "refused": (NotAuthorized, "renew them"), "full": (LakeFull, "raise the quota")}  # fmt: skip


def test_store_forbids_finds_keys_expired_or_is_full_in_mid_run(
    remote: Field, store: Proxy, draw: random.Random
) -> None:
    with remote.producing():
        count = requests_of(remote, store)
        other = "refused" if "s3" in remote.settings else "expired"  # by the other stores
        for name, refusal in REFUSALS.items():
            if name == other:
                continue
            kind, says = SAYS[name]
            at = int(count * draw.uniform(0.05, 0.8))
            store.rules = [Rule(".", "pass", times=at), Rule(".", times=-1, **refusal)]
            remote.account.did(f"{at} requests from now, everything is {name}")
            ran = remote.run()
            store.rules = []
            ran.stopped_by(kind, says=says)
            remote.recovered()
    remote.proven()


def killed_at(field: Field, store: Proxy, request: str, nth: int, fault: str) -> Run:
    """A run that is killed (SIGKILL) while such a request of its has this fault, after so many others of the kind."""
    victims: list[Running] = []
    there = rule(request, fault)
    there.then = lambda: victims[0].process.kill()
    store.rules = [Rule(REQUESTS[request], "pass", times=nth), there]
    victims.append(field.start())
    ran = field.ended(victims[0], about=f"a run (killed when {request} {nth + 1} was {fault})")
    store.rules = []
    return ran


def test_run_killed_before_the_store_answered(remote: Field, store: Proxy, draw: random.Random) -> None:
    """What it was about is done, or is not, and nobody was told."""
    lost, refused = "done, and nobody answered", "500"
    with remote.producing():
        remote.normal(1)
        upload = "the end of an upload" if "s3" in remote.settings else "a staged file"
        for request in ("a ledger entry", "a ledger entry", upload, "a copy", "a deletion"):
            large(remote)
            most = 4 if request == "a ledger entry" else 1 if request == upload else 3
            killed_at(remote, store, request, draw.randrange(most), draw.choice((lost, refused)))
            if draw.random() < 0.5:
                remote.recovered()
        store.rules = [rule("a ledger entry", lost, 1)]
        remote.run(draw.choice(("after stage", "before publish", "after publish", "after show", "before record")))
        store.rules = []
        remote.recovered()
    remote.proven()


def test_copy_ends_after_its_run_died_and_another_replaced_its_file(remote: Field, store: Proxy) -> None:
    """The store has read the staged file, and its copy appears when nobody expects it. The next run hides it."""
    with remote.producing():
        remote.normal(1)
        killed_at(remote, store, "a copy", 0, "500")
        lake = open_lake(remote.feed())
        staged = next(p for p in lake.list(paths.staging_root(remote.name)) if paths.parse_part(p))
        data = lake.get(staged)
        assert data is not None
        remote.recovered()
        (old,) = (p for p in lake.list(f"data/{remote.name}") if p.endswith(staged.rpartition("/")[2]))
        part = paths.parse_part(old)
        assert part is not None
        offsets = f"{remote.topic}:{part.partition}:{part.start}-{part.end}"
        again = remote.start_cli("--no-dagster", "--offsets", offsets, "--replace")
        assert remote.ended(again, about="a run that replaces a file").clean
        assert lake.size(old) is None
        lake.put(old, data)
        remote.account.did("the copy of the replaced file ends")
        remote.recovered()
        assert lake.size(old) is None
    remote.proven()


def test_two_runs_at_once_of_which_one_is_killed(remote: Field, draw: random.Random) -> None:
    """At any moment of it. The other one lands, or is refused while the first may live."""
    with remote.producing():
        remote.normal(1)
        took = remote.account.numbers["normal_s"]
        for _ in range(4):
            large(remote)
            first, second = remote.start(), remote.start()
            time.sleep(draw.uniform(0, took))
            draw.choice((first, second)).process.kill()
            for running in (first, second):
                remote.ended(running)
            remote.recovered()
    remote.proven()


def test_temporary_folder_has_no_room_for_what_waits_to_be_uploaded(
    remote: Field, store: Proxy, tmp_path: Path
) -> None:
    remote = in_store(remote, store.endpoint, buffer_bytes="1MiB")
    try:
        block = mounted(tmp_path / "temporary", "1m")
        block.__enter__()
    except OSError as error:
        pytest.skip(f"a file system of its own needs the right to mount one: {error.strerror}")
    with remote.producing():
        remote.normal(1)
        remote.environment["TMPDIR"] = str(tmp_path / "temporary")
        large(remote)
        remote.run().stopped_by(LakeFull, says="TMPDIR")
        remote.environment.clear()
        remote.recovered()
    block.__exit__(None, None, None)
    remote.proven()


# -- a ledger


def loses_entries(field: Field, draw: random.Random, times: int) -> None:
    """So many times the newest entries are gone: each time a run is refused, and goes on once that is accepted.

    A commit's entry alone is told of by the note beside the ledger only: its intent has the mark.
    """
    with field.producing():
        field.normal(2)
        for count in draw.sample(range(1, 8), times):
            ledger_loses(field, count, note=count == 1 or draw.random() < 0.5)
            field.run().stopped_by(EntriesLost, says="sluice accept orders ledger")
            accepted(field, "ledger")
            field.recovered()
            if draw.random() < 0.5:
                field.normal(1)
    verdict = field.proven()
    assert verdict.counts["entries that were seen and are named as lost"]


def test_a_ledger_loses_its_newest_entries(field: Field, draw: random.Random) -> None:
    loses_entries(field, draw, 4)


def test_a_ledger_in_a_store_loses_its_newest_entries(remote: Field, store: Proxy, draw: random.Random) -> None:
    loses_entries(remote, draw, 2)
