"""CPU time and memory of a tree of processes, and the CPU time of everything else on the machine.

Promises: CPU time counts every process below the root, ended ones too as soon as their parent took note of them (as
JVMs and Spark's Python daemon do). Memory is each process's own highest resident size, as the kernel keeps it. Where
there is no `/proc` (macOS), CPU and memory are unknown and wall time alone is measured.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_LOOK_SECONDS = 0.5  # between two looks for processes; their peaks are kept by the kernel
_PEAK = re.compile(rb"VmHWM:\s+(\d+) kB")
_PID = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one block of work: wall seconds, CPU seconds (None: unknown) and peak bytes of the tree by kind of process.

    Kinds are `driver` (the root), `jvm`, `worker` (a Python process that is not the root) and `other`. A process that
    ended counts to the kind of its parent; a kind's peak is that of its largest process since that began. `machine_cpu`
    is CPU seconds of everything on the machine, `beside_cpu` those of separately named processes, such as the broker.
    """

    seconds: float
    cpus: Mapping[str, float] | None
    machine_cpu: float | None
    beside_cpu: float | None
    peaks: Mapping[str, int] = field(default_factory=dict)

    @property
    def cpu(self) -> float | None:
        """CPU seconds of the whole tree."""
        return None if self.cpus is None else sum(self.cpus.values())


class Meter:
    """Takes the cost of a block. `cost` is there once the block has ended."""

    cost: Cost

    def __init__(self, root: int, others: tuple[int, ...]) -> None:
        self._root, self._beside, self._peaks = root, others, dict[str, int]()

    def begin(self) -> None:
        self._before = self._clocks()
        self._started = time.perf_counter()

    def end(self) -> None:
        seconds = time.perf_counter() - self._started
        self.look()
        self.cost = Cost(seconds, *_between(self._before, self._clocks()), self._peaks)

    def look(self) -> None:
        """Take note of every process of the tree and its highest size until now."""
        for pid in list_tree(self._root):
            kind = self._kind(pid)
            self._peaks[kind] = max(self._peaks.get(kind, 0), _peak(pid))

    def _clocks(self) -> _Clocks | None:
        if not _measurable():
            return None
        stats, cpus = read_stats(), Counter[str]()
        for pid in list_tree(self._root, stats):
            cpus[self._kind(pid)] += stats[pid].cpu  # type: ignore[assignment]
        return _Clocks(cpus, _machine_cpu(), sum(stats[pid].cpu for pid in self._beside if pid in stats))

    def _kind(self, pid: int) -> str:
        return "driver" if pid == self._root else _kind(pid)


class _Clocks(NamedTuple):
    """CPU seconds since each began."""

    cpus: Mapping[str, float]
    machine: float
    others: float


@contextmanager
def metering(root: int, others: tuple[int, ...] = ()) -> Iterator[Meter]:
    """Measure the block as work of the process `root` and all below it."""
    meter, stop = Meter(root, others), Event()

    def watch() -> None:
        while not stop.wait(_LOOK_SECONDS):
            meter.look()

    watcher = Thread(target=watch, name="bench-meter", daemon=True)
    meter.begin()
    watcher.start()
    try:
        yield meter
    finally:
        stop.set()
        watcher.join()
        meter.end()


def _between(
    then: _Clocks | None, now: _Clocks | None
) -> tuple[Mapping[str, float] | None, float | None, float | None]:
    """Returns the differences, by kind, of the machine, and of the others."""
    if then is None or now is None:
        return None, None, None
    cpus = {kind: now.cpus.get(kind, 0.0) - then.cpus.get(kind, 0.0) for kind in {**then.cpus, **now.cpus}}
    return cpus, now.machine - then.machine, now.others - then.others


def _measurable() -> bool:
    return (_PROC / "self" / "stat").exists()


@dataclass(frozen=True, slots=True)
class Stat:
    name: str
    parent: int
    cpu: float
    """Seconds of its own and of the children that it has waited for."""


def read_stats() -> dict[int, Stat]:
    if not _measurable():
        return {}
    pids = (int(name) for name in os.listdir(_PROC) if _PID.fullmatch(name))
    return {pid: stat for pid in pids if (stat := _stat(pid))}


def _stat(pid: int) -> Stat | None:
    try:
        before, _, after = (_PROC / str(pid) / "stat").read_text().rpartition(")")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = after.split()
    return Stat(before.partition("(")[2], int(fields[1]), sum(map(int, fields[11:15])) / _TICKS)


def list_tree(root: int, stats: Mapping[int, Stat] | None = None) -> list[int]:
    """The root and all below it, those that live."""
    stats = read_stats() if stats is None else stats
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    tree = [root] if root in stats else []
    for pid in tree:
        tree += children.get(pid, ())
    return tree


def _kind(pid: int) -> str:
    try:
        name = (_PROC / str(pid) / "comm").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "other"
    return "jvm" if name.startswith("java") else "worker" if name.startswith("python") else "other"


def _peak(pid: int) -> int:
    try:
        match = _PEAK.search((_PROC / str(pid) / "status").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(match[1]) * 1024 if match else 0


def _machine_cpu() -> float:
    """Seconds that all processors were busy (user, nice, system, interrupts and stolen time)."""
    fields = (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _wait, interrupt, soft, stolen = map(int, fields[:8])
    return (user + nice + system + interrupt + soft + stolen) / _TICKS
