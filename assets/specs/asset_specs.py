"""How Dagster shows a feed's assets: keys, groups, descriptions, kinds, columns.

A project of one's own may translate all of it (`sluice.dagster`). Runs need the keys only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any

import dagster as dg

from sluice.assets.specs.metadata_tables import columns_of, plain
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.records.rows.row_format import QUARANTINED, landed_schema
from sluice.pipelines.schema.schema import KAFKA


def landed_key(feed: str) -> dg.AssetKey:
    return dg.AssetKey([feed, "landed"])


def quarantined_key(feed: str) -> dg.AssetKey:
    return dg.AssetKey([feed, "quarantined"])


def committed_key(feed: str) -> dg.AssetKey:
    return dg.AssetKey([feed, "committed"])


def republished_key(feed: str) -> dg.AssetKey:
    return dg.AssetKey([feed, "republished"])


def table_key(feed: str) -> dg.AssetKey:
    return dg.AssetKey([feed, "table"])


def topic_key(topic: str) -> dg.AssetKey:
    return dg.AssetKey(["kafka", topic])


@dataclass(frozen=True, slots=True)
class Keys:
    """One feed's assets, and the topics that it reads."""

    landed: dg.AssetKey
    quarantined: dg.AssetKey
    committed: dg.AssetKey
    republished: dg.AssetKey
    table: dg.AssetKey
    topic: Callable[[str], dg.AssetKey] = topic_key

    @classmethod
    def of(cls, feed: str) -> Keys:
        """The keys that nobody has translated."""
        own = (landed_key(feed), quarantined_key(feed), committed_key(feed))
        return cls(*own, republished_key(feed), table_key(feed))


class AssetOf(StrEnum):
    """The role of an asset."""

    TOPIC = "topic"
    LANDED = "landed"
    QUARANTINED = "quarantined"
    COMMITTED = "committed"
    REPUBLISHED = "republished"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class FeedAsset:
    """An asset that is to be shown. `name` is the feed's, or the topic's. There is no `feed` for a topic, which several
    may read, and for a file that is wrong.

    `spec` is how it is shown if nobody says otherwise.
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
    table: dg.AssetSpec
    topic: Callable[[str], dg.AssetSpec]

    @classmethod
    def of(cls, feed: Feed, translate: Translate = get_spec) -> AssetSpecs:
        specs = {k: translate(FeedAsset(k, feed.name, feed, spec(feed))) for k, spec in _SPECS.items()}
        return cls(
            specs[AssetOf.LANDED],
            specs[AssetOf.QUARANTINED],
            specs[AssetOf.COMMITTED],
            specs[AssetOf.REPUBLISHED],
            specs[AssetOf.TABLE],
            lambda topic: translate(FeedAsset(AssetOf.TOPIC, topic, None, _build_topic(topic))),
        )

    @property
    def keys(self) -> Keys:
        feed = self.landed.key, self.quarantined.key, self.committed.key, self.republished.key, self.table.key
        return Keys(*feed, lambda topic: self.topic(topic).key)


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


def _build_freshness(feed: Feed) -> dg.FreshnessPolicy:
    """A policy by the feed's windows: an asset without the last two windows warns, without the last three fails."""
    length, grace = timedelta(milliseconds=feed.window.length), timedelta(milliseconds=feed.window.grace)
    return dg.FreshnessPolicy.time_window(fail_window=3 * length + grace, warn_window=2 * length + grace)


def _build_landed(feed: Feed) -> dg.AssetSpec:
    columns = columns_of(landed_schema(feed.columns), feed.descriptions, own=feed.columns is None)
    return dg.AssetSpec(
        landed_key(feed.name),
        **_describe_feed(feed),
        description=f"{f'{plain(feed.description)} ' if feed.description else ''}"
        f"The records of `{feed.topics}` as Parquet, each exactly once.",
        kinds={"parquet", "kafka"},
        metadata={"dagster/column_schema": columns},
        freshness_policy=_build_freshness(feed),
    )


def _build_quarantined(feed: Feed) -> dg.AssetSpec:
    return dg.AssetSpec(
        quarantined_key(feed.name),
        **_describe_feed(feed),
        description=f"Records of `{feed.topics}` that violate {_name_conditions(feed)}, unchanged, with the reason.",
        kinds={"parquet", "kafka"},
        metadata={"dagster/column_schema": columns_of(QUARANTINED, own=True)},
    )


def _name_conditions(feed: Feed) -> str:
    return " or ".join(w for w, there in (("the schema", feed.columns), ("the contract", feed.contract)) if there)


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
    columns = columns_of(landed_schema(feed.columns), feed.descriptions, own=feed.columns is None)
    called = f" `{names[0]}`" if names else ""
    return dg.AssetSpec(
        table_key(feed.name),
        **_describe_feed(feed),
        description=f"The landed rows as a table{called} with snapshots: the same files, by name and by SQL."
        f" Each run brings it up to date; by hand: `sluice table sync {feed.name}`.",
        kinds={feed.table.format.lower()} if feed.table else None,
        metadata={"dagster/column_schema": columns} | ({"dagster/table_name": names[0]} if names else {}),
    )


def _build_topic(topic: str) -> dg.AssetSpec:
    description = "A topic in Kafka. Observe it to see its partitions, ends and lag."
    return dg.AssetSpec(topic_key(topic), group_name="kafka", kinds={"kafka"}, description=description)


_SPECS: dict[AssetOf, Callable[[Feed], dg.AssetSpec]] = {
    AssetOf.LANDED: _build_landed,
    AssetOf.QUARANTINED: _build_quarantined,
    AssetOf.COMMITTED: _build_committed,
    AssetOf.REPUBLISHED: _build_republished,
    AssetOf.TABLE: _build_table,
}
