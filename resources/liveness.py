"""Heartbeats of batch owners. A heartbeat is a small file in the lake, rewritten every few seconds.

Evidence of death is one of: the file is gone (the run ended), the process is gone (seen on its own machine), or the
heartbeat did not change while this process watched it for `bound_ms`. An old stamp alone is only a reason to watch: the
clocks of two machines may differ by hours. A wrong judgement costs work, never data: the ledger voids an owner's
publications after a takeover. `Informed` adds what Dagster knows about runs.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

from sluice.pipelines.lake import paths
from sluice.pipelines.model.receipts import Life, Owner, Verdict
from sluice.pipelines.ports import Clock, Lake, Liveness
from sluice.pipelines.util.units import CALENDAR_ENDS


def now() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


log = logging.getLogger("sluice.liveness")
_GRACE_S = 10
"""How long the end of a run waits for a heartbeat under way: a heartbeat written after the file is removed would stay.
Also how far apart two times of this machine may be that mean the same moment.
"""


def new_owner(run: str) -> Owner:
    """This process as the owner of a batch for `run`, under a random token that is never reused."""
    pid = os.getpid()
    return Owner(secrets.token_hex(16), run, socket.gethostname(), pid, _process_start(pid) or 0)


def process_gone(pid: int, start_time: float) -> bool:
    """Returns whether this machine's process `pid`, started at `start_time` (s since the epoch), has ended.

    If the pid's process began after that time, it is another process.
    """
    began = _began(pid)
    return not _exists(pid) or (began is not None and began > start_time + _GRACE_S)


class LakeLiveness:
    """`ports.Liveness` over files `_sluice/<feed>/owners/<token>.json`.

    `bound_ms` is how long a heartbeat may stay unchanged, `heartbeat_ms` how often it is renewed; `pause` (seconds)
    waits between two checks of a suspect.
    """

    def __init__(
        self,
        lake: Lake,
        feed: str,
        clock: Clock,
        bound_ms: int = 60_000,
        heartbeat_ms: int = 5_000,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._lake, self._feed, self._clock = lake, feed, clock
        self._folder = paths.owners_folder(feed)
        self._bound_ms, self._heartbeat_ms, self._pause = bound_ms, heartbeat_ms, pause

    @contextmanager
    def send_heartbeats(self, owner: Owner) -> Iterator[None]:
        """Beat now and every `heartbeat_ms` from a daemon thread; the file is removed when the block ends.

        If the lake does not take a heartbeat, this is logged, never raised.
        """
        ended = Event()
        self._write(owner, 0)
        thread = Thread(target=self._send_heartbeats, args=(owner, ended), name="sluice-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(_GRACE_S)
            self._tolerant("remove", lambda: self._lake.remove(self._path(owner)))

    def judge(self, owners: Iterable[Owner], *, watch: bool = True) -> Mapping[str, Verdict]:
        """The verdict on each owner, by token, with its evidence. An owner whose stamp is fresh by this machine's clock
        counts as alive at once; one whose process is gone from this machine counts as dead.

        With `watch`, all suspects are watched together, for `bound_ms`. Without it, they are not known yet.
        """
        heartbeats = {o: self._read_heartbeat(o) for o in owners}
        clear = {o.token: verdict for o, heartbeat in heartbeats.items() if (verdict := self._at_once(heartbeat))}
        suspects = {o: heartbeat for o, heartbeat in heartbeats.items() if o.token not in clear}
        if watch:
            return clear | self._watch(suspects)
        return clear | {o.token: self._judge_age(heartbeat or b"") for o, heartbeat in suspects.items()}

    def owners(self) -> tuple[Owner, ...]:
        """Every owner with a heartbeat in the lake, at work or killed; fields that a heartbeat lacks are empty."""
        return tuple(o for path in self._lake.list(self._folder) if (o := _owner(path, self._lake.get(path) or b"")))

    def last_heartbeat(self, owner: Owner) -> int | None:
        """The time (ms, by the owner's clock) of the owner's last heartbeat; None without one. Never waits."""
        return _stamp(self._read_heartbeat(owner) or b"")

    def _path(self, owner: Owner) -> str:
        return paths.owner_path(self._feed, owner.token)

    def _read_heartbeat(self, owner: Owner) -> bytes | None:
        return self._lake.get(self._path(owner))

    def _send_heartbeats(self, owner: Owner, ended: Event) -> None:
        number = 0
        while not ended.wait(self._heartbeat_ms / 1000):
            number += 1
            self._write(owner, number)

    def _write(self, owner: Owner, number: int) -> None:
        """The number makes every heartbeat differ, even if a clock stands still."""
        document = {"token": owner.token, "run": owner.run, "host": owner.host, "pid": owner.pid}
        document |= {"started": owner.started, "machine": machine(), "at": self._clock(), "beat": number}
        data = json.dumps(document, sort_keys=True).encode()
        self._tolerant("write", lambda: self._lake.put(self._path(owner), data))

    def _tolerant(self, what: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - a missed heartbeat must not end the run
            log.warning("could not %s the owner's heartbeat in %s: %s", what, self._folder, error)

    def _at_once(self, heartbeat: bytes | None) -> Verdict | None:
        """The verdict that a heartbeat gives without waiting; None for a suspect."""
        if heartbeat is None:
            return Verdict(Life.DEAD, "it has ended: no heartbeat of it is in the lake")
        if _process_gone(heartbeat):
            return Verdict(
                Life.DEAD, f"its process (pid {_parse_heartbeat(heartbeat)['pid']}) is gone from this machine"
            )
        at = _stamp(heartbeat)
        age = None if at is None else self._clock() - at
        if age is not None and abs(age) <= self._bound_ms:
            return Verdict(Life.ALIVE, f"its last heartbeat is {max(age, 0) / 1000:.0f} s old")
        return None

    def _judge_age(self, heartbeat: bytes) -> Verdict:
        at, bound = _stamp(heartbeat), self._bound_ms / 1000
        aged = "its last heartbeat has no time"
        if at is not None:
            age = self._clock() - at
            aged = f"by our clock its last heartbeat is {abs(age) / 1000:.0f} s {'old' if age >= 0 else 'ahead'}"
        return Verdict(Life.UNKNOWN, f"{aged}; whether it goes on is seen by watching it for {bound:.0f} s")

    def _watch(self, suspects: dict[Owner, bytes | None]) -> dict[str, Verdict]:
        """Watch for `bound_ms`, by counted pauses and no clock. An owner whose heartbeat changes is alive."""
        verdicts: dict[str, Verdict] = {}
        for _ in range(-(-self._bound_ms // self._heartbeat_ms)):
            if not (remaining := {o: heartbeat for o, heartbeat in suspects.items() if o.token not in verdicts}):
                return verdicts
            self._pause(self._heartbeat_ms / 1000)
            for owner, first in remaining.items():
                now = self._read_heartbeat(owner)
                if now is None or _process_gone(first or b""):
                    verdicts[owner.token] = Verdict(Life.DEAD, "it ended while it was watched")
                elif now != first:
                    verdicts[owner.token] = Verdict(Life.ALIVE, "its heartbeat goes on")
        silent = Verdict(
            Life.DEAD, f"its heartbeat did not change while it was watched for {self._bound_ms / 1000:.0f} s"
        )
        return {o.token: silent for o in suspects} | verdicts


Ended = Callable[[Iterable[str]], Mapping[str, str]]
"""Takes run ids. Returns those that have ended according to Dagster, each with its status, such as `FAILURE`."""


@dataclass(frozen=True)
class Informed:
    """`ports.Liveness` that asks Dagster, too: an owner whose run has ended is dead, even if it still works.

    A run that only another instance knows is judged by its heartbeat. If Dagster is wrong (a run that is marked as
    failed goes on), only its work is lost: the ledger voids its publications after another run took over.
    """

    liveness: Liveness
    ended: Ended

    def send_heartbeats(self, owner: Owner) -> AbstractContextManager[None]:
        return self.liveness.send_heartbeats(owner)

    def last_heartbeat(self, owner: Owner) -> int | None:
        return self.liveness.last_heartbeat(owner)

    def owners(self) -> tuple[Owner, ...]:
        return self.liveness.owners()

    def judge(self, owners: Iterable[Owner], *, watch: bool = True) -> Mapping[str, Verdict]:
        """Dagster is not asked about owners whose heartbeat alone shows that they are dead."""
        everybody = tuple(owners)
        verdicts = dict(self.liveness.judge(everybody, watch=False))
        remaining = [o for o in everybody if not verdicts[o.token].dead]
        ended = self.ended([o.run for o in remaining]) if remaining else {}
        verdicts |= {
            o.token: Verdict(Life.DEAD, f"Dagster knows it as {ended[o.run]}") for o in remaining if o.run in ended
        }
        suspects = [o for o in remaining if verdicts[o.token].life is Life.UNKNOWN]
        return verdicts | dict(self.liveness.judge(suspects) if watch and suspects else {})


def _parse_heartbeat(heartbeat: bytes) -> dict[str, Any]:
    try:
        document = json.loads(heartbeat)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _stamp(heartbeat: bytes) -> int | None:
    at = _parse_heartbeat(heartbeat).get("at")
    return at if isinstance(at, int) and 0 <= at < CALENDAR_ENDS else None


def _owner(path: str, heartbeat: bytes) -> Owner | None:
    """The owner whose heartbeat is at the path; None if the file is not a heartbeat."""
    token = paths.owner_token(path)
    if token is None:
        return None
    document = _parse_heartbeat(heartbeat)
    run, host = (v if isinstance(v := document.get(k), str) else "" for k in ("run", "host"))
    pid, started = (v if isinstance(v := document.get(k), int) else 0 for k in ("pid", "started"))
    return Owner(token, run, host, pid, started)


def _process_gone(heartbeat: bytes) -> bool:
    """Returns whether the heartbeat names a process of this machine that has ended, or whose pid now belongs to
    another.
    """
    document = _parse_heartbeat(heartbeat)
    pid, started = document.get("pid"), document.get("started")
    if document.get("machine") != machine() or not isinstance(pid, int) or not 0 < pid < 1 << 31:
        return False
    return not _exists(pid) or (bool(started) and _process_start(pid) not in (None, started))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is there, and belongs to somebody else
        return True
    return _stat(pid)[:1] not in ([b"Z"], [b"X"])  # killed, and not yet reaped by its parent


def _process_start(pid: int) -> int | None:
    """When the process started, in clock ticks since boot (no clock moves it); None without /proc."""
    fields = _stat(pid)
    return int(fields[19]) if len(fields) > 19 and fields[19].isdigit() else None


def _began(pid: int) -> float | None:
    """The same in seconds since the epoch, if this machine's clock has not been set since."""
    ticks = _process_start(pid)
    try:
        lines = Path("/proc/stat").read_text().splitlines() if ticks else []
    except OSError:
        return None
    boot = next((float(line.split()[1]) for line in lines if line.startswith("btime ")), None)
    return boot + ticks / os.sysconf("SC_CLK_TCK") if boot and ticks else None


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/<pid>/stat from the state on; none if the file does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def machine() -> str:
    """One boot of one machine and one space of process ids in it (containers may share host names)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
