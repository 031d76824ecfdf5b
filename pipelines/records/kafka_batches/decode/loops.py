"""Decode record bytes into Arrow buffers, in compiled loops that check every length against the bytes there are.

    scan          response ─► one row of `table` per frame: kind, offsets, attributes, where its records are
    control_type  control batch ─► 0 abort, 1 commit
    decode        frames ─► rows of preallocated buffers

    decode, frame at state[FRAME] ─┬─ MODE PASS ──► all its records are hidden ──────► next frame
                                   └─ _batch (v2) or _messages (magic 0, 1), from state[AT]
                                        ├─ all records read, or END reached ─────────► next frame
                                        ├─ chunk full ────────► return FULL  ┐ call again: it resumes
                                        ├─ buffers short ─────► return GROW  ┘ at the same record
                                        ├─ record too large ──► _go_back; return OVERSIZED
                                        └─ does not parse ────► _go_back: rows of the frame removed; return error
    Next frame: hidden records count as control or aborted, POSITION = last offset + 1 at least, AT = −1.

Promise, for any bytes: nothing is read or written outside of the arrays, and a code and a byte name a record that does
not parse. All entry points release the GIL and create no Python object for a record.

Formats: record batches v2 (KIP-98, headers of KIP-82, delete horizon of KIP-534) and message sets of magic 0 and 1
(times of KIP-32, relative offsets of KIP-31).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sluice.pipelines.records.compiled.jit import (
    BYTES,
    I32,
    I64,
    INTEGER,
    TABLE,
    U8,
    Array,
    clear,
    compiled,
    copy,
    inner,
    int32,
    int64,
    uint64,
)
from sluice.pipelines.records.compiled.loop import Arrays

# --- the table of frames: one row for each batch, wrapper message or run of plain messages ------------------

MODE = 0  # PASS over the records, EMIT them, HIDE them (count only), or LOOK (not decided)
ATTRIBUTES = 1
FROM = 2  # byte range of the records in their source
TO = 3
SOURCE = 4  # RAW (the response) or SCRATCH (decompressed)
CHECKED = 5  # byte range under the checksum, the sum, and BATCH, WRAPPER or MESSAGES
STOP = 6
CRC = 7
KIND = 8
BASE = 9  # first and last offset; a wrapper does not tell its first: −1
LAST = 10
BASE_TIME = 11
MAX_TIME = 12
PRODUCER = 13
COUNT = 14  # records that the header claims
MAGIC = 15
FIELDS = 16

PASS, EMIT, HIDE, LOOK = 0, 1, 2, 3
RAW, SCRATCH = 0, 1
MESSAGES, WRAPPER, BATCH = 0, 1, 2
CODEC_BITS, LOG_APPEND, TRANSACTIONAL, CONTROL = 0x07, 0x08, 0x10, 0x20
LZ4, ZSTD = 3, 4
ABORT, COMMIT = 0, 1

# --- `state`, kept between calls of `decode` ------------------------------------------------------------------

ROWS = 0  # rows in the buffers, and bytes in each data buffer
KEY_BYTES = 1
VALUE_BYTES = 2
HEADERS = 3
HEADER_KEY_BYTES = 4
HEADER_VALUE_BYTES = 5
NULL_KEYS = 6
NULL_VALUES = 7
NULL_HEADERS = 8
NULL_HEADER_VALUES = 9
POSITION = 10  # next offset to read
END = 11  # read offsets below this one
MAX_ROWS = 12  # when a chunk is full
MAX_BYTES = 13
CHECK_CRC = 14
FRAME = 15  # row of the table at work
AT = 16  # next byte of its records; −1: not begun
INDEX = 17  # records of it that are done
PREVIOUS = 18  # offset of the last of these
FIRST_ROW = 19  # where its rows begin in the buffers, and the position then: for going back
FIRST_POSITION = 20
HIDDEN = 21  # records of it that are in range and not emitted
ALL_ROWS = 22  # totals since the decoder began, rows in the buffers left out
ALL_CONTROL = 23
ALL_ABORTED = 24
NEED_ROWS = 25  # capacities that the next record asks for
NEED_KEY_BYTES = 26
NEED_VALUE_BYTES = 27
NEED_HEADERS = 28
NEED_HEADER_KEY_BYTES = 29
NEED_HEADER_VALUE_BYTES = 30
ERROR_AT = 31  # byte, counted from `FROM`
MOST_RECORD = 32  # bytes that one record may take
SLOTS = 33

CHUNK = slice(ROWS, NULL_HEADER_VALUES + 1)
SIZES = slice(KEY_BYTES, HEADER_VALUE_BYTES + 1)
NEEDS = slice(NEED_ROWS, NEED_HEADER_VALUE_BYTES + 1)

# --- how a call ended; above FULL: an error -------------------------------------------------------------------

DONE, GROW, FULL = 0, 1, 2
BAD_SIZE, BAD_MAGIC, BAD_OFFSETS, OUT_OF_ORDER = 10, 11, 12, 13
BAD_VARINT, BAD_RECORD_LENGTH, BAD_OFFSET, BAD_KEY, BAD_VALUE = 20, 21, 22, 23, 24
BAD_HEADER_COUNT, BAD_HEADER_KEY, BAD_HEADER_VALUE = 25, 26, 27
BAD_RECORD_END, BAD_BATCH_END, BAD_COUNT = 28, 29, 30
BAD_MESSAGE, BAD_MESSAGE_CRC, NESTED, NO_MESSAGES = 40, 41, 42, 43
OVERSIZED = 50

LOG_OVERHEAD = 12
BATCH_OVERHEAD = 61
MESSAGE_OVERHEAD = (26, 34)
LEAST_RECORD = 7
"""Bytes of the smallest record of format v2, its length included."""
HEADER_BYTES = 8
"""Bytes of a header in a chunk, besides its key and value."""
MOST_HEADER_BYTES = 16
"""The same as a share of `MOST_RECORD`: copies of headers take more than those of a value."""
MOST_OFFSET = (1 << 63) - 1


class Frame(NamedTuple):
    """A row of the table, in Python."""

    mode: int
    attributes: int
    first_byte: int
    stop_byte: int
    source: int
    checked: int
    stop: int
    crc: int
    kind: int
    base: int
    last: int
    base_time: int
    max_time: int
    producer: int
    records: int
    magic: int

    @property
    def codec(self) -> int:
        return self.attributes & CODEC_BITS

    @property
    def first(self) -> int:
        """Its first offset; the last of a wrapper, which tells no other."""
        return self.last if self.kind == WRAPPER else self.base


class ChunkBuffers(NamedTuple):
    """The Arrow buffers of one chunk. Bitmaps begin as all ones (valid); offsets arrays have one item more."""

    keys: Array
    key_offsets: Array
    key_valid: Array
    values: Array
    value_offsets: Array
    value_valid: Array
    offsets: Array
    timestamps: Array
    timestamp_types: Array
    header_lists: Array
    header_lists_valid: Array
    header_keys: Array
    header_key_offsets: Array
    header_values: Array
    header_value_offsets: Array
    header_values_valid: Array


_COLUMNS = Arrays((U8, I32, U8, U8, I32, U8, I64, I64, I32, I32, U8, U8, I32, U8, I32, U8), ChunkBuffers)


def _crc32_tables() -> Array:
    """Slicing-by-8 tables of CRC-32 (zlib's), which magic 0 and 1 use for each message."""
    tables = np.zeros((8, 256), np.uint32)
    for i in range(256):
        c = i
        for _ in range(8):
            c = (c >> 1) ^ (0xEDB88320 if c & 1 else 0)
        tables[0, i] = c
    for i in range(256):
        c = int(tables[0, i])
        for t in range(1, 8):
            c = int(tables[0, c & 0xFF]) ^ (c >> 8)
            tables[t, i] = c
    return tables


_CRC32 = _crc32_tables()


@inner
def _int32(buf: Array, at: int) -> int:
    v = (int64(buf[at]) << 24) | (int64(buf[at + 1]) << 16) | (int64(buf[at + 2]) << 8) | int64(buf[at + 3])
    return int64(int32(v))


@inner
def _uint32(buf: Array, at: int) -> int:
    return _int32(buf, at) & 0xFFFFFFFF


@inner
def _int64(buf: Array, at: int) -> int:
    return (_int32(buf, at) << 32) | _uint32(buf, at + 4)


@inner
def _varint(buf: Array, at: int, stop: int, max_bytes: int) -> tuple[int, int]:
    """A zigzag varint of at most `max_bytes` + 1 bytes that ends before `stop`: (value, next byte), −1 when bad."""
    if at < stop and buf[at] < 0x80:
        b = int64(buf[at])
        return (b >> 1) ^ -(b & 1), at + 1
    value = uint64(0)
    for i in range(max_bytes + 1):
        if at >= stop:
            return int64(0), int64(-1)
        bits = buf[at]
        at += 1
        value |= uint64(bits & 0x7F) << uint64(7 * i)
        if bits < 0x80:
            if i == 9 and bits > 1:  # the tenth byte has room for one bit
                return int64(0), int64(-1)
            return int64(value >> uint64(1)) ^ -int64(value & uint64(1)), at
    return int64(0), int64(-1)


@inner
def _varint32(buf: Array, at: int, stop: int) -> tuple[int, int]:
    value, at = _varint(buf, at, stop, 4)
    if value < -0x80000000 or value > 0x7FFFFFFF:
        return int64(0), int64(-1)
    return value, at


@inner
def _frame_error(size: int, magic: int) -> int:
    if magic < 0 or magic > 2:
        return BAD_MAGIC
    minimum = BATCH_OVERHEAD
    if magic < 2:
        minimum = MESSAGE_OVERHEAD[magic]
    return BAD_SIZE if size < minimum else DONE


@inner
def _batch_header(raw: Array, at: int, row: Array) -> None:
    """The fields of a batch of format v2; EMIT when nothing about it is special."""
    attributes = (int64(raw[at + 21]) << 8) | int64(raw[at + 22])
    count = _int32(raw, at + 57)
    row[KIND] = BATCH
    row[CHECKED] = at + 21
    row[CRC] = _uint32(raw, at + 17)
    row[ATTRIBUTES] = attributes
    row[BASE_TIME] = _int64(raw, at + 27)
    row[MAX_TIME] = _int64(raw, at + 35)
    row[PRODUCER] = _int64(raw, at + 43)
    row[COUNT] = count
    row[FROM] = at + BATCH_OVERHEAD
    plain = attributes & ~(CODEC_BITS | LOG_APPEND) == 0 and attributes & CODEC_BITS <= ZSTD
    row[MODE] = EMIT if plain and 0 < count <= row[LAST] - row[BASE] + 1 else LOOK


@inner
def _message_header(raw: Array, at: int, row: Array) -> bool:
    """Returns the fields of a message of magic 0 or 1; for a wrapper, the byte range inside. False: it is cut."""
    attributes = int64(raw[at + 17])
    row[CHECKED] = at + 16
    row[CRC] = _uint32(raw, at + 12)
    row[ATTRIBUTES] = attributes
    row[BASE_TIME] = row[MAX_TIME] = _int64(raw, at + 18) if row[MAGIC] == 1 else -1
    row[PRODUCER] = -1
    row[COUNT] = 0
    row[MODE] = EMIT
    if attributes & CODEC_BITS == 0:
        row[KIND] = MESSAGES
        row[FROM] = at
        return True
    row[KIND] = WRAPPER
    row[BASE] = -1
    if attributes & CODEC_BITS > LZ4:
        row[MODE] = LOOK
    # MESSAGE_OVERHEAD has room for both sizes, so the key's is within the message; the value's is checked.
    key = at + (18 if row[MAGIC] == 0 else 26)
    value = key + 4 + max(_int32(raw, key), 0)
    if value + 4 > row[STOP]:
        return False
    row[FROM] = value + 4
    row[TO] = value + 4 + _int32(raw, value)
    return bool(row[FROM] <= row[TO] <= row[STOP])


@compiled(BYTES, TABLE, results=3)
def scan(raw: Array, table: Array) -> tuple[int, int, int]:
    """Write the headers of the complete frames of `raw` into `table`.

    Returns (rows, next byte, code): DONE (the end, or a truncated frame at `next byte`) or an error that names the
    frame there; FULL when the table is too short. OUT_OF_ORDER also takes back the frame before, since nothing tells
    which of the two is wrong (the base offset is not under the checksum). Plain messages in a row become one frame
    of kind MESSAGES.
    """
    rows, at, after = 0, 0, -1
    while raw.size - at >= 17:  # up to the magic; each format's smallest size is checked before its header is read
        size = LOG_OVERHEAD + _int32(raw, at + 8)
        magic = int64(np.int8(raw[at + 16]))
        # The smallest frame of any format comes first, so that a damaged size is not taken for truncation.
        if size < MESSAGE_OVERHEAD[0]:
            return rows, at, BAD_SIZE
        error = _frame_error(size, magic)
        if error != DONE:
            return rows, at, error
        if size > raw.size - at:
            break
        offset = _int64(raw, at)
        last = offset
        if magic == 2:
            last = offset + _int32(raw, at + 23)
        if offset < 0 or last < offset or last >= MOST_OFFSET:
            return rows, at, BAD_OFFSETS
        if offset <= after:
            return rows - 1, at, OUT_OF_ORDER
        after = last
        if magic < 2 and raw[at + 17] & CODEC_BITS == 0 and rows > 0:
            row = table[rows - 1]
            if row[KIND] == MESSAGES and row[MAGIC] == magic:
                row[LAST] = last
                row[STOP] = row[TO] = at + size
                at += size
                continue
        if rows >= table.shape[0]:
            return rows, at, FULL
        row = table[rows]
        row[STOP] = row[TO] = at + size
        row[BASE], row[LAST] = offset, last
        row[MAGIC] = magic
        row[SOURCE] = RAW
        if magic == 2:
            _batch_header(raw, at, row)
        elif not _message_header(raw, at, row):
            return rows, at, BAD_MESSAGE
        rows += 1
        at += size
    return rows, at, DONE


@compiled(BYTES, INTEGER, INTEGER, results=1)
def control_type(buf: Array, at: int, stop: int) -> int:
    """Type of the first record of a control batch (0 abort, 1 commit); −1 when it does not parse."""
    length, at = _varint32(buf, at, stop)
    if at < 0 or length < 0 or length > stop - at:
        return -1
    stop = at + length
    _, at = _varint(buf, at + 1, stop, 9)
    if at < 0:
        return -1
    _, at = _varint32(buf, at, stop)
    if at < 0:
        return -1
    size, at = _varint32(buf, at, stop)
    if at < 0 or size < 4 or size > stop - at or buf[at] >= 0x80:
        return -1
    return (int64(buf[at + 2]) << 8) | int64(buf[at + 3])


@inner
def _room(
    columns: ChunkBuffers,
    state: Array,
    key_size: int,
    value_size: int,
    headers: int,
    header_key_bytes: int,
    header_value_bytes: int,
) -> int:
    """DONE when the record fits, FULL when it belongs to the next chunk, GROW (needs noted) when buffers are short.

    OVERSIZED when it fits into no chunk.
    """
    record_bytes = max(key_size, 0) + max(value_size, 0) + header_key_bytes + header_value_bytes
    if record_bytes + headers * MOST_HEADER_BYTES > state[MOST_RECORD]:
        return OVERSIZED
    rows = state[ROWS]
    key_bytes = state[KEY_BYTES] + max(key_size, 0)
    value_bytes = state[VALUE_BYTES] + max(value_size, 0)
    header_key_bytes += state[HEADER_KEY_BYTES]
    header_value_bytes += state[HEADER_VALUE_BYTES]
    headers += state[HEADERS]
    if rows > 0:
        if rows >= state[MAX_ROWS]:
            return FULL
        total = key_bytes + value_bytes + header_key_bytes + header_value_bytes + headers * HEADER_BYTES
        if total > state[MAX_BYTES]:
            return FULL
    if (
        rows < columns.offsets.size
        and key_bytes <= columns.keys.size
        and value_bytes <= columns.values.size
        and headers < columns.header_key_offsets.size
        and header_key_bytes <= columns.header_keys.size
        and header_value_bytes <= columns.header_values.size
    ):
        return DONE
    state[NEED_ROWS] = rows + 1
    state[NEED_KEY_BYTES] = key_bytes
    state[NEED_VALUE_BYTES] = value_bytes
    state[NEED_HEADERS] = headers
    state[NEED_HEADER_KEY_BYTES] = header_key_bytes
    state[NEED_HEADER_VALUE_BYTES] = header_value_bytes
    return GROW


@inner
def _append(
    columns: ChunkBuffers,
    state: Array,
    buf: Array,
    offset: int,
    time: int,
    time_type: int,
    key_at: int,
    key_size: int,
    value_at: int,
    value_size: int,
) -> None:
    """Write a row for which there is room, without its headers (null until `_append_headers`)."""
    row = state[ROWS]
    key_end = int64(columns.key_offsets[row])
    if key_size < 0:
        clear(columns.key_valid, row)
        state[NULL_KEYS] += 1
    else:
        copy(columns.keys, key_end, buf, key_at, key_size)
        key_end += key_size
    columns.key_offsets[row + 1] = key_end
    state[KEY_BYTES] = key_end
    value_end = int64(columns.value_offsets[row])
    if value_size < 0:
        clear(columns.value_valid, row)
        state[NULL_VALUES] += 1
    else:
        copy(columns.values, value_end, buf, value_at, value_size)
        value_end += value_size
    columns.value_offsets[row + 1] = value_end
    state[VALUE_BYTES] = value_end
    columns.offsets[row] = offset
    columns.timestamps[row] = time
    columns.timestamp_types[row] = time_type
    columns.header_lists[row + 1] = state[HEADERS]
    state[ROWS] = row + 1


@inner
def _append_headers(columns: ChunkBuffers, state: Array, buf: Array, at: int, stop: int, count: int) -> None:
    """Give the last row its `count` headers, which `_measure` has checked."""
    n = state[HEADERS]
    key_end = state[HEADER_KEY_BYTES]
    value_end = state[HEADER_VALUE_BYTES]
    for _ in range(count):
        size, at = _varint32(buf, at, stop)
        copy(columns.header_keys, key_end, buf, at, size)
        at += size
        key_end += size
        size, at = _varint32(buf, at, stop)
        if size < 0:
            clear(columns.header_values_valid, n)
            state[NULL_HEADER_VALUES] += 1
        else:
            copy(columns.header_values, value_end, buf, at, size)
            at += size
            value_end += size
        n += 1
        columns.header_key_offsets[n] = key_end
        columns.header_value_offsets[n] = value_end
    state[HEADERS] = n
    state[HEADER_KEY_BYTES] = key_end
    state[HEADER_VALUE_BYTES] = value_end
    columns.header_lists[state[ROWS]] = n


@inner
def _measure(buf: Array, at: int, stop: int, count: int) -> tuple[int, int, int, int]:
    """Check `count` headers: (next byte, bytes of keys, bytes of values, code); when bad, next byte is where."""
    keys = int64(0)
    values = int64(0)
    for _ in range(count):
        size, after = _varint32(buf, at, stop)
        if after < 0:
            return at, keys, values, BAD_VARINT
        if size < 0 or size > stop - after:
            return at, keys, values, BAD_HEADER_KEY
        keys += size
        at = after + size
        size, after = _varint32(buf, at, stop)
        if after < 0:
            return at, keys, values, BAD_VARINT
        if size > stop - after:
            return at, keys, values, BAD_HEADER_VALUE
        values += max(size, 0)
        at = after + max(size, 0)
    return at, keys, values, DONE


@inner
def _record_error(state: Array, begin: int, at: int, code: int) -> int:
    state[ERROR_AT] = at - begin
    return code


@inner
def _batch(buf: Array, row: Array, columns: ChunkBuffers, state: Array) -> int:
    """Records of one batch of format v2 (KIP-98), from state[AT] on.

    begin ≤ at ≤ stop ≤ end ≤ buf.size: every size is compared with the rest of its record before it is used.
    """
    begin, end = row[FROM], row[TO]
    base, last, count, base_time = row[BASE], row[LAST], row[COUNT], row[BASE_TIME]
    emit = row[MODE] == EMIT
    append_time = row[ATTRIBUTES] & LOG_APPEND != 0
    time_type = 1 if append_time else 0
    # Each record takes some bytes and an offset of its own: a wild count ends here, not in a long loop.
    if count < 0 or count > last - base + 1 or count > (end - begin) // LEAST_RECORD:
        return _record_error(state, begin, begin, BAD_COUNT)
    at = state[AT]
    while state[INDEX] < count:
        length, p = _varint32(buf, at, end)
        if p < 0:
            return _record_error(state, begin, at, BAD_VARINT)
        if length < LEAST_RECORD - 1 or length > end - p:
            return _record_error(state, begin, at, BAD_RECORD_LENGTH)
        stop = p + length
        p += 1  # the record's attributes mean nothing yet
        delta, q = _varint(buf, p, stop, 9)
        if q < 0:
            return _record_error(state, begin, p, BAD_VARINT)
        time = row[MAX_TIME] if append_time else base_time + delta
        delta, p = _varint32(buf, q, stop)
        if p < 0:
            return _record_error(state, begin, q, BAD_VARINT)
        # Offsets ascend within a batch, with gaps where compaction took records.
        offset = base + delta
        if delta < 0 or offset > last or offset <= state[PREVIOUS]:
            return _record_error(state, begin, q, BAD_OFFSET)
        key_size, key_at = _varint32(buf, p, stop)
        if key_at < 0:
            return _record_error(state, begin, p, BAD_VARINT)
        if key_size > stop - key_at:
            return _record_error(state, begin, p, BAD_KEY)
        p = key_at + max(key_size, 0)
        value_size, value_at = _varint32(buf, p, stop)
        if value_at < 0:
            return _record_error(state, begin, p, BAD_VARINT)
        if value_size > stop - value_at:
            return _record_error(state, begin, p, BAD_VALUE)
        p = value_at + max(value_size, 0)
        headers, headers_at = _varint32(buf, p, stop)
        if headers_at < 0:
            return _record_error(state, begin, p, BAD_VARINT)
        if headers < 0 or headers > (stop - headers_at) // 2:
            return _record_error(state, begin, p, BAD_HEADER_COUNT)
        p = headers_at
        header_key_bytes = header_value_bytes = int64(0)
        if headers > 0:
            p, header_key_bytes, header_value_bytes, code = _measure(buf, headers_at, stop, headers)
            if code != DONE:
                return _record_error(state, begin, p, code)
        if p != stop:
            return _record_error(state, begin, p, BAD_RECORD_END)
        # Records below the position were emitted before, or are not asked for; offsets ascend, so END ends the frame.
        if offset >= state[POSITION]:
            if offset >= state[END]:
                return DONE
            if emit:
                status = _room(columns, state, key_size, value_size, headers, header_key_bytes, header_value_bytes)
                if status != DONE:  # the record is parsed again: INDEX and PREVIOUS are those before it
                    state[AT] = at
                    return status
                _append(columns, state, buf, offset, time, time_type, key_at, key_size, value_at, value_size)
                if headers > 0:
                    _append_headers(columns, state, buf, headers_at, stop, headers)
                else:
                    clear(columns.header_lists_valid, state[ROWS] - 1)
                    state[NULL_HEADERS] += 1
            else:
                state[HIDDEN] += 1
            state[POSITION] = offset + 1
        state[PREVIOUS] = offset
        state[INDEX] += 1
        at = stop
    if at != end:
        return _record_error(state, begin, at, BAD_BATCH_END)
    return DONE


@inner
def _crc32(buf: Array, at: int, stop: int) -> int:
    crc = np.uint32(0xFFFFFFFF)
    while stop - at >= 8:
        a = crc ^ (
            np.uint32(buf[at])
            | (np.uint32(buf[at + 1]) << np.uint32(8))
            | (np.uint32(buf[at + 2]) << np.uint32(16))
            | (np.uint32(buf[at + 3]) << np.uint32(24))
        )
        crc = (
            _CRC32[7, a & np.uint32(0xFF)]
            ^ _CRC32[6, (a >> np.uint32(8)) & np.uint32(0xFF)]
            ^ _CRC32[5, (a >> np.uint32(16)) & np.uint32(0xFF)]
            ^ _CRC32[4, a >> np.uint32(24)]
            ^ _CRC32[3, buf[at + 4]]
            ^ _CRC32[2, buf[at + 5]]
            ^ _CRC32[1, buf[at + 6]]
            ^ _CRC32[0, buf[at + 7]]
        )
        at += 8
    while at < stop:
        crc = _CRC32[0, (crc ^ np.uint32(buf[at])) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
        at += 1
    return int64(crc ^ np.uint32(0xFFFFFFFF))


@inner
def _message_end(buf: Array, at: int, end: int, magic: int) -> int:
    """Where the message at `at` ends; −1 when it is cut, of another magic, too small or compressed."""
    if end - at < MESSAGE_OVERHEAD[magic]:
        return int64(-1)
    size = LOG_OVERHEAD + _int32(buf, at + 8)
    if size < MESSAGE_OVERHEAD[magic] or size > end - at or int64(buf[at + 16]) != magic:
        return int64(-1)
    return at + size


@inner
def _last_inner_offset(buf: Array, at: int, end: int, magic: int) -> int:
    """Offset field of the last message of a set; −1 when the set does not parse."""
    last = int64(-1)
    while at < end:
        stop = _message_end(buf, at, end, magic)
        if stop < 0:
            return int64(-1)
        last = _int64(buf, at)
        at = stop
    return last


@inner
def _messages(buf: Array, row: Array, columns: ChunkBuffers, state: Array) -> int:
    """Messages of magic 0 or 1, from state[AT] on: a run of plain ones, or those inside of a wrapper."""
    begin, end, last, magic = row[FROM], row[TO], row[LAST], row[MAGIC]
    wrapped = row[KIND] == WRAPPER
    shift = int64(0)
    if wrapped:
        inner = _last_inner_offset(buf, begin, end, magic)
        if inner < 0:
            return _record_error(state, begin, begin, NO_MESSAGES)
        if inner > last:
            return _record_error(state, begin, begin, BAD_OFFSET)
        # Magic 1 counts from the beginning of the set; only the wrapper knows the offset of the last (KIP-31).
        shift = last - inner if magic == 1 else int64(0)
    at = state[AT]
    while at < end:
        stop = _message_end(buf, at, end, magic)
        if stop < 0:
            return _record_error(state, begin, at, BAD_MESSAGE)
        if state[CHECK_CRC] != 0 and _crc32(buf, at + 16, stop) != _uint32(buf, at + 12):
            return _record_error(state, begin, at, BAD_MESSAGE_CRC)
        attributes = int64(buf[at + 17])
        if attributes & CODEC_BITS:
            return _record_error(state, begin, at, NESTED)
        offset = _int64(buf, at) + shift
        if offset <= state[PREVIOUS] or offset > last:
            return _record_error(state, begin, at, BAD_OFFSET)
        time = int64(-1)
        time_type = -1
        p = at + 18
        if magic == 1:
            # The wrapper's timestamp type applies to all messages inside (KIP-32).
            append_time = (row[ATTRIBUTES] if wrapped else attributes) & LOG_APPEND != 0
            time = row[MAX_TIME] if wrapped and append_time else _int64(buf, p)
            time_type = 1 if append_time else 0
            p += 8
        key_size = _int32(buf, p)
        key_at = p + 4
        if key_size > stop - key_at - 4:  # 4 bytes of the value's size follow
            return _record_error(state, begin, p, BAD_KEY)
        p = key_at + max(key_size, 0)
        value_size = _int32(buf, p)
        value_at = p + 4
        if value_size > stop - value_at:
            return _record_error(state, begin, p, BAD_VALUE)
        if value_at + max(value_size, 0) != stop:
            return _record_error(state, begin, p, BAD_RECORD_END)
        if offset >= state[POSITION]:
            if offset >= state[END]:
                return DONE
            status = _room(columns, state, key_size, value_size, 0, 0, 0)
            if status != DONE:
                state[AT] = at
                return status
            _append(columns, state, buf, offset, time, time_type, key_at, key_size, value_at, value_size)
            clear(columns.header_lists_valid, state[ROWS] - 1)
            state[NULL_HEADERS] += 1
            state[POSITION] = offset + 1
        state[PREVIOUS] = offset
        at = stop
    return DONE


@inner
def _is_valid(bitmap: Array, bit: int) -> bool:
    return bool((bitmap[bit >> 3] >> (bit & 7)) & 1)


@inner
def _restore(bitmap: Array, first: int, stop: int) -> int:
    """Set the bits [first, stop) again; how many were cleared."""
    cleared = 0
    for i in range(first, stop):
        if not _is_valid(bitmap, i):
            bitmap[i >> 3] |= np.uint8(1 << (i & 7))
            cleared += 1
    return cleared


@inner
def _go_back(columns: ChunkBuffers, state: Array) -> None:
    """Take back the rows of the frame at work that are still in the buffers: from FIRST_ROW on.

    Bitmaps become all ones again, as `_append` expects them.
    """
    row, rows = state[FIRST_ROW], state[ROWS]
    headers = int64(columns.header_lists[row])
    state[NULL_KEYS] -= _restore(columns.key_valid, row, rows)
    state[NULL_VALUES] -= _restore(columns.value_valid, row, rows)
    state[NULL_HEADERS] -= _restore(columns.header_lists_valid, row, rows)
    state[NULL_HEADER_VALUES] -= _restore(columns.header_values_valid, headers, state[HEADERS])
    state[KEY_BYTES] = columns.key_offsets[row]
    state[VALUE_BYTES] = columns.value_offsets[row]
    state[HEADER_KEY_BYTES] = columns.header_key_offsets[headers]
    state[HEADER_VALUE_BYTES] = columns.header_value_offsets[headers]
    state[HEADERS] = headers
    state[ROWS] = row
    state[POSITION] = state[FIRST_POSITION]
    state[AT] = -1


@compiled(BYTES, BYTES, TABLE, _COLUMNS, I64, results=1)
def decode(raw: Array, scratch: Array, table: Array, columns: ChunkBuffers, state: Array) -> int:
    """Records of the frames from `state[FRAME]` on → rows of `columns`, in order.

    Returns DONE; FULL or GROW (make room and call again: it continues at the same record); or an error, with `state` at
    the frame at fault, ERROR_AT its byte, and the rows of that frame taken back, save those already handed out.
    POSITION follows the last offset of each finished frame, whatever records are left in it.
    """
    while state[FRAME] < table.shape[0]:
        row = table[state[FRAME]]
        # AT is −1 at the start of a frame; FULL and GROW leave it at the record to resume with.
        if state[AT] < 0:
            state[AT] = row[FROM]
            state[INDEX] = 0
            state[HIDDEN] = 0
            state[PREVIOUS] = row[BASE] - 1
            state[FIRST_ROW] = state[ROWS]
            state[FIRST_POSITION] = state[POSITION]
        if row[MODE] == PASS:
            state[HIDDEN] = row[COUNT]
        else:
            buf = scratch if row[SOURCE] == SCRATCH else raw
            status = _batch(buf, row, columns, state) if row[KIND] == BATCH else _messages(buf, row, columns, state)
            if status != DONE:
                if status > FULL:
                    _go_back(columns, state)
                return status
        if row[ATTRIBUTES] & CONTROL and row[KIND] == BATCH:
            state[ALL_CONTROL] += state[HIDDEN]
        else:
            state[ALL_ABORTED] += state[HIDDEN]
        state[POSITION] = max(state[POSITION], row[LAST] + 1)
        state[FRAME] += 1
        state[AT] = -1
    return DONE
