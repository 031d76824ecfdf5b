"""The installed `sluice` script.

Promises: from the first line on, an interrupt ends the command with 130 (see `signals`), also during its imports and
at exit. Imports nothing that takes time, so that this holds early.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from sluice.cli.terminal import fast_start, signals


def main() -> int:
    """Run the command, as the installed script does. Returns its exit code."""
    _open_what_is_closed()
    fast_start.end_at_once()
    try:
        signals.install()
        with fast_start.fast_imports():
            from sluice.cli.main import main as command

        code = command()
    except KeyboardInterrupt:  # before the command could turn it into an exit code
        code = signals.report_interrupt()
    signal.signal(signal.SIGINT, _gone)
    fast_start.Ending.code = code
    return code


def _gone(signum: int, frame: FrameType | None) -> NoReturn:
    """The command has said everything; only the interpreter's own end is left."""
    os._exit(signals.INTERRUPTED)


def _open_what_is_closed() -> None:
    """Let a closed stdin, stdout or stderr lead nowhere: otherwise the next opened file would take its place."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - for as long as we live
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
