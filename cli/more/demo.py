"""`sluice demo`: lands an hour of a real local Kafka by the commands that it prints, then the rest, and the proof.

Promises: it has its own project folder (`.sluice/demo` below the current folder), starts afresh each time, listens on
loopback only, and touches no other feeds, cluster or Dagster home, regardless of the environment. Landed files stay for
inspection. Kafka is stopped at the end, unless you keep it.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from sluice.cli.app.menu import build_app
from sluice.cli.app.parameters import option
from sluice.cli.daily import run
from sluice.cli.terminal.output import CommandOutput, facts, good, table
from sluice.cli.terminal.text_layout import seconds
from sluice.pipelines.contract.suite import CONTRACT
from sluice.pipelines.errors import Failed, UsageError
from sluice.pipelines.util import extras
from sluice.pipelines.util.units import HOUR, many, show_window

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed

FEED = "orders"
SEED = 20_261_120
REPORT = "revenue_by_hour"

_FEED_FILE = """\
# Written by `sluice demo`, again each time.
feed: {feed}
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
        option("--table", "iceberg|delta", "Make a table of the landed rows, and query it at the end."),
    ] = None
    events: Annotated[
        EventFormat,
        option(
            "--format",
            "FORMAT",
            "json, avro, json_schema or protobuf. All but json start a schema registry, too.",
            show_default=True,
        ),
    ] = EventFormat.JSON
    airflow: Annotated[
        bool, typer.Option("--airflow", help="Land the hour by a DAG of Airflow, in an Airflow of the demo's own.")
    ] = False


def demo(session: Session, options: DemoOptions) -> int:
    """Land an hour of events from a local Kafka, then the rest, and audit it.

    Events arrive, and land as typed Parquet. Malformed records go to the quarantine, a report reads the hour, and
    offsets are committed. Then more events arrive, and only pending offsets land. Each step prints its command.
    Everything is in .sluice/demo; each demo starts from scratch.

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
    show = (_AirflowShow if options.airflow else _Show)(session, folder)
    with _own_environment(options.lake), _store(options.lake) as lines:
        show.clear()
        _write_project(folder, options, lines + (_TABLE_LINES[options.table] if options.table else ""))
        # Servers of a demo that fails or is interrupted end with it, even with --keep.
        stays = False
        try:
            show.run_all(options)
            stays = options.keep
        finally:
            if not stays:
                show.stop()
    run.archive_classes()
    took = time.monotonic() - began
    done = (f" done in {seconds(took)}", "bold")
    farewell = ". The S3 server and its data are gone; `sluice demo` keeps them."
    closing = Text.assemble("\n", (" ✓ ", "bold reverse green"), done, farewell)
    session.terminal.show(*([closing] if options.lake == LOCAL_S3 else show.list_closing(options, took)))
    session.terminal.print_document(project=folder, seconds=took, steps=show.steps)
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
    from sluice.pipelines.feed.stores import EXAMPLES, STORES, scheme, store_address
    from sluice.resources.lake import open_store

    try:
        address = f"{store_address(lake)}/demo-{datetime.now(UTC):%Y%m%dT%H%M%S}"
    except (KeyError, ValueError):
        raise UsageError(f"--lake {lake} is no lake", remedy=f"local, s3, or {EXAMPLES}") from None
    kind = STORES[scheme(lake)]
    access = kind.settings.read_environment(os.environ)
    try:
        settings = kind.settings.model_validate({**access, "retries": 1})
    except ValidationError as error:
        name = error.errors()[0]["loc"][0]
        raise UsageError(
            f"the environment has no valid {name} for {lake}", remedy="see the variables of the store"
        ) from None
    store = open_store(address, settings)
    store.put(_PROBE, b"")
    store.remove(_PROBE)
    return f"lake: {address}\n" + (f"{kind.section}: {json.dumps(access)}\n" if access else "")


def _write_project(folder: Path, options: DemoOptions, lines: str) -> None:
    for name in ("feeds", "reports"):
        (folder / name).mkdir(parents=True)
    columns = _COLUMNS if options.events is EventFormat.JSON else _write_schema(folder, options.events)
    (folder / "feeds" / f"{FEED}.yaml").write_text(_FEED_FILE.format(feed=FEED, columns=columns) + lines)
    (folder / "feeds" / f"{FEED}{CONTRACT}").write_text(_CONTRACT_FILE)
    (folder / "reports" / f"{REPORT}.sql").write_text(_REPORT_FILE.format(feed=FEED))


def _write_schema(folder: Path, events: EventFormat) -> str:
    """The feed's lines on its columns, for events with a schema, and the schema's file."""
    from sluice.resources.local.registered_events import SAMPLES

    file = folder / "schemas" / f"{FEED}.{SAMPLES[events].suffix}"
    file.parent.mkdir()
    file.write_text(SAMPLES[events].schema)
    return _BY_SCHEMA.format(format=events, file=file.relative_to(folder))


@dataclass(frozen=True)
class _Show:
    """The steps in the demo's own project. Each is printed, with its command, and is a part of `--json`."""

    session: Session
    folder: Path
    steps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def feed(self) -> Feed:
        return Session(self.session.terminal, self.folder, self.session.debug).feed(FEED)

    def run_all(self, options: DemoOptions) -> None:
        registry = [] if options.events is EventFormat.JSON else ["--registry"]
        self.run("A real Kafka", "kafka", "start", *(["--secure"] if options.secure else []), *registry)
        if options.secure:
            self.run("The rights that the feed needs, and no other", "kafka", "grant", FEED)
        now = time.time_ns() // 1_000_000
        hour = self.feed.window.last_boundary(now) - HOUR
        window, spread = ("--window", show_window(hour)), f"{(now - hour) // 60_000 + 20}m"
        shares = ("--bad-share", "0.05%", "--tombstones", "1%", "--headers", "10%", "--transactional")
        sent, seed = ("--records", str(options.records)), ("--seed", str(SEED))
        self.run(
            "Order events, some malformed, some in aborted transactions",
            *("produce", FEED, *sent, "--spread", spread, *seed, *shares, "--aborted", "5%"),
        )
        self.run("The plan for an hour: no record is read yet", "plan", FEED, *window)
        self.run_hour(hour)
        self.run("Is the hour complete?", "check", FEED, *window[1:])
        self.query("Landed rows of the hour, read by DuckDB", hour)
        self.run("Records that did not fit the schema, in quarantine with their bytes", "quarantine", "list", FEED)
        self.report(hour)
        more = ("--records", str(max(options.records // 10, 100)), "--first", str(options.records))
        self.run("Some more events", "produce", FEED, *more, "--seed", str(SEED + 1))
        self.run("The rest: landed records are not read again", *self.words, FEED)
        self.run("The committed offsets of the group in Kafka", "offsets", "show", FEED)
        self.run("The audit, compared with Kafka", "audit", FEED, "--rescan")
        if options.table:
            self.run("The table, compared with the ledger", "table", "check", FEED)

    words: tuple[str, ...] = ("run",)

    def run(self, title: str, *words: str) -> None:
        """Run a command, and show it. Raises its error, and Failed for its exit code."""
        typed = f"sluice {shlex.join(words)}"
        self._begin(title, f"$ {typed}")
        terminal, documents = self.session.terminal, io.StringIO()
        if terminal.json:
            terminal = CommandOutput(documents)
        full = [*words, "--project", str(self.folder), *(["--json"] if terminal.json else [])]
        code = build_app(words[0])(full, prog_name="sluice", standalone_mode=False, obj=terminal)
        document = json.loads(documents.getvalue()) if terminal.json else None
        self.steps.append({"command": typed, "document": document})
        if code:
            raise Failed(f"{typed} ended with exit code {code}", remedy="this is a bug: please report it")

    def run_hour(self, hour: int) -> None:
        self.run("The hour, through Dagster and Spark", *self.words, FEED, "--window", show_window(hour))

    def query(self, title: str, hour: int) -> None:
        """Show rows and sums of the hour's files, by DuckDB."""
        import duckdb

        from sluice.reading import of_feed

        landed = of_feed(self.feed, hour)
        files = landed.paths
        with duckdb.connect() as db:
            landed.duckdb(db).create_view("landed")
            rows, sums = db.sql(_SOME).fetchall(), db.sql(_SUMS).fetchall()
        self._begin(title, f"{many(len(files), 'file')} in {files[0].rpartition('/')[0]}")
        names = ("partition", "offset", "order_id", "ts", "amount", "currency", "status")
        self.session.terminal.show(table(names, _list_texts(rows), "offset amount"), "")
        self._show_sums("files", sums, files=files)

    def report(self, hour: int) -> None:
        """Show the sample report, as Dagster runs it by itself when an hour is complete."""
        import pyarrow.parquet as pq

        from sluice.assets.execution import run_report
        from sluice.resources.lake import arrow_files, strip_scheme

        own = Session(self.session.terminal, self.folder, self.session.debug)
        self._begin("The report on that hour, by Spark SQL", f"reports/{REPORT}.sql")
        with self.session.terminal.working("querying Spark"):
            path = run_report(own.project, REPORT, hour, own.open_ports)
        rows = pq.read_table(strip_scheme(path), filesystem=arrow_files(self.feed)).to_pylist()
        self._show_sums("report", [(r["currency"], r["orders"], r["revenue"]) for r in rows])

    def _show_sums(self, name: str, sums: Sequence[tuple[Any, ...]], **more: Any) -> None:
        self.session.terminal.show(table(("currency", "orders", "revenue"), _list_texts(sums), "orders revenue"))
        by_currency = [{"currency": c, "orders": n, "revenue": str(r or 0)} for c, n, r in sums]
        self.steps.append({"command": name, "document": {"by_currency": by_currency, **more}})

    def clear(self) -> None:
        """Stop the cluster of an earlier demo, and remove its files."""
        if self.folder.exists():
            self.stop()
            shutil.rmtree(self.folder)

    def stop(self) -> None:
        from sluice.resources.local.local_kafka import LocalKafka
        from sluice.resources.local.local_registry import LocalRegistry

        cluster = self.folder / ".sluice" / "kafka"
        with self.session.terminal.working("stopping Kafka"):
            LocalRegistry(self.folder / ".sluice" / "registry").stop()
            if (cluster / "cluster.json").exists():
                LocalKafka.attach(cluster).stop()

    def _begin(self, title: str, typed: str) -> None:
        number = (f" {len(self.steps) + 1} ", "bold reverse")
        self.session.terminal.show(Text.assemble("\n", number, (f" {title}", "bold")), Text(f"  {typed}", style="cyan"))

    def list_closing(self, options: DemoOptions, took: float) -> list[RenderableType]:
        folder, lake = self.folder, self.feed.lake
        try:
            path = folder.relative_to(Path.cwd())
        except ValueError:
            path = folder
        sluice = "sluice" if shutil.which("sluice") else os.path.relpath(sys.argv[0])  # `make demo` sets no path
        project = f"--project {shlex.quote(str(path))}"
        kafka = ("stop Kafka", "stop") if options.keep else ("Kafka again", "start")
        return [
            Text.assemble(
                "\n",
                (" ✓ ", "bold reverse green"),
                (f" done in {seconds(took)}", "bold"),
                ". Everything is still there:",
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


class _AirflowShow(_Show):
    """The same with a DAG of the feed, and a second run of it in place of the report."""

    words = ("run", "--no-dagster")

    def run_hour(self, hour: int) -> None:
        (self.folder / "fleet.yaml").write_text("scheduler: airflow\n")
        (self._home / "dags").mkdir(parents=True)
        (self._home / "dags" / "feeds.py").write_text(_DAGS.format(project=str(self.folder)))
        with self.session.terminal.working("making Airflow's database"):
            self._call("db", "migrate")
        self._test_dag(f"The hour, by the DAG land_{FEED} of Airflow", hour)

    def report(self, hour: int) -> None:
        self._test_dag("A second run of the DAG: nothing is read twice", hour)

    @property
    def _home(self) -> Path:
        return self.folder / "airflow"

    def _test_dag(self, title: str, hour: int) -> None:
        """Run the DAG headless, due at the end of the hour, and show its stages. Raises Failed."""
        words = ("dags", "test", f"land_{FEED}", f"{show_window(hour + HOUR)}:00+00:00")
        self._begin(title, f"$ airflow {' '.join(words)}")
        with self.session.terminal.working("running the DAG"):
            log = self._call(*words)
        ended = _DAG_RUN.findall(log)
        if not ended or ended[-1][1] != "success":
            raise Failed("the DAG run failed", remedy="\n".join(log.splitlines()[-20:]))
        run_id, state = ended[-1]
        stages = dict.fromkeys(a or b for a, b in _STAGES.findall(log))
        self.session.terminal.show(*(f"  {stage}" for stage in stages), good(f"DAG run {run_id}: {state}"))
        self.steps.append({"command": f"airflow {' '.join(words)}", "document": {"dag_run": run_id, "state": state}})

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


def _list_texts(rows: Sequence[Sequence[Any]]) -> list[list[str]]:
    """Cells as text, numbers with separators. A row without currency is a tombstone."""
    return [["tombstones" if row[0] is None else _format_text(row[0]), *map(_format_text, row[1:])] for row in rows]


def _format_text(cell: Any) -> str:
    if cell is None:
        return "–"
    return f"{cell:,}" if isinstance(cell, int | Decimal) else str(cell)
