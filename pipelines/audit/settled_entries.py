"""What audits know of old publish entries, in files of their own by entry numbers: most audits do not open them.

A quick audit looks at what was published or superseded since the last one, at the newest entries, and at one of these
files more: the one whose turn it is. Of the others it takes what the note beside them says: their sums, and which
offsets and folders they are about. So it takes as long for a feed of five years as for one of a few months.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from typing import Any

import numpy as np

from sluice.pipelines.audit.receipt_rows import COLUMNS, SUMMED, Rows
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import State
from sluice.pipelines.ledger.columns import MOST, inflate, packed, unpack
from sluice.pipelines.model.kafka import Key
from sluice.pipelines.ports import Lake

ENTRIES = 10_000
"""Ledger numbers in a file: some two months of hours."""
SUMS = (*SUMMED, "files", "span", "start", "end")
"""What is told of each partition: `totals` of the rows, the offsets in them, and those between which they lie."""


@dataclass(frozen=True, slots=True)
class Settled:
    """The rows of publish entries from number `first` on, `ENTRIES` of them; `digest` is that of their file.

    `batches`, `parts` and `rows` are counts. Its receipts were looked at between the times `looked` (seconds); all its
    files and entries were in a listing at `seen` (seconds), and lie in the folders `places`.
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
        """With the file's content."""
        data = dump(rows)
        looked, numbers = rows.column("looked"), rows.column("number")
        when = (int(looked.min()), int(looked.max())) if len(rows) else (looked_at, looked_at)
        counts = len(np.unique(numbers)), len(np.unique(rows.tags)), int(rows.column("rows").sum())
        settled = cls(first, _digest(data), *counts, when, looked_at, tuple(sorted(folders)), _sums(rows))
        return settled, data

    def load(self, lake: Lake, feed: str) -> Rows | None:
        """The rows; None where the file is not the one that was kept."""
        data = lake.get(paths.settled_path(feed, self.first)) or b""
        return load(data) if _digest(data) == self.digest else None

    def meets(self, state: State, since: int) -> bool:
        """Whether an entry from a number on may have superseded some of the rows."""
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
        return document | {"places": self.places, "keys": list(self.sums), "sums": packed(table.T)}

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
    """None for anything that is not such a file."""
    try:
        return parse(json.loads(inflate(data, MOST)))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, zlib.error):
        return None


def document(rows: Rows) -> dict[str, Any]:
    rows = rows.in_order()
    tags = base64.b64encode(rows.tags.astype("<u8").tobytes()).decode()
    return {"keys": rows.keys, "columns": packed(rows.table.T), "tags": tags}


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
    """The first folder below the feed's visible root: a day, as a rule. Empty for a file right below the root."""
    return "/".join(path.split("/")[2:-1]).partition("/")[0]


def runs(wanted: Collection[str], known_folders: Collection[str]) -> Iterator[tuple[str, str]]:
    """The wanted folders as runs (first, last), in the order of paths: no other known one lies within. What lies there
    that nobody knows is listed, too."""
    in_order = sorted({*wanted, *known_folders}, key=lambda folder: f"{folder}/")
    for mine, run in groupby(in_order, key=lambda folder: folder in wanted):
        if mine:
            run_folders = list(run)
            yield run_folders[0], run_folders[-1]


# -- kept


def split(rows: Rows, number: int, folders: Mapping[int, str]) -> tuple[Rows, dict[int, tuple[Rows, set[str]]]]:
    """What is not settled yet, and by first number the rows that are, each with its folders: those of the entries below
    `number`, in whole files, whose parts' folders are all known by tag."""
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


def summed(settled: Sequence[Settled], key: Key, name: str) -> int:
    return sum(s.sums[key][name] for s in settled if key in s.sums)
