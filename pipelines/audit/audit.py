"""Audits a feed: every offset from origin to frontier is in exactly one class, every part matches the ledger, and
nothing else lies under `data/` (docs/developers/design/audits.md).

Invariants have the numbers of docs/developers/design/invariants.md.

`audit` checks the ledger and the files; `rescan` compares every value with Kafka.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.audit.audit_cache import Audited, EntryHashes, shown, still_counts, still_there, tag
from sluice.pipelines.audit.gaps import Gap
from sluice.pipelines.audit.receipt_rows import (
    COUNTS,
    NEVER,
    PROOFS,
    ReceiptRow,
    Rows,
    place_of,
    runs,
)
from sluice.pipelines.errors import Terminal
from sluice.pipelines.lake import parquet, paths
from sluice.pipelines.landing.proof import hash_file
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.account import OffsetAccount, build_account
from sluice.pipelines.ledger.entries import Entry, PublishEntry, parse
from sluice.pipelines.model.kafka import Key, Range, intersect, subtract, union
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Counts, Part, PartKind, Receipt
from sluice.pipelines.ports import Lake, Stat
from sluice.pipelines.publishing import published_files
from sluice.pipelines.records.rows.row_format import inside, offset_column
from sluice.pipelines.schema.arrays import int64s
from sluice.pipelines.util.documents import AsText, Derived, Flat, Instant, Internal
from sluice.pipelines.util.parallel import map_parallel


@dataclass(frozen=True, slots=True)
class AuditProblem:
    """One violated invariant. `invariant` is its number in docs/developers/design/invariants.md.

    For a problem with a file, `file` is its lake path and `remedy` the command that repairs it; `ranges` are the offset
    ranges of a file that is missing or damaged. `by_size`: it is missing or has another size.
    """

    invariant: int
    text: str
    file: str = ""
    remedy: str = ""
    ranges: AsText[tuple[OffsetRange, ...]] = ()
    by_size: Internal[bool] = False

    def __str__(self) -> str:
        return f"I{self.invariant}: {self.text}"


@dataclass(frozen=True, slots=True)
class AuditedPartition:
    """The account of one partition. `holes` lie between the frontier and landed offsets; `files` counts parts."""

    key: Flat[Key]
    origin: int
    frontier: int
    account: Flat[OffsetAccount]
    committed: int | None
    holes: tuple[Range, ...]
    reserved: tuple[Range, ...]
    files: int
    bytes: int
    relanded: int = 0
    """Landed records that had been in quarantine before."""
    fixed: int = 0
    """Re-landed records whose bytes differ from the log's."""
    ended: Instant | None = None
    """The time (ms) at which the feed left this life of the log. Records beyond `known_end` may be unseen."""
    known_end: int = 0
    new_feed: str = ""
    """The feed to which the topic was moved at the end of this life."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of an audit. `compared` counts records that a rescan compared with Kafka.

    Of `batches` live publish entries, `looked_at` were checked with all their files. Earlier audits proved the others,
    between the times `proven` (ms). The next audit may rely on `audited`. `rest` are live receipts with problems, each
    with its entry number.
    """

    feed: str
    partitions: tuple[AuditedPartition, ...]
    problems: tuple[AuditProblem, ...]
    files: int
    rows: int
    audited: Internal[Audited]
    rest: Internal[tuple[tuple[int, Receipt], ...]] = ()
    looked_at: int = 0
    batches: int = 0
    proven: tuple[Instant, Instant] | None = None
    unlisted: int = 0
    """Old batches whose files a quick audit did not list. It takes them in turns."""
    seen: Internal[int] = 0
    """The time (ms) by which all of these had been listed last."""
    at: Instant = 0
    """The time of the audit (ms)."""
    compared: int = 0
    not_comparable: int = 0
    """Records that Kafka has deleted: a rescan cannot compare them."""
    compared_before: int = 0
    """Landed records that earlier rescans compared."""
    gaps: tuple[Gap, ...] = ()
    """Offsets that no batch held, by partition of the topics' current lives."""
    foreign: tuple[str, ...] = ()
    """Files of other writers, named by retained snapshots of the feed's table."""

    @property
    def reconciled(self) -> Derived[bool]:
        return not self.problems

    def list_uncompared(self) -> list[ReceiptRow]:
        """Returns the receipts that no known audit compared with Kafka."""
        rows = self.audited.rows
        return rows.where(rows.column("compared") == NEVER).to_rows() + [
            ReceiptRow(n, r.offset_range.key, r.offset_range.range, r.counts.landed) for n, r in self.rest
        ]


def list_live_receipts(ledger: Ledger, state: State) -> list[Receipt]:
    """Returns the live receipts of every publish entry, oldest first."""
    published = ((n, e) for n, e in ledger.entries() if isinstance(e, PublishEntry))
    return [r for n, e in published for r in state.receipts(n, e)]


def audit(
    ledger: Ledger,
    lake: Lake,
    *,
    hashes: bool = False,
    previous: Audited | None = None,
    at: int = 0,
    quick: bool = False,
) -> AuditReport:
    """Check every offset against the ledger and the files. `hashes` reads every byte; the default reads footers.

    With `previous`, only changed entries and files, and batches with problems, are checked again; otherwise everything
    is. `at` is the current time (ms). `quick` also skips the listing of old batches, except superseded ones and one
    portion in turn. An unreadable file is reported as a problem. Raises LedgerCorrupt, LedgerTooNew, LakeUnavailable.
    """
    state = ledger.read()
    scope = _find_scope(ledger, lake, state, previous, "hashed" if hashes else "looked", quick=quick)
    # Files are opened in parallel, and each file once for all of its offset ranges.
    files = scope.list_files()
    checked = map_parallel(lambda claims: _check_file(lake, ledger.feed, claims, hashes=hashes), list(files.values()))
    bad_files = {path for path, problems in zip(files, checked, strict=True) if problems}
    bad_sums = [list(_check_sums([r])) for _, r in scope.receipts]
    # A receipt is sound if its sums and all of its files are: only sound ones go into the results for the next audit.
    sound = [not sums and bad_files.isdisjoint(p.path for p in r.parts)
             for sums, (_, r) in zip(bad_sums, scope.receipts, strict=True)]  # fmt: skip
    rows = scope.make_rows(at // 1000, hashed=hashes)
    everything = scope.rows.plus(rows)
    strangers = scope.list_strangers()
    # Files of other writers that retained snapshots of the feed's table name are no strangers.
    noted = published_files.read_pending_removals(lake, ledger.feed) if strangers else published_files.PendingRemovals()
    foreign = noted.foreign.intersection(strangers)
    unfinished = [
        f"{key}: {sum(r.span for r in ranges)} records are to be erased, and may still be in files"
        for key, ranges in sorted(state.erasing.items())
    ] or [
        f"an erasure by {(lake.get(note) or b'?').decode()} is not finished: snapshots of tables may have its rows"
        for note in lake.list(paths.get_erasing_folder(ledger.feed))
        if paths.parse_erasing_path(note)
    ]
    problems = [
        *itertools.chain.from_iterable(bad_sums),
        *_check_overlaps(state, everything),
        *(_check_landed(ledger.feed, state, everything) if not scope.settled else ()),  # else it tiles
        *_check_commits(state),
        *(AuditProblem(19, text, remedy=f"sluice erase {ledger.feed} --yes   finishes it") for text in unfinished),
        *_check_strangers(ledger, lake, state, [path for path in strangers if path not in foreign]),
        *_check_copies(scope.log),
        *itertools.chain.from_iterable(checked),
    ]
    rest = tuple(claims for claims, is_sound in zip(scope.receipts, sound, strict=True) if not is_sound)
    settled = scope.settled
    return AuditReport(
        ledger.feed,
        tuple(_list_partitions(state, everything.plus(scope.sums))),
        tuple(problems),
        len(np.unique(everything.tags)) + sum(s.parts for s in settled),
        int(everything.column("rows").sum()) + sum(s.rows for s in settled),
        scope.make_audited(scope.rows.plus(rows.where(np.array(sound, bool))), {n for n, _ in rest}, strangers),
        rest,
        len({n for n, _ in scope.receipts}),
        len(np.unique(everything.column("number"))) + sum(s.batches for s in settled),
        scope.get_proof_times(),
        sum(s.batches for s in settled),
        min((s.seen for s in settled), default=0) * 1000,
        at,
        foreign=tuple(sorted(foreign)),
    )


def _find_scope(
    ledger: Ledger, lake: Lake, state: State, previous: Audited | None, proof: str, *, quick: bool
) -> _Scope:
    """Returns the scope that relies on as much of `previous` as still holds: on some rows, on all rows, or on none."""
    if previous is not None and quick and previous.may_be_quick(state):
        due = previous.due(state)
        if (loaded := previous.with_settled(lake, ledger.feed, due)) is not None:
            listed = previous.numbers(due) if loaded.settled else [(0, None)]
            log = EntryHashes(ledger, state, listed, loaded.log)
            if log.begin(loaded):
                scope = _Scope(ledger, lake, state, loaded, log, proof)
                if not scope.settled or (not scope.unread and scope.tiles()):
                    return scope
    if previous is not None and (loaded := previous.with_settled(lake, ledger.feed)) is not None:
        log = EntryHashes(ledger, state)
        if log.begin(loaded):
            return _Scope(ledger, lake, state, loaded, log, proof)
    return _Scope(ledger, lake, state, None, EntryHashes(ledger, state), proof)


class _Scope:
    """The scope of an audit. `rows` are those of `previous` that still hold: entries and files are unchanged.
    `receipts` are live receipts to be checked, each with its entry number.

    An entry is checked completely: if part of it changed, none of its rows holds.
    """

    def __init__(
        self, ledger: Ledger, lake: Lake, state: State, previous: Audited | None, log: EntryHashes, proof: str
    ) -> None:
        self._ledger, self._lake, self._state, self._previous = ledger, lake, state, previous
        self.log, self._proof, none = log, proof, Rows.of((), self.tag, ())
        self.settled = previous.settled if previous else ()
        self.sums = previous.sums if previous else none
        since = previous.number if previous else 0
        self.receipts: list[tuple[int, Receipt]] = []
        for number, path, data in log.entries(since):
            self._take(number, parse(data, path))
        self.listed, unopened = self._list_visible()
        self.unread = None in unopened
        self._unloaded_tags = {tag for rows in unopened if rows for tag in rows.tags.tolist()}
        rows = previous.rows if previous else none
        counts = still_counts(rows, state, since)
        holds = counts & still_there(rows, self.listed) & (rows.column(proof) != NEVER)
        again = {*(previous.again if previous else ()), *rows.column("number")[counts & ~holds].tolist()}
        self.rows, stale_tags = rows.where(holds), rows.where(~holds).tags
        while len(again := again | self._sharing(stale_tags)):
            stale_tags = self._read_again(again)
            again = set()

    def _list_visible(self) -> tuple[dict[str, int], list[Rows | None]]:
        """Returns the tags of the feed's visible files by path: of all, or only of those in the folders of checked
        entries if some rows are not loaded. Also returns such rows with files there, None for a damaged file of them.
        """
        previous, lake, feed = self._previous, self._lake, self._ledger.feed
        if previous is None or not previous.settled:
            return shown(lake, feed), []
        again = ((n, e) for n in previous.again if isinstance(e := self._ledger.entry(n), PublishEntry))
        old = (r for n, e in again for r in self._state.receipts(n, e))
        wanted = {
            *(previous.folders or ()),
            *previous.strange,
            *(place_of(p.path) for r in (*(r for _, r in self.receipts), *old) for p in r.parts),
        }
        everywhere, known_folders = "" in wanted, {p for s in previous.settled for p in s.places}
        unloaded = [s for s in previous.settled if everywhere or not wanted.isdisjoint(s.places)]
        listed = shown(lake, feed, None if everywhere else list(runs(wanted, known_folders)))
        return listed, [s.load(lake, feed) for s in unloaded]

    def _take(self, number: int, entry: Entry) -> None:
        if isinstance(entry, PublishEntry):
            self.receipts += [(number, r) for r in self._state.receipts(number, entry)]

    def _sharing(self, stale_tags: Any) -> set[int]:
        """Returns the entries of rows that share a file with a receipt to be checked or with stale rows."""
        paths_ = [p.path for _, r in self.receipts for p in r.parts]
        tags = np.array([self.listed[p] for p in paths_ if p in self.listed], np.uint64)
        shared = np.isin(self.rows.tags, np.concatenate([tags, stale_tags]))
        return {*self.rows.column("number")[np.unique(self.rows.owners[shared])].tolist()}

    def _read_again(self, numbers: set[int]) -> Any:
        """Read the entries again. Returns the tags of their rows, now stale."""
        reread = np.isin(self.rows.column("number"), sorted(numbers))
        stale_tags, self.rows = self.rows.where(reread).tags, self.rows.where(~reread)
        for number in sorted(numbers):
            self._take(number, self._ledger.entry(number))
        return stale_tags

    def tag(self, path: str) -> int:
        """Returns the tag of the listed file, or for a missing file a tag that no other file has."""
        return self.listed[path] if path in self.listed else tag(Stat(path, -1, ""))

    def list_files(self) -> dict[str, list[tuple[Receipt, Part]]]:
        """Returns the files to be checked, each with all of its offset ranges."""
        out: dict[str, list[tuple[Receipt, Part]]] = {}
        for _, r in self.receipts:
            for p in r.parts:
                out.setdefault(p.path, []).append((r, p))
        return out

    def make_rows(self, seconds: int, *, hashed: bool) -> Rows:
        """Returns the rows of the receipts to be checked, proved at that time."""
        proofs = {"looked": seconds, "hashed": seconds if hashed else NEVER}
        return Rows.of(self.receipts, self.tag, [proofs.get(p, NEVER) for p in PROOFS])

    def tiles(self) -> bool:
        """Returns whether the spans of live receipts add up to the landed offsets, so that no two overlap."""
        spans = Counter({key: row["span"] for key, row in self.rows.plus(self.sums).by_partition().items()})
        for _, r in self.receipts:
            spans[r.offset_range.key] += r.offset_range.span
        landed = {key: sum(r.span for r in ranges) for key, ranges in self._state.landed.items()}
        return all(landed.get(key, 0) == spans[key] for key in {*spans, *landed})

    def get_proof_times(self) -> tuple[int, int] | None:
        """Returns the oldest and the newest time (ms) of the proofs that the audit relies on."""
        when = self.rows.column(self._proof)
        times = [*map(int, (when.min(), when.max()) if len(when) else ()), *(t for s in self.settled for t in s.looked)]
        return (min(times) * 1000, max(times) * 1000) if times else None

    def make_audited(self, rows: Rows, again: set[int], strangers: Sequence[str]) -> Audited:
        """Returns the results for the next audit: the sound rows, and the entries to be checked again."""
        return Audited(
            self._state.ledger_id,
            self._state.number,
            tuple(sorted(again)),
            self.log.blocks(),
            self._previous.strictly if self._previous else None,
            self.settled,
            strange=tuple(sorted({place_of(path) for path in strangers})),
            rows=rows,
            sums=self.sums,
            tagged={tag: place_of(path) for path, tag in self.listed.items()},
        )

    def list_strangers(self) -> list[str]:
        """Returns the visible files that belong to no live receipt."""
        live = {p.path for _, r in self.receipts for p in r.parts}
        known_tags = {*self.rows.tags.tolist(), *self._unloaded_tags}
        return [path for path, tag in self.listed.items() if path not in live and tag not in known_tags]


def _list_partitions(state: State, rows: Rows) -> Iterator[AuditedPartition]:
    figures = rows.by_partition()
    for key in sorted(state.origins):
        of = Counter(figures.get(key, {}))
        yield AuditedPartition(
            key=key,
            origin=state.origins[key].offset,
            frontier=state.frontier(key),
            account=build_account(state, key, Counts(**{name: of[name] for name in COUNTS})),
            committed=state.commits.get(key),
            holes=state.holes(key),
            reserved=state.list_reserved(key),
            files=of["files"],
            bytes=of["bytes"],
            relanded=of["relanded"],
            fixed=of["mended"],
            ended=state.ended.get(key),
            known_end=state.find_known_end(key),
            new_feed=state.find_new_feed(key),
        )


def _check_sums(receipts: Iterable[Receipt]) -> Iterator[AuditProblem]:
    for r in receipts:
        if r.counts.total != r.offset_range.span:
            yield AuditProblem(
                5, f"{r.offset_range}: classes add up to {r.counts.total}, the span is {r.offset_range.span}"
            )
        for kind, count in ((PartKind.LANDED, r.counts.landed_rows), (PartKind.QUARANTINED, r.counts.quarantined)):
            rows = sum(p.rows for p in r.of(kind))
            if rows != count:
                yield AuditProblem(5, f"{r.offset_range}: {count} rows {kind} by its counts, {rows} in its parts")
        if r.counts.erased != sum(x.span for x in intersect(r.erased, r.offset_range.range)):
            yield AuditProblem(5, f"{r.offset_range}: {r.counts.erased} records are erased, its offsets are {r.erased}")
        # Re-landed offsets must be among the landed ones, and fixed ones among the re-landed.
        relanded, span = union(r.relanded), sum(x.span for x in r.relanded)
        inside = not relanded or (r.offset_range.start <= relanded[0].start and relanded[-1].end <= r.offset_range.end)
        if span > r.counts.landed or not inside:
            yield AuditProblem(
                5, f"{r.offset_range}: {span} re-landed records are not among its {r.counts.landed} landed ones"
            )
        if union((*relanded, *r.mended)) != relanded:
            yield AuditProblem(5, f"{r.offset_range}: repaired records were never re-landed")


def _check_overlaps(state: State, rows: Rows) -> Iterator[AuditProblem]:
    names = ("landed", "lost", "retired", "skipped")
    others = [(key, r, n) for n, by in enumerate((state.lost, state.retired, state.skipped), 1)
              for key, ranges in by.items() for r in ranges]  # fmt: skip
    own_keys, own_indexes = rows.by_key()
    keys = sorted({*own_keys, *(key for key, _, _ in others)})
    indexes = {key: i for i, key in enumerate(keys)}
    at = np.array([indexes[k] for k in own_keys] or [0], np.int64)
    mine = np.stack([at[own_indexes], rows.column("start"), rows.column("end"), np.zeros(len(rows), np.int64)])
    theirs = np.array([(indexes[k], *r, n) for k, r, n in others], np.int64).reshape(-1, 4).T
    bounds = np.concatenate([mine, theirs], axis=1)
    key, start, end, name = bounds = bounds[:, np.lexsort(bounds[::-1])]
    meets = (key[1:] == key[:-1]) & (start[:-1] < end[1:]) & (start[1:] < end[:-1])
    for i in np.flatnonzero(meets).tolist():
        a, b = (Range(int(start[j]), int(end[j])) for j in (i, i + 1))
        what, other = names[int(name[i])], names[int(name[i + 1])]
        yield AuditProblem(2, f"{keys[int(key[i])]}: {what} {a} and {other} {b} overlap")


def _check_landed(feed: str, state: State, rows: Rows) -> Iterator[AuditProblem]:
    """Check that every landed offset lies in an offset range that counts."""
    figures = rows.by_partition()
    for key, ranges in sorted(state.landed.items()):
        if sum(r.span for r in ranges) == figures.get(key, {}).get("span", 0):
            continue
        own = [row.range for row in rows.to_rows() if row.key == key]
        for r in (x for wide in ranges for x in subtract(wide, own)):
            text = f"{key}: {r} has landed by the ledger, and lies in no offset range that counts"
            again = paths.landing_remedy(feed, f"{key}:{r.start}-{r.end}")
            yield AuditProblem(1, text, "", again if state.current.get(key.tp) == key else "")


def _check_commits(state: State) -> Iterator[AuditProblem]:
    for key, offset in sorted(state.commits.items()):
        frontier = state.frontier(key) if key in state.origins else 0
        if offset > frontier:
            yield AuditProblem(7, f"{key}: committed {offset} is above the frontier {frontier}")


def _check_strangers(ledger: Ledger, lake: Lake, state: State, others: Sequence[str]) -> Iterator[AuditProblem]:
    """Yields a problem for each of these visible files."""
    feed = ledger.feed
    replaced = ledger.list_replaced(others, state)
    roots = published_files.list_table_roots(lake, feed) if others else ()
    for path in others:
        if path in replaced and path.startswith(roots):
            continue  # older snapshots of the feed's table may name it
        if path in replaced:
            yield AuditProblem(
                10, f"{path} does not count any more and is still visible; `sluice repair {feed}` removes it"
            )
        else:
            foreign = published_files.may_be_foreign(path) and path.startswith(roots)
            fix = f"sluice table sync {feed} --repair, if another writer of the table made it" if foreign else ""
            yield AuditProblem(10, f"{path} is in no publish entry of the ledger", path if fix else "", fix)


def _check_copies(log: EntryHashes) -> Iterator[AuditProblem]:
    for number, path in log.copied_wrongly:
        text = f"{path} differs from entry {number} of the ledger"
        yield AuditProblem(11, text, path, "remove that file; the next `sluice compact` writes it again")


def _check_file(lake: Lake, feed: str, claims: Sequence[tuple[Receipt, Part]], *, hashes: bool) -> list[AuditProblem]:
    """Returns the problems of one file, given its offset ranges."""
    r, part = claims[0]
    size = lake.size(part.path)
    description = f"{part.path} ({_format_ranges(claims)}, {sum(p.rows for _, p in claims)} rows)"
    if size is None and lake.size(part.staged) is not None:
        what, way_out = "not visible yet", f"the next run makes it visible: sluice run {feed}"
        return [AuditProblem(1, f"{description} is {what}", part.path, way_out)]
    missing = [AuditProblem(1, f"{description} is missing", by_size=True)]
    problems, way_out = (
        missing if size is None else _check_readable(lake, claims, size, hashes),
        paths.landing_remedy(feed, str(r.offset_range)),
    )
    ranges = tuple(r.offset_range for r, _ in claims)
    return [replace(p, file=part.path, remedy=way_out, ranges=ranges) for p in problems]


def _format_ranges(claims: Sequence[tuple[Receipt, Part]]) -> str:
    """Returns the first offset range and the number of others."""
    return f"{claims[0][0].offset_range}" + (f" and {len(claims) - 1} more offset ranges" if len(claims) > 1 else "")


def _check_readable(lake: Lake, claims: Sequence[tuple[Receipt, Part]], size: int, hashes: bool) -> list[AuditProblem]:
    """Returns the problems of a file of `size` bytes."""
    part = claims[0][1]
    if any(p.file_bytes != size for _, p in claims):
        return [AuditProblem(3, f"{part.path} has {size} bytes, the ledger says {part.file_bytes}", by_size=True)]
    try:
        with parquet.wrap_read_errors(part.path):
            return list(_check_content(lake, claims, hashes=hashes))
    except Terminal as e:  # damaged, or refused by the lake
        return [AuditProblem(3, e.message)]


def _check_content(lake: Lake, claims: Sequence[tuple[Receipt, Part]], *, hashes: bool) -> Iterator[AuditProblem]:
    part = claims[0][1]
    if hashes:
        with lake.open(part.path) as f:
            digest = hash_file(f)
        if any(p.sha256 != digest for _, p in claims):
            yield AuditProblem(3, f"{part.path}: its SHA-256 is not the ledger's")
            return
    yield from _check_shared(claims)
    with parquet.open_parquet(lake, part.path) as file:
        expected_rows = part.shared.rows if part.shared else part.rows
        if file.metadata.num_rows != expected_rows:
            yield AuditProblem(5, f"{part.path} has {file.metadata.num_rows} rows, the ledger says {expected_rows}")
        offset = offset_column(file.schema_arrow)
        partition = offset.replace("offset", "partition")
        rows = file.read(columns=[offset, partition] if part.shared else [offset])
    for r, p in claims:
        own = rows.slice(p.shared.first, p.rows) if p.shared else rows
        yield from _check_offsets(r, p, own.column(offset))
        if p.shared and pc.unique(own.column(partition)).to_pylist() != [r.offset_range.partition]:
            yield AuditProblem(3, f"{p.path}: the rows of {r.offset_range} are not all of its partition")


def _check_shared(claims: Sequence[tuple[Receipt, Part]]) -> Iterator[AuditProblem]:
    """Check that each row of a shared file belongs to one live offset range, and other files to one."""
    part, at = claims[0][1], 0
    if len(claims) > 1 and any(p.shared is None for _, p in claims):
        yield AuditProblem(2, f"{part.path} belongs to {_format_ranges(claims)}, but is not a shared file")
    elif part.shared:
        for first, rows in sorted((p.shared.first, p.rows) for _, p in claims if p.shared):
            if first != at:
                yield AuditProblem(
                    2 if first < at else 3,
                    f"{part.path}: rows {at} to {first} do not belong to exactly one offset range",
                )
            at = max(at, first + rows)
        if at != part.shared.rows:
            yield AuditProblem(3, f"{part.path}: {part.shared.rows - at} of its rows belong to no live offset range")


def _check_offsets(r: Receipt, part: Part, offsets: pa.ChunkedArray) -> Iterator[AuditProblem]:
    values = offsets.combine_chunks() if offsets.num_chunks != 1 else offsets.chunk(0)
    if not len(values):
        return
    steps = pc.subtract(values[1:], values[:-1]) if len(values) > 1 else None
    if steps is not None and pc.min(steps).as_py() < 1:
        yield AuditProblem(6, f"{part.path}: offsets do not strictly increase")
    first, last = values[0].as_py(), values[-1].as_py()
    if first < r.offset_range.start or last >= r.offset_range.end:
        yield AuditProblem(3, f"{part.path}: holds offsets {first}..{last}, its range is {r.offset_range.range}")
    positions = int64s(values)
    if len(stale := positions[inside(positions, r.erased)]):
        yield AuditProblem(19, f"{part.path}: holds offset {stale[0]}, which was erased")
    if part.kind is PartKind.QUARANTINED and r.relanded:
        both = positions[inside(positions, r.relanded)]
        if len(both):
            yield AuditProblem(2, f"{part.path}: holds offset {both[0]}, which was re-landed")
