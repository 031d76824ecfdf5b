"""Loaded by each Python that has this folder in PYTHONPATH: a run that Dagster launches waits at a point.

The file that SLUICE_FAULTS_STOP names says at which one of `points`, and the run waits there while it stands; a file
beside it, with the process's pid as suffix, says that it got there. It sleeps in Python, and can be interrupted: a
process that SIGSTOP stopped Dagster cannot cancel, and its code server hangs when it tries.
"""

import os
import signal
import sys
import time
from pathlib import Path

_asked = Path(os.environ.get("SLUICE_FAULTS_STOP", "."))


def _wait(*_: object) -> None:
    _asked.with_suffix(f".{os.getpid()}").touch()
    while _asked.exists():
        time.sleep(0.05)


if _asked.is_file() and "spawn_main" in " ".join(sys.orig_argv):
    from tests.faults.points import planted

    signal.signal(signal.SIGUSR1, _wait)
    _planted = planted(_asked.read_text(), signal.SIGUSR1)
    _planted.__enter__()
