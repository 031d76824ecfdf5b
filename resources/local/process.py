"""Processes that outlive the one that started them: start, recognise and end exactly those.

Promises: a process is known by its pid *and* the moment it was born, so that a pid which the system gave to
somebody else is never signalled.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_POLL = 0.05  # seconds between two checks of a process that is about to end


@dataclass(frozen=True)
class Process:
    """A pid and what tells its bearer from a later one with the same pid."""

    pid: int
    born: str

    @property
    def alive(self) -> bool:
        return _start_time(self.pid) == self.born

    def send(self, number: signal.Signals) -> None:
        """Signal it; nothing happens when it has ended."""
        if self.alive:
            with suppress(ProcessLookupError):  # it ended after this look
                os.kill(self.pid, number)

    def wait(self, seconds: float) -> bool:
        """Returns whether it ended within that number of seconds."""
        deadline = time.monotonic() + seconds
        while self.alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL)
        return True

    def end(self, grace: float) -> bool:
        """Terminate it (also if stopped); kill it after `grace` seconds. Returns whether it ended by itself."""
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)
        if ended := self.wait(grace):
            return ended
        self.send(signal.SIGKILL)
        self.wait(grace + 10)
        return False


def spawn(command: Sequence[str | Path], folder: Path, output: Path) -> Process:
    """Start `command` in `folder` as a daemon of its own session; its words go to `output`, emptied first."""
    with output.open("wb") as sink:
        # The shell leaves at once, so that the daemon is not our child: no zombie and no handle stays.
        shell = subprocess.run(
            ["/bin/sh", "-c", '"$@" >&2 & echo $!', "sh", *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=sink,
            start_new_session=True,
            check=True,
        )
    pid = int(shell.stdout)
    return Process(pid, _start_time(pid) or "ended at once")


def age() -> float | None:
    """For how many seconds this process has lived; None where the system does not tell."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return None
    started = int(stat.read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def _start_time(pid: int) -> str | None:
    """When the process was started, in the system's own words; None when it has ended, reaped or not."""
    stat = Path("/proc", str(pid), "stat")
    if not Path("/proc/self/stat").exists():
        process = subprocess.run(
            ["ps", "-o", "state=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
        ).stdout.strip()
        return None if not process or process[0] == "Z" else process.split(None, 1)[1]
    try:
        fields = stat.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, threads, started = fields[0], int(fields[17]), fields[19]
    # A zombie whose other threads have not ended yet still holds its ports and files.
    if state in "ZX" and threads <= 1:
        return None
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{started}"
