"""Loaded by each Python that has this folder in PYTHONPATH: a run that Dagster launches waits at a point.

The file that SLUICE_FAULTS_STOP names has one of `points`. The run waits there as long as the file exists, and marks
its arrival with a file whose suffix is its pid. It sleeps in Python and can be interrupted: Dagster cannot cancel a
process that SIGSTOP stopped, and its code server hangs when it tries.
"""

import os
import signal
import sys
import time
from pathlib import Path

_stop_file = Path(os.environ.get("SLUICE_FAULTS_STOP", "."))


def _wait(*_: object) -> None:
    _stop_file.with_suffix(f".{os.getpid()}").touch()
    while _stop_file.exists():
        time.sleep(0.05)


if _stop_file.is_file() and "spawn_main" in " ".join(sys.orig_argv):
    from tests.faults.points import interrupt_at

    signal.signal(signal.SIGUSR1, _wait)
    _interruption = interrupt_at(_stop_file.read_text(), signal.SIGUSR1)
    _interruption.__enter__()
