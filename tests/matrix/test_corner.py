"""The usual tasks of users in one environment of the matrix, with its versions. `make matrix` runs this in each.

Tests run in order, share a project with a local Kafka, and use only the installed package, pytest, `bench` and servers
of `tests`. Those of extras are named `test_extra_…`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import psycopg2
import pytest

from bench.spark_cluster import LocalSpark
from tests.postgres import Postgres, find_programs, run_server
from tests.zookeepers import LocalZooKeeper

ROOT = Path(__file__).parents[2]
COMMAND = Path(sys.executable).with_name("sluice")
SPARK = int(version("pyspark").partition(".")[0])
SECONDS = 1200
"""Limit on each command, for busy machines."""
ADDRESS = r"127\.0\.0\.1:\d+"
OWN = ("PYTHONPATH", "DAGSTER_HOME", "SLUICE_PROJECT", "KAFKA_BOOTSTRAP")
pytestmark = [pytest.mark.matrix, pytest.mark.usefixtures("default_engine")]

NODE = """query ($keys: [AssetKeyInput!]) {
  assetNodes(assetKeys: $keys) { partitionStats { numMaterialized numFailed } } }"""
FAILED = "{ runsOrError(filter: {statuses: [FAILURE]}) { ... on Runs { results { runId } } } }"
AGAIN = """mutation ($id: String!) {
  launchPipelineReexecution(reexecutionParams: {parentRunId: $id, strategy: ALL_STEPS}) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""
STATUS = "query ($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }"


class Project:
    """A folder with the feed `orders` and its local Kafka."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environ = {name: value for name, value in os.environ.items() if name not in OWN}
        self.hours: list[str] = []
        """Closed windows with records, in order: three or more."""

    def run(self, *words: str, code: int = 0) -> dict[str, Any]:
        """Return the document of `sluice WORDS --json`, which must end with `code`."""
        return dict(json.loads(self.call(COMMAND, *words, "--json", code=code)))

    def call(self, *words: str | Path, code: int = 0, cwd: Path | None = None, **environ: str) -> str:
        """Return the output of a command, which must end with `code`."""
        result = subprocess.run(
            words,
            cwd=cwd or self.root,
            env=self.environ | environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert result.returncode == code, (
            f"{words}: {result.returncode}\n{result.stdout[-6000:]}\n{result.stderr[-6000:]}"
        )
        return result.stdout

    def evaluate(self, *expressions: str, feed: str = "orders") -> list[Any]:
        """Return the values of expressions in one process, in which `hours` are the feed's windows."""
        read = f"hours = sluice.read({feed!r}, {self.hours[0]!r}, to={self.hours[-1]!r})"
        script = f"import json, sluice, pyarrow.dataset\n{read}\nprint('=', json.dumps([{', '.join(expressions)}]))"
        return list(json.loads(self.call(sys.executable, "-c", script).rpartition("= ")[2]))

    def add_feed(self, name: str, *lines: str) -> None:
        """Write a feed of the same topic with its own group."""
        text = (self.root / "feeds" / "orders.yaml").read_text()
        common = [line for line in text.splitlines() if not re.match("group:|spark:", line)]
        (self.root / "feeds" / f"{name}.yaml").write_text("\n".join([*common, f"group: sluice-{name}", *lines, ""]))


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    shop = Project(tmp_path_factory.mktemp("shop"))
    try:
        shop.run("init", "--local")
        yield shop
    finally:
        shop.call(COMMAND, "kafka", "stop")


def count_landed(document: dict[str, Any]) -> int:
    """Return the number of rows that a run landed."""
    return sum(batch["landed"] for feed in document["feeds"] for run in feed["runs"] for batch in run["batches"])


def test_land(project: Project) -> None:
    """A first run lands all pending records and commits them."""
    assert count_landed(project.run("run", "orders")) > 0
    (status,) = project.run("status", "orders")["feeds"]
    assert (status["lag"], status["uncommitted"]) == (0, 0)
    now = time.time()
    starts = (time.gmtime(now - 3600 * back) for back in (4, 3, 2, 1))
    project.hours = [time.strftime("%Y-%m-%dT%H", start) for start in starts]


def test_backfill(project: Project) -> None:
    """Another feed lands a range of windows, and the same range again."""
    project.add_feed("backfilled")
    first, last = project.hours[0], project.hours[-1]
    words = ("run", "backfilled", "--from", first, "--to", last, "--windows-per-run", "2")
    rows = count_landed(project.run(*words))
    assert rows > 0
    assert count_landed(project.run(*words, "--replace")) == rows
    assert project.evaluate("hours.arrow().num_rows", feed="backfilled") == [rows]


def test_read(project: Project) -> None:
    """Landed rows are the same in every reader, whole and filtered."""
    rows, pandas, polars, duckdb, filtered, dataset = project.evaluate(
        "hours.arrow().num_rows",
        "len(hours.pandas())",
        "hours.polars().collect().height",
        "hours.duckdb().aggregate('count(*)').fetchall()[0][0]",
        "hours.duckdb().filter(\"currency = 'EUR'\").aggregate('count(*)').fetchall()[0][0]",
        "hours.dataset().to_table(filter=pyarrow.dataset.field('currency') == 'EUR').num_rows",
    )
    assert rows == pandas == polars == duckdb
    assert 0 < filtered == dataset < rows


def test_read_by_spark(project: Project) -> None:
    """`.spark()` has the same rows, by Spark's own reader and by Arrow in its tasks."""
    filtered = "hours.spark().filter(\"currency = 'EUR'\").count()"
    by_arrow = "vars(hours).update(_alike=False) or hours.spark().count()"
    values = ["hours.arrow().num_rows", "hours.spark().count()", filtered]
    if SPARK < 4 and find_spec("distutils") is None:
        with pytest.raises(AssertionError, match="needs setuptools"):
            project.evaluate(by_arrow)
        by_arrow = "None"
    rows, spark, in_euros, arrow = project.evaluate(*values, by_arrow)
    assert rows == spark > in_euros
    assert arrow in (rows, None)


def test_report(project: Project) -> None:
    """A report in SQL runs over a window."""
    (project.root / "reports").mkdir()
    (project.root / "reports" / "sums.sql").write_text(
        "-- feed: orders\nSELECT currency, count(*) AS n, sum(amount) AS revenue FROM orders GROUP BY currency\n"
    )
    code = "from pathlib import Path\nfrom sluice.pipelines.feed.sql_report import load_report\n"
    code += "import sluice\nfrom sluice.reading import run_report\n"
    code += f"rows = sluice.read('orders', {project.hours[0]!r})\n"
    code += "table = run_report(load_report(Path('reports/sums.sql')), rows)\n"
    code += "assert sum(table['n'].to_pylist()) == rows.arrow().num_rows, table\n"
    project.call(sys.executable, "-c", code)


@pytest.mark.skipif(SPARK < 4, reason="needs PySpark 4")
def test_spark_source(project: Project) -> None:
    """`spark.read.format("sluice")` reads a window."""
    code = "from pyspark.sql import SparkSession\nimport sluice\nfrom sluice.spark_source import SluiceSource\n"
    code += "spark = SparkSession.builder.master('local[1]').getOrCreate()\nspark.dataSource.register(SluiceSource)\n"
    code += (
        f"frame = spark.read.format('sluice').option('feed', 'orders').option('window', {project.hours[0]!r}).load()\n"
    )
    code += f"assert frame.count() == sluice.read('orders', {project.hours[0]!r}).arrow().num_rows\n"
    project.call(sys.executable, "-c", code, PYSPARK_PYTHON=sys.executable)


def test_audit(project: Project) -> None:
    """Every offset is accounted for, with files and Kafka read again."""
    for feed in ("orders", "backfilled"):
        assert project.run("audit", feed, "--rescan", "--hashes")["reconciled"] is True


@contextmanager
def serve(project: Project) -> Iterator[str]:
    """Run `sluice ui` until the block ends, and yield the address of its GraphQL."""
    log = project.root / "ui.log"
    with log.open("wb") as output:
        words = [COMMAND, "ui", "--json"]
        server = subprocess.Popen(words, cwd=project.root, env=project.environ, stdout=output, stderr=output)
    try:
        until = time.monotonic() + SECONDS
        while not (address := re.search(f"http://{ADDRESS}", log.read_text())):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
        yield f"{address[0]}/graphql"
    finally:
        server.terminate()
        server.wait(SECONDS)


def ask(address: str, query: str, **variables: Any) -> dict[str, Any]:
    body = json.dumps({"query": query, "variables": variables}).encode()
    with urlopen(Request(address, body, {"content-type": "application/json"}), timeout=SECONDS) as answer:
        document = json.load(answer)
    assert "errors" not in document, document
    return dict(document["data"])


def test_rerun_in_ui(project: Project) -> None:
    """The UI counts a failed partition, runs it again, and counts it as landed."""
    lake = project.root / ".sluice" / "blocked"
    lake.write_text("a file where the lake should be")
    project.add_feed("blocked", f"lake: {lake}")
    hour = project.hours[0]
    project.call(COMMAND, "run", "blocked", "--window", hour, "--json", code=1)
    lake.unlink()
    with serve(project) as address:
        keys = [{"path": ["blocked", "landed"]}]
        assert ask(address, NODE, keys=keys)["assetNodes"][0]["partitionStats"]["numFailed"] == 1
        run = ask(address, FAILED)["runsOrError"]["results"][0]["runId"]
        launched = ask(address, AGAIN, id=run)["launchPipelineReexecution"]
        assert launched["__typename"] == "LaunchRunSuccess", launched
        until = time.monotonic() + SECONDS
        while (status := ask(address, STATUS, id=launched["run"]["runId"])["runOrError"]["status"]) != "SUCCESS":
            assert status not in ("FAILURE", "CANCELED"), status
            assert time.monotonic() < until, status
            time.sleep(0.5)
        stats = ask(address, NODE, keys=keys)["assetNodes"][0]["partitionStats"]
    assert stats == {"numMaterialized": 1, "numFailed": 0}


def test_dg(project: Project, tmp_path: Path) -> None:
    """A `dg` project with Sluice's component is checked and listed, and lands an hour."""
    shop = shutil.copytree(ROOT / "examples" / "dg_project", tmp_path / "shop")
    text = (shop / "feeds" / "orders.yaml").read_text()
    (shop / "feeds" / "orders.yaml").write_text(text.replace("sluice-orders", "sluice-dg"))
    # dg 1.12 fails on this key.
    pyproject = (shop / "pyproject.toml").read_text()
    (shop / "pyproject.toml").write_text(pyproject.replace("telemetry.enabled = false\n", ""))
    (shop / ".sluice" / "dagster").mkdir(parents=True)
    bootstrap = re.search(ADDRESS, project.call(COMMAND, "kafka", "status", "--json"))
    assert bootstrap
    environ = {
        "KAFKA_BOOTSTRAP": bootstrap[0],
        "DAGSTER_HOME": str(shop / ".sluice" / "dagster"),
        "PYTHONPATH": str(shop / "src"),
        "PATH": f"{COMMAND.parent}:{os.environ['PATH']}",
    }
    dg = COMMAND.with_name("dg")
    project.call(dg, "check", "defs", cwd=shop, **environ)
    assert "orders/landed" in project.call(dg, "list", "defs", cwd=shop, **environ)
    assets = ("--assets", "orders/landed,orders/committed", "--partition", f"{project.hours[0]}:00")
    project.call(dg, "launch", *assets, cwd=shop, **environ)


def test_cluster(project: Project, tmp_path: Path) -> None:
    """A standalone Spark lands a feed; its worker's Python has nothing but the standard library."""
    with LocalSpark(tmp_path / "spark", workers=1) as cluster:
        conf = ", ".join(f"'{key}': '{value}'" for key, value in cluster.conf.items())
        project.add_feed("clustered", f"spark: {{master: '{cluster.master}', conf: {{{conf}}}}}")
        assert count_landed(project.run("run", "clustered", "--window", project.hours[0])) > 0
    assert project.run("audit", "clustered", "--rescan")["reconciled"] is True


@pytest.mark.skipif(SPARK < 4, reason="needs PySpark 4")
def test_connect(project: Project, tmp_path: Path) -> None:
    """A Spark Connect server lands a feed and reads it. Arrow in its tasks needs Sluice there."""
    window = f"sluice.read('connected', {project.hours[0]!r})"
    by_arrow = f"(vars(w := {window}).update(_alike=False), w.spark().count())[1]"
    with LocalSpark(tmp_path / "spark", workers=0) as cluster:
        project.add_feed("connected", f"spark: {{master: '{cluster.start_connect()}'}}")
        rows = count_landed(project.run("run", "connected", "--window", project.hours[0]))
        assert project.evaluate(f"{window}.spark().count()") == [rows] > [0]
        with pytest.raises(AssertionError, match="No module named 'sluice'"):
            project.evaluate(by_arrow)
    assert project.run("audit", "connected", "--rescan")["reconciled"] is True


class Extras(NamedTuple):
    """One run of three feeds with extras."""

    landed: dict[str, int]
    """Rows of each feed."""
    offsets: dict[int, str]
    """Committed offsets in ZooKeeper."""
    stored: int | None
    """Number of Dagster's runs in PostgreSQL. None without PostgreSQL's programs."""
    requests: set[str]
    """Paths of requests to a collector of traces and a lineage server."""


@pytest.fixture(scope="session")
def extras(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Extras:
    """Land an hour with all extras in one process: starting one takes longer than its work."""
    folder, requests = tmp_path_factory.mktemp("extras"), set[str]()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            requests.add(self.path)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ExitStack() as stack:
        zookeeper = LocalZooKeeper(folder / "zookeeper").start()
        stack.callback(zookeeper.stop)
        server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Collector))
        stack.callback(server.shutdown)
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": address, "OPENLINEAGE_URL": address}
        if programs := find_programs():
            postgres = stack.enter_context(run_server(programs))
            # Older releases of dagster-postgres require a password.
            storage = postgres.render_storage(database := postgres.create_database())
            storage = storage.replace("hostname: ''", "hostname: ''\n      password: none")
            (folder / "dagster.yaml").write_text(storage)
            environ["DAGSTER_HOME"] = str(folder)
        project.add_feed("iceberg", "table: {iceberg: {name: db.orders}}")
        project.add_feed("delta", "table: {delta: {}}")
        project.add_feed("old", f"offsets: {{store: zookeeper, connect: '{zookeeper.connect}'}}")
        words = ("run", "iceberg", "delta", "old", "--window", project.hours[0], "--json")
        document = json.loads(project.call(COMMAND, *words, **environ))
        landed = {feed["feed"]: count_landed({"feeds": [feed]}) for feed in document["feeds"]}
        stored = count_runs(postgres, database) if programs else None
        return Extras(landed, zookeeper.read_offsets("sluice-old", "orders"), stored, requests)


def count_runs(server: Postgres, database: str) -> int:
    with closing(psycopg2.connect(host=str(server.folder), user=server.user, dbname=database)) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT count(*) FROM runs")
        return int(cursor.fetchone()[0])


@pytest.mark.parametrize("feed", ["iceberg", "delta"])
def test_extra_table(project: Project, extras: Extras, feed: str) -> None:
    """A run adds its files to a table; the table's rows are those of the ledger."""
    assert extras.landed[feed] > 0
    project.run("table", "check", feed)


def test_extra_traces_and_lineage(extras: Extras) -> None:
    """A run reports to a collector and to a lineage server."""
    assert extras.requests >= {"/v1/traces", "/api/v1/lineage"}


def test_extra_zookeeper(extras: Extras) -> None:
    """A run commits its offsets to ZooKeeper."""
    assert extras.landed["old"] > 0
    assert extras.offsets


@pytest.mark.skipif(find_programs() is None, reason="needs PostgreSQL's programs")
def test_extra_postgres(extras: Extras) -> None:
    """Dagster's runs and events are in PostgreSQL."""
    assert extras.stored


def test_extra_contract(project: Project) -> None:
    """A proposed contract is loaded by Great Expectations, and holds for landed rows."""
    project.add_feed("agreed")
    project.run("contract", "init", "agreed")
    project.run("contract", "check", "agreed", "--file", "feeds/agreed.contract.proposed.json")


def test_extra_protobuf(project: Project) -> None:
    """A schema is compiled, and becomes columns."""
    (project.root / "schemas").mkdir(exist_ok=True)
    (project.root / "schemas" / "order.proto").write_text(
        'syntax = "proto3";\nimport "google/protobuf/timestamp.proto";\n'
        "message Order { string id = 1; google.protobuf.Timestamp at = 2; repeated int32 parts = 3; }\n"
    )
    bootstrap = project.call(COMMAND, "kafka", "status", "--json")
    lines = (
        f"kafka: {{bootstrap: '{re.search(ADDRESS, bootstrap)[0]}'}}",
        "topics: orders\nstart: earliest\nformat: protobuf\nmessage: Order\nschema_file: schemas/order.proto\n",
    )
    (project.root / "feeds" / "messages.yaml").write_text("\n".join(lines))
    project.run("feeds", "check")
    (project.root / "feeds" / "messages.yaml").unlink()


def test_extra_metrics(project: Project) -> None:
    assert 'sluice_up{feed="orders"} 1' in project.call(COMMAND, "metrics")


def test_extra_kubernetes() -> None:
    """Dagster's launcher takes the chart's values."""
    from dagster._config import process_config
    from dagster_k8s import K8sRunLauncher

    from tests.test_infra import configure_launcher

    config = process_config(K8sRunLauncher.config_type(), configure_launcher())
    assert config.success, config.errors


def test_databricks() -> None:
    """Databricks' SDK takes the job of docs/clouds.md. It drops keys that it does not know."""
    from databricks.sdk.service.jobs import JobSettings

    text = (ROOT / "docs" / "clouds.md").read_text().partition("## Databricks")[2]
    job = json.loads(text.partition("```json\n")[2].partition("```")[0])
    assert JobSettings.from_dict(job).as_dict() == job
