"""The code server's process for the code dies, and another one serves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from sluice.assets.instance.internals import CODE_SERVER, LOCATION, MODULE
from tests.faults.nemeses.engines import Process, Processes
from tests.resources.kafka.tools import wait_until

pytestmark = pytest.mark.slow
_SERVER_ID = "/api.DagsterApi/GetServerId"


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    (tmp_path / "feeds").mkdir()
    (tmp_path / "feeds" / "orders.yaml").write_text("topics: orders\nstart: earliest\n")
    processes = Processes()
    with processes.kill_at_exit():
        yield processes


def read_server_id(address: str) -> bytes:
    """Returns the id of the process that has loaded the code; nothing while none answers."""
    with suppress(grpc.RpcError), grpc.insecure_channel(address) as channel:
        return bytes(channel.unary_unary(_SERVER_ID)(b"", timeout=20))
    return b""


def test_killed_code_server_process_is_replaced(tmp_path: Path, processes: Processes) -> None:
    socket = tmp_path / "s"
    address = f"unix:{socket}"
    options = ["--socket", str(socket), "-m", MODULE, "--location-name", LOCATION]
    env = os.environ | processes.environment | {"DAGSTER_HOME": str(tmp_path), "SLUICE_PROJECT": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-m", CODE_SERVER, *options], env=env) as server:

        def find_process() -> Process | None:
            alive = processes.list_alive()
            return next((p for p in alive if p.parent == server.pid and b"\0grpc\0" in p.command), None)

        for _ in range(2):  # also the one that was started instead
            before = wait_until(lambda: read_server_id(address), 300)
            wait_until(find_process).send(signal.SIGKILL)
            wait_until(lambda before=before: read_server_id(address) not in (b"", before), 300)
        assert server.poll() is None
        server.send_signal(signal.SIGTERM)
        assert server.wait(90) == 0
    processes.wait_until_gone()
