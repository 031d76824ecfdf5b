"""The compiled loops of Protobuf: record bytes → slots, by the tables of the feed's message (`programs.py`).

One compile serves all messages. Fields come in any order and as often as they like: the last of a singular field
counts, messages are merged, a member of a oneof replaces the others, lists are appended to, packed or not. Slots,
levels and blocks are as in `slots.slots`. A refused record leaves no slot, only a position and a code. Promise, for any
bytes: nothing is read or written outside of the arrays, nothing recurses, the work for a record is bounded by its bytes
and by the room of its lists, and no Python object is created for a record.

    next record ── block full ────────────────► return FULL
        │        └─ none left ────────────────► return DONE
        ├─ null ──────────────────────────────► row without slots
        ├─ no header, or another message ─────► refused
        ├─ schema and message not in `ids` ───► return WANT (state[NEED], state[PATH])
        ├─ its start below 0 ─────────────────► refused with that code
        └─ _record: tag ─► field ─► value; messages and groups on `stack`; unknown fields in `news`
             ├─ end of the bytes at depth 0 ──► row
             ├─ a code ──────────► undo ──────► refused
             └─ a level is full ─► undo ──────► return GROW_LEVEL (state[NEED]; −1: `chain`)
    WANT and GROW_LEVEL leave state[ROW] at the record, which is read again from its first byte.
    After a block, `settle` writes defaults and reports required fields that are missing.

    _record ─┬─ END of the message ─► pop `stack`      tag ─┬─ known, its wire type ─► value ─► slot; ENTER pushes
             ├─ `packed` ──► next value of the field        ├─ known, packed ────────► `packed` = end of its values
             └─ tag                                         ├─ END_GROUP ────────────► pop, if it is this group's
                                                            └─ unknown ──────────────► _skip, then `news` or refused

Tables come from `programs.py` and are trusted. Bytes of a record are not: each read is behind a check against the end
of the message at hand, which is never behind the end of the record.

Source: Protobuf's encoding guide, and its conformance tests' rules for parsers.
"""

from __future__ import annotations

from typing import NamedTuple

from sluice.pipelines.records.columns.spans import PLAIN, get_size, pack
from sluice.pipelines.records.compiled.jit import (
    BYTES,
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
    int32,
    int64,
    item,
    put,
    uint64,
)
from sluice.pipelines.records.compiled.loop import Arrays
from sluice.pipelines.records.rows.wire_format import NO_HEADER
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

# --- a field: a row of `fields` -------------------------------------------------------------------------------

OP, NODE, LEVEL = 0, 1, 2  # the operation; the node that it writes, and its level
WIRE = 3  # the wire type that it has
LIST, INNER, OUTER = 4, 5, 6  # a list's or map's node (−1: it is none), the level of its elements, the list's own level
PACKED = 7  # whether several values may come as one
OTHERS = 8  # the members of a oneof that it excludes, in `lists` (−1: none)
MESSAGE = 9  # the message that begins
VALUE = 10  # what its slot holds from then on, if nothing is there

INT32, INT64, UINT32, SINT32, SINT64, TRUTH = 0, 1, 2, 3, 4, 5
FIXED32, SFIXED32, FIXED64, TEXT, BYTES_, DOCUMENT, ENTER, SECONDS, NANOS = 6, 7, 8, 9, 10, 11, 12, 13, 14

VARINT, EIGHT, SIZED, GROUP, END_GROUP, FOUR = 0, 1, 2, 3, 4, 5

# --- a message: a row of `messages`, where its hash table of numbers and fields begins in `lookup`, and its node ------

LOOKUP_AT, LOOKUP_MASK, OF_NODE = 0, 1, 2

# --- a node: a row of `nodes`; the result of a slot without a value ----------------------------------------------

MODE, PARENT = 0, 1  # PARENT: the node that must be there, −1 when it always is
MAY_MISS, DEFAULT, REQUIRED = 0, 1, 2

# --- `state`, besides the common slots ------------------------------------------------------------------------------

PATH = OWN  # the message of the schema that is wanted
NAMED = OWN + 1  # where a record names its message: UNNAMED, INDEXES, NAME, PATHS or NUMBER
CLOSED = OWN + 2  # whether a field that the feed's message does not have is refused
CHAINED = OWN + 3  # rows of `chain`
SLOTS = OWN + 4

UNNAMED, INDEXES, NAME, PATHS, NUMBER = 0, 1, 2, 3, 4

# --- why a record is refused, besides what all formats have ----------------------------------------------------------

OTHER_MESSAGE, NO_MESSAGE, LONG_VARINT, NO_FIELD, NO_WIRE, NO_GROUP, DEEP = 100, 101, 102, 103, 104, 105, 106
NEW_FIELD, OTHER_SYMBOL, MISSING, NO_DOCUMENT = 107, 108, 109, 110
_CROWDED = 120  # a level is full: no fault of the record

MOST_INDEXES, INDEX = 5, 4096
"""How many indexes name a message, and below what each is: so a path of them is one number."""
MOST_DEPTH = 100
"""Messages and groups inside one another, as in Google's parsers."""
MOST_CHAIN = 4096
"""Second and later parts of JSON documents that a block may have."""
IN_PARTS = 2
"""What `there` has of a document with several parts."""
FRAME = 3  # numbers of a frame: where the message ends, its number, and the group's (0: none)
_WRONG = 1 << 60
"""More than any time in microseconds."""
_MICROS = 1_000_000
_FIRST_SECOND, _LAST_SECOND = -62_135_596_800, 253_402_300_799


class ProtobufTables(NamedTuple):
    """A message's tables, and the room that scanning needs. `ids`, `paths`, `starts`: a hash table from schemas and
    their messages to 0, or to the code below 0 that refuses all such records; `usage`: how many records of each were
    read in this piece, and the first of their rows. `name`: the prefix of a record of the feed's message under NAME.
    `news`: fields that the message does not have, as message, number, records, first row, last row. `chain`: slots and
    the spans of their second and later parts; 0 takes back those before. Each takes back at least one part, so that
    twice the rows are room enough."""

    fields: Array
    messages: Array
    lookup: Array
    lists: Array
    nodes: Array
    ids: Array
    paths: Array
    starts: Array
    usage: Array
    name: Array
    news: Array
    chain: Array
    bases: Array
    spans: Array
    there: Array
    counts: Array
    room: Array
    saved: Array
    at: Array
    begins: Array
    stack: Array
    state: Array


_TABLES = Arrays(
    (TABLE, TABLE, I64, I64, TABLE, I64, I64, I64, TABLE, BYTES, TABLE, TABLE, I64, I64, U8, *[I64] * 7), ProtobufTables
)


@inner
def _varint(data: Array, at: int, end: int, max_bytes: int) -> tuple[int, int]:
    """Reads a varint of a limited length: (the number, the next byte), or (a code, −1). Drops bits beyond 64."""
    number = uint64(0)
    shift = uint64(0)
    stop = at + max_bytes
    while at < end:
        if at >= stop:
            return int64(LONG_VARINT), int64(-1)
        b = uint64(byte(data, at))
        at += 1
        number |= (b & uint64(0x7F)) << shift
        if b < uint64(0x80):
            return int64(number), at
        shift += uint64(7)
    return int64(CUT), int64(-1)


@inner
def _field_of(t: ProtobufTables, message: int, number: int) -> int:
    """The row of the field of that number; −1 where the message has none."""
    at = cell(t.messages, message, LOOKUP_AT)
    mask = cell(t.messages, message, LOOKUP_MASK)
    slot = number & mask
    while True:
        known_number = item(t.lookup, at + 2 * slot)
        if known_number == number:
            row: int = item(t.lookup, at + 2 * slot + 1)
            return row
        if known_number == 0:
            return int64(-1)
        slot = (slot + 1) & mask


@inner
def _skip(data: Array, p: int, end: int, wire: int, number: int, depth: int, t: ProtobufTables) -> tuple[int, int]:
    """Pass over the value of an unknown field: (OK, the next byte), or (a code, where it was found)."""
    groups = int64(0)
    while True:
        if wire == VARINT:
            begun = p
            value, p = _varint(data, p, end, 10)
            if p < 0:
                return value, begun
        elif wire == EIGHT:
            if end - p < 8:
                return int64(CUT), p
            p += 8
        elif wire == FOUR:
            if end - p < 4:
                return int64(CUT), p
            p += 4
        elif wire == SIZED:
            begun = p
            value, p = _varint(data, p, end, 5)
            if p < 0:
                return value, begun
            if value > end - p:  # five bytes make no negative number
                return int64(CUT), begun
            p += value
        elif wire == GROUP:
            if depth + groups >= MOST_DEPTH:
                return int64(DEEP), p
            put(t.stack, MOST_DEPTH * FRAME + FRAME + groups, number)  # behind all frames; groups < MOST_DEPTH
            groups += 1
        elif wire == END_GROUP:
            if groups == 0 or item(t.stack, MOST_DEPTH * FRAME + FRAME + groups - 1) != number:
                return int64(NO_GROUP), p
            groups -= 1
        else:
            return int64(NO_WIRE), p
        if groups == 0:
            return int64(OK), p
        begun = p
        tag, p = _varint(data, p, end, 5)
        if p < 0:
            return tag, begun
        number = tag >> 3
        wire = tag & 7
        if number == 0 or number > 536870911:
            return int64(NO_FIELD), begun


@inner
def _note(t: ProtobufTables, message: int, number: int) -> None:
    """Count a field that the message does not have, once a record. What there is no room for is not counted."""
    mask = t.news.shape[0] - 1
    slot = (number * SPREAD + message) & mask
    row = t.state[ROW]
    for _ in range(8):
        if t.news[slot, 2] == 0:
            t.news[slot, 0] = message
            t.news[slot, 1] = number
            t.news[slot, 2] = 1
            t.news[slot, 3] = row
            t.news[slot, 4] = row
            return
        if t.news[slot, 0] == message and t.news[slot, 1] == number:
            if t.news[slot, 4] != row:
                t.news[slot, 2] += 1
                t.news[slot, 4] = row
            return
        slot = (slot + 1) & mask


@inner
def _empty_slots(t: ProtobufTables, first: int, n: int) -> None:
    """Take back all that is in some nodes, from place `first` of `lists` on: a node and all below it, of the elements
    at hand. Their lists' elements are the last of their levels."""
    top = t.lists[first]
    if t.there[t.bases[top] + t.at[t.nodes[top, LEVEL]]] == 0:
        return
    level = t.nodes[top, LEVEL]
    for i in range(first, first + n):
        node = t.lists[i]
        own = t.nodes[node, LEVEL]
        begin = t.at[own] if own == level else t.begins[own]
        stop = begin + 1 if own == level else t.counts[own]
        if t.nodes[node, INNER] != own:
            total = int64(0)
            for slot in range(t.bases[node] + begin, t.bases[node] + stop):
                total += get_size(t.spans[slot])
            deeper = t.nodes[node, INNER]
            t.begins[deeper] = t.counts[deeper] - total
        for slot in range(t.bases[node] + begin, t.bases[node] + stop):
            if t.there[slot] == IN_PARTS:
                t.chain[t.state[CHAINED], 0] = slot
                t.chain[t.state[CHAINED], 1] = 0
                t.state[CHAINED] += 1
            t.spans[slot] = 0
            t.there[slot] = 0
    for i in range(first, first + n):
        node = t.lists[i]
        deeper = t.nodes[node, INNER]
        if deeper != t.nodes[node, LEVEL]:
            t.counts[deeper] = t.begins[deeper]


@inner
def _exclude(t: ProtobufTables, slot: int) -> None:
    """Take back the other members of a oneof."""
    n = t.lists[slot]
    slot += 1
    for _ in range(n):
        size = t.lists[slot]
        _empty_slots(t, slot + 1, size)
        slot += 1 + size


@inner
def _time(op: int, number: int, before: int) -> int:
    """A time in microseconds, with other seconds or another fraction, of which digits below a microsecond are cut off.

    Invalid seconds or an invalid fraction set bits that no time has, until a later value replaces them.
    """
    wrong = (before + _WRONG // 2) // _WRONG
    before -= wrong * _WRONG
    fraction = before % _MICROS
    if op == SECONDS:
        if number < _FIRST_SECOND or number > _LAST_SECOND:
            return (wrong | 2) * _WRONG + fraction
        return (wrong & 1) * _WRONG + number * _MICROS + fraction
    number = int64(int32(number))
    if number < 0 or number > 999_999_999:
        return (wrong | 1) * _WRONG + before - fraction
    return (wrong & 2) * _WRONG + before - fraction + number // 1000


@inner
def _enter(stack: Array, depth: int, stop: int, message: int, group: int) -> None:
    """Save the end of the message or group at hand, its number, and the group's: a nested one is read next."""
    put(stack, depth * FRAME, stop)
    put(stack, depth * FRAME + 1, message)
    put(stack, depth * FRAME + 2, group)


@inner
def _leave(stack: Array, depth: int) -> tuple[int, int, int]:
    """Returns the state saved when the message that ends now was entered."""
    return item(stack, depth * FRAME), item(stack, depth * FRAME + 1), item(stack, depth * FRAME + 2)


@inlined
def _record(data: Array, p: int, end: int, t: ProtobufTables) -> int:
    """Read one record from byte `p` on: OK or a code, with AT_NODE and AT_BYTE set.

    p ≤ stop ≤ end holds throughout: `stop` is the end of the message at hand, and only smaller ends are pushed.
    """
    fields, bases, spans, there, at, state, stack = t.fields, t.bases, t.spans, t.there, t.at, t.state, t.stack
    depth = int64(0)
    message = int64(0)
    group = int64(0)
    stop = end
    packed = int64(-1)
    row = int64(-1)
    code = int64(OK)
    begun = p
    while True:
        # A packed field is a run of values without tags: they are read as if each had one, up to `packed`.
        if packed >= 0 and p >= packed:
            packed = int64(-1)
        if packed < 0:
            begun = p
            row = int64(-1)
            if p >= stop:
                if group != 0:  # a group ends at its END_GROUP, never with the bytes
                    code = int64(CUT)
                    break
                if depth == 0:
                    return int64(OK)
                depth -= 1
                stop, message, group = _leave(stack, depth)
                continue
            # A tag is the field's number and the wire type of its value; numbers below 16 take one byte.
            tag = byte(data, p)
            if tag < 0x80:
                p += 1
            else:
                tag, p = _varint(data, p, stop, 5)
                if p < 0:
                    code = tag
                    break
            number = tag >> 3
            wire = tag & 7
            if number == 0 or number > 536870911:
                code = int64(NO_FIELD)
                break
            if wire == END_GROUP:
                if group != number:
                    code = int64(NO_GROUP)
                    break
                depth -= 1
                stop, message, group = _leave(stack, depth)
                continue
            # Writers pack repeated fields or not, as they like. Any other wire type makes the field unknown.
            row = _field_of(t, message, number)
            if row >= 0 and cell(fields, row, WIRE) != wire:
                if wire == SIZED and cell(fields, row, PACKED) != 0:
                    size, p = _varint(data, p, stop, 5)
                    if p < 0:
                        code = size
                        break
                    if size > stop - p:
                        code = int64(CUT)
                        break
                    packed = p + size
                    continue
                row = int64(-1)
            if row < 0:
                code, p = _skip(data, p, stop, wire, number, depth, t)
                if code != OK:
                    begun = p
                    break
                if state[CLOSED] != 0:
                    code = int64(NEW_FIELD)
                    state[AT_NODE] = cell(t.messages, message, OF_NODE)
                    state[AT_BYTE] = begun
                    return code
                _note(t, message, number)
                continue
        limit = stop if packed < 0 else packed
        op = cell(fields, row, OP)
        node = cell(fields, row, NODE)
        holder = cell(fields, row, LIST)
        # An element of a list: it takes the next slot of its level, and the list's span counts it.
        if holder >= 0:
            level = cell(fields, row, INNER)
            n = item(t.counts, level)
            if n >= item(t.room, level):  # otherwise the element's slots are within `spans`
                state[NEED] = level
                return int64(_CROWDED)
            put(t.counts, level, n + 1)
            put(at, level, n)
            slot = item(bases, holder) + item(at, cell(fields, row, OUTER))
            before = get_size(item(spans, slot))
            put(spans, slot, pack(0, before + 1, PLAIN))
            there[uint64(slot)] = 1
        # Of a oneof's members, the last one on the wire counts.
        if cell(fields, row, OTHERS) >= 0:
            _exclude(t, cell(fields, row, OTHERS))
        decoded = int64(0)
        if op <= TRUTH or op >= SECONDS:
            decoded = byte(data, p) if p < limit else int64(0x80)
            if decoded < 0x80:
                p += 1
            else:
                decoded, p = _varint(data, p, limit, 10)
                if p < 0:
                    code = decoded
                    break
            # Varints have up to 64 bits: narrower types keep the lower ones, as protobuf's parsers do; sint is zigzag.
            if op == INT32:
                decoded = int64(int32(decoded))
            elif op == UINT32:
                decoded &= 0xFFFFFFFF
            elif op == SINT32:
                decoded &= 0xFFFFFFFF
                decoded = (decoded >> 1) ^ -(decoded & 1)
            elif op == SINT64:
                decoded = int64(uint64(decoded) >> uint64(1)) ^ -(decoded & 1)
            elif op == TRUTH:
                decoded = int64(decoded != 0)
            elif op >= SECONDS:
                before = item(spans, item(bases, node) + item(at, cell(fields, row, LEVEL)))
                decoded = _time(op, decoded, before)
        elif op <= SFIXED32:
            if limit - p < 4:
                code = int64(CUT)
                break
            decoded = bits(data, p, 4)
            p += 4
            if op == SFIXED32:
                decoded = int64(int32(decoded))
        elif op == FIXED64:
            if limit - p < 8:
                code = int64(CUT)
                break
            decoded = bits(data, p, 8)
            p += 8
        elif op == ENTER and cell(fields, row, WIRE) == GROUP:
            if depth >= MOST_DEPTH:
                code = int64(DEEP)
                break
            _enter(stack, depth, stop, message, group)
            depth += 1
            group = number
            message = cell(fields, row, MESSAGE)
        else:
            size, p = _varint(data, p, stop, 5)
            if p < 0:
                code = size
                break
            if size > stop - p:
                code = int64(CUT)
                break
            if op == ENTER:
                if depth >= MOST_DEPTH:
                    code = int64(DEEP)
                    break
                _enter(stack, depth, stop, message, group)
                depth += 1
                group = int64(0)
                message = cell(fields, row, MESSAGE)
                stop = p + size
            else:
                if op == TEXT:
                    wrong = not_utf8(data, p, p + size)
                    if wrong >= 0:
                        code = int64(BAD_TEXT)
                        begun = wrong
                        break
                decoded = pack(p, p + size, PLAIN)
                p += size
        if node >= 0:
            slot = item(bases, node) + item(at, cell(fields, row, LEVEL))
            present = int64(1)
            # A message that occurs twice is merged: its fields are read into the same slots.
            if op == ENTER:
                if there[uint64(slot)] == 0:
                    put(spans, slot, cell(fields, row, VALUE))
            elif op == DOCUMENT and there[uint64(slot)] != 0:
                # A message in several parts is merged: the slot has the first part, `chain` the later ones.
                if 2 * state[CHAINED] >= t.chain.shape[0]:
                    state[NEED] = -1
                    return int64(_CROWDED)
                t.chain[state[CHAINED], 0] = slot
                t.chain[state[CHAINED], 1] = decoded
                state[CHAINED] += 1
                present = int64(IN_PARTS)
            else:
                put(spans, slot, decoded)
            there[uint64(slot)] = present
    state[AT_NODE] = cell(fields, row, NODE) if row >= 0 else cell(t.messages, message, OF_NODE)
    state[AT_BYTE] = begun
    return code


@inner
def _find_message(t: ProtobufTables, schema: int, path: int) -> int:
    """The slot of a schema's message in `ids`; −1 when it is unknown. The table is never full."""
    mask = t.ids.size - 1
    slot = (schema + path) * SPREAD & mask
    while t.ids[slot] >= 0:
        if t.ids[slot] == schema and t.paths[slot] == path:
            return slot
        slot = (slot + 1) & mask
    return int64(-1)


@inner
def _path(data: Array, p: int, end: int) -> tuple[int, int]:
    """The message that indexes before a record name, as one number: (it, the next byte), or (a code, −1)."""
    count, p = _varint(data, p, end, 10)
    if p < 0:
        return int64(NO_HEADER), int64(-1)
    count = (count >> 1) ^ -(count & 1)
    if count == 0:
        return int64(1), p
    if count < 0 or count > MOST_INDEXES:
        return int64(NO_MESSAGE), int64(-1)
    path = int64(0)
    for _ in range(count):
        index, p = _varint(data, p, end, 10)
        if p < 0:
            return int64(NO_HEADER), int64(-1)
        index = (index >> 1) ^ -(index & 1)
        if index < 0 or index >= INDEX - 1:
            return int64(NO_MESSAGE), int64(-1)
        path = path * INDEX + index + 1
    return path, p


@inner
def _behind_name(data: Array, p: int, end: int, name: Array) -> int:
    """The byte behind the name of the feed's message; −1 where another one is named."""
    if end - p < name.size:
        return int64(-1)
    for i in range(name.size):
        if byte(data, p + i) != byte(name, i):
            return int64(-1)
    return p + name.size


@compiled(BYTES, I32, U8, I64, I64, _TABLES, RESULTS, results=1)
def scan(
    data: Array, ends: Array, valid: Array, schemas: Array, paths: Array, t: ProtobufTables, results: BlockResults
) -> int:
    """Read records from state[ROW] on, up to a block: DONE, FULL, GROW_LEVEL (state[NEED]: which, −1: of `chain`), or
    WANT (state[NEED], state[PATH]: the schema and its message that are unknown).

    `data` has the chunk's values, `ends` where each ends. `valid`: the bitmap of values that are not null, or empty.
    `schemas`: the number of each record's schema, or below 0 a code, if state[HEADER] is GIVEN; `paths` its message, or
    below 0 a code, if state[NAMED] is PATHS.
    """
    state = t.state
    begin(t)
    state[CHAINED] = 0
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
            path = int64(0)
            # Where a record names its message depends on the registry: before the value, in headers, or not at all.
            if state[NAMED] == INDEXES:
                if p < end and byte(data, p) == 0:
                    path = int64(1)
                    p += 1
                else:
                    named_at = p - begun
                    path, p = _path(data, p, end)
                    if p < 0:
                        refuse(t, results, path, -1, named_at)
                        continue
            elif state[NAMED] == PATHS:
                path = paths[row]
                if path < 0:
                    refuse(t, results, -path, -1, 0)
                    continue
            elif state[NAMED] == NAME:
                named_at = p - begun
                p = _behind_name(data, p, end, t.name)
                if p < 0:
                    refuse(t, results, OTHER_MESSAGE, -1, named_at)
                    continue
            elif state[NAMED] == NUMBER:
                named_at = p - begun
                path, p = _varint(data, p, end, 5)
                if p < 0:
                    refuse(t, results, NO_HEADER, -1, named_at)
                    continue
                path = (path & 0xFFFFFFFF) + 1
            # Neighbours mostly have one schema: the last slot is tried before the hash table.
            slot = state[KNOWN]
            if t.ids[slot] != schema or t.paths[slot] != path:
                slot = _find_message(t, schema, path)
                if slot < 0:
                    state[NEED] = schema
                    state[PATH] = path
                    return int64(WANT)
                state[KNOWN] = slot
            if t.starts[slot] < 0:
                refuse(t, results, -t.starts[slot], -1, 1)
                continue
        for level in range(t.counts.size):
            t.saved[level] = t.counts[level]
        # The writes of a refused record are undone: back to `saved` and `chained`.
        chained = state[CHAINED]
        top = t.bases[0] + out
        t.at[0] = out
        t.spans[top] = pack(0, 0, PLAIN)
        t.there[top] = 1
        code = _record(data, p, end, t)
        if code == OK:
            note_landed(t, results, row, out, slot)
            continue
        undo(t)
        state[CHAINED] = chained
        if code == _CROWDED:
            return int64(GROW_LEVEL)
        refuse(t, results, code, state[AT_NODE], state[AT_BYTE] - begun)
    return int64(DONE)


@compiled(_TABLES, INTEGER, I64, I32, results=1)
def settle(t: ProtobufTables, rows: int, bad_item: Array, bad_node: Array) -> int:
    """Write defaults into empty slots whose parent is there.

    Returns how many slots of required fields are empty, up to the room of `bad_item` and `bad_node`, which name them.
    """
    bad = int64(0)
    for node in range(t.bases.size):
        mode = t.nodes[node, MODE]
        if mode == MAY_MISS:
            continue
        level = t.nodes[node, LEVEL]
        n = rows if level == 0 else t.counts[level]
        base = t.bases[node]
        parent = t.nodes[node, PARENT]
        above = int64(0) if parent < 0 else t.bases[parent]
        value = t.nodes[node, VALUE]
        for i in range(n):
            if t.there[base + i] == 0 and (parent < 0 or t.there[above + i] != 0):
                if mode == DEFAULT:
                    t.spans[base + i] = value
                    t.there[base + i] = 1
                elif bad < bad_item.size:
                    bad_item[bad] = i
                    bad_node[bad] = node
                    bad += 1
    return bad
