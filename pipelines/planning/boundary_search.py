"""Decides which record begins a window where some producers' clocks are wrong (docs/developers/design/windows.md).

Kafka's answer to a look-up by time is the first record stamped at or after it. A record from a clock that is ahead is
that answer for all times up to its stamp. But most records before an honest one are stamped no later, and most records
behind it no earlier, unless they arrived late. So a record is *late* if it is stamped earlier than most records before
it, *ahead* if most of the next ones that are not late, up to some number, are stamped earlier; and the boundary is the
first record that is neither.

Promises: no I/O here: a search yields the positions that it reads. The log decides, never a clock or another boundary:
all callers get the same answer. If Kafka's is right, one read confirms it, or two where late records follow. A search
takes some 15 reads.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, NamedTuple

from sluice.pipelines.model.kafka import OffsetAtTime

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

VOTERS = 128
"""Records of a sample. By chance, a fifth that is ahead is half of a sample once in 10^13."""
_SHARES = ((11, 11), (15, 18), (44, 64))
"""A record is late if it is stamped earlier than 11 of 11 records before it, or than 15 of 18, or 44 of 64. By chance,
a fifth that is ahead has such a share before one record in a million. The first finds late records soonest, the last
where a third of all records are late."""
_MINUTE = 60_000
_MANY = 16
"""The least number of records that show which ones are late, and whether a time has come."""
_FAR = 1 << 16
"""Offsets before Kafka's answer at which a search for the beginning of a burst of late records begins."""
_ESTIMATES = 16
"""Reads that approach a boundary by the pace of the log; those behind them halve the rest."""


class Sample(NamedTuple):
    """Offsets and stamps (ms) of records from a position up to, not including, `end`.

    Of a batch within a minute, one record per minute: these are of one clock. Times of windows are whole minutes.
    """

    offsets: NDArray[np.int64]
    stamps: NDArray[np.int64]
    end: int

    @classmethod
    def take(
        cls, offsets: NDArray[np.int64], stamps: NDArray[np.int64], batches: NDArray[np.int64], end: int
    ) -> Sample:
        """Returns a sample of stamped records. `batches` are the numbers of their batches."""
        import numpy as np

        begins = np.diff(batches, prepend=-1) != 0
        starts = begins.nonzero()[0]
        spans = np.zeros(0, np.int64)
        if len(starts):
            spans = np.maximum.reduceat(stamps, starts) - np.minimum.reduceat(stamps, starts)
        is_long = np.repeat(spans >= _MINUTE, np.diff(starts, append=len(stamps)))
        passes = np.diff(stamps // _MINUTE, prepend=-1) != 0
        voters = ((begins | passes | is_long) & (stamps >= 0)).nonzero()[0]
        if len(voters) > VOTERS:
            end, voters = int(offsets[voters[VOTERS]]), voters[:VOTERS]
        return cls(offsets[voters], stamps[voters], end)

    def select(self, chosen: NDArray[np.bool_]) -> Sample:
        return self._replace(offsets=self.offsets[chosen], stamps=self.stamps[chosen])

    def end_before(self, offset: int) -> Sample:
        return self.select(self.offsets < offset)._replace(end=min(self.end, offset))

    def is_ahead(self, offset: int, max_skew: int) -> bool:
        """Returns whether the record at an offset is ahead."""
        return bool(_find_ahead(self.stamps, max_skew)[self.offsets == offset].any())

    def join(self, later: Sample) -> Sample:
        """Returns the records of both samples, without those of the later one that are in this one."""
        import numpy as np

        later = later.select(later.offsets >= self.end)._replace(end=max(self.end, later.end))
        return later._replace(
            offsets=np.concatenate([self.offsets, later.offsets]), stamps=np.concatenate([self.stamps, later.stamps])
        )

    def drop_late(self, arrived: int, max_skew: int, *, since: int = 0) -> tuple[Sample, int]:
        """Returns the sample without late records, and a time at which its end had arrived. `arrived`: the same of the
        offset `since` (0: unknown)."""
        import numpy as np

        on_time, stamps, bound = np.zeros(len(self.stamps), bool), list[int](), 0
        for n, (offset, stamp) in enumerate(zip(self.offsets.tolist(), self.stamps.tolist(), strict=True)):
            bound = max(bound, arrived) if offset >= since else bound
            if stamp >= bound - max_skew:
                on_time[n] = True
                stamps.append(stamp)
                bound = max(bound, *(sorted(stamps[-of:])[-share] for share, of in _SHARES if len(stamps) >= share), 0)
        return self.select(on_time), max(bound, arrived)

    def has_come(self, time: int) -> bool:
        """Returns whether most of the records, if they are many, are stamped at or after the time."""
        return len(self.stamps) >= _MANY and 2 * int((self.stamps >= time).sum()) > len(self.stamps)


Search = Generator[int, Sample, OffsetAtTime]
"""Yields positions, at each of which it needs a sample; returns the boundary."""


def search_boundary(time: int, max_skew: int, hit: OffsetAtTime, high: int) -> Search:
    """Search the boundary at `time`. `hit` is the first record stamped so late, and `high` the end of the log, which is
    the answer if no record behind the hit can be believed. The answer says `against` if it is not the hit."""
    start = hit.offset
    sample = yield start
    if not sample.is_ahead(start, max_skew):
        return hit
    before = yield from _read_before(start)
    region, arrived = before.join(sample).drop_late(0, max_skew)
    if region.is_ahead(start, max_skew):
        # It may lie in a large burst of late records: those before the burst tell the time at which it arrived.
        far = (yield max(start - _FAR, 0)).end_before(start)
        before, _, arrived = yield from _approach(time, max_skew, *far.drop_late(0, max_skew), start)
        region, arrived = before.join(sample).drop_late(arrived, max_skew, since=start)
    if not region.is_ahead(start, max_skew):
        return hit
    if not region.select(region.offsets >= start).has_come(time):
        low, upper, _ = yield from _approach(time, max_skew, region, arrived, high)
        region = low.join(upper)
    at, stamp = _place(region.stamps, time, max_skew)
    offset = region.end if at == len(region.offsets) else int(region.offsets[at])
    return OffsetAtTime(offset, stamp, against=start < offset)


def _approach(
    time: int, max_skew: int, low: Sample, arrived: int, end: int
) -> Generator[int, Sample, tuple[Sample, Sample, int]]:
    """Returns the last sample before a time has come, the next one (empty: none before `end`), and a time at which the
    first one had arrived. `low` and `arrived` are such a sample and time.

    The pace of the log tells the next position, somewhat before the boundary: in samples from behind it, a burst of
    late records looks like the time before it.
    """
    (began_at, began), upper, top = (low.end, arrived), low.select(low.offsets < 0), end
    reads = stride = 0
    while low.end < top:
        if not began:
            began_at, began = low.end, arrived
        limit = max(top - low.end - VOTERS, 0) if top == end and reads < _ESTIMATES else (top - low.end) // 2
        step = limit if reads >= _ESTIMATES else stride
        if began < arrived and reads < _ESTIMATES:
            step = max((low.end - began_at) * (time - arrived) // (arrived - began) * 7 // 8 - VOTERS, stride)
        position, reads = low.end + min(step, limit), reads + 1
        sample, bound = (yield position).end_before(end).drop_late(arrived, max_skew)
        stride = 0 if len(sample.offsets) else 2 * stride + VOTERS
        if sample.has_come(time):
            upper, top = sample, position
        else:
            low, arrived = sample if len(sample.offsets) >= _MANY else low.join(sample), bound
    return low, upper, arrived


def _read_before(position: int) -> Generator[int, Sample, Sample]:
    """Returns records before a position, enough of them to tell late ones apart if the log has them."""
    distance, sample = VOTERS, None
    while sample is None or (len(sample.offsets) < _MANY and distance < 8 * position):
        sample = (yield max(position - distance, 0)).end_before(position)
        distance *= 8
    return sample


def _find_ahead(stamps: NDArray[np.int64], max_skew: int) -> NDArray[np.bool_]:
    """Returns for each record whether most of the next ones, up to some number, contradict its stamp.

    In a topic with few records the next two are all that is known of the time at which it arrived: they contradict it
    if neither is later, and the first of them is earlier. If only the second is, that one is late.
    """
    import numpy as np

    count = np.arange(len(stamps))
    numbers = count - count[:, None]  # [i, j]: how far the record j is behind i
    earlier = (stamps < stamps[:, None] - max_skew) & (numbers > 0)
    next_two = (numbers > 0) & (numbers <= 2) & (count[:, None] < len(stamps) - 2)
    is_later = (stamps > stamps[:, None]) & next_two
    is_contradicted = (2 * earlier.cumsum(axis=1) > numbers) & (numbers > 2)
    by_next_two: NDArray[np.bool_] = (earlier & (numbers == 1)).any(axis=1) & next_two.any(axis=1)
    return is_contradicted.any(axis=1) | (by_next_two & ~is_later.any(axis=1))


def _place(stamps: NDArray[np.int64], time: int, max_skew: int) -> tuple[int, int]:
    """Returns the index of the boundary, and its time.

    Records directly before it that are ahead arrived between their neighbours, at the head of the log with the next
    one."""
    credible = (~_find_ahead(stamps, max_skew)).nonzero()[0].tolist()
    at = next((n for n, index in enumerate(credible) if stamps[index] >= time), len(credible))
    if at == len(credible):
        return len(stamps), time
    start, end = credible[at - 1] if at else -1, credible[at]
    after = int(stamps[end])
    before = int(stamps[start]) if at else after
    for n in range(start + 1, end):
        arrived = min(before + (after - before) * (n - start) // (end - start), int(stamps[n]))
        if arrived >= time:
            return n, arrived
    return end, after
