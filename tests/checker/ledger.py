"""Folds the ledger from raw JSON, as docs/developers/design specifies, independently of Sluice's own fold.

`Book` holds every offset range in its newest class, every receipt with the entry that superseded it, and the frontier
of each partition after each entry. Invariants that the entries alone violate are in `broken`.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.checker.facts import EvidenceError, Life

FORMATS = {"boundary": (1, 2, 3), "publish": (1, 2, 3), "schema": (1, 2, 3, 4, 5, 6, 7, 8)}
"""Known formats of entries by kind; 1 for all others. In a publish entry of format 2 offset ranges may share files. A
schema entry of format 4 names the prefix of folders' keys; one of format 5 has columns with other names in records, one
of format 6 columns at paths and in headers; outputs of one of format 7 share tombstones.
One of format 8 corrects a type.
"""
_SOURCE = re.compile(r'.* from ("(?:[^"\\]|\\.)*")', re.DOTALL)
"""A column's type, followed by the column's name in records."""
_PATH = re.compile(r".* at (\S.*)", re.DOTALL)
_STEP = re.compile(r'("(?:[^"\\]|\\.)*")|\[(\d+)\]|([^.\["]+)')
_HEADER = re.compile(r".* header \S.*", re.DOTALL)
_KINDS = {"origin", "boundary", "plan", "own", "publish", "intent", "commit", "moved", "loss", "skip", "abandon"} | {
    "accept",
    "retire",
    "schema",
    "gap",
    "take",
    "erase",
    "hold",
}


@dataclass(frozen=True)
class Broken:
    """A violation of an invariant of docs/developers/design/invariants.md, with its coordinates."""

    invariant: int
    text: str
    where: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"I{self.invariant}: {self.text}"


class Pin(NamedTuple):
    """A boundary of one partition, pinned at `at` by the clock of its run.

    `by_clock`: by its entry, no record marks the boundary. `by_marker`: by its entry, the boundary was searched for
    behind transaction markers, and need not be the first record of its time. `against`: by its entry, a record of its
    time or later lies below it, which others contradict.
    """

    time: int
    offset: int
    number: int
    at: int
    by_clock: bool
    by_marker: bool
    against: bool = False


class Span(NamedTuple):
    """A range of offsets, in a class (`landed`, `lost`, `skipped`, `retired`) since entry `number`."""

    start: int
    end: int
    kind: str
    number: int


@dataclass(frozen=True)
class Part:
    """An offset range's rows in a file: all rows, or in a shared file `rows` rows from row `first` on."""

    path: str
    staged: str
    name: str
    kind: str
    rows: int
    bytes: int
    sha256: str
    first: int = 0
    shared: bool = False
    file_rows: int = 0
    file_bytes: int = 0


@dataclass
class Receipt:
    """A publish entry's receipt of an offset range. `superseded_by` is the number of the entry that superseded it."""

    number: int
    batch: int
    life: Life
    start: int
    end: int
    counts: dict[str, int]
    parts: tuple[Part, ...]
    relanded: tuple[tuple[int, int], ...]
    mended: tuple[tuple[int, int], ...]
    format: str
    erased: tuple[tuple[int, int], ...] = ()
    superseded_by: int | None = None

    def __str__(self) -> str:
        return f"{self.life}:{self.start}-{self.end}"

    @property
    def span(self) -> int:
        return self.end - self.start

    def has_offset(self, offset: int) -> bool:
        return self.start <= offset < self.end


@dataclass
class Plan:
    """A plan entry; `token` is its current owner's, `status` is planned, published or abandoned."""

    number: int
    at: int
    hash: str
    raw: dict[str, Any]
    token: str
    status: str = "planned"

    @property
    def offset_ranges(self) -> list[tuple[Life, int, int]]:
        return [(Life(s["topic"], s["partition"], s["incarnation"]), s["start"], s["end"]) for s in self._list_ranges()]

    def _list_ranges(self) -> Iterator[dict[str, Any]]:
        return (s for t in self.raw["tasks"] for s in t["slices"])

    @property
    def replaces(self) -> set[str]:
        return set(self.raw["replaces"])

    @property
    def kind(self) -> str:
        return str(self.raw["request"]["kind"])


@dataclass
class Book:
    """The ledger, folded."""

    entries: dict[int, dict[str, Any]]
    id: str = ""
    cluster: str = ""
    plans: dict[int, Plan] = field(default_factory=dict)
    receipts: list[Receipt] = field(default_factory=list)
    spans: dict[Life, list[Span]] = field(default_factory=dict)
    origins: dict[Life, int] = field(default_factory=dict)
    current: dict[tuple[str, int], Life] = field(default_factory=dict)
    lives: dict[tuple[str, int], list[Life]] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)
    void: set[int] = field(default_factory=set)
    intents: dict[int, dict[Life, int]] = field(default_factory=dict)
    moved: list[tuple[int, Life, int]] = field(default_factory=list)
    pins: dict[Life, dict[int, int]] = field(default_factory=dict)
    resolved: dict[Life, dict[int, Pin]] = field(default_factory=dict)
    """The pins that were looked up; excludes those at which the feed opens."""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """(first, next): numbers of entries that existed, and are named as lost."""
    former: set[str] = field(default_factory=set)
    """The ids of ledgers that were lost completely, and that this one continues."""
    taken: dict[str, int] = field(default_factory=dict)
    """By the id of another ledger: the number of the last entry whose marks this ledger explicitly took over."""
    frontiers: dict[int, dict[Life, int]] = field(default_factory=dict)
    currents: dict[int, dict[tuple[str, int], Life]] = field(default_factory=dict)
    broken: list[Broken] = field(default_factory=list)
    sources: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    """Columns that have another name in records → that name."""
    folder_prefix: str | None = None
    """The prefix of folders' keys, by the first schema entry; None without one."""
    holds: dict[int, tuple[int | None, int | None]] = field(default_factory=dict)
    """By entry, the times (ms; None: no limit) between which windows are on hold."""
    erased: dict[Life, list[tuple[int, int, int]]] = field(default_factory=dict)
    """(start, end, entry) of each range of erased records."""
    outputs: set[str] = field(default_factory=set)
    """The folders of outputs that a schema entry names."""
    shares_tombstones: bool = False
    """Whether tombstones may land in all outputs."""

    def list_live_receipts(self) -> list[Receipt]:
        """Returns the receipts that no later entry superseded."""
        return [r for r in self.receipts if r.superseded_by is None]

    def get_frontier(self, life: Life, number: int | None = None) -> int | None:
        """Returns the frontier after entry `number`, by default after the last. None: the partition was not known."""
        at = next(reversed(self.frontiers), -1) if number is None else number
        return self.frontiers.get(at, {}).get(life)

    def is_lost(self, number: int) -> bool:
        """Returns whether the entry is named as lost."""
        return any(first <= number < after for first, after in self.gaps)

    def find_span(self, life: Life, offset: int) -> Span | None:
        """Returns the span that holds the offset."""
        return next((s for s in self.spans.get(life, ()) if s.start <= offset < s.end), None)

    def is_erased(self, life: Life, offset: int, number: int | None = None) -> bool:
        """Returns whether the record was erased, by an entry before `number`."""
        erased = self.erased.get(life, ())
        return any(start <= offset < end and (number is None or by < number) for start, end, by in erased)

    def is_planned(self, life: Life, offset: int, number: int) -> bool:
        """Returns whether a plan before entry `number` includes the offset: it is in the window that was open then."""
        ranges = (s for n, p in self.plans.items() if n < number for s in p.offset_ranges)
        return any(of == life and start <= offset < end for of, start, end in ranges)

    def is_read_committed(self) -> bool:
        """Returns whether the feed reads committed records only, by all of its plans."""
        return all(p.raw["isolation"] == "read_committed" for p in self.plans.values())


def parse_entry(data: bytes) -> dict[str, Any]:
    """Returns the JSON of an entry, also of a compressed one, of format 9. Raises ValueError."""
    entry: dict[str, Any] = json.loads(data)
    if entry.keys() != {"follows", "format", "kind", "number", "packed", "size"} or entry["format"] != 9:
        return entry
    try:
        line = zlib.decompress(base64.b64decode(entry["packed"], validate=True))
    except zlib.error as e:
        raise ValueError(f"not zlib: {e}") from None
    inner: dict[str, Any] = json.loads(line)
    if len(line) != entry["size"] or any(inner[k] != entry[k] for k in ("follows", "kind", "number")):
        raise ValueError("its head is that of another entry")
    return inner


def fold_entries(entries: Mapping[int, dict[str, Any]]) -> Book:
    """Fold the entries in the order of their numbers. Raises EvidenceError for an unknown format or kind."""
    book, writes = Book(dict(entries)), dict[str, int]()
    expected = 0
    for number, entry in sorted(entries.items()):
        if number < expected:
            continue  # written late by a run that knew the lost entries: the gap skipped its number
        if number != expected:
            book.broken.append(Broken(11, f"entry {expected} is missing ({number} stands)", {"number": expected}))
            break
        kind = entry.get("kind")
        if entry.get("format") not in FORMATS.get(str(kind), (1,)) or kind not in _KINDS:
            raise EvidenceError(f"entry {number}: format {entry.get('format')}, kind {entry.get('kind')} is not known")
        _check_write(book, writes, number, entry)
        _check_cluster(book, number, entry)
        _APPLY[entry["kind"]](book, number, entry)
        book.frontiers[number] = {life: _find_frontier(book, life) for life in book.origins}
        book.currents[number] = dict(book.current)
        expected = entry["next"] if entry["kind"] == "gap" else number + 1
    return book


def _check_write(book: Book, writes: dict[str, int], number: int, entry: dict[str, Any]) -> None:
    before = writes.setdefault(entry["write"], number)
    if before != number:
        text = f"entries {before} and {number} are one write ({entry['write']})"
        book.broken.append(Broken(11, text, {"number": number}))


def _check_cluster(book: Book, number: int, entry: dict[str, Any]) -> None:
    if number == 0:
        book.id, book.cluster = entry["write"], entry["cluster"]
    elif entry["kind"] == "accept":
        book.cluster = entry["cluster"]
    elif entry["cluster"] != book.cluster:
        text = f"entry {number} ({entry['kind']}) was made on cluster {entry['cluster']!r}"
        book.broken.append(Broken(12, f"{text}, the ledger's is {book.cluster!r}", {"number": number}))


# -- entries


def _apply_origin(book: Book, number: int, entry: dict[str, Any]) -> None:
    for item in entry["items"]:
        life = Life(*item["key"])
        if book.current.setdefault(life.tp, life) == life and life not in book.origins:
            book.origins[life] = item["offset"]
            book.lives.setdefault(life.tp, []).append(life)
            if item.get("opens") is not None:
                begins = item["offset"] if item.get("cuts") is None else item["cuts"]
                book.pins.setdefault(life, {}).setdefault(item["opens"], begins)


def _apply_boundary(book: Book, number: int, entry: dict[str, Any]) -> None:
    for item in entry["items"]:
        life = Life(*item["key"])
        if book.current.get(life.tp) == life:
            flags = [set(item.get(name, ())) for name in ("by_clock", "by_marker", "against")]
            for time, offset in zip(item["times"], item["offsets"], strict=True):
                if time not in book.pins.setdefault(life, {}):
                    pin = Pin(time, offset, number, entry["at"], *(time in flag for flag in flags))
                    book.pins[life][time], book.resolved.setdefault(life, {})[time] = offset, pin


def _apply_plan(book: Book, number: int, entry: dict[str, Any]) -> None:
    plan = Plan(number, entry["at"], entry["hash"], entry["plan"], entry["owner"]["token"])
    book.broken += _check_plan_hash(plan)
    book.broken += _check_plan_lives(book, plan)
    book.broken += _check_plan_overlaps(book, plan)
    book.broken += _check_plan_gaps(book, plan)
    book.plans[number] = plan


def _check_plan_hash(plan: Plan) -> Iterator[Broken]:
    text = json.dumps(plan.raw, sort_keys=True, separators=(",", ":"))
    if hashlib.sha256(text.encode()).hexdigest() != plan.hash:
        yield Broken(9, f"plan {plan.number}: its hash is not that of its content", {"number": plan.number})


def _check_plan_lives(book: Book, plan: Plan) -> Iterator[Broken]:
    if plan.raw["cluster"] != book.cluster:
        message = f"plan {plan.number} is for cluster {plan.raw['cluster']!r}, the ledger's is {book.cluster!r}"
        yield Broken(12, message, {"number": plan.number})
    if plan.kind in ("compact", "replay", "erase"):
        return
    for life, start, end in plan.offset_ranges:
        if book.current.get(life.tp) != life:
            message = f"plan {plan.number} reads {life}:{start}-{end} in topic id {life.incarnation}"
            current = book.current.get(life.tp)
            where = locate(life, start, number=plan.number)
            yield Broken(12, f"{message}, the partition is in {current.incarnation if current else 'none'}", where)


def _check_plan_overlaps(book: Book, plan: Plan) -> Iterator[Broken]:
    """Check that no offset is reserved twice."""
    reserved = [(s, p.number) for p in book.plans.values() if p.status == "planned" for s in p.offset_ranges]
    own = sorted((s, plan.number) for s in plan.offset_ranges)
    ranges = sorted([*reserved, *own])
    for ((a, _, end), first), ((b, start, stop), second) in itertools.pairwise(ranges):
        if a == b and start < end and plan.number in (first, second):
            other = first if first != plan.number else second
            text = (
                f"plan {plan.number}: offset range {b}:{start}-{stop} overlaps one of plan {other} that ends at {end}"
            )
            yield Broken(4, text, locate(b, start, number=plan.number))


def _check_plan_gaps(book: Book, plan: Plan) -> Iterator[Broken]:
    """Check that a catch-up omits no pending offset between a partition's first and last offset in its plan."""
    if plan.kind != "catch-up":
        return
    reserved = [s for p in book.plans.values() if p.status == "planned" for s in p.offset_ranges]
    for life in sorted({life for life, _, _ in plan.offset_ranges}):
        own = [(start, end) for of, start, end in plan.offset_ranges if of == life]
        classified = [(s.start, s.end) for s in book.spans.get(life, ())]
        reserved_here = [(start, end) for of, start, end in reserved if of == life]
        at = min(start for start, _ in own)
        for start, end in sorted([*own, *classified, *reserved_here]):
            if start > at and at < max(e for _, e in own):
                text = f"plan {plan.number} leaves out {life}:{at}-{start}, which is pending"
                yield Broken(4, text, locate(life, at, number=plan.number))
                break
            at = max(at, end)


def _apply_own(book: Book, number: int, entry: dict[str, Any]) -> None:
    plan = book.plans.get(entry["batch"])
    if plan and plan.status == "planned":
        plan.token = entry["owner"]["token"]


def _apply_publish(book: Book, number: int, entry: dict[str, Any]) -> None:
    plan = book.plans.get(entry["batch"])
    allowed = plan and plan.status == "planned" and plan.token == entry["token"] and not plan.replaces & book.replaced
    if plan is None or not allowed:
        book.void.add(number)
        return
    receipts = [_parse_receipt(number, plan.number, raw) for raw in entry["receipts"]]
    book.broken += _check_erased(book, number, receipts)
    for r in receipts:
        if rows := set(_list_erased(book, r)) - _list_offsets(r.erased):
            text = f"entry {number} publishes {r}, and offset {min(rows)} of it was erased"
            book.broken.append(Broken(19, text, locate(r.life, min(rows), number=number)))
            book.void.add(number)
    if number in book.void:
        return
    failed = [_parse_range(f["slice"]) for f in entry["failures"]]
    book.broken += _check_published_ranges(plan, number, receipts, failed)
    plan.status = "published"
    if plan.replaces or plan.raw["request"]["replace"]:
        book.replaced |= plan.replaces
        _mark_superseded(book, number, [(r.life, r.start, r.end) for r in receipts])
    else:
        book.broken += _check_published_overlaps(book, receipts)
    book.receipts += receipts
    for r in receipts:
        _put(book, r.life, Span(r.start, r.end, "landed", number))


def _check_erased(book: Book, number: int, receipts: Iterable[Receipt]) -> Iterator[Broken]:
    """Check that a receipt calls only those records erased that an entry before it erased (19)."""
    for r in receipts:
        for offset in sorted(_list_offsets(r.erased) - set(_list_erased(book, r))):
            where = locate(r.life, offset, number=number)
            yield Broken(19, f"entry {number}: {r.life}:{offset} is called erased, and no entry erased it", where)


def _list_erased(book: Book, r: Receipt) -> Iterator[int]:
    for start, end, _ in book.erased.get(r.life, ()):
        yield from range(max(start, r.start), min(end, r.end))


def _list_offsets(ranges: Iterable[tuple[int, int]]) -> set[int]:
    return {offset for start, end in ranges for offset in range(start, end)}


def _check_published_ranges(
    plan: Plan, number: int, receipts: list[Receipt], failed: list[tuple[Life, int, int]]
) -> Iterator[Broken]:
    """Check that each range of the plan is published or named as failed, and no other range is."""
    accounted = sorted([*((r.life, r.start, r.end) for r in receipts), *failed])
    planned = sorted(plan.offset_ranges)
    for life, start, end in planned:
        if (life, start, end) not in accounted:
            text = f"entry {number}: range {life}:{start}-{end} of plan {plan.number} is neither published nor failed"
            yield Broken(4, text, locate(life, start, number=number))
    for life, start, end in accounted:
        if (life, start, end) not in planned:
            text = f"entry {number}: {life}:{start}-{end} is no offset range of plan {plan.number}"
            yield Broken(4, text, locate(life, start, number=number))


def _check_published_overlaps(book: Book, receipts: Iterable[Receipt]) -> Iterator[Broken]:
    live = [(r, r.number) for r in book.list_live_receipts()]
    for r in receipts:
        for other, number in live:
            if r.life == other.life and r.start < other.end and other.start < r.end:
                text = f"entry {r.number}: {r} overlaps {other}, which entry {number} published and which still counts"
                yield Broken(2, text, locate(r.life, max(r.start, other.start), number=r.number))
        live.append((r, r.number))


def _apply_intent(book: Book, number: int, entry: dict[str, Any]) -> None:
    book.intents[number] = {Life(*o["key"]): o["offset"] for o in entry["offsets"]}


def _apply_commit(book: Book, number: int, entry: dict[str, Any]) -> None:
    for item in entry["offsets"]:
        life, offset = Life(*item["key"]), item["offset"]
        frontier = book.get_frontier(life)
        if frontier is None or offset > frontier:
            text = f"entry {number}: {life} is committed at {offset}, published is up to {frontier}"
            book.broken.append(Broken(7, text, locate(life, offset, number=number)))


def _apply_loss(book: Book, number: int, entry: dict[str, Any]) -> None:
    _apply_named_ranges(book, number, entry, "lost")


def _apply_skip(book: Book, number: int, entry: dict[str, Any]) -> None:
    _apply_named_ranges(book, number, entry, "skipped")


def _apply_named_ranges(book: Book, number: int, entry: dict[str, Any], kind: str) -> None:
    for item in entry["ranges"]:
        life, (start, end) = Life(*item["key"]), item["range"]
        for r in book.list_live_receipts() if kind == "lost" else ():
            if r.life == life and r.start < end and start < r.end:
                text = f"entry {number} names {life}:{start}-{end} lost, and {r} of it landed by entry {r.number}"
                book.broken.append(Broken(2, text, locate(life, max(start, r.start), number=number)))
        _put(book, life, Span(start, end, kind, number))


def _apply_abandon(book: Book, number: int, entry: dict[str, Any]) -> None:
    plan = book.plans.get(entry["batch"])
    if plan and plan.status == "planned":
        plan.status = "abandoned"


def _apply_accept(book: Book, number: int, entry: dict[str, Any]) -> None:
    moves = [(Life(*i["leaves"]), i["enters"]) for i in entry["items"]]
    left_lives = {leaves for leaves, _ in moves if book.current.get(leaves.tp) == leaves}
    for kind, ranges in (("skipped", entry["passed"]), ("lost", entry.get("lost", []))):
        ours = [i for i in ranges if Life(*i["key"]) in left_lives]
        _apply_named_ranges(book, number, {"ranges": ours}, kind)
    for plan in book.plans.values():
        if plan.status == "planned" and any(life in left_lives for life, _, _ in plan.offset_ranges):
            plan.status = "abandoned"
    for leaves, enters in moves:
        if leaves in left_lives:
            del book.current[leaves.tp]
            _apply_origin(book, number, {"items": [enters]})


def _apply_moved(book: Book, number: int, entry: dict[str, Any]) -> None:
    book.moved += [(number, Life(*o["key"]), o["offset"]) for o in entry["offsets"]]


def _apply_hold(book: Book, number: int, entry: dict[str, Any]) -> None:
    if entry["ends"] is None:
        book.holds[number] = (entry["start"], entry["end"])
    else:
        book.holds.pop(entry["ends"], None)


def _check_holds(book: Book, number: int, ranges: Iterable[tuple[Life, int, int]]) -> Iterator[Broken]:
    """Check that no record of a window on hold is retired or erased (20)."""
    for life, start, end in ranges:
        pins = sorted(book.pins.get(life, {}).items())
        for first, last in book.holds.values():
            low = max((o for t, o in pins if first is not None and t <= first), default=0)
            high = min((o for t, o in pins if last is not None and t >= last), default=1 << 63)
            if max(start, low) < min(end, high):
                text = f"entry {number} takes {life}:{start}-{end}, of which {low}-{high} is on hold"
                yield Broken(20, text, locate(life, start, number=number))


def _apply_retire(book: Book, number: int, entry: dict[str, Any]) -> None:
    ranges = [(Life(*i["key"]), *i["range"]) for i in entry["ranges"]]
    for life, start, end in ranges:
        _put(book, life, Span(start, end, "retired", number))
    book.broken += _check_holds(book, number, ranges)
    _mark_superseded(book, number, ranges)
    book.replaced |= set(entry["parts"])


def _apply_erase(book: Book, number: int, entry: dict[str, Any]) -> None:
    for item in entry["ranges"]:
        life, (start, end) = Life(*item["key"]), item["range"]
        book.broken += _check_holds(book, number, [(life, start, end)])
        book.erased.setdefault(life, []).append((start, end, number))
        for plan in book.plans.values():
            overlap = any(of == life and a < end and start < b for of, a, b in plan.offset_ranges)
            if plan.status == "planned" and overlap:
                text = f"entry {number} erases {life}:{start}-{end}, which the live plan {plan.number} reserves"
                book.broken.append(Broken(19, text, locate(life, start, number=number)))


def _apply_gap(book: Book, number: int, entry: dict[str, Any]) -> None:
    """Apply the loss of all entries from here on: it ends every plan; numbers continue above all that were used."""
    if entry["next"] <= number:
        book.broken.append(Broken(11, f"entry {number} goes on with number {entry['next']}", {"number": number}))
    for plan in book.plans.values():
        plan.status = "abandoned" if plan.status == "planned" else plan.status
    book.gaps.append((number, entry["next"]))
    book.former |= {entry["ledger"]} - {""}


def _apply_take(book: Book, number: int, entry: dict[str, Any]) -> None:
    """Apply the takeover of the consumer group from other ledgers."""
    for mark in entry["marks"]:
        book.taken[mark["ledger"]] = max(mark["number"], book.taken.get(mark["ledger"], -1))
    _apply_origin(book, number, {"items": entry["origins"]})


def _apply_schema(book: Book, number: int, entry: dict[str, Any]) -> None:
    for name, text in entry["columns"] or ():
        if source := _SOURCE.fullmatch(text):
            book.sources[name] = (json.loads(source[1]),)
        elif path := _PATH.fullmatch(text):
            book.sources[name] = tuple(
                json.loads(m[1]) if m[1] else int(m[2]) if m[2] else m[3] for m in _STEP.finditer(path[1])
            )
        elif _HEADER.fullmatch(text):
            book.sources[name] = ()
    if book.folder_prefix is None:
        book.folder_prefix = entry.get("folder_prefix", "")
    if split := entry.get("split"):
        book.outputs |= {"otherwise", *(name for name, _ in split["outputs"])}
        book.shares_tombstones |= split.get("tombstones") == "all"


_APPLY = {
    "origin": _apply_origin,
    "boundary": _apply_boundary,
    "plan": _apply_plan,
    "own": _apply_own,
    "publish": _apply_publish,
    "intent": _apply_intent,
    "commit": _apply_commit,
    "moved": _apply_moved,
    "loss": _apply_loss,
    "skip": _apply_skip,
    "abandon": _apply_abandon,
    "accept": _apply_accept,
    "retire": _apply_retire,
    "erase": _apply_erase,
    "hold": _apply_hold,
    "schema": _apply_schema,
    "gap": _apply_gap,
    "take": _apply_take,
}


# -- ranges


def _put(book: Book, life: Life, new: Span) -> None:
    """Add a span, and cut the older ones that it overlaps: the newest entry decides the class of an offset."""
    remaining = []
    for s in book.spans.get(life, ()):
        remaining += [s] if s.end <= new.start or new.end <= s.start else []
        if s.start < new.end and new.start < s.end:
            remaining += [s._replace(end=new.start)] if s.start < new.start else []
            remaining += [s._replace(start=new.end)] if new.end < s.end else []
    book.spans[life] = sorted([*remaining, *([new] if new.start < new.end else [])])


def _mark_superseded(book: Book, number: int, ranges: list[tuple[Life, int, int]]) -> None:
    for r in book.list_live_receipts():
        if any(r.life == life and r.start < end and start < r.end for life, start, end in ranges):
            r.superseded_by = number


def _find_frontier(book: Book, life: Life) -> int:
    at = book.origins[life]
    for s in book.spans.get(life, ()):
        if s.start <= at < s.end:
            at = s.end
    return at


def locate(life: Life, offset: int, **more: Any) -> dict[str, Any]:
    return {"topic": life.topic, "partition": life.partition, "offset": offset, **more}


# -- receipts


def _parse_range(raw: dict[str, Any]) -> tuple[Life, int, int]:
    return Life(raw["topic"], raw["partition"], raw["incarnation"]), raw["start"], raw["end"]


def _parse_receipt(number: int, batch: int, raw: dict[str, Any]) -> Receipt:
    life, start, end = _parse_range(raw["slice"])
    parts = tuple(_parse_part(p) for p in raw["parts"])
    relanded, mended = (tuple((a, b) for a, b in raw[n]) for n in ("relanded", "mended"))
    erased = tuple((a, b) for a, b in raw.get("erased", ()))
    return Receipt(number, batch, life, start, end, raw["counts"], parts, relanded, mended, raw["format"], erased)


def _parse_part(raw: dict[str, Any]) -> Part:
    names = ("path", "staged", "name", "kind", "rows", "bytes", "sha256")
    fields, shared = {n: raw[n] for n in names}, raw.get("shared")
    if shared is None:
        return Part(**fields, file_rows=raw["rows"], file_bytes=raw["bytes"])
    return Part(**fields, first=shared["first"], shared=True, file_rows=shared["rows"], file_bytes=shared["bytes"])


def parse_staged_receipt(raw: dict[str, Any], batch: int) -> Receipt:
    """Parse a receipt in staging, which no entry has published."""
    return _parse_receipt(-1, batch, raw)
