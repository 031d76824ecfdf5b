"""A feed, as its file describes it: typed, frozen and validated. Secrets are masked wherever a feed is shown.

`feed.load` makes feeds from files. Each stage gets its own section of the feed, never the whole of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from enum import Enum, auto
from typing import Annotated, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    InstanceOf,
    ValidationInfo,
    WithJsonSchema,
    field_serializer,
    model_validator,
)

from sluice.pipelines.contract.expectation import Contract
from sluice.pipelines.feed.changes_section import (
    ChangesSettings,
    UnusableChanges,
    check_changes,
    check_protection,
    get_row_columns,
)
from sluice.pipelines.feed.kafka_section import KafkaSettings, RegistrySettings
from sluice.pipelines.feed.sections import (
    Alerts,
    AssetGroup,
    CommitMode,
    CompactionSettings,
    DeadLetters,
    Description,
    Duration,
    FetchSettings,
    FieldProtection,
    GroupName,
    LandingSettings,
    Layout,
    Limits,
    LocalFile,
    Name,
    OffsetSettings,
    OffsetStore,
    OnDrift,
    OnUndecodable,
    Owner,
    Policies,
    PublishPolicy,
    RecordFormat,
    Settings,
    SparkSettings,
    Start,
    TagKey,
    TagValue,
    Text,
    WindowSettings,
    below_root,
    parse_start,
)
from sluice.pipelines.feed.split_section import SplitSettings
from sluice.pipelines.feed.stores import (
    CLIENT_BYTES,
    STORES,
    AzureSettings,
    GcsSettings,
    S3Settings,
    StoreSettings,
    scheme,
    store_address,
)
from sluice.pipelines.feed.table_section import TableSettings, UnusableTable, check_address, check_holds
from sluice.pipelines.feed.topic_selection import TopicFilter
from sluice.pipelines.model.kafka import Isolation
from sluice.pipelines.model.receipts import EngineKind, name_dataset
from sluice.pipelines.records.rows.split_rule import OTHERWISE, Otherwise
from sluice.pipelines.records.rows.value_reader import KeyReader, Reader
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.pipelines.records.shape import READERS, Shape, Split
from sluice.pipelines.schema.protection import (
    DROPPED,
    HEADERS,
    QUARANTINE,
    RAW_KEY,
    ProtectedField,
    Protection,
    find_unmatched,
    get_landed_columns,
    protect_schema,
)
from sluice.pipelines.schema.schema import EXTRA, KAFKA, Schema, parse_schema
from sluice.pipelines.schema.schema import Field as Column
from sluice.pipelines.util.units import sanitize

SHARED, OWN = "many", "own"
"""Values of `schedule`: the schedule that all feeds share which name no other, and the feed's own alone."""

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
"""The beginning of an address, also with a slash too few: a folder of that name would be a surprise."""


def _lake(text: str, info: ValidationInfo) -> str:
    if scheme(text):
        return store_address(text)
    if _ADDRESS.match(text):
        raise ValueError("is neither a folder nor an address of a store")
    return below_root(text, info)


_RAW = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")
_OWN = (EXTRA, f"{KAFKA}tombstone", *(KAFKA + name for name in _RAW if name != "value"))


def _check_described(described: dict[str, str], info: ValidationInfo) -> dict[str, str]:
    if "columns" not in info.data:
        return described  # the schema's own problem is reported
    columns = info.data["columns"]
    column_names = {*_OWN, *(f.name for f in columns.fields)} if columns else {*_RAW}
    if not column_names.issuperset(described):
        raise ValueError("describes a column that the feed does not have")
    return described


def _check_landing(landing: LandingSettings, info: ValidationInfo) -> LandingSettings:
    if "columns" in info.data and (info.context or {}).get(LEVEL) is None:
        columns = info.data["columns"]
        names = {*_OWN, *(f.name for f in columns.fields)} if columns else {*_RAW}
        if not names.issuperset(path.partition(".")[0] for path in landing.bloom_filters):
            raise ValueError("has a Bloom filter for a column that the feed does not have")
    return landing


def _check_letters(letters: DeadLetters | None, info: ValidationInfo) -> DeadLetters | None:
    commit, topics = info.data.get("commit"), info.data.get("topics")
    if letters and commit not in (CommitMode.TRANSACTIONAL, None):
        raise ValueError("need the transaction of `commit: transactional`")
    if letters and topics and topics.takes(letters.topic):
        raise ValueError("go to a topic that this feed reads")
    return letters


def _usual_commit(offsets: OffsetSettings | None) -> CommitMode:
    in_kafka = offsets is None or offsets.store is OffsetStore.KAFKA
    return CommitMode.TRANSACTIONAL if in_kafka else CommitMode.PLAIN


def _check_commit(commit: CommitMode, info: ValidationInfo) -> CommitMode:
    offsets = info.data.get("offsets")
    if commit is CommitMode.TRANSACTIONAL and offsets and offsets.store is OffsetStore.ZOOKEEPER:
        raise ValueError("is a transaction of Kafka, and the offsets are in ZooKeeper")
    return commit


class Unprotectable(ValueError):
    """Rules of `protect` that the feed cannot follow."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


class Level(Enum):
    """The part of a split feed that is validated: the whole, or one output as a feed of its own."""

    SPLIT = auto()
    OUTPUT = auto()


LEVEL = "level"
"""The key of the level in the context of a validation."""


def _check_protect(rules: dict[str, FieldProtection], info: ValidationInfo) -> dict[str, FieldProtection]:
    protection, columns = _to_protection(rules), info.data.get("columns")
    level = (info.context or {}).get(LEVEL)
    for path, of in rules.items():
        if (path == QUARANTINE) != (of.encrypt is not None) and of.rule != DROPPED:
            raise Unprotectable(
                f"has {sanitize(path)} under another rule than it can have",
                f"`encrypt` is for `{QUARANTINE}` alone, which has `encrypt` or `drop`",
            )
    if protection is None or "columns" not in info.data or level is Level.SPLIT:
        return rules
    if columns is None:
        if wrong := next((p for p in rules if not is_of_raw(p)), ""):
            raise Unprotectable(
                f"has {sanitize(wrong)} under `format: raw`, whose values have no fields",
                f"give the feed a schema, or protect only `{RAW_KEY}` and `{HEADERS}.NAME`",
            )
        return rules
    protected = _protect_columns(columns, protection, info.data.get("key_reader"))
    if level is not Level.OUTPUT and (wrong := next(find_unmatched(protected, protection), "")):
        raise build_unmatched_error(wrong, protected)
    if not get_landed_columns(protected).fields:
        raise Unprotectable("drops all columns", "leave at least one")
    return rules


def is_of_raw(path: str) -> bool:
    """Returns whether a rule of this path is about a record's key or headers alone."""
    return path in (RAW_KEY, HEADERS, QUARANTINE) or path.startswith(f"{HEADERS}.")


def build_unmatched_error(wrong: str, protected: Sequence[ProtectedField]) -> Unprotectable:
    """Returns the error about a path that names none of the fields."""
    near = get_close_matches(wrong, [p for f in protected for p in f.paths], n=1)
    hint = f"did you mean `{near[0]}`? " if near else ""
    return Unprotectable(
        f"has {sanitize(wrong)}, which is no field of the schema",
        f"{hint}`{RAW_KEY}` is the key, `{HEADERS}.NAME` a header; `*.NAME` is also for fields in `{EXTRA}`",
    )


def _to_protection(rules: Mapping[str, FieldProtection]) -> Protection | None:
    return Protection(tuple((path, of.rule) for path, of in rules.items())) if rules else None


def _protect_columns(columns: Schema, protection: Protection, key: KeyReader | None) -> tuple[ProtectedField, ...]:
    return protect_schema(columns, protection, {f.name for f in key.columns} if key else ())


def _check_table(table: TableSettings | None, info: ValidationInfo) -> TableSettings | None:
    if table and info.data.get("split"):
        raise UnusableTable("names a table for all rows of a feed with `split`", "move it to `split.into.NAME.table`")
    if table:
        columns, protection = info.data.get("columns"), _to_protection(info.data.get("protect", {}))
        if columns and protection:
            columns = get_landed_columns(_protect_columns(columns, protection, info.data.get("key_reader")))
        check_holds(table, columns)
        check_address(table, info.data.get("lake", ""))
    return table


def _check_wire(reader: Reader, registry: RegistrySettings | None) -> None:
    if registry is None and reader.asks:
        raise ValueError("needs `registry`, unless it has `wire_format: bare`")
    glue = registry is not None and registry.glue is not None
    if reader.asks and reader.wire is WireFormat.GLUE and not glue:
        raise ValueError("has `wire_format: glue`, whose schemas are in `registry: {url: glue://REGION/REGISTRY}`")
    if reader.asks and glue and reader.wire is not WireFormat.GLUE:
        raise ValueError(f"has `wire_format: {reader.wire}`, whose numbers AWS Glue does not have: its own is `glue`")
    if reader.asks and registry and reader.wire is WireFormat.APICURIO_HEADERS and not registry.apicurio:
        raise ValueError(
            "has `wire_format: apicurio_headers`, which needs Apicurio's `registry.url`: one that ends with"
            " /apis/ccompat/v7; Apicurio's own API at the same address is used"
        )


def _check_message(message: str | None, format_: str) -> None:
    if message is not None and format_ != RecordFormat.PROTOBUF:
        raise ValueError("has `message` without `format: protobuf`, whose files may have several")


_PROTECT = {
    "type": "object",
    "additionalProperties": {
        "anyOf": [
            {"enum": ["drop"]},
            {"type": "object", "properties": {"hmac": {"type": "string"}}, "additionalProperties": False},
            {"type": "object", "properties": {"encrypt": {"type": "string"}}, "additionalProperties": False},
            {
                "type": "object",
                "properties": {"keep_last": {"type": "integer", "minimum": 1, "maximum": 64}},
                "additionalProperties": False,
            },
        ]
    },
}


class KeySettings(Settings):
    """How keys are read: a format with schemas of its own, and the schema to read by."""

    format: Text
    schema_file: LocalFile
    wire_format: WireFormat | None = None
    message: Text | None = None

    @model_validator(mode="after")
    def _message_of_protobuf(self) -> Self:
        _check_message(self.message, self.format)
        return self


class Feed(Settings):
    """One dataset: its topics, its consumer group, and how its records are landed and committed."""

    name: Name = Field(alias="feed")
    stored: Name = Field(default_factory=lambda data: data["name"], alias="stored_as")
    """The name of its ledger, and of its folders in the lake."""
    retired: bool = False
    """It lands nothing any more; its rows stay readable."""
    kafka: KafkaSettings
    topics: TopicFilter
    group: GroupName = Field(default_factory=lambda data: f"sluice-{data['stored']}")
    start: Annotated[Start, BeforeValidator(parse_start), WithJsonSchema({"type": "string"})]
    isolation: Isolation = Isolation.READ_COMMITTED
    format: RecordFormat = RecordFormat.RAW
    schema_file: LocalFile | None = None
    """Of a format with schemas of its own: the feed's, whose fields are the columns."""
    wire_format: WireFormat | None = None
    message: Text | None = None
    """Of Protobuf: which of the messages in schema_file records are."""
    registry: RegistrySettings | None = None
    reader: InstanceOf[Reader] | None = Field(default=None, exclude=True)
    key: KeySettings | None = None
    key_reader: InstanceOf[KeyReader] | None = Field(default=None, exclude=True)
    columns: Annotated[InstanceOf[Schema], BeforeValidator(parse_schema), WithJsonSchema({"type": "object"})] | None = (
        Field(default=None, alias="schema")
    )
    protect: Annotated[dict[Text, FieldProtection], AfterValidator(_check_protect), WithJsonSchema(_PROTECT)] = Field(
        default_factory=dict
    )
    """Rules by the paths of fields, for values before they are written."""
    changes: ChangesSettings | None = None
    split: SplitSettings | None = None
    outputs: tuple[InstanceOf[Feed], ...] = Field(default=(), exclude=True)
    """Of a feed with `split`: the feed as each output sees it, in the order of its file."""
    output: str = Field(default="", exclude=True)
    """The output whose rows these are; empty for the feed itself."""
    description: Description | None = None
    descriptions: Annotated[dict[str, Description], AfterValidator(_check_described)] = Field(default_factory=dict)
    owners: tuple[Owner, ...] = ()
    tags: dict[TagKey, TagValue] = Field(default_factory=dict)
    group_name: AssetGroup = Field(default_factory=lambda data: data["name"])
    """Of the feed's assets in Dagster; `group` is the consumer group."""
    lake: Annotated[Text, AfterValidator(_lake)] = Field(default=".sluice/lake", validate_default=True)
    s3: S3Settings = S3Settings()
    gcs: GcsSettings = GcsSettings()
    azure: AzureSettings = AzureSettings()
    window: WindowSettings = WindowSettings()
    schedule: Name = SHARED
    publish: PublishPolicy = PublishPolicy.BY_PARTITION
    offsets: OffsetSettings = OffsetSettings()
    commit: Annotated[CommitMode, AfterValidator(_check_commit)] = Field(
        default_factory=lambda data: _usual_commit(data.get("offsets"))
    )
    transactional_id: GroupName = Field(default_factory=lambda data: f"sluice-{data['group']}-{data['stored']}")
    dead_letters: Annotated[DeadLetters | None, AfterValidator(_check_letters)] = None
    landing: Annotated[LandingSettings, AfterValidator(_check_landing)] = LandingSettings()
    compaction: CompactionSettings = CompactionSettings()
    retention: Duration | None = None
    """Age (ms) of windows that expire by maintenance, or by `sluice expire` without a time. None: no window does."""
    table: Annotated[TableSettings | None, AfterValidator(_check_table)] = None
    limits: Limits = Limits()
    policies: Policies = Policies()
    alerts: Alerts = Alerts()
    contract: InstanceOf[Contract] | None = Field(default=None, exclude=True)
    fetch: FetchSettings = FetchSettings()
    engine: EngineKind = EngineKind.SPARK
    spark: SparkSettings = SparkSettings()

    @field_serializer("columns")
    def _serialize_columns(self, columns: Schema | None) -> dict[str, str] | None:
        return columns.texts() if columns else None

    @property
    def dataset(self) -> str:
        """The name of the rows: the feed's, or `feed.output`."""
        return name_dataset(self.name, self.output)

    @property
    def stored_dataset(self) -> str:
        """The name of the rows in the lake and in tables: another one than `dataset` after a feed was renamed."""
        return name_dataset(self.stored, self.output)

    @property
    def datasets(self) -> tuple[Feed, ...]:
        """The feed as each of its datasets sees it: those of a split feed, with the raw one if there is any; else the
        feed alone."""
        if self.split is None:
            return (self,)
        raw = self.model_copy(update={"output": OTHERWISE, "split": None, "outputs": ()})
        return (*self.outputs, raw) if self.split.otherwise is Otherwise.RAW else self.outputs

    @property
    def table_feeds(self) -> tuple[Feed, ...]:
        """Those of its datasets that have a table."""
        return tuple(d for d in self.datasets if d.table)

    @property
    def store(self) -> StoreSettings | None:
        """The settings of the lake's object store; None for a folder."""
        store = STORES.get(scheme(self.lake))
        settings: StoreSettings | None = getattr(self, store.section) if store else None
        return settings

    @property
    def task_memory(self) -> int:
        """Bytes of a task's memory without those of its lake: a store's client, and the data that waits for upload."""
        return self.limits.task_memory - (CLIENT_BYTES + self.store.buffer_bytes if self.store else 0)

    @property
    def batch_bytes(self) -> int:
        """The most bytes of records of one Kafka batch. Larger batches are oversized."""
        return self.fetch.limits().batch_bytes(self.task_memory)

    @property
    def shape(self) -> Shape:
        """The shape of the feed's rows: schema, contract and policies."""
        dropping = self.policies.on_undecodable is OnUndecodable.DROP
        protection = _to_protection(self.protect)
        if self.split:
            split = Split(self.split.rule, {o.output: o.shape for o in self.outputs})
            return Shape(dropping=dropping, protection=protection, split=split)
        closed = self.columns is not None and self.policies.on_drift is OnDrift.QUARANTINE
        return Shape(self.columns, self.contract, dropping, closed, self.reader, self.key_reader, protection=protection)

    @property
    def landed_columns(self) -> Schema | None:
        """The columns of landed rows, by the feed's file; None for a raw feed. `columns` are those of records."""
        return self.shape.landed_columns

    @property
    def readers(self) -> tuple[Reader, ...]:
        """Returns the readers of values and keys with schemas of their own; of a split feed, those of all outputs."""
        if self.split:
            return tuple(reader for output in self.outputs for reader in output.readers)
        return (*([self.reader] if self.reader else []), *([self.key_reader.reader] if self.key_reader else []))

    @model_validator(mode="after")
    def _key_beside_columns(self) -> Self:
        if self.key is None:
            return self
        if self.columns is None:
            raise ValueError("has `key` under `format: raw`, which has no columns but Kafka's")
        if self.key_reader is None:
            raise ValueError("has `key` with another format than those that have a schema_file")
        _check_wire(self.key_reader.reader, self.registry)
        return self

    @model_validator(mode="after")
    def _check_split(self) -> Self:
        if self.split is None:
            return self
        if self.columns:
            raise ValueError("has `split` and `schema`; give each output its own")
        return self

    @model_validator(mode="after")
    def _check_changes(self) -> Self:
        if self.changes is None:
            if self.table and self.table.current:
                raise UnusableChanges(
                    "has `table.current` without `changes`", "say how records change rows: changes: {format: upsert}"
                )
            return self
        if self.split or self.output:
            raise UnusableChanges("has `split` and `changes`", "land the changes as a feed of their own")
        check_protection(self.changes, {path: of.rule for path, of in self.protect.items()})
        check_changes(self.changes, self.landed_columns)
        if self.table and self.table.current and (columns := self.landed_columns):
            rows = get_row_columns(self.changes, {f.name: f.type for f in columns.fields})
            check_holds(self.table, Schema(tuple(Column(name, t) for name, t in rows.items())))
        return self

    @model_validator(mode="after")
    def _reader_has_a_schema(self) -> Self:
        if self.split:
            return self
        keys = [n for n in ("schema_file", "wire_format", "registry") if getattr(self, n) is not None]
        _check_message(self.message, self.format)
        if self.format not in READERS:
            if keys and not (keys == ["registry"] and self.key):
                raise ValueError(f"has {' and '.join(keys)} without `format: {'` or `'.join(READERS)}`")
            return self
        if self.reader is None:
            raise ValueError(f"has `format: {self.format}` without `schema_file`, the file of the schema to read by")
        _check_wire(self.reader, self.registry)
        if self.policies.on_drift is OnDrift.EVOLVE and not self.reader.evolves:
            raise ValueError("has `on_drift: evolve`; columns of such a feed come from its schema_file alone")
        return self

    @model_validator(mode="after")
    def _folders_have_the_windows_zone(self) -> Self:
        if self.window.timezone and self.landing.layout is Layout.RECORD_TIME:
            raise ValueError("has window.timezone with `layout: record_time`, whose folders are days in UTC")
        return self

    @model_validator(mode="after")
    def _typed_has_columns(self) -> Self:
        if self.split:
            return self
        if self.format is RecordFormat.JSON and self.columns is None:
            raise ValueError("has `format: json` without `schema`, the columns: {order_id: string, ts: timestamp}")
        if self.format is RecordFormat.RAW and self.columns is not None:
            raise ValueError("has `schema` without `format: json`")
        if self.columns is None and self.policies.on_drift is not OnDrift.EXTRA:
            raise ValueError("has policies.on_drift without a schema that records could drift from")
        return self


def group_feeds(feeds: Iterable[Feed], part: Callable[[Feed], object]) -> list[list[Feed]]:
    """Returns the feeds, together where that part of them is equal. Texts do not do: secrets look alike in them."""
    groups: list[tuple[object, list[Feed]]] = []
    for feed in feeds:
        own = part(feed)
        group = next((group for other, group in groups if other == own), None)
        if group is None:
            groups.append((own, [feed]))
        else:
            group.append(feed)
    return [group for _, group in groups]
