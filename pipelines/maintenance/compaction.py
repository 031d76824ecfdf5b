"""Compaction: merges the many small parts of a window into few, without Kafka and without Spark.

    find small parts that follow each other → plan (reserves, names replaced parts) → merge → prove → publish → swap

Guarantees: rows, offsets and coordinates stay as they are, and so does the account. Each row is in exactly one part
that counts: before, after, and at any crash in between. It is a batch like any other, but all or nothing. When its run
dies, the parts are as they were, and the next command that meets the batch gives it up.
`renew` writes files again whose statistics engines misread (`ports.Table.misread`), by the same kind of batch.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import CompactionSettings, WindowSettings
from sluice.pipelines.lake import paths
from sluice.pipelines.landing.writer import MAX_FOLDERS
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.fold import NO_PINS
from sluice.pipelines.maintenance.merging import MERGE_BYTES, Merge, Merger, count_files_after
from sluice.pipelines.maintenance.rewrite import RewriteMethod, Rewriting, company, foresee_free, open_for_rewriting
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.model.receipts import Met, Owner, Progress, Receipt, Reporter
from sluice.pipelines.planning import windows
from sluice.pipelines.ports import Lake, Ports
from sluice.pipelines.publishing import manifest

REQUEST = Request(RequestKind.COMPACT)
SMALL_MERGE = 8 << 20
"""The most bytes of files whose rows share a file with those of other partitions: they are in memory together."""


@dataclass(frozen=True, slots=True)
class PendingMerges:
    """The possible merges by the state below entry `number`, oldest windows first.

    `incomplete` are windows (their starts, ms) whose small parts are left alone because part of the window is pending.
    """

    number: int
    merges: tuple[Merge, ...]
    incomplete: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Compacted:
    """The merges, each with its new receipt (None in a dry run), and their `batches`.

    `busy` has by window (None: outside windows) the other live batch that reserves parts, which were left alone. `met`
    reports these batches: whether their runs are alive, and the remedies.
    """

    merged: tuple[tuple[Merge, Receipt | None], ...] = ()
    batches: tuple[int, ...] = ()
    busy: Mapping[int | None, int] = field(default_factory=dict)
    incomplete: tuple[int, ...] = ()
    met: tuple[Met, ...] = ()


# -- what there is to merge


def find(feed: Feed, ledger: Ledger, windows_wanted: Sequence[int] | None = None) -> PendingMerges:
    """Small parts of complete windows (those that start at `windows_wanted`; None: all, and rows outside windows)."""
    return _find(feed, ledger, windows_wanted, None)


def _find(feed: Feed, ledger: Ledger, windows_wanted: Sequence[int] | None, previous: _Seen | None) -> PendingMerges:
    """As `find`, without windows that a `previous` compaction has checked and that have nothing new."""
    state, window = ledger.read(), feed.window
    if windows_wanted is not None:
        lie_in = _lying_in(state, windows_wanted, window)
    else:
        lie_in = {*state.published_in} if previous is None else previous.new(state, window)
    merges = list(_list_merges(state, manifest.read_receipts_in(ledger, state, lie_in), feed))
    starts = {window.start_of(m.offset_range.window) for m in merges if m.offset_range.window is not None}
    complete = {w for w in starts if windows.complete(state, w, window)}
    whole_merges = (
        m for m in merges if m.offset_range.window is None or window.start_of(m.offset_range.window) in complete
    )
    in_order = sorted(
        whole_merges, key=lambda m: (m.offset_range.window or 0, m.offset_range.key, m.offset_range.start)
    )
    return PendingMerges(state.number, tuple(in_order), tuple(sorted(starts - complete)))


class _Seen(NamedTuple):
    """The note of a compaction of everything: below entry `number`, only the windows in `left` (None: rows outside
    windows) still had parts to merge into files of `target` bytes, which partitions share if `sharing`. Windows were of
    this `length` then (`grain`)."""

    ledger: str
    number: int
    target: int
    sharing: bool
    length: int | str
    left: tuple[int | None, ...]

    @classmethod
    def read(cls, lake: Lake, feed: Feed, state: State) -> _Seen | None:
        """Returns None unless this is a note of this ledger and these settings."""
        try:
            previous = cls(**json.loads(lake.get(paths.compacted_path(feed.stored)) or b""))
            here = (state.ledger_id, *_list_settings(feed))
            same = (previous.ledger, *previous[2:5]) == here and 0 <= previous.number <= state.number
            unbroken = not any(after > previous.number for _, after in state.gaps)
            return previous._replace(left=tuple(previous.left)) if same and unbroken else None
        except (ValueError, TypeError, RecursionError):
            return None

    def dump(self) -> bytes:
        return json.dumps(self._asdict()).encode() + b"\n"

    def new(self, state: State, window: WindowSettings) -> set[int | None]:
        """Returns the windows to check: those with newer entries, and those left over."""
        remaining = _lying_in(state, (w for w in self.left if w is not None), window)
        return state.published_in.since(self.number) | remaining | {w for w in self.left if w is None}


def _list_settings(feed: Feed) -> tuple[int, bool, int | str]:
    return feed.compaction.target_file_bytes, feed.landing.shared_files is not False, feed.window.grain


def _lying_in(state: State, starts: Iterable[int], window: WindowSettings) -> set[int | None]:
    """The windows that lie in those asked for: themselves, and those of when windows were shorter."""
    return {t for w in starts for t in windows.list_windows_within(state, w, window)}


def _list_merges(state: State, receipts: Iterable[Receipt], feed: Feed) -> Iterator[Merge]:
    """Runs of small receipts with the same key, window and folder that fit into one file and save files.

    Small ones of several partitions share a file, unless the feed forbids it. Files that offset ranges share are left
    alone: they are few already.
    """
    target, sharing = feed.compaction.target_file_bytes, feed.landing.shared_files is not False
    alike: dict[tuple[object, ...], list[Receipt]] = {}
    for r in receipts:
        s = r.offset_range
        if state.current.get(s.tp) == s.key and not any(p.shared for p in r.parts):
            alike.setdefault((s.key, s.window, s.folder, s.by_time, r.format), []).append(r)
    small: dict[tuple[object, ...], list[Merge]] = {}
    for group in alike.values():
        in_order = sorted(group, key=lambda r: r.offset_range.start)
        for m in (Merge(run) for run in _split_runs(state, in_order, target) if run):
            s = m.offset_range
            if sharing and 0 < m.bytes <= SMALL_MERGE and s.window is not None and not s.by_time:
                small.setdefault((s.topic, s.incarnation, s.window, s.folder, m.receipts[0].format), []).append(m)
            elif _is_saving_files([m]):
                yield m
    for merges in small.values():
        merges.sort(key=lambda m: (m.offset_range.partition, m.offset_range.start))
        for file in _fill_files(merges, target):
            together = [replace(m, file=file[0].offset_range) for m in file] if len(file) > 1 else file
            if _is_saving_files(together):
                yield from together


def _fill_files(merges: Sequence[Merge], target: int) -> list[list[Merge]]:
    """The merges in files of at most `target` bytes, each in the first file with room for it, in order."""
    files, room = list[list[Merge]](), list[int]()
    for m in merges:
        at = next((i for i, free in enumerate(room) if m.bytes <= free), len(files))
        if at == len(files):
            files.append([])
            room.append(target)
        files[at].append(m)
        room[at] -= m.bytes
    return files


def _is_saving_files(merges: Sequence[Merge]) -> bool:
    return count_files_after(merges) < sum(len(m.parts) for m in merges)


def _split_runs(state: State, receipts: Sequence[Receipt], target: int) -> Iterator[tuple[Receipt, ...]]:
    """Neighbours that fit into one file. Receipts of half a file or more are left alone, so that rewriting ends."""
    run: list[Receipt] = []
    run_bytes, folders = 0, frozenset[str]()
    for r in receipts:
        size, lies_in = sum(p.bytes for p in r.parts), frozenset(p.path.rpartition("/")[0] for p in r.parts)
        small = size < target // 2
        fits = run_bytes + size <= target and len(folders | lies_in) <= MAX_FOLDERS
        if run and not (small and fits and _follows(state, run, r)):
            yield tuple(run)
            run, run_bytes, folders = [], 0, frozenset()
        if small:
            run.append(r)
            run_bytes, folders = run_bytes + size, folders | lies_in
    yield tuple(run)


def _follows(state: State, run: Sequence[Receipt], r: Receipt) -> bool:
    """Returns whether it starts where the run ends, with no window boundary in between, pinned or not."""
    offsets, s = state.boundaries.get(r.offset_range.key, NO_PINS).offsets, r.offset_range
    bounded = bisect_right(offsets, run[0].offset_range.start) < bisect_left(offsets, s.end)
    return run[-1].offset_range.end == s.start and not bounded


def foresee_compaction(feed: Feed, ports: Ports, windows_wanted: Sequence[int] | None = None) -> Compacted:
    """Returns what `compact` would merge now, including the unfinished merges of a dead run. Writes nothing."""
    ledger = Ledger.offline(ports.lake, feed.stored, ports.clock)
    merges = _find(feed, ledger, windows_wanted, _Seen.read(ports.lake, feed, ledger.read()))
    free, busy, met = foresee_free(feed, ports, ledger, _build_method(feed).group(merges.merges), merges.number)
    return Compacted(tuple((m, None) for m in free), (), busy, merges.incomplete, met)


# -- carried out


def compact(
    feed: Feed, ports: Ports, windows_wanted: Sequence[int] | None, owner: Owner, report: Reporter
) -> Compacted:
    """Merge what `find` finds, batch by batch. What one batch put in place stays, whatever stops the next.

    Rewriting batches of dead runs are given up first, and reported. Raises PlanBusy while another run merges,
    OwnershipLost, ProofFailed for a part that differs from the ledger, LakeFull, LakeUnavailable.
    """
    with open_for_rewriting(feed, ports, owner, REQUEST.kind, report) as ledger:
        report(Progress("find"))
        merges = _find(feed, ledger, windows_wanted, _Seen.read(ports.lake, feed, ledger.read()))
        run = Rewriting(feed, ports, ledger, owner, report, _build_method(feed))
        run.all(merges.merges, merges.number)
        if windows_wanted is None:
            unfinished = {*merges.incomplete, *(b if b is None else feed.window.start_of(b) for b in run.busy)}
            of = (ledger.read().ledger_id, merges.number, *_list_settings(feed))
            with suppress(SluiceError):  # the next one checks more, and packs the rest
                ports.lake.put(paths.compacted_path(feed.stored), _Seen(*of, tuple(unfinished)).dump())
                ledger.pack()
        met = company(feed.name, ledger, ports.liveness, run.busy.values())
    return Compacted(tuple(run.done), tuple(run.batches), run.busy, merges.incomplete, met)


def _build_method(feed: Feed) -> RewriteMethod[Merge]:
    at_once = threads(feed.compaction, os.cpu_count() or 1)
    return RewriteMethod(REQUEST, "merge", lambda context: Merger(context).write, at_once, lambda m: m.file)


def threads(settings: CompactionSettings, cores: int) -> int:
    """How many merges run at once."""
    return max(min(cores, settings.memory // MERGE_BYTES), 1)


def renew(feed: Feed, ports: Ports, addresses: Collection[str], owner: Owner, report: Reporter) -> Compacted:
    """Write the files at these addresses again, batch by batch; what one batch replaced stays replaced.

    Offset ranges of a shared file get files of their own. A file that another live batch works on, or that holds a
    topic's earlier life, stays as it is. Raises as `compact`.
    """
    with open_for_rewriting(feed, ports, owner, REQUEST.kind, report) as ledger:
        report(Progress("find"))
        state = ledger.read()
        run = Rewriting(feed, ports, ledger, owner, report, _build_method(feed))
        # Offset ranges that share a file with a chosen one are rewritten, too: the file goes as a whole.
        receipts = manifest.read_receipts_in(ledger, state, {*state.published_in})
        chosen = [r for r in receipts if any(ports.lake.locate(p.path) in addresses for p in r.parts)]
        run.all([Merge((r,)) for r in manifest.with_sharers(ledger, state, chosen)], state.number)
        met = company(feed.name, ledger, ports.liveness, run.busy.values())
    return Compacted(tuple(run.done), tuple(run.batches), run.busy, (), met)
