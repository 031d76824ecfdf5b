"""The compiled loops of Avro: record bytes → slots by programs of operations, and decimals.

A *program* (`programs.py`) combines one writer's schema with the feed's own: rows of `ops`, which `_record` reads one
after another. One compilation serves all schemas. For each node of the feed's schema a *slot* holds an item: a number,
or the span of a text; `there` marks the slots in use. Spans are those of `columns.spans`, levels those of
`columns.nodes`. A refused record leaves no slot, only a position and a code. Promise, for any bytes: nothing is read or
written outside of the arrays, nothing recurses, the work for a record is bounded by its bytes and by the room of its
lists, and no Python object is created for a record.

    next record ── block full ────────────────► return FULL
        │        └─ none left ────────────────► return DONE
        ├─ null ──────────────────────────────► row without slots
        ├─ no schema header ──────────────────► refused
        ├─ schema not in `ids` ───────────────► return WANT (state[NEED]); call again with its program
        ├─ start of its program below 0 ──────► refused with that code
        └─ _record: one operation after another, lists and calls on `stack`
             ├─ END after the last byte ──────► row
             ├─ a code, END before it ─► undo ► refused
             └─ a level is full ───────► undo ► return GROW_LEVEL (state[NEED])
    WANT and GROW_LEVEL leave state[ROW] at the record, which is read again from its first byte.

Programs come from `programs.py` and are trusted: `pc`, nodes and levels are within their arrays. Bytes of a record are
not: each read is behind a check against `end`, and each number from a record is compared before it is an index.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sluice.pipelines.records.columns.spans import NULL, PLAIN, get_kind, get_size, get_start, pack
from sluice.pipelines.records.compiled.jit import (
    BYTES,
    CELLS,
    I8,
    I32,
    I64,
    INTEGER,
    TABLE,
    U8,
    Array,
    byte,
    cell,
    compiled,
    inlined,
    inner,
    int64,
    item,
    put,
    uint64,
)
from sluice.pipelines.records.compiled.loop import Arrays
from sluice.pipelines.records.slots.binary_loops import (
    AT_BYTE,
    AT_NODE,
    BAD_TEXT,
    CUT,
    DONE,
    FULL,
    GROW_LEVEL,
    HEADER,
    KNOWN,
    LAST,
    MANY,
    NEED,
    NOWHERE,
    OK,
    OUT,
    OWN,
    PASSED,
    RESULTS,
    ROW,
    SPREAD,
    WANT,
    BlockResults,
    begin,
    bits,
    not_utf8,
    note_landed,
    open_record,
    refuse,
    step,
    undo,
)

# --- operations: a row of `ops` is one, its node and level where it writes (node −1: nowhere), and up to four numbers

OP, NODE, LEVEL, A, B, C = 0, 1, 2, 3, 4, 5
OP_FIELDS = CELLS

END = 0
LONG = 1  # A: AS_IS, AS_FLOAT or AS_DOUBLE; B: whether 32 bits must hold it
FLOAT = 2  # A: AS_IS or AS_DOUBLE
DOUBLE = 3
TRUTH = 4
TEXT = 5  # A: whether it must be UTF-8
FIXED = 6  # A: its bytes
ENUM = 7  # A: where its numbers are translated, in `lists`; B: how many there are
SKIP = 8  # A: bytes
SKIP_LONG = 9
SKIP_TEXT = 10
BRANCH = 11  # A: where the operations of its branches begin, in `lists`; B: how many there are
JUMP = 12  # A: the next operation
PRESENT = 13  # a struct, or an element of a constant list, is there
NUMBER = 14  # A: a constant
CONSTANT = 15  # A, B: a text, in the pool
LIST = 16  # A: the level of its elements, −1 if they are skipped; B: the operation after; C: least bytes of an element
NEXT = 17  # A: the list's operation
LIST_OF = 18  # A: the level of its elements; B: how many elements a constant list has
ELEMENT = 19  # A: the level: the next element of a constant list begins
WORD = 20  # four bytes, unsigned
FAIL = 21  # A: why a record with such a value is refused
CALL = 22  # A: the first operation of a routine, which passes over a value of a recursive type
RETURN = 23  # from a routine, to the operation behind the call
REST = 24  # all bytes that are left; A: whether they must be UTF-8

AS_IS, AS_FLOAT, AS_DOUBLE = 0, 1, 2

POOL = OWN  # in `state`: where constants begin, behind the chunk's bytes
SLOTS = OWN + 1

# --- why a record is refused, besides what all formats have --------------------------------------------------------

LONG_VARINT, WIDE_INT, NO_TRUTH, NO_BRANCH, NO_SYMBOL, BAD_SIZE, MORE = 76, 77, 78, 79, 80, 81, 82
OTHER_BRANCH, OTHER_SYMBOL, WIDE_DECIMAL, NEW_FIELDS = 83, 84, 85, 86
DEEP = 88
_CROWDED = 99  # a level is full: no fault of the record

MOST_EMPTY = 4096
"""Elements without bytes (nulls, records without fields) that one block of a list may have."""
MOST_OPEN = 16_384
"""Lists and recursive records inside one another, in a record."""


class AvroTables(NamedTuple):
    """Programs, and the room that scanning needs. `ids`, `starts`: a hash table from schema ids to programs; a start
    below 0 is the code that refuses all records of that schema. `usage`: for each program, how many records it read in
    this piece and the first of their rows."""

    ops: Array
    lists: Array
    ids: Array
    starts: Array
    usage: Array
    nodes: Array
    bases: Array
    spans: Array
    there: Array
    counts: Array
    room: Array
    saved: Array
    at: Array
    stack: Array
    state: Array


_TABLES = Arrays((TABLE, I64, I64, I64, TABLE, TABLE, I64, I64, U8, I64, I64, I64, I64, I64, I64), AvroTables)
FRAME = 4  # numbers of a list's frame: its operation, elements left in this block, elements read, unused; of a call's
# frame: the operation behind it


@inner
def _long(data: Array, at: int, end: int) -> tuple[int, int]:
    """A zigzag varint of 64 bits at most: (the number, the next byte), or (a code, −1)."""
    number = uint64(0)
    shift = uint64(0)
    while at < end:
        b = uint64(byte(data, at))
        at += 1
        if shift == uint64(63) and b > uint64(1):  # the tenth byte has room for one bit
            return int64(LONG_VARINT), int64(-1)
        number |= (b & uint64(0x7F)) << shift
        if b < uint64(0x80):
            return int64(number >> uint64(1)) ^ -int64(number & uint64(1)), at
        shift += uint64(7)
        if shift > uint64(63):
            return int64(LONG_VARINT), int64(-1)
    return int64(CUT), int64(-1)


@inner
def _number(number: int, how: int) -> int:
    """A number as its slot holds it: floats by their bits."""
    if how == AS_IS:
        return number
    if how == AS_FLOAT:
        return int64(np.float32(number).view(np.uint32))
    return int64(np.float64(number).view(np.int64))


@inlined
def _record(data: Array, p: int, end: int, pc: int, t: AvroTables) -> int:
    """Read one record from byte `p` on by the program at `pc`: OK or a code, with AT_NODE and AT_BYTE set.

    Operations that write fall through to the end of the loop; those that only move `pc` continue before it.
    """
    ops, lists, bases, spans, there, at, state = t.ops, t.lists, t.bases, t.spans, t.there, t.at, t.state
    depth = int64(0)
    begun = p
    while True:
        op = cell(ops, pc, OP)
        node = cell(ops, pc, NODE)
        number = int64(0)
        code = int64(OK)
        begun = p
        pc += 1
        if op == LONG:
            number, p = _long(data, p, end)
            if p < 0:
                code = number
            elif cell(ops, pc - 1, B) != 0 and (number > 2147483647 or number < -2147483648):
                code = int64(WIDE_INT)
            else:
                number = _number(number, cell(ops, pc - 1, A))
        elif op == TEXT:
            size, p = _long(data, p, end)
            if p < 0:
                code = size
            elif size < 0:
                code = int64(BAD_SIZE)
            elif size > end - p:
                code = int64(CUT)
            else:
                if cell(ops, pc - 1, A) != 0:
                    wrong = not_utf8(data, p, p + size)
                    if wrong >= 0:
                        code = int64(BAD_TEXT)
                        begun = wrong
                number = pack(p, p + size, PLAIN)
                p += size
        elif op == BRANCH:
            which, p = _long(data, p, end)
            if p < 0:
                code = which
            elif which < 0 or which >= cell(ops, pc - 1, B):  # makes the index into `lists` safe
                code = int64(NO_BRANCH)
            else:
                pc = item(lists, cell(ops, pc - 1, A) + which)
                continue
        elif op == JUMP:
            pc = cell(ops, pc - 1, A)
            continue
        elif op == DOUBLE:
            if end - p < 8:
                code = int64(CUT)
            else:
                number = bits(data, p, 8)
                p += 8
        elif op == FLOAT:
            if end - p < 4:
                code = int64(CUT)
            else:
                number = bits(data, p, 4)
                p += 4
                if cell(ops, pc - 1, A) == AS_DOUBLE:
                    number = int64(np.float64(np.uint32(number).view(np.float32)).view(np.int64))
        elif op == WORD:
            if end - p < 4:
                code = int64(CUT)
            else:
                number = bits(data, p, 4)
                p += 4
        elif op == TRUTH:
            if p >= end:
                code = int64(CUT)
            else:
                number = byte(data, p)
                p += 1
                if number > 1:
                    code = int64(NO_TRUTH)
        elif op == FIXED:
            size = cell(ops, pc - 1, A)
            if size > end - p:
                code = int64(CUT)
            else:
                number = pack(p, p + size, PLAIN)
                p += size
        elif op == ENUM:
            number, p = _long(data, p, end)
            if p < 0:
                code = number
            elif number < 0 or number >= cell(ops, pc - 1, B):
                code = int64(NO_SYMBOL)
            else:
                number = item(lists, cell(ops, pc - 1, A) + number)
                if number < 0:
                    code = int64(OTHER_SYMBOL)
        elif op == SKIP:
            if cell(ops, pc - 1, A) > end - p:
                code = int64(CUT)
            else:
                p += cell(ops, pc - 1, A)
        elif op == SKIP_LONG:
            number, p = _long(data, p, end)
            if p < 0:
                code = number
        elif op == SKIP_TEXT:
            size, p = _long(data, p, end)
            if p < 0:
                code = size
            elif size < 0:
                code = int64(BAD_SIZE)
            elif size > end - p:
                code = int64(CUT)
            else:
                p += size
        elif op == PRESENT:
            number = pack(0, 0, PLAIN)
        elif op == NUMBER:
            number = cell(ops, pc - 1, A)
        elif op == CONSTANT:
            number = pack(state[POOL] + cell(ops, pc - 1, A), state[POOL] + cell(ops, pc - 1, B), PLAIN)
        elif op == LIST or op == NEXT:  # noqa: SIM109 - compiled
            # LIST opens a frame. Then both: read block headers until one has elements or closes the list, and begin the
            # next element behind LIST. Each header takes a byte at least, so empty blocks cannot loop for long.
            if op == LIST:
                if (depth + 1) * FRAME > t.stack.size:
                    code = int64(DEEP)
                else:
                    put(t.stack, depth * FRAME, pc - 1)
                    put(t.stack, depth * FRAME + 1, 0)
                    put(t.stack, depth * FRAME + 2, 0)
                    depth += 1
            if code == OK:
                frame = (depth - 1) * FRAME
                own = item(t.stack, frame)
                remaining = item(t.stack, frame + 1) - (1 if op == NEXT else 0)
                level = cell(ops, own, A)
                closed = False
                while remaining <= 0 and code == OK and not closed:
                    begun = p
                    remaining, p = _long(data, p, end)
                    if p < 0:
                        code = remaining
                    elif remaining == 0:
                        closed = True
                    else:
                        if remaining < 0:  # the block's size follows, which is not needed; −2⁶³ stays negative
                            remaining = -remaining
                            size, p = _long(data, p, end)
                            if p < 0:
                                code = size
                            elif size < 0 or remaining < 0:
                                code = int64(BAD_SIZE)
                        # A count that the rest of the record cannot hold is refused before any element is read.
                        minimum = cell(ops, own, C)
                        if code == OK and minimum > 0 and remaining > (end - p) // minimum:
                            code = int64(CUT)
                        elif code == OK and minimum == 0:
                            if remaining > MOST_EMPTY:
                                code = int64(MANY)
                            elif level < 0:
                                remaining = int64(0)
                if code == OK and closed:
                    depth -= 1
                    pc = cell(ops, own, B)
                    node = cell(ops, own, NODE)
                    number = pack(0, item(t.stack, frame + 2), PLAIN)
                    if node >= 0:
                        slot = item(bases, node) + item(at, cell(ops, own, LEVEL))
                        put(spans, slot, number)
                        there[uint64(slot)] = 1
                    continue
                if code == OK:
                    put(t.stack, frame + 1, remaining)
                    pc = own + 1
                    if level >= 0:  # n < room makes the slots of this element safe
                        n = item(t.counts, level)
                        if n >= item(t.room, level):
                            state[NEED] = level
                            return int64(_CROWDED)
                        put(t.counts, level, n + 1)
                        put(at, level, n)
                        put(t.stack, frame + 2, item(t.stack, frame + 2) + 1)
                    continue
        elif op == LIST_OF:
            number = pack(0, cell(ops, pc - 1, B), PLAIN)
        elif op == ELEMENT:
            level = cell(ops, pc - 1, A)
            n = item(t.counts, level)
            if n >= item(t.room, level):
                state[NEED] = level
                return int64(_CROWDED)
            put(t.counts, level, n + 1)
            put(at, level, n)
            continue
        elif op == REST:
            if cell(ops, pc - 1, A) != 0:
                wrong = not_utf8(data, p, end)
                if wrong >= 0:
                    code = int64(BAD_TEXT)
                    begun = wrong
            number = pack(p, end, PLAIN)
            p = end
        elif op == FAIL:
            code = cell(ops, pc - 1, A)
        elif op == CALL:
            if (depth + 1) * FRAME > t.stack.size:
                code = int64(DEEP)
            else:
                put(t.stack, depth * FRAME, pc)
                depth += 1
                pc = cell(ops, pc - 1, A)
                continue
        elif op == RETURN:
            depth -= 1
            pc = item(t.stack, depth * FRAME)
            continue
        else:  # END
            if p == end:
                return int64(OK)
            code = int64(MORE)
        if code != OK:
            state[AT_NODE] = node
            state[AT_BYTE] = begun
            return code
        if node >= 0:
            slot = item(bases, node) + item(at, cell(ops, pc - 1, LEVEL))
            put(spans, slot, number)
            there[uint64(slot)] = 1


@inner
def _find_program(t: AvroTables, schema: int) -> int:
    """The slot of a schema in `ids`; −1 when it has no program yet. The table is never full, so a free slot ends it."""
    mask = t.ids.size - 1
    slot = schema * SPREAD & mask
    while t.ids[slot] >= 0:
        if t.ids[slot] == schema:
            return slot
        slot = (slot + 1) & mask
    return int64(-1)


@compiled(BYTES, I32, U8, I64, _TABLES, RESULTS, results=1)
def scan(data: Array, ends: Array, valid: Array, schemas: Array, t: AvroTables, results: BlockResults) -> int:
    """Read records from state[ROW] on, up to a block: DONE, FULL, GROW_LEVEL (state[NEED]: which), or WANT
    (state[NEED]: the id of a schema without a program).

    `data` has the chunk's values and then the constants; `ends` where each value ends. `valid`: the bitmap of values
    that are not null, or empty. `schemas`: the number of each record's schema, or below 0 a code, if state[HEADER] is
    GIVEN.
    """
    state = t.state
    begin(t)
    while state[ROW] < state[LAST]:
        next_ = step(valid, t, results)
        if next_ == PASSED:
            continue
        if next_ == FULL:
            return int64(FULL)
        row, out = state[ROW], state[OUT]
        begun, end = int64(ends[row]), int64(ends[row + 1])
        schema, p = open_record(data, begun, end, schemas, row, state)
        if schema < 0:
            refuse(t, results, -schema, -1, 0)
            continue
        slot = int64(0)
        if state[HEADER] != NOWHERE:
            slot = state[KNOWN]
            if t.ids[slot] != schema:
                slot = _find_program(t, schema)
                if slot < 0:
                    state[NEED] = schema
                    return int64(WANT)
                state[KNOWN] = slot
        pc = t.starts[slot]
        if pc < 0:
            refuse(t, results, -pc, -1, 1)
            continue
        for level in range(t.counts.size):
            t.saved[level] = t.counts[level]
        t.at[0] = out
        code = _record(data, p, end, pc, t)
        if code == OK:
            note_landed(t, results, row, out, slot)
            continue
        undo(t)
        if code == _CROWDED:
            return int64(GROW_LEVEL)
        refuse(t, results, code, state[AT_NODE], state[AT_BYTE] - begun)
    return int64(DONE)


@inner
def _too_wide(high: int, low: int, most_high: int, most_low: int) -> bool:
    """Returns whether the absolute value of high:low is larger than most_high:most_low."""
    if high < 0:
        low = ~low + 1
        high = ~high + (1 if low == 0 else 0)
    a, b = uint64(high), uint64(most_high)
    return a > b or (a == b and uint64(low) > uint64(most_low))


@compiled(BYTES, I64, INTEGER, I64, INTEGER, INTEGER, I32, I8, results=1)
def decimals(
    data: Array, spans: Array, at: int, out: Array, most_high: int, most_low: int, bad_item: Array, bad_code: Array
) -> int:
    """Two's complement, big-endian, into `out` from item `at` on, two numbers each, the low one first.

    Returns how many are wider than their precision; `bad_item` and `bad_code` name them.
    """
    bad = int64(0)
    for i in range(spans.size):
        span = spans[i]
        low = high = int64(0)
        if get_kind(span) > NULL:
            p = get_start(span)
            stop = p + get_size(span)
            if p < stop and byte(data, p) > 0x7F:
                low = high = int64(-1)
            wide = False
            while stop - p > 16 and not wide:  # leading bytes may only repeat the sign
                wide = byte(data, p) != low & 0xFF or byte(data, p + 1) >> 7 != low & 1
                p += 1
            while p < stop and not wide:
                high = high << 8 | (low >> 56 & 0xFF)
                low = low << 8 | byte(data, p)
                p += 1
            if wide or _too_wide(high, low, most_high, most_low):
                bad_item[bad] = at + i
                bad_code[bad] = WIDE_DECIMAL
                bad += 1
                low = high = int64(0)
        out[2 * (at + i)] = low
        out[2 * (at + i) + 1] = high
    return bad
