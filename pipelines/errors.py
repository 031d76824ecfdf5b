"""Every way in which Sluice can stop, by name. The class decides the exit code and whether a retry makes sense.

    SluiceError
    ├── UsageError                 exit 2: the request, a feed file or the setup is wrong
    │   ├── FeedError              a feed file is missing or wrong
    │   └── SetupError             Java, the local Kafka or an extra is missing
    ├── Refused                    exit 3: going on could lose or duplicate data
    │   ├── OwnershipLost          another run took this batch over; ours must not be published
    │   ├── OffsetsLost            pending offsets are gone from Kafka
    │   ├── IncarnationChanged     cluster, topic or log differ from the ledger
    │   │   ├── ClusterChanged     another cluster answers
    │   │   ├── TopicRecreated     the topic was deleted and created again: its id changed
    │   │   └── LogTruncated       the log lost records that were read
    │   ├── NothingToAccept        the event to accept has not happened
    │   ├── GroupHeld              another client is a member of the group
    │   ├── GroupMoved             committed offsets differ from the ledger
    │   ├── WindowRetired          the window's rows have expired
    │   ├── BatchRefused           the batch's contents must not be published
    │   │   ├── QuarantineExceeded too many records broke the contract
    │   │   ├── ContractBroken     the batch as a whole breaks the contract
    │   │   └── SchemaDrifted      records differ from the schema, and the feed forbids it
    │   ├── SchemaChanged          new rows would not form one table with the landed ones
    │   ├── NotLocal               sample events go only to the project's own Kafka
    │   ├── EntriesLost            the ledger lost its newest entries
    │   ├── ForeignMarks           committed offsets carry the mark of another ledger
    │   ├── TableDiffers           somebody else changed the feed's table, or it is not the feed's
    │   └── LedgerTooNew           written by a newer Sluice
    ├── NotYet                     exit 75 (EX_TEMPFAIL): the same call succeeds later
    │   ├── WindowOpen             no window of the request is past its grace period yet
    │   ├── WindowHeld             an open transaction reaches into the window
    │   ├── WindowIncomplete       reading the window now would miss records
    │   └── PlanBusy               another run's live plan reserves these ranges
    ├── Failed                     exit 1: it did not work this time
    │   ├── NotReached             a run over many feeds ended before it began with this one
    │   ├── Retryable              the same call may succeed later
    │   │   ├── KafkaUnavailable   no answer, no leader, or a connection cut
    │   │   │   └── ZooKeeperUnavailable  no answer from where old consumers keep their offsets
    │   │   ├── CommitFenced       a newer committer, or a new generation, took our place
    │   │   ├── LakeUnavailable    the store is busy, unavailable or does not answer
    │   │   ├── CatalogUnavailable the catalog of tables does not answer
    │   │   ├── TableMoved         somebody else committed to the table first
    │   │   ├── DagsterUnavailable the database of Dagster's instance does not answer
    │   │   └── RegistryUnavailable  the schema registry does not answer
    │   └── Terminal               it will fail again until somebody changes something
    │       ├── BrokerTooOld       no topic ids (< 2.8), or for republishing no description of transactions (< 3.0)
    │       ├── UnknownTopic
    │       ├── NotAuthorized
    │       │   └── RegistryForbidden  the schema registry takes the login for nothing, or not for reading
    │       ├── CorruptBatch       record bytes that do not parse or do not match their CRC
    │       ├── UnsupportedBatch   a record format or codec that Sluice does not know
    │       │   └── OversizedBatch  its records take more memory than a task may
    │       ├── LedgerCorrupt      an entry that cannot be read
    │       ├── PartUnreadable     a Parquet file of the lake is missing, cut short or damaged
    │       ├── TableRefused       the table cannot hold these columns or files
    │       ├── LakeFull           the disk or quota is exhausted
    │       ├── ProofFailed        receipts, footers and ranges do not add up
    │       └── BatchIncomplete    some partitions failed; the rest is published
    └── Unknown                    no answer came: done or not. Read back, never clean up

An error carries topic, partition and range as fields. Its `remedy` gives the next step.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar


class SluiceError(Exception):
    """Base of all errors. `message` describes the failure, `remedy` the next step. Neither ever holds a secret."""

    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        message: str,
        *,
        remedy: str = "",
        topic: str | None = None,
        partition: int | None = None,
        start: int | None = None,
        end: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.topic = topic
        self.partition = partition
        self.start = start
        self.end = end

    def __str__(self) -> str:
        return f"{self.message}\n  → {self.remedy}" if self.remedy else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process borders (Spark workers, Dagster): keep every field.
        return (_rebuild, (type(self), dict(self.__dict__)))

    def fields(self) -> dict[str, Any]:
        """The error as a JSON-ready dict: `error` (the class), `message`, `remedy`, and the coordinates that it has."""
        out = {"error": type(self).__name__, "message": self.message, "remedy": self.remedy}
        coordinates = {k: getattr(self, k) for k in ("topic", "partition", "start", "end")}
        return out | {k: v for k, v in coordinates.items() if v is not None}


def _rebuild(kind: type[SluiceError], fields: dict[str, Any]) -> SluiceError:
    error = kind.__new__(kind)
    Exception.__init__(error, fields.get("message", ""))
    error.__dict__.update(fields)
    return error


class UsageError(SluiceError):
    exit_code = 2


class FeedError(UsageError):
    """A feed file is missing or wrong."""


class SetupError(UsageError):
    """Something on the machine is missing or does not start."""


class ClockAhead(SetupError):
    """This machine's clock would close windows that are open by the brokers' clock."""


class NotYet(SluiceError):
    """The same call succeeds later. The exit code is EX_TEMPFAIL of sysexits.h."""

    exit_code = 75


class WindowOpen(NotYet):
    """No window of the request is past its grace period. The schedule lands them later."""


class WindowHeld(NotYet): ...


class WindowIncomplete(NotYet): ...


class PlanBusy(NotYet): ...


class Refused(SluiceError):
    """Stopped to protect data. `remedy` holds the command that accepts the consequence."""

    exit_code = 3


class OwnershipLost(Refused): ...


class OffsetsLost(Refused): ...


class IncarnationChanged(Refused): ...


class ClusterChanged(IncarnationChanged): ...


class TopicRecreated(IncarnationChanged): ...


class LogTruncated(IncarnationChanged):
    """`start` is where the log ends now, `end` where it ended when it was read."""


class NothingToAccept(Refused): ...


class GroupHeld(Refused): ...


class GroupMoved(Refused): ...


class WindowRetired(Refused): ...


class NotLocal(Refused): ...


@dataclass(frozen=True, slots=True)
class Breach:
    """One reason why a batch must not be published.

    `stage` is `decode`, `schema` or `contract`; `said` is a readable sentence; `expectation` is the type of the
    expectation that was broken, if any. `records` of `checked` records are wrong (0: not counted), and `first` names
    the first of them as `topic:partition:offset`.
    """

    stage: str
    said: str
    expectation: str = ""
    records: int = 0
    checked: int = 0
    first: tuple[str, ...] = ()


MOST_BREACHES = 50


class BatchRefused(Refused):
    """A whole batch is refused. `breaches` say why, the worst first, at most `MOST_BREACHES` of them."""

    def __init__(self, message: str, *, remedy: str = "", breaches: Sequence[Breach] = ()) -> None:
        super().__init__(message, remedy=remedy)
        self.breaches = tuple(breaches[:MOST_BREACHES])

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"breaches": [asdict(b) for b in self.breaches]}


class QuarantineExceeded(BatchRefused): ...


class ContractBroken(BatchRefused): ...


class SchemaDrifted(BatchRefused): ...


class SchemaChanged(Refused): ...


class EntriesLost(Refused): ...


class ForeignMarks(Refused): ...


class TableDiffers(Refused): ...


class LedgerTooNew(Refused): ...


class Failed(SluiceError): ...


class NotReached(Failed):
    """A run over many feeds ended before this one began. Its pending offsets stay pending."""


class Retryable(Failed): ...


class KafkaUnavailable(Retryable): ...


class ZooKeeperUnavailable(KafkaUnavailable): ...


class CommitFenced(Retryable): ...


class LakeUnavailable(Retryable): ...


class CatalogUnavailable(Retryable): ...


class TableMoved(Retryable): ...


class DagsterUnavailable(Retryable): ...


class RegistryUnavailable(Retryable): ...


class Terminal(Failed): ...


class BrokerTooOld(Terminal): ...


class UnknownTopic(Terminal): ...


class NotAuthorized(Terminal): ...


class RegistryForbidden(NotAuthorized): ...


class CorruptBatch(Terminal): ...


class UnsupportedBatch(Terminal): ...


class OversizedBatch(UnsupportedBatch):
    """A whole batch whose records take more than `limit` bytes. It takes `size` bytes in the log.

    `latest` is the time of its newest record (ms), set by the broker if `append_time`. `records` counts its records.
    """

    size: int = 0
    limit: int = 0
    latest: int = -1
    append_time: bool = False
    records: int = 0


class LedgerCorrupt(Terminal): ...


class PartUnreadable(Terminal):
    """`path` is the file's path in the lake; `gone` is set when no file is there."""

    def __init__(self, message: str, *, remedy: str = "", path: str = "", gone: bool = False) -> None:
        super().__init__(message, remedy=remedy)
        self.path, self.gone = path, gone

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"file": self.path}


class TableRefused(Terminal): ...


class LakeFull(Terminal): ...


class ProofFailed(Terminal): ...


class BatchIncomplete(Terminal):
    """`transient`: each failure passes by itself, as that of an executor that could not reach Kafka."""

    def __init__(self, message: str, *, remedy: str = "", transient: bool = False) -> None:
        super().__init__(message, remedy=remedy)
        self.transient = transient


class Unknown(SluiceError):
    """A request without a response: it may have taken effect. The caller must read back."""


TRANSIENT = (Retryable, Unknown, WindowHeld, WindowIncomplete, PlanBusy)
"""Errors that a retry can resolve."""
_TRANSIENT_NAMES = {name for name, kind in globals().items() if isinstance(kind, type) and issubclass(kind, TRANSIENT)}


def is_transient(error: object) -> bool:
    """Returns whether an error, or the class of one by its name, passes by itself."""
    if isinstance(error, str):
        return error in _TRANSIENT_NAMES
    return isinstance(error, TRANSIENT) or (isinstance(error, BatchIncomplete) and error.transient)


_LEAST_ADDRESSES = 1 << 30
_UNLIMITED = "raise or remove that limit, and run the command again: ulimit -v unlimited"


def get_address_limit() -> int | None:
    """Returns the bytes of addresses that this process may use (`ulimit -v`); None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def check_address_limit() -> None:
    """Raise Failed below 1 GiB of addresses: there, libraries abort, and threads hang, before they report an error."""
    limit = get_address_limit()
    if limit is not None and limit < _LEAST_ADDRESSES:
        text = f"this process may use {limit / 2**30:.1f} GiB of addresses (ulimit -v), and needs 1 GiB to begin"
        raise Failed(text, remedy=_UNLIMITED)


def explain_memory_error(error: BaseException) -> Failed | None:
    """Returns the error of a process that got no memory, else None.

    Under a limit on address space (`ulimit -v`), any unforeseen error may come from it: libraries report it as errors
    of threads, locks, imports and others.
    """
    limit = get_address_limit()
    if limit is not None:
        return Failed(
            f"unexpected {type(error).__name__}: {error}; this process may use {limit / 2**30:.1f} GiB of addresses"
            " (ulimit -v)",
            remedy=_UNLIMITED,
        )
    if isinstance(error, MemoryError):
        return Failed(
            "memory ran out", remedy="give the machine or container more memory, or lower `tuning.task_memory`"
        )
    return None


def choose_exit_code(errors: Iterable[SluiceError]) -> int:
    """Returns the exit code of the worst error; 0 without one. That of NotYet is the mildest."""
    codes = sorted({e.exit_code for e in errors})
    return max((c for c in codes if c != NotYet.exit_code), default=codes[0] if codes else 0)


def docs_command(name: str) -> str:
    """The command that opens a page: `docs_command("feeds")` for docs/feeds.md."""
    return f"sluice docs {name}"
