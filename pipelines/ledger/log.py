"""The numbering of entries: optimistic concurrency over files that are only created if absent.

    read → decide on the state just below number N → create N
                 ↑ taken: continue reading, decide again

Guarantees: each number has one creator (invariant 11), the order is total, and an entry was decided on exactly the
state below it. If the response to a write is lost, the file is read back and its write id compared. If there is no
file, the write may still arrive, and its outcome is Unknown.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from itertools import chain, islice
from typing import NamedTuple

from sluice.pipelines.errors import LedgerCorrupt, LedgerTooNew, SluiceError, Unknown
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import segments
from sluice.pipelines.ledger.batches import FORGOTTEN, Batch
from sluice.pipelines.ledger.entries import Entry, OwnEntry, PlanEntry, PublishEntry, dump, measure, parse
from sluice.pipelines.ledger.fold import State, number_after
from sluice.pipelines.ledger.segments import Segment
from sluice.pipelines.ledger.tip import Facts, Tip, Trace, build_lost_error, find_lost_entry
from sluice.pipelines.model.kafka import Range, encode_topic
from sluice.pipelines.model.plans import Plan
from sluice.pipelines.ports import Clock, Lake, Stat
from sluice.pipelines.util.parallel import AT_ONCE, map_parallel

CHECKPOINT_EVERY = 20
CHECKPOINT_BYTES = 2 << 20
"""Entries, or bytes of them, that a reader folds before it writes a checkpoint for the next one."""
CHECKPOINT_SHARE = 4000
"""An old ledger needs at least 1/CHECKPOINT_SHARE new entries, because its checkpoint takes longer to write."""
CHECKPOINTS_KEPT = 3
NEWEST_BYTES = 256 << 10
"""The entries of the last read are cached up to this size: they are usually read again soon."""
SEGMENTS_AT_ONCE = 8
"""The maximum number of segments written in one call."""
READ_AHEAD = 64
"""Entries read before they are folded."""
BEYOND_THE_END = tuple(1 << i for i in range(17))
"""Distances behind the end of the log at which a reader checks for entries behind a hole."""


class Appended(NamedTuple):
    """An entry at `number`; `state` is the fold including it."""

    number: int
    entry: Entry
    state: State


class Ledger:
    """One feed's ledger in one run. `run` and `cluster` are stamped on every entry it writes.

    With `checkpoints=False` reading writes nothing.
    """

    def __init__(
        self,
        lake: Lake,
        feed: str,
        clock: Clock,
        run: str = "",
        cluster: str = "",
        *,
        checkpoints: bool = True,
    ) -> None:
        self.lake, self.feed, self._clock = lake, feed, clock
        self._run, self._cluster, self._whole = run, cluster, True
        self._checkpoints = checkpoints
        self._state = State()
        self._newest: dict[str, bytes] = {}
        self._facts: tuple[int, Facts] = (-1, Facts())

    @classmethod
    def offline(cls, lake: Lake, feed: str, clock: Clock, run: str = "") -> Ledger:
        """Open a ledger for work without Kafka: its entries name the cluster of the ledger."""
        ledger = cls(lake, feed, clock, run)
        ledger._cluster = ledger.read().cluster
        return ledger

    @classmethod
    def from_entries(cls, lake: Lake, feed: str, clock: Clock, cluster: str = "") -> Ledger:
        """Open a ledger that folds the existing entries from the first on, and does not check for lost newer ones."""
        ledger = cls(lake, feed, clock, cluster=cluster, checkpoints=False)
        ledger._whole = False
        return ledger

    @property
    def uri(self) -> str:
        """The address of the lake."""
        return self.lake.uri

    def neighbour(self, identity: str) -> str:
        """Returns the name of the feed in this lake whose ledger has this identity; empty if there is none."""
        return find_feed_of_ledger(self.lake, identity)

    def read(self) -> State:
        """Returns the fold of all written entries. Raises LedgerTooNew, LedgerCorrupt, EntriesLost.

        The first read fetches entries by number from the newest checkpoint to the tip. Without the two, or if an entry
        in between is missing, it lists the log. Later reads continue from the last number.
        """
        if self._state.number == 0:
            return self._first_read()
        data = list(self._following(self._state.number))
        return self._remember(_fold_entry(self.feed, self._state, data), data)

    def _first_read(self) -> State:
        """Read tip and checkpoints before the entries: the entries that they imply are older."""
        tip = Tip.parse(self.lake.get(paths.tip_path(self.feed))) if self._whole else None
        if tip and tip.facts:
            self._facts = -1, tip.facts
        begun = (self._checkpoint() if self._whole else None) or State()
        data = self._by_number(begun, tip) if tip and begun.number and tip.ledger == begun.ledger_id else None
        if data is None:
            data = [(path, content) for _, path, content in self._standing(begun.number, begun.newest)]
        state = _fold_entry(self.feed, begun, data)
        if trace := find_lost_entry(self.feed, state, tip):
            raise build_lost_error(self.feed, state.newest, [trace])
        return self._remember(state, data)

    def _by_number(self, begun: State, tip: Tip) -> list[tuple[str, bytes]] | None:
        """Returns (path, content) of the entries after a checkpoint.

        Returns None if an entry is missing that existed once, or if others exist behind the last: a listing decides.
        """
        if self.lake.size(paths.log_path(self.feed, begun.newest)) is None:
            return None
        out: list[tuple[str, bytes]] = []
        number = begun.number
        while number <= tip.number:
            ahead = range(number, min(number + READ_AHEAD, tip.number + 1))
            contents = map_parallel(self.lake.get, [paths.log_path(self.feed, n) for n in ahead])
            for at, data in zip(ahead, contents, strict=True):
                if at != number:
                    break  # lost entries lie between
                if data is None:
                    return None
                out.append((path := paths.log_path(self.feed, at), data))
                number = _find_next_number(at, path, data)
        for path, data in self._following(number):
            out.append((path, data))
            number = _find_next_number(paths.log_number(path) or 0, path, data)
        behind = [paths.log_path(self.feed, number + far) for far in BEYOND_THE_END]
        return out if all(size is None for size in map_parallel(self.lake.size, behind)) else None

    def _remember(self, state: State, data: list[tuple[str, bytes]]) -> State:
        self._state = state
        size = sum(measure(d) for _, d in data)
        if 0 < size < NEWEST_BYTES:
            self._newest = dict(data)
        many = max(CHECKPOINT_EVERY, state.number // CHECKPOINT_SHARE)
        much = len(data) >= many or size >= CHECKPOINT_BYTES
        if much and self._checkpoints:
            self._leave_checkpoint()
        return state

    def _leave_checkpoint(self) -> None:
        """Write a checkpoint, replacing an unreadable one of this number. Retain a few older ones for other readers.

        A best effort: a reader may have no right to write.
        """
        from sluice.pipelines.ledger import checkpoint

        with suppress(SluiceError):
            self.lake.put(paths.checkpoint_path(self.feed, self._state.number), checkpoint.dump(self._state))
            for old in list(self.lake.list(paths.checkpoint_folder(self.feed)))[:-CHECKPOINTS_KEPT]:
                self.lake.remove(old)

    def _checkpoint(self) -> State | None:
        """Returns the state of the newest readable checkpoint."""
        for path in reversed(list(self.lake.list(paths.checkpoint_folder(self.feed)))):
            state = load_checkpoint(self.lake.get(path) or b"")
            if state is not None and state.number == paths.checkpoint_number(path):
                return state
        return None

    def entries(self, first: int = 0) -> Iterator[tuple[int, Entry]]:
        """Yields (number, entry) from `first` on. Raises LedgerCorrupt for a missing number: none is ever removed."""
        for number, path, data in self._standing(first):
            yield number, parse(data, path)

    def _standing(self, first: int, before: int = -1) -> Iterator[tuple[int, str, bytes]]:
        """Yields the same as `raw`, but reads old entries from segments if there are many."""
        numbered = self._list_numbers(first, before)
        segment_entries = list(islice(numbered, segments.ENTRIES)) if self._whole and before < 0 else []
        for segment in segments.read(self.lake, self.feed, first) if len(segment_entries) == segments.ENTRIES else ():
            yield from ((n, paths.log_path(self.feed, n), data) for n, data in segment.entries if n >= first)
            first = segment.end
        yield from self._read(((n, path) for n, path in chain(segment_entries, numbered) if n >= first), first)

    def segments(self) -> Iterator[Segment]:
        """Returns the segments, which are copies of old entries, from entry 0 on."""
        return segments.read(self.lake, self.feed)

    def pack(self, limit: int = SEGMENTS_AT_ONCE) -> int:
        """Copy entries older than every checkpoint into at most `limit` segments. Returns the number of segments.

        Raises LakeUnavailable; written segments stay.
        """
        self.read()
        numbers = (paths.checkpoint_number(p) for p in self.lake.list(paths.checkpoint_folder(self.feed)))
        below, first = min((n for n in numbers if n is not None), default=0), 0
        for segment in self.segments() if below > segments.ENTRIES else ():
            first = segment.end
        if first + segments.ENTRIES >= below:
            return 0
        return segments.write(self.lake, self.feed, ((n, data) for n, _, data in self.raw(first)), below, limit)

    def raw(self, first: int, before: int = -1) -> Iterator[tuple[int, str, bytes]]:
        """Returns (number, path, content) of the entries from `first` on, without a hole.

        Checks that entry `before` exists. After a gap entry, numbers below its `next` are skipped. Raises
        LedgerCorrupt.
        """
        return self._read(self._list_numbers(first, before), first)

    def by_number(self, first: int, end: int) -> Iterator[tuple[int, str, bytes]]:
        """Yields the same as `raw` for the entries from `first` up to, not including, `end`, without a listing."""
        number = first
        while number < end:
            ahead = range(number, min(number + READ_AHEAD, end))
            contents = map_parallel(self.lake.get, [paths.log_path(self.feed, n) for n in ahead])
            for at, data in zip(ahead, contents, strict=True):
                if at != number:
                    continue  # lost entries lie between
                path = paths.log_path(self.feed, at)
                if data is None:
                    raise self._hole(at, path)
                yield at, path, data
                number = _find_next_number(at, path, data)

    def _read(self, numbered: Iterator[tuple[int, str]], expected: int) -> Iterator[tuple[int, str, bytes]]:
        while chunk := list(islice(numbered, READ_AHEAD)):
            for (number, path), data in zip(chunk, self._contents([path for _, path in chunk]), strict=True):
                if number > expected:
                    raise self._hole(expected, path)
                if number == expected:
                    yield number, path, data
                    expected = _find_next_number(number, path, data)

    def check_end(self, standing: Iterable[int]) -> None:
        """Raises LedgerCorrupt if one of these numbers lies behind the end of the log: there is a hole before it.

        List the numbers before the call, because entries may be added.
        """
        if (behind := min((n for n in standing if n >= self._state.number), default=None)) is not None:
            end = self.read().number
            if behind >= end:
                raise self._hole(end, paths.log_path(self.feed, behind))

    def stats(self, first: int = 0, end: int | None = None) -> Iterator[tuple[int, Stat]]:
        """Yields the number and the listed file of each entry from `first` up to, not including, `end`."""
        after = paths.log_path(self.feed, first - 1) if first else ""
        for stat in self.lake.stats(paths.log_folder(self.feed), after):
            if (number := paths.log_number(stat.path)) is not None:
                if end is not None and number >= end:
                    return
                yield number, stat

    def _list_numbers(self, first: int, before: int) -> Iterator[tuple[int, str]]:
        """Yields numbers and paths of the entries from `first` on. Raises EntriesLost if entry `before` is missing."""
        begin = before if before >= 0 else first
        listed = self.lake.list(paths.log_folder(self.feed), paths.log_path(self.feed, begin - 1) if begin else "")
        numbered = ((number, path) for path in listed if (number := paths.log_number(path)) is not None)
        if before >= 0 and next(numbered, (-1, ""))[0] != before:
            end = first - 1
            numbers = map(paths.log_number, self.lake.list(paths.log_folder(self.feed)))
            newest = max((n for n in numbers if n is not None), default=-1)
            folder = paths.checkpoint_folder(self.feed)
            raise build_lost_error(self.feed, newest, [Trace(end, f"a checkpoint in {folder} names entry {end}")])
        yield from numbered

    def _contents(self, chunk: list[str]) -> list[bytes]:
        """Returns the contents of the paths; many are read in parallel."""
        if len(chunk) <= AT_ONCE:
            return [self._content(path) for path in chunk]
        return map_parallel(self._content, chunk)

    def _following(self, number: int) -> Iterator[tuple[str, bytes]]:
        """Yields (path, content) of the entries from `number` on. Costs one request if there are none."""
        while (data := self.lake.get(path := paths.log_path(self.feed, number))) is not None:
            yield path, data
            number = _find_next_number(number, path, data)

    def entry(self, number: int) -> Entry:
        """Returns the entry at `number`. Raises LedgerCorrupt if there is none."""
        path = paths.log_path(self.feed, number)
        if (newest := self._newest.get(path)) is not None:
            return parse(newest, path)
        after = paths.log_path(self.feed, number + 1)
        data, follower = map_parallel(self.lake.get, [path, after]) if number + 1 < self._state.number else (None, None)
        data = self._content(path) if data is None else data
        entry = parse(data, path)
        follows = _FOLLOWS.search(follower) if follower else None
        head = follows[1].decode() if follows else self._state.head if number == self._state.newest else ""
        if entry.number is not None and (entry.number != number or head not in ("", sha256(data).hexdigest())):
            raise _build_replaced_error(self.feed, path)
        return entry

    def plan(self, batch: int) -> Plan:
        """Returns the plan of the batch. Raises LedgerCorrupt if there is none."""
        entry = self.entry(batch)
        if not isinstance(entry, PlanEntry):
            raise LedgerCorrupt(f"entry {batch} is not the plan of batch {batch}")
        return entry.plan

    def recall(self, batch: Batch) -> Batch:
        """Returns the batch with hash, owner and time, from the log if the state has forgotten them.

        The owner of a batch that was given up long ago is the one that planned it. Raises LedgerCorrupt.
        """
        if batch.owner != FORGOTTEN:
            return batch
        entry = self.entry(batch.id)
        if not isinstance(entry, PlanEntry):
            raise LedgerCorrupt(f"entry {batch.id} is not the plan of batch {batch.id}")
        later = (self.entry(n) for n in range(batch.id + 1, batch.published or 0))
        owners = [e.owner for e in later if isinstance(e, OwnEntry) and e.batch == batch.id]
        return replace(batch, hash=entry.hash, owner=[entry.owner, *owners][-1], planned_at=entry.at)

    def list_replaced(self, files: Iterable[str], state: State | None = None) -> frozenset[str]:
        """Returns the lake paths among `files` whose parts were landed again, merged or retired at any time.

        If the state has forgotten a part, its publish entry is read.
        """
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
        """Returns the publish entry of the batch. Raises LedgerCorrupt if it has none."""
        entry = None if batch.published is None else self.entry(batch.published)
        if not isinstance(entry, PublishEntry):
            raise LedgerCorrupt(f"entry {batch.published} is not the publish entry of batch {batch.id}")
        return entry

    def is_younger(self, entry: Entry, ms: int) -> bool:
        """Returns whether the entry was written less than `ms` milliseconds ago, by this machine's clock."""
        return self._clock() - entry.at < ms

    def append(self, decide: Callable[[State], Entry | None]) -> Appended | None:
        """Write the entry that `decide` returns for the newest state; call it again whenever the number was taken.

        Returns None if `decide` does. `decide` may raise to refuse. Raises Unknown if the response to the write was
        lost and the entry is not there.
        """
        while True:
            state = self.read()
            entry = decide(state)
            if entry is None:
                return None
            data = dump(entry := self._stamp(entry, state))
            if self._create(state.number, entry, data):
                self._state = state.extend([entry])
                self._state.head = sha256(data).hexdigest()
                self._leave_tip()
                return Appended(state.number, entry, self._state)

    @property
    def facts(self) -> Facts:
        """The facts of the entries that were read, for the tip."""
        origins, facts = self._facts
        if origins != len(self._state.origins):
            facts = Facts.of(self._state, facts.retention)
        first = self._state.boundary_times[0] if self._state.boundary_times else None
        self._facts = len(self._state.origins), facts._replace(first_window=first)
        return self._facts[1]

    def note_retention(self, retention: int | None) -> None:
        """Leave in the tip for how long (ms) Kafka keeps the feed's records."""
        if (facts := self.facts).retention != retention:
            self._facts = self._facts[0], facts._replace(retention=retention)
            self._leave_tip()

    def _leave_tip(self) -> None:
        """Write the tip, as a best effort: the entry is written in any case."""
        with suppress(SluiceError):
            tip = Tip(self._state.ledger_id, self._state.number - 1, self.facts)
            self.lake.put(paths.tip_path(self.feed), tip.dump())

    def _create(self, number: int, entry: Entry, data: bytes) -> bool:
        path = paths.log_path(self.feed, number)
        try:
            return self.lake.put_if_absent(path, data)
        except Unknown:
            if (standing := self.lake.get(path)) is None:
                raise
            return parse(standing, path).write == entry.write

    def _stamp(self, entry: Entry, state: State) -> Entry:
        follows = state.head
        if state.number and not follows:  # an earlier release wrote the newest entry, or the checkpoint
            follows = sha256(self._content(paths.log_path(self.feed, state.newest))).hexdigest()
        chain = {"number": state.number, "follows": follows}
        stamp = {"write": secrets.token_hex(8), "run": self._run, "at": self._clock(), "cluster": self._cluster}
        return entry.model_copy(update=chain | stamp)

    def _content(self, path: str) -> bytes:
        data = self.lake.get(path)
        if data is None:
            raise self._hole(paths.log_number(path) or 0, path)
        return data

    def _hole(self, expected: int, path: str) -> LedgerCorrupt:
        return LedgerCorrupt(
            f"ledger of feed {self.feed}: entry {expected} is missing ({path} exists)",
            remedy="restore the missing file from a backup of the lake; Sluice changes nothing until then",
        )


@lru_cache(2)
def load_checkpoint(data: bytes) -> State | None:
    """Returns the state in a checkpoint. A process that opens a ledger again gets the same one, which never changes."""
    from sluice.pipelines.ledger import checkpoint  # late: it needs numpy, and a new ledger has none

    return checkpoint.load(data)


def _may_be_replaced(state: State, path: str) -> Batch | None:
    """Returns the batch that published the file, if any offset of its name was superseded since."""
    part = paths.parse_part(path)
    batch = state.batches.get(part.batch) if part else None
    if part is None or batch is None or batch.published is None:
        return None
    published_range, number = Range(part.start, part.end), batch.published
    lives = (s for k, s in state.superseded.items() if (encode_topic(k.topic), k.partition) == part[:2])
    return batch if any(s.after(number, published_range) for s in lives) else None


def _fold_entry(feed: str, state: State, data: list[tuple[str, bytes]]) -> State:
    """Returns the state with further entries. Raises LedgerCorrupt unless each names its number and the one before."""
    if not data:
        return state
    entries, number, head, numbered = list[Entry](), state.number, state.head, bool(state.head)
    for path, content in data:
        entry = parse(content, path)
        follows = not head or entry.follows == head
        if numbered if entry.number is None else entry.number != number or not follows:
            raise _build_replaced_error(feed, path)
        entries.append(entry)
        head, numbered = sha256(content).hexdigest(), entry.number is not None
        number = number_after(number, entry)
    out = state.extend(entries)
    out.head = head if numbered else ""
    return out


def _build_replaced_error(feed: str, path: str) -> LedgerCorrupt:
    return LedgerCorrupt(
        f"ledger entry {path}, or the one before it, is not the one that was written there",
        remedy=f"restore both files of _sluice/{feed}/log from a backup of the lake; Sluice changes nothing until then",
    )


def _find_next_number(number: int, path: str, data: bytes) -> int:
    """Returns the number of the entry after the one with this content."""
    return number_after(number, parse(data, path)) if _GAP in data else number + 1


_GAP = b'"gap"'
_FOLLOWS = re.compile(rb'"follows":"([0-9a-f]{64})"')


def list_feeds_without_files(lake: Lake, names: Collection[str]) -> list[str]:
    """Returns the feeds, in order, that have a ledger in the lake and are not among `names`."""
    return [feed for feed in lake.folders(paths.SLUICE) if feed not in names and any(lake.list(paths.log_folder(feed)))]


def read_ledger_id(lake: Lake, feed: str) -> str:
    """Returns the identity of the feed's ledger; empty if its first entry is missing or unreadable."""
    path = paths.log_path(feed, 0)
    try:
        data = lake.get(path)
        return parse(data, path).write if data else ""
    except (LedgerCorrupt, LedgerTooNew):
        return ""


def find_feed_of_ledger(lake: Lake, identity: str) -> str:
    """Returns the name of the feed that has this ledger in the lake; empty if none has."""
    feeds = list(lake.folders(paths.SLUICE))
    identities = map_parallel(lambda feed: read_ledger_id(lake, feed), feeds)
    return next((feed for feed, other in zip(feeds, identities, strict=True) if other == identity), "")
