"""Binary records, several in one input, for the loops of binary formats over guarded memory.

The first byte of an input selects the schema and the side of the guarded page (128: not at its end). Each record
follows after one byte with its length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.columns import builders
from sluice.pipelines.records.columns.reasons import Reasons
from sluice.pipelines.records.slots import slots
from sluice.pipelines.records.slots.binary import BinaryTyper
from tests.fuzz.mutation import mutate_bytes
from tests.guarded import Guarded

_GUARDED = Guarded()


def guard() -> None:
    """Make columns and slots grow in memory that ends at a guarded page, from here on."""
    builders.allocate = _GUARDED.allocate_items
    vars(slots)["allocate"] = _GUARDED.allocate_items


def make_seeds(kind: int, records: Sequence[bytes]) -> list[bytes]:
    """Return an input of these records for each side of the guarded page."""
    return [bytes([side]) + _join(records) for side in (kind, kind | 128)]


def split_records(data: bytes) -> list[bytes]:
    """Return the records of an input."""
    records, at = list[bytes](), 1
    while at < len(data) and len(records) < 32:
        records.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    return records


def mutate_records(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Return the input with an edit of one of its records, or of any bytes."""
    records = split_records(data) or [b""]
    if random.randrange(4) == 0:
        return mutate_bytes(random, data, others)
    index = random.randrange(len(records))
    records[index] = mutate_bytes(random, records[index], records)[:255]
    return data[:1] + _join(records)


def check_records(typer: BinaryTyper, reasons: Reasons, data: bytes, check_landed: Callable[[bytes], None]) -> str:
    """Type the records of an input, and return the reasons of refusals. `check_landed` checks each landed record."""
    records = split_records(data)
    room = _GUARDED.fill(b"".join(records), at_end=not (data or b"\0")[0] & 128)
    ends = np.cumsum([0, *map(len, records)], dtype=np.int32)
    array = pa.Array.from_buffers(pa.binary(), len(records), [None, pa.py_buffer(ends), pa.py_buffer(room)])
    refusals: set[str] = set()
    try:
        for piece in typer.pieces(array):
            rows = np.sort(np.concatenate([piece.rows, piece.refused.rows]))
            assert rows.tolist() == list(range(piece.start, piece.stop))
            for column in piece.arrays:
                column.validate(full=True)
                assert len(column) == len(piece.rows)
            for row in piece.rows.tolist():
                check_landed(records[row])
            for code, node in zip(piece.refused.codes.tolist(), piece.refused.nodes.tolist(), strict=True):
                assert reasons.describe(code, typer.nodes[node] if node >= 0 else None, 1)
                refusals.add(str(reasons.get_reason(code)))
    finally:
        _GUARDED.free()
    return " ".join(sorted(refusals))


def _join(records: Sequence[bytes]) -> bytes:
    return b"".join(bytes([len(r)]) + r for r in records)
