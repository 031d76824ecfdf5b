"""Connections to the brokers of one cluster, driven by one background thread.

kafka-python connects, logs in (SASL, TLS) and negotiates versions; this module chooses the broker for each request, and
when to give up. In this package only `connections`, `sasl`, `zero_copy_transport` and the request modules of `protocol`
touch kafka-python's internal API.

Promises: the thread starts, and the first socket opens, with the first `run`; every wait has an end; `close` ends
thread and sockets at once. Coroutines run on the background thread, one at a time: their shared state needs no locks.
If a retry could hide the effect of a lost request to a coordinator, the request ends in `Unknown`.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from kafka import errors as kafka_errors
from kafka.errors import KafkaError
from kafka.future import Future
from kafka.net.selector import NetworkSelector

from sluice.pipelines.errors import KafkaUnavailable, SluiceError, Unknown
from sluice.pipelines.feed.rights import Right
from sluice.pipelines.model.consumer_groups import Broker
from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.resources.kafka.connection.connection_settings import Connecting, KafkaAccess, connecting
from sluice.resources.kafka.connection.zero_copy_transport import Manager
from sluice.resources.kafka.protocol import group_api, messages
from sluice.resources.kafka.protocol.group_api import GROUP
from sluice.resources.kafka.protocol.kafka_errors import (
    NOWHERE,
    AnswerLost,
    BrokerNotReached,
    Location,
    NoAddress,
    error_text,
    explain,
    is_hopeless,
    is_passing,
)

ANSWER_BYTES = 100 << 20
"""The largest answer that is not a fetch: metadata of a very large cluster."""
_REFUSED_SECONDS = 3.0  # how long to retry addresses that refuse at once: a broker may be starting
_PAUSE = 0.1
MOST_THROTTLED = 300.0
"""Seconds for which a broker may pause us without giving data. After that it counts as silent."""
_SHARES = 3  # after 1/_SHARES of a request's time, a silent broker is no longer the only one asked
_DEDICATED = "coordinator-"

_LOST = (
    kafka_errors.KafkaConnectionError,
    kafka_errors.RequestTimedOutError,
    kafka_errors.KafkaProtocolError,
    kafka_errors.Cancelled,
)
T = TypeVar("T")

# kafka-python logs each failed attempt as an error; our errors report it once, when it matters.
for _name in ("kafka.net", "kafka.cluster", "kafka.protocol"):
    if logging.getLogger(_name).level == logging.NOTSET:
        logging.getLogger(_name).setLevel(logging.CRITICAL)


class Wire:
    """The connections to one cluster. Use from any thread; `run` and `spawn` hand work to the background thread."""

    def __init__(self, access: KafkaAccess, answer_bytes: int = ANSWER_BYTES, rights: Sequence[Right] = ()) -> None:
        """`rights`: needed by its work, for errors about a missing one."""
        self._settings: Connecting = connecting(access, answer_bytes)
        self._rights = rights
        self._lock = threading.Lock()
        self._net: Any = None
        self._manager: Any = None
        self._bootstrapping: Future | None = None
        self._knows_brokers = self._knew_brokers = False
        self._troubles: dict[Any, str] = {}
        self._made: dict[int, tuple[Any, int]] = {}
        self._coordinators: dict[tuple[int, str, str], Any] = {}
        self._closed = False

    @property
    def bootstrap(self) -> str:
        return self._settings.bootstrap

    @property
    def client_id(self) -> str:
        return self._settings.client_id

    # -- from outside the background thread

    def run(self, doing: str, function: Callable[..., Awaitable[T]], *args: Any, rights: Sequence[Right] = ()) -> T:
        """Run the coroutine and return its result. Kafka's errors become ours; `doing` begins their message."""
        try:
            result: T = self._loop().run(function, *args)
        except (KafkaError, OSError, ValueError) as error:
            raise self.explain(error, doing, rights=rights) from None
        return result

    def explain(
        self, error: BaseException, doing: str, where: Location = NOWHERE, *, rights: Sequence[Right] = ()
    ) -> SluiceError:
        """Return the error as one of ours, with our identity; `rights`: needed here, if other than the wire's."""
        return explain(error, self._settings.grantee, doing, where, rights=rights or self._rights)

    def spawn(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Future:
        """Start a coroutine from any thread; the future is its outcome."""
        return self._loop().call_soon_with_future(function, *args)

    def post(self, callback: Callable[[], Any]) -> None:
        """Call it on the background thread, soon; do nothing if that has ended."""
        with contextlib.suppress(RuntimeError, KafkaUnavailable):
            self._loop().call_soon_threadsafe(callback)

    @property
    def alive(self) -> bool:
        """True while the background thread runs."""
        thread = None if self._net is None else self._net._io_thread
        return thread is not None and thread.is_alive()

    def close(self) -> None:
        """End thread and connections; pending requests fail. Idempotent."""
        with self._lock:
            done, self._closed = self._closed or self._net is None, True
        if done:
            return
        with contextlib.suppress(KafkaError, RuntimeError):
            self._net.run(self._manager.close)
            self._net.run(self._manager.abandon)
        self._net.close()
        self._manager.close_sockets()

    def borrow(self, rights: Sequence[Right] = ()) -> Wire:
        """Return this wire for a group of one feed, with that feed's rights."""
        return cast(Wire, Borrowed(self, rights))

    def hang_up(self, borrower: str) -> None:
        """End a borrower's connections to coordinators."""
        if self.alive:
            self.post(lambda: self._hang_up(borrower))

    def _loop(self) -> Any:
        with self._lock:
            if self._closed:
                raise KafkaUnavailable("the connection to Kafka was closed", remedy="open it again")
            if self._net is None:
                # A step may wait for the interpreter lock; that is no reason for a warning.
                net = NetworkSelector(client_id=self.client_id, slow_task_threshold_secs=0)
                try:
                    self._manager = Manager(net, **self._settings.options)
                except ValueError:
                    net.close()
                    raise
                net.start()
                self._net = net
            return self._net

    # -- on the background thread

    async def sleep(self, seconds: float) -> None:
        await self._net.sleep(seconds)

    async def gather(self, coroutines: Iterable[Awaitable[T]]) -> list[T]:
        """Run them concurrently; raise the first error when all have ended."""
        futures = [self._net.call_soon_with_future(c) for c in coroutines]
        for future in futures:
            with contextlib.suppress(Exception):
                await future
        return [await future for future in futures]

    async def within(self, future: Future, seconds: float) -> Any:
        """Return the future's outcome. Raises KafkaTimeoutError if it does not come in time."""
        return await self._manager.wait_for(future, seconds * 1000)

    async def send(self, node: int | str | None, request: Any, seconds: float | None = None) -> Any:
        """Return the broker's response. `node` None: the first broker to answer, for requests that may be sent twice.

        Raises AnswerLost if the request was sent and no answer came, other kafka errors if it was not sent.
        """
        await self._find_brokers()
        limit = seconds or self._settings.request_seconds
        return await (self._ask_any(request, limit) if node is None else self._ask(node, request, limit))

    async def _ask(self, node: int | str, request: Any, seconds: float) -> Any:
        try:
            sent = await self._submit(node, request, seconds)
        except KafkaError as error:
            if not is_passing(error):
                raise
            raise BrokerNotReached(self._about(node, error)) from None
        try:
            response = await sent
        except _LOST as error:
            raise AnswerLost(self._about(node, error)) from None
        self._troubles.pop(node, None)
        return response

    async def _submit(self, node: int | str, request: Any, seconds: float) -> Future:
        connection = self._manager.get_connection(node)
        await self._ready(connection)
        # A throttling broker reads nothing from the connection now (KIP-219).
        until = time.monotonic() + MOST_THROTTLED
        while connection.connected and "throttle" in connection.paused:
            if time.monotonic() > until:
                raise kafka_errors.ThrottlingQuotaExceededError
            await self.sleep(_PAUSE / 2)
        sent: Future = connection.send_request(request, request_timeout_ms=seconds * 1000)
        if sent.is_done and sent.exception:
            raise sent.exception
        return sent

    async def _ask_any(self, request: Any, seconds: float) -> Any:
        """Ask the least busy broker, and the next one when it fails or stays silent for a while.

        When none of them answers, the next request asks the bootstrap addresses for other brokers (KIP-899).
        """
        start, attempts = time.monotonic(), []
        nodes = [broker.node_id for broker in self._manager.cluster.brokers()]
        # Those with the fewest requests in flight first, those that just failed last.
        nodes = sorted(random.sample(nodes, len(nodes)), key=self._load)
        for node in nodes:
            attempts.append(self._net.call_soon_with_future(self._ask, node, copy.copy(request), seconds))
            remaining = seconds - (time.monotonic() - start)
            share = remaining if node == nodes[-1] else min(remaining, seconds / max(len(nodes), _SHARES))
            with contextlib.suppress(KafkaError):
                return await self.within(_first_of(attempts), share)
        self._knows_brokers = False
        silent = kafka_errors.KafkaTimeoutError(seconds)
        errors = [a.exception or AnswerLost(self._about(n, silent)) for n, a in zip(nodes, attempts, strict=True)]
        for error in filter(is_hopeless, errors):
            raise error
        raise BrokerNotReached("no broker answers; " + ", ".join(map(error_text, errors)))

    def _load(self, node: int) -> tuple[bool, int, bool]:
        connection = self._manager._conns.get(node)
        connected = connection is not None and connection.connected
        under_way = len(connection.in_flight_requests) if connected else 0
        return self._manager.connection_delay(node) > 0, under_way, not connected

    def _about(self, node: int | str, error: BaseException) -> str:
        """Describe a broker and its error; while we back off from it, the error is the last one before that."""
        if not isinstance(error, kafka_errors.NodeNotReadyError):
            self._troubles[node] = error_text(error)
        broker = self._manager.cluster.broker_metadata(node)
        name = f"broker {str(node).removeprefix(_DEDICATED).rpartition('/')[2]}"
        if broker is None:
            return f"{name} is not there at this moment"
        return f"{name} at {broker.host}:{broker.port}: {self._troubles.get(node, 'not ready')}"

    async def layout(self, topics: Iterable[str] | None, node: int | None = None) -> messages.ClusterView:
        """Return metadata of the topics (None: all) as `node` (None: any broker) has it."""
        response = await self.send(node, messages.ask_layout(topics))
        self._manager.cluster._brokers = {broker.node_id: broker for broker in response.brokers}
        return messages.read_layout(response)

    async def reach(self, node: int) -> tuple[str, int]:
        """Connect and log in to a broker unless that is done; return its address and the number of connections made.

        Raises BrokerNotReached.
        """
        connection = await self._connect(node)
        before, count = self._made.get(node, (None, 0))
        if connection is not before:
            count += 1
            self._made[node] = connection, count
        broker = self._manager.cluster.broker_metadata(node)
        return f"{broker.host}:{broker.port}" if broker else "", count

    async def _connect(self, node: int) -> Any:
        await self._find_brokers()
        try:
            connection = self._manager.get_connection(node)
            await self._ready(connection)
        except KafkaError as error:
            if not is_passing(error):
                raise
            raise BrokerNotReached(self._about(node, error)) from None
        return connection

    async def brokers(self) -> list[Any]:
        """Return every broker (`node_id`, `host`, `port`, `rack`), as listed by the first bootstrap address that
        answers."""
        await self._find_brokers()
        return list(self._manager.cluster.brokers())

    async def release(self, node: int) -> tuple[int, ...]:
        """Return the broker's release, as far as its protocol shows it. Connects to it, and logs in."""
        release: tuple[int, ...] = (await self._connect(node)).broker_version
        return release

    async def coordinator(self, kind: int, key: str, borrower: str = "") -> Any:
        """Return the node to ask about a group or transactional id; cached until `forget_coordinator`."""
        cache_key = kind, key, borrower
        if cache_key not in self._coordinators:
            # A separate connection, also for each borrower: a pending join would hold up requests sent after it.
            coordinator = await self.find_coordinator(kind, key)
            node = f"{_DEDICATED}{borrower}{coordinator.node}"
            broker = type(self._manager.cluster.bootstrap_brokers()[0])
            self._manager.cluster._coordinator_brokers[node] = broker(node, coordinator.host, coordinator.port, None)
            self._coordinators[cache_key] = node
        return self._coordinators[cache_key]

    async def find_coordinator(self, kind: int, key: str) -> group_api.Coordinator:
        """Return the current coordinator of a group or transactional id. Raises its error where there is none."""
        coordinator = group_api.read_coordinator(await self.send(None, group_api.ask_coordinator(kind, key)))
        if coordinator.error:
            raise coordinator.error()
        return coordinator

    async def find_coordinators(self, kind: int, keys: Iterable[str]) -> dict[str, int]:
        """Return the current coordinators of these; keys without one are left out. Raises its error below Kafka 3.0."""
        response = await self.send(None, group_api.ask_coordinators(kind, keys))
        return group_api.read_coordinators(response)

    def forget_coordinator(self, kind: int, key: str, borrower: str = "") -> None:
        self._coordinators.pop((kind, key, borrower), None)

    def _hang_up(self, borrower: str) -> None:
        self._coordinators = {
            cache_key: node for cache_key, node in self._coordinators.items() if cache_key[2] != borrower
        }
        brokers = self._manager.cluster._coordinator_brokers
        for node in [n for n in brokers if str(n).startswith(f"{_DEDICATED}{borrower}")]:
            del brokers[node]
            if connection := self._manager._conns.get(node):
                connection.close()

    async def _ready(self, connection: Any) -> None:
        """Wait until it is connected and logged in; close it if that takes too long."""
        if connection.connected:
            return
        try:
            await self.within(connection.init_future, self._settings.request_seconds)
        except kafka_errors.KafkaTimeoutError as error:
            connection.close(error)
            raise

    async def _find_brokers(self) -> None:
        if self._knows_brokers:
            return
        if self._bootstrapping is None or self._bootstrapping.is_done:
            self._bootstrapping = self._net.call_soon_with_future(self._bootstrap)
        await self._bootstrapping

    async def _bootstrap(self) -> None:
        """Learn the brokers from the first bootstrap address that answers."""
        start, failures = time.monotonic(), {}
        addresses = self._manager.cluster.bootstrap_brokers()
        share = max(self._settings.bootstrap_seconds / len(addresses), 2.0)
        while True:
            for address in random.sample(addresses, len(addresses)):
                try:
                    return await self._learn_from(address.node_id, share)
                except (KafkaError, OSError, ValueError) as error:
                    if is_hopeless(error):
                        raise
                    failures[f"{address.host}:{address.port}"] = error_text(error)
            if time.monotonic() - start > min(_REFUSED_SECONDS, self._settings.bootstrap_seconds):
                kind = BrokerNotReached if self._knew_brokers else NoAddress
                raise kind("no broker answers; " + ", ".join(f"{a}: {why}" for a, why in failures.items()))
            await self.sleep(_PAUSE)

    async def _learn_from(self, node: str, seconds: float) -> None:
        self._manager.reset_backoff(node)
        connection = self._manager.get_connection(node, timeout_ms=seconds * 1000, refresh_metadata_on_err=False)
        try:
            await self.within(connection.init_future, seconds)
            response = await self.within(connection.send_request(messages.ask_layout([])), seconds)
        finally:
            connection.close()
        self._manager.cluster._brokers = {broker.node_id: broker for broker in response.brokers}
        if not response.brokers:
            raise kafka_errors.MetadataEmptyBrokerList("it knows no brokers yet")
        self._knows_brokers = self._knew_brokers = True


class Borrowed:
    """A borrowed wire for a group of one feed, with its own rights and its own connections to coordinators.

    `close` ends only those; the owner closes the rest.
    """

    _numbers = itertools.count(1)

    def __init__(self, wire: Wire, rights: Sequence[Right] = ()) -> None:
        self._wire, self._rights = wire, rights
        self._name = f"{next(self._numbers)}/"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wire, name)

    def run(self, doing: str, function: Callable[..., Awaitable[T]], *args: Any, rights: Sequence[Right] = ()) -> T:
        return self._wire.run(doing, function, *args, rights=rights or self._rights)

    def explain(
        self, error: BaseException, doing: str, where: Location = NOWHERE, *, rights: Sequence[Right] = ()
    ) -> SluiceError:
        return self._wire.explain(error, doing, where, rights=rights or self._rights)

    async def coordinator(self, kind: int, key: str) -> Any:
        return await self._wire.coordinator(kind, key, self._name)

    def forget_coordinator(self, kind: int, key: str) -> None:
        self._wire.forget_coordinator(kind, key, self._name)

    def close(self) -> None:
        self._wire.hang_up(self._name)


def _first_of(attempts: Iterable[Future]) -> Future:
    """Return a future: done with the first success, failed when all have failed."""
    first, remaining = Future(), list(attempts)

    def succeed(answer: Any) -> None:
        if not first.is_done:
            first.success(answer)

    def fail(error: BaseException) -> None:
        if not first.is_done and all(attempt.failed() for attempt in remaining):
            first.failure(error)

    for attempt in remaining:
        attempt.add_callback(succeed)
        attempt.add_errback(fail)
    return first


class Patience:
    """Bounded waiting with growing pauses: starts with the first error, starts over after progress."""

    def __init__(self, wire: Wire, seconds: float) -> None:
        self._wire = wire
        self._seconds = seconds
        self.progress()

    def progress(self) -> None:
        self._since: float | None = None
        self._pause = _PAUSE / 2

    async def trouble(self, error: BaseException) -> None:
        """Pause before the next attempt. Raises the error if it is not a passing one or time is up."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if not is_passing(error) or isinstance(error, NoAddress) or now - self._since > self._seconds:
            raise error
        await self._wire.sleep(self._pause * random.uniform(0.8, 1.2))
        self._pause = min(self._pause * 2, 1.0)


_MAYBE_DONE = (
    AnswerLost,
    kafka_errors.RequestTimedOutError,
    kafka_errors.CoordinatorNotAvailableError,  # also sent when replicas are slow
    kafka_errors.UnknownError,
)

_NOTICE_SECONDS = 3.0

Errors = Callable[[Any], set[type[KafkaError]]]
"""Extracts the errors of a response."""


class Coordinators:
    """All coordinators of one cluster. `patience`: seconds to wait for an absent one."""

    def __init__(self, wire: Wire, patience: float) -> None:
        self.wire = wire
        self.patience = patience

    async def ask(
        self,
        kind: int,
        key: str,
        request: Callable[[], Any],
        errors: Errors,
        seconds: float | None = None,
        *,
        final: bool = False,
    ) -> Any:
        """Return the response; retry while the coordinator moves, loads, or finishes a transaction.

        All requests here are idempotent. But after a lost answer, a refused retry does not show whether the first
        attempt took effect: a `final` request then ends in Unknown.
        """
        patience, maybe_done = Patience(self.wire, self.patience), False
        try:
            while True:
                try:
                    return await self._once(kind, key, request, errors, seconds)
                except KafkaError as error:
                    self.wire.forget_coordinator(kind, key)
                    maybe_done = maybe_done or isinstance(error, _MAYBE_DONE)
                    await self._bear(patience, error)
        except (KafkaError, SluiceError, OSError, ValueError) as last:  # also a new connection's login or certificates
            if final and maybe_done:
                raise Unknown(
                    f"the answer to a commit was lost, of {key}: {error_text(last)}",
                    remedy="read the committed offsets back; the next run does",
                ) from None
            raise

    async def ask_once(self, kind: int, key: str, request: Any, seconds: float) -> Any:
        """Return the response to one attempt. The connection stays open after a timeout: others may use it."""

        async def ask() -> Any:
            return await self.wire.send(await self.wire.coordinator(kind, key), request)

        return await self.wire.within(self.wire.spawn(ask), seconds)

    async def notify(self, kind: int, key: str, request: Any) -> None:
        """Send a request that only lets others go on sooner: once, for at most 3 s, errors ignored."""
        with contextlib.suppress(KafkaError):
            await self.ask_once(kind, key, request, _NOTICE_SECONDS)

    async def fetch_offsets(
        self, group: str, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, CommittedOffset | None]:
        """Return the group's committed offsets, with require_stable (KIP-447)."""
        request = partial(group_api.ask_committed, group, partitions)
        return group_api.read_committed(await self.ask(GROUP, group, request, group_api.committed_errors))

    async def broker(self, kind: int, key: str) -> Broker:
        """Look up the coordinator again; wait while there is none."""
        patience = Patience(self.wire, self.patience)
        while True:
            try:
                coordinator = await self.wire.find_coordinator(kind, key)
                return Broker(coordinator.node, f"{coordinator.host}:{coordinator.port}")
            except KafkaError as error:
                await patience.trouble(error)

    async def _once(
        self, kind: int, key: str, request: Callable[[], Any], errors: Errors, seconds: float | None
    ) -> Any:
        node = await self.wire.coordinator(kind, key)
        response = await self.wire.send(node, request(), seconds)
        for error in errors(response):
            raise error()
        return response

    @staticmethod
    async def _bear(patience: Patience, error: KafkaError) -> None:
        if isinstance(error, kafka_errors.UnknownTopicOrPartitionError):
            raise error  # offsets of a deleted topic: a retry cannot help
        await patience.trouble(error)
