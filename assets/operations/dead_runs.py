"""Runs that Dagster shows as under way: finds the dead ones, with the evidence, and ends them.

Promises: a run is called dead because of its lock, its heartbeat in the lake or its process on this machine, or because
no process ever began. To end it means to mark it as failed (canceled, if somebody asked for that), to free its slots
and to say so. No process is killed and no data is touched: if a run still lives, it publishes nothing once
another run has its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from time import time as clock

import dagster as dg

from sluice.assets.instance.instance import end_run, has_died, is_held, let_go, list_processes
from sluice.assets.instance.internals import PARTITION_TAG, RANGE_TAGS, keeps_runs_here, name_job, optional
from sluice.assets.runs.run_config import find_feeds
from sluice.assets.runs.run_session import FEED_TAG
from sluice.assets.specs.asset_specs import landed_key
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.receipts import Life, Verdict
from sluice.pipelines.operating.feed_status import OpenPorts
from sluice.pipelines.publishing.publish import describe_outlook
from sluice.pipelines.util.documents import Derived, Instant, Internal
from sluice.resources.liveness import process_gone
from sluice.resources.project import Project

Status = dg.DagsterRunStatus
BEGUN = (Status.NOT_STARTED, Status.STARTING, Status.STARTED, Status.CANCELING)
"""The statuses in which a killed run stays. A queued run has no process yet: it waits for Dagster's daemon."""

Heartbeats = Callable[[Collection[str]], Mapping[str, Verdict]]
"""Verdicts about runs by their heartbeats in the lake, by run id; none for runs without one or that ended in order."""


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A run that has begun and not ended, as far as Dagster knows. `verdict`: None without evidence."""

    run: Internal[dg.DagsterRun]
    since: Internal[float]
    verdict: Verdict | None

    @property
    def id(self) -> Derived[str]:
        return self.run.run_id

    @property
    def job(self) -> Derived[str]:
        return name_job(self.run)

    @property
    def status(self) -> Derived[str]:
        return self.run.status.value

    @property
    def began(self) -> Derived[Instant]:
        return int(self.since * 1000)

    @property
    def window(self) -> Derived[str | None]:
        return self.run.tags.get(PARTITION_TAG) or self.run.tags.get(RANGE_TAGS[0])

    @property
    def title(self) -> str:
        """The assets of the run, or its job and feed, and its window."""
        feed = "" if self.run.asset_selection else self.run.tags.get(FEED_TAG, "")
        return " ".join(filter(None, [self.job, feed, self.window]))

    @property
    def is_dead(self) -> bool:
        return self.verdict is not None and self.verdict.dead


def under_way(
    instance: dg.DagsterInstance, project: Project, heartbeats: Heartbeats, feed: str | None = None
) -> list[UnderWay]:
    """Every run that has begun and not ended, the oldest first; with `feed`, only those of that feed."""
    records = instance.get_run_records(dg.RunsFilter(statuses=list(BEGUN)), ascending=True)
    mine = [r for r in records if feed is None or find_feeds(r.dagster_run, {feed: None}, {landed_key(feed): feed})]
    locks = {r.dagster_run.run_id: _by_lock(instance, project, r.dagster_run.run_id) for r in mine}
    beating = heartbeats([run for run, verdict in locks.items() if verdict is None])
    return [_judge(instance, r, locks[run] or beating.get(run)) for r in mine for run in (r.dagster_run.run_id,)]


def end(instance: dg.DagsterInstance, project: Project, stuck: UnderWay) -> tuple[str, ...]:
    """End the run in Dagster. Returns the pools that this frees. No error if the run has ended in between."""
    freed = pools(instance, stuck.run)
    why = stuck.verdict.why if stuck.verdict else "no evidence that it is alive"
    end_run(instance, stuck.id, f"ended by `sluice unstick`: {why}; the next run goes on")
    let_go(project.dagster_home, stuck.id)
    return freed


def pools(instance: dg.DagsterInstance, run: dg.DagsterRun) -> tuple[str, ...]:
    """The pools that other runs cannot have while this run counts as under way."""
    concurrency = run.run_op_concurrency
    pools = set(concurrency.all_pools or ()) if concurrency else set()
    log = instance.event_log_storage
    if log.supports_global_concurrency_limits:
        infos = log.get_concurrency_infos(sorted(log.get_concurrency_keys()))
        pools |= {pool for pool, info in infos.items() if run.run_id in info.active_run_ids | info.pending_run_ids}
    return tuple(sorted(pools))


def free_leaked_slots(instance: dg.DagsterInstance) -> tuple[str, ...]:
    """Free the slots of runs that have ended or are no longer known. Returns the ids of those runs."""
    log = instance.event_log_storage
    holding: list[str] = []
    with optional():  # Dagster+ frees slots itself, and refuses the question
        holding = sorted(log.get_concurrency_run_ids()) if log.supports_global_concurrency_limits else []
    ended = [i for i in holding if (run := instance.get_run_by_id(i)) is None or run.is_finished]
    for run_id in ended:
        log.free_concurrency_slots_for_run(run_id)
    return tuple(ended)


def queued_runs(instance: dg.DagsterInstance) -> int:
    """Runs that wait for Dagster's daemon to start them."""
    return instance.get_runs_count(dg.RunsFilter(statuses=[Status.QUEUED]))


# -- heartbeats in the lakes


@dataclass(frozen=True, slots=True)
class LeftBatch:
    """A live batch that a run began: its feed, its id, its progress, and the commands that finish it or give it up."""

    feed: str
    batch: int
    request: str
    progress: str
    remedy: tuple[str, ...]


@dataclass(frozen=True)
class Lakes:
    """The ledgers and heartbeats of all feeds. Kafka is not asked."""

    feeds: Collection[Feed]
    open_ports: OpenPorts

    def heartbeats(self, runs: Collection[str]) -> Mapping[str, Verdict]:
        """Returns a verdict for each run by its heartbeats; one in any lake proves it alive. See `Heartbeats`."""
        by_run: dict[str, Verdict] = {}
        for feed in self.feeds if runs else ():
            with self.open_ports(feed) as ports:
                owners = [o for o in ports.liveness.owners() if o.run in runs]
                verdicts = ports.liveness.judge(owners)
            for o in owners:
                if o.run not in by_run or not verdicts[o.token].dead:
                    by_run[o.run] = verdicts[o.token]
        return by_run

    def left_by(self, run: str) -> tuple[LeftBatch, ...]:
        """The live batches that the run owns."""
        return tuple(batch for feed in self.feeds for batch in self._find_batches(feed, run))

    def _find_batches(self, feed: Feed, run: str) -> list[LeftBatch]:
        with self.open_ports(feed) as ports:
            live = Ledger(ports.lake, feed.stored, ports.clock).read().live()
            mine = [b for b in live if b.owner.run == run]
            return [
                LeftBatch(feed.name, b.id, str(b.request), *describe_outlook(ports.lake, feed.stored, b)) for b in mine
            ]


# -- evidence


def _build_verdict(dead: bool, why: str) -> Verdict:
    return Verdict(Life.DEAD if dead else Life.ALIVE, why)


def _by_lock(instance: dg.DagsterInstance, project: Project, run: str) -> Verdict | None:
    home = project.dagster_home
    if is_held(home, run):
        return _build_verdict(False, "its process holds its lock")
    is_dead = has_died(instance, home, run)
    if is_dead is None:
        return None
    if is_dead:
        return _build_verdict(True, "its process is gone: it let go of its lock")
    return _build_verdict(False, "its process goes on; that of a step is gone")


def _judge(instance: dg.DagsterInstance, record: dg.RunRecord, verdict: Verdict | None) -> UnderWay:
    since = record.start_time or record.create_timestamp.timestamp()
    return UnderWay(record.dagster_run, since, verdict or _by_process(instance, record))


def _by_process(instance: dg.DagsterInstance, record: dg.RunRecord) -> Verdict | None:
    """By the process that Dagster noted. It is a process of this machine if runs are kept in a file of this machine."""
    noted = next(list_processes(instance, record.dagster_run.run_id), None)
    if noted is None:
        # It was launched and never had a process: Dagster has a time limit for that.
        bound, run = instance.run_monitoring_start_timeout_seconds, record.dagster_run
        if run.status not in (Status.NOT_STARTED, Status.STARTING) or not bound:
            return None
        launched = instance.get_run_stats(run.run_id).launch_time if run.status is Status.STARTING else None
        age = clock() - (launched or record.create_timestamp.timestamp())
        return _build_verdict(age > bound, f"it was launched {age:.0f} s ago, and no process of it has begun")
    if not keeps_runs_here(instance):
        return None
    pid, at = noted
    is_dead = process_gone(pid, at)
    return _build_verdict(
        is_dead, f"its process (pid {pid}) {'is gone from' if is_dead else 'is there on'} this machine"
    )
