"""Audit results of old publish entries, in files by entry numbers that most audits do not open.

A quick audit checks entries published or superseded since the last one, the newest entries, and one more of these files
in turn. For the others it relies on the cache: their sums, ranges of offsets and folders. So its duration does not
grow with the age of the feed.
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
    """Returns None if the data is not a file of settled rows."""
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


def summed(settled: Sequence[Settled], key: Key, name: str) -> int:
    return sum(s.sums[key][name] for s in settled if key in s.sums)
