"""Decodes one offset range of a partition: fetch responses in, Arrow record batches out.

Promises: rows come in strictly increasing offset order, each visible record of `[start, end)` exactly once, with the
bytes of the log. Control records and, under read_committed, records of aborted transactions never come (KIP-98, as in
Kafka's own consumer). No batch is decoded whose checksum does not match. Chunks depend on the records alone, not on the
cuts between responses. `position` moves only over checked batches: after an error it is at the failed batch, and the
rows before it are kept, so that the batch can be fetched and fed again.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from sluice.pipelines.errors import CorruptBatch, OversizedBatch, UnsupportedBatch
from sluice.pipelines.model.kafka import Tail
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.kafka_batches.decode import loops
from sluice.pipelines.records.kafka_batches.decode.columns import DecodeOptions, RangeRows
from sluice.pipelines.records.kafka_batches.decode.decompression import (
    HEAD,
    REASONS,
    BatchProblem,
    LogPlace,
    NoRoom,
    Scratch,
    Undecodable,
    decompress,
    is_known_codec,
    read_frames,
    read_only,
)
from sluice.pipelines.records.kafka_batches.decode.loops import Frame


class Aborted:
    """The aborted transactions of one partition, batch after batch in offset order."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int]] = []
        self._open: set[int] = set()
        self._ended: dict[int, int] = {}

    def begin(self, aborted: Iterable[tuple[int, int]], position: int) -> None:
        """Begin a response that was fetched at `position`, with its (producer id, first offset) pairs in any order.

        A transaction that a marker below the position ended stays ended: a pair counts only if it begins above that
        marker.
        """
        pairs = list(aborted)
        ended = {producer: marker for producer, marker in self._ended.items() if marker < position}
        self._ended = {producer: ended.get(producer, -1) for producer, _ in pairs}
        self._waiting = sorted(((f, p) for p, f in pairs if f > self._ended[p]), reverse=True)
        self._open.clear()

    def covers(self, producer: int, last_offset: int) -> bool:
        """Returns whether the transactional batch of `producer` that ends at `last_offset` was aborted."""
        while self._waiting and self._waiting[-1][0] <= last_offset:
            self._open.add(self._waiting.pop()[1])
        return producer in self._open

    def end(self, producer: int, marker: int) -> None:
        """Note that the producer's transaction ended with a commit or abort marker at this offset."""
        self.covers(producer, marker)
        self._open.discard(producer)
        if producer in self._ended:
            self._ended[producer] = marker


_CONTROL_BYTES = 64 << 10


class Checks:
    """Checks the responses of one offset range, one after another."""

    def __init__(self, origin: LogPlace, end: int, *, read_committed: bool, check_crc: bool) -> None:
        self._place, self._end = origin, end
        self._read_committed, self._check_crc = read_committed, check_crc
        self._aborted = Aborted()

    def begin(self, aborted: Sequence[tuple[int, int]], position: int) -> None:
        """Begin a response that was fetched at `position`. `aborted` holds (producer id, first offset) pairs."""
        self._aborted.begin(aborted, position)

    def run(self, view: memoryview, table: Array, position: int) -> tuple[int, BatchProblem | None]:
        """Set the modes of these frames. Returns the number before the first bad one, and its error.

        Frames from the offset range's end on are left out; the first of them only moves the position.
        """
        good, problem = self._check_checksums(view, table) if self._check_crc else (len(table), None)
        modes, firsts, lasts = table[:good, loops.MODE], table[:good, loops.BASE], table[:good, loops.LAST]
        special = (modes == loops.LOOK) | (lasts < position) | (firsts >= self._end)
        for i in np.flatnonzero(special).tolist():
            frame = Frame(*table[i].tolist())
            if frame.base >= self._end:
                table[i, [loops.MODE, loops.COUNT, loops.LAST]] = loops.PASS, 0, frame.base - 1
                return i + 1, None
            try:
                table[i, [loops.MODE, loops.COUNT]] = self._decide(view, frame, position)
            except (CorruptBatch, UnsupportedBatch) as e:
                return i, e
        return good, problem

    def _check_checksums(self, view: memoryview, table: Array) -> tuple[int, BatchProblem | None]:
        cells = table[:, loops.CHECKED : loops.KIND + 1].tolist()
        for i, (checked, stop, crc, kind) in enumerate(cells):
            if kind == loops.BATCH:
                checksum = crc32c(view[checked:stop])
            elif kind == loops.WRAPPER:
                checksum = zlib.crc32(view[checked:stop])
            else:
                continue  # plain messages have one each, which the loop checks
            if checksum != crc:
                frame = Frame(*table[i].tolist())
                return i, self._make_error(frame, f"its checksum is {checksum:#010x}, it says {crc:#010x}")
        return len(cells), None

    def _decide(self, view: memoryview, f: Frame, position: int) -> tuple[int, int]:
        """The mode of a frame, and how many records count when it is passed over."""
        if not is_known_codec(f.codec, in_old=f.kind != loops.BATCH):
            raise self._place.make_unsupported(f"codec {f.codec}", f.first, f.last)
        if f.kind != loops.BATCH:
            return (loops.PASS, 0) if f.last < position else (loops.EMIT, 0)
        if not 0 <= f.records <= f.last - f.base + 1:
            raise self._make_error(f, REASONS[loops.BAD_COUNT])
        hidden = self._is_hidden(view, f)
        if f.last < position or not f.records:
            return loops.PASS, 0
        if not hidden:
            return loops.EMIT, f.records
        # At the edges of the range, the records themselves must be counted.
        is_inside = f.base >= position and f.last < self._end
        if f.records == f.last - f.base + 1:  # without gaps, the offsets count them
            return loops.PASS, min(f.last + 1, self._end) - max(f.base, position)
        return (loops.PASS if is_inside else loops.HIDE), f.records

    def _is_hidden(self, view: memoryview, f: Frame) -> bool:
        if f.attributes & loops.CONTROL:
            if self._read_committed and f.producer >= 0 and f.records:
                self._read_marker(view, f)
            return True
        if not self._read_committed or not f.attributes & loops.TRANSACTIONAL:
            return False
        return self._aborted.covers(f.producer, f.last)

    def _read_marker(self, view: memoryview, f: Frame) -> None:
        data = view[f.first_byte : f.stop_byte]
        if f.codec:
            data = self._decompress(data, f)
        kind = loops.control_type(np.frombuffer(data, np.uint8), 0, len(data))
        if kind < 0:
            raise self._make_error(f, "a control record that does not parse")
        if kind in (loops.ABORT, loops.COMMIT):
            self._aborted.end(f.producer, f.last)

    def _decompress(self, data: memoryview, f: Frame) -> memoryview:
        out = memoryview(bytearray(_CONTROL_BYTES))
        try:
            return out[: decompress(f.codec, data, out)].toreadonly()
        except (Undecodable, NoRoom) as e:
            raise self._make_error(f, f"a control batch that does not decompress: {e}") from None

    def _make_error(self, f: Frame, reason: str) -> CorruptBatch:
        return self._place.make_corrupt(reason, f.first, f.last)


def _as_rows(chunk: pa.RecordBatch) -> tuple[None, pa.RecordBatch]:
    return None, chunk


# Frames that are checked together: little enough that the processor's caches still hold them when they are decoded.
_BLOCK = 256


@dataclass(frozen=True, slots=True)
class OffsetCounts:
    """Counts of the offsets of `[start, end)`. Offsets that are not counted were compacted away.

    `records` became rows. `control` and `aborted` are records of control batches and of aborted transactions.
    """

    records: int = 0
    control: int = 0
    aborted: int = 0


_DEFAULTS = DecodeOptions()


class BatchDecoder:
    """Decodes `[start, end)` of one partition. Not for two threads at once; the compiled parts release the GIL.

    Memory: one chunk, 4 MiB, one larger decompressed batch while its rows are made, and 128 bytes for each batch of a
    response. Between two calls of `feed`, no chunk is above its bytes.
    """

    def __init__(self, topic: str, partition: int, start: int, end: int, options: DecodeOptions = _DEFAULTS) -> None:
        if not 0 <= start <= end:
            raise ValueError(f"not a range of offsets: [{start}, {end})")
        o = options
        self._place = LogPlace(topic, partition)
        self._end = end
        self._checks = Checks(self._place, end, read_committed=o.read_committed, check_crc=o.check_crc)
        self._scratch = Scratch(self._place, o.max_batch_bytes)
        self._rows = RangeRows(self._place, start, end, o)
        self._crc_ns = 0
        self._decompress_ns = 0
        self.tail: Tail | None = None
        """The last batch of format v2 that was decoded, if any."""

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
        table, _, problem = read_frames(raw, self._place)
        for first in range(0, len(table), _BLOCK):
            yield from self._block(raw, table[first : first + _BLOCK])
            if self.position >= self._end:
                return
        if problem:
            raise problem

    def read(
        self, records: bytes | memoryview, aborted: Sequence[tuple[int, int]] = ()
    ) -> Iterator[tuple[OversizedBatch | None, pa.RecordBatch]]:
        """Decode one response as `feed` does, but pass over oversized batches. Yields chunks, each after None.

        A chunk after an OversizedBatch stands for the visible records of that batch. Its rows have no key, value and
        headers, and the time of the batch's newest record. Raises OversizedBatch if the offsets of a batch's records
        are unknown: compaction has cut it, or it has an old format.
        """
        while True:
            try:
                yield from map(_as_rows, self.feed(records, aborted))
                return
            except OversizedBatch as error:
                batch = error.with_traceback(None)
            first, end = batch.start or 0, batch.end or 0
            if batch.records != end - first:
                raise batch
            yield from map(_as_rows, self.finish())
            for chunk in self._rows.stand_ins(min(end, self._end), batch.latest, int(batch.append_time)):
                yield batch, chunk

    def finish(self) -> Iterator[pa.RecordBatch]:
        """The remaining rows, at most one chunk."""
        yield from self._rows.rest()

    def _block(self, raw: Array, table: Array) -> Iterator[pa.RecordBatch]:
        """Check these frames, then decompress and decode the good ones group by group."""
        view = raw.data
        began = perf_counter_ns()
        good, problem = self._checks.run(view, table, self.position)
        self._crc_ns += perf_counter_ns() - began
        self._note_tail(table[:good])
        done = 0
        while done < good:
            group, damage = self._decompress(view, table[done:good])
            yield from self._rows.decode(raw, self._scratch.data, table[done : done + group])
            self._scratch.shrink()
            yield from self._rows.overfull()
            if damage:
                raise damage
            done += group
        if problem and self.position < self._end:
            raise problem

    def _note_tail(self, table: Array) -> None:
        inside = np.flatnonzero((table[:, loops.KIND] == loops.BATCH) & (table[:, loops.BASE] < self._end))
        if len(inside):
            f = Frame(*table[inside[-1]].tolist())
            self.tail = Tail(min(f.last, self._end - 1), f.crc, f.stop - f.checked + HEAD)

    def _decompress(self, view: memoryview, table: Array) -> tuple[int, BatchProblem | None]:
        began = perf_counter_ns()
        try:
            return self._scratch.fill(view, table)
        finally:
            self._decompress_ns += perf_counter_ns() - began
