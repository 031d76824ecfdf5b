"""`sluice republish`: send landed or quarantined rows to a topic again, each once and in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app.invocation import FeedName, Session, command
from sluice.cli.options import parsing, window_options
from sluice.cli.options.request_options import DryRun, Offsets, Yes
from sluice.cli.options.window_options import From, To, Window
from sluice.cli.terminal import output
from sluice.cli.terminal.number_format import count, rate, seconds, size
from sluice.cli.terminal.output import copyable, facts, good, heading, limit_rows, table, warn
from sluice.pipelines.errors import Failed, Unknown, UsageError
from sluice.pipelines.util.units import many

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.ledger import Ledger, State
    from sluice.pipelines.ports import Ports
    from sluice.pipelines.republishing.lanes import Sent
    from sluice.pipelines.republishing.republish_plan import Republish, Wishes
    from sluice.pipelines.republishing.send_lane import Pace

_CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


def register(app: typer.Typer) -> None:
    command(app)(republish)


def republish(
    session: Session,
    feed: FeedName,
    topic: Annotated[
        str | None,
        typer.Option("--topic", metavar="TOPIC", help="The topic to send to. It must exist.", show_default=False),
    ] = None,
    window: Window = None,
    start: From = None,
    end: To = None,
    offsets: Offsets = None,
    quarantined: Annotated[
        bool, typer.Option("--quarantined", help="Send the records that are in quarantine, not those that landed.")
    ] = False,
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            metavar="SQL",
            help="Only rows that meet this condition, in DuckDB's SQL over their columns.",
            show_default=False,
        ),
    ] = None,
    keep_partitions: Annotated[
        bool, typer.Option("--keep-partitions", help="Each record to the partition of its old number.")
    ] = False,
    partition_by: Annotated[
        str | None,
        typer.Option(
            "--partition-by",
            metavar="key|round-robin|MODULE:FUNCTION",
            help="By key, as Kafka's Java producer does; to one after the other; or by a function of yours.",
            show_default="key",
        ),
    ] = None,
    keep_timestamps: Annotated[
        bool,
        typer.Option("--keep-timestamps", help="Records keep their times; without it they get the time of sending."),
    ] = False,
    headers: Annotated[
        bool, typer.Option("--headers", help="Add headers with the old topic, partition and offset.")
    ] = False,
    per_second: Annotated[
        str | None,
        typer.Option(
            "--rate", metavar="N|SIZE", help="Limit of records, or bytes (5MB), a second.", show_default=False
        ),
    ] = None,
    compression: Annotated[str, typer.Option("--compression", metavar="CODEC", help=f"{', '.join(_CODECS)}.")] = "lz4",
    name: Annotated[
        str | None,
        typer.Option(
            "--id", metavar="NAME", help="A name; without it, equal wishes have one name.", show_default=False
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="NAME", help="Go on with this republish, as planned.", show_default=False),
    ] = None,
    into_source: Annotated[
        bool, typer.Option("--into-source", help="Allow a topic that the feed reads: the records land again.")
    ] = False,
    here: Annotated[bool, typer.Option("--here", help="Send from this process alone, without Spark.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Send landed rows back to Kafka, each once and in order.

    Asks for confirmation on a terminal; elsewhere it needs --yes. Rows of raw feeds are sent byte for byte; rows of
    typed feeds are encoded again from their columns, in the feed's format (sluice docs republishing lists what is
    lost). Quarantined records are sent with their own bytes.

    Sends in transactions, each with its progress. After a crash, run the same command again: consumers of committed
    records see each record once. A map from old offsets to new ones stays in the lake (sluice explain). Many records of
    several partitions are sent by tasks of the feed's Spark, in parallel.

    $ sluice republish orders --topic orders-again --window 2026-11-20T14 --dry-run
    $ sluice republish orders --topic orders-again --window 2026-11-20T14 --keep-partitions --keep-timestamps
    $ sluice republish orders --topic orders-again --from 2026-11-20 --to 2026-11-21 --headers --rate 5000 --yes
    $ sluice republish orders --topic orders-fixed --offsets orders:0:100-200 --quarantined
    $ sluice republish orders --topic orders-de --window 2026-11-20T14 --where "country = 'DE'"
    $ sluice republish orders --topic orders-again --window 2026-11-20T14 --partition-by places.py:by_country
    $ sluice republish orders --resume 1f0c2a9b77de
    """
    from sluice.pipelines.republishing.lanes import check_resumed, name_of, pace_of, way_of

    definition, pace = session.feed(feed), pace_of(per_second or "")
    if compression not in _CODECS:
        raise UsageError(f"{compression!r} is no codec", remedy=f"one of {', '.join(_CODECS)}")
    if (topic is None) is (resume is None):
        raise UsageError("give either --topic or --resume", remedy="see sluice republish --help")
    planned = {
        "--window": window, "--from": start, "--to": end, "--offsets": offsets, "--quarantined": quarantined,
        "--where": where, "--keep-partitions": keep_partitions, "--partition-by": partition_by,
        "--keep-timestamps": keep_timestamps, "--headers": headers, "--id": name, "--into-source": into_source,
    }  # fmt: skip
    if resume is not None:
        check_resumed(planned)
    chosen = name_of(name or resume or "")
    by, function = way_of(keep_partitions, partition_by or "")
    with session.open_ports(definition) as edges:
        from sluice.assets.specs.feed_files import remember_target
        from sluice.pipelines.ledger import Ledger
        from sluice.pipelines.model.receipts import PartKind
        from sluice.pipelines.republishing import republish_plan as plans
        from sluice.pipelines.republishing import where as conditions
        from sluice.resources.republish_tasks import by_own_schema

        ledger = Ledger(edges.lake, feed, edges.clock)
        if resume is not None:
            plan = plans.load(edges.lake, feed, chosen)
        else:
            state = ledger.read()
            ranges = _build_request(definition, state, edges.clock(), window, start, end, offsets)
            with session.open_target(definition, topic or "") as target:
                kind = PartKind.QUARANTINED if quarantined else PartKind.LANDED
                settings = (keep_timestamps, headers, where or "", function)
                wishes = plans.Wishes(topic or "", target.partitions(), kind, by, *settings)
            wishes = by_own_schema(wishes, definition, {key.topic for key, _ in ranges})
            plan = plans.plan_republish(
                definition, state, wishes, ranges, edges.clock(), name=chosen, into_source=into_source
            )
        conditions.check(plan.wishes, definition.columns)
        if dry_run or not yes:
            _preview(session, plan, ledger, edges, dry_run=dry_run)
        if dry_run:
            return
        plan = plans.keep(edges.lake, plan)
        remember_target(session.project, feed, plan.wishes.to)
        session.compile()
        _send(session, definition, plan, edges, _CODECS.index(compression), pace, here)


def _send(session: Session, feed: Feed, plan: Republish, edges: Ports, codec: int, pace: Pace, here: bool) -> None:
    from sluice.pipelines.republishing.lanes import carry_out
    from sluice.resources.republish_tasks import sending

    work = sending(feed, edges.lake, plan, codec, pace, session.project.root)
    with session.terminal.progress() as meter:
        try:
            sent = carry_out(work, None if here else edges.engine, meter)
        except (Failed, Unknown):
            again = f"sluice republish {plan.feed} --resume {plan.id}"
            session.terminal.note(f"what was committed stays, and nothing is sent twice; go on with: {again}")
            raise
    session.terminal.show(*_sent_view(sent))
    session.terminal.print_document({"applied": True, **_plan_document(plan), **_sent_document(sent)})


# -- as typed


def _build_request(
    feed: Feed,
    state: State,
    now: int,
    window: Sequence[str] | None,
    start: str | None,
    end: str | None,
    offsets: Sequence[str] | None,
) -> list[Any]:
    """The ranges that the options name."""
    from sluice.pipelines.planning.windows import check_aligned
    from sluice.pipelines.republishing.republish_plan import asked_offsets, asked_windows

    if offsets and (window or start or end):
        raise UsageError("--offsets and windows together", remedy="--offsets names exactly what to send")
    if offsets:
        return asked_offsets(state, [parsing.parse_offset_range(text) for text in offsets])
    if start and not end:
        raise UsageError("--from without --to", remedy="give the end: a republish is planned over fixed windows")
    if end and not start:
        raise UsageError("--to without --from", remedy="give the start: --from 2026-11-20T00")
    if not (window or start):
        raise UsageError("no rows chosen", remedy="give --window, --from and --to, or --offsets")
    chosen = window_options.parse_windows(feed.window, now, window, start, end)
    for start_time in chosen:
        check_aligned(start_time, feed.window)
    return asked_windows(feed, state, chosen)


# -- for people


def _preview(session: Session, plan: Republish, ledger: Ledger, edges: Ports, *, dry_run: bool) -> None:
    """Show the plan, and ask for confirmation unless it is a dry run or nothing would be sent."""
    from sluice.pipelines.lake import paths
    from sluice.pipelines.republishing.republish_rows import Shelf

    shelf = Shelf(edges.lake, ledger, ledger.read(), plan)
    amounts = [shelf.amount(n) for n in range(len(plan.sources))]
    done = edges.lake.get(paths.republish_done_path(plan.feed, plan.id)) is not None
    session.terminal.show(*_plan_view(plan, amounts, done))
    if not dry_run:
        if not done and any(rows for rows, _ in amounts):
            session.terminal.confirm(f"Send these rows to {plan.wishes.to}?")
        return
    session.terminal.show(*([] if done else [output.format_dry_run("nothing was sent")]))
    document = {
        "applied": False,
        "done": done,
        **_plan_document(plan),
        "sources": [
            {
                "topic": s.topic,
                "partition": s.partition,
                "ranges": [list(r) for r in s.ranges],
                "rows": rows,
                "file_bytes": size_,
            }
            for s, (rows, size_) in zip(plan.sources, amounts, strict=True)
        ],
    }
    session.terminal.print_document(document)


def _plan_view(plan: Republish, amounts: Sequence[tuple[int, int]], done: bool) -> Iterator[RenderableType]:
    yield heading(f"Republish of {plan.feed}", plan.id)
    yield facts(*_facts(plan.wishes))
    if not any(rows for rows, _ in amounts):
        yield good(f"nothing {plan.wishes.kind} lies there: nothing would be sent")
        return
    rows = [
        [f"{s.topic}:{s.partition}", ", ".join(map(str, s.ranges)), count(n), size(file_bytes)]
        for s, (n, file_bytes) in zip(plan.sources, amounts, strict=True)
    ]
    total = ["in all", "", count(sum(n for n, _ in amounts)), size(sum(b for _, b in amounts))]
    yield table(["from", "offsets", "rows", "files"], [*limit_rows(rows), total], right="rows files", optional="files")
    fewer = "only some rows" if plan.wishes.where else "only some offsets of one"
    yield Text(f"  Rows and files are of whole slices: where {fewer} are asked for, fewer are sent.")
    if done:
        yield good("already sent: nothing would be sent; give it another name with --id to send it again")


def _facts(wishes: Wishes) -> list[tuple[str, str]]:
    how = {
        "partition": "the one of its old number",
        "key": "by key, as Kafka's Java producer does; without a key, one after the other",
        "round-robin": "one after the other",
        "function": f"as {wishes.function} says",
    }
    return [
        ("to", f"{wishes.to}, {many(wishes.partitions, 'partition')}"),
        ("rows", str(wishes.kind) + (f", where {wishes.where}" if wishes.where else "")),
        ("partition", how[wishes.by]),
        ("times", "the records' own" if wishes.keep_timestamps else "the time of sending"),
        ("headers", "the records' own" + (", and their old coordinates" if wishes.headers else "")),
    ]


def _sent_view(sent: Sent) -> Iterator[RenderableType]:
    plan = sent.plan
    yield heading(f"Republish of {plan.feed}", plan.id)
    if sent.before:
        yield good(f"it was done before: {many(sent.in_all, 'record')} are in {plan.wishes.to}")
        return
    yield good(f"{many(sent.records, 'record')} sent to {plan.wishes.to}")
    yield facts(
        ("bytes", f"{size(sent.bytes)} before compression"),
        ("transactions", count(sent.transactions)),
        ("took", f"{seconds(sent.seconds)}, {rate(sent.records, sent.seconds)}"),
    )
    if sent.throttled_ms:
        yield warn(
            f"brokers had it pause for {seconds(sent.throttled_ms / 1000)}: a quota (producer_byte_rate or"
            " request_percentage) bounds how fast it goes; kafka-configs shows it"
        )
    if sent.in_all != sent.records:
        yield Text(f"  With earlier runs of this republish: {many(sent.in_all, 'record')}.")
    rows = [[f"{plan.wishes.to}:{p}", count(n)] for p, n in sorted(sent.partitions.items())]
    if rows:
        yield table(["partition", "records"], limit_rows(rows), right="records")
    yield Text("  Where a record is now:")
    yield copyable(f"sluice explain {plan.feed} TOPIC:PARTITION:OFFSET")


# -- for programs


def _plan_document(plan: Republish) -> dict[str, Any]:
    w = plan.wishes
    return {
        "feed": plan.feed,
        "id": plan.id,
        "to": w.to,
        "to_partitions": w.partitions,
        "kind": str(w.kind),
        "partition_by": str(w.by),
        "keep_timestamps": w.keep_timestamps,
        "headers": w.headers,
        "where": w.where or None,
        "function": w.function or None,
        "offsets": plan.span,
        "lanes": plan.lanes,
        "schema_id": w.schema_id or None,
    }


def _sent_document(sent: Sent) -> dict[str, Any]:
    return {
        "done_before": sent.before,
        "records": sent.records,
        "records_in_all": sent.in_all,
        "bytes": sent.bytes,
        "transactions": sent.transactions,
        "partitions": {str(p): n for p, n in sorted(sent.partitions.items())},
        "took": round(sent.seconds, 3),
        "throttled": sent.throttled_ms / 1000,
    }
