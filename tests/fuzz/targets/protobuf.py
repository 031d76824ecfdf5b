"""Protobuf records, several in one input (`fuzz.binary`): the loops over guarded memory, compared with Google's
library."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

from sluice.pipelines.records.protobuf.format import REASONS, ProtobufTyper
from sluice.pipelines.records.protobuf.reader_schema import ProtobufReader
from sluice.pipelines.records.rows.wire_format import WireFormat
from tests.fuzz import binary
from tests.fuzz.binary import check_records, make_seeds, mutate_records
from tests.fuzz.target import Target
from tests.pipelines.records.protobuf import wild
from tests.pipelines.records.protobuf.rows import make_message_class

_MESSAGES = 16


@cache
def _make_message(kind: int) -> tuple[ProtobufReader, Any]:
    """Return the message of this number, always the same, and Google's class for it."""
    for seed in range(kind, 1 << 20, _MESSAGES):
        text = wild.make_schema(Random(seed))
        if make_message_class(text).DESCRIPTOR.fields:
            return ProtobufReader((text,), WireFormat.BARE), make_message_class(text)
    raise AssertionError("no message with fields")


def _make_seeds() -> list[bytes]:
    seeds = []
    for kind in range(_MESSAGES):
        random = Random(kind)
        seeds += make_seeds(kind, [wild.make_record(random, _make_message(kind)[1].DESCRIPTOR)[:255] for _ in range(4)])
    return seeds


def _run(data: bytes) -> str:
    reader, google = _make_message((data[0] if data else 0) % _MESSAGES)
    documents = any("json" in f.text for f in reader.columns.fields)
    return check_records(
        ProtobufTyper(reader, None), REASONS, data, lambda r: None if documents else google.FromString(r)
    )


guard = binary.guard
PROTOBUF = Target("protobuf", _make_seeds, _run, mutate_records)
