"""The sensor checks every feed, asks each Kafka once, and reports new and resolved findings once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import dagster as dg
import pytest

from sluice.assets.factory import build
from sluice.assets.runs.run_session import RunSession
from sluice.assets.schedules.sensors import FEED_HEALTH, SECONDS, SENSOR, SensorCursor, Tick
from sluice.assets.specs.asset_specs import landed_key
from sluice.pipelines.errors import KafkaUnavailable
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.kafka import BrokerConfig, Configs, OpenTransaction, TopicConfig, TopicPartition
from sluice.pipelines.ports import Ports
from sluice.testing.cluster import partition
from tests.assets.world import FEED, HOUR, P0, P1, SECRET, World, at_hour, in_hour, read_cells


class Sensor:
    """The project's sensor, evaluated tick by tick as in Dagster's daemon."""

    def __init__(self, world: World, instance: dg.DagsterInstance) -> None:
        self.world, self.instance, self.cursor = world, instance, None
        self.session = RunSession(world.project, world.open_ports)

    def run_tick(self) -> tuple[str, dict[str, dg.AssetCheckEvaluation]]:
        """Run a tick, store its evaluations as the daemon does, and return its summary and the evaluations by feed."""
        defs = build(self.world.project, self.session)
        with dg.build_sensor_context(self.instance, self.cursor, definitions=defs) as context:
            data = defs.resolve_sensor_def(SENSOR).evaluate_tick(context)
        self.cursor = data.cursor
        for event in data.asset_events:
            self.instance.report_runless_asset_event(event)
        checks = [e for e in data.asset_events if isinstance(e, dg.AssetCheckEvaluation)]
        assert {e.check_name for e in checks} <= {FEED_HEALTH}
        return data.skip_message or "", {e.asset_key.path[0]: e for e in checks}

    def find_evaluation(self) -> dg.AssetCheckEvaluation:
        """Run a tick and return its only evaluation, that of `orders`."""
        (evaluation,) = self.run_tick()[1].values()
        return evaluation


@pytest.fixture
def sensor(world: World, instance: dg.DagsterInstance) -> Sensor:
    return Sensor(world, instance)


def write(world: World, **feeds: str) -> None:
    for name, text in feeds.items():
        (world.project.feeds_folder / f"{name}.yaml").write_text(text)


def list_findings(evaluation: dg.AssetCheckEvaluation) -> list[tuple[str, str]]:
    """Returns the findings with their remedies."""
    table = evaluation.metadata.get("findings")
    return [(r["finding"], r["remedy"]) for r in read_cells(table.value)] if table else []


def get_metadata(evaluation: dg.AssetCheckEvaluation) -> Mapping[str, Any]:
    return {k: v.value for k, v in evaluation.metadata.items() if k != "findings"}


# -- reported once


def test_new_feed_and_healthy_feed_have_no_findings(world: World, sensor: Sensor) -> None:
    summary, checks = sensor.run_tick()
    assert (summary, checks["orders"].passed) == ("1 feed checked; no findings", True)
    world.run()
    evaluation = sensor.find_evaluation()
    assert (evaluation.passed, evaluation.description) == (True, "no findings")
    assert get_metadata(evaluation)["lag_offsets"] == 0
    assert sensor.run_tick() == ("1 feed checked; no findings", {}), "nothing new: nothing to store"


def test_lag_is_reported_once_and_again_when_resolved(world: World, sensor: Sensor) -> None:
    world.land_unrecorded()
    world.grow(1, 130)
    assert sensor.find_evaluation().passed, "a few seconds old"
    world.at(9)
    summary, checks = sensor.run_tick()
    evaluation = checks["orders"]
    assert (evaluation.passed, evaluation.severity) == (False, dg.AssetCheckSeverity.WARN)
    ((text, remedy),) = list_findings(evaluation)
    assert "pending record (orders:1) is 3 h 29 min old (alerts.lag 130m); 30 offsets behind" in text
    assert remedy.startswith("catch up: sluice run orders")
    assert summary == f"1 feed checked; findings in orders (1)\norders: {text} → {remedy}"
    assert get_metadata(evaluation)["lag_seconds"] > 3 * 3600

    assert sensor.run_tick() == ("1 feed checked; findings in orders (1)", {})
    world.land_unrecorded()
    summary, checks = sensor.run_tick()
    assert checks["orders"].passed
    assert "orders: passed: lag" in summary


def test_findings_of_a_retired_feed_end(world: World, sensor: Sensor) -> None:
    world.land_unrecorded()
    world.grow(1, 130)
    world.at(9)
    assert "findings in orders" in sensor.run_tick()[0]
    write(world, orders=f"retired: true\n{FEED}", clicks=FEED)
    summary, checks = sensor.run_tick()
    assert "orders" not in checks
    assert "orders: passed: lag" in summary
    assert "orders" not in sensor.run_tick()[0]


def test_check_is_evaluated_again_after_materialization(
    world: World, sensor: Sensor, instance: dg.DagsterInstance
) -> None:
    world.run(in_hour(2))
    world.at(9)
    assert not sensor.find_evaluation().passed
    assert sensor.run_tick()[1] == {}
    world.run(in_hour(1))
    assert not sensor.find_evaluation().passed, "Dagster ignores evaluations from before the newest materialization"
    key = dg.AssetCheckKey(landed_key("orders"), FEED_HEALTH)
    record = instance.event_log_storage.get_latest_asset_check_execution_by_key([key])[key]
    newest = instance.get_latest_materialization_event(landed_key("orders"))
    assert newest is not None
    assert record.event is not None
    assert record.event.timestamp > newest.timestamp, "by the events' own times: the record's is in whole seconds"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"told": {"orders": 3}}', '{"told": []}', "[" * 100_000])
def test_damaged_cursor_is_ignored(text: str) -> None:
    assert SensorCursor.read(text) == SensorCursor()


# -- each finding


def test_lag_threshold_is_configured_by_feed(world: World, sensor: Sensor) -> None:
    write(world, orders=FEED + "alerts: {lag: 1d}\n")
    world.land_unrecorded()
    world.grow(1, 130)
    world.at(9)
    assert sensor.find_evaluation().passed


def test_records_about_to_be_deleted_are_reported(world: World, sensor: Sensor) -> None:
    world.cluster.settings = Configs({"orders": TopicConfig(retention_ms=9 * HOUR)})
    world.land_unrecorded(in_hour(0))
    evaluation = sensor.find_evaluation()
    assert (evaluation.passed, evaluation.severity) == (False, dg.AssetCheckSeverity.ERROR)
    at_risk = [t for t in list_findings(evaluation) if "deleted" in t[0]]
    ((text, remedy),) = at_risk
    assert text.startswith("orders:0 [25, 38) will begin to be deleted in about 3 h 59 min")
    assert "(retention.ms 9h); then ranges of 1 more partition" in text
    assert remedy == "land it before: sluice run orders"
    assert get_metadata(evaluation)["ranges_at_risk"] == 2


def test_denied_topic_settings_are_reported_with_acl_command(world: World, sensor: Sensor) -> None:
    world.cluster.settings = Configs(denied=("orders",))
    world.land_unrecorded(in_hour(0))
    evaluation = sensor.find_evaluation()
    assert (evaluation.passed, evaluation.severity) == (False, dg.AssetCheckSeverity.WARN)
    ((text, remedy),) = [t for t in list_findings(evaluation) if "keeps its records" in t[0]]
    assert text == "how long orders keeps its records may not be asked: nothing warns before they are deleted"
    assert remedy.startswith("kafka-acls.sh --bootstrap-server 127.0.0.1:9 --add --allow-principal User:NAME")
    assert remedy.endswith("--operation DescribeConfigs --topic orders")


def test_lost_records_are_reported_with_accept_command(world: World, sensor: Sensor) -> None:
    world.land_unrecorded(in_hour(0))
    world.cluster.states[P1] = replace(world.cluster.states[P1], log_start=60)
    (text, remedy), *_ = list_findings(sensor.find_evaluation())
    assert "orders:1: offsets [25, 60) are gone from Kafka" in text
    assert "sluice accept orders lost" in remedy


def test_new_partitions_and_topics_are_reported(world: World, sensor: Sensor) -> None:
    write(world, orders=FEED.replace("topics: orders", "topics: {include: ['orders.*']}"))
    world.land_unrecorded()
    world.cluster.write(TopicPartition("orders", 2), [])
    world.cluster.write(TopicPartition("orders.eu", 0), [at_hour(5)])
    assert list_findings(sensor.find_evaluation()) == [
        ("orders has new partitions: 2", "the next run reads them: sluice run orders"),
        (
            "orders.eu is new and matches `orders.*` (1 partition)",
            "the next run reads them: sluice run orders; then reload definitions to see the topic in the graph",
        ),
    ]
    world.land_unrecorded()
    assert sensor.find_evaluation().passed


def test_recreated_topic_and_missing_topic_are_reported(world: World, sensor: Sensor) -> None:
    world.land_unrecorded()
    before = dict(world.cluster.states)
    for tp in (P0, P1):
        world.cluster.states[tp] = partition(tp.topic, tp.partition, topic_id="id-2")
    evaluation = sensor.find_evaluation()
    ((text, remedy),) = list_findings(evaluation)
    assert evaluation.severity is dg.AssetCheckSeverity.ERROR
    assert "created again" in text
    assert "; 1 more partition" in text
    assert "sluice accept orders recreated" in remedy
    world.cluster.states.clear()
    ((text, _),) = list_findings(sensor.find_evaluation())
    assert "no topic `orders` in Kafka" in text
    world.cluster.states.update(before)
    assert sensor.find_evaluation().passed


def test_other_cluster_at_bootstrap_address_is_reported(world: World, sensor: Sensor) -> None:
    world.land_unrecorded()
    world.cluster.id = "cluster-2"
    ((text, _),) = list_findings(sensor.find_evaluation())
    assert "the bootstrap address answers as cluster-2" in text


def test_hanging_transaction_is_reported_with_abort_command(world: World, sensor: Sensor) -> None:
    world.land_unrecorded(in_hour(0))
    world.cluster.hold(P1, 40)
    world.cluster.open[P1] = OpenTransaction(40, 77, 3, last_written=at_hour(6) + 59 * 60_000, name="billing-7")
    world.at(7, minutes=10)
    assert not [t for t in list_findings(sensor.find_evaluation()) if "billing" in t[0]], "written to 11 minutes ago"
    world.at(9)
    world.cluster.settings = Configs(broker=BrokerConfig(transaction_max_timeout=HOUR))
    ((text, remedy),) = [t for t in list_findings(sensor.find_evaluation()) if "billing" in t[0]]
    assert "transaction 'billing-7' of producer 77" in text
    assert text.startswith("orders:1 is held at offset 40 by transaction ")
    assert remedy == (
        "it hangs: none may last longer than 1h here (transaction.max.timeout.ms). Abort it: kafka-transactions.sh "
        "--bootstrap-server 127.0.0.1:9 --command-config FILE abort --topic orders --partition 1 --start-offset 40"
    )


def test_window_that_stays_partial_is_reported(world: World, sensor: Sensor) -> None:
    world.engine.failing.add(P1)
    world.land_unrecorded(in_hour(1))
    world.engine.failing.clear()
    assert not [t for t in list_findings(sensor.find_evaluation()) if "window" in t[0]]
    world.at(8, minutes=20)
    ((text, remedy),) = [t for t in list_findings(sensor.find_evaluation()) if t[0].startswith("window")]
    assert text.startswith("window 2024-05-01T01:00 ended 6 h 20 min ago and is failed: orders:1 lacks [25, 50)")
    assert remedy.endswith("then sluice run orders --window 2024-05-01T01:00")
    world.land_unrecorded()
    assert sensor.find_evaluation().passed


# -- many feeds


class TopicCounter:
    """Opens ports that count the requests for Kafka's topics."""

    def __init__(self, world: World) -> None:
        self.world, self.requests = world, 0

    @contextmanager
    def open_ports(self, feed: Feed) -> Iterator[Ports]:
        counter, cluster = self, self.world.cluster

        class Cluster:
            def topics(self) -> Mapping[str, str]:
                counter.requests += 1
                return cluster.topics()

            def __getattr__(self, name: str) -> Any:
                return getattr(cluster, name)

        with self.world.open_ports(feed) as ports:
            yield replace(ports, cluster=Cluster())


def write_feeds(world: World, number: int) -> World:
    """Replace the feeds by `number` feeds of one Kafka, and `other` of another one."""
    (world.project.feeds_folder / "orders.yaml").unlink()
    write(world, **{f"feed{i}": FEED + f"group: g{i}\n" for i in range(number)})
    write(world, other=FEED.replace("127.0.0.1:9", "127.0.0.1:8"))
    return world


def test_unavailable_kafka_affects_only_its_feeds(world: World, instance: dg.DagsterInstance) -> None:
    write_feeds(world, 2)

    @contextmanager
    def open_ports(feed: Feed) -> Iterator[Ports]:
        with world.open_ports(feed) as ports:
            yield replace(ports, cluster=Away()) if feed.name == "other" else ports

    class Away:
        def cluster_id(self) -> str:
            raise KafkaUnavailable("no broker answers")

    tick = Tick(RunSession(world.project, open_ports), SensorCursor({"other": (0, ("lag",))}))
    tick.run(instance, lambda: 0.0)
    assert tick.looked == 2
    assert tick.news == ["other could not be checked: no broker answers"]
    assert tick.cursor.reported["other"] == (0, ("lag",)), "its reported findings stay"


def test_unexpected_error_affects_only_its_feed(world: World, instance: dg.DagsterInstance) -> None:
    """A failing tick stores no cursor: the next one would fail at the same feed and never reach those after it."""
    write_feeds(world, 2)

    @contextmanager
    def open_ports(feed: Feed) -> Iterator[Ports]:
        if feed.name == "feed0":
            raise RuntimeError(SECRET)
        with world.open_ports(feed) as ports:
            yield ports

    tick = Tick(RunSession(world.project, open_ports), SensorCursor())
    tick.run(instance, lambda: 0.0)
    assert (tick.looked, tick.cursor.last) == (2, "other")
    assert tick.news == ["feed0 could not be checked: unforeseen RuntimeError"]


def test_tick_that_runs_out_of_time_continues_at_next_tick(world: World, instance: dg.DagsterInstance) -> None:
    write_feeds(world, 3)
    now = 0.0

    def read_clock() -> float:
        nonlocal now
        now += SECONDS * 0.4
        return now

    session, cursor, checked = RunSession(world.project, world.open_ports), SensorCursor(), []
    for _ in range(3):
        tick = Tick(session, cursor)
        tick.run(instance, read_clock)
        cursor = SensorCursor.read(tick.cursor.dump())
        checked.append(sorted(e.asset_key.path[0] for e in tick.events))
    assert checked == [["feed0", "feed1"], ["feed2", "other"], []]


def test_broken_feed_file_is_reported_and_other_feeds_are_checked(world: World, instance: dg.DagsterInstance) -> None:
    (world.project.feeds_folder / "bad.yaml").write_text("topics: [\n")
    tick = Tick(RunSession(world.project, world.open_ports), SensorCursor())
    tick.run(instance, lambda: 0.0)
    assert tick.looked == 1
    assert "bad.yaml" in tick.news[0]


# -- the check outside the sensor


def test_manual_check_run_evaluates_immediately(world: World, instance: dg.DagsterInstance) -> None:
    world.land_unrecorded()
    world.grow(1, 130)
    world.at(9)
    session = RunSession(world.project, world.open_ports)
    key = dg.AssetCheckKey(landed_key("orders"), FEED_HEALTH)
    defs = dg.Definitions.merge(
        build(world.project, session),
        dg.Definitions(jobs=[dg.define_asset_job("look", dg.AssetSelection.checks(key))]),
    )
    result = defs.resolve_job_def("look").execute_in_process(instance=instance)
    (evaluation,) = result.get_asset_check_evaluations()
    assert result.success
    assert not evaluation.passed
    assert "alerts.lag" in (evaluation.description or "")


def test_health_check_runs_after_window_is_landed_from_ui(world: World, instance: dg.DagsterInstance) -> None:
    """The job behind `Materialize` also runs the check, after the window; the check has no partitions and passes."""
    session = RunSession(world.project, world.open_ports)
    job = build(world.project, session).resolve_implicit_job_def_def_for_assets([landed_key("orders")])
    assert job is not None
    result = job.execute_in_process(
        instance=instance, partition_key="2024-05-01T01:00", asset_selection=[landed_key("orders")]
    )
    assert result.success
    evaluations = {e.check_name: e for e in result.get_asset_check_evaluations()}
    assert evaluations["window_complete"].passed
    assert FEED_HEALTH in evaluations


def test_findings_contain_no_secret(world: World, sensor: Sensor) -> None:
    world.land_unrecorded(in_hour(0))
    world.cluster.hold(P1, 40)
    world.cluster.open[P1] = OpenTransaction(40, 77, 3, last_written=0)
    world.at(23)
    summary, checks = sensor.run_tick()
    assert SECRET not in summary + repr(checks) + (sensor.cursor or "")
