"""Shared state of one stream's readers: requests to each broker, a budget of bytes, and known leaders.

Promises: one fetch in flight to each broker, with every partition that waits for it, those longest without data first;
the bytes requested and not yet consumed stay within the budget, except for one answer when nothing else is buffered; a
throttling broker gets no request during the pause that it demands (KIP-219); requests made at about the same time are
combined.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from kafka.errors import KafkaError, UnsupportedVersionError
from kafka.future import Future

from sluice.pipelines.model.kafka import FetchLimits, Isolation, TopicPartition
from sluice.pipelines.model.receipts import BrokerTraffic, Latency, TaskTraffic
from sluice.resources.kafka.connection.connections import MOST_THROTTLED, Wire
from sluice.resources.kafka.protocol import messages
from sluice.resources.kafka.protocol.kafka_errors import AnswerLost, error_name
from sluice.resources.kafka.protocol.messages import EARLIEST, LATEST, ClusterView, FetchAsk, FetchPart, Leadership

WAIT_MS = 500
"""How long a broker may hold an empty fetch (ms): Kafka's own default, which tiered storage counts on."""

K = TypeVar("K")
V = TypeVar("V")


class TrafficCounter:
    """Counts fetch traffic: once for each request and answer, never for a record.

    Filled on the fetching thread; after that, any thread may call `total`.
    """

    def __init__(self) -> None:
        self._brokers: dict[int, BrokerTraffic] = {}
        self._ends: dict[str, int] = {}

    def add(self, traffic: BrokerTraffic) -> None:
        """Add traffic with one broker."""
        total = self._brokers.get(traffic.node)
        self._brokers[traffic.node] = total + traffic if total else traffic

    def saw_end(self, tp: TopicPartition, high_watermark: int) -> None:
        """Record the current end of the partition's log."""
        self._ends[str(tp)] = max(high_watermark, self._ends.get(str(tp), 0))

    def total(self) -> TaskTraffic:
        """Return the current counts."""
        return TaskTraffic(tuple(b for _, b in sorted(self._brokers.items())), dict(self._ends))


class ByteBudget:
    """Bytes reserved for answers in flight, or received and not yet taken by the consumer."""

    def __init__(self, wire: Wire, limit: int) -> None:
        self._wire = wire
        self._limit = limit
        self._held = 0
        self._waiting: list[Future] = []

    async def reserve(self, want: int, minimum: int) -> int:
        """Reserve as much of `want` as fits, at least `minimum`; wait for that unless nothing is reserved."""
        while self._held and self._limit - self._held < minimum:
            self._waiting.append(turn := Future())
            await turn
        granted = min(want, max(self._limit - self._held, minimum))
        self._held += granted
        return granted

    def change(self, by: int) -> None:
        """Change the reserved bytes. Call it on the background thread."""
        self._held += by
        if by < 0:
            waiting, self._waiting = self._waiting, []
            for turn in waiting:
                turn.success(None)

    def release(self, count: int) -> None:
        """Release bytes. Call it on the consumer's thread."""
        self._wire.post(lambda: self.change(-count))


class StreamContext(NamedTuple):
    """The connections, limits and counters that all sessions of one stream share."""

    wire: Wire
    isolation: Isolation
    limits: FetchLimits
    budget: ByteBudget
    counter: TrafficCounter


class BrokerSession:
    """Fetches from one broker. `rack`: the location that we give it; empty: none."""

    def __init__(self, stream: StreamContext, node: int, rack: str) -> None:
        self._wire, self._isolation, self._limits, self._budget, self._counter = stream
        self._node = node
        self._rack = rack
        self._connections = 1
        self._paused = 0.0
        self._waiting: list[tuple[int, FetchAsk, Future]] = []
        self._serving = False

    async def fetch(self, ask: FetchAsk, fed: int) -> tuple[FetchPart, bool]:
        """Return the answer, and whether the partition stood first in the request.

        KIP-74 promises a whole batch only to the first. `fed` orders a request: the number of the last answer that
        brought this partition data.
        """
        answer = Future()
        self._waiting.append((fed, ask, answer))
        if not self._serving:
            self._serving = True
            self._wire.spawn(self._serve)
        part, first = await answer
        return part, first

    async def _serve(self) -> None:
        try:
            while self._waiting:
                await self._wire.sleep(0)  # readers that the last answer woke ask again before the next request is sent
                began = time.perf_counter_ns()
                granted = await self._reserve()
                await self._wire.sleep(await self._exchange(granted, _us_since(began)))
        finally:
            self._serving = False

    async def _reserve(self) -> int:
        limit = sum(min(ask.max_bytes, self._limits.partition_bytes) for _, ask, _ in self._waiting)
        want = min(self._limits.request_bytes, limit)
        return await self._budget.reserve(want, min(want, self._limits.partition_bytes))

    async def _exchange(self, granted: int, held_us: int) -> float:
        """Send one request, handle its answer, and return the seconds for which the broker wants no other."""
        batch, self._waiting = sorted(self._waiting, key=lambda waiting: waiting[0]), []
        asks = [ask for _, ask, _ in batch]
        received = 0
        try:
            request = messages.ask_fetch(asks, self._isolation, granted, WAIT_MS, self._rack)
            answer = await self._ask_broker(request, held_us)
            pause = min(answer.throttle_time_ms / 1000, MOST_THROTTLED)
            self._paused = 0.0 if answer.parts else self._paused + pause
            if pause and not (answer.parts or answer.error) and self._paused <= MOST_THROTTLED:
                self._waiting += batch  # it left all of them out: they are requested again
                return pause
            parts = parts_of(answer, asks)
            received = sum(len(part.records) for part in parts)
            for position, ((_, _, turn), part) in enumerate(zip(batch, parts, strict=True)):
                turn.success((part, position == 0))
            return pause
        except KafkaError as error:
            _fail((answer for _, _, answer in batch), error)
            return 0.0
        except BaseException as error:  # a bug, or the end: no reader may be left waiting
            _fail((answer for _, _, answer in batch), error)
            raise
        finally:
            self._budget.change(received - granted)

    async def _ask_broker(self, request: Any, held_us: int) -> messages.FetchAnswer:
        """Return the broker's answer to one fetch, and count it."""
        address, sent, again = "", 0, 0
        try:
            address, connections = await self._wire.reach(self._node)
            again, self._connections = max(connections - self._connections, 0), connections
            sent, began = 1, time.perf_counter_ns()
            answer: messages.FetchAnswer = await self._wire.send(self._node, request)
        except KafkaError as error:
            # A request without an answer counts, too: a profile shows brokers that do not answer.
            errors = {error_name(error): 1}
            self._counter.add(
                BrokerTraffic(self._node, address, sent, errors=errors, held_us=held_us, reconnects=again)
            )
            raise
        us, parts = _us_since(began), answer.parts.values()
        refused = [e for e in (answer.error, *(part.error for part in parts)) if e]
        self._counter.add(
            BrokerTraffic(
                self._node,
                address,
                sent,
                empty=int(not any(part.records for part in parts)),
                bytes=answer.bytes,
                latency=Latency.of(us),
                errors=dict(Counter(map(error_name, refused))),
                held_us=held_us,
                throttled=int(answer.throttle_time_ms > 0),
                throttle_ms=answer.throttle_time_ms,
                reconnects=again,
            )
        )
        return answer


def _us_since(began: int) -> int:
    """Return the microseconds since `perf_counter_ns` returned `began`."""
    return (time.perf_counter_ns() - began) // 1000


def parts_of(answer: messages.FetchAnswer, asks: Sequence[FetchAsk]) -> list[FetchPart]:
    """Return the answer for each ask; a broker may leave partitions out."""
    if answer.error:
        raise answer.error()
    parts = []
    for ask in asks:
        tp = ask.leadership.tp
        part = answer.parts.get((ask.leadership.topic_id, tp.partition) if answer.by_id else tp)
        parts.append(part or FetchPart(AnswerLost, -1, -1, -1, (), memoryview(b"")))
    return parts


async def find_local_starts(
    send: Callable[[int, Any], Awaitable[Any]], leader: int, leaderships: Iterable[Leadership]
) -> dict[TopicPartition, int]:
    """Return the first offset of each partition on its leader's own disks (KIP-405); 0 before Kafka 3.5.

    Below it, a fetch without bytes and without an error proves nothing: tiered storage may be slow, or its quota used
    up (KIP-956).
    """
    wanted = list(leaderships)
    try:
        listed = messages.read_offsets(await send(leader, messages.ask_local_starts(wanted)))
        starts = {leadership.tp: listed.get(leadership.tp, _LEFT_OUT) for leadership in wanted}
        for error in (start.error for start in starts.values() if start.error):
            raise error()
    except UnsupportedVersionError:  # also in place of one offset, from what only imitates Kafka
        return dict.fromkeys((leadership.tp for leadership in wanted), 0)
    return {tp: start.offset for tp, start in starts.items()}


_LEFT_OUT = messages.Listed(AnswerLost, -1, -1)


def _fail(answers: Iterable[Future], error: BaseException) -> None:
    for answer in answers:
        if not answer.is_done:
            answer.failure(error)


class Together(Generic[K, V]):
    """Combines keys of the same turn of the loop into one request, sent after the last of them."""

    def __init__(self, wire: Wire, ask: Callable[[Sequence[K]], Awaitable[Mapping[K, V]]]) -> None:
        self._wire = wire
        self._ask = ask
        self._waiting: dict[K, Future] = {}

    async def of(self, key: K) -> V:
        if not self._waiting:
            self._wire.spawn(self._flush)
        answer: V = await self._waiting.setdefault(key, Future())
        return answer

    async def _flush(self) -> None:
        await self._wire.sleep(0)
        waiting, self._waiting = self._waiting, {}
        try:
            results = await self._ask(list(waiting))
            for key, answer in waiting.items():
                answer.success(results[key])
        except KafkaError as error:
            _fail(waiting.values(), error)
        except BaseException as error:  # as above
            _fail(waiting.values(), error)
            raise


class Sources:
    """Known topics and leaders, and the lanes to them, for all readers of one stream."""

    def __init__(
        self, wire: Wire, isolation: Isolation, limits: FetchLimits, rack: str, counter: TrafficCounter
    ) -> None:
        self.wire = wire
        self.counter = counter
        self.isolation = isolation
        self.limits = limits
        self.rack = rack
        self.budget = ByteBudget(wire, limits.ahead_bytes - limits.kept_bytes)
        self.answers = 0
        """The number of answers with data, which orders readers by their last data."""
        self.checked: dict[str, int] = {}
        """The number of answers, by topic, when its id was requested last."""
        self._lanes: dict[tuple[int, str], BrokerSession] = {}
        self._known: dict[str, ClusterView] = {}
        self._layouts: Together[str, ClusterView] = Together(wire, self._ask_layouts)
        self._epochs: dict[int, Together[tuple[Leadership, int], int]] = {}
        self._epoch_ends: dict[tuple[Leadership, int], int] = {}

    def lane(self, node: int, rack: str) -> BrokerSession:
        if (node, rack) not in self._lanes:
            stream = StreamContext(self.wire, self.isolation, self.limits, self.budget, self.counter)
            self._lanes[node, rack] = BrokerSession(stream, node, rack)
        return self._lanes[node, rack]

    def next_answer(self) -> int:
        self.answers += 1
        return self.answers

    async def place(self, tp: TopicPartition, *, fresh: bool) -> Leadership:
        """Return the partition's leader, requested again if `fresh`. Raises kafka errors, also without a leader."""
        if fresh or tp.topic not in self._known:
            self._known[tp.topic] = await self._layouts.of(tp.topic)
        layout = self._known[tp.topic]
        if tp.topic in layout.errors:
            raise layout.errors[tp.topic]()
        leadership = layout.leaders.get(tp)
        if leadership is None or leadership.leader < 0:
            raise messages.missing(leadership)
        return leadership

    async def epoch_end(self, leadership: Leadership, epoch: int, minimum: int) -> int:
        """Return the end of `epoch` in the leader's log, −1 if it does not know.

        It is not requested again if it was at least `minimum`: a log becomes shorter only in a later leader epoch.
        """
        key = leadership, epoch
        if self._epoch_ends.get(key, -1) < minimum:
            if leadership.leader not in self._epochs:
                self._epochs[leadership.leader] = Together(self.wire, self._ask_epochs)
            self._epoch_ends[key] = await self._epochs[leadership.leader].of(key)
        return self._epoch_ends[key]

    async def bounds(self, leadership: Leadership) -> tuple[int, int]:
        """Return log start and high watermark."""
        offsets = []
        for moment in (EARLIEST, LATEST):
            request = messages.ask_offsets([(leadership, moment)], Isolation.READ_UNCOMMITTED)
            answer = messages.read_offsets(await self.wire.send(leadership.leader, request))
            listed = answer.get(leadership.tp, _LEFT_OUT)
            if listed.error:
                raise listed.error()
            offsets.append(listed.offset)
        return offsets[0], offsets[1]

    async def may_compact(self, leadership: Leadership) -> bool:
        """Return whether the topic is compacted; True if this client may not see that."""
        topic = leadership.tp.topic
        try:
            response = await self.wire.send(leadership.leader, messages.ask_configs([topic], leadership.leader))
        except UnsupportedVersionError:
            return True
        config = messages.read_configs(response).topics.get(topic)
        return config is None or not config.only_deletes

    async def _ask_layouts(self, topics: Sequence[str]) -> Mapping[str, ClusterView]:
        answers, layout = self.answers, await self.wire.layout(topics)
        self.checked |= dict.fromkeys(topics, answers)
        return dict.fromkeys(topics, layout)

    async def _ask_epochs(self, requests: Sequence[tuple[Leadership, int]]) -> Mapping[tuple[Leadership, int], int]:
        leader = requests[0][0].leader
        response: Any = await self.wire.send(leader, messages.ask_epoch_ends(requests))
        ends = dict.fromkeys((leadership.tp for leadership, _ in requests), messages.EpochEnd(AnswerLost, -1))
        ends |= messages.read_epoch_ends(response)
        if failed := [end.error for leadership, _ in requests if (end := ends[leadership.tp]).error]:
            raise failed[0]()
        return {(leadership, epoch): ends[leadership.tp].end for leadership, epoch in requests}
