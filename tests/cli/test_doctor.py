"""`sluice doctor` with a reachable and an unreachable Kafka, missing rights, and damaged lakes and ledgers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sluice.cli.inspect import doctor
from sluice.cli.main import main
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.feed.rights import Operation, rights_of
from sluice.pipelines.model.health import Health, report_ok
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.secured import grant, revoke
from tests.cli.conftest import Sluice
from tests.integration.support import SLUICE

if TYPE_CHECKING:
    import dagster as dg

    from sluice.pipelines.feed.feed import Feed

FEED = "kafka: {{bootstrap: '{0}', bootstrap_timeout_ms: 1000}}\ntopics: {1}\nstart: earliest\n"


def find_checks(document: dict[str, Any], title: str, group: str = "") -> list[dict[str, Any]]:
    """Return the checks with this title in the groups whose title begins with `group`."""
    groups = [g for g in document["groups"] if g["title"].startswith(group)]
    return [c for g in groups for c in g["checks"] if c["title"] == title]


def read_health(document: dict[str, Any], title: str, group: str = "") -> list[str]:
    return [c["health"] for c in find_checks(document, title, group)]


@pytest.fixture
def feed(project: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> str:
    """Return the name of a new topic, which the project's feed reads."""
    topic = fresh_topic(partitions=2)
    (project / "feeds" / "orders.yaml").write_text(FEED.format(kafka.bootstrap, topic))
    return topic


def test_healthy_project_passes_all_checks(feed: str, kafka: LocalKafka, project: Path, sluice: Sluice) -> None:
    before = sorted(str(p) for p in project.rglob("*"))
    result = sluice("doctor", "--json")
    assert (result.code, result.document["healthy"]) == (0, True)
    assert [g["title"] for g in result.document["groups"]] == [
        "This machine",
        f"Project {project}",
        f"Kafka {kafka.bootstrap}",
        f"Lake {project}/.sluice/lake",
        "Spark local",
    ]
    everything = [c for g in result.document["groups"] for c in g["checks"]]
    assert {c["health"] for c in everything} == {"ok", "skipped"}
    (broker,), (clock,), (topics,) = (find_checks(result.document, t) for t in ("broker", "clock", "topics"))
    assert "answers, protocol of Kafka 4" in broker["found"]
    assert clock["found"] == "as the brokers', to the second"
    assert f"{feed} (2 partitions, id " in topics["found"]
    assert find_checks(result.document, "scheduler")[0]["found"] == "dagster"
    assert read_health(result.document, "Dagster") == ["skipped"], "nobody has used it yet, and looking makes none"
    assert sorted(str(p) for p in project.rglob("*")) == before, "it reads only"


def test_scheduler_of_the_project_is_reported(project: Path, sluice: Sluice, monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> str:
        return str(find_checks(sluice("doctor", "--json").document, "scheduler", "Project")[0]["found"])

    (project / "fleet.yaml").write_text("scheduler: airflow\n")
    assert read() == "airflow, which is not in this environment"
    folder = project / "installed" / "apache_airflow-2.10.5.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: apache-airflow\nVersion: 2.10.5\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    assert read() == "airflow; Airflow 2.10.5 is installed"
    (project / "fleet.yaml").write_text("scheduler: cron\n")
    assert "fleet.yaml" in read()


def test_invalid_notify_file_is_reported_without_secret(project: Path, sluice: Sluice) -> None:
    (project / "notify.yaml").write_text("webhook: ftp://chat.internal/canary\n")
    (problem,) = find_checks(sluice("doctor", "--json").document, "notify", "Project")
    assert problem["health"] == "failed"
    assert "notify.yaml:1:1: webhook: is no http:// or https:// address" in problem["found"]
    assert "canary" not in str(problem)


def test_deprecated_keys_are_reported_with_replacement(project: Path, sluice: Sluice) -> None:
    feed = FEED.format("127.0.0.1:9", "orders") + "window: {settle: 1m}\nlimits: {task_bytes: 64MiB}\n"
    (project / "feeds" / "orders.yaml").write_text(feed)
    (problem,) = find_checks(sluice("doctor", "--json").document, "orders: deprecated keys", "Project")
    assert problem["health"] == "warning"
    assert problem["found"] == "limits.task_bytes, window.settle: 0.4.0 refuses them, not before 1 June 2027"
    assert problem["remedy"] == "write tuning.task_bytes, window.grace"
    (project / "feeds" / "orders.yaml").rename(project / "feeds" / "file.yaml").write_text(f"feed: sales\n{feed}")
    (problem,) = find_checks(sluice("doctor", "sales", "--json").document, "sales: deprecated keys", "Project")
    assert problem["health"] == "warning"


def test_check_with_unexpected_error_counts_as_failed(
    project: Path, sluice: Sluice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_check_keys", lambda project, files: 1 / 0)
    answer = sluice("doctor", "--json")
    (problem,) = find_checks(answer.document, f"project {project}", "Project")
    assert (answer.code, problem["health"]) == (1, "failed")
    assert problem["found"] == "unforeseen ZeroDivisionError"


def test_text_output_fits_narrow_and_wide_screens(
    feed: str, sluice: Sluice, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "feeds" / "broken.yaml").write_text("topics: x\n")
    for columns in ("60", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        result = sluice("doctor")
        assert result.code == 1
        lines = result.out.splitlines()
        assert "✗ 2 things wrong" not in lines
        assert lines[-1] == "✗ 1 thing wrong"
        assert any(line.startswith("  ✓ broker: 1 at 127.0.0.1:") for line in lines)
        assert any(line.startswith("  ✗ feeds: ") for line in lines)
        assert any(line.startswith("    → ") for line in lines)
        words = [line for line in lines if len(line) > int(columns) and " " in line.strip()]
        assert [line for line in words if len(line.split()[-1]) < int(columns) - 8] == []


def test_unreachable_kafka_is_reported_and_other_checks_run(
    feed: str, kafka: LocalKafka, project: Path, sluice: Sluice, unused_port: Callable[[], int]
) -> None:
    """All other checks still run. One dead address of two is a warning: another answers."""
    dead_address = f"127.0.0.1:{unused_port()}"
    (project / "feeds" / "orders.yaml").write_text(FEED.format(f"{dead_address},{kafka.bootstrap}", feed))
    (project / "feeds" / "away.yaml").write_text(FEED.format(dead_address, feed))
    result = sluice("doctor", "--json")
    assert result.code == 1
    assert read_health(result.document, "address", f"Kafka {dead_address},") == ["warning", "ok"]
    assert read_health(result.document, "topics", f"Kafka {dead_address},") == ["ok"]
    (away,) = (g for g in result.document["groups"] if g["title"] == f"Kafka {dead_address}")
    assert [c["health"] for c in away["checks"]] == ["failed", "skipped"]
    assert "connection refused" in away["checks"][0]["found"]
    assert read_health(result.document, "folder") == ["ok"]

    one = sluice("doctor", "orders", "--json")
    assert (one.code, one.document["healthy"]) == (0, True), "what only others need is not asked"
    assert sluice("doctor", "nobody", "--json").code == 2


def test_missing_topics_and_files_of_feeds_are_reported(
    feed: str, kafka: LocalKafka, project: Path, sluice: Sluice
) -> None:
    text = FEED.format(kafka.bootstrap, "nowhere")
    (project / "feeds" / "orders.yaml").write_text(f"{text}dead_letters: {{topic: no-letters}}\n")
    other = FEED.format(kafka.bootstrap, feed) + "group: g2\ntransactional_id: t2\n"
    (project / "feeds" / "other.yaml").write_text(other)
    (project / "feeds" / "damaged.yaml").write_text('topics: x\nstart: "${file:no/secret}"\n')
    result = sluice("doctor", "--json")
    assert result.code == 1
    assert (
        read_health(result.document, "orders: topics")
        == read_health(result.document, "orders: dead letters")
        == ["failed"]
    )
    assert "UNKNOWN_TOPIC" in find_checks(result.document, "orders: topics")[0]["found"]
    assert (
        read_health(result.document, "other: topics") == read_health(result.document, "orders: transactions") == ["ok"]
    )
    assert read_health(result.document, "feeds") == ["ok", "failed"]
    assert (
        f"needs the file {project}/no/secret, which does not exist" in find_checks(result.document, "feeds")[1]["found"]
    )
    assert read_health(sluice("doctor", "damaged", "--json").document, "feeds") == ["failed"]


def test_foreign_group_member_and_invalid_timeouts_are_reported(
    feed: str, kafka: LocalKafka, project: Path, sluice: Sluice
) -> None:
    from kafka import KafkaConsumer

    text = f"kafka: {{bootstrap: '{kafka.bootstrap}', transaction_timeout_ms: 86400000, session_timeout_ms: 100}}\n"
    (project / "feeds" / "orders.yaml").write_text(f"{text}topics: {feed}\nstart: earliest\ngroup: held-{feed}\n")
    other = KafkaConsumer(feed, bootstrap_servers=kafka.bootstrap, group_id=f"held-{feed}", client_id="billing")
    try:
        until = time.monotonic() + 30
        while not other.assignment() and time.monotonic() < until:
            other.poll(100)
        result = sluice("doctor", "--json")
    finally:
        other.close()
    assert result.code == 1
    (group,), (transactions,) = (find_checks(result.document, t) for t in ("group", "transactions"))
    assert (group["health"], "billing at 127.0.0.1" in group["found"]) == ("warning", True)
    assert transactions["health"] == "failed"
    assert "Ours may last 1d, the brokers allow 15m" in transactions["found"]
    (session,) = find_checks(result.document, "group session")
    assert session["found"] == "ours in the group is to last 100ms, the brokers allow 500ms to 30m"
    assert "set kafka.session_timeout_ms in the feed to 500 at least" in session["remedy"]


def test_unwritable_lake_is_reported(project: Path, sluice: Sluice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path is a file; or the user has no right to write (by `os.access`, as root may always write)."""
    (project / "feeds" / "orders.yaml").write_text(f"{FEED.format('127.0.0.1:9', 'x')}lake: feeds/orders.yaml\n")
    assert read_health(sluice("doctor", "--json").document, "folder") == ["failed"]

    (project / "feeds" / "orders.yaml").write_text(f"{FEED.format('127.0.0.1:9', 'x')}lake: lake\n")
    (project / "lake").mkdir(mode=0o555)
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != project / "lake")
    result = sluice("doctor", "--json")
    assert result.code == 1
    (folder,) = find_checks(result.document, "folder")
    assert (folder["health"], folder["remedy"]) == ("failed", "give this user the right to write there")


@pytest.fixture
def instance(project: Path) -> Iterator[dg.DagsterInstance]:
    """The project's own Dagster instance, as its first run creates it."""
    import dagster as dg

    from sluice.assets.instance.instance import prepare_home
    from sluice.resources.project import Project

    prepare_home(Project(project))
    with dg.DagsterInstance.from_config(str(project / ".sluice" / "dagster")) as instance:
        yield instance


def test_stopped_dagster_daemon_is_reported_when_runs_are_queued(
    project: Path, sluice: Sluice, instance: dg.DagsterInstance
) -> None:
    import dagster as dg
    from dagster._daemon.types import DaemonHeartbeat

    from sluice.assets.instance.internals import job_origin
    from sluice.resources.project import Project

    def read_daemon() -> dict[str, Any]:
        (line,) = find_checks(sluice("doctor", "--json").document, "daemon")
        assert isinstance(line, dict)
        return line

    def send_heartbeats(seconds_ago: float) -> None:
        for kind in instance.get_required_daemon_types():
            instance.add_daemon_heartbeat(DaemonHeartbeat(time.time() - seconds_ago, kind, "x"))

    assert read_daemon()["health"] == "skipped", "nobody needs it yet"
    send_heartbeats(0)
    assert read_daemon()["health"] == "ok"
    send_heartbeats(7200)
    assert read_daemon()["health"] == "skipped"
    origin = job_origin(Project(project), "catch_up")
    instance.add_run(dg.DagsterRun("catch_up", status=dg.DagsterRunStatus.QUEUED, remote_job_origin=origin))
    dead = read_daemon()
    assert dead["health"] == "failed"
    assert dead["found"] == "its last heartbeat is 2 h old, and 1 run is queued"


def test_problems_of_dagster_instance_are_reported(project: Path, sluice: Sluice, instance: dg.DagsterInstance) -> None:
    import dagster as dg

    document = sluice("doctor", "--json").document
    assert (
        read_health(document, "schema")
        == read_health(document, "concurrency")
        == read_health(document, "Dagster")
        == ["ok"]
    )
    instance.event_log_storage.set_concurrency_slots("sluice_orders", 0)
    (shut, _) = find_checks(sluice("doctor", "--json").document, "concurrency")
    assert (shut["health"], shut["remedy"]) == ("failed", "dagster instance concurrency set sluice_orders 1")
    instance.event_log_storage.set_concurrency_slots("sluice_orders", 1)

    killed = instance.add_run(dg.DagsterRun("catch_up", status=dg.DagsterRunStatus.STARTED)).run_id
    (project / ".sluice" / "dagster" / "attended").mkdir()
    (project / ".sluice" / "dagster" / "attended" / killed).touch()
    (dead,) = find_checks(sluice("doctor", "--json").document, "runs")
    assert (dead["health"], dead["found"]) == ("warning", "1 run of 1 under way is dead")

    config = project / ".sluice" / "dagster" / "dagster.yaml"
    config.write_text(config.read_text().replace("granularity: run", "granularity: op"))
    (by_op,) = find_checks(sluice("doctor", "--json").document, "concurrency")
    assert by_op["health"] == "warning"
    assert "free_slots_after_run_end_seconds" in by_op["remedy"]
    config.write_text(config.read_text().replace("default_limit: 1", "").replace("granularity: op", "granularity: run"))
    assert read_health(sluice("doctor", "--json").document, "concurrency") == ["ok"], (
        "the feed's own pool has its limit"
    )
    instance.event_log_storage.delete_concurrency_limit("sluice_orders")
    (free,) = find_checks(sluice("doctor", "--json").document, "concurrency")
    assert "no limit of 1 on sluice_orders" in free["found"]
    assert free["remedy"] == "dagster instance concurrency set sluice_orders 1, and so for each feed"
    config.write_text("storage: {sqlite: {base_dir: 7, correct-horse: battery}}\n")
    result = sluice("doctor", "--json")
    assert (result.code, read_health(result.document, "Dagster")) == (1, ["failed"])
    assert "battery" not in result.out


def test_silent_address_times_out_and_interrupt_ends_the_command(project: Path) -> None:
    """An address accepts connections and never answers: the report is still complete, and Ctrl-C ends the command."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        (project / "feeds" / "orders.yaml").write_text(FEED.format(address, "x").replace("1000", "60000"))
        command = [*SLUICE, "doctor", "--json"]
        done = subprocess.run(command, cwd=project, capture_output=True, timeout=60, check=False)
        assert done.returncode == 1, done.stderr
        assert read_health(json.loads(done.stdout), "address") == ["failed"]

        silent.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                silent.accept()[0].close()  # of the first
        begun = subprocess.Popen(command, cwd=project, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
        silent.settimeout(30)
        silent.accept()[0].close()
        begun.send_signal(signal.SIGINT)
        _, err = begun.communicate(timeout=10)
    assert (begun.returncode, err.decode().strip()) == (130, "interrupted")


def test_group_that_hangs_has_failed_after_its_time() -> None:
    hung, counts = threading.Event(), list[int]()
    waits = doctor.CheckGroup("Kafka", lambda: [report_ok("never", "")] * hung.wait(30), seconds=0.3)
    ends = doctor.CheckGroup("Lake", lambda: [report_ok("folder", "there")])
    doctor._look([waits, ends], counts.append)
    hung.set()
    assert [(d.health, d.title, d.found) for d in waits.checks] == [(Health.FAILED, "kafka", "no end within 0 s")]
    assert [d.title for d in ends.checks] == ["folder"]
    assert 1 in counts


def test_missing_project_is_reported(tmp_path: Path, sluice: Sluice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLUICE_PROJECT", raising=False)
    monkeypatch.chdir(tmp_path)
    result = sluice("doctor", "--json")
    assert result.code == 1
    assert [g["title"] for g in result.document["groups"]] == ["This machine", "Project"]
    assert main(["doctor", "orders"]) == 2


# -- on a secured Kafka


@pytest.fixture
def locked(project: Path, secured: LocalKafka, fresh_topic: Callable[..., str]) -> Feed:
    """The project's feed, whose user `sluice` has no rights."""
    assert secured.secured is not None
    topic, letters = fresh_topic(cluster=secured, name="doctor"), fresh_topic(cluster=secured, name="letters")
    lines = [
        *secured.secured.section(secured.bootstrap, project),
        f"topics: {topic}\nstart: earliest\ngroup: g-{topic}\ndead_letters: {{topic: {letters}}}\n",
    ]
    path = project / "feeds" / "orders.yaml"
    path.write_text("\n".join(lines))
    return load_feed(path, {})


def read_rights(document: dict[str, Any]) -> dict[str, str]:
    """Return the health of each right by its name."""
    return {re.split(",| is missing", c["found"])[0]: c["health"] for c in find_checks(document, "rights")}


def test_each_missing_right_is_reported_separately(locked: Feed, secured: LocalKafka, sluice: Sluice) -> None:
    needed = rights_of(locked)
    none = sluice("doctor", "orders", "--json")
    assert none.code == 1
    hidden = {str(r) for r in needed if r.operation is Operation.DESCRIBE_CONFIGS}
    expected = {str(r): "skipped" if str(r) in hidden else "warning" if r.optional else "failed" for r in needed}
    assert read_rights(none.document) == expected, (
        "without the right to describe a resource, its other rights are not checked"
    )
    for title in ("topics", "dead letters", "group", "group session", "transactions"):
        assert read_health(none.document, title) == ["skipped"], "missing rights are reported once"
    (first, *_) = find_checks(none.document, "rights")
    assert first["remedy"].startswith(f"grant {needed[0]} to User:sluice: kafka-acls")

    grant(secured, needed)
    try:
        every = sluice("doctor", "orders", "--json")
        assert (every.code, set(read_rights(every.document).values())) == (0, {"ok"}), every.out
        assert read_health(every.document, "clock") == ["ok"]
        for right in needed:
            revoke(secured, [right])
            without = read_rights(sluice("doctor", "orders", "--json").document)
            grant(secured, [right])
            assert without.pop(str(right)) == ("warning" if right.optional else "failed")
            not_ok = {name: health for name, health in without.items() if health != "ok"}
            assert (set(not_ok.values()) <= {"skipped"}, not_ok.keys() <= hidden) == (True, True), right
    finally:
        revoke(secured, needed)


def test_checking_a_transactional_id_does_not_affect_its_transaction(
    locked: Feed, secured: LocalKafka, sluice: Sluice
) -> None:
    from kafka import KafkaProducer

    needed = rights_of(locked)
    grant(secured, needed)
    settings = {"bootstrap_servers": secured.bootstrap, "transactional_id": locked.transactional_id}
    producer = KafkaProducer(**settings, **secured.client())
    try:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(locked.topics.names[0], b"x").get(30)
        assert set(read_rights(sluice("doctor", "--json").document).values()) == {"ok"}
        producer.commit_transaction()
    finally:
        producer.close()
        revoke(secured, needed)


def test_refused_login_is_reported(locked: Feed, project: Path, sluice: Sluice) -> None:
    path = project / "feeds" / "orders.yaml"
    text = path.read_text()
    (project / "wrong").write_text("hunter2-s3cr3t")
    path.write_text(re.sub(r"\$\{file:[^}]*\}", "${file:wrong}", text))
    result = sluice("doctor", "--json")
    assert (result.code, read_health(result.document, "address")) == (1, ["failed"])
    assert "hunter2" not in result.out + result.err
    path.write_text(re.sub(r"  ssl_cafile.*\n", "", text))
    (untrusted,) = find_checks(sluice("doctor", "--json").document, "address")
    assert (untrusted["health"], "ssl_cafile" in untrusted["remedy"]) == ("failed", True)


# -- ledgers


def land_records(project: Path, kafka: LocalKafka, topic: str) -> Path:
    """Land and commit one record of each partition. Return the lake."""
    from kafka import KafkaProducer

    producer = KafkaProducer(bootstrap_servers=kafka.bootstrap)
    for partition in (0, 1):
        producer.send(topic, b"{}", partition=partition)
    producer.close()
    assert main(["run", "orders", "--project", str(project)]) == 0
    return project / ".sluice" / "lake"


@pytest.mark.slow
def test_lost_ledger_entries_and_missing_lake_are_reported(
    feed: str, kafka: LocalKafka, project: Path, sluice: Sluice
) -> None:
    (project / "feeds" / "orders.yaml").write_text(FEED.format(kafka.bootstrap, feed) + f"group: g-{feed}\n")
    lake = land_records(project, kafka, feed)
    sound = sluice("doctor", "--json")
    assert (sound.code, read_health(sound.document, "ledger")) == (0, ["ok"])
    assert "no committed offset is of another ledger" in find_checks(sound.document, "ledger")[0]["found"]

    newest = max((lake / "_sluice" / "orders" / "log").iterdir())
    newest.rename(project / "newest")
    lost = sluice("doctor", "--json")
    assert (lost.code, lost.document["healthy"], read_health(lost.document, "ledger")) == (1, False, ["failed"])
    assert "lost entries" in find_checks(lost.document, "ledger")[0]["found"]
    assert "sluice accept orders ledger" in find_checks(lost.document, "ledger")[0]["remedy"]
    (project / "newest").rename(newest)

    lake.rename(project / "elsewhere")
    without_lake = sluice("doctor", "--json")
    assert (without_lake.code, read_health(without_lake.document, "ledger")) == (1, ["failed"])
    assert "belong to another ledger" in find_checks(without_lake.document, "ledger")[0]["found"]
    for command in (
        "plan orders",
        "status orders",
        "status",
        "run orders",
        "offsets show orders",
        "audit orders --strict",
    ):
        assert sluice(*command.split()).code == 3, command
    assert not list(lake.rglob("*.parquet"))
    shutil.rmtree(lake, ignore_errors=True)
    (project / "elsewhere").rename(lake)
    assert sluice("doctor", "--json").code == 0, "restored"


@pytest.mark.slow
def test_renamed_feed_is_reported(feed: str, kafka: LocalKafka, project: Path, sluice: Sluice) -> None:
    (project / "feeds" / "orders.yaml").write_text(FEED.format(kafka.bootstrap, feed) + f"group: g-{feed}\n")
    land_records(project, kafka, feed)
    (project / "feeds" / "orders.yaml").rename(project / "feeds" / "sales.yaml")
    result = sluice("doctor", "--json")
    assert (result.code, read_health(result.document, "ledger"), read_health(result.document, "ledgers")) == (
        1,
        ["failed"],
        ["warning"],
    )
    assert "feed orders in this lake" in find_checks(result.document, "ledger")[0]["remedy"]
    assert find_checks(result.document, "ledgers")[0]["found"] == "without a feed file here: orders"
    status = sluice("status", "--json")
    assert (status.code, [*status.document["ledgers_without_files"].values()]) == (3, [["orders"]])
    assert sluice("accept", "sales", "group", "--begin", "committed", "--reason", "renamed").code == 0
    assert sluice("status").code == 0
    assert "ledgers without a feed file" in sluice("status").out


def test_offsets_of_other_consumer_override_start_with_a_warning(
    feed: str, kafka: LocalKafka, project: Path, sluice: Sluice
) -> None:
    from kafka import KafkaConsumer
    from kafka.structs import OffsetAndMetadata, TopicPartition

    (project / "feeds" / "orders.yaml").write_text(FEED.format(kafka.bootstrap, feed) + f"group: g-{feed}\n")
    assert "is not used" not in sluice("plan", "orders").out
    consumer = KafkaConsumer(bootstrap_servers=kafka.bootstrap, group_id=f"g-{feed}", enable_auto_commit=False)
    consumer.assign([TopicPartition(feed, 0)])
    consumer.commit({TopicPartition(feed, 0): OffsetAndMetadata(0, "", -1)})
    consumer.close()
    warning = f"`start: earliest` is not used in 1 of 2 partitions: group g-{feed} has offsets there"
    remedy = "give the feed a group of its own: `group: NAME` in feeds/orders.yaml"
    assert remedy in sluice("plan", "orders", "--json").document["start_not_used"]
    assert warning in " ".join(sluice("plan", "orders").out.split())
    assert warning in " ".join(sluice("status", "orders").out.split())
