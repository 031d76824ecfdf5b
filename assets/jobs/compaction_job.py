"""The job `compact_<feed>`: merges small files of complete windows into few. It changes no asset and no row.

It waits for no run of the feed and delays none: the ledger's reservation is the guard. Only one compaction runs at a
time, over all feeds, since each takes the memory that its feed allows.
"""

# No `from __future__ import annotations` here: Dagster reads the annotation of `config` itself, not as text.

from collections.abc import Iterator
from typing import Any

import dagster as dg
from pydantic import Field

from sluice.assets.instance.instance import with_dagster_liveness
from sluice.assets.runs.run_session import FEED_TAG, RunSession
from sluice.assets.steps.table_step import bring_up_table
from sluice.pipelines.errors import UsageError
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.maintenance.compaction import Compacted, compact
from sluice.pipelines.model.receipts import count_files
from sluice.pipelines.planning.windows import check_aligned
from sluice.pipelines.util.units import parse_window, show_window
from sluice.resources.liveness import new_owner

POOL = "sluice_compaction"


class CompactConfig(dg.Config):
    """Which windows to compact. By default: all complete ones, and rows outside windows."""

    since: str = Field(default="", description="All windows from this one on, such as 2026-11-20T14:00.")
    until: str = Field(default="", description="All windows up to this one, which is not included.")

    def windows(self, settings: WindowSettings) -> list[int] | None:
        """The windows' starts (ms); None: all. Raises UsageError."""
        if not (self.since or self.until):
            return None
        first, last = _window(self.since, "since", settings), _window(self.until, "until", settings)
        return list(range(first, last, settings.length))


def _window(text: str, name: str, settings: WindowSettings) -> int:
    try:
        start = parse_window(text)
    except ValueError as error:
        raise UsageError(f"{name}: {text!r} {error}", remedy="name both, or neither") from None
    check_aligned(start, settings)
    return start


_CONFIG = CompactConfig.to_config_schema().as_field()
"""Made once: otherwise Dagster would infer it again for each op that is annotated with it."""


def compact_job(feed: str, session: RunSession) -> dg.JobDefinition:
    """Merge the feed's small files, when somebody or their own schedule runs the job."""

    @dg.op(
        name=f"{feed}__compact",
        config_schema=_CONFIG,
        pool=POOL,
        out=dg.Out(dg.Nothing),
    )
    def merge(context: dg.OpExecutionContext) -> Iterator[Any]:
        yield from compact_step(context, session, feed)

    @dg.job(
        name=f"compact_{feed}",
        description=f"Merge the small files of {feed}'s complete windows. Rows stay the same; Kafka is not asked.",
        tags={FEED_TAG: feed},
        executor_def=dg.in_process_executor,
    )
    def job() -> None:
        merge()

    return job


def compact_step(context: dg.OpExecutionContext, session: RunSession, name: str) -> Iterator[Any]:
    """Merge small files, and report how many. Raises dagster.Failure, or an interrupt."""
    with session.step(context, name):
        feed = session.feed(name)
        asked = CompactConfig(**context.op_config).windows(feed.window)
        with session.open_ports(feed) as opened:
            edges, report = with_dagster_liveness(opened, context.instance), session.reporter(context.log)
            done = compact(feed, edges, asked, new_owner(context.run.run_id), report)
    yield from bring_up_table(context, session, name)
    yield dg.Output(None, metadata=_compaction_metadata(done))


def _compaction_metadata(done: Compacted) -> dict[str, Any]:
    made = [r for _, r in done.merged if r is not None]
    return {
        "files_before": sum(len(m.parts) for m, _ in done.merged),
        "files_after": count_files(made),
        "bytes_before": sum(m.bytes for m, _ in done.merged),
        "bytes_after": sum(p.bytes for r in made for p in r.parts),
        "batches": ", ".join(map(str, done.batches)) or "none",
        "left_alone": ", ".join(show_window(w) for w in done.incomplete) or "none",
        **({"in_the_way": "; ".join(map(str, done.met))} if done.met else {}),
    }
