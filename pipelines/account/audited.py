"""What audits have looked at and found right, in a file beside the ledger: the next one looks at what changed since.

What is kept says of which log it is: the ledger's id, and a hash of what its entries say, in blocks. Files are known by
path, size and the store's tag, so a listing shows what is missing, changed or new. A receipt with anything wrong about
it, or about its files, is never kept. What cannot be read is as if it were not there: everything is looked at.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import numpy as np

from sluice.pipelines.account.rows import COLUMNS, Rows
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.columns import MOST, inflate, packed, unpack
from sluice.pipelines.ports import Lake
from sluice.pipelines.vocabulary.errors import SluiceError
from sluice.pipelines.vocabulary.kafka import Key
from sluice.pipelines.vocabulary.ranges import union
from sluice.pipelines.vocabulary.stat import Stat

FORMAT = 1
BLOCK = 1000
"""Entries whose hash is kept together: where a listing shows that one of them is another file, all of them are read."""


@dataclass(frozen=True, slots=True)
class Block:
    """Entries of a block up to some number: `files` is a hash of what a listing showed, `said` one of their bytes."""

    files: str
    said: str


@dataclass(frozen=True, slots=True)
class Strictly:
    """What only a strict audit looks at. Every commit entry below `number` was held against the fold below it (there
    were `recorded`), and `state` is a checkpoint there. `manifests` are tags of those that were read."""

    number: int
    recorded: int
    state: bytes
    manifests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Audited:
    """The entries below `number` of the ledger with this id were read. `rows` are the receipts that counted then and
    have nothing wrong about them; publish entries in `again` have other receipts, too."""

    ledger: str
    number: int
    rows: Rows
    again: tuple[int, ...]
    log: tuple[Block, ...]
    strictly: Strictly | None = None

    def dump(self) -> bytes:
        rows = self.rows.in_order()
        raw = {
            "format": FORMAT,
            "ledger": self.ledger,
            "number": self.number,
            "keys": rows.keys,
            "columns": packed(rows.table.T),
            "tags": base64.b64encode(rows.tags.astype("<u8").tobytes()).decode(),
            "again": self.again,
            "log": [(b.files, b.said) for b in self.log],
            "strictly": self.strictly and _strictly(self.strictly),
        }
        return zlib.compress(json.dumps(raw, separators=(",", ":")).encode(), 1)

    @classmethod
    def load(cls, data: bytes) -> Audited | None:
        """None for anything that is not such a file."""
        try:
            raw = json.loads(inflate(data, MOST))
            return _audited(raw) if raw["format"] == FORMAT else None
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, zlib.error):
            return None


def _audited(raw: dict[str, Any]) -> Audited:
    keys = [Key(str(topic), int(partition), str(life)) for topic, partition, life in raw["keys"]]
    columns = [unpack(text) for text in raw["columns"]]
    table, tags = np.array(columns, np.int64).T, np.frombuffer(base64.b64decode(raw["tags"]), "<u8")
    rows = Rows(keys, table.reshape(-1, len(COLUMNS)), tags.astype(np.uint64))
    sound = len(columns) == len(COLUMNS) and keys == sorted(set(keys))
    sound = sound and (table.min(initial=0, axis=0)[1] >= 0 and rows.column("key").max(initial=-1) < len(keys))
    sound = sound and rows.column("parts").min(initial=0) >= 0 and int(rows.column("parts").sum()) == len(tags)
    number, log = int(raw["number"]), tuple(Block(str(a), str(b)) for a, b in raw["log"])
    if not sound or len(log) != -(-number // BLOCK):
        raise ValueError("not one value for each receipt")
    again = tuple(int(n) for n in raw["again"])
    return Audited(str(raw["ledger"]), number, rows, again, log, _strictly_of(raw["strictly"]))


def _strictly(s: Strictly) -> dict[str, Any]:
    return {
        "number": s.number,
        "recorded": s.recorded,
        "state": base64.b64encode(s.state).decode(),
        "manifests": list(s.manifests),
    }


def _strictly_of(raw: dict[str, Any] | None) -> Strictly | None:
    if raw is None:
        return None
    state, manifests = base64.b64decode(raw["state"]), tuple(int(t) for t in raw["manifests"])
    return Strictly(int(raw["number"]), int(raw["recorded"]), state, manifests)


# -- files


def tag(found: Stat) -> int:
    """What stands for the file as it is now."""
    said = f"{found.size}:{found.tag}:{found.path}".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(said, digest_size=8).digest(), "little")


def shown(lake: Lake, feed: str) -> dict[str, int]:
    """Every visible file of the feed by its path, with its tag."""
    found = (s for root in paths.visible_roots(feed) for s in lake.stats(root))
    return {s.path: tag(s) for s in found if not paths.is_table_log(s.path)}


def still_there(rows: Rows, listed: Mapping[str, int]) -> Any:
    """A mask: which rows have all of their files as they were."""
    there = np.fromiter(listed.values(), np.uint64, len(listed))
    missing = ~np.isin(rows.tags, there)
    out = np.ones(len(rows), bool)
    out[rows.owners[missing]] = False
    return out


def still_counts(rows: Rows, state: State, since: int) -> Any:
    """A mask: which rows, that counted below entry `since`, no entry from there on has superseded."""
    out, order = np.ones(len(rows), bool), np.argsort(rows.column("key"), kind="stable")
    begins = np.searchsorted(rows.column("key")[order], np.arange(len(rows.keys) + 1))
    for i, key in enumerate(rows.keys):
        newer = state.superseded.get(key)
        over = union(r for n, r in newer if n >= since) if newer and newer.numbers[-1] >= since else ()
        if over:
            mine = order[begins[i] : begins[i + 1]]
            starts, ends = np.array(over, np.int64).T
            first = np.searchsorted(ends, rows.column("start")[mine], "right")
            out[mine] = first >= np.searchsorted(starts, rows.column("end")[mine], "left")
    return out


# -- the log


class Log:
    """The entries below a number as a listing shows them, and what they say, by blocks."""

    def __init__(self, ledger: Ledger, state: State) -> None:
        self._ledger, self._state = ledger, state
        self._files = [(n, f"{n}:{s.size}:{s.tag};".encode()) for n, s in ledger.stats() if not state.lost_entry(n)]
        ledger.check_end(n for n, _ in self._files)
        self._said: dict[int, bytes] = {}
        self.copied_wrongly: list[tuple[int, str]] = []
        """Entries, with the segment that says anything else than the log does."""

    def files(self, below: int) -> list[str]:
        """Of each block, what a listing shows of its entries below the number."""
        hashes = [blake2b(digest_size=16) for _ in range(-(-below // BLOCK))]
        for n, said in takewhile(lambda f: f[0] < below, self._files):
            hashes[n // BLOCK].update(said)
        return [h.hexdigest() for h in hashes]

    def begin(self, before: Audited) -> bool:
        """Go on from what an audit knew. False where the log says anything else than it did."""
        if before.ledger != self._state.ledger_id or not 0 < before.number <= self._state.number:
            return False
        now = self.files(before.number)
        self._said = {i: bytes.fromhex(b.said) for i, b in enumerate(before.log)}
        others = [i for i, (files, b) in enumerate(zip(now, before.log, strict=True)) if files != b.files]
        return all(self._reread(i, before.number) == self._said[i] for i in others)

    def _reread(self, block: int, below: int) -> bytes:
        """What the entries of the block say, those below a number."""
        said, number = b"", block * BLOCK
        while self._state.lost_entry(number):
            number += 1
        for at, _, data in self._ledger.raw(number):
            if at >= min(below, (block + 1) * BLOCK):
                break
            said = _linked(said, data)
        return said

    def entries(self, first: int) -> Iterator[tuple[int, str, bytes]]:
        """(number, path, content) of those from a number on, which is where `begin` went on from, or 0."""
        if first >= self._state.number:
            return
        copies = self._copies() if first == 0 else iter(())
        copied = next(copies, None)
        for number, path, data in self._ledger.raw(first):
            if number >= self._state.number:
                return
            if copied and copied[0] == number:
                self.copied_wrongly += [(number, copied[2])] if copied[1] != data else []
                copied = next(copies, None)
            self._said[number // BLOCK] = _linked(self._said.get(number // BLOCK, b""), data)
            yield number, path, data

    def _copies(self) -> Iterator[tuple[int, bytes, str]]:
        """Number and content of the entries in segments, and the segment."""
        for segment in self._ledger.segments():
            path = paths.segment_path(self._ledger.feed, segment.entries[0][0], segment.end)
            yield from ((number, data, path) for number, data in segment.entries)

    def blocks(self) -> tuple[Block, ...]:
        """Once all entries were taken."""
        files = self.files(self._state.number)
        return tuple(Block(f, self._said.get(i, b"").hex()) for i, f in enumerate(files))


def _linked(said: bytes, data: bytes) -> bytes:
    return blake2b(said + data, digest_size=16).digest()


def keep(lake: Lake, feed: str, now: Audited, before: Audited | None, at: int) -> SluiceError | None:
    """Keep what an audit found right at a time (ms), for the next one, with what was proven before of the same receipts
    and files. Returns the error where it cannot be kept: who audits may have no right to write."""
    if before is not None and before.ledger == now.ledger:
        now = replace(now, rows=now.rows.also(before.rows, at // 1000))
    try:
        lake.put(paths.audited_path(feed), now.dump())
    except SluiceError as error:
        return error
    return None


def kept(lake: Lake, feed: str) -> Audited | None:
    """What earlier audits kept."""
    return Audited.load(lake.get(paths.audited_path(feed)) or b"")
