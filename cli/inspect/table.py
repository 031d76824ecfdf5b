"""`sluice table`: a feed's table by name: bring it up to the ledger, see where it stands, compare it file by file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app.invocation import FeedName, Session, command, make_group
from sluice.cli.options.request_options import DryRun, Yes
from sluice.cli.terminal.output import bad, facts, format_dry_run, good, heading, indent, warn
from sluice.cli.terminal.text_layout import count
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.util.documents import Flat
from sluice.pipelines.util.units import many, show_instant

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.model.tables import TableHead
    from sluice.pipelines.operating.feed_tables import TableStatus
    from sluice.pipelines.ports import Ports
    from sluice.pipelines.tables.check import TableComparison
    from sluice.pipelines.tables.sync import Synced
    from sluice.pipelines.tables.table_windows import FeedTables

    Opened = tuple[Feed, Ports, FeedTables]

group = make_group(
    "Update and check a feed's Iceberg or Delta table.",
    "sluice table status orders",
    "sluice table sync orders",
)

SHOWN = 5
"""How many files of each kind people see; `--json` has all."""


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="table")


@command(group)
def sync(
    session: Session,
    feed: FeedName,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Undo changes by other clients; rewrite files whose bounds Spark misreads.",
        ),
    ] = False,
) -> None:
    """Bring the table up to date with the ledger.

    Each batch is one commit, and so is each change of files: merged, landed again, replayed, retired. A new table gets
    all landed rows, many batches per commit. After an interruption, the next sync continues. Each file is added once,
    also by concurrent syncs. Runs sync the table after their commit. FEED.OUTPUT stands for the table of one output of
    a split feed, FEED for those of all.

    Complete windows are listed in a second table: db.orders_windows, or tables/orders_windows. With the feed's
    table.quarantine, quarantined records have a table, too: db.orders_quarantine, or quarantine/orders. With
    table.current, the changes that have landed are folded into the table of current rows.

    Snapshots older than the feed's table.keep_snapshots expire, and their files are removed. Exit 3 if another client
    changed the table. With --repair, old files whose time bounds Spark misreads in Iceberg are rewritten, with the same
    rows.

    $ sluice table sync orders
    $ sluice table sync github.push
    $ sluice table sync orders --repair
    """
    from sluice.pipelines.operating.feed_tables import sync_current_rows, sync_tables

    all_misread = list[str]()

    def sync_one(dataset: Feed, ports: Ports, tables: FeedTables) -> TableResult | None:
        landed = tables._replace(current=None)
        with session.terminal.progress() as meter:
            done, misread = sync_tables(dataset, ports, landed, meter, repair=repair)
        # The first sync found them. Rewriting is a batch in the ledger, which the second one brings into the table.
        if misread:
            session.terminal.show(_rewrite_misread(session, dataset.name, misread))
            with session.terminal.progress() as meter:
                done, misread = sync_tables(dataset, ports, landed, meter, repair=repair)
        results = [(tables.rows.name, done)]
        if tables.quarantine and done.quarantine:
            results.append((tables.quarantine.name, done.quarantine))
        for name, of_table in results:
            session.terminal.show(*_sync_view(name, of_table))
        if misread:
            text = _describe_misread(dataset.dataset, len(misread), "run it again when no other run is active")
            session.terminal.show(warn(text))
        all_misread.extend(misread)
        with session.terminal.progress() as meter:
            current = sync_current_rows(dataset, ports, tables, meter, repair=repair)
        if tables.current and current:
            results.append((tables.current.table.name, current))
            session.terminal.show(*_sync_view(*results[-1]))
        return _build_result(dataset.dataset, results, tables)

    with _open_tables(session, feed) as opened:
        _print_results(session, feed, _apply(session, opened, sync_one), misread=all_misread)


def _rewrite_misread(session: Session, feed_name: str, misread: tuple[str, ...]) -> Text:
    """Write these files again, and report it."""
    from sluice.pipelines.maintenance.compaction import renew
    from sluice.resources.liveness import new_owner

    feed = session.feed(feed_name)
    with session.open_ports(feed) as ports, session.terminal.progress() as meter:
        done = renew(feed, ports, frozenset(misread), new_owner("compact"), meter)
    files = sum(len(receipt.parts) for _, receipt in done.merged if receipt)
    return good(f"{many(len(misread), 'file')} with bounds that Spark misreads rewritten as {many(files, 'file')}")


def _describe_misread(feed: str, files: int, remedy: str) -> str:
    have = "has" if files == 1 else "have"
    return f"{many(files, 'file')} {have} bounds that engines misread, so filters miss rows of feed {feed}: {remedy}"


@command(group)
def rebuild(session: Session, feed: FeedName, dry_run: DryRun = False, yes: Yes = False) -> None:
    """Drop the table, and make it again from the ledger.

    For tables that other clients changed in ways that no sync can undo: rows deleted, columns changed, metadata lost.
    It asks for confirmation on a terminal; elsewhere it needs --yes. The new table has all landed rows, and no older
    snapshots. Landed files stay as they are. The tables of the quarantine, of complete windows and of current rows are
    made again, too.
    Runs may go on.

    $ sluice table rebuild orders --dry-run
    $ sluice table rebuild orders --yes
    """
    from sluice.pipelines.operating.feed_tables import rebuild_tables
    from sluice.pipelines.tables.sync import look_or_none

    def rebuild_one(dataset: Feed, ports: Ports, tables: FeedTables) -> TableResult | None:
        with session.terminal.progress() as meter:
            done = rebuild_tables(dataset, ports, tables, meter)
        session.terminal.show(*_sync_view(tables.rows.name, done))
        return _build_result(dataset.dataset, [(tables.rows.name, done)], tables)

    with _open_tables(session, feed) as opened:
        every = [(dataset, table) for dataset, _, tables in opened for table in tables.all]
        if dry_run or not yes:
            for dataset, table in every:
                session.terminal.show(*_format_standing(dataset.dataset, table.name, look_or_none(table)))
        if dry_run:
            session.terminal.show(format_dry_run())
            return session.terminal.print_document(applied=False, tables=[t.name for _, t in every])
        if not yes:
            session.terminal.confirm(f"Drop {len(every)} tables of {feed} with their snapshots, and make them again?")
        _print_results(session, feed, _apply(session, opened, rebuild_one), applied=True)


@command(group)
def status(session: Session, feed: FeedName) -> None:
    """Show the table's newest snapshot, and the batches that it lacks.

    Reads the ledger's entries since the snapshot. If another client changed the table, it compares all files.

    $ sluice table status orders
    """
    from sluice.pipelines.operating.feed_tables import read_table_statuses

    def show_one(dataset: Feed, ports: Ports, tables: FeedTables) -> TableResult | None:
        name = dataset.dataset
        with session.terminal.working("comparing table and ledger"):
            statuses = read_table_statuses(dataset, ports, tables)
        for table in statuses:
            session.terminal.show(*_format_standing(name, table.name, table.head), *_format_lacking(name, table))
        return _build_result(name, [(table.name, table) for table in statuses], tables)

    with _open_tables(session, feed) as opened:
        _print_results(session, feed, _apply(session, opened, show_one))


def _format_lacking(feed: str, table: TableStatus) -> Iterator[RenderableType]:
    """Describes the entries that a table lacks, or the files that a table changed by others lacks."""
    if table.comparison:
        yield warn("another client wrote the newest snapshot: all files were compared with the ledger")
        yield from verdict(feed, table.comparison)
    elif table.head or table.pending.files:
        yield _format_pending(feed, table.pending.batches, table.pending.files, table.pending.gone)


@command(group)
def check(session: Session, feed: FeedName) -> int:
    """Compare the table with the ledger: files, rows, and column bounds. Current rows are folded again.

    Exit 1 if they differ, also if a sync is due. It reads the whole ledger, all manifests of the table, and the footers
    of all its files.

    $ sluice table check orders
    """
    from sluice.pipelines.operating.feed_tables import compare_tables

    verdicts = list[bool]()

    def check_one(dataset: Feed, ports: Ports, tables: FeedTables) -> TableResult | None:
        with session.terminal.working("comparing table and ledger"):
            results = compare_tables(dataset, ports, tables)
        for name, compared in results:
            verdicts.append(compared.right)
            session.terminal.show(
                *_format_standing(dataset.dataset, name, compared.head), *verdict(dataset.dataset, compared)
            )
        return _build_result(dataset.dataset, results, tables)

    with _open_tables(session, feed) as opened:
        _print_results(session, feed, _apply(session, opened, check_one))
    return 0 if all(verdicts) else 1


@contextmanager
def _open_tables(session: Session, name: str) -> Iterator[list[Opened]]:
    """Open the tables of a feed, or of one output by `feed.output`; of a split feed those of its outputs."""
    from sluice.resources.open_ports import list_tabled, open_tables

    feed = session.find_dataset(name)
    with ExitStack() as stack:
        datasets, ports = list_tabled(feed), stack.enter_context(session.open_ports(feed))
        yield [(d, ports, stack.enter_context(open_tables(d, ports.lake))) for d in datasets]


def _apply(
    session: Session, opened: Sequence[Opened], apply: Callable[[Feed, Ports, FeedTables], TableResult | None]
) -> list[TableResult]:
    """Apply a function to the tables of each dataset. An error of one is raised after the others are done."""
    results, errors = list[TableResult | None](), list[SluiceError]()
    for one in opened:
        try:
            results.append(apply(*one))
        except SluiceError as error:
            errors.append(error)
    for other in errors[1:]:
        session.terminal.fail(other)
    if errors:
        raise errors[0]
    return [r for r in results if r]


def _print_results(session: Session, name: str, results: Sequence[TableResult], **more: object) -> None:
    if session.find_dataset(name).split:
        session.terminal.print_document(OutputTables(name, tuple(results)), **more)
    else:
        session.terminal.print_document(results[0], **more)


# -- shown


def _format_standing(feed: str, name: str, head: TableHead | None) -> Iterator[RenderableType]:
    yield heading(f"{name[0].upper()}{name[1:]}", f"of feed {feed}")
    if head is None or head.snapshot is None:
        yield Text("  it does not exist yet" if head is None else "  it is empty")
        return
    yield facts(
        ("snapshot", f"{head.snapshot}, {show_instant(head.at or 0)}"),
        ("rows", count(head.rows)),
        ("files", count(head.files)),
        ("snapshots", count(head.snapshots)),
        ("up to", f"entry {head.mark - 1} of the ledger" if head.mark else "nothing yet"),
    )


def _format_pending(feed: str, batches: int, files: int, removed: int) -> Text:
    if not files and not removed:
        return good("all landed rows are in it")
    missing = f"{many(files, 'file')} of {many(batches, 'batch', 'batches')} not in it yet" if files else ""
    out = f"{many(removed, 'file')} that no longer {'counts' if removed == 1 else 'count'}" if removed else ""
    return warn(f"{' and '.join(s for s in (missing, out) if s)}: sluice table sync {feed}")


def _sync_view(name: str, done: Synced) -> Iterator[RenderableType]:
    if done.head is None:
        yield Text("  nothing has landed yet: no table")
        return
    if done.created:
        yield good(f"{name} is new")
    changes = [f"{many(done.added, 'file')} added"] if done.added else []
    changes += [f"{many(done.removed, 'file')} taken out"] if done.removed else []
    if changes:
        yield good(f"{', '.join(changes)} in {many(done.commits, 'commit')}")
    else:
        yield good("all landed rows were in it already")
    if done.expired or done.cleaned:
        files = f", and {many(len(done.cleaned), 'file')} of theirs removed" if done.cleaned else ""
        yield good(f"{many(done.expired, 'old snapshot')} expired{files}")
    if done.head.snapshot is None:
        return
    yield facts(
        ("snapshot", str(done.head.snapshot)), ("rows", count(done.head.rows)), ("files", count(done.head.files))
    )


def verdict(feed: str, comparison: TableComparison) -> Iterator[RenderableType]:
    """Describe a comparison."""
    if comparison.head is None and not comparison.pending:
        return
    if comparison.same and comparison.keys is not None:
        yield good(f"it has the rows of {many(comparison.keys, 'key')} that the landed changes give")
    elif comparison.same:
        yield good(f"the ledger and the table have the same {many(len(comparison.live), 'file')} and rows")
    elif comparison.sound:
        yield _format_pending(feed, len(comparison.batches), len(comparison.pending), len(comparison.stale))
    else:
        yield bad(f"{comparison.describe()}: {comparison.find_remedy(feed)}")
        if first := comparison.find_erasure(feed):
            yield indent(first)
    if comparison.sound and comparison.faults:
        yield bad(f"{comparison.describe()}: {comparison.find_remedy(feed)}")
    if comparison.misread:
        yield bad(_describe_misread(feed, len(comparison.misread), f"sluice table sync {feed} --repair"))
    wrong = tuple(f"{address}: {rows} rows, not {landed}" for address, rows, landed in comparison.rows_differ)
    for what, files in (
        ("missing", comparison.missing),
        ("not in the ledger", comparison.foreign),
        ("with other numbers of rows", wrong),
        ("listed twice", comparison.twice),
        ("keys with other rows", comparison.keys_differ),
    ):
        more = [f"… {len(files) - SHOWN} more"] if len(files) > SHOWN else []
        if files:
            yield indent(f"{what}:", *files[:SHOWN], *more)


@dataclass(frozen=True, slots=True)
class TableResult:
    """The state or the changes of a table, and of the tables of quarantined records and of current rows."""

    feed: str
    table: str
    exists: bool
    result: Flat[Synced | TableStatus | TableComparison]
    quarantine: TableResult | None
    current: TableResult | None = None


@dataclass(frozen=True, slots=True)
class OutputTables:
    """The tables of the outputs of a split feed."""

    feed: str
    outputs: tuple[TableResult, ...]


def _build_result(
    feed: str, results: Sequence[tuple[str, Synced | TableStatus | TableComparison]], tables: FeedTables
) -> TableResult:
    """Returns the result of the table of rows, with those of the feed's other tables in it."""
    built = {name: TableResult(feed, name.removeprefix("table "), r.head is not None, r, None) for name, r in results}
    quarantine = built.get(tables.quarantine.name) if tables.quarantine else None
    current = built.get(tables.current.table.name) if tables.current else None
    return replace(built[tables.rows.name], quarantine=quarantine, current=current)
