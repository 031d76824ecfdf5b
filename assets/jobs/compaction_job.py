"""The job `compact_<schedule>_feeds`: merges small files of complete windows of a feed. It changes no asset and no row.
The schedule `maintain_<schedule>_feeds` runs it each night for each feed, and retires windows beyond its `retention`.

It neither waits for runs of the feed nor delays them: the ledger's reservation is the guard. One compaction runs at a
time, over all feeds, since each takes the memory that its feed allows.
"""

# No `from __future__ import annotations` here: Dagster reads the annotation of `config` itself, not as text.

from collections.abc import Iterator, Sequence
from typing import Any

import dagster as dg
from pydantic import Field

from sluice.assets.instance.instance import with_dagster_liveness
from sluice.assets.runs.run_config import list_windows
from sluice.assets.runs.run_session import RunSession
from sluice.assets.steps.table_step import sync_table
from sluice.pipelines.errors import UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.maintenance.compaction import compact
from sluice.pipelines.maintenance.expiry import request_retention, retire
from sluice.pipelines.model.receipts import count_files
from sluice.resources.liveness import new_owner

POOL = "sluice_compaction"


class CompactConfig(dg.Config):
    """The windows of a feed to compact. By default: all complete ones, and rows outside windows."""

    feed: str = Field(description="The feed.")
    since: str = Field(default="", description="The first window, such as 2026-11-20T14:00.")
    until: str = Field(default="", description="The end (exclusive).")
    expires: bool = Field(default=False, description="Retire the windows beyond the feed's `retention`, too.")

    def windows(self, settings: WindowSettings) -> list[int] | None:
        """Returns the windows' starts (ms); None: all. Raises UsageError."""
        if not (self.since or self.until):
            return None
        if not (self.since and self.until):
            raise UsageError("`since` and `until` go together", remedy="name both, or neither")
        return list(list_windows(self.since, self.until, settings))


_CONFIG = CompactConfig.to_config_schema().as_field()
"""Built once: otherwise Dagster would infer it for each op."""


def compact_job(schedule: str, session: RunSession) -> dg.JobDefinition:
    """Returns the job that merges the small files of a feed of this schedule."""
    name = f"compact_{schedule}_feeds"

    @dg.op(name=f"{name}__compact", config_schema=_CONFIG, pool=POOL, out=dg.Out(dg.Nothing))
    def merge(context: dg.OpExecutionContext) -> Iterator[Any]:
        yield from compact_step(context, session)

    @dg.job(
        name=name,
        description="Merge the small files of a feed's complete windows. Rows stay the same. It needs no Kafka.",
        executor_def=dg.in_process_executor,
    )
    def job() -> None:
        merge()

    return job


def compact_step(context: dg.OpExecutionContext, session: RunSession) -> Iterator[Any]:
    """Merge small files, and report their number. Raises dagster.Failure, or an interrupt."""
    config = CompactConfig(**context.op_config)
    name = config.feed
    session.tag_feed(context, name)
    with session.step(context, name):
        feed = session.feed(name)
        windows = config.windows(feed.window)
        with session.open_ports(feed) as opened:
            ports, report = with_dagster_liveness(opened, context.instance), session.reporter(context.log)
            done = compact(feed, ports, windows, new_owner(context.run.run_id), report)
            request = request_retention(feed, ports.clock()) if config.expires else None
            retired = None
            if request and Ledger(ports.lake, feed.stored, ports.clock).read().known():
                retired = retire(feed, ports, request, context.run.run_id, report)
    with session.hold_lock(context):
        yield from sync_table(context, session, name)
    receipts = [r for _, r in done.merged if r is not None]
    yield dg.Output(
        None,
        metadata={
            "files_before": sum(len(m.parts) for m, _ in done.merged),
            "files_after": count_files(receipts),
            "bytes_before": sum(m.bytes for m, _ in done.merged),
            "bytes_after": sum(p.bytes for r in receipts for p in r.parts),
            "batches": ", ".join(map(str, done.batches)) or "none",
            **({"expired_files": count_files(retired.expiry.receipts)} if retired else {}),
            "left_alone": ", ".join(map(feed.window.name, done.incomplete)) or "none",
            **({"conflicts": "; ".join(map(str, done.met))} if done.met else {}),
        },
    )


def schedule_maintenance(schedule: str, feeds: Sequence[Feed]) -> dg.ScheduleDefinition:
    """Returns the schedule that requests a run for each of these feeds, at night. It is off by default."""
    job = f"compact_{schedule}_feeds"

    @dg.schedule(
        name=f"maintain_{schedule}_feeds",
        job_name=job,
        cron_schedule="0 3 * * *",
        execution_timezone="UTC",
        description="Retires the windows beyond each feed's `retention`, and merges small files. At 3:00 UTC.",
    )
    def request_maintenance(context: dg.ScheduleEvaluationContext) -> list[dg.RunRequest]:
        day = f"{context.scheduled_execution_time:%Y-%m-%d}"
        config = {f.name: {"ops": {f"{job}__compact": {"config": {"feed": f.name, "expires": True}}}} for f in feeds}
        return [dg.RunRequest(f"{job} {name} {day}", run_config=own) for name, own in config.items()]

    return request_maintenance
