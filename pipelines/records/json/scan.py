"""Scan JSON values into spans, in one compiled loop. Source: RFC 8259.

For each record and each node of the schema, `scan` notes where the node's text lies. It checks the grammar, UTF-8 and
the JSON type of each field; `fill` reads numbers and times. A refused record leaves no span, only a position and a
code. Promise, for any bytes: nothing is read or written outside of the arrays, nothing recurses, and no Python object
is created for a record.

    next record ── block full ──────────────────────────────────► return FULL
        │        └─ none left ──────────────────────────────────► return DONE
        ├─ null ────────────────────────────────────────────────► row without spans
        ├─ `extra` too short ───────────────────────────────────► return GROW_EXTRA
        ├─ _fits_template: same bytes around its values ────────► row
        └─ _record ─┬─ fits the schema ─────────────────────────► row
                    ├─ bad JSON, or a NOTE ──► _wipe ───────────► refused
                    └─ a level is full ──────► _wipe ─┬─ rows ──► return FULL
                                                      └─ none ──► return GROW_LEVEL
    Each return but DONE leaves state[ROW] at the next record to read: take the block, make room, call again.
    A landed record becomes the template (`_learn`) if there is none, or if the one before did not fit either.

Spans are those of `columns.spans`, levels those of `columns.nodes`: a node has a slot for each row, or for each element
of its level.

Records of one producer differ in their values only. The bytes around the values of one record, among them those of
members that no field has a name for, are a *template*:
`_fits_template` reads records that match it byte by byte. `_record` reads all others, and it alone refuses records.
Both write the same spans.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sluice.pipelines.records.columns.loops import TWICE
from sluice.pipelines.records.columns.spans import NULL, ODD, PLAIN, get_kind, get_size, get_start, pack, skip_sequence
from sluice.pipelines.records.compiled.jit import (
    BYTES,
    CELLS,
    I32,
    I64,
    TABLE,
    U8,
    Array,
    bit_of,
    byte,
    cell,
    compiled,
    copy,
    find_differences,
    find_digit_stops,
    find_text_stops,
    inlined,
    inner,
    int64,
    item,
    keep_branch,
    prefetch,
    put,
    trailing_zeros,
    uint64,
    word,
)
from sluice.pipelines.records.compiled.loop import Arrays

MOST_DEPTH = 100
"""Objects and arrays inside one another, those of unknown fields included."""
LONGEST_KEY = 8192
"""Bytes of a key with escapes that may still be a field's name."""

# --- a node: a row of `nodes`; children of a struct follow one another ----------------------------------------

SHAPE = 0
LEVEL = 1  # whose elements its slots are: 0 for rows
BASE = 2  # where its slots begin in `spans`
REQUIRED = 3
CHILD = 4  # first child; a map has two, key and value
COUNT = 5  # a struct's fields
INNER = 6  # the level that a list or map opens
NAME_AT = 7  # its name and a closing quote, in `names`
NAME_SIZE = 8
NAME_WORD = 9  # the first eight bytes of these, and which of them count
NAME_MASK = 10
LOOKUP_AT = 11  # a struct's hash table: places of its children in `lookup`, −1 where there is none
LOOKUP_MASK = 12
FOLLOW_AT = 13  # a struct's guesses, learned from its records: which child came after which, in `follow`
DEMANDS = 14  # whether any child of a struct is required
NODE_FIELDS = CELLS

TEXT, NUMBER, TRUTH, ANYTHING, STRUCT, LIST, MAP = 0, 1, 2, 3, 4, 5, 6
FITS, FITS_INSIDE = int64(1), int64(2)
UNKNOWN = 7  # of a step: a member that no field has a name for

# --- a template: a row of `steps` for each value, and one for the bytes after the last ---------------------------

STEP_NODE = 0
STEP_SHAPE = 1
STEP_REQUIRED = 2
STEP_SIZE = 3  # bytes before the value; where they begin in `template`; which of their last 32 count, a bit each
STEP_AT = 4
STEP_MASK = 5
STEP_DEPTH = 6  # objects that it is in
STEP_LENGTH = 7  # bytes of the text before; a bit for each and for the quote, 0: they vary
STEP_ENDS = 8
STEP_MISSES = 9  # texts of this block with another length than the one before
STEP_NAME = 10  # of an unknown member: bytes from its name to its value, 0 within a field; and bytes of the name
STEP_NAME_SIZE = 11
MOST_MISSES = 16
TEMPLATE_BYTES = 4096
AHEAD = 8  # records from the one at hand to the one whose bytes are asked for
BEYOND = 128  # bytes behind a record that may be read with it
DOUBT, MOST_DOUBT = 8, 128
"""A record that does not fit adds DOUBT, one that fits takes one away. Beyond MOST_DOUBT, the rest of the block does
without a template."""

# --- `state`, kept between calls -----------------------------------------------------------------------------

ROW = 0  # next record of the chunk
LAST = 1  # one past the last
OUT = 2  # rows noted in this block
MOST_OUT = 3
BAD = 4  # records refused in this block
EXTRA = 5  # bytes of `extra` in use
EXTRAS = 6  # rows of this block that have some
NEED = 7  # bytes of `extra`, or the level, that need room
BITMAP_AT = 8  # bit and offset of record 0 of the chunk
NOTE = 9  # the first thing found wrong with the record at hand: code, node, byte
NOTE_NODE = 10
NOTE_AT = 11
STEPS = 12  # values of the template; −1: there is none
UNFIT = 13  # whether the record before did not fit
DOUBTS = 14
TRAIL = 15  # values of the record at hand, in their order; −1: it makes no template
TRAIL_FIELDS = 4  # of a value: its node and place; of an unknown member (node −1): the end, and where its name is
MOST_UNKNOWN = 16  # unknown members in a template
INSIDE = 16  # whether the record at hand has unknown members inside of its fields
INSIDES = 17  # rows of this block that have
SLOTS = 18

# --- how a call ended, and why a record is refused ---------------------------------------------------------------

DONE, FULL, GROW_EXTRA, GROW_LEVEL = 0, 1, 2, 3
OK = 0
NO_VALUE, NO_LITERAL, NO_NUMBER, NO_NAME, NO_COLON, NO_COMMA = 1, 2, 3, 4, 5, 6
CUT, CONTROL, BAD_ESCAPE, MORE, BAD_UTF8, TOO_DEEP, TOO_LARGE = 7, 8, 9, 10, 11, 12, 13
NO_OBJECT, WRONG_TYPE, IS_NULL, IS_MISSING, SURROGATE = 14, 15, 16, 17, 19
_CROWDED = 99  # a level is full: no fault of the record


class ScanTables(NamedTuple):
    """A schema as arrays, and the room that scanning needs. `follow`, `counts` and all after them are written.

    `trail` has the values of the record at hand, `steps` and `template` are the template.
    """

    nodes: Array
    names: Array
    lookup: Array
    follow: Array
    spans: Array
    counts: Array
    room: Array
    saved: Array
    stack: Array
    nest: Array
    scratch: Array
    trail: Array
    steps: Array
    template: Array
    state: Array


class ScanResults(NamedTuple):
    """The results of a block besides spans: for each row its record and the end of its extra text; refused records.

    `extra` has members of the records themselves. `inside` are the records whose unknown members are not all among
    these: some are inside of fields (`unknown.copy_members`).
    """

    source: Array
    extra: Array
    extra_ends: Array
    inside: Array
    bad_row: Array
    bad_code: Array
    bad_node: Array
    bad_at: Array


TABLES = Arrays((TABLE, U8, I32, I32, I64, I64, I64, I64, I64, U8, U8, I64, TABLE, U8, I64), ScanTables)
_RESULTS = Arrays((I32, U8, I32, I32, I32, I32, I32, I32), ScanResults)

_HEX = np.full(256, -1, np.int64)
for _i, _c in enumerate(b"0123456789abcdef"):
    _HEX[_c] = _HEX[ord(chr(_c).upper())] = _i

_LITERALS = np.array([list(b"true\0"), list(b"false"), list(b"null\0")], np.int64)


@inner
def blank(buf: Array, at: int, end: int) -> int:
    """The next byte that is no white space."""
    while at < end:
        b = byte(buf, at)
        if b > 0x20 or not (b == 0x20 or b == 0x0A or b == 0x0D or b == 0x09):
            break
        at += 1
    return at


@inner
def _hex4(buf: Array, at: int) -> int:
    """Four hexadecimal digits; negative when they are not. The caller has checked that there are four bytes."""
    a: int = _HEX[byte(buf, at)]
    b: int = _HEX[byte(buf, at + 1)]
    c: int = _HEX[byte(buf, at + 2)]
    d: int = _HEX[byte(buf, at + 3)]
    if a < 0 or b < 0 or c < 0 or d < 0:
        return int64(-1)
    return (a << 12) | (b << 8) | (c << 4) | d


@inner
def _escape(buf: Array, at: int, end: int) -> tuple[int, int]:
    """The escape at `at` (a backslash): (next byte, OK or SURROGATE for a lone one), or (−1, code)."""
    if at + 1 >= end:
        return int64(-1), CUT
    b = byte(buf, at + 1)
    if b != 0x75:
        if b == 0x22 or b == 0x5C or b == 0x2F or b == 0x62 or b == 0x66 or b == 0x6E or b == 0x72 or b == 0x74:
            return at + 2, OK
        return int64(-1), BAD_ESCAPE
    if at + 6 > end:
        return int64(-1), BAD_ESCAPE
    code = _hex4(buf, at + 2)
    if code < 0:
        return int64(-1), BAD_ESCAPE
    at += 6
    if code < 0xD800 or code > 0xDFFF:
        return at, OK
    if code < 0xDC00 and at + 6 <= end and byte(buf, at) == 0x5C and byte(buf, at + 1) == 0x75:
        low = _hex4(buf, at + 2)
        if 0xDC00 <= low <= 0xDFFF:
            return at + 6, OK
    return at, SURROGATE


@inner
def string(buf: Array, at: int, end: int) -> tuple[int, int]:
    """From the byte after a quote: (the closing quote, PLAIN, ODD or SURROGATE), or (−1 − byte, code)."""
    kind = PLAIN
    # 32 bytes may reach beyond `end`, but never beyond the buffer; `end` is checked when a special byte stops them.
    last = buf.size - 32
    while True:
        while at <= last:
            stops = find_text_stops(buf, at)
            if stops != uint64(0):
                at += trailing_zeros(stops)
                break
            at += 32
        else:
            while at < end:
                b = byte(buf, at)
                if b == 0x22 or b == 0x5C or b < 0x20 or b > 0x7F:
                    break
                at += 1
        if at >= end:
            return -1 - end, CUT
        b = byte(buf, at)  # at < end ≤ buf.size
        if b == 0x22:
            return at, kind
        if b == 0x5C:
            after, what = _escape(buf, at, end)
            if after < 0:
                return -1 - at, what
            if what == SURROGATE:
                kind = SURROGATE
            elif kind == PLAIN:
                kind = ODD
            at = after
        elif b < 0x20:
            return -1 - at, CONTROL
        else:
            while at < end and byte(buf, at) > 0x7F:
                after = skip_sequence(buf, at, end)
                if after < 0:
                    return -1 - at, BAD_UTF8
                at = after


@inner
def _digits(buf: Array, at: int, end: int) -> int:
    while at < end and uint64(byte(buf, at) - 0x30) < uint64(10):
        at += 1
    return at


@inner
def number(buf: Array, at: int, end: int) -> tuple[int, int]:
    """The number at `at`: (next byte, PLAIN or ODD), or (−1 − byte, code)."""
    # At once: up to 15 digits and a point, which end within the value.
    begin = at + int64(byte(buf, at) == 0x2D)
    if begin <= buf.size - 16:
        stops = find_digit_stops(buf, begin) | uint64(0x10000)
        digits = trailing_zeros(stops)
        stop = begin + digits
        if 0 < digits < 16 and stop < end and (digits == 1 or byte(buf, begin) != 0x30):
            kind = PLAIN
            if byte(buf, stop) == 0x2E:
                kind = ODD
                point_end = trailing_zeros(stops & (stops - uint64(1)))
                stop = begin + point_end if digits + 1 < point_end < 16 else end
            if stop < end and byte(buf, stop) | 0x20 != 0x65:
                return stop, kind
    kind = PLAIN
    if byte(buf, at) == 0x2D:
        at += 1
    begin = at
    at = _digits(buf, at, end)
    if at == begin or (byte(buf, begin) == 0x30 and at > begin + 1):
        return -1 - begin, NO_NUMBER
    if at < end and byte(buf, at) == 0x2E:
        kind = ODD
        begin = at + 1
        at = _digits(buf, begin, end)
        if at == begin:
            return -1 - at, NO_NUMBER
    if at < end and byte(buf, at) | 0x20 == 0x65:
        kind = ODD
        begin = at + 1
        if begin < end and (byte(buf, begin) == 0x2B or byte(buf, begin) == 0x2D):
            begin += 1
        at = _digits(buf, begin, end)
        if at == begin:
            return -1 - at, NO_NUMBER
    return at, kind


@inner
def _literal(buf: Array, at: int, end: int) -> int:
    """The byte after `true`, `false` or `null`; −1 when it is none."""
    for i in range(3):
        size = 5 if i == 1 else 4
        if byte(buf, at) == _LITERALS[i, 0] and at + size <= end:
            for k in range(1, size):
                if byte(buf, at + k) != _LITERALS[i, k]:
                    return int64(-1)
            return at + size
    return int64(-1)


@inner
def scalar(buf: Array, at: int, end: int) -> tuple[int, int]:
    """Any value that is no object or array: (next byte, code or kind), or (−1 − byte, code)."""
    b = byte(buf, at)
    if b == 0x22:
        stop, kind = string(buf, at + 1, end)
        if stop < 0:
            return stop, kind
        return stop + 1, kind
    if b == 0x2D or uint64(b - 0x30) < uint64(10):
        return number(buf, at, end)
    stop = _literal(buf, at, end)
    if stop < 0:
        return -1 - at, NO_LITERAL if 0x61 <= b <= 0x7A else NO_VALUE
    return stop, PLAIN


@inner
def skip(buf: Array, at: int, end: int, depth: int, nest: Array) -> tuple[int, int]:
    """Any value, checked and passed over, below `depth` levels: (next byte, OK), or (−1 − byte, code)."""
    ground = depth
    while True:
        # a value begins at `at`
        if at >= end:
            return -1 - end, CUT
        b = byte(buf, at)
        if b == 0x7B or b == 0x5B:
            if depth >= MOST_DEPTH:  # `nest` has MOST_DEPTH bytes
                return -1 - at, TOO_DEEP
            nest[depth] = b
            depth += 1
            at = blank(buf, at + 1, end)
            if at >= end:
                return -1 - end, CUT
            if byte(buf, at) != b + 2:  # in ASCII, a closing bracket or brace is its opening one plus 2
                if b == 0x7B:
                    at, code = _name(buf, at, end)
                    if at < 0:
                        return at, code
                continue
            depth -= 1
            at += 1
        else:
            at, code = scalar(buf, at, end)
            if at < 0:
                return at, code
        # a value ended before `at`
        while True:
            if depth == ground:
                return at, OK
            at = blank(buf, at, end)
            if at >= end:
                return -1 - end, CUT
            b = byte(buf, at)
            opened = nest[depth - 1]
            if b == 0x2C:
                at = blank(buf, at + 1, end)
                if opened == 0x7B:
                    at, code = _name(buf, at, end)
                    if at < 0:
                        return at, code
                break
            if b != opened + 2:
                return -1 - at, NO_COMMA
            depth -= 1
            at += 1


@inner
def _name(buf: Array, at: int, end: int) -> tuple[int, int]:
    """Skip an unwanted name and its colon. Returns (start of the value, OK) or (−1 − byte, code)."""
    if at >= end:
        return -1 - end, CUT
    if byte(buf, at) != 0x22:
        return -1 - at, NO_NAME
    stop, code = string(buf, at + 1, end)
    if stop < 0:
        return stop, code
    return colon(buf, stop + 1, end)


@inner
def colon(buf: Array, at: int, end: int) -> tuple[int, int]:
    """Past a colon and the white space around it: (where the value begins, OK), or (−1 − byte, code)."""
    at = blank(buf, at, end)
    if at >= end:
        return -1 - end, CUT
    if byte(buf, at) != 0x3A:
        return -1 - at, NO_COLON
    return blank(buf, at + 1, end), OK


@inner
def unescape(dst: Array, to: int, buf: Array, at: int, end: int) -> int:
    """A string's text without its escapes, as UTF-8: the next byte of `dst`. `buf[at:end]` was scanned; it never grows.
    The caller has checked that `dst` has room for as many bytes as it is long."""
    while at < end:
        b = byte(buf, at)
        if b != 0x5C:
            dst[to] = b
            to += 1
            at += 1
            continue
        b = byte(buf, at + 1)
        at += 2
        # \n \t \r \b \f; the others stand for themselves: \" \\ \/
        if b != 0x75:
            if b == 0x6E:
                b = 0x0A
            elif b == 0x74:
                b = 0x09
            elif b == 0x72:
                b = 0x0D
            elif b == 0x62:
                b = 0x08
            elif b == 0x66:
                b = 0x0C
            dst[to] = b
            to += 1
            continue
        code = _hex4(buf, at)
        at += 4
        # \uXXXX, as one to three bytes of UTF-8
        if code < 0x80:
            dst[to] = code
            to += 1
        elif code < 0x800:
            dst[to] = 0xC0 | (code >> 6)
            dst[to + 1] = 0x80 | (code & 0x3F)
            to += 2
        elif code < 0xD800 or code > 0xDFFF:
            dst[to] = 0xE0 | (code >> 12)
            dst[to + 1] = 0x80 | ((code >> 6) & 0x3F)
            dst[to + 2] = 0x80 | (code & 0x3F)
            to += 3
        else:
            # A high surrogate: the scan has checked that a low one follows. Four bytes.
            code = 0x10000 + ((code - 0xD800) << 10) + _hex4(buf, at + 2) - 0xDC00
            at += 6
            dst[to] = 0xF0 | (code >> 18)
            dst[to + 1] = 0x80 | ((code >> 12) & 0x3F)
            dst[to + 2] = 0x80 | ((code >> 6) & 0x3F)
            dst[to + 3] = 0x80 | (code & 0x3F)
            to += 4
    return to


@inlined
def has_name(buf: Array, at: int, end: int, t: ScanTables, node: int) -> bool:
    """Returns whether the node's name and a closing quote are at `at`."""
    size = cell(t.nodes, node, NAME_SIZE)
    # Eight bytes at once only where the buffer has them; the mask drops those behind the name.
    if size > end - at or at > buf.size - 8:
        return _same_bytes(buf, at, end, t.names, cell(t.nodes, node, NAME_AT), size, 0)
    if (word(buf, at) ^ uint64(cell(t.nodes, node, NAME_WORD))) & uint64(cell(t.nodes, node, NAME_MASK)) != uint64(0):
        return False
    return size <= 8 or _same_bytes(buf, at, end, t.names, cell(t.nodes, node, NAME_AT), size, 8)


@inner
def _same_bytes(buf: Array, at: int, end: int, names: Array, name_at: int, size: int, done: int) -> bool:
    if size > end - at:
        return False
    for i in range(done, size):  # noqa: SIM110 - compiled
        if byte(buf, at + i) != byte(names, name_at + i):
            return False
    return True


@inner
def find(buf: Array, at: int, stop: int, t: ScanTables, node: int) -> int:
    """The place among the struct's children of the name `buf[at:stop]`, without escapes; −1: none."""
    hashed = uint64(0xCBF29CE484222325)
    for i in range(at, stop):
        hashed = (hashed ^ uint64(byte(buf, i))) * uint64(0x100000001B3)
    begin, mask = cell(t.nodes, node, LOOKUP_AT), cell(t.nodes, node, LOOKUP_MASK)
    probe = int64(hashed ^ (hashed >> uint64(32))) & mask
    while True:
        child = t.lookup[begin + probe]
        if child < 0:
            return int64(-1)
        name = cell(t.nodes, node, CHILD) + child
        size = cell(t.nodes, name, NAME_SIZE) - 1
        if size == stop - at and _same_bytes(buf, at, stop, t.names, cell(t.nodes, name, NAME_AT), size, 0):
            return int64(child)
        probe = (probe + 1) & mask


@inlined
def member(buf: Array, at: int, stop: int, kind: int, t: ScanTables, node: int) -> int:
    """The place of a name that was not guessed, escapes resolved."""
    if kind == PLAIN:
        return find(buf, at, stop, t, node)
    if kind == SURROGATE or stop - at > LONGEST_KEY:
        return int64(-1)
    size = unescape(t.scratch, 0, buf, at, stop)
    return find(t.scratch, 0, size, t, node)


@inner
def _note(state: Array, code: int, node: int, at: int) -> None:
    if state[NOTE] == OK:
        state[NOTE] = code
        state[NOTE_NODE] = node
        state[NOTE_AT] = at


@inlined
def _note_span(t: ScanTables, node: int, span: int, at: int) -> None:
    """Note the span in the node's slot; a second one for the same field is a fault."""
    slot = cell(t.nodes, node, BASE) + item(t.counts, cell(t.nodes, node, LEVEL))
    if item(t.spans, slot) != 0:
        _note(t.state, TWICE, node, at)
    put(t.spans, slot, span)


@inner
def _demand(t: ScanTables, struct: int, at: int) -> None:
    """Note a required field of the struct that did not come."""
    for child in range(cell(t.nodes, struct, CHILD), cell(t.nodes, struct, CHILD) + cell(t.nodes, struct, COUNT)):
        if (
            cell(t.nodes, child, REQUIRED)
            and t.spans[cell(t.nodes, child, BASE) + t.counts[cell(t.nodes, child, LEVEL)]] == 0
        ):
            _note(t.state, IS_MISSING, child, at)


@inlined
def _append_extra(
    t: ScanTables, results: ScanResults, buf: Array, name: int, name_end: int, at: int, stop: int, first: bool
) -> None:
    """Append a member that no field has a name for: `,"name":value`, both as they stand."""
    to = t.state[EXTRA]
    results.extra[to] = 0x7B if first else 0x2C
    copy(results.extra, to + 1, buf, name, name_end - name)
    to += 1 + name_end - name
    results.extra[to] = 0x3A
    copy(results.extra, to + 1, buf, at, stop - at)
    t.state[EXTRA] = to + 1 + stop - at


@inlined
def _record(buf: Array, at: int, end: int, t: ScanTables, results: ScanResults) -> tuple[int, int]:
    """Read one value: (a code of bad JSON, byte), otherwise (OK, −); the first misfit of a type is in NOTE.

    `spans` slots are safe: level 0 has room for MOST_OUT rows, and an element begins only while counts < room.
    """
    nodes, spans, counts, stack, state = t.nodes, t.spans, t.counts, t.stack, t.state
    state[TRAIL] = -1
    state[INSIDE] = 0
    trail = int64(0)
    begin = at
    if end - at >= 3 and byte(buf, at) == 0xEF and byte(buf, at + 1) == 0xBB and byte(buf, at + 2) == 0xBF:
        at += 3
    at = blank(buf, at, end)
    if at >= end:
        return CUT, end - begin
    if byte(buf, at) != 0x7B:
        stop, code = skip(buf, at, end, int64(0), t.nest)
        if stop < 0:
            return code, -1 - stop - begin
        at, stop = stop, at
        at = blank(buf, at, end)
        if at < end:
            return MORE, at - begin
        return NO_OBJECT, stop - begin
    node = int64(0)
    depth = int64(1)
    before = int64(0)  # which member of the struct came last, counted from 1
    fresh = True
    extras = False
    at += 1
    while True:
        # A member or element begins, or the container ends without any.
        at = blank(buf, at, end)
        if at >= end:
            return CUT, end - begin
        shape = cell(nodes, node, SHAPE)
        b = byte(buf, at)
        if fresh and b == (0x5D if shape == LIST else 0x7D):
            closing = True
        else:
            closing = False
            child = int64(-1)
            name = at
            name_end = at
            if shape == LIST:
                child = cell(nodes, node, CHILD)
            else:
                if b != 0x22:
                    return NO_NAME, at - begin
                at += 1
                if shape == STRUCT:
                    guess = t.follow[cell(nodes, node, FOLLOW_AT) + before]
                    if guess >= 0 and has_name(buf, at, end, t, cell(nodes, node, CHILD) + guess):
                        child = cell(nodes, node, CHILD) + guess
                        before = int64(guess) + 1
                        at += cell(nodes, child, NAME_SIZE)
                    else:
                        stop, kind = string(buf, at, end)
                        if stop < 0:
                            return kind, -1 - stop - begin
                        child_index = member(buf, at, stop, kind, t, node)
                        if child_index >= 0:
                            child = cell(nodes, node, CHILD) + child_index
                            if kind == PLAIN:  # a guess goes by the name's own bytes: no JSON if it needs escapes
                                t.follow[cell(nodes, node, FOLLOW_AT) + before] = child_index
                            before = child_index + 1
                        at = stop + 1
                else:
                    stop, kind = string(buf, at, end)
                    if stop < 0:
                        return kind, -1 - stop - begin
                    child = cell(nodes, node, CHILD) + 1
                    if counts[cell(nodes, node, INNER)] >= t.room[cell(nodes, node, INNER)]:
                        state[NEED] = cell(nodes, node, INNER)
                        return _CROWDED, at - begin
                    if kind == SURROGATE:
                        _note(state, SURROGATE, child - 1, at - begin)
                    _note_span(t, child - 1, pack(at, stop, kind & ODD), at - begin)
                    at = stop + 1
                name_end = at
                at, code = colon(buf, at, end)
                if at < 0:
                    return code, -1 - at - begin
            if shape == LIST and counts[cell(nodes, node, INNER)] >= t.room[cell(nodes, node, INNER)]:
                state[NEED] = cell(nodes, node, INNER)
                return _CROWDED, at - begin
            # Its value begins.
            if at >= end:
                return CUT, end - begin
            b = byte(buf, at)
            if child < 0:
                stop, code = skip(buf, at, end, depth, t.nest)
                if stop < 0:
                    return code, -1 - stop - begin
                if TRAIL_FIELDS * (trail + 1) > t.trail.size:
                    trail = int64(-1)
                elif trail >= 0:
                    put(t.trail, TRAIL_FIELDS * trail, -1)
                    put(t.trail, TRAIL_FIELDS * trail + 1, at)
                    put(t.trail, TRAIL_FIELDS * trail + 2, stop)
                    put(t.trail, TRAIL_FIELDS * trail + 3, name if depth == 1 else int64(-1))
                    trail += 1
                if depth == 1:
                    _append_extra(t, results, buf, name, name_end, at, stop, not extras)
                    extras = True
                else:
                    state[INSIDE] = 1
                at = stop
            else:
                want = cell(nodes, child, SHAPE)
                # A list or map varies in length, so its record makes no template.
                if want > STRUCT or TRAIL_FIELDS * (trail + 1) > t.trail.size:
                    trail = int64(-1)
                elif trail >= 0:
                    put(t.trail, TRAIL_FIELDS * trail, child)
                    put(t.trail, TRAIL_FIELDS * trail + 1, at)
                    trail += 1
                if want == TEXT and b == 0x22:
                    stop, kind = string(buf, at + 1, end)
                    if stop < 0:
                        return kind, -1 - stop - begin
                    if kind == SURROGATE:
                        _note(state, SURROGATE, child, at - begin)
                    _note_span(t, child, pack(at + 1, stop, kind & ODD), at - begin)
                    at = stop + 1
                elif want == NUMBER and (uint64(b - 0x30) < uint64(10) or b == 0x2D):
                    stop, kind = number(buf, at, end)
                    if stop < 0:
                        return kind, -1 - stop - begin
                    _note_span(t, child, pack(at, stop, kind), at - begin)
                    at = stop
                elif b == 0x6E:
                    stop = _literal(buf, at, end)
                    if stop < 0:
                        return NO_LITERAL, at - begin
                    if cell(nodes, child, REQUIRED):
                        _note(state, IS_NULL, child, at - begin)
                    _note_span(t, child, pack(at, stop, NULL), at - begin)
                    at = stop
                elif want == TRUTH and (b == 0x74 or b == 0x66):
                    stop = _literal(buf, at, end)
                    if stop < 0:
                        return NO_LITERAL, at - begin
                    _note_span(t, child, pack(at, stop, PLAIN), at - begin)
                    at = stop
                elif (want == LIST and b == 0x5B) or (want >= STRUCT and want != LIST and b == 0x7B):
                    if depth >= MOST_DEPTH:
                        return TOO_DEEP, at - begin
                    first = int64(0) if want == STRUCT else counts[cell(nodes, child, INNER)]
                    _note_span(t, child, pack(first, first, PLAIN), at - begin)
                    # depth < MOST_DEPTH, and `stack` has 2 · (MOST_DEPTH + 1) numbers.
                    stack[2 * depth] = node
                    stack[2 * depth + 1] = before
                    depth += 1
                    node = child
                    before = int64(0)
                    fresh = True
                    at += 1
                    continue
                else:
                    stop, code = skip(buf, at, end, depth, t.nest)
                    if stop < 0:
                        return code, -1 - stop - begin
                    if want == ANYTHING:
                        _note_span(t, child, pack(at, stop, PLAIN), at - begin)
                    else:
                        _note(state, WRONG_TYPE, child, at - begin)
                    at = stop
        # A value ended, and with it perhaps its container, and that container's own, and so on.
        while True:
            if not closing:
                if cell(nodes, node, SHAPE) != STRUCT:
                    counts[cell(nodes, node, INNER)] += 1
                at = blank(buf, at, end)
                if at >= end:
                    return CUT, end - begin
                b = byte(buf, at)
                if b == 0x2C:
                    fresh = False
                    at += 1
                    break
                if b != (0x5D if cell(nodes, node, SHAPE) == LIST else 0x7D):
                    return NO_COMMA, at - begin
            closing = False
            if cell(nodes, node, SHAPE) != STRUCT:
                # The list's span began with its first element's number; now its length is known.
                slot = cell(nodes, node, BASE) + counts[cell(nodes, node, LEVEL)]
                first = get_start(spans[slot])
                spans[slot] = pack(first, counts[cell(nodes, node, INNER)], PLAIN)
            elif cell(nodes, node, DEMANDS):
                _demand(t, node, at - begin)
            at += 1
            depth -= 1
            if depth == 0:
                if extras:
                    results.extra[state[EXTRA]] = 0x7D
                    state[EXTRA] += 1
                    state[EXTRAS] += 1
                at = blank(buf, at, end)
                if at < end:
                    return MORE, at - begin
                state[TRAIL] = trail
                return OK, int64(0)
            node = stack[2 * depth]
            before = stack[2 * depth + 1]


@inlined
def _learn(buf: Array, at: int, end: int, t: ScanTables) -> None:
    """Make a template of the record that `_record` has read, if it can be one: `trail` has its values in order."""
    values, used, depth = t.state[TRAIL], int64(0), int64(1)
    t.state[STEPS] = -1
    if values < 0:
        return
    # A step is the text between two values (names, colons, commas, blanks) and the value behind it, if any.
    for k in range(values + 1):
        node = int64(0)
        stop = end
        if k < values:
            node, stop = item(t.trail, TRAIL_FIELDS * k), item(t.trail, TRAIL_FIELDS * k + 1)
        size = stop - at
        # 32 bytes are compared at once, so the template keeps as many behind its last text.
        if size > TEMPLATE_BYTES - 32 - used:
            return
        for i in range(size):
            t.template[used + i] = byte(buf, at + i)
        step = t.steps[k]
        step[STEP_NODE] = node
        step[STEP_SHAPE] = UNKNOWN if node < 0 else cell(t.nodes, node, SHAPE)
        step[STEP_REQUIRED] = 0 if node < 0 else cell(t.nodes, node, REQUIRED)
        step[STEP_SIZE], step[STEP_AT], step[STEP_DEPTH] = size, used, depth
        step[STEP_LENGTH], step[STEP_ENDS], step[STEP_MISSES] = 0, 0, 0
        step[STEP_MASK] = (int64(1) << (size if size <= 32 else ((size - 1) & 31) + 1)) - 1
        used += size
        at = stop
        if node < 0:
            at, name = item(t.trail, TRAIL_FIELDS * k + 2), item(t.trail, TRAIL_FIELDS * k + 3)
            step[STEP_NAME] = step[STEP_NAME_SIZE] = 0
            if name >= 0:
                name_end, _ = string(buf, name + 1, stop)
                step[STEP_NAME], step[STEP_NAME_SIZE] = stop - name, name_end + 1 - name
        elif k < values:
            # The next text begins behind the value; behind a struct's brace, since its members are steps of their own.
            span = t.spans[cell(t.nodes, node, BASE) + t.counts[0]]
            if step[STEP_SHAPE] == STRUCT:
                if get_kind(span) == NULL:
                    return
                depth += 1
                at += 1
            else:
                at = get_start(span) + get_size(span)
                if step[STEP_SHAPE] == TEXT and byte(buf, stop) == 0x22:
                    at += 1
    t.state[STEPS] = values


@inner
def _match_long(buf: Array, at: int, end: int, t: ScanTables, k: int) -> bool:
    """Returns whether the template's bytes before its value `k`, more than 32, are at `at`."""
    size, same = cell(t.steps, k, STEP_SIZE), cell(t.steps, k, STEP_AT)
    if size > end - at:
        return False
    last = (size - 1) & ~31
    for i in range(0, last, 32):
        if find_differences(buf, at + i, t.template, same + i) != uint64(0):
            return False
    different = find_differences(buf, at + last, t.template, same + last) & uint64(cell(t.steps, k, STEP_MASK))
    return bool(different == uint64(0))


# Where most values are read, a call takes as long as they do.
_number = inlined(number)


@inlined
def _value_like_before(buf: Array, at: int, end: int, t: ScanTables, k: int) -> tuple[int, int]:
    """A value where the template has its value `k`: (the byte after it, its span), or −1 when it is unusual."""
    want = cell(t.steps, k, STEP_SHAPE)
    b = byte(buf, at)
    if want == STRUCT:
        return (at + 1 if b == 0x7B else int64(-1)), pack(0, 0, PLAIN)
    if b == 0x6E and not cell(t.steps, k, STEP_REQUIRED):
        return _literal(buf, at, end), pack(at, at + 4, NULL)
    if want == TRUTH and (b == 0x74 or b == 0x66):
        stop = _literal(buf, at, end)
        return stop, pack(at, stop, PLAIN)
    if want == ANYTHING and b != 0x6E:
        stop, _ = skip(buf, at, end, cell(t.steps, k, STEP_DEPTH), t.nest)
        if stop < 0:
            return int64(-1), int64(0)
        return stop, pack(at, stop, PLAIN)
    return int64(-1), int64(0)


@inner
def _skip_unknown(buf: Array, at: int, end: int, t: ScanTables, results: ScanResults, k: int, before: int) -> int:
    """The byte after an unknown member's value, which is the template's value `k`; −1 when it is no JSON.

    The member is appended to `extra` if it is the record's own, where `before` others precede it.
    """
    stop, _ = skip(buf, at, end, cell(t.steps, k, STEP_DEPTH), t.nest)
    name = at - cell(t.steps, k, STEP_NAME)
    if stop >= 0 and name < at:
        _append_extra(t, results, buf, name, name + cell(t.steps, k, STEP_NAME_SIZE), at, stop, before == 0)
    return max(stop, int64(-1))


@inlined
def _expect(t: ScanTables, k: int, size: int) -> None:
    """Expect texts of this size for value `k` of the template, unless the size changed often in this block."""
    misses = cell(t.steps, k, STEP_MISSES)
    if misses < MOST_MISSES:
        step, is_expected = t.steps[k], size < 32 and misses + 1 < MOST_MISSES
        step[STEP_MISSES] = misses + 1
        step[STEP_LENGTH] = size if is_expected else 0
        step[STEP_ENDS] = (int64(2) << size) - 1 if is_expected else 0


@inlined
def _fits_template(buf: Array, at: int, end: int, t: ScanTables, results: ScanResults) -> int:
    """Returns FITS if the record matches the template, FITS_INSIDE if fields of it have unknown members, else 0. Its
    spans and unknown members are noted if it fits; no spans otherwise.

    Most reads need no check of their own: a step begins before `end`, compares up to 32 bytes and reads up to 34 more,
    and the buffer has BEYOND bytes behind `end`.
    """
    if end > buf.size - BEYOND:
        return int64(0)
    values, out = t.state[STEPS], t.counts[0]
    k, unknown, fit = int64(0), int64(0), FITS
    while at < end:
        size = cell(t.steps, k, STEP_SIZE)
        # A branch, not a choice between two values of `at`: the processor then reads on while it compares.
        if size <= 32:
            if find_differences(buf, at, t.template, cell(t.steps, k, STEP_AT)) & uint64(cell(t.steps, k, STEP_MASK)):
                break
        elif not _match_long(buf, at, end, t, k):
            break
        at += size
        if k == values:
            if at == end:
                if unknown:
                    results.extra[t.state[EXTRA]] = 0x7D
                    t.state[EXTRA] += 1
                    t.state[EXTRAS] += 1
                return fit
            break
        want = cell(t.steps, k, STEP_SHAPE)
        b = byte(buf, at)
        kind = PLAIN
        if want == TEXT and b == 0x22:
            at += 1
            stops = find_text_stops(buf, at)
            size = cell(t.steps, k, STEP_LENGTH)
            if (
                stops & uint64(cell(t.steps, k, STEP_ENDS)) == uint64(1) << uint64(size)
                and byte(buf, at + size) == 0x22
            ):
                span = pack(at, at + size, PLAIN)
                # Its place depends on no byte of the text, so that the processor need not wait for them.
                at = keep_branch(at + size + 1)
            else:
                stop = at + trailing_zeros(stops | uint64(1 << 32))
                if byte(buf, stop) != 0x22:
                    stop, kind = string(buf, at, end)
                    if stop < 0 or kind == SURROGATE:
                        break
                _expect(t, k, stop - at)
                span = pack(at, stop, kind & ODD)
                at = stop + 1
        elif want == NUMBER and (uint64(b - 0x30) < uint64(10) or b == 0x2D):
            stop, kind = _number(buf, at, end)
            if stop < 0:
                break
            span = pack(at, stop, kind)
            at = stop
        elif want == UNKNOWN:
            at = _skip_unknown(buf, at, end, t, results, k, unknown)
            if at < 0:
                break
            if cell(t.steps, k, STEP_NAME):
                unknown += 1
            else:
                fit = FITS_INSIDE
            k += 1
            continue
        else:
            at, span = _value_like_before(buf, at, end, t, k)
            if at < 0:
                break
        put(t.spans, cell(t.nodes, cell(t.steps, k, STEP_NODE), BASE) + out, span)
        k += 1
    for done in range(k):  # `_record` reads it next, and takes a span that is there for a second value
        if cell(t.steps, done, STEP_SHAPE) != UNKNOWN:
            put(t.spans, cell(t.nodes, cell(t.steps, done, STEP_NODE), BASE) + out, 0)
    return int64(0)


@inner
def _wipe(t: ScanTables) -> None:
    """Empty the slots that the record at hand took, and take its elements back."""
    out = t.state[OUT]
    for node in range(t.nodes.shape[0]):
        level, base = cell(t.nodes, node, LEVEL), cell(t.nodes, node, BASE)
        if level == 0:
            t.spans[base + out] = 0
        else:  # an element that was begun is not counted yet: one more slot
            for slot in range(t.saved[level], min(t.counts[level] + 1, t.room[level])):
                t.spans[base + slot] = 0
    for level in range(t.counts.size):
        t.counts[level] = t.saved[level]


@compiled(BYTES, I32, I32, BYTES, TABLES, _RESULTS, results=1)
def scan(values: Array, starts: Array, stops: Array, valid: Array, t: ScanTables, results: ScanResults) -> int:
    """The records from `state[ROW]` on → a block of spans.

    `starts`, `stops`: where the values lie, in any order; `valid`: their bitmap (empty: all are valid), which begins at
    bit `state[BITMAP_AT]`. Returns DONE after the last record; FULL when the block is; GROW_EXTRA when `extra`
    wants NEED bytes more; GROW_LEVEL when one record alone wants more elements of level NEED. Call again for the rest:
    each call begins a block, with the spans of the last one emptied.
    """
    state = t.state
    # Only used slots are emptied: clearing all of `spans` would cost more than scanning a small chunk.
    for node in range(t.nodes.shape[0]):
        base = cell(t.nodes, node, BASE)
        used = state[OUT] if cell(t.nodes, node, LEVEL) == 0 else item(t.counts, cell(t.nodes, node, LEVEL))
        for slot in range(base, base + used):
            put(t.spans, slot, 0)
    for k in range(state[STEPS]):
        t.steps[k, STEP_MISSES] = 0
    state[OUT] = state[BAD] = state[EXTRAS] = state[DOUBTS] = state[INSIDES] = 0
    for level in range(t.counts.size):
        t.counts[level] = 0
    while state[ROW] < state[LAST]:
        row = state[ROW]
        if state[OUT] >= state[MOST_OUT] or state[BAD] >= state[MOST_OUT]:
            return FULL
        at, end = int64(starts[row]), int64(stops[row])
        if row + AHEAD < state[LAST]:  # chosen records do not follow one another: the processor cannot foresee them
            soon = int64(starts[row + AHEAD])
            prefetch(values, soon)
            prefetch(values, soon + 64)
            prefetch(values, soon + 128)
            prefetch(values, soon + 192)
        # From here on 0 ≤ at ≤ end ≤ values.size: every `byte` below is behind a check against `end`.
        if at < 0 or at > end or end > values.size:
            raise IndexError("values outside of their buffer")
        code = int64(OK)
        where = int64(0)
        if valid.size == 0 or bit_of(valid, state[BITMAP_AT] + row):
            extra = state[EXTRA]
            extras = state[EXTRAS]
            # The unknown members of a record are no longer than the record, and `copy` may write 16 bytes more: with
            # this room, no check is needed while they are copied.
            if end - at + 32 > results.extra.size - extra:
                state[NEED] = end - at + 32
                return GROW_EXTRA
            for level in range(t.counts.size):
                t.saved[level] = t.counts[level]
            t.counts[0] = state[OUT]
            state[NOTE] = OK
            trying = state[DOUBTS] <= MOST_DOUBT
            fits = int64(0)
            if trying and state[STEPS] >= 0:
                fits = _fits_template(values, at, end, t, results)
            if fits:
                state[INSIDE] = fits - FITS
                state[UNFIT] = 0
                state[DOUBTS] = max(state[DOUBTS] - 1, 0)
            else:
                state[EXTRA] = extra  # the template may have begun with unknown members
                code, where = _record(values, at, end, t, results)
            if code == OK and state[NOTE] == OK and state[INSIDE]:
                results.inside[state[INSIDES]] = row
                state[INSIDES] += 1
            # The record did not fit the room of a list: the block ends before it, and it begins the next one.
            if code == _CROWDED:
                _wipe(t)
                state[EXTRA] = extra
                state[EXTRAS] = extras
                if state[OUT] > 0:
                    return FULL
                return GROW_LEVEL
            node = int64(-1)
            if code == OK and state[NOTE] != OK:
                code, node, where = state[NOTE], state[NOTE_NODE], state[NOTE_AT]
            if code != OK:
                _wipe(t)
                state[EXTRA] = extra
                state[EXTRAS] = extras
                bad = state[BAD]
                results.bad_row[bad] = row
                results.bad_code[bad] = code
                results.bad_node[bad] = node
                results.bad_at[bad] = where
                state[BAD] = bad + 1
            elif trying and not fits:
                # One that is unlike the others does not take the template's place; two in a row do.
                if state[UNFIT] or state[STEPS] < 0:
                    _learn(values, at, end, t)
                state[UNFIT] = 1
                state[DOUBTS] += DOUBT
        if code == OK:
            out = state[OUT]
            results.source[out] = row
            results.extra_ends[out] = state[EXTRA]
            state[OUT] = out + 1
        state[ROW] = row + 1
    return DONE
