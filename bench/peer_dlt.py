"""dlt as a peer. Its Kafka source is no package but a file that `dlt init` copies into a project: this resource does
what that one does, in lots of the same size, with the same fields and the same table by topic. Headers are not among
them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.consume import message_lots
from bench.stand import PeerTask, Ready, serve

_LOT = 3_000
_OFFLINE = {"RUNTIME__DLTHUB_TELEMETRY": "false", "RUNTIME__LOG_LEVEL": "ERROR"}


@contextmanager
def stand(task: PeerTask) -> Iterator[Ready]:
    with TemporaryDirectory(prefix="sluice-bench-dlt-") as home:
        os.environ.update(_OFFLINE | {"DLT_DATA_DIR": home, "DLT_PROJECT_DIR": home})
        # Imported once the environment is set, and before the clock runs: it takes seconds.
        from dlt.common.runtime.run_context import active

        # A user's own settings are not read; dlt's user id, with or without telemetry, is a new one.
        active()._global_dir = home
        yield Ready(partial(_land, task), {name: version(name) for name in ("dlt", "confluent-kafka", "pyarrow")})


def _land(task: PeerTask, out: Path) -> dict[str, Any]:
    import dlt

    pipeline = dlt.pipeline(
        pipeline_name="bench",
        pipelines_dir=str(out / "pipelines"),
        destination=dlt.destinations.filesystem(bucket_url=out.as_uri()),
        dataset_name="data",
    )
    messages = dlt.resource(
        _messages(task), name="kafka_messages", table_name=lambda message: message["_kafka"]["topic"]
    )
    pipeline.run(messages, loader_file_format="parquet").raise_on_failed_jobs()
    return {}


def _messages(task: PeerTask) -> Iterator[list[dict[str, Any]]]:
    from dlt.common.time import ensure_pendulum_datetime
    from dlt.common.utils import digest128

    def item(message: Any) -> dict[str, Any]:
        kind, ms = message.timestamp()
        topic, partition, key = message.topic(), message.partition(), message.key().decode()
        return {
            "_kafka": {
                "partition": partition,
                "topic": topic,
                "key": key,
                "offset": message.offset(),
                "ts": {"type": kind, "value": ensure_pendulum_datetime(ms / 1e3)},
                "data": message.value().decode(),
            },
            "_kafka_msg_id": digest128(f"{topic}{partition}{key}"),
        }

    for lot in message_lots(task, _LOT):
        yield [item(message) for message in lot]


if __name__ == "__main__":
    serve(stand)
