"""Owners that send heartbeats to a real lake: alive, dead on this machine, or watched because clocks disagree."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.pipelines.errors import LakeUnavailable
from sluice.pipelines.model.receipts import Life, Owner
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.liveness import LakeLiveness, new_owner, process_gone

BOUND, HEARTBEAT = 60_000, 5_000
HOUR = 3_600_000
PATH = "_sluice/orders/owners/{}.json"


class Clock:
    def __init__(self, now: int = 1_795_521_600_000) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lake(tmp_path: Path) -> LocalLake:
    return LocalLake(tmp_path)


class Watcher:
    """A liveness whose pauses do not wait: it records them and calls `on_pause`."""

    def __init__(self, lake: LocalLake, clock: Clock) -> None:
        self.pauses: list[float] = []
        self.on_pause: Callable[[], None] = lambda: None
        self.liveness = LakeLiveness(lake, "orders", clock, BOUND, HEARTBEAT, self._pause)

    def is_dead(self, owner: Owner) -> bool:
        return self.liveness.judge([owner])[owner.token].dead

    def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.on_pause()


@pytest.fixture
def watcher(lake: LocalLake, clock: Clock) -> Watcher:
    return Watcher(lake, clock)


def wait_until(condition: Callable[[], bool], event: str) -> None:
    give_up = time.monotonic() + 30
    while not condition():
        if time.monotonic() > give_up:
            pytest.fail(f"never came: {event}")
        threading.Event().wait(0.001)


def read_heartbeat(lake: LocalLake, owner: Owner) -> dict[str, object]:
    heartbeat: dict[str, object] = json.loads(lake.get(PATH.format(owner.token)) or b"{}")
    return heartbeat


def write_foreign_heartbeat(lake: LocalLake, owner: Owner, at: int, number: int = 1) -> None:
    """Write the heartbeat of an owner on another machine, whose pid means nothing here."""
    heartbeat = {"machine": "another", "pid": 1 << 30, "started": 1, "at": at, "beat": number}
    lake.put(PATH.format(owner.token), json.dumps(heartbeat).encode())


def test_owner_is_this_process_with_a_unique_token() -> None:
    one, other = new_owner("run-1"), new_owner("run-1")
    assert (one.run, one.pid, one.started) == ("run-1", os.getpid(), other.started)
    assert one.host
    assert one.token != other.token
    assert len(bytes.fromhex(one.token)) == 16


def test_heartbeat_starts_at_once_names_its_owner_and_ends_with_the_block(
    lake: LocalLake, watcher: Watcher, clock: Clock
) -> None:
    owner = new_owner("run-1")
    with watcher.liveness.send_heartbeats(owner):
        heartbeat = read_heartbeat(lake, owner)
        assert {k: heartbeat[k] for k in ("token", "run", "host", "pid", "at")} == {
            "token": owner.token, "run": "run-1", "host": owner.host, "pid": os.getpid(), "at": clock.now,
        }  # fmt: skip
        assert not watcher.is_dead(owner)
        assert watcher.liveness.last_heartbeat(owner) == clock.now
    assert watcher.is_dead(owner)
    assert watcher.liveness.last_heartbeat(owner) is None
    assert list(lake.list("")) == []
    assert watcher.pauses == []


def test_heartbeat_repeats_while_the_clock_is_frozen(lake: LocalLake, clock: Clock) -> None:
    owner = new_owner("run-1")
    with LakeLiveness(lake, "orders", clock, BOUND, heartbeat_ms=1).send_heartbeats(owner):
        first = read_heartbeat(lake, owner)
        wait_until(lambda: read_heartbeat(lake, owner) != first, "another heartbeat")
    names = [t.name for t in threading.enumerate()]
    assert "sluice-heartbeat" not in names


def test_heartbeat_file_is_removed_when_the_block_raises(lake: LocalLake, watcher: Watcher) -> None:
    owner = new_owner("run-1")
    with pytest.raises(RuntimeError), watcher.liveness.send_heartbeats(owner):
        raise RuntimeError
    assert watcher.is_dead(owner)


def test_two_owners_of_one_process_end_separately(watcher: Watcher) -> None:
    one, other = new_owner("run-1"), new_owner("run-2")
    with watcher.liveness.send_heartbeats(one):
        with watcher.liveness.send_heartbeats(other):
            pass
        assert watcher.is_dead(other)
        assert not watcher.is_dead(one)


HEARTBEATS = """
import sys
from pathlib import Path
from dataclasses import asdict
import json
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.liveness import LakeLiveness, new_owner
owner = new_owner("other")
with LakeLiveness(LocalLake(Path(sys.argv[1])), "orders", lambda: int(sys.argv[2])).send_heartbeats(owner):
    print(json.dumps(asdict(owner)), flush=True)
    sys.stdin.readline()
"""


@contextmanager
def run_other_owner(lake: LocalLake, clock: Clock) -> Iterator[tuple[subprocess.Popen[str], Owner]]:
    with subprocess.Popen(
        [sys.executable, "-c", HEARTBEATS, str(lake.root), str(clock.now)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            yield process, Owner(**json.loads(process.stdout.readline()))
        finally:
            process.kill()


def test_killed_run_on_this_machine_is_dead_despite_a_fresh_heartbeat(
    lake: LocalLake, watcher: Watcher, clock: Clock
) -> None:
    with run_other_owner(lake, clock) as (process, owner):
        assert not watcher.is_dead(owner)
        process.send_signal(signal.SIGKILL)
        # It stays a zombie until this process, its parent, waits for it.
        wait_until(lambda: watcher.is_dead(owner), "death seen while unburied")
        process.wait()
        assert watcher.is_dead(owner)
    assert read_heartbeat(lake, owner), "its last heartbeat is still there"
    assert watcher.pauses == []


def test_reused_pid_does_not_prove_life(lake: LocalLake, watcher: Watcher) -> None:
    owner = replace(new_owner("run-1"), started=1)  # this pid, but not this process
    with watcher.liveness.send_heartbeats(owner):
        assert watcher.is_dead(owner)


def test_pid_of_another_machine_is_ignored(lake: LocalLake, watcher: Watcher, clock: Clock) -> None:
    owner = new_owner("run-1")
    write_foreign_heartbeat(lake, owner, clock.now - BOUND)
    assert not watcher.is_dead(owner)
    assert watcher.pauses == []


@pytest.mark.parametrize("off", [-HOUR, HOUR], ids=["an hour slow", "an hour fast"])
def test_heartbeat_of_owner_with_clock_skew_proves_life(
    lake: LocalLake, watcher: Watcher, clock: Clock, off: int
) -> None:
    owner = new_owner("run-1")
    write_foreign_heartbeat(lake, owner, clock.now + off)

    def send_at_third_pause() -> None:
        if len(watcher.pauses) == 3:
            write_foreign_heartbeat(lake, owner, clock.now + off, number=2)

    watcher.on_pause = send_at_third_pause
    assert not watcher.is_dead(owner)
    assert len(watcher.pauses) == 3


@pytest.mark.parametrize("off", [-HOUR, HOUR, -BOUND - 1], ids=["an hour slow", "an hour fast", "just late"])
def test_owner_without_heartbeat_during_the_watch_is_dead(
    lake: LocalLake, watcher: Watcher, clock: Clock, off: int
) -> None:
    owner = new_owner("run-1")
    write_foreign_heartbeat(lake, owner, clock.now + off)
    watcher.on_pause = lambda: setattr(clock, "now", clock.now - HOUR)  # this machine's clock has no influence
    assert watcher.is_dead(owner)
    assert sum(watcher.pauses) * 1000 == BOUND


def test_owner_that_ends_while_watched_is_dead_at_once(lake: LocalLake, watcher: Watcher, clock: Clock) -> None:
    owner = new_owner("run-1")
    write_foreign_heartbeat(lake, owner, clock.now - HOUR)
    watcher.on_pause = lambda: lake.remove(PATH.format(owner.token))
    assert watcher.is_dead(owner)
    assert len(watcher.pauses) == 1


def test_hanging_run_on_this_machine_is_dead_after_the_limit(lake: LocalLake, watcher: Watcher, clock: Clock) -> None:
    with run_other_owner(lake, clock) as (process, owner):
        process.send_signal(signal.SIGSTOP)
        clock.now += HOUR
        assert watcher.is_dead(owner)
        assert sum(watcher.pauses) * 1000 == BOUND


@pytest.mark.parametrize(
    "heartbeat",
    [b"", b"{", b"[]", b'{"at": "soon", "pid": -1}', b'{"at": 1%s}' % (b"0" * 400), b"\xff", b"[" * 100_000],
)
def test_unreadable_heartbeat_is_judged_by_its_changes(lake: LocalLake, watcher: Watcher, heartbeat: bytes) -> None:
    owner = new_owner("run-1")
    lake.put(PATH.format(owner.token), heartbeat)
    assert watcher.liveness.last_heartbeat(owner) is None
    assert watcher.liveness.judge([owner], watch=False)[owner.token].life is Life.UNKNOWN
    watcher.on_pause = lambda: lake.put(PATH.format(owner.token), heartbeat + b" ")
    assert not watcher.is_dead(owner)
    watcher.on_pause = lambda: None
    assert watcher.is_dead(owner)


def test_failed_heartbeat_write_is_logged_and_the_run_continues(
    lake: LocalLake,
    watcher: Watcher,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        raise LakeUnavailable("the lake is away")

    monkeypatch.setattr(lake, "put", refuse)
    monkeypatch.setattr(lake, "remove", refuse)
    done = False
    with LakeLiveness(lake, "orders", clock, BOUND, heartbeat_ms=1).send_heartbeats(new_owner("run-1")):
        wait_until(lambda: len(caplog.records) > 2, "more heartbeats tried")
        done = True
    assert done
    assert {r.levelname for r in caplog.records} == {"WARNING"}
    assert "could not write the owner's heartbeat in _sluice/orders/owners: the lake is away" in caplog.text
    assert "could not remove" in caplog.text


# -- verdicts


def test_suspects_are_watched_concurrently_and_judged_separately(
    lake: LocalLake, watcher: Watcher, clock: Clock
) -> None:
    beating, silent, ended, fresh, absent = (new_owner(f"run-{i}") for i in range(5))
    for owner in (beating, silent, ended):
        write_foreign_heartbeat(lake, owner, clock.now - HOUR)
    write_foreign_heartbeat(lake, fresh, clock.now - 3000)

    def change_at_second_pause() -> None:
        if len(watcher.pauses) == 2:
            write_foreign_heartbeat(lake, beating, clock.now - HOUR, number=2)
            lake.remove(PATH.format(ended.token))

    watcher.on_pause = change_at_second_pause
    verdicts = watcher.liveness.judge([beating, silent, ended, fresh, absent])
    assert {
        o.run: (verdicts[o.token].dead, verdicts[o.token].why) for o in (beating, silent, ended, fresh, absent)
    } == {
        "run-0": (False, "its heartbeat goes on"),
        "run-1": (True, "its heartbeat did not change while it was watched for 60 s"),
        "run-2": (True, "it ended while it was watched"),
        "run-3": (False, "its last heartbeat is 3 s old"),
        "run-4": (True, "it has ended: no heartbeat of it is in the lake"),
    }
    assert sum(watcher.pauses) * 1000 == BOUND, "for all of them together"


def test_stale_owner_is_undecided_without_watch_and_reason_names_the_watch(
    lake: LocalLake, watcher: Watcher, clock: Clock
) -> None:
    silent, undated, fresh, absent = (new_owner(f"run-{i}") for i in range(4))
    write_foreign_heartbeat(lake, silent, clock.now - HOUR)
    lake.put(PATH.format(undated.token), b"{}")
    write_foreign_heartbeat(lake, fresh, clock.now - 3000)
    verdicts = watcher.liveness.judge([silent, undated, fresh, absent], watch=False)
    assert [verdicts[o.token].life for o in (silent, undated, fresh, absent)] == [
        Life.UNKNOWN, Life.UNKNOWN, Life.ALIVE, Life.DEAD,
    ]  # fmt: skip
    watching = "whether it goes on is seen by watching it for 60 s"
    assert verdicts[silent.token].why == f"by our clock its last heartbeat is 3600 s old; {watching}"
    assert verdicts[undated.token].why == f"its last heartbeat has no time; {watching}"
    assert watcher.pauses == [], "nobody waited"


def test_owners_with_heartbeats_are_listed_and_invalid_fields_are_empty(lake: LocalLake, watcher: Watcher) -> None:
    owner = new_owner("run-1")
    with watcher.liveness.send_heartbeats(owner):
        lake.put(PATH.format("odd"), b'{"run": 7, "pid": "x", "host": null}')
        lake.put("_sluice/orders/owners/readme.txt", b"?")
        assert watcher.liveness.owners() == tuple(sorted([owner, Owner("odd", "", "", 0, 0)], key=lambda o: o.token))


def test_process_started_after_the_recorded_time_counts_as_gone() -> None:
    now = time.time()
    assert not process_gone(os.getpid(), now)
    assert process_gone(os.getpid(), now - 86_400 * 365)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    assert process_gone(ended.pid, now)
