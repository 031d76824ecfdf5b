"""The outside world as protocols: Kafka, the lake, the engine that runs tasks, the clock.

The pipelines know only these protocols. `resources/` implements them; tests use fakes. Read `Ports` first: it holds all
the ports of one feed. Every method may raise a SluiceError when the outside fails (KafkaUnavailable, NotAuthorized,
LakeUnavailable); a docstring names only the errors that a caller treats in a special way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

from sluice.pipelines.errors import SluiceError
from sluice.pipelines.model.kafka import (
    CommittedOffset,
    Configs,
    FetchLimits,
    Isolation,
    OffsetAtTime,
    OpenTransaction,
    PartitionState,
    Range,
    Tail,
    TopicPartition,
)
from sluice.pipelines.model.plans import OffsetRange, Plan
from sluice.pipelines.model.receipts import EngineUse, Outcome, Owner, TaskTraffic, Verdict
from sluice.pipelines.records.rows.value_reader import WriterSchemas
from sluice.pipelines.records.rows.wire_format import RegisteredSchema
from sluice.pipelines.records.shape import RAW, Shape

if TYPE_CHECKING:  # most commands need none of them
    from sluice.pipelines.model.consumer_groups import GroupView, ListedGroup
    from sluice.pipelines.model.tables import TableChange, TableFault, TableFile, TableHead
    from sluice.pipelines.records.kafka_batches.encode.accumulator import SealedBatch


class Stat(NamedTuple):
    """`tag` is another as soon as the file's bytes are others. It is empty where a store does not tell."""

    path: str
    size: int
    tag: str


class Groups(Protocol):
    """Every consumer group of one cluster. Each method may raise NotAuthorized or KafkaUnavailable."""

    def list_groups(self) -> tuple[ListedGroup, ...]:
        """The groups that this client may see, sorted by name."""
        ...

    def view(self, group: str) -> GroupView:
        """Returns the group's current state; Dead when there is none."""
        ...

    def fetch_committed(self, group: str) -> Mapping[TopicPartition, CommittedOffset]:
        """All offsets that the group has committed. Waits while a transaction on them is open (KIP-447)."""
        ...

    def put(self, group: str, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
        """Commit offsets without being a member.

        Raises GroupHeld when the group has members, and Unknown when no answer came: read the offsets back.
        """
        ...


class Cluster(Protocol):
    """Read-only metadata and offsets of a Kafka cluster.

    An answer may be some seconds old: feeds surveyed together share it. `forget` discards cached answers.
    """

    def forget(self) -> None:
        """Discard cached answers; later calls ask Kafka again."""
        ...

    def get_age(self) -> int:
        """How long ago (ms), at most, Kafka was asked for the next answer of `partitions`."""
        ...

    def get_clock_lead(self) -> int | None:
        """By how many ms this machine's clock is ahead of the brokers', at least; negative: behind. None if unknown."""
        ...

    def cluster_id(self) -> str:
        """The id that this cluster gave itself."""
        ...

    def topics(self) -> Mapping[str, str]:
        """Every visible topic that is not internal, as name → topic id.

        Raises BrokerTooOld when the brokers have no topic ids.
        """
        ...

    def partitions(self, topics: Iterable[str], isolation: Isolation) -> tuple[PartitionState, ...]:
        """All partitions of the topics, sorted by topic and number. Raises UnknownTopic, NotAuthorized."""
        ...

    def offsets_at(
        self, times: Mapping[TopicPartition, int], max_skew: int | None = None
    ) -> Mapping[TopicPartition, OffsetAtTime | None]:
        """For each partition, the first record stamped at or after its time (ms since the epoch), or None.

        With `max_skew`, the boundary at that time: records that their neighbours contradict are passed over
        (`planning/boundary_search.py`). At the end of the log, if no record there can be believed.

        Counts all records, as read_uncommitted does. The answer is never a transaction's marker, which carries the
        broker's clock; where a marker hides the record, `by_marker` may be set.
        """
        ...

    def open_transactions(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, OpenTransaction]:
        """The open transaction that holds back each partition's last stable offset.

        Partitions without one, or whose cluster does not tell, are left out.
        """
        ...

    def epoch_ends(self, epochs: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        """The offset at which each leader epoch ends in today's log (KIP-101).

        An end below the read offsets means that the log was truncated.
        """
        ...

    def read_checksums(self, tails: Mapping[TopicPartition, Tail]) -> Mapping[TopicPartition, int]:
        """The checksum of the batch that now has each tail's offset.

        Partitions without such a batch are left out, and those that an implementation's bound on bytes excludes.
        """
        ...

    def configs(self, topics: Iterable[str]) -> Configs:
        """How long the topics keep records, and the brokers keep offsets.

        The answer only explains, so missing rights raise nothing: such settings are unknown, and the topics that
        were refused are in `denied`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Fetched:
    """Record bytes of one offset range, as Kafka sent them.

    `index` is the range's place in the sequence given to `stream`. `aborted` holds (producer id, first offset) pairs.
    `next_position` is the offset after the last complete batch. `last` is set once per range, with the bytes (maybe
    none) that reach its end, after the topic id was checked again. `waited_ns` is the time that the consumer waited.
    """

    index: int
    records: bytes | memoryview
    aborted: tuple[tuple[int, int], ...]
    next_position: int
    last: bool
    waited_ns: int = 0


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The offset range at `index` failed with this error; the other ranges go on."""

    index: int
    error: SluiceError


class Fetcher(Protocol):
    """Fetches raw record bytes from partition leaders, within bounds (FetchRequest v12–v13)."""

    def stream(self, ranges: Sequence[OffsetRange], limits: FetchLimits) -> Iterator[Fetched | FetchFailed]:
        """The bytes of the offset ranges. A thread fetches ahead of the consumer.

        Ranges start in order, at most `limits.active_ranges` at once; one request never names a partition twice.
        Guarantee: each range ends with either one `last` or one FetchFailed, unless the iterator is closed first.
        The fetcher follows a leader that moves. An offset out of range, a changed topic id, truncation and missing
        rights end a range with FetchFailed; so does a leader that stays away (KafkaUnavailable).
        """
        ...

    def traffic(self) -> TaskTraffic:
        """The requests of all streams to brokers."""
        ...

    def close(self) -> None:
        """End every stream. A consumer that waits for an item gets KafkaUnavailable."""
        ...


@dataclass(frozen=True, slots=True)
class Member:
    """A member of the group, as its coordinator lists it."""

    member_id: str
    client_id: str
    host: str
    instance_id: str | None = None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record to publish to a partition of the dead-letter topic.

    `timestamp` is in ms, −1 when the record never had one. `source` names the record that the letter was made from, as
    `topic:partition:offset`.
    """

    partition: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    source: str


class Membership(Protocol):
    """Our place in the group: the member id and generation of one join. They are never refreshed."""

    def init_transactions(self) -> None:
        """Fence older committers of the same transactional id (KIP-98, KIP-447)."""
        ...

    def fetch_committed(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, CommittedOffset | None]:
        """The committed offset of each partition, or None. Waits while a transaction on them is open (KIP-447)."""
        ...

    def partitions_of(self, topic: str) -> int:
        """How many partitions the dead-letter topic has. Never creates the topic: raises UnknownTopic."""
        ...

    def commit_transaction(
        self, offsets: Mapping[TopicPartition, CommittedOffset], topic: str = "", letters: Iterable[DeadLetter] = ()
    ) -> None:
        """Commit all offsets in one transaction, and publish the letters to `topic` in the same one.

        Letters are read one at a time; each partition keeps their order. Raises CommitFenced when a newer member took
        our place, UsageError when the topic does not take a letter or the letters need more time than a transaction
        has, and Unknown when no answer came. After any error but Unknown, neither offsets nor letters are visible.
        """
        ...

    def commit_plain(self, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
        """Commit the offsets with an ordinary OffsetCommit. Raises CommitFenced, Unknown."""
        ...


class Group(Protocol):
    """The consumer group whose committed offsets a feed moves, wherever they are kept: in Kafka, in ZooKeeper, or both
    (`offsets` in the feed). A feed that says `commit: none` only asks where to begin: its ledger alone knows how far it
    has come."""

    def fetch_committed(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, CommittedOffset | None]:
        """The same as `Membership.fetch_committed`, without joining."""
        ...

    def members(self) -> tuple[Member, ...]:
        """The group's members now."""
        ...

    def check_alone(self) -> None:
        """Raises GroupHeld if another client is a member of the group now: a commit would be refused."""
        ...

    def own(self, partitions: Callable[[], Iterable[TopicPartition]], lost: Callable[[], None]) -> None:
        """Keep the group's other consumers from reading the partitions until this port is closed, where owners are
        known: in ZooKeeper. Kafka knows none outside of a join, so nothing is done there, and nothing is asked.

        May be called again, with partitions that came since. `lost` is called from another thread, at most once, when
        ownership ends before the port is closed; nothing is committed through it afterwards. Raises GroupHeld when
        others do not let go in time, and CommitFenced when ownership was lost.
        """
        ...

    def join(self, topics: Sequence[str], transactional_id: str | None) -> AbstractContextManager[Membership]:
        """Join the group as its only member, and leave when the block ends.

        `transactional_id` None: the membership commits without transactions. Raises GroupHeld when somebody else is
        a member or comes in.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Delivered:
    """A batch that a topic took: its rows by the caller's `numbers`, the first at offset `first` of the partition."""

    partition: int
    first: int
    numbers: Any


class Target(Protocol):
    """A topic that records are sent to, in transactions of one name, and the mark that each transaction leaves."""

    @property
    def throttled_ms(self) -> int:
        """The total pause that brokers imposed because of a quota."""
        ...

    @property
    def most_bytes(self) -> int | None:
        """Of a transaction now, so that it ends in its time, where brokers had us pause; None: any."""
        ...

    def partitions(self) -> int:
        """How many partitions the topic has. Raises UnknownTopic; it is never created."""
        ...

    def begin(self) -> CommittedOffset | None:
        """Fence other senders of this name, abort their open transaction, and return the newest committed mark."""
        ...

    def send(self, batches: Iterable[SealedBatch], describe: Callable[[int], str]) -> list[Delivered]:
        """Send batches in the open transaction, in order by partition, each acknowledged by all replicas in sync.

        Batches are taken as room for them comes. `describe` names a row by its number. Raises UsageError for a record
        that the topic does not take, CommitFenced when another took our name or time was up, and what taking batches
        raises. After any error the transaction is aborted and `begin` must be called.
        """
        ...

    def commit(self, mark: CommittedOffset) -> None:
        """End the transaction; the mark takes effect with its records or not at all.

        Raises CommitFenced, KafkaUnavailable (nothing took effect), and Unknown: then `begin` returns the current mark.
        """
        ...


class Lake(Protocol):
    """The store of ledger and parts. Paths are relative, with `/`. Writes are atomic: a reader sees all or nothing."""

    @property
    def uri(self) -> str:
        """Returns the lake's address."""
        ...

    @property
    def copies(self) -> bool:
        """Returns whether `show` copies: the file may then appear late, when its run is dead and its source is gone."""
        ...

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Create the file durably. Returns False when the path is taken. Raises Unknown when the answer was lost."""
        ...

    def put_each_if_absent(self, files: Mapping[str, bytes]) -> frozenset[str]:
        """Create each of the files as `put_if_absent` does; much faster than one after the other.

        Returns the paths that were not taken. After an error each file is there whole, or not at all.
        """
        ...

    def put(self, path: str, data: bytes) -> None:
        """Create or replace the file."""
        ...

    def get(self, path: str) -> bytes | None:
        """The file's bytes; None when there is no file."""
        ...

    def list(self, prefix: str, after: str = "") -> Iterator[str]:
        """The paths below the folder `prefix`, sorted by name; only those greater than `after`."""
        ...

    def folders(self, prefix: str) -> Iterator[str]:
        """The names, in order, of the folders directly below the folder `prefix`, however much is in them."""
        ...

    def stats(self, prefix: str, after: str = "") -> Iterator[Stat]:
        """Yields the current status of each file that `list` names, without opening it.

        On S3 the tag is the ETag. In a folder it is the inode number and the time of the last change of any kind, which
        cannot be set back.
        """
        ...

    def size(self, path: str) -> int | None:
        """The file's size in bytes; None when there is no file."""
        ...

    def create(self, path: str) -> AbstractContextManager[BinaryIO]:
        """A file to write. It appears when the block ends, and never when the block raises."""
        ...

    def open(self, path: str) -> BinaryIO:
        """A seekable file to read. Raises FileNotFoundError."""
        ...

    def show(self, source: str, target: str) -> None:
        """Make the staged file visible at `target` too, by link or copy. Idempotent.

        Raises FileNotFoundError when there is no source.
        """
        ...

    def remove(self, path: str) -> None:
        """Remove the file. Idempotent: no file is no error."""
        ...

    def list_unfinished(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Unfinished writes below the folder, as (name, ms since the last change).

        A killed process leaves such writes behind, and no other method shows them. The names are for `discard` alone.
        Where a store has real folders, an empty one counts as such a write; its name ends in `/`.
        """
        ...

    def discard(self, name: str) -> None:
        """End a write that `list_unfinished` named. If its process still lives, its write fails. Idempotent."""
        ...

    def locate(self, path: str) -> str:
        """The address by which other tools read the file: an absolute path or an s3:// URI."""
        ...


class Registry(Protocol):
    """A schema registry. Each method may raise RegistryUnavailable, NotAuthorized, or Failed for an answer that makes
    no sense: references in a circle, more than there may be, no JSON."""

    def schema(self, id: int | str) -> RegisteredSchema | None:
        """The schema of that number or GUID, with all that it refers to; None when there is none."""
        ...

    def version(self, subject: str, version: int | None = None) -> RegisteredSchema | None:
        """A version of a subject, or its newest one; None when there is none."""
        ...


class Table(Protocol):
    """A table that names files of the lake. Each method may raise CatalogUnavailable and NotAuthorized.

    The contents are read from the table: only the result of the last `look` is cached.
    """

    @property
    def name(self) -> str:
        """The table as people call it: format and name."""
        ...

    @property
    def format(self) -> str:
        """Iceberg or Delta."""
        ...

    @property
    def output(self) -> str:
        """The output of a split feed whose files it names; empty for a table of a whole feed."""
        ...

    def close(self) -> None:
        """Let go of the catalog's connections."""
        ...

    def look(self) -> TableHead | None:
        """Returns the table's current head; None without a table. Later calls refer to it."""
        ...

    def files(self) -> Mapping[str, TableFile]:
        """The data files that the newest snapshot names, by address."""
        ...

    def rows(self, columns: Sequence[str]) -> Any:
        """Returns these columns of all rows as a `pyarrow.Table`, read by the format's own library."""
        ...

    def create(self, columns: Mapping[str, str], about: Mapping[str, str]) -> None:
        """Make the table, empty, with these columns and properties. If somebody was faster, nothing is changed."""
        ...

    def commit(self, change: TableChange) -> int:
        """Change the table in one step, and return the id of its new snapshot.

        Guarantee: it takes effect on the snapshot that `look` read, or not at all. Raises TableMoved when that is no
        longer the newest one, TableRefused when the table cannot hold the added columns, PartUnreadable when a file is
        missing, and Unknown without a response: call `look` again.
        """
        ...

    def tell(self, complete: str) -> None:
        """Say up to when windows are complete, without a new snapshot. Raises as `commit` does."""
        ...

    def find_faults(self, columns: Mapping[str, str]) -> tuple[TableFault, ...]:
        """Returns changes by other clients to the table as a whole, which should have these columns. Empty before
        `look`."""
        ...

    def drop(self) -> None:
        """Remove the table without any data file, also if its metadata cannot be read. No-op without a table."""
        ...

    def misread(self) -> tuple[str, ...]:
        """The addresses of files with bounds by which some engine leaves out rows that it should find."""
        ...

    def repair(self, columns: Mapping[str, str], *, undo: bool = False) -> bool:
        """Describe such files again as far as the table alone can, without a change of rows. Restore properties and
        columns that are missing, and with `undo` the names of columns. Returns whether it did. Raises as `commit`
        does."""
        ...

    def expiring(self, before: int) -> tuple[str, ...]:
        """The addresses of files that the newest snapshot does not name, and one from before that time (ms) may."""
        ...

    def find_named(self, addresses: Iterable[str]) -> frozenset[str]:
        """Those of the addresses that any snapshot names."""
        ...

    def list_metadata(self) -> frozenset[str]:
        """The addresses of files outside the log that describe the files of any snapshot; none where the log does."""
        ...

    def remove_metadata(self, addresses: Iterable[str]) -> None:
        """Remove such files, which no snapshot may name any longer. A missing one is no error."""
        ...

    def expire(self, before: int) -> int:
        """Expire the snapshots from before that time (ms), except the newest and those of branches and tags.

        Removes no data file. Returns the number of expired snapshots. Raises as `commit` does."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that a task needs. Picklable.

    Executors build their own ports from `wiring`. Records become rows of `shape`. `fresh`: no run has worked on the
    batch before, so the first try of a task finds nothing of it in staging. `erased` are offsets whose records do not
    land, by offset range; ranges without any are left out.
    """

    plan: Plan
    batch: int
    attempt: str
    wiring: Any
    shape: Shape = RAW
    fresh: bool = False
    erased: Mapping[OffsetRange, tuple[Range, ...]] = field(default_factory=dict)


class Engine(Protocol):
    """Runs tasks, each perhaps more than once. Returns receipts and counts of requests to Kafka, never data."""

    def start(self) -> None:
        """Start the engine and wait until it is ready. Raises SetupError.

        Slow work is done once per process. `run` starts the engine if it is not started.
        """
        ...

    def describe(self) -> EngineUse:
        """Return the engine of the tasks; of a Spark that is not started, only its master."""
        ...

    def run(self, job: Job, tasks: Sequence[int]) -> Sequence[Outcome | TaskTraffic]:
        """Run the job's tasks with these indices. Returns one outcome for each of their offset ranges, and the traffic
        of each task that read anything, in no particular order.

        Raises SetupError when the engine does not start, and Failed when the job failed or was cancelled.
        """
        ...

    def map(self, feed: str, what: str, call: Callable[[int], str], count: int) -> Sequence[str]:
        """Call it for each number below `count` in separate tasks, and return the results in no particular order.

        A task may run more than once. The call must pickle. `what` describes the work in messages.

        Raises SetupError when the engine does not start, and Failed when the job failed or was cancelled.
        """
        ...

    def cancel(self) -> None:
        """End what `run` or `map` is doing: it raises Failed. Any thread may call this, at any time."""
        ...


class Liveness(Protocol):
    """Tells whether the owner of a batch may still be at work."""

    def send_heartbeats(self, owner: Owner) -> AbstractContextManager[None]:
        """Write a sign of life now and then, until the block ends."""
        ...

    def judge(self, owners: Iterable[Owner], *, watch: bool = True) -> Mapping[str, Verdict]:
        """Returns each owner's state by token (alive, dead, not known yet) with evidence. Nothing else decides this.

        With `watch`, suspects are watched side by side until the answer is known. Without, nothing waits, and a
        suspect is not known yet.
        """
        ...

    def owners(self) -> tuple[Owner, ...]:
        """Every owner that left a sign of life, whether at work or killed."""
        ...

    def last_heartbeat(self, owner: Owner) -> int | None:
        """When the owner last gave a sign of life (ms, by the owner's clock); None when it never did. Never waits."""
        ...


Clock = Callable[[], int]
"""Milliseconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Ports:
    """All the ports of one feed."""

    cluster: Cluster
    group: Group
    lake: Lake
    engine: Engine
    liveness: Liveness
    clock: Clock
    wiring: Any
    """What executors build their own ports from."""
    writers: WriterSchemas | None = None
    """Schemas of Avro records: kept ones, and those that the feed's registry knows."""
    parallelism: int = 2
    """How many tasks the engine runs at once."""

    def open_fetcher(self, isolation: Isolation) -> AbstractContextManager[Fetcher]:
        """A fetcher of this process; no connection is opened before the first fetch."""
        fetcher: AbstractContextManager[Fetcher] = self.wiring.open_fetcher(isolation)
        return fetcher
