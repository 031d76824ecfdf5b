"""`sluice status`: the progress of each feed, in its ledger, in its group and in Kafka."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli import completing, met, windows
from sluice.cli import outlook as outlooks
from sluice.cli.numbers import count
from sluice.cli.partitions import lives, ranges
from sluice.cli.session import OpenEdges, Session, command
from sluice.cli.terminal import bad, facts, good, heading, safe, shorten, table, warn
from sluice.pipelines.vocabulary.errors import (
    BatchRefused,
    ContractBroken,
    QuarantineExceeded,
    SchemaDrifted,
    SluiceError,
)
from sluice.pipelines.vocabulary.kafka import BrokerConfig, Key, OpenTransaction, PartitionState, TopicPartition
from sluice.pipelines.vocabulary.receipts import Life, Met
from sluice.pipelines.vocabulary.side_by_side import each
from sluice.pipelines.vocabulary.units import many, show_about, show_duration, show_instant, show_window
from sluice.pipelines.watching.standing import Standing

if TYPE_CHECKING:
    from sluice.cli.terminal import Terminal
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.ledger import Batch, Ledger, State
    from sluice.pipelines.planning.held_back import HeldBack
    from sluice.pipelines.ports import Edges
    from sluice.pipelines.watching.outlook import Outlook
    from sluice.pipelines.watching.standing import WindowStanding


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """One partition: `frontier` None before its first plan, `end` None when Kafka did not answer.

    `age` (ms): how old the oldest record is that it owes, None where that is not known. `unstable`: offsets above the
    stable end, which open transactions hold.
    """

    key: Key
    origin: int | None
    frontier: int | None
    committed: int | None
    end: int | None
    holes: tuple[tuple[int, int], ...]
    age: int | None = None
    unstable: int = 0

    @property
    def lag(self) -> int | None:
        """Stable offsets above the frontier."""
        return None if self.end is None or self.frontier is None else max(0, self.end - self.frontier)


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """One feed; `error` says why Kafka's side is missing or refused, and then there is no `outlook`.

    Its newest windows last `length` ms each. `losses`: what is owed and gone from Kafka, by partition; `held`: what
    open transactions hold back; `met`: how the runs of the live batches stand; `beats`: by live batch, how long ago
    (ms) its owner was heard of; `refused`: by live batch whose run is dead, why it was not published.
    """

    feed: str
    partitions: tuple[PartitionStatus, ...]
    live: tuple[Batch, ...]
    last: Batch | None
    error: SluiceError | None
    length: int
    windows: tuple[WindowStanding, ...]
    outlook: Outlook | None = None
    losses: tuple[SluiceError, ...] = ()
    held: tuple[HeldBack, ...] = ()
    beats: Mapping[int, int] = field(default_factory=dict)
    met: Mapping[int, Met] = field(default_factory=dict)
    refused: Mapping[int, BatchRefused] = field(default_factory=dict)

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
        str | None,
        typer.Argument(
            metavar="[FEED]", help="This feed alone, by partition.", show_default=False, autocompletion=completing.feeds
        ),
    ] = None,
    last: Annotated[int, typer.Option("--last", metavar="N", min=1, max=10_000, help="How many windows to show.")] = 24,
) -> int:
    """Show how far the feeds are.

    For each feed: records that Kafka will delete before they land, the frontier, committed offsets, lag in offsets and
    in time, rates and when it will have caught up, live batches and their owners, and the newest windows as a strip.
    With FEED also by partition.

    $ sluice status
    $ sluice status orders --last 168
    $ sluice status orders --json
    """
    feeds = {feed: session.feed(feed)} if feed else dict(session.files.feeds)
    with session.terminal.working("reading ledgers, asking Kafka"):
        if feed:
            found = [look(session.open_edges, feeds[feed], last)]
        else:
            with session.shared_edges(feeds.values()) as open_edges:
                found = each(lambda f: _look_if_possible(open_edges, f, last), list(feeds.values()))
    broken = {} if feed else session.files.broken
    session.terminal.show(
        *(_detail(found[0], session.terminal) if feed else _overview(found, session.terminal)),
        *(bad(e.message) for e in broken.values()),
    )
    session.terminal.document({"feeds": [document(f) for f in found], "broken": [e.fields() for e in broken.values()]})
    return max((e.exit_code for e in (*broken.values(), *(f.error for f in found)) if e), default=0)


def _look_if_possible(open_edges: OpenEdges, feed: Feed, last: int) -> FeedStatus:
    """As `look`. What keeps this feed from being looked at, an extra that is missing perhaps, is its error alone."""
    try:
        return look(open_edges, feed, last)
    except SluiceError as stopped:
        return FeedStatus(feed.name, (), (), None, stopped, feed.window.length, ())


def look(open_edges: OpenEdges, feed: Feed, last: int) -> FeedStatus:
    """The feed's status. If Kafka does not answer, the ledger's part alone; Kafka's error is kept, not raised."""
    from sluice.pipelines.batch.survey import survey
    from sluice.pipelines.ledger import Ledger, State
    from sluice.pipelines.planning.held_back import unstable_partitions
    from sluice.pipelines.planning.origins import check_cluster
    from sluice.pipelines.watching.outlook import look_ahead

    found = _FeedReading(State())
    with open_edges(feed) as edges:
        ledger = Ledger(edges.lake, feed.name, edges.clock)
        try:
            found.state = ledger.read()
            found.committed = dict(found.state.commits)
            check_cluster(found.state, edges.cluster.cluster_id(), feed.name)
            seen = survey(feed, edges, ledger)
            found.state, found.error = seen.state, seen.refusals[0].error if seen.refusals else None
            found.committed = {k: c.offset for k in seen.partitions if (c := seen.committed.get(k.tp))}
            found.partitions = seen.partitions
            waiting = [p.tp for p in unstable_partitions(seen.partitions.values())]
            found.holders = edges.cluster.open_transactions(waiting) if waiting else {}
            found.outlook = look_ahead(feed, ledger, seen.state, edges.cluster, seen.partitions, edges.clock())
        except SluiceError as stopped:
            found.error = stopped
        return _status(feed, edges, ledger, found, last)


@dataclass(slots=True)
class _FeedReading:
    """The findings about a feed, as far as the look got."""

    state: State
    committed: Mapping[Key, int] = field(default_factory=dict)
    partitions: Mapping[Key, PartitionState] = field(default_factory=dict)
    holders: Mapping[TopicPartition, OpenTransaction] = field(default_factory=dict)
    outlook: Outlook | None = None
    error: SluiceError | None = None


def _status(feed: Feed, edges: Edges, ledger: Ledger, found: _FeedReading, last: int) -> FeedStatus:
    from sluice.pipelines.publishing import owners

    state = found.state
    keys = sorted({*found.partitions, *state.known()})
    batches = sorted((b for b in state.batches.values() if not b.merges), key=lambda b: b.id)
    beats = {b.id: edges.clock() - at for b in state.live() if (at := edges.liveness.last_beat(b.owner)) is not None}
    verdicts = owners.judge_batches(edges.liveness, state.live(), watch=False)
    gone = [b for b in state.live() if verdicts[b.id].dead]
    refused = _refused_batches(feed, edges, ledger, found, gone)
    return FeedStatus(
        feed=feed.name,
        partitions=tuple(_partition(found, k) for k in keys),
        live=state.live(),
        last=batches[-1] if batches else None,
        error=found.error,
        length=feed.window.length,
        windows=_windows(feed, edges, ledger, found, last, gone),
        outlook=found.outlook,
        losses=_losses(feed, found.outlook),
        held=_held_back(feed, found, edges.clock()),
        beats=beats,
        met={b.id: owners.met(feed.name, b, verdicts[b.id]) for b in state.live()},
        refused=refused,
    )


def _refused_batches(
    feed: Feed, edges: Edges, ledger: Ledger, found: _FeedReading, gone: Sequence[Batch]
) -> Mapping[int, BatchRefused]:
    """The refused batches, judged as the next run would judge them. If the lake fails, its error is kept."""
    from sluice.pipelines.quarantine.staged import refusals_of_staged

    try:
        return refusals_of_staged(feed, ledger, found.state, edges.lake, {b.id for b in gone})
    except SluiceError as stopped:
        found.error = found.error or stopped
        return {}


def _windows(
    feed: Feed, edges: Edges, ledger: Ledger, found: _FeedReading, last: int, gone: Sequence[Batch]
) -> tuple[WindowStanding, ...]:
    from sluice.pipelines.watching import strip

    state, now = found.state, edges.clock()
    asked = strip.last_windows(state, feed.window, now, last)
    ends = {k: p.stable_end for k, p in found.partitions.items()}
    return strip.standings(
        state, feed.window, asked, now, strip.outside_facts(ledger, state, ends, found.holders, gone)
    )


def _losses(feed: Feed, outlook: Outlook | None) -> tuple[SluiceError, ...]:
    """Owed offsets that are gone, for which a run would refuse."""
    from sluice.pipelines.planning.origins import out_of_range

    lost = outlook.lost if outlook else ()
    return tuple(e for o in lost if (e := out_of_range(o.lost[0].start, o.key, o.partition, feed.name)))


def _held_back(feed: Feed, found: _FeedReading, now: int) -> tuple[HeldBack, ...]:
    from sluice.pipelines.planning.held_back import held_back

    broker = found.outlook.broker if found.outlook else BrokerConfig()
    return held_back(feed, found.partitions.values(), found.holders, broker, now)


def _partition(found: _FeedReading, key: Key) -> PartitionStatus:
    state, p, committed = found.state, found.partitions.get(key), found.committed.get(key)
    end = p.stable_end if p else None
    unstable = p.high_watermark - p.stable_end if p else 0
    if key not in state.origins:
        return PartitionStatus(key, None, None, committed, end, (), unstable=unstable)
    frontier = state.frontier(key)
    above = tuple((r.start, r.end) for r in state.accounted(key) if r.start > frontier)
    age = found.outlook.ages().get(key) if found.outlook else None
    return PartitionStatus(key, state.origins[key].offset, frontier, committed, end, above, age, unstable)


# -- for people


def _overview(found: list[FeedStatus], terminal: Terminal) -> list[RenderableType]:
    if not found:
        return [Text("no feeds")]
    names = ("feed", "windows", "lag", "behind", "uncommitted", "last batch", "")
    wide = terminal.width >= _WIDE
    shown = [True] * 4 + [wide or any(f.uncommitted for f in found)] + [True] * 2
    rows = [[c for c, keep in zip(_row(f, terminal), shown, strict=True) if keep] for f in found]
    columns = [n for n, keep in zip(names, shown, strict=True) if keep]
    every = [w for f in found for w in f.windows[-_STRIP:]]
    legend = [Text(), windows.legend(every, fancy=terminal.fancy)] if every else []
    return [*_alarms(found), table(columns, rows, right="lag behind uncommitted", least="uncommitted last"), *legend]


_STRIP = 24
"""Windows of each feed in the overview."""
_WIDE = 120
"""The width from which on the overview says more about the last batch."""


def _row(f: FeedStatus, terminal: Terminal) -> tuple[str | Text, ...]:
    age = f.outlook.age if f.outlook else None
    strip = windows.strip(f.windows[-_STRIP:], fancy=terminal.fancy)
    last = _batch(f.last, brief=terminal.width < _WIDE)
    return f.feed, strip, count(f.lag), outlooks.short(age), count(f.uncommitted), last, _state(f)


def _alarms(found: list[FeedStatus]) -> Iterator[Text]:
    """The worst finding of each feed in trouble; beyond a limit, only their number."""
    troubled = [(f.feed, alarms) for f in found if (alarms := _worst_first(f, [h for h in f.held if h.overdue]))]
    troubled.sort(key=lambda t: t[1][0].colour != "red")
    for feed, alarms in troubled[:_TROUBLED]:
        yield from alarms[0].lines(1, f"{feed}: ")
    if len(troubled) > _TROUBLED:
        yield Text(f"  {many(len(troubled) - _TROUBLED, 'feed')} more in trouble", style="dim")
    yield from [Text()] if troubled else []


_TROUBLED = 8
"""How many feeds the overview gives lines to."""


def _worst_first(f: FeedStatus, held: Sequence[HeldBack]) -> list[outlooks.Alarm]:
    return [*outlooks.alarms(f.feed, f.outlook, f.losses, held)] if f.outlook else []


def _state(status: FeedStatus) -> Text:
    outlook = status.outlook
    if status.error:
        return warn(status.error.message.splitlines()[0])
    if outlook and (status.losses or outlook.at_risk):
        return bad("lost records") if status.losses else warn("at risk")
    if status.refused:
        return bad(f"refused: {_BY[type(next(iter(status.refused.values())))]}")
    if any(h.overdue for h in status.held):
        return warn("held back")
    if status.live:
        return _living(status)
    if status.last is None:
        return Text("never run", style="dim")
    if outlook and outlook.falls_behind:
        return warn("falls behind")
    if outlook and outlook.lag and outlook.eta is not None:
        return Text(f"{show_about(outlook.eta)} to land")
    if status.held:
        return warn(f"{count(sum(h.offsets for h in status.held))} held back")
    return good("caught up") if status.lag == 0 else Text("")


def _living(status: FeedStatus) -> Text:
    lives = [m.verdict.life for m in status.met.values()]
    if alive := lives.count(Life.ALIVE):
        return Text(f"{many(alive, 'batch', 'batches')} at work", style="cyan")
    return warn("left by a dead run" if Life.DEAD in lives else "by a run that may be dead")


_BY = {QuarantineExceeded: "quarantine limit", ContractBroken: "contract", SchemaDrifted: "drift"}


def _batch(batch: Batch | None, *, brief: bool = False) -> str:
    if batch is None:
        return "–"
    landed = f"{count(batch.rows)} rows" if batch.published is not None else str(batch.status)
    return (
        f"{batch.id}, {landed}" if brief else f"{batch.id}, {landed}, {show_instant(batch.planned_at // 1000 * 1000)}"
    )


def _detail(status: FeedStatus, terminal: Terminal) -> list[RenderableType]:
    known = lives(p.key for p in status.partitions)
    rows = [
        (
            *(known[p.key], count(p.origin), count(p.frontier), count(p.committed), count(p.end), count(p.lag)),
            outlooks.short(p.age) if p.lag else "",
            "; ".join(filter(None, (_above(p.holes), f"{count(p.unstable)} not stable" if p.unstable else ""))),
        )
        for p in status.partitions
    ]
    names = ("partition", "origin", "frontier", "committed", "stable end", "lag", "behind", "")
    outlook = status.outlook
    age, unstable = outlook.age if outlook else None, sum(p.unstable for p in status.partitions)
    out: list[RenderableType] = [heading(status.feed, outlooks.behind(status.lag, age, unstable))]
    if alarms := _worst_first(status, status.held):
        out += [*(line for alarm in alarms for line in alarm.lines()), Text()]
    out += [*outlooks.settings_denied(outlook)] if outlook else []
    for batch, why in status.refused.items():
        out += [*_refusal(status.feed, batch, why), Text()]
    out += [
        table(names, shorten(rows), right="origin frontier committed stable lag behind", least="origin"),
        facts(
            *(outlooks.pace(outlook) if outlook else ()),
            ("last batch", _batch(status.last)),
            *(("live batch", _at_work(b, status.met[b.id])) for b in status.live if b.id not in status.refused),
            *(outlooks.forgotten(outlook) if outlook else ()),
        ),
        *met.view(m for b, m in status.met.items() if m.verdict.life is not Life.ALIVE and b not in status.refused),
    ]
    if status.windows:
        out += _windows_view(status, terminal)
    if status.error:
        out.append(warn(f"{status.error.message}\n  → {status.error.remedy}"))
    return out


def _refusal(feed: str, batch: int, why: BatchRefused) -> Iterator[Text]:
    """A refused batch: by what it was refused, and what to do."""
    yield bad(f"batch {batch} was refused and stays staged: {why.message}")
    if isinstance(why, QuarantineExceeded):
        yield Text.assemble(("  → ", "bold"), f"see them by reason: sluice quarantine list {feed}")
    yield Text.assemble(("  → ", "bold"), safe(why.remedy))
    yield Text.assemble(
        ("  → ", "bold"), f"then: sluice run {feed}; or give it up: sluice repair {feed} --abandon {batch}"
    )


def _at_work(b: Batch, standing: Met) -> str:
    seen = standing.verdict
    stands = f"at work: {seen.why}" if seen.life is Life.ALIVE else {Life.DEAD: "dead"}.get(seen.life, str(seen.life))
    return f"{b.id}: {b.request}, {count(b.reserved_span)} offsets, {b.owner.describe()}, {stands}"


def _above(ranges: tuple[tuple[int, int], ...]) -> str:
    """The first few ranges that have landed beyond the frontier."""
    shown = ", ".join(f"[{start}, {end})" for start, end in ranges[:3])
    more = f", {len(ranges) - 3} more" if len(ranges) > 3 else ""
    return f"and {shown}{more}" if ranges else ""


def _windows_view(status: FeedStatus, terminal: Terminal) -> list[RenderableType]:
    """The strip, and a line for each of the newest windows that wait for something."""
    waiting = [w for w in status.windows if w.standing not in _NO_WORD]
    return [
        heading("Windows", windows.title(status.length, status.windows)),
        *windows.calendar(status.windows, status.length, fancy=terminal.fancy, width=terminal.width),
        *(Text("  ") + _stands(status, w) for w in waiting[-_TOLD:]),
    ]


_NO_WORD = (Standing.LANDED, Standing.RETIRED, Standing.OPEN, Standing.OWED)
"""States that a sign in the strip says everything about."""


def _stands(status: FeedStatus, w: WindowStanding) -> Text:
    if w.standing is Standing.FAILED and w.batch in status.refused:
        return bad(f"window {show_window(w.window)}: batch {w.batch}, which was refused; {windows.owing(w.owes)}")
    return windows.verdict(w)


_TOLD = 5
"""How many windows get a line of their own."""


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
                "lag_seconds": _age(p),
                "unstable": p.unstable,
                "landed_above_frontier": ranges(p.holes),
            }
            for p in status.partitions
        ],
        "window": show_duration(status.length),
        "windows": [windows.document(w) for w in status.windows],
        "outlook": outlooks.document(status.outlook, status.losses) if status.outlook else None,
        "held_back": [h.document() for h in status.held],
        "live_batches": [_live_document(status, b) for b in status.live],
        "last_batch": _batch_document(status.last) if status.last else None,
        "problem": status.error.fields() if status.error else None,
    }


def _age(p: PartitionStatus) -> float | None:
    return 0.0 if p.lag == 0 else None if p.age is None else p.age / 1000


def _how_live(status: FeedStatus, b: Batch) -> dict[str, Any]:
    """How many seconds ago the owner last gave a sign, and why the batch was refused."""
    return {
        "beat_seconds": status.beats[b.id] / 1000 if b.id in status.beats else None,
        "refused": status.refused[b.id].fields() if b.id in status.refused else None,
    }


def _live_document(status: FeedStatus, b: Batch) -> dict[str, Any]:
    """The batch, the verdict on its run, and the commands to use if the run is dead."""
    (standing,) = met.document([status.met[b.id]])
    said = {name: standing[name] for name in ("owner_is", "evidence", "ways")}
    return _batch_document(b) | _how_live(status, b) | said


def _batch_document(b: Batch) -> dict[str, Any]:
    owner = {"run": b.owner.run, "host": b.owner.host, "pid": b.owner.pid}
    return {
        "batch": b.id,
        "status": str(b.status),
        "request": str(b.request),
        "plan": b.hash,
        "planned_at": b.planned_at,
        "offsets": b.reserved_span,
        "rows": b.rows,
        "failed_slices": b.failed,
        "owner": owner,
    }
