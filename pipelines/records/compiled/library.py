"""Finds the library of compiled loops, which is built with the wheel or the checkout (`infra/loops.py`).

Nothing is compiled when Sluice runs. A library's name has a hash of the loops' sources, of numba's settings and of the
processors that it is for, so that one of other sources is never loaded, nor one with instructions that this processor
lacks.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

from sluice.pipelines.errors import SetupError
from sluice.pipelines.util.locks import is_ours

PACKAGE = "sluice.pipelines.records"
ROOM = Path(__file__).parents[1]
"""The folder of `sluice.pipelines.records`."""
LOOPS = ROOM / "compiled" / "loops"
SHARES = (
    *("json.scan", "json.fill", "avro.loops", "kafka_batches.decode.loops", "protobuf.loops", "json.unknown"),
    *("kafka_batches.encode.loops", "compiled.take_rows", "columns.loops"),
    *("contract_rows.text_tables", "json.counting", "json.member_values", "rows.row_hashes"),
)
"""The modules with entry points. Those that compile longest come first."""
LEVEL, GENERIC = "x86-64-v3", "generic"
"""The processors for which loops are compiled, as LLVM names them: those with AVX2 (2013 and later), and all of this
architecture."""
_FLAGS = frozenset(
    (
        *("pni", "ssse3", "sse4_1", "sse4_2", "cx16", "lahf_lm", "popcnt"),
        *("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"),
    )
)
"""Linux's names of what LEVEL requires."""
SETTINGS = (
    *("NUMBA_BOUNDSCHECK", "NUMBA_CPU_FEATURES", "NUMBA_CPU_NAME", "NUMBA_DEBUGINFO", "NUMBA_ENABLE_AVX"),
    *("NUMBA_LOOP_VECTORIZE", "NUMBA_OPT", "NUMBA_SLP_VECTORIZE"),
)
_THIS, _BUILD = "compiled.library", "compiled.build"
_IMPORT = re.compile(r"^from sluice\.pipelines\.records\.([\w.]+) import", re.MULTILINE)


def hash_sources(*modules: str) -> str:
    """Returns a hash of these modules' sources and of all sources of this room that they import, less this module's.

    `modules` are relative to `sluice.pipelines.records`, such as `json.scan`.
    """
    names = [_BUILD, *modules]
    digest = hashlib.sha256()
    for name in names:  # grows while it is walked
        text = (ROOM / f"{name.replace('.', '/')}.py").read_bytes()
        digest.update(hashlib.sha256(text).digest())
        names += [n for n in dict.fromkeys(_IMPORT.findall(text.decode())) if n not in (*names, _THIS)]
    return digest.hexdigest()


def name_file(target: str, suffix: str, *modules: str, versions: tuple[str, ...] = ()) -> str:
    """Returns the name of the file with these modules' loops: of all modules, without `modules`."""
    settings = [(name, os.environ.get(name)) for name in SETTINGS]
    inputs = (hash_sources(*(modules or SHARES)), versions, settings, platform.machine(), target)
    return f"{modules[0] if modules else 'loops'}-{hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]}{suffix}"


def get_folder() -> Path:
    """Returns the folder of libraries: the package's own, or `NUMBA_CACHE_DIR`."""
    return Path(os.environ.get("NUMBA_CACHE_DIR") or LOOPS)


@cache
def list_targets() -> tuple[str, ...]:
    """Returns the targets whose code this processor executes, best first."""
    flags = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        flags = next((line for line in lines if line.startswith("flags")), "")
    is_free = not any(name in os.environ for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX"))
    is_own = platform.machine() == "x86_64"  # an emulator of others shows the flags of its host
    return (LEVEL, GENERIC) if is_free and is_own and _FLAGS.issubset(flags.split()) else (GENERIC,)


@cache
def find_library() -> Path | None:
    """Returns the library of all loops. None if there is none for these sources and this processor."""
    paths = [get_folder() / name_file(target, ".so") for target in list_targets()]
    # The package's folder is as safe as its sources are.
    return next((p for p in paths if p.exists() and (p.parent == LOOPS or is_ours(p.parent, p))), None)


def find_address(share: str, function: str) -> int:
    """Returns the address of an entry point's C function. Raises SetupError without a library."""
    return ctypes.cast(_load_library()[f"{share}.{function}"], ctypes.c_void_p).value or 0


@cache
def _load_library() -> ctypes.CDLL:
    if (path := find_library()) is None:
        raise SetupError(
            f"this Sluice has no compiled loops for its sources and this processor ({platform.machine()})",
            remedy="in a checkout: make setup; else install the wheel that `make wheel` builds on such a processor",
        )
    return ctypes.CDLL(str(path))
