"""Lands the sets of values by the real pipeline in a folder, with a table of the store over the files."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.tables.sync import sync
from sluice.pipelines.tables.table_windows import FeedTables
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.open_ports import open_tables
from sluice.testing import Message, land
from tests.readers.values import SETS, Column, as_json, as_object, build_columns

_HEAD = "kafka: {{bootstrap: '127.0.0.1:9'}}\ntopics: {name}\nstart: earliest\n"
_TABLES = {"iceberg": "table: {{iceberg: {{name: db.{name}}}}}\n", "delta": "table: {{delta: {{}}}}\n", "folder": ""}
_REFUSED = {
    "iceberg": ("uint8", "uint16", "uint32", "uint64"),
    "delta": ("uint32", "uint64"),
    "folder": (),
}
"""Types that a feed with a table of the store may not have."""
STORES = tuple(_TABLES)


@dataclass(frozen=True)
class LandedSet:
    """A set of values in a store: its columns and its paths. The column `n` is the row number."""

    store: str
    name: str
    root: Path
    columns: tuple[Column, ...]

    @property
    def folder(self) -> str:
        return str(self.root / "lake" / "data" / self.name)

    @property
    def files(self) -> list[str]:
        return sorted(map(str, Path(self.folder).rglob("*.parquet")))

    @property
    def catalog(self) -> str:
        return f"{self.root}/.sluice/catalog.db"

    @property
    def warehouse(self) -> str:
        return f"{self.root}/lake/tables"


def list_sets(store: str) -> list[str]:
    """Returns the sets that the store can hold. Tables have no nanoseconds."""
    return [name for name in SETS if name != "nanos" or store == "folder"]


def land_set(root: Path, store: str, name: str) -> LandedSet:
    """Land the set: a window and a file for each third of its rows."""
    accepted = {text: values for text, values in SETS[name].items() if text not in _REFUSED[store]}
    landed_set = LandedSet(store, name, root, tuple(build_columns(accepted)))
    feed = _write_feed(landed_set)
    at = 0
    for number in range(3):
        rows = len(landed_set.columns[0].files[number])
        records = [_encode_record(landed_set, n) for n in range(at, at + rows)]
        assert land(feed, map(Message, records), lake=root / "lake").rows.num_rows == rows
        at += rows
    if store != "folder":
        lake = LocalLake(root / "lake")
        with open_tables(feed.model_copy(update={"lake": str(lake.root)}), lake) as tables:
            assert sync(Ledger(lake, feed.name, lambda: 0), lake, FeedTables(tables.rows)).added == 3
    return landed_set


def _write_feed(landed_set: LandedSet) -> Feed:
    path = landed_set.root / "feeds" / f"{landed_set.name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (_HEAD + _TABLES[landed_set.store]).format(name=landed_set.name)
    if landed_set.name == "avro":
        fields = [
            {"name": "n", "type": "long"},
            *({"name": c.name, "type": _make_avro_type(c.type)} for c in landed_set.columns),
        ]
        (path.parent / "avro.avsc").write_text(json.dumps({"type": "record", "name": "R", "fields": fields}))
        lines += "format: avro\nschema_file: feeds/avro.avsc\nwire_format: bare\n"
    else:
        schema = {"n": "int64 not null"} | {c.name: c.type for c in landed_set.columns}
        lines += f"format: json\nschema: {json.dumps(schema)}\n"
    path.write_text(lines)
    return load_feed(path, {})


def _make_avro_type(text: str) -> list[object]:
    if text == "struct<x:float64>":
        return ["null", {"type": "record", "name": "X", "fields": [{"name": "x", "type": ["null", "double"]}]}]
    return ["null", {"float32": "float", "float64": "double"}[text]]


def _encode_record(landed_set: LandedSet, n: int) -> bytes:
    if landed_set.name == "avro":
        return bytes([n * 2]) + b"".join(_encode_avro(c.type, c.rows[n]) for c in landed_set.columns)
    return as_object({"n": str(n)} | {c.name: as_json(c.type, c.rows[n]) for c in landed_set.columns}).encode()


def _encode_avro(text: str, value: float | dict[str, float] | None) -> bytes:
    if value is None:
        return b"\0"
    if isinstance(value, dict):
        return b"\2\2" + struct.pack("<d", value["x"])
    return b"\2" + struct.pack("<f" if text == "float32" else "<d", value)
