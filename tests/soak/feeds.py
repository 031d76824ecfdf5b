"""The feeds of the scene: every format, layout, commit and kind of table, over a store and over a local lake.

A record names its producer and sequence in its key, so that the checker knows it in every format. Of typed feeds the
value has `producer`, `sequence` and `amount`, and of JSON feeds also decimals, floats, times and nested values.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import fastavro
from google.protobuf import descriptor_pb2, json_format, message_factory
from google.protobuf.descriptor_pool import DescriptorPool

from sluice.pipelines.model.receipts import ENGINE, EngineKind

FRAME = 5
"""Bytes before a value with a schema's number: a zero byte and the number."""
CONTRACT = {
    "name": "amounts",
    "expectations": [
        {"type": "expect_column_values_to_be_between", "kwargs": {"column": "amount", "min_value": 0}},
        {
            "type": "expect_column_values_to_match_regex",
            "kwargs": {"column": "producer", "regex": "^w", "mostly": 0.9},
            "severity": "warning",
        },
    ],
    "meta": {"great_expectations_version": "1.24.1"},
}
_COLUMNS = {"producer": "string", "sequence": "int64", "amount": "int64"}
_JSON_COLUMNS = _COLUMNS | {
    "price": "decimal(9,2)",
    "ratio": "float64",
    "at": "timestamp(ms)",
    "lines": "list<struct<sku:string, price:decimal(9,2), sold:timestamp(us)>>",
}
_FIRST_TIME = datetime(2024, 2, 29, 12, tzinfo=UTC)
AVRO: dict[str, Any] = {
    "type": "record",
    "name": "Amount",
    "namespace": "soak",
    "fields": [{"name": n, "type": "string" if t == "string" else "long"} for n, t in _COLUMNS.items()],
}
PROTOBUF = """\
syntax = "proto3";
package soak;
message Amount {
  string producer = 1;
  int64 sequence = 2;
  int64 amount = 3;
}
"""
JSON_SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "title": "Amount",
    "type": "object",
    "properties": {n: {"type": "string" if t == "string" else "integer"} for n, t in _COLUMNS.items()},
}
SCHEMAS = {"avro": json.dumps(AVRO), "protobuf": PROTOBUF, "json_schema": json.dumps(JSON_SCHEMA)}
_FILES = {"avro": "amount.avsc", "protobuf": "amount.proto", "json_schema": "amount.json"}
_REGISTERED = {"avro": "AVRO", "protobuf": "PROTOBUF", "json_schema": "JSON"}


class Record(NamedTuple):
    """A record to send. `fits`: it lands as a row; otherwise it goes into quarantine."""

    key: bytes
    value: bytes | None
    fits: bool
    amount: int


@dataclass(frozen=True)
class SoakFeed:
    """A feed and its topic. `lines` are keys of its file beyond those that all feeds have."""

    name: str
    lines: Mapping[str, Any] = field(default_factory=dict)
    format: str = "raw"
    partitions: int = 2
    window: int = 1
    """Minutes."""
    local: bool = False
    table: str = ""
    contract: bool = False
    letters: bool = False
    registry: bool = False
    splits: bool = False
    """Records have a `kind`, which chooses their output, if it is one of two."""
    protects: bool = False
    """Records have an `email`, which lands as its HMAC."""
    customers: int = 0
    """The number of customers that records are changes of; then none is a tombstone."""
    erases: bool = False
    """Upkeep erases records."""
    source: str = ""
    """The feed whose rows are republished into this one's topic; nobody else writes to it."""

    @property
    def topic(self) -> str:
        return self.name.replace("_", "-")

    @property
    def letters_topic(self) -> str:
        return f"{self.topic}-dlq"

    @property
    def is_typed(self) -> bool:
        return self.format != "raw"

    @property
    def offset_column(self) -> str:
        return "kafka_offset" if self.is_typed else "offset"

    @property
    def partition_column(self) -> str:
        return "kafka_partition" if self.is_typed else "partition"

    @property
    def time_column(self) -> str:
        return "kafka_timestamp" if self.is_typed else "timestamp"

    def make_record(self, producer: str, sequence: int, draw: random.Random, number: int) -> Record:
        """Returns a record; `number` is that of the writer's schema. Few are tombstones or do not fit."""
        who = {"producer": producer, "sequence": sequence}
        key, amount, luck = json.dumps(who).encode(), draw.randrange(1000), draw.random()
        if luck < 0.005 and not self.customers:
            return Record(key, None, True, -1)
        if self.is_typed and luck < 0.025:
            return Record(key, b"\xff\xff not of the format", False, -1)
        if self.contract and luck < 0.045:
            return Record(key, self._encode({**who, "amount": -1}, number), False, -1)
        more = {f"more{draw.randrange(3)}": "x"} if self.name == "json_evolve" and draw.random() < 0.2 else {}
        more |= _draw_values(draw) if self.format == "json" else {}
        kind = draw.choices(("web", "store", "app"), (6, 3, 1))[0] if self.splits else ""
        more |= {"kind": kind} if self.splits else {}
        more |= {"email": f"{producer}.{sequence}{CANARY}"} if self.protects else {}
        more |= {"customer": draw.randrange(self.customers)} if self.customers else {}
        return Record(key, self._encode({**who, "amount": amount, **more}, number), kind != "app", amount)

    def _encode(self, fields: dict[str, Any], number: int) -> bytes:
        frame = b"\0" + number.to_bytes(4, "big") if self.registry else b""
        match self.format:
            case "avro":
                out = io.BytesIO()
                fastavro.schemaless_writer(out, _parse_avro(), fields)
                return frame + out.getvalue()
            case "protobuf":
                index = b"\0" if self.registry else b""
                return frame + index + _build_message_class()(**fields).SerializeToString()
            case _:
                return frame + json.dumps(fields).encode()

    def decode(self, value: bytes | None) -> bytes | None:
        """Returns the value as JSON, read by the format's own library, or as it lands under protection; another value
        unchanged."""
        if value is not None and self.protects:
            try:
                row = json.loads(value)
            except ValueError:
                return None  # quarantined without its value
            digest = hmac.new(PROTECTION.encode(), row["email"].encode(), hashlib.sha256)
            return json.dumps(row | {"email": digest.hexdigest()}).encode()
        if value is None or not self.is_typed or self.format == "json":
            return value
        if self.registry and value[:1] != b"\0":
            return value
        body = value[FRAME:] if self.registry else value
        try:
            match self.format:
                case "avro":
                    fields: Any = fastavro.schemaless_reader(io.BytesIO(body), _parse_avro(), None)
                case "protobuf":
                    message = _build_message_class()()
                    message.ParseFromString(body[1:] if self.registry else body)
                    fields = json_format.MessageToDict(
                        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
                    )
                    fields = {n: fields[n] if t == "string" else int(fields[n]) for n, t in _COLUMNS.items()}
                case _:
                    fields = json.loads(body)
        except Exception:  # noqa: BLE001 - each library has its own: the value is not of the format
            return value
        return json.dumps(fields).encode()

    def list_lines(self, addresses: Addresses) -> dict[str, Any]:
        """Returns the keys of the feed's file."""
        client = {"bootstrap": addresses.bootstrap, "request_timeout_ms": 8000, "bootstrap_timeout_ms": 6000}
        client |= {"session_timeout_ms": 6000, "transaction_timeout_ms": 10_000}
        lines: dict[str, Any] = {"kafka": client, "topics": self.topic, "start": "earliest", "group": f"g-{self.topic}"}
        lines["window"] = {"length": f"{self.window}m", "grace": "10s"}
        lines["engine"] = os.environ.get(ENGINE) or EngineKind.PROCESSES
        if not self.local:
            lines |= {"lake": addresses.lake, "s3": dict(addresses.s3)}
        if self.is_typed:
            lines |= {"format": self.format, "policies": {"quarantine_limit": {"share": 1.0}}}
        if self.format == "json":
            more = {"kind": self.splits, "email": self.protects, "customer": bool(self.customers)}
            types = {"kind": "string", "email": "string", "customer": "int64"}
            lines["schema"] = _JSON_COLUMNS | {name: types[name] for name, has in more.items() if has}
        if self.splits:
            schema = lines.pop("schema")
            outputs = {name: {"schema": schema} for name in ("web", "store")}
            lines["split"] = {"by": {"field": "kind"}, "into": outputs, "tombstones": "all"}
        if self.protects:
            lines["protect"] = {"email": {"hmac": PROTECTION}}
        if self.customers:
            lines["changes"] = {"format": "upsert", "key": ["customer"], "order_by": ["kafka_timestamp"]}
        if self.format in _FILES:
            lines["schema_file"] = f"schemas/{_FILES[self.format]}"
        if self.registry:
            lines["registry"] = {"url": addresses.registry, "timeout": "5s"}
        if self.letters:
            lines["dead_letters"] = {"topic": self.letters_topic}
        if self.table == "iceberg":
            name = {"name": f"db.{self.name}", "catalog": {"type": "sql", "uri": addresses.catalog}}
            lines["table"] = {"iceberg": name, "keep_snapshots": KEEP_SNAPSHOTS, "quarantine": self.local}
        if self.table == "delta":
            lines["table"] = {"delta": {}, "keep_snapshots": KEEP_SNAPSHOTS, "quarantine": self.local}
            lines["table"] |= {"current": True} if self.customers else {}
        return {**lines, **self.lines}

    def write(self, project: Path, addresses: Addresses) -> None:
        """Write the feed's file, its contract and its schema into the project."""
        feeds, schemas = project / "feeds", project / "schemas"
        feeds.mkdir(parents=True, exist_ok=True)
        schemas.mkdir(exist_ok=True)
        if self.contract:
            (feeds / f"{self.name}.contract.json").write_text(json.dumps(CONTRACT))
        if self.format in _FILES:
            (schemas / _FILES[self.format]).write_text(SCHEMAS[self.format])
        lines = self.list_lines(addresses).items()
        (feeds / f"{self.name}.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in lines))

    def build_schema(self, version: int) -> dict[str, Any]:
        """Returns the body that registers the writers' schema; each version has another optional field at its end."""
        text = SCHEMAS[self.format]
        if self.format == "protobuf" and version:
            text = text.replace("amount = 3;", f"amount = 3;\n  string more{version} = {version + 3};")
        if self.format == "avro" and version:
            # A field that every reader skips, and that costs one byte: fastavro writes it, too.
            text = json.dumps(AVRO | {"doc": f"version {version}"})
        if self.format == "json_schema" and version:
            text = json.dumps(JSON_SCHEMA | {"description": f"version {version}"})
        return {"schema": text, "schemaType": _REGISTERED[self.format]}


KEEP_SNAPSHOTS = "10m"


@dataclass(frozen=True)
class Addresses:
    """Addresses for feed files: those of the proxies."""

    bootstrap: str
    lake: str
    s3: Mapping[str, str]
    registry: str
    catalog: str


def _draw_values(draw: random.Random) -> dict[str, Any]:
    """Returns fields of `_JSON_COLUMNS`; some are null, and some are missing."""
    times = [(_FIRST_TIME + timedelta(milliseconds=draw.randrange(10**11))).isoformat() for _ in range(3)]
    prices = [draw.randrange(10**6) / 100 for _ in range(3)]
    lines = [
        {"sku": f"s{n}", "price": prices[n], "sold": times[n]} | ({"price": None} if draw.random() < 0.1 else {})
        for n in range(draw.randrange(3))
    ]
    fields = {"price": prices[2], "ratio": draw.random(), "at": times[2], "lines": lines}
    return {name: None if draw.random() < 0.05 else value for name, value in fields.items() if draw.random() > 0.05}


@cache
def _parse_avro() -> Any:
    return fastavro.parse_schema(AVRO)


@cache
def _build_message_class() -> Callable[..., Any]:
    """Returns Google's class of the message, made of a descriptor: nothing is compiled."""
    file = descriptor_pb2.FileDescriptorProto(name="amount.proto", package="soak", syntax="proto3")
    message = file.message_type.add(name="Amount")
    kinds = {"string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING}
    for number, (name, kind) in enumerate(_COLUMNS.items(), start=1):
        message.field.add(
            name=name,
            number=number,
            type=kinds.get(kind, descriptor_pb2.FieldDescriptorProto.TYPE_INT64),
            label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
        )
    pool = DescriptorPool()
    pool.Add(file)
    message_class: Callable[..., Any] = message_factory.GetMessageClass(pool.FindMessageTypeByName("soak.Amount"))
    return message_class


PROTECTION, CANARY = "a key of thirty-two bytes, at most", "@canary.example"
"""The key of protected values, and the end of all of them, which no file may hold."""

FEEDS: tuple[SoakFeed, ...] = (
    SoakFeed("raw_plain", {"commit": "transactional"}, window=1),
    SoakFeed("raw_again", window=2, source="raw_plain"),
    SoakFeed("raw_local", {"schedule": "own"}, window=2, local=True),
    SoakFeed("raw_times", {"landing": {"layout": "record_time"}}, window=2),
    SoakFeed("raw_shared", {"landing": {"shared_files": True}}, window=1, partitions=12),
    SoakFeed("raw_ledger", {"commit": "none"}, window=5, local=True),
    SoakFeed("raw_uncommitted", {"isolation": "read_uncommitted", "commit": "plain"}, window=3),
    SoakFeed("json_orders", format="json", contract=True, letters=True),
    SoakFeed("json_whole", {"commit": "plain", "publish": "all_or_nothing"}, format="json", contract=True, window=2),
    SoakFeed("json_evolve", {"policies": {"quarantine_limit": {"share": 1.0}, "on_drift": "evolve"}}, format="json"),
    SoakFeed("json_times", {"landing": {"layout": "record_time"}}, format="json", local=True, window=5),
    SoakFeed("json_iceberg", format="json", table="iceberg", contract=True),
    SoakFeed("json_delta", format="json", table="delta", window=2),
    SoakFeed("json_iceberg_local", {"commit": "plain"}, format="json", table="iceberg", local=True, window=2),
    SoakFeed("json_delta_local", {"schedule": "own"}, format="json", table="delta", local=True, contract=True),
    SoakFeed("json_split", format="json", splits=True, letters=True),
    SoakFeed("json_protected", format="json", protects=True, local=True, window=2),
    SoakFeed("json_changes", format="json", customers=40, table="delta", window=2),
    SoakFeed("json_erased", {"commit": "transactional"}, format="json", erases=True, table="iceberg", window=2),
    SoakFeed("avro_orders", {"landing": {"shared_files": True}}, format="avro", registry=True, partitions=6),
    SoakFeed("avro_iceberg", format="avro", registry=True, table="iceberg", window=3),
    SoakFeed("avro_bare", {"publish": "all_or_nothing"}, format="avro", local=True, window=2),
    SoakFeed("proto_delta", format="protobuf", registry=True, table="delta", window=2),
    SoakFeed("schema_orders", {"commit": "plain"}, format="json_schema", registry=True, window=3),
)
BY_NAME: Mapping[str, SoakFeed] = {feed.name: feed for feed in FEEDS}
SCHEDULES = ("pending_of_many_feeds_windows", "land_raw_local_windows", "land_json_delta_local_windows")
SENSOR = "watch_feeds"
