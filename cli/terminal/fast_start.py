"""Fast imports and a fast exit: the time of a command before and after its work.

Promises: memory is as bounded as ever once the code is loaded. At the end everything that was registered with `atexit`
runs, threads that must be waited for are waited for, and output is flushed.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def fast_imports() -> Iterator[None]:
    """Import in this block what takes seconds. Garbage is not looked for meanwhile, nor later among what was loaded:
    importing Dagster makes a million objects that stay, and a fifth of its time would go into looking at them."""
    was_on = gc.isenabled()
    gc.disable()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)  # what an interpreter takes apart at its end, it must find: DuckDB tells of the rest
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


class Ending:
    """The command's exit code, once everything is said."""

    code: int | None = None


def end_at_once() -> None:
    """To be called before anything else is registered with `atexit`: what is registered first runs last. Then the
    system takes the memory back, instead of the interpreter object by object: that takes half a second after a run."""
    atexit.register(_end)


def _end() -> None:
    if Ending.code is not None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(Ending.code)
