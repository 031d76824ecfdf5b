"""Compiles the loops in advance, side by side, and keeps them in files that serve other machines as well.

    ready(report)                                   the driver before it plans, a worker before its first task
    python -m sluice.pipelines.records.compiled.cache                the same from a shell, in an installation
    python -m sluice.pipelines.records.compiled.cache json.scan     one share of the work: what `ready` starts

Compiling takes more than a minute of one core. A wheel of `make wheel` has the loops already. Promises: once they are
ready, this checks one file. No two processes of a machine compile the same loops. Where no file can be written, this
reports it and does not wait. Only a share imports numba itself. A loop is loaded only where the processor executes it:
on x86-64, loops are compiled for the level v3 (AVX2, 2013 and later), elsewhere for the processor at hand.

The name of a loop's file has a hash of all that its code depends on (`stamp`), and none of times or places.
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
_THIS = "compiled.cache"
_IMPORT = re.compile(r"^from sluice\.pipelines\.records\.([\w.]+) import", re.MULTILINE)


def source_stamp(module: str) -> str:
    """Return a hash of a module's source and of all sources of this room that it imports, less this module's.

    `module` is relative to `sluice.pipelines.records`, such as `json.scan`.
    """
    modules = [module]
    digest = hashlib.sha256()
    for name in modules:  # grows while it is walked
        text = (ROOM / f"{name.replace('.', '/')}.py").read_bytes()
        digest.update(hashlib.sha256(text).digest())
        modules += [n for n in dict.fromkeys(_IMPORT.findall(text.decode())) if n not in (*modules, _THIS)]
    return digest.hexdigest()


LEVEL = "x86-64-v3"
"""The processors for which loops are compiled, as LLVM and the x86-64 ABI name them."""
_FLAGS = frozenset(
    (
        *("pni", "ssse3", "sse4_1", "sse4_2", "cx16", "lahf_lm", "popcnt"),
        *("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"),
    )
)
"""Linux's names of what LEVEL requires."""
HOST = "host"
"""The processor at hand, in place of LEVEL."""
LOOPS = ROOM / "compiled" / "loops"
"""Loops that came with the package, or were compiled where it can be written."""
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
    if is_ready():
        return
    folder = find_writable_folder()
    if folder is None:
        report(Progress(STAGE, note=NOWHERE))
        return
    mark = folder / mark_name()
    with _alone(folder):
        if mark.exists():
            return
        report(Progress(STAGE, 0, len(SHARES), describe_compiling()))
        if _side_by_side(lambda done: report(Progress(STAGE, done, len(SHARES)))):
            with suppress(OSError):
                mark.touch()
                if folder == LOOPS:
                    _remove_stale()


def is_ready() -> bool:
    """Returns whether all loops are compiled, judged by one file."""
    return any((folder / mark_name()).exists() for folder in get_folders())


def list_files() -> list[Path]:
    """Return the files of all loops and their mark. Empty unless all are compiled."""
    folder = next((folder for folder in get_folders() if (folder / mark_name()).exists()), None)
    if folder is None:
        return []
    current = {stamp(share, find_targets()[0]) for share in SHARES}
    return [folder / mark_name(), *(p for p in sorted(folder.glob("*.loop")) if _stamp_of(p) in current)]


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
    "compiled loops cannot be kept anywhere: every process compiles them for itself, for most of a minute; set"
    " NUMBA_CACHE_DIR to a folder that this user may write"
)


def get_folders() -> tuple[Path, ...]:
    """Return the folders of compiled loops: those of the package, then those of this user or of `NUMBA_CACHE_DIR`."""
    return LOOPS, _own_folder()


def find_writable_folder() -> Path | None:
    """Return the folder for new loops. None if no folder is writable."""
    own = _own_folder()
    return next(filter(_writable, (own,) if "NUMBA_CACHE_DIR" in os.environ else (LOOPS, own)), None)


def _own_folder() -> Path:
    if configured := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "sluice"


def _writable(folder: Path) -> bool:
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        return os.access(folder, os.W_OK | os.X_OK)
    return False


def make_file_name(module: str, function: str, target: str) -> str:
    """Return the name of a compiled loop's file. `module` is relative to `sluice.pipelines.records`."""
    return f"{module}.{function}-{stamp(module, target)}.loop"


@cache
def stamp(module: str, target: str) -> str:
    """Return a hash of sources, numba, Python, the target and numba's settings: the inputs of a module's loops."""
    versions = version("numba"), version("llvmlite"), sys.implementation.cache_tag, platform.machine()
    settings = [(name, os.environ.get(name)) for name in _SETTINGS]
    processor = LEVEL if target == LEVEL else _processor()
    return hashlib.sha256(repr((source_stamp(module), versions, settings, processor)).encode()).hexdigest()[:16]


_SETTINGS = [
    *("NUMBA_BOUNDSCHECK", "NUMBA_CPU_FEATURES", "NUMBA_CPU_NAME", "NUMBA_DEBUGINFO", "NUMBA_ENABLE_AVX"),
    *("NUMBA_LOOP_VECTORIZE", "NUMBA_OPT", "NUMBA_SLP_VECTORIZE"),
]


@cache
def find_targets() -> tuple[str, ...]:
    """Return the targets whose code this processor executes, best first; new loops are compiled for the first."""
    chosen = any(name in os.environ for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX"))
    return (LEVEL, HOST) if not chosen and _FLAGS.issubset(_processor().split()) else (HOST,)


def mark_name() -> str:
    """Return the name of the file that exists when all loops are compiled."""
    stamps = [stamp(share, find_targets()[0]) for share in SHARES]
    return f"sluice-loops-{hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]}"


def _remove_stale() -> None:
    """Remove the package's loops of earlier sources."""
    current = {stamp(share, target) for share in SHARES for target in find_targets()}
    for path in LOOPS.glob("*.loop"):
        if _stamp_of(path) not in current:
            path.unlink(missing_ok=True)
    for path in LOOPS.glob("sluice-loops-*"):
        if path.name not in (mark_name(), _LOCK):
            path.unlink(missing_ok=True)


def _stamp_of(path: Path) -> str:
    return path.stem.rpartition("-")[2]


@cache
def _processor() -> str:
    """The processor that code is compiled for. Machines that share a home folder may differ."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    return platform.processor()


_LOCK = "sluice-loops.lock"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process of this machine in at a time. Where files cannot be locked, let all in."""
    with (folder / _LOCK).open("a") as lock:
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
    import numba

    settings: Any = numba.config
    if find_targets()[0] == LEVEL:  # before a first function of ours makes numba's code generator
        settings.CPU_NAME, settings.CPU_FEATURES = LEVEL, ""
    from sluice.pipelines.records.compiled import jit

    folder = find_writable_folder()
    vars(jit)["get_folders"] = lambda: (
        (folder,) if folder else ()
    )  # loops of other folders would be missing in this one
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
