"""Avro messages through a feed in memory: schemas in the lake, one table over versions, replay with a newer file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.errors import SchemaChanged
from sluice.pipelines.lake.schemas import KeptSchemas
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ledger.entries import SchemaEntry, dump, parse
from sluice.pipelines.maintenance.replay import replay
from sluice.pipelines.planning.schema_changes import shape_named
from sluice.pipelines.ports import Ports
from sluice.pipelines.quarantine.listing import Filter
from sluice.pipelines.records.avro.reader_schema import AvroReader
from sluice.pipelines.records.rows.wire_format import AVRO, RegisteredSchema, WireFormat
from sluice.resources.liveness import new_owner
from sluice.testing import LandedMessages, Message, land
from sluice.testing.engine import MemoryClock, MemoryEngine, MemoryLiveness
from sluice.testing.lake import MemoryLake
from tests.pipelines.records.avro.rows import encode

FEED = "topics: orders\nstart: latest\nformat: avro\nschema_file: order.avsc\n"
REGISTRY = "registry: {url: 'http://127.0.0.1:9'}\n"


def of(*fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": "Order", "fields": list(fields)}


def state(*symbols: str) -> dict[str, Any]:
    return {"name": "state", "type": {"type": "enum", "name": "State", "symbols": symbols}}


ID = {"name": "id", "type": "int"}
COUNTRY = {"name": "country", "type": "string", "default": "DE"}


class Project:
    """A feed's file with its schema, and a lake with the schemas of a registry."""

    def __init__(self, root: Path) -> None:
        self.root, self.lake = root, MemoryLake()
        (root / "feeds").mkdir()
        self.feed = root / "feeds" / "orders.yaml"
        self.feed.write_text(FEED + REGISTRY)

    def set_schema(self, schema: Any) -> None:
        (self.root / "order.avsc").write_text(json.dumps(schema))

    def keep_schema(self, number: int, schema: Any) -> None:
        KeptSchemas(self.lake, "orders").keep(RegisteredSchema(number, AVRO, (json.dumps(schema),)))

    def land(self, values: Iterable[bytes | None]) -> LandedMessages:
        return land(self.feed, map(Message, values), lake=self.lake, environ={})


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_versions_share_a_table_and_the_ledger_records_their_schemas(project: Project) -> None:
    project.set_schema(of(ID))
    project.keep_schema(1, of(ID))
    project.keep_schema(2, of(ID, COUNTRY))
    first = project.land([encode(of(ID), {"id": 1}, 1), None, b"x", encode(of(ID), {"id": 9}, 77)])
    assert first.rows["id"].to_pylist() == [1, None]
    assert first.quarantined["reason"].to_pylist() == ["not_avro", "unknown_schema"]
    project.set_schema(of(ID, COUNTRY))
    both = [encode(of(ID), {"id": 2}, 1), encode(of(ID, COUNTRY), {"id": 3, "country": "FR"}, 2)]
    second = project.land(both)
    assert second.rows.select(["id", "country"]).to_pylist() == [{"id": 2, "country": "DE"}, {"id": 3, "country": "FR"}]
    ledger = Ledger(project.lake, "orders", lambda: 0)
    entries = [e for _, e in ledger.entries() if isinstance(e, SchemaEntry)]
    assert [e.reason for e in entries] == ["the first", "added country (string not null); schema_file changed"]
    assert shape_named(ledger, ledger.read(), entries[0].shape) != second.feed.shape
    assert shape_named(ledger, ledger.read(), entries[1].shape) == second.feed.shape
    project.set_schema(of({"name": "id", "type": "string"}))
    with pytest.raises(SchemaChanged, match="id is string"):
        project.land([])


def test_records_refused_by_a_schema_are_replayed_with_a_newer_schema(project: Project) -> None:
    project.set_schema(of(state("open")))
    project.keep_schema(1, of(state("open", "paid")))
    landed = project.land(encode(of(state("open", "paid")), {"state": s}, 1) for s in ("open", "paid", "open"))
    assert landed.rows["state"].to_pylist() == ["open", "open"]
    assert landed.quarantined.select(["reason", "field", "detail"]).to_pylist() == [
        {
            "reason": "wrong_type",
            "field": "state",
            "detail": "a symbol that the feed's schema does not have (schema 1)",
        }
    ]
    project.set_schema(of(state("open", "paid")))
    again = project.land([])
    writers = KeptSchemas(project.lake, "orders")
    ports = Ports(None, None, project.lake, MemoryEngine(), MemoryLiveness(), MemoryClock(0), None, writers)  # type: ignore[arg-type]
    done = replay(again.feed, ports, Filter(), None, new_owner("test"), lambda progress: None)
    assert done.outcome.fit.total() == 1


def test_without_a_registry_the_file_is_the_schema_of_all_records(project: Project) -> None:
    project.feed.write_text(FEED)
    project.set_schema(of(ID))
    landed = project.land([encode(of(ID), {"id": 1}, None), encode(of(ID), {"id": 2}, 1)])
    assert landed.rows["id"].to_pylist() == [1]
    assert landed.quarantined["reason"].to_pylist() == ["not_avro"]


def test_writer_fields_become_columns_under_the_evolve_policy(project: Project) -> None:
    project.feed.write_text(FEED + REGISTRY + "policies: {on_drift: evolve}\n")
    project.set_schema(of(ID))
    tags = {"name": "tags", "type": {"type": "array", "items": ["null", "string"]}}
    at = {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}}
    newer = of(ID, COUNTRY, tags, at, state("open"))
    project.keep_schema(1, of(ID))
    project.keep_schema(2, newer)
    row = {"id": 1, "country": "FR", "tags": ["a", None], "at": 7, "state": "open"}
    plain = of(ID, COUNTRY, tags, {"name": "at", "type": "long"}, state("open"))
    first = project.land([encode(plain, row, 2)])
    assert first.rows.column_names[:2] == ["id", "_extra"]
    second = project.land([encode(plain, row, 2), encode(of(ID), {"id": 2}, 1)])
    assert second.rows.select(["id", "country", "tags"]).to_pylist() == [
        {"id": 1, "country": "FR", "tags": ["a", None]},
        {"id": 2, "country": None, "tags": None},
    ]
    assert str(second.rows.schema.field("at").type) == "timestamp[ms, tz=UTC]"
    assert "state" not in second.rows.column_names


def test_ledger_entry_of_format_2_is_readable() -> None:
    """The first ledgers of Avro feeds have the source `avro`, and its records are Avro."""
    texts = [json.dumps(of(ID))]
    document = {"kind": "schema", "format": 2, "shape": "avro x", "columns": [["id", "int32 not null"]]}
    entry = parse(json.dumps(document | {"avro": {"texts": texts, "wire": "confluent"}}).encode(), "log/1.json")
    assert isinstance(entry, SchemaEntry)
    assert entry.source is not None
    assert entry.source.reader() == AvroReader(tuple(texts), WireFormat.CONFLUENT)
    assert parse(dump(entry), "log/1.json") == entry
