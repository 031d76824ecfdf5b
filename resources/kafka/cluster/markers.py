"""Looks past transactions' markers: from Kafka's answers to a question by time to first records.

Promises: what the searches of all partitions want is read in rounds, one fetch to each leader, or as many as its bytes
need; what was seen is kept for the moment, so that looks at other times read little again, or nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kafka.errors import OffsetOutOfRangeError

from sluice.pipelines.model.kafka import Isolation, OffsetAtTime, TopicPartition
from sluice.resources.kafka.cluster.offsets_by_time import Answer, Finding, PartitionLog, StampSearch, Want
from sluice.resources.kafka.fetch.broker_sessions import WAIT_MS, parts_of
from sluice.resources.kafka.protocol import messages
from sluice.resources.kafka.protocol.messages import Code, FetchAsk, FetchPart, Leadership

REQUEST_BYTES = 16 << 20
"""Asked for in one fetch."""
_GIVEN = 8 << 20
"""What any broker gives in one answer (`fetch.max.bytes`, 55 MiB by default): up to there, what is empty is so because
the batch does not fit, and no marker is as large as that."""
BUDGET_BYTES = 64 << 20
"""Read on behind markers in one look, of all partitions together; of each at least and at most the bounds below."""
_LEAST, _MOST = 64 << 10, 1 << 20
_GROWTH = 8
_LARGEST = 8 << 20
_EMPTY_FOR_THE_END = 2
_MEMORY = 2_000_000
"""Batches and records that are remembered."""

Send = Callable[[int, Any], Awaitable[Any]]
Answers = Mapping[TopicPartition, tuple[Code, Answer | None]]
Ask = Callable[[int, Sequence[Leadership]], Awaitable[Answers]]
OfLeaders = Callable[[Sequence[TopicPartition], Ask], Mapping[TopicPartition, Answer | None]]


class Markers:
    """`of_leaders` asks each partition's leader by what it is given; `send` sends a request to a broker."""

    def __init__(self, of_leaders: OfLeaders, send: Send) -> None:
        self._of_leaders, self._send = of_leaders, send
        self._one_look = threading.Lock()
        self._seen: dict[TopicPartition, PartitionLog] = {}

    def forget(self) -> None:
        """Another moment begins."""
        with self._one_look:
            self._seen = {}

    def passed(
        self, times: Mapping[TopicPartition, int], hits: Mapping[TopicPartition, OffsetAtTime]
    ) -> dict[TopicPartition, OffsetAtTime | None]:
        """The first record at or after each time, by Kafka's answers; left out: where the log begins later by now.

        One look at a time: those that wait find what the others saw.
        """
        with self._one_look:
            return self._skip_markers(times, hits)

    def _skip_markers(
        self, times: Mapping[TopicPartition, int], hits: Mapping[TopicPartition, OffsetAtTime]
    ) -> dict[TopicPartition, OffsetAtTime | None]:
        offsets: dict[TopicPartition, OffsetAtTime | None] = {}
        if sum(log.size for log in self._seen.values()) > _MEMORY:
            self._seen = {}
        budget = min(max(BUDGET_BYTES // max(len(hits), 1), _LEAST), _MOST)
        searches = {
            tp: StampSearch(self._seen.setdefault(tp, PartitionLog(tp)), times[tp], hit, budget).run()
            for tp, hit in hits.items()
        }
        heard: dict[TopicPartition, Answer | None] = dict.fromkeys(searches)
        while wants := _advance(searches, heard, offsets):
            heard = dict(self._of_leaders(list(wants), _Round(wants, self._send).ask))
            for tp in [tp for tp, answer in heard.items() if answer is None]:
                del searches[tp], heard[tp], self._seen[tp]
        return offsets


def _advance(
    searches: Mapping[TopicPartition, Finding],
    heard: Mapping[TopicPartition, Answer | None],
    offsets: dict[TopicPartition, OffsetAtTime | None],
) -> dict[TopicPartition, Want]:
    """What the searches want next, now that they hear this (None: as they begin); those that end, into `found`."""
    wants = {}
    for tp, answer in heard.items():
        try:
            wants[tp] = next(searches[tp]) if answer is None else searches[tp].send(answer)
        except StopIteration as end:
            offsets[tp] = end.value
    return wants


@dataclass(slots=True)
class _Open:
    """A want that is not answered yet. `tries` came back empty, `empty` of them although it stood first."""

    leadership: Leadership
    want: Want
    tries: int = 0
    empty: int = 0

    @property
    def size(self) -> int:
        grown: int = self.want.size * _GROWTH ** min(self.tries, 8)
        return min(grown, max(_LARGEST, self.want.size))


class _Round:
    """The wants of one round. A fetch gives the partition that stands first a whole batch, whatever its size (KIP-74),
    the others only one that fits: what came back empty stands further ahead the next time."""

    def __init__(self, wants: Mapping[TopicPartition, Want], send: Send) -> None:
        self._wants, self._send = wants, send

    async def ask(self, leader: int, leaderships: Sequence[Leadership]) -> Answers:
        """None: the position lies outside of the log."""
        answers: dict[TopicPartition, tuple[Code, Answer | None]] = {}
        open_ = [
            _Open(leadership, self._wants[leadership.tp]) for leadership in sorted(leaderships, key=lambda p: p.tp)
        ]
        while open_:
            batch = _fitting(sorted(open_, key=lambda o: -o.tries))
            asks = [FetchAsk(o.leadership, o.want.position, o.size) for o in batch]
            request = messages.ask_fetch(asks, Isolation.READ_UNCOMMITTED, 2 * REQUEST_BYTES, WAIT_MS, "")
            parts = parts_of(await self._send(leader, request), asks)
            room = _GIVEN
            for at, (o, part) in enumerate(zip(batch, parts, strict=True)):
                if (answer := _answer_of(o, part, first=at == 0, room=room)) is not None:
                    answers[o.leadership.tp] = answer
                room -= len(part.records)
            open_ = [o for o in open_ if o.leadership.tp not in answers]
        return answers


def _fitting(open_: Sequence[_Open]) -> list[_Open]:
    """As many as one fetch has room for, at least one."""
    batch, size = [open_[0]], open_[0].size
    for o in open_[1:]:
        if (size := size + o.size) > REQUEST_BYTES:
            break
        batch.append(o)
    return batch


def _answer_of(o: _Open, part: FetchPart, *, first: bool, room: int) -> tuple[Code, Answer | None] | None:
    """What the answer says; None: ask again."""
    if part.error is OffsetOutOfRangeError:
        return None, None
    if part.error:
        return part.error, None
    heard = Answer(part.records, part.high_watermark, end=o.want.position >= part.high_watermark)
    if heard.end or len(part.records) >= (o.want.size if o.want.complete else 1):
        return None, heard
    if o.want.may_lack and not first and room >= o.want.size:
        return None, heard
    o.tries += 1
    o.empty += first and not len(part.records)
    return (None, heard._replace(end=True)) if o.empty >= _EMPTY_FOR_THE_END else None
