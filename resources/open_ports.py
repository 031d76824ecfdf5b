"""A feed's ports, opened: Kafka, the lake, Spark. Only this module chooses the implementations of the ports."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from importlib.util import find_spec
from threading import RLock
from typing import TYPE_CHECKING, Any

from sluice.pipelines.errors import UsageError, docs_command
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.kafka_section import KafkaSettings
from sluice.pipelines.feed.rights import rights_of
from sluice.pipelines.feed.table_section import QUARANTINE_TABLE, WINDOWS_TABLE
from sluice.pipelines.lake import paths
from sluice.pipelines.model.receipts import EngineKind, PartKind
from sluice.pipelines.ports import Engine, Groups, Lake, Ports, Table
from sluice.pipelines.util import extras
from sluice.pipelines.util.grouping import group_by
from sluice.resources.lake import open_lake
from sluice.resources.liveness import LakeLiveness, now
from sluice.resources.registry import writers_of
from sluice.resources.spark.executor import Wiring

if TYPE_CHECKING:
    from sluice.pipelines.operating.migrate_offsets import Stores
    from sluice.pipelines.tables.current import CurrentTable
    from sluice.pipelines.tables.table_windows import FeedTables
    from sluice.resources.kafka.cluster.cluster import KafkaCluster
    from sluice.resources.kafka.cluster.shared_cluster import SharedKafka
    from sluice.resources.kafka.connection.connections import Wire
    from sluice.resources.kafka.group.all_groups import KafkaGroups
    from sluice.resources.kafka.group.group import KafkaGroup
    from sluice.resources.kafka.produce.sender import KafkaTarget
    from sluice.resources.spark.preflight import ExecutorPorts
    from sluice.resources.zookeeper.zookeeper_group import BothGroup, BothGroups, ZooKeeperGroup, ZooKeeperGroups


@contextmanager
def open_ports(feed: Feed) -> Iterator[Ports]:
    """The feed's ports, each opened by its first use, and closed when the block ends. Raises SetupError."""
    with _open_ports(feed) as ports:
        yield ports


@contextmanager
def share_ports(feeds: Iterable[Feed]) -> Iterator[Callable[[Feed], AbstractContextManager[Ports]]]:
    """`open_ports` for feeds that one command or tick inspects. Feeds with the same Kafka settings share its
    connections and cached answers (`shared_cluster`) until the block ends. Any thread may call it; other feeds
    get ports of their own."""
    if find_spec("kafka") is None:
        yield _open_ports
        return
    from sluice.resources.kafka.cluster.shared_cluster import SharedKafka

    alike = group_by(feeds, lambda feed: feed.kafka)
    with ExitStack() as opened:
        shared = {
            access: opened.enter_context(closing(SharedKafka(access, many)))
            for access, many in alike.items()
            if len(many) > 1
        }
        yield lambda feed: _open_ports(feed, shared.get(feed.kafka))


@contextmanager
def _open_ports(feed: Feed, shared: SharedKafka | None = None) -> Iterator[Ports]:
    lake = open_lake(feed)

    def open_wire() -> Wire:
        extras.require("kafka")
        from sluice.resources.kafka.connection.connections import Wire

        return Wire(feed.kafka)

    def open_cluster() -> KafkaCluster:
        wired = wire.port
        from sluice.resources.kafka.cluster.cluster import KafkaCluster

        return KafkaCluster(feed.kafka, wire=wired)

    # Clients open when they are first used: a command that reads the lake alone needs no Kafka, and no package for it.
    # They close in reverse order, since the group and the cluster use the wire.
    with (
        closing(_Late(open_wire)) as wire,
        closing(_Late(shared.cluster if shared else open_cluster)) as cluster,
        closing(_Late(lambda: _group(feed, shared, wire))) as group,
    ):
        yield Ports(
            cluster=cluster,
            group=group,
            lake=lake,
            engine=_Late(lambda: _engine(feed, lake)),
            liveness=LakeLiveness(lake, feed.stored, now),
            clock=now,
            wiring=Wiring.of(feed),
            writers=writers_of(feed, lake),
            parallelism=os.cpu_count() or 1,
        )


class _Late:
    """A port that its first use opens, in any thread: commands that need only the lake load no client of Kafka."""

    def __init__(self, open_port: Callable[[], Any]) -> None:
        self._open, self._lock = open_port, RLock()
        self._port: Any = None

    @property
    def port(self) -> Any:
        with self._lock:
            if self._port is None:
                self._port = self._open()
            return self._port

    def __getattr__(self, name: str) -> Any:
        return getattr(self.port, name)

    def close(self) -> None:
        if self._port is not None:
            self._port.close()


def _open_executor_ports(feed: Feed, lake: Lake) -> ExecutorPorts:
    from sluice.resources.spark.preflight import ExecutorPorts

    return ExecutorPorts.of(feed.kafka, lake)


def _engine(feed: Feed, lake: Lake) -> Engine:
    per_broker = feed.fetch.tasks_per_broker
    if feed.engine is EngineKind.SPARK:
        from sluice.resources.spark.engine import SparkEngine

        return SparkEngine(feed.spark, lambda: _open_executor_ports(feed, lake), per_broker)
    from sluice.resources.local_engine import LocalEngine

    return LocalEngine(per_broker)


def open_groups(feed: Feed) -> AbstractContextManager[Groups]:
    """The groups of the store that the feed's offsets are in; no connection is opened before the first question."""
    return closing(_groups(feed))


@contextmanager
def open_stores(feed: Feed) -> Iterator[Stores]:
    """Both stores of the feed's group, whichever its offsets are in. Raises UsageError without ZooKeeper's address."""
    from sluice.pipelines.operating.migrate_offsets import Stores
    from sluice.resources.kafka.group.all_groups import KafkaGroups

    with closing(_zookeeper_group(feed)) as zookeeper, closing(KafkaGroups(feed.kafka)) as kafka:
        yield Stores(feed.group, zookeeper, kafka)


def open_cluster(kafka: KafkaSettings) -> AbstractContextManager[KafkaCluster]:
    """A Kafka that no feed reads yet; no connection is opened before the first question."""
    from sluice.resources.kafka.cluster.cluster import KafkaCluster

    return closing(KafkaCluster(kafka))


def open_target(feed: Feed, topic: str) -> AbstractContextManager[KafkaTarget]:
    """A topic of the feed's Kafka to ask about; no connection is opened before the first question."""
    from sluice.resources.kafka.produce.sender import (
        KafkaTarget,  # late: what encodes records takes numba, and a second
    )

    return closing(KafkaTarget(feed.kafka, topic, ""))


def open_table(feed: Feed, lake: Lake, kind: PartKind = PartKind.LANDED) -> Table:
    """The table that the feed or output names, over the files of this kind in its lake. Nothing is opened before the
    first question. Raises UsageError for a feed that names none, and SetupError."""
    if feed.table is None:
        raise _build_no_table_error(feed)
    if feed.table.delta:
        from sluice.resources.tables.delta import DeltaLakeTable

        return DeltaLakeTable.of(feed, lake, paths.delta_root(feed.stored, kind, feed.output))
    from sluice.resources.tables.iceberg import IcebergTable

    return IcebergTable.of(feed, lake, "" if kind is PartKind.LANDED else QUARANTINE_TABLE)


def _build_no_table_error(feed: Feed) -> UsageError:
    table = f"table: {{iceberg: {{name: db.{feed.output or feed.name}}}}}"
    where = f"its output {feed.output}" if feed.output else "one of its outputs" if feed.split else "the feed"
    return UsageError(
        f"feed {feed.dataset} has no table", remedy=f"add to {where}: {table}; see {docs_command('tables')}"
    )


def list_tabled(feed: Feed) -> tuple[Feed, ...]:
    """Returns the datasets of the feed, or output, that have a table. Raises UsageError if none has."""
    if not feed.table_feeds:
        raise _build_no_table_error(feed)
    return feed.table_feeds


@contextmanager
def open_tables(feed: Feed, lake: Lake) -> Iterator[FeedTables]:
    """The tables that the feed or output names. Raises as `open_table`."""
    from sluice.pipelines.tables.table_windows import CompleteWindows, FeedTables  # late: it takes pyarrow

    with ExitStack() as opened:
        rows = opened.enter_context(closing(open_table(feed, lake)))
        refused = open_table(feed, lake, PartKind.QUARANTINED) if feed.table and feed.table.quarantine else None
        if refused:
            opened.enter_context(closing(refused))
        windows = opened.enter_context(closing(_open_windows_table(feed, lake)))
        current = _open_current_table(feed, lake)
        if current:
            opened.enter_context(closing(current.table))
        yield FeedTables(rows, refused, CompleteWindows(windows, feed.window), current)


def _open_current_table(feed: Feed, lake: Lake) -> CurrentTable | None:
    from sluice.pipelines.tables.current import CurrentTable  # late: it takes pyarrow

    if feed.table is None or feed.changes is None or not feed.table.current:
        return None
    extras.require("duckdb")
    if feed.table.delta:
        from sluice.resources.tables.delta import DeltaLakeTable

        root = paths.get_current_table_root(feed.stored_dataset)
        return CurrentTable(DeltaLakeTable.of(feed, lake, root), feed.changes, feed.landing)
    from sluice.resources.tables.iceberg import IcebergTable

    return CurrentTable(IcebergTable.of(feed, lake, name=str(feed.table.current)), feed.changes, feed.landing)


def _open_windows_table(feed: Feed, lake: Lake) -> Table:
    if feed.table and feed.table.delta:
        from sluice.resources.tables.delta import DeltaLakeTable

        return DeltaLakeTable.of(feed, lake, paths.windows_table_root(feed.stored_dataset))
    from sluice.resources.tables.iceberg import IcebergTable

    return IcebergTable.of(feed, lake, suffix=WINDOWS_TABLE)


# -- where offsets are kept: each store is chosen here, and nowhere else


def _group(feed: Feed, shared: SharedKafka | None, wire: _Late) -> KafkaGroup | ZooKeeperGroup | BothGroup:
    if feed.offsets.dual_commit:
        from sluice.resources.zookeeper.zookeeper_group import BothGroup

        kafka, zookeeper = _kafka_group(feed, shared, wire), _zookeeper_group(feed)
        return BothGroup(kafka, zookeeper, _both(kafka.close, zookeeper.close))
    return _zookeeper_group(feed) if feed.offsets.in_zookeeper else _kafka_group(feed, shared, wire)


def _groups(feed: Feed) -> KafkaGroups | ZooKeeperGroups | BothGroups:
    from sluice.resources.kafka.group.all_groups import KafkaGroups
    from sluice.resources.zookeeper.zookeeper_group import BothGroups, ZooKeeperGroups

    if feed.offsets.dual_commit:
        kafka, zookeeper = KafkaGroups(feed.kafka), ZooKeeperGroups(_connect(feed))
        return BothGroups(kafka, zookeeper, _both(kafka.close, zookeeper.close))
    return ZooKeeperGroups(_connect(feed)) if feed.offsets.in_zookeeper else KafkaGroups(feed.kafka)


def _kafka_group(feed: Feed, shared: SharedKafka | None, wire: _Late) -> KafkaGroup:
    """`wire`: the cluster's. A connection of its own would be the same brokers looked for and greeted once more."""
    extras.require("kafka")
    from sluice.resources.kafka.group.group import KafkaGroup

    milliseconds = {"session": feed.kafka.session_timeout_ms, "transaction": feed.kafka.transaction_timeout_ms}
    seconds: dict[str, Any] = {name: ms / 1000 for name, ms in milliseconds.items() if ms is not None}
    if shared:
        return shared.group(feed.group, rights_of(feed), **seconds)
    return KafkaGroup(feed.kafka, feed.group, **seconds, wire=wire.borrow(rights_of(feed)))


def _zookeeper_group(feed: Feed) -> ZooKeeperGroup:
    from sluice.resources.zookeeper.zookeeper_group import ZooKeeperGroup

    return ZooKeeperGroup(_connect(feed), feed.group, patience=feed.offsets.patience / 1000)


def _connect(feed: Feed) -> str:
    if feed.offsets.connect is None:
        raise UsageError(
            f"feed {feed.name} does not say where ZooKeeper is",
            remedy="write it in the feed: offsets: {connect: host:2181/chroot}",
        )
    return feed.offsets.connect


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def close() -> None:
        try:
            first()
        finally:
            second()

    return close
