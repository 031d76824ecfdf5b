"""Observes the topics that feeds read: partitions, ends, lag and risks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from sluice.assets.runs.run_session import RunSession
from sluice.assets.specs.asset_specs import Metadata, table
from sluice.pipelines.errors import SluiceError, UnknownTopic
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.model.kafka import PartitionState
from sluice.pipelines.planning.origins import find_key
from sluice.pipelines.ports import Ports
from sluice.pipelines.status.outlook import Outlook, look_ahead

Topics = Mapping[str, list[PartitionState]]


def observe_step(
    context: dg.AssetExecutionContext, session: RunSession, owner: str, readers: Mapping[str, Sequence[str]]
) -> Iterator[Any]:
    """Report partitions, ends, lag and risks of the selected topics. `readers`: the feeds of each topic.

    Kafka is that of the feed `owner`. Raises dagster.Failure for missing topics and unreadable feeds after reporting
    the others.
    """
    topic_key = session.keys(owner).topic
    topics = {t: feeds for t, feeds in readers.items() if topic_key(t) in context.selected_asset_keys}
    with session.step(context):
        partitions, readers_of, errors = _read_topics(session, owner, topics)
        for topic, states in sorted(partitions.items()):
            yield dg.ObserveResult(asset_key=topic_key(topic), metadata=build_topic_metadata(states, readers_of[topic]))
        if missing := sorted(topics.keys() - partitions.keys()):
            raise UnknownTopic(f"no topic {', '.join(missing[:10])} in Kafka", remedy="create it, or fix the feed")
        if errors:
            raise errors[0]


def _read_topics(
    session: RunSession, owner: str, topics: Mapping[str, Sequence[str]]
) -> tuple[Topics, dict[str, list[TopicReader]], list[SluiceError]]:
    """Returns the partitions and readers of each topic, and the errors of readers that are left out."""
    states: Topics = {}
    errors: list[SluiceError] = []
    lags: dict[str, list[TopicReader]] = {t: [] for t in topics}
    for name in (owner, *sorted({r for feeds in topics.values() for r in feeds} - {owner})):
        mine = [t for t, feeds in topics.items() if name in feeds]
        try:
            feed = session.feed(name)
            with session.open_ports(feed) as ports:
                states = states or partitions_of(ports, feed, mine)
                state = Ledger(ports.lake, feed.stored, ports.clock).read()
                outlook = outlook_of(ports, feed, state, {t: states[t] for t in mine if t in states})
        except SluiceError as error:
            if not states:
                raise
            errors.append(error)
            continue
        for topic in mine:
            lags[topic].append(reader_of(name, state, topic, outlook))
    return states, lags, errors


def partitions_of(ports: Ports, feed: Feed, topics: Iterable[str]) -> Topics:
    """Returns the partitions of those topics that exist."""
    there = set(topics) & ports.cluster.topics().keys()
    by_topic: dict[str, list[PartitionState]] = {t: [] for t in there}
    for p in ports.cluster.partitions(sorted(there), feed.isolation) if there else ():
        by_topic[p.topic].append(p)
    return by_topic


def outlook_of(ports: Ports, feed: Feed, state: State, topics: Topics) -> Outlook:
    """Returns the outlook of the feed in these topics."""
    partitions = {find_key(state, p): p for ps in topics.values() for p in ps}
    now = ports.clock()
    return look_ahead(feed, Ledger(ports.lake, feed.stored, ports.clock), state, ports.cluster, partitions, now)


@dataclass(frozen=True)
class TopicReader:
    """A feed that reads a topic, with its state by partition.

    `frontiers`: the next offset to land. `ages`: the age (ms) of the oldest pending record, if known. `at_risk`: the
    ranges that Kafka will delete before they land.
    """

    feed: str
    frontiers: Mapping[int, int] = field(default_factory=dict)
    ages: Mapping[int, int] = field(default_factory=dict)
    at_risk: Sequence[str] = ()


def reader_of(feed: str, state: State, topic: str, outlook: Outlook) -> TopicReader:
    frontiers = {k.partition: state.frontier(k) for k in state.known() if k.topic == topic}
    ages = {k.partition: age for k, age in outlook.ages().items() if k.topic == topic}
    at_risk = [r.describe(outlook.now) for r in outlook.at_risk if r.key.topic == topic]
    return TopicReader(feed, frontiers, ages, at_risk)


def build_topic_metadata(partitions: Sequence[PartitionState], readers: Sequence[TopicReader]) -> Metadata:
    """Returns a topic's state in Kafka, and the lag of each feed in offsets and in time."""
    lags = {
        r.feed: [max(0, p.last_stable_offset - r.frontiers.get(p.partition, p.log_start)) for p in partitions]
        for r in readers
    }
    rows: list[dict[str, str | int]] = [
        {
            "partition": p.partition,
            "leader": p.leader,
            "start": p.log_start,
            "end": p.last_stable_offset,
            **{f"lag of {feed}": lag[i] for feed, lag in lags.items()},
        }
        for i, p in enumerate(partitions)
    ]
    columns = dict.fromkeys(("partition", "leader", "start", "end", *(f"lag of {feed}" for feed in lags)), "int")
    ages = {
        r.feed: age
        for r in readers
        if (age := max(r.ages.values(), default=None if sum(lags[r.feed]) else 0)) is not None
    }
    return {
        "partitions": len(partitions),
        "offsets": sum(p.last_stable_offset - p.log_start for p in partitions),
        **{f"lag_{feed}": sum(lag) for feed, lag in lags.items()},
        **{f"lag_seconds_{feed}": age / 1000 for feed, age in ages.items()},
        **{f"at_risk_{r.feed}": "\n".join(r.at_risk) for r in readers if r.at_risk},
        "log": table(rows, columns),
    }
