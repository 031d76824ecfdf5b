"""The first record stamped at or after a time, where Kafka's own look-up answered with a transaction's marker.

A marker carries the broker's clock, and ListOffsets takes it for a record. What it says is right below: no record
before the marker is stamped so late. From there on headers of batches are read, `budget` bytes of the log at most: a
record that is found there is the first one. Beyond that a search by offset goes on, which finds it where stamps are
in order by offset, and says `by_marker`.

Promises: no input or output here, a search yields what it wants to read; each ends, whatever it is told; the probes
depend on the log alone, so that the same log gives the same answer and one moment's searches share what they saw.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from sluice.pipelines.errors import CorruptBatch, UnsupportedBatch
from sluice.pipelines.model.kafka import OffsetAtTime, TopicPartition
from sluice.resources.kafka.protocol.batch_headers import Header, Unreadable, headers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PROBE_BYTES = 256
"""Room for a marker (78 bytes) and the header behind it. What is larger than that is no marker."""
WALK_BYTES = 64 << 10
"""Asked for at once of a partition that is read on."""
_QUESTIONS = 200
"""Of one search: it takes some 20 for a log of a billion records; who answers without end is not asked on."""


@dataclass(frozen=True, slots=True)
class Want:
    """Bytes of the log from `position`. `whole`: all of the first batch; `may_lack`: none of it if it is larger."""

    position: int
    size: int
    complete: bool = False
    may_lack: bool = False


class Answer(NamedTuple):
    """What came. `end`: nothing stands at or above the position; no bytes else: the first batch is larger."""

    records: memoryview
    high_watermark: int
    end: bool = False


class BatchStamps(NamedTuple):
    """The records of one batch."""

    offsets: NDArray[np.int64]
    stamps: NDArray[np.int64]


@dataclass
class PartitionLog:
    """What was seen of one partition's log: by position the batch there or next, places that hold no marker, the
    records of batches (by base), and the high watermark."""

    tp: TopicPartition
    batches: dict[int, Header] = field(default_factory=dict)
    records: set[int] = field(default_factory=set)
    rows: dict[int, BatchStamps] = field(default_factory=dict)
    high: int = 0

    @property
    def size(self) -> int:
        return len(self.batches) + len(self.records) + sum(len(r.offsets) for r in self.rows.values())

    def learn(self, position: int, records: memoryview) -> None:
        """Raises Unreadable."""
        for header in headers(records, position):
            self.batches[position] = self.batches[header.base] = header
            position = header.last + 1

    def knows(self, offset: int) -> bool:
        """Whether it was seen what stands there."""
        return offset in self.records or offset in self.batches

    def is_record(self, offset: int) -> bool:
        """Of an offset that it knows."""
        return offset in self.records or not self.batches[offset].control


class _NotReadOn(Exception):
    """It cannot be read on."""


Asking = Generator[Want, Answer, Header | None]
Finding = Generator[Want, Answer, OffsetAtTime | None]


class StampSearch:
    """For the first record of the partition stamped at or after `time`; `hit`: Kafka's answer; `budget` in bytes."""

    def __init__(self, log: PartitionLog, time: int, hit: OffsetAtTime, budget: int) -> None:
        self._seen, self._time, self._hit, self._budget = log, time, hit, budget
        self._low = hit.offset
        self._asked = 0
        self._typical = PROBE_BYTES

    def run(self) -> Finding:
        """None: there is no such record. Where `by_marker`, the stamp may be no record's: the time asked for."""
        if (yield from self._is_record()):
            return self._hit
        try:
            while (offset := (yield from self._find())) is None and not self._asked:
                yield from self._look_again()
        except (_NotReadOn, Unreadable):
            return self._about(self._low)
        return offset if offset or self._read_all else self._about(self._seen.high)

    @property
    def _read_all(self) -> bool:
        return self._low >= self._seen.high

    def _about(self, offset: int) -> OffsetAtTime:
        return OffsetAtTime(offset, self._time, by_marker=True)

    def _is_record(self) -> Generator[Want, Answer, bool]:
        """Whether Kafka's answer is a record. A batch that makes no sense is left to whoever lands it."""
        position, log = self._hit.offset, self._seen
        if not log.knows(position):
            heard = yield from self._hear(Want(position, PROBE_BYTES, may_lack=True))
            try:
                log.learn(position, heard.records)
            except Unreadable:
                log.records.add(position)
            if position not in log.batches:
                log.records.add(position)
        return log.is_record(position)

    def _look_again(self) -> Generator[Want, Answer, None]:
        """What an earlier search saw of the log's end may be old."""
        yield from self._hear(Want(max(self._seen.high - 1, 0), PROBE_BYTES, may_lack=True))

    def _hear(self, want: Want) -> Generator[Want, Answer, Answer]:
        if self._asked == _QUESTIONS:
            raise _NotReadOn
        self._asked += 1
        heard = yield want
        self._seen.high = max(self._seen.high, heard.high_watermark)
        return heard

    def _find(self) -> Finding:
        batch, self._low = None, self._hit.offset
        if (batch := (yield from self._walk())) is None and not self._read_all:
            batch = yield from self._by_offset()
        return batch

    # -- reading on

    def _walk(self) -> Finding:
        """None: not in the stretch that may be read. `_low` stands behind what was read, at the end if that is all."""
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
        """The batch that holds the position, or else the next one; None: there is none."""
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
                self._seen.rows[batch.base] = _decode_stamps(self._seen.tp, batch, heard.records)
            except (CorruptBatch, UnsupportedBatch):  # landing names it, with the way out
                self._low = batch.base
                raise _NotReadOn from None
        return self._seen.rows[batch.base]

    def _reaches(self, batch: Header) -> bool:
        return not batch.control and batch.latest >= self._time

    # -- by offset

    def _by_offset(self) -> Finding:
        """From `_low` on, in steps that double, then in halves; a batch stands for all that are before or after it."""
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
        """The first batch of records from the position on, below `top`, if it reaches the time. One that does not
        raises `_low`."""
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


def _decode_stamps(tp: TopicPartition, batch: Header, records: memoryview) -> BatchStamps:
    """Raises CorruptBatch, UnsupportedBatch."""
    import pyarrow as pa

    from sluice.pipelines.records.kafka_batches.decode import BatchDecoder  # its compiled loops take a moment to load

    decoder = BatchDecoder(tp.topic, tp.partition, batch.base, batch.last + 1, read_committed=False)
    chunks = [*decoder.feed(records), *decoder.finish()]
    stamps = pa.chunked_array([c.column("timestamp").cast(pa.int64()).fill_null(-1) for c in chunks], pa.int64())
    offsets = pa.chunked_array([c.column("offset") for c in chunks], pa.int64())
    return BatchStamps(_to_numpy(offsets), _to_numpy(stamps))


def _to_numpy(column: object) -> NDArray[np.int64]:
    return column.to_numpy()  # type: ignore[attr-defined, no-any-return]
