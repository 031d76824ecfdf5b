"""What the assets do when they run: one call into the pipelines each, and the event that says what came of it.

A step raises what stopped it as `dagster.Failure`. What it published before stays published: the next run records it
in Dagster's event log before it commits anything (see `evidence`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import dagster as dg
from dagster import DagsterExecutionInterruptedError

from sluice.assets import evidence, metadata
from sluice.assets.feeds import remember_topics
from sluice.assets.metadata import Reader
from sluice.assets.session import Session
from sluice.pipelines.batch import Edges, Landed, land, open_ledger
from sluice.pipelines.commit import CommitSettings, commit
from sluice.pipelines.errors import SluiceError, UnknownTopic
from sluice.pipelines.feed import Feed
from sluice.pipelines.ledger import BatchStatus, Ledger, State
from sluice.pipelines.ports import Engine
from sluice.pipelines.values import PartitionState, Request
from sluice.resources.liveness import new_owner

Events = Iterator[Any]
Topics = Mapping[str, list[PartitionState]]
COMPLETE = "complete"


def topic_key(topic: str) -> dg.AssetKey:
    return dg.AssetKey(["kafka", topic])


# -- landed


def land_step(context: dg.AssetExecutionContext, name: str, request: Request) -> Events:
    """Land what the request owes, and say so for each batch published. Raises dagster.Failure, or an interrupt."""
    session: Session = context.resources.session
    with session.step(context):
        feed = session.feed(name)
        with session.open_edges(feed) as edges:
            yield from _land(context, session, feed, edges, request)


def _land(context: dg.AssetExecutionContext, session: Session, feed: Feed, edges: Edges, request: Request) -> Events:
    ledger = open_ledger(feed, edges, context.run.run_id)
    evidence.roll_forward(context.instance, feed.name, ledger, ledger.read(), edges.lake)
    with _canceling(edges.engine):
        landed = land(feed, edges, request, new_owner(context.run.run_id), session.reporter(context.log))
    session.witness.landed = landed
    remember_topics(session.project, feed, {k.topic for k in landed.frontiers})
    state = ledger.read()
    yield from _read_topics(context, feed, edges, landed, state)
    if not _failed(landed):
        yield from _published(feed, edges, ledger, state, landed)
    yield _complete(landed, state)  # of the materialization before it, or of none
    landed.check()


@contextmanager
def _canceling(engine: Engine) -> Iterator[None]:
    """An interrupt ends what the engine is at."""
    try:
        yield
    except (KeyboardInterrupt, DagsterExecutionInterruptedError):
        engine.cancel()
        raise


def _published(feed: Feed, edges: Edges, ledger: Ledger, state: State, landed: Landed) -> Events:
    """One materialization for each published batch; with none, one that says that the data is what it was."""
    batches = [state.batches[b.batch] for b in landed.batches if b.number is not None]
    if not batches:
        version = dg.DataVersion(_last_version(state))
        yield dg.MaterializeResult(metadata=metadata.nothing_owed(feed.name, edges.lake), data_version=version)
        return
    for batch in batches[:-1]:
        yield evidence.materialization(feed.name, ledger, state, batch, edges.lake)
    yield dg.MaterializeResult(
        metadata=metadata.of_batch(feed.name, ledger, state, batches[-1], edges.lake),
        data_version=dg.DataVersion(evidence.batch_version(state, batches[-1])),
    )


def _last_version(state: State) -> str:
    published = [b for b in state.batches.values() if b.status is BatchStatus.PUBLISHED]
    last = max(published, key=lambda b: b.published or 0, default=None)
    return evidence.batch_version(state, last) if last else "empty"


def _complete(landed: Landed, state: State) -> dg.AssetCheckResult:
    """Is everything that was asked for landed, and every account closed up to where it reaches?"""
    found, failed = metadata.standings(state), _failed(landed)
    open_ = [s for s in found if not s.whole]
    return dg.AssetCheckResult(
        check_name=COMPLETE,
        passed=not failed and not open_,
        severity=dg.AssetCheckSeverity.ERROR if failed else dg.AssetCheckSeverity.WARN,
        description=_said(failed, len(open_), len(found)),
        metadata=metadata.of_standings(found) | metadata.of_failures(landed),
    )


def _failed(landed: Landed) -> int:
    """How many slices and partitions were asked for in vain; with any, `landed.check` raises."""
    return len(landed.refusals) + sum(len(b.failures) for b in landed.batches)


def _said(failed: int, open_: int, partitions: int) -> str:
    if failed:
        return f"{failed} slices or partitions were asked for and did not land; they stay owed"
    if open_:
        return f"{open_} of {partitions} partitions have holes below what landed, or another batch at work"
    return f"every offset from origin to frontier is accounted for in all {partitions} partitions"


def _read_topics(context: dg.AssetExecutionContext, feed: Feed, edges: Edges, landed: Landed, state: State) -> Events:
    """The topics that were just read, as they are now. Seeing them is a comfort: failing to is only logged."""
    topics = {s.topic for b in landed.batches for s in b.plan.slices}
    try:
        seen = _look(edges, feed, topics)
    except SluiceError as error:
        context.log.warning("the topics could not be observed after landing: %s", error.message)
        return
    for topic, partitions in sorted(seen.items()):
        said = metadata.of_topic(partitions, [_reader(feed.name, state, topic)])
        yield dg.AssetObservation(topic_key(topic), metadata=said)


# -- committed


def commit_step(context: dg.AssetExecutionContext, name: str) -> dg.MaterializeResult[Any]:
    """Commit the frontier, once the event log holds every batch below it. Raises dagster.Failure, or an interrupt."""
    session: Session = context.resources.session
    with session.step(context):
        feed = session.feed(name)
        with session.open_edges(feed) as edges:
            ledger = open_ledger(feed, edges, context.run.run_id)
            state = ledger.read()
            evidence.roll_forward(context.instance, name, ledger, state, edges.lake)
            evidence.demand(context.instance, name, state)
            settings = CommitSettings(feed.commit, feed.transactional_id, feed.policies.on_group_moved)
            result = commit(ledger, edges.group, settings)
        session.witness.committed = result
    return dg.MaterializeResult(
        metadata=metadata.of_commit(feed.group, result),
        data_version=dg.DataVersion(evidence.reconciled_version(state)),
    )


# -- topics


def observe_step(context: dg.AssetExecutionContext, owner: str, readers: Mapping[str, Sequence[str]]) -> Events:
    """Partitions, ends and lag of the selected topics. `readers`: each topic's feeds; the owner's Kafka is shown.

    Raises dagster.Failure for topics that are not there, after showing the others.
    """
    session: Session = context.resources.session
    topics = {t: feeds for t, feeds in readers.items() if topic_key(t) in context.selected_asset_keys}
    with session.step(context):
        seen, lags = _survey(session, owner, topics)
        for topic, partitions in sorted(seen.items()):
            said = metadata.of_topic(partitions, lags[topic])
            yield dg.ObserveResult(asset_key=topic_key(topic), metadata=said)
        if gone := sorted(topics.keys() - seen.keys()):
            raise UnknownTopic(f"no topic {', '.join(gone[:10])} in Kafka", remedy="create it, or mend the feed")


def _survey(
    session: Session, owner: str, topics: Mapping[str, Sequence[str]]
) -> tuple[Topics, dict[str, list[Reader]]]:
    seen: Topics = {}
    lags: dict[str, list[Reader]] = {t: [] for t in topics}
    for name in (owner, *sorted({r for feeds in topics.values() for r in feeds} - {owner})):
        feed, mine = session.feed(name), [t for t, feeds in topics.items() if name in feeds]
        with session.open_edges(feed) as edges:
            seen = seen or _look(edges, feed, mine)
            state = Ledger(edges.lake, name, edges.clock).read()
        for topic in mine:
            lags[topic].append(_reader(name, state, topic))
    return seen, lags


def _look(edges: Edges, feed: Feed, topics: Iterable[str]) -> Topics:
    """The partitions of those topics that are there."""
    there = set(topics) & edges.cluster.topics().keys()
    found: dict[str, list[PartitionState]] = {t: [] for t in there}
    for p in edges.cluster.partitions(sorted(there), feed.isolation) if there else ():
        found[p.topic].append(p)
    return found


def _reader(feed: str, state: State, topic: str) -> Reader:
    mine = (k for k in state.current.values() if k.topic == topic and k in state.origins)
    return Reader(feed, {k.partition: state.frontier(k) for k in mine})
