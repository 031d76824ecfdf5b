"""A renamed feed on a real Kafka: one ledger, one group and one set of folders, whatever command runs by which name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import duckdb
import pytest
from kafka import KafkaAdminClient

import sluice
import sluice.dagster
from sluice.pipelines.util.units import show_window
from sluice.resources import local_engine
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.spark import engine
from tests.integration.conftest import Call
from tests.integration.support import FeedProject, InlineEngine, produce_numbers
from tests.integration.test_lives import find_hour

pytestmark = pytest.mark.kafka
CONTRACT = {"expectations": [{"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "id"}}]}
COMMANDS = """
    audit sales --strict --hashes
    audit orders --rescan
    check {window}
    report sales
    report sales {hour}
    report --all
    status sales
    status
    compact sales
    table check sales
    table rebuild orders --yes
    quarantine list sales
    quarantine replay sales
    explain orders {topic}:0:3
    explain sales --where id=5
    files orders --window {hour}
    offsets show sales
    erase sales --where id=7 --reason test --yes
    hold sales --from {hour} --reason test
    repair sales
    run orders --window {hour} --replace
    run sales --missing-files
    metrics sales
    dbt sources sales
    contract check sales
    plan orders
    feeds check
"""


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(partitions=2, config={"retention.ms": "-1"}), {})


def read_ids(project: FeedProject) -> list[int]:
    query = "select id from read_parquet($1, hive_partitioning = false) order by id"
    files = f"{project.root}/.sluice/lake/data/orders/kafka_window_date=*/**/*.parquet"
    return [i for (i,) in duckdb.execute(query, [files]).fetchall()]


def list_paths_named(project: FeedProject, name: str) -> list[Path]:
    return [p for p in (project.root / ".sluice" / "lake").rglob("*") if name in p.name]


def write_feed(project: FeedProject) -> None:
    """Write a feed with a contract, a table and a key that a comment explains."""
    settings = {"format": "json", "schema": "{id: int64}", "policies": "{quarantine_limit: {share: 1.0}}"}
    project.write_feed("orders", **{**settings, "group_name": "shop  # the shop's", "table": "{delta: {}}"})
    path = project.root / "feeds" / "orders.yaml"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith("group:")))
    (project.root / "feeds" / "orders.contract.json").write_text(json.dumps(CONTRACT))


@pytest.mark.slow
def test_a_renamed_feed_goes_on_with_its_rows_offsets_and_history(project: FeedProject, call: Call) -> None:
    write_feed(project)
    produce_numbers(project, range(100), find_hour(3))
    produce_numbers(project, range(100, 140), find_hour(0))
    assert call("run", "orders")[0] == 0
    feeds, before = project.root / "feeds", read_ids(project)
    assert len(before) == 126

    code, preview = call("feeds", "rename", "orders", "sales", "--json")
    assert (code, preview["applied"], sorted(p.name for p in feeds.iterdir())) == (
        0,
        False,
        ["orders.contract.json", "orders.yaml"],
    )
    assert call("feeds", "rename", "orders", "sales", "--yes")[0] == 0
    assert sorted(p.name for p in feeds.iterdir()) == ["sales.contract.json", "sales.yaml"]
    assert "# the shop's" in (feeds / "sales.yaml").read_text()

    produce_numbers(project, range(140, 200), find_hour(0))
    code, ran = call("run", "sales", "--json")
    assert (code, ran["feeds"][0]["feed"]) == (0, "sales")
    assert read_ids(project) == [i for i in range(200) if i % 10], "each record once, also of the hour of the rename"
    hour = show_window(find_hour(3))
    for line in COMMANDS.strip().splitlines():
        words = line.format(topic=project.topic, hour=hour, window=f"sales {hour}").split()
        code, text = call(*words)
        assert code == 0 or words[:2] in (["contract", "check"], ["report", "--all"]), (line, text)
    assert list_paths_named(project, "sales") == []
    assert call("explain", "sales", "--where", "id = 7")[0] == 1
    names = [sluice.read(name, hour, project=project.root).rows for name in ("orders", "sales")]
    assert names[0] == names[1] == 89
    with KafkaAdminClient(bootstrap_servers=project.kafka.bootstrap) as admin:
        groups = {str(g if isinstance(g, str) else g["group_id"]) for g in admin.list_groups()}
    assert "sluice-orders" in groups
    assert "sluice-sales" not in groups

    (feeds / "orders.yaml").write_text((feeds / "sales.yaml").read_text().replace("stored_as: orders\n", "group: g\n"))
    code, text = call("run", "sales")
    assert (code, "would share a ledger" in text) == (2, True), text
    (feeds / "orders.yaml").unlink()
    assert call("feeds", "rename", "sales", "orders", "--yes")[0] == 0
    assert (feeds / "orders.yaml").read_text().startswith("stored_as: orders\n")
    code, audited = call("audit", "orders", "--strict", "--json")
    assert (code, sum(p["landed"] for p in audited["partitions"])) == (0, 179)


@pytest.mark.slow
def test_dagster_lands_a_renamed_feed_and_reports_its_history(
    project: FeedProject, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine, "SparkEngine", lambda *_: InlineEngine())
    monkeypatch.setattr(local_engine, "LocalEngine", lambda *_: InlineEngine())
    write_feed(project)
    produce_numbers(project, range(100), find_hour(3))
    produce_numbers(project, range(100, 140), find_hour(2))
    hours = [show_window(find_hour(ago)) for ago in (3, 2)]
    assert call("run", "orders", "--window", hours[0], "--no-dagster")[0] == 0
    assert call("feeds", "rename", "orders", "sales", "--yes")[0] == 0
    defs = sluice.dagster.feed_definitions(project.root)
    keys = [dg.AssetKey(["sales", name]) for name in ("landed", "committed")]
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        job = defs.resolve_implicit_job_def_def_for_assets(keys)
        assert job
        done = job.execute_in_process(instance=instance, partition_key=hours[1], asset_selection=keys)
        assert done.success
        assert instance.get_materialized_partitions(keys[0]) >= {*hours}
    assert read_ids(project) == [i for i in range(140) if i % 10]
    assert list_paths_named(project, "sales") == []


@pytest.mark.slow
def test_a_retired_feed_lands_nothing_stays_readable_and_continues(project: FeedProject, call: Call) -> None:
    write_feed(project)
    shop = json.dumps({"kafka": {"bootstrap": project.kafka.bootstrap}, "topics": project.topic, "start": "earliest"})
    (project.root / "feeds" / "clicks.yaml").write_text(shop)
    produce_numbers(project, range(100), find_hour(3))
    assert call("run", "--all")[0] == 0
    assert call("report", "--all", "--json")[0] == 0
    assert call("feeds", "retire", "orders", "--json")[1]["applied"] is False
    assert call("run", "orders")[0] == 0
    assert call("feeds", "retire", "orders", "--yes")[0] == 0

    produce_numbers(project, range(100, 140), find_hour(2))
    hours = [show_window(find_hour(ago)) for ago in (3, 2)]
    code, text = call("run", "orders")
    assert (code, "sluice feeds retire orders --undo --yes" in text) == (2, True), text
    code, ran = call("run", "--all", "--json")
    assert (code, [f["feed"] for f in ran["feeds"]]) == (0, ["clicks"])
    code, status = call("status", "--json")
    assert (code, [f["feed"] for f in status["feeds"]], status["ledgers_without_files"]) == (0, ["clicks"], {})
    code, page = call("report", "--all", "--json")
    assert (code, [f["feed"] for f in page["feeds"]]) == (0, ["clicks"])
    assert 'feed="orders"' not in call("metrics")[1]
    assert sluice.read("orders", hours[0], project=project.root).rows == 90
    lines = (
        f"files orders --window {hours[0]}|audit orders --strict|check orders {hours[0]}|explain orders --where id=5"
    )
    for line in lines.split("|"):
        assert call(*line.split())[0] == 0, line
    assert {f["feed"]: f["retired"] for f in call("feeds", "list", "--json")[1]["feeds"]}["orders"] is True
    defs = sluice.dagster.feed_definitions(project.root)
    assert {key.path[0] for key in defs.resolve_asset_graph().materializable_asset_keys} == {"clicks"}

    assert call("feeds", "retire", "orders", "--undo", "--yes")[0] == 0
    assert call("run", "orders")[0] == 0
    assert read_ids(project) == [i for i in range(140) if i % 10]


def list_rows(project: FeedProject, feed: str) -> list[tuple[str, int, int]]:
    """Returns the coordinates of all rows of a feed, by DuckDB over its folder."""
    query = "select kafka_topic, kafka_partition, kafka_offset from read_parquet($1, hive_partitioning = false)"
    files = f"{project.root}/.sluice/lake/data/{feed}/kafka_window_date=*/**/*.parquet"
    return sorted(duckdb.execute(query, [files]).fetchall())


@pytest.mark.slow
def test_a_topic_moves_to_a_new_feed_and_back_without_loss_or_copies(
    project: FeedProject, call: Call, fresh_topic: Callable[..., str]
) -> None:
    write_feed(project)
    clicks, orders = fresh_topic(partitions=2, config={"retention.ms": "-1"}), project.topic
    path = project.root / "feeds" / "orders.yaml"
    text = path.read_text().replace(f"topics: {orders}\n", f"topics: [{orders}, {clicks}]\n")
    path.write_text(text.replace("table:", "# table:"))
    sent = dict.fromkeys((orders, clicks), 0)

    def write(numbers: range, hour: int) -> None:
        for project.topic in sent:
            produce_numbers(project, numbers, hour)
            sent[project.topic] += len(numbers) * 9 // 10

    def check_rows() -> None:
        rows = [r for feed in ("orders", "web") if (lake / feed).exists() for r in list_rows(project, feed)]
        assert len(rows) == len(set(rows)) == sum(sent.values())

    lake = project.root / ".sluice" / "lake" / "data"
    write(range(100), find_hour(3))
    write(range(100, 140), find_hour(0))
    assert call("run", "orders")[0] == 0
    produce_numbers(project, range(40), find_hour(2))
    sent[project.topic] += 36
    code, text = call("feeds", "move-topic", clicks, "orders", "web", "--json")
    assert (code, text["applied"], [at["offset"] for at in text["seam"]]) == (0, False, [70, 70])
    assert sorted(p.name for p in path.parent.iterdir()) == ["orders.contract.json", "orders.yaml"]
    code, text = call("feeds", "move-topic", clicks, "orders", "web", "--yes")
    assert code == 0, text
    assert re.findall(r"^  (new|change):", text, re.MULTILINE) == ["new", "new", "change"]
    assert sorted(p.name for p in path.parent.glob("web.*")) == ["web.contract.json", "web.yaml"]
    write(range(140, 200), find_hour(0))
    assert call("run", "--all")[0] == 0
    check_rows()
    assert {t for t, *_ in list_rows(project, "web")} == {clicks}
    for feed in ("orders", "web"):
        code, audited = call("audit", feed, "--strict", "--rescan", "--json")
        assert code == 0, audited
    assert "in feed web" in call("audit", "orders", "--strict")[1]
    hour = show_window(find_hour(3))
    code, checked = call("check", "orders", hour, "--json")
    assert (code, checked["complete"], checked["rows"]) == (0, True, 180)
    assert call("explain", "orders", f"{clicks}:0:3")[0] == 0
    code, text = call("run", "web", "--window", hour)
    assert (code, "before the feed's first window" in text) == (2, True), text

    path.write_text(path.read_text().replace(orders, f'{orders}", "{clicks}'))
    code, text = call("run", "orders")
    assert (code != 0, f"sluice feeds move-topic {clicks} web orders" in text) == (True, True), text
    assert call("accept", "orders", "recreated", "--reason", "test")[0] != 0
    code, text = call("feeds", "move-topic", clicks, "web", "other", "--yes")
    assert (code, "sluice feeds rename web other" in text) == (2, True), text
    code, text = call("feeds", "move-topic", clicks, "web", "orders", "--yes")
    assert (code, "web has no other topic and is retired" in text) == (0, True), text
    assert path.with_name("web.yaml").read_text().startswith("retired: true")
    write(range(200, 240), find_hour(0))
    assert call("run", "--all")[0] == 0
    check_rows()
    for feed in ("orders", "web"):
        code, text = call("audit", feed, "--strict", "--rescan")
        assert code == 0, text
    assert call("feeds", "move-topic", clicks, "web", "orders", "--yes")[0] == 0, "nothing is left to do"
    check_rows()
