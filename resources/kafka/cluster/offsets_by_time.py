"""Finds the first record stamped at or after a time where ListOffsets returned a transaction marker.

A marker carries the broker's clock, and ListOffsets takes it for a record. Its answer is a lower bound: no record
before the marker is stamped so late. From there on batch headers are read, at most `budget` bytes of the log: a record
found there is the first one. Beyond that a search by offset follows, which finds the record if stamps are in offset
order, and sets `by_marker`.

Promises: no I/O here: a search yields the reads that it needs; each search ends, for any sequence of answers; the
probes depend on the log alone, so that the same log gives the same answer and searches of one moment share their reads.
Headers are checked for plausibility: offsets go up, and no batch ends below the requested position. Nothing is
decompressed for them, and no checksum computed.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from sluice.pipelines.errors import CorruptBatch, UnsupportedBatch
from sluice.pipelines.model.kafka import OffsetAtTime, TopicPartition
from sluice.pipelines.planning.boundary_search import VOTERS, Sample, search_boundary

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_OVERHEAD = 12  # offset and size, which the size does not count
_MAGIC_AT = 16
_BATCH = struct.Struct(">qiibIhiqq")  # up to the largest timestamp
_MESSAGE = struct.Struct(">qiIbbq")  # of the formats before Kafka 0.11
_LEAST_BATCH, _LEAST_MESSAGE = 49, 14
_CODEC, _APPEND_TIME, _CONTROL, _HORIZON = 0x07, 0x08, 0x20, 0x40


class Unreadable(Exception):
    """The bytes do not begin with a plausible batch."""


@dataclass(frozen=True, slots=True)
class Header:
    """A batch of offsets `base` to `last` that takes `size` bytes.

    `latest` is its largest stamp, `first` that of its first record; None: only its records have it. `by_broker`: its
    stamps are the broker's (`LogAppendTime`). `checksum` is that of format v2.
    """

    base: int
    last: int
    size: int
    control: bool
    first: int | None
    latest: int
    by_broker: bool = False
    checksum: int | None = None


def headers(records: memoryview, position: int) -> list[Header]:
    """Return the batches in the answer to a fetch from `position`, also a cut-off one whose header is there.

    Raises Unreadable if the first is no batch; a later one that is none ends the list.
    """
    batches: list[Header] = []
    try:
        for header in _walk(records, position):
            batches.append(header)
    except Unreadable:
        if not batches:
            raise
    return batches


def _walk(records: memoryview, position: int) -> Iterator[Header]:
    at = 0
    while at + _MAGIC_AT < len(records):
        try:
            header = _one(records, at, position)
        except struct.error:
            return  # cut off in the header
        if not position <= header.last or header.base < 0 or header.base > header.last:
            raise Unreadable
        yield header
        position, at = header.last + 1, at + header.size


def _one(records: memoryview, at: int, position: int) -> Header:
    magic = records[at + _MAGIC_AT]
    if magic < 2:
        return _message(records, at, position)
    if magic > 2:
        raise Unreadable
    base, size, _, _, checksum, attributes, delta, first, latest = _BATCH.unpack_from(records, at)
    if size < _LEAST_BATCH or delta < 0:
        raise Unreadable
    # A batch that compaction marked for later removal has that time in place of its first stamp (KIP-534).
    timestamp = latest if attributes & _APPEND_TIME else None if attributes & _HORIZON else first
    control, by_broker = bool(attributes & _CONTROL), bool(attributes & _APPEND_TIME)
    return Header(base, base + delta, size + _OVERHEAD, control, timestamp, latest, by_broker, checksum)


def _message(records: memoryview, at: int, position: int) -> Header:
    """Return a message of the old formats: never a marker, and never stamped in the oldest one."""
    offset, size, _, magic, attributes, stamp = _MESSAGE.unpack_from(records, at)
    if size < _LEAST_MESSAGE:
        raise Unreadable
    stamp = stamp if magic else -1
    if attributes & _CODEC:  # several in one, named by the last of them
        return Header(min(position, offset), offset, size + _OVERHEAD, False, None, stamp)
    return Header(offset, offset, size + _OVERHEAD, False, stamp, stamp)


PROBE_BYTES = 256
"""Room for a marker (78 bytes) and the header behind it. A larger batch is no marker."""
LOOKED_AT_BYTES = 64 << 20
"""The most bytes of records of one batch that are decompressed for their stamps. Those of a larger batch count as its
newest record's.
"""
WALK_BYTES = 64 << 10
"""Bytes requested at once while reading on in a partition."""
SAMPLE_BYTES = 512 << 10
"""Limit on the bytes of a sample, beyond which no further batch is read for it."""
_QUESTIONS = 200
"""Limit on the reads of one search, which takes some 20 for a log of a billion records; it stops endless answers."""


@dataclass(frozen=True, slots=True)
class Want:
    """Bytes of the log from `position`. `complete`: all of the first batch; `may_lack`: none of it if it is larger."""

    position: int
    size: int
    complete: bool = False
    may_lack: bool = False


class Answer(NamedTuple):
    """The bytes received. `end`: nothing is at or above the position. No bytes otherwise: the first batch is larger."""

    records: memoryview
    high_watermark: int
    end: bool = False
    log_start: int = 0


class BatchStamps(NamedTuple):
    """Offsets and timestamps of one batch's records."""

    offsets: NDArray[np.int64]
    stamps: NDArray[np.int64]


@dataclass
class PartitionLog:
    """The known part of one partition's log: by position the batch there or next, positions that hold no marker, the
    records of batches (by base), samples by position, its start and high watermark. `by_broker`: its stamps are the
    broker's."""

    tp: TopicPartition
    batches: dict[int, Header] = field(default_factory=dict)
    records: set[int] = field(default_factory=set)
    rows: dict[int, BatchStamps] = field(default_factory=dict)
    samples: dict[int, Sample] = field(default_factory=dict)
    start: int = 0
    high: int = 0
    by_broker: bool = False
    records_of_both: int = 0
    """The number of records in `rows` and `samples`."""

    @property
    def size(self) -> int:
        return len(self.batches) + len(self.records) + self.records_of_both

    def learn(self, position: int, records: memoryview) -> None:
        """Add the headers of `records`, which start at `position`. Raises Unreadable."""
        for header in headers(records, position):
            self.batches[position] = self.batches[header.base] = header
            position = header.last + 1

    def knows(self, offset: int) -> bool:
        """Return whether the batch at this offset is known."""
        return offset in self.records or offset in self.batches

    def is_record(self, offset: int) -> bool:
        """Return whether a known offset holds a record, not a marker."""
        return offset in self.records or not self.batches[offset].control


class _NotReadOn(Exception):
    """The partition cannot be read on."""


Asking = Generator[Want, Answer, Header | None]
Finding = Generator[Want, Answer, OffsetAtTime | None]
Sampling = Generator[Want, Answer, Sample]


class StampSearch:
    """Searches one partition for the first record stamped at or after `time`. `hit`: Kafka's answer; `budget` in
    bytes; `near`: bytes of one read of a sample."""

    def __init__(
        self,
        log: PartitionLog,
        time: int,
        hit: OffsetAtTime,
        budget: int,
        near: int = WALK_BYTES,
        max_skew: int | None = None,
    ) -> None:
        self._seen, self._time, self._hit, self._budget = log, time, hit, budget
        self._near, self._max_skew = near, max_skew
        self._low = hit.offset
        self._asked = self._reads = 0
        self._typical = PROBE_BYTES

    def run(self) -> Finding:
        """Search, and return the record, or None if there is none. With `by_marker`, the stamp may be the requested
        time instead of a record's. With `max_skew`, return the boundary (`search_boundary`)."""
        first = yield from self._find_record()
        if first is None or self._max_skew is None or self._seen.by_broker:
            return first
        try:
            return (yield from self._find_boundary(first, self._max_skew))
        except (_NotReadOn, Unreadable, CorruptBatch, UnsupportedBatch):  # landing reports it, with the remedy
            return first

    def _find_boundary(self, hit: OffsetAtTime, max_skew: int) -> Finding:
        search, self._asked = search_boundary(self._time, max_skew, hit, self._seen.high), 0
        position = next(search)
        while True:
            sample = yield from self._sample(max(position, self._seen.start))
            if self._seen.by_broker:
                return hit
            try:
                position = search.send(sample)
            except StopIteration as end:
                boundary: OffsetAtTime = end.value
                return replace(boundary, by_marker=hit.by_marker, reads=self._reads)

    def _find_record(self) -> Finding:
        if (yield from self._is_record()):
            return self._hit
        try:
            while (offset := (yield from self._find())) is None and not self._asked:
                # The log's end may be outdated, from an earlier search.
                yield from self._hear(Want(max(self._seen.high - 1, 0), PROBE_BYTES, may_lack=True))
        except (_NotReadOn, Unreadable):
            return self._about(self._low)
        return offset if offset or self._read_all else self._about(self._seen.high)

    @property
    def _read_all(self) -> bool:
        return self._low >= self._seen.high

    def _about(self, offset: int) -> OffsetAtTime:
        return OffsetAtTime(offset, self._time, by_marker=True)

    def _is_record(self) -> Generator[Want, Answer, bool]:
        """Return whether Kafka's answer is a record. An unreadable batch counts as one and is left to landing."""
        position, log = self._hit.offset, self._seen
        if self._max_skew is not None and not log.by_broker and not log.knows(position):
            with contextlib.suppress(Unreadable, CorruptBatch, UnsupportedBatch, _NotReadOn):
                yield from self._sample(position)
        if not log.knows(position):
            heard = yield from self._hear(Want(position, PROBE_BYTES, may_lack=True))
            try:
                log.learn(position, heard.records)
            except Unreadable:
                log.records.add(position)
            if position not in log.batches:
                log.records.add(position)
        return log.is_record(position)

    def _hear(self, want: Want) -> Generator[Want, Answer, Answer]:
        if self._asked == _QUESTIONS:
            raise _NotReadOn
        self._asked, self._reads = self._asked + 1, self._reads + 1
        heard = yield want
        self._seen.high, self._seen.start = max(self._seen.high, heard.high_watermark), heard.log_start
        return heard

    def _sample(self, position: int) -> Sampling:
        """Return the records from the position on, as `search_boundary` needs them, and learn their headers."""
        import numpy as np

        log, end, read = self._seen, position, 0
        offsets = stamps = bases = np.empty(0, np.int64)
        while position not in log.samples:
            heard, length = (yield from self._hear(Want(end, max(self._near, read)))), 0
            if (first := next(iter(headers(heard.records, end)), None)) and first.size > len(heard.records):
                heard = yield from self._hear(Want(end, first.size, complete=True))
            log.learn(end, heard.records)
            for header in headers(heard.records, end):
                if length + header.size > len(heard.records) or read + length >= SAMPLE_BYTES:
                    break
                length, end, bases = length + header.size, header.last + 1, np.append(bases, header.base)
                log.by_broker = header.by_broker
            read += length
            rows = _decode_stamps(log.tp, position, end, heard.records[:length])
            offsets, stamps = np.append(offsets, rows.offsets), np.append(stamps, rows.stamps)
            sample = Sample.take(
                offsets, stamps, bases.searchsorted(offsets, side="right"), end if length else max(end, log.high)
            )
            # Brokers delay a fetch at the end of the log: for half a second, in case that a record arrives.
            is_last = not length or end >= heard.high_watermark
            if len(sample.offsets) == VOTERS or is_last or read >= SAMPLE_BYTES or log.by_broker:
                log.samples[position] = sample
                log.records_of_both += len(sample.offsets)
        return log.samples[position]

    def _find(self) -> Finding:
        batch, self._low = None, self._hit.offset
        if (batch := (yield from self._walk())) is None and not self._read_all:
            batch = yield from self._by_offset()
        return batch

    # -- reading on

    def _walk(self) -> Finding:
        """Read on within the budget; return None if the record is not there. `_low` is then behind the bytes read, at
        the log's end if those are all."""
        read = 0
        while read <= self._budget:
            batch = yield from self._at(self._low, WALK_BYTES)
            if batch is None:
                self._low = self._seen.high
                return None
            read += batch.size
            self._typical = max(self._typical, batch.size)
            if offset := (yield from self._first_in(batch)):
                return offset
            self._low = batch.last + 1
        return None

    def _at(self, position: int, size: int) -> Asking:
        """Return the batch that holds the position, else the next one, or None."""
        log = self._seen
        while position not in log.batches:
            if position >= log.high:
                return None
            heard = yield from self._hear(Want(position, size))
            if heard.end:
                return None
            log.learn(position, heard.records)
        return log.batches[position]

    def _first_in(self, batch: Header) -> Finding:
        if not self._reaches(batch):
            return None
        if batch.first is not None and batch.first >= self._time:
            return OffsetAtTime(batch.base, batch.first)
        rows = yield from self._rows(batch)
        late = (rows.stamps >= self._time).nonzero()[0]
        return OffsetAtTime(int(rows.offsets[late[0]]), int(rows.stamps[late[0]])) if len(late) else None

    def _rows(self, batch: Header) -> Generator[Want, Answer, BatchStamps]:
        if batch.base not in self._seen.rows:
            heard = yield from self._hear(Want(batch.base, batch.size, complete=True))
            try:
                self._seen.rows[batch.base] = _decode_stamps(self._seen.tp, batch.base, batch.last + 1, heard.records)
            except (CorruptBatch, UnsupportedBatch):  # landing reports it, with the remedy
                self._low = batch.base
                raise _NotReadOn from None
            self._seen.records_of_both += len(self._seen.rows[batch.base].offsets)
        return self._seen.rows[batch.base]

    def _reaches(self, batch: Header) -> bool:
        return not batch.control and batch.latest >= self._time

    # -- by offset

    def _by_offset(self) -> Finding:
        """Search from `_low` on in steps that double, then by bisection.

        A batch stands for all that are before or after it.
        """
        late = yield from self._gallop()
        top = self._seen.high if late is None else late.base
        while self._low < top:
            middle = (self._low + top) // 2
            batch = yield from self._probe(middle, top)
            if batch is not None:
                late, top = batch, min(batch.base, middle)
            elif self._low <= middle:
                top = middle  # nothing but markers from there on
        if late is None:
            return None
        first = yield from self._first_in(late)
        return replace(first, by_marker=True) if first else self._about(late.last + 1)

    def _gallop(self) -> Asking:
        step, top = self._low - self._hit.offset, self._seen.high
        while (probe := self._low + step) < top:
            if (late := (yield from self._probe(probe, top))) is not None:
                return late
            step *= 2
        return None

    def _probe(self, position: int, top: int) -> Asking:
        """Return the first batch of records in [position, top) if it reaches the time; else move `_low` behind it."""
        size = self._typical + PROBE_BYTES
        while position < top:
            batch = yield from self._at(position, size)
            if batch is None or batch.base >= top:
                return None
            if not batch.control:
                self._low = self._low if self._reaches(batch) else batch.last + 1
                return batch if self._reaches(batch) else None
            position, size = batch.last + 1, WALK_BYTES
        return None


def _decode_stamps(tp: TopicPartition, start: int, end: int, records: memoryview) -> BatchStamps:
    """Return offsets and timestamps of the records in [start, end). Raises CorruptBatch, UnsupportedBatch."""
    import numpy as np
    import pyarrow as pa

    from sluice.pipelines.records.kafka_batches.decode import BatchDecoder, DecodeOptions  # loads compiled loops
    from sluice.pipelines.schema.arrays import fill_int64s, int64s

    options = DecodeOptions(read_committed=False, max_batch_bytes=LOOKED_AT_BYTES)
    decoder = BatchDecoder(tp.topic, tp.partition, start, end, options)
    offsets, stamps, last = [np.empty(0, np.int64)], [np.empty(0, np.int64)], None
    for batch, chunk in chain(decoder.read(records), ((None, rest) for rest in decoder.finish())):
        # Of an oversized batch, whose records may be countless, the first one stands for all.
        if batch is None or batch is not last:
            rows, last = chunk if batch is None else chunk.slice(0, 1), batch
            offsets.append(int64s(rows.column("offset")))
            stamps.append(fill_int64s(rows.column("timestamp").cast(pa.int64()), -1))
    return BatchStamps(np.concatenate(offsets), np.concatenate(stamps))
