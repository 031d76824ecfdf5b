"""Dagster's logs of a run's output, without a copy on the terminal.

This uses Dagster's internals, as `internals` does. It is a module of its own because Dagster loads the class by the
module's name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dagster._core.execution.compute_logs import redirect_to_file
from dagster._core.instance.ref import InstanceRef
from dagster._core.storage.compute_log_manager import CapturedLogContext, ComputeIOType
from dagster._core.storage.local_compute_log_manager import IO_TYPE_EXTENSION, LocalComputeLogManager
from dagster._serdes import ConfigurableClassData
from dagster._utils import ensure_file, touch_file


def quiet_ref(home: Path) -> InstanceRef:
    """The instance in that folder. If it has Dagster's own local logs, these are quiet."""
    ref = InstanceRef.from_dir(str(home))
    if ref.compute_logs_data.class_name == LocalComputeLogManager.__name__:
        quiet = ConfigurableClassData(__name__, QuietLogs.__name__, ref.compute_logs_data.config_yaml)
        ref = ref._replace(compute_logs_data=quiet)
    return ref


class QuietLogs(LocalComputeLogManager):
    """Dagster's local logs of stdout and stderr, without repeating every line on the terminal."""

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData | None, config_value: Any) -> QuietLogs:
        """Dagster's own method would make its own class."""
        return cls(inst_data=inst_data, **config_value)

    @contextmanager
    def capture_logs(self, log_key: Sequence[str]) -> Iterator[CapturedLogContext]:
        out, err = (
            self.get_captured_local_path(log_key, IO_TYPE_EXTENSION[kind])
            for kind in (ComputeIOType.STDOUT, ComputeIOType.STDERR)
        )
        ensure_file(out)
        ensure_file(err)
        with redirect_to_file(sys.stdout, out), redirect_to_file(sys.stderr, err):
            yield CapturedLogContext(log_key)
        touch_file(str(self.get_captured_local_path(log_key, "complete")))
