"""The Cluster port: reads the state of a Kafka cluster and changes nothing.

Promises: a few requests to each leader however many partitions; an answer of a moment ago is reused instead of
requested again; leaders that move are followed, for a bounded time; every answer for a partition comes from its leader
at a known epoch (KIP-320).
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from kafka.errors import KafkaError, OffsetOutOfRangeError, UnknownError, UnknownTopicOrPartitionError

from sluice.pipelines.errors import BrokerTooOld, KafkaUnavailable, SluiceError
from sluice.pipelines.model.kafka import (
    Configs,
    Isolation,
    OffsetAtTime,
    OpenTransaction,
    PartitionState,
    Tail,
    TopicPartition,
)
from sluice.resources.kafka.cluster.markers import BUDGET_BYTES, REQUEST_BYTES, Markers
from sluice.resources.kafka.cluster.offsets_by_time import Unreadable, headers
from sluice.resources.kafka.connection.connection_settings import KafkaAccess
from sluice.resources.kafka.connection.connections import Patience, Wire
from sluice.resources.kafka.fetch.broker_sessions import WAIT_MS, find_local_starts, parts_of
from sluice.resources.kafka.protocol import messages
from sluice.resources.kafka.protocol.admin_api import ask_quorum, read_clock
from sluice.resources.kafka.protocol.kafka_errors import Location, is_passing
from sluice.resources.kafka.protocol.messages import EARLIEST, LATEST, ClusterView, Code, FetchAsk, Leadership

_MOVING_STARTS = 5  # attempts, while retention deletes the offsets just found
_MOMENT = 5.0  # seconds for which known leaders need no new request
_UNKNOWN_TOPIC_TRIES = 4  # a broker may not know a new topic yet

T = TypeVar("T")
Answer = tuple[Code, T | None]
AskLeader = Callable[[int, Sequence[Leadership]], Awaitable[Mapping[TopicPartition, Answer[T]]]]


class KafkaCluster:
    """A read-only view of one cluster. Opens no connection before the first request.

    `patience`: seconds to wait for absent leaders. `wire`: shares another's connections; its owner closes them.
    """

    def __init__(self, access: KafkaAccess, patience: float = 30.0, wire: Wire | None = None) -> None:
        self._wire = wire or Wire(access)
        self._lent = wire is not None
        self._patience = patience
        self._known: ClusterView | None = None
        self._listed: tuple[float, ClusterView] | None = None
        self._id = ""
        self._markers = Markers(self._read_headers, lambda leader, request: self._wire.send(leader, request))

    def close(self) -> None:
        if not self._lent:
            self._wire.close()

    def forget(self) -> None:
        """Discard the topic listing, which is out of date."""
        self._listed = None

    def get_age(self) -> int:
        """Return 0: `partitions` always asks Kafka for positions."""
        return 0

    def get_clock_lead(self) -> int | None:
        """Return by how many ms this machine's clock is ahead of the brokers', at least; None if unknown."""
        with contextlib.suppress(SluiceError):
            lead = self._wire.run("asking for the time", measure_lead, self._wire.send)
            return None if lead is None else int(lead * 1000)
        return None

    def cluster_id(self) -> str:
        """Return the cluster's own id, from the last metadata response if there was one."""
        return self._id or self._wire.run("asking for the cluster id", self._layout, ()).cluster_id

    def addresses(self) -> tuple[str, ...]:
        """Return `host:port` of every broker, as advertised, sorted."""
        brokers = self._wire.run("asking for the brokers", self._wire.brokers)
        return tuple(sorted(f"{broker.host}:{broker.port}" for broker in brokers))

    def topics(self) -> Mapping[str, str]:
        """Return every visible topic that is not internal: name → topic id as Kafka's tools print it.

        Raises BrokerTooOld without topic ids.
        """
        layout = self.layout()
        self._listed = time.monotonic(), layout
        return self.map_topic_ids(layout)

    def layout(self) -> ClusterView:
        """Return all metadata that a broker has of visible topics."""
        return self._wire.run("listing topics", self._layout, None)

    def map_topic_ids(self, layout: ClusterView) -> dict[str, str]:
        """Return the result of `topics` for this metadata."""
        return {name: self._with_id(name, layout.topics[name]) for name in sorted(layout.topics)}

    def glance(self, layout: ClusterView, topics: Collection[str]) -> dict[TopicPartition, PartitionState]:
        """Return the partitions of these topics as under read_committed, as far as their leaders answer at once.

        `layout`, a moment old, names the leaders.
        """

        states: dict[TopicPartition, PartitionState] = {}
        wanted = {tp for tp in layout.leaders if tp.topic in topics}
        ask = partial(self._describe, isolation=Isolation.READ_COMMITTED)
        self._wire.run("describing partitions", self._run_round, layout, wanted, states, ask)
        return states

    def begin(self, layout: ClusterView) -> None:
        """Take the leaders for later requests from this metadata, a moment old."""
        self._known, self._id = layout, layout.cluster_id
        self._markers.forget()

    def partitions(self, topics: Iterable[str], isolation: Isolation) -> tuple[PartitionState, ...]:
        """Return all partitions of the topics, sorted. Raises UnknownTopic, NotAuthorized, BrokerTooOld.

        Right after `topics`, their leaders are taken from its answer.
        """

        self._markers.forget()
        names = sorted(set(topics))
        listed = self._listed_now(names)
        wanted = {tp for tp in listed.leaders if tp.topic in names} if listed else None
        self._known = listed or self._known
        ask = partial(self._describe, isolation=isolation)
        states = self._wire.run("describing partitions", self._of_leaders, names, wanted, ask, listed)
        return tuple(states[tp] for tp in sorted(states))

    def _listed_now(self, names: Sequence[str]) -> ClusterView | None:
        """Return the listing of `topics`, once, if it is recent and has all of these topics.

        Positions of another moment need leaders of another moment.
        """
        (at, listed), self._listed = self._listed or (0.0, None), None
        fresh = listed if time.monotonic() - at < _MOMENT else None
        return fresh if fresh and all(name in fresh.topics for name in names) else None

    def offsets_at(
        self, times: Mapping[TopicPartition, int], max_skew: int | None = None
    ) -> Mapping[TopicPartition, OffsetAtTime | None]:
        """Return the first record at or after each time (ms), under read_uncommitted; None if there is none. With
        `max_skew`, return the boundary (`ports.Cluster.offsets_at`).

        A time before 1970 is taken as 1970: negative times have another meaning in Kafka. The leaders are those that
        `partitions` found last; they are looked up again when one refuses because it leads no more. Kafka itself may
        answer with a transaction's marker: `offsets_by_time` then finds the record behind it.
        """
        timestamps = {tp: max(time, 0) for tp, time in times.items()}
        offsets: dict[TopicPartition, OffsetAtTime | None] = {}
        for _ in range(_MOVING_STARTS):
            listed = self._listed_at({tp: time for tp, time in timestamps.items() if tp not in offsets})
            offsets |= {tp: None for tp, hit in listed.items() if hit is None}
            offsets |= self._markers.skip_markers(
                timestamps, {tp: hit for tp, hit in listed.items() if hit is not None}, max_skew
            )
            if len(offsets) == len(timestamps):
                return offsets
        tp = min(timestamps.keys() - offsets.keys())
        raise KafkaUnavailable(
            f"looking up offsets by time: the log of {tp} began later each time that it was asked",
            remedy="repeat; records are deleted faster than they can be read",
            topic=tp.topic,
            partition=tp.partition,
        )

    def _listed_at(self, times: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, OffsetAtTime | None]:
        """Return the answers of Kafka's own look-up (ListOffsets)."""

        async def ask(leader: int, leaderships: Sequence[Leadership]) -> Mapping[TopicPartition, Answer[OffsetAtTime]]:
            request = messages.ask_offsets(
                [(leadership, times[leadership.tp]) for leadership in leaderships], Isolation.READ_UNCOMMITTED
            )
            listed = messages.read_offsets(await self._wire.send(leader, request))
            return {
                tp: (at.error, OffsetAtTime(at.offset, at.timestamp) if at.offset >= 0 else None)
                for tp, at in listed.items()
            }

        return self._wire.run(
            "looking up offsets by time", self._of_leaders, _topics(times), set(times), ask, self._known
        )

    def _read_headers(self, tps: Sequence[TopicPartition], ask: AskLeader[T]) -> Mapping[TopicPartition, T]:
        wanted = dict.fromkeys(tps)
        doing = "looking behind transactions' markers"
        return self._wire.run(doing, self._of_leaders, _topics(wanted), set(wanted), ask, self._known)

    def epoch_ends(self, epochs: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        """Return the end of each leader epoch in today's log (KIP-101); below our position it means truncation.

        Partitions whose leader has nothing of that epoch are left out.
        """

        async def ask(leader: int, leaderships: Sequence[Leadership]) -> Mapping[TopicPartition, Answer[int]]:
            request = messages.ask_epoch_ends((leadership, epochs[leadership.tp]) for leadership in leaderships)
            ends = messages.read_epoch_ends(await self._wire.send(leader, request))
            return {tp: (end.error, end.end) for tp, end in ends.items()}

        doing = "looking up leader epochs"
        cached = self._known
        positions = self._wire.run(doing, self._of_leaders, _topics(epochs), set(epochs), ask, cached) if epochs else {}
        return {tp: end for tp, end in positions.items() if end >= 0}

    def read_checksums(self, tails: Mapping[TopicPartition, Tail]) -> Mapping[TopicPartition, int]:
        """Return the checksum of the batch that now has each tail's offset, as far as 64 MiB of batches go.

        The smallest are read first. Partitions without such a batch, or in an older record format, are left out.
        """
        by_size = sorted(tails, key=lambda tp: tails[tp].size)
        within = itertools.accumulate(tails[tp].size for tp in by_size)
        wanted = {tp: None for tp, total in zip(by_size, within, strict=True) if total <= BUDGET_BYTES}

        async def ask(leader: int, leaderships: Sequence[Leadership]) -> Mapping[TopicPartition, Answer[int]]:
            answers: dict[TopicPartition, Answer[int]] = {}
            while asks := [
                FetchAsk(o, tails[o.tp].offset, tails[o.tp].size) for o in leaderships if o.tp not in answers
            ]:
                request = messages.ask_fetch(asks, Isolation.READ_UNCOMMITTED, REQUEST_BYTES, WAIT_MS, "")
                for i, part in enumerate(parts_of(await self._wire.send(leader, request), asks)):
                    code = None if part.error is OffsetOutOfRangeError else part.error
                    if i == 0 or code or part.records:  # the others may not have fitted: only the first always does
                        answers[asks[i].leadership.tp] = code, _read_checksum(part.records, asks[i].position)
            return answers

        doing = "comparing the last landed batches"
        if not wanted:
            return {}
        checksums = self._wire.run(doing, self._of_leaders, _topics(wanted), set(wanted), ask, self._known)
        return {tp: checksum for tp, checksum in checksums.items() if checksum is not None}

    def open_transactions(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, OpenTransaction]:
        """Return the transaction that holds back each partition's last stable offset, if the cluster shows one.

        Only for explanations: brokers too old for it, and missing rights, leave out partitions or names.
        """

        async def ask(
            leader: int, leaderships: Sequence[Leadership]
        ) -> Mapping[TopicPartition, Answer[OpenTransaction | None]]:
            return messages.read_open(await self._wire.send(leader, messages.ask_producers(p.tp for p in leaderships)))

        wanted = dict.fromkeys(partitions)
        with contextlib.suppress(SluiceError):
            answers = self._wire.run("describing producers", self._of_leaders, _topics(wanted), set(wanted), ask)
            transactions = {tp: transaction for tp, transaction in answers.items() if transaction}
            names = self._wire.run("listing transactions", self._names, {t.producer_id for t in transactions.values()})
            return {tp: replace(t, name=names.get(t.producer_id, "")) for tp, t in transactions.items()}
        return {}

    def configs(self, topics: Iterable[str]) -> Configs:
        """Return how long topics keep records and brokers keep offsets, in one request.

        Only for explanations: missing rights leave topics, or the brokers' part, unknown.
        """
        with contextlib.suppress(SluiceError):
            return self._wire.run("describing settings", self._configs, sorted(set(topics)))
        return Configs()

    # -- on the background thread

    async def _layout(self, topics: Iterable[str] | None) -> ClusterView:
        patience = Patience(self._wire, self._patience)
        while True:
            try:
                return await self._load_layout(topics)
            except KafkaError as error:
                await patience.trouble(error)

    async def _load_layout(self, topics: Iterable[str] | None) -> ClusterView:
        layout = await self._wire.layout(topics)
        self._id = layout.cluster_id
        return layout

    async def _configs(self, topics: Sequence[str]) -> Configs:
        broker = min(b.node_id for b in await self._wire.brokers())
        return messages.read_configs(await self._wire.send(broker, messages.ask_configs(topics, broker)))

    async def _names(self, producers: set[int]) -> dict[int, str]:
        """Return the transactional ids of the producers, from all brokers that answer."""
        request = messages.ask_transactions(producers)

        async def one(broker: int) -> dict[int, str]:
            with contextlib.suppress(KafkaError):
                return messages.read_names(await self._wire.send(broker, request))
            return {}

        answers = await self._wire.gather(one(b.node_id) for b in await self._wire.brokers()) if producers else []
        return {producer: name for names in answers for producer, name in names.items()}

    async def _describe(
        self, leader: int, leaderships: Sequence[Leadership], isolation: Isolation
    ) -> Mapping[TopicPartition, Answer[PartitionState]]:
        """Read start, last stable offset and high watermark in this order: each can only be lower than the next."""
        positions = (
            self._offsets(leader, leaderships, time, level)
            for time, level in (
                (EARLIEST, Isolation.READ_UNCOMMITTED),
                (LATEST, isolation),
                (LATEST, Isolation.READ_UNCOMMITTED),
            )
        )
        # All are sent at once: a broker answers the requests of one connection in turn.
        others = self._log_bytes(leader, leaderships), self._read_local_starts(leader, leaderships)
        requests: list[Awaitable[Any]] = [*positions, *others]
        starts, stable, highs, sizes, local = await self._wire.gather(requests)
        answers: dict[TopicPartition, Answer[PartitionState]] = {}
        for leadership in leaderships:
            tp = leadership.tp
            if not (tp in starts and tp in stable and tp in highs):
                continue  # requested again
            start, end, high = starts[tp], stable[tp], highs[tp]
            state = PartitionState(
                topic=tp.topic,
                partition=tp.partition,
                topic_id=self._with_id(tp.topic, leadership.topic_id),
                leader=leader,
                leader_epoch=leadership.leader_epoch,
                log_start=start.offset,
                last_stable_offset=end.offset,
                high_watermark=high.offset,
                log_bytes=_estimate_log_bytes(sizes.get(tp), start.offset, local.get(tp, 0), high.offset),
                rack=leadership.rack,
            )
            answers[tp] = (start.error or end.error or high.error, state)
        return answers

    async def _offsets(
        self, leader: int, leaderships: Sequence[Leadership], time: int, isolation: Isolation
    ) -> dict[TopicPartition, messages.Listed]:
        request = messages.ask_offsets([(leadership, time) for leadership in leaderships], isolation)
        return messages.read_offsets(await self._wire.send(leader, request))

    async def _log_bytes(self, leader: int, leaderships: Sequence[Leadership]) -> dict[TopicPartition, int]:
        """Return the sizes of the logs; empty without DESCRIBE on the cluster: sizes only balance tasks."""
        try:
            response = await self._wire.send(leader, messages.ask_log_dirs(p.tp for p in leaderships))
        except KafkaError:
            return {}
        return messages.read_log_bytes(response)

    async def _read_local_starts(self, leader: int, leaderships: Sequence[Leadership]) -> dict[TopicPartition, int]:
        try:
            return await find_local_starts(self._wire.send, leader, leaderships)
        except KafkaError:
            return {}

    async def _of_leaders(
        self,
        topics: Sequence[str],
        wanted: set[TopicPartition] | None,
        ask: AskLeader[T],
        cached: ClusterView | None = None,
    ) -> dict[TopicPartition, T]:
        """Ask the leader of each wanted partition (None: all of the topics) and return the answers.

        Partitions whose leader has moved or is absent are retried until patience ends. `cached`: the leaders of a
        moment ago; leaders are looked up only when those do not answer for all partitions.
        """
        results: dict[TopicPartition, T] = {}
        if cached and wanted is not None:
            # Layouts are remembered: most requests need no metadata request before them.
            if not await self._run_round(cached, wanted, results, ask):
                return results
            self._known = None  # or every later request would wait for the same dead leader first
        patience = Patience(self._wire, self._patience)
        unknown = 0
        while True:
            try:
                layout = await self._load_layout(topics)
                self._known = layout if wanted is None else self._known
                failures = await self._run_round(layout, wanted, results, ask)
                failures |= {TopicPartition(t, -1): e() for t, e in layout.errors.items()}
            except KafkaError as error:
                await patience.trouble(error)
                continue
            # Rounds go on with missing partitions, until every wanted partition has an answer: callers get all, or an
            # error.
            if not failures:
                return results
            # A final failure counts before one that another try may mend.
            tp, failure = self._worst(failures)
            # A topic that was just created is unknown to some brokers for a moment.
            unknown += isinstance(failure, UnknownTopicOrPartitionError)
            try:
                if unknown >= _UNKNOWN_TOPIC_TRIES:
                    raise failure
                await patience.trouble(failure)
            except KafkaError as error:
                is_topic = tp.partition < 0
                what = f"topic {tp.topic}" if is_topic else f"partition {tp}"
                partition = None if is_topic else tp.partition
                raise self._wire.explain(error, what, Location(tp.topic, partition)) from None

    async def _run_round(
        self,
        layout: ClusterView,
        wanted: set[TopicPartition] | None,
        results: dict[TopicPartition, T],
        ask: AskLeader[T],
    ) -> dict[TopicPartition, KafkaError]:
        """Ask each leader once, concurrently, for the missing partitions; return the failures by partition."""
        failures: dict[TopicPartition, KafkaError] = {}
        by_leader: dict[int, list[Leadership]] = {}
        # Answers of earlier rounds stay: only partitions that moved, or whose leader failed, are asked again.
        for tp in layout.leaders if wanted is None else wanted:
            leadership = layout.leaders.get(tp)
            if tp in results or tp.topic in layout.errors:
                continue
            if leadership is None or leadership.leader < 0:
                failures[tp] = messages.missing(leadership)
            else:
                by_leader.setdefault(leadership.leader, []).append(leadership)

        async def one(leader: int, leaderships: list[Leadership]) -> None:
            try:
                answers = await ask(leader, leaderships)
            except KafkaError as error:
                # The connection failed: none of the leader's partitions has an answer.
                failures.update({leadership.tp: error for leadership in leaderships})
                return
            failures.update(
                {leadership.tp: UnknownError("left out") for leadership in leaderships if leadership.tp not in answers}
            )
            failures.update({tp: error() for tp, (error, _) in answers.items() if error})
            results.update({tp: value for tp, (error, value) in answers.items() if not error})  # type: ignore[misc]

        await self._wire.gather(one(leader, partitions) for leader, partitions in by_leader.items())
        return failures

    @staticmethod
    def _worst(failures: Mapping[TopicPartition, KafkaError]) -> tuple[TopicPartition, KafkaError]:
        """Return a failure that no waiting cures, if there is one, else any."""
        return min(failures.items(), key=lambda item: (is_passing(item[1]), item[0]))

    def _with_id(self, topic: str, topic_id: str) -> str:
        if not topic_id:
            raise BrokerTooOld(
                f"the brokers at {self._wire.bootstrap} give topic {topic} no id",
                remedy="Sluice needs Apache Kafka 2.8 or newer, with inter.broker.protocol.version 2.8 or newer",
                topic=topic,
            )
        return topic_id


async def measure_lead(send: Callable[[int | None, Any], Awaitable[Any]]) -> float | None:
    """Return by how many seconds this machine's clock is ahead of the brokers', at least; None if unknown.

    Zero if the brokers' time lies between request and answer. Needs DESCRIBE on the cluster.
    """
    sent_at = time.time()
    response = await send(None, ask_quorum())
    answered, there = time.time(), read_clock(response)
    if there is None:
        return None
    return min(0.0, answered - there / 1000) or max(0.0, sent_at - there / 1000)


def _estimate_log_bytes(local_bytes: int | None, start: int, local_start: int, end: int) -> int | None:
    """Return the bytes of the log: those on the leader's disks, and tiered storage in proportion to its offsets."""
    if local_bytes is None or local_start <= start:
        return local_bytes
    return local_bytes * (end - start) // (end - local_start) if local_start < end else None


def _topics(wanted: Mapping[TopicPartition, Any]) -> list[str]:
    return sorted({tp.topic for tp in wanted})


def _read_checksum(records: memoryview, offset: int) -> int | None:
    """Return the checksum of the batch that has the offset; None if there is none, or in an older format."""
    with contextlib.suppress(Unreadable):
        return next((batch.checksum for batch in headers(records, offset)[:1] if batch.base <= offset), None)
    return None
