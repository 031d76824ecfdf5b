"""One process of the Polars peer: `python -m bench.program_polars TASK OUT`. It imports nothing that it does not need,
so that its start is that of a script."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl
from confluent_kafka import TIMESTAMP_CREATE_TIME

from bench.consume import message_lots
from bench.stand import PeerTask

_LOT = 100_000
_HEADERS = pl.List(pl.Struct({"key": pl.String, "value": pl.Binary}))
_READ: Mapping[str, pl.DataType] = {
    "string": pl.String(),
    "int32": pl.Int32(),
    "int64": pl.Int64(),
    "float64": pl.Float64(),
    "bool": pl.Boolean(),
    "timestamp": pl.String(),
}
"""As which fields are read; decimals are read as floats."""


def main(task: PeerTask, out: Path) -> None:
    """Write a file for each lot below the new folder `out`."""
    out.mkdir()
    for number, messages in enumerate(message_lots(task, _LOT)):
        frame = pl.DataFrame([*_read_values(task, messages), *_make_kafka_columns(task, messages)])
        frame.write_parquet(out / f"{number}.parquet", compression="zstd", compression_level=1)


def _read_values(task: PeerTask, messages: list[Any]) -> list[pl.Series]:
    values = [m.value() for m in messages]
    if not task.schema:
        return [pl.Series("value", values, pl.Binary)]
    typed = pl.read_ndjson(
        b"\n".join(values), schema={name: _READ.get(t, pl.Float64()) for name, t in task.schema.items()}
    )
    if len(typed) != len(messages):
        raise ValueError(f"{len(typed)} rows of {len(messages)} values")
    return typed.with_columns(_cast_fields(task.schema)).get_columns()


def _cast_fields(schema: Mapping[str, str]) -> Iterator[pl.Expr]:
    for name, kind in schema.items():
        if kind == "timestamp":
            yield pl.col(name).str.to_datetime("%Y-%m-%dT%H:%M:%S%.fZ", time_unit="us").dt.replace_time_zone("UTC")
        elif kind not in _READ:
            precision, scale = kind.removeprefix("decimal(").removesuffix(")").split(",")
            yield pl.col(name).cast(pl.Decimal(int(precision), int(scale)))


def _make_kafka_columns(task: PeerTask, messages: list[Any]) -> list[pl.Series]:
    stamps = [m.timestamp() for m in messages]
    columns = [
        pl.Series("key", [m.key() for m in messages], pl.Binary),
        pl.repeat(task.topic, len(messages), dtype=pl.String, eager=True).alias("topic"),
        pl.Series("partition", [m.partition() for m in messages], pl.Int32),
        pl.Series("offset", [m.offset() for m in messages], pl.Int64),
        pl.Series("timestamp", [ms for _, ms in stamps], pl.Int64).cast(pl.Datetime("ms", "UTC")),
        pl.Series("timestampType", [kind - TIMESTAMP_CREATE_TIME for kind, _ in stamps], pl.Int32),
        pl.Series("headers", [_list_headers(m.headers()) for m in messages], _HEADERS),
    ]
    return [c.alias(f"kafka_{c.name}") for c in columns] if task.schema else columns


def _list_headers(headers: list[tuple[str, bytes]] | None) -> list[dict[str, Any]] | None:
    return [{"key": key, "value": value} for key, value in headers] if headers else None


if __name__ == "__main__":
    main(PeerTask.from_json(sys.argv[1]), Path(sys.argv[2]))
