"""Definitions of the code location. Loading them never asks Kafka."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import dagster as dg
import pytest

from sluice.assets.factory import build
from sluice.assets.runs.run_session import RunSession
from sluice.assets.specs import feed_files
from sluice.assets.specs.asset_specs import landed_key
from sluice.assets.specs.feed_files import open_real_lake, read_feeds
from sluice.pipelines.errors import FeedError, LakeUnavailable, UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger.tip import Facts, Tip
from sluice.pipelines.ports import Lake
from sluice.resources.project import Project
from sluice.testing.lake import MemoryLake
from tests.assets.world import FEED, SECRET, World, in_hour


def make_project(root: Path, **feeds: str) -> Project:
    (root / "feeds").mkdir()
    for name, text in feeds.items():
        (root / "feeds" / f"{name}.yaml").write_text(text)
    return Project(root)


def list_keys(defs: dg.Definitions) -> set[str]:
    return {k.to_user_string() for k in defs.resolve_asset_graph().get_all_asset_keys()}


def get_description(defs: dg.Definitions, key: str) -> str:
    return defs.resolve_asset_graph().get(dg.AssetKey(key.split("/"))).description or ""


def test_twenty_feeds_load_without_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("a socket was asked for")

    monkeypatch.delenv("KAFKA_BOOTSTRAP", raising=False)
    text = "kafka: {bootstrap: '${KAFKA_BOOTSTRAP}'}\ntopics: [%s]\nstart: earliest\n"
    project = make_project(tmp_path, **{f"feed{i}": text % f"topic-{i}.v1, shared" for i in range(20)})
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)

    defs = build(project)

    dg.Definitions.validate_loadable(defs)
    assert len(list_keys(defs)) == 20 * 3 + 1
    assert {"feed0/landed", "feed0/committed", "kafka/topic-0.v1", "kafka/shared"} <= list_keys(defs)
    assert {j.name for j in defs.resolve_all_job_defs()} == {
        *("__ASSET_JOB", "catch_up", "pending_of_many_feeds", "compact_many_feeds", "republish_many_feeds")
    }, "no job for each feed"
    assert {f"land_feed{i}_windows" for i in range(20)} <= {s.name for s in defs.schedules or ()}


def test_lineage_goes_from_topic_to_committed_offsets(tmp_path: Path) -> None:
    graph = build(make_project(tmp_path, orders=FEED)).resolve_asset_graph()
    landed, committed = dg.AssetKey(["orders", "landed"]), dg.AssetKey(["orders", "committed"])
    assert graph.get(landed).parent_keys == {dg.AssetKey(["kafka", "orders"])}
    assert graph.get(committed).parent_keys == {landed}
    assert graph.get(dg.AssetKey(["kafka", "orders"])).is_observable


def test_jobs_run_in_process_and_schedule_is_stopped_by_default(tmp_path: Path) -> None:
    defs = build(make_project(tmp_path, orders=FEED))
    for job in ("__ASSET_JOB", "catch_up"):
        assert defs.resolve_job_def(job).executor_def is dg.in_process_executor
    schedule = defs.resolve_schedule_def("land_orders_windows")
    assert schedule.default_status == dg.DefaultScheduleStatus.STOPPED
    assert schedule.job_name == "__ASSET_JOB"


def test_second_feed_of_a_table_is_shown_as_broken(tmp_path: Path) -> None:
    table = "table: {iceberg: {name: db.orders%s}}\n"
    defs = build(make_project(tmp_path, one=FEED + table % "", other=FEED, two=FEED + table % "_windows"))
    assert {"one/table", "other/landed"} <= list_keys(defs)
    assert "`db.orders_windows` would be a table of feed `two` and of feed `one`" in get_description(defs, "two/landed")
    assert [s.name for s in defs.schedules or () if s.name.startswith("land_")] == [
        "land_one_windows",
        "land_other_windows",
    ]


def test_broken_feed_is_shown_and_other_feeds_load(tmp_path: Path) -> None:
    defs = build(
        make_project(
            tmp_path, orders=FEED, clicks="topics: [\n", refunds=FEED.replace("2024-05-01T00:00:00Z", "sometimes")
        )
    )
    assert {"orders/landed", "clicks/landed", "refunds/landed"} <= list_keys(defs)
    assert "clicks.yaml" in get_description(defs, "clicks/landed")
    assert "start" in get_description(defs, "refunds/landed")
    assert not defs.resolve_asset_graph().get(dg.AssetKey(["clicks", "landed"])).is_executable
    assert [s.name for s in defs.schedules or () if s.name.startswith("land_")] == ["land_orders_windows"]


def test_duplicate_feed_or_group_is_reported_on_later_file(tmp_path: Path) -> None:
    same_group = FEED + "group: sluice-orders\n"
    defs = build(make_project(tmp_path, orders=FEED, rivals=same_group, zorders="feed: orders\n" + FEED))
    assert "shared with feed `orders`" in get_description(defs, "rivals/landed")
    assert f"is `orders` in {tmp_path / 'feeds' / 'orders.yaml'} too" in get_description(defs, "zorders/landed")


def test_error_names_every_file_when_no_feed_loads(tmp_path: Path) -> None:
    with pytest.raises(FeedError, match=r"(?s)a\.yaml.*b\.yaml"):
        build(make_project(tmp_path, a="topics: [\n", b="start: never\n"))


def test_project_without_feeds_loads(tmp_path: Path) -> None:
    assert list_keys(build(make_project(tmp_path))) == set()


def test_missing_feeds_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder `feeds/`"):
        Project.find(tmp_path)


PATTERN = FEED.replace("topics: orders", "topics: {include: ['orders.*']}")


def leave_tip(sample: Project, tip: bytes) -> None:
    open_real_lake(RunSession(sample).feed("orders")).put(paths.tip_path("orders"), tip)


def test_pattern_feed_shows_topics_recorded_in_ledger(tmp_path: Path) -> None:
    sample = make_project(tmp_path, orders=PATTERN)
    assert list_keys(build(sample)) == {"orders/landed", "orders/committed"}
    leave_tip(sample, Tip("id", 3, Facts(0, ("orders.eu", "orders.us"))).dump())
    assert {"kafka/orders.eu", "kafka/orders.us"} <= list_keys(build(sample))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        '["orders"]',
        '{"ledger": "id", "number": 3, "facts": {"topics": ["../../x", 3, "ok"], "first_window": 3, "kept_ms": -1}}',
        '{"ledger": "id", "number": 3, "facts": 7}',
        "[" * 100_000,
    ],
)
def test_damaged_ledger_tip_is_ignored(tmp_path: Path, text: str) -> None:
    sample = make_project(tmp_path, orders=PATTERN)
    leave_tip(sample, text.encode())
    assert list_keys(build(sample)) == {"orders/landed", "orders/committed"}


def test_unexpected_ledger_error_does_not_affect_other_feeds(root: Path) -> None:
    files = read_feeds(World(root, dict.fromkeys("abcdefghij", FEED)).project, {})

    def open_wrongly(feed: Feed) -> Lake:
        if feed.name != "j":
            raise RecursionError("deep")
        return MemoryLake()

    recalled, errors = feed_files.recall_feeds(files, open_wrongly)
    assert ({*recalled}, {*errors}) == ({"j"}, {*"abcdefghi"})
    assert "unforeseen RecursionError" in errors["a"].message


@pytest.mark.parametrize("hangs", [False, True])
def test_unavailable_lake_is_logged_as_warning(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    (world.project.feeds_folder / "orders.yaml").write_text(FEED.replace("2024-05-01T00:00:00Z", "earliest"))
    world.run(in_hour(2))
    monkeypatch.setenv("DAGSTER_HOME", str(world.project.dagster_home))
    monkeypatch.setattr(feed_files.recall_feeds, "__defaults__", (open_real_lake, 0.2 if hangs else 10.0))
    waiting = threading.Event()

    def refuse(_: str) -> None:
        if hangs:
            waiting.wait(60)
        raise LakeUnavailable("the store does not answer", remedy="start the store")

    world.lake.before["get"] = refuse
    try:
        partitions = build(world.project, world.make_session()).resolve_assets_def(landed_key("orders")).partitions_def
    finally:
        waiting.set()
    assert isinstance(partitions, dg.TimeWindowPartitionsDefinition)
    assert partitions.get_first_partition_key() == "2024-05-01T02:00", "the first one that Dagster has"
    (warning,) = (r.getMessage() for r in caplog.records if "ledger" in r.getMessage())
    expected = "did not answer within 0 s → check the lake" if hangs else "does not answer → start the store"
    assert expected in warning
    assert "then reload the code location" in warning


@pytest.mark.parametrize(
    "lake",
    [
        "lake: s3://${LAKE_OF_NOBODY}/x\n",
        "lake: az://lake/x\nazure: {account: acme, account_key: '${LAKE_OF_NOBODY}'}\n",
        "lake: gs://lake/x\ngcs: {token: '${LAKE_OF_NOBODY}'}\n",
    ],
)
def test_undefined_variable_in_lake_settings_is_logged_as_warning(
    lake: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sample = make_project(tmp_path, orders=FEED + lake)
    assert "orders/landed" in list_keys(build(sample))
    (warning,) = (r.getMessage() for r in caplog.records if "ledger" in r.getMessage())
    assert "LAKE_OF_NOBODY" in warning


def test_definitions_contain_no_secret(tmp_path: Path) -> None:
    graph = build(make_project(tmp_path, orders=FEED)).resolve_asset_graph()
    nodes = [graph.get(k) for k in graph.get_all_asset_keys()]
    text = repr([(n.description, n.metadata, n.tags) for n in nodes])
    assert SECRET not in text
    assert "reader" not in text
