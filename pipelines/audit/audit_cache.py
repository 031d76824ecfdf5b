"""Results of earlier audits, in a file next to the ledger: the next audit checks only changes.

The file names its log: the ledger's id, and a hash of its entries by blocks. Lake files are identified by path, size
and the store's tag, so a listing shows missing, changed and new ones. Receipts with problems, of their own or of their
files, are never stored. An unreadable cache counts as absent: everything is checked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import numpy as np
from pydantic import ConfigDict, TypeAdapter

from sluice.pipelines.audit import receipt_rows
from sluice.pipelines.audit.receipt_rows import Rows, Settled, place_of
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.lake import paths
from sluice.pipelines.lake.parquet import DAMAGE
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.model.kafka import union
from sluice.pipelines.ports import Lake, Stat
from sluice.pipelines.schema.arrays import as_mask

BLOCK = 1000
"""Entries under one hash: if a listing shows that one of them changed, all of them are read."""


@dataclass(frozen=True, slots=True)
class BlockHashes:
    """Entries of a block up to some number: `files` is a hash of the listing, `content_hash` one of their bytes."""

    files: str
    content_hash: str


@dataclass(frozen=True, slots=True)
class Strictly:
    """The additional results of a strict audit. All `recorded` commit entries below `number` were compared with the
    fold below them, and `state` is a checkpoint there. `manifests` are tags of the manifests that were read."""

    __pydantic_config__ = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    number: int
    recorded: int
    state: bytes
    manifests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """The entries below `number` of the ledger with this id were read. Publish entries in `again` have receipts with
    problems. `folders` are those of the unsettled rows' files, None where that is not known."""

    ledger: str
    number: int
    again: tuple[int, ...]
    log: tuple[BlockHashes, ...]
    strictly: Strictly | None = None
    settled: tuple[Settled, ...] = ()
    folders: tuple[str, ...] | None = None
    strange: tuple[str, ...] = ()
    """Folders with unknown files: they are listed each time."""


_NOTE = TypeAdapter(Note)


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited(Note):
    """A note, with `rows`: the receipts that were live then and have no problems, except settled ones. `sums` are those
    of each partition in a settled file."""

    rows: Rows
    sums: Rows
    tagged: Mapping[int, str] = field(default_factory=dict, repr=False, compare=False)
    """The folder of each listed file, by tag. Not stored."""

    def with_settled(self, lake: Lake, feed: str, selection: Collection[Settled] | None = None) -> Audited | None:
        """Returns a copy whose rows include the settled ones, or a selection of them.

        Returns None if one of their files does not match its digest.
        """
        taken = self.settled if selection is None else tuple(selection)
        loaded = [s.load(lake, feed) for s in taken]
        if None in loaded:
            return None
        unopened = tuple(s for s in self.settled if s not in taken)
        sums = self.sums.where(np.isin(self.sums.column("number"), [s.first for s in unopened]))
        lie_in = None if self.folders is None else tuple({*self.folders, *(p for s in taken for p in s.places)})
        rows = self.rows.plus(*filter(None, loaded))
        return replace(self, rows=rows, sums=sums, settled=unopened, folders=lie_in)

    def may_be_quick(self, state: State) -> bool:
        """Returns whether the folders of all files are known and no entries were lost since."""
        return self.folders is not None and not any(after > self.number for _, after in state.gaps)

    def due(self, state: State) -> tuple[Settled, ...]:
        """Returns the settled rows that a quick audit checks: possibly changed ones, and the next in turn."""
        superseded = self.sums.column("number")[~still_counts(self.sums, state, self.number)].tolist()
        changed = [s for s in self.settled if s.first in superseded or any(s.first <= n < s.end for n in self.again)]
        others = [s for s in self.settled if s not in changed]
        return (*changed, *([min(others, key=lambda s: (s.seen, s.first))] if others else ()))

    def numbers(self, due: Sequence[Settled]) -> list[tuple[int, int | None]]:
        """Returns the entries that a quick audit lists: those of its settled rows, and the newest."""
        newest = self.number // BLOCK * BLOCK
        return [*((s.first, s.end) for s in sorted(due, key=lambda s: s.first)), (newest, None)]

    def dump(self) -> bytes:
        note = Note(*(getattr(self, f.name) for f in fields(Note)))
        return self.rows.plus(self.sums).dump(_NOTE.dump_json(note))

    @classmethod
    def load(cls, data: bytes) -> Audited | None:
        """Returns None if the data is not an audit cache."""
        try:
            rows, content = receipt_rows.load(data)
            note = _NOTE.validate_json(content)
        except DAMAGE:
            return None
        if len(note.log) != -(-note.number // BLOCK):
            return None
        is_sum = as_mask(rows.table.column("tags").is_null())
        values = {f.name: getattr(note, f.name) for f in fields(Note)}
        return cls(**values, rows=rows.where(~is_sum), sums=rows.where(is_sum))


# -- files


def tag(stat: Stat) -> int:
    """Returns a number that identifies the file in its current version."""
    identity = f"{stat.size}:{stat.tag}:{stat.path}".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(identity, digest_size=8).digest(), "little")


def shown(lake: Lake, feed: str, runs: Sequence[tuple[str, str]] | None = None) -> dict[str, int]:
    """Returns the tags of the feed's visible files by path, or only of those in `runs` of folders (first, last)."""
    if runs is None:
        stats = (s for root in paths.visible_roots(feed) for s in lake.stats(root))
    else:
        stats = (s for root in paths.visible_roots(feed) for run in runs for s in _within(lake, root, *run))
    return {s.path: tag(s) for s in stats if not paths.is_ignored(s.path)}


def _within(lake: Lake, root: str, first: str, last: str) -> Iterator[Stat]:
    for stat in lake.stats(root, f"{root}/{first}"):
        lies_in = f"{place_of(stat.path)}/"
        if lies_in > f"{last}/":
            return
        if lies_in >= f"{first}/":
            yield stat


def still_there(rows: Rows, listed: Mapping[str, int]) -> Any:
    """Returns a mask of the rows whose files are all unchanged."""
    there = np.fromiter(listed.values(), np.uint64, len(listed))
    missing = ~np.isin(rows.tags, there)
    out = np.ones(len(rows), bool)
    out[rows.owners[missing]] = False
    return out


def still_counts(rows: Rows, state: State, since: int) -> Any:
    """Returns a mask of the rows, live below entry `since`, that no later entry has superseded."""
    keys, indexes = rows.by_key()
    out, order = np.ones(len(rows), bool), np.argsort(indexes, kind="stable")
    begins = np.searchsorted(indexes[order], np.arange(len(keys) + 1))
    for i, key in enumerate(keys):
        newer = state.superseded.get(key)
        over = union(r for n, r in newer if n >= since) if newer and newer.numbers[-1] >= since else ()
        if over:
            mine = order[begins[i] : begins[i + 1]]
            starts, ends = np.array(over, np.int64).T
            first = np.searchsorted(ends, rows.column("start")[mine], "right")
            out[mine] = first >= np.searchsorted(starts, rows.column("end")[mine], "left")
    return out


# -- the log


class EntryHashes:
    """The entries below a number, as listed and as read, hashed by blocks.

    With `listed`, ordered ranges of numbers aligned to blocks (end None: unlimited), only these are listed; `previous`
    has the hashes of the other blocks.
    """

    def __init__(
        self,
        ledger: Ledger,
        state: State,
        listed: Sequence[tuple[int, int | None]] = ((0, None),),
        previous: Sequence[BlockHashes] = (),
    ) -> None:
        self._ledger, self._state, self._listed, self._known = ledger, state, listed, previous
        stats = ((n, s) for first, end in listed for n, s in ledger.stats(first, end))
        self._files = [(n, f"{n}:{s.size}:{s.tag};".encode()) for n, s in stats if not state.lost_entry(n)]
        ledger.check_end(n for n, _ in self._files)
        self._said: dict[int, bytes] = {}
        self.copied_wrongly: list[tuple[int, str]] = []
        """Entries that differ from their copy in a segment, with the segment's path."""

    def files(self, below: int) -> list[str]:
        """Returns a hash of the listing for each block of entries below the number."""
        hashes = [blake2b(digest_size=16) for _ in range(-(-below // BLOCK))]
        for n, line in takewhile(lambda f: f[0] < below, self._files):
            hashes[n // BLOCK].update(line)
        return [h.hexdigest() if self._looks_at(i) else self._known[i].files for i, h in enumerate(hashes)]

    def _looks_at(self, block: int) -> bool:
        number = block * BLOCK
        return any(first <= number and (end is None or number < end) for first, end in self._listed)

    def begin(self, before: Audited) -> bool:
        """Continue from an earlier audit. Returns False if the log differs from the one it read."""
        if before.ledger != self._state.ledger_id or not 0 < before.number <= self._state.number:
            return False
        now = self.files(before.number)
        self._said = {i: bytes.fromhex(b.content_hash) for i, b in enumerate(before.log)}
        others = [i for i, (files, b) in enumerate(zip(now, before.log, strict=True)) if files != b.files]
        return all(self._reread(i, before.number) == self._said[i] for i in others)

    def _reread(self, block: int, below: int) -> bytes:
        """Returns the hash of the contents of the block's entries below a number."""
        digest, number = b"", block * BLOCK
        while self._state.lost_entry(number):
            number += 1
        for at, _, data in self._ledger.raw(number):
            if at >= min(below, (block + 1) * BLOCK):
                break
            digest = _link(digest, data)
        return digest

    def entries(self, first: int) -> Iterator[tuple[int, str, bytes]]:
        """Yields (number, path, content) of the entries from `first` on: where `begin` continued, or 0."""
        if first >= self._state.number:
            return
        copies = self._copies() if first == 0 else iter(())
        copied = next(copies, None)
        end = self._state.number
        for number, path, data in self._ledger.by_number(first, end) if first else self._ledger.raw(0):
            if number >= end:
                return
            if copied and copied[0] == number:
                self.copied_wrongly += [(number, copied[2])] if copied[1] != data else []
                copied = next(copies, None)
            self._said[number // BLOCK] = _link(self._said.get(number // BLOCK, b""), data)
            yield number, path, data

    def _copies(self) -> Iterator[tuple[int, bytes, str]]:
        """Yields (number, content, segment path) of the entries in segments."""
        for segment in self._ledger.segments():
            path = paths.segment_path(self._ledger.feed, segment.entries[0][0], segment.end)
            yield from ((number, data, path) for number, data in segment.entries)

    def blocks(self) -> tuple[BlockHashes, ...]:
        """Returns the hashes of all blocks. Call it after all entries were read."""
        files = self.files(self._state.number)
        return tuple(BlockHashes(f, self._said.get(i, b"").hex()) for i, f in enumerate(files))


def _link(digest: bytes, data: bytes) -> bytes:
    return blake2b(digest + data, digest_size=16).digest()


def keep(lake: Lake, feed: str, now: Audited, before: Audited | None, at: int) -> SluiceError | None:
    """Store the results of an audit at a time (ms), merged with earlier proofs of the same receipts and files.

    Returns the error if they cannot be stored: auditors may lack the permission to write.
    """
    seconds = at // 1000
    try:
        if before is not None and before.ledger == now.ledger:
            again = np.unique(now.rows.column("number")[now.rows.column("looked") == seconds])
            reopened = [s for s in before.settled if ((s.first <= again) & (again < s.end)).any()]
            opened = before.with_settled(lake, feed, reopened) or before
            now = replace(now, rows=now.rows.also(opened.rows, seconds))
        now = _settle(lake, feed, now, seconds)
        lake.put(paths.audited_path(feed), now.dump())
        for first in {s.first for s in (before.settled if before else ())} - {s.first for s in now.settled}:
            lake.remove(paths.settled_path(feed, first))
    except SluiceError as error:
        return error
    return None


def _settle(lake: Lake, feed: str, now: Audited, at: int) -> Audited:
    """Move old rows into files of their own, written before the cache names them."""
    rows, old = receipt_rows.split(now.rows, now.number, now.tagged)
    there, sums = {s.first: s for s in now.settled}, now.sums
    for first, (mine, folders) in old.items():
        there[first] = Settled.put(lake, feed, first, mine, folders, at)
        sums = sums.plus(mine.sum_up(first))
    folders = {now.tagged.get(t, "") for t in rows.tags.tolist()}
    known_folders = None if "" in folders else tuple(sorted(folders))
    settled = tuple(there[n] for n in sorted(there))
    return replace(now, rows=rows, sums=sums, settled=settled, folders=known_folders)


def load_audited(lake: Lake, feed: str) -> Audited | None:
    """Returns the stored results of earlier audits."""
    return Audited.load(lake.get(paths.audited_path(feed)) or b"")
