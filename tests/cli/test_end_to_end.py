"""The commands in sequence on a real Kafka, with Dagster and Spark, as in a user's first session."""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import pytest
from kafka import KafkaAdminClient

from sluice.assets.factory import build
from sluice.assets.instance.instance import open_instance, prepare_home
from sluice.assets.runs.run_config import fleet_job
from sluice.pipelines.feed.feed import SHARED
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.feed.stores import AzureSettings
from sluice.pipelines.util.units import HOUR, show_window
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.observe import tracing
from sluice.resources.project import Project
from tests import collectors
from tests.checker.producers import Noting
from tests.cli.conftest import Sluice
from tests.clouds import CLOUDS, CloudStore
from tests.collectors import Listener, run_listener
from tests.integration.support import SLUICE
from tests.resources.kafka.tools import wait_until

pytestmark = pytest.mark.usefixtures("default_engine")


def run_apart(*arguments: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a command in its own process; it must succeed. Return the JSON document that is its stdout."""
    env = {**os.environ, **(environment or {})}
    done = subprocess.run([*SLUICE, *arguments, "--json"], capture_output=True, env=env, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document


def land_apart(*arguments: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run `sluice run orders` in its own process. Return its only run."""
    (feed,) = run_apart("run", "orders", *arguments, environment=environment)["feeds"]
    (run,) = feed["runs"]
    return dict(run)


@pytest.fixture
def topic(project: Path, kafka: LocalKafka, request: pytest.FixtureRequest) -> str:
    """Return the name of a topic that does not exist yet, which the project's feed `orders` reads."""
    name = f"orders-{secrets.token_hex(4)}"
    text = f"kafka: {{bootstrap: '{kafka.bootstrap}'}}\ntopics: {name}\nstart: earliest\ngroup: g-{name}\n"
    (project / "feeds" / "orders.yaml").write_text(text)
    return name


@pytest.mark.spark
@pytest.mark.slow
def test_commands_of_a_first_session_work_in_sequence(
    topic: str, project: Path, kafka: LocalKafka, sluice: Sluice
) -> None:
    assert sluice("plan", "orders", "--json").document["error"] == "UnknownTopic"
    assert sluice("produce", "orders", "--json").code == 3  # not this project's own Kafka: --bootstrap is demanded
    bootstrap = ("--bootstrap", kafka.bootstrap)
    assert sluice("produce", "orders", *bootstrap, "--json").code == 2  # and --create
    arguments = (
        *bootstrap,
        "--create",
        "--partitions",
        "3",
        "--tombstones",
        "2%",
        "--headers",
        "20%",
        "--seed",
        "7",
        "--json",
    )
    sent = sluice("produce", "orders", "-n", "20000", "--transactional", "--aborted", "20%", *arguments).document
    assert 0 < sent["aborted"] < sent["records"] == 20_000

    planned = sluice("plan", "orders", "--json").document
    assert planned["offsets"] == sum(p["last_stable_offset"] for p in planned["partitions"]) > 20_000
    with run_listener() as listener:
        ran = land_apart(environment=collectors.build_environment(listener.address))
    _check_trace(listener, ran["run"], planned["offsets"])
    _check_lineage(listener, ran["run"], planned, sent["committed"])
    (completed,) = (e for e in listener.list_events() if e["eventType"] == "COMPLETE")
    assert _read_dataset(completed["inputs"]) == (f"kafka://{kafka.bootstrap}", topic)
    assert _read_dataset(completed["outputs"]) == ("file", f"{project}/.sluice/lake/data/orders")
    assert not listener.has_received(collectors.SECRET.encode())
    (batch,) = ran["batches"]
    assert (batch["hash"], batch["landed"]) == (planned["hash"], sent["committed"])
    assert batch["aborted"] == sent["aborted"]
    assert {o["after"] for o in ran["committed"]["offsets"]} == {p["last_stable_offset"] for p in planned["partitions"]}

    files = duckdb.read_parquet(f"{project}/.sluice/lake/data/orders/**/*.parquet")
    assert len(files.filter("value is null")) == sent["tombstones"]
    values = files.filter("octet_length(value) > 20").project("value").limit(100).fetchall()
    assert values
    assert not any(listener.has_received(value) for (value,) in values)
    assert len(files.filter("headers is not null and len(headers) > 0")) == sent["with_headers"]
    _compare_peek_and_explain(topic, files, sluice)
    audit = sluice("audit", "orders", "--rescan", "--hashes", "--json").document
    assert (audit["reconciled"], audit["compared"]) == (True, sent["committed"])

    more = sluice("produce", "orders", "-n", "500", *bootstrap, "--json").document
    feed = project / "feeds" / "orders.yaml"
    feed.write_text(f"{feed.read_text()}\nfetch: {{assignor: sticky}}\n")
    compared = {a["assignor"]: a for a in sluice("plan", "orders", "--compare", "--json").document["assignors"]}
    assert list(compared) == ["leader_bytes", "range", "round_robin", "sticky"]
    assert (compared["sticky"]["moved"], compared["leader_bytes"]["leaders"]) == (0, 1)
    again = land_apart()
    assert again["batches"][0]["landed"] == more["committed"] == 500
    starts = {p["partition"]: p["ranges"][0][0] for p in again["batches"][0]["partitions"]}
    assert starts == {p["partition"]: p["last_stable_offset"] for p in planned["partitions"]}
    assert sluice("run", "orders", "--json").run["batches"] == []
    (status,) = sluice("status", "orders", "--json").document["feeds"]
    assert (status["lag"], status["uncommitted"]) == (0, 0)


def _check_trace(listener: Listener, run: str, offsets: int) -> None:
    """Check the spans of both steps, of their stages, and of the tasks, which ran in other processes during `land`."""
    spans = listener.list_spans()
    assert {int.from_bytes(s.trace_id, "big") for s in spans} == {tracing.trace_of(run)}
    by_id = {s.span_id: s for s in spans}
    steps = [s for s in spans if not s.parent_span_id]
    assert len(steps) == 2, "one step lands, one commits"
    stages = {s.name for s in spans if s.parent_span_id in {x.span_id for x in steps}}
    assert {"plan", "start workers", "land", "prove", "publish", "commit"} <= stages
    landed_offsets = 0
    for task in (s for s in spans if s.name == "task"):
        above, about = by_id[task.parent_span_id], {a.key: a.value for a in task.attributes}
        assert above.name == "land"
        assert above.start_time_unix_nano <= task.start_time_unix_nano <= task.end_time_unix_nano
        assert task.end_time_unix_nano <= above.end_time_unix_nano
        assert about["sluice.feed"].string_value == "orders"
        assert about["process.pid"].int_value != os.getpid()
        landed_offsets += about["sluice.offsets"].int_value
    assert landed_offsets == offsets


def _read_dataset(datasets: list[dict[str, Any]]) -> tuple[str, str]:
    (one,) = datasets
    return one["namespace"], one["name"]


def _check_lineage(listener: Listener, run: str, planned: Mapping[str, Any], rows: int) -> None:
    """Check the START and COMPLETE events, with the offsets that were read and the rows that landed."""
    started, completed = listener.list_events()
    assert [e["eventType"] for e in (started, completed)] == ["START", "COMPLETE"]
    assert {e["run"]["runId"] for e in (started, completed)} == {run}
    assert {(e["job"]["namespace"], e["job"]["name"]) for e in (started, completed)} == {("shop", "orders")}
    ((topic,), (landed,)) = completed["inputs"], completed["outputs"]
    assert topic["inputFacets"]["inputStatistics"]["rowCount"] == rows
    offsets = topic["inputFacets"]["sluice_offsets"]
    assert (offsets["offsets"], offsets["left_out"]) == (planned["offsets"], 0)
    ends = {(p["partition"], 0, p["last_stable_offset"]) for p in planned["partitions"]}
    assert {(r["partition"], r["start"], r["end"]) for r in offsets["ranges"]} == ends
    assert landed["outputFacets"]["outputStatistics"]["rowCount"] == rows
    assert "value" in {f["name"] for f in landed["facets"]["schema"]["fields"]}


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.slow
def test_smallest_documented_feed_runs_unchanged(project: Path, sluice: Sluice) -> None:
    text = (Path(__file__).parents[2] / "docs" / "feeds.md").read_text()
    smallest = text.partition("```yaml\n")[2].partition("```")[0]
    (project / "feeds" / "orders.yaml").write_text(smallest)
    without = sluice("plan", "orders", "--json")
    assert (without.code, "sluice kafka start" in without.document["remedy"]) == (2, True)
    sluice("kafka", "start")
    try:
        assert sluice("produce", "orders", "-n", "300", "--json").document["committed"] == 300
        assert land_apart()["batches"][0]["landed"] == 300
    finally:
        sluice("kafka", "stop")
    stopped = sluice("plan", "orders", "--json")
    assert (stopped.document["error"], stopped.code) == ("KafkaUnavailable", 1)
    assert "sluice kafka start" in stopped.document["remedy"]


def _compare_peek_and_explain(topic: str, files: duckdb.DuckDBPyRelation, sluice: Sluice) -> None:
    peeked = sluice("peek", f"{topic}:1:0", "-n", "12000", "--json").document["records"]
    landed = dict(files.filter("partition = 1").project('"offset", value').fetchall())
    stable = {r["offset"]: r["value"] and base64.b64decode(r["value"]) for r in peeked if r["state"] == "stable"}
    assert stable == landed
    aborted = next(r["offset"] for r in peeked if r["state"] == "aborted")
    assert sluice("explain", "orders", f"{topic}:1:{aborted}", "--json").document["class"] == "no record"
    first = min(landed)
    explained = sluice("explain", "orders", f"{topic}:1:{first}", "--json").document
    assert (explained["class"], explained["record"]["offset"]) == ("landed", first)


@contextmanager
def run_ui(port: int, *signals: signal.Signals) -> Iterator[dict[str, Any]]:
    """Run `sluice ui` during the block, and yield its announcement. The signals end it and all its processes."""
    with subprocess.Popen([*SLUICE, "ui", "--port", str(port), "--json"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        announcement = json.loads(process.stdout.readline())
        assert announcement["address"] == f"http://127.0.0.1:{port}"
        yield announcement
        for number in signals:
            process.send_signal(number)
            time.sleep(0.5)
        process.wait()
    assert process.returncode == (0 if signals[0] == signal.SIGINT else 128 + signal.SIGTERM)
    assert not any(_is_session_alive(pid) for pid in announcement["pids"].values())


@pytest.mark.slow
def test_ui_listens_on_loopback_and_shows_new_feeds(project: Path, sluice: Sluice) -> None:
    (project / "feeds" / "broken.yaml").write_text("topics: [\n")  # the other feeds' pages are still served
    query = json.dumps({"query": "{ assetNodes { assetKey { path } } }"}).encode()
    with open_instance(Project(project)):
        (remedy,) = find_daemon(sluice)["remedy"].split(";")[:1]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = sluice("ui", "--port", str(taken.getsockname()[1]))
    (port,) = re.findall(r"sluice ui --port (\d+)$", refused.err)
    assert (refused.code, remedy) == (2, "sluice ui")
    with run_ui(int(port), signal.SIGINT) as announcement:
        assert [e["error"] for e in announcement["broken"]] == ["FeedError"]

        def list_assets() -> list[str]:
            graphql_request = urllib.request.Request(
                f"{announcement['address']}/graphql", query, {"content-type": "application/json"}
            )
            with urllib.request.urlopen(graphql_request, timeout=60) as answer:
                return ["/".join(n["assetKey"]["path"]) for n in json.load(answer)["data"]["assetNodes"]]

        assert "orders/landed" in list_assets()
        (project / "feeds" / "refunds.yaml").write_text("topics: refunds\nstart: earliest\ngroup: g-refunds\n")
        wait_until(lambda: "refunds/landed" in list_assets(), 60)
        wait_until(lambda: find_daemon(sluice)["health"] == "ok", 60)


def find_daemon(sluice: Sluice) -> dict[str, Any]:
    """Returns what `sluice doctor` reports about Dagster's daemon."""
    groups = sluice("doctor", "--json").document["groups"]
    (daemon,) = (check for group in groups for check in group["checks"] if check["title"] == "daemon")
    return dict(daemon)


@pytest.mark.slow
def test_ui_that_is_terminated_twice_stops_its_processes(project: Path, unused_port: Callable[[], int]) -> None:
    with run_ui(unused_port(), signal.SIGTERM, signal.SIGTERM) as announcement:
        assert all(_is_session_alive(pid) for pid in announcement["pids"].values())


def _is_session_alive(pid: int) -> bool:
    """Return True if a process of the session still runs; zombies do not count."""
    stats = (Path(f"/proc/{p}/stat") for p in os.listdir("/proc") if p.isdigit())
    for stat in stats:
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == pid and state != "Z":
            return True
    return False


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("lake", ["local", *CLOUDS, pytest.param("s3", marks=pytest.mark.soak)])
def test_the_demo_proves_its_figures(
    project: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, lake: str
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP", "203.0.113.1:9092")  # somebody's own Kafka, which the demo must not touch
    before = {"local": "/", "s3": "s3://lake/data/"}.get(lake)
    if lake in CLOUDS:
        store: CloudStore = request.getfixturevalue(f"{lake}_store")
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        lake = store.make_address()
        before = f"{lake}/demo-"
    document = run_apart("demo", "-n", "9000", "--lake", lake)

    def list_documents(command: str) -> list[Any]:
        return [step["document"] for step in document["steps"] if step["command"].startswith(command)]

    runs = [run for done in list_documents("sluice run") for feed in done["feeds"] for run in feed["runs"]]
    (hour,), (rest,) = (run["batches"] for run in runs)
    produced = list_documents("sluice produce")
    quarantined = hour["quarantined"] + rest["quarantined"]
    assert hour["landed"] + rest["landed"] + quarantined == sum(p["committed"] for p in produced)
    assert sum(p["malformed"] for p in produced) == quarantined
    ((listed,), (checked,)) = list_documents("sluice quarantine"), list_documents("sluice check")
    assert sum(reason["records"] for reason in listed["held"]) == hour["quarantined"]
    assert checked["complete"] is True
    ((proven,), (offsets,)) = list_documents("sluice audit"), list_documents("sluice offsets")
    assert proven["reconciled"] is True
    assert proven["compared"] == hour["landed"] + rest["landed"]
    assert all(o["committed"] == o["log_end"] for o in offsets["offsets"])
    ((files,), (report,)) = list_documents("files"), list_documents("report")
    by_currency = [{c["currency"]: c for c in of["by_currency"] if c["currency"]} for of in (report, files)]
    assert by_currency[0] == by_currency[1]
    assert all(p.startswith(before or "") for p in files["files"])
    demo = project / ".sluice" / "demo"
    assert Path(document["project"]) == demo
    assert not any(b.running for b in LocalKafka.attach(demo / ".sluice" / "kafka").status().brokers)
    assert sorted(p.name for p in project.iterdir()) == [".sluice", "feeds"]


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.soak
@pytest.mark.parametrize("format_", ["avro", "json_schema", "protobuf"])
def test_demo_of_a_format_uses_its_own_registry(project: Path, monkeypatch: pytest.MonkeyPatch, format_: str) -> None:
    monkeypatch.setenv("SCHEMA_REGISTRY_URL", "http://203.0.113.1:8081")
    document = run_apart("demo", "-n", "3000", "--format", format_)
    assert document["steps"][-1]["document"]["reconciled"] is True
    (feed,) = (project / ".sluice" / "demo" / ".sluice" / "lake" / "_sluice").glob("*")
    assert [p.name for p in feed.glob("schemas/*")] == ([] if format_ == "json_schema" else ["1.json"])


@pytest.mark.parametrize(
    ("lake", "message"),
    [
        ("there", "--lake there is no lake"),
        ("az://lake", "no answer for az://lake/demo-"),
        ("gs://lake", "no answer for gs://lake/demo-"),
    ],
)
def test_demo_checks_the_store_before_it_starts(
    project: Path, sluice: Sluice, monkeypatch: pytest.MonkeyPatch, lake: str, message: str
) -> None:
    if "://" in lake:
        pytest.importorskip("obstore")
    nowhere = "http://127.0.0.1:9"
    for name, value in {**CloudStore("az", AzureSettings()).environment, "AZURE_STORAGE_ENDPOINT": nowhere}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", nowhere)
    refused = sluice("demo", "--lake", lake, "--json")
    assert refused.document["message"].startswith(message)
    assert not (project / ".sluice" / "demo").exists()


def test_demo_refuses_to_keep_its_s3_server(project: Path, sluice: Sluice) -> None:
    refused = sluice("demo", "--lake", "s3", "--keep", "--json")
    assert (refused.code, refused.document["error"]) == (2, "UsageError")
    assert not (project / ".sluice" / "demo").exists()


@pytest.mark.spark
@pytest.mark.slow
def test_one_run_lands_many_feeds_and_names_failed_feeds(
    topic: str, project: Path, kafka: LocalKafka, sluice: Sluice, monkeypatch: pytest.MonkeyPatch
) -> None:
    feeds, hours_ago = project / "feeds", -3 * 3_600_000
    text = (feeds / "orders.yaml").read_text()
    (feeds / "copy.yaml").write_text(text.replace("group: g-", "group: copy-"))
    (feeds / "gone.yaml").write_text(text.replace(kafka.bootstrap, "127.0.0.1:9"))
    (feeds / "wrong.yaml").write_text("topic: orders")
    with closing(KafkaAdminClient(bootstrap_servers=kafka.bootstrap)) as admin:
        admin.create_topics({topic: {"num_partitions": 2, "configs": {"retention.ms": "-1"}}})
    with closing(Noting(project / "sent.jsonl", "past", kafka.bootstrap, ahead_ms=hours_ago)) as producer:
        for partition in range(2):
            producer.send(topic, partition, 50)

    closed = show_window(WindowSettings().last_boundary(int(time.time() * 1000)) - HOUR)
    result = sluice("run", "--all", "--window", closed, "--json")
    assert result.code == 2, "of the file that is wrong"
    by_feed = {f["feed"]: f["runs"][0] for f in result.document["feeds"]}
    assert result.document["failed"] == ["gone"], by_feed["orders"].get("message")
    assert by_feed["gone"]["error"] == "KafkaUnavailable"
    assert "wrong.yaml" in result.document["broken"][0]["message"]
    assert by_feed["orders"]["run"] == by_feed["copy"]["run"]

    monkeypatch.setenv("SLUICE_PROJECT", str(project))
    with open_instance(Project(project)) as instance:
        defs, now = build(Project(project)), datetime.now(UTC)
        with dg.build_schedule_context(instance, now, repository_def=defs.get_repository_def()) as context:
            (run_request,) = (
                defs.resolve_schedule_def(f"{fleet_job(SHARED)}_windows").evaluate_tick(context).run_requests or ()
            )
        config = project / "tick.yaml"
        config.write_text(json.dumps(run_request.run_config))
        monkeypatch.setenv("DAGSTER_HOME", str(prepare_home(Project(project))))
        command = ["job", "execute", "-m", "sluice.assets.definitions", "-j", fleet_job(SHARED), "-c", str(config)]
        subprocess.run([sys.executable, "-m", "dagster", *command], capture_output=True, check=False)
        run = instance.get_runs(limit=1)[0]
        assert (run.tags["sluice/done"], run.tags["sluice/failed"]) == ("2", "gone"), run.tags
    for name in ("copy", "orders"):
        audited = sluice("audit", name, "--rescan", "--json").document
        assert (audited["reconciled"], audited["compared"]) == (True, 100)
