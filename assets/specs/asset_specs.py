"""How Dagster shows a feed's assets: keys, groups, descriptions, kinds, columns.

A project of one's own may translate all of it (`sluice.dagster`). Runs need the keys only. Metadata holds numbers that
Dagster plots and tables of at most `MAX_ROWS` rows; it never holds a client's settings or values of records.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from functools import cache, partial
from typing import Any

import dagster as dg
import pyarrow as pa

from sluice.pipelines.feed.changes_section import get_row_columns
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import StartKind, WindowSettings
from sluice.pipelines.records.rows.row_format import QUARANTINED, landed_schema
from sluice.pipelines.schema.schema import EXTRA, KAFKA, Kind, Schema, Type, arrow_type
from sluice.pipelines.util.units import DAY, HOUR, MINUTE, many


def landed_key(feed: str) -> dg.AssetKey:
    return dg.AssetKey([feed, "landed"])


def quarantined_key(feed: str) -> dg.AssetKey:
    return dg.AssetKey([feed, "quarantined"])


def committed_key(feed: str) -> dg.AssetKey:
    return dg.AssetKey([feed, "committed"])


def republished_key(feed: str) -> dg.AssetKey:
    return dg.AssetKey([feed, "republished"])


def table_key(feed: str, output: str = "") -> dg.AssetKey:
    return dg.AssetKey([feed, output, "table"] if output else [feed, "table"])


def build_current_key(feed: str) -> dg.AssetKey:
    return dg.AssetKey([feed, "current"])


def build_output_key(feed: str, output: str) -> dg.AssetKey:
    return dg.AssetKey([feed, output])


def topic_key(topic: str) -> dg.AssetKey:
    return dg.AssetKey(["kafka", topic])


@dataclass(frozen=True, slots=True)
class Keys:
    """One feed's assets, the topics that it reads, and its outputs."""

    landed: dg.AssetKey
    quarantined: dg.AssetKey
    committed: dg.AssetKey
    republished: dg.AssetKey
    current: dg.AssetKey
    table: Callable[[str], dg.AssetKey]
    """By the output; the empty one in a feed without `split`."""
    topic: Callable[[str], dg.AssetKey]
    output: Callable[[str], dg.AssetKey]

    @classmethod
    def of(cls, feed: str) -> Keys:
        """Returns the untranslated keys."""
        own = (landed_key(feed), quarantined_key(feed), committed_key(feed), republished_key(feed))
        return cls(*own, build_current_key(feed), partial(table_key, feed), topic_key, partial(build_output_key, feed))


class AssetOf(StrEnum):
    """The role of an asset."""

    TOPIC = "topic"
    LANDED = "landed"
    OUTPUT = "output"
    QUARANTINED = "quarantined"
    COMMITTED = "committed"
    REPUBLISHED = "republished"
    TABLE = "table"
    CURRENT = "current"


@dataclass(frozen=True, slots=True)
class FeedAsset:
    """An asset that is to be shown. `name` is the feed's, or the topic's. There is no `feed` for a topic, which several
    may read, and for a file that is wrong; that of an output, or its table, is the feed as the output sees it.

    `spec` is the default spec.
    """

    kind: AssetOf
    name: str
    feed: Feed | None = field(repr=False)
    spec: dg.AssetSpec = field(repr=False)


Translate = Callable[[FeedAsset], dg.AssetSpec]
"""Translates the presentation of an asset; partitions, checks and dependencies are fixed."""


def get_spec(asset: FeedAsset) -> dg.AssetSpec:
    return asset.spec


@dataclass(frozen=True, slots=True)
class AssetSpecs:
    """One feed's assets as they are shown."""

    landed: dg.AssetSpec
    quarantined: dg.AssetSpec
    committed: dg.AssetSpec
    republished: dg.AssetSpec
    current: dg.AssetSpec
    tables: Mapping[str, dg.AssetSpec]
    """By output; under the empty one in a feed without `split`."""
    topic: Callable[[str], dg.AssetSpec]
    outputs: Mapping[str, dg.AssetSpec]
    untranslated: Keys
    """Of outputs that the feed had not when definitions were loaded."""

    @classmethod
    def of(cls, feed: Feed, translate: Translate = get_spec) -> AssetSpecs:
        split = feed.datasets if feed.split else ()
        specs = {k: translate(FeedAsset(k, feed.name, feed, spec(feed))) for k, spec in _SPECS.items()}
        return cls(
            specs[AssetOf.LANDED],
            specs[AssetOf.QUARANTINED],
            specs[AssetOf.COMMITTED],
            specs[AssetOf.REPUBLISHED],
            specs[AssetOf.CURRENT],
            {d.output: translate(FeedAsset(AssetOf.TABLE, feed.name, d, _build_table(d))) for d in feed.datasets},
            lambda topic: translate(FeedAsset(AssetOf.TOPIC, topic, None, _build_topic(topic))),
            {o.output: translate(FeedAsset(AssetOf.OUTPUT, feed.name, o, _build_output(o))) for o in split},
            Keys.of(feed.name),
        )

    @property
    def keys(self) -> Keys:
        new = self.untranslated
        return Keys(
            self.landed.key,
            self.quarantined.key,
            self.committed.key,
            self.republished.key,
            self.current.key,
            lambda output: self.tables[output].key if output in self.tables else new.table(output),
            lambda topic: self.topic(topic).key,
            lambda output: self.outputs[output].key if output in self.outputs else new.output(output),
        )


def attributes(spec: dg.AssetSpec) -> dict[str, Any]:
    """Returns the arguments of `dagster.asset` from a spec, besides dependencies."""
    return {
        "key": spec.key,
        "group_name": spec.group_name,
        "description": spec.description,
        "kinds": spec.kinds,
        "metadata": spec.metadata,
        "owners": spec.owners,
        "tags": {k: v for k, v in spec.tags.items() if not k.startswith(_KIND)},
        "automation_condition": spec.automation_condition,
        "freshness_policy": spec.freshness_policy,
    }


_KIND = "dagster/kind/"


def trace_columns(
    spec: dg.AssetSpec, upstream: Iterable[dg.AssetKey], source: Callable[[str], str] = str
) -> dg.AssetSpec:
    """Returns the spec with the lineage of its columns; `source` is the name of a column in each upstream asset."""
    keys, columns = [*upstream], spec.metadata["dagster/column_schema"].columns
    lineage = {c.name: [dg.TableColumnDep(key, source(c.name)) for key in keys] for c in columns}
    return spec.merge_attributes(metadata={"dagster/column_lineage": dg.TableColumnLineage(lineage)})


def find_source(column: str) -> str:
    """Returns the name of a column's source in Kafka's records: `value`, or the part of a record."""
    return column.removeprefix(KAFKA) if column.startswith(KAFKA) else "value"


def _describe_feed(feed: Feed) -> dict[str, Any]:
    """Returns the attributes that all assets of a feed share."""
    return {"group_name": feed.group_name, "owners": list(feed.owners), "tags": dict(feed.tags)}


def _build_landed(feed: Feed) -> dg.AssetSpec:
    columns = describe_columns(feed.landed_columns, feed.descriptions)
    length, grace = timedelta(milliseconds=feed.window.length), timedelta(milliseconds=feed.window.grace)
    return dg.AssetSpec(
        landed_key(feed.name),
        **_describe_feed(feed),
        description=f"{f'{plain(feed.description)} ' if feed.description else ''}"
        f"The records of `{feed.topics}` as Parquet, each exactly once.",
        kinds={"parquet", "kafka"},
        metadata={} if feed.split else {"dagster/column_schema": columns},
        freshness_policy=dg.FreshnessPolicy.time_window(fail_window=3 * length + grace, warn_window=2 * length + grace),
    )


def _build_output(feed: Feed) -> dg.AssetSpec:
    key = build_output_key(feed.name, feed.output)
    return _build_landed(feed).replace_attributes(
        key=key,
        description=f"{f'{plain(feed.description)} ' if feed.description else ''}The records of `{feed.topics}` that"
        f" `split` gives to `{feed.output}`, as Parquet, each exactly once."
        f" Each run of {landed_key(feed.name).to_user_string()} reports them; it cannot run by itself.",
    )


def _build_quarantined(feed: Feed) -> dg.AssetSpec:
    rules = [name for name, value in (("the schema", feed.columns), ("the contract", feed.contract)) if value]
    violated = "the schema or the contract of their output, or have none" if feed.split else " or ".join(rules)
    return dg.AssetSpec(
        quarantined_key(feed.name),
        **_describe_feed(feed),
        description=f"Records of `{feed.topics}` that violate {violated}, unchanged, with the reason."
        f" Each run of {landed_key(feed.name).to_user_string()} reports them; it cannot run by itself.",
        kinds={"parquet", "kafka"},
        metadata={"dagster/column_schema": columns_of(QUARANTINED, own=True)},
    )


def _build_committed(feed: Feed) -> dg.AssetSpec:
    return dg.AssetSpec(
        committed_key(feed.name),
        **_describe_feed(feed),
        description=f"The committed offsets of group `{feed.group}`, never beyond landed rows.",
        kinds={"kafka"},
    )


def _build_republished(feed: Feed) -> dg.AssetSpec:
    return dg.AssetSpec(
        republished_key(feed.name),
        **_describe_feed(feed),
        description=f"Rows of {feed.name} that went back into Kafka. The job `republish_{feed.schedule}_feeds` sends"
        " them.",
        kinds={"kafka"},
    )


def _build_table(feed: Feed) -> dg.AssetSpec:
    names = feed.table.names if feed.table else ()
    columns = describe_columns(feed.landed_columns, feed.descriptions)
    called = f" `{names[0]}`" if names else ""
    return dg.AssetSpec(
        table_key(feed.name, feed.output),
        **_describe_feed(feed),
        description=f"The landed rows as a table{called} with snapshots: the same files, by name and by SQL."
        f" Each run brings it up to date; by hand: `sluice table sync {feed.dataset}`.",
        kinds={feed.table.format.lower()} if feed.table else None,
        metadata={"dagster/column_schema": columns} | ({"dagster/table_name": names[0]} if names else {}),
    )


def _build_current(feed: Feed) -> dg.AssetSpec:
    name = feed.table.current if feed.table else False
    landed = {f.name: f.type for f in feed.landed_columns.fields} if feed.landed_columns else {}
    rows = get_row_columns(feed.changes, landed) if feed.changes and landed else landed
    columns = columns_of(
        pa.schema([(n, arrow_type(t)) for n, t in rows.items()]), feed.descriptions, types=_name_json(rows)
    )
    return dg.AssetSpec(
        build_current_key(feed.name),
        **_describe_feed(feed),
        description=f"The rows as of now: the last change of each key in {feed.name}. Each run brings it up to date; by"
        f" hand: `sluice table sync {feed.dataset}`.",
        kinds={feed.table.format.lower()} if feed.table else None,
        metadata={"dagster/column_schema": columns} | ({"dagster/table_name": name} if isinstance(name, str) else {}),
    )


def _build_topic(topic: str) -> dg.AssetSpec:
    description = "A topic in Kafka. Observe it to see its partitions, ends and lag."
    return dg.AssetSpec(topic_key(topic), group_name="kafka", kinds={"kafka"}, description=description)


_SPECS: dict[AssetOf, Callable[[Feed], dg.AssetSpec]] = {
    AssetOf.LANDED: _build_landed,
    AssetOf.QUARANTINED: _build_quarantined,
    AssetOf.COMMITTED: _build_committed,
    AssetOf.REPUBLISHED: _build_republished,
    AssetOf.CURRENT: _build_current,
}


KEY_FORMAT, DATE_FORMAT = "%Y-%m-%dT%H:%M", "%Y-%m-%d"
"""How partitions are named: windows in UTC, and days of a time zone."""

REACH = 7 * DAY
"""How far back partitions reach if nothing is known: as long as Kafka keeps records by default."""


def now() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def partitions_of(feed: Feed, first_window: int | None, now: int) -> dg.TimeWindowPartitionsDefinition:
    """The feed's windows. `now` (ms) counts only as long as the ledger has no first window."""
    first = feed.window.start_of(_find_first(feed, now) if first_window is None else first_window)
    return _build_partitions(feed.window.name(first), feed.window.cron, feed.window.timezone)


@cache  # feeds with the same windows share what Dagster computes of them
def _build_partitions(start: str, every: str, zone: str | None) -> dg.TimeWindowPartitionsDefinition:
    fmt = DATE_FORMAT if zone else KEY_FORMAT
    return dg.TimeWindowPartitionsDefinition(start=start, fmt=fmt, cron_schedule=every, timezone=zone or "UTC")


def _find_first(feed: Feed, now: int) -> int:
    """The earliest time that may be requested; a whole day, so that it does not move with every load."""
    if feed.start.kind is StartKind.TIME:
        return feed.start.ms
    first = feed.start.earliest(now)
    begin = now - REACH if first is None else first
    return begin - begin % DAY


def closing_words(window: WindowSettings) -> str:
    """Returns when windows close, in words: `every hour, 5 minutes past`."""
    every, first = _compute_closing(window)
    length = "hour" if every == 60 else many(every, "minute")
    return f"every {length}, {many(first, 'minute')} past" if first else f"every {length}, on the dot"


def closing_cron(window: WindowSettings) -> str:
    """Returns the cron schedule at which windows close; hourly for longer windows, for early retries of failed ones."""
    every, first = _compute_closing(window)
    return f"{first} * * * *" if every == 60 else f"{first}-59/{every} * * * *"


def closings_until(window: WindowSettings, time: int) -> int:
    """How often, since the epoch, `closing_cron` has been due at a time (ms)."""
    every, first = _compute_closing(window)
    return (time // MINUTE - first) // every


def _compute_closing(window: WindowSettings) -> tuple[int, int]:
    """How often, and how long after that, in minutes."""
    every = min(window.length, HOUR) // MINUTE
    return every, -(-window.grace // MINUTE) % every


_MARKUP = re.compile(
    r"""[<`*]                                           # HTML, code, emphasis
    |(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])|~(?=~)         # emphasis
    |\](?=[(\[:])                                      # what makes links and images of brackets
    |(?<=:)/(?=/)|(?<=www)\.|@                         # addresses, which become links by themselves
    |\\(?=[!-/:-@\[-`{-~])|&(?=\#?[0-9A-Za-z]+;)       # an escape, an entity
    |^[-#>+=]                                          # a list, a heading, a quotation
    """,
    re.VERBOSE | re.IGNORECASE,
)
_NUMBERED = re.compile(r"^([0-9]+)(?=[.)])")


def plain(text: str) -> str:
    """One line of text as Markdown that shows exactly this text: no image, no link, no emphasis.

    Usual text stays as it is, for the places where the UI shows a description without rendering it.
    """
    return _NUMBERED.sub(r"\1\\", _MARKUP.sub(r"\\\g<0>", text))


Metadata = dict[str, Any]

MAX_ROWS = 200
"""Rows of a table: an event is read whole by every page that shows it."""


_OWN = {
    "key": "the record's key",
    "value": "the record's value, as it is in Kafka",
    "topic": "the topic that the record is in",
    "partition": "the topic's partition",
    "offset": "the record's offset in its partition",
    "timestamp": "the record's time",
    "timestampType": "0: the producer stamped it, 1: the broker did",
    "headers": "the record's headers, in their order",
    "tombstone": "whether the record has no value",
    "_extra": "the fields that the schema does not name, as JSON",
    "stage": "what refused the record: decode, schema or contract",
    "reason": "why, in one word",
    "expectation": "the contract's expectation that it broke",
    "field": "the field's path",
    "detail": "why, in a sentence",
    "byte": "where in the value",
    "batch": "the batch that read the record",
    "contract": "the hash of the contract that it was checked against",
}
"""Descriptions of Sluice's own columns."""


def describe_columns(schema: Schema | None, described: Mapping[str, str]) -> dg.TableSchema:
    """Returns the columns of landed rows. `schema` None means a raw feed."""
    types = _name_json({f.name: f.type for f in schema.fields}) if schema else {}
    return columns_of(landed_schema(schema), described, schema is None, types)


def _name_json(types: Mapping[str, Type]) -> dict[str, str]:
    """Returns types that contain `json`, which Arrow has as strings."""
    return {name: str(type_) for name, type_ in types.items() if Kind.JSON in str(type_)}


def columns_of(
    schema: pa.Schema,
    described: Mapping[str, str] | None = None,
    own: bool = False,
    types: Mapping[str, str] | None = None,
) -> dg.TableSchema:
    """Returns an Arrow schema as Dagster's columns. `described`: their descriptions. `own`: all are Sluice's own.
    `types` replace Arrow's."""
    descriptions, names = described or {}, types or {}
    kinds = ((f, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in schema)
    return dg.TableSchema(
        [
            dg.TableColumn(
                f.name,
                names.get(f.name) or str(kind),
                description=descriptions.get(f.name) or _find_description(f.name, own),
                constraints=dg.TableColumnConstraints(nullable=f.nullable),
            )
            for f, kind in kinds
        ]
    )


def _find_description(name: str, own: bool) -> str | None:
    plain = name.removeprefix(KAFKA)
    return _OWN.get(plain) if own or plain != name or name == EXTRA else None


def table(rows: Sequence[Mapping[str, str | int | float]], columns: Mapping[str, str]) -> dg.TableMetadataValue:
    """A bounded table; `columns` maps name to Dagster's type (`string`, `int`, `float`)."""
    records = [dg.TableRecord(dict(r)) for r in rows[:MAX_ROWS]]
    if len(rows) > MAX_ROWS:
        rest = {c: f"… and {len(rows) - MAX_ROWS} more" if i == 0 else "" for i, c in enumerate(columns)}
        records.append(dg.TableRecord(rest))
    return dg.MetadataValue.table(records, dg.TableSchema([dg.TableColumn(n, t) for n, t in columns.items()]))
