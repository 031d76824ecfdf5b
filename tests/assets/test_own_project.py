"""Feeds in the definitions of another Dagster project."""

# No `from __future__ import annotations` here: Dagster reads the annotations of assets themselves, not as text.

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster.components.resolved.core_models import OpSpec
from dagster.components.testing import create_defs_folder_sandbox

import sluice.dagster as own
from sluice.assets.factory import feeds_of, knowing, recall_all, windows_of
from sluice.assets.runs.run_session import RunSession
from sluice.assets.specs.asset_specs import AssetSpecs
from sluice.assets.specs.feed_files import read_shapes
from sluice.pipelines.errors import FeedError, UsageError
from sluice.resources import project as projects
from tests.assets.test_contracts import ROWS, agree
from tests.assets.world import FEED, World, read_windows, resolve_landing

pytestmark = pytest.mark.filterwarnings("ignore::dagster.BetaWarning")
DAY = "2024-05-01T"
RAW = own.FeedTranslator(
    key_prefix="raw", group_name="ingest", owners=["team:data"], tags={"tier": "1"}, kinds=["bronze"]
)


def write_feeds(at: Path, **feeds: str) -> Path:
    (at / "feeds").mkdir()
    for name, text in feeds.items():
        (at / "feeds" / f"{name}.yaml").write_text(text)
    return at / "feeds"


def get_nodes(defs: dg.Definitions) -> dict[str, Any]:
    graph = defs.resolve_asset_graph()
    return {k.to_user_string(): graph.get(k) for k in graph.get_all_asset_keys()}


def test_feed_definitions_merge_with_project_definitions(tmp_path: Path) -> None:
    @dg.asset
    def theirs() -> None: ...

    @dg.resource
    def session() -> str:
        return "theirs"

    mine = dg.Definitions(assets=[theirs], resources={"session": session}, executor=dg.multiprocess_executor)
    ours = own.feed_definitions(write_feeds(tmp_path, orders=FEED))
    assert (ours.executor, dict(ours.resources or {})) == (None, {})
    both = dg.Definitions.merge(ours, mine)
    dg.Definitions.validate_loadable(both)
    assert {"theirs", "kafka/orders", "orders/landed", "orders/committed"} == get_nodes(both).keys()


def test_definitions_of_two_folders_merge(tmp_path: Path) -> None:
    for name in ("eu", "us"):
        (tmp_path / name).mkdir()
    eu = own.feed_definitions(write_feeds(tmp_path / "eu", orders_eu=FEED))
    us = own.feed_definitions(
        tmp_path / write_feeds(tmp_path / "us", orders_us=FEED + "schedule: us\n"),
        translator=RAW,
        schedules=False,
        sensor="watch_us",
    )
    both = dg.Definitions.merge(eu, us)
    dg.Definitions.validate_loadable(both)
    assert {s.name for s in both.sensors or ()} == {"watch_feeds", "watch_us"}
    assert [s.name for s in both.schedules or ()] == ["pending_of_many_feeds_windows", "maintain_many_feeds"]


def test_each_schedule_has_three_jobs_and_own_schedule_adds_feed_jobs(tmp_path: Path) -> None:
    feeds = {f"orders{i}": FEED + f"group: g{i}\ntransactional_id: t{i}\n" for i in range(20)}
    feeds["alone"] = FEED + "group: a\nschedule: own\n"
    defs = own.feed_definitions(write_feeds(tmp_path, **feeds))
    assert {j.name for j in defs.jobs or ()} == {
        *(f"{work}_{name}_feeds" for work in ("pending_of", "compact", "republish") for name in ("many", "own")),
        "land_alone",
    }
    landing = {"pending_of_many_feeds_windows", "land_alone_windows"}
    assert {s.name for s in defs.schedules or ()} == landing | {"maintain_many_feeds", "maintain_own_feeds"}


def test_settings_needed_only_by_runs_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Definitions load without secrets, as in CI or a web server; only settings that shape assets are needed."""
    monkeypatch.delenv("KAFKA_BOOTSTRAP", raising=False)
    secret = (
        "kafka: {bootstrap: '${MY_KAFKA}', security_protocol: SASL_SSL, sasl_mechanism: '${HOW}',"
        " sasl_plain_password: '${file:/run/secrets/nowhere}'}\n"
        "topics: orders\nstart: earliest\nlake: s3://${BUCKET}/lake\n"
    )
    feeds = write_feeds(
        tmp_path, orders=secret, refunds=secret, clicks=secret.replace("orders", "${TOPIC}"), bad="topics: ["
    )
    assets = get_nodes(own.feed_definitions(feeds))
    assert assets["orders/landed"].is_executable
    assert assets["refunds/landed"].is_executable, "they share an unknown address, not a group"
    assert "TOPIC" in assets["clicks/landed"].description
    assert "bad.yaml" in assets["bad/landed"].description
    with pytest.raises(FeedError, match="MY_KAFKA"):
        RunSession(own.definitions.find_feeds(feeds)).feed("orders")


def test_missing_folder_is_refused_and_parents_are_not_searched(tmp_path: Path) -> None:
    write_feeds(tmp_path, orders=FEED)
    below = tmp_path / "project" / "defs"
    below.mkdir(parents=True)
    for path in (below, below / "feeds", tmp_path / "nowhere"):
        with pytest.raises(UsageError, match="no folder `feeds`"):
            own.feed_definitions(path)
    with pytest.raises(FeedError, match="no feed `refunds`"):
        own.feed_assets("refunds", tmp_path)


def test_translator_sets_key_group_owners_and_tags_of_assets(tmp_path: Path) -> None:
    class PerFeed(own.FeedTranslator):
        def get_asset_spec(self, asset: own.FeedAsset) -> dg.AssetSpec:
            spec = super().get_asset_spec(asset)
            return spec.replace_attributes(group_name="offsets") if asset.kind is own.AssetOf.COMMITTED else spec

    assets = get_nodes(
        own.feed_definitions(write_feeds(tmp_path, orders=FEED, bad="topics: ["), translator=PerFeed("raw"))
    )
    assert assets.keys() == {"raw/kafka/orders", "raw/orders/landed", "raw/orders/committed", "raw/bad/landed"}
    assert assets["raw/orders/committed"].group_name == "offsets"
    assert assets["raw/orders/landed"].parent_keys == {dg.AssetKey(["raw", "kafka", "orders"])}

    landed = get_nodes(own.feed_definitions(tmp_path, translator=RAW))["raw/orders/landed"]
    assert (landed.group_name, landed.owners, landed.tags["tier"]) == ("ingest", ["team:data"], "1")
    assert landed.kinds == {"bronze", "kafka", "parquet"}
    assert own.feed_assets("orders", tmp_path, translator=RAW).landed == landed.key


class Project:
    """A user's project over memory, with translated keys and a downstream asset that takes rows."""

    def __init__(self, world: World, instance: dg.DagsterInstance) -> None:
        self.world, self.instance = world, instance
        self.executions: list[tuple[str, int]] = []
        project, files = world.project, read_shapes(world.project)
        specs = {n: AssetSpecs.of(f, RAW.get_asset_spec) for n, f in files.feeds.items()}
        session = knowing(RunSession(project, world.open_ports, open_lake=lambda feed: world.lake), specs)
        memory = recall_all(files, specs, session)
        windows = windows_of(files.feeds, memory)
        feeds = feeds_of(files, specs, memory, windows, session, RAW.get_asset_spec)
        self.orders = own.feed_assets("orders", project.root, translator=RAW)
        self.defs = dg.Definitions.merge(feeds, dg.Definitions(assets=[self._define_downstream()]))

    def _define_downstream(self) -> dg.AssetsDefinition:
        @dg.asset(
            ins={"rows": dg.AssetIn(self.orders.landed)},
            partitions_def=self.orders.partitions_def,
            automation_condition=own.when_complete(),
        )
        def volume(context: dg.AssetExecutionContext, rows: Any) -> None:
            self.executions.append((context.partition_key, rows.rows))

        asset: dg.AssetsDefinition = volume
        return asset

    def run(self, hour: int) -> dg.ExecuteInProcessResult:
        return resolve_landing(self.defs, prefix=["raw"]).execute_in_process(
            instance=self.instance, partition_key=f"{DAY}{hour:02}:00", raise_on_error=False
        )

    def make(self, hour: int) -> dg.ExecuteInProcessResult:
        job = self.defs.resolve_implicit_job_def_def_for_assets([dg.AssetKey("volume")])
        assert job is not None
        return job.execute_in_process(
            instance=self.instance,
            partition_key=f"{DAY}{hour:02}:00",
            asset_selection=[dg.AssetKey("volume")],
            raise_on_error=False,
        )


@pytest.fixture
def project(world: World, instance: dg.DagsterInstance) -> Project:
    return Project(world, instance)


def test_runs_report_under_translated_keys(project: Project, instance: dg.DagsterInstance) -> None:
    assert project.run(1).success
    landed, committed = project.orders.landed, project.orders.committed
    assert (
        read_windows(instance, landed).keys()
        == read_windows(instance, committed).keys()
        == {f"{DAY}01:00", f"{DAY}04:00"}
    )
    assert dg.AssetKey(["raw", "kafka", "orders"]) in instance.get_asset_keys()
    assert {k.path[0] for k in instance.get_asset_keys()} == {"raw"}


def test_run_uses_home_of_dagster_and_creates_no_other_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dg` and `dagster dev` create a temporary home if none is set; the run's lock is kept in it."""
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    for name in ("home", "project"):
        (tmp_path / name).mkdir()
    home, world = tmp_path / "home", World(tmp_path / "project")
    with dg.DagsterInstance.local_temp(str(home)) as instance:
        assert Project(world, instance).run(1).success
    assert not world.project.dagster_home.exists()
    assert (home / "attended").is_dir()


def test_downstream_asset_reads_rows_of_complete_windows(
    project: Project,
    instance: dg.DagsterInstance,
) -> None:
    """The newest window comes first, with the quiet hour 4, then a backfilled one; incomplete windows are refused."""
    cursor = None

    def find_due() -> set[str | None]:
        nonlocal cursor
        result = dg.evaluate_automation_conditions(project.defs, instance, cursor=cursor)
        cursor = result.cursor
        return set(result.get_requested_partitions(dg.AssetKey("volume")))

    assert find_due() == set()
    assert not project.make(2).success, "the window is pending"
    for hour, complete in ((2, (2, 4)), (0, (0,))):
        assert project.run(hour).success
        assert find_due() == {f"{DAY}{h:02}:00" for h in complete}
        assert all(project.make(h).success for h in complete)
        assert find_due() == set()
    assert project.executions == [(f"{DAY}02:00", 50), (f"{DAY}04:00", 0), (f"{DAY}00:00", 50)]


def test_check_added_after_loading_is_logged_with_reload_hint(project: Project, instance: dg.DagsterInstance) -> None:
    """Dagster accepts no result of a check that it has not loaded; the run lands nevertheless."""
    agree(project.world, ROWS)
    done = project.run(1)
    assert done.success
    warnings = [e.message for e in instance.all_logs(done.run_id) if e.level == logging.WARNING]
    assert any("contract_volume" in m and "Reload definitions" in m for m in warnings), warnings
    (project.world.project.feeds_folder / "orders.contract.json").unlink()
    assert project.run(2).success


def test_component_wraps_landing_steps(world: World, instance: dg.DagsterInstance) -> None:
    calls: list[str] = []

    class Wrapped(own.FeedsComponent):
        def execute(self, context: Any, events: Iterator[Any]) -> Iterator[Any]:
            calls.append(context.partition_key)
            yield from super().execute(context, events)

    session = RunSession(
        world.project, world.open_ports, open_lake=lambda feed: world.lake, steps=Wrapped()._build_steps()
    )
    files = read_shapes(world.project)
    specs = {n: AssetSpecs.of(f) for n, f in files.feeds.items()}
    memory = recall_all(files, specs, session)
    defs = feeds_of(files, specs, memory, windows_of(files.feeds, memory), session)
    job = resolve_landing(defs)
    assert job.execute_in_process(instance=instance, partition_key=f"{DAY}01:00").success
    assert calls == [f"{DAY}01:00"]
    with pytest.raises(UsageError, match="`tags` and `pool` only"):
        own.FeedsComponent(op=OpSpec(name="land"))._build_steps()


def test_owners_tags_and_group_come_from_the_feed_file(tmp_path: Path) -> None:
    words = "owners: [team:data, ann@example.com]\ntags: {tier: '1'}\ngroup_name: shop\n"
    typed = "format: json\nschema: {amount: float64}\ntable: {iceberg: {name: shop.orders}}\n"
    graph = get_nodes(own.feed_definitions(write_feeds(tmp_path, orders=FEED + words + typed)))
    for name in ("landed", "committed", "table"):
        asset = graph[f"orders/{name}"]
        assert (asset.group_name, asset.owners) == ("shop", ["team:data", "ann@example.com"])
        assert asset.tags["tier"] == "1"
    landed, table = graph["orders/landed"], graph["orders/table"]
    assert table.metadata["dagster/table_name"] == "shop.orders"
    lineage = table.metadata["dagster/column_lineage"].deps_by_column
    assert lineage["amount"] == [dg.TableColumnDep(landed.key, "amount")]
    lineage = landed.metadata["dagster/column_lineage"].deps_by_column
    topic = dg.AssetKey(["kafka", "orders"])
    assert lineage["amount"] == [dg.TableColumnDep(topic, "value")]
    assert lineage["kafka_offset"] == [dg.TableColumnDep(topic, "offset")]
    for wrong in ("owners: [ann]", "tags: {'a b': c}", "group_name: our shop"):
        (tmp_path / "feeds" / "orders.yaml").write_text(FEED + wrong)
        with pytest.raises(FeedError, match=wrong.partition(":")[0]):
            own.feed_assets("orders", tmp_path)


@pytest.mark.parametrize(
    ("lake", "store"),
    [
        ("s3://bucket/p", "s3: {access_key_id: x, secret_access_key: '${UNSET}'}"),
        ("az://container/p", "azure: {account: acme, account_key: '${UNSET}'}"),
        ("gs://bucket/p", "gcs: {token: '${UNSET}'}"),
    ],
)
def test_missing_store_secret_does_not_break_feed_definitions(tmp_path: Path, lake: str, store: str) -> None:
    write_feeds(
        tmp_path, orders=f"kafka: {{bootstrap: 'a:1'}}\ntopics: orders\nstart: earliest\nlake: {lake}\n{store}\n"
    )
    files = read_shapes(projects.Project(tmp_path))
    assert (files.feeds.keys(), files.broken) == ({"orders"}, {})
    assert "UNSET" in files.without_lake["orders"].message


def test_columns_have_descriptions(tmp_path: Path) -> None:
    text = FEED + (
        "format: json\nschema: {amount: float64, any: json, more: list<json>}\ndescription: Orders of the shop.\n"
        "descriptions: {amount: 'in euros, with VAT', any: as sent, more: as sent}\n"
    )
    landed = get_nodes(own.feed_definitions(write_feeds(tmp_path, orders=text)))["orders/landed"]
    assert landed.description.startswith("Orders of the shop. The records of")
    columns = {c.name: c.description for c in landed.metadata["dagster/column_schema"].columns}
    assert (columns["amount"], columns["kafka_offset"]) == (
        "in euros, with VAT",
        "the record's offset in its partition",
    )
    assert all(columns.values())
    types = {c.name: c.type for c in landed.metadata["dagster/column_schema"].columns}
    assert [types[name] for name in ("amount", "any", "more", "_extra")] == ["double", "json", "list<json>", "string"]
    (tmp_path / "feeds" / "orders.yaml").write_text(text.replace("{amount: 'in", "{price: 'in"))
    with pytest.raises(FeedError, match="descriptions: describes a column"):
        own.feed_assets("orders", tmp_path)


def test_dg_finds_the_component() -> None:
    (entry_point,) = entry_points(group="dagster_dg_cli.registry_modules", name="sluice")
    assert entry_point.load().FeedsComponent is own.FeedsComponent
    assert {
        "feeds",
        "translation",
        "schedules",
        "sensor",
        "op",
    } == own.FeedsComponent.get_model_cls().model_fields.keys()


def test_component_accepts_translation_in_yaml(tmp_path: Path) -> None:
    write_feeds(tmp_path, orders=FEED)
    translation: Mapping[str, Any] = {
        "key_prefix": "raw",
        "group_name": "{{ 'topics' if kind == 'topic' else name }}",
        "owners": ["team:data"],
    }
    with ExitStack() as stack:
        sandbox = stack.enter_context(create_defs_folder_sandbox())
        sandbox.scaffold_component(
            component_cls=own.FeedsComponent,
            defs_path="ingest",
            defs_yaml_contents={
                "type": "sluice.dagster.FeedsComponent",
                "attributes": {
                    "feeds": str(tmp_path / "feeds"),
                    "translation": dict(translation),
                    "op": {"pool": "kafka", "tags": {"team": "data"}},
                },
            },
        )
        _, defs = stack.enter_context(sandbox.load_component_and_build_defs("ingest"))
        assets = get_nodes(defs)
    assert assets.keys() == {"raw/kafka/orders", "raw/orders/landed", "raw/orders/committed"}
    assert [assets[k].group_name for k in ("raw/kafka/orders", "raw/orders/landed")] == ["topics", "orders"]
    assert assets["raw/orders/landed"].owners == ["team:data"]
    landed = defs.resolve_assets_def(dg.AssetKey(["raw", "orders", "landed"])).op
    assert (landed.pool, landed.tags["team"]) == ("kafka", "data")
