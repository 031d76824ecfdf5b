"""Commands of `sluice` as an operator or cron runs them, and the check of their ends.

During a fault, and shortly after, a command may fail with a transient error. It may meet a rival at any time.
Everything else is a finding: another error, a traceback, no end.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.pipelines import errors
from tests.soak.site import PROGRAM, Site, list_environment

AFTERMATH = 90
"""Seconds after a fault in which its errors may show."""
_RIVALS = (
    errors.PlanBusy,
    errors.OwnershipLost,
    errors.GroupHeld,
    errors.NotYet,
    errors.NotReached,
    errors.CommitFenced,
    errors.TableMoved,
)
_PASSING = (*_RIVALS, errors.Retryable, errors.Unknown)
_LIMIT = 900


@dataclass(frozen=True)
class Done:
    """How a command ended: exit code (negative: a signal), its document, and the errors in that."""

    command: str
    code: int
    document: dict[str, Any]
    errors: tuple[dict[str, Any], ...]
    noise: str

    @property
    def is_clean(self) -> bool:
        return self.code == 0

    def __str__(self) -> str:
        text = "; ".join(f"{e['error']}: {str(e.get('message', ''))[:300]}" for e in self.errors)
        return f"sluice {self.command}: exit {self.code} {text or self.noise[-400:]}".strip()


@dataclass
class Weather:
    """Faults with their times. Faults write it, judges of commands read it."""

    spans: list[list[float]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def note_fault(self, name: str) -> Iterator[None]:
        """Note a fault that lasts as long as the block."""
        span = [time.time(), float("inf")]
        with self.lock:
            self.spans.append(span)
            self.names.append(name)
        try:
            yield
        finally:
            span[1] = time.time()

    def list_faults(self, begin: float, end: float) -> list[str]:
        """Returns the faults that may show between two times (s since the epoch)."""
        with self.lock:
            pairs = zip(self.spans, self.names, strict=True)
            return [name for (a, b), name in pairs if a <= end and begin <= b + AFTERMATH]


@dataclass
class Commands:
    """Runs commands with the environment of the site, and judges them."""

    site: Site
    weather: Weather
    running: dict[int, str] = field(default_factory=dict)
    """The process groups at work, by pid."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def run(
        self,
        *words: str,
        accepted: Sequence[int] = (),
        seconds: float = _LIMIT,
        killable: bool = False,
        program: Sequence[str] = (PROGRAM,),
        environment: Mapping[str, str] | None = None,
        expected: tuple[type[errors.SluiceError], ...] = (),
    ) -> Done:
        """Run `sluice …` to its end. An unexpected end is a finding.

        `accepted`: exit codes without an error that are fine; `expected`: errors that are. `killable`: faults may kill
        it.
        """
        began, number = time.time(), next(self._numbers)
        outputs = self.site.project.parent / "commands"
        outputs.mkdir(exist_ok=True)
        out = outputs / f"{number:05d}-{words[0]}.out"
        command = [*program, *words, "--project", str(self.site.project), "--json"]
        late = False
        with out.open("wb") as sink, out.with_suffix(".err").open("wb") as noise:
            process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=noise,
                env=list_environment(self.site) | dict(environment or {}),
                cwd=self.site.project,
                start_new_session=True,
            )
            if killable:
                self.running[process.pid] = " ".join(words)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                late = True
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            finally:
                self.running.pop(process.pid, None)
        done = _read(" ".join(words), process.returncode, out)
        if late:
            self.site.journal.fail(f"{done.command} did not end within {seconds:.0f} s", output=str(out))
        elif problem := self._judge(done, began, accepted, expected):
            self.site.journal.fail(f"{problem}: {done}", output=str(out))
        else:
            out.unlink()
            out.with_suffix(".err").unlink()
        self.site.journal.note("command", str(done), seconds=round(time.time() - began, 1))
        return done

    def kill_one(self, choose: Any) -> str:
        """Kill a running command (SIGKILL to its process group); return its arguments, or nothing if none runs."""
        pids = sorted(self.running)
        if not pids:
            return ""
        pid = choose(pids)
        words = self.running.get(pid, "")
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        return words

    def _judge(
        self, done: Done, began: float, accepted: Sequence[int], expected: tuple[type[errors.SluiceError], ...]
    ) -> str:
        """Returns the description of a problem; empty if the end is expected."""
        if "Traceback" in done.noise:
            return "a traceback"
        faults = self.weather.list_faults(began, time.time())
        if done.code < 0:
            return "" if any(name.startswith("kill") for name in faults) else "ended by a signal"
        if done.code == 0 or (done.code in accepted and not done.errors):
            return ""
        passing = (*(_PASSING if faults else _RIVALS), *expected)
        for error in done.errors:
            kind = getattr(errors, error["error"], errors.SluiceError)
            if not issubclass(kind, (*passing, errors.BatchIncomplete) if faults else passing):
                return f"an error that may not be{' in calm' if not faults else ''}"
            if not error.get("remedy"):
                return "an error without a remedy"
        return "" if done.errors else "a failure without an error"


def _read(command: str, code: int, out: Path) -> Done:
    noise = out.with_suffix(".err").read_text(errors="replace")
    document: dict[str, Any] = {}
    for line in out.read_text(errors="replace").splitlines():
        with suppress(ValueError):
            document = json.loads(line)
    if not document:
        with suppress(ValueError):
            document = json.loads(out.read_text(errors="replace"))
    return Done(command, code, document, tuple(_list_errors(document)), noise)


def _list_errors(value: Any) -> Iterator[dict[str, Any]]:
    """Yields every error in a document, at any depth."""
    if isinstance(value, dict):
        if isinstance(value.get("error"), str) and "message" in value:
            yield value
        for inner in value.values():
            yield from _list_errors(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _list_errors(inner)
