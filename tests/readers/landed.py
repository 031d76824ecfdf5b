"""The values, landed by the real pipeline into a folder, with the table that a store names over them."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
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
from tests.readers.values import SETS, Column, as_json, as_object, columns

_HEAD = "kafka: {{bootstrap: '127.0.0.1:9'}}\ntopics: {name}\nstart: earliest\n"
_TABLES = {"iceberg": "table: {{iceberg: {{name: db.{name}}}}}\n", "delta": "table: {{delta: {{}}}}\n", "folder": ""}
_REFUSED = {
    "iceberg": ("uint8", "uint16", "uint32", "uint64"),
    "delta": ("uint32", "uint64"),
    "folder": (),
}
"""Types that a feed with such a table may not have."""
STORES = tuple(_TABLES)


@dataclass(frozen=True)
class Landed:
    """A set of values in a store: its columns, and where readers find it. `n` is the number of a row."""

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


def sets_of(store: str) -> list[str]:
    """The sets that the store can hold. No table has nanoseconds."""
    return [name for name in SETS if name != "nanos" or store == "folder"]


def landed(root: Path, store: str, name: str) -> Landed:
    """Land the set, a window and a file for each third of its rows."""
    some = {text: values for text, values in SETS[name].items() if text not in _REFUSED[store]}
    made = Landed(store, name, root, tuple(columns(some)))
    feed = _feed(made)
    at = 0
    for number in range(3):
        rows = len(made.columns[0].files[number])
        records = [_record(made, n) for n in range(at, at + rows)]
        assert land(feed, map(Message, records), lake=root / "lake").rows.num_rows == rows
        at += rows
    if store != "folder":
        lake = LocalLake(root / "lake")
        with open_tables(feed.model_copy(update={"lake": str(lake.root)}), lake) as tables:
            assert sync(Ledger(lake, feed.name, lambda: 0), lake, FeedTables(tables.rows)).added == 3
    return made


def _feed(made: Landed) -> Feed:
    path = made.root / "feeds" / f"{made.name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (_HEAD + _TABLES[made.store]).format(name=made.name)
    if made.name == "avro":
        fields = [{"name": "n", "type": "long"}, *({"name": c.name, "type": _avro(c.type)} for c in made.columns)]
        (path.parent / "avro.avsc").write_text(json.dumps({"type": "record", "name": "R", "fields": fields}))
        lines += "format: avro\nschema_file: feeds/avro.avsc\nwire_format: bare\n"
    else:
        schema = {"n": "int64 not null"} | {c.name: c.type for c in made.columns}
        lines += f"format: json\nschema: {json.dumps(schema)}\n"
    path.write_text(lines)
    return load_feed(path, {})


def _avro(text: str) -> list[object]:
    if text == "struct<x:float64>":
        return ["null", {"type": "record", "name": "X", "fields": [{"name": "x", "type": ["null", "double"]}]}]
    return ["null", {"float32": "float", "float64": "double"}[text]]


def _record(made: Landed, n: int) -> bytes:
    if made.name == "avro":
        return bytes([n * 2]) + b"".join(_avro_bytes(c.type, c.rows[n]) for c in made.columns)
    return as_object({"n": str(n)} | {c.name: as_json(c.type, c.rows[n]) for c in made.columns}).encode()


def _avro_bytes(text: str, value: float | dict[str, float] | None) -> bytes:
    if value is None:
        return b"\0"
    if isinstance(value, dict):
        return b"\2\2" + struct.pack("<d", value["x"])
    return b"\2" + struct.pack("<f" if text == "float32" else "<d", value)


def of_all(root: Path, store: str) -> Sequence[Landed]:
    return [landed(root / store / name, store, name) for name in sets_of(store)]
