"""Signals, and output that nobody reads.

Promises: an interrupt ends the command with 130, one line and no traceback, wherever it strikes: in an import, while an
error is reported, or in a callback that swallows it. If the reader of our output closes it, the command ends quietly.
Imports nothing that takes time, so that this is true early.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

INTERRUPTED = 130
_UNHEARD = 1
_AGAIN = 0.05  # seconds until an interrupt that a callback swallowed is raised again


class Interrupts:
    """The signals that this process got."""

    pending = False


def install() -> None:
    """From now on SIGINT raises KeyboardInterrupt, also where a callback swallowed it, and SIGTERM SystemExit.

    An ignored SIGINT stays ignored: a shell wants that for commands in the background.
    """
    signal.signal(signal.SIGTERM, _leave)
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_DFL):
        signal.signal(signal.SIGINT, _leave)
        sys.unraisablehook = _keep_interrupts(sys.unraisablehook)


def report_interrupt() -> int:
    """Say so, in one line."""
    print("interrupted", file=sys.stderr, flush=True)
    return INTERRUPTED


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    """Leave through every `finally`, so that everything this process started is ended."""
    if signum != signal.SIGINT:
        sys.exit(128 + signum)
    Interrupts.pending = True
    raise KeyboardInterrupt


def _keep_interrupts(hook: Callable[[UnraisableHookArgs], object]) -> Callable[[UnraisableHookArgs], None]:
    """Python drops errors in callbacks and destructors: raise an interrupt again, and pass all others to `hook`."""

    def raise_again(error: UnraisableHookArgs) -> None:
        if not issubclass(error.exc_type, KeyboardInterrupt):
            hook(error)
            return
        again = threading.Timer(_AGAIN, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()

    return raise_again


# -- output that nobody reads


def unheard(*descriptors: int) -> bool:
    """Whether the reader of one of them has gone."""
    ends = select.poll()
    for descriptor in descriptors:
        ends.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in ends.poll(0))


def hush() -> int:
    """Print nothing more, not even at exit: buffered output is dropped. Returns the exit code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
    return _UNHEARD
