"""`sluice quarantine`: count and show quarantined records, and land those that fit now."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app.invocation import EachFeed, FeedName, Session, command, make_group
from sluice.cli.app.parameters import option
from sluice.cli.options import parsing
from sluice.cli.options.request_options import DryRun
from sluice.cli.options.window_options import WindowOptions
from sluice.cli.shared import other_batches
from sluice.cli.shared.rewrite_summary import BusyWindow, format_window, list_busy, name, table_after
from sluice.cli.terminal.output import bad, copyable, good, heading, limit_rows, safe, table, warn
from sluice.cli.terminal.record_view import build_document as record_document
from sluice.cli.terminal.record_view import rows as record_rows
from sluice.cli.terminal.record_view import view as record_view
from sluice.cli.terminal.text_layout import count, seconds
from sluice.pipelines.util.documents import AsText, Flat
from sluice.pipelines.util.grouping import group_by
from sluice.pipelines.util.units import many

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.maintenance.replay import Replayed
    from sluice.pipelines.maintenance.sorter import FixerError, Trial
    from sluice.pipelines.model.plans import OffsetRange
    from sluice.pipelines.model.receipts import Met
    from sluice.pipelines.ports import Ports
    from sluice.pipelines.quarantine.limit import Fault, QuarantineKind
    from sluice.pipelines.quarantine.listing import Filter, Listing

group = make_group(
    "Count, show and land records that did not fit the schema or the contract.",
    "sluice quarantine list orders",
    "sluice quarantine show orders --field amount -n 3",
    "sluice quarantine replay orders --dry-run",
)

REFUSED = 3


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="quarantine")


def _make_option(option: str, what: str) -> Any:
    return typer.Option(option, metavar="NAME", help=f"Only this {what}; repeatable.", show_default=False)


Reason = Annotated[list[str] | None, _make_option("--reason", "reason")]
Field = Annotated[list[str] | None, _make_option("--field", "field")]
Expectation = Annotated[list[str] | None, _make_option("--expectation", "expectation")]
Place = Annotated[list[str] | None, option("--offset", "T:P:O", "Only this record; repeatable.")]


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """Quarantined records, as typed. All given options must match."""

    windows: WindowOptions
    reason: Reason = None
    field: Field = None
    expectation: Expectation = None
    offset: Place = None

    def build_filter(self, session: Session, feed: Feed) -> Filter:
        """Raises UsageError."""
        from sluice.pipelines.planning.windows import check_aligned
        from sluice.pipelines.quarantine.listing import Filter

        chosen: frozenset[int] | None = None
        if self.windows.any:
            with session.open_ports(feed) as ports:
                chosen = frozenset(self.windows.parse(feed.window, ports.clock()))
            for window in chosen:
                check_aligned(window, feed.window)
        records = tuple(map(parsing.parse_record, self.offset or ()))
        reasons, fields = tuple(self.reason or ()), tuple(self.field or ())
        return Filter(chosen, reasons, fields, tuple(self.expectation or ()), records)


# -- list


@command(group, name="list")
def list_(session: Session, feed: EachFeed, windows: WindowOptions) -> None:
    """Count quarantined records by reason and by window.

    It reads the ledger and the files, not Kafka. Records that a replay landed since are counted separately, and so are
    the records of batches that were staged but not published, such as refused ones.

    $ sluice quarantine list orders
    $ sluice quarantine list orders --from 2026-11-20 --json
    $ sluice quarantine list --all
    """
    from sluice.pipelines.quarantine.listing import list_all

    definition = session.feed(feed)
    criteria = RecordOptions(windows).build_filter(session, definition)
    with session.open_ports(definition) as ports, session.terminal.working("counting"):
        listed, waiting = list_all(definition, ports, criteria)
    views = [*list_view(definition, listed), *(line for part in waiting for line in list_view(definition, part))]
    session.terminal.show(*views)
    session.terminal.print_document(listed, feed=feed, staged=waiting)


def list_view(feed: Feed, listed: Listing) -> Iterator[RenderableType]:
    """For people: the reasons of all windows together, then the windows."""
    total = listed.records
    if listed.batch is None:
        yield heading(f"Quarantine of {feed.name}", many(total, "record"))
    else:
        yield heading(f"Staged by batch {listed.batch}, not published", many(total, "record"))
    if not listed.windows:
        yield good("no record is in quarantine, and no replay landed any")
        return
    if listed.held:
        names = ("stage", "why", "what", "records", "share", "windows", "first")
        yield table(
            names,
            limit_rows(list(_list_reasons(listed))),
            right="records share windows",
            optional="windows share stage",
        )
    yield heading("By window")
    names = ("window", "landed", "quarantined", "share", "re-landed", "fixed", "mostly")
    yield table(
        names,
        limit_rows(_list_windows(feed, listed)),
        right="landed quarantined share re-landed fixed",
        optional="fixed re-landed share",
    )


def _list_reasons(listed: Listing) -> Iterator[list[str]]:
    all_ = sum(w.landed + w.quarantined for w in listed.windows)
    of_kind = group_by(listed.held, lambda h: h.kind)
    ranked = sorted(of_kind.items(), key=lambda x: -sum(h.records for h in x[1]))
    for kind, number in ranked:
        n = sum(h.records for h in number)
        first = min(number, key=lambda h: h.start or 0).first
        yield [kind.stage, str(kind), kind.detail, count(n), _share(n, all_), count(len(number)), first]


def _list_windows(feed: Feed, listed: Listing) -> list[list[str]]:
    mostly: dict[str | None, str] = {}
    for h in listed.held:
        mostly.setdefault(h.window, str(h.kind))
    return [
        [
            w.window or "outside windows",
            *map(count, (w.landed, w.quarantined)),
            _share(w.quarantined, w.landed + w.quarantined),
            *map(count, (w.relanded, w.fixed)),
            mostly.get(w.window, ""),
        ]
        for w in listed.windows
    ]


def _share(part: int, total: int) -> str:
    return f"{part / max(total, 1):.2%}"


# -- show


@command(group)
def show(
    session: Session,
    feed: FeedName,
    options: RecordOptions,
    number: Annotated[int, option("-n", "N", "Maximum number of records.", min=1, max=10_000, show_default=True)] = 10,
) -> None:
    """Show quarantined records, and the reason for each.

    Values are shortened, and control characters escaped; values of feeds that protect fields are not shown. --json has
    full values, in base64, as they are stored.

    $ sluice quarantine show orders --field amount -n 3
    $ sluice quarantine show orders --offset orders:0:150 --json | jq -r '.records[].value | @base64d'
    """
    from sluice.pipelines.quarantine.listing import samples

    definition = session.feed(feed)
    criteria = options.build_filter(session, definition)
    with session.open_ports(definition) as ports, session.terminal.working("reading"):
        sampled = samples(definition, ports, criteria, number)
        rows = [(window, row) for window, batch in sampled for row in record_rows(batch)]
    session.terminal.show(*show_view(definition, rows))
    records = [
        record_document(row) | {"window": format_window(definition, w)} | {n: row.get(n) for n in _WHY}
        for w, row in rows
    ]
    session.terminal.print_document(feed=feed, records=records)


Seen = Sequence[tuple[int | None, Mapping[str, Any]]]


def show_view(feed: Feed, records: Seen) -> Iterator[RenderableType]:
    """For people: a table for each partition of each window."""
    from sluice.pipelines.quarantine.listing import describe_reason

    if not records:
        yield good(f"no quarantined record of {feed.name} matches")
    for partition in dict.fromkeys((w, row["topic"], row["partition"]) for w, row in records):
        rows = [row for w, row in records if (w, row["topic"], row["partition"]) == partition]
        yield heading(f"{partition[1]}:{partition[2]}", name(feed, partition[0]))
        yield record_view(rows, [safe(describe_reason(row)) for row in rows])


_WHY = ("stage", "reason", "expectation", "field", "detail", "byte", "batch", "contract", "withheld_bytes")


# -- replay


@command(group)
def replay(
    session: Session,
    feed: FeedName,
    options: RecordOptions,
    fix: Annotated[
        str | None,
        option("--fix", "FILE.py:FUNCTION", "Fix values with this function of the project; also MODULE:FUNCTION."),
    ] = None,
    dry_run: DryRun = False,
) -> int:
    """Land the quarantined records that fit now.

    Use it after a fix of the schema or the contract, or with a function that fixes values. Each record is tried with
    the feed's current files. Records that fit land in their own windows, at their own offsets; the others stay in
    quarantine. Kafka is not read, and committed offsets stay.

    The function receives a record (key, value, headers, topic, partition, offset, timestamp, stage, reason, field,
    detail, expectation) and returns bytes, text, or a dict or list for JSON; None leaves the record in quarantine. It
    is called twice for each record. Exit 3 if offset ranges were skipped: another live batch reserves them, their files
    were replaced during the replay, or rows that landed there do not fit the current types.

    $ sluice quarantine replay orders --dry-run
    $ sluice quarantine replay orders --window 2026-11-20T14 --field amount
    $ sluice quarantine replay orders --fix fixes.py:cents_to_euros --reason out_of_range
    """
    from sluice.pipelines.maintenance.fixers import load

    definition = session.feed(feed)
    criteria = options.build_filter(session, definition)
    fixer = load(fix, session.project.root) if fix else None
    began = time.monotonic()
    done, given_up = (_preview if dry_run else _replay)(session, definition, criteria, fixer)
    ran = ReplayRun(definition, done, time.monotonic() - began, dry_run, given_up)
    session.terminal.show(*replay_view(ran), *(() if dry_run else table_after(session, definition)))
    session.terminal.print_document(sum_replay(ran))
    return REFUSED if done.busy or done.candidates.unfit or done.overtaken else 0


@dataclass(frozen=True)
class ReplayRun:
    """Describes re-landed records, and abandoned batches of dead runs."""

    feed: Feed
    done: Replayed
    seconds: float
    dry_run: bool
    given_up: tuple[Met, ...] = ()


Done = tuple["Replayed", tuple["Met", ...]]


def _preview(session: Session, feed: Feed, criteria: Filter, fixer: Any) -> Done:
    from sluice.pipelines.maintenance.replay import foresee_replay

    with session.open_ports(feed) as ports, session.terminal.progress() as meter:
        return foresee_replay(feed, ports, criteria, fixer, meter), ()


def _replay(session: Session, feed: Feed, criteria: Filter, fixer: Any) -> Done:
    from sluice.pipelines.maintenance.replay import replay as carry_out
    from sluice.resources.liveness import new_owner

    with session.open_ports(feed) as ports:
        with session.terminal.progress() as meter:
            heard = other_batches.MetRecorder(meter)
            done = carry_out(feed, ports, criteria, fixer, new_owner("replay"), heard)
        if done.batches:
            _tell(session, feed, ports)
    return done, heard.met


def _tell(session: Session, feed: Feed, ports: Ports) -> None:
    """Report the batches to Dagster, if it is installed; its commits wait for that."""
    with session.terminal.working("reporting to Dagster"), session.open_dagster() as instance:
        if instance is None:
            return
        from sluice.assets.events import landed_metadata
        from sluice.assets.events.ledger_view import LedgerView

        landed_metadata.roll_forward(instance, LedgerView.open(feed, ports), landed_metadata.PORTION)


def replay_view(ran: ReplayRun) -> Iterator[RenderableType]:
    """The view: results by kind, reasons of the records that do not fit, and errors."""
    trial = ran.done.trial
    yield heading(f"Replay of the quarantine of {ran.feed.name}", f"{many(trial.tried.total(), 'record')} tried")
    if not trial.tried:
        yield good("no quarantined record matches")
        return
    landed = ran.done.outcome.fit
    names = ("stage", "refused for", "what", "tried", "would land" if ran.dry_run else "landed", "stay")
    kinds = [
        [k.stage, str(k), k.detail, count(n), count(landed[k]), count(n - landed[k])]
        for k, n in trial.tried.most_common()
    ]
    yield table(names, limit_rows(kinds), right="tried would landed stay")
    yield from _format_unfit(ran.feed, trial)
    yield from _format_verdict(ran)


def _format_unfit(feed: Feed, trial: Trial) -> Iterator[RenderableType]:
    ranked = sorted(trial.why.items(), key=lambda x: -x[1][0])
    if ranked:
        yield heading("Reasons of records that still do not fit")
        kinds = [[k.stage, str(k), k.detail, count(n), first] for k, (n, first) in ranked]
        yield table(("stage", "why", "what", "records", "first"), limit_rows(kinds), right="records")
    if any(k.is_oversized for k, _ in ranked):
        yield warn("The bytes of oversized records are in Kafka only. Raise `tuning.task_memory`, and land them again:")
    if trial.withheld:
        why = "can land from Kafka alone: the feed protects fields, so quarantine has no values. Land them again:"
        yield warn(f"{many(trial.withheld, 'record')} of these {why}")
    if trial.unread:
        windows = {s.window for s in trial.unread}
        names = [feed.window.name(feed.window.start_of(w)) for w in sorted(w for w in windows if w is not None)]
        options = [f"--offsets {s}" for s in trial.unread]
        if len(options) > 10 and None not in windows:
            options = [f"--window {name}" for name in dict.fromkeys(names)]
        yield copyable(f"sluice run {feed.name} --replace {' '.join(options)}")
    if trial.botched:
        yield heading("Errors of the fix function")
        ranked_ = sorted(trial.botched.items(), key=lambda x: -x[1][0])
        yield table(("what", "records", "first"), [[w, count(n), first] for w, (n, first) in ranked_], right="records")
    if trial.left:
        fit = f"; {count(trial.left_fit)} of them fit without --fix" if trial.left_fit else ""
        yield Text(f"  The fix function skipped {many(trial.left, 'record')} alone{fit}.", style="dim")


def _format_verdict(ran: ReplayRun) -> Iterator[Text]:
    done, landed = ran.done, ran.done.outcome
    n = landed.fit.total()
    fixed = f", {count(landed.mended)} of them fixed" if landed.mended else ""
    if ran.dry_run:
        yield Text(f"  A dry run: nothing was changed. {many(n, 'record')} would land{fixed}.")
    elif n:
        batches = f"{'batch' if len(done.batches) == 1 else 'batches'} {', '.join(map(str, done.batches))}"
        yield good(f"{many(n, 'record')} re-landed{fixed}: {batches}")
        rows = sum(r.counts.landed for _, r in done.done if r)
        yield Text(f"  {seconds(ran.seconds)}, {many(rows, 'row')} written again", style="dim")
    else:
        yield warn("no record landed")
    yield from other_batches.view(ran.given_up)
    yield from other_batches.standing(done.busy, done.met, partial(name, ran.feed))
    if done.overtaken:
        skipped = many(done.overtaken, "offset range")
        yield bad(f"{skipped} skipped: files were merged, replayed or landed again during the replay; run it again")
    for s, why in done.candidates.unfit[:5]:
        yield bad(f"{s} was skipped: {why}")
    if (more := len(done.candidates.unfit) - 5) > 0:
        yield bad(f"and {more} more offset ranges were skipped")


@dataclass(frozen=True, slots=True)
class TriedKind:
    """Records that were refused for one reason: how many were tried, landed, and stay in quarantine."""

    kind: Flat[QuarantineKind]
    tried: int
    landed: int
    stay: int


@dataclass(frozen=True, slots=True)
class UnfitRange:
    offset_range: AsText[OffsetRange]
    why: str


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The amounts of a replay. `skipped` were left alone by the fix function; `botched` are its errors. `withheld`
    are not stored, since the feed protects fields."""

    feed: str
    dry_run: bool
    tried: int
    landed: int
    fixed: int
    stay: int
    skipped: int
    skipped_fit: int
    withheld: int
    kinds: list[TriedKind]
    why: list[Fault]
    botched: list[FixerError]
    seconds: float
    batches: tuple[int, ...]
    busy: list[BusyWindow]
    other_batches: tuple[Met, ...]
    unfit: list[UnfitRange]


def sum_replay(ran: ReplayRun) -> ReplayResult:
    from sluice.pipelines.maintenance.sorter import FixerError
    from sluice.pipelines.quarantine.limit import Fault

    done, trial, fit = ran.done, ran.done.trial, ran.done.outcome.fit
    tried, landed = trial.tried.total(), fit.total()
    return ReplayResult(
        ran.feed.name,
        ran.dry_run,
        tried,
        landed,
        ran.done.outcome.mended,
        tried - landed,
        trial.left,
        trial.left_fit,
        trial.withheld,
        [TriedKind(k, n, fit[k], n - fit[k]) for k, n in trial.tried.most_common()],
        [Fault(k, *first) for k, first in trial.why.items()],
        [FixerError(what, *first) for what, first in trial.botched.items()],
        round(ran.seconds, 3),
        done.batches,
        list_busy(ran.feed, done.busy),
        (*ran.given_up, *done.met),
        [UnfitRange(s, why) for s, why in done.candidates.unfit],
    )
