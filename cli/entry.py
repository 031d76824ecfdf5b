"""The installed `sluice` script.

Promises: an interrupt ends the command with 130 from the first line on (see `process`), also during its imports and
at exit. Imports only fast modules, so that this holds early.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import NoReturn

from sluice.cli.terminal import process


def main() -> int:
    """Run the command. Returns its exit code."""
    _open_closed_streams()
    process.end_at_once()
    try:
        process.handle_signals()
        _start_engine(sys.argv[1:])
        with process.fast_imports():
            from sluice.cli.main import main as command

        code = command()
    except KeyboardInterrupt:  # before the command could turn it into an exit code
        code = process.report_interrupt()
    except SystemExit as ending:
        if ending.code != process.TERMINATED:
            raise
        code = process.report_termination()
    signal.signal(signal.SIGINT, _exit_now)
    process.Ending.code = code
    return code


_PROCESSES = re.compile(rb"^engine: *[\"']?processes", re.MULTILINE)


def _start_engine(words: Sequence[str]) -> None:
    """Start Spark's JVM for a run of one feed: it loads while this process does.

    A feed with Spark settings of its own starts its Spark later. Runs of several feeds start theirs once something is
    known to be pending.
    """
    if len(words) < 2 or words[0] != "run" or (words[2:3] and not words[2].startswith("-")):
        return
    try:
        feed = Path("feeds", f"{words[1]}.yaml").read_bytes()
        fleet = Path("fleet.yaml").read_bytes() if Path("fleet.yaml").exists() else b""
    except (OSError, ValueError):
        return  # not in the project's folder, or no feed: the command finds out
    in_processes = "processes" in (*words, os.environ.get("SLUICE_ENGINE"))
    with suppress(Exception):
        if not (in_processes or _PROCESSES.search(feed + b"\n" + fleet) or b"\nspark" in feed):
            from sluice.resources.spark import jvm

            jvm.begin()


def _exit_now(signum: int, frame: FrameType | None) -> NoReturn:
    """Exit at once: the command has finished."""
    os._exit(process.INTERRUPTED)


def _open_closed_streams() -> None:
    """Connect closed standard streams to /dev/null: otherwise the next opened file would take their descriptors.

    Stdout escapes what its encoding lacks, as stderr does.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - open until exit
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):  # a sign that the terminal's encoding lacks is no error
        sys.stdout.reconfigure(errors="backslashreplace")
