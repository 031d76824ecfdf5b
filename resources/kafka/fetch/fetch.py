"""The Fetcher port: raw record bytes of offset ranges, fetched ahead of the decoder.

Promises: ranges start in order, `active_slices` at once, those of one partition one after another; the bytes buffered
ahead of the consumer stay within `ahead_bytes`, except for one answer when nothing else is buffered (a record batch
comes whole, whatever its size). Each range ends with either one `last` or one FetchFailed. Closing ends thread and
connections.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kafka.errors import KafkaError

from sluice.pipelines.errors import KafkaUnavailable, SluiceError
from sluice.pipelines.model.kafka import FetchLimits, Isolation, TopicPartition
from sluice.pipelines.model.plans import Slice
from sluice.pipelines.model.traffic import TaskTraffic
from sluice.pipelines.ports import Fetched, FetchFailed
from sluice.resources.kafka.connection.connection_settings import KafkaAccess
from sluice.resources.kafka.connection.connections import Wire
from sluice.resources.kafka.fetch.broker_sessions import Sources, TrafficCounter
from sluice.resources.kafka.fetch.range_reader import SliceReader
from sluice.resources.kafka.protocol.kafka_errors import is_passing

_ANSWER_BYTES = 1 << 30
"""The largest accepted answer: a fetch of the request's size, or one record batch of any size in use."""
_LIVELY = 5.0  # seconds between checks that the background thread is alive
_SHARE_TOLD = 8  # consumed bytes are reported to the fetching thread by this share of `ahead_bytes`, or when we wait


class KafkaFetcher:
    """Fetches offset ranges of one Kafka. Opens no connection before a stream is consumed.

    `isolation` as in the plan; `rack` (client.rack, KIP-392) lets a leader send us to a replica near us; `patience`:
    seconds without progress after which a range fails with KafkaUnavailable. After that, later ranges of its partition
    are tried without waiting, as are all others until something is read again.
    """

    def __init__(self, access: KafkaAccess, isolation: Isolation, *, rack: str = "", patience: float = 60.0) -> None:
        self._access = access
        self._isolation = isolation
        self._rack = rack
        self._patience = patience
        self._streams: set[_Stream] = set()
        self._counter = TrafficCounter()

    def stream(self, slices: Sequence[Slice], limits: FetchLimits) -> Iterator[Fetched | FetchFailed]:
        """Yield bytes of the ranges from their leaders, fetched ahead in a thread that starts with the first `next`.

        `aborted` of each item is the broker's list under read_committed: transactions (producer id, first offset) that
        were aborted and overlap its bytes. Close the iterator, or the fetcher, to end early.
        """
        wire = Wire(self._access, _ANSWER_BYTES)
        stream = _Stream(Sources(wire, self._isolation, limits, self._rack, self._counter), slices, self._patience)
        self._streams.add(stream)
        try:
            yield from stream.items()
        finally:
            self._streams.discard(stream)
            stream.close()

    def traffic(self) -> TaskTraffic:
        """Return the traffic of all streams of this fetcher."""
        return self._counter.total()

    def close(self) -> None:
        """End every stream; a pending `next` raises KafkaUnavailable."""
        for stream in list(self._streams):
            stream.close()


class _End:
    pass


class _Stream:
    """One thread's readers on one side, one consumer on the other, a queue between them."""

    def __init__(self, sources: Sources, slices: Sequence[Slice], patience: float) -> None:
        self._sources = sources
        self._patience = patience
        self._waiting = list(enumerate(slices))
        self._active: set[TopicPartition] = set()
        self._given_up: set[TopicPartition] = set()
        self._answers_then = -1
        self._taken = 0
        self._queue: queue.SimpleQueue[Fetched | FetchFailed | BaseException | _End] = queue.SimpleQueue()

    def items(self) -> Iterator[Fetched | FetchFailed]:
        """Yield the items of the readers until all have ended."""
        self._sources.wire.post(self._admit)
        while True:
            start = time.perf_counter_ns()
            item = self._next()
            match item:
                case Fetched():
                    self._take(len(item.records))
                    yield replace(item, waited_ns=time.perf_counter_ns() - start)
                case FetchFailed():
                    yield item
                case _End():
                    return
                case error:
                    raise error

    def close(self) -> None:
        self._queue.put(
            KafkaUnavailable("the stream was closed while it was being read", remedy="read the slices again")
        )
        self._sources.wire.close()

    def _next(self) -> Fetched | FetchFailed | BaseException | _End:
        with contextlib.suppress(queue.Empty):
            return self._queue.get_nowait()
        self._give_back()
        while True:
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=_LIVELY)
            if not self._sources.wire.alive:
                raise KafkaUnavailable("the thread that fetches has died", remedy="read the slices again")

    def _take(self, size: int) -> None:
        """Report consumed bytes of several items at once: waking the other thread costs more than a small range's
        bytes."""
        self._taken += size
        if self._taken * _SHARE_TOLD >= self._sources.limits.ahead_bytes:
            self._give_back()

    def _give_back(self) -> None:
        if self._taken:
            self._sources.budget.release(self._taken)
            self._taken = 0

    # -- on the background thread

    def _admit(self) -> None:
        """Start the ranges that may start; end the stream when nothing is left."""
        while len(self._active) < self._sources.limits.active_slices:
            ready = (item for item in self._waiting if item[1].tp not in self._active)
            if (item := next(ready, None)) is None:
                break
            self._waiting.remove(item)
            self._active.add(item[1].tp)
            # An unexpected error is a bug: the consumer must see it instead of waiting without end.
            self._sources.wire.spawn(self._read, *item).add_errback(self._queue.put)
        if not self._active:
            self._queue.put(_End())

    async def _read(self, index: int, piece: Slice) -> None:
        reader = SliceReader(self._sources, index, piece, self._queue.put, self._patience_with(piece.tp))
        try:
            await reader.run()
        except SluiceError as error:
            self._queue.put(FetchFailed(index, error))
        except (KafkaError, OSError, ValueError) as error:
            if is_passing(error):
                self._given_up.add(piece.tp)
                self._answers_then = self._sources.answers
            self._queue.put(FetchFailed(index, self._explain(error, piece, reader.position)))
        self._active.remove(piece.tp)
        self._admit()

    def _patience_with(self, tp: TopicPartition) -> float:
        """Return the patience for a range: 0 if waiting just failed, or each range of a dead leader would take its
        time."""
        vain = tp in self._given_up or self._sources.answers == self._answers_then
        return 0.0 if vain else self._patience

    def _explain(self, error: BaseException, piece: Slice, position: int) -> SluiceError:
        return self._sources.wire.explain(
            error,
            f"reading {piece.tp} at {position}",
            topic=piece.topic,
            partition=piece.partition,
            start=position,
            end=piece.end,
        )
