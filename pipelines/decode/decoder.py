"""The decoder of one slice: fetch responses in, Arrow record batches out.

Promise: rows come in strictly increasing offset order, each visible record of `[start, end)` exactly once, with the
bytes the log holds; control records and (under read_committed) records of aborted transactions never. `position`
only moves over what was checked: after an error it stands at the batch that is at fault, and everything before it
can still be had from `finish`, so that the batch can be fetched and fed once more.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from sluice.pipelines.decode import codecs, loops
from sluice.pipelines.decode.columns import Capacity, allocate, enlarge, to_arrow
from sluice.pipelines.decode.errors import REASONS, Place
from sluice.pipelines.decode.frames import frame_table, read_only
from sluice.pipelines.decode.loops import (
    ATTRIBUTES,
    BASE,
    BATCH,
    CODEC_BITS,
    CONTROL,
    COUNT,
    CRC,
    EMIT,
    FROM,
    HIDE,
    KIND,
    LAST,
    MODE,
    PASS,
    PRODUCER,
    SOURCE,
    START,
    STOP,
    TO,
    TRANSACTIONAL,
    WRAPPER,
    Columns,
)
from sluice.pipelines.decode.transactions import Aborted
from sluice.pipelines.errors import CorruptBatch, UnsupportedBatch

# Frames that are checked together, and bytes that are decompressed before they are decoded: small enough that the
# processor's caches still hold them, large enough that calls cost nothing.
_BLOCK_FRAMES = 256
_GROUP_BYTES = 1 << 20
_SCRATCH_BYTES = 4 << 20
_CONTROL_BYTES = 64 << 10
_INT32_MAX = (1 << 31) - 1

Frame = list[int]


@dataclass(frozen=True, slots=True)
class Counts:
    """Offsets of `[start, end)` by what became of them; what is missing to the span was compacted away.

    `records` became rows; `control` and `aborted` are the records of control batches and aborted transactions.
    """

    records: int = 0
    control: int = 0
    aborted: int = 0


class BatchDecoder:
    """Decodes `[start, end)` of one partition. Not for two threads at once; the compiled parts release the GIL.

    A chunk is yielded when the next record would bring it above `chunk_rows` rows or `chunk_bytes` bytes of keys,
    values and headers (a single larger record makes a chunk of its own). `max_batch_bytes` bounds what one batch may
    decompress to. Memory: the chunk, one decompressed batch (or 4 MiB), 128 bytes for each batch of a response.
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        *,
        read_committed: bool = True,
        check_crc: bool = True,
        max_batch_bytes: int = 256 << 20,
        chunk_rows: int,
        chunk_bytes: int,
    ) -> None:
        if not 0 <= start <= end:
            raise ValueError(f"not a range of offsets: [{start}, {end})")
        if chunk_rows < 1 or not 1 <= chunk_bytes <= _INT32_MAX or not 1 <= max_batch_bytes <= _INT32_MAX:
            raise ValueError("chunks need at least a row, chunks and batches 1 to 2**31 - 1 bytes")
        self.timings = {"crc": 0, "decompress": 0, "decode": 0}
        self._place = Place(topic, partition)
        self._end = end
        self._read_committed = read_committed
        self._check_crc = check_crc
        self._max_batch_bytes = max_batch_bytes
        self._chunk_rows = min(chunk_rows, _INT32_MAX - 1)
        self._chunk_bytes = chunk_bytes
        self._aborted = Aborted()
        self._table = np.empty((0, loops.FIELDS), np.int64)
        self._scratch = np.empty(0, np.uint8)
        self._capacity: Capacity | None = None
        self._columns: Columns | None = None
        self._state = np.zeros(loops.SLOTS, np.int64)
        self._state[loops.POSITION] = start
        self._state[loops.END] = end
        self._state[loops.MAX_ROWS] = self._chunk_rows
        self._state[loops.MAX_BYTES] = chunk_bytes
        self._state[loops.CHECK_CRC] = check_crc

    @property
    def position(self) -> int:
        """Next offset to read. The slice is done when it reaches `end`, whatever was visible on the way."""
        return int(self._state[loops.POSITION])

    @property
    def counts(self) -> Counts:
        """Counts up to `position`; rows still in the buffers included."""
        s = self._state
        rows = int(s[loops.ALL_RECORDS] + s[loops.ROWS])
        return Counts(rows, int(s[loops.ALL_CONTROL]), int(s[loops.ALL_ABORTED]))

    def feed(self, records: bytes | memoryview, aborted: Sequence[tuple[int, int]] = ()) -> Iterator[pa.RecordBatch]:
        """Decode the record bytes of one fetch response; yields full chunks. To be exhausted before the next call.

        `records`: concatenated batches or message sets; a truncated one at the end is left for the next response,
        batches below `position` are passed over. `aborted`: the response's aborted transactions, (producer id, first
        offset). Raises CorruptBatch, UnsupportedBatch, when all that comes before the batch is decoded.
        """
        if not len(records) or self.position >= self._end:
            return
        raw = read_only(records)
        self._aborted.begin(aborted)
        self._table, _, problem = frame_table(raw, self._place)
        for first in range(0, len(self._table), _BLOCK_FRAMES):
            yield from self._block(raw, first, first + _BLOCK_FRAMES)
            if self.position >= self._end:
                return
        if problem:
            raise problem

    def finish(self) -> Iterator[pa.RecordBatch]:
        """What is left in the buffers, at most one chunk."""
        if self._state[loops.ROWS]:
            yield self._flush()

    def _block(self, raw: np.ndarray, first: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Check, decompress and decode the frames [first, stop) of the table."""
        view = memoryview(raw)
        frames: list[Frame] = self._table[first:stop].tolist()
        good, problem = self._check(view, frames, first)
        done = 0
        while done < good:
            ready, damage = self._decompress(view, frames, first, done, good)
            yield from self._decode(raw, first + done, first + ready)
            if damage:
                raise damage
            done = ready
        if problem:
            raise problem

    # --- checks -----------------------------------------------------------------------------------------------------

    def _check(
        self, view: memoryview, frames: list[Frame], first: int
    ) -> tuple[int, CorruptBatch | UnsupportedBatch | None]:
        """Checksums, and what to do with each frame: how many are good, and what is wrong with the one after them."""
        began = perf_counter_ns()
        good, problem = len(frames), None
        if self._check_crc:
            good, problem = self._checksums(view, frames)
        self.timings["crc"] += perf_counter_ns() - began
        table, floor = memoryview(self._table), self.position
        for i in range(good):
            try:
                frame = frames[i]
                mode = frame[MODE] = self._mode(view, frame, floor)
            except (CorruptBatch, UnsupportedBatch) as e:
                return i, e
            table[first + i, MODE] = mode
            if mode != EMIT:
                table[first + i, COUNT] = frame[COUNT]
                table[first + i, LAST] = frame[LAST]
        return good, problem

    def _checksums(self, view: memoryview, frames: list[Frame]) -> tuple[int, CorruptBatch | None]:
        for i, f in enumerate(frames):
            if f[KIND] == BATCH:
                crc = crc32c(view[f[START] + 21 : f[STOP]])
            elif f[KIND] == WRAPPER:
                crc = zlib.crc32(view[f[START] + 16 : f[STOP]])
            else:
                continue  # plain messages: each has its own, checked in the loop
            if crc != f[CRC]:
                return i, self._corrupt(f, f"checksum is {crc:#010x}, the batch says {f[CRC]:#010x}")
        return len(frames), None

    def _mode(self, view: memoryview, f: Frame, floor: int) -> int:
        """PASS, EMIT or HIDE; raises for what no record of it can be read from."""
        if f[KIND] != BATCH:
            if f[ATTRIBUTES] & CODEC_BITS > codecs.LZ4:
                raise self._unsupported(f)
            return EMIT
        if not 0 <= f[COUNT] <= f[LAST] - f[BASE] + 1:
            raise self._corrupt(f, REASONS[loops.BAD_COUNT])
        if f[ATTRIBUTES] & CODEC_BITS > codecs.ZSTD:
            raise self._unsupported(f)
        if f[BASE] >= self._end:
            f[LAST], f[COUNT] = f[BASE] - 1, 0  # nothing is left below it: the position moves up to it
            return PASS
        hidden = self._is_hidden(view, f)
        if f[LAST] < floor:
            f[COUNT] = 0
        if not f[COUNT]:
            return PASS
        if not hidden:
            return EMIT
        return PASS if f[BASE] >= floor and f[LAST] < self._end else HIDE

    def _is_hidden(self, view: memoryview, f: Frame) -> bool:
        if f[ATTRIBUTES] & CONTROL:
            if self._read_committed and f[PRODUCER] >= 0 and f[COUNT]:
                self._control(view, f)
            return True
        transactional = self._read_committed and f[ATTRIBUTES] & TRANSACTIONAL
        return bool(transactional and self._aborted.covers(f[PRODUCER], f[LAST]))

    def _control(self, view: memoryview, f: Frame) -> None:
        data = view[f[FROM] : f[TO]]
        if f[ATTRIBUTES] & CODEC_BITS:
            data = self._small(view, f)
        kind = loops.control_type(np.frombuffer(data, np.uint8), 0, len(data))
        if kind < 0:
            raise self._corrupt(f, "a control record that does not parse")
        if kind <= 1:
            self._aborted.end(f[PRODUCER], f[LAST])

    def _small(self, view: memoryview, f: Frame) -> memoryview:
        out = memoryview(bytearray(_CONTROL_BYTES))
        try:
            return out[: self._inflate(view, f, out)].toreadonly()
        except codecs.NoRoom:
            raise self._corrupt(f, "a control batch that does not decompress") from None

    # --- decompression ----------------------------------------------------------------------------------------------

    def _decompress(
        self, view: memoryview, frames: list[Frame], first: int, at: int, stop: int
    ) -> tuple[int, CorruptBatch | None]:
        """Decompress a group of frames from `at` on into scratch: where the group ends, and what is wrong there."""
        began = perf_counter_ns()
        table, used, problem = memoryview(self._table), 0, None
        while at < stop and used < _GROUP_BYTES:
            f = frames[at]
            if f[ATTRIBUTES] & CODEC_BITS and f[MODE] != PASS:
                try:
                    size = self._into_scratch(view, f, used)
                except CorruptBatch as e:
                    problem = e
                    break
                if size < 0:
                    break
                table[first + at, SOURCE], table[first + at, FROM], table[first + at, TO] = loops.SCRATCH, used, used + size
                used += size
            at += 1
        self.timings["decompress"] += perf_counter_ns() - began
        return at, problem

    def _into_scratch(self, view: memoryview, f: Frame, used: int) -> int:
        """Bytes written at `used`; −1 when they belong to a group of their own."""
        if not len(self._scratch):
            self._scratch = np.empty(min(_SCRATCH_BYTES, self._max_batch_bytes), np.uint8)
        while True:
            try:
                return self._inflate(view, f, memoryview(self._scratch)[used:])
            except codecs.NoRoom:
                if used:
                    return -1
            size = len(self._scratch)
            if size >= self._max_batch_bytes:
                raise self._corrupt(f, f"does not decompress, or to more than {self._max_batch_bytes:,} bytes")
            self._scratch = np.empty(min(4 * size, self._max_batch_bytes), np.uint8)

    def _inflate(self, view: memoryview, f: Frame, out: memoryview) -> int:
        codec = f[ATTRIBUTES] & CODEC_BITS
        try:
            return codecs.decompress(codec, view[f[FROM] : f[TO]], out)
        except codecs.Undecodable as e:
            raise self._corrupt(f, f"{codecs.NAMES[codec]} data does not decompress: {e}") from None

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _decode(self, raw: np.ndarray, first: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Rows of the frames [first, stop) of the table, which are checked and decompressed."""
        state = self._state
        scratch = self._scratch.view()
        scratch.flags.writeable = False
        state[loops.FRAME], state[loops.AT] = first, -1
        code = loops.GROW
        while code != loops.DONE:
            began = perf_counter_ns()
            columns = self._room(first, stop)
            code = loops.decode(raw, scratch, self._table, stop, columns, state)
            if code == loops.GROW:
                self._grow(columns)
            self.timings["decode"] += perf_counter_ns() - began
            if code == loops.FULL:
                yield self._flush()
            elif code > loops.FULL:
                raise self._record_error(code)
        if len(self._scratch) > _SCRATCH_BYTES:
            self._scratch = np.empty(0, np.uint8)

    def _room(self, first: int, stop: int) -> Columns:
        if self._columns is None:
            self._capacity = self._capacity or self._estimate(first, stop)
            self._columns = allocate(self._capacity)
        return self._columns

    def _estimate(self, first: int, stop: int) -> Capacity:
        """Room for a whole chunk of records like the first ones: memory that is not written to costs nothing."""
        rows = min(self._chunk_rows, self._end - self.position)
        t = self._table[first:stop]
        t = t[(t[:, MODE] == EMIT) & (t[:, KIND] == BATCH)]
        size = int((t[:, TO] - t[:, FROM]).sum()) // max(int(t[:, COUNT].sum()), 1)
        data = min(rows * size, self._chunk_bytes)
        return Capacity(rows, data // 4, data)

    def _grow(self, columns: Columns) -> None:
        need = Capacity(*self._state[loops.NEED_ROWS : loops.NEED_HEADER_VALUE_BYTES + 1].tolist())
        self._capacity = need if self._capacity is None else self._capacity.grown(need)
        self._columns = enlarge(columns, self._capacity)

    def _flush(self) -> pa.RecordBatch:
        """The rows as a chunk that owns its buffers. The next ones get room for one more like it."""
        state, columns = self._state, self._columns
        if columns is None:
            raise RuntimeError("no buffers to hand out")
        batch = to_arrow(columns, state)
        rows, *used = state[loops.ROWS : loops.HEADER_VALUE_BYTES + 1].tolist()
        key_bytes, value_bytes, headers, *header_bytes = (n + n // 8 for n in used)
        rows = min(self._chunk_rows, self._end - self.position)
        self._capacity = Capacity(rows, key_bytes, value_bytes, headers, *header_bytes)
        self._columns = None
        state[loops.ALL_RECORDS] += state[loops.ROWS]
        state[loops.ROWS : loops.NULL_HEADER_VALUES + 1] = 0
        state[loops.FIRST_ROW], state[loops.FIRST_POSITION] = 0, state[loops.POSITION]
        return batch

    # --- errors -------------------------------------------------------------------------------------------------------

    def _record_error(self, code: int) -> CorruptBatch:
        f: Frame = self._table[self._state[loops.FRAME]].tolist()
        return self._corrupt(f, REASONS[code], int(self._state[loops.ERROR_AT]))

    def _corrupt(self, f: Frame, reason: str, at: int | None = None) -> CorruptBatch:
        return self._place.corrupt(reason, f[BASE], f[LAST], at)

    def _unsupported(self, f: Frame) -> UnsupportedBatch:
        return self._place.unsupported(f"codec {f[ATTRIBUTES] & CODEC_BITS}", f[BASE], f[LAST])
