"""Does the account close? Every offset from origin to frontier is in exactly one class, every part is where and what
the ledger says, and nothing else lies under `data/` (DESIGN §8; invariants by their number in §12).

`audit` proves it from ledger and files; `rescan` proves it against Kafka itself, value by value.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.lake import parquet, paths
from sluice.pipelines.landing.proof import sha256
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.entries import PublishEntry
from sluice.pipelines.ports import Lake
from sluice.pipelines.records import landed_columns
from sluice.pipelines.records.format import inside
from sluice.pipelines.schema.arrays import int64s
from sluice.pipelines.vocabulary.errors import Terminal
from sluice.pipelines.vocabulary.kafka import Key
from sluice.pipelines.vocabulary.ranges import Range, union
from sluice.pipelines.vocabulary.receipts import Counts, Part, PartKind, Receipt, count_files
from sluice.pipelines.vocabulary.side_by_side import each


@dataclass(frozen=True, slots=True)
class AuditProblem:
    """One way in which the account does not close. `invariant` is its number in DESIGN §12.

    If it is about a file, `file` is its place in the lake and `remedy` says what mends it.
    """

    invariant: int
    text: str
    file: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return f"I{self.invariant}: {self.text}"


@dataclass(frozen=True, slots=True)
class PartitionAccount:
    """Where one partition's offsets are. `holes` lie between the frontier and what landed; `files` counts parts."""

    key: Key
    origin: int
    frontier: int
    counts: Counts
    lost: int
    skipped: int
    retired: int
    committed: int | None
    holes: tuple[Range, ...]
    reserved: tuple[Range, ...]
    files: int
    bytes: int
    relanded: int = 0
    """Landed records that had been in quarantine before."""
    mended: int = 0
    """Records among these with other bytes than the log had."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """`closes` when there is no problem. `compared` counts records compared with Kafka by a rescan."""

    feed: str
    accounts: tuple[PartitionAccount, ...]
    problems: tuple[AuditProblem, ...]
    parts: int
    rows: int
    compared: int = 0
    not_comparable: int = 0
    """Landed records that Kafka no longer holds, so that a rescan cannot compare them."""

    @property
    def closes(self) -> bool:
        return not self.problems


def live_receipts(ledger: Ledger, state: State) -> list[Receipt]:
    """The receipts of every publish entry that still count, oldest first."""
    published = ((n, e) for n, e in ledger.entries() if isinstance(e, PublishEntry))
    return [r for n, e in published for r in state.receipts(n, e)]


def audit(ledger: Ledger, lake: Lake, feed: str, *, hashes: bool = False) -> AuditReport:
    """Prove the account from the ledger and the files. `hashes` reads every byte; otherwise only sizes and footers.

    A file that cannot be read is a problem like any other. Raises LedgerCorrupt, LedgerTooNew, LakeUnavailable.
    """
    state = ledger.read()
    receipts = live_receipts(ledger, state)
    accounts = tuple(_account(state, key, receipts) for key in sorted(state.origins))
    parts = [(r, p) for r in receipts for p in r.parts]
    problems = [
        *_sums(receipts),
        *_overlaps(state, receipts),
        *_commits(state),
        *_strangers(ledger, state, lake, {p.path for _, p in parts}),
    ]
    files: dict[str, list[tuple[Receipt, Part]]] = {}
    for r, p in parts:
        files.setdefault(p.path, []).append((r, p))
    checked = each(lambda held: _file(lake, feed, held, hashes=hashes), list(files.values()))
    problems += [x for found in checked for x in found]
    return AuditReport(feed, accounts, tuple(problems), len(files), sum(p.rows for _, p in parts))


def _account(state: State, key: Key, receipts: Sequence[Receipt]) -> PartitionAccount:
    mine = [r for r in receipts if r.slice.key == key]
    return PartitionAccount(
        key=key,
        origin=state.origins[key].offset,
        frontier=state.frontier(key),
        counts=sum((r.counts for r in mine), Counts()),
        lost=sum(r.span for r in state.lost.get(key, ())),
        skipped=sum(r.span for r in state.skipped.get(key, ())),
        retired=sum(r.span for r in state.retired.get(key, ())),
        committed=state.commits.get(key),
        holes=state.holes(key),
        reserved=state.reserved(key),
        files=count_files(mine),
        bytes=sum(p.bytes for r in mine for p in r.parts),
        relanded=sum(x.span for r in mine for x in r.relanded),
        mended=sum(x.span for r in mine for x in r.mended),
    )


def _sums(receipts: Iterable[Receipt]) -> Iterator[AuditProblem]:
    for r in receipts:
        if r.counts.total != r.slice.span:
            yield AuditProblem(5, f"{r.slice}: classes add up to {r.counts.total}, the span is {r.slice.span}")
        for kind, count in ((PartKind.LANDED, r.counts.landed), (PartKind.QUARANTINED, r.counts.quarantined)):
            rows = sum(p.rows for p in r.of(kind))
            if rows != count:
                yield AuditProblem(5, f"{r.slice}: {count} records {kind}, {rows} rows in its parts")
        yield from _again(r)


def _again(r: Receipt) -> Iterator[AuditProblem]:
    """Re-landed offsets must be among the landed ones, and mended ones among the re-landed."""
    relanded, span = union(r.relanded), sum(x.span for x in r.relanded)
    inside = not relanded or (r.slice.start <= relanded[0].start and relanded[-1].end <= r.slice.end)
    if span > r.counts.landed or not inside:
        yield AuditProblem(5, f"{r.slice}: {span} records re-landed are not among the {r.counts.landed} that landed")
    if union((*relanded, *r.mended)) != relanded:
        yield AuditProblem(5, f"{r.slice}: records are mended that were never re-landed")


def _overlaps(state: State, receipts: Iterable[Receipt]) -> Iterator[AuditProblem]:
    by_key: dict[Key, list[tuple[Range, str]]] = {}
    for r in receipts:
        by_key.setdefault(r.slice.key, []).append((r.slice.range, "landed"))
    for name, ranges in (("lost", state.lost), ("skipped", state.skipped), ("retired", state.retired)):
        for key, of_key in ranges.items():
            by_key.setdefault(key, []).extend((r, name) for r in of_key)
    for key, held in sorted(by_key.items()):
        held.sort()
        for (a, what), (b, other) in itertools.pairwise(held):
            if a.meets(b):
                yield AuditProblem(2, f"{key}: {what} {a} and {other} {b} overlap")


def _commits(state: State) -> Iterator[AuditProblem]:
    for key, offset in sorted(state.commits.items()):
        frontier = state.frontier(key) if key in state.origins else 0
        if offset > frontier:
            yield AuditProblem(7, f"{key}: committed {offset} is above the frontier {frontier}")


def _strangers(ledger: Ledger, state: State, lake: Lake, live: set[str]) -> Iterator[AuditProblem]:
    feed = ledger.feed
    others = [p for root in paths.visible_roots(feed) for p in lake.list(root) if p not in live]
    replaced = ledger.replaced(others, state)
    for path in others:
        if path in replaced:
            yield AuditProblem(
                10, f"{path} does not count any more and is still visible; `sluice repair {feed}` removes it"
            )
        else:
            yield AuditProblem(10, f"{path} is in no publish entry of the ledger")


def _file(lake: Lake, feed: str, held: Sequence[tuple[Receipt, Part]], *, hashes: bool) -> list[AuditProblem]:
    """What is wrong with one file, whose slices are given."""
    r, part = held[0]
    size = lake.size(part.path)
    said = f"{part.path} ({_slices(held)}, {sum(p.rows for _, p in held)} rows)"
    if size is None and lake.size(part.staged) is not None:
        what, way_out = "not visible yet", f"the next run makes it visible: sluice run {feed}"
        return [AuditProblem(1, f"{said} is {what}", part.path, way_out)]
    missing = [AuditProblem(1, f"{said} is missing")]
    found, way_out = missing if size is None else _wrong(lake, held, size, hashes), parquet.of_slice(feed, r.slice)
    return [replace(p, file=part.path, remedy=way_out) for p in found]


def _slices(held: Sequence[tuple[Receipt, Part]]) -> str:
    """The first slice and how many more there are."""
    return f"{held[0][0].slice}" + (f" and {len(held) - 1} more slices" if len(held) > 1 else "")


def _wrong(lake: Lake, held: Sequence[tuple[Receipt, Part]], size: int, hashes: bool) -> list[AuditProblem]:
    """What is wrong with the file, which has this many bytes."""
    part = held[0][1]
    if any(p.file_bytes != size for _, p in held):
        return [AuditProblem(3, f"{part.path} has {size} bytes, the ledger says {part.file_bytes}")]
    try:
        with parquet.readable(part.path):
            return list(_content(lake, held, hashes=hashes))
    except Terminal as e:  # damaged, or the lake refuses it for good
        return [AuditProblem(3, e.message)]


def _content(lake: Lake, held: Sequence[tuple[Receipt, Part]], *, hashes: bool) -> Iterator[AuditProblem]:
    part = held[0][1]
    if hashes:
        with lake.open(part.path) as f:
            digest = sha256(f)
        if any(p.sha256 != digest for _, p in held):
            yield AuditProblem(3, f"{part.path}: its SHA-256 is not the ledger's")
            return
    yield from _shared(held)
    with parquet.open_parquet(lake, part.path) as file:
        told = part.shared.rows if part.shared else part.rows
        if file.metadata.num_rows != told:
            yield AuditProblem(5, f"{part.path} has {file.metadata.num_rows} rows, the ledger says {told}")
        offset = landed_columns.offset_column(file.schema_arrow)
        partition = offset.replace("offset", "partition")
        found = file.read(columns=[offset, partition] if part.shared else [offset])
    for r, p in held:
        own = found.slice(p.shared.first, p.rows) if p.shared else found
        yield from _offsets(r, p, own.column(offset))
        if p.shared and pc.unique(own.column(partition)).to_pylist() != [r.slice.partition]:
            yield AuditProblem(3, f"{p.path}: the rows of {r.slice} are not all of its partition")


def _shared(held: Sequence[tuple[Receipt, Part]]) -> Iterator[AuditProblem]:
    """The rows of a shared file are each of one slice that counts; any other file is of one alone."""
    part, at = held[0][1], 0
    if len(held) > 1 and any(p.shared is None for _, p in held):
        yield AuditProblem(2, f"{part.path} is the file of {_slices(held)}, and not as one that they share")
    elif part.shared:
        for first, rows in sorted((p.shared.first, p.rows) for _, p in held if p.shared):
            if first != at:
                yield AuditProblem(2 if first < at else 3, f"{part.path}: rows {at} to {first} are of no one slice")
            at = max(at, first + rows)
        if at != part.shared.rows:
            yield AuditProblem(3, f"{part.path}: {part.shared.rows - at} of its rows are of no slice that counts")


def _offsets(r: Receipt, part: Part, offsets: pa.ChunkedArray) -> Iterator[AuditProblem]:
    values = offsets.combine_chunks() if offsets.num_chunks != 1 else offsets.chunk(0)
    if not len(values):
        return
    steps = pc.subtract(values[1:], values[:-1]) if len(values) > 1 else None
    if steps is not None and pc.min(steps).as_py() < 1:
        yield AuditProblem(6, f"{part.path}: offsets do not strictly increase")
    first, last = values[0].as_py(), values[-1].as_py()
    if first < r.slice.start or last >= r.slice.end:
        yield AuditProblem(3, f"{part.path}: holds offsets {first}..{last}, its range is {r.slice.range}")
    if part.kind is PartKind.QUARANTINED and r.relanded:
        known = int64s(values)
        both = known[inside(known, r.relanded)]
        if len(both):
            yield AuditProblem(2, f"{part.path}: holds offset {both[0]}, which was re-landed")
