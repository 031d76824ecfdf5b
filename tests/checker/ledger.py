"""The ledger's meaning, folded from raw JSON by the words of docs/developers/design, beside Sluice's own fold.

`Book` keeps what later questions need: every range in its newest class, every receipt with the entry that superseded
it, and where each partition's frontier stood after each entry. What the entries themselves break is in `broken`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.checker.facts import EvidenceError, Life

FORMATS = {"boundary": (1, 2), "publish": (1, 2), "schema": (1, 2, 3, 4, 5)}
"""Of entries by kind; 1 for all others. In a publish entry of format 2 offset ranges may share files; a schema entry of
format 4 names the prefix of the keys of folders, and one of format 5 has columns that are named otherwise in records.
"""
_SOURCE = re.compile(r'.* from ("(?:[^"\\]|\\.)*")', re.DOTALL)
"""The type of a column behind which its name in records is."""
_KINDS = {"origin", "boundary", "plan", "own", "publish", "intent", "commit", "moved", "loss", "skip", "abandon"} | {
    "accept",
    "retire",
    "schema",
    "gap",
    "take",
}


@dataclass(frozen=True)
class Broken:
    """One way in which an invariant of docs/developers/design/invariants.md does not hold, and where."""

    invariant: int
    text: str
    where: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"I{self.invariant}: {self.text}"


class Pin(NamedTuple):
    """A boundary of one partition, put when the clock of its run said `at`. `by_clock`, `by_marker`: as the entry says
    of itself, no record marked it; or it was searched for behind markers of transactions, and need not be the first."""

    time: int
    offset: int
    number: int
    at: int
    by_clock: bool
    by_marker: bool


class Span(NamedTuple):
    """Offsets in a class (`landed`, `lost`, `skipped`, `retired`) since entry `number`."""

    start: int
    end: int
    kind: str
    number: int


@dataclass(frozen=True)
class Part:
    """An offset range's rows in a file: all of it; or, of a shared one, `rows` rows from row `first` on."""

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
    """What a publish entry says of a range. `gone` is the entry that superseded it."""

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
    gone: int | None = None

    def __str__(self) -> str:
        return f"{self.life}:{self.start}-{self.end}"

    @property
    def span(self) -> int:
        return self.end - self.start

    def holds(self, offset: int) -> bool:
        return self.start <= offset < self.end


@dataclass
class Plan:
    """A plan entry; `token` is its owner's now, `status` planned, published or abandoned."""

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
    """Of the pins those that were looked up: not where the feed opens."""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """(first, next): numbers of entries that stood once, and are named as lost."""
    former: set[str] = field(default_factory=set)
    """The ids of ledgers that were lost as a whole, and that this one goes on from."""
    taken: dict[str, int] = field(default_factory=dict)
    """By the id of another ledger, up to which of its entries the marks of it were taken over by name."""
    kept: set[tuple[Life, int]] = field(default_factory=set)
    """Committed offsets that lost entries had put there, by what the entry says that goes on without them."""
    frontiers: dict[int, dict[Life, int]] = field(default_factory=dict)
    currents: dict[int, dict[tuple[str, int], Life]] = field(default_factory=dict)
    broken: list[Broken] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    """Columns that have another name in records → that name."""
    folder_prefix: str | None = None
    """What the keys of folders begin with, by the first schema entry; None without one."""

    def live(self) -> list[Receipt]:
        """The receipts that count."""
        return [r for r in self.receipts if r.gone is None]

    def frontier(self, life: Life, number: int | None = None) -> int | None:
        """Where it stood once entry `number` was in; now, without one. None: the partition was not known yet."""
        at = next(reversed(self.frontiers), -1) if number is None else number
        return self.frontiers.get(at, {}).get(life)

    def lost(self, number: int) -> bool:
        """Whether an entry of this number is named as lost."""
        return any(first <= number < after for first, after in self.gaps)

    def named(self, life: Life, offset: int) -> Span | None:
        """The class in which the offset is."""
        return next((s for s in self.spans.get(life, ()) if s.start <= offset < s.end), None)

    def planned(self, life: Life, offset: int, number: int) -> bool:
        """Whether a plan before entry `number` was to read it: it lies in the window that was open then."""
        ranges = (s for n, p in self.plans.items() if n < number for s in p.offset_ranges)
        return any(of == life and start <= offset < end for of, start, end in ranges)

    def mode(self) -> bool:
        """Whether the feed reads committed records only, as its newest plan says."""
        return all(p.raw["isolation"] == "read_committed" for p in self.plans.values())


def fold(entries: Mapping[int, dict[str, Any]]) -> Book:
    """The book of the entries, in the order of their numbers. Raises EvidenceError for a format that is not known."""
    book, writes = Book(dict(entries)), dict[str, int]()
    expected = 0
    for number, entry in sorted(entries.items()):
        if number < expected:
            continue  # written late by a run that knew of lost entries: the gap passed over it
        if number != expected:
            book.broken.append(Broken(11, f"entry {expected} is missing ({number} stands)", {"number": expected}))
            break
        kind = entry.get("kind")
        if entry.get("format") not in FORMATS.get(str(kind), (1,)) or kind not in _KINDS:
            raise EvidenceError(f"entry {number}: format {entry.get('format')}, kind {entry.get('kind')} is not known")
        _once(book, writes, number, entry)
        _cluster(book, number, entry)
        _APPLY[entry["kind"]](book, number, entry)
        book.frontiers[number] = {life: _contiguous(book, life) for life in book.origins}
        book.currents[number] = dict(book.current)
        expected = entry["next"] if entry["kind"] == "gap" else number + 1
    return book


def _once(book: Book, writes: dict[str, int], number: int, entry: dict[str, Any]) -> None:
    before = writes.setdefault(entry["write"], number)
    if before != number:
        text = f"entries {before} and {number} are one write ({entry['write']})"
        book.broken.append(Broken(11, text, {"number": number}))


def _cluster(book: Book, number: int, entry: dict[str, Any]) -> None:
    if number == 0:
        book.id, book.cluster = entry["write"], entry["cluster"]
    elif entry["kind"] == "accept":
        book.cluster = entry["cluster"]
    elif entry["cluster"] != book.cluster:
        text = f"entry {number} ({entry['kind']}) was made on cluster {entry['cluster']!r}"
        book.broken.append(Broken(12, f"{text}, the ledger's is {book.cluster!r}", {"number": number}))


# -- entries


def _origin(book: Book, number: int, entry: dict[str, Any]) -> None:
    for item in entry["items"]:
        life = Life(*item["key"])
        if book.current.setdefault(life.tp, life) == life and life not in book.origins:
            book.origins[life] = item["offset"]
            book.lives.setdefault(life.tp, []).append(life)
            if item.get("opens") is not None:
                book.pins.setdefault(life, {}).setdefault(item["opens"], item["offset"])


def _boundary(book: Book, number: int, entry: dict[str, Any]) -> None:
    for item in entry["items"]:
        life = Life(*item["key"])
        if book.current.get(life.tp) == life:
            clock, marker = set(item.get("by_clock", ())), set(item.get("by_marker", ()))
            for time, offset in zip(item["times"], item["offsets"], strict=True):
                if time not in book.pins.setdefault(life, {}):
                    pin = Pin(time, offset, number, entry["at"], time in clock, time in marker)
                    book.pins[life][time], book.resolved.setdefault(life, {})[time] = offset, pin


def _plan(book: Book, number: int, entry: dict[str, Any]) -> None:
    plan = Plan(number, entry["at"], entry["hash"], entry["plan"], entry["owner"]["token"])
    book.broken += _plan_hash(plan)
    book.broken += _plan_lives(book, plan)
    book.broken += _plan_overlaps(book, plan)
    book.broken += _plan_gaps(book, plan)
    book.plans[number] = plan


def _plan_hash(plan: Plan) -> Iterator[Broken]:
    text = json.dumps(plan.raw, sort_keys=True, separators=(",", ":"))
    if hashlib.sha256(text.encode()).hexdigest() != plan.hash:
        yield Broken(9, f"plan {plan.number}: its hash is not that of its content", {"number": plan.number})


def _plan_lives(book: Book, plan: Plan) -> Iterator[Broken]:
    if plan.raw["cluster"] != book.cluster:
        said = f"plan {plan.number} is for cluster {plan.raw['cluster']!r}, the ledger's is {book.cluster!r}"
        yield Broken(12, said, {"number": plan.number})
    if plan.kind in ("compact", "replay"):
        return
    for life, start, end in plan.offset_ranges:
        if book.current.get(life.tp) != life:
            said = f"plan {plan.number} reads {life}:{start}-{end} in topic id {life.incarnation}"
            now = book.current.get(life.tp)
            where = _at(life, start, number=plan.number)
            yield Broken(12, f"{said}, the partition is in {now.incarnation if now else 'none'}", where)


def _plan_overlaps(book: Book, plan: Plan) -> Iterator[Broken]:
    """No offset is reserved twice."""
    others = [(s, p.number) for p in book.plans.values() if p.status == "planned" for s in p.offset_ranges]
    mine = sorted((s, plan.number) for s in plan.offset_ranges)
    held = sorted([*others, *mine])
    for ((a, _, end), first), ((b, start, stop), second) in itertools.pairwise(held):
        if a == b and start < end and plan.number in (first, second):
            other = first if first != plan.number else second
            text = (
                f"plan {plan.number}: offset range {b}:{start}-{stop} overlaps one of plan {other} that ends at {end}"
            )
            yield Broken(4, text, _at(b, start, number=plan.number))


def _plan_gaps(book: Book, plan: Plan) -> Iterator[Broken]:
    """Between the first and the last offset that a catch-up reads of a partition, nothing is left out that is
    pending."""
    if plan.kind != "catch-up":
        return
    reserved = [s for p in book.plans.values() if p.status == "planned" for s in p.offset_ranges]
    for life in sorted({life for life, _, _ in plan.offset_ranges}):
        mine = [(start, end) for of, start, end in plan.offset_ranges if of == life]
        known = [(s.start, s.end) for s in book.spans.get(life, ())]
        held = [(start, end) for of, start, end in reserved if of == life]
        at = min(start for start, _ in mine)
        for start, end in sorted([*mine, *known, *held]):
            if start > at and at < max(e for _, e in mine):
                text = f"plan {plan.number} leaves out {life}:{at}-{start}, which is pending"
                yield Broken(4, text, _at(life, at, number=plan.number))
                break
            at = max(at, end)


def _own(book: Book, number: int, entry: dict[str, Any]) -> None:
    plan = book.plans.get(entry["batch"])
    if plan and plan.status == "planned":
        plan.token = entry["owner"]["token"]


def _publish(book: Book, number: int, entry: dict[str, Any]) -> None:
    plan = book.plans.get(entry["batch"])
    allowed = plan and plan.status == "planned" and plan.token == entry["token"] and not plan.replaces & book.replaced
    if plan is None or not allowed:
        book.void.add(number)
        return
    receipts = [_receipt(number, plan.number, raw) for raw in entry["receipts"]]
    failed = [_parse_range(f["slice"]) for f in entry["failures"]]
    book.broken += _published_whole(plan, number, receipts, failed)
    plan.status = "published"
    if plan.replaces or plan.raw["request"]["replace"]:
        book.replaced |= plan.replaces
        _supersede(book, number, [(r.life, r.start, r.end) for r in receipts])
    else:
        book.broken += _published_twice(book, receipts)
    book.receipts += receipts
    for r in receipts:
        _put(book, r.life, Span(r.start, r.end, "landed", number))


def _published_whole(
    plan: Plan, number: int, receipts: list[Receipt], failed: list[tuple[Life, int, int]]
) -> Iterator[Broken]:
    """What is published are ranges of the plan, and each of those is published or named as failed."""
    told = sorted([*((r.life, r.start, r.end) for r in receipts), *failed])
    planned = sorted(plan.offset_ranges)
    for life, start, end in planned:
        if (life, start, end) not in told:
            text = f"entry {number}: range {life}:{start}-{end} of plan {plan.number} is neither published nor failed"
            yield Broken(4, text, _at(life, start, number=number))
    for life, start, end in told:
        if (life, start, end) not in planned:
            text = f"entry {number}: {life}:{start}-{end} is no offset range of plan {plan.number}"
            yield Broken(4, text, _at(life, start, number=number))


def _published_twice(book: Book, receipts: Iterable[Receipt]) -> Iterator[Broken]:
    counting = [(r, r.number) for r in book.live()]
    for r in receipts:
        for other, number in counting:
            if r.life == other.life and r.start < other.end and other.start < r.end:
                text = f"entry {r.number}: {r} overlaps {other}, which entry {number} published and which still counts"
                yield Broken(2, text, _at(r.life, max(r.start, other.start), number=r.number))
        counting.append((r, r.number))


def _intent(book: Book, number: int, entry: dict[str, Any]) -> None:
    book.intents[number] = {Life(*o["key"]): o["offset"] for o in entry["offsets"]}


def _commit(book: Book, number: int, entry: dict[str, Any]) -> None:
    for item in entry["offsets"]:
        life, offset = Life(*item["key"]), item["offset"]
        frontier = book.frontier(life)
        if frontier is None or offset > frontier:
            text = f"entry {number}: {life} is committed at {offset}, published is up to {frontier}"
            book.broken.append(Broken(7, text, _at(life, offset, number=number)))


def _loss(book: Book, number: int, entry: dict[str, Any]) -> None:
    _named(book, number, entry, "lost")


def _skip(book: Book, number: int, entry: dict[str, Any]) -> None:
    _named(book, number, entry, "skipped")


def _named(book: Book, number: int, entry: dict[str, Any], kind: str) -> None:
    for item in entry["ranges"]:
        life, (start, end) = Life(*item["key"]), item["range"]
        for r in book.live() if kind == "lost" else ():
            if r.life == life and r.start < end and start < r.end:
                text = f"entry {number} names {life}:{start}-{end} lost, and {r} of it landed by entry {r.number}"
                book.broken.append(Broken(2, text, _at(life, max(start, r.start), number=number)))
        _put(book, life, Span(start, end, kind, number))


def _abandon(book: Book, number: int, entry: dict[str, Any]) -> None:
    plan = book.plans.get(entry["batch"])
    if plan and plan.status == "planned":
        plan.status = "abandoned"


def _accept(book: Book, number: int, entry: dict[str, Any]) -> None:
    moves = [(Life(*i["leaves"]), i["enters"]) for i in entry["items"]]
    left = {leaves for leaves, _ in moves if book.current.get(leaves.tp) == leaves}
    for item in entry["passed"]:
        life, (start, end) = Life(*item["key"]), item["range"]
        if life in left:
            _put(book, life, Span(start, end, "skipped", number))
    for plan in book.plans.values():
        if plan.status == "planned" and any(life in left for life, _, _ in plan.offset_ranges):
            plan.status = "abandoned"
    for leaves, enters in moves:
        if leaves in left:
            del book.current[leaves.tp]
            _origin(book, number, {"items": [enters]})


def _moved(book: Book, number: int, entry: dict[str, Any]) -> None:
    book.moved += [(number, Life(*o["key"]), o["offset"]) for o in entry["offsets"]]


def _retire(book: Book, number: int, entry: dict[str, Any]) -> None:
    ranges = [(Life(*i["key"]), *i["range"]) for i in entry["ranges"]]
    for life, start, end in ranges:
        _put(book, life, Span(start, end, "retired", number))
    _supersede(book, number, ranges)
    book.replaced |= set(entry["parts"])


def _gap(book: Book, number: int, entry: dict[str, Any]) -> None:
    """Entries from here on are lost: every plan ends, and numbers go on above all that were used."""
    if entry["next"] <= number:
        book.broken.append(Broken(11, f"entry {number} goes on with number {entry['next']}", {"number": number}))
    for plan in book.plans.values():
        plan.status = "abandoned" if plan.status == "planned" else plan.status
    book.gaps.append((number, entry["next"]))
    book.former |= {entry["ledger"]} - {""}
    book.kept |= {(Life(*item["key"]), item["offset"]) for item in entry["committed"]}


def _take(book: Book, number: int, entry: dict[str, Any]) -> None:
    """The group is taken over from other ledgers."""
    for mark in entry["marks"]:
        book.taken[mark["ledger"]] = max(mark["number"], book.taken.get(mark["ledger"], -1))
    book.kept |= {(Life(*item["key"]), item["offset"]) for item in entry["committed"]}
    _origin(book, number, {"items": entry["origins"]})


def _schema(book: Book, number: int, entry: dict[str, Any]) -> None:
    for name, text in entry["columns"] or ():
        if source := _SOURCE.fullmatch(text):
            book.sources[name] = json.loads(source[1])
    if book.folder_prefix is None:
        book.folder_prefix = entry.get("folder_prefix", "")


_APPLY = {
    "origin": _origin,
    "boundary": _boundary,
    "plan": _plan,
    "own": _own,
    "publish": _publish,
    "intent": _intent,
    "commit": _commit,
    "moved": _moved,
    "loss": _loss,
    "skip": _skip,
    "abandon": _abandon,
    "accept": _accept,
    "retire": _retire,
    "schema": _schema,
    "gap": _gap,
    "take": _take,
}


# -- ranges


def _put(book: Book, life: Life, new: Span) -> None:
    """The newest entry decides in which class an offset is."""
    kept = []
    for s in book.spans.get(life, ()):
        kept += [s] if s.end <= new.start or new.end <= s.start else []
        if s.start < new.end and new.start < s.end:
            kept += [s._replace(end=new.start)] if s.start < new.start else []
            kept += [s._replace(start=new.end)] if new.end < s.end else []
    book.spans[life] = sorted([*kept, *([new] if new.start < new.end else [])])


def _supersede(book: Book, number: int, ranges: list[tuple[Life, int, int]]) -> None:
    for r in book.live():
        if any(r.life == life and r.start < end and start < r.end for life, start, end in ranges):
            r.gone = number


def _contiguous(book: Book, life: Life) -> int:
    at = book.origins[life]
    for s in book.spans.get(life, ()):
        if s.start <= at < s.end:
            at = s.end
    return at


def _at(life: Life, offset: int, **more: Any) -> dict[str, Any]:
    return {"topic": life.topic, "partition": life.partition, "offset": offset, **more}


# -- receipts


def _parse_range(raw: dict[str, Any]) -> tuple[Life, int, int]:
    return Life(raw["topic"], raw["partition"], raw["incarnation"]), raw["start"], raw["end"]


def _receipt(number: int, batch: int, raw: dict[str, Any]) -> Receipt:
    life, start, end = _parse_range(raw["slice"])
    parts = tuple(_part(p) for p in raw["parts"])
    relanded, mended = (tuple((a, b) for a, b in raw[n]) for n in ("relanded", "mended"))
    return Receipt(number, batch, life, start, end, raw["counts"], parts, relanded, mended, raw["format"])


def _part(raw: dict[str, Any]) -> Part:
    names = ("path", "staged", "name", "kind", "rows", "bytes", "sha256")
    said, shared = {n: raw[n] for n in names}, raw.get("shared")
    if shared is None:
        return Part(**said, file_rows=raw["rows"], file_bytes=raw["bytes"])
    return Part(**said, first=shared["first"], shared=True, file_rows=shared["rows"], file_bytes=shared["bytes"])


def receipt_of(raw: dict[str, Any], batch: int) -> Receipt:
    """A receipt that stands in staging."""
    return _receipt(-1, batch, raw)
