"""Checks the invariants of docs/developers/design/invariants.md against the logs in memory after every effect and all
faults.

The ledger is read by `tests.checker.ledger`, which shares nothing with Sluice's own fold; files are read as Parquet.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pyarrow.parquet as pq

from sluice.pipelines.model.kafka import CommittedOffset, Key, TopicPartition
from tests.checker.facts import Life
from tests.checker.ledger import Book, Part, Receipt, fold
from tests.model.world import FEED, HOUR, START, World, visible

LOG = f"_sluice/{FEED}/log/"
WINDOWS = f"_sluice/{FEED}/windows/"
ROOTS = (f"data/{FEED}/", f"quarantine/{FEED}/")


@lru_cache(20_000)
def book_of(entries: tuple[tuple[int, bytes], ...]) -> Book:
    return fold({n: json.loads(data) for n, data in entries})


@lru_cache(20_000)
def rows_of(data: bytes) -> tuple[tuple[str, int, int, bytes], ...]:
    """Topic, partition, offset and value of the rows of a file."""
    table = pq.read_table(io.BytesIO(data), columns=["topic", "partition", "offset", "value"])
    return tuple(zip(*(table.column(n).to_pylist() for n in table.column_names), strict=True))


def own_rows(data: bytes, part: Part) -> tuple[tuple[str, int, int, bytes], ...]:
    """Those of the file's rows that are the offset range's."""
    rows = rows_of(data)
    return rows[part.first : part.first + part.rows] if part.shared else rows


class Watch:
    """Looks at a world whenever it changes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._highest: dict[Life, int] = {}
        world.watch = self

    def take_over(self, other: Watch) -> None:
        """What it knows of the past."""
        self._highest = dict(other._highest)

    # -- at every instant

    def after(self, what: str, **how: Any) -> str:
        """What the change broke; empty: nothing."""
        if what == "commit":
            return self._committed(**how)
        path = how["path"]
        if path.startswith(LOG):
            return self._entry()
        if path.startswith(ROOTS):
            return self._seen(path)
        return self._manifest(path) if path.startswith(WINDOWS) else ""

    def book(self) -> Book:
        return book_of(self._entries())

    def _entries(self) -> tuple[tuple[int, bytes], ...]:
        paths = sorted(p for p in self.world.files if p.startswith(LOG))
        return tuple((int(p.removeprefix(LOG).removesuffix(".json")), self.world.files[p]) for p in paths)

    def _entry(self) -> str:
        book = self.book()
        if book.broken:
            return str(book.broken[0])
        number = max(book.entries, default=-1)
        if number < 0:
            return ""
        entry = book.entries[number]
        if entry["kind"] == "publish" and number not in book.void:
            for r in book.receipts:
                if r.number == number and (bad := self._landed(r) or self._named_lost(r)):
                    return bad
            if bad := self._shared(book):
                return bad
        if entry["kind"] == "loss":
            return self._lost(entry)
        if entry["kind"] == "accept" and (bad := self._happened(entry)):
            return bad
        if entry["kind"] == "origin" and (bad := self._begun(book, entry)):
            return bad
        if entry["kind"] == "plan" and entry["plan"]["request"]["kind"] not in ("compact", "replay"):
            return self._stable(book.plans[number].offset_ranges)
        if entry["kind"] == "boundary" and (bad := self._sides(book, number)):
            return bad
        return self._pins(book) if entry["kind"] in ("boundary", "origin", "accept", "publish") else ""

    def _landed(self, r: Receipt) -> str:
        """1, 3, 5, 6: the rows of an offset range are the committed records of its range, in one of the logs of its
        life.
        """
        rows = []
        for part in r.parts:
            data = self.world.files.get(part.staged) or self.world.files.get(part.path)
            if data is None:
                return f"I1: {part.path} is published, and neither staged nor visible"
            mine = own_rows(data, part)
            if {row[1] for row in mine} - {r.life.partition}:
                return f"I3: {part.path} has rows of another partition where those of {r} are to be"
            if [row[2] for row in mine] != sorted({row[2] for row in mine}):
                return f"I6: offsets of {part.path} do not increase"
            rows += mine
        found = sorted((row[2], row[3]) for row in rows)
        logs = self.world.logs(_key(r.life))
        if not any(r.end <= p.end and found == sorted(visible(p.records, r.start, r.end)) for p in logs):
            return f"I1/I3: the rows of {r} (entry {r.number}) are {found}, not the committed records of that range"
        return ""

    def _shared(self, book: Book) -> str:
        """2, 3: each row of a file that counts is of exactly one offset range that counts."""
        held: dict[str, list[tuple[int, int]]] = {}
        for r in book.live():
            for part in r.parts:
                held.setdefault(part.path, []).append((part.first, part.rows))
        for path, some in held.items():
            parts = [p for r in book.live() for p in r.parts if p.path == path]
            at = 0
            for first, rows in sorted(some):
                if first != at:
                    return f"I2: rows {min(at, first)} to {max(at, first)} of {path} are not of one range that counts"
                at += rows
            data = self.world.files.get(parts[0].staged) or self.world.files.get(path)
            if data is not None and len(rows_of(data)) != at:
                return f"I2: offset ranges that count have {at} of the {len(rows_of(data))} rows of {path}"
        return ""

    def _named_lost(self, r: Receipt) -> str:
        """4: an offset is in one class, and what is lost cannot land."""
        before = book_of(tuple((n, data) for n, data in self._entries() if n < r.number))
        for s in before.spans.get(r.life, ()):
            if s.kind == "lost" and s.start < r.end and r.start < s.end:
                return f"I4: {r} landed (entry {r.number}), and entry {s.number} names {s.start}-{s.end} of it lost"
        return ""

    def _lost(self, entry: Mapping[str, Any]) -> str:
        for item in entry["ranges"]:
            life, end = Life(*item["key"]), item["range"][1]
            now = self.world.now_of(_key(life).tp)
            if now is not None and now.topic_id == life.topic_id and end > now.start:
                return f"I1: {life} is named lost up to {end}, and Kafka has it from {now.start} on"
        return ""

    def _begun(self, book: Book, entry: Mapping[str, Any]) -> str:
        """8: where another ledger committed, a feed begins only once somebody took the group over by name."""
        for item in entry["items"]:
            tp = TopicPartition(*item["key"][:2])
            if item["committed"] is not None and (of := self._another(book, self.world.group.offsets.get(tp))):
                return f"I8: {tp} begins at {item['offset']}, where ledger {of} committed"
        return ""

    def _another(self, book: Book, held: CommittedOffset | None) -> str:
        """The id of the ledger that committed the offset, if it is another one that nobody took over."""
        mark = json.loads(held.metadata) if held and held.metadata.startswith("{") else {}
        ledger = mark.get("sluice", book.id)
        former = ledger in book.former or mark.get("n", 0) <= book.taken.get(ledger, -1)
        return "" if ledger == book.id or former else str(ledger)

    def _happened(self, entry: Mapping[str, Any]) -> str:
        """8 of the design: what somebody accepts has happened."""
        for item in entry["items"]:
            leaves, enters = Life(*item["leaves"]), Life(*item["enters"]["key"])
            known = max(p.version for p in self.world.logs(_key(enters)))
            if entry["event"] == "truncated" and known < _version(enters):
                return f"A: {leaves} ({leaves.incarnation}) is accepted as truncated, and never was"
            if entry["event"] == "recreated" and leaves.topic_id == enters.topic_id:
                return f"A: {leaves} ({leaves.incarnation}) is accepted as recreated, and never was"
        return ""

    def _stable(self, ranges: Sequence[tuple[Life, int, int]]) -> str:
        for life, start, end in ranges:
            if not any(end <= p.stable for p in self.world.logs(_key(life))):
                return f"I13: {life}:{start}-{end} is planned beyond the last stable offset"
        return ""

    def _pins(self, book: Book) -> str:
        for life, pins in book.pins.items():
            offsets = [pins[t] for t in sorted(pins)]
            if any(a > b for a, b in pairwise(offsets)):
                said = {(t - START) // HOUR: o for t, o in sorted(pins.items())}
                return f"I4: boundaries of {life} decrease: {said}"
        return ""

    def _sides(self, book: Book, number: int) -> str:
        """16: nothing that is in order stands above a boundary that it belongs below; in a log that is there, uncut."""
        for life, pins in book.resolved.items():
            now, current = self.world.now_of(_key(life).tp), book.current.get(life.tp) == life
            logs = self.world.logs(_key(life)) if current and now and now.topic_id == life.topic_id else []
            for pin in pins.values() if len(logs) == 1 and not logs[0].start else ():
                data = [(o, r.stamp) for o, r in enumerate(logs[0].records) if r.marker is None]
                late = next((o for o, _ in data if o >= pin.offset), None)
                apart = any(p.offset > pin.offset if p.time < pin.time else p.by_clock for p in pins.values())
                if pin.number != number or pin.by_clock or late is None or apart:
                    continue
                if max(stamp for o, stamp in data if o <= late) < pin.time:
                    said = f"{(pin.time - START) // HOUR} h is pinned to {pin.offset}"
                    return f"I16: {life}:{late} is stamped before {said}, and so is all before it"
        return ""

    def _seen(self, path: str) -> str:
        """10: what is visible, the ledger knows."""
        if path in self.world.files and all(path != p.path for r in self.book().receipts for p in r.parts):
            return f"I10: {path} is visible, and no entry lists it"
        return ""

    def _manifest(self, path: str) -> str:
        if path not in self.world.files:
            return ""
        book = self.book()
        for b in json.loads(self.world.files[path])["boundaries"]:
            lives = [x for x in book.lives.get((b["topic"], b["partition"]), ()) if x.topic_id == b["topic_id"]]
            gaps = [_gap(book, life, b["start"], b["end"]) for life in lives]
            if gaps and all(gaps):
                return f"W: {path} says complete, and {lives[0]}:{gaps[0]} is pending"
        return ""

    def _committed(
        self,
        before: Mapping[TopicPartition, CommittedOffset],
        offsets: Mapping[TopicPartition, CommittedOffset],
        letters: Sequence[str],
    ) -> str:
        """7, 8, 12 and the letters, as the commit takes effect."""
        book = self.book()
        for tp, o in offsets.items():
            mark = json.loads(o.metadata)
            if other := self._another(book, before.get(tp)):
                return f"I8: {tp} is committed at {o.offset}, over the mark of ledger {other}"
            life = Life(tp.topic, tp.partition, mark["i"])
            if book.intents.get(mark["n"], {}).get(life) != o.offset:
                return f"I11: {life} is committed at {o.offset}, and entry {mark['n']} is no intent to"
            frontier = book.frontier(life)
            if frontier is None or o.offset > frontier:
                return f"I7: {life} is committed at {o.offset}, published is up to {frontier}"
            if bad := self._below(book, life, o.offset) or self._back(book, life, before.get(tp), o.offset):
                return bad
        twice = sorted({x for x in self.world.group.letters if self.world.group.letters.count(x) > 1})
        return f"DL: the letter of {twice[0]} was sent twice" if twice else ""

    def _below(self, book: Book, life: Life, offset: int) -> str:
        """1: every committed record below the committed offset is in a part that counts, or named."""
        held = {row[2] for r in book.live() if r.life == life for p in r.parts for row in self._rows(p)}
        for p in self.world.logs(_key(life)):
            if p.version != _version(life) or p not in self.world.partitions:
                continue
            for at, _ in visible(p.records, book.origins[life], min(offset, p.end)):
                span = book.named(life, at)
                if at not in held and (span is None or span.kind == "landed"):
                    return f"I1: {life}:{at} lies below the committed offset {offset}, and is nowhere"
        return ""

    def _rows(self, part: Any) -> tuple[tuple[str, int, int, bytes], ...]:
        data = self.world.files.get(part.path) or self.world.files.get(part.staged)
        return own_rows(data, part) if data is not None else ()

    def _back(self, book: Book, life: Life, before: CommittedOffset | None, to: int) -> str:
        """8: neither behind what we committed, nor behind what somebody else did in this life."""
        tp = TopicPartition(life.topic, life.partition)
        by_hand = any(x == life for _, x, _ in book.moved) or tp in self.world.group.foreign
        highest = self._highest.get(life, -1)
        self._highest[life] = max(to, highest)
        if to < highest and not by_hand:
            return f"I8: {life} is committed at {to}, after {highest}"
        seen = [
            i["committed"]
            for e in book.entries.values()
            for i in [*e.get("items", ()), *(x["enters"] for x in e.get("items", ()) if "enters" in x)]
            if isinstance(i, dict) and "committed" in i and Life(*i["key"]) == life
        ]
        moved = [o for _, x, o in book.moved if x == life]
        foreign = self.world.group.foreign.get(tp) == life.topic_id
        if foreign and before is not None and to < before.offset and before.offset not in [*seen, *moved]:
            return f"I8: {life} is committed at {to}; somebody else had put it to {before.offset}"
        return ""

    # -- once faults are over

    def at_last(self, *, moved: bool, letters: bool) -> str:
        """1, 4, 5, 10, 14: everything is landed or named, shown as the ledger says, and committed."""
        book, world = self.book(), self.world
        if book.broken:
            return str(book.broken[0])
        for life in book.current.values():
            if bad := self._whole(book, life, moved):
                return bad
        for p in world.partitions:
            if (p.tp.topic, p.tp.partition) not in book.current:
                return f"I14: {p.tp} was never planned"
        return self._as_listed(book) or self._windows(book) or (self._told(book) if letters and not moved else "")

    def _whole(self, book: Book, life: Life, moved: bool) -> str:
        tp, frontier = _key(life).tp, book.frontier(life)
        now = self.world.now_of(tp)
        if now is None or now.topic_id != life.topic_id:
            return f"I12: {life} is in topic id {life.topic_id}, Kafka's is {now.topic_id if now else 'none'}"
        if frontier is None or frontier < now.stable:
            return f"I14: {life} landed up to {frontier}, the last stable offset is {now.stable}"
        if bad := self._below(book, life, frontier):
            return bad
        held = self.world.group.offsets.get(tp)
        if not moved and (held is None or held.offset != frontier):
            return f"I14: {life} is committed at {held.offset if held else None}, landed up to {frontier}"
        return ""

    def _as_listed(self, book: Book) -> str:
        """10: what is visible is what counts; nothing is left in staging."""
        shown = {p for p in self.world.files if p.startswith(ROOTS)}
        counts = {p.path for r in book.live() for p in r.parts}
        if shown != counts:
            return f"I10: visible and replaced: {sorted(shown - counts)}; missing: {sorted(counts - shown)}"
        for r in book.live():
            if bad := self._landed(r):
                return bad
        if bad := self._shared(book):
            return bad
        left = [p for p in self.world.files if p.startswith(f"_sluice/{FEED}/staging/")]
        live = {p.number for p in book.plans.values() if p.status == "planned"}
        orphans = [p for p in left if int(p.split("/staging/")[1].split("/")[0]) not in live]
        return f"I10: left in staging: {orphans}" if orphans else ""

    def _windows(self, book: Book) -> str:
        """What lies in a window's folder lies between its boundaries; a window that was complete still is."""
        for r in book.live():
            raw = next(x["slice"] for x in book.entries[r.number]["receipts"] if _at(x["slice"]) == (r.life, r.start))
            pins, window = book.pins.get(r.life, {}), raw["window"]
            if window is None:
                continue
            begins, ends = pins.get(window), pins.get(window + HOUR)
            if (begins is not None and r.start < begins) or (ends is not None and r.end > ends):
                hour = (window - START) // HOUR
                return f"W: {r} lies in window {hour}, whose boundaries are {begins} and {ends}"
        for path in [p for p in self.world.files if p.startswith(WINDOWS)]:
            if bad := self._manifest(path):
                return bad
        return ""

    def _told(self, book: Book) -> str:
        """Each record that is in quarantine has its letter."""
        held = (row for r in book.live() for p in r.parts if p.kind == "quarantined" for row in self._rows(p))
        missing = {f"{topic}:{partition}:{offset}" for topic, partition, offset, _ in held}
        missing -= set(self.world.group.letters)
        return f"DL: no letter was sent of {sorted(missing)}" if missing else ""


def _at(raw: Mapping[str, Any]) -> tuple[Life, int]:
    return Life(raw["topic"], raw["partition"], raw["incarnation"]), raw["start"]


def _gap(book: Book, life: Life, start: int, end: int) -> str:
    at = max(start, book.origins[life]) if start >= book.origins[life] else start
    for s in book.spans.get(life, ()):
        if s.start <= at < s.end:
            at = s.end
    return f"{at}-{end}" if at < end else ""


def _key(life: Life) -> Key:
    return Key(life.topic, life.partition, life.incarnation)


def _version(life: Life) -> int:
    return int(life.incarnation.partition("#")[2] or 0)
