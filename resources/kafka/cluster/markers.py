"""Skips transaction markers in Kafka's answers to look-ups by time, to find the first records.

Promises: the reads of all searches go out in rounds, with one fetch to each leader, or as many as its bytes need;
results are kept for the moment, so that look-ups of other times read little or nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kafka.errors import OffsetOutOfRangeError

from sluice.pipelines.model.kafka import Isolation, OffsetAtTime, TopicPartition
from sluice.resources.kafka.cluster.offsets_by_time import WALK_BYTES, Answer, Finding, PartitionLog, StampSearch, Want
from sluice.resources.kafka.fetch.broker_sessions import WAIT_MS, find_local_starts, parts_of
from sluice.resources.kafka.protocol import messages
from sluice.resources.kafka.protocol.kafka_errors import NoRecordsReturned
from sluice.resources.kafka.protocol.messages import Code, FetchAsk, FetchPart, Leadership

REQUEST_BYTES = 16 << 20
"""Bytes requested in one fetch."""
_GIVEN = 8 << 20
"""Bytes that any broker returns in one answer (`fetch.max.bytes`, 55 MiB by default). Up to there, an answer is empty
only because the batch does not fit, and no marker is that large."""
BUDGET_BYTES = 64 << 20
"""Bytes read behind markers in one look-up, for all partitions together; the bounds below hold for each."""
_LEAST, _MOST = 64 << 10, 1 << 20
_LEAST_NEAR = 4 << 10
_GROWTH = 8
_LARGEST = 8 << 20
_EMPTY_FOR_THE_END = 2
_MEMORY = 2_000_000
"""Limit on cached batches and records."""

Send = Callable[[int, Any], Awaitable[Any]]
Answers = Mapping[TopicPartition, tuple[Code, Answer | None]]
Ask = Callable[[int, Sequence[Leadership]], Awaitable[Answers]]
OfLeaders = Callable[[Sequence[TopicPartition], Ask], Mapping[TopicPartition, Answer | None]]


class Markers:
    """Finds the first records behind markers. `of_leaders` runs an `Ask` at each partition's leader; `send` sends a
    request to a broker."""

    def __init__(self, of_leaders: OfLeaders, send: Send) -> None:
        self._of_leaders, self._send = of_leaders, send
        self._one_look = threading.Lock()
        self._seen: dict[TopicPartition, PartitionLog] = {}
        self._local_starts: dict[TopicPartition, int] = {}

    def forget(self) -> None:
        """Discard cached reads: another moment begins."""
        with self._one_look:
            self._seen, self._local_starts = {}, {}

    def skip_markers(
        self,
        times: Mapping[TopicPartition, int],
        hits: Mapping[TopicPartition, OffsetAtTime],
        max_skew: int | None = None,
    ) -> dict[TopicPartition, OffsetAtTime | None]:
        """Return the first record at or after each time, starting from Kafka's answers; with `max_skew`, the boundary.

        Partitions whose log now starts later are left out. One search runs at a time; waiting threads reuse its reads.
        """
        with self._one_look:
            return self._skip_markers(times, hits, max_skew)

    def _skip_markers(
        self,
        times: Mapping[TopicPartition, int],
        hits: Mapping[TopicPartition, OffsetAtTime],
        max_skew: int | None,
    ) -> dict[TopicPartition, OffsetAtTime | None]:
        offsets: dict[TopicPartition, OffsetAtTime | None] = {}
        if sum(log.size for log in self._seen.values()) > _MEMORY:
            self._seen = {}
        budget = min(max(BUDGET_BYTES // max(len(hits), 1), _LEAST), _MOST)
        logs = {tp: self._seen.setdefault(tp, PartitionLog(tp)) for tp in hits}
        near = max(min(REQUEST_BYTES // max(len(hits), 1), WALK_BYTES), _LEAST_NEAR)
        searches = {tp: StampSearch(logs[tp], times[tp], hit, budget, near, max_skew).run() for tp, hit in hits.items()}
        heard: dict[TopicPartition, Answer | None] = dict.fromkeys(searches)
        while wants := _advance(searches, heard, offsets):
            heard = dict(self._of_leaders(list(wants), _Round(wants, self._send, self._local_starts).ask))
            for tp in [tp for tp, answer in heard.items() if answer is None]:
                del searches[tp], heard[tp], self._seen[tp]
        return offsets


def _advance(
    searches: Mapping[TopicPartition, Finding],
    heard: Mapping[TopicPartition, Answer | None],
    offsets: dict[TopicPartition, OffsetAtTime | None],
) -> dict[TopicPartition, Want]:
    """Return the next read of each search, given these answers (None: just started); finished ones go into
    `offsets`."""
    wants = {}
    for tp, answer in heard.items():
        try:
            wants[tp] = next(searches[tp]) if answer is None else searches[tp].send(answer)
        except StopIteration as end:
            offsets[tp] = end.value
    return wants


@dataclass(slots=True)
class _PendingRead:
    """A pending read. `tries`: answers that were too short; `empty`: those of them without bytes although it stood
    first."""

    leadership: Leadership
    want: Want
    tries: int = 0
    empty: int = 0

    @property
    def size(self) -> int:
        grown: int = self.want.size * _GROWTH ** min(self.tries, 8)
        return min(grown, max(_LARGEST, self.want.size))


class _Round:
    """The reads of one round. A fetch returns a whole batch, whatever its size, for its first partition (KIP-74), for
    the others only one that fits: unanswered reads move to the front of the next fetch."""

    def __init__(
        self, wants: Mapping[TopicPartition, Want], send: Send, local_starts: dict[TopicPartition, int]
    ) -> None:
        self._wants, self._send, self._local_starts = wants, send, local_starts

    async def ask(self, leader: int, leaderships: Sequence[Leadership]) -> Answers:
        """Return the answers; None in place of one if the position is outside the log."""
        answers: dict[TopicPartition, tuple[Code, Answer | None]] = {}
        open_ = [
            _PendingRead(leadership, self._wants[leadership.tp])
            for leadership in sorted(leaderships, key=lambda p: p.tp)
        ]
        while open_:
            batch = _fitting(sorted(open_, key=lambda o: -o.tries))
            asks = [FetchAsk(o.leadership, o.want.position, o.size) for o in batch]
            request = messages.ask_fetch(asks, Isolation.READ_UNCOMMITTED, 2 * REQUEST_BYTES, WAIT_MS, "")
            parts = parts_of(await self._send(leader, request), asks)
            room = _GIVEN
            doubtful = []  # answered without bytes
            for at, (o, part) in enumerate(zip(batch, parts, strict=True)):
                if (answer := _answer_of(o, part, first=at == 0, room=room)) is not None:
                    answers[o.leadership.tp] = answer
                    if not (part.error or part.records or o.want.position >= part.high_watermark):
                        doubtful.append(o)
                room -= len(part.records)
            unknown = [leadership for leadership in leaderships if leadership.tp not in self._local_starts]
            if doubtful and unknown:
                self._local_starts |= await find_local_starts(self._send, leader, unknown)
            for o in doubtful:
                if o.want.position >= self._local_starts[o.leadership.tp]:
                    continue
                if o.empty >= _EMPTY_FOR_THE_END:
                    answers[o.leadership.tp] = NoRecordsReturned, None
                else:
                    del answers[o.leadership.tp]
                    o.tries += 1  # it moves to the front
            open_ = [o for o in open_ if o.leadership.tp not in answers]
        return answers


def _fitting(open_: Sequence[_PendingRead]) -> list[_PendingRead]:
    """Return as many as fit in one fetch, at least one."""
    batch, size = [open_[0]], open_[0].size
    for o in open_[1:]:
        if (size := size + o.size) > REQUEST_BYTES:
            break
        batch.append(o)
    return batch


def _answer_of(o: _PendingRead, part: FetchPart, *, first: bool, room: int) -> tuple[Code, Answer | None] | None:
    """Return the answer, or None to ask again."""
    if part.error is OffsetOutOfRangeError:
        return None, None
    if part.error:
        return part.error, None
    end = o.want.position >= part.high_watermark
    heard = Answer(part.records, part.high_watermark, end, part.log_start)
    # The first one's batch is whole: one that is smaller than expected was compacted since its header was read.
    enough = o.want.size if o.want.complete and not first else 1
    if heard.end or len(part.records) >= enough:
        return None, heard
    if o.want.may_lack and not first and room >= o.want.size:
        return None, heard
    o.tries += 1
    o.empty += first and not len(part.records)
    return (None, heard._replace(end=True)) if o.empty >= _EMPTY_FOR_THE_END else None
