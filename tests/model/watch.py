"""Checks of the invariants of docs/developers/design/invariants.md against the logs in memory, after each effect and
after the last fault.

The ledger is read by `tests.checker.ledger`, which shares no code with Sluice's own fold; files are read as Parquet.
"""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pyarrow.parquet as pq

from sluice.pipelines.model.kafka import CommittedOffset, Key, TopicPartition
from tests.checker.facts import Life
from tests.checker.ledger import Book, Part, Receipt, fold_entries, parse_entry
from tests.model.world import FEED, HOUR, START, World, choose_kind, list_committed

LOG = f"_sluice/{FEED}/log/"
WINDOWS = f"_sluice/{FEED}/windows/"
ROOTS = (f"data/{FEED}/", f"quarantine/{FEED}/")


@lru_cache(20_000)
def build_book(entries: tuple[tuple[int, bytes], ...]) -> Book:
    return fold_entries({n: parse_entry(data) for n, data in entries})


@lru_cache(20_000)
def read_rows(data: bytes) -> tuple[tuple[str, int, int, bytes], ...]:
    """Return topic, partition, offset and value of the rows of a file."""
    table = pq.read_table(io.BytesIO(data), columns=["topic", "partition", "offset", "value"])
    return tuple(zip(*(table.column(n).to_pylist() for n in table.column_names), strict=True))


def read_own_rows(data: bytes, part: Part) -> tuple[tuple[str, int, int, bytes], ...]:
    """Return the rows of the file that belong to the offset range of `part`."""
    rows = read_rows(data)
    return rows[part.first : part.first + part.rows] if part.shared else rows


def choose_folder(offset: int) -> str:
    """Return the folder of the output that the offset's record goes to."""
    kind = choose_kind(offset)
    return kind if kind in ("a", "b") else "otherwise"


class Watch:
    """The checks of one world after each change."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._highest: dict[Life, int] = {}
        world.watch = self

    def take_over(self, other: Watch) -> None:
        """Copy the history of another watch."""
        self._highest = dict(other._highest)

    # -- after each change

    def check_change(self, what: str, **how: Any) -> str:
        """Return the invariant that the change violates; empty: none."""
        if what == "commit":
            return self._check_commit(**how)
        path = how["path"]
        if path.startswith(LOG):
            return self._check_entry()
        if path.startswith(ROOTS):
            return self._check_visible_file(path)
        return self._check_manifest(path) if path.startswith(WINDOWS) else ""

    def read_book(self) -> Book:
        return build_book(self._read_entries())

    def _read_entries(self) -> tuple[tuple[int, bytes], ...]:
        paths = sorted(p for p in self.world.files if p.startswith(LOG))
        return tuple((int(p.removeprefix(LOG).removesuffix(".json")), self.world.files[p]) for p in paths)

    def _check_entry(self) -> str:
        book = self.read_book()
        if book.broken:
            return str(book.broken[0])
        number = max(book.entries, default=-1)
        if number < 0:
            return ""
        entry = book.entries[number]
        if entry["kind"] == "publish" and number not in book.void:
            for r in book.receipts:
                if r.number == number and (bad := self._check_rows(r) or self._check_not_lost(r)):
                    return bad
            if bad := self._check_one_log(book, {r.life for r in book.receipts if r.number == number}):
                return bad
            if bad := self._check_shared_files(book) or self._check_no_row_is_lost(book, number):
                return bad
        if entry["kind"] == "loss":
            return self._check_loss(entry)
        if entry["kind"] == "accept" and (bad := self._check_acceptance(entry) or self._check_left(book, entry)):
            return bad
        if entry["kind"] == "origin" and (bad := self._check_origins(book, entry)):
            return bad
        if entry["kind"] == "plan" and entry["plan"]["request"]["kind"] not in ("compact", "replay", "erase"):
            return self._check_stable(book.plans[number].offset_ranges)
        if entry["kind"] == "boundary" and (bad := self._check_boundary(book, number)):
            return bad
        return self._check_order(book) if entry["kind"] in ("boundary", "origin", "accept", "publish") else ""

    def _check_rows(self, r: Receipt) -> str:
        """Check 1, 3, 5, 6: the rows of an offset range are its committed records in one log of its incarnation."""
        rows = []
        for part in r.parts:
            data = self.world.files.get(part.staged) or self.world.files.get(part.path)
            if data is None:
                return f"I1: {part.path} is published, and neither staged nor visible"
            mine = read_own_rows(data, part)
            folder = part.path.split("/")[2]
            if self.world.feed.outputs and {choose_folder(row[2]) for row in mine} - {folder}:
                return f"I1: {part.path} has rows of another output"
            if {row[1] for row in mine} - {r.life.partition}:
                return f"I3: {part.path} has rows of another partition where those of {r} are to be"
            if [row[2] for row in mine] != sorted({row[2] for row in mine}):
                return f"I6: offsets of {part.path} do not increase"
            rows += mine
        values = sorted((row[2], row[3]) for row in rows)
        if bad := next((o for o, _ in values if self.read_book().is_erased(r.life, o, r.number)), None):
            return f"I19: {r} (entry {r.number}) has a row of offset {bad}, which was erased"
        if not self._list_versions(r, values):
            return f"I1/I3: the rows of {r} (entry {r.number}) are {values}, not the committed records of that range"
        return ""

    def _list_versions(self, r: Receipt, values: Sequence[tuple[int, bytes]]) -> set[int]:
        """Return the versions of the partition's log whose committed records in the offset range are these."""
        logs = [p for p in self.world.list_logs(_to_key(r.life)) if r.end <= p.end]
        erased = {offset for start, end in r.erased for offset in range(start, end)}
        return {
            p.version
            for p in logs
            if list(values) == sorted(x for x in list_committed(p.records, r.start, r.end) if x[0] not in erased)
        }

    def _check_one_log(self, book: Book, lives: Collection[Life]) -> str:
        """Check 3: the live rows of an incarnation are of one log, not also of its truncated or restored form."""
        for life in lives:
            versions = list[set[int]]()
            for r in (r for r in book.list_live_receipts() if r.life == life):
                files = [(p, self.world.files.get(p.staged) or self.world.files.get(p.path) or b"") for p in r.parts]
                values = sorted((row[2], row[3]) for p, data in files if data for row in read_own_rows(data, p))
                versions.append(self._list_versions(r, values))
            if versions and not set.intersection(*versions):
                return f"I3: rows of {life} ({life.incarnation}) are of several logs"
        return ""

    def _check_shared_files(self, book: Book) -> str:
        """Check 2, 3: each row of a live file belongs to exactly one live offset range."""
        shares: dict[str, list[tuple[int, int]]] = {}
        for r in book.list_live_receipts():
            for part in r.parts:
                shares.setdefault(part.path, []).append((part.first, part.rows))
        for path, ranges in shares.items():
            parts = [p for r in book.list_live_receipts() for p in r.parts if p.path == path]
            at = 0
            for first, rows in sorted(ranges):
                if first != at:
                    return f"I2: rows {min(at, first)} to {max(at, first)} of {path} are not of one range that counts"
                at += rows
            data = self.world.files.get(parts[0].staged) or self.world.files.get(path)
            if data is not None and len(read_rows(data)) != at:
                return f"I2: offset ranges that count have {at} of the {len(read_rows(data))} rows of {path}"
        return ""

    def _check_no_row_is_lost(self, book: Book, number: int) -> str:
        """Check 1: a batch that replaces parts has each of their offsets."""
        before = build_book(tuple((n, data) for n, data in self._read_entries() if n < number))
        missing = {x for x in self._list_offsets(before) - self._list_offsets(book) if not book.is_erased(*x)}
        if missing:
            return f"I1: entry {number} replaces parts, and has no rows for {sorted(missing)}"
        return ""

    def _list_offsets(self, book: Book) -> set[tuple[Life, int]]:
        parts = ((r.life, p) for r in book.list_live_receipts() for p in r.parts)
        files = ((life, p, self.world.files.get(p.staged) or self.world.files.get(p.path)) for life, p in parts)
        return {(life, row[2]) for life, p, data in files if data is not None for row in read_own_rows(data, p)}

    def _check_not_lost(self, r: Receipt) -> str:
        """Check 4: each offset is in one class, and lost offsets cannot land."""
        before = build_book(tuple((n, data) for n, data in self._read_entries() if n < r.number))
        for s in before.spans.get(r.life, ()):
            if s.kind == "lost" and s.start < r.end and r.start < s.end:
                return f"I4: {r} landed (entry {r.number}), and entry {s.number} names {s.start}-{s.end} of it lost"
        return ""

    def _check_loss(self, entry: Mapping[str, Any]) -> str:
        for item in entry["ranges"]:
            life, end = Life(*item["key"]), item["range"][1]
            now = self.world.get_partition(_to_key(life).tp)
            if now is not None and now.topic_id == life.topic_id and end > now.start:
                return f"I1: {life} is named lost up to {end}, and Kafka has it from {now.start} on"
        return ""

    def _check_origins(self, book: Book, entry: Mapping[str, Any]) -> str:
        """Check 8: a feed begins at offsets of another ledger only after an explicit takeover of the group."""
        for item in entry["items"]:
            tp = TopicPartition(*item["key"][:2])
            if item["committed"] is not None and (
                of := self._find_other_ledger(book, self.world.group.offsets.get(tp))
            ):
                return f"I8: {tp} begins at {item['offset']}, where ledger {of} committed"
        return ""

    def _find_other_ledger(self, book: Book, committed: CommittedOffset | None) -> str:
        """Return the id of another ledger that committed the offset, unless it was taken over; else empty."""
        mark = json.loads(committed.metadata) if committed and committed.metadata.startswith("{") else {}
        ledger = mark.get("sluice", book.id)
        former = ledger in book.former or mark.get("n", 0) <= book.taken.get(ledger, -1)
        return "" if ledger == book.id or former else str(ledger)

    def _check_acceptance(self, entry: Mapping[str, Any]) -> str:
        """Check 8 of the design: each accepted event has happened."""
        for item in entry["items"]:
            leaves, enters = Life(*item["leaves"]), Life(*item["enters"]["key"])
            newest = max(p.version for p in self.world.list_logs(_to_key(enters)))
            if entry["event"] == "truncated" and newest < _get_version(enters):
                return f"A: {leaves} ({leaves.incarnation}) is accepted as truncated, and never was"
            if entry["event"] == "recreated" and leaves.topic_id == enters.topic_id:
                return f"A: {leaves} ({leaves.incarnation}) is accepted as recreated, and never was"
        return ""

    def _check_left(self, book: Book, entry: Mapping[str, Any]) -> str:
        """Check 1, 4: no known offset of a life stays pending after the feed has left it."""
        for life in (Life(*item["leaves"]) for item in entry["items"]):
            end = max(book.pins.get(life, {}).values(), default=0)
            if (book.get_frontier(life) or 0) < end:
                return f"I4: {life} ({life.incarnation}) was left, and its offsets up to {end} are pending"
        return ""

    def _check_stable(self, ranges: Sequence[tuple[Life, int, int]]) -> str:
        for life, start, end in ranges:
            if not any(end <= p.stable for p in self.world.list_logs(_to_key(life))):
                return f"I13: {life}:{start}-{end} is planned beyond the last stable offset"
        return ""

    def _check_order(self, book: Book) -> str:
        for life, pins in book.pins.items():
            offsets = [pins[t] for t in sorted(pins)]
            if any(a > b for a, b in pairwise(offsets)):
                hours = {(t - START) // HOUR: o for t, o in sorted(pins.items())}
                return f"I4: boundaries of {life} decrease: {hours}"
        return ""

    def _check_boundary(self, book: Book, number: int) -> str:
        """Check 16: no record in order of time lies above a boundary that it belongs below, in a complete log; where it
        is known when records arrived, each lies on its side of the boundary."""
        for life, pins in book.resolved.items():
            now, current = self.world.get_partition(_to_key(life).tp), book.current.get(life.tp) == life
            logs = self.world.list_logs(_to_key(life)) if current and now and now.topic_id == life.topic_id else []
            for pin in pins.values() if len(logs) == 1 and not logs[0].start else ():
                records = [(o, r) for o, r in enumerate(logs[0].records) if r.arrived is not None]
                wrong = [o for o, r in records if (o < pin.offset) != ((r.arrived or 0) < pin.time)]
                if pin.number == number and wrong:
                    return f"I16: {life}:{wrong[0]} arrived on the other side of {(pin.time - START) // HOUR} h"
                data = [(o, r.stamp) for o, r in enumerate(logs[0].records) if r.marker is None]
                late = next((o for o, _ in data if o >= pin.offset), None)
                apart = any(p.offset > pin.offset if p.time < pin.time else p.by_clock for p in pins.values())
                if pin.number != number or pin.by_clock or late is None or apart:
                    continue
                if max(stamp for o, stamp in data if o <= late) < pin.time:
                    boundary = f"{(pin.time - START) // HOUR} h is pinned to {pin.offset}"
                    return f"I16: {life}:{late} is stamped before {boundary}, and so is all before it"
        return ""

    def _check_visible_file(self, path: str) -> str:
        """Check 10: the ledger lists each visible file."""
        if path in self.world.files and all(path != p.path for r in self.read_book().receipts for p in r.parts):
            return f"I10: {path} is visible, and no entry lists it"
        return ""

    def _check_manifest(self, path: str) -> str:
        if path not in self.world.files:
            return ""
        book = self.read_book()
        for b in json.loads(self.world.files[path])["boundaries"]:
            lives = [x for x in book.lives.get((b["topic"], b["partition"]), ()) if x.topic_id == b["topic_id"]]
            gaps = [_find_gap(book, life, b["start"], b["end"]) for life in lives]
            if gaps and all(gaps):
                return f"W: {path} says complete, and {lives[0]}:{gaps[0]} is pending"
        return ""

    def _check_commit(
        self,
        before: Mapping[TopicPartition, CommittedOffset],
        offsets: Mapping[TopicPartition, CommittedOffset],
        letters: Sequence[str],
    ) -> str:
        """Check 7, 8, 12 and the letters when a commit takes effect."""
        book = self.read_book()
        for tp, o in offsets.items():
            mark = json.loads(o.metadata)
            if other := self._find_other_ledger(book, before.get(tp)):
                return f"I8: {tp} is committed at {o.offset}, over the mark of ledger {other}"
            life = Life(tp.topic, tp.partition, mark["i"])
            if book.intents.get(mark["n"], {}).get(life) != o.offset:
                return f"I11: {life} is committed at {o.offset}, and entry {mark['n']} is no intent to"
            frontier = book.get_frontier(life)
            if frontier is None or o.offset > frontier:
                return f"I7: {life} is committed at {o.offset}, published is up to {frontier}"
            if bad := self._check_below(book, life, o.offset) or self._check_progress(
                book, life, before.get(tp), o.offset
            ):
                return bad
        twice = sorted({x for x in self.world.group.letters if self.world.group.letters.count(x) > 1})
        return f"DL: the letter of {twice[0]} was sent twice" if twice else ""

    def _check_below(self, book: Book, life: Life, offset: int) -> str:
        """Check 1: each committed record below the committed offset is in a live part, or recorded as not landed."""
        landed = {
            row[2] for r in book.list_live_receipts() if r.life == life for p in r.parts for row in self._read_part(p)
        }
        for p in self.world.list_logs(_to_key(life)):
            if p.version != _get_version(life) or p not in self.world.partitions:
                continue
            for at, _ in list_committed(p.records, book.origins[life], min(offset, p.end)):
                span = book.find_span(life, at)
                if at not in landed and not book.is_erased(life, at) and (span is None or span.kind == "landed"):
                    return f"I1: {life}:{at} lies below the committed offset {offset}, and is nowhere"
        return ""

    def _read_part(self, part: Any) -> tuple[tuple[str, int, int, bytes], ...]:
        data = self.world.files.get(part.path) or self.world.files.get(part.staged)
        return read_own_rows(data, part) if data is not None else ()

    def _check_progress(self, book: Book, life: Life, before: CommittedOffset | None, to: int) -> str:
        """Check 8: no commit goes back behind our last one, or behind a foreign one in this incarnation."""
        tp = TopicPartition(life.topic, life.partition)
        by_hand = any(x == life for _, x, _ in book.moved) or tp in self.world.group.foreign
        highest = self._highest.get(life, -1)
        self._highest[life] = max(to, highest)
        if to < highest and not by_hand:
            return f"I8: {life} is committed at {to}, after {highest}"
        recorded = [
            i["committed"]
            for e in book.entries.values()
            for i in [*e.get("items", ()), *(x["enters"] for x in e.get("items", ()) if "enters" in x)]
            if isinstance(i, dict) and "committed" in i and Life(*i["key"]) == life
        ]
        moved = [o for _, x, o in book.moved if x == life]
        foreign = self.world.group.foreign.get(tp) == life.topic_id
        if foreign and before is not None and to < before.offset and before.offset not in [*recorded, *moved]:
            return f"I8: {life} is committed at {to}; somebody else had put it to {before.offset}"
        return ""

    # -- after the last fault

    def check_end_state(self, *, moved: bool, letters: bool) -> str:
        """Check 1, 4, 5, 10, 14: all offsets are landed or recorded, visible as listed, and committed."""
        book, world = self.read_book(), self.world
        if book.broken:
            return str(book.broken[0])
        for life in book.current.values():
            if bad := self._check_complete(book, life, moved):
                return bad
        for p in world.partitions:
            if (p.tp.topic, p.tp.partition) not in book.current:
                return f"I14: {p.tp} was never planned"
        return (
            self._check_listing(book)
            or self._check_erased(book)
            or self._check_windows(book)
            or (self._check_letters(book) if letters and not moved else "")
        )

    def _check_complete(self, book: Book, life: Life, moved: bool) -> str:
        tp, frontier = _to_key(life).tp, book.get_frontier(life)
        now = self.world.get_partition(tp)
        if now is None or now.topic_id != life.topic_id:
            return f"I12: {life} is in topic id {life.topic_id}, Kafka's is {now.topic_id if now else 'none'}"
        if frontier is None or frontier < now.stable:
            return f"I14: {life} landed up to {frontier}, the last stable offset is {now.stable}"
        if bad := self._check_below(book, life, frontier):
            return bad
        committed = self.world.group.offsets.get(tp)
        if not moved and (committed is None or committed.offset != frontier):
            return f"I14: {life} is committed at {committed.offset if committed else None}, landed up to {frontier}"
        return ""

    def _check_listing(self, book: Book) -> str:
        """Check 10: the visible files are the live parts; no staged files are left."""
        visible = {p for p in self.world.files if p.startswith(ROOTS)}
        counts = {p.path for r in book.list_live_receipts() for p in r.parts}
        if visible != counts:
            return f"I10: visible and replaced: {sorted(visible - counts)}; missing: {sorted(counts - visible)}"
        for r in book.list_live_receipts():
            if bad := self._check_rows(r):
                return bad
        if bad := self._check_shared_files(book):
            return bad
        staged = [p for p in self.world.files if p.startswith(f"_sluice/{FEED}/staging/")]
        live = {p.number for p in book.plans.values() if p.status == "planned"}
        orphans = [p for p in staged if int(p.split("/staging/")[1].split("/")[0]) not in live]
        return f"I10: left in staging: {orphans}" if orphans else ""

    def _check_erased(self, book: Book) -> str:
        """Check 19: no file has a row of an erased record."""
        for path, data in self.world.files.items():
            for _, partition, offset, _ in (
                read_rows(data) if path.endswith(".parquet") and "relanded" not in path else ()
            ):
                lives = [life for life in book.erased if life.partition == partition]
                if any(book.is_erased(life, offset) for life in lives):
                    return f"I19: {path} has a row of offset {offset}, which was erased"
        return ""

    def _check_windows(self, book: Book) -> str:
        """Check that parts lie between the boundaries of their windows, and that complete windows stay complete."""
        for r in book.list_live_receipts():
            raw = next(
                x["slice"] for x in book.entries[r.number]["receipts"] if _get_position(x["slice"]) == (r.life, r.start)
            )
            pins, window = book.pins.get(r.life, {}), raw["window"]
            if window is None:
                continue
            begins, ends = pins.get(window), pins.get(window + HOUR)
            if (begins is not None and r.start < begins) or (ends is not None and r.end > ends):
                hour = (window - START) // HOUR
                return f"W: {r} lies in window {hour}, whose boundaries are {begins} and {ends}"
        for path in [p for p in self.world.files if p.startswith(WINDOWS)]:
            if bad := self._check_manifest(path):
                return bad
        return ""

    def _check_letters(self, book: Book) -> str:
        """Check that each quarantined record has its letter."""
        rows = (
            row
            for r in book.list_live_receipts()
            for p in r.parts
            if p.kind == "quarantined"
            for row in self._read_part(p)
        )
        missing = {f"{topic}:{partition}:{offset}" for topic, partition, offset, _ in rows}
        missing -= set(self.world.group.letters)
        return f"DL: no letter was sent of {sorted(missing)}" if missing else ""


def _get_position(raw: Mapping[str, Any]) -> tuple[Life, int]:
    return Life(raw["topic"], raw["partition"], raw["incarnation"]), raw["start"]


def _find_gap(book: Book, life: Life, start: int, end: int) -> str:
    at = max(start, book.origins[life]) if start >= book.origins[life] else start
    for s in book.spans.get(life, ()):
        if s.start <= at < s.end:
            at = s.end
    return f"{at}-{end}" if at < end else ""


def _to_key(life: Life) -> Key:
    return Key(life.topic, life.partition, life.incarnation)


def _get_version(life: Life) -> int:
    return int(life.incarnation.partition("#")[2] or 0)
