"""One run lands the pending windows of many feeds, each on its own: a feed that fails stops no other."""

from __future__ import annotations

import hashlib
import os
import signal
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.storage.event_log import SqliteEventLogStorage
from sqlalchemy.exc import OperationalError

from sluice import running
from sluice.assets.execution import run_feeds
from sluice.assets.factory import build, windows_of
from sluice.assets.instance import internals
from sluice.assets.instance.instance import open_instance
from sluice.assets.jobs import fleet_job
from sluice.assets.jobs.fleet_job import Fleet as Feeds
from sluice.assets.jobs.fleet_job import many_job
from sluice.assets.operations.dagster_health import recent_runs
from sluice.assets.runs import run_config
from sluice.assets.runs.run_config import (
    AT_WORK_TAG,
    DONE_TAG,
    FAILED_TAG,
    FLEET_TAG,
    LEFT_TAG,
    MORE_TAG,
    PENDING,
    fleet_config,
    named_in,
)
from sluice.assets.runs.run_session import FEED_TAG, RunSession, StepSettings
from sluice.assets.schedules.window_scheduler import FleetScheduler
from sluice.assets.specs.feed_files import read_feeds, recall_feeds
from sluice.pipelines.batch import land as rounds
from sluice.pipelines.errors import Failed, FeedError, KafkaUnavailable, LakeUnavailable, NotReached, WindowOpen
from sluice.pipelines.feed.feed import SHARED, Feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.ports import Job, Ports
from sluice.pipelines.util.units import show_window
from sluice.resources.lake import open_store
from sluice.resources.local.local_s3 import LocalS3
from sluice.resources.spark import engine
from sluice.running import RunResult
from sluice.testing.group import MemoryGroup
from tests.assets.conftest import ON_FILES
from tests.assets.ui import open_pages
from tests.assets.world import CATCH_UP, FEED, HOUR, MadeUpEngine, World, at_hour, in_hour, resolve_landing

NAMES = ("orders", "refunds", "returns")
MANY = run_config.fleet_job(SHARED)
AGAIN = """
mutation ($run: String!) {
  launchRunReexecution(reexecutionParams: {parentRunId: $run, strategy: FROM_FAILURE}) {
    __typename
    ... on LaunchRunSuccess { run { parentRunId pipelineName stepKeysToExecute } }
    ... on PythonError { message }
  }
}"""


def build_feed(name: str, more: str = "") -> str:
    return FEED.replace("feed: orders", f"feed: {name}").replace("sluice-orders", f"sluice-{name}") + more


class WatchedEngine(MadeUpEngine):
    """An engine that counts concurrent feeds, holds them at the world's `gate`, and hangs for the feed `hung`.

    A hung feed waits until it is cancelled.
    """

    def __init__(self, world: Fleet, name: str) -> None:
        super().__init__(world.lake)
        self.world, self.name, self.cancelled = world, name, threading.Event()

    def run(self, job: Job, tasks: Sequence[int]):  # type: ignore[no-untyped-def,override]
        with self.world.track_landing(self.name):
            if self.world.gate is not None:
                self.world.gate.wait(20)
            if self.name == self.world.hung:
                self.world.hanging.set()
                assert self.cancelled.wait(20)
                raise Failed("the Spark job was cancelled")
            return super().run(job, tasks)

    def cancel(self) -> None:
        self.cancelled.set()


def load_windows(fleet: Fleet) -> Mapping[str, dg.TimeWindowPartitionsDefinition]:
    """Returns the partitions of each feed's asset in a freshly loaded code location."""
    files = read_feeds(fleet.project, {})
    recalled, _ = recall_feeds(files, lambda feed: fleet.lake)
    return windows_of(files.feeds, recalled)


class Fleet(World):
    """Three feeds of one topic, each with its group. Kafka is down for feeds in `away`, the lake for `no_lake`."""

    away: frozenset[str] = frozenset()
    no_lake: frozenset[str] = frozenset()
    bug: str = ""
    hung: str = ""
    gate: threading.Barrier | None = None
    most_at_once = 0

    def __init__(self, root: Path, feeds: dict[str, str]) -> None:
        super().__init__(root, feeds)
        self.groups: dict[str, MemoryGroup] = {}
        self.at_work: set[str] = set()
        self.lock, self.hanging = threading.Lock(), threading.Event()

    @contextmanager
    def track_landing(self, name: str) -> Iterator[None]:
        with self.lock:
            self.at_work.add(name)
            self.most_at_once = max(self.most_at_once, len(self.at_work))
        try:
            yield
        finally:
            with self.lock:
                self.at_work.discard(name)

    @contextmanager
    def open_ports(self, feed: Feed) -> Iterator[Ports]:
        if feed.name in self.no_lake:
            raise LakeUnavailable("the store does not answer", remedy="wait for it")
        if feed.name in self.away:
            raise KafkaUnavailable("no broker answers", remedy="start it")
        if feed.name == self.bug:
            raise ZeroDivisionError("a mistake of ours")
        group = self.groups.setdefault(feed.name, MemoryGroup())
        engine = WatchedEngine(self, feed.name)
        yield Ports(self.cluster, group, self.lake, engine, self.liveness, self.clock, None)

    def land(self, *names: str, request: Request = CATCH_UP) -> Mapping[str, RunResult]:
        requests = dict.fromkeys(names or NAMES, request)
        return run_feeds(self.project, requests, lambda name: self.progress.append, self.open_ports)

    def land_without_dagster(self, *names: str, request: Request = CATCH_UP) -> Mapping[str, RunResult]:
        requests = dict.fromkeys(names or NAMES, request)
        feeds = {name: self.project.feed(name) for name in requests}
        how = running.SideBySide(self.project.fleet())
        return running.run_feeds(feeds, requests, lambda name: self.progress.append, self.open_ports, side_by_side=how)

    def bury_all(self) -> None:
        """Declare the owners of all live batches dead."""
        states = (Ledger(self.lake, name, self.clock, "test", self.cluster.id).read() for name in NAMES)
        self.liveness.dead = {b.owner.token for state in states for b in state.live()}

    def write_limits(self, text: str) -> None:
        (self.project.root / "fleet.yaml").write_text(text)


@pytest.fixture
def fleet(root: Path) -> Fleet:
    return Fleet(root, {name: build_feed(name) for name in NAMES})


@pytest.fixture
def instance(fleet: Fleet) -> Iterator[dg.DagsterInstance]:
    with open_instance(fleet.project) as dagster_instance:
        yield dagster_instance


def get_only_run(instance: dg.DagsterInstance) -> dg.DagsterRun:
    (run,) = instance.get_runs()
    return run


def read_failure(instance: dg.DagsterInstance, run: str) -> tuple[str, dict[str, object]]:
    """Returns the message and the metadata of the only failed step of a run."""
    events = [e.dagster_event for e in instance.all_logs(run, of_type=dg.DagsterEventType.STEP_FAILURE)]
    (failure,) = (e.step_failure_data.user_failure_data for e in events if e)
    return failure.description, {key: value.value for key, value in failure.metadata.items()}


def count_outcomes(fleet: Fleet) -> dict[tuple[str, str, str], int]:
    """Count outcomes by feed, status and error, as `sluice metrics` does."""
    return dict(recent_runs(fleet.project, [*read_feeds(fleet.project, {}).feeds.values()]))


# -- one run


def test_one_run_lands_and_commits_pending_records_of_many_feeds(fleet: Fleet, instance: dg.DagsterInstance) -> None:
    fleet.gate = threading.Barrier(3)
    outcomes = fleet.land()
    assert [o.error for o in outcomes.values()] == [None] * 3, "in parallel: none passes the gate without the others"
    assert len({o.run_id for o in outcomes.values()}) == 1
    for outcome in outcomes.values():
        assert outcome.landed
        assert sum(b.counts.landed for b in outcome.landed.batches) == 200
        assert outcome.committed
    run = get_only_run(instance)
    assert (run.job_name, run.status, run.tags[DONE_TAG]) == (MANY, dg.DagsterRunStatus.SUCCESS, "3")
    for name in NAMES:
        assert len(instance.get_materialized_partitions(dg.AssetKey([name, "landed"]))) >= 4
        assert instance.fetch_materializations(dg.AssetKey([name, "committed"]), limit=1).records


def test_step_of_a_project_wraps_the_landing_of_each_feed(fleet: Fleet, instance: dg.DagsterInstance) -> None:
    def execute(context: dg.OpExecutionContext, events: Iterator[Any]) -> Iterator[Any]:
        context.log.info("begins")
        yield from events

    session = RunSession(fleet.project, fleet.open_ports, steps=StepSettings(execute=execute))
    ended = build(fleet.project, session).resolve_job_def(MANY).execute_in_process(instance=instance)
    lines = [e.user_message for e in instance.all_logs(ended.run_id)]
    assert {f"{name}: begins" for name in NAMES} <= {*lines}


def test_failed_feed_stops_no_other_feed_and_lands_in_next_run(fleet: Fleet, instance: dg.DagsterInstance) -> None:
    fleet.away, fleet.bug = frozenset({"orders"}), "refunds"
    outcomes = fleet.land()
    assert isinstance(outcomes["orders"].error, KafkaUnavailable)
    assert "ZeroDivisionError: a mistake of ours" in str(outcomes["refunds"].error)
    assert outcomes["returns"].error is None
    assert outcomes["returns"].committed
    run = get_only_run(instance)
    assert (run.status, run.tags[FAILED_TAG]) == (dg.DagsterRunStatus.FAILURE, "orders,refunds")
    message, errors = read_failure(instance, run.run_id)
    assert message.startswith("1 feed done; 2 failed: orders, refunds. Re-execute from failure")
    assert errors["orders"] == "KafkaUnavailable: no broker answers\n  → start it"
    assert str(errors["refunds"]).startswith("Failed: unforeseen ZeroDivisionError: a mistake of ours\n  → run it by")
    log = [e.user_message for e in instance.all_logs(run.run_id) if not e.dagster_event]
    assert any("in open_ports" in line for line in log), "the traceback"
    assert {line.partition(": ")[0] for line in log} == {*NAMES}
    assert not instance.get_materialized_partitions(dg.AssetKey(["orders", "landed"]))
    fleet.away, fleet.bug = frozenset(), ""
    first = {("orders", "failure", "KafkaUnavailable"): 1, ("refunds", "failure", "ZeroDivisionError"): 1}
    assert count_outcomes(fleet) == first | {("returns", "success", ""): 1}
    again = fleet.land("orders", "refunds")
    assert [o.error for o in again.values()] == [None, None]
    assert set(again) == {"orders", "refunds"}
    assert count_outcomes(fleet) == first | {(name, "success", ""): 1 for name in NAMES}


def test_feeds_uncommitted_by_broken_run_are_reported_as_failed(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run breaks when the second feed begins; only the first one has an error itself."""

    def note(self: object, at_work: Collection[str]) -> None:
        if "refunds" in at_work:
            raise RuntimeError("planted")

    fleet.write_limits("feeds_at_once: 1\n")
    fleet.away = frozenset({"orders"})
    monkeypatch.setattr(fleet_job._Steps, "note_at_work", note)
    outcomes = fleet.land()
    assert isinstance(outcomes["orders"].error, KafkaUnavailable)
    assert "unforeseen RuntimeError: planted" in str(outcomes["refunds"].error)
    assert "failed outside its steps" in str(outcomes["returns"].error)
    assert not any(o.committed for o in outcomes.values())


@ON_FILES
def test_refused_events_of_a_feed_do_not_stop_other_feeds(
    fleet: Fleet, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite refuses so after half a minute of contention; even the step's failure cannot be stored."""
    store = SqliteEventLogStorage.store_event

    def refuse(self: SqliteEventLogStorage, event: dg.EventLogEntry) -> None:
        if threading.current_thread().name == "sluice-refunds":
            raise OperationalError("INSERT", {}, sqlite3.OperationalError("database is locked"))
        store(self, event)

    monkeypatch.setattr(SqliteEventLogStorage, "store_event", refuse)
    outcomes = fleet.land()
    assert "database is locked" in str(outcomes["refunds"].error)
    assert [bool(outcomes[name].committed) for name in NAMES] == [True, False, True]
    assert [outcomes[name].error for name in ("orders", "returns")] == [None, None]
    run = get_only_run(instance)
    assert (run.status, run.tags[FAILED_TAG]) == (dg.DagsterRunStatus.FAILURE, "refunds")


def test_feeds_whose_spark_differs_in_a_secret_do_not_share_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = "spark: {{conf: {{spark.hadoop.fs.azure.account.key.x: {}}}}}\n"
    keys = {"orders": "one", "refunds": "two", "returns": "one"}
    fleet, events = Fleet(root, {name: build_feed(name, conf.format(key)) for name, key in keys.items()}), list[str]()
    feeds = {name: fleet.project.feed(name) for name in keys}
    monkeypatch.setattr(engine, "end", lambda: events.append("Spark ends"))

    def run_one(feed: Feed, *_: object) -> RunResult:
        events.append(feed.name)
        return RunResult(feed.name)

    side_by_side = running.SideBySide(fleet.project.fleet(), run_one)
    requests = dict.fromkeys(keys, CATCH_UP)
    running.run_feeds(feeds, requests, lambda name: fleet.progress.append, fleet.open_ports, side_by_side=side_by_side)
    assert (sorted(events[:2]), events[2:]) == (["orders", "returns"], ["Spark ends", "refunds"])


def test_per_kafka_limit_bounds_concurrent_feeds(fleet: Fleet) -> None:
    fleet.write_limits("per_kafka: 1\n")
    assert [o.error for o in fleet.land(request=in_hour(0)).values()] == [None] * 3
    assert fleet.most_at_once == 1


def test_hanging_feed_is_ended_and_other_feeds_complete(fleet: Fleet, instance: dg.DagsterInstance) -> None:
    fleet.write_limits("feed_time: 10s\n")
    fleet.hung = "refunds"
    outcomes = fleet.land()
    assert [bool(o.error) for o in outcomes.values()] == [False, True, False]
    assert "refunds was ended after 10s" in str(outcomes["refunds"].error)
    assert get_only_run(instance).tags[FAILED_TAG] == "refunds"
    fleet.hung = ""
    fleet.write_limits("feed_time: 1h\n")
    fleet.bury_all()
    assert fleet.land("refunds")["refunds"].error is None


def test_feeds_not_reached_by_a_run_are_skipped_and_not_failed(fleet: Fleet, instance: dg.DagsterInstance) -> None:
    fleet.write_limits("deadline: 5s\nfeeds_at_once: 1\nfeed_time: 8s\n")
    fleet.hung = "orders"
    outcomes = fleet.land(request=in_hour(0))
    assert "was ended" in str(outcomes["orders"].error)
    assert "not reached" in str(outcomes["refunds"].error)
    run = get_only_run(instance)
    assert (run.tags[FAILED_TAG], run.tags[LEFT_TAG], run.tags[DONE_TAG]) == ("orders", "refunds,returns", "0")
    assert {(name, status) for name, status, _ in count_outcomes(fleet)} == {("orders", "failure")}


def interrupt_while_one_hangs(fleet: Fleet, land: Callable[[], object]) -> None:
    """Land, and interrupt the process while a feed hangs."""
    fleet.hung = "refunds"

    def interrupt() -> None:
        assert fleet.hanging.wait(20)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        land()


def test_an_interrupt_reaches_every_feed(fleet: Fleet, instance: dg.DagsterInstance) -> None:
    interrupt_while_one_hangs(fleet, fleet.land)
    assert get_only_run(instance).status is dg.DagsterRunStatus.CANCELED
    assert not fleet.at_work


# -- without Dagster


def test_feeds_land_concurrently_without_dagster(fleet: Fleet) -> None:
    fleet.gate = threading.Barrier(3)
    outcomes = fleet.land_without_dagster()
    assert [*outcomes] == [*NAMES]
    assert [o.error for o in outcomes.values()] == [None] * 3
    assert [sum(b.counts.landed for b in o.batches) for o in outcomes.values()] == [200] * 3
    assert all(o.committed for o in outcomes.values())


def test_failed_feed_stops_no_other_feed_without_dagster(fleet: Fleet) -> None:
    fleet.write_limits("per_kafka: 1\n")
    fleet.away, fleet.bug = frozenset({"orders"}), "refunds"
    outcomes = fleet.land_without_dagster()
    assert isinstance(outcomes["orders"].error, KafkaUnavailable)
    assert "ZeroDivisionError: a mistake of ours" in str(outcomes["refunds"].error)
    assert outcomes["returns"].committed
    assert fleet.most_at_once == 1


def test_run_ends_by_its_deadline_without_dagster(fleet: Fleet) -> None:
    fleet.write_limits("deadline: 1s\nfeeds_at_once: 1\nfeed_time: 2s\n")
    fleet.hung = "orders"
    outcomes = fleet.land_without_dagster(request=in_hour(0))
    assert "orders was ended after 2s" in str(outcomes["orders"].error)
    assert outcomes["orders"].run_id.startswith("none:")
    assert isinstance(outcomes["refunds"].error, NotReached)
    assert isinstance(outcomes["returns"].error, NotReached)


def test_interrupt_reaches_every_feed_without_dagster(fleet: Fleet) -> None:
    interrupt_while_one_hangs(fleet, fleet.land_without_dagster)
    assert not fleet.at_work


# -- the code location


def test_code_location_has_one_job_for_each_shared_schedule(root: Path) -> None:
    apart = {"hourly": "schedule: hourly\n", "own": "schedule: own\n"}
    fleet = Fleet(root, {name: build_feed(name, apart.get(name, "")) for name in (*NAMES, *apart)})
    location = build(fleet.project)
    dg.Definitions.validate_loadable(location)
    assert {n.name for n in location.resolve_job_def(MANY).nodes} == {PENDING}
    jobs = {j.name for j in location.resolve_all_job_defs()}
    assert {run_config.fleet_job("hourly"), MANY} <= jobs
    assert run_config.fleet_job("own") not in jobs
    schedules = {s.name for s in location.get_repository_def().schedule_defs}
    assert {
        f"{MANY}_windows",
        "pending_of_hourly_feeds_windows",
        "land_own_windows",
        "land_orders_windows",
    } <= schedules
    assert "land_hourly_windows" not in schedules


def test_unknown_feed_is_refused_before_any_run_starts(fleet: Fleet, instance: dg.DagsterInstance) -> None:
    with pytest.raises(FeedError, match="no feed `ordres`"):
        fleet.land("orders", "ordres")
    assert not instance.get_runs()


def test_invalid_fleet_file_error_names_line_and_key(fleet: Fleet) -> None:
    fleet.write_limits("feeds_at_once: 0\nfeed_at_once: 2\n")
    with pytest.raises(FeedError) as error:
        fleet.project.fleet()
    assert "fleet.yaml:1:1: feeds_at_once: should be" in str(error.value)
    assert "did you mean `feeds_at_once`?" in str(error.value)


# -- in the UI


def test_only_failed_feed_has_red_windows_and_is_reexecuted(
    fleet: Fleet, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.away = frozenset({"refunds"})
    request = Request(RequestKind.WINDOW, window=at_hour(0), until=at_hour(3))
    fleet.land(request=request)
    with open_pages(instance, fleet.project, monkeypatch) as pages:
        stats = {name: pages.fetch_node(dg.AssetKey([name, "landed"]))["partitionStats"] for name in NAMES}
        assert {n: s["numFailed"] for n, s in stats.items()} == {"orders": 0, "refunds": 3, "returns": 0}
        assert {n: s["numMaterialized"] for n, s in stats.items()} == {"orders": 4, "refunds": 0, "returns": 4}
        again = pages.ask(AGAIN, run=get_only_run(instance).run_id)["launchRunReexecution"]
        assert again["__typename"] == "LaunchRunSuccess", again
        assert again["run"]["stepKeysToExecute"] == [PENDING]


def launch_run(fleet: Fleet, instance: dg.DagsterInstance, **config: Any) -> dg.DagsterRun:
    """Run the job with a configuration as from its launchpad."""
    job = build(fleet.project, RunSession(fleet.project, fleet.open_ports)).resolve_job_def(MANY)
    run_config = {"ops": {"pending_feeds": {"config": config}}}
    ended = job.execute_in_process(instance=instance, run_config=run_config, raise_on_error=False)
    run = instance.get_run_by_id(ended.run_id)
    assert run is not None
    return run


def test_windows_of_many_feeds_are_landed_by_one_run(fleet: Fleet, instance: dg.DagsterInstance) -> None:
    own = {"feed": "refunds", "window": show_window(at_hour(3))}
    first_hours = {"window": show_window(at_hour(1)), "until": show_window(at_hour(3))}
    assert launch_run(fleet, instance, **first_hours, feeds=[{"feed": "orders"}, own]).is_success
    hours = [[h for h in range(4) if show_window(at_hour(h)) in list_windows(instance, name)] for name in NAMES]
    assert hours == [[1, 2], [3], []]
    fleet.away = frozenset({"returns"})
    assert launch_run(fleet, instance, **first_hours).tags[FAILED_TAG] == "returns"
    hours = [[h for h in range(4) if show_window(at_hour(h)) in list_windows(instance, name)] for name in NAMES]
    assert hours == [[1, 2], [1, 2, 3], []]


def test_window_in_grace_period_does_not_fail_run_of_many_feeds(fleet: Fleet, instance: dg.DagsterInstance) -> None:
    """A feed whose grace period has not passed does not fail a run of many feeds."""
    fleet.at(6, minutes=5)
    path = fleet.project.feeds_folder / "returns.yaml"
    path.write_text(path.read_text() + "window: {grace: 6h}\n")
    run = launch_run(fleet, instance, window=show_window(at_hour(3)), until=show_window(at_hour(6)))
    assert run.is_success
    assert FAILED_TAG not in run.tags
    hours = [[h for h in range(6) if show_window(at_hour(h)) in list_windows(instance, name)] for name in NAMES]
    assert hours == [[3, 4], [3, 4], []]
    outcomes = fleet.land(request=Request(RequestKind.WINDOW, window=at_hour(3), until=at_hour(6)))
    open_windows = {name: o.landed.open_windows if o.landed else None for name, o in outcomes.items()}
    assert [p.first if p else None for p in open_windows.values()] == [at_hour(5), at_hour(5), None]
    assert isinstance(outcomes["returns"].error, WindowOpen)


@pytest.mark.parametrize("wrong", [{"until": "2024-05-01T03:00"}, {"window": "tomorrow"}])
def test_invalid_run_config_fails_before_any_feed_starts(
    fleet: Fleet, instance: dg.DagsterInstance, wrong: dict[str, str]
) -> None:
    run = launch_run(fleet, instance, **wrong)
    assert not run.is_success
    message, _ = read_failure(instance, run.run_id)
    assert "window" in message
    assert not count_outcomes(fleet)


def list_windows(instance: dg.DagsterInstance, name: str) -> set[str]:
    return set(instance.get_materialized_partitions(dg.AssetKey([name, "landed"])))


def retry(fleet: Fleet, instance: dg.DagsterInstance, parent: dg.DagsterRun) -> dg.DagsterRun:
    """Execute a run again from its failure, as Dagster's servers do: with its tags."""
    execute, in_memory = internals.find_private("execute_run_iterator"), internals.find_private("InMemoryJob")
    job = build(fleet.project, RunSession(fleet.project, fleet.open_ports)).resolve_job_def(MANY)
    tags = dict(parent.tags) | {"dagster/is_resume_retry": "true"}
    ids = {"parent_run_id": parent.run_id, "root_run_id": parent.root_run_id or parent.run_id}
    run = instance.create_run_for_job(job, run_config=parent.run_config, tags=tags, **ids)
    for _ in execute(in_memory(job), run, instance):
        pass
    ended = instance.get_run_by_id(run.run_id)
    assert ended is not None
    return ended


def test_retry_runs_only_failed_and_left_feeds(fleet: Fleet, instance: dg.DagsterInstance) -> None:
    fleet.away = frozenset({"refunds"})
    fleet.land()
    parent = get_only_run(instance)
    instance.add_run_tags(parent.run_id, {LEFT_TAG: "returns"})
    again = retry(fleet, instance, instance.get_run_by_id(parent.run_id))
    assert (again.status, again.tags[DONE_TAG]) == (dg.DagsterRunStatus.FAILURE, "1"), "returns"
    assert (again.tags[FAILED_TAG], again.tags[LEFT_TAG], again.tags[AT_WORK_TAG]) == ("refunds", "", "")
    fleet.away = frozenset()
    last = retry(fleet, instance, again)
    assert (last.status, last.tags[DONE_TAG], last.tags[FAILED_TAG]) == (dg.DagsterRunStatus.SUCCESS, "1", "")
    assert count_outcomes(fleet)["refunds", "success", ""] == 1
    assert len(list_windows(instance, "refunds")) >= 4


def test_retry_of_a_killed_retry_runs_the_feeds_of_the_first_failure(
    fleet: Fleet, instance: dg.DagsterInstance
) -> None:
    fleet.away = frozenset({"refunds"})
    fleet.land()
    parent = get_only_run(instance)
    tags = dict(parent.tags) | {"dagster/is_resume_retry": "true", DONE_TAG: ""}
    killed = instance.create_run_for_job(
        many_job(Feeds(RunSession(fleet.project))),
        run_config=parent.run_config,
        tags=tags,
        parent_run_id=parent.run_id,
        root_run_id=parent.run_id,
    )
    fleet.away = frozenset()
    assert retry(fleet, instance, killed).tags[DONE_TAG] == "1"


def test_tags_of_a_thousand_feeds_fit_postgresql_index(fleet: Fleet, instance: dg.DagsterInstance) -> None:
    """Dagster indexes tags; a row of the index holds 2,704 bytes."""
    names = {f"f{hashlib.sha256(bytes([n % 256, n // 256])).hexdigest()[:16]}" for n in range(1000)}
    run = launch_run(fleet, instance, feeds=[{"feed": name} for name in sorted(names)])
    assert named_in(run, FAILED_TAG) == names
    assert max(map(len, run.tags.values())) <= 2000
    tags = run_config.build_tags(FAILED_TAG, ["orders"], run.tags)
    assert (tags.pop(FAILED_TAG), {*tags.values()}) == ("orders", {""}), "those that do not fit are emptied"


# -- the schedule


def evaluate_tick(fleet: Fleet, instance: dg.DagsterInstance) -> Any:
    defs = build(fleet.project, RunSession(fleet.project, fleet.open_ports))
    with dg.build_schedule_context(instance, fleet.time(), repository_def=defs.get_repository_def()) as context:
        return defs.resolve_schedule_def(f"{MANY}_windows").evaluate_tick(context)


def list_tick_requests(fleet: Fleet, instance: dg.DagsterInstance) -> list[dict[str, str]]:
    """Returns the windows that a tick requests by feed, a mapping for each run."""
    return [
        {f["feed"]: "-".join(f[at][11:16] for at in ("window", "until") if at in f) for f in feeds}
        for request in evaluate_tick(fleet, instance).run_requests
        for op in request.run_config["ops"].values()
        for feeds in (op["config"]["feeds"],)
    ]


def read_skip_message(fleet: Fleet, instance: dg.DagsterInstance) -> str:
    """Returns the reason why a tick requests no run."""
    return str(evaluate_tick(fleet, instance).skip_message)


def test_tick_requests_one_run_for_pending_windows_oldest_first(fleet: Fleet, instance: dg.DagsterInstance) -> None:
    fleet.land("orders", request=in_hour(3))
    (feeds,) = list_tick_requests(fleet, instance)
    assert list(feeds.items()) == [("orders", "00:00-03:00"), ("refunds", "04:00"), ("returns", "04:00")]
    fleet.write_limits("windows: 2\n")
    (feeds,) = list_tick_requests(fleet, instance)
    assert feeds["orders"] == "00:00-02:00"
    fleet.land("orders", request=Request(RequestKind.WINDOW, window=at_hour(0), until=at_hour(3)))
    fleet.land("refunds", "returns")
    assert "3 feeds checked: no closed window is pending" in read_skip_message(fleet, instance)


def test_idle_tick_sends_few_requests_and_detects_new_ledger(fleet: Fleet, instance: dg.DagsterInstance) -> None:
    fleet.land()
    session = RunSession(fleet.project, fleet.open_ports)
    windows = load_windows(fleet)

    def list_feeds() -> list[str]:
        return [*FleetScheduler(session, windows, SHARED).list_requests(instance)]

    assert list_feeds() == []
    fleet.lake.requests.clear()
    assert list_feeds() == []
    assert sum(fleet.lake.requests.values()) <= 2 * len(NAMES)
    fleet.at(7)
    assert list_feeds() == list(NAMES), "a window has closed"
    fleet.land()
    assert list_feeds() == []
    fleet.lake.files = {p: data for p, data in fleet.lake.files.items() if "/orders/" not in p}
    del fleet.groups["orders"]
    fleet.land("orders", request=in_hour(3))
    assert list_feeds() == ["orders"], "its ledger begins again"


def test_idle_tick_sends_two_s3_requests_per_feed_and_no_kafka_request(
    fleet: Fleet, instance: dg.DagsterInstance
) -> None:
    with LocalS3() as store:
        fleet.lake = open_store(store.lake, store.settings)  # type: ignore[assignment]
        fleet.land()
        session = RunSession(fleet.project, fleet.open_ports)
        windows = load_windows(fleet)
        assert FleetScheduler(session, windows, SHARED).list_requests(instance) == {}
        before = store.requests()
        fleet.cluster.requests.clear()
        assert FleetScheduler(session, windows, SHARED).list_requests(instance) == {}
        requests = store.requests() - before
    assert sum(requests.values()) == 2 * len(NAMES), requests
    assert not fleet.cluster.requests


def test_feeds_with_shortest_retention_come_first(fleet: Fleet, instance: dg.DagsterInstance) -> None:
    fleet.land(request=in_hour(3))
    for name, hours in (("orders", 7 * 24), ("refunds", 12), ("returns", 6)):
        ledger = Ledger(fleet.lake, name, fleet.clock)
        ledger.read()
        ledger.note_retention(hours * HOUR)
    (feeds,) = list_tick_requests(fleet, instance)
    assert [*feeds] == ["returns", "refunds", "orders"]


def test_feed_far_behind_continues_in_next_run(
    fleet: Fleet, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "BATCH_RANGES", 2)
    monkeypatch.setattr(rounds, "RANGES_PER_CORE", 1)
    monkeypatch.setattr(internals, "SCHEDULE_TAG", FLEET_TAG)  # as if a schedule had asked for the run
    fleet.write_limits("catch_up: 0s\n")
    request = Request(RequestKind.WINDOW, window=at_hour(0), until=at_hour(4))
    outcome = fleet.land("orders", "refunds", request=request)["orders"]
    assert outcome.error is None
    run = get_only_run(instance)
    assert (run.status, run.tags.get(MORE_TAG)) == (dg.DagsterRunStatus.SUCCESS, "1")
    (feeds,) = list_tick_requests(fleet, instance)
    assert feeds["orders"].endswith("-04:00")
    assert feeds["orders"] > "00:00"
    assert outcome.committed is not None, "landed records are committed"


def test_invalid_file_and_unavailable_lake_stop_no_other_feed(fleet: Fleet, instance: dg.DagsterInstance) -> None:
    fleet.land(request=in_hour(3))
    (fleet.project.feeds_folder / "returns.yaml").write_text("topics: [")
    fleet.no_lake = frozenset({"orders"})
    assert list_tick_requests(fleet, instance) == [{"refunds": "00:00-03:00"}]
    fleet.no_lake = frozenset({"orders", "refunds"})
    message = read_skip_message(fleet, instance)
    assert "not loaded: returns.yaml" in message
    assert "orders could not be checked: the store does not answer" in message


def test_only_previously_unavailable_lake_is_read_at_next_tick(fleet: Fleet, instance: dg.DagsterInstance) -> None:
    """It does not wait until another window closes, which may take an hour."""
    fleet.land(request=in_hour(3))
    defs, done = build(fleet.project, RunSession(fleet.project, fleet.open_ports)), dg.DagsterRunStatus.SUCCESS
    job = defs.resolve_job_def(MANY)

    def ask(minutes: int) -> str:
        fleet.at(5, minutes)
        with dg.build_schedule_context(instance, fleet.time(), repository_def=defs.get_repository_def()) as context:
            data = defs.resolve_schedule_def(f"{MANY}_windows").evaluate_tick(context)
        for request in data.run_requests or ():
            key = {"dagster/run_key": request.run_key}
            instance.create_run_for_job(job, status=done, tags=job.tags | key)
        feeds = (f["feed"] for r in data.run_requests or () for op in r.run_config["ops"].values()
                 for f in op["config"]["feeds"])  # fmt: skip
        return ", ".join(feeds) or data.skip_message or ""

    fleet.no_lake = frozenset({"orders"})
    assert ask(10) == "refunds, returns"
    assert "orders could not be checked" in ask(15)
    fleet.no_lake = frozenset()
    assert ask(20) == "orders"
    assert "no window has closed since the last look" in ask(25)


def test_tick_skips_running_feeds_and_feeds_with_own_schedule(fleet: Fleet, instance: dg.DagsterInstance) -> None:
    fleet.land(request=in_hour(3))
    defs, started = build(fleet.project), dg.DagsterRunStatus.STARTED
    config = fleet_config(SHARED, {"orders": in_hour(0)})
    instance.create_run_for_job(
        defs.resolve_job_def(MANY), status=started, run_config=config, tags={"sluice/fleet": SHARED}
    )
    assert list_tick_requests(fleet, instance) == [dict.fromkeys(NAMES[1:], "00:00-03:00")]
    instance.create_run_for_job(resolve_landing(defs, "refunds"), status=started, tags={FEED_TAG: "refunds"})
    assert list_tick_requests(fleet, instance) == [{"returns": "00:00-03:00"}]
    (fleet.project.feeds_folder / "returns.yaml").write_text(build_feed("returns", "schedule: own\n"))
    assert "orders is left alone" in read_skip_message(fleet, instance)


def test_tick_skips_thrice_failed_window_and_puts_killed_feed_last(fleet: Fleet, instance: dg.DagsterInstance) -> None:
    fleet.land(request=in_hour(3))
    job, failed = build(fleet.project).resolve_job_def(MANY), dg.DagsterRunStatus.FAILURE

    def create_failed_run(**tags: str) -> dg.DagsterRun:
        config = fleet_config(SHARED, dict.fromkeys(NAMES, in_hour(0)))
        all_tags = {FLEET_TAG: SHARED} | {f"sluice/{name}": text for name, text in tags.items()}
        return instance.create_run_for_job(job, status=failed, run_config=config, tags=all_tags)

    for _ in range(3):
        create_failed_run(done="1", failed="orders,refunds", passes="refunds")
    create_failed_run(at_work="refunds")  # killed
    (feeds,) = list_tick_requests(fleet, instance)
    assert list(feeds.items()) == [("returns", "00:00-03:00"), ("orders", "01:00-03:00"), ("refunds", "00:00")]
