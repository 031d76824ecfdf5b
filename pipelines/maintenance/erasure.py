"""Erasure: removes the rows of chosen records, first by an entry in the ledger, then from the files.

    entry with the offsets → reports and notes with values go → plan → parts without the rows → prove → publish → swap
    → tables forget their older snapshots → the note of the process goes

Guarantees: from the entry on, no batch can publish rows of these offsets, whichever run wrote it: the fold calls such
an entry void. Rewriting goes by whole windows, so a reader finds each window either old or new. The account stays
closed: erased records are a class of their own. `finish` continues the work of a dead run; call it at any time.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines.errors import Refused
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import parquet, paths
from sluice.pipelines.ledger import Appended, BatchStatus, Ledger, State
from sluice.pipelines.ledger.entries import EraseEntry, HoldEntry, KeyRange, PublishEntry
from sluice.pipelines.maintenance.compaction import threads
from sluice.pipelines.maintenance.merging import Merge, Merger
from sluice.pipelines.maintenance.rewrite import RewriteMethod, Rewriting, company, give_up_dead, open_for_rewriting
from sluice.pipelines.model.kafka import Key, Range, intersect, subtract, union
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.model.receipts import Met, Owner, Receipt, Reporter
from sluice.pipelines.planning import windows
from sluice.pipelines.ports import Lake, Liveness, Ports
from sluice.pipelines.publishing import manifest, publish
from sluice.pipelines.records.rows.row_format import inside
from sluice.pipelines.schema.arrays import fixed_width, int64s

REQUEST = Request(RequestKind.ERASE)
Offsets = Mapping[Key, tuple[Range, ...]]


@dataclass(frozen=True, slots=True)
class ErasureRequest:
    """The offsets of records to erase, with reason and author."""

    offsets: Offsets
    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The rewritten offset ranges, each with its new receipt, and their `batches`.

    `removed` are the lake paths of reports with values. `busy` has by window the other live batch that reserves parts;
    `met` reports these. `number` is that of the entry; None without a new one. `notes` are those of the erasures that
    are finished once the tables forget their older snapshots: remove them then.
    """

    done: tuple[tuple[Merge, Receipt], ...] = ()
    batches: tuple[int, ...] = ()
    removed: tuple[str, ...] = ()
    busy: Mapping[int | None, int] | None = None
    met: tuple[Met, ...] = ()
    number: int | None = None
    notes: tuple[str, ...] = ()


def erase(feed: Feed, ports: Ports, request: ErasureRequest | None, owner: Owner, report: Reporter) -> Finished:
    """Append the entry of the request, if there is one, and carry out all erasures. Raises as `decide` and `finish`."""
    appended = None
    if request is not None:
        ledger = Ledger.offline(ports.lake, feed.stored, ports.clock, request.by)
        appended = decide(ledger, ports.liveness, request.offsets, request.reason, report)
    return replace(finish(feed, ports, owner, report), number=appended.number if appended else None)


def decide(ledger: Ledger, liveness: Liveness, offsets: Offsets, reason: str, report: Reporter) -> Appended | None:
    """Append the entry that erases the landed ones of these offsets; None if all of them are erased already.

    Raises PlanBusy while a live batch reserves one: it may have read the rows before; Refused for records on hold.
    """
    give_up_dead(ledger, liveness, None, report)

    def append(state: State) -> EraseEntry | None:
        ranges = tuple(_list_new(state, offsets))
        _check_holds(ledger, state, ranges)
        wanted = {item.key: offsets[item.key] for item in ranges}
        for batch, s in state.list_live_ranges():
            if any(r.meets(s.range) for r in wanted.get(s.key, ())):
                verdict = publish.judge_batches(liveness, [batch])[batch.id]
                raise publish.build_busy_error(ledger.feed, batch, s, verdict)
        records = sum(item.range.span for item in ranges)
        return EraseEntry(ranges=ranges, records=records, reason=reason) if ranges else None

    return ledger.append(append)


def find_holds(state: State, ranges: Iterable[tuple[Key, Range]]) -> Iterator[tuple[int, Key, Range]]:
    """Yields the entry of each hold on a window with one of these records, with their range."""
    for key, r in ranges if state.holds else ():
        for start in (p.window for p in windows.cut_at_boundaries(state, key, r)):
            later = state.boundary_times[bisect_right(state.boundary_times, start) :] if start is not None else ()
            yield from ((number, key, r) for number in state.find_holds(start, next(iter(later), None)))


def _check_holds(ledger: Ledger, state: State, ranges: Iterable[KeyRange]) -> None:
    """Raises Refused if a window with one of these records is on hold."""
    for number, key, r in find_holds(state, ((item.key, item.range) for item in ranges)):
        if isinstance(entry := ledger.entry(number), HoldEntry):
            raise Refused(
                f"{key.tp} {r} is on hold, by {entry.run}: {entry.reason}",
                remedy=f"once the hold has ended: sluice hold {ledger.feed} --release {number} --reason …",
            )


def _list_new(state: State, offsets: Offsets) -> Iterator[KeyRange]:
    for key, ranges in sorted(offsets.items()):
        landed = (x for r in ranges for x in intersect(state.landed.get(key, ()), r))
        new = union(rest for x in landed for rest in subtract(x, state.erased.get(key, ())))
        yield from (KeyRange(key=key, range=r) for r in new)


def finish(feed: Feed, ports: Ports, owner: Owner, report: Reporter) -> Finished:
    """Write the parts again that still have rows of erased records, and remove reports and notes with their values.

    Raises PlanBusy while another run erases, OwnershipLost, ProofFailed for a part that differs from the ledger,
    LakeFull, LakeUnavailable.
    """
    with open_for_rewriting(feed, ports, owner, REQUEST.kind, report) as ledger:
        state = ledger.read()
        if state.erasing:  # until the files are written again, the ledger alone reports it
            note = paths.build_erasing_path(feed.stored, state.number, owner.token)
            ports.lake.put(note, owner.describe().encode())
        listed = ports.lake.list(paths.get_erasing_folder(feed.stored))
        # Notes of later erasures stay: their entries are beyond this state, so their files may not be clean after this
        # run.
        notes = tuple(path for path in listed if (of := paths.parse_erasing_path(path)) and of[0] <= state.number)
        removed = _remove_values(ledger, ports.lake, state)
        pending = [(key, r) for key, ranges in state.erasing.items() for r in ranges]
        # A shared file is written again as a whole, so the offset ranges that share it are rewritten along.
        receipts = manifest.with_sharers(ledger, state, manifest.read_receipts_meeting(ledger, state, pending))
        method: RewriteMethod[Merge] = RewriteMethod(
            REQUEST,
            "erase",
            lambda context: Merger(context, state.erased).write,
            threads(feed.compaction, os.cpu_count() or 1),
            whole_windows=True,
        )
        run = Rewriting(feed, ports, ledger, owner, report, method)
        run.all([Merge((r,)) for r in receipts], state.number)
        # Again: a report that was built in between is of the former rows.
        removed = (*removed, *_remove_values(ledger, ports.lake, state))
        _discard_writes(ports.lake, feed.stored, ledger.read())
        met = company(feed.name, ledger, ports.liveness, run.busy.values())
    notes = () if run.busy else notes
    return Finished(tuple(run.done), tuple(run.batches), tuple(dict.fromkeys(removed)), run.busy, met, None, notes)


def _discard_writes(lake: Lake, feed: str, state: State) -> None:
    """Remove what killed processes wrote of a file: it may have rows of erased records. Staging of live batches stays.

    A table's publisher that is still writing fails, and the next sync repeats its work.
    """
    if not state.erased:
        return
    for root in (paths.staging_root(feed), *paths.visible_roots(feed), paths.get_current_table_root(feed)):
        for name, _ in [*lake.list_unfinished(root)]:
            batch = state.batches.get(paths.staged_batch(name) or 0)
            if batch is None or batch.status is not BatchStatus.PLANNED:
                lake.discard(name)


def _remove_values(ledger: Ledger, lake: Lake, state: State) -> tuple[str, ...]:
    """Remove the pages of batches and windows that ever had an erased offset, and its rows in notes of replays. Returns
    the paths of the pages."""
    if not state.erased:
        return ()
    publishers = _list_publishers(ledger, state)
    erased_in = {w for rs in publishers.values() for r in rs if (w := r.offset_range.window) is not None}
    listed = [*lake.list(paths.batch_page_folder(ledger.feed))]
    starts = sorted(start for p in listed if (start := paths.parse_page_window(p)) is not None)
    # A page may be of a longer window than the range lay in when it landed.
    hours = {starts[at - 1] for w in erased_in if (at := bisect_right(starts, w))}
    pages = [p for p in listed if paths.page_batch(p) in publishers or paths.parse_page_window(p) in hours]
    for path in pages:
        lake.remove(path)
    for batch, receipts in publishers.items():
        for s in (r.offset_range for r in receipts if r.relanded):
            _clean_note(lake, paths.relanded_path(ledger.feed, batch, s), state.list_erased(s))
    return tuple(pages)


def _list_publishers(ledger: Ledger, state: State) -> dict[int, list[Receipt]]:
    """Returns the batches that ever published an erased offset, with their receipts of such ranges."""
    pieces = (p for key, rs in state.erased.items() for r in rs for p in windows.cut_at_boundaries(state, key, r))
    lie_in = {None, *(p.window for p in pieces)}
    out: dict[int, list[Receipt]] = {}
    for number in sorted({n for w in lie_in for n in state.published_in.get(w, ())}):
        if isinstance(entry := ledger.entry(number), PublishEntry):
            receipts = [r for r in entry.receipts if state.list_erased(r.offset_range)]
            out |= {entry.batch: receipts} if receipts else {}
    return out


def _clean_note(lake: Lake, path: str, erased: tuple[Range, ...]) -> None:
    """Write the note of a replay again without the rows at these offsets: they have parts of values."""
    if lake.size(path) is None:
        return
    with parquet.open_parquet(lake, path) as file:
        rows = file.read()
    outside = np.flatnonzero(~inside(int64s(rows.column("offset").combine_chunks()), erased))
    if len(outside) < rows.num_rows:
        out = pa.BufferOutputStream()
        pq.write_table(rows.take(fixed_width(pa.int64(), outside)), out, compression="zstd", store_schema=False)
        lake.put(path, out.getvalue().to_pybytes())
