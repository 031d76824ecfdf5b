"""Fills Arrow buffers with rows and hands out full chunks. Keeps the state of the decode loop.

Promise: a chunk that was handed out is never touched again. An error takes back the position and the rows of its batch,
except rows already handed out.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter_ns

import numpy as np
import pyarrow as pa

from sluice.pipelines.errors import CorruptBatch
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.kafka_batches.decode import loops
from sluice.pipelines.records.kafka_batches.decode.columns import Capacity, allocate, enlarge, to_arrow
from sluice.pipelines.records.kafka_batches.decode.decode_errors import REASONS, LogPlace
from sluice.pipelines.records.kafka_batches.decode.loops import Columns, Frame


class SliceRows:
    """Makes the rows of one slice, chunk after chunk."""

    def __init__(
        self, origin: LogPlace, start: int, end: int, chunk_rows: int, chunk_bytes: int, *, check_crc: bool
    ) -> None:
        self.spent_ns = 0
        self._place, self._end, self._chunk_rows, self._chunk_bytes = origin, end, chunk_rows, chunk_bytes
        self._capacity: Capacity | None = None
        self._columns: Columns | None = None
        self._state = np.zeros(loops.SLOTS, np.int64)
        self._state[loops.POSITION] = start
        self._state[loops.END] = end
        self._state[loops.MAX_ROWS] = chunk_rows
        self._state[loops.MAX_BYTES] = chunk_bytes
        self._state[loops.CHECK_CRC] = check_crc

    @property
    def position(self) -> int:
        """The next offset to read."""
        return int(self._state[loops.POSITION])

    @property
    def totals(self) -> tuple[int, int, int]:
        """So far: records that became rows, control records, and records of aborted transactions."""
        s = self._state
        return int(s[loops.ALL_ROWS] + s[loops.ROWS]), int(s[loops.ALL_CONTROL]), int(s[loops.ALL_ABORTED])

    def decode(self, raw: Array, scratch: Array, table: Array) -> Iterator[pa.RecordBatch]:
        """Decode frames that are checked and decompressed. Yields full chunks. Raises CorruptBatch."""
        self._state[loops.FRAME], self._state[loops.AT] = 0, -1
        while (code := self._run(raw, scratch, table)) != loops.DONE:
            if code != loops.FULL:
                frame = Frame(*table[self._state[loops.FRAME]].tolist())
                raise self._corrupt(frame, code)
            yield self._chunk()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """The remaining rows, at most one chunk."""
        if self._state[loops.ROWS]:
            yield self._chunk()

    def _run(self, raw: Array, scratch: Array, table: Array) -> int:
        """Run the loop, making room as it asks. Returns the first other code."""
        began = perf_counter_ns()
        if self._columns is None:
            self._capacity = self._capacity or self._first_capacity(table)
            self._columns = allocate(self._capacity)
        while (code := loops.decode(raw, scratch, table, self._columns, self._state)) == loops.GROW:
            need = Capacity(*self._state[loops.NEEDS].tolist())
            self._capacity = need if self._capacity is None else self._capacity.grown(need)
            self._columns = enlarge(self._columns, self._capacity)
        self.spent_ns += perf_counter_ns() - began
        return code

    def _first_capacity(self, table: Array) -> Capacity:
        """Room for a whole chunk of records like these. Memory that is not written to costs nothing."""
        rows = min(self._chunk_rows, self._end - self.position)
        t = table[(table[:, loops.MODE] == loops.EMIT) & (table[:, loops.COUNT] > 0)]
        size = int((t[:, loops.TO] - t[:, loops.FROM]).sum()) // max(int(t[:, loops.COUNT].sum()), 1)
        data = min(rows * size, self._chunk_bytes)
        return Capacity(rows, data // 4, data, rows, data // 8, data // 8)

    def _chunk(self) -> pa.RecordBatch:
        """Returns the rows as a chunk that owns its buffers. The next chunk gets the same capacity."""
        if self._columns is None:
            raise RuntimeError("rows without buffers")
        state = self._state
        chunk = to_arrow(self._columns, state)
        sizes = (n + n // 8 for n in state[loops.SIZES].tolist())
        self._capacity = Capacity(min(self._chunk_rows, max(self._end - self.position, 0)), *sizes)
        self._columns = None
        state[loops.ALL_ROWS] += state[loops.ROWS]
        state[loops.CHUNK] = 0
        state[loops.FIRST_ROW], state[loops.FIRST_POSITION] = 0, state[loops.POSITION]
        return chunk

    def _corrupt(self, f: Frame, code: int) -> CorruptBatch:
        return self._place.corrupt(REASONS[code], f.first, f.last, int(self._state[loops.ERROR_AT]))
