"""Builds the library of compiled loops, in the package's folder or in NUMBA_CACHE_DIR: about a minute of one core.

    PYTHONPATH=src python infra/loops.py [MODULE ...]

Each module of loops is compiled by numba in a process of its own (`compiled/build.py`), as many at once as there are
cores, and linked by the C compiler named cc. Objects stay, so that only changed modules are compiled again. Two
processes do not build the same library at once. With MODULE, such as json.scan, the library has the loops of these
alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from sluice.pipelines.records.compiled import library
from sluice.pipelines.util.locks import locking

_LOCK = "sluice-loops.lock"
_POLL = 0.05


def main() -> None:
    """Build the library unless it is there. Exits with the error of the compiler or the linker."""
    folder = library.get_folder()
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    with locking(folder / _LOCK):
        library.find_library.cache_clear()
        if library.find_library() is None:
            link(compile_objects(folder, sys.argv[1:] or library.SHARES), folder)
        if folder == library.LOOPS:
            remove_stale(folder)


def name_object(share: str) -> str:
    versions = (version("numba"), version("llvmlite"))
    return library.name_file(library.list_targets()[0], ".o", share, versions=versions)


def compile_objects(folder: Path, shares: Sequence[str]) -> list[Path]:
    """Compile the loops that have no object yet. Returns the objects of all. Exits if one fails."""
    objects = {share: folder / name_object(share) for share in shares}
    waiting = [share for share, path in objects.items() if not path.exists()]
    if waiting:
        print(f"compiling the loops that decode and type records: {len(waiting)} modules", file=sys.stderr, flush=True)
    running = dict[str, subprocess.Popen[str]]()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        while waiting or running:
            while waiting and len(running) < cores:
                share = waiting.pop(0)
                build = f"{library.PACKAGE}.compiled.build"
                command = [sys.executable, "-m", build, share, str(objects[share]), library.list_targets()[0]]
                running[share] = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            time.sleep(_POLL)
            for share, child in [(s, c) for s, c in running.items() if c.poll() is not None]:
                del running[share]
                if child.returncode:
                    _, errors = child.communicate()
                    sys.exit(f"error: {share} cannot be compiled: {errors.strip().rpartition(chr(10))[2]}")
    finally:  # also after an interrupt: no process continues to compile
        for child in running.values():
            child.terminate()
    return list(objects.values())


def link(objects: list[Path], folder: Path) -> None:
    """Link the objects into the library, which appears whole. Exits without a C compiler, or with its error."""
    if (compiler := shutil.which("cc")) is None:
        sys.exit("error: the loops need a C compiler named cc, which links them: install gcc, and run again")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = Path(scratch, library.name_file(library.list_targets()[0], ".so"))
        # The library calls memcpy and memset and nothing else.
        command = [compiler, "-shared", "-nostdlib", "-Wl,-s", "-o", str(path), *map(str, objects)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"error: cc cannot link the loops: {done.stderr.strip()}")
        path.chmod(0o755)
        path.replace(folder / path.name)


def remove_stale(folder: Path) -> None:
    """Remove libraries and objects of earlier sources."""
    libraries = {library.name_file(target, ".so") for target in (library.LEVEL, library.GENERIC)}
    objects = {name_object(share) for share in library.SHARES}
    for path in folder.iterdir():
        if path.is_file() and path.name not in {*libraries, *objects, _LOCK}:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
