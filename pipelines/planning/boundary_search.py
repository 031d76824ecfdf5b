"""Decides which record begins a window where some producers' clocks are wrong (docs/developers/design/windows.md).

Kafka's answer to a look-up by time is the first record stamped at or after it. A record from a clock that is ahead is
that answer for all times up to its stamp. So an answer stands only if its neighbours agree; otherwise the boundary is
the offset that leaves the fewest records on the wrong side, found by bisection, because most stamps around an offset
rise with the offset.

Promises: no I/O here: a search yields the positions that it reads. The log and the pinned boundary before it decide,
never a clock. A search ends after some 20 reads for a log of a million records behind the answer.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, NamedTuple

from sluice.pipelines.model.kafka import OffsetAtTime

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RECORDS, BATCHES = 256, 16
"""A sample ends with the first batch that has it exceed both. A batch is from one producer, so some clocks agree by
chance: of 16 batches, half are from a fifth of all producers in one sample of a thousand."""
_NEXT = 9
"""The most records behind one that may contradict it."""
_BEFORE = 64
"""Offsets before Kafka's answer, most of whose stamps are about the time at which that record arrived."""


class Sample(NamedTuple):
    """Offsets and stamps (ms) of all records from a position up to, not including, `end`."""

    offsets: NDArray[np.int64]
    stamps: NDArray[np.int64]
    end: int

    def drop_before(self, earliest: int) -> Sample:
        """Returns the sample without late and unstamped records."""
        chosen = self.stamps >= max(earliest, 0)
        return self._replace(offsets=self.offsets[chosen], stamps=self.stamps[chosen])

    def join(self, later: Sample) -> Sample:
        """Returns the records of both samples, without those of the later one that are in this one."""
        import numpy as np

        more = later.offsets >= self.end
        offsets = np.concatenate([self.offsets, later.offsets[more]])
        return Sample(offsets, np.concatenate([self.stamps, later.stamps[more]]), max(self.end, later.end))


Search = Generator[int, Sample, OffsetAtTime]
"""Yields positions, at each of which it needs a sample; returns the boundary."""


def search_boundary(time: int, max_skew: int, hit: OffsetAtTime, floor: OffsetAtTime | None, high: int) -> Search:
    """Search the boundary at `time`. `hit` is the first record stamped so late, `floor` an earlier boundary, and `high`
    the end of the log, which is the answer if no record behind the hit can be believed.

    The answer says `against` if records stamped at `time` or later lie between the floor and it.
    """
    start, earliest, previous, is_first = hit.offset, 0, 0, False
    if floor is not None:
        start, earliest = max(hit.offset, floor.offset), floor.timestamp - max_skew
    low = (yield start).drop_before(earliest)
    if start == hit.offset:
        if not len(low.offsets) or not _is_contradicted(low, time, max_skew):
            return hit
        before = yield max(start - _BEFORE, 0)
        stamps = before.stamps[(before.offsets < start) & (before.stamps >= 0)]
        is_first = not len(stamps)
        previous = 0 if is_first else int(stamps[-1])
        arrived = earliest if is_first else _find_typical(stamps) - max_skew
        if 2 * len(low.drop_before(arrived).offsets) > len(low.offsets):  # else most records would be late
            earliest = max(earliest, arrived)
            low = low.drop_before(earliest)
        if not _is_contradicted(low, time, max_skew, is_first=is_first):
            return hit
    upper, top = low, high
    if not _has_come(low, time):
        upper = Sample(low.offsets[:0], low.stamps[:0], high)
        while low.end < top:
            middle = _find_most_aligned(low.end, top)
            sample = (yield middle).drop_before(earliest)
            if _has_come(sample, time):
                upper, top = sample, middle
            else:
                low = sample
        earliest = _find_typical(low.stamps) - max_skew if len(low.stamps) else earliest
    region = low.join(upper).drop_before(earliest)
    at, stamp = _place(region, time, max_skew, previous, is_first=is_first)
    offset = high if at == len(region.offsets) else int(region.offsets[at])
    against = start <= hit.offset < offset or bool((region.stamps[:at] >= time).any())
    return OffsetAtTime(offset, stamp, against=against)


def _is_contradicted(sample: Sample, time: int, max_skew: int, *, is_first: bool = False) -> bool:
    """Returns whether the first record is ahead, or most records up to some point are earlier than the time."""
    ahead = _find_ahead(sample, max_skew, is_first=is_first)
    votes = (sample.stamps >= time) * ~ahead - (sample.stamps < time - max_skew).astype(int)
    return bool(ahead[0] or (votes.cumsum() < 0).any())


def _find_ahead(sample: Sample, max_skew: int, *, is_first: bool) -> NDArray[np.bool_]:
    """Returns for each record whether most of the next ones, up to some number, contradict its stamp.

    In a topic with few records the next two are all that is known of the time at which it arrived: they contradict it
    if neither is later. Nothing contradicts the first record of a log.
    """
    import numpy as np

    stamps, count = sample.stamps, len(sample.stamps)
    padded = np.concatenate([stamps, np.full(_NEXT, np.iinfo(np.int64).max)])
    following = np.lib.stride_tricks.sliding_window_view(padded, _NEXT)[1 : count + 1]
    earlier = (following < (stamps - max_skew)[:, None]).cumsum(axis=1)
    numbers = np.arange(1, _NEXT + 1)
    near = (following[:, :2] <= stamps[:, None]) | (following[:, :2] == padded[-1])
    ahead: NDArray[np.bool_] = ((earlier > numbers / 2) & (numbers > 2)).any(axis=1) | (
        near.all(axis=1) & (earlier[:, 1] > 0)
    )
    ahead[:1] &= not is_first
    return ahead


def _place(sample: Sample, time: int, max_skew: int, previous: int, *, is_first: bool) -> tuple[int, int]:
    """Returns the index of the boundary, which leaves the fewest records on the wrong side, and its time.

    Records that are ahead have no vote. Those directly before it arrived between their neighbours, the first of which
    is stamped `previous` if the sample does not have it."""
    ahead = _find_ahead(sample, max_skew, is_first=is_first)
    late_enough = (sample.stamps >= time) & ~ahead
    wrong = [0, *(late_enough - (sample.stamps < time).astype(int)).cumsum().tolist()]
    split = wrong.index(min(wrong))
    end = next((n for n in range(split, len(ahead)) if late_enough[n]), len(ahead))
    if end == len(ahead):
        return end, time
    start = next((n for n in range(end - 1, -1, -1) if not ahead[n]), -1)
    before, after = int(sample.stamps[start]) if start >= 0 else previous, int(sample.stamps[end])
    for n in range(start + 1, end):
        if (arrived := before + (after - before) * (n - start) // (end - start)) >= time:
            return n, arrived
    return end, after


def _find_typical(stamps: NDArray[np.int64]) -> int:
    """Returns the lower quartile: neither of a fifth that is ahead, nor of a fifth that is late."""
    return int(sorted(stamps)[len(stamps) // 4])


def _has_come(sample: Sample, time: int) -> bool:
    """Returns whether most of the records are stamped at or after the time."""
    return 2 * int((sample.stamps >= time).sum()) > len(sample.stamps)


def _find_most_aligned(start: int, end: int) -> int:
    """Returns the number of [start, end) with the most factors of 2, so that searches for other times share reads."""
    bits = ((start - 1) ^ (end - 1)).bit_length() - 1
    return (end - 1) >> bits << bits
