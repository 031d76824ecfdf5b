"""Steps that the compiled loops of Avro and Protobuf share.

    begin ─► step ─┬─ FULL ──────► the block ends
                   ├─ PASSED ────► a null: a row
                   └─ READ ─► open_record ─┬─ a schema's number ─► the format's own _record ─┬─ note_landed
                                           │   (unknown: WANT)                               ├─ undo, refuse
                                           └─ below 0 ──────────► refuse                     └─ undo, GROW_LEVEL

Each format has its own named tuple of tables; the fields used here have the same names in each. `note_landed`, `refuse`
and PASSED move state[ROW] on; every other way leaves it at the record, which is read again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sluice.pipelines.records.columns.spans import skip_sequence
from sluice.pipelines.records.compiled.jit import I32, Array, bit_of, byte, cell, inlined, inner, int64, uint64, word
from sluice.pipelines.records.compiled.loop import Arrays
from sluice.pipelines.records.rows.wire_format import NO_HEADER

_TOPS = 0x8080808080808080

# --- `state`, kept between calls; slots of a format's own loop follow -------------------------------------------------

ROW = 0  # next record of the chunk
LAST = 1
OUT = 2  # rows of this block
MOST_OUT = 3
BAD = 4
NEED = 5  # the level that needs room, or the number of the schema that is unknown
HEADER = 6  # where the number of a record's schema is: NOWHERE, BEFORE or GIVEN
KNOWN = 7  # the slot of the schema of the record before, in `ids`
AT_NODE = 8  # where a record was found wrong
AT_BYTE = 9
SKIPPED = 10  # bytes before a record, when its schema is GIVEN
OWN = 11  # the first of the format's own

NOWHERE, BEFORE, GIVEN = 0, 1, 2  # one schema for all; before each record, as Confluent writes it; in a list

NODE_LEVEL = 2
"""The column of `nodes` that has a node's level."""

# --- how a call ended, and why a record is refused ---------------------------------------------------------------

DONE, FULL, GROW_LEVEL, WANT = 0, 1, 2, 3
OK = 0
NO_SCHEMA, INCOMPATIBLE, CUT, BAD_TEXT, MANY = 71, 72, 73, 74, 75

SPREAD = 40503
"""A schema's number times this gives its slot in `ids`."""
_HEADER_BYTES = 5
"""A zero byte and a schema's number, before a record."""
READ, PASSED = 2, 3  # results of `step`, besides FULL


class BlockResults(NamedTuple):
    """The results of a block besides slots: the record of each row, and refused records.

    One class for all loops: numba takes two of the same name and fields for one another.
    """

    source: Array
    bad_row: Array
    bad_code: Array
    bad_node: Array
    bad_at: Array


RESULTS = Arrays((I32,) * 5, BlockResults)


@inlined
def begin(t: Any) -> None:
    """Begin a block."""
    t.state[OUT] = 0
    t.state[BAD] = 0
    for level in range(t.counts.size):
        t.counts[level] = 0


@inlined
def step(valid: Array, t: Any, results: BlockResults) -> int:
    """Decide about the record at hand: READ it; PASSED, if it was a null, which is a row; FULL, if the block is full.

    `valid`: the bitmap of values that are not null, or empty.
    """
    state = t.state
    if state[OUT] >= state[MOST_OUT] or state[BAD] >= results.bad_row.size:
        return int64(FULL)
    if valid.size > 0 and not bit_of(valid, state[ROW]):
        results.source[state[OUT]] = state[ROW]
        state[OUT] += 1
        state[ROW] += 1
        return int64(PASSED)
    return int64(READ)


@inlined
def open_record(data: Array, p: int, end: int, schemas: Array, row: int, state: Array) -> tuple[int, int]:
    """The number of the record's schema (0: none is needed; below 0 the code that refuses it), and the next byte.

    With GIVEN, a record shorter than its prefix has a code in `schemas`, so the next byte is at most `end`.
    """
    if state[HEADER] == NOWHERE:
        return int64(0), p
    if state[HEADER] == GIVEN:
        return schemas[row], p + state[SKIPPED]
    if end - p < _HEADER_BYTES or byte(data, p) != 0:
        return int64(-NO_HEADER), p
    schema: int = byte(data, p + 1) << 24 | byte(data, p + 2) << 16 | byte(data, p + 3) << 8 | byte(data, p + 4)
    return schema, p + _HEADER_BYTES


@inlined
def note_landed(t: Any, results: BlockResults, row: int, out: int, slot: int) -> None:
    """The record `row` is row `out` of the block. `slot` is its schema's, in `ids`."""
    state = t.state
    results.source[out] = row
    if t.usage[slot, 0] == 0:
        t.usage[slot, 1] = row
    t.usage[slot, 0] += 1
    state[OUT] = out + 1
    state[ROW] = row + 1


@inner
def refuse(t: Any, results: BlockResults, code: int, node: int, at: int) -> None:
    """The record at hand is refused."""
    n = t.state[BAD]
    results.bad_row[n] = t.state[ROW]
    results.bad_code[n] = code
    results.bad_node[n] = node
    results.bad_at[n] = at
    t.state[BAD] = n + 1
    t.state[ROW] += 1


@inner
def undo(t: Any) -> None:
    """Undo the writes of a refused record."""
    row = t.state[OUT]
    for n in range(t.bases.size):
        level = cell(t.nodes, n, NODE_LEVEL)
        first = row if level == 0 else t.saved[level]
        stop = row + 1 if level == 0 else t.counts[level]
        for i in range(first, stop):
            t.spans[t.bases[n] + i] = 0
            t.there[t.bases[n] + i] = 0
    for level in range(1, t.counts.size):
        t.counts[level] = t.saved[level]


@inner
def not_utf8(data: Array, at: int, end: int) -> int:
    """The first byte that is not UTF-8; −1 when all are."""
    while at < end:
        while at + 8 <= end and word(data, at) & uint64(_TOPS) == uint64(0):
            at += 8
        while at < end and byte(data, at) < 0x80:
            at += 1
        while at < end and byte(data, at) > 0x7F:
            after = skip_sequence(data, at, end)
            if after < 0:
                return at
            at = after
    return int64(-1)


@inner
def bits(data: Array, at: int, size: int) -> int:
    """Four or eight bytes, little-endian; the caller has checked that they are there."""
    if size == 8:
        return int64(word(data, at))
    number: int = byte(data, at) | byte(data, at + 1) << 8 | byte(data, at + 2) << 16 | byte(data, at + 3) << 24
    return number
