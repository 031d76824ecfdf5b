"""The outside of a feed in memory: logs, a coordinator of groups, a lake, and what happens to them by itself.

Each port asks the stage before an effect, so that a run may stop there for ever, or for as long as others please.
Answers get lost only where the port's contract says so. What the ports are is said in `pipelines/ports.py`; whose
semantics they have, in docs/developers/design.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from sluice.pipelines.errors import (
    CommitFenced,
    GroupHeld,
    IncarnationChanged,
    KafkaUnavailable,
    LogTruncated,
    OffsetsLost,
    Unknown,
)
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.kafka import (
    CommittedOffset,
    FetchLimits,
    Isolation,
    Key,
    OffsetAtTime,
    PartitionState,
    TopicPartition,
)
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Life
from sluice.pipelines.ports import DeadLetter, Fetched, FetchFailed, Job, Member, Ports
from sluice.pipelines.records.rows.row_format import REFUSED, Formatted, RawFormat
from sluice.pipelines.schema.arrays import fixed_width, text_array
from sluice.testing.cluster import MemoryCluster
from sluice.testing.engine import MemoryEngine, MemoryLiveness
from sluice.testing.lake import Files, MemoryLake
from sluice.testing.logs import ABORT, COMMIT, Log, LogBatch, LogRecord, log
from tests.model.scheduler import Event, Stage

HOUR = 3_600_000
START = 16 * HOUR
LAG = 3 * HOUR
"""By so much the records of transactions that stand there when a world begins lie behind the broker's clock."""
TOPIC, FEED, CLUSTER = "orders", "orders", "cluster-1"
DLQ = "orders.dlq"
FAR = START + 10 * 365 * 24 * HOUR


class Written(NamedTuple):
    """One place in a log: a record (of a transaction of `producer`, where that is not −1), or a transaction's end."""

    stamp: int
    value: bytes
    producer: int = -1
    marker: int | None = None


@lru_cache(4096)
def built(records: tuple[Written, ...]) -> Log:
    """The log as a broker holds it."""
    return log(
        *(
            LogBatch(producer=r.producer, marker=r.marker)
            if r.marker is not None
            else LogBatch((LogRecord(b"k", r.value, r.stamp),), producer=r.producer, transactional=r.producer >= 0)
            for r in records
        )
    )


@lru_cache(4096)
def visible(records: tuple[Written, ...], start: int, end: int) -> tuple[tuple[int, bytes], ...]:
    """Offsets and values of the committed records."""
    return tuple((r["offset"], r["value"]) for r in built(records).visible(start, end))


@dataclass(frozen=True)
class Partition:
    """One partition now. `version` counts how often its log was truncated, `ends` where each leader epoch ended."""

    number: int
    topic_id: str = "id-1"
    version: int = 0
    start: int = 0
    records: tuple[Written, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(TOPIC, self.number)

    @property
    def end(self) -> int:
        return len(self.records)

    @property
    def open(self) -> dict[int, int]:
        """Transactions that have not ended: producer and first offset."""
        out: dict[int, int] = {}
        for at, r in enumerate(self.records):
            if r.marker is not None:
                out.pop(r.producer, None)
            elif r.producer >= 0:
                out.setdefault(r.producer, at)
        return out

    @property
    def stable(self) -> int:
        return min(self.open.values(), default=self.end)

    def value(self, bad: bool = False) -> bytes:
        return f"{'bad ' if bad else ''}{self.topic_id}.{self.version}:{self.number}:{self.end}".encode()

    def written(self, stamp: int, kind: str = "c") -> Partition:
        """With one record more: committed, bad (it goes into quarantine), or of a transaction that is open."""
        r = Written(stamp, self.value(kind == "b"), 100 + self.end if kind == "o" else -1)
        return replace(self, records=(*self.records, r))

    def ended(self, stamp: int, producer: int, marker: int) -> Partition:
        return replace(self, records=(*self.records, Written(stamp, b"", producer, marker)))

    def epoch_end(self, epoch: int) -> int:
        return self.ends[epoch] if epoch < len(self.ends) else self.end

    def state(self) -> PartitionState:
        return PartitionState(TOPIC, self.number, self.topic_id, 1, self.version, self.start, self.stable, self.end)


@dataclass
class Pending:
    """A transaction of ours that has not ended."""

    epoch: int
    offsets: dict[TopicPartition, CommittedOffset]
    letters: tuple[str, ...]


@dataclass
class Coordinator:
    """The group's and the transactions' coordinators."""

    offsets: dict[TopicPartition, CommittedOffset] = field(default_factory=dict)
    pending: Pending | None = None
    epoch: int = 0
    generation: int = 0
    members: dict[str, int] = field(default_factory=dict)
    letters: list[str] = field(default_factory=list)
    """Where the records come from that readers of the dead-letter topic see."""
    foreign: dict[TopicPartition, str] = field(default_factory=dict)
    """By partition, the topic's life in which somebody else put the offset that stands there."""

    def key(self) -> int:
        pending = self.pending
        held = (pending.epoch, tuple(pending.offsets.items()), pending.letters) if pending else None
        members = tuple(sorted(self.members.items()))
        offsets = tuple(sorted(self.offsets.items()))
        return hash((offsets, held, self.epoch, self.generation, members, tuple(self.letters)))

    def drop(self, member: str) -> None:
        if self.members.pop(member, None) is not None:
            self.generation += 1


class World:
    """Everything outside of the runs. `watch` hears of every change; `dead` names the runs that are no more."""

    def __init__(self, feed: Feed, logs: Sequence[str] = ("cc",), stamps: Sequence[Sequence[int]] = ()) -> None:
        self.feed, self.stage, self.now = feed, Stage(), START + HOUR
        self.partitions = [self._begun(n, kinds, stamps[n] if stamps else ()) for n, kinds in enumerate(logs)]
        self.past: list[Partition] = []
        self.group = Coordinator()
        self.files = Files()
        self.content = 0
        self.delayed: list[tuple[str, bytes]] = []
        """Writes of entries that nobody waits for any more, and that may still arrive."""
        self.dead: set[str] = set()
        self.slow_copies = False
        self.watch: Any = None
        self.broken = ""

    def _begun(self, number: int, kinds: str, stamps: Sequence[int]) -> Partition:
        p = Partition(number)
        for at, kind in enumerate(kinds):
            stamp = START + (stamps[at] if stamps else 0) * HOUR
            if kind == "t":
                p = p.written(stamp, "o").ended(stamp + LAG, 100 + p.end, COMMIT)
            elif kind == "a":
                p = p.written(stamp, "o").ended(stamp + LAG, 100 + p.end, ABORT)
            else:
                p = p.written(stamp, kind)
        return p

    def clone(self) -> World:
        """Another world in the same state, with a stage of its own and nobody watching."""
        out = copy.copy(self)
        out.stage, out.watch = Stage(), None
        out.partitions, out.past, out.files = list(self.partitions), list(self.past), Files(self.files)
        out.delayed, out.dead, out.group = list(self.delayed), set(self.dead), copy.deepcopy(self.group)
        return out

    def fingerprint(self) -> int:
        log = (tuple(self.partitions), self.now, tuple(self.delayed), tuple(sorted(self.dead)))
        return hash((log, self.content, self.group.key()))

    def changed(self, what: str, **how: Any) -> None:
        if self.watch is not None and not self.broken:
            self.broken = self.watch.after(what, **how) or ""

    # -- the ports of one run

    def edges(self, name: str) -> Ports:
        lake = Lake(self)
        engine, liveness = Engine(lake, lambda: Logs(self), self.feed.landing), Liveness(self)
        cluster, group = Kafka(self), Group(self, name)
        return Ports(cluster, group, lake, engine, liveness, lambda: self.now, None, parallelism=1)

    def ledger(self, name: str) -> Ledger:
        return Ledger(Lake(self), FEED, lambda: self.now, name, CLUSTER)

    # -- files

    def write(self, path: str, data: bytes | None) -> None:
        """Every change of the lake goes through here. None: remove."""
        before = self.files.get(path)
        if before is not None:
            self.content ^= hash((path, before))
        if data is not None:
            self.files[path] = data
            self.content ^= hash((path, data))
        elif before is not None:
            del self.files[path]
        if before != data:
            self.changed("file", path=path)

    # -- what happens by itself

    def events(self) -> Iterator[Event]:
        for path, data in self.delayed:
            if path not in self.files:
                yield Event(
                    f"delayed write of {_short(path)} arrives", "arrive", lambda p=path, d=data: self._arrive(p, d)
                )
        for p in self.partitions:
            yield from self._to_log(p)
        yield Event("an hour passes", "tick", self._tick)
        yield Event("a partition is added with a record", "addpart", self._add_partition)
        for count in (1, 2, 3):
            yield Event(f"the ledger loses its newest {count}", "lose", lambda n=count: self._lose(n))
        yield Event("the note of the newest entry is gone", "lose", lambda: self.write(paths.tip_path(FEED), None))
        yield Event("the lake is removed", "remove", self._remove_lake)
        g = self.group
        for member in sorted(g.members):
            yield Event(f"session of {member} times out", "kick", lambda m=member: g.drop(m))
        if g.pending:
            yield Event("the coordinator aborts the open transaction", "abort", self._abort)
        if not g.members and not g.pending and g.offsets:
            yield Event("the group's offsets expire", "expire", g.offsets.clear)
            for to in sorted({0, self.partitions[0].end}):
                yield Event(f"somebody puts the group to {to}", "reset", lambda to=to: self._put_by_hand(to))

    def _to_log(self, p: Partition) -> Iterator[Event]:
        n = p.number

        def put(make: Callable[[], Partition]) -> Callable[[], None]:
            def act() -> None:
                self.partitions[n] = make()

            return act

        yield Event(f"{n}: a record", "append", put(lambda: p.written(self.now)))
        yield Event(f"{n}: a bad record", "bad", put(lambda: p.written(self.now, "b")))
        yield Event(f"{n}: a late record", "late", put(lambda: p.written(START)))
        yield Event(f"{n}: a record from the future", "future", put(lambda: p.written(FAR)))
        yield Event(f"{n}: a transaction begins", "open", put(lambda: p.written(self.now, "o")))
        for producer in p.open:
            for marker, word in ((COMMIT, "commits"), (ABORT, "aborts")):
                end = put(lambda who=producer, m=marker: p.ended(self.now, who, m))
                yield Event(f"{n}: transaction {producer} {word}", "end", end)
        if p.start < p.stable:
            yield Event(f"{n}: log start {p.start + 1}", "retain", put(lambda: replace(p, start=p.start + 1)))
        yield Event(f"{n}: recreated", "recreate", lambda: self._recreate(p))
        if p.end > p.start + 1 and not p.open:
            yield Event(f"{n}: truncated at {p.end - 1}", "trunc", lambda: self._truncate(p))

    def _arrive(self, path: str, data: bytes) -> None:
        self.delayed.remove((path, data))
        if path not in self.files:
            self.write(path, data)

    def _lose(self, count: int) -> None:
        for path in sorted(p for p in self.files if p.startswith(paths.log_folder(FEED)))[: -count - 1 : -1]:
            self.write(path, None)

    def _remove_lake(self) -> None:
        self._lose(len(self.files))
        for path in sorted(self.files):
            self.write(path, None)

    def _tick(self) -> None:
        self.now += HOUR

    def _add_partition(self) -> None:
        new = Partition(len(self.partitions), self.partitions[0].topic_id)
        self.partitions.append(new.written(self.now))

    def _recreate(self, p: Partition) -> None:
        """The whole topic, with a record less."""
        fresh = f"id-{int(p.topic_id[3:]) + 1}"
        self.past += self.partitions
        self.partitions = [_filled(Partition(q.number, fresh), max(q.end - 1, 0), self.now) for q in self.partitions]

    def _truncate(self, p: Partition) -> None:
        """An unclean election: the last record is another."""
        self.past.append(p)
        cut = p.end - 1
        new = replace(p, version=p.version + 1, records=p.records[:cut], ends=(*p.ends, cut))
        self.partitions[p.number] = new.written(self.now)

    def _abort(self) -> None:
        self.group.pending = None

    def _put_by_hand(self, to: int) -> None:
        self.put_foreign(TopicPartition(TOPIC, 0), to)

    def put_foreign(self, tp: TopicPartition, to: int) -> None:
        self.group.offsets[tp] = CommittedOffset(to)
        self.group.foreign[tp] = self.partitions[tp.partition].topic_id

    def release(self) -> bool:
        """Time passes: the transaction that nobody ends is over. Whether there was one."""
        had = self.group.pending is not None
        self._abort()
        return had

    def logs(self, key: Key) -> list[Partition]:
        """Every log that this topic id ever had in the partition."""
        return [p for p in [*self.past, *self.partitions] if p.tp == key.tp and p.topic_id == key.topic_id]

    def now_of(self, tp: TopicPartition) -> Partition | None:
        return next((p for p in self.partitions if p.tp == tp), None)


def _filled(p: Partition, records: int, stamp: int) -> Partition:
    for _ in range(records):
        p = p.written(stamp)
    return p


def _short(path: str) -> str:
    return path.replace(f"_sluice/{FEED}/", "")


# -- Kafka


class Kafka(MemoryCluster):
    """`ports.Cluster` over the world's partitions."""

    def __init__(self, world: World) -> None:
        super().__init__(id=CLUSTER)
        self._world = world

    def topics(self) -> Mapping[str, str]:
        self._world.stage.point("ask for topics")
        return self._saw({TOPIC: self._world.partitions[0].topic_id})

    def partitions(self, topics: Iterable[str], isolation: Isolation) -> tuple[PartitionState, ...]:
        self._world.stage.point("ask for partitions")
        return self._saw(tuple(p.state() for p in self._world.partitions))

    def offsets_at(self, times: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, OffsetAtTime | None]:
        self._world.stage.point("look up times")
        return self._saw(super().offsets_at(times))

    def first(self, tp: TopicPartition, time: int) -> OffsetAtTime | None:
        p = self._world.now_of(tp)
        found = ((at, r) for at, r in enumerate(p.records) if at >= p.start and r.marker is None) if p else ()
        return next((OffsetAtTime(at, r.stamp) for at, r in found if r.stamp >= time), None)

    def epoch_ends(self, epochs: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        if epochs:
            self._world.stage.point("ask for epochs")
        held = {tp: p.epoch_end(e) for tp, e in epochs.items() if (p := self._world.now_of(tp))}
        return self._saw(held)

    def _saw(self, answer: Any) -> Any:
        self._world.stage.saw(answer)
        return answer


class Logs:
    """`ports.Fetcher`: each offset range in one answer, checked before it and after."""

    def __init__(self, world: World) -> None:
        self._world = world

    def stream(self, ranges: Sequence[OffsetRange], limits: FetchLimits) -> Iterator[Fetched | FetchFailed]:
        for index, s in enumerate(ranges):
            self._world.stage.point(f"fetch {s}")
            p = self._world.now_of(s.tp)
            if (wrong := self._wrong(s, p)) is not None or p is None:
                self._world.stage.saw(type(wrong).__name__)
                yield FetchFailed(index, wrong or KafkaUnavailable("no such partition"))
                continue
            source = built(p.records)
            data, aborted = source.fetch(s.start)
            self._world.stage.saw(data)
            self._world.stage.point(f"is {s} still of that topic id?")
            after = self._world.now_of(s.tp)
            if after is None or after.topic_id != s.key.topic_id:
                self._world.stage.saw("other")
                yield FetchFailed(index, IncarnationChanged("another topic id"))
                continue
            yield Fetched(index, data, tuple(aborted), source.end, True)

    def _wrong(self, s: OffsetRange, p: Partition | None) -> Any:
        if p is None or p.topic_id != s.key.topic_id:
            return IncarnationChanged("another topic id")
        if p.epoch_end(s.leader_epoch) < s.end:
            return LogTruncated("the log ends below the offset range")
        if s.start < p.start:
            return OffsetsLost("below the log start")
        return KafkaUnavailable("the end is not stable") if p.stable < s.end else None

    def close(self) -> None: ...


class Marked(RawFormat):
    """Raw rows; a record whose value says that it is bad goes into quarantine."""

    def convert(self, s: OffsetRange, chunk: pa.RecordBatch) -> Iterator[Formatted]:
        for rows in super().convert(s, chunk):
            bad = np.array([(v or b"").startswith(b"bad ") for v in rows.landed.column(1).to_pylist()])
            good, refused = (rows.landed.take(fixed_width(pa.int64(), np.flatnonzero(m))) for m in (~bad, bad))
            yield Formatted(good, _refused(refused) if refused.num_rows else None)


def _refused(rows: pa.RecordBatch) -> pa.RecordBatch:
    n = rows.num_rows
    said = {"stage": "decode", "reason": "bad", "expectation": None, "field": None, "detail": "bad"}
    few = [
        pa.DictionaryArray.from_arrays(pa.array([0 if v else None] * n, pa.int16()), text_array([v or ""]))
        for v in said.values()
    ]
    return pa.RecordBatch.from_arrays([*rows.columns, *few, pa.array([None] * n, pa.int32())], schema=REFUSED)


class Engine(MemoryEngine):
    """`ports.Engine`: the code that executors run, in the driver."""

    def format(self, job: Job) -> Marked:
        return Marked()


# -- the group


class Group:
    """`ports.Group`."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name

    def fetch_committed(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, CommittedOffset | None]:
        g = self._world.group
        self._world.stage.point("read committed offsets", lambda: g.pending is None)
        if g.pending is not None:
            raise KafkaUnavailable("a transaction is open")
        held = {tp: g.offsets.get(tp) for tp in partitions}
        self._world.stage.saw(held)
        return held

    def members(self) -> tuple[Member, ...]:
        self._world.stage.point("describe the group")
        found = tuple(Member(m, m, "host") for m in sorted(self._world.group.members))
        self._world.stage.saw(found)
        return found

    def own(self, partitions: Callable[[], Iterable[TopicPartition]], lost: Callable[[], None]) -> None: ...

    @contextmanager
    def join(self, topics: Sequence[str], transactional_id: str | None) -> Iterator[Membership]:
        """Others of ours are waited for as long as a session lasts: one that is at work stays, the dead are dropped."""
        g, stage = self._world.group, self._world.stage
        if not self._world.stage.point("describe the group", answers=("kick",)):
            for member in sorted(g.members):
                if member in self._world.dead:
                    g.drop(member)
            if g.members:
                stage.saw("held")
                raise GroupHeld("held by " + ", ".join(g.members))
        else:
            g.members.clear()
        stage.point("join the group")
        others = sorted(m for m in g.members if m.startswith("ext"))
        for member in sorted(set(g.members) - set(others)):
            g.drop(member)  # it never joins again
        g.generation += 1
        if others:
            stage.saw("held")
            raise GroupHeld("held by " + ", ".join(others))
        g.members[self._name] = g.generation
        stage.saw(g.generation)
        try:
            yield Membership(self._world, self._name, g.generation)
        finally:
            self._leave()

    def _leave(self) -> None:
        self._world.stage.point("leave the group")
        self._world.group.drop(self._name)


class Membership:
    def __init__(self, world: World, name: str, generation: int) -> None:
        self._world, self._name, self._generation, self._epoch = world, name, generation, -1

    def init_transactions(self) -> None:
        self._world.stage.point("init transactions")
        self._world.group.pending = None
        self._world.group.epoch += 1
        self._epoch = self._world.group.epoch
        self._world.stage.saw(self._epoch)

    def fetch_committed(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, CommittedOffset | None]:
        return Group(self._world, self._name).fetch_committed(partitions)

    def partitions_of(self, topic: str) -> int:
        return 1

    def commit_transaction(
        self, offsets: Mapping[TopicPartition, CommittedOffset], topic: str = "", letters: Iterable[DeadLetter] = ()
    ) -> None:
        g = self._world.group
        try:
            sent = tuple(letter.source for letter in letters)
            self._world.stage.point(f"send offsets {_offsets(offsets)} and {len(sent)} letters")
            self._check_epoch()
            self._check_generation()
            g.pending = Pending(self._epoch, dict(offsets), sent)
        except Exception:
            if g.pending is not None and g.pending.epoch == self._epoch:
                g.pending = None
            raise
        answer = self._world.stage.point("end the transaction", answers=("lost", "lost, and it never arrived"))
        self._check_epoch()
        if g.pending is None:
            raise CommitFenced("the coordinator aborted the transaction")
        pending, g.pending = g.pending, None
        if not answer.endswith("arrived"):
            self._world_commits(pending.offsets, pending.letters)
        if answer:
            raise Unknown("no answer")

    def commit_plain(self, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
        answer = self._world.stage.point(f"commit {_offsets(offsets)}", answers=("lost", "lost, and it never arrived"))
        self._check_generation()
        if not answer.endswith("arrived"):
            self._world_commits(offsets, ())
        if answer:
            raise Unknown("no answer")

    def _check_epoch(self) -> None:
        if self._epoch != self._world.group.epoch:
            self._world.stage.saw("fenced")
            raise CommitFenced("fenced by a newer producer")

    def _check_generation(self) -> None:
        g = self._world.group
        if g.members.get(self._name) != self._generation or g.generation != self._generation:
            self._world.stage.saw("generation")
            raise CommitFenced("illegal generation")

    def _world_commits(self, offsets: Mapping[TopicPartition, CommittedOffset], letters: Sequence[str]) -> None:
        g = self._world.group
        before = dict(g.offsets)
        g.offsets.update(offsets)
        g.letters += letters
        self._world.changed("commit", before=before, offsets=offsets, letters=letters)
        for tp in offsets:
            g.foreign.pop(tp, None)


def _offsets(offsets: Mapping[TopicPartition, CommittedOffset]) -> str:
    return ", ".join(f"{tp.partition}:{o.offset}" for tp, o in offsets.items())


class Liveness(MemoryLiveness):
    """`ports.Liveness`: who has ended, or crashed, is dead; who is at work may be taken for dead wrongly."""

    def __init__(self, world: World) -> None:
        super().__init__(world.dead)
        self._stage = world.stage

    def life(self, token: str, watch: bool) -> Life:
        answer = self._stage.point(f"is {token} dead?", answers=("wrongdead",))
        life = Life.DEAD if answer else super().life(token, watch)
        self._stage.saw(life is Life.DEAD)
        return life


# -- the lake


class Lake(MemoryLake):
    """`ports.Lake` over the world's files. Entries of the ledger never change: reading one that stands is no event."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.files, self.copies = world.files, world.slow_copies
        self._world, self._stage = world, world.stage
        self.before = {
            "put": lambda path: self._point(f"write {_short(path)}"),
            "get": self._before_get,
            "list": lambda prefix: self._point(f"list {_short(prefix)}"),
            "size": lambda path: self._point(f"is {_short(path)} there?"),
            "create": lambda path: self._point(f"finish {_short(path)}"),
            "open": self._before_open,
            "show": lambda target: self._point(f"show {target}"),
            "remove": lambda path: self._point(f"remove {_short(path)}"),
        }

    def write(self, path: str, data: bytes | None) -> None:
        self._world.write(path, data)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        answers = ("lost", "lost, and it is late") if paths.log_number(path) is not None else ()
        answer = self._stage.point(f"put {_short(path)}: {_told(data)}", answers=answers)
        if path in self.files:
            self._stage.saw("taken")
            return False
        if answer.endswith("late"):
            self._world.delayed.append((path, data))
        else:
            self.write(path, data)
        if answer:
            raise Unknown(f"no answer for {path}")
        return True

    def list(self, prefix: str, after: str = "") -> Iterator[str]:
        found = list(super().list(prefix, after))
        self._stage.saw(found)
        return iter(found)

    def size(self, path: str) -> int | None:
        found = super().size(path)
        self._stage.saw(found)
        return found

    def show(self, source: str, target: str) -> None:
        self.before["show"](target)
        data = self.files.get(source)
        self._stage.saw(data is not None)
        if data is None:
            raise FileNotFoundError(source)
        if self._world.slow_copies:
            self._point(f"the copy to {target} ends")
        self.write(target, data)

    def _before_get(self, path: str) -> None:
        if not (path in self.files and "/log/" in path):
            self._point(f"read {_short(path)}")
        self._stage.saw(self.files.get(path, b""))

    def _before_open(self, path: str) -> None:
        self._point(f"open {_short(path)}")
        self._stage.saw(self.files.get(path, b""))

    def _point(self, label: str) -> None:
        self._stage.point(label)


def _told(data: bytes) -> str:
    """An entry in a line."""
    try:
        entry = json.loads(data)
    except ValueError:
        return hashlib.sha256(data).hexdigest()[:8]
    kind = entry.get("kind", "")
    if kind == "plan":
        ranges = [f"{s['partition']}:{s['start']}-{s['end']}" for t in entry["plan"]["tasks"] for s in t["slices"]]
        more = f" replacing {len(entry['plan']['replaces'])} parts" if entry["plan"]["replaces"] else ""
        return f"plan {entry['plan']['request']['kind']} {' '.join(ranges)}{more}"
    if kind == "publish":
        ranges = [f"{r['slice']['partition']}:{r['slice']['start']}-{r['slice']['end']}" for r in entry["receipts"]]
        return f"publish of batch {entry['batch']} by {entry['token']}: {' '.join(ranges)}"
    if kind in ("own", "abandon"):
        return f"{kind} batch {entry['batch']}"
    if kind in ("loss", "skip", "retire"):
        return f"{kind} " + " ".join(f"{r['key'][1]}:{r['range'][0]}-{r['range'][1]}" for r in entry["ranges"])
    if kind in ("intent", "commit", "moved"):
        return f"{kind} " + " ".join(f"{o['key'][1]}:{o['offset']}" for o in entry["offsets"])
    if kind == "origin":
        return "origin " + " ".join(f"{i['key'][1]}:{i['offset']}" for i in entry["items"])
    if kind == "boundary":
        return "boundary " + " ".join(
            f"{i['key'][1]}:{(time - START) // HOUR}h={offset}"
            for i in entry["items"]
            for time, offset in zip(i["times"], i["offsets"], strict=True)
        )
    if kind == "accept":
        return f"accept {entry['event']} " + " ".join(i["enters"]["key"][2] for i in entry["items"])
    return str(kind or "manifest")
