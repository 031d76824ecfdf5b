"""The job `catch_up`: lands any request of the feed that its configuration names, then commits.

It reports the windows that it completes. One step does both, so a run that is executed again repeats both.
"""

# No `from __future__ import annotations` here: Dagster reads the annotation of `context` itself, not as text.

from collections.abc import Iterator
from typing import Any

import dagster as dg

from sluice.assets.runs.run_config import CATCH_UP, LAND, FeedConfig
from sluice.assets.runs.run_session import RunSession
from sluice.assets.steps.commit_step import commit_step
from sluice.assets.steps.land_step import land_step


def catch_up_job(session: RunSession) -> dg.JobDefinition:
    """Returns the job. It belongs to no pool: a second run of a feed waits for the first, or fails."""

    @dg.op(name=LAND, config_schema=FeedConfig.to_config_schema().as_field(), out=dg.Out(dg.Nothing))
    def land_and_commit(context: dg.OpExecutionContext) -> Iterator[Any]:
        config = FeedConfig(**context.op_config)
        session.tag_feed(context, config.feed)
        yield from session.steps.execute(context, land_step(context, session, config.feed, config))
        yield from commit_step(context, session, config.feed)
        yield dg.Output(None)

    @dg.job(
        name=CATCH_UP,
        description="Land the pending offsets of a feed, or given windows or offsets, then commit.",
        executor_def=dg.in_process_executor,
    )
    def catch_up() -> None:
        land_and_commit()

    return catch_up
