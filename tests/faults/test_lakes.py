"""Runs over a lake on a full, read-only or forbidden disk, or in a store that fails requests."""

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
from tests.faults.nemeses.groups import fetch_offsets
from tests.faults.nemeses.lakes import (
    REFUSALS,
    REQUESTS,
    build_rule,
    draw_faults,
    fill_disk,
    lose_newest_entries,
    make_read_only,
    mount_tmpfs,
    read_ledger_continuously,
    revoke_write,
    start_without_privileges,
    take_store_away,
    use_up_inodes,
    with_store,
)
from tests.faults.nemeses.logs import accept_event
from tests.resources.lake.s3_faults import Proxy, Rule

pytestmark = pytest.mark.faults
BROKERS = 1
LATE_S = 3.0
_numbers = itertools.count(1)


@pytest.fixture
def draw() -> random.Random:
    return random.Random(SEED)


# -- a lost lake


@pytest.mark.parametrize("killed", ["", "before intent", "before record"])
def test_a_lake_is_lost_while_kafka_stays(field: Field, killed: str) -> None:
    """Lost after a clean run, between publishing and committing, and between Kafka's commit and its entry."""
    with field.run_producers():
        field.run_baseline()
        if killed:
            field.run(killed)
        shutil.rmtree(field.write_feed().lake)
        field.observed_entries.clear()  # entries of the deleted ledger
        field.account.log("the lake is gone")
        before = fetch_offsets(field)
        for _ in range(2):
            field.run().expect_error(ForeignMarks, mentions="sluice accept")
        assert fetch_offsets(field) == before
        accept_event(field, "group", "--begin", "start")
        field.run_until_clean()
    field.verify()


def test_a_second_lake_on_the_group_is_refused(field: Field, tmp_path: Path) -> None:
    other = field.with_settings(lake=str(tmp_path / "other"), policies="{on_group_moved: overwrite}")
    with field.run_producers():
        for point in ("before publish", "before intent", "before record"):
            field.run_baseline(1)
            field.run(point)
            before = fetch_offsets(field)
            other.run().expect_error(ForeignMarks, mentions="sluice accept")
            assert fetch_offsets(field) == before
        field.run_until_clean()
    field.verify()
    assert not list(other.folder.read_entries())


# -- a folder


@pytest.fixture
def disk(field: Field, tmp_path: Path) -> Iterator[Field]:
    """A feed whose lake has a separate, small file system."""
    disk_folder = tmp_path / "disk"
    mount = mount_tmpfs(disk_folder)
    try:
        mount.__enter__()
    except OSError as error:
        pytest.skip(f"a file system of its own needs the right to mount one: {error.strerror}")
    yield field.with_settings(lake=str(disk_folder / "lake"))
    mount.__exit__(None, None, None)


Fault = Callable[[Field], AbstractContextManager[None]]


def run_with_fault(field: Field, point: str, inject: Fault) -> Run:
    """Run with a fault that begins at the point and ends with the run. "": the fault begins before the run."""
    running = field.start_paused(point) if point else None
    with inject(field):
        if running is None:
            return field.run()
        running.process.send_signal(signal.SIGCONT)
        return field.wait_for_run(running)


FULL_AT = ("", "before stage", "before receipt", "before publish", "before show", "before intent", "before record")


def test_disk_fills_up_before_and_within_runs(disk: Field, draw: random.Random) -> None:
    """A file without room is absent, never partial, and the next run continues."""
    with disk.run_producers(), read_ledger_continuously(disk):
        disk.run_baseline(1)
        for point in draw.sample(FULL_AT, len(FULL_AT)):
            run = run_with_fault(disk, point, draw.choice((fill_disk, use_up_inodes)))
            if not run.clean:
                run.expect_error(LakeFull, mentions="free space or raise the quota")
            disk.run_until_clean()
    disk.verify()


def test_file_system_is_mounted_read_only(disk: Field, draw: random.Random) -> None:
    with disk.run_producers():
        disk.run_baseline(1)
        for point in ("", *draw.sample(("before publish", "before show", "before intent", "before record"), 2)):
            run_with_fault(disk, point, make_read_only).expect_error(Terminal, mentions="mount it writable")
            disk.run_until_clean()
    disk.verify()


def test_write_permission_is_revoked(field: Field) -> None:
    with field.run_producers():
        field.run_baseline(1)
        with revoke_write(field):
            field.wait_for_run(start_without_privileges(field)).expect_error(
                Terminal, mentions="give this user the right"
            )
        field.run_until_clean()
    field.verify()


# -- a store


def produce_large(field: Field) -> None:
    """Produce 6 MB to the first partition, which are uploaded in two parts."""
    producer = Noting(field.add_notes("large"), f"large{next(_numbers)}", field.arena.kafka.bootstrap)
    producer.send(field.topic, 0, 40, [{"text": "x" * 150_000}])
    producer.close()


def count_requests(field: Field, store: Proxy) -> int:
    """Returns the number of requests of a run without faults."""
    store.requests.clear()
    field.run_baseline(1)
    return len(store.requests)


def test_store_fails_less_often_than_requests_are_retried(remote: Field, store: Proxy, draw: random.Random) -> None:
    """Throttling, resets, lost and late answers to every kind of request: retries hide them."""
    remote = with_store(remote, store.endpoint, retries=12, read_timeout_ms=int(LATE_S * 800))
    with remote.run_producers():
        remote.run_baseline(1)
        store.rules = [build_rule(r, f, draw.choice((1, 1, 2, 3)), LATE_S) for r, f in draw_faults(remote)]
        remote.account.log("; ".join(f"{request} is {fault}" for request, fault in draw_faults(remote)))
        for _ in range(TRIES):
            produce_large(remote)
            assert remote.run().clean
            if not any(r.times for r in store.rules):
                break
        assert [r for r in store.rules if r.times] == [], "all were played"
    remote.verify()


def test_store_fails_more_often_than_requests_are_retried(remote: Field, store: Proxy, draw: random.Random) -> None:
    """A kind of request never succeeds: the run fails with an error, and the next one continues."""
    first_faults = dict(reversed(draw_faults(remote)))
    remote = with_store(remote, store.endpoint, read_timeout_ms=1000)
    with remote.run_producers():
        remote.run_baseline(1)
        for request in draw.sample(sorted(first_faults), 4):
            fault = first_faults[request]
            produce_large(remote)
            store.rules = [build_rule(request, fault, -1, 1.2)]
            remote.account.log(f"{request} is {fault}, always")
            run = remote.run()
            store.rules = []
            if not run.clean:
                run.expect_error(LakeUnavailable, Unknown, mentions="run again")
            remote.run_until_clean()
    remote.verify()


def test_store_becomes_unreachable_during_a_run(remote: Field, store: Proxy, draw: random.Random) -> None:
    with remote.run_producers():
        count = count_requests(remote, store)
        for share in (draw.uniform(0.05, 0.5), draw.uniform(0.5, 0.95)):
            with take_store_away(remote, store, int(count * share)):
                run = remote.run()
            if not run.clean:
                run.expect_error(LakeUnavailable, Unknown, mentions="run again")
            remote.run_until_clean()
    remote.verify()


SAYS = {"forbidden": (NotAuthorized, "grant "), "expired": (NotAuthorized, "renew them"),
        "refused": (NotAuthorized, "renew them"), "full": (LakeFull, "raise the quota")}  # fmt: skip


def test_store_rejects_access_or_is_full_during_a_run(remote: Field, store: Proxy, draw: random.Random) -> None:
    with remote.run_producers():
        count = count_requests(remote, store)
        other = "refused" if "s3" in remote.settings else "expired"  # only other stores answer so
        for name, refusal in REFUSALS.items():
            if name == other:
                continue
            kind, says = SAYS[name]
            passed = int(count * draw.uniform(0.05, 0.8))
            store.rules = [Rule(".", "pass", times=passed), Rule(".", times=-1, **refusal)]
            remote.account.log(f"{passed} requests from now, everything is {name}")
            run = remote.run()
            store.rules = []
            run.expect_error(kind, mentions=says)
            remote.run_until_clean()
    remote.verify()


def kill_at_request(field: Field, store: Proxy, request: str, nth: int, fault: str) -> Run:
    """Start a run and kill it (SIGKILL) during the fault of a request, after `nth` others of its kind."""
    victims: list[Running] = []
    rule = build_rule(request, fault)
    rule.then = lambda: victims[0].process.kill()
    store.rules = [Rule(REQUESTS[request], "pass", times=nth), rule]
    victims.append(field.start())
    run = field.wait_for_run(victims[0], about=f"a run (killed when {request} {nth + 1} was {fault})")
    store.rules = []
    return run


def test_run_killed_before_the_store_answered(remote: Field, store: Proxy, draw: random.Random) -> None:
    """The request is carried out or not, and the run dies without an answer."""
    lost, refused = "done, and nobody answered", "500"
    with remote.run_producers():
        remote.run_baseline(1)
        upload = "the end of an upload" if "s3" in remote.settings else "a staged file"
        for request in ("a ledger entry", "a ledger entry", upload, "a copy", "a deletion"):
            produce_large(remote)
            limit = 4 if request == "a ledger entry" else 1 if request == upload else 3
            kill_at_request(remote, store, request, draw.randrange(limit), draw.choice((lost, refused)))
            if draw.random() < 0.5:
                remote.run_until_clean()
        store.rules = [build_rule("a ledger entry", lost, 1)]
        remote.run(draw.choice(("after stage", "before publish", "after publish", "after show", "before record")))
        store.rules = []
        remote.run_until_clean()
    remote.verify()


def test_copy_ends_after_its_run_died_and_another_run_replaced_its_file(remote: Field, store: Proxy) -> None:
    """The store has read the staged file, and the copy appears late. The next run hides it."""
    with remote.run_producers():
        remote.run_baseline(1)
        kill_at_request(remote, store, "a copy", 0, "500")
        lake = open_lake(remote.write_feed())
        staged = next(p for p in lake.list(paths.staging_root(remote.name)) if paths.parse_part(p))
        data = lake.get(staged)
        assert data is not None
        remote.run_until_clean()
        (old,) = (p for p in lake.list(f"data/{remote.name}") if p.endswith(staged.rpartition("/")[2]))
        part = paths.parse_part(old)
        assert part is not None
        offsets = f"{remote.topic}:{part.partition}:{part.start}-{part.end}"
        replacement = remote.start_cli("--no-dagster", "--offsets", offsets, "--replace")
        assert remote.wait_for_run(replacement, about="a run that replaces a file").clean
        assert lake.size(old) is None
        lake.put(old, data)
        remote.account.log("the copy of the replaced file ends")
        remote.run_until_clean()
        assert lake.size(old) is None
    remote.verify()


def test_one_of_two_concurrent_runs_is_killed(remote: Field, draw: random.Random) -> None:
    """It is killed at a random time. The other run lands, or is refused while the first may be alive."""
    with remote.run_producers():
        remote.run_baseline(1)
        duration = remote.account.numbers["normal_s"]
        for _ in range(4):
            produce_large(remote)
            first, second = remote.start(), remote.start()
            time.sleep(draw.uniform(0, duration))
            draw.choice((first, second)).process.kill()
            for running in (first, second):
                remote.wait_for_run(running)
            remote.run_until_clean()
    remote.verify()


def test_temporary_folder_has_no_room_for_pending_uploads(remote: Field, store: Proxy, tmp_path: Path) -> None:
    remote = with_store(remote, store.endpoint, buffer_bytes="1MiB")
    try:
        mount = mount_tmpfs(tmp_path / "temporary", "1m")
        mount.__enter__()
    except OSError as error:
        pytest.skip(f"a file system of its own needs the right to mount one: {error.strerror}")
    with remote.run_producers():
        remote.run_baseline(1)
        remote.environment["TMPDIR"] = str(tmp_path / "temporary")
        produce_large(remote)
        remote.run().expect_error(LakeFull, mentions="TMPDIR")
        remote.environment.clear()
        remote.run_until_clean()
    mount.__exit__(None, None, None)
    remote.verify()


# -- a ledger


def run_with_lost_entries(field: Field, draw: random.Random, times: int) -> None:
    """Delete the newest entries repeatedly. Each time a run is refused, and the next one lands after `accept`.

    Only the note of the newest number shows the loss of a commit's entry: its intent has the mark.
    """
    with field.run_producers():
        field.run_baseline(2)
        for count in draw.sample(range(1, 8), times):
            lose_newest_entries(field, count, note=count == 1 or draw.random() < 0.5)
            field.run().expect_error(EntriesLost, mentions="sluice accept orders ledger")
            accept_event(field, "ledger")
            field.run_until_clean()
            if draw.random() < 0.5:
                field.run_baseline(1)
    verdict = field.verify()
    assert verdict.counts["entries that were seen and are named as lost"]


def test_a_ledger_loses_its_newest_entries(field: Field, draw: random.Random) -> None:
    run_with_lost_entries(field, draw, 4)


def test_a_ledger_in_a_store_loses_its_newest_entries(remote: Field, store: Proxy, draw: random.Random) -> None:
    run_with_lost_entries(remote, draw, 2)
