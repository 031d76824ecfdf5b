"""The engine on a real server of Spark Connect, from a process that is only its client."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from sluice.resources.local import java
from tests.resources.kafka.tools import free_port, wait_until

ROOT = Path(__file__).parents[3]
_SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"


@pytest.fixture(scope="module")
def connect() -> Iterator[str]:
    """The address of a Spark Connect server that tries each task three times."""
    port = free_port()
    conf = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": port,
        "spark.ui.enabled": "false",
        "spark.python.daemon.module": "sluice.resources.spark.daemon",
    }
    environment = os.environ | {
        "JAVA_HOME": str(java.java_home()),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    command = [Path(pyspark.__file__).parent / "bin/spark-submit", "--master", "local[2,3]", "--class", _SERVER]
    options = [word for key, value in conf.items() for word in ("--conf", f"{key}={value}")]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([*command, *options, "spark-internal"], env=environment, start_new_session=True, **quiet)
    try:
        wait_until(lambda: _is_listening(port) or server.poll() is not None, 120)
        assert server.poll() is None
        yield f"sc://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _is_listening(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.spark
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        ("lands", {"receipts": 3, "failures": 0, "begun": 1}),
        ("dies", {"receipts": 3, "failures": 0, "begun": 2}),
        ("cancelled", {"error": "the Spark job was cancelled"}),
    ],
)
def test_batch_runs_through_spark_connect(connect: str, tmp_path: Path, how: str, outcome: dict[str, object]) -> None:
    ask = [sys.executable, "-m", "tests.resources.spark.connect_client", connect, str(tmp_path), how]
    done = subprocess.run(ask, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == outcome
