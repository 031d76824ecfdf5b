"""`sluice demo`: lands an hour of a real local Kafka and narrates it; then everything else, and the proof.

Promises: it has its own project folder (`.sluice/demo` below the current folder), starts afresh each time, listens on
loopback only, and touches no other feeds, cluster or Dagster home, regardless of the environment. Landed files stay for
inspection. Kafka is stopped at the end, unless you keep it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app.invocation import Session, command
from sluice.cli.daily import audit, run, run_view
from sluice.cli.inspect import plan
from sluice.cli.kafka import produce
from sluice.cli.terminal.output import facts, good, table
from sluice.cli.terminal.text_layout import count, seconds
from sluice.pipelines.contract.suite import CONTRACT
from sluice.pipelines.errors import Failed, ProofFailed, UsageError
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.model.receipts import Progress
from sluice.pipelines.util import extras
from sluice.pipelines.util.units import HOUR, many, show_window

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.feed.kafka_section import KafkaSettings
    from sluice.resources.local.events import Mix, SentEvents
    from sluice.resources.local.local_kafka import LocalKafka

FEED = "orders"
PARTITIONS = 6
SEED = 20_261_120
CATCH_UP = Request(RequestKind.CATCH_UP)

REPORT = "revenue_by_hour"

_FEED_FILE = """\
# Written by `sluice demo`, again each time.
feed: {feed}
{kafka}
topics: {feed}
group: sluice-demo
start: earliest
{columns}"""
_COLUMNS = """\
format: json
schema:
  order_id: string not null
  customer: string
  ts: timestamp
  amount: decimal(12,2)
  currency: string
  items: int32
  country: string
  channel: string
  status: string
"""
_BY_SCHEMA = """\
format: {format}
schema_file: {file}
registry:                             # the project's own
"""
_CONTRACT_FILE = """\
{
  "name": "orders",
  "expectations": [
    {"type": "expect_column_values_to_match_regex",
     "kwargs": {"column": "order_id", "regex": "^o-[0-9]{10}-[0-9a-f]{6}$"}},
    {"type": "expect_column_values_to_be_between", "kwargs": {"column": "amount", "min_value": 0, "max_value": 10000}},
    {"type": "expect_column_values_to_be_in_set",
     "kwargs": {"column": "currency", "value_set": ["EUR", "USD", "GBP", "CHF"]}, "severity": "warning"},
    {"type": "expect_column_values_to_be_unique", "kwargs": {"column": "order_id"}, "severity": "warning"}
  ],
  "meta": {"great_expectations_version": "1.24.1"}
}
"""
_LAKE_LINES = """\
lake: {lake}
s3: {{endpoint: "{endpoint}", region: {region}, access_key_id: local, secret_access_key: local}}
"""
_PROBE = "_sluice/.probe/demo"
_REPORT_FILE = """\
-- Revenue by hour and currency.
-- feed: {feed}
SELECT date_trunc('HOUR', ts) AS hour, currency, count(*) AS orders, sum(amount) AS revenue
FROM {feed}
WHERE NOT kafka_tombstone
GROUP BY ALL
ORDER BY hour, revenue DESC
"""


LOCAL, LOCAL_S3 = "local", "s3"
_ENDPOINTS = {"azure": "AZURE_STORAGE_ENDPOINT", "gcs": "STORAGE_EMULATOR_HOST"}
"""Variables with the address of an emulator, by the section of a feed."""


class TableKind(StrEnum):
    ICEBERG = "iceberg"
    DELTA = "delta"


_TABLE_LINES = {
    TableKind.ICEBERG: "table: {iceberg: {name: demo.orders}}\n",
    TableKind.DELTA: "table: {delta: {}}\n",
}


class EventFormat(StrEnum):
    JSON = "json"
    AVRO = "avro"
    JSON_SCHEMA = "json_schema"
    PROTOBUF = "protobuf"


def register(app: typer.Typer) -> None:
    command(app)(demo)


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The demo, as typed."""

    records: Annotated[
        int, typer.Option("--records", "-n", metavar="N", min=1000, help="Events before the hour is landed.")
    ] = 300_000
    keep: Annotated[bool, typer.Option("--keep", help="Leave Kafka running at the end.")] = False
    lake: Annotated[
        str,
        typer.Option(
            metavar="local|s3|ADDRESS",
            help="The lake: a folder, a local S3 server that stops with the demo, or a store that you have.",
        ),
    ] = LOCAL
    secure: Annotated[
        bool, typer.Option("--secure", help="Use a Kafka with TLS, users and ACLs, and only the rights that it needs.")
    ] = False
    table: Annotated[
        TableKind | None,
        typer.Option(
            "--table",
            metavar="iceberg|delta",
            help="Make a table of the landed rows, and query it at the end.",
            show_default=False,
        ),
    ] = None
    events: Annotated[
        EventFormat,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="json, avro, json_schema or protobuf. All but json start a schema registry, too.",
        ),
    ] = EventFormat.JSON
    airflow: Annotated[
        bool, typer.Option("--airflow", help="Land the hour by a DAG of Airflow, in an Airflow of the demo's own.")
    ] = False


def demo(session: Session, options: DemoOptions) -> int:
    """Land an hour of events from a local Kafka, then the rest, and audit it.

    Events arrive, and land as typed Parquet. Malformed records go to the quarantine, a report reads the hour, and
    offsets are committed. Then more events arrive, and only pending offsets land. Everything is in .sluice/demo; each
    demo starts from scratch.

    $ sluice demo
    $ sluice demo --lake s3
    $ sluice demo --lake az://container/prefix
    $ sluice demo --secure
    $ sluice demo --table iceberg
    $ sluice demo --table delta
    $ sluice demo --format avro
    $ sluice demo --airflow
    $ sluice demo --keep && sluice ui --project .sluice/demo
    """
    if options.keep and options.lake == LOCAL_S3:
        raise UsageError(
            "--keep together with --lake s3: the S3 server stops with the demo", remedy="leave out --keep or --lake s3"
        )
    extras.require(*(("kafka", "duckdb", *(["airflow"] if options.airflow else ["dagster", "pyspark"]))))
    if options.table:
        extras.require("pyiceberg" if options.table is TableKind.ICEBERG else "deltalake")
    began = time.monotonic()
    folder = (session.folder or Path.cwd()).resolve() / ".sluice" / "demo"
    with _own_environment(options.lake), _store(options.lake) as lines, ExitStack() as stack:
        lines += _TABLE_LINES[options.table] if options.table else ""
        stack.enter_context(_start_kafka(session, folder, options, lines))
        own = Session(session.terminal, folder, session.debug, dagster=not options.airflow)
        report = (_AirflowShow if options.airflow else _Show)(own, own.feed(FEED)).all(options.records)
    run.archive_classes()
    took = time.monotonic() - began
    session.terminal.show(*([_format_gone(took)] if options.lake == LOCAL_S3 else _list_closing(own, options, took)))
    session.terminal.print_document({"project": str(folder), "seconds": time.monotonic() - began, **report})
    return 0


@contextmanager
def _own_environment(lake: str) -> Iterator[None]:
    """Without the variables that would lead a feed or Dagster elsewhere."""
    aws = [] if lake.startswith("s3:") else [name for name in os.environ if name.startswith("AWS_")]
    names = ("DAGSTER_HOME", "KAFKA_BOOTSTRAP", "SCHEMA_REGISTRY_URL", "SLUICE_PROJECT", *aws)
    saved = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(saved)


@contextmanager
def _store(lake: str) -> Iterator[str]:
    """The feed's settings for its lake; the local server runs while the block lasts. Raises UsageError."""
    if lake == LOCAL:
        yield ""
    elif lake == LOCAL_S3:
        from sluice.resources.local.local_s3 import LocalS3

        with LocalS3() as store:
            yield _LAKE_LINES.format(lake=store.lake, endpoint=store.endpoint, region=store.settings.region)
    else:
        yield _describe_store(lake)


def _describe_store(lake: str) -> str:
    """The settings for a new folder below the address, to which an object was written. Each store's own variables and
    files have the credentials."""
    from sluice.pipelines.feed.s3_section import S3Settings
    from sluice.pipelines.feed.stores import (
        EXAMPLES,
        SECTIONS,
        AzureSettings,
        GcsSettings,
        StoreSettings,
        scheme,
        store_address,
    )
    from sluice.resources.lake import open_store

    section = SECTIONS.get(scheme(lake), "")
    try:
        address = f"{store_address(lake)}/demo-{datetime.now(UTC):%Y%m%dT%H%M%S}"
    except (KeyError, ValueError):
        raise UsageError(f"--lake {lake} is no lake", remedy=f"local, s3, or {EXAMPLES}") from None
    access: dict[str, str] = {}
    if endpoint := os.environ.get(_ENDPOINTS.get(section, "")):
        access = {"endpoint": endpoint if "://" in endpoint else f"http://{endpoint}"}
        access |= {"token": "emulator"} if section == "gcs" else {}
    if section == "azure" and (account := os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")):
        access |= {"account": account}
    kinds: dict[str, type[StoreSettings]] = {"azure": AzureSettings, "gcs": GcsSettings, "s3": S3Settings}
    try:
        settings = kinds[section].model_validate({**access, "retries": 1})
    except ValidationError as error:
        name = error.errors()[0]["loc"][0]
        raise UsageError(
            f"the environment has no valid {name} for {lake}", remedy="see the variables of the store"
        ) from None
    store = open_store(address, settings)
    store.put(_PROBE, b"")
    store.remove(_PROBE)
    return f"lake: {address}\n" + (f"{section}: {json.dumps(access)}\n" if access else "")


@contextmanager
def _start_kafka(session: Session, folder: Path, options: DemoOptions, lake: str) -> Iterator[None]:
    """A fresh cluster in a fresh project. It is stopped however the block ends, unless it is kept and all went well."""
    from sluice.resources.local.local_kafka import VERSION, LocalKafka
    from sluice.resources.local.local_registry import LocalRegistry

    events = options.events
    _clear(folder)
    for name in ("feeds", "reports"):
        (folder / name).mkdir(parents=True)
    kafka = LocalKafka(folder / ".sluice" / "kafka", secure=options.secure)
    began = time.monotonic()
    with session.terminal.progress() as report:
        kafka.start(report)
    lines = [f"kafka: {{bootstrap: '{kafka.bootstrap}'}}"]
    if kafka.secured:
        lines = kafka.secured.section(kafka.bootstrap, folder)
    columns = _COLUMNS if events is EventFormat.JSON else _register_schema(folder, events)
    feed_file = _FEED_FILE.format(feed=FEED, kafka="\n".join(lines), columns=columns)
    (folder / "feeds" / f"{FEED}.yaml").write_text(feed_file + lake)
    (folder / "feeds" / f"{FEED}{CONTRACT}").write_text(_CONTRACT_FILE)
    (folder / "reports" / f"{REPORT}.sql").write_text(_REPORT_FILE.format(feed=FEED))
    session.terminal.show(
        _step(1, "A real Kafka"),
        good(f"Apache Kafka {VERSION} answers at {kafka.bootstrap} ({seconds(time.monotonic() - began)})"),
    )
    server = LocalRegistry(folder / ".sluice" / "registry")
    stop = True
    try:
        if events is not EventFormat.JSON:
            with session.terminal.working("starting a schema registry (the first time it is downloaded, 160 MB)"):
                server.start()
            session.terminal.show(good(f"a schema registry (Apicurio) answers at {server.url}"))
        if options.secure:
            _grant(session, folder, kafka)
        yield
        stop = not options.keep
    finally:
        if stop:
            with session.terminal.working("stopping Kafka"):
                server.stop()
                kafka.stop()


def _register_schema(folder: Path, events: EventFormat) -> str:
    """The feed's lines on its columns, for events with a schema, and the schema's file."""
    from sluice.resources.local.registered_events import SAMPLES

    file = folder / "schemas" / f"{FEED}.{SAMPLES[events].suffix}"
    file.parent.mkdir()
    file.write_text(SAMPLES[events].schema)
    return _BY_SCHEMA.format(format=events, file=file.relative_to(folder))


def _grant(session: Session, folder: Path, kafka: LocalKafka) -> None:
    """The demo's user may do what its feed needs, and nothing else."""
    from sluice.pipelines.feed.rights import rights_of
    from sluice.resources.local.secured import grant

    rights = rights_of(Session(session.terminal, folder, session.debug).feed(FEED))
    grant(kafka, rights)
    granted = ", ".join(str(r) for r in rights if not r.optional)
    session.terminal.show(
        good("TLS, SCRAM-SHA-512 and ACLs: user sluice reads the feed, with rights to"), f"  {granted}"
    )


def _clear(folder: Path) -> None:
    """Stop the cluster of an earlier demo, and remove its files."""
    from sluice.resources.local.local_kafka import LocalKafka
    from sluice.resources.local.local_registry import LocalRegistry

    if not folder.exists():
        return
    LocalRegistry(folder / ".sluice" / "registry").stop()
    cluster = folder / ".sluice" / "kafka"
    if (cluster / "cluster.json").exists():
        LocalKafka.attach(cluster).stop()
    shutil.rmtree(folder)


def _step(number: int, title: str) -> RenderableType:
    return Text.assemble("\n", (f" {number} ", "bold reverse"), (f" {title}", "bold"))


@dataclass(frozen=True)
class _Show:
    """The steps after Kafka stands, in the demo's own project. Each shows itself and returns its part of `--json`."""

    session: Session
    feed: Feed

    def all(self, records: int) -> dict[str, Any]:
        now = time.time_ns() // 1_000_000
        hour = self.feed.window.last_boundary(now) - HOUR
        window = Request(RequestKind.WINDOW, window=hour)
        name = show_window(hour)
        produced = self.produce(2, f"{count(records)} order events, some malformed", records, 0, hour - HOUR // 3)
        planned = self.plan(3, f"The plan for the hour {name}: no record is read yet", window)
        first = self.run_hour(4, name, window)
        landed = self.preview(5, hour)
        quarantined = self.show_quarantine(6, hour)
        report = self.report(7, hour)
        more = self.produce(8, "Some more events", max(records // 10, 100), records, now)
        rest = self.run(9, "The rest: landed records are not read again", CATCH_UP)
        committed = self.show_committed(10)
        proven = self.audit(11)
        table = {"table": self.show_table(12)} if self.feed.table else {}
        return {
            "produced": [produced, more],
            "plan": planned,
            "runs": [first, rest],
            "preview": landed,
            "quarantined": quarantined,
            "report": report,
            "committed": committed,
            "audit": proven,
            **table,
        }

    @property
    def writer(self) -> KafkaSettings:
        """The shop that the events come from: on a secured Kafka not the feed's user, which must not write."""
        return self.session.project.writer(self.feed)

    def produce(self, number: int, title: str, records: int, first: int, since: int) -> dict[str, Any]:
        """In order of time, from `since` (ms) on: two thirds as they come, then transactions, some aborted."""
        from sluice.resources.local import events

        self._say(_step(number, title))
        events.create(self.writer, [FEED], PARTITIONS)
        now = time.time_ns() // 1_000_000
        begun = since + (now - since) * 2 // 3
        mix = events.Mix(SEED + first, first, bad=0.0005, tombstones=0.01, headers=0.1)
        plain = self._send(mix, records * 2 // 3, (since, begun), None)
        rest = replace(mix, seed=mix.seed + 1, first=first + plain.records, aborted=0.15)
        sent = plain + self._send(rest, records - plain.records, (begun, now), "sluice-demo-produce")
        self._say(*produce.view(sent, (FEED,)))
        return asdict(sent)

    def _send(self, mix: Mix, records: int, span: tuple[int, int], transactional_id: str | None) -> SentEvents:
        from sluice.resources.local import events

        stream, how = events.orders(mix, records, *span), events.SendOptions((FEED,), transactional_id)
        stream = produce.in_format(self.session, self.feed, stream)
        with self.session.terminal.progress() as meter:
            return events.send(self.writer, stream, mix, how, lambda done: meter(Progress("send", done, records)))

    def plan(self, number: int, title: str, request: Request) -> dict[str, Any]:
        from sluice.pipelines.batch.preview import preview

        with self.session.terminal.working("querying Kafka"), self.session.open_ports(self.feed) as edges:
            result = preview(self.feed, edges, request)
        self._say(_step(number, title), *plan.view(result, FEED, request)[1:])
        return plan.build_document(result, FEED, request)

    def run_hour(self, number: int, hour: str, request: Request) -> Mapping[str, Any]:
        return self.run(number, f"The hour {hour}, through Dagster and Spark", request)

    def run(self, number: int, title: str, request: Request) -> dict[str, Any]:
        """A run that did not do all ends the demo with its error."""
        self._say(_step(number, title))
        (timed_run,) = run.execute(self.session, {FEED: request})
        self._say(*run_view.view(timed_run)[1:])
        if timed_run.result.error:
            raise timed_run.result.error
        return run_view.run_document(timed_run)

    def preview(self, number: int, hour: int) -> dict[str, Any]:
        """The hour's files, read by a tool that knows nothing of Sluice except where they are."""
        import duckdb

        from sluice.reading import of_feed

        landed = of_feed(self.feed, hour)
        files = landed.paths
        with duckdb.connect() as db:
            landed.duckdb(db).create_view("landed")
            rows, sums = db.sql(_SOME).fetchall(), db.sql(_SUMS).fetchall()
        names = ("partition", "offset", "order_id", "ts", "amount", "currency", "status")
        self._say(
            _step(number, f"Landed rows of the hour, read by DuckDB from {many(len(files), 'file')}"),
            f"  {files[0].rpartition('/')[0]}",
            table(names, _list_texts(rows), "offset amount"),
            "",
            table(("currency", "orders", "revenue"), _list_texts(sums), "orders revenue"),
        )
        return {
            "files": files,
            "by_currency": [{"currency": c, "orders": n, "revenue": str(r or 0)} for c, n, r in sums],
        }

    def show_quarantine(self, number: int, hour: int) -> list[dict[str, Any]]:
        """The records that did not fit the schema: nothing is lost, nothing is guessed."""
        import duckdb

        from sluice.reading import of_feed

        with duckdb.connect() as db:
            of_feed(self.feed, hour, kind="quarantined").duckdb(db).create_view("quarantined")
            rows = db.sql(_WRONG).fetchall()
        self._say(
            _step(number, "Records that did not fit the schema, in quarantine with their bytes"),
            table(("reason", "records", "such as", "its value"), _list_texts(rows), "records"),
        )
        return [{"reason": reason, "records": n} for reason, n, _, _ in rows]

    def report(self, number: int, hour: int) -> Any:
        """The sample report, as Dagster runs it by itself when an hour is complete."""
        import pyarrow.parquet as pq

        from sluice.assets.execution import run_report
        from sluice.resources.lake import arrow_files, strip_scheme

        with self.session.terminal.working("querying Spark"):
            path = run_report(self.session.project, REPORT, hour, self.session.open_ports)
        rows = pq.read_table(strip_scheme(path), filesystem=arrow_files(self.feed)).to_pylist()
        cells = [[r["hour"].strftime("%Y-%m-%d %H:%M"), r["currency"], r["orders"], r["revenue"]] for r in rows]
        self._say(
            _step(number, f"The report reports/{REPORT}.sql on that hour, by Spark SQL"),
            table(("hour", "currency", "orders", "revenue"), _list_texts(cells), "orders revenue"),
        )
        return [{"currency": r["currency"], "orders": r["orders"], "revenue": str(r["revenue"])} for r in rows]

    def show_committed(self, number: int) -> list[dict[str, Any]]:
        """The group's offsets as a plain consumer sees them."""
        from kafka import KafkaConsumer
        from kafka import TopicPartition as Place

        partitions = [Place(FEED, p) for p in range(PARTITIONS)]
        consumer = KafkaConsumer(
            bootstrap_servers=self.feed.kafka.bootstrap,
            group_id=self.feed.group,
            isolation_level="read_committed",
            **self.feed.kafka.client_settings(),
        )
        with closing(consumer):
            ends = consumer.end_offsets(partitions)
            offsets = [(f"{FEED}:{p.partition}", consumer.committed(p), ends[p]) for p in partitions]
        rows = [(name, count(at), count(end)) for name, at, end in offsets]
        self._say(
            _step(number, f"The committed offsets of group {self.feed.group} in Kafka"),
            table(("partition", "committed", "end of the log"), rows, "committed end"),
        )
        return [{"partition": name, "committed": at, "end": end} for name, at, end in offsets]

    def audit(self, number: int) -> dict[str, Any]:
        report = audit.prove(self.session, self.feed, rescan=True)
        self._say(_step(number, "The audit, compared with Kafka"), *audit.view(report, rescanned=True)[1:])
        if not report.is_reconciled:
            raise ProofFailed("the demo does not reconcile", remedy="this is a bug: please report it")
        return audit.build_document(report)

    def show_table(self, number: int) -> list[dict[str, Any]]:
        """The table that the runs have filled, read by its format's own library and asked by DuckDB."""
        import duckdb

        from sluice.resources.lake import open_lake
        from sluice.resources.open_ports import open_table

        with closing(open_table(self.feed, open_lake(self.feed))) as feed_table:
            head, rows = feed_table.look(), feed_table.rows(("currency", "amount"))
        with duckdb.connect() as db:
            db.register("landed", rows)
            sums = db.sql(_SUMS).fetchall()
        reader = "deltalake" if self.feed.table and self.feed.table.delta else "PyIceberg"
        until, snapshots = (head.complete, head.snapshots) if head else ("", 0)
        self._say(
            _step(number, f"The {feed_table.name}, read by {reader} and queried by DuckDB"),
            f"  {snapshots} snapshots; every hour up to {until} is complete in it",
            table(("currency", "orders", "revenue"), _list_texts(sums), "orders revenue"),
        )
        return [{"currency": c, "orders": n, "revenue": str(r or 0)} for c, n, r in sums]

    def _say(self, *what: RenderableType) -> None:
        self.session.terminal.show(*what)


class _AirflowShow(_Show):
    """The same with a DAG of the feed, and a second run of it in place of the report."""

    def run_hour(self, number: int, hour: str, request: Request) -> Mapping[str, Any]:
        self._say(_step(number, f"The hour {hour}, by the DAG land_{FEED} of Airflow"))
        with self.session.terminal.working("making Airflow's database"):
            (self.session.project.root / "fleet.yaml").write_text("scheduler: airflow\n")
            (self._home / "dags").mkdir(parents=True)
            (self._home / "dags" / "feeds.py").write_text(_DAGS.format(project=str(self.session.project.root)))
            self._call("db", "migrate")
        return self._test_dag(request.window or 0)

    def report(self, number: int, hour: int) -> Mapping[str, Any]:
        self._say(_step(number, "A second run of the DAG: nothing is read twice"))
        return self._test_dag(hour)

    @property
    def _home(self) -> Path:
        return self.session.project.root / "airflow"

    def _test_dag(self, hour: int) -> Mapping[str, Any]:
        """Run the DAG headless, due at the end of the hour, and show its stages. Raises Failed."""
        words = ("dags", "test", f"land_{FEED}", f"{show_window(hour + HOUR)}:00+00:00")
        self._say(f"  $ airflow {' '.join(words)}")
        with self.session.terminal.working("running the DAG"):
            log = self._call(*words)
        ended = _DAG_RUN.findall(log)
        if not ended or ended[-1][1] != "success":
            raise Failed("the DAG run failed", remedy="\n".join(log.splitlines()[-20:]))
        for stage in dict.fromkeys(a or b for a, b in _STAGES.findall(log)):
            self._say(f"  {stage}")
        run, state = ended[-1]
        self._say(good(f"DAG run {run}: {state}"))
        return {"dag_run": run, "state": state}

    def _call(self, *words: str) -> str:
        """Returns the output of a command of Airflow, which has a database of its own."""
        own = {
            "AIRFLOW_HOME": str(self._home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(self._home / "dags"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        }
        outer = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
        command = [sys.executable, "-P", "-m", "airflow", *words]
        return subprocess.run(command, env=outer | own, capture_output=True, text=True, check=False).stdout


_DAGS = """\
# Written by `sluice demo --airflow`.
from sluice.airflow import make_dags

globals().update(make_dags({project!r}))
"""
_DAG_RUN = re.compile(r"DagRun Finished: .*?run_id=([^,]+), .*?\bstate=(\w+)")
_STAGES = re.compile(
    r"\{(?:running|operators)\.py:\d+\} INFO - (.+)|\[info +\] (.+?) +\[airflow\.task\.operators\.sluice"
)
"""Lines of the operator in a log: of Airflow 2, and of Airflow 3."""

_SOME = """select kafka_partition, kafka_offset, order_id, strftime(ts, '%H:%M:%S.%g'), amount, currency, status
from landed where not kafka_tombstone
qualify row_number() over (partition by kafka_partition order by kafka_offset) = 100 order by 1 limit 5"""
_SUMS = """select currency, count(*), sum(amount) from landed group by 1 order by 2 desc"""
_WRONG = """select reason, count(*), any_value('orders:' || partition || ':' || "offset"), any_value(substr(
replace(cast(value as varchar), '\\x22', '"'), 1, 56))
from quarantined group by 1 order by 2 desc, 1"""


def _list_texts(rows: Sequence[Sequence[Any]]) -> list[list[str]]:
    """Cells as text, numbers with separators. A row without currency is a tombstone."""
    return [["tombstones" if row[0] is None else _format_text(row[0]), *map(_format_text, row[1:])] for row in rows]


def _format_text(cell: Any) -> str:
    if cell is None:
        return "–"
    return f"{cell:,}" if isinstance(cell, int | Decimal) else str(cell)


def _list_closing(session: Session, options: DemoOptions, took: float) -> list[RenderableType]:
    folder, lake = session.project.root, session.feed(FEED).lake
    try:
        path = folder.relative_to(Path.cwd())
    except ValueError:
        path = folder
    sluice, project = _format_command(), f"--project {shlex.quote(str(path))}"
    kafka = ("stop Kafka", "stop") if options.keep else ("Kafka again", "start")
    return [
        Text.assemble(
            "\n", (" ✓ ", "bold reverse green"), (f" done in {seconds(took)}", "bold"), ". Everything is still there:"
        ),
        facts(
            *([] if options.airflow else [("Dagster's UI", f"{sluice} ui {project}")]),
            ("the audit", f"{sluice} audit {FEED} {project}"),
            ("the hours", f"{sluice} status {FEED} {project}"),
            ("a batch's report", f"{sluice} report {FEED} {project}"),
            ("the quarantine", f"{sluice} quarantine list {FEED} {project}"),
            ("one record", f"{sluice} explain {FEED} {FEED}:0:150 {project}"),
            (kafka[0], f"{sluice} kafka {kafka[1]} {project}"),
            *([("the lake", lake)] if "://" in lake else []),
        ),
    ]


def _format_gone(took: float) -> RenderableType:
    done = ("\n", (" ✓ ", "bold reverse green"), (f" done in {seconds(took)}", "bold"))
    return Text.assemble(*done, ". The S3 server and its data are gone; `sluice demo` keeps them.")


def _format_command() -> str:
    """How to call `sluice` from here: `make demo` does not put it on the path."""
    return "sluice" if shutil.which("sluice") else os.path.relpath(sys.argv[0])
