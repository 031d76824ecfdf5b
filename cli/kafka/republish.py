"""`sluice republish`: send landed or quarantined rows to a topic again, each once and in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app.invocation import FeedName, Session, command
from sluice.cli.app.parameters import option
from sluice.cli.options import parsing
from sluice.cli.options.request_options import ChangeOptions, Offsets
from sluice.cli.options.window_options import WindowOptions
from sluice.cli.terminal import output
from sluice.cli.terminal.output import copyable, facts, good, heading, limit_rows, table, warn
from sluice.cli.terminal.text_layout import count, rate, seconds, size
from sluice.pipelines.errors import Failed, Unknown, UsageError
from sluice.pipelines.republishing import CODEC_NAMES
from sluice.pipelines.util.units import many

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.operating.republish import RepublishPreview, RepublishRequest
    from sluice.pipelines.ports import Engine
    from sluice.pipelines.republishing.lanes import LaneSender, Sent
    from sluice.pipelines.republishing.republish_plan import Wishes


def register(app: typer.Typer) -> None:
    command(app)(republish)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The rows to send, and how, as typed. A plan keeps all of it."""

    topic: Annotated[str | None, option("--topic", "TOPIC", "The topic to send to. It must exist.")] = None
    windows: WindowOptions = field(default_factory=WindowOptions)
    offsets: Offsets = None
    quarantined: Annotated[
        bool, typer.Option("--quarantined", help="Send quarantined records instead of landed rows.")
    ] = False
    where: Annotated[
        str | None, option("--where", "SQL", "Only rows that meet this condition: DuckDB SQL over their columns.")
    ] = None
    keep_partitions: Annotated[
        bool, typer.Option("--keep-partitions", help="Send each record to the partition of the same number.")
    ] = False
    partition_by: Annotated[
        str | None,
        option(
            "--partition-by",
            "key|round-robin|MODULE:FUNCTION",
            "By key, as Kafka's Java producer does; round-robin; or by your function.",
            show_default="key",
        ),
    ] = None
    keep_timestamps: Annotated[
        bool,
        typer.Option("--keep-timestamps", help="Keep the records' timestamps; default: the time of sending."),
    ] = False
    headers: Annotated[
        bool, typer.Option("--headers", help="Add headers with the old topic, partition and offset.")
    ] = False
    name: Annotated[str | None, option("--id", "NAME", "Name of the republish; default: a hash of its plan.")] = None
    into_source: Annotated[
        bool, typer.Option("--into-source", help="Allow a topic that the feed reads: the records land again.")
    ] = False

    def list_given(self) -> dict[str, Any]:
        """The options that a plan keeps, except the topic, by name."""
        return {
            "--window": self.windows.window, "--from": self.windows.start, "--to": self.windows.end,
            "--offsets": self.offsets, "--quarantined": self.quarantined, "--where": self.where,
            "--keep-partitions": self.keep_partitions, "--partition-by": self.partition_by,
            "--keep-timestamps": self.keep_timestamps, "--headers": self.headers, "--id": self.name,
            "--into-source": self.into_source,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class CarryOutOptions:
    """How a republish is carried out, as typed."""

    per_second: Annotated[
        str | None,
        option("--rate", "N|SIZE", "Limit in records (5000) or bytes (5MB) per second.", show_default="no limit"),
    ] = None
    compression: Annotated[str, option("--compression", "CODEC", f"{', '.join(CODEC_NAMES)}.", show_default=True)] = (
        "lz4"
    )
    here: Annotated[bool, typer.Option("--here", help="Send from this process alone, without Spark.")] = False


def republish(
    session: Session,
    feed: FeedName,
    *,
    options: PlanOptions,
    resume: Annotated[str | None, option("--resume", "NAME", "Continue this republish as planned.")] = None,
    sending: CarryOutOptions,
    change: ChangeOptions,
) -> None:
    """Send landed rows back to Kafka, each once and in order.

    It asks for confirmation on a terminal; elsewhere it needs --yes. Rows of raw feeds are sent byte for byte; rows of
    typed feeds are encoded from their columns, in the feed's format (sluice docs republishing lists the losses).
    Quarantined records are sent with their original bytes.

    It sends in transactions, each with its progress. After a crash, run the same command again: consumers of committed
    records see each record once. A map from old to new offsets stays in the lake (sluice explain). Large republishes of
    several partitions are sent by Spark tasks, in parallel.

    $ sluice republish orders --topic orders-again --window 2026-11-20T14 --dry-run
    $ sluice republish orders --topic orders-again --window 2026-11-20T14 --keep-partitions --keep-timestamps
    $ sluice republish orders --topic orders-again --from 2026-11-20 --to 2026-11-21 --headers --rate 5000 --yes
    $ sluice republish orders --topic orders-fixed --offsets orders:0:100-200 --quarantined
    $ sluice republish orders --topic orders-de --window 2026-11-20T14 --where "country = 'DE'"
    $ sluice republish orders --topic orders-again --window 2026-11-20T14 --partition-by places.py:by_country
    $ sluice republish orders --resume 1f0c2a9b77de
    $ sluice republish github.push --topic pushes --window 2026-11-20T14
    """
    from sluice.pipelines.republishing.lanes import check_resumed, pace_of
    from sluice.resources import republish_tasks

    definition, pace = session.find_dataset(feed), pace_of(sending.per_second or "")
    if sending.compression not in CODEC_NAMES:
        raise UsageError(
            f"unknown codec --compression {sending.compression!r}", remedy=f"use one of {', '.join(CODEC_NAMES)}"
        )
    if (options.topic is None) is (resume is None):
        raise UsageError("give either --topic or --resume", remedy="see sluice republish --help")
    if resume is not None:
        check_resumed(options.list_given())
    with session.open_ports(definition) as ports:
        from sluice.pipelines.operating.republish import plan_republish, preview_republish, resume_republish
        from sluice.pipelines.republishing.republish_plan import keep

        if resume is not None:
            plan = resume_republish(definition, resume, ports)
        else:
            request, add_schema = _build_request(definition, ports.clock(), options), republish_tasks.by_own_schema
            plan = plan_republish(definition, request, ports, session.open_target, add_schema)
        # A plan is made without a trace. Only `keep` below writes it, and then --resume continues it after a crash.
        if change.dry_run or not change.yes:
            _preview(session, preview_republish(plan, ports), dry_run=change.dry_run)
        if change.dry_run:
            return
        codec, plan = CODEC_NAMES.index(sending.compression), keep(ports.lake, plan)
        work = republish_tasks.sending(definition, ports.lake, plan, codec, pace, session.project.root)
        _send(session, work, None if sending.here else ports.engine)


def _send(session: Session, work: LaneSender, engine: Engine | None) -> None:
    from sluice.pipelines.republishing.lanes import carry_out

    plan = work.plan
    with session.terminal.progress() as meter:
        try:
            sent = carry_out(work, engine, meter)
        except (Failed, Unknown):
            again = f"sluice republish {plan.feed} --resume {plan.id}"
            session.terminal.note(f"committed records stay, and no record is sent twice; continue with: {again}")
            raise
    session.terminal.show(*_format_sent(sent))
    session.terminal.print_document(sent, applied=True)


# -- as typed


def _build_request(feed: Feed, now: int, options: PlanOptions) -> RepublishRequest:
    """Raises UsageError."""
    from sluice.pipelines.model.receipts import PartKind
    from sluice.pipelines.operating.republish import RepublishRequest
    from sluice.pipelines.republishing.lanes import name_of, way_of
    from sluice.pipelines.republishing.republish_plan import Wishes

    name, kind = name_of(options.name or ""), PartKind.QUARANTINED if options.quarantined else PartKind.LANDED
    by, function = way_of(options.keep_partitions, options.partition_by or "")
    settings = (options.keep_timestamps, options.headers, options.where or "", function)
    wishes = Wishes(options.topic or "", 0, kind, by, *settings)
    offsets, windows = options.offsets, options.windows
    if offsets and windows.any:
        raise UsageError("--offsets together with windows", remedy="use either --offsets or windows")
    if not offsets:
        if windows.start and not windows.end:
            raise UsageError("--from without --to", remedy="add the end: --to 2026-11-21T00")
        if windows.end and not windows.start:
            raise UsageError("--to without --from", remedy="add the start: --from 2026-11-20T00")
        if not windows.any:
            raise UsageError("no windows or offsets", remedy="add --window, --from and --to, or --offsets")
    starts = () if offsets else windows.parse(feed.window, now)
    ranges = [parsing.parse_offset_range(text) for text in offsets or ()]
    return RepublishRequest(wishes, starts, ranges, name, options.into_source)


# -- for people


def _preview(session: Session, preview: RepublishPreview, *, dry_run: bool) -> None:
    """Show the plan, and ask for confirmation unless it is a dry run or nothing would be sent."""
    session.terminal.show(*_format_plan(preview))
    if not dry_run:
        if not preview.done and any(s.rows for s in preview.sources):
            session.terminal.confirm(f"Send these rows to {preview.plan.wishes.to}?")
        return
    session.terminal.show(*([] if preview.done else [output.format_dry_run("nothing was sent")]))
    session.terminal.print_document(preview, applied=False)


def _format_plan(preview: RepublishPreview) -> Iterator[RenderableType]:
    plan, amounts = preview.plan, preview.sources
    yield heading(f"Republish of {plan.rows_name}", plan.id)
    yield facts(*_list_facts(plan.wishes))
    if not any(a.rows for a in amounts):
        yield good(f"nothing {plan.wishes.kind} lies there: nothing would be sent")
        return
    rows = [
        [
            f"{s.source.topic}:{s.source.partition}",
            ", ".join(map(str, s.source.ranges)),
            count(s.rows),
            size(s.file_bytes),
        ]
        for s in amounts
    ]
    total = ["in all", "", count(sum(a.rows for a in amounts)), size(sum(a.file_bytes for a in amounts))]
    yield table(["from", "offsets", "rows", "files"], [*limit_rows(rows), total], right="rows files", optional="files")
    fewer = "only some rows" if plan.wishes.where else "only some offsets of one"
    yield Text(f"  Rows and files are counted by offset range: if {fewer} are requested, fewer are sent.")
    if preview.done:
        yield good("already sent; use another name with --id to send it again")


def _list_facts(wishes: Wishes) -> list[tuple[str, str]]:
    how = {
        "partition": "same number",
        "key": "by key, as Kafka's Java producer does; round-robin without a key",
        "round-robin": "round-robin",
        "function": f"as {wishes.function} says",
    }
    return [
        ("to", f"{wishes.to}, {many(wishes.partitions, 'partition')}"),
        ("rows", str(wishes.kind) + (f", where {wishes.where}" if wishes.where else "")),
        ("partition", how[wishes.by]),
        ("times", "the records' own" if wishes.keep_timestamps else "the time of sending"),
        ("headers", "the records' own" + (", and the old topic, partition and offset" if wishes.headers else "")),
    ]


def _format_sent(sent: Sent) -> Iterator[RenderableType]:
    plan = sent.plan
    yield heading(f"Republish of {plan.rows_name}", plan.id)
    if sent.done_before:
        yield good(f"already done: {many(sent.records_in_all, 'record')} in {plan.wishes.to}")
        return
    yield good(f"{many(sent.records, 'record')} sent to {plan.wishes.to}")
    yield facts(
        ("bytes", f"{size(sent.bytes)} before compression"),
        ("transactions", count(sent.transactions)),
        ("took", f"{seconds(sent.took)}, {rate(sent.records, sent.took)}"),
    )
    if sent.throttled_ms:
        yield warn(
            f"throttled by brokers for {seconds(sent.throttled_ms / 1000)}: a quota (producer_byte_rate or"
            " request_percentage) limits it; kafka-configs shows it"
        )
    if sent.records_in_all != sent.records:
        yield Text(f"  With earlier runs of this republish: {many(sent.records_in_all, 'record')}.")
    rows = [[f"{plan.wishes.to}:{p}", count(n)] for p, n in sorted(sent.records_by_partition.items())]
    if rows:
        yield table(["partition", "records"], limit_rows(rows), right="records")
    yield Text("  To find a record:")
    first = plan.sources[0]
    yield copyable(f"sluice explain {plan.rows_name} {first.key}:{first.ranges[0].start}")
