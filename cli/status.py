"""`sluice status`: how far each feed is, in its ledger, in its group and in Kafka."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli import windows
from sluice.cli.plan import ranges, shortened
from sluice.cli.session import Session, command
from sluice.cli.terminal import bad, count, facts, good, heading, many, table, warn
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.standing import Standing
from sluice.pipelines.units import show_duration, show_instant
from sluice.pipelines.values import Key, OpenTransaction, TopicPartition

if TYPE_CHECKING:
    from sluice.cli.terminal import Terminal
    from sluice.pipelines.batch import Edges
    from sluice.pipelines.feed import Feed
    from sluice.pipelines.ledger import Batch, Ledger, State
    from sluice.pipelines.standing import WindowStanding


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """One partition: `frontier` None before its first plan, `end` None when Kafka did not answer."""

    key: Key
    origin: int | None
    frontier: int | None
    committed: int | None
    end: int | None
    holes: tuple[tuple[int, int], ...]

    @property
    def lag(self) -> int | None:
        """Stable offsets above the frontier."""
        return None if self.end is None or self.frontier is None else max(0, self.end - self.frontier)


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """One feed; `error` says why Kafka's side is missing or refused. Its newest windows last `length` ms each."""

    feed: str
    partitions: tuple[PartitionStatus, ...]
    live: tuple[Batch, ...]
    last: Batch | None
    error: SluiceError | None
    length: int
    windows: tuple[WindowStanding, ...]

    @property
    def lag(self) -> int | None:
        lags = [p.lag for p in self.partitions]
        return None if None in lags or self.error else sum(lag or 0 for lag in lags)

    @property
    def uncommitted(self) -> int:
        """Offsets below the frontier that the group has not committed."""
        return sum(max(0, p.frontier - (p.committed or p.origin or 0)) for p in self.partitions if p.frontier)


def register(app: typer.Typer) -> None:
    command(app)(status)


def status(
    session: Session,
    feed: Annotated[
        str | None, typer.Argument(metavar="[FEED]", help="One feed, by partition.", show_default=False)
    ] = None,
    last: Annotated[int, typer.Option("--last", metavar="N", min=1, max=10_000, help="So many windows.")] = 24,
) -> int:
    """Show how far the feeds are.

    Frontier, committed offsets, lag, live batches and their owners, and the newest windows as a strip; with FEED by
    partition.

    $ sluice status
    $ sluice status orders --last 168
    $ sluice status orders --json
    """
    feeds = {feed: session.feed(feed)} if feed else dict(session.files.feeds)
    with session.terminal.working("reading ledgers, asking Kafka"):
        found = [look(session, f, last) for f in feeds.values()]
    broken = {} if feed else session.files.broken
    session.terminal.show(
        *(_detail(found[0], session.terminal) if feed else _overview(found, session.terminal)),
        *(bad(e.message) for e in broken.values()),
    )
    session.terminal.document({"feeds": [document(f) for f in found], "broken": [e.fields() for e in broken.values()]})
    return max((e.exit_code for e in (*broken.values(), *(f.error for f in found)) if e), default=0)


def look(session: Session, feed: Feed, last: int) -> FeedStatus:
    """The feed's standing; when Kafka does not answer, what the ledger alone says. Its error is kept, not raised."""
    from sluice.pipelines.batch import open_ledger, survey
    from sluice.pipelines.ledger import Ledger, State

    state, committed, ends, holders, error = State(), dict[Key, int](), dict[Key, int](), _NOBODY, None
    with session.open_edges(feed) as edges:
        ledger = Ledger(edges.lake, feed.name, edges.clock)
        try:
            state = ledger.read()
            committed = dict(state.commits)
            seen = survey(feed, edges, open_ledger(feed, edges))
            state, error = seen.state, seen.refusals[0].error if seen.refusals else None
            committed = {k: c.offset for k in seen.partitions if (c := seen.committed.get(k.tp))}
            ends = {k: p.stable_end for k, p in seen.partitions.items()}
            held = [k.tp for k, p in seen.partitions.items() if p.stable_end < p.high_watermark]
            holders = edges.cluster.open_transactions(held) if held else _NOBODY
        except SluiceError as stopped:
            error = stopped
        newest = _windows(feed, edges, ledger, state, ends, holders, last)
        return _standing(feed, state, committed, ends, error, newest)


_NOBODY: Mapping[TopicPartition, OpenTransaction] = {}


def _windows(
    feed: Feed,
    edges: Edges,
    ledger: Ledger,
    state: State,
    ends: Mapping[Key, int],
    holders: Mapping[TopicPartition, OpenTransaction],
    last: int,
) -> tuple[WindowStanding, ...]:
    from sluice.pipelines import strip

    now = edges.clock()
    gone = [b for b in state.live() if edges.liveness.looks_dead(b.owner)]
    asked = strip.last_windows(state, feed.window, now, last)
    return strip.standings(state, feed.window, asked, now, strip.seen(ledger, state, ends, holders, gone))


def _standing(
    feed: Feed,
    state: State,
    committed: Mapping[Key, int],
    ends: Mapping[Key, int],
    error: SluiceError | None,
    newest: tuple[WindowStanding, ...],
) -> FeedStatus:
    keys = sorted({*ends, *state.known()})
    batches = sorted(state.batches.values(), key=lambda b: b.id)
    partitions = tuple(_partition(state, k, committed.get(k), ends.get(k)) for k in keys)
    last = batches[-1] if batches else None
    return FeedStatus(feed.name, partitions, state.live(), last, error, feed.window.length, newest)


def _partition(state: State, key: Key, committed: int | None, end: int | None) -> PartitionStatus:
    if key not in state.origins:
        return PartitionStatus(key, None, None, committed, end, ())
    frontier = state.frontier(key)
    above = tuple((r.start, r.end) for r in state.accounted(key) if r.start > frontier)
    return PartitionStatus(key, state.origins[key].offset, frontier, committed, end, above)


# -- for people


def _overview(found: list[FeedStatus], terminal: Terminal) -> list[RenderableType]:
    if not found:
        return [Text("no feeds")]
    rows = [
        (
            f.feed,
            windows.strip(f.windows[-_STRIP:], fancy=terminal.fancy),
            count(f.lag),
            count(f.uncommitted),
            _batch(f.last, brief=terminal.width < _WIDE),
            _state(f),
        )
        for f in found
    ]
    names = ("feed", "windows", "lag", "uncommitted", "last batch", "")
    every = [w for f in found for w in f.windows[-_STRIP:]]
    legend = [Text(), windows.legend(every, fancy=terminal.fancy)] if every else []
    return [table(names, rows, right="lag uncommitted"), *legend]


_STRIP = 24
"""Windows of each feed in the overview."""
_WIDE = 110
"""Columns from which on the overview says when the last batch was."""


def _state(status: FeedStatus) -> Text:
    if status.error:
        return warn(status.error.message.splitlines()[0])
    if status.live:
        return Text(f"{many(len(status.live), 'batch', 'batches')} at work", style="cyan")
    if status.last is None:
        return Text("never run", style="dim")
    return good("caught up") if status.lag == 0 else Text("")


def _batch(batch: Batch | None, *, brief: bool = False) -> str:
    if batch is None:
        return "–"
    landed = f"{count(batch.rows)} rows" if batch.published is not None else str(batch.status)
    return (
        f"{batch.id}, {landed}" if brief else f"{batch.id}, {landed}, {show_instant(batch.planned_at // 1000 * 1000)}"
    )


def _detail(status: FeedStatus, terminal: Terminal) -> list[RenderableType]:
    rows = [
        (
            *(str(p.key), count(p.origin), count(p.frontier), count(p.committed), count(p.end), count(p.lag)),
            _above(p.holes),
        )
        for p in status.partitions
    ]
    names = ("partition", "origin", "frontier", "committed", "stable end", "lag", "")
    out: list[RenderableType] = [
        heading(status.feed, f"lag {count(status.lag)} offsets"),
        table(names, shortened(rows, len(names)), right="origin frontier committed stable lag"),
        facts(
            ("last batch", _batch(status.last)),
            *(
                (
                    "live batch",
                    f"{b.id}: {b.request}, {count(b.reserved_span)} offsets, {b.owner.describe()}",
                )
                for b in status.live
            ),
        ),
    ]
    if status.windows:
        out += _windows_view(status, terminal)
    if status.error:
        out.append(warn(f"{status.error.message}\n  → {status.error.remedy}"))
    return out


def _above(ranges: tuple[tuple[int, int], ...]) -> str:
    """What has landed beyond the frontier, the first few ranges."""
    shown = ", ".join(f"[{start}, {end})" for start, end in ranges[:3])
    more = f", {len(ranges) - 3} more" if len(ranges) > 3 else ""
    return f"and {shown}{more}" if ranges else ""


def _windows_view(status: FeedStatus, terminal: Terminal) -> list[RenderableType]:
    """The strip, and a line for each of the newest windows that wait for something."""
    waiting = [w for w in status.windows if w.standing not in (Standing.LANDED, Standing.OPEN, Standing.OWED)]
    return [
        heading("Windows", windows.title(status.length, status.windows)),
        *windows.calendar(status.windows, status.length, fancy=terminal.fancy),
        *(Text("  ") + windows.verdict(w) for w in waiting[-_TOLD:]),
    ]


_TOLD = 5
"""Windows that a line is spent on."""


# -- for programs


def document(status: FeedStatus) -> dict[str, Any]:
    return {
        "feed": status.feed,
        "lag": status.lag,
        "uncommitted": status.uncommitted,
        "partitions": [
            {
                "topic": p.key.topic,
                "partition": p.key.partition,
                "topic_id": p.key.topic_id,
                "origin": p.origin,
                "frontier": p.frontier,
                "committed": p.committed,
                "stable_end": p.end,
                "lag": p.lag,
                "landed_above_frontier": ranges(p.holes),
            }
            for p in status.partitions
        ],
        "window": show_duration(status.length),
        "windows": [windows.document(w) for w in status.windows],
        "live_batches": [_batch_document(b) for b in status.live],
        "last_batch": _batch_document(status.last) if status.last else None,
        "problem": status.error.fields() if status.error else None,
    }


def _batch_document(b: Batch) -> dict[str, Any]:
    owner = {"run": b.owner.run, "host": b.owner.host, "pid": b.owner.pid}
    return {
        "batch": b.id,
        "status": str(b.status),
        "request": b.request,
        "plan": b.hash,
        "planned_at": b.planned_at,
        "offsets": b.reserved_span,
        "rows": b.rows,
        "failed_slices": b.failed,
        "owner": owner,
    }
