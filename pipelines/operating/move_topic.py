"""Moves a topic from one feed to another at the offsets up to which the first one accounts for it.

    ledger of the first feed     each partition leaves its life at the frontier  → it lands no more of the topic
    ledger of the second feed    each partition begins at that offset            → it may land the rest
    files of both                `topics`

In this order no offset ever belongs to both feeds. After a kill nobody lands the topic until the same command
continues. Landed rows, offsets and history stay in the first feed, whose windows are complete without the rest.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sluice.pipelines.batch.survey import open_ledger
from sluice.pipelines.contract.suite import CONTRACT
from sluice.pipelines.errors import UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import clashes
from sluice.pipelines.feed.problems import raise_problems
from sluice.pipelines.feed.topic_selection import TopicFilter
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.entries import AcceptEntry, Entering, KeyOffset, OriginEntry, OriginItem
from sluice.pipelines.ledger.fold import MOVED_FROM, MOVED_TO
from sluice.pipelines.model.kafka import GONE, Key, PartitionState
from sluice.pipelines.operating.rename_feed import match_key, replace_file
from sluice.pipelines.planning import windows
from sluice.pipelines.planning.origins import advise_absent
from sluice.pipelines.ports import Ports
from sluice.pipelines.publishing import publish
from sluice.pipelines.util.documents import Internal

MOVE = "topic moved"
"""The event of the entries in both ledgers."""
_OF_ONE_FEED = ("feed", "stored_as", "retired", "group", "transactional_id", "description")
"""Keys that a new feed does not get from the one that it is split from."""


@dataclass(frozen=True, slots=True)
class TopicMove:
    """A planned move. `seam` has the first offset of the target in each partition, `files` the new texts of feed
    files; `new` are those of a feed that the move makes, with its contracts."""

    topic: str
    source: str
    target: str
    group: str
    seam: tuple[KeyOffset, ...]
    files: Internal[Mapping[Path, str]]
    new: tuple[Path, ...] = ()
    feed: Internal[Feed] = field(kw_only=True)


def plan_move(topic: str, source: Feed, target: Feed, ports: Ports, files: Mapping[Path, str]) -> TopicMove:
    """Returns the move of a topic that nothing reads at the moment. Raises UsageError, PlanBusy."""
    ledger = open_ledger(source, ports)
    listed = {topic} & ports.cluster.topics().keys()
    state, partitions = ledger.read(), ports.cluster.partitions(listed, source.isolation)
    if not (seam := _list_seam(state, topic, target.stored)):
        seam = tuple(KeyOffset(key=k, offset=state.frontier(k)) for k in _find_leaving(ledger, state, topic, source))
    _check_log(source.name, topic, seam, partitions)
    new = tuple(path for path in files if not path.exists())
    return TopicMove(topic, source.name, target.name, source.group, seam, files, new, feed=target)


def carry_out(move: TopicMove, source: Feed, of_source: Ports, of_target: Ports) -> TopicMove:
    """Write both ledgers, then the files. Returns the move as it was done. Raises as `plan_move`."""
    seam = leave(open_ledger(source, of_source), source, move.topic, move.feed.stored)
    arrive(open_ledger(move.feed, of_target), move.feed, source, move.topic, seam, of_target)
    for path, text in move.files.items():
        replace_file(path, text)
    if source.topics.names == (move.topic,):
        of_source.lake.remove(paths.get_feed_row_path(source.stored))
    return replace(move, seam=seam)


def leave(ledger: Ledger, source: Feed, topic: str, target: str) -> tuple[KeyOffset, ...]:
    """Let the partitions of a topic leave the feed for another one. Returns their offsets, also if they have left."""

    def decide(state: State) -> AcceptEntry | None:
        if _list_seam(state, topic, target):
            return None
        items = tuple(
            Entering(
                leaves=key,
                enters=OriginItem(
                    key=key._replace(incarnation=key.incarnation + GONE),
                    offset=state.frontier(key),
                    committed=None,
                    why=f"{MOVED_TO}{target}",
                    opens=state.boundary_times[-1] if state.boundary_times else None,
                ),
            )
            for key in _find_leaving(ledger, state, topic, source)
        )
        return AcceptEntry(event=MOVE, items=items, reason=f"{MOVED_TO}{target}")

    ledger.append(decide)
    return _list_seam(ledger.read(), topic, target)


def arrive(
    ledger: Ledger,
    target: Feed,
    source: Feed,
    topic: str,
    seam: Sequence[KeyOffset],
    ports: Ports,
) -> None:
    """Let the partitions begin in the feed at the offsets of the seam. They may have been there before."""
    partitions = ports.cluster.partitions([topic], target.isolation)
    _check_log(source.name, topic, seam, partitions)
    keyed = {Key(*p.tp, p.topic_id): p for p in partitions}
    committed = ports.group.fetch_committed([at.key.tp for at in seam])
    origins = [
        OriginItem(
            key=Key(*at.key.tp, at.key.topic_id),
            offset=at.offset,
            committed=c.offset if (c := committed.get(at.key.tp)) else None,
            why=f"{MOVED_FROM}{source.stored}",
        )
        for at in seam
    ]
    origins = [*windows.find_opening(ports.cluster, keyed, origins, target.window, ports.clock())]

    def decide(state: State) -> AcceptEntry | OriginEntry | None:
        entered, fresh = list[Entering](), list[OriginItem]()
        for item in origins:
            opens = max((item.opens or 0, *state.boundary_times[:1]))
            current, tp = state.current.get(item.key.tp), item.key.tp
            if current is None:
                fresh.append(item.model_copy(update={"opens": opens}))
            elif current.is_ended:
                key = state.find_unused_life(item.key)
                entered.append(Entering(leaves=current, enters=item.model_copy(update={"opens": opens, "key": key})))
            elif (state.origins[current].why, state.origins[current].offset) != (item.why, item.offset):
                own = f"from offset {state.origins[current].offset} on"
                raise UsageError(
                    f"feed {target.name} has its own account of {tp}, {own}",
                    remedy="if it shall land no more of it: take the topic out of its file, then"
                    f" sluice accept {target.name} gone",
                )
        if entered:
            return AcceptEntry(event=MOVE, items=tuple(entered), reason=origins[0].why)
        return OriginEntry(items=tuple(fresh)) if fresh else None

    while ledger.append(decide):
        pass


def _list_seam(state: State, topic: str, target: str) -> tuple[KeyOffset, ...]:
    """Returns the offsets at which the topic has left for that feed; none if it has not."""
    ended = (k for tp, k in sorted(state.current.items()) if tp.topic == topic and k.is_ended)
    return tuple(
        KeyOffset(key=k, offset=state.origins[k].offset) for k in ended if state.origins[k].why == MOVED_TO + target
    )


def _find_leaving(ledger: Ledger, state: State, topic: str, source: Feed) -> list[Key]:
    """Returns the topic's partitions, unless offsets of windows are pending, or a batch is live."""
    keys, run = [k for k in state.known() if k.topic == topic], f"sluice run {source.name}"
    if not keys:
        raise UsageError(f"feed {source.name} has landed nothing of {topic}", remedy=f"first: {run}")
    for batch, reserved in state.list_live_ranges():
        if reserved.key in keys:
            raise publish.build_busy_error(source.name, batch, reserved, publish.NEW)
    for key in keys:
        if state.find_known_end(key) > state.frontier(key):
            what = f"offsets {state.frontier(key)} to {state.find_known_end(key)} of {key} are pending"
            raise UsageError(f"{what} in feed {source.name}, within windows of it", remedy=f"land them first: {run}")
    return keys


def _check_log(source: str, topic: str, seam: Sequence[KeyOffset], partitions: Sequence[PartitionState]) -> None:
    """Raises UsageError unless the ledger knows each partition of the topic, and in its current log."""
    by_partition = {at.key.tp: at for at in seam}
    for p in partitions:
        if (at := by_partition.get(p.tp)) is None or at.key.topic_id != p.topic_id or at.offset > p.high_watermark:
            what = f"{p.tp} is not known to feed {source} as Kafka has it now"
            raise UsageError(what, remedy=f"see the difference: sluice run {source}")
    if len(by_partition) != len(partitions):
        raise UsageError(f"Kafka lacks partitions of {topic}", remedy=advise_absent(source))


# -- feed files


def edit_files(
    topic: str,
    source: Feed,
    target: Feed | str,
    others: Mapping[str, Feed],
    locate: Callable[[str], Path],
    load: Callable[[Path], Feed],
) -> tuple[Feed, dict[Path, str]]:
    """Returns the target, and the new texts of the files: of the target, its contracts if it is new, and the source.

    A `target` that is only a name becomes a feed like the source, without keys of one feed alone. A source without
    another topic is retired. `locate` returns the file of a feed. Raises UsageError, FeedError.
    """
    own = locate(source.name)
    text = own.read_text("utf-8")
    files = dict[Path, str]()
    if isinstance(target, str):
        if source.topics.names == (topic,):
            remedy = f"give the feed the other name: sluice feeds rename {source.name} {target}"
            raise UsageError(f"{topic} is the only topic of feed {source.name}", remedy=remedy)
        draft_text = text
        for key in _OF_ONE_FEED:
            draft_text = match_key(key).sub("", draft_text)
        path = own.with_name(f"{target}{own.suffix}")
        files[path] = _with_topics(draft_text, TopicFilter(names=(topic,)))
        for contract in own.parent.glob(f"{own.stem}.*{CONTRACT.lstrip('.')}"):
            files[path.with_name(target + contract.name.removeprefix(own.stem))] = contract.read_text("utf-8")
        with tempfile.TemporaryDirectory() as draft:
            for name, content in files.items():
                (Path(draft) / name.name).write_text(content, "utf-8")
            target = load(Path(draft) / path.name)
        if problems := clashes(target, [(locate(n), f) for n, f in others.items()]):
            raise_problems([(str(path), p) for p in problems])
    elif not target.topics.takes(topic):
        files[locate(target.name)] = _with_topics(locate(target.name).read_text("utf-8"), _add(target, topic))
    if source.topics.names == (topic,):
        files[own] = f"retired: true\n{match_key('retired').sub('', text)}"
    elif source.topics.takes(topic):
        files[own] = _with_topics(text, _remove(source, topic))
    return target, files


def _with_topics(text: str, topics: TopicFilter) -> str:
    """Returns a feed file's text with these topics."""
    wanted = topics.names or {k: v for k in ("include", "exclude") if (v := getattr(topics, k))}
    return match_key("topics").sub(lambda _: f"topics: {json.dumps(wanted)}\n", text, count=1)


def _add(target: Feed, topic: str) -> TopicFilter:
    topics = target.topics
    if topics.names:
        return TopicFilter(names=(*topics.names, topic))
    added = TopicFilter(include=(*topics.include, re.escape(topic)) if topics.include else (), exclude=topics.exclude)
    if not added.takes(topic):
        raise UsageError(f"`exclude` of feed {target.name} leaves {topic} out", remedy="change it in the feed's file")
    return added


def _remove(source: Feed, topic: str) -> TopicFilter:
    topics = source.topics
    if topics.names:
        return TopicFilter(names=tuple(n for n in topics.names if n != topic))
    return TopicFilter(include=topics.include, exclude=(*topics.exclude, re.escape(topic)))
