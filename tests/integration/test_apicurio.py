"""Schemas registered as Apicurio's own serializers do, by its own API: references in groups, Google's files, maps."""

from __future__ import annotations

import http.client
import json
import struct
import uuid
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from sluice.pipelines.errors import Failed
from sluice.pipelines.feed.kafka_section import RegistrySettings
from sluice.pipelines.lake.schemas import KeptSchemas
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.records.avro.format import AvroFormat
from sluice.pipelines.records.rows.wire_format import APICURIO_IDS, AVRO, PROTOBUF, WireFormat, reference
from sluice.resources.local.local_registry import LocalRegistry
from sluice.resources.registry.confluent import RegistryClient
from sluice.testing.lake import MemoryLake
from tests.pipelines.records.avro import rows as avro
from tests.pipelines.records.json.rows import FIRST, make_chunk, with_headers
from tests.pipelines.records.protobuf import rows as protobuf

pytestmark = pytest.mark.kafka

ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "id", "type": "string"}, {"name": "line", "type": "LINE"}],
}
WRITTEN_OUT = """// Proto schema formatted by Wire, do not edit.
syntax = "proto3";
package shop;
import "google/protobuf/struct.proto";
import "google/protobuf/timestamp.proto";
message Order {
  string id = 1;
  repeated .shop.Order.CountsEntry counts = 2;
  .google.protobuf.Struct more = 3;
  .google.protobuf.Timestamp at = 4;
  message CountsEntry {
    option map_entry = true;

    string key = 1;

    int32 value = 2;
  }
}
"""
AS_MAP = """package shop;
import "google/protobuf/struct.proto";
import "google/protobuf/timestamp.proto";
message Order {
  string id = 1;
  map<string, int32> counts = 2;
  google.protobuf.Struct more = 3;
  google.protobuf.Timestamp at = 4;
}"""


def put(
    registry: LocalRegistry,
    group: str,
    artifact: str,
    kind: str,
    text: str,
    *references: dict[str, str],
    number: str = "contentId",
) -> int:
    """Register an artifact as Apicurio's serializers do. Returns its number of this kind."""
    url = urlsplit(registry.url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=30)
    type_ = "application/x-protobuf" if kind == PROTOBUF else "application/json"
    content = {"content": text, "contentType": type_, "references": list(references)}
    body = {"artifactId": artifact, "artifactType": kind, "firstVersion": {"content": content}}
    path = f"/apis/registry/v3/groups/{quote(group, safe='')}/artifacts?ifExists=FIND_OR_CREATE_VERSION"
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return int(answer["version"][number])


def to(group: str, artifact: str, name: str) -> dict[str, str]:
    return {"groupId": group, "artifactId": artifact, "version": "1", "name": name}


@pytest.fixture
def schemas(registry: LocalRegistry) -> KeptSchemas:
    return KeptSchemas(MemoryLake(), "orders", RegistryClient(RegistrySettings(url=registry.url, timeout="20s")))


def test_references_are_resolved_within_their_groups(registry: LocalRegistry, schemas: KeptSchemas) -> None:
    """RecordIdStrategy uses the namespace as group; Apicurio's default group has another artifact of the same name."""
    space = f"n{uuid.uuid4().hex[:8]}"
    line, sku = f"{space}.b.Line", f"{space}.c.Sku"
    wrong = {"type": "record", "name": line, "fields": [{"name": "sku", "type": ["null", "string"]}]}
    inner = {"type": "record", "name": sku, "fields": [{"name": "text", "type": "string"}]}
    right = wrong | {"fields": [{"name": "sku", "type": sku}]}
    put(registry, "default", line, AVRO, json.dumps(wrong))
    put(registry, "default", sku, AVRO, json.dumps(inner | {"fields": [{"name": "text", "type": "int"}]}))
    put(registry, f"{space}.c", sku, AVRO, json.dumps(inner))
    put(registry, f"{space}.b", line, AVRO, json.dumps(right), to(f"{space}.c", sku, sku))
    text = json.dumps(ORDER | {"namespace": space}).replace("LINE", line)
    number = put(registry, f"{space}.a", "Order", AVRO, text, to(f"{space}.b", line, line))
    full_schema: Any = ORDER | {"fields": [ORDER["fields"][0], {"name": "line", "type": right}]}  # type: ignore[index]
    full_schema = json.loads(json.dumps(full_schema).replace(f'"type": "{sku}"', f'"type": {json.dumps(inner)}'))
    value = {"id": "a", "line": {"sku": {"text": "x"}}}
    landed, refused, _ = avro.convert(avro.make_reader(full_schema), [avro.encode(full_schema, value, number)], schemas)  # type: ignore[arg-type]
    assert refused is None
    assert landed.select(["id", "line"]).to_pylist() == [value]


def test_protobuf_with_maps_and_google_files_matches_google(registry: LocalRegistry, schemas: KeptSchemas) -> None:
    names = ("google/protobuf/struct.proto", "google/protobuf/timestamp.proto")
    for name in names:
        put(registry, "default", name, PROTOBUF, 'syntax = "proto3"; package google.protobuf; message Wrong {}')
    artifact = f"orders-{uuid.uuid4().hex[:8]}-value"
    number = put(registry, "default", artifact, PROTOBUF, WRITTEN_OUT, *(to("default", name, name) for name in names))
    reader = protobuf.make_reader(AS_MAP, "shop.Order", WireFormat.APICURIO3)
    kind = protobuf.make_message_class(reader.texts[-1])
    message = kind(id="a", counts={"x": 1})
    message.more.update({"k": [1, None]})
    message.at.FromJsonString("2024-02-29T12:00:00Z")
    record = message.SerializeToString()
    value = b"\0" + struct.pack(">I", number) + reference("Order") + record
    (row,) = protobuf.convert_rows(reader, [value], schemas=schemas)
    assert row is not None
    fields = {f.name: protobuf.normalize(row[f.name], f.type) for f in reader.columns.fields}
    assert fields == protobuf.read_by_google(kind, record)


@pytest.mark.parametrize("kind", APICURIO_IDS)
def test_schema_ids_in_headers_are_requested_by_kind(registry: LocalRegistry, schemas: KeptSchemas, kind: str) -> None:
    """Artifacts with the same content share a content id, not a global id: the numbers of the kinds differ."""
    space = f"n{uuid.uuid4().hex[:8]}"
    line = {"type": "record", "name": f"{space}.Line", "fields": [{"name": "sku", "type": "string"}]}
    for artifact in ("one", "two"):
        put(registry, space, artifact, AVRO, json.dumps(line))
    text = json.dumps(ORDER | {"namespace": space}).replace("LINE", f"{space}.Line")
    number = put(registry, space, "Order", AVRO, text, to(space, "one", f"{space}.Line"), number=kind)
    other = put(registry, space, "Json", "JSON", '{"type": "object"}', number=kind)
    schema: Any = json.loads(json.dumps(ORDER | {"namespace": space}).replace('"LINE"', json.dumps(line)))
    values = [{"id": name, "line": {"sku": name}} for name in "abc"]
    records = with_headers(
        make_chunk([avro.encode(schema, value, None) for value in values]),
        [[(APICURIO_IDS[kind], struct.pack(">q", n))] for n in (number, number + 1_000_000, other)],
    )
    form = AvroFormat(avro.make_reader(schema, WireFormat.APICURIO_HEADERS), schemas)
    (piece,) = form.convert(OffsetRange("orders", 3, "id", FIRST, FIRST + 3), records)
    assert piece.landed.select(["id", "line"]).to_pylist() == values[:1]
    assert piece.quarantined is not None
    assert piece.quarantined["reason"].to_pylist() == ["unknown_schema", "incompatible"]


def test_schema_ids_in_headers_need_the_apicurio_api(registry: LocalRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    client = RegistryClient(RegistrySettings(url=registry.url, timeout="20s"))
    monkeypatch.setattr(RegistryClient, "_own", "/apis/nowhere")
    with pytest.raises(Failed, match="has no /apis/nowhere, which tells the schemas of headers"):
        client.schema("globalId-1")


def test_references_in_groups_need_the_apicurio_api(registry: LocalRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"n{uuid.uuid4().hex[:8]}.Line"
    put(registry, "b", line, AVRO, json.dumps({"type": "record", "name": line, "fields": []}))
    number = put(registry, "a", line + "s", AVRO, json.dumps({"type": "array", "items": line}), to("b", line, line))
    client = RegistryClient(RegistrySettings(url=registry.url, timeout="20s"))
    monkeypatch.setattr(RegistryClient, "_own", "/apis/nowhere")
    with pytest.raises(Failed, match="only Apicurio's own API tells"):
        client.schema(number)
