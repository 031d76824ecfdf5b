"""How an entry gets its number: optimistic concurrency over files that are only created if absent.

    read → decide on the state just below number N → create N
                 ↑ taken: read on, decide again

Guarantees: each number has one creator (invariant 11), the order is total, and an entry was decided on exactly the
state below it. When an answer is lost, the file is read back and its write id compared. When no file stands there, the
write may still arrive, and its outcome stays unknown.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import chain, islice
from typing import NamedTuple

from sluice.pipelines.errors import LedgerCorrupt, SluiceError, Unknown
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import checkpoint, segments
from sluice.pipelines.ledger.batches import FORGOTTEN, Batch
from sluice.pipelines.ledger.entries import Entry, OwnEntry, PlanEntry, PublishEntry, dump, parse
from sluice.pipelines.ledger.fold import State, number_after
from sluice.pipelines.ledger.neighbours import feed_of_ledger
from sluice.pipelines.ledger.segments import Segment
from sluice.pipelines.ledger.tip import Tip, Trace, beyond, entries_lost
from sluice.pipelines.model.plans import Plan
from sluice.pipelines.model.ranges import Range
from sluice.pipelines.model.stat import Stat
from sluice.pipelines.model.topic_names import encode_topic
from sluice.pipelines.ports import Clock, Lake
from sluice.pipelines.util.parallel import AT_ONCE, each

CHECKPOINT_EVERY = 20
CHECKPOINT_BYTES = 2 << 20
"""Entries, or bytes of them, that a reader folds before it leaves a checkpoint behind for the next one."""
CHECKPOINT_SHARE = 4000
"""Of an old ledger it is one entry in so many: the older it is, the more its checkpoint takes to write."""
CHECKPOINTS_KEPT = 3
NEWEST_BYTES = 256 << 10
"""Entries that the last read brought are kept up to this size: who looks at a feed asks for the newest again."""
SEGMENTS_AT_ONCE = 8
"""The most segments that are written in one go: so many requests for each thousand entries of theirs."""
READ_AHEAD = 64
"""Entries read before they are folded."""
BEYOND_THE_END = tuple(1 << i for i in range(17))
"""How far behind the end of the log a reader looks for entries that a hole would hide."""


class Appended(NamedTuple):
    """The entry stands at `number`; `state` is the fold including it."""

    number: int
    entry: Entry
    state: State


class Ledger:
    """One feed's ledger as one run sees it. `run` and `cluster` are stamped on every entry it writes.

    With `checkpoints=False` reading writes nothing. With `whole=False` it folds the entries that stand, from the first
    on, and does not ask whether newer ones are lost.
    """

    def __init__(
        self,
        lake: Lake,
        feed: str,
        clock: Clock,
        run: str = "",
        cluster: str = "",
        *,
        packs: bool = True,
        checkpoints: bool = True,
    ) -> None:
        self._lake, self.feed, self._clock = lake, feed, clock
        self._run, self._cluster, self._whole = run, cluster, packs
        self._checkpoints = checkpoints and packs
        self._state = State()
        self._newest: dict[str, bytes] = {}

    @classmethod
    def offline(cls, lake: Lake, feed: str, clock: Clock, run: str = "") -> Ledger:
        """For work that never asks Kafka: its entries name the cluster that the ledger knows."""
        ledger = cls(lake, feed, clock, run)
        ledger._cluster = ledger.read().cluster
        return ledger

    @property
    def uri(self) -> str:
        """The address of the lake."""
        return self._lake.uri

    def neighbour(self, identity: str) -> str:
        """The name of another feed whose ledger, in the same lake, has this identity; empty if there is none."""
        return feed_of_ledger(self._lake, identity)

    def read(self) -> State:
        """The fold of everything written so far. Raises LedgerTooNew, LedgerCorrupt, EntriesLost.

        The first read goes from the newest checkpoint to the entry that the note beside the log names, by number, so
        it looks at no older name. Without the two, or where an entry between them is missing, it lists the log. Later
        reads continue from the last number.
        """
        if self._state.number == 0:
            return self._first_read()
        data = list(self._following(self._state.number))
        return self._kept(_fold(self._state, data), data)

    def _first_read(self) -> State:
        """The tip and the checkpoints are read before the entries: the entries that they imply are older."""
        tip = Tip.parse(self._lake.get(paths.tip_path(self.feed))) if self._whole else None
        begun = (self._checkpoint() if self._whole else None) or State()
        data = self._by_number(begun, tip) if tip and begun.number and tip.ledger == begun.ledger_id else None
        if data is None:
            data = [(path, content) for _, path, content in self._standing(begun.number, begun.newest)]
        state = _fold(begun, data)
        if trace := beyond(self.feed, state, tip):
            raise entries_lost(self.feed, state.newest, [trace])
        return self._kept(state, data)

    def _by_number(self, begun: State, tip: Tip) -> list[tuple[str, bytes]] | None:
        """(path, content) of the entries after a checkpoint. None where one is missing that stood once, or where others
        stand behind the last: the listing finds out what that means."""
        if self._lake.size(paths.log_path(self.feed, begun.newest)) is None:
            return None
        out: list[tuple[str, bytes]] = []
        number = begun.number
        while number <= tip.number:
            ahead = range(number, min(number + READ_AHEAD, tip.number + 1))
            contents = each(self._lake.get, [paths.log_path(self.feed, n) for n in ahead])
            for at, data in zip(ahead, contents, strict=True):
                if at != number:
                    break  # lost entries lie between
                if data is None:
                    return None
                out.append((path := paths.log_path(self.feed, at), data))
                number = _after(at, path, data)
        for path, data in self._following(number):
            out.append((path, data))
            number = _after(paths.log_number(path) or 0, path, data)
        behind = [paths.log_path(self.feed, number + far) for far in BEYOND_THE_END]
        return out if all(size is None for size in each(self._lake.size, behind)) else None

    def _kept(self, state: State, data: list[tuple[str, bytes]]) -> State:
        self._state = state
        size = sum(len(d) for _, d in data)
        if 0 < size < NEWEST_BYTES:
            self._newest = dict(data)
        many = max(CHECKPOINT_EVERY, state.number // CHECKPOINT_SHARE)
        much = len(data) >= many or size >= CHECKPOINT_BYTES
        if much and self._checkpoints:
            self._leave_checkpoint()
        return state

    def _leave_checkpoint(self) -> None:
        """Write a checkpoint; an unreadable one of this number is replaced. Keep a few older ones for other readers."""
        self._lake.put(paths.checkpoint_path(self.feed, self._state.number), checkpoint.dump(self._state))
        for old in list(self._lake.list(paths.checkpoint_folder(self.feed)))[:-CHECKPOINTS_KEPT]:
            self._lake.remove(old)

    def _checkpoint(self) -> State | None:
        """The state of the newest checkpoint that can be read."""
        for path in reversed(list(self._lake.list(paths.checkpoint_folder(self.feed)))):
            state = loaded(self._lake.get(path) or b"")
            if state is not None and state.number == paths.checkpoint_number(path):
                return state
        return None

    def entries(self, first: int = 0) -> Iterator[tuple[int, Entry]]:
        """(number, entry) from `first` on. A missing number is LedgerCorrupt: entries are never removed."""
        for number, path, data in self._standing(first):
            yield number, parse(data, path)

    def _standing(self, first: int, before: int = -1) -> Iterator[tuple[int, str, bytes]]:
        """As `raw`, but where there are many, old entries are read from segments."""
        numbered = self._numbered(first, before)
        segment_entries = list(islice(numbered, segments.ENTRIES)) if self._whole and before < 0 else []
        for segment in segments.read(self._lake, self.feed, first) if len(segment_entries) == segments.ENTRIES else ():
            yield from ((n, paths.log_path(self.feed, n), data) for n, data in segment.entries if n >= first)
            first = segment.end
        yield from self._read(((n, path) for n, path in chain(segment_entries, numbered) if n >= first), first)

    def segments(self) -> Iterator[Segment]:
        """The copies of old entries, from entry 0 on."""
        return segments.read(self._lake, self.feed)

    def pack(self, limit: int = SEGMENTS_AT_ONCE) -> int:
        """Copy entries that are older than every checkpoint into segments, at most so many; returns how many. Raises
        LakeUnavailable; what was copied stays."""
        self.read()
        numbers = (paths.checkpoint_number(p) for p in self._lake.list(paths.checkpoint_folder(self.feed)))
        below, first = min((n for n in numbers if n is not None), default=0), 0
        for segment in self.segments() if below > segments.ENTRIES else ():
            first = segment.end
        if first + segments.ENTRIES >= below:
            return 0
        return segments.write(self._lake, self.feed, ((n, data) for n, _, data in self.raw(first)), below, limit)

    def raw(self, first: int, before: int = -1) -> Iterator[tuple[int, str, bytes]]:
        """(number, path, content) of the entries from `first` on, without a hole. Checks first that entry `before`
        stands. After a gap entry, the numbers below the one it names are passed over. Raises LedgerCorrupt."""
        return self._read(self._numbered(first, before), first)

    def by_number(self, first: int, end: int) -> Iterator[tuple[int, str, bytes]]:
        """As `raw`, of the entries from `first` up to, not including, `end`. Lists nothing."""
        number = first
        while number < end:
            ahead = range(number, min(number + READ_AHEAD, end))
            contents = each(self._lake.get, [paths.log_path(self.feed, n) for n in ahead])
            for at, data in zip(ahead, contents, strict=True):
                if at != number:
                    continue  # lost entries lie between
                path = paths.log_path(self.feed, at)
                if data is None:
                    raise self._hole(at, path)
                yield at, path, data
                number = _after(at, path, data)

    def _read(self, numbered: Iterator[tuple[int, str]], expected: int) -> Iterator[tuple[int, str, bytes]]:
        while chunk := list(islice(numbered, READ_AHEAD)):
            for (number, path), data in zip(chunk, self._contents([path for _, path in chunk]), strict=True):
                if number > expected:
                    raise self._hole(expected, path)
                if number == expected:
                    yield number, path, data
                    expected = _after(number, path, data)

    def check_end(self, standing: Iterable[int]) -> None:
        """Raises LedgerCorrupt where one of these numbers stands behind the end of the log: a hole hides it, however
        wide. Numbers are listed before, since entries come meanwhile."""
        if (behind := min((n for n in standing if n >= self._state.number), default=None)) is not None:
            end = self.read().number
            if behind >= end:
                raise self._hole(end, paths.log_path(self.feed, behind))

    def stats(self, first: int = 0, end: int | None = None) -> Iterator[tuple[int, Stat]]:
        """The number and the file of each entry, those from `first` up to, not including, `end`, as a listing shows
        them."""
        after = paths.log_path(self.feed, first - 1) if first else ""
        for stat in self._lake.stats(paths.log_folder(self.feed), after):
            if (number := paths.log_number(stat.path)) is not None:
                if end is not None and number >= end:
                    return
                yield number, stat

    def _numbered(self, first: int, before: int) -> Iterator[tuple[int, str]]:
        """The numbers and paths of the entries from `first` on. Raises EntriesLost where entry `before` is gone."""
        begin = before if before >= 0 else first
        listed = self._lake.list(paths.log_folder(self.feed), paths.log_path(self.feed, begin - 1) if begin else "")
        numbered = ((number, path) for path in listed if (number := paths.log_number(path)) is not None)
        if before >= 0 and next(numbered, (-1, ""))[0] != before:
            raise self._shorter_than_its_checkpoint(first - 1)
        yield from numbered

    def _shorter_than_its_checkpoint(self, end: int) -> SluiceError:
        numbers = map(paths.log_number, self._lake.list(paths.log_folder(self.feed)))
        newest = max((n for n in numbers if n is not None), default=-1)
        folder = paths.checkpoint_folder(self.feed)
        return entries_lost(self.feed, newest, [Trace(end, f"a checkpoint in {folder} tells of entry {end}")])

    def _contents(self, chunk: list[str]) -> list[bytes]:
        """The contents of the paths; many are read side by side."""
        if len(chunk) <= AT_ONCE:
            return [self._content(path) for path in chunk]
        return each(self._content, chunk)

    def _following(self, number: int) -> Iterator[tuple[str, bytes]]:
        """(path, content) of the entries from `number` on. Where nothing is new, this is one request."""
        while (data := self._lake.get(path := paths.log_path(self.feed, number))) is not None:
            yield path, data
            number = _after(number, path, data)

    def entry(self, number: int) -> Entry:
        """The entry at `number`. Raises LedgerCorrupt when there is none."""
        path = paths.log_path(self.feed, number)
        return parse(self._newest.get(path) or self._content(path), path)

    def plan(self, batch: int) -> Plan:
        """The plan of the batch. Raises LedgerCorrupt when there is none."""
        entry = self.entry(batch)
        if not isinstance(entry, PlanEntry):
            raise LedgerCorrupt(f"entry {batch} is not the plan of batch {batch}")
        return entry.plan

    def recall(self, batch: Batch) -> Batch:
        """The batch with hash, owner and time, from the log if the state has forgotten them. Of a batch that was given
        up long ago, the owner is the one that planned it. Raises LedgerCorrupt."""
        if batch.owner != FORGOTTEN:
            return batch
        entry = self.entry(batch.id)
        if not isinstance(entry, PlanEntry):
            raise LedgerCorrupt(f"entry {batch.id} is not the plan of batch {batch.id}")
        later = (self.entry(n) for n in range(batch.id + 1, batch.published or 0))
        owners = [e.owner for e in later if isinstance(e, OwnEntry) and e.batch == batch.id]
        return replace(batch, hash=entry.hash, owner=[entry.owner, *owners][-1], planned_at=entry.at)

    def replaced(self, files: Iterable[str], state: State | None = None) -> frozenset[str]:
        """Those of these lake paths that are parts which no longer count: landed anew, merged or retired, however long
        ago. Where the state has forgotten a part, the entry that published it says what became of it."""
        state = state or self.read()
        names = list(files)
        replaced = {path for path in names if path in state.replaced}
        unsure: dict[int, list[str]] = {}
        for path in names:
            if path not in replaced and (batch := _may_be_replaced(state, path)) is not None:
                unsure.setdefault(batch.id, []).append(path)
        for id, names_in_batch in unsure.items():
            entry = self.publication(state.batches[id])
            counting = state.receipts(state.batches[id].published or 0, entry)
            live = {p.path for r in counting for p in r.parts}
            replaced |= {p.path for r in entry.receipts for p in r.parts}.intersection(names_in_batch) - live
        return frozenset(replaced)

    def publication(self, batch: Batch) -> PublishEntry:
        """The publish entry of the batch. Raises LedgerCorrupt when it has none."""
        entry = None if batch.published is None else self.entry(batch.published)
        if not isinstance(entry, PublishEntry):
            raise LedgerCorrupt(f"entry {batch.published} is not the publish entry of batch {batch.id}")
        return entry

    def append(self, decide: Callable[[State], Entry | None]) -> Appended | None:
        """Write the entry that `decide` returns for the newest state; ask it again whenever the number was taken.

        Returns None when `decide` does. `decide` may raise to refuse. Raises Unknown when the answer to the write was
        lost and the entry is not there.
        """
        while True:
            state = self.read()
            entry = decide(state)
            if entry is None:
                return None
            if self._create(state.number, entry := self._stamped(entry)):
                self._state = state.extended([entry])
                self._leave_tip()
                return Appended(state.number, entry, self._state)

    def _leave_tip(self) -> None:
        """Best effort: the entry stands whether this succeeds or not."""
        with suppress(SluiceError):
            tip = Tip(self._state.ledger_id, self._state.number - 1)
            self._lake.put(paths.tip_path(self.feed), tip.dump())

    def _create(self, number: int, entry: Entry) -> bool:
        path = paths.log_path(self.feed, number)
        try:
            return self._lake.put_if_absent(path, dump(entry))
        except Unknown:
            if (standing := self._lake.get(path)) is None:
                raise
            return parse(standing, path).write == entry.write

    def _stamped(self, entry: Entry) -> Entry:
        stamp = {"write": secrets.token_hex(8), "run": self._run, "at": self._clock(), "cluster": self._cluster}
        return entry.model_copy(update=stamp)

    def _content(self, path: str) -> bytes:
        data = self._lake.get(path)
        if data is None:
            raise self._hole(paths.log_number(path) or 0, path)
        return data

    def _hole(self, expected: int, path: str) -> LedgerCorrupt:
        return LedgerCorrupt(
            f"ledger of feed {self.feed}: entry {expected} is missing ({path} stands)",
            remedy="restore the missing file from a backup of the lake; Sluice changes nothing until then",
        )


loaded = lru_cache(2)(checkpoint.load)
"""A process that opens a ledger again soon, as the steps of a run do, gets the same state: nobody changes one."""


def _may_be_replaced(state: State, path: str) -> Batch | None:
    """The batch that published a file of that name, if something of the offsets in the name was superseded since."""
    part = paths.parse_part(path)
    batch = state.batches.get(part.batch) if part else None
    if part is None or batch is None or batch.published is None:
        return None
    published_range, number = Range(part.start, part.end), batch.published
    lives = (s for k, s in state.superseded.items() if (encode_topic(k.topic), k.partition) == part[:2])
    return batch if any(s.after(number, published_range) for s in lives) else None


def _fold(state: State, data: list[tuple[str, bytes]]) -> State:
    return state.extended(parse(content, path) for path, content in data) if data else state


def _after(number: int, path: str, data: bytes) -> int:
    """The number of the entry that follows the one with this content."""
    return number_after(number, parse(data, path)) if _GAP in data else number + 1


_GAP = b'"gap"'
