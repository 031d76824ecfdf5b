"""What can be written in the ledger, and how it is read back.

One frozen model for each kind. Reading is strict: an unknown kind or a newer format stops with `LedgerTooNew`,
anything else that does not parse with `LedgerCorrupt`; nothing is skipped in silence.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from sluice.pipelines.contract.results import Result
from sluice.pipelines.contract.suite import recall
from sluice.pipelines.schema.schema import parse_schema
from sluice.pipelines.vocabulary.errors import LedgerCorrupt, LedgerTooNew
from sluice.pipelines.vocabulary.kafka import Key
from sluice.pipelines.vocabulary.plans import Plan
from sluice.pipelines.vocabulary.ranges import Range
from sluice.pipelines.vocabulary.receipts import Owner, Receipt, SliceFailure

FORMAT = 1


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
"""An offset, or a time in ms, as Kafka has them."""


class OriginItem(_Model):
    """Where a feed begins in a partition; `committed` is the group's offset seen then (None: none).

    `opens` is the window (its start, ms) that begins at the origin.
    """

    key: Key
    offset: Int64
    committed: Int64 | None
    why: str
    opens: Int64 | None = None


class KeyOffset(_Model):
    key: Key
    offset: Int64


class KeyRange(_Model):
    key: Key
    range: Range


class _Entry(_Model):
    """Common to all: `write` is unique to this attempt to write, `at` in ms, `run` the Dagster run id."""

    format: Literal[1] = 1
    write: str = ""
    run: str = ""
    at: int = 0
    cluster: str = ""


class OriginEntry(_Entry):
    """Where the feed begins, for all partitions first seen by one plan."""

    kind: Literal["origin"] = "origin"
    items: tuple[OriginItem, ...]


class Boundaries(_Model):
    """Boundaries of one partition: at each time (ms, oldest first) the offset that separates the windows around it.

    `by_clock`: the times where no record, or an absurdly stamped one, marked it, so that the high watermark served.
    `by_marker`: those where transactions' markers hid the record, far ahead of it, and it was searched for by offset:
    it is the first where stamps are in order there.
    """

    key: Key
    times: tuple[Int64, ...]
    offsets: tuple[Int64, ...]
    by_clock: tuple[Int64, ...] = ()
    by_marker: tuple[Int64, ...] = ()

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        known = set(self.times)
        if len(self.times) != len(self.offsets) or sorted(known) != list(self.times):
            raise ValueError("not one offset for each time, or the times do not increase")
        if not known.issuperset((*self.by_clock, *self.by_marker)):
            raise ValueError("a time by the clock, or by a marker, that is none of the times")
        return self


class BoundaryEntry(_Entry):
    """Boundaries of several partitions: first resolution wins."""

    kind: Literal["boundary"] = "boundary"
    items: tuple[Boundaries, ...]


class PlanEntry(_Entry):
    """Reserves the plan's ranges; this entry's number is the batch's id."""

    kind: Literal["plan"] = "plan"
    plan: Plan
    hash: str
    owner: Owner


class OwnEntry(_Entry):
    """A live batch changes hands: from now on only this owner's token may publish."""

    kind: Literal["own"] = "own"
    batch: int
    owner: Owner


class PublishEntry(_Entry):
    """The commit point of the data: every part with its range, counts, bytes and hash; and what the batch as a whole
    said to its contract."""

    kind: Literal["publish"] = "publish"
    batch: int
    token: str
    receipts: tuple[Receipt, ...]
    failures: tuple[SliceFailure, ...] = ()
    results: tuple[Result, ...] = ()


def _columns(said: Any) -> dict[Any, Any]:
    try:
        return dict(said)
    except TypeError:
        raise ValueError("no pairs of names and types") from None


def _of_a_schema(columns: dict[str, str]) -> dict[str, str]:
    parse_schema(columns)
    return columns


Columns = Annotated[dict[str, str], BeforeValidator(_columns), PlainSerializer(lambda d: list(d.items()))]
"""Names and types, in an order that JSON keeps."""


def _of_a_contract(text: str) -> str:
    if text:
        recall(text)
    return text


class SchemaEntry(_Entry):
    """What rows are made to from here on: `shape` is its name, `columns` the schema (names and types; None: raw),
    `contract` the contract's text (empty: none). `evolved`: the columns that Sluice added to the feed's own schema, or
    widened in it, because records had them so.
    """

    kind: Literal["schema"] = "schema"
    shape: str
    columns: Annotated[Columns, AfterValidator(_of_a_schema)] | None
    contract: Annotated[str, AfterValidator(_of_a_contract)] = ""
    dropping: bool = False
    closed: bool = False
    evolved: Columns = {}
    reason: str = ""


class IntentEntry(_Entry):
    """The offsets that a commit is about to write; its number is the mark in their metadata."""

    kind: Literal["intent"] = "intent"
    offsets: tuple[KeyOffset, ...]


class CommitEntry(_Entry):
    """Kafka was seen to hold these committed offsets; `mark` is the intent's number."""

    kind: Literal["commit"] = "commit"
    mode: str
    mark: int
    offsets: tuple[KeyOffset, ...]


class LossEntry(_Entry):
    """Gone from Kafka before we read it, and accepted as such."""

    kind: Literal["loss"] = "loss"
    ranges: tuple[KeyRange, ...]
    reason: str


class SkipEntry(_Entry):
    """Passed over by somebody's named decision; never read."""

    kind: Literal["skip"] = "skip"
    ranges: tuple[KeyRange, ...]
    reason: str


class AbandonEntry(_Entry):
    """The batch will not be published; its ranges are owed again."""

    kind: Literal["abandon"] = "abandon"
    batch: int
    reason: str


class Entering(_Model):
    """A partition leaves one life of its log for another, where the feed begins afresh."""

    leaves: Key
    enters: OriginItem

    @model_validator(mode="after")
    def _of_one_partition(self) -> Self:
        if self.leaves.tp != self.enters.key.tp:
            raise ValueError("leaves one partition and enters another")
        return self


class AcceptEntry(_Entry):
    """Somebody accepts that Kafka is not what the ledger knew: `event` says what had happened.

    Counts for the partitions that are still in the life that they leave. What was owed there is `passed`.
    """

    kind: Literal["accept"] = "accept"
    event: str
    items: tuple[Entering, ...]
    passed: tuple[KeyRange, ...] = ()
    reason: str


class MovedEntry(_Entry):
    """Committed offsets that were moved by hand, knowingly: the next commit goes on from them to the frontier."""

    kind: Literal["moved"] = "moved"
    offsets: tuple[KeyOffset, ...]
    reason: str


class RetireEntry(_Entry):
    """What landed before a time (ms) is not kept any longer: these ranges, in these parts (lake paths)."""

    kind: Literal["retire"] = "retire"
    before: int
    ranges: tuple[KeyRange, ...]
    parts: tuple[str, ...]
    reason: str


class GapEntry(_Entry):
    """Entries that stood from this number on are lost, and somebody goes on without them: the next number is `next`,
    above all that are known to have been used. Live plans end here.

    `evidence` says how the loss was known, `ledger` which ledger was lost as a whole (empty: this one goes on),
    `committed` the group's offsets that lost entries had committed, ahead of what is accounted for now.
    """

    kind: Literal["gap"] = "gap"
    next: Annotated[int, Field(ge=1, lt=1 << 62)]
    evidence: tuple[str, ...]
    ledger: str = ""
    committed: tuple[KeyOffset, ...] = ()
    reason: str


Entry = (
    OriginEntry
    | BoundaryEntry
    | PlanEntry
    | OwnEntry
    | PublishEntry
    | IntentEntry
    | CommitEntry
    | LossEntry
    | SkipEntry
    | AbandonEntry
    | AcceptEntry
    | MovedEntry
    | RetireEntry
    | SchemaEntry
    | GapEntry
)

_ADAPTER: TypeAdapter[Entry] = TypeAdapter(Annotated[Entry, Field(discriminator="kind")])
KINDS = frozenset(e.model_fields["kind"].default for e in Entry.__args__)


def dump(entry: Entry) -> bytes:
    """The entry as one line of canonical JSON."""
    text = json.dumps(entry.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return text.encode() + b"\n"


def parse(data: bytes, path: str) -> Entry:
    """The entry in `data`, read from `path`. Raises LedgerTooNew, LedgerCorrupt."""
    try:
        return _ADAPTER.validate_json(data)
    except ValidationError as e:
        raise _unreadable(data, path, e) from None


def _unreadable(data: bytes, path: str, error: ValidationError) -> LedgerTooNew | LedgerCorrupt:
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as e:
        return _corrupt(path, f"not JSON ({e.__class__.__name__}), {len(data)} bytes")
    if not isinstance(raw, dict):
        return _corrupt(path, "not a JSON object")
    where = ".".join(str(x) for x in error.errors()[0]["loc"])
    return _newer(raw, path) or _corrupt(path, f"field {where}: {error.errors()[0]['msg']}")


def _newer(raw: dict[str, object], path: str) -> LedgerTooNew | None:
    version, kind = raw.get("format"), raw.get("kind")
    if (isinstance(version, int) and version > FORMAT) or (isinstance(kind, str) and kind not in KINDS):
        return LedgerTooNew(
            f"ledger entry {path} was written by a newer Sluice (format {version!r}, kind {kind!r}; "
            f"this one reads format {FORMAT})",
            remedy="upgrade Sluice on this machine; nothing was changed",
        )
    return None


def _corrupt(path: str, why: str) -> LedgerCorrupt:
    return LedgerCorrupt(
        f"ledger entry {path} cannot be read: {why}",
        remedy="restore this file from a backup of the lake; Sluice reads no further and changes nothing",
    )
