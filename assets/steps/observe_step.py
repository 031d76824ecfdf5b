"""Observes the topics that feeds read: partitions, ends, lag and risks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import dagster as dg

from sluice.assets.events.topics_metadata import TopicReader, topic_metadata
from sluice.assets.runs.run_session import RunSession
from sluice.pipelines.errors import UnknownTopic
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

    Kafka is that of the feed `owner`. Raises dagster.Failure for missing topics after reporting the others.
    """
    find_key = session.keys(owner).topic
    topics = {t: feeds for t, feeds in readers.items() if find_key(t) in context.selected_asset_keys}
    with session.step(context):
        partitions, readers_of = _read_topics(session, owner, topics)
        for topic, states in sorted(partitions.items()):
            yield dg.ObserveResult(asset_key=find_key(topic), metadata=topic_metadata(states, readers_of[topic]))
        if missing := sorted(topics.keys() - partitions.keys()):
            raise UnknownTopic(f"no topic {', '.join(missing[:10])} in Kafka", remedy="create it, or fix the feed")


def _read_topics(
    session: RunSession, owner: str, topics: Mapping[str, Sequence[str]]
) -> tuple[Topics, dict[str, list[TopicReader]]]:
    states: Topics = {}
    lags: dict[str, list[TopicReader]] = {t: [] for t in topics}
    for name in (owner, *sorted({r for feeds in topics.values() for r in feeds} - {owner})):
        feed, mine = session.feed(name), [t for t, feeds in topics.items() if name in feeds]
        with session.open_ports(feed) as edges:
            states = states or partitions_of(edges, feed, mine)
            state = Ledger(edges.lake, name, edges.clock).read()
            outlook = outlook_of(edges, feed, state, {t: states[t] for t in mine if t in states})
        for topic in mine:
            lags[topic].append(reader_of(name, state, topic, outlook))
    return states, lags


def partitions_of(edges: Ports, feed: Feed, topics: Iterable[str]) -> Topics:
    """Returns the partitions of those topics that exist."""
    there = set(topics) & edges.cluster.topics().keys()
    by_topic: dict[str, list[PartitionState]] = {t: [] for t in there}
    for p in edges.cluster.partitions(sorted(there), feed.isolation) if there else ():
        by_topic[p.topic].append(p)
    return by_topic


def outlook_of(edges: Ports, feed: Feed, state: State, topics: Topics) -> Outlook:
    """Returns the outlook of the feed in these topics."""
    partitions = {find_key(state, p): p for ps in topics.values() for p in ps}
    now = edges.clock()
    return look_ahead(feed, Ledger(edges.lake, feed.name, edges.clock), state, edges.cluster, partitions, now)


def reader_of(feed: str, state: State, topic: str, outlook: Outlook) -> TopicReader:
    frontiers = {k.partition: state.frontier(k) for k in state.known() if k.topic == topic}
    ages = {k.partition: age for k, age in outlook.ages().items() if k.topic == topic}
    at_risk = [r.describe(outlook.now) for r in outlook.at_risk if r.key.topic == topic]
    return TopicReader(feed, frontiers, ages, at_risk)
