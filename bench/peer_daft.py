"""Daft as a peer: its `read_kafka`, which reads a bounded range by confluent-kafka, and its own Parquet writer.

Its columns are Kafka's without headers and the stamp's kind. Read in lots of `_LOT`, far larger than its own choice,
and with as much room to read ahead as the other loop has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.consume import READ_AHEAD
from bench.stand import PeerTask, Ready, serve

_LOT = 100_000


@contextmanager
def stand(task: PeerTask) -> Iterator[Ready]:
    # Read at import: no telemetry.
    os.environ |= {"DAFT_ANALYTICS_ENABLED": "0", "SCARF_NO_ANALYTICS": "true", "DAFT_PROGRESS_BAR": "0"}
    import daft

    daft.set_runner_native(num_threads=task.cores)
    yield Ready(partial(_land, task), {name: version(name) for name in ("daft", "confluent-kafka")})


def _land(task: PeerTask, out: Path) -> dict[str, Any]:
    import daft

    bounds = {task.topic: dict.fromkeys(task.ends, 0)}, {task.topic: task.ends}
    frame = daft.read_kafka(
        task.bootstrap,
        task.topic,
        start=bounds[0],
        end=bounds[1],
        group_id="bench",
        chunk_size=_LOT,
        kafka_client_config=READ_AHEAD,
    )
    frame.write_parquet(str(out), compression="zstd")
    return {}


if __name__ == "__main__":
    serve(stand)
