"""`sluice groups`: consumer groups of a feed's Kafka, their members, and holders of the feed's partitions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app import completers
from sluice.cli.app.invocation import Session, command, make_group
from sluice.cli.app.parameters import option
from sluice.cli.options import parsing
from sluice.cli.terminal import text_layout as numbers
from sluice.cli.terminal.output import SHOWN_ROWS, facts, heading, indent, limit_rows, table, warn
from sluice.cli.terminal.text_layout import count
from sluice.pipelines.errors import UsageError
from sluice.pipelines.model.consumer_groups import (
    KINDS,
    STATES,
    ZOOKEEPER,
    Counting,
    GroupMember,
    ListedGroup,
    OffsetExpiry,
    format_kind,
)
from sluice.pipelines.model.kafka import Range, union
from sluice.pipelines.util.documents import Flat
from sluice.pipelines.util.units import show_duration, show_instant

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.operating.describe_group import GroupListing, GroupOffset, GroupReport

group = make_group(
    "Show the consumer groups of a feed's Kafka.",
    "sluice groups list --feed orders",
    "sluice groups describe sluice-orders",
    "sluice groups watch legacy-loader --until Empty --timeout 10m",
)

GroupName = Annotated[
    str | None,
    typer.Argument(metavar="GROUP", help="Name of the group. Default: the group of --feed.", show_default=False),
]
OfFeed = Annotated[
    str | None, option("--feed", "FEED", "The feed whose Kafka to use.", autocompletion=completers.complete_feeds)
]


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="groups")


# -- list


@command(group, name="list")
def list_(session: Session, feed: OfFeed = None) -> None:
    """List all groups of a Kafka: state, protocol, and the feed that commits for each.

    Groups that this client must not describe are missing.

    $ sluice groups list
    $ sluice groups list --feed orders --json | jq -r '.groups[] | select(.state != "Empty") | .group'
    """
    from sluice.pipelines.operating.describe_group import describe_store, list_groups

    definition = session.feed(feed) if feed else _choose_feed(session)
    with session.terminal.working("querying Kafka"), session.open_groups(definition) as groups:
        listing = list_groups(definition, session.files.feeds.values(), groups)
    owners, hidden = listing.owners, listing.hidden
    session.terminal.show(*_list_view(listing, describe_store(definition)))
    session.terminal.print_document(
        bootstrap=definition.kafka.bootstrap,
        groups=[OwnedGroup(g, owners.get(g.group)) for g in listing.groups],
        not_there=[MissingGroup(g, owners[g]) for g in listing.missing if g not in hidden],
        hidden=[MissingGroup(g, owners[g], e.remedy) for g, e in hidden.items()],
    )


@dataclass(frozen=True, slots=True)
class OwnedGroup:
    group: Flat[ListedGroup]
    feed: str | None


@dataclass(frozen=True, slots=True)
class MissingGroup:
    """A feed's group that is not listed. With a `remedy`, this client may not see it."""

    group: str
    feed: str
    remedy: str = ""


def _choose_feed(session: Session) -> Feed:
    """Any feed, if all read one Kafka. Raises UsageError."""
    feeds = list(session.files.feeds.values())
    if len({f.kafka.bootstrap for f in feeds}) == 1:
        return feeds[0]
    why = "the feeds of this project read from several Kafkas" if feeds else "no feed of this project names a Kafka"
    raise UsageError(f"{why}, and --feed is missing", remedy="add a feed of that Kafka: --feed NAME")


def _list_view(listing: GroupListing, store: str) -> list[RenderableType]:
    listed, owners, hidden = listing.groups, listing.owners, listing.hidden
    rows: list[tuple[str | Text, ...]] = [
        (
            g.group,
            _state(g.state),
            (g.protocol_type or "–") if g.kind in ("", "classic") else format_kind(g.kind),
            owners.get(g.group, ""),
            "ZooKeeper" if g.coordinator < 0 else f"broker {g.coordinator}",
        )
        for g in listed
    ]
    missing = [
        (g, Text("not visible" if g in hidden else "does not exist yet", style="dim"), "", owners[g], "")
        for g in listing.missing
    ]
    names = ("group", "state", "protocol", "feed", "coordinator")
    out: list[RenderableType] = [heading("Groups", f"{len(listed)} at {store}")]
    out += [table(names, [*rows, *missing], optional="coordinator protocol")] if rows or missing else [Text("  none")]
    newer = sorted({g.kind for g in listed} & set(KINDS) - {"classic"})
    out += [Text(), facts(*((format_kind(kind), KINDS[kind]) for kind in newer))] if newer else []
    busy = [g.group for g in listed if g.group in owners and g.state not in _FREE]
    return [
        *out,
        *(warn(f"{g}, for which {owners[g]} commits, has members: sluice groups describe {g}") for g in busy),
        *(warn(f"{name}, for which {owners[name]} commits, is not visible: {e.remedy}") for name, e in hidden.items()),
    ]


_FREE = ("Empty", "Dead")
_LOOKS = {"Stable": "green", "Empty": "dim", "Dead": "red"}


def _state(state: str) -> Text:
    return Text(state or "–", style=_LOOKS.get(state, "yellow"))


# -- describe


@command(group)
def describe(session: Session, name: GroupName = None, feed: OfFeed = None) -> None:
    """Show a group: members and their partitions, committed offsets, and their expiry.

    Lag is counted to the end of the log, as Kafka's tools do. For the feed's view, see sluice offsets show.

    $ sluice groups describe --feed orders
    $ sluice groups describe sluice-orders
    $ sluice groups describe sluice-orders --json | jq '.members'
    """
    from sluice.pipelines.operating.describe_group import describe_group

    source, wanted = _find_group(session, name, feed)
    with session.terminal.working("querying Kafka"), session.open_groups(source) as groups:
        report = describe_group(source, wanted, session.files.feeds.values(), session.open_ports, groups)
    session.terminal.show(*_view(report))
    session.terminal.print_document(report)


@command(group)
def watch(
    session: Session,
    name: GroupName = None,
    feed: OfFeed = None,
    until: Annotated[
        str | None, option("--until", "STATE", "End when the group reaches this state, such as Empty.")
    ] = None,
    timeout: Annotated[
        str | None, option("--timeout", "TIME", "Give up after this time, such as 10m.", show_default="never")
    ] = None,
) -> int:
    """Follow the changes of a group: state, members and their partitions.

    It asks the coordinator once a second, without effect on members. Each change of state is printed with the duration
    of the previous state, and with states that must have come between. --json prints one document per line. With
    --until, exit 1 at the end of --timeout.

    $ sluice groups watch sluice-orders
    $ sluice groups watch legacy-loader --until Empty --timeout 10m && sluice run orders
    """
    from sluice.pipelines.operating.describe_group import follow_group
    from sluice.resources.liveness import now

    source, wanted = _find_group(session, name, feed)
    awaited = _state_named(until) if until else None
    deadline = None if timeout is None else time.monotonic() + parsing.duration(timeout) / 1000
    with session.open_groups(source) as groups:
        for view, events in follow_group(groups, wanted, now):
            for event in events:
                lasted = "" if event.seconds is None else f" (after {numbers.seconds(event.seconds)})"
                session.terminal.lines([f"{show_instant(event.at)}  {event.change.text}{lasted}"])
                session.terminal.print_document(event, group=wanted)
            # Without --until, only Ctrl-C or the timeout ends it, and neither is a failure.
            if awaited and view.state == awaited:
                return 0
            if deadline is not None and time.monotonic() >= deadline:
                return 1 if awaited else 0
            time.sleep(1)
    return 0


def _state_named(text: str) -> str:
    """Raises UsageError."""
    match = next((state for state in STATES if state.lower() == text.lower()), None)
    if match is None:
        raise UsageError(f"unknown state --until {text!r}", remedy=f"use one of {', '.join(STATES)}")
    return match


def _find_group(session: Session, name: str | None, feed: str | None) -> tuple[Feed, str]:
    """The feed whose Kafka to ask, and the group. Raises UsageError."""
    if feed:
        of = session.feed(feed)
        return of, name or of.group
    feeds = list(session.files.feeds.values())
    if name:
        return next((f for f in feeds if f.group == name), None) or _choose_feed(session), name
    if len(feeds) != 1:
        raise UsageError("no group", remedy="add the name of a group (see sluice groups list), or --feed NAME")
    return feeds[0], feeds[0].group


# -- describe, for people


def _view(report: GroupReport) -> list[RenderableType]:
    view = report.view
    by = ", ".join(part for part in (view.protocol_type, view.assignor) if part and part != view.kind)
    kind = KINDS.get(view.kind, "a protocol that Sluice does not know")
    out: list[RenderableType] = [
        heading(f"Group {view.group}", f"of feed {report.feed}" if report.feed else "of no feed of this project"),
        facts(
            (
                "state",
                Text.assemble(_state(view.state), f", {STATES.get(view.state, 'a state that Sluice does not know')}"),
            ),
            *([("protocol", f"{format_kind(view.kind)}{f' ({by})' if by else ''}, {kind}")] if view.exists else []),
            ("coordinator", str(view.coordinator)),
            *([("offsets", _describe_retention(report.expiry))] if report.offsets else []),
        ),
    ]
    if view.members:
        rows = [(m.client_id, m.host, m.instance_id or "–", holds(m)) for m in view.members[:SHOWN_ROWS]]
        out.append(heading("Members", str(len(view.members))))
        out.append(table(("client", "host", "static id", "holds"), limit_rows(rows, len(view.members))))
    if report.offsets:
        out += [
            heading("Offsets", f"lag {count(sum(r.lag or 0 for r in report.offsets))}"),
            _format_offsets(report.offsets),
        ]
    return [*out, *_format_blocked(report)]


def _describe_retention(retention: OffsetExpiry) -> str:
    """How long the group's offsets last, as far as that can be known."""
    time = (
        "for a time that brokers do not report"
        if retention.retention_ms is None
        else show_duration(retention.retention_ms)
    )
    match retention.counted_from:
        case Counting.NOTHING:
            return "kept until they are deleted"
        case Counting.NEVER:
            return f"kept while it has members, then {time}"
        case Counting.COMMIT:
            return f"kept {time} after each commit; coordinators do not report its time"
    if retention.not_before is None:
        return f"kept {time} after its last member left; coordinators do not report that time"
    moment = show_instant(retention.not_before // 1000 * 1000)
    return f"kept {time} after its last member left: not before {moment}, by the ledger's last commit"


def holds(member: GroupMember) -> str:
    """Formats assigned partitions: `orders:0-2, payments:1`."""
    if member.partitions is None:
        return "–"
    by_topic: dict[str, list[Range]] = {}
    for tp in member.partitions:
        by_topic.setdefault(tp.topic, []).append(Range(tp.partition, tp.partition + 1))
    texts = []
    for topic, partitions in by_topic.items():
        runs = (str(r.start) if r.span == 1 else f"{r.start}-{r.end - 1}" for r in union(partitions))
        texts.append(f"{topic}:{','.join(runs)}")
    return ", ".join(texts) or "nothing"


def _format_offsets(rows: Sequence[GroupOffset]) -> RenderableType:
    with_holders, with_notes = any(r.holder for r in rows), any(r.put_there_by for r in rows)
    lines = []
    for r in rows[:SHOWN_ROWS]:
        epoch = str(r.commit.leader_epoch) if r.commit and r.commit.leader_epoch >= 0 else "–"
        cells = [str(r.tp), count(r.committed), count(r.log_end), count(r.lag), epoch]
        cells += [r.holder.client_id if r.holder else "–"] if with_holders else []
        lines.append((*cells, *([r.put_there_by] if with_notes else [])))
    names = ("partition", "committed", "log end", "lag", "epoch", *(["held by"] if with_holders else []))
    names += ("set by",) if with_notes else ()
    return table(names, limit_rows(lines, len(rows)), right="committed log lag epoch")


def _format_blocked(report: GroupReport) -> list[RenderableType]:
    """The members that block the feed's commits."""
    if report.feed is None or report.view.free:
        return []
    if report.view.members and not report.strangers:
        return [Text(), warn(f"a run of {report.feed} is committing, or died less than a session ago")]
    # In ZooKeeper a run owns its partitions before it lands.
    runs = (
        "Runs land nothing until old consumers leave; the first run after that lands and commits."
        if report.view.kind == ZOOKEEPER
        else "Landing continues; the first run after they leave commits."
    )
    holders = "; ".join(f"{m.client_id} at {m.host} holds {holds(m)}" for m in report.strangers[:SHOWN_ROWS])
    return [
        Text(),
        warn(f"{report.feed} cannot commit while others are in its group{f': {holders}' if holders else ''}"),
        indent(
            f"{runs} To run both, set another group for one of them: `group:` in feeds/{report.feed}.yaml.",
        ),
    ]
