"""A ZooKeeper's transaction log contains each offset that took effect, in order, over restarts and kills."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.checker import zookeeper
from tests.zookeepers import LocalZooKeeper

MARK = {"sluice": "l", "n": 7, "i": "id"}


@pytest.mark.kafka
def test_transaction_log_contains_each_committed_offset(tmp_path: Path) -> None:
    server = LocalZooKeeper(tmp_path / "zookeeper").start()
    try:
        server.put("g", "orders", {0: "4"})
        server.put("g", "orders", {0: "9", 1: "2"})
        server.put("other", "orders", {0: "1"})
        assert server.process
        server.process.send(signal.SIGKILL)
        server.process.wait(10)
        server.start()
        with server.open_client() as client:
            client.ensure_path("/consumers/g/sluice/orders/1")
            both = client.transaction()
            both.set_data("/consumers/g/offsets/orders/1", b"12")
            both.set_data("/consumers/g/sluice/orders/1", json.dumps({"metadata": json.dumps(MARK)}).encode())
            both.commit()
            refused = client.transaction()
            refused.set_data("/consumers/g/offsets/orders/1", b"99")
            refused.check("/consumers/g/offsets/orders/1", 77)
            refused.commit()
            client.delete("/consumers/g/offsets/orders/0")
    finally:
        server.stop()
    commits = zookeeper.read_offsets(server.root / "data", "g")
    assert [(c.tp[1], c.offset) for c in commits] == [(0, 4), (0, 9), (1, 2), (1, 12), (0, None)]
    assert [c.mark for c in commits] == [None, None, None, ("l", 7, "id"), None]
    assert all(c.time > 0 for c in commits)
