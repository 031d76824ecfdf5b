"""Consumer groups as their coordinator describes them: values, the port that asks, and what the words mean.

Any group of a cluster, Sluice's or not, of the classic protocol or a newer one. What a coordinator does not tell is
None here, never a guess: when a group became empty, above all, which is what its offsets expire by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from sluice.pipelines.records.shape import RAW, Shape
from sluice.pipelines.vocabulary.errors import SluiceError
from sluice.pipelines.vocabulary.groups import GroupView, ListedGroup
from sluice.pipelines.vocabulary.kafka import (
    CommittedOffset,
    Configs,
    FetchLimits,
    Isolation,
    OffsetAtTime,
    OpenTransaction,
    PartitionState,
    TopicPartition,
)
from sluice.pipelines.vocabulary.plans import Plan, Slice
from sluice.pipelines.vocabulary.receipts import Outcome, Owner, Verdict


class Groups(Protocol):
    """Every group of one cluster. All may raise NotAuthorized, KafkaUnavailable."""

    def listed(self) -> tuple[ListedGroup, ...]:
        """The groups that this client may see, sorted by name."""
        ...

    def view(self, group: str) -> GroupView:
        """One group as it is now; Dead when there is none."""
        ...

    def committed(self, group: str) -> Mapping[TopicPartition, CommittedOffset]:
        """All that it has committed, stable (KIP-447): waits while a transaction on its offsets is open."""
        ...

    def put(self, group: str, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
        """Commit in the name of nobody. Raises GroupHeld when the group has members, Unknown (read back)."""
        ...


class Cluster(Protocol):
    """What Kafka says of itself, read-only."""

    def cluster_id(self) -> str: ...

    def topics(self) -> Mapping[str, str]:
        """Every visible topic that is not internal, name → topic id. Raises BrokerTooOld without topic ids."""
        ...

    def partitions(self, topics: Iterable[str], isolation: Isolation) -> tuple[PartitionState, ...]:
        """All partitions of the topics, sorted. Raises UnknownTopic, NotAuthorized."""
        ...

    def offsets_at(self, times: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, OffsetAtTime | None]:
        """First record stamped at or after each time (ms), over all records (read_uncommitted); None: no such.

        Never a transaction's marker, which has the broker's clock: where one hides the record, `by_marker` may say so.
        """
        ...

    def open_transactions(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, OpenTransaction]:
        """The transaction that holds the stable end of each partition, where one does and the cluster tells."""
        ...

    def epoch_ends(self, epochs: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        """Where each leader epoch ended in today's log (KIP-101): below what we read means truncation."""
        ...

    def configs(self, topics: Iterable[str]) -> Configs:
        """How long the topics keep records, and brokers offsets. It only explains: what may not be read is unknown.

        Topics that are refused are named.
        """
        ...


@dataclass(frozen=True, slots=True)
class Fetched:
    """Record bytes of one slice, as they came. `index` is the slice's place in the sequence given to `stream`.

    `aborted` holds (producer id, first offset) pairs; `next_position` follows the last complete batch.
    `last` is set once, with the bytes (maybe none) that bring the slice's position to its end, after the
    topic id was seen to be unchanged.
    """

    index: int
    records: bytes | memoryview
    aborted: tuple[tuple[int, int], ...]
    next_position: int
    last: bool
    waited_ns: int = 0


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The slice at `index` cannot go on; the others do."""

    index: int
    error: SluiceError


class Fetcher(Protocol):
    """Raw, bounded, by leader (FetchRequest v12–v13)."""

    def stream(self, slices: Sequence[Slice], limits: FetchLimits) -> Iterator[Fetched | FetchFailed]:
        """Bytes of the slices from their leaders, fetching ahead of the consumer in a thread.

        Slices are started in order, at most `active_slices` at once; a partition never stands twice in one
        request. Guarantee: for each slice either one `last` or one FetchFailed comes, unless the iterator is
        closed before. Follows leadership; out of range, topic-id change, truncation and lack of rights are
        FetchFailed; a leader that stays away is FetchFailed with KafkaUnavailable.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Member:
    member_id: str
    client_id: str
    host: str
    instance_id: str | None = None


@dataclass(frozen=True, slots=True)
class Letter:
    """A record to publish to a partition of the dead-letter topic, stamped in ms (-1: never was).

    `source` is the record that it is made of, as `topic:partition:offset`.
    """

    partition: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    source: str


class Membership(Protocol):
    """Our place in the group: the member id and generation of one join, never refreshed."""

    def init_transactions(self) -> None:
        """Fence older committers of the same transactional id (KIP-98, KIP-447)."""
        ...

    def committed(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, CommittedOffset | None]:
        """Committed offsets with require_stable (KIP-447): waits while a transaction on them is open."""
        ...

    def partitions_of(self, topic: str) -> int:
        """How many partitions a topic has that letters are to go to. Raises UnknownTopic; it is never created."""
        ...

    def commit_transaction(
        self, offsets: Mapping[TopicPartition, CommittedOffset], topic: str = "", letters: Iterable[Letter] = ()
    ) -> None:
        """All offsets in one transaction under our member id and generation, and with them the letters to `topic`.

        Letters are taken one after the other, and each partition keeps their order. Whatever is raised but Unknown:
        neither offsets nor letters are there for anybody. CommitFenced, Unknown; UsageError for a letter that the
        topic does not take, and for more of them than the transaction's time allows.
        """
        ...

    def commit_plain(self, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
        """The same by an ordinary OffsetCommit. Raises CommitFenced, Unknown."""
        ...


class Group(Protocol):
    """The consumer group whose committed offsets a feed moves."""

    def committed(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, CommittedOffset | None]:
        """As Membership.committed, without joining."""
        ...

    def members(self) -> tuple[Member, ...]: ...

    def join(self, topics: Sequence[str], transactional_id: str | None) -> AbstractContextManager[Membership]:
        """Join as the only member; leaves on exit. Raises GroupHeld when anybody else is or comes in."""
        ...


class Lake(Protocol):
    """Where ledger and parts live. Paths are relative, with `/`; every write is atomic: seen whole or not at all."""

    @property
    def uri(self) -> str: ...

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Create durably; False when something stands there. A lost answer raises Unknown."""
        ...

    def put(self, path: str, data: bytes) -> None:
        """Create or replace."""
        ...

    def get(self, path: str) -> bytes | None:
        """None when there is nothing."""
        ...

    def list(self, prefix: str, after: str = "") -> Iterator[str]:
        """Paths below the folder `prefix`, in order of name, those greater than `after` only."""
        ...

    def size(self, path: str) -> int | None: ...

    def create(self, path: str) -> AbstractContextManager[BinaryIO]:
        """A file to write; it appears when the block ends, never when the block raises."""
        ...

    def open(self, path: str) -> BinaryIO:
        """A seekable file to read. Raises FileNotFoundError."""
        ...

    def show(self, source: str, target: str) -> None:
        """Make the staged file visible at `target` too (link or copy); idempotent. FileNotFoundError: no source."""
        ...

    def remove(self, path: str) -> None:
        """Idempotent."""
        ...

    def unfinished(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Writes below the folder that have not ended, and for how long (ms) each has stood still.

        Nothing else shows them. A killed process leaves them behind; their names are for `discard` alone. Where folders
        are things of their own, an empty one is such a write, too, and its name ends in `/`.
        """
        ...

    def discard(self, name: str) -> None:
        """Do away with a write that `unfinished` named: if it goes on after all, it fails. Idempotent."""
        ...

    def locate(self, path: str) -> str:
        """The address by which other tools read it (an absolute path or s3:// URI)."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that a task needs, picklable. `wiring` is what the executor side builds its ports from, `shape` what
    rows are made to."""

    plan: Plan
    batch: int
    attempt: str
    wiring: Any
    shape: Shape = RAW


class Engine(Protocol):
    """Carries out tasks, each perhaps more than once; receipts come back, data does not."""

    def start(self) -> None:
        """Get ready, and return once it is: what is slow about that is done once in a process. `run` needs no call.

        Raises SetupError.
        """
        ...

    def run(self, job: Job, tasks: Sequence[int]) -> list[Outcome]:
        """One outcome for each slice of the tasks (by index)."""
        ...

    def cancel(self) -> None: ...


class Liveness(Protocol):
    """Whether the owner of a batch may still be at work."""

    def beat(self, owner: Owner) -> AbstractContextManager[None]:
        """Say that we live, now and then, until the block ends."""
        ...

    def judge(self, owners: Iterable[Owner], *, watch: bool = True) -> Mapping[str, Verdict]:
        """By token, how each stands: alive, or dead, with the evidence. The one judge of that.

        With `watch` suspects are watched, all at once, until it is known; without, nobody waits, and of a suspect it
        is not known yet.
        """
        ...

    def owners(self) -> tuple[Owner, ...]:
        """Everybody of whom there is a sign of life, at work or killed."""
        ...

    def last_beat(self, owner: Owner) -> int | None:
        """The time (ms, by the owner's clock) of the owner's last beat; None without one. Never waits."""
        ...


Clock = Callable[[], int]
"""Milliseconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Edges:
    """The outside of one feed."""

    cluster: Cluster
    group: Group
    lake: Lake
    engine: Engine
    liveness: Liveness
    clock: Clock
    wiring: object
    """What executors build their own edges from."""
    parallelism: int = 2
