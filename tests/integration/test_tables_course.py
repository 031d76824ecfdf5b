"""A table goes through all that can happen to a feed, on a real Kafka: landings whose offset ranges share files,
several into one window, drift, compaction, landing again, replay, expiry. Whatever was brought up in between, each
snapshot that is kept shows each row once, then and ever after.

Judged by PyIceberg, deltalake and DuckDB over the files that a snapshot names (`tests/table_readers.py`), against what
an independent consumer reads from Kafka.
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
from sluice.pipelines.lake.paths import is_table_log
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
from tests.integration.support import CATCH_UP, Place, consumed, edges, ledger, run
from tests.stores import Store
from tests.table_readers import DeltaReader, IcebergReader, Reader, Row, by_duckdb, delta_access, iceberg_access

HOUR = 3_600_000
START = 1_795_183_200_000 - 1_795_183_200_000 % HOUR - 20_000 * HOUR
PARTITIONS, EACH = 12, 40
"""Partitions of the topic, and records of each hour in each. A task reads several partitions: their offset ranges
share.
"""
COLUMNS = ("kafka_partition", "kafka_offset", "id", "amount")
REFUSED = ("partition", "offset", "key")
LATER = 1 << 45
"""A time (ms) after all snapshots."""

Place_ = tuple[int, int]
"""A partition and an offset."""


@dataclass
class Kept:
    """What a snapshot showed when it was new: rows of the table, or of the quarantine's."""

    snapshot: int
    rows: list[Row]


@dataclass
class Course:
    """A feed, its tables, what they have to show, and what older snapshots showed."""

    place: Place
    table: str
    rows: Reader
    refused: Reader
    store: Store | None = None
    landed: set[Place_] = field(default_factory=set)
    held: set[Place_] = field(default_factory=set)
    retired: set[Place_] = field(default_factory=set)
    kept: dict[str, list[Kept]] = field(default_factory=lambda: {"rows": [], "refused": []})
    logged: dict[Place_, Any] = field(default_factory=dict)

    @property
    def feed(self) -> Feed:
        return self.place.feed(
            format="json",
            schema=json.dumps({"id": "int64 not null", "amount": "int32"}),
            policies="{on_drift: evolve, quarantine_limit: {share: 1.0}}",
            table=self.table,
        )

    # -- what happens

    def produce(self, *hours: int) -> None:
        """Of ten records one has its amount as text; from the second hour on each has a coupon."""
        producer = KafkaProducer(bootstrap_servers=self.place.kafka.bootstrap, linger_ms=5)
        for at in (h * EACH + n for h in hours for n in range(EACH)):
            for p in range(PARTITIONS):
                said: dict[str, Any] = {"id": at, "amount": str(at) if at % 10 == 7 else at}
                said |= {"coupon": f"c{at}"} if at >= EACH else {}
                stamp = START + at // EACH * HOUR + at % EACH
                producer.send(self.place.topic, json.dumps(said).encode(), b"%d" % at, partition=p, timestamp_ms=stamp)
        producer.close()
        found = consumed(self.place.kafka, self.place.topic)
        self.logged = {(r["partition"], r["offset"]): json.loads(r["value"]) for r in found}

    def land(self, start: int, end: int, partitions: int = PARTITIONS) -> list[Receipt]:
        """These offsets of the first partitions."""
        ranges = tuple(AskedRange(self.place.topic, p, start, end) for p in range(partitions))
        return self._land(Request(RequestKind.OFFSETS, ranges=ranges), _offsets(range(start, end), partitions))

    def catch_up(self) -> list[Receipt]:
        return self._land(CATCH_UP, self.logged.keys() - self.landed - self.held - self.retired)

    def land_again(self, hour: int) -> None:
        self._land(Request(RequestKind.WINDOW, window=START + hour * HOUR, replace=True), _offsets(_of(hour)))

    def land_again_one(self, partition: int, hour: int) -> None:
        """One partition's hour, and what lies in a file with it."""
        some = AskedRange(self.place.topic, partition, *_bounds(hour))
        self._land(Request(RequestKind.OFFSETS, ranges=(some,), replace=True), ())

    def _land(self, request: Request, places: Any) -> list[Receipt]:
        done = run(self.feed, request)
        self._landed_again(places)
        return [r for b in done.batches for r in b.receipts]

    def _landed_again(self, places: Any) -> None:
        bad = {(p, o) for p, o in places if o % 10 == 7}
        self.landed, self.held = self.landed - bad | ({*places} - bad), self.held | bad

    def compact(self) -> Compacted:
        with edges(self.feed) as opened:
            return compact(self.feed, opened, None, new_owner("compact"), lambda progress: None)

    def replay(self) -> None:
        with edges(self.feed) as opened:
            fixer = Fixer(mended, __file__)
            replay(self.feed, opened, Filter(), fixer, new_owner("replay"), lambda progress: None)
        self.landed, self.held = self.landed | self.held, set()

    def expire(self, hours: int) -> None:
        feed, end = self.feed, START + hours * HOUR
        with edges(feed) as opened:
            book = Ledger.offline(opened.lake, feed.name, opened.clock, "ada")
            expire(book, opened.lake, RetireRequest(end, "old"), feed.window, opened.liveness)
        self._retire(hours)

    def _retire(self, hours: int) -> None:
        gone = _offsets(range(hours * EACH))
        self.landed, self.held, self.retired = self.landed - gone, self.held - gone, self.retired | gone

    def bring_up(self, **how: Any) -> Synced:
        """As runs do; then all that readers see is held against what has landed, and what older snapshots showed."""
        try:
            done = self._sync(**how)
        except Unknown:
            assert isinstance(self.rows, IcebergReader)
            assert self.rows.newest, "Nessie takes no new column from PyIceberg (docs/tables.md): the way out is this"
            self.rows.drop()
            self.kept["rows"].clear()
            done = self._sync(**how)
            assert done.created
        self.check_readers()
        return done

    def _sync(self, **how: Any) -> Synced:
        feed = self.feed
        with edges(feed) as opened, open_tables(feed, opened.lake) as tables:
            return sync(ledger(feed, opened), opened.lake, tables, **how)

    # -- what has to be true

    def check_readers(self) -> None:
        self._check("rows", self.rows, COLUMNS, self._wanted_rows())
        self._check("refused", self.refused, REFUSED, [(p, o, b"%d" % o) for p, o in sorted(self.held)])

    def _wanted_rows(self) -> list[Row]:
        said = ((place, self.logged[place]) for place in sorted(self.landed))
        return [(*place, v["id"], int(v["amount"])) for place, v in said]

    def _check(self, which: str, reader: Reader, columns: tuple[str, ...], wanted: list[Row]) -> None:
        there, before = reader.snapshots(), self.kept[which]
        newest = there[-1]
        assert reader.rows(newest, columns) == wanted
        assert by_duckdb(reader.files(newest), columns, self.store) == wanted
        for old in (k for k in before if k.snapshot in there):
            assert reader.rows(old.snapshot, columns) == old.rows, "an older snapshot shows what it showed"
        shown = {row[:2] for rows in (wanted, *(k.rows for k in before[-1:])) for row in rows}
        for between in set(there[:-1]) - {k.snapshot for k in before}:
            found = reader.rows(between, columns)
            assert len(found) == len({row[:2] for row in found}), "a row is there twice"
            assert {row[:2] for row in found} <= shown
            before.insert(0, Kept(between, found))
        before.append(Kept(newest, wanted))

    def check_account(self) -> None:
        with edges(self.feed) as opened:
            assert audit(ledger(self.feed, opened), opened.lake, hashes=True).problems == ()

    def check_no_other_files(self) -> None:
        """Nothing lies in the lake that the newest snapshots do not name."""
        with edges(self.feed) as opened:
            for root, reader in (("data", self.rows), ("quarantine", self.refused)):
                there = {opened.lake.locate(p) for p in opened.lake.list(f"{root}/orders") if not is_table_log(p)}
                assert there == {*reader.files(reader.snapshots()[-1])}


def _of(hour: int) -> range:
    return range(*_bounds(hour))


def _bounds(hour: int) -> tuple[int, int]:
    return hour * EACH, (hour + 1) * EACH


def _offsets(offsets: range, partitions: int = PARTITIONS) -> set[Place_]:
    return {(p, o) for p in range(partitions) for o in offsets}


def mended(record: Record) -> Any:
    return {k: int(v) if k == "amount" else v for k, v in json.loads(record.value or b"").items()}


def _shares(receipts: list[Receipt], hour: int) -> int:
    """How many offset ranges of the hour share a file."""
    found = (r for r in receipts if r.offset_range.window == START + hour * HOUR)
    return sum(any(p.shared for p in r.parts) for r in found)


# -- where the tables are

HERE = ["iceberg", "delta"]
ELSEWHERE = ["iceberg in PostgreSQL, on S3", "iceberg by REST, on S3", "iceberg in moto's Glue, on S3", "delta on S3"]


@pytest.fixture(params=[*HERE, *(pytest.param(k, marks=pytest.mark.soak) for k in ELSEWHERE)])
def course(
    request: pytest.FixtureRequest, tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]
) -> Iterator[Course]:
    kind, _, where = str(request.param).partition(" ")
    pytest.importorskip("pyiceberg" if kind == "iceberg" else "deltalake")
    store: Store | None = request.getfixturevalue("s3_store") if where else None
    lines = store.lines() if store else {}
    place = Place(tmp_path, kafka, fresh_topic(partitions=PARTITIONS), lines)
    lake = lines.get("lake", str(tmp_path / ".sluice" / "lake"))
    if kind == "delta":
        options = delta_access(store)
        readers = [DeltaReader(f"{lake}/{root}/orders", options) for root in ("data", "quarantine")]
        yield Course(place, "{delta: {}, quarantine: true}", *readers, store=store)
        return
    with ExitStack() as opened:
        said, warehouse = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db"}, f"{lake}/tables"
        if "PostgreSQL" in where:
            if (found := postgres.programs()) is None:
                pytest.skip("no PostgreSQL here: infra/postgres.sh installs one")
            server = opened.enter_context(postgres.started(found))
            uri = f"postgresql+psycopg2://{server.user}@/{server.database()}?host={server.folder}"
            said = {"type": "sql", "uri": uri}
        if "REST" in where:
            if (program := rest_catalog.jar()) is None:
                pytest.skip("no Nessie here: tests/rest_catalog.py says where it comes from")
            assert store is not None
            uri = opened.enter_context(rest_catalog.started(program, store, lake, tmp_path))
            warehouse = rest_catalog.WAREHOUSE
            said = {"type": "rest", "uri": uri, "warehouse": warehouse}
        name = "db.orders"
        if "Glue" in where:  # moto's servers of a process share what they hold
            name = f"db_{secrets.token_hex(4)}.orders"
            server = ThreadedMotoServer("127.0.0.1", port=0)
            server.start()
            opened.callback(server.stop)
            host, port = server.get_host_and_port()
            said = {"type": "glue", "glue.endpoint": f"http://{host}:{port}", "glue.region": "us-east-1"}
            said |= {"glue.access-key-id": "local", "glue.secret-access-key": "local"}
        read = said | {"warehouse": warehouse}
        table = json.dumps({"iceberg": {"name": name, "catalog": said}, "quarantine": True})
        made = [
            IcebergReader(name + beside, read, iceberg_access(store), newest="REST" in where)
            for beside in ("", "_quarantine")
        ]
        yield Course(place, table, *made, store=store)


@pytest.mark.kafka
def test_a_table_shows_each_row_once_whatever_happens_to_its_feed(course: Course) -> None:
    course.produce(0, 1, 2, 3)

    # several landings into one window, and two at once for a new table
    assert _shares(course.land(0, 20), 0) >= 8
    assert _shares(course.land(20, 30), 0) >= 8
    course.bring_up()
    course.land(30, 33, partitions=1)
    course.land(33, 36, partitions=1)
    course.bring_up()
    caught = course.land(0, 3 * EACH)
    assert [_shares(caught, hour) >= 8 for hour in (0, 1, 2)] == [True, True, True]
    assert course.bring_up().commits == 1

    # merged: what shares no file; landed again: a whole file for one of its offset ranges
    merged = course.compact().merged
    assert [(m.offset_range.partition, m.offset_range.start, m.offset_range.end) for m, _ in merged] == [(0, 30, 36)]
    course.bring_up()
    course.land_again_one(3, 1)
    course.bring_up()

    # replayed: shared files become files of offset ranges, and these are merged
    assert course.held
    course.replay()
    course.bring_up()
    assert len(course.compact().merged) >= PARTITIONS
    assert _shares(course.catch_up(), 3) >= 8
    course.bring_up()
    course.land_again(0)
    assert course.held
    course.bring_up()

    # retired, and then everything that only older snapshots named goes
    course.expire(1)
    course.bring_up()
    course.check_account()
    done = course.bring_up(expire_before=LATER)
    course.check_account()
    if not (isinstance(course.rows, IcebergReader) and course.rows.newest):  # Nessie lets nothing expire
        assert done.cleaned
        course.check_no_other_files()


@pytest.mark.kafka
def test_a_feed_that_landed_long_before_gets_its_table_at_once(course: Course) -> None:
    """Everything has happened already when the table is made. Then the feed lives on."""
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
    """The same by `sluice`, each command a process of its own; runs are Dagster's, on Spark, and bring the table up."""

    def sluice(self, *arguments: str) -> dict[str, Any]:
        assert self.feed  # its file is written
        return run_apart(*arguments, "--project", str(self.place.root))

    def _land(self, request: Request, places: Any) -> list[Receipt]:
        begins = self._numbers()
        asked = [a for r in request.ranges for a in ("--offsets", f"{r.topic}:{r.partition}:{r.start}-{r.end}")]
        asked += [] if request.window is None else ["--window", show_window(request.window)]
        self.sluice("run", "orders", *asked, *(["--replace"] if request.replace else []))
        self._landed_again(places)
        self.check_readers()
        with edges(self.feed) as opened:
            state = (book := ledger(self.feed, opened)).read()
            published = ((n, e) for n, e in book.entries(begins) if isinstance(e, PublishEntry))
            return [r for n, e in published for r in state.receipts(n, e)]

    def _numbers(self) -> int:
        with edges(self.feed) as opened:
            return ledger(self.feed, opened).read().number

    def compact(self) -> Any:
        return self.sluice("compact", "orders")

    def replay(self) -> None:
        fixes = "from tests.integration.test_tables_course import mended\n"
        (self.place.root / "fixes.py").write_text(fixes)
        self.sluice("quarantine", "replay", "orders", "--fix", "fixes.py:mended")
        self.landed, self.held = self.landed | self.held, set()

    def expire(self, hours: int) -> None:
        before = show_window(START + hours * HOUR)
        self.sluice("expire", "orders", "--before", before, "--reason", "old", "--yes")
        self._retire(hours)

    def bring_up(self, **how: Any) -> Any:
        done = self.sluice("table", "sync", "orders")
        self.check_readers()
        checked = self.sluice("table", "check", "orders")
        assert (checked["same"], checked["quarantine"]["same"]) == (True, True)
        return done


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.soak
@pytest.mark.parametrize("course", HERE, indirect=True)
def test_a_table_by_commands_alone(course: Course) -> None:
    course = ByCommands(course.place, course.table, course.rows, course.refused)
    course.produce(0, 1, 2, 3)
    assert _shares(course.land(0, 20), 0) >= 8
    assert _shares(course.land(20, 30), 0) >= 8
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
    assert course.sluice("audit", "orders", "--table", "--strict")["reconciled"]
    course.table = course.table.removesuffix("}") + ", keep_snapshots: 0s}"
    assert course.bring_up()["cleaned"]
    course.check_no_other_files()
    assert course.sluice("audit", "orders", "--table", "--strict", "--rescan")["reconciled"]
