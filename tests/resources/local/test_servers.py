"""A local Kafka, registry or S3 whose start fails, or is interrupted, leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.pipelines.errors import SetupError
from sluice.resources.local import local_registry, local_s3
from sluice.resources.local.local_registry import LocalRegistry
from sluice.resources.local.local_s3 import LocalS3
from tests.resources.kafka.tools import wait_until

_START = """
import sys
from pathlib import Path
from sluice.resources.local import java, local_kafka
folder = Path(sys.argv[1])
java.find_java = lambda: folder / "java"
local_kafka._jars = lambda report=None: folder
local_kafka.LocalKafka(folder / "kafka").start()
"""


@pytest.mark.parametrize("ends", [SetupError, KeyboardInterrupt])
def test_failed_registry_start_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: type[BaseException]
) -> None:
    def ask(port: int) -> bool:
        if ends is KeyboardInterrupt:
            raise ends
        return False

    program = tmp_path / "java"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(local_registry, "application", lambda: tmp_path)
    monkeypatch.setattr(local_registry, "_java", lambda: program)
    monkeypatch.setattr(local_registry, "_answers", ask)
    monkeypatch.setattr(local_registry, "START_SECONDS", 0)
    registry = LocalRegistry(tmp_path / "registry", keep=False)
    with pytest.raises(ends):
        registry.start()
    assert not registry.running
    assert registry._guard is None


def test_interrupted_bucket_creation_ends_the_s3_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(local_s3.S3Client, "call", interrupt)
    store = LocalS3()
    with pytest.raises(KeyboardInterrupt):
        store.__enter__()
    assert store._process is not None
    assert store._process.poll() is not None


def test_kafka_interrupted_while_formatting_storage_leaves_no_process(tmp_path: Path) -> None:
    program, note = tmp_path / "java", tmp_path / "pid"
    program.write_text(f"#!/bin/sh\necho $$ > {note}\nexec sleep 600\n")
    program.chmod(0o755)
    with subprocess.Popen([sys.executable, "-c", _START, str(tmp_path)], stderr=subprocess.DEVNULL) as starting:
        pid = wait_until(lambda: note.exists() and int(note.read_text() or 0))
        wait_until(lambda: _is_asleep(starting.pid))  # an interrupt of Python's Popen itself would leave the program
        starting.send_signal(signal.SIGINT)
        assert starting.wait() != 0
    # Python kills the program without waiting for its end. A zombie has no executable.
    wait_until(lambda: not os.path.exists(f"/proc/{pid}/exe"))
    assert not (tmp_path / "kafka").exists()


def _is_asleep(pid: int) -> bool:
    """Returns whether the process waits in a system call."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
