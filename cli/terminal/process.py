"""The process of a command: signals, closed output, fast imports and a fast exit.

Promises: an interrupt ends the command with 130, one line and no traceback, wherever it strikes: in an import, while an
error is reported, or in a callback that swallows it. If the reader of our output closes it, the command ends quietly.
At exit, everything registered with `atexit` runs, threads are joined and output is flushed. Imports only fast modules,
so that this holds early.
"""

from __future__ import annotations

import atexit
import gc
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from sluice.pipelines.util import COLLECTING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

INTERRUPTED = 130
TERMINATED = 128 + signal.SIGTERM
_UNHEARD = 1
_AGAIN = 0.05  # seconds until an interrupt that a callback swallowed is raised again


class Interrupts:
    """The signals of this process: True after SIGINT."""

    pending = False


def handle_signals() -> None:
    """Raise KeyboardInterrupt for SIGINT, even if a callback swallows it, and SystemExit for SIGTERM.

    An ignored SIGINT stays ignored, as shells require for background commands.
    """
    signal.signal(signal.SIGTERM, _leave)
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_DFL):
        signal.signal(signal.SIGINT, _leave)
        sys.unraisablehook = _keep_interrupts(sys.unraisablehook)


def report_interrupt() -> int:
    """Print one line. Returns the exit code."""
    print("interrupted", file=sys.stderr, flush=True)
    return INTERRUPTED


def report_termination() -> int:
    """Print one line. Returns the exit code."""
    print("terminated", file=sys.stderr, flush=True)
    return TERMINATED


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    """Raise, so that every `finally` runs and ends what this process started."""
    if signum != signal.SIGINT:
        sys.exit(TERMINATED)
    Interrupts.pending = True
    raise KeyboardInterrupt


def _keep_interrupts(hook: Callable[[UnraisableHookArgs], object]) -> Callable[[UnraisableHookArgs], None]:
    """Raise interrupts again that Python drops in callbacks and destructors. Pass other errors to `hook`."""

    def raise_again(error: UnraisableHookArgs) -> None:
        if not issubclass(error.exc_type, KeyboardInterrupt):
            hook(error)
            return
        again = threading.Timer(_AGAIN, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()

    return raise_again


# -- closed output


def unheard(*descriptors: int) -> bool:
    """Returns True if the reader of a descriptor has closed it."""
    ends = select.poll()
    for descriptor in descriptors:
        ends.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in ends.poll(0))


def hush() -> int:
    """Drop all further output, including buffered output at exit. Returns the exit code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
    return _UNHEARD


# -- start and exit


@contextmanager
def fast_imports() -> Iterator[None]:
    """Disable garbage collection during imports that take seconds, and exempt the imported objects from it later.

    Importing Dagster creates a million permanent objects; collecting them takes a fifth of the import time. If all
    modules were loaded before, nothing is exempt: in a process that serves, that would keep all of its garbage.
    """
    was_on, loaded = gc.isenabled(), len(sys.modules)
    gc.disable()
    gc.set_threshold(*COLLECTING)
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)  # DuckDB reports objects that remain at exit
    try:
        yield
    finally:
        if len(sys.modules) > loaded:
            gc.freeze()
        if was_on:
            gc.enable()


class Ending:
    """The command's exit code, once all output is written."""

    code: int | None = None


def end_at_once() -> None:
    """Exit without freeing each object, which takes half a second after a run.

    Call this before any other registration with `atexit`: the first registration runs last.
    """
    atexit.register(_end)


def _end() -> None:
    if Ending.code is not None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(Ending.code)
