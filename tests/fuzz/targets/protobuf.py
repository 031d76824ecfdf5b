"""Protobuf records, several in one input (`fuzz.binary`): the loops over guarded memory, and what Google's library
says."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

from sluice.pipelines.records.protobuf.format import REASONS, ProtobufTyper
from sluice.pipelines.records.protobuf.reader_schema import ProtobufReader
from sluice.pipelines.records.rows.wire_format import WireFormat
from tests.fuzz import binary
from tests.fuzz.binary import changed, seeds_of, typed
from tests.fuzz.target import Target
from tests.pipelines.records.protobuf import wild
from tests.pipelines.records.protobuf.rows import message_class

_MESSAGES = 16


@cache
def _message(kind: int) -> tuple[ProtobufReader, Any]:
    """One of the messages, always the same, and Google's class of it."""
    for seed in range(kind, 1 << 20, _MESSAGES):
        text = wild.schema(Random(seed))
        if message_class(text).DESCRIPTOR.fields:
            return ProtobufReader((text,), WireFormat.BARE), message_class(text)
    raise AssertionError("no message with fields")


def _seeds() -> list[bytes]:
    found = []
    for kind in range(_MESSAGES):
        random = Random(kind)
        found += seeds_of(kind, [wild.record(random, _message(kind)[1].DESCRIPTOR)[:255] for _ in range(4)])
    return found


def _run(data: bytes) -> str:
    reader, google = _message((data[0] if data else 0) % _MESSAGES)
    documents = any("json" in f.text for f in reader.columns.fields)
    return typed(ProtobufTyper(reader, None), REASONS, data, lambda r: None if documents else google.FromString(r))


guard = binary.guard
PROTOBUF = Target("protobuf", _seeds, _run, changed)
