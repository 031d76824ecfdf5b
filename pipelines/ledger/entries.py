"""The kinds of ledger entries, written and parsed by one frozen model each.

Parsing is strict: an unknown kind or field, or a newer format, raises `LedgerTooNew`; any other error raises
`LedgerCorrupt`. No entry is skipped silently.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Mapping
from operator import lt
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    Base64Bytes,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)

from sluice.pipelines.contract.catalogue import Result
from sluice.pipelines.contract.suite import recall
from sluice.pipelines.errors import LedgerCorrupt, LedgerTooNew
from sluice.pipelines.lake.paths import FORMER_PREFIX, FolderPrefix
from sluice.pipelines.ledger.columns import inflate
from sluice.pipelines.model.kafka import Key, Range
from sluice.pipelines.model.plans import Plan
from sluice.pipelines.model.receipts import Owner, RangeFailure, Receipt, Traffic
from sluice.pipelines.records.rows.split_rule import Otherwise, Tombstones
from sluice.pipelines.records.rows.value_reader import Reader
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.pipelines.records.shape import READERS
from sluice.pipelines.schema.protection import Protection
from sluice.pipelines.schema.schema import parse_schema
from sluice.pipelines.util.documents import Derived, Flat, Internal

FORMAT: Literal[1] = 1
BOUNDARY_FORMAT: Literal[3] = 3
"""A boundary entry with `against` and `reads`. Those of format 2 have `by_marker`."""

PUBLISH_FORMAT: Literal[3] = 3
"""A publish entry with `engines` in its traffic, and `tail` in its receipts. Format 2 has `traffic`, and `shared` in
its parts: readers of format 1 would count a file's rows for each offset range in it."""

FOLDERS_FORMAT: Literal[4] = 4
"""A schema entry with a `folder_prefix`: writers of earlier formats would land in other folders."""

READER_FORMAT: Literal[3] = 3
"""A schema entry with a `source` or a `key`: readers of format 1 would assume plain JSON. In format 2 the source is
`avro`, and its records are Avro."""


RENAMED_FORMAT: Literal[5] = 5
"""A schema entry with columns whose fields have other names in records: earlier readers could not parse them."""

PLACED_FORMAT: Literal[6] = 6
"""A schema entry with columns at paths, in headers or in other forms, or with `protect`: earlier readers could not
parse them, and would land protected values as they are."""

SPLIT_FORMAT: Literal[6] = 6
"""A schema entry with a `split`: earlier readers would take its outputs for one table of raw rows."""

COPIES_FORMAT: Literal[7] = 7
"""A schema entry whose outputs share tombstones: earlier readers would count a record for each of its rows."""

CORRECTED_FORMAT: Literal[8] = 8
"""A schema entry with a `table`: earlier readers would read new rows with the former type of a column."""


PACKED_FORMAT: Literal[9] = 9
"""A large entry of any kind, compressed: `packed` is the base64 of the zlib of its line of JSON, and `size` the line's
length in bytes. Earlier readers stop at the format."""

PACKED_FROM = 64 << 10
"""Bytes from which on an entry is compressed: 1,000 partitions write a publish entry of 0.7 MB each hour."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings", defer_build=True)


Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
"""An offset or a time in ms, within Kafka's range."""


class OriginItem(_Model):
    """Where a feed begins in a partition. `committed` is the offset that the group had committed then, if any.

    `opens` is the start (ms) of the window in which the feed begins. `cuts` is that window's first offset if it lies
    below the origin: the window is not complete until a request for it lands the records from there on, too.
    """

    key: Flat[Key]
    offset: Int64
    committed: Int64 | None
    why: str
    opens: Int64 | None = None
    cuts: Int64 | None = None

    @property
    def begins(self) -> int:
        """The first offset of the window in which the feed begins."""
        return self.offset if self.cuts is None else self.cuts

    @model_serializer(mode="wrap")
    def _without_cuts(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = serialize(self)
        return {k: v for k, v in document.items() if k != "cuts" or v is not None}


class KeyOffset(_Model):
    key: Flat[Key]
    offset: Int64


class KeyRange(_Model):
    key: Flat[Key]
    range: Flat[Range]


class _Entry(_Model):
    """Fields of all entries: `write` is unique to the attempt to write, `at` is in ms, `run` is the Dagster run id.

    `number` is the entry's own, and `follows` the SHA-256 (hex) of the file of the entry before it. Earlier releases
    wrote neither.
    """

    format: Literal[1, 2, 3, 4, 5, 6, 7, 8] = 1
    number: int | None = None
    follows: str = ""
    write: str = ""
    run: str = ""
    at: int = 0
    cluster: str = ""
    newest_format: ClassVar[int] = FORMAT

    @model_validator(mode="after")
    def _of_a_known_format(self) -> Self:
        if self.format > self.newest_format:
            raise ValueError("a format that entries of this kind do not have")
        return self


class OriginEntry(_Entry):
    """The origins of the partitions that one plan saw first."""

    kind: Literal["origin"] = "origin"
    items: tuple[OriginItem, ...]


class Boundaries(_Model):
    """Boundaries of one partition: for each time (ms, oldest first), the offset that separates the windows around it.

    `by_clock`: times for which no record, or only an absurdly stamped one, marked the boundary; the high watermark is
    used. `by_marker`: times for which transaction markers, far ahead of the record, hid it; it was searched for by
    offset, and is the first record if stamps are in order there. `against`: times at or after which a record below the
    offset is stamped, whose neighbours contradict it.
    """

    key: Key
    times: tuple[Int64, ...]
    offsets: tuple[Int64, ...]
    by_clock: tuple[Int64, ...] = ()
    by_marker: tuple[Int64, ...] = ()
    against: tuple[Int64, ...] = ()

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if len(self.times) != len(self.offsets) or not all(map(lt, self.times, self.times[1:])):
            raise ValueError("not one offset for each time, or the times do not increase")
        if not set(self.times).issuperset((*self.by_clock, *self.by_marker, *self.against)):
            raise ValueError("a time by the clock, or by a marker, that is none of the times")
        return self


class BoundaryEntry(_Entry):
    """Boundaries of several partitions. The first entry for a time wins. `reads`: reads of the logs that decided them,
    and those of the entries behind it."""

    kind: Literal["boundary"] = "boundary"
    newest_format: ClassVar[int] = BOUNDARY_FORMAT
    format: Literal[1, 2, 3] = BOUNDARY_FORMAT
    items: tuple[Boundaries, ...]
    reads: int = 0


class PlanEntry(_Entry):
    """Reserves the plan's ranges; this entry's number is the batch's id."""

    kind: Literal["plan"] = "plan"
    plan: Plan
    hash: str
    owner: Owner


class OwnEntry(_Entry):
    """A live batch changes hands: from here on only this owner's token may publish it."""

    kind: Literal["own"] = "own"
    batch: int
    owner: Owner


class PublishEntry(_Entry):
    """The commit point of the data: every part with its range, counts, bytes and hash, and the results of the contract
    for the complete batch. `traffic` sums its tasks' traffic with brokers, and names the engine."""

    kind: Literal["publish"] = "publish"
    newest_format: ClassVar[int] = PUBLISH_FORMAT
    format: Literal[1, 2, 3] = PUBLISH_FORMAT
    batch: int
    token: str
    receipts: tuple[Receipt, ...]
    failures: tuple[RangeFailure, ...] = ()
    results: tuple[Result, ...] = ()
    traffic: Traffic = Traffic()

    @model_serializer(mode="wrap")
    def _without_erased(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what older readers do not know while nothing is erased, and no row is a copy."""
        document: dict[str, Any] = serialize(self)
        for receipt in document["receipts"]:
            if not receipt["erased"]:
                del receipt["erased"], receipt["counts"]["erased"]
            if not receipt["counts"]["copies"]:
                del receipt["counts"]["copies"]
        return document


def _parse_columns(value: Any) -> dict[Any, Any]:
    try:
        return dict(value)
    except TypeError:
        raise ValueError("no pairs of names and types") from None


def _of_a_schema(columns: dict[str, str]) -> dict[str, str]:
    parse_schema(columns)
    return columns


def _of_protection(texts: dict[str, str]) -> dict[str, str]:
    Protection.parse(texts)
    return texts


Columns = Annotated[dict[str, str], BeforeValidator(_parse_columns), PlainSerializer(lambda d: list(d.items()))]
"""Names and types, in an order that JSON keeps."""


def _of_a_contract(text: str) -> str:
    if text:
        recall(text)
    return text


def _check_format(name: str) -> str:
    if name not in READERS:
        raise ValueError("is no format of records that we know")
    return name


class SchemaSource(_Model):
    """The reader of records with their own schemas: format, texts of the feed's own schema (the last), wire format."""

    format: Annotated[str, AfterValidator(_check_format)]
    texts: tuple[str, ...]
    wire: WireFormat

    @model_validator(mode="after")
    def _of_a_schema(self) -> Self:
        self.reader()
        return self

    def reader(self) -> Reader:
        """Returns the reader."""
        return READERS[self.format].make(self.texts, self.wire)


class ShapeText(_Model):
    """A shape in words: `shape` is its name, `columns` the schema (names and types; None: raw) and `contract` the
    contract's text (empty: none). `base` is the schema without columns that records added, under which other values
    stay in `_extra`. `source` reads values with schemas of their own, and `key` reads keys. `protect` has the rules of
    fields, with identifiers of keys, and `landed` the columns that these leave.
    """

    shape: str
    columns: Annotated[Columns, AfterValidator(_of_a_schema)] | None
    contract: Annotated[str, AfterValidator(_of_a_contract)] = ""
    dropping: bool = False
    closed: bool = False
    source: SchemaSource | None = None
    key: SchemaSource | None = None
    base: Annotated[Columns, AfterValidator(_of_a_schema)] | None = None
    protect: Annotated[Columns, AfterValidator(_of_protection)] | None = None
    landed: Annotated[Columns, AfterValidator(_of_a_schema)] | None = None


class SplitText(_Model):
    """The outputs of a feed with their shapes, in order, and the rule that chooses a record's output."""

    outputs: tuple[tuple[str, ShapeText], ...]
    values: dict[str, str]
    header: str = ""
    path: tuple[str, ...] = ()
    by_message: bool = False
    otherwise: Otherwise
    tombstones: Tombstones = Tombstones.OTHERWISE


class SchemaEntry(_Entry, ShapeText):
    """The shape of rows from here on. `evolved` are the columns that Sluice added to the feed's own schema, or widened,
    because of records. `folder_prefix` is the prefix of the keys of the feed's folders: the first entry decides.
    `split` are the outputs of a split feed, whose `columns` are those of all of them, as `output/column`. With a
    `table`, the columns of all rows that remain, a column has another type than rows that landed once and are gone.
    """

    kind: Literal["schema"] = "schema"
    newest_format: ClassVar[int] = CORRECTED_FORMAT
    evolved: Columns = {}
    reason: str = ""
    folder_prefix: FolderPrefix = FORMER_PREFIX
    split: SplitText | None = None
    table: Columns | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_format_2(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(avro := data.get("avro"), dict):
            return {k: v for k, v in data.items() if k != "avro"} | {"source": {"format": "avro"} | avro}
        return data

    @model_serializer(mode="wrap")
    def _without_source(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = serialize(self)
        optional = ("source", "key", "folder_prefix", "base", "protect", "landed", "split")
        absent = {"table"} if self.table is None else set()
        return {k: v for k, v in document.items() if k not in absent and (k not in optional or v)}


class IntentEntry(_Entry):
    """The offsets that a commit will write. This entry's number is the mark in their metadata."""

    kind: Literal["intent"] = "intent"
    offsets: tuple[KeyOffset, ...]


class CommitEntry(_Entry):
    """Kafka holds these committed offsets: they were read back. `mark` is the intent's number."""

    kind: Literal["commit"] = "commit"
    mode: str
    mark: int
    offsets: tuple[KeyOffset, ...]


class LossEntry(_Entry):
    """Offsets that Kafka deleted before they were read, accepted as lost."""

    kind: Literal["loss"] = "loss"
    ranges: tuple[KeyRange, ...]
    reason: str


class SkipEntry(_Entry):
    """Offsets that are skipped by a decision, with its reason. They are never read."""

    kind: Literal["skip"] = "skip"
    ranges: tuple[KeyRange, ...]
    reason: str


class AbandonEntry(_Entry):
    """The batch will not be published; its ranges are pending again."""

    kind: Literal["abandon"] = "abandon"
    batch: int
    reason: str


class Entering(_Model):
    """A partition leaves one life of its log for another, where the feed has a new origin."""

    leaves: Internal[Key]
    enters: Flat[OriginItem]

    @property
    def left(self) -> Derived[str]:
        return self.leaves.incarnation

    @property
    def entered(self) -> Derived[str]:
        return self.enters.key.incarnation

    @model_validator(mode="after")
    def _of_one_partition(self) -> Self:
        if self.leaves.tp != self.enters.key.tp:
            raise ValueError("leaves one partition and enters another")
        return self


class AcceptEntry(_Entry):
    """The decision to accept that Kafka differs from the ledger; `event` is the kind of difference.

    An item counts only while its partition is still in the life that it leaves. Of its pending ranges, `lost` are in
    no log any longer, and `passed` lie below the point at which the feed continues in the same log.
    """

    kind: Literal["accept"] = "accept"
    event: str
    items: tuple[Entering, ...]
    passed: tuple[KeyRange, ...] = ()
    lost: tuple[KeyRange, ...] = ()
    reason: str


class MovedEntry(_Entry):
    """Committed offsets that were moved by hand. The next commit goes from there to the frontier."""

    kind: Literal["moved"] = "moved"
    offsets: tuple[KeyOffset, ...]
    reason: str


class TakenMark(_Model):
    """The marks of another ledger, up to its entry `number`, which are accepted."""

    ledger: str
    number: Int64


class TakeEntry(_Entry):
    """The decision to take the group over from other ledgers, by name. Their newer marks are still refused.

    `committed` are the offsets that stood there. The feed begins at `origins` in partitions that it had not planned;
    `begin` is the way in which they were chosen.
    """

    kind: Literal["take"] = "take"
    marks: tuple[TakenMark, ...]
    committed: tuple[KeyOffset, ...]
    origins: tuple[OriginItem, ...]
    begin: Literal["committed", "start"]
    reason: str


class RetireEntry(_Entry):
    """Retired rows that landed before a time (ms): these ranges, in these parts (lake paths)."""

    kind: Literal["retire"] = "retire"
    before: int
    ranges: tuple[KeyRange, ...]
    parts: tuple[str, ...]
    reason: str


class EraseEntry(_Entry):
    """The decision to erase the records at these offsets: from here on, no batch may publish rows of them.

    `records` counts them. Conditions and keys that selected them are not stored: they may hold a person's data.
    """

    kind: Literal["erase"] = "erase"
    ranges: tuple[KeyRange, ...]
    records: int
    reason: str


class HoldEntry(_Entry):
    """A legal hold: windows from `start` to `end` (ms; None: without a limit) are neither expired nor erased.

    With `ends`, the number of another such entry, it is the end of that hold.
    """

    kind: Literal["hold"] = "hold"
    start: Int64 | None = None
    end: Int64 | None = None
    ends: int | None = None
    reason: str


class GapEntry(_Entry):
    """The decision to continue without the lost entries from this number on. Live plans end here.

    The next number is `next`, above all numbers known to be used. `evidence` describes how the loss was noticed.
    `ledger` names a ledger that was lost completely (empty: this one continues). `committed` are the group's offsets
    that lost entries had committed, ahead of the accounted offsets.
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
    | TakeEntry
    | RetireEntry
    | EraseEntry
    | HoldEntry
    | SchemaEntry
    | GapEntry
)


class _Packed(_Model):
    """The head of a compressed entry repeats the fields by which readers follow the log."""

    follows: str
    format: Literal[9]
    kind: str
    number: int | None
    packed: Base64Bytes
    size: Annotated[int, Field(ge=0, lt=1 << 40)]


_PACKED = b'{"follows":'
"""How a compressed entry begins; the first field of all others is `at`."""
_SIZE = re.compile(rb'"size":(\d+)')
_ADAPTER: TypeAdapter[Entry] = TypeAdapter(Annotated[Entry, Field(discriminator="kind")])
NEWEST_FORMATS: Mapping[str, int] = {e.model_fields["kind"].default: e.newest_format for e in Entry.__args__}
"""The newest format of each kind of entry."""


def dump(entry: Entry) -> bytes:
    """Returns the entry as one line of canonical JSON, compressed if it is long."""
    line = _to_line(entry.model_dump(mode="json", by_alias=True))
    if len(line) < PACKED_FROM:
        return line
    head = {"format": PACKED_FORMAT, "kind": entry.kind, "number": entry.number, "follows": entry.follows}
    return _to_line(head | {"size": len(line), "packed": base64.b64encode(zlib.compress(line)).decode()})


def _to_line(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def measure(data: bytes) -> int:
    """Returns the size of an entry's JSON in bytes, of a compressed one by its head."""
    size = _SIZE.search(data) if data.startswith(_PACKED) else None
    return int(size[1]) if size else len(data)


def parse(data: bytes, path: str) -> Entry:
    """Parse the entry in `data`, read from `path`. Raises LedgerTooNew, LedgerCorrupt."""
    line, head = data, None
    try:
        if data.startswith(_PACKED):
            head = _Packed.model_validate_json(data)
            line = inflate(head.packed, head.size)
        entry = _ADAPTER.validate_json(line)
    except ValidationError as e:
        raise _explain_unreadable(line, path, e) from None
    except (ValueError, zlib.error) as e:
        raise _build_corrupt_error(path, f"its compressed part: {e}") from None
    if head and (entry.kind, entry.number, entry.follows) != (head.kind, head.number, head.follows):
        raise _build_corrupt_error(path, "its head is that of another entry")
    return entry


def _explain_unreadable(data: bytes, path: str, error: ValidationError) -> LedgerTooNew | LedgerCorrupt:
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as e:
        return _build_corrupt_error(path, f"not JSON ({e.__class__.__name__}), {len(data)} bytes")
    if not isinstance(raw, dict):
        return _build_corrupt_error(path, "not a JSON object")
    first = error.errors()[0]
    where = ".".join(str(x) for x in first["loc"])
    added = first["type"] in ("extra_forbidden", "unexpected_keyword_argument")
    newer = _find_newer_format(raw) or (f"field {where} is unknown here" if added else None)
    if newer is None:
        return _build_corrupt_error(path, f"field {where}: {first['msg']}")
    return LedgerTooNew(
        f"ledger entry {path} was written by a newer Sluice ({newer})",
        remedy="upgrade Sluice on this machine; nothing was changed",
    )


def _find_newer_format(raw: dict[str, object]) -> str | None:
    """Returns a description of the entry's format or kind if it is newer than this code."""
    version, kind = raw.get("format"), raw.get("kind")
    newest = PACKED_FORMAT if "packed" in raw else NEWEST_FORMATS.get(str(kind), FORMAT)
    if (isinstance(version, int) and version > newest) or (isinstance(kind, str) and kind not in NEWEST_FORMATS):
        return f"format {version!r}, kind {kind!r}; this one reads format {newest}"
    return None


def _build_corrupt_error(path: str, why: str) -> LedgerCorrupt:
    return LedgerCorrupt(
        f"ledger entry {path} cannot be read: {why}",
        remedy="restore this file from a backup of the lake; Sluice reads no further and changes nothing",
    )
