"""Every way in which Sluice can stop, by name.

    SluiceError
    ├── UsageError                 exit 2: the request, a feed file or the set-up is wrong
    │   ├── FeedError              a feed file: names file, key and remedy
    │   └── SetupError             Java, the local Kafka, a missing extra
    ├── Refused                    exit 3: going on could lose or duplicate data
    │   ├── PlanBusy               a live plan of another run reserves these ranges
    │   ├── OwnershipLost          another run took this batch over; what we would publish is void
    │   ├── OffsetsLost            owed offsets are gone from Kafka
    │   ├── IncarnationChanged     Kafka is not what the ledger knows any more
    │   │   ├── ClusterChanged     another cluster answers
    │   │   ├── TopicRecreated     deleted and created again: another topic id
    │   │   └── LogTruncated       what was read is not in the log any more
    │   ├── NothingToAccept        what somebody accepts has not happened
    │   ├── GroupHeld              somebody else is a member of the group
    │   ├── GroupMoved             committed offsets are not what the ledger expects
    │   ├── WindowIncomplete       reading it now would miss records
    │   ├── WindowRetired          what had landed in it is not kept any longer
    │   ├── WindowHeld             an open transaction reaches into the window
    │   ├── BatchRefused           what a batch holds must not be published
    │   │   ├── QuarantineExceeded too many records broke the contract
    │   │   ├── ContractBroken     the batch as a whole is not what the contract expects
    │   │   └── SchemaDrifted      records differ from the schema, and the feed does not take that
    │   ├── SchemaChanged          what would land is not one table with what has landed
    │   ├── NotLocal               sample events for a Kafka that is not the project's own
    │   ├── EntriesLost            the ledger lost its newest entries
    │   └── LedgerTooNew           written by a newer Sluice
    ├── Failed                     exit 1: it did not work this time
    │   ├── Retryable              the same call may succeed later
    │   │   ├── KafkaUnavailable   no answer, no leader, connection cut
    │   │   ├── CommitFenced       a newer committer, or a new generation, took our place
    │   │   └── LakeUnavailable    the store said "later", or did not answer
    │   └── Terminal               it will not, until somebody changes something
    │       ├── BrokerTooOld       no topic ids (< 2.8)
    │       ├── UnknownTopic
    │       ├── NotAuthorized
    │       ├── CorruptBatch       record bytes that do not parse or do not match their CRC
    │       ├── UnsupportedBatch   a record format or codec that we do not know
    │       ├── LedgerCorrupt      an entry that cannot be read
    │       ├── PartUnreadable     a Parquet file of the lake is missing, cut short or damaged
    │       ├── LakeFull           disk or quota exhausted
    │       ├── ProofFailed        receipts, footers and ranges do not add up
    │       └── BatchIncomplete    some partitions failed; the rest is published
    └── Unknown                    done or not done: nobody answered; read back, never clean up

An error carries topic, partition and range as fields and says what to do next in `remedy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar


class SluiceError(Exception):
    """Base of all. `message` says what happened, `remedy` what to do next; neither ever holds a secret."""

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
        """The error as a JSON-ready dict: `error`, `message`, `remedy` and whatever coordinates it has."""
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


class Refused(SluiceError):
    """Stopped to protect data; `remedy` holds the command that accepts the consequence."""

    exit_code = 3


class PlanBusy(Refused): ...


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


class WindowIncomplete(Refused): ...


class WindowRetired(Refused): ...


class NotLocal(Refused): ...


class WindowHeld(Refused): ...


@dataclass(frozen=True, slots=True)
class Breach:
    """One thing that keeps a batch from being published: the stage that says so (`decode`, `schema`, `contract`), the
    sentence, the type of the expectation where there is one, `records` of `checked` ones that are not so (0: none were
    counted), and `topic:partition:offset` of the first of them.
    """

    stage: str
    said: str
    expectation: str = ""
    records: int = 0
    checked: int = 0
    first: tuple[str, ...] = ()


MOST_BREACHES = 50


class BatchRefused(Refused):
    """`breaches` say what is wrong with the batch, the worst first, and no more than `MOST_BREACHES`."""

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


class LedgerTooNew(Refused): ...


class Failed(SluiceError): ...


class Retryable(Failed): ...


class KafkaUnavailable(Retryable): ...


class CommitFenced(Retryable): ...


class LakeUnavailable(Retryable): ...


class Terminal(Failed): ...


class BrokerTooOld(Terminal): ...


class UnknownTopic(Terminal): ...


class NotAuthorized(Terminal): ...


class CorruptBatch(Terminal): ...


class UnsupportedBatch(Terminal): ...


class LedgerCorrupt(Terminal): ...


class PartUnreadable(Terminal):
    """`path` is the file's place in the lake; `gone`: nothing stands there."""

    def __init__(self, message: str, *, remedy: str = "", path: str = "", gone: bool = False) -> None:
        super().__init__(message, remedy=remedy)
        self.path, self.gone = path, gone

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"file": self.path}


class LakeFull(Terminal): ...


class ProofFailed(Terminal): ...


class BatchIncomplete(Terminal): ...


class Unknown(SluiceError):
    """The outcome was not observed. The only way on is to read back."""
