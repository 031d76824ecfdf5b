"""Finds the machine code of the loops: in the library that came with the package, else in objects compiled here.

    ready(report)                                   the driver before it plans, a worker before its first task
    python -m sluice.pipelines.records.compiled.cache                the same from a shell, in an installation

The wheel for x86-64 has the library: nothing is compiled, and numba is not needed. Elsewhere `ready` compiles each
module of loops in a process of its own, by numba, which takes more than a minute of one core. Without a C compiler to
link a library, llvmlite loads the objects. Promises: once loops are ready, this checks a few files. No two processes
of a machine compile the same loops at once. Machine code is loaded only where the processor executes it: on x86-64,
loops are compiled for the level v3 (AVX2, 2013 and later), elsewhere for the processor at hand.

The names of files have a hash of all that their code depends on, and none of times or places.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sluice.pipelines.model.receipts import Progress, Reporter
from sluice.pipelines.util.locks import is_ours, locking

PACKAGE = "sluice.pipelines.records"
ROOM = Path(__file__).parents[1]
"""The folder of `sluice.pipelines.records`."""
_THIS, _BUILD = "compiled.cache", "compiled.build"
_IMPORT = re.compile(r"^from sluice\.pipelines\.records\.([\w.]+) import", re.MULTILINE)


def source_stamp(*modules: str) -> str:
    """Return a hash of these modules' sources and of all sources of this room that they import, less this module's.

    `modules` are relative to `sluice.pipelines.records`, such as `json.scan`.
    """
    names = [_BUILD, *modules]
    digest = hashlib.sha256()
    for name in names:  # grows while it is walked
        text = (ROOM / f"{name.replace('.', '/')}.py").read_bytes()
        digest.update(hashlib.sha256(text).digest())
        names += [n for n in dict.fromkeys(_IMPORT.findall(text.decode())) if n not in (*names, _THIS)]
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
    with locking(folder / _LOCK, required=False):
        if is_ready():
            return
        report(Progress(STAGE, 0, len(SHARES), describe_compiling()))
        if _side_by_side(folder, lambda done: report(Progress(STAGE, done, len(SHARES)))):
            with suppress(OSError):
                _link(folder)


def is_ready() -> bool:
    """Returns whether all loops are compiled."""
    return bool(list_files())


def list_files() -> list[Path]:
    """Return the library, or the objects of all loops. Empty unless all are compiled."""
    if library := find_library():
        return [library]
    objects = [path for share in SHARES if (path := find_object(share))]
    return objects if len(objects) == len(SHARES) else []


@cache
def find_library() -> Path | None:
    """Return the library of all loops. None if there is none for these sources and this processor."""
    if any(name in os.environ for name in _SETTINGS):
        return None
    return _find(_make_library_name)


def _make_library_name(target: str) -> str:
    return f"loops-{_hash(source_stamp(*SHARES), _describe_processor(target))}.so"


def find_object(share: str) -> Path | None:
    """Return the object of a share's loops. None if it was never compiled."""
    return _find(lambda target: make_object_name(share, target))


def _find(name: Callable[[str], str]) -> Path | None:
    paths = (folder / n for n in map(name, find_targets()) for folder in get_folders())
    # The package's folder is as safe as its sources are.
    return next((p for p in paths if p.exists() and (p.parent == LOOPS or is_ours(p.parent, p))), None)


def find_address(share: str, function: str) -> int:
    """Return the address of an entry point's C function. Compiles its share if it was never compiled.

    Raises ModuleNotFoundError if that needs numba, which is not installed, and ImportError if it fails.
    """
    name = f"{share}.{function}"
    if library := _load_library():
        return ctypes.cast(library[name], ctypes.c_void_p).value or 0
    return int(_load_object(share).get_function_address(name))


@cache
def _load_library() -> ctypes.CDLL | None:
    path = find_library()
    return ctypes.CDLL(str(path)) if path else None


@cache
def _load_object(share: str) -> Any:
    if find_spec("numba") is None:
        raise ModuleNotFoundError(_NEEDS_NUMBA, name="numba")
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    with tempfile.TemporaryDirectory() as scratch:
        path = find_object(share) or _compile(share, find_writable_folder() or Path(scratch))
        engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(path.read_bytes()))
    engine.finalize_object()
    return engine


_NEEDS_NUMBA = "no compiled loops for this processor came with Sluice, and numba, which compiles them, is not installed"


def _compile(share: str, folder: Path) -> Path:
    path = folder / make_object_name(share, find_targets()[0])
    with locking(folder / _LOCK, required=False):
        if find_object(share) is None:
            done = subprocess.run(_command(share, folder), capture_output=True, text=True, check=False)
            if done.returncode:
                raise ImportError(f"{share} cannot be compiled: {done.stderr.strip().rpartition(chr(10))[2]}")
    return path


def _link(folder: Path) -> str:
    """Link the objects into a library, which loads without llvmlite. Without a C compiler, there is none. Remove the
    package's loops of earlier sources. Returns the linker's error."""
    compiler, objects, error = shutil.which("cc"), list_files(), ""
    if compiler and objects and find_library() is None and not any(name in os.environ for name in _SETTINGS):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            library = Path(scratch, _make_library_name(find_targets()[0]))
            command = [compiler, "-shared", "-nostdlib", "-Wl,-s", "-o", str(library), *map(str, objects)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                error = f"cc cannot link the loops: {done.stderr.strip()}"
            else:
                library.chmod(0o755)
                library.replace(folder / library.name)
        find_library.cache_clear()
    if folder == LOOPS:
        _remove_stale()
    return error


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
    " NUMBA_CACHE_DIR to a folder that this user alone may write"
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
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        return os.access(folder, os.W_OK | os.X_OK) and (folder == LOOPS or is_ours(folder))
    return False


def make_object_name(share: str, target: str) -> str:
    """Return the name of the object of a share's loops."""
    return f"{share}-{stamp(share, target)}.o"


@cache
def stamp(share: str, target: str) -> str:
    """Return a hash of sources, numba, the target and numba's settings: the inputs of a share's loops."""
    settings = [(name, os.environ.get(name)) for name in _SETTINGS]
    return _hash(source_stamp(share), _version("numba"), _version("llvmlite"), settings, _describe_processor(target))


def _hash(*inputs: object) -> str:
    return hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return ""


def _describe_processor(target: str) -> tuple[str, str]:
    return platform.machine(), LEVEL if target == LEVEL else _processor()


_SETTINGS = [
    *("NUMBA_BOUNDSCHECK", "NUMBA_CPU_FEATURES", "NUMBA_CPU_NAME", "NUMBA_DEBUGINFO", "NUMBA_ENABLE_AVX"),
    *("NUMBA_LOOP_VECTORIZE", "NUMBA_OPT", "NUMBA_SLP_VECTORIZE"),
]


@cache
def find_targets() -> tuple[str, ...]:
    """Return the targets whose code this processor executes, best first; new loops are compiled for the first."""
    chosen = any(name in os.environ for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX"))
    return (LEVEL, HOST) if not chosen and _FLAGS.issubset(_processor().split()) else (HOST,)


def _remove_stale() -> None:
    """Remove the package's loops of earlier sources."""
    targets = find_targets()
    current = {make_object_name(share, target) for share in SHARES for target in targets}
    for path in LOOPS.iterdir():
        if path.name not in {*current, *map(_make_library_name, targets), _LOCK}:
            path.unlink(missing_ok=True)


@cache
def _processor() -> str:
    """The processor that code is compiled for. Machines that share a home folder may differ."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    return platform.processor()


_LOCK = "sluice-loops.lock"


def _side_by_side(folder: Path, done: Callable[[int], None]) -> bool:
    """Compile each missing share in its own process, as many at once as there are cores. Returns whether all
    succeeded."""
    waiting, running = [s for s in SHARES if find_object(s) is None], list[subprocess.Popen[bytes]]()
    ended = [0] * (len(SHARES) - len(waiting))
    try:
        while waiting or running:
            while waiting and len(running) < _cores():
                running.append(subprocess.Popen(_command(waiting.pop(0), folder), **_QUIET))
            time.sleep(_LOOK)
            if codes := [code for child in running if (code := child.poll()) is not None]:
                running = [child for child in running if child.returncode is None]
                ended += codes
                done(len(ended))
        return not any(ended)
    finally:  # also after an interrupt: no process continues to compile
        for child in running:
            child.terminate()


def _command(share: str, folder: Path) -> list[str]:
    target = find_targets()[0]
    path = folder / make_object_name(share, target)
    return [sys.executable, "-m", f"{PACKAGE}.{_BUILD}", share, str(path), target]


_QUIET: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _say(progress: Progress) -> None:
    if progress.note:
        print(progress.note, file=sys.stderr, flush=True)


def main() -> None:
    """Compile and link the loops. Exits with the error of one that cannot be compiled."""
    ready(_say)
    if folder := find_writable_folder():
        try:
            for share in () if is_ready() else SHARES:
                if find_object(share) is None:
                    _compile(share, folder)
        except ImportError as error:
            sys.exit(f"error: {error}")
        if reason := _link(folder):
            print(reason, file=sys.stderr)


if __name__ == "__main__":
    main()
