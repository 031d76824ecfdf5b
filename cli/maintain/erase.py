"""`sluice erase`: remove the rows of chosen records, by an entry in the ledger."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from sluice.cli.app.invocation import FeedName, Session, command
from sluice.cli.app.parameters import option
from sluice.cli.options.request_options import Yes
from sluice.cli.shared import other_batches, rewrite_summary
from sluice.cli.terminal.output import copyable, format_dry_run, good, warn
from sluice.pipelines.errors import SluiceError, UsageError
from sluice.pipelines.util.units import many

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.maintenance.erasure import ErasureRequest, Finished
    from sluice.pipelines.model.receipts import Reporter
    from sluice.pipelines.operating.record_search import Criteria, Matches
    from sluice.pipelines.ports import Ports


def register(app: typer.Typer) -> None:
    command(app)(erase)


@dataclass(frozen=True, slots=True)
class Selection:
    """The records to erase, as typed."""

    where: Annotated[
        str | None,
        option("--where", "SQL", "Records whose row meets this condition, such as: customer_id = 17 (DuckDB's SQL)."),
    ] = None
    keys_file: Annotated[Path | None, option("--keys-file", "FILE", "Records with one of these keys, one a line.")] = (
        None
    )
    column: Annotated[
        str | None, option("--column", "NAME", "With --keys-file: the column.", show_default="the record's key")
    ] = None

    def parse(self) -> Criteria | None:
        """Returns None if nothing is asked for. Raises UsageError."""
        from sluice.pipelines.operating.record_search import Criteria

        if self.where and self.keys_file:
            raise UsageError("--where together with --keys-file", remedy="use either --where or --keys-file")
        if self.column and not self.keys_file:
            raise UsageError("--column without --keys-file", remedy="add --keys-file FILE")
        if self.keys_file:
            try:
                keys = [line for line in self.keys_file.read_text("utf-8").splitlines() if line]
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
                raise UsageError(f"{self.keys_file}: {reason}", remedy="one key a line, in UTF-8") from None
            return Criteria(keys=tuple(dict.fromkeys(keys)), column=self.column or "")
        return Criteria(self.where) if self.where else None


def erase(
    session: Session,
    feed: FeedName,
    selection: Selection,
    reason: Annotated[str | None, option("--reason", "TEXT", "The reason; the ledger keeps it.")] = None,
    yes: Yes = False,
) -> int:
    """Erase records: from landed files, quarantine, tables with their older snapshots, and reports.

    It is a preview without --yes. The ledger records the offsets with user and reason, never the condition. No
    replay, repair or --replace brings the rows back. Records that land later are not erased. Kafka is not changed.
    Without --where and --keys-file, it finishes erasures that were interrupted. Exit 1 while a table, or a file that
    another run works on, still has the rows.

    $ sluice erase orders --where "customer_id = 17"
    $ sluice erase orders --where "customer_id = 17" --reason "request 4711" --yes
    $ sluice erase orders --keys-file keys.txt --column email --reason "request 4712" --yes
    """
    from sluice.pipelines.operating.record_search import search

    dataset, criteria = session.find_dataset(feed), selection.parse()
    if yes and criteria and not (reason or "").strip():
        raise UsageError("--reason is missing", remedy='add --reason "request 4711", or preview it without --yes')
    with session.open_ports(dataset) as ports:
        matches = None
        if criteria:
            with session.terminal.progress() as meter:
                matches = search(dataset, ports, criteria, meter)
            session.terminal.show(*rewrite_summary.view_matches(dataset, matches, f"Erasure in {dataset.dataset}"))
        if not yes:
            # With --yes, a hold is an error; the preview shows all of them with the command that ends each.
            for hold in matches.holds if matches else ():
                release = copyable(f"sluice hold {dataset.name} --release {hold.number} --reason …")
                session.terminal.show(warn(f"refused while windows of them are on hold {hold}"), release)
            session.terminal.show(_format_remaining(), format_dry_run("nothing was erased; add --yes"))
            session.terminal.print_document(matches, feed=feed, applied=False)
            return 0
        return _carry_out(session, dataset, ports, matches, reason or "")


def _carry_out(session: Session, dataset: Feed, ports: Ports, matches: Matches | None, reason: str) -> int:
    from sluice.pipelines.maintenance.erasure import ErasureRequest

    by = f"{getpass.getuser()} on {socket.gethostname()}"
    with session.terminal.progress() as meter:
        heard = other_batches.MetRecorder(meter)
        request = ErasureRequest(matches.offsets, reason, by) if matches else None
        done, cleaned, unclean = carry_out(session, dataset, ports, request, heard)
    session.terminal.show(*_format_done(done), *other_batches.view(heard.met), *cleaned, *unclean, _format_remaining())
    session.terminal.print_document(
        matches,
        feed=dataset.dataset,
        applied=True,
        entry=done.number,
        batches=done.batches,
        rewritten=len(done.done),
        removed_reports=len(done.removed),
        other_batches=(*heard.met, *done.met),
    )
    return int(bool(unclean or done.busy))


def carry_out(
    session: Session, dataset: Feed, ports: Ports, request: ErasureRequest | None, report: Reporter
) -> tuple[Finished, list[Text], list[Text]]:
    """Carry out the request, and erasures that were interrupted, in files and tables, whose older snapshots expire.

    Returns the result, the lines of tables, and of those that failed.
    """
    from sluice.pipelines.maintenance.erasure import erase
    from sluice.pipelines.operating.feed_tables import forget_snapshots
    from sluice.resources.liveness import new_owner
    from sluice.resources.open_ports import open_tables

    done = erase(dataset, ports, request, new_owner("erase"), report)
    feed, cleaned, unclean = session.feed(dataset.name), list[Text](), list[Text]()
    for tabled in feed.table_feeds:
        try:
            with open_tables(tabled, ports.lake) as tables:
                forgotten = forget_snapshots(tabled, ports, tables)
        except SluiceError as error:
            again = f"sluice erase {dataset.name} --yes"
            unclean.append(warn(f"the table may still have the rows: {error.message}: {error.remedy}; then: {again}"))
            continue
        text = f"{many(forgotten.expired, 'snapshot')} and {many(len(forgotten.cleaned), 'file')} removed"
        cleaned.append(good(f"{tables.rows.name}: {text}"))
    for note in () if unclean else done.notes:
        ports.lake.remove(note)
    return done, cleaned, unclean


# -- for people


def _format_done(done: Finished) -> Iterator[Text]:
    if done.number is not None:
        yield good(f"erased, by ledger entry {done.number}: {many(len(done.done), 'offset range')} written again")
    elif done.done:
        yield good(f"finished: {many(len(done.done), 'offset range')} written again")
    else:
        yield good("nothing left to erase")
    if done.removed:
        yield good(f"{many(len(done.removed), 'report')} with values of these batches removed")
    if done.busy:
        yield warn("another batch reserves some of the files: run it again when that batch has ended")


def _format_remaining() -> Text:
    return Text(
        "  Out of reach, where they have these records: Kafka until its retention, topics and dead letters to which"
        " they were sent, staged batches that wait for a decision, results of SQL reports, copies and backups.",
        "dim",
    )
