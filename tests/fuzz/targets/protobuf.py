"""Protobuf records, several in one input: the loops over guarded memory, and what Google's library says.

The first byte of an input chooses the message and the side of the guarded page; then each record has its length in one
byte before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.protobuf.reader import ProtobufReader
from sluice.pipelines.records.protobuf.reasons import detail_of, reason_of
from sluice.pipelines.records.protobuf.typer import ProtobufTyper
from sluice.pipelines.records.typed import columns as typed_columns
from sluice.pipelines.records.typed import slots
from sluice.pipelines.records.wire import WireFormat
from tests.fuzz.mutation import mutated
from tests.fuzz.target import Target
from tests.guarded import Guarded
from tests.pipelines.records.protobuf import wild
from tests.pipelines.records.protobuf.rows import message_class

_GUARDED = Guarded()
_MESSAGES = 16


def guard() -> None:
    """From here on columns and slots grow in memory that ends where nobody may write."""
    typed_columns.buffer = _GUARDED.buffer
    vars(slots)["buffer"] = _GUARDED.buffer


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
        records = [wild.record(random, _message(kind)[1].DESCRIPTOR)[:255] for _ in range(4)]
        joined = b"".join(bytes([len(r)]) + r for r in records)
        found += [bytes([kind]) + joined, bytes([kind | 128]) + joined]
    return found


def _records(data: bytes) -> list[bytes]:
    found, at = list[bytes](), 1
    while at < len(data) and len(found) < 32:
        found.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    return found


def _mutated(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    records = _records(data) or [b""]
    if random.randrange(4) == 0:
        return mutated(random, data, others)
    place = random.randrange(len(records))
    records[place] = mutated(random, records[place], records)[:255]
    return data[:1] + b"".join(bytes([len(r)]) + r for r in records)


def _run(data: bytes) -> str:
    kind, records = data[0] if data else 0, _records(data)
    reader, google = _message(kind % _MESSAGES)
    room = _GUARDED.filled(b"".join(records), at_end=not kind & 128)
    ends = np.cumsum([0, *map(len, records)], dtype=np.int32)
    array = pa.Array.from_buffers(pa.binary(), len(records), [None, pa.py_buffer(ends), pa.py_buffer(room)])
    made = ProtobufTyper(reader, None)
    said: set[str] = set()
    try:
        for piece in made.pieces(array):
            both = np.sort(np.concatenate([piece.rows, piece.refused.rows]))
            assert both.tolist() == list(range(piece.start, piece.stop))
            for column in piece.arrays:
                column.validate(full=True)
                assert len(column) == len(piece.rows)
            if not any("json" in f.text for f in reader.columns.fields):
                for row in piece.rows.tolist():
                    google.FromString(records[row])
            for code, node in zip(piece.refused.codes.tolist(), piece.refused.nodes.tolist(), strict=True):
                assert detail_of(code, made.nodes[node] if node >= 0 else None, 1)
                said.add(str(reason_of(code)))
    finally:
        _GUARDED.free()
    return " ".join(sorted(said))


PROTOBUF = Target("protobuf", _seeds, _run, _mutated)
