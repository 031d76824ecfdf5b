"""Pending changes of a table, by the ledger: batches published since its mark, and files that no longer count."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sluice.pipelines.ledger import Batch, Ledger, State
from sluice.pipelines.ledger.entries import PublishEntry, RetireEntry
from sluice.pipelines.ledger.fold import NO_PINS
from sluice.pipelines.model.kafka import Range, union
from sluice.pipelines.model.receipts import Part, PartKind, Receipt, find_output, name_dataset
from sluice.pipelines.model.tables import BATCHES, FEED, LEDGER, OFFSETS, WINDOWS
from sluice.pipelines.planning.schema_changes import select_output
from sluice.pipelines.ports import Lake
from sluice.pipelines.schema.schema import EXTRA, KAFKA, Type
from sluice.pipelines.schema.wider import QUARANTINED_TYPES, RAW_TYPES, one_table, parse_type
from sluice.pipelines.util.units import show_instant, show_window

GROUP_FILES, GROUP_BATCHES = 2000, 100
"""Maximum of files, or of batches, in one commit of a backfill."""
SINGLE = 24
"""Up to this many batches each have a commit of their own."""


@dataclass(frozen=True, slots=True)
class PendingBatch:
    """Files of one kind of a published batch that still count: its `parts`, one for each file, by lake path.

    Their offsets and windows come with them. `number` is the publish entry's.
    """

    number: int
    batch: Batch
    parts: dict[str, Part]
    ranges: tuple[tuple[str, int, Range], ...]
    windows: frozenset[int]

    @property
    def rewrites(self) -> bool:
        """Returns whether it replaces rows that had landed before."""
        return _rewrites(self.batch)

    @classmethod
    def of(cls, number: int, batch: Batch, receipts: Iterable[Receipt], kind: PartKind, output: str) -> PendingBatch:
        parts = [(r.offset_range, p) for r in receipts for p in r.of(kind) if p.output == output]
        ranges = dict.fromkeys(s for s, _ in parts)
        return cls(
            number,
            batch,
            {p.path: p for _, p in parts},
            tuple((s.topic, s.partition, s.range) for s in ranges),
            frozenset(s.window for s in ranges if s.window is not None),
        )


@dataclass(frozen=True, slots=True)
class PendingFiles:
    """Changes from a mark on: `batches` with files, oldest first, and `removed`, lake paths that no longer count.

    `end` is the mark once all of this is in the table. With `merged`, files are gone only because others have their
    rows.
    """

    end: int
    batches: tuple[PendingBatch, ...]
    removed: frozenset[str]
    merged: bool = True

    @property
    def rewrites(self) -> bool:
        """Returns whether any of it concerns rows that had landed before."""
        return bool(self.removed) or any(b.rewrites for b in self.batches)


def _rewrites(batch: Batch) -> bool:
    return batch.request.replace or batch.rewrites


def since(
    ledger: Ledger,
    state: State,
    mark: int,
    limit: int | None = None,
    kind: PartKind = PartKind.LANDED,
    output: str = "",
) -> PendingFiles:
    """Returns the changes that entries from number `mark` on, up to the state, require of a table of such files.

    With `limit`, only those up to that many batches with files. Files in `removed` are of the output, of either kind.
    """
    batches: list[PendingBatch] = []
    removed: set[str] = set()
    merged = True
    for number, entry in ledger.entries(mark) if mark < state.number else ():
        if number >= state.number:
            break
        # A merge moves rows, and a retirement takes them away. Only if all that is removed was merged does the table
        # keep its rows: then readers of its changes see none.
        if isinstance(entry, RetireEntry):
            retired = _select(entry.parts, output)
            removed |= retired
            merged = merged and not retired
        elif isinstance(entry, PublishEntry) and number not in state.void:
            batch = state.batches[entry.batch]
            pending = PendingBatch.of(number, batch, state.receipts(number, entry), kind, output)
            if _rewrites(batch):
                replaced = _select(ledger.plan(batch.id).replaces, output)
                removed |= replaced
                merged = merged and (batch.merges or not (replaced or pending.parts))
            # The limit counts batches with files, and the result ends behind the entry that reached it: the next call
            # goes on from there.
            batches += [pending] if pending.parts else []
            if len(batches) == limit:
                return PendingFiles(number + 1, tuple(batches), frozenset(removed), merged)
    return PendingFiles(state.number, tuple(batches), frozenset(removed), merged)


def _select(parts: Iterable[str], output: str) -> set[str]:
    return {path for path in parts if find_output(path) == output}


def groups(batches: Sequence[PendingBatch]) -> Iterator[list[PendingBatch]]:
    """The batches of each commit: one by one, or for a backfill many at once."""
    one_each, group, files = len(batches) <= SINGLE, list[PendingBatch](), 0
    for b in batches:
        group.append(b)
        files += len(b.parts)
        if one_each or files >= GROUP_FILES or len(group) >= GROUP_BATCHES:
            yield group
            group, files = [], 0
    if group:
        yield group


def about(ledger: Ledger, state: State, batches: Iterable[PendingBatch], output: str) -> dict[str, str]:
    """The batches in a snapshot, for its summary: ids and plan hashes, offsets by partition, windows."""
    ranges: dict[str, dict[str, list[Range]]] = {}
    windows: set[int] = set()
    names: list[str] = []
    for b in batches:
        names.append(witness(ledger, b.batch))
        windows |= b.windows
        for topic, partition, r in b.ranges:
            ranges.setdefault(topic, {}).setdefault(str(partition), []).append(r)
    offsets = {t: {p: [f"{r.start}-{r.end}" for r in union(rs)] for p, rs in ps.items()} for t, ps in ranges.items()}
    out = {FEED: name_dataset(ledger.feed, output), LEDGER: state.ledger_id, BATCHES: " ".join(names)}
    if windows:
        out |= {WINDOWS: " ".join(map(show_window, sorted(windows)))}
    return out | {OFFSETS: json.dumps(offsets, separators=(",", ":"))}


def witness(ledger: Ledger, batch: Batch) -> str:
    """A batch by its id and the hash of its plan: who meets it elsewhere knows that it is of this very log."""
    return f"{batch.id}/{ledger.recall(batch).hash}"


def complete_until(state: State) -> str:
    """The time up to which windows are complete in all partitions, as ISO text; empty where none is."""
    ends = []
    for key in state.known():
        pinned = state.boundaries.get(key, NO_PINS)
        passed = bisect_right(pinned.offsets, state.frontier(key))
        if not passed:
            return ""
        ends.append(pinned.times[passed - 1])
    return show_instant(min(ends)) if ends else ""


def columns(state: State, kind: PartKind = PartKind.LANDED, output: str = "") -> dict[str, str]:
    """Every column that is in any file of the kind, by name, with the type that reads all of them."""
    if kind is PartKind.QUARANTINED:
        return dict(QUARANTINED_TYPES)
    own = select_output(state.table, output) if output else state.table
    is_raw = own == one_table({}, RAW_TYPES) if output else all(name.startswith("raw") for name in state.schemas)
    if is_raw:
        return dict(RAW_TYPES)
    kafka = {f"{KAFKA}{name}": text for name, text in RAW_TYPES.items() if name != "value"}
    return own | {EXTRA: "string"} | kafka | {f"{KAFKA}tombstone": "bool"}


def column_types(state: State, kind: PartKind = PartKind.LANDED, output: str = "") -> dict[str, Type]:
    texts = columns(state, kind, output)
    return {name: parse_type(text.removesuffix(" not null")) for name, text in texts.items()}


def rows_of(part: Part) -> int:
    """The rows of the part's whole file."""
    return part.shared.rows if part.shared else part.rows


def addresses(lake: Lake, batches: Iterable[PendingBatch]) -> dict[str, Part]:
    """The files of the batches, by address."""
    return {lake.locate(path): part for b in batches for path, part in b.parts.items()}
