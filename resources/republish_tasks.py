"""Runs lanes of a republish, here or on an executor: the feed's Kafka and lake, opened where it runs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.ports import Lake
from sluice.pipelines.republishing.lanes import LaneSender
from sluice.pipelines.republishing.republish_plan import Republish, Wishes, find_shape_of
from sluice.pipelines.republishing.send_lane import TRANSACTION_SECONDS, Pace
from sluice.pipelines.republishing.values import check_sendable
from sluice.resources.kafka.connection.connection_settings import KafkaAccess
from sluice.resources.kafka.produce.sender import KafkaTarget
from sluice.resources.liveness import now
from sluice.resources.registry.confluent import number_of_own


def sending(feed: Feed, lake: Lake, plan: Republish, codec: int, pace: Pace, root: Path) -> LaneSender:
    """The work on a plan, as the feed reaches Kafka and the lake. `root` is the project's folder.

    Raises as `Ledger.read` and `find_shape_of`: columns that records added are in the ledger.
    """
    family = plan.name if plan.lanes > 1 else ""
    seconds = (feed.kafka.transaction_timeout_ms or 60_000) / 1000
    opening = partial(_open, feed.kafka, plan.wishes.to, family, seconds)
    brief = min(TRANSACTION_SECONDS, seconds / 4)  # the rest is for records pending then, and for the end
    shape = find_shape_of(plan, feed, Ledger(lake, feed.stored, now).read())
    return LaneSender(plan, lake, opening, shape, now, codec, pace, root, seconds=brief)


def by_own_schema(wishes: Wishes, feed: Feed, topics: Iterable[str]) -> Wishes:
    """The wishes, with the schema by which values of the feed's typed rows are written. `topics`: where rows came from.

    Raises UsageError and Refused where they cannot be written again, RegistryUnavailable, NotAuthorized.
    """
    if wishes.kind is not PartKind.LANDED or feed.reader is None:
        return wishes
    check_sendable(feed.shape, feed.dataset)
    number = number_of_own(feed, [wishes.to, *sorted(topics)])
    return replace(wishes, schema=feed.reader.fingerprint, schema_id=number)


def _open(access: KafkaAccess, topic: str, family: str, seconds: float, name: str) -> closing[KafkaTarget]:
    return closing(KafkaTarget(access, topic, name, family=family, seconds=seconds))
