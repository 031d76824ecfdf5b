"""Receipts as rows of numbers, and those of old publish entries in files that most audits do not open.

A quick audit checks entries published or superseded since the last one, the newest entries, and one more of these files
in turn. For the others it relies on the cache: their sums, ranges of offsets and folders. So its duration does not
grow with the age of the feed.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import State
from sluice.pipelines.ledger.columns import MOST, inflate, pack, unpack
from sluice.pipelines.model.kafka import Key, Range
from sluice.pipelines.model.receipts import Counts, Receipt
from sluice.pipelines.ports import Lake

COUNTS = tuple(name for name in Counts.__dataclass_fields__ if name not in ("elsewhere", "copies"))
PROOFS = ("looked", "hashed", "compared")
"""Times (seconds since the epoch, or NEVER) at which the receipt and its files were checked, their bytes hashed, and
their records compared with Kafka."""
COLUMNS = ("number", "key", "start", "end", *COUNTS, "relanded", "mended", "rows", "bytes", "parts", *PROOFS)
SUMMED = (*COUNTS, "relanded", "mended", "bytes")
"""Columns that are summed for each partition."""
NEVER = -1
_AT = {name: i for i, name in enumerate(COLUMNS)}


class ReceiptRow(NamedTuple):
    """A receipt of the publish entry `number`: its offset range and the number of landed records."""

    number: int
    key: Key
    range: Range
    landed: int


class Rows:
    """An immutable table of receipts. `keys` are sorted; the column `key` holds indexes into them. `tags` identify the
    receipts' parts in sequence. `table` is stored by column, because few columns of many rows are read at a time."""

    __slots__ = ("keys", "table", "tags")

    def __init__(self, keys: Sequence[Key], table: Any, tags: Any) -> None:
        self.keys, self.table, self.tags = tuple(keys), np.asfortranarray(table), tags

    @classmethod
    def of(cls, receipts: Sequence[tuple[int, Receipt]], tag: Callable[[str], int], proofs: Sequence[int]) -> Rows:
        """Build rows from receipts, each with its entry number. `tag` maps a part's path to its tag."""
        keys = sorted({r.offset_range.key for _, r in receipts})
        indexes = {key: i for i, key in enumerate(keys)}
        table = np.array([_row(n, indexes[r.offset_range.key], r, proofs) for n, r in receipts], np.int64)
        tags = np.array([tag(p.path) for _, r in receipts for p in r.parts], np.uint64)
        return cls(keys, table.reshape(-1, len(COLUMNS)), tags)

    def __len__(self) -> int:
        return len(self.table)

    def column(self, name: str) -> Any:
        return self.table[:, _AT[name]]

    @property
    def owners(self) -> Any:
        """The row of each tag."""
        return np.repeat(np.arange(len(self)), self.column("parts"))

    def where(self, mask: Any) -> Rows:
        """Returns the rows that the mask selects."""
        return Rows(self.keys, self.table.T[:, mask].T, self.tags[mask[self.owners]])

    def plus(self, other: Rows) -> Rows:
        keys = sorted({*self.keys, *other.keys})
        tables = [r._with_keys(keys) for r in (self, other)]
        return Rows(keys, np.concatenate([t.T for t in tables], axis=1).T, np.concatenate([self.tags, other.tags]))

    def _with_keys(self, keys: Sequence[Key]) -> Any:
        indexes = {key: i for i, key in enumerate(keys)}
        table, at = self.table.copy("K"), np.array([indexes[k] for k in self.keys] or [0], np.int64)
        table[:, _AT["key"]] = at[table[:, _AT["key"]]]
        return table

    def in_order(self) -> Rows:
        """Returns the rows sorted by partition and offset, which compresses best."""
        order = np.lexsort((self.column("number"), self.column("start"), self.column("key")))
        begins = np.cumsum(self.column("parts")) - self.column("parts")
        parts = self.column("parts")[order]
        positions = np.repeat(begins[order] - (np.cumsum(parts) - parts), parts) + np.arange(len(self.tags))
        return Rows(self.keys, self.table.T[:, order].T, self.tags[positions])

    def to_rows(self) -> list[ReceiptRow]:
        columns = (self.column(n).tolist() for n in ("number", "key", "start", "end", "landed"))
        return [ReceiptRow(n, self.keys[k], Range(a, b), landed) for n, k, a, b, landed in zip(*columns, strict=True)]

    def mark(self, proof: str, rows: Iterable[ReceiptRow], at: int) -> Rows:
        """Returns a copy in which `rows` have the proof at time `at`."""
        marked = set(rows)
        near = self._of({r.number for r in marked})
        mine = [r in marked for r in self.where(near).to_rows()]
        table = self.table.copy("K")
        table[np.flatnonzero(near)[np.array(mine, bool)], _AT[proof]] = at
        return Rows(self.keys, table, self.tags)

    def _of(self, numbers: set[int]) -> Any:
        """Returns a mask of the rows of these entries."""
        return np.isin(self.column("number"), np.array(sorted(numbers), np.int64))

    def also(self, before: Rows, at: int) -> Rows:
        """Returns a copy with earlier proofs of unchanged rows that were checked again at `at`."""
        again = self.column("looked") == at
        old = before.where(before._of(set(self.column("number")[again].tolist())))
        by_part = dict(zip(old._whole(), old._proofs(), strict=True))
        table, positions = self.table.copy("K"), [_AT[p] for p in PROOFS]
        for i, what in zip(np.flatnonzero(again).tolist(), self.where(again)._whole(), strict=True):
            if (proofs := by_part.get(what)) is not None:
                table[i, positions] = np.maximum(table[i, positions], proofs)
        return Rows(self.keys, table, self.tags)

    def _whole(self) -> list[tuple[ReceiptRow, bytes]]:
        ends = np.cumsum(self.column("parts")).tolist()
        tags = (self.tags[a:b].tobytes() for a, b in zip([0, *ends], ends, strict=False))
        return list(zip(self.to_rows(), tags, strict=True))

    def _proofs(self) -> Any:
        return self.table[:, [_AT[p] for p in PROOFS]]

    # -- added up

    def totals(self, *names: str) -> dict[Key, dict[str, int]]:
        """Returns the sums of the columns by partition; `files` counts files."""
        sums = {n: np.zeros(len(self.keys), np.int64) for n in (*names, "files")}
        for n in names:
            np.add.at(sums[n], self.column("key"), self.column(n))
        of = self.column("key")[self.owners]
        order = np.lexsort((self.tags, of))
        first = np.ones(len(order), bool)
        of, tags = of[order], self.tags[order]
        first[1:] = (of[1:] != of[:-1]) | (tags[1:] != tags[:-1])
        np.add.at(sums["files"], of[first], 1)
        return {k: {n: int(column[i]) for n, column in sums.items()} for i, k in enumerate(self.keys)}

    def spans(self) -> dict[Key, int]:
        """Returns the number of offsets in the receipts' offset ranges by partition."""
        sums = np.zeros(len(self.keys), np.int64)
        np.add.at(sums, self.column("key"), self.column("end") - self.column("start"))
        return dict(zip(self.keys, sums.tolist(), strict=True))


def _row(number: int, key: int, r: Receipt, proofs: Sequence[int]) -> tuple[int, ...]:
    counts = (getattr(r.counts, name) for name in COUNTS)
    again = sum(x.span for x in r.relanded), sum(x.span for x in r.mended)
    sizes = sum(p.rows for p in r.parts), sum(p.bytes for p in r.parts), len(r.parts)
    return number, key, r.offset_range.start, r.offset_range.end, *counts, *again, *sizes, *proofs


ENTRIES = 10_000
"""Ledger numbers in a file: about two months of hourly batches."""
SUMS = (*SUMMED, "files", "span", "start", "end")
"""The figures of each partition: `totals` of the rows, the number of offsets, the first one and the end."""


@dataclass(frozen=True, slots=True)
class Settled:
    """The rows of publish entries from number `first` on, `ENTRIES` of them; `digest` is that of their file.

    `batches`, `parts` and `rows` are counts. Its receipts were checked between the times `looked` (seconds). A listing
    at `seen` (seconds) had all its files and entries; the files lie in the folders `places`.
    """

    first: int
    digest: str
    batches: int
    parts: int
    rows: int
    looked: tuple[int, int]
    seen: int
    places: tuple[str, ...]
    sums: Mapping[Key, Mapping[str, int]]

    @property
    def end(self) -> int:
        return self.first + ENTRIES

    @classmethod
    def of(cls, first: int, rows: Rows, folders: Iterable[str], looked_at: int) -> tuple[Settled, bytes]:
        """Returns the settled rows and the content of their file."""
        data = dump(rows)
        looked, numbers = rows.column("looked"), rows.column("number")
        when = (int(looked.min()), int(looked.max())) if len(rows) else (looked_at, looked_at)
        counts = len(np.unique(numbers)), len(np.unique(rows.tags)), int(rows.column("rows").sum())
        settled = cls(first, _digest(data), *counts, when, looked_at, tuple(sorted(folders)), _sums(rows))
        return settled, data

    def load(self, lake: Lake, feed: str) -> Rows | None:
        """Returns the rows; None if the file does not match its digest."""
        data = lake.get(paths.settled_path(feed, self.first)) or b""
        return load(data) if _digest(data) == self.digest else None

    def meets(self, state: State, since: int) -> bool:
        """Returns whether an entry from `since` on may have superseded some of the rows."""
        for key, of in self.sums.items():
            newer = state.superseded.get(key)
            if newer and newer.numbers[-1] >= since:
                ranges = (r for n, r in newer if n >= since)
                if any(r.start < of["end"] and of["start"] < r.end for r in ranges):
                    return True
        return False

    def document(self) -> dict[str, Any]:
        table = np.array([[of[name] for name in SUMS] for of in self.sums.values()], np.int64).reshape(-1, len(SUMS))
        document = {n: getattr(self, n) for n in ("first", "digest", "batches", "parts", "rows", "looked", "seen")}
        return document | {"places": self.places, "keys": list(self.sums), "sums": pack(table.T)}

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Settled:
        """Raises ValueError, LookupError or TypeError for anything else."""
        keys = [Key(str(topic), int(partition), str(life)) for topic, partition, life in raw["keys"]]
        columns = [unpack(text).tolist() for text in raw["sums"]]
        if len(columns) != len(SUMS) or any(len(c) != len(keys) for c in columns):
            raise ValueError("not the sums of each partition")
        sums = {k: {name: c[i] for name, c in zip(SUMS, columns, strict=True)} for i, k in enumerate(keys)}
        first, last = (int(t) for t in raw["looked"])
        batches, parts, rows = (int(raw[n]) for n in ("batches", "parts", "rows"))
        folders, when = tuple(str(p) for p in raw["places"]), (first, last)
        return cls(int(raw["first"]), str(raw["digest"]), batches, parts, rows, when, int(raw["seen"]), folders, sums)


def dump(rows: Rows) -> bytes:
    return zlib.compress(json.dumps(document(rows), separators=(",", ":")).encode(), 1)


def load(data: bytes) -> Rows | None:
    """Returns None if the data is not a file of settled rows."""
    try:
        return parse(json.loads(inflate(data, MOST)))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, zlib.error):
        return None


def document(rows: Rows) -> dict[str, Any]:
    rows = rows.in_order()
    tags = base64.b64encode(rows.tags.astype("<u8").tobytes()).decode()
    return {"keys": rows.keys, "columns": pack(rows.table.T), "tags": tags}


def parse(raw: Mapping[str, Any]) -> Rows:
    """Raises ValueError, LookupError or TypeError for anything else."""
    keys = [Key(str(topic), int(partition), str(life)) for topic, partition, life in raw["keys"]]
    columns = [unpack(text) for text in raw["columns"]]
    table, tags = np.array(columns, np.int64).T, np.frombuffer(base64.b64decode(raw["tags"]), "<u8")
    rows = Rows(keys, table.reshape(-1, len(COLUMNS)), tags.astype(np.uint64))
    sound = len(columns) == len(COLUMNS) and keys == sorted(set(keys))
    sound = sound and (table.min(initial=0, axis=0)[1] >= 0 and rows.column("key").max(initial=-1) < len(keys))
    sound = sound and rows.column("parts").min(initial=0) >= 0 and int(rows.column("parts").sum()) == len(tags)
    if not sound:
        raise ValueError("not one value for each receipt")
    return rows


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _sums(rows: Rows) -> dict[Key, dict[str, int]]:
    totals, spans = rows.totals(*SUMMED), rows.spans()
    keys, starts, ends = (rows.column(n) for n in ("key", "start", "end"))
    out = {}
    for i, key in enumerate(rows.keys):
        mine = keys == i
        if mine.any():
            lie = {"start": int(starts[mine].min()), "end": int(ends[mine].max())}
            out[key] = totals[key] | {"span": spans[key]} | lie
    return out


# -- folders


def place_of(path: str) -> str:
    """Returns the first folder below the feed's visible root, usually a day; empty for a file directly below it."""
    return "/".join(path.split("/")[2:-1]).partition("/")[0]


def runs(wanted: Collection[str], known_folders: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields the wanted folders as runs (first, last) in path order, with no other known folder in between.

    Unknown folders within a run are listed, too.
    """
    in_order = sorted({*wanted, *known_folders}, key=lambda folder: f"{folder}/")
    for mine, run in groupby(in_order, key=lambda folder: folder in wanted):
        if mine:
            run_folders = list(run)
            yield run_folders[0], run_folders[-1]


# -- kept


def split(rows: Rows, number: int, folders: Mapping[int, str]) -> tuple[Rows, dict[int, tuple[Rows, set[str]]]]:
    """Returns the recent rows, and by first number the rows to be settled, each with its folders.

    Rows are settled in complete files of entries below `number`, if the folders of all their parts are known by tag.
    """
    block = rows.column("number") // ENTRIES
    out: dict[int, tuple[Rows, set[str]]] = {}
    recent = np.ones(len(rows), bool)
    for b in np.unique(block[(block + 1) * ENTRIES <= number]).tolist():
        mine = rows.where(block == b)
        lie_in = {folders.get(tag, "") for tag in mine.tags.tolist()}
        if "" not in lie_in:
            out[b * ENTRIES] = mine, lie_in
            recent[block == b] = False
    return rows.where(recent), out


def put(lake: Lake, feed: str, first: int, data: bytes) -> None:
    lake.put(paths.settled_path(feed, first), data)


def sum_settled(settled: Sequence[Settled], key: Key, name: str) -> int:
    return sum(s.sums[key][name] for s in settled if key in s.sums)
