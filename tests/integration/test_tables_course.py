"""A table through the whole life of a feed, on a real Kafka: landings whose offset ranges share files, several landings
into one window, drift, compaction, landing again, replay, expiry. After every sync, each snapshot that still exists
shows each of its rows once, and always the same rows.

The rows are read by PyIceberg, deltalake and DuckDB over the files of a snapshot (`tests/table_readers.py`), and
compared with the records of an independent consumer.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer
from moto.server import ThreadedMotoServer

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.errors import Unknown
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake.paths import is_ignored
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ledger.entries import PublishEntry
from sluice.pipelines.maintenance.compaction import Compacted, compact
from sluice.pipelines.maintenance.expiry import RetireRequest, expire
from sluice.pipelines.maintenance.fixers import Fixer, Record
from sluice.pipelines.maintenance.replay import replay
from sluice.pipelines.model.plans import AskedRange, Request, RequestKind
from sluice.pipelines.model.receipts import Receipt
from sluice.pipelines.quarantine.listing import Filter
from sluice.pipelines.tables.sync import Synced, sync
from sluice.pipelines.util.units import show_window
from sluice.resources.liveness import new_owner
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.open_ports import open_tables
from tests import postgres, rest_catalog
from tests.cli.test_end_to_end import run_apart
from tests.integration.support import CATCH_UP, FeedProject, consume_topic, open_feed_ledger, open_inline_ports, run
from tests.stores import Store
from tests.table_readers import (
    DeltaReader,
    IcebergReader,
    Reader,
    Row,
    get_delta_access,
    get_iceberg_access,
    read_by_duckdb,
)

HOUR = 3_600_000
START = 1_795_183_200_000 - 1_795_183_200_000 % HOUR - 20_000 * HOUR
PARTITIONS, EACH = 12, 40
"""Partitions of the topic, and records per hour and partition. A task reads several partitions, whose offset ranges
share files.
"""
COLUMNS = ("kafka_partition", "kafka_offset", "id", "amount")
REFUSED = ("partition", "offset", "key")
LATER = 1 << 45
"""A time (ms) after all snapshots."""

Position = tuple[int, int]
"""A partition and an offset."""


@dataclass
class SnapshotRows:
    """The rows of a snapshot when it was new, in the table or in the quarantine's table."""

    snapshot: int
    rows: list[Row]


@dataclass
class Course:
    """A feed, its tables, their expected rows, and the rows of older snapshots."""

    project: FeedProject
    table: str
    rows: Reader
    refused: Reader
    store: Store | None = None
    landed: set[Position] = field(default_factory=set)
    quarantined: set[Position] = field(default_factory=set)
    retired: set[Position] = field(default_factory=set)
    history: dict[str, list[SnapshotRows]] = field(default_factory=lambda: {"rows": [], "refused": []})
    records: dict[Position, Any] = field(default_factory=dict)

    @property
    def feed(self) -> Feed:
        return self.project.write_feed(
            format="json",
            schema=json.dumps({"id": "int64 not null", "amount": "int32"}),
            policies="{on_drift: evolve, quarantine_limit: {share: 1.0}}",
            table=self.table,
        )

    # -- events

    def produce(self, *hours: int) -> None:
        """Produce the hours: of ten records one has its amount as text; from the second hour on each has a coupon."""
        producer = KafkaProducer(bootstrap_servers=self.project.kafka.bootstrap, linger_ms=5)
        for number in (h * EACH + n for h in hours for n in range(EACH)):
            for p in range(PARTITIONS):
                value: dict[str, Any] = {"id": number, "amount": str(number) if number % 10 == 7 else number}
                value |= {"coupon": f"c{number}"} if number >= EACH else {}
                stamp = START + number // EACH * HOUR + number % EACH
                producer.send(
                    self.project.topic, json.dumps(value).encode(), b"%d" % number, partition=p, timestamp_ms=stamp
                )
        producer.close()
        records = consume_topic(self.project.kafka, self.project.topic)
        self.records = {(r["partition"], r["offset"]): json.loads(r["value"]) for r in records}

    def land(self, start: int, end: int, partitions: int = PARTITIONS) -> list[Receipt]:
        """Land these offsets of the first partitions."""
        ranges = tuple(AskedRange(self.project.topic, p, start, end) for p in range(partitions))
        return self._land(Request(RequestKind.OFFSETS, ranges=ranges), _list_positions(range(start, end), partitions))

    def catch_up(self) -> list[Receipt]:
        return self._land(CATCH_UP, self.records.keys() - self.landed - self.quarantined - self.retired)

    def land_again(self, hour: int) -> None:
        self._land(
            Request(RequestKind.WINDOW, window=START + hour * HOUR, replace=True), _list_positions(_list_offsets(hour))
        )

    def land_again_one(self, partition: int, hour: int) -> None:
        """Land one partition's hour again, with the offset ranges that share a file with it."""
        hour_range = AskedRange(self.project.topic, partition, *_get_bounds(hour))
        self._land(Request(RequestKind.OFFSETS, ranges=(hour_range,), replace=True), ())

    def _land(self, request: Request, positions: Any) -> list[Receipt]:
        result = run(self.feed, request)
        self._record_landed(positions)
        return [r for b in result.batches for r in b.receipts]

    def _record_landed(self, positions: Any) -> None:
        bad = {(p, o) for p, o in positions if o % 10 == 7}
        self.landed, self.quarantined = self.landed - bad | ({*positions} - bad), self.quarantined | bad

    def compact(self) -> Compacted:
        with open_inline_ports(self.feed) as ports:
            return compact(self.feed, ports, None, new_owner("compact"), lambda progress: None)

    def replay(self) -> None:
        with open_inline_ports(self.feed) as ports:
            fixer = Fixer(fix_amount, __file__)
            replay(self.feed, ports, Filter(), fixer, new_owner("replay"), lambda progress: None)
        self.landed, self.quarantined = self.landed | self.quarantined, set()

    def expire(self, hours: int) -> None:
        feed, end = self.feed, START + hours * HOUR
        with open_inline_ports(feed) as ports:
            ledger = Ledger.offline(ports.lake, feed.name, ports.clock, "ada")
            expire(ledger, ports.lake, RetireRequest(end, "old"), feed.window, ports.liveness)
        self._retire(hours)

    def _retire(self, hours: int) -> None:
        retired = _list_positions(range(hours * EACH))
        self.landed, self.quarantined, self.retired = (
            self.landed - retired,
            self.quarantined - retired,
            self.retired | retired,
        )

    def bring_up(self, **options: Any) -> Synced:
        """Sync the tables as runs do, and compare all readers with the landed rows and with older snapshots."""
        try:
            result = self._sync(**options)
        except Unknown:
            assert isinstance(self.rows, IcebergReader)
            assert self.rows.newest, (
                "Nessie accepts no new column from PyIceberg (docs/tables.md): the table is dropped and created again"
            )
            self.rows.drop()
            self.history["rows"].clear()
            result = self._sync(**options)
            assert result.created
        self.check_readers()
        return result

    def _sync(self, **options: Any) -> Synced:
        feed = self.feed
        with open_inline_ports(feed) as ports, open_tables(feed, ports.lake) as tables:
            return sync(open_feed_ledger(feed, ports), ports.lake, tables, **options)

    # -- checks

    def check_readers(self) -> None:
        self._check("rows", self.rows, COLUMNS, self._expect_rows())
        self._check("refused", self.refused, REFUSED, [(p, o, b"%d" % o) for p, o in sorted(self.quarantined)])

    def _expect_rows(self) -> list[Row]:
        orders = ((position, self.records[position]) for position in sorted(self.landed))
        return [(*position, v["id"], int(v["amount"])) for position, v in orders]

    def _check(self, name: str, reader: Reader, columns: tuple[str, ...], expected: list[Row]) -> None:
        snapshots, history = reader.list_snapshots(), self.history[name]
        newest = snapshots[-1]
        assert reader.read_rows(newest, columns) == expected
        assert read_by_duckdb(reader.list_files(newest), columns, self.store) == expected
        for earlier in (k for k in history if k.snapshot in snapshots):
            assert reader.read_rows(earlier.snapshot, columns) == earlier.rows, "an older snapshot is unchanged"
        positions = {row[:2] for rows in (expected, *(k.rows for k in history[-1:])) for row in rows}
        for between in set(snapshots[:-1]) - {k.snapshot for k in history}:
            rows = reader.read_rows(between, columns)
            assert len(rows) == len({row[:2] for row in rows}), "a row is duplicated"
            assert {row[:2] for row in rows} <= positions
            history.insert(0, SnapshotRows(between, rows))
        history.append(SnapshotRows(newest, expected))

    def check_account(self) -> None:
        with open_inline_ports(self.feed) as ports:
            assert audit(open_feed_ledger(self.feed, ports), ports.lake, hashes=True).problems == ()

    def check_no_other_files(self) -> None:
        """Check that the lake has no files besides those of the newest snapshots."""
        with open_inline_ports(self.feed) as ports:
            for root, reader in (("data", self.rows), ("quarantine", self.refused)):
                files = {ports.lake.locate(p) for p in ports.lake.list(f"{root}/orders") if not is_ignored(p)}
                assert files == {*reader.list_files(reader.list_snapshots()[-1])}


def _list_offsets(hour: int) -> range:
    return range(*_get_bounds(hour))


def _get_bounds(hour: int) -> tuple[int, int]:
    return hour * EACH, (hour + 1) * EACH


def _list_positions(offsets: range, partitions: int = PARTITIONS) -> set[Position]:
    return {(p, o) for p in range(partitions) for o in offsets}


def fix_amount(record: Record) -> Any:
    return {k: int(v) if k == "amount" else v for k, v in json.loads(record.value or b"").items()}


def _count_sharing(receipts: list[Receipt], hour: int) -> int:
    """Count the offset ranges of the hour that share a file."""
    of_hour = (r for r in receipts if r.offset_range.window == START + hour * HOUR)
    return sum(any(p.shared for p in r.parts) for r in of_hour)


# -- catalogs and stores

HERE = ["iceberg", "delta"]
ELSEWHERE = ["iceberg in PostgreSQL, on S3", "iceberg by REST, on S3", "iceberg in moto's Glue, on S3", "delta on S3"]


@pytest.fixture(params=[*HERE, *(pytest.param(k, marks=pytest.mark.soak) for k in ELSEWHERE)])
def course(
    request: pytest.FixtureRequest, tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]
) -> Iterator[Course]:
    kind, _, where = str(request.param).partition(" ")
    pytest.importorskip("pyiceberg" if kind == "iceberg" else "deltalake")
    store: Store | None = request.getfixturevalue("s3_store") if where else None
    lines = store.build_feed_settings() if store else {}
    project = FeedProject(tmp_path, kafka, fresh_topic(partitions=PARTITIONS), lines)
    lake = lines.get("lake", str(tmp_path / ".sluice" / "lake"))
    if kind == "delta":
        options = get_delta_access(store)
        readers = [DeltaReader(f"{lake}/{root}/orders", options) for root in ("data", "quarantine")]
        yield Course(project, "{delta: {}, quarantine: true}", *readers, store=store)
        return
    with ExitStack() as stack:
        catalog, warehouse = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db"}, f"{lake}/tables"
        if "PostgreSQL" in where:
            if (programs := postgres.find_programs()) is None:
                pytest.skip("no PostgreSQL here: infra/postgres.sh installs one")
            server = stack.enter_context(postgres.run_server(programs))
            uri = f"postgresql+psycopg2://{server.user}@/{server.create_database()}?host={server.folder}"
            catalog = {"type": "sql", "uri": uri}
        if "REST" in where:
            if (program := rest_catalog.find_jar()) is None:
                pytest.skip("no Nessie here: tests/rest_catalog.py says where it comes from")
            assert store is not None
            uri = stack.enter_context(rest_catalog.run_server(program, store, lake, tmp_path))
            warehouse = rest_catalog.WAREHOUSE
            catalog = {"type": "rest", "uri": uri, "warehouse": warehouse}
        name = "db.orders"
        if "Glue" in where:  # moto's servers share their state within a process
            name = f"db_{secrets.token_hex(4)}.orders"
            server = ThreadedMotoServer("127.0.0.1", port=0)
            server.start()
            stack.callback(server.stop)
            host, port = server.get_host_and_port()
            catalog = {"type": "glue", "glue.endpoint": f"http://{host}:{port}", "glue.region": "us-east-1"}
            catalog |= {"glue.access-key-id": "local", "glue.secret-access-key": "local"}
        access = catalog | {"warehouse": warehouse}
        table = json.dumps({"iceberg": {"name": name, "catalog": catalog}, "quarantine": True})
        iceberg_readers = [
            IcebergReader(name + suffix, access, get_iceberg_access(store), newest="REST" in where)
            for suffix in ("", "_quarantine")
        ]
        yield Course(project, table, *iceberg_readers, store=store)


@pytest.mark.kafka
def test_table_shows_each_row_once_through_all_changes_of_its_feed(course: Course) -> None:
    course.produce(0, 1, 2, 3)

    # several landings into one window, and two at once for a new table
    assert _count_sharing(course.land(0, 20), 0) >= 8
    assert _count_sharing(course.land(20, 30), 0) >= 8
    course.bring_up()
    course.land(30, 33, partitions=1)
    course.land(33, 36, partitions=1)
    course.bring_up()
    caught = course.land(0, 3 * EACH)
    assert [_count_sharing(caught, hour) >= 8 for hour in (0, 1, 2)] == [True, True, True]
    assert course.bring_up().commits == 1

    # merged: ranges that share no file; landed again: all ranges of a file, for one of them
    merged = course.compact().merged
    assert [(m.offset_range.partition, m.offset_range.start, m.offset_range.end) for m, _ in merged] == [(0, 30, 36)]
    course.bring_up()
    course.land_again_one(3, 1)
    course.bring_up()

    # replayed: shared files become files of offset ranges, and these are merged
    assert course.quarantined
    course.replay()
    course.bring_up()
    assert len(course.compact().merged) >= PARTITIONS
    assert _count_sharing(course.catch_up(), 3) >= 8
    course.bring_up()
    course.land_again(0)
    assert course.quarantined
    course.bring_up()

    # retired, and then files that only older snapshots name are deleted
    course.expire(1)
    course.bring_up()
    course.check_account()
    result = course.bring_up(expire_before=LATER)
    course.check_account()
    if not (isinstance(course.rows, IcebergReader) and course.rows.newest):  # Nessie lets nothing expire
        assert result.cleaned
        course.check_no_other_files()


@pytest.mark.kafka
def test_feed_with_earlier_rows_gets_its_complete_table_at_once(course: Course) -> None:
    """The table is created after all kinds of events, and the feed continues afterwards."""
    course.produce(0, 1, 2)
    course.land(0, 20)
    course.land(20, 30)
    course.catch_up()
    course.replay()
    course.compact()
    course.land_again(1)
    course.expire(1)
    course.bring_up()
    course.produce(3)
    course.catch_up()
    course.land_again(2)
    course.compact()
    course.bring_up()
    course.check_account()
    course.bring_up(expire_before=LATER)
    course.check_account()


# -- by commands


class ByCommands(Course):
    """The same course by `sluice` commands in separate processes; runs are Dagster's, on Spark, and sync the table."""

    def run_sluice(self, *arguments: str) -> dict[str, Any]:
        assert self.feed  # its file is written
        return run_apart(*arguments, "--project", str(self.project.root))

    def _land(self, request: Request, positions: Any) -> list[Receipt]:
        first_number = self._read_number()
        arguments = [a for r in request.ranges for a in ("--offsets", f"{r.topic}:{r.partition}:{r.start}-{r.end}")]
        arguments += [] if request.window is None else ["--window", show_window(request.window)]
        self.run_sluice("run", "orders", *arguments, *(["--replace"] if request.replace else []))
        self._record_landed(positions)
        self.check_readers()
        with open_inline_ports(self.feed) as ports:
            state = (ledger := open_feed_ledger(self.feed, ports)).read()
            published = ((n, e) for n, e in ledger.entries(first_number) if isinstance(e, PublishEntry))
            return [r for n, e in published for r in state.receipts(n, e)]

    def _read_number(self) -> int:
        with open_inline_ports(self.feed) as ports:
            return open_feed_ledger(self.feed, ports).read().number

    def compact(self) -> Any:
        return self.run_sluice("compact", "orders")

    def replay(self) -> None:
        fixes = "from tests.integration.test_tables_course import fix_amount\n"
        (self.project.root / "fixes.py").write_text(fixes)
        self.run_sluice("quarantine", "replay", "orders", "--fix", "fixes.py:fix_amount")
        self.landed, self.quarantined = self.landed | self.quarantined, set()

    def expire(self, hours: int) -> None:
        before = show_window(START + hours * HOUR)
        self.run_sluice("expire", "orders", "--before", before, "--reason", "old", "--yes")
        self._retire(hours)

    def bring_up(self, **options: Any) -> Any:
        result = self.run_sluice("table", "sync", "orders")
        self.check_readers()
        checked = self.run_sluice("table", "check", "orders")
        assert (checked["same"], checked["quarantine"]["same"]) == (True, True)
        return result


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.soak
@pytest.mark.parametrize("course", HERE, indirect=True)
def test_a_table_by_commands_alone(course: Course) -> None:
    course = ByCommands(course.project, course.table, course.rows, course.refused)
    course.produce(0, 1, 2, 3)
    assert _count_sharing(course.land(0, 20), 0) >= 8
    assert _count_sharing(course.land(20, 30), 0) >= 8
    course.land(30, 33, partitions=1)
    course.land(33, 36, partitions=1)
    course.land(0, 3 * EACH)
    assert course.compact()["files"] == 2
    course.bring_up()
    course.land_again_one(3, 1)
    course.replay()
    course.bring_up()
    course.compact()
    course.catch_up()
    course.land_again(0)
    course.expire(1)
    course.bring_up()
    assert course.run_sluice("audit", "orders", "--table", "--strict")["reconciled"]
    course.table = course.table.removesuffix("}") + ", keep_snapshots: 0s}"
    assert course.bring_up()["cleaned"]
    course.check_no_other_files()
    assert course.run_sluice("audit", "orders", "--table", "--strict", "--rescan")["reconciled"]
