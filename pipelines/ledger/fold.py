"""The state that the ledger's entries fold to, from number 0 up.

Folding is deterministic. It repeats each decision of the writer: a publish entry counts only if the current owner of
a live plan wrote it, and is void otherwise. Frontiers, accounted ranges and live reservations are all computed here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field, fields, replace
from itertools import takewhile
from typing import Any

from pydantic import BaseModel

from sluice.pipelines.lake.paths import FORMER_PREFIX, PREFIX, FolderPrefix
from sluice.pipelines.ledger.batches import Batch, Batches, BatchStatus
from sluice.pipelines.ledger.columns import NOTHING_SUPERSEDED, Pins, Published, Superseded
from sluice.pipelines.ledger.entries import (
    AbandonEntry,
    AcceptEntry,
    BoundaryEntry,
    CommitEntry,
    Entry,
    EraseEntry,
    GapEntry,
    HoldEntry,
    IntentEntry,
    LossEntry,
    MovedEntry,
    OriginEntry,
    OriginItem,
    OwnEntry,
    PlanEntry,
    PublishEntry,
    RetireEntry,
    SchemaEntry,
    SkipEntry,
    TakeEntry,
)
from sluice.pipelines.model.kafka import (
    GONE,
    Key,
    Range,
    Tail,
    TopicPartition,
    find_contiguous_end,
    intersect,
    subtract,
    union,
)
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Receipt
from sluice.pipelines.schema.wider import RAW_TYPES, common_type, one_table, parse_type

Accounted = dict[Key, tuple[Range, ...]]
MOVED_TO, MOVED_FROM = "moved to feed ", "moved from feed "
"""Before the name of a ledger: why a partition begins a life that no feed lands, or one in another feed."""
NO_PINS = Pins()


@dataclass(slots=True)
class State:
    """The ledger folded up to, not including, `number`: the number of the next entry.

    Treat it as frozen: `extended` returns a new state.
    """

    number: int = 0
    head: str = field(default="", compare=False)
    """The SHA-256 (hex) of the newest entry's file; empty if that entry does not name its number, or is unknown."""
    ledger_id: str = ""
    cluster: str = ""
    origins: dict[Key, OriginItem] = field(default_factory=dict)
    current: dict[TopicPartition, Key] = field(default_factory=dict)
    batches: Batches = field(default_factory=Batches)
    landed: Accounted = field(default_factory=dict)
    lost: Accounted = field(default_factory=dict)
    skipped: Accounted = field(default_factory=dict)
    retired: Accounted = field(default_factory=dict)
    erased: Accounted = field(default_factory=dict)
    """Offsets of erased records; they are landed or retired as well. No batch may publish rows of them."""
    erasing: Accounted = field(default_factory=dict)
    """Those of them whose rows may still be in parts that count."""
    holds: dict[int, tuple[int | None, int | None]] = field(default_factory=dict)
    """By the number of its entry, the start and end (ms; None: without a limit) of each hold that has not ended."""
    replaced: dict[str, int] = field(default_factory=dict)
    """Lake paths of parts that were landed again, merged or retired, with the entry that replaced them. Old ones are
    forgotten; `Ledger.replaced` knows all of them."""
    superseded: dict[Key, Superseded] = field(default_factory=dict)
    """By key, (number, range): in the range, receipts of entries below that number are superseded."""
    commits: dict[Key, int] = field(default_factory=dict)
    intents: dict[Key, frozenset[int]] = field(default_factory=dict)
    moved: dict[Key, int] = field(default_factory=dict)
    """By key, the committed offset that was set by hand since the newest commit."""
    epochs: dict[Key, tuple[int, int]] = field(default_factory=dict)
    """By key, (end, leader epoch) of the furthest landed offset range, to detect truncation (KIP-101)."""
    tails: dict[Key, Tail] = field(default_factory=dict)
    """By key, the furthest landed batch, to detect a log that was restored from a copy."""
    boundaries: dict[Key, Pins] = field(default_factory=dict)
    """The boundaries pinned in each partition: the offset separates the windows before and after the time."""
    boundary_times: tuple[int, ...] = ()
    """All times at which any partition has a boundary, in order."""
    by_marker: dict[int, int] = field(default_factory=dict)
    """By time, the number of partitions in which transaction markers hid the boundary: it was searched by offset."""
    against: dict[int, int] = field(default_factory=dict)
    """By time, the number of partitions in which the boundary was decided against a record's stamp."""
    floors: dict[Key, tuple[int, int]] = field(default_factory=dict)
    """By key, (window, end) of the plan's offsets in its open window: later boundaries cannot lie below `end`."""
    published_in: Published = field(default_factory=Published)
    """By window (None: outside windows): the publish entries with offset ranges in it."""
    first_window: int | None = None
    folder_prefix: FolderPrefix = PREFIX
    """The prefix of the keys of the feed's folders: the first schema entry decides."""
    shapes: dict[str, int] = field(default_factory=dict)
    """By the name of a shape, the newest schema entry that defines it; the feed's own comes last."""
    schemas: dict[str, dict[str, str]] = field(default_factory=dict)
    """By the name of a shape, its columns and their types; raw rows have Kafka's."""
    table: dict[str, str] = field(default_factory=dict)
    """Every column that has landed in any file, with the type that reads all of them."""
    evolved: dict[str, str] = field(default_factory=dict)
    """The columns of the newest shape that were added from records, not from the feed's file."""
    corrected: int = -1
    """The newest schema entry that gave a column another type, once no row of the former type remained."""
    last_mark: int = -1
    """Number of the intent behind the newest commit: batches published after it are not committed yet."""
    gaps: tuple[tuple[int, int], ...] = ()
    """(number, next) of each gap entry: the entries from `number` up to, not including, `next` are lost."""
    ahead: dict[Key, int] = field(default_factory=dict)
    """By key, the offset committed by lost entries or another ledger, possibly ahead of the offsets accounted here."""
    taken: dict[str, int] = field(default_factory=dict)
    """By the id of another ledger, the newest of its entries whose mark on a committed offset was accepted."""
    ended: dict[Key, int] = field(default_factory=dict)
    """By key of a life that was left, the time (ms) of the entry: until then its log may have had unseen records."""
    void: tuple[int, ...] = ()
    """Numbers of void publish entries."""
    _reserved: Accounted | None = field(default=None, init=False, repr=False, compare=False)
    """The ranges of live plans; computed on first use."""
    _copied: set[tuple[str, Key | None]] = field(default_factory=set, init=False, repr=False, compare=False)
    """During a fold: the columns that it has copied and may extend."""

    # -- queries

    @property
    def newest(self) -> int:
        """The number of the newest entry; -1 if there is none."""
        return self.gaps[-1][0] if self.gaps and self.gaps[-1][1] == self.number else self.number - 1

    def lost_entry(self, number: int) -> bool:
        """Returns whether an entry with this number existed and is lost."""
        return any(first <= number < after for first, after in self.gaps)

    def list_accounted(self, key: Key) -> tuple[Range, ...]:
        """Returns every range of the key that is landed (control records included), lost, skipped or retired."""
        return union(r for by in self._classes() for r in by.get(key, ()))

    def _classes(self) -> tuple[Accounted, ...]:
        return self.landed, self.lost, self.skipped, self.retired

    def frontier(self, key: Key) -> int:
        """Returns the end of the contiguous accounted prefix from the origin. KeyError without an origin."""
        return find_contiguous_end(self.origins[key].offset, self.list_accounted(key))

    def pending(self, key: Key, end: int) -> tuple[Range, ...]:
        """Returns the pending ranges between the key's origin and `end`. KeyError without an origin."""
        return subtract(Range(self.origins[key].offset, end), self.list_accounted(key))

    def holes(self, key: Key) -> tuple[Range, ...]:
        """Returns the pending ranges below the furthest accounted offset."""
        return self.pending(key, max((r.end for r in self.list_accounted(key)), default=0))

    def find_known_end(self, key: Key) -> int:
        """Returns the end of the partition's offsets that the ledger knows: accounted, planned or below a boundary."""
        pinned, (_, planned) = self.boundaries.get(key, NO_PINS), self.floors.get(key, (0, 0))
        ends: list[int] = [planned, *pinned.offsets[-1:], *(r.end for r in self.list_accounted(key)[-1:])]
        return max(ends)

    def find_new_feed(self, key: Key) -> str:
        """Returns the name of the ledger for which the partition left this life, whose log goes on there; or empty."""
        after = self.origins.get(key._replace(incarnation=key.incarnation + GONE))
        return after.why.removeprefix(MOVED_TO) if after and after.why.startswith(MOVED_TO) else ""

    def find_unused_life(self, key: Key) -> Key:
        """Returns the first life with this topic id that the ledger does not know yet."""
        number, unused = 0, key
        while unused in self.origins:
            number += 1
            unused = key._replace(incarnation=f"{key.incarnation}#{number}")
        return unused

    def find_holds(self, start: int | None, end: int | None = None) -> tuple[int, ...]:
        """Returns the entries of the holds on a window (ms). All are on records outside of windows (no `start`)."""
        return tuple(
            number
            for number, (first, last) in self.holds.items()
            if start is None or ((last is None or start < last) and (first is None or end is None or end > first))
        )

    def known(self) -> list[Key]:
        """Returns the sorted keys of all partitions with an origin in their current life, unless they are gone."""
        return [k for k in sorted(self.current.values()) if k in self.origins and not k.is_ended]

    def frontiers(self) -> dict[Key, int]:
        """Returns the frontier of each known partition."""
        return {k: self.frontier(k) for k in self.known()}

    def live(self) -> tuple[Batch, ...]:
        """Returns the batches that are neither published nor abandoned, oldest first."""
        return self.batches.live()

    def list_live_ranges(self) -> Iterator[tuple[Batch, OffsetRange]]:
        """Returns every offset range that a live plan reserves, with its batch."""
        return ((b, s) for b in self.live() if b.plan for s in b.plan.offset_ranges)

    def list_reserved(self, key: Key) -> tuple[Range, ...]:
        """Returns the ranges of the key that live plans reserve."""
        if self._reserved is None:
            live = by_key((s.key, s.range) for _, s in self.list_live_ranges())
            self._reserved = {k: union(ranges) for k, ranges in live.items()}
        return self._reserved.get(key, ())

    def may_publish(self, entry: PublishEntry) -> bool:
        """Returns whether the entry counts: its plan is live, its token current, its replaced parts still count, and
        it has no rows of erased records, nor of a type that was corrected."""
        batch = self.batches.get(entry.batch)
        return (
            batch is not None
            and batch.plan is not None
            and batch.status is BatchStatus.PLANNED
            and batch.owner.token == entry.token
            and not any(path in self.replaced for path in batch.plan.replaces)
            and not any(self.find_unerased(r) or self._is_outdated(r) for r in entry.receipts)
        )

    def _is_outdated(self, r: Receipt) -> bool:
        """Returns whether the rows have a column with a type that was corrected since their shape was declared."""
        if not r.counts.landed_rows or self.shapes.get(r.format, self.number) >= self.corrected:
            return False
        columns = self.schemas.get(r.format, {})
        return any(
            common_type(parse_type(self.table[name]), parse_type(text)) is None
            for name, text in columns.items()
            if name in self.table
        )

    def find_unerased(self, r: Receipt) -> tuple[Range, ...]:
        """Returns the erased offsets of which the receipt may have rows."""
        return tuple(rest for x in self.list_erased(r.offset_range) for rest in subtract(x, r.erased))

    def list_erased(self, s: OffsetRange) -> tuple[Range, ...]:
        """Returns the erased offsets in an offset range."""
        return intersect(self.erased.get(s.key, ()), s.range)

    def receipts(self, number: int, entry: PublishEntry) -> list[Receipt]:
        """Returns the live receipts of the publish entry at `number`."""
        return (
            []
            if number in self.void
            else [r for r in entry.receipts if not self._is_superseded(number, r.offset_range)]
        )

    def _is_superseded(self, number: int, s: OffsetRange) -> bool:
        return self.superseded.get(s.key, NOTHING_SUPERSEDED).after(number, s.range)

    # -- folding

    def extend(self, entries: Iterable[Entry]) -> State:
        """Returns a new state with further entries, numbered from `self.number` on."""
        out = copy(self)
        for f in fields(out):
            value = getattr(self, f.name)
            if isinstance(value, dict | Batches):
                setattr(out, f.name, value.copy())
        out._reserved, out._copied = None, set()
        for entry in entries:
            out.head = ""
            if out.number == 0:
                out.ledger_id, out.cluster = entry.write, entry.cluster
            _APPLY[type(entry)](out, entry)
            out.number = number_after(out.number, entry)
        out._copied = set()
        return out

    def _growing_pins(self, key: Key) -> Pins:
        """Returns the partition's boundaries for additions: each column is copied once per fold, not per entry."""
        if ("boundaries", key) not in self._copied:
            self._copied.add(("boundaries", key))
            self.boundaries[key] = self.boundaries.get(key, NO_PINS).copy()
        return self.boundaries[key]

    def _growing_published(self) -> Published:
        """Returns the publications by window for additions."""
        if ("published_in", None) not in self._copied:
            self._copied.add(("published_in", None))
            self.published_in = self.published_in.copy()
        return self.published_in

    def _growing_superseded(self, key: Key) -> Superseded:
        """Returns the partition's superseded ranges for additions."""
        if ("superseded", key) not in self._copied:
            self._copied.add(("superseded", key))
            self.superseded[key] = self.superseded.get(key, NOTHING_SUPERSEDED).copy()
        return self.superseded[key]

    def _origin(self, entry: OriginEntry) -> None:
        for item in entry.items:
            if self.current.setdefault(item.key.tp, item.key) != item.key or item.key in self.origins:
                continue
            self.origins[item.key] = item
            if item.opens is not None:
                self._pin(item.key, (item.opens,), (item.begins,))
                self.first_window = item.opens if self.first_window is None else self.first_window

    def _boundary(self, entry: BoundaryEntry) -> None:
        for item in entry.items:
            if self.current.get(item.key.tp) == item.key:
                for counts, times in ((self.by_marker, item.by_marker), (self.against, item.against)):
                    pinned = self.boundaries.get(item.key, NO_PINS)
                    for time in times:
                        # Of a repeated boundary, the first one counts: `_pin` keeps it, too.
                        if (at := pinned.position(time)) == len(pinned) or pinned.times[at] != time:
                            counts[time] = counts.get(time, 0) + 1
                self._pin(item.key, item.times, item.offsets)

    def _pin(self, key: Key, times: tuple[int, ...], offsets: tuple[int, ...]) -> None:
        self._growing_pins(key).add(times, offsets)
        have = self.boundary_times
        if times and (not have or times[0] > have[-1]):
            self.boundary_times = (*have, *times)
        elif have[-len(times) :] == times:
            return  # another partition pinned the same ones
        elif new := [t for t in times if (at := bisect_left(have, t)) == len(have) or have[at] != t]:
            self.boundary_times = tuple(sorted((*have, *new)))

    def _plan(self, entry: PlanEntry) -> None:
        plan, planned = entry.plan, BatchStatus.PLANNED
        batch = Batch(self.number, plan, plan.request, entry.hash, entry.owner, planned, entry.at)
        self.batches.plan(batch)
        if not self.shapes:
            self.folder_prefix = FORMER_PREFIX
        for s in entry.plan.offset_ranges:
            self._raise_floor(s)

    def _own(self, entry: OwnEntry) -> None:
        batch = self.batches.get(entry.batch)
        if batch and batch.status is BatchStatus.PLANNED:
            self.batches.become(replace(batch, owner=entry.owner))

    def _publish(self, entry: PublishEntry) -> None:
        if not self.may_publish(entry):
            # The number is taken, and the entry changes nothing: its run had lost the batch before it appended.
            self.void += (self.number,)
            return
        batch = self.batches[entry.batch]
        self._replace(batch.plan.replaces if batch.plan else ())
        self._finish(
            replace(
                batch,
                plan=None,
                status=BatchStatus.PUBLISHED,
                published=self.number,
                failed=len(entry.failures),
                rows=sum(r.counts.landed for r in entry.receipts),
            )
        )
        self._class(self.landed, ((r.offset_range.key, r.offset_range.range) for r in entry.receipts))
        for shape in sorted({r.format for r in entry.receipts}):
            self.table = one_table(self.table, self.schemas.get(shape, {}))
        # A range without rows has no part to name.
        if batch.request.replace or (batch.plan and batch.plan.replaces):
            self._supersede((r.offset_range.key, r.offset_range.range) for r in entry.receipts)
        self._settle_erased((r.offset_range.key, r.offset_range.range) for r in entry.receipts)
        # The furthest offset that was read, with its leader epoch: a log that ends before it was truncated.
        for s in (r.offset_range for r in entry.receipts):
            key, furthest = s.key, (s.end, s.leader_epoch)
            self.epochs[key] = max(furthest, self.epochs.get(key, furthest))
        for r in entry.receipts:
            before = self.tails.get(r.offset_range.key)
            if r.tail and (before is None or r.tail.offset >= before.offset):
                self.tails[r.offset_range.key] = r.tail
        self._growing_published().add(self.number, dict.fromkeys(r.offset_range.window for r in entry.receipts))

    def _raise_floor(self, s: OffsetRange) -> None:
        """Raise the floor when the plan is made: a run that takes it over publishes in the windows of the plan."""
        pinned = self.boundaries.get(key := s.key)
        if s.window is None or not pinned or pinned.times[-1] > s.window:
            return
        self.floors[key] = max((s.window, s.end), self.floors.get(key, (s.window, s.end)))

    def _intent(self, entry: IntentEntry) -> None:
        for item in entry.offsets:
            self.intents[item.key] = self.intents.get(item.key, frozenset()) | {item.offset}

    def _commit(self, entry: CommitEntry) -> None:
        self.last_mark = max(self.last_mark, entry.mark)
        for item in entry.offsets:
            last = self.commits[item.key] = max(item.offset, self.commits.get(item.key, -1))
            self.moved.pop(item.key, None)
            self.intents[item.key] = frozenset(o for o in self.intents.get(item.key, ()) if o > last)

    def _loss(self, entry: LossEntry) -> None:
        self._class(self.lost, ((item.key, item.range) for item in entry.ranges))

    def _skip(self, entry: SkipEntry) -> None:
        self._class(self.skipped, ((item.key, item.range) for item in entry.ranges))

    def _abandon(self, entry: AbandonEntry) -> None:
        self._give_up(entry.batch)

    def _give_up(self, batch: int) -> None:
        current = self.batches.get(batch)
        if current and current.status is BatchStatus.PLANNED:
            self._finish(replace(current, plan=None, status=BatchStatus.ABANDONED))

    def _finish(self, batch: Batch) -> None:
        """Finish a batch, and forget parts replaced before the oldest batch that is stored in full: no live plan names
        them, and readers of such a file read the log."""
        self.batches.become(batch)
        if horizon := self.batches.horizon:
            for path in [*takewhile(lambda p: self.replaced[p] < horizon, self.replaced)]:
                del self.replaced[path]

    def _replace(self, parts: Iterable[str]) -> None:
        for path in parts:
            self.replaced.pop(path, None)
            self.replaced[path] = self.number

    def _accept(self, entry: AcceptEntry) -> None:
        lives = {i.leaves: i.enters for i in entry.items if self.current.get(i.leaves.tp) == i.leaves}
        for into, ranges in ((self.skipped, entry.passed), (self.lost, entry.lost)):
            self._class(into, ((r.key, r.range) for r in ranges if r.key in lives))
        for batch in {b.id for b, s in self.list_live_ranges() if s.key in lives}:
            self._give_up(batch)
        for leaves, origin in lives.items():
            if leaves.is_ended and leaves.topic_id == origin.key.topic_id:
                if not self.origins[leaves].why.startswith(MOVED_TO):
                    self._resume(origin)
            elif not leaves.is_ended:
                self.ended[leaves] = entry.at
            del self.current[origin.key.tp]
            self._origin(OriginEntry(items=(origin,)))
        self.cluster = entry.cluster

    def _resume(self, origin: OriginItem) -> None:
        """Take back the offsets lost with a log that is in Kafka again, from the new origin on: it is pending there."""
        former = max((k for k in self.ended if k.tp == origin.key.tp), key=self.ended.__getitem__, default=None)
        if former is not None and former.topic_id == origin.key.topic_id:
            del self.ended[former]
            self.lost[former] = intersect(self.lost.get(former, ()), Range(0, origin.offset))

    def _move(self, entry: MovedEntry) -> None:
        self.moved.update({item.key: item.offset for item in entry.offsets})

    def _take(self, entry: TakeEntry) -> None:
        for mark in entry.marks:
            self._accept_marks(mark.ledger, mark.number)
        self._origin(OriginEntry(items=entry.origins))
        self.ahead.update({item.key: item.offset for item in entry.committed})

    def _accept_marks(self, ledger: str, number: int) -> None:
        self.taken[ledger] = max(number, self.taken.get(ledger, -1))

    def _retire(self, entry: RetireEntry) -> None:
        ranges = [(item.key, item.range) for item in entry.ranges]
        self._class(self.retired, ranges)
        for key, over in by_key(ranges).items():
            self.superseded[key] = self._growing_superseded(key).cover(self.number, union(over))
        self._replace(entry.parts)
        self._settle_erased(ranges)

    def _erase(self, entry: EraseEntry) -> None:
        for key, ranges in by_key((item.key, item.range) for item in entry.ranges).items():
            self.erased[key] = union([*self.erased.get(key, ()), *ranges])
            self.erasing[key] = union([*self.erasing.get(key, ()), *ranges])

    def _put_on_hold(self, entry: HoldEntry) -> None:
        if entry.ends is None:
            self.holds[self.number] = (entry.start, entry.end)
        else:
            self.holds.pop(entry.ends, None)

    def _settle_erased(self, ranges: Iterable[tuple[Key, Range]]) -> None:
        """The rows of these ranges are without erased records, or gone."""
        for key, over in by_key((key, r) for key, r in ranges if key in self.erasing).items():
            rest = tuple(x for r in self.erasing[key] for x in subtract(r, union(over)))
            self.erasing.pop(key)
            self.erasing |= {key: rest} if rest else {}

    def _schema(self, entry: SchemaEntry) -> None:
        if not self.shapes:
            self.folder_prefix = entry.folder_prefix
        self.shapes.pop(entry.shape, None)
        self.shapes[entry.shape] = self.number
        self.schemas[entry.shape] = RAW_TYPES if entry.columns is None else entry.landed or entry.columns
        self.evolved = entry.evolved
        if entry.table is not None:
            self.table, self.corrected = one_table(entry.table, self.schemas[entry.shape]), self.number

    def _gap(self, entry: GapEntry) -> None:
        for batch in self.live():
            self._give_up(batch.id)
        self.gaps = (*self.gaps, (self.number, number_after(self.number, entry)))
        if entry.ledger:
            self._accept_marks(entry.ledger, entry.next - 1)
        self.ahead.update({item.key: item.offset for item in entry.committed})

    def _class(self, into: Accounted, items: Iterable[tuple[Key, Range]]) -> None:
        """Add ranges to one class and remove them from the others."""
        for key, ranges in by_key(items).items():
            for by in self._classes():
                if by is into:
                    by[key] = union([*by.get(key, ()), *ranges])
                elif other := by.get(key):
                    by[key] = tuple(rest for r in other for rest in subtract(r, ranges))

    def _supersede(self, items: Iterable[tuple[Key, Range]]) -> None:
        for key, ranges in by_key(items).items():
            self._growing_superseded(key).add(self.number, union(ranges))


def number_after(number: int, entry: Entry) -> int:
    """Returns the number of the entry after the one at `number`."""
    return max(number + 1, entry.next) if isinstance(entry, GapEntry) else number + 1


def by_key(items: Iterable[tuple[Key, Range]]) -> dict[Key, list[Range]]:
    """Returns the ranges of each key, in the given order."""
    out: dict[Key, list[Range]] = {}
    for key, r in items:
        out.setdefault(key, []).append(r)
    return out


_APPLY: dict[type[BaseModel], Callable[[State, Any], None]] = {
    OriginEntry: State._origin,
    BoundaryEntry: State._boundary,
    PlanEntry: State._plan,
    OwnEntry: State._own,
    PublishEntry: State._publish,
    IntentEntry: State._intent,
    CommitEntry: State._commit,
    LossEntry: State._loss,
    SkipEntry: State._skip,
    AbandonEntry: State._abandon,
    AcceptEntry: State._accept,
    MovedEntry: State._move,
    TakeEntry: State._take,
    RetireEntry: State._retire,
    EraseEntry: State._erase,
    HoldEntry: State._put_on_hold,
    SchemaEntry: State._schema,
    GapEntry: State._gap,
}
