"""Binary records, several in one input, for the loops of such formats over guarded memory.

The first byte of an input chooses the schema and the side of the guarded page (128: at its end or not); then each
record has its length in one byte before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.json import columns as typed_columns
from sluice.pipelines.records.slots import slots
from sluice.pipelines.records.slots.binary import BinaryTyper, Reasons
from tests.fuzz.mutation import mutated
from tests.guarded import Guarded

_GUARDED = Guarded()


def guard() -> None:
    """From here on columns and slots grow in memory that ends where nobody may write."""
    typed_columns.allocate = _GUARDED.buffer
    vars(slots)["allocate"] = _GUARDED.buffer


def seeds_of(kind: int, records: Sequence[bytes]) -> list[bytes]:
    """An input of these records for each side of the guarded page."""
    return [bytes([side]) + _joined(records) for side in (kind, kind | 128)]


def records_of(data: bytes) -> list[bytes]:
    """The records of an input."""
    found, at = list[bytes](), 1
    while at < len(data) and len(found) < 32:
        found.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    return found


def changed(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """The input with something done to one of its records, or to any bytes."""
    records = records_of(data) or [b""]
    if random.randrange(4) == 0:
        return mutated(random, data, others)
    place = random.randrange(len(records))
    records[place] = mutated(random, records[place], records)[:255]
    return data[:1] + _joined(records)


def typed(made: BinaryTyper, reasons: Reasons, data: bytes, landed: Callable[[bytes], None]) -> str:
    """Type the records of an input, and say why some were refused. `landed` looks at each record that lands."""
    records = records_of(data)
    room = _GUARDED.filled(b"".join(records), at_end=not (data or b"\0")[0] & 128)
    ends = np.cumsum([0, *map(len, records)], dtype=np.int32)
    array = pa.Array.from_buffers(pa.binary(), len(records), [None, pa.py_buffer(ends), pa.py_buffer(room)])
    said: set[str] = set()
    try:
        for piece in made.pieces(array):
            both = np.sort(np.concatenate([piece.rows, piece.refused.rows]))
            assert both.tolist() == list(range(piece.start, piece.stop))
            for column in piece.arrays:
                column.validate(full=True)
                assert len(column) == len(piece.rows)
            for row in piece.rows.tolist():
                landed(records[row])
            for code, node in zip(piece.refused.codes.tolist(), piece.refused.nodes.tolist(), strict=True):
                assert reasons.detail(code, made.nodes[node] if node >= 0 else None, 1)
                said.add(str(reasons.reason(code)))
    finally:
        _GUARDED.free()
    return " ".join(sorted(said))


def _joined(records: Sequence[bytes]) -> bytes:
    return b"".join(bytes([len(r)]) + r for r in records)
