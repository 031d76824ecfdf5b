"""Compiles the loops in advance: once for this version of Sluice and numba, side by side, before anybody waits.

    ready(report)                                   the driver before it plans, a worker before its first task
    python -m sluice.pipelines.records.compiled.cache                the same from a shell, in an installation
    python -m sluice.pipelines.records.compiled.cache json.scan     one share of the work: what `ready` starts

The first compilation takes most of a minute of one core, in any process that imports the loops. Promises: once they
are ready, this checks one file. No two processes of a machine compile the same loops. Where numba cannot write its
cache, this reports it and does not wait. Only a share imports numba itself.

A compiled loop is made of several files. `source_stamp` hashes them: numba's cache carries it, and so does the mark.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sluice.pipelines.model.receipts import Progress, Reporter

ROOM = Path(__file__).parents[1]
"""The folder of `sluice.pipelines.records`."""
_IMPORT = re.compile(r"^from sluice\.pipelines\.records\.([\w.]+) import", re.MULTILINE)


def source_stamp(module: str) -> str:
    """Return a hash of a module's source and of all sources of this room that it imports.

    `module` is relative to `sluice.pipelines.records`, such as `json.scan`.
    """
    modules = [module]
    digest = hashlib.sha256()
    for name in modules:  # grows while it is walked
        text = (ROOM / f"{name.replace('.', '/')}.py").read_bytes()
        digest.update(hashlib.sha256(text).digest())
        modules += [n for n in dict.fromkeys(_IMPORT.findall(text.decode())) if n not in modules]
    return digest.hexdigest()


SHARES = {
    "json.scan": 23,
    "json.fill": 15,
    "avro.loops": 12,
    "protobuf.loops": 10,
    "kafka_batches.decode.loops": 11,
    "json.unknown": 8,
    "kafka_batches.encode.loops": 4,
    "json.counting": 1,
    "compiled.take_rows": 2,
    "contract_rows.text_tables": 2,
}
"""The modules with entry points, and about how many seconds of one core each takes. The longest comes first."""
STAGE = "compile"
_START = 2  # seconds that a share's process takes besides
_LOOK = 0.05  # seconds between two checks of the processes


def ready(report: Reporter = lambda progress: None) -> None:
    """Compile missing loops, unless no cache can be written. Loops that fail are compiled when needed."""
    folder = _folder()
    if folder is None:
        report(Progress(STAGE, note=NOWHERE))
        return
    mark = _mark(folder)
    if mark.exists():
        return
    with _alone(folder):
        if mark.exists():
            return
        report(Progress(STAGE, 0, len(SHARES), describe_compiling()))
        if _side_by_side(lambda done: report(Progress(STAGE, done, len(SHARES)))):
            with suppress(OSError):
                mark.touch()


def is_ready() -> bool:
    """Returns whether all loops are compiled, judged by one file."""
    folder = _folder()
    return folder is not None and _mark(folder).exists()


def describe_compiling() -> str:
    """Describes the compilation and its expected duration."""
    cores = _cores()
    seconds = max(max(SHARES.values()) + _START, sum(s + _START for s in SHARES.values()) // cores)
    how = f"on {cores} cores, " if cores > 1 else ""
    return (
        "compiling the loops that decode and type records"
        f" ({how}once for this version of Sluice and numba; about {seconds} s)"
    )


NOWHERE = (
    "numba has nowhere to keep compiled loops: every process compiles them for itself, for most of a minute; set"
    " NUMBA_CACHE_DIR to a folder that this user may write"
)


def _folder() -> Path | None:
    """Returns the folder of the mark: the one that numba chooses, or one next to it; None if none is writable."""
    if configured := os.environ.get("NUMBA_CACHE_DIR"):
        folders = [Path(configured)]
    else:
        user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folders = [ROOM / "__pycache__", Path(user) / "sluice"]
    return next(filter(_writable, folders), None)


def _writable(folder: Path) -> bool:
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        return os.access(folder, os.W_OK | os.X_OK)
    return False


def _mark(folder: Path) -> Path:
    return folder / f"sluice-loops-{_fingerprint(folder)}"


@cache
def _fingerprint(folder: Path) -> str:
    """A hash of what compiled code depends on: the sources, numba, Python, the kind of processor.

    Beside the sources, compiled code goes with them wherever they are moved. Elsewhere it is numba's for their place.
    """
    sources = [source_stamp(share) for share in SHARES]
    location = "" if folder.parent == ROOM else str(ROOM)
    versions = version("numba"), version("llvmlite"), platform.python_version()
    return hashlib.sha256(repr((sources, location, versions, _processor())).encode()).hexdigest()[:16]


def _processor() -> str:
    """The processor that code is compiled for. Machines that share a home folder may differ."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    return platform.processor()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process of this machine in at a time. Where files cannot be locked, let all in."""
    with (folder / "sluice-loops.lock").open("a") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _side_by_side(done: Callable[[int], None]) -> bool:
    """Compile each share in its own process, as many at once as there are cores. Returns whether all succeeded."""
    waiting, running, ended = list(SHARES), list[subprocess.Popen[bytes]](), list[int]()
    try:
        while waiting or running:
            while waiting and len(running) < _cores():
                running.append(subprocess.Popen(_command(waiting.pop(0)), **_QUIET))
            time.sleep(_LOOK)
            if codes := [code for child in running if (code := child.poll()) is not None]:
                running = [child for child in running if child.returncode is None]
                ended += codes
                done(len(ended))
        return not any(ended)
    finally:  # also when we are interrupted: nothing goes on compiling
        for child in running:
            child.terminate()


def _command(share: str) -> list[str]:
    return [sys.executable, "-m", "sluice.pipelines.records.compiled.cache", share]


_QUIET: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _compile(share: str) -> None:
    """Compile the entry points of one module, and none of the modules that it imports."""
    from sluice.pipelines.records.compiled import jit

    module, one = f"sluice.pipelines.records.{share}", jit.compiled

    def only(signature: Any) -> Callable[[Any], Any]:
        return lambda f: one(signature)(f) if f.__module__ == module else f

    jit.compiled = only
    importlib.import_module(module)


def _say(progress: Progress) -> None:
    if progress.note:
        print(progress.note, file=sys.stderr, flush=True)


if __name__ == "__main__":
    _compile(sys.argv[1]) if sys.argv[1:] else ready(_say)
