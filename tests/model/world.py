"""The environment of a feed in memory: logs, a group coordinator, a lake, and their own events.

Each port calls the stage before an effect, so that a run may stop there for any time, or die. Answers get lost only
where the port's contract allows it. `pipelines/ports.py` defines the ports, docs/developers/design their semantics.
"""

from __future__ import annotations

import copy
import hashlib
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
    Configs,
    FetchLimits,
    Isolation,
    Key,
    OffsetAtTime,
    PartitionState,
    TopicConfig,
    TopicPartition,
)
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Life
from sluice.pipelines.ports import DeadLetter, Fetched, FetchFailed, Job, Member, Ports
from sluice.pipelines.records.rows.row_format import REFUSED, Format, Formatted
from sluice.pipelines.schema.arrays import fixed_width, text_array
from sluice.testing.cluster import MemoryCluster
from sluice.testing.engine import MemoryEngine, MemoryLiveness
from sluice.testing.lake import Files, MemoryLake
from sluice.testing.logs import ABORT, COMMIT, Log, LogBatch, LogRecord, log
from tests.checker.ledger import parse_entry
from tests.model.scheduler import Event, Stage

HOUR = 3_600_000
START = 16 * HOUR
LAG = 3 * HOUR
"""The delay between the records of a world's initial transactions and their markers."""
TOPIC, FEED, CLUSTER = "orders", "orders", "cluster-1"
DLQ = "orders.dlq"
KIND = "kind"
"""The header that chooses an output in feeds that have any, by the record's offset."""
FAR = START + 10 * 365 * 24 * HOUR


class LogEntry(NamedTuple):
    """One offset of a log: a record, or a marker. `producer` is −1 outside of transactions. `compacted`: no batch has
    the offset any more. `arrived` is known in worlds with skewed producers.
    """

    stamp: int
    value: bytes
    producer: int = -1
    marker: int | None = None
    compacted: bool = False
    arrived: int | None = None


def choose_kind(offset: int) -> str:
    return ("a", "b", "c")[offset % 3]


@lru_cache(4096)
def build_log(records: tuple[LogEntry, ...]) -> Log:
    """Return the log in the form of a broker."""
    batches, gap = list[LogBatch](), 0
    for at, r in enumerate(records):
        if r.compacted:
            gap += 1
            continue
        if r.marker is not None:
            batches.append(LogBatch(producer=r.producer, marker=r.marker, gap=gap))
        else:
            record = LogRecord(b"k", r.value, r.stamp, ((KIND, choose_kind(at).encode()),))
            batches.append(LogBatch((record,), producer=r.producer, transactional=r.producer >= 0, gap=gap))
        gap = 0
    return log(*batches)


@lru_cache(4096)
def list_committed(records: tuple[LogEntry, ...], start: int, end: int) -> tuple[tuple[int, bytes], ...]:
    """Return offsets and values of the committed records."""
    return tuple((r["offset"], r["value"]) for r in build_log(records).visible(start, end))


@dataclass(frozen=True)
class Partition:
    """One partition. `version` counts truncations and restored copies of its log, `ends` has the end offset of each
    leader epoch: a copy begins none."""

    number: int
    topic_id: str = "id-1"
    version: int = 0
    start: int = 0
    records: tuple[LogEntry, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(TOPIC, self.number)

    @property
    def end(self) -> int:
        return len(self.records)

    @property
    def open(self) -> dict[int, int]:
        """Return the open transactions: producer and first offset."""
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

    def make_value(self, bad: bool = False) -> bytes:
        return f"{'bad ' if bad else ''}{self.topic_id}.{self.version}:{self.number}:{self.end}".encode()

    def with_record(self, stamp: int, kind: str = "c") -> Partition:
        """Return the partition with one more record: committed, bad (for the quarantine), or of an open transaction."""
        r = LogEntry(stamp, self.make_value(kind == "b"), 100 + self.end if kind == "o" else -1)
        return replace(self, records=(*self.records, r))

    def with_transaction_end(self, stamp: int, producer: int, marker: int) -> Partition:
        return replace(self, records=(*self.records, LogEntry(stamp, b"", producer, marker)))

    def get_epoch_end(self, epoch: int) -> int:
        return self.ends[epoch] if epoch < len(self.ends) else self.end

    def state(self) -> PartitionState:
        epoch = len(self.ends)
        return PartitionState(TOPIC, self.number, self.topic_id, 1, epoch, self.start, self.stable, self.end)


@dataclass
class Pending:
    """An open transaction of ours."""

    epoch: int
    offsets: dict[TopicPartition, CommittedOffset]
    letters: tuple[str, ...]


@dataclass
class Coordinator:
    """The coordinator of the group and of its transactions."""

    offsets: dict[TopicPartition, CommittedOffset] = field(default_factory=dict)
    pending: Pending | None = None
    epoch: int = 0
    generation: int = 0
    members: dict[str, int] = field(default_factory=dict)
    letters: list[str] = field(default_factory=list)
    """The sources of the visible records in the dead-letter topic."""
    foreign: dict[TopicPartition, str] = field(default_factory=dict)
    """The topic id under which others put the current offset, by partition."""

    def hash_state(self) -> int:
        pending = self.pending
        transaction = (pending.epoch, tuple(pending.offsets.items()), pending.letters) if pending else None
        members = tuple(sorted(self.members.items()))
        offsets = tuple(sorted(self.offsets.items()))
        return hash((offsets, transaction, self.epoch, self.generation, members, tuple(self.letters)))

    def drop(self, member: str) -> None:
        if self.members.pop(member, None) is not None:
            self.generation += 1


class World:
    """The environment of all runs. `watch` checks each change; `dead` has the names of dead runs."""

    def __init__(self, feed: Feed, logs: Sequence[str] = ("cc",), stamps: Sequence[Sequence[Any]] = ()) -> None:
        self.feed, self.stage, self.now = feed, Stage(), START + HOUR
        self.partitions = [self._build_partition(n, kinds, stamps[n] if stamps else ()) for n, kinds in enumerate(logs)]
        self.past: list[Partition] = []
        self.group = Coordinator()
        self.files = Files()
        self.content = 0
        self.delayed: list[tuple[str, bytes]] = []
        """Writes of entries whose client gave up, and that may still arrive."""
        self.dead: set[str] = set()
        self.slow_copies = False
        self.watch: Any = None
        self.broken = ""

    def _build_partition(self, number: int, kinds: str, stamps: Sequence[Any]) -> Partition:
        p = Partition(number)
        for at, kind in enumerate(kinds):
            hour = stamps[at] if stamps else 0
            arrived, ahead = hour if isinstance(hour, tuple) else (hour, 0)
            stamp = START + (arrived + ahead) * HOUR
            if kind == "t":
                p = p.with_record(stamp, "o").with_transaction_end(stamp + LAG, 100 + p.end, COMMIT)
            elif kind == "a":
                p = p.with_record(stamp, "o").with_transaction_end(stamp + LAG, 100 + p.end, ABORT)
            else:
                p = p.with_record(stamp, kind)
            if isinstance(hour, tuple):
                p = replace(p, records=(*p.records[:-1], p.records[-1]._replace(arrived=START + arrived * HOUR)))
        return p

    def clone(self) -> World:
        """Return a copy of the world, with its own stage and no watch."""
        out = copy.copy(self)
        out.stage, out.watch = Stage(), None
        out.partitions, out.past, out.files = list(self.partitions), list(self.past), Files(self.files)
        out.delayed, out.dead, out.group = list(self.delayed), set(self.dead), copy.deepcopy(self.group)
        return out

    def compute_fingerprint(self) -> int:
        log = (tuple(self.partitions), self.now, tuple(self.delayed), tuple(sorted(self.dead)))
        return hash((log, self.content, self.group.hash_state()))

    def notify_watch(self, what: str, **how: Any) -> None:
        if self.watch is not None and not self.broken:
            self.broken = self.watch.check_change(what, **how) or ""

    # -- the ports of one run

    def open_ports(self, name: str) -> Ports:
        lake = Lake(self)
        engine, liveness = Engine(lake, lambda: Logs(self), self.feed.landing), Liveness(self)
        cluster, group = Kafka(self), Group(self, name)
        return Ports(cluster, group, lake, engine, liveness, lambda: self.now, None, parallelism=1)

    def open_ledger(self, name: str) -> Ledger:
        return Ledger(Lake(self), FEED, lambda: self.now, name, CLUSTER)

    # -- files

    def write(self, path: str, data: bytes | None) -> None:
        """Change a file of the lake; every change goes through here. None: remove."""
        before = self.files.get(path)
        if before is not None:
            self.content ^= hash((path, before))
        if data is not None:
            self.files[path] = data
            self.content ^= hash((path, data))
        elif before is not None:
            del self.files[path]
        if before != data:
            self.notify_watch("file", path=path)

    # -- events

    def list_events(self) -> Iterator[Event]:
        for path, data in self.delayed:
            if path not in self.files:
                yield Event(
                    f"delayed write of {_trim_path(path)} arrives", "arrive", lambda p=path, d=data: self._deliver(p, d)
                )
        for p in self.partitions:
            yield from self._list_log_events(p)
        yield Event("an hour passes", "tick", self._advance_clock)
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

    def _list_log_events(self, p: Partition) -> Iterator[Event]:
        n = p.number

        def put(make: Callable[[], Partition]) -> Callable[[], None]:
            def apply() -> None:
                self.partitions[n] = make()

            return apply

        yield Event(f"{n}: a record", "append", put(lambda: p.with_record(self.now)))
        yield Event(f"{n}: a bad record", "bad", put(lambda: p.with_record(self.now, "b")))
        yield Event(f"{n}: a late record", "late", put(lambda: p.with_record(START)))
        yield Event(f"{n}: a record from the future", "future", put(lambda: p.with_record(FAR)))
        yield Event(f"{n}: a transaction begins", "open", put(lambda: p.with_record(self.now, "o")))
        for producer in p.open:
            for marker, word in ((COMMIT, "commits"), (ABORT, "aborts")):
                end = put(lambda who=producer, m=marker: p.with_transaction_end(self.now, who, m))
                yield Event(f"{n}: transaction {producer} {word}", "end", end)
        for at, r in enumerate(p.records[: max(p.stable - 1, 0)]):
            if r.producer < 0 and not r.compacted:
                yield Event(f"{n}: offset {at} is compacted away", "clean", lambda at=at: self._clean(p, at))
        if p.start < p.stable:
            yield Event(f"{n}: log start {p.start + 1}", "retain", put(lambda: replace(p, start=p.start + 1)))
        yield Event(f"{n}: recreated", "recreate", lambda: self._recreate(p))
        if p.end > p.start + 1 and not p.open:
            yield Event(f"{n}: truncated at {p.end - 1}", "trunc", lambda: self._truncate(p))
            yield Event(f"{n}: restored at {p.end - 1}", "restore", lambda: self._restore(p))

    def _deliver(self, path: str, data: bytes) -> None:
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

    def _advance_clock(self) -> None:
        self.now += HOUR

    def _add_partition(self) -> None:
        new = Partition(len(self.partitions), self.partitions[0].topic_id)
        self.partitions.append(new.with_record(self.now))

    def _recreate(self, p: Partition) -> None:
        """Recreate the whole topic, with one record less in each partition."""
        fresh = f"id-{int(p.topic_id[3:]) + 1}"
        self.past += self.partitions
        self.partitions = [_fill(Partition(q.number, fresh), max(q.end - 1, 0), self.now) for q in self.partitions]

    def _clean(self, p: Partition, at: int) -> None:
        """Remove a record below the newest one, as log compaction does."""
        self.past.append(p)
        records = (*p.records[:at], p.records[at]._replace(compacted=True), *p.records[at + 1 :])
        self.partitions[p.number] = replace(p, records=records)

    def _truncate(self, p: Partition) -> None:
        """Replace the last record, as an unclean leader election does."""
        self.past.append(p)
        cut = p.end - 1
        new = replace(p, version=p.version + 1, records=p.records[:cut], ends=(*p.ends, cut))
        self.partitions[p.number] = new.with_record(self.now)

    def _restore(self, p: Partition) -> None:
        """Take back the last record, as the copy of a broker's volume does, and refill the log beyond it."""
        self.past.append(p)
        new = replace(p, version=p.version + 1, records=p.records[: p.end - 1])
        self.partitions[p.number] = _fill(new, 2, self.now)

    def _abort(self) -> None:
        self.group.pending = None

    def _put_by_hand(self, to: int) -> None:
        self.put_foreign(TopicPartition(TOPIC, 0), to)

    def put_foreign(self, tp: TopicPartition, to: int) -> None:
        self.group.offsets[tp] = CommittedOffset(to)
        self.group.foreign[tp] = self.partitions[tp.partition].topic_id

    def release(self) -> bool:
        """Abort the open transaction, as the coordinator does in time. Return True if there was one."""
        had = self.group.pending is not None
        self._abort()
        return had

    def list_logs(self, key: Key) -> list[Partition]:
        """Return every log that the partition ever had under this topic id."""
        return [p for p in [*self.past, *self.partitions] if p.tp == key.tp and p.topic_id == key.topic_id]

    def get_partition(self, tp: TopicPartition) -> Partition | None:
        return next((p for p in self.partitions if p.tp == tp), None)


def _fill(p: Partition, records: int, stamp: int) -> Partition:
    for _ in range(records):
        p = p.with_record(stamp)
    return p


def _trim_path(path: str) -> str:
    return path.replace(f"_sluice/{FEED}/", "")


# -- Kafka


class Kafka(MemoryCluster):
    """`ports.Cluster` with the world's partitions."""

    def __init__(self, world: World) -> None:
        super().__init__(id=CLUSTER)
        self._world = world

    def topics(self) -> Mapping[str, str]:
        self._world.stage.point("ask for topics")
        return self._record({TOPIC: self._world.partitions[0].topic_id})

    def partitions(self, topics: Iterable[str], isolation: Isolation) -> tuple[PartitionState, ...]:
        self._world.stage.point("ask for partitions")
        return self._record(tuple(p.state() for p in self._world.partitions))

    def offsets_at(
        self, times: Mapping[TopicPartition, int], max_skew: int | None = None
    ) -> Mapping[TopicPartition, OffsetAtTime | None]:
        self._world.stage.point("look up times")
        return self._record(super().offsets_at(times, max_skew))

    def list_stamps(self, tp: TopicPartition) -> Iterable[tuple[int, int]]:
        p = self._world.get_partition(tp)
        return [(o, r.stamp) for o, r in enumerate(p.records) if o >= p.start and r.marker is None] if p else []

    def first(self, tp: TopicPartition, time: int) -> OffsetAtTime | None:
        p = self._world.get_partition(tp)
        entries = enumerate(p.records) if p else ()
        records = ((at, r) for at, r in entries if p and at >= p.start and r.marker is None and not r.compacted)
        return next((OffsetAtTime(at, r.stamp) for at, r in records if r.stamp >= time), None)

    def log(self, tp: TopicPartition) -> Log | None:
        return build_log(p.records) if (p := self._world.get_partition(tp)) else None

    def epoch_ends(self, epochs: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        if epochs:
            self._world.stage.point("ask for epochs")
        ends = {tp: p.get_epoch_end(e) for tp, e in epochs.items() if (p := self._world.get_partition(tp))}
        return self._record(ends)

    def configs(self, topics: Iterable[str]) -> Configs:
        """Return the policy: deletion, unless a record was compacted away."""
        logs = [*self._world.past, *self._world.partitions]
        compacted = any(r.compacted for p in logs for r in p.records)
        return Configs({TOPIC: TopicConfig(compacts=compacted)})

    def _record(self, answer: Any) -> Any:
        self._world.stage.record(answer)
        return answer


class Logs:
    """`ports.Fetcher`: each offset range in one answer; the partition is checked before and after."""

    def __init__(self, world: World) -> None:
        self._world = world

    def stream(self, ranges: Sequence[OffsetRange], limits: FetchLimits) -> Iterator[Fetched | FetchFailed]:
        for index, s in enumerate(ranges):
            self._world.stage.point(f"fetch {s}")
            p = self._world.get_partition(s.tp)
            if (wrong := self._find_error(s, p)) is not None or p is None:
                self._world.stage.record(type(wrong).__name__)
                yield FetchFailed(index, wrong or KafkaUnavailable("no such partition"))
                continue
            source = build_log(p.records)
            data, aborted = source.fetch(s.start)
            self._world.stage.record(data)
            self._world.stage.point(f"is {s} still of that topic id?")
            after = self._world.get_partition(s.tp)
            if after is None or after.topic_id != s.key.topic_id:
                self._world.stage.record("other")
                yield FetchFailed(index, IncarnationChanged("another topic id"))
                continue
            yield Fetched(index, data, tuple(aborted), source.end, True)

    def _find_error(self, s: OffsetRange, p: Partition | None) -> Any:
        if p is None or p.topic_id != s.key.topic_id:
            return IncarnationChanged("another topic id")
        if p.get_epoch_end(s.leader_epoch) < s.end:
            return LogTruncated("the log ends below the offset range")
        if s.start < p.start:
            return OffsetsLost("below the log start")
        return KafkaUnavailable("the end is not stable") if p.stable < s.end else None

    def close(self) -> None: ...


class Marked:
    """The rows of raw formats; a record whose value begins with `bad` goes into the quarantine of its output."""

    def __init__(self, behind: Format) -> None:
        self.schema, self.contract, self._behind = behind.schema, behind.contract, behind

    def convert(self, s: OffsetRange, chunk: pa.RecordBatch) -> Iterator[Formatted]:
        for rows in self._behind.convert(s, chunk):
            bad = np.array([(v or b"").startswith(b"bad ") for v in rows.landed.column(1).to_pylist()], np.bool_)
            good, refused = (rows.landed.take(fixed_width(pa.int64(), np.flatnonzero(m))) for m in (~bad, bad))
            yield replace(rows, landed=good, quarantined=_build_quarantine(refused) if refused.num_rows else None)


def _build_quarantine(rows: pa.RecordBatch) -> pa.RecordBatch:
    n = rows.num_rows
    reasons = {"stage": "decode", "reason": "bad", "expectation": None, "field": None, "detail": "bad"}
    few = [
        pa.DictionaryArray.from_arrays(pa.array([0 if v else None] * n, pa.int16()), text_array([v or ""]))
        for v in reasons.values()
    ]
    return pa.RecordBatch.from_arrays([*rows.columns, *few, pa.array([None] * n, pa.int32())], schema=REFUSED)


class Engine(MemoryEngine):
    """`ports.Engine`: runs the executors' code in the driver."""

    def format(self, job: Job) -> Marked:
        return Marked(job.shape.format())


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
        committed = {tp: g.offsets.get(tp) for tp in partitions}
        self._world.stage.record(committed)
        return committed

    def members(self) -> tuple[Member, ...]:
        self._world.stage.point("describe the group")
        members = tuple(Member(m, m, "host") for m in sorted(self._world.group.members))
        self._world.stage.record(members)
        return members

    def check_alone(self) -> None:
        if self.members():
            raise GroupHeld("held")

    def own(self, partitions: Callable[[], Iterable[TopicPartition]], lost: Callable[[], None]) -> None: ...

    @contextmanager
    def join(self, topics: Sequence[str], transactional_id: str | None) -> Iterator[Membership]:
        """Join the group. Dead members of ours are removed, as after a session timeout; live ones raise GroupHeld."""
        g, stage = self._world.group, self._world.stage
        if not self._world.stage.point("describe the group", answers=("kick",)):
            for member in sorted(g.members):
                if member in self._world.dead:
                    g.drop(member)
            if g.members:
                stage.record("held")
                raise GroupHeld("held by " + ", ".join(g.members))
        else:
            g.members.clear()
        stage.point("join the group")
        others = sorted(m for m in g.members if m.startswith("ext"))
        for member in sorted(set(g.members) - set(others)):
            g.drop(member)  # it never rejoins
        g.generation += 1
        if others:
            stage.record("held")
            raise GroupHeld("held by " + ", ".join(others))
        g.members[self._name] = g.generation
        stage.record(g.generation)
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
        self._world.stage.record(self._epoch)

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
            self._world.stage.point(f"send offsets {_format_offsets(offsets)} and {len(sent)} letters")
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
            self._apply_commit(pending.offsets, pending.letters)
        if answer:
            raise Unknown("no answer")

    def commit_plain(self, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
        answer = self._world.stage.point(
            f"commit {_format_offsets(offsets)}", answers=("lost", "lost, and it never arrived")
        )
        self._check_generation()
        if not answer.endswith("arrived"):
            self._apply_commit(offsets, ())
        if answer:
            raise Unknown("no answer")

    def _check_epoch(self) -> None:
        if self._epoch != self._world.group.epoch:
            self._world.stage.record("fenced")
            raise CommitFenced("fenced by a newer producer")

    def _check_generation(self) -> None:
        g = self._world.group
        if g.members.get(self._name) != self._generation or g.generation != self._generation:
            self._world.stage.record("generation")
            raise CommitFenced("illegal generation")

    def _apply_commit(self, offsets: Mapping[TopicPartition, CommittedOffset], letters: Sequence[str]) -> None:
        g = self._world.group
        before = dict(g.offsets)
        g.offsets.update(offsets)
        g.letters += letters
        self._world.notify_watch("commit", before=before, offsets=offsets, letters=letters)
        for tp in offsets:
            g.foreign.pop(tp, None)


def _format_offsets(offsets: Mapping[TopicPartition, CommittedOffset]) -> str:
    return ", ".join(f"{tp.partition}:{o.offset}" for tp, o in offsets.items())


class Liveness(MemoryLiveness):
    """`ports.Liveness`: ended and crashed runs are dead; a running one may wrongly be taken for dead."""

    def __init__(self, world: World) -> None:
        super().__init__(world.dead)
        self._stage = world.stage

    def life(self, token: str, watch: bool) -> Life:
        answer = self._stage.point(f"is {token} dead?", answers=("wrongdead",))
        life = Life.DEAD if answer else super().life(token, watch)
        self._stage.record(life is Life.DEAD)
        return life


# -- the lake


class Lake(MemoryLake):
    """`ports.Lake` with the world's files. Ledger entries never change: reading an existing one is no event."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.files, self.copies = world.files, world.slow_copies
        self._world, self._stage = world, world.stage
        self.before = {
            "put": lambda path: self._point(f"write {_trim_path(path)}"),
            "get": self._observe_get,
            "list": lambda prefix: self._point(f"list {_trim_path(prefix)}"),
            "size": lambda path: self._point(f"is {_trim_path(path)} there?"),
            "create": lambda path: self._point(f"finish {_trim_path(path)}"),
            "open": self._observe_open,
            "show": lambda target: self._point(f"show {target}"),
            "remove": lambda path: self._point(f"remove {_trim_path(path)}"),
        }

    def write(self, path: str, data: bytes | None) -> None:
        self._world.write(path, data)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        answers = ("lost", "lost, and it is late") if paths.log_number(path) is not None else ()
        answer = self._stage.point(f"put {_trim_path(path)}: {_describe_entry(data)}", answers=answers)
        if path in self.files:
            self._stage.record("taken")
            return False
        if answer.endswith("late"):
            self._world.delayed.append((path, data))
        else:
            self.write(path, data)
        if answer:
            raise Unknown(f"no answer for {path}")
        return True

    def list(self, prefix: str, after: str = "") -> Iterator[str]:
        files = list(super().list(prefix, after))
        self._stage.record(files)
        return iter(files)

    def size(self, path: str) -> int | None:
        size = super().size(path)
        self._stage.record(size)
        return size

    def show(self, source: str, target: str) -> None:
        self.before["show"](target)
        data = self.files.get(source)
        self._stage.record(data is not None)
        if data is None:
            raise FileNotFoundError(source)
        if self._world.slow_copies:
            self._point(f"the copy to {target} ends")
        self.write(target, data)

    def _observe_get(self, path: str) -> None:
        if not (path in self.files and "/log/" in path):
            self._point(f"read {_trim_path(path)}")
        self._stage.record(self.files.get(path, b""))

    def _observe_open(self, path: str) -> None:
        self._point(f"open {_trim_path(path)}")
        self._stage.record(self.files.get(path, b""))

    def _point(self, label: str) -> None:
        self._stage.point(label)


def _describe_entry(data: bytes) -> str:
    """Return a ledger entry as one line."""
    try:
        entry = parse_entry(data)
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
