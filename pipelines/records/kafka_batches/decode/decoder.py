"""The decoder of one slice: fetch responses in, Arrow record batches out.

Promise: rows come in strictly increasing offset order, each visible record of `[start, end)` exactly once, with the
bytes that the log holds; control records and (under read_committed) records of aborted transactions never. Chunks
depend on the records alone, not on how responses cut them. `position` moves only over what was checked: after an
error it stands at the batch at fault, and what comes before that is kept, so that it can be fetched and fed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import pyarrow as pa

from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.kafka_batches.decode.columns import SliceRows
from sluice.pipelines.records.kafka_batches.decode.decompression import Scratch
from sluice.pipelines.records.kafka_batches.decode.frames import BatchProblem, LogPlace, frame_table, read_only
from sluice.pipelines.records.kafka_batches.decode.response_checks import Checks

# Frames that are checked together: little enough that the processor's caches still hold them when they are decoded.
_BLOCK = 256
_MOST = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class OffsetCounts:
    """What happened to the offsets of `[start, end)`. Offsets that are not counted were compacted away.

    `records` became rows. `control` and `aborted` are records of control batches and of aborted transactions.
    """

    records: int = 0
    control: int = 0
    aborted: int = 0


class BatchDecoder:
    """Decodes `[start, end)` of one partition. Not for two threads at once; the compiled parts release the GIL.

    A chunk is yielded when one more record would bring it above `chunk_rows` rows or `chunk_bytes` bytes of keys,
    values and headers (8 more for each header; a larger record makes a chunk of its own). `max_batch_bytes` bounds
    what one batch may decompress to. Memory: one chunk, one decompressed batch (at least 4 MiB), and 128 bytes for
    each batch of a response.
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
        chunk_rows: int = 1 << 17,
        chunk_bytes: int = 16 << 20,
    ) -> None:
        if not 0 <= start <= end:
            raise ValueError(f"not a range of offsets: [{start}, {end})")
        if not (1 <= chunk_rows < _MOST and 1 <= chunk_bytes <= _MOST and 1 <= max_batch_bytes <= _MOST):
            raise ValueError("chunks need at least a row; chunks and batches hold from 1 to 2**31 - 1 bytes")
        self._place = LogPlace(topic, partition)
        self._end = end
        self._checks = Checks(self._place, end, read_committed=read_committed, check_crc=check_crc)
        self._scratch = Scratch(self._place, max_batch_bytes)
        self._rows = SliceRows(self._place, start, end, chunk_rows, chunk_bytes, check_crc=check_crc)
        self._crc_ns = 0
        self._decompress_ns = 0

    @property
    def position(self) -> int:
        """The next offset to read. The range is done when this reaches `end`, even if no record was visible."""
        return self._rows.position

    @property
    def counts(self) -> OffsetCounts:
        """Counts up to `position`, including rows that were not yielded yet."""
        return OffsetCounts(*self._rows.totals)

    @property
    def timings(self) -> dict[str, int]:
        """Nanoseconds spent on checksums (`crc`), in codecs (`decompress`), and on making rows (`decode`)."""
        return {"crc": self._crc_ns, "decompress": self._decompress_ns, "decode": self._rows.spent_ns}

    def feed(self, records: bytes | memoryview, aborted: Sequence[tuple[int, int]] = ()) -> Iterator[pa.RecordBatch]:
        """Decode the record bytes of one response. Yields full chunks; exhaust it before the next call.

        `records` are record batches or message sets, one after another. One that is cut at the end is left for the next
        response; records below `position` are passed over. `aborted` are the response's aborted transactions, as
        (producer id, first offset). Raises CorruptBatch or UnsupportedBatch after everything before that batch is
        decoded.
        """
        if not len(records) or self.position >= self._end:
            return
        raw = read_only(records)
        self._checks.begin(aborted, self.position)
        table, _, problem = frame_table(raw, self._place)
        for first in range(0, len(table), _BLOCK):
            yield from self._block(raw, table[first : first + _BLOCK])
            if self.position >= self._end:
                return
        if problem:
            raise problem

    def finish(self) -> Iterator[pa.RecordBatch]:
        """The remaining rows, at most one chunk."""
        yield from self._rows.rest()

    def _block(self, raw: Array, table: Array) -> Iterator[pa.RecordBatch]:
        """Check these frames, then decompress and decode the good ones group by group."""
        view = raw.data
        began = perf_counter_ns()
        good, problem = self._checks.run(view, table, self.position)
        self._crc_ns += perf_counter_ns() - began
        done = 0
        while done < good:
            group, damage = self._decompress(view, table[done:good])
            yield from self._rows.decode(raw, self._scratch.data, table[done : done + group])
            if damage:
                raise damage
            done += group
        if problem and self.position < self._end:
            raise problem

    def _decompress(self, view: memoryview, table: Array) -> tuple[int, BatchProblem | None]:
        began = perf_counter_ns()
        try:
            return self._scratch.fill(view, table)
        finally:
            self._decompress_ns += perf_counter_ns() - began
