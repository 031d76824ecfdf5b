"""The job `republish_<schedule>_feeds`: landed or quarantined rows of a feed go to a topic again. It
materializes `<feed>/republished`.

That asset, and the lineage from it to the topics, show once something was republished: only then it is known where to.
It waits for no run of the feed and delays none: it reads published rows, and changes neither ledger nor rows.
"""

# No `from __future__ import annotations` here: Dagster reads the annotation of `config` itself, not as text.

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from sluice.assets.runs.run_config import list_windows
from sluice.assets.runs.run_session import RunSession
from sluice.pipelines.errors import SluiceError, UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import paths
from sluice.pipelines.model.plans import AskedRange
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.ports import Engine, Ports
from sluice.pipelines.republishing import CODEC_NAMES

if TYPE_CHECKING:  # only who sends needs them, not who loads definitions
    from sluice.pipelines.operating.republish import RepublishRequest
    from sluice.pipelines.republishing.lanes import Sent
    from sluice.pipelines.republishing.republish_plan import Republish

POOL = "sluice_republish"
_UNPLANNED = ("feed", "resume", "rate", "compression", "here")
"""Settings of a run that are not part of the plan."""


class SentOffsets(dg.Config):
    """Offsets from `start` up to `end`, which is not included."""

    topic: str
    partition: int
    start: int
    end: int


class RepublishConfig(dg.Config):
    """The rows to send, and their target. Equal requests are one republish: the next run continues an ended one."""

    feed: str = Field(description="The feed, or `feed.output`.")
    to: str = Field(default="", description="The topic to send to. It must be there.")
    window: str = Field(default="", description="Send this window, such as 2026-11-20T14:00.")
    until: str = Field(default="", description="With `window`: all windows up to this one, which is not included.")
    offsets: list[SentOffsets] = Field(default=[], description="Send exactly these ranges, instead of windows.")
    quarantined: bool = Field(default=False, description="Send the records in quarantine, not those that landed.")
    where: str = Field(default="", description="Only rows that meet this condition, in DuckDB's SQL.")
    keep_partitions: bool = Field(default=False, description="Each record to the partition of its old number.")
    partition_by: str = Field(default="", description="key (the default), round-robin or MODULE:FUNCTION.")
    keep_timestamps: bool = Field(default=False, description="Records keep their times.")
    headers: bool = Field(default=False, description="Add headers with the old topic, partition and offset.")
    rate: str = Field(default="", description="Maximum rate per second, in records (5000) or bytes (5MB).")
    compression: str = Field(default="lz4", description=", ".join(CODEC_NAMES))
    name: str = Field(default="", description="A name; without it, equal wishes have one name.")
    resume: str = Field(default="", description="Go on with this republish, as planned.")
    here: bool = Field(default=False, description="Send from this process alone, without Spark.")
    into_source: bool = Field(default=False, description="The feed may read from the topic: the sent rows land again.")

    def build_request(self, feed: Feed) -> "RepublishRequest":
        """Raises UsageError."""
        from sluice.pipelines.operating.republish import RepublishRequest
        from sluice.pipelines.republishing.lanes import name_of, way_of
        from sluice.pipelines.republishing.republish_plan import Wishes

        kind = PartKind.QUARANTINED if self.quarantined else PartKind.LANDED
        by, function = way_of(self.keep_partitions, self.partition_by)
        wishes = Wishes(self.to, 0, kind, by, self.keep_timestamps, self.headers, self.where, function)
        if self.offsets and (self.window or self.until):
            raise UsageError("`offsets` and windows together", remedy="`offsets` names exactly what to send")
        offsets = [AskedRange(o.topic, o.partition, o.start, o.end) for o in self.offsets]
        if not (offsets or self.window):
            raise UsageError("no rows are selected", remedy="name `window`, `window` and `until`, or `offsets`")
        windows = () if offsets else list_windows(self.window, self.until, feed.window)
        return RepublishRequest(wishes, windows, offsets, name_of(self.name), self.into_source)

    @property
    def codec(self) -> int:
        if self.compression not in CODEC_NAMES:
            raise UsageError(f"{self.compression!r} is no codec", remedy=f"one of {', '.join(CODEC_NAMES)}")
        return CODEC_NAMES.index(self.compression)


_CONFIG = RepublishConfig.to_config_schema().as_field()
"""Made once: otherwise Dagster would infer it again for each op that is annotated with it."""


def republish_job(schedule: str, session: RunSession) -> dg.JobDefinition:
    """Returns the job that sends rows of a feed of this schedule to a topic again."""
    name = f"republish_{schedule}_feeds"

    @dg.op(name=f"{name}__republish", config_schema=_CONFIG, pool=POOL, out=dg.Out(dg.Nothing))
    def send(context: dg.OpExecutionContext) -> Iterator[Any]:
        yield from republish_step(context, session)

    @dg.job(
        name=name,
        description="Send landed or quarantined rows of a feed to a topic again, each once and in order. Configure the"
        " rows and the topic in the Launchpad; run the same again to go on after a failure.",
        executor_def=dg.in_process_executor,
    )
    def job() -> None:
        send()

    return job


def republish_step(context: dg.OpExecutionContext, session: RunSession) -> Iterator[Any]:
    """Send the rows of the run's configuration, and report it. Raises dagster.Failure, or an interrupt."""
    from sluice.pipelines.republishing.lanes import carry_out, check_resumed, pace_of
    from sluice.resources.republish_tasks import sending
    from sluice.resources.spark import executors

    config = RepublishConfig(**context.op_config)
    name, *_ = config.feed.split(".")
    session.tag_feed(context, name)
    with session.step(context, name):
        feed = session.find_dataset(config.feed)
        if bool(config.to) is bool(config.resume):
            raise UsageError("`to` or `resume`, and not both", remedy="say where to send, or which republish goes on")
        if config.resume:
            check_resumed({setting: value for setting, value in config if setting not in _UNPLANNED})
        codec, pace = config.codec, pace_of(config.rate)
        with session.open_ports(feed) as ports:
            plan = _plan(feed, config, ports)
            key = session.keys(name).republished
            report = session.reporter(context.log)
            # The archive of packages is made before the transactions begin: the first time takes half a minute.
            executors.prepare(feed, report)
            work = sending(feed, ports.lake, plan, codec, pace, session.project.root)
            try:
                with _cancel_on_interrupt(ports.engine):
                    sent = carry_out(work, None if config.here else ports.engine, report)
            # The plan and the maps of sent records stay in the lake: the observation has the command that goes on.
            except SluiceError as error:
                again = f"run this again, or: sluice republish {name} --resume {plan.id}"
                metadata = _describe_wishes(plan, ports) | {"failed": error.message, "go_on": again}
                yield dg.AssetObservation(key, description="Not finished.", metadata=metadata)
                raise
    yield dg.AssetMaterialization(key, metadata=_describe_wishes(plan, ports) | _describe_sent(sent))
    yield dg.Output(None)


def _plan(feed: Feed, config: RepublishConfig, ports: Ports) -> "Republish":
    from sluice.pipelines.operating.republish import plan_republish, resume_republish
    from sluice.pipelines.republishing.republish_plan import keep
    from sluice.resources.open_ports import open_target
    from sluice.resources.republish_tasks import by_own_schema

    if config.resume:
        return resume_republish(feed, config.resume, ports)
    return keep(ports.lake, plan_republish(feed, config.build_request(feed), ports, open_target, by_own_schema))


@contextmanager
def _cancel_on_interrupt(engine: Engine) -> Iterator[None]:
    """Cancel the engine's work on an interrupt."""
    try:
        yield
    except (KeyboardInterrupt, dg.DagsterExecutionInterruptedError):
        engine.cancel()
        raise


def _describe_wishes(plan: "Republish", ports: Ports) -> dict[str, Any]:
    w = plan.wishes
    return {
        "republish": plan.id,
        "of": plan.rows_name,
        "to": w.to,
        "kind": str(w.kind),
        "offsets": plan.offsets,
        "partition_by": w.function or str(w.by),
        "keep_timestamps": w.keep_timestamps,
        **({"where": w.where} if w.where else {}),
        "map": dg.MetadataValue.path(ports.lake.locate(paths.republish_map_folder(plan.feed, plan.id))),
    }


def _describe_sent(sent: "Sent") -> dict[str, Any]:
    to = sent.plan.wishes.to
    rows = [
        dg.TableRecord({"partition": f"{to}:{p}", "records": n}) for p, n in sorted(sent.records_by_partition.items())
    ]
    columns = [dg.TableColumn("partition", "string"), dg.TableColumn("records", "int")]
    return {
        "records": sent.records,
        "records_in_all": sent.records_in_all,
        "done_before": sent.done_before,
        "bytes": sent.bytes,
        "transactions": sent.transactions,
        "seconds": sent.took,
        "throttled_seconds": sent.throttled_ms / 1000,
        **({"partitions": dg.MetadataValue.table(rows, dg.TableSchema(columns))} if rows else {}),
        "audit": f"sluice audit {sent.plan.feed} --republished {sent.plan.id}",
    }
