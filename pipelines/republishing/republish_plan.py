"""The plan of a republish: rows and their order, decided before anything is sent.

Guarantee: the same wishes over the same ledger give the same plan, and the plan alone decides the order. So a run that
resumes after a crash sends what follows, and nothing else.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from sluice.pipelines.errors import LedgerCorrupt, Refused, UsageError, WindowIncomplete, WindowRetired
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import find_output
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import State
from sluice.pipelines.ledger.fold import by_key
from sluice.pipelines.model.kafka import Key, Range, intersect, subtract, union
from sluice.pipelines.model.plans import AskedRange, to_json
from sluice.pipelines.model.receipts import PartKind, name_dataset
from sluice.pipelines.planning import windows
from sluice.pipelines.planning.schema_changes import find_shape
from sluice.pipelines.ports import Lake
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.util.documents import Derived, Flat
from sluice.pipelines.util.units import many

PIECE = 20_000
"""Offsets of one partition that are sent before the next one's turn."""
LANE_OFFSETS = 250_000
"""Offsets that make a lane worth its while: it costs a transactional id, a group, and a task."""
MOST_LANES = 64
_ENDLESS = 1 << 63


class PartitionBy(StrEnum):
    """Which partition of the target a record goes to."""

    SAME = "partition"
    KEY = "key"
    ROUND_ROBIN = "round-robin"
    FUNCTION = "function"


@dataclass(frozen=True, slots=True)
class Source:
    """Offsets of one partition whose rows are sent, in a lane of the plan."""

    topic: str
    partition: int
    incarnation: str
    ranges: tuple[Range, ...]
    lane: int = 0

    @property
    def key(self) -> Key:
        return Key(self.topic, self.partition, self.incarnation)

    @property
    def span(self) -> int:
        return sum(r.span for r in self.ranges)


@dataclass(frozen=True, slots=True)
class Wishes:
    """The request without its rows: the topic, its partitions now, and what records become there.

    `kind`: rows that landed, or those in quarantine. `headers`: records carry their old coordinates in headers.
    `where`: a condition in SQL that rows must meet; `function`: what chooses partitions, by name. Empty: none.
    `schema` is the fingerprint of the schema of their own by which typed values are written, and `schema_id` its number
    in the registry; empty and 0 where there is none. `output`: the output of a split feed whose landed rows are sent.
    """

    to: str
    partitions: int
    kind: PartKind = PartKind.LANDED
    by: PartitionBy = PartitionBy.KEY
    keep_timestamps: bool = False
    headers: bool = False
    where: str = ""
    function: str = ""
    schema: str = ""
    schema_id: int = 0
    output: str = ""


@dataclass(frozen=True, slots=True)
class Republish:
    """One republish. `id` names it; it follows from the rest but `created` (ms), unless somebody chose it.

    Its sources are in one or more lanes. A lane is sent by itself, in transactions of its own, with a mark of its own.
    """

    id: str
    feed: str
    ledger: str
    wishes: Flat[Wishes]
    sources: tuple[Source, ...]
    created: int = 0

    @property
    def rows_name(self) -> str:
        """The name of the rows: the feed's, or `feed.output`."""
        return name_dataset(self.feed, self.wishes.output)

    @property
    def name(self) -> str:
        """The prefix of its lanes' names."""
        return f"sluice-republish-{self.feed}-{self.id}"

    def lane_name(self, lane: int) -> str:
        """The transactional id of a lane, and the group of its marks. No `id` has a dot, so no two have one name."""
        return self.name if self.lanes == 1 else f"{self.name}.{lane}"

    @property
    def lanes(self) -> Derived[int]:
        return 1 + max((s.lane for s in self.sources), default=0)

    @property
    def digest(self) -> str:
        """Returns a shortened SHA-256 (hex) of its rows and target, without its name, time and lanes."""
        content = json.loads(to_json(replace(self, id="", created=0)))
        for source in content["sources"]:
            del source["lane"]
        for name in ("where", "function", "schema", "schema_id", "output"):  # came later: others keep their names
            content["wishes"] = {k: v for k, v in content["wishes"].items() if v or k != name}
        return hashlib.sha256(to_json(content).encode()).hexdigest()[:12]

    @property
    def offsets(self) -> Derived[int]:
        """How many offsets it covers: it sends no more records than that."""
        return sum(s.span for s in self.sources)

    def rename(self, name: str) -> Republish:
        """Returns the plan under a chosen name; itself if that is empty."""
        return replace(self, id=name) if name else self


class Piece(NamedTuple):
    """Offsets of one source that are sent in one go. `source` is the source's place in the plan."""

    source: int
    start: int
    end: int


def pieces(plan: Republish, lane: int = 0) -> list[Piece]:
    """Everything that a lane of the plan sends, in order: its sources take turns."""
    of_each = [
        [Piece(n, at, min(at + PIECE, r.end)) for r in s.ranges for at in range(r.start, r.end, PIECE)]
        for n, s in enumerate(plan.sources)
        if s.lane == lane
    ]
    return [piece for turn in itertools.zip_longest(*of_each) for piece in turn if piece is not None]


# -- made


def plan_republish(
    feed: Feed,
    state: State,
    wishes: Wishes,
    requested: Iterable[tuple[Key, Range]],
    created: int,
    *,
    into_source: bool = False,
) -> Republish:
    """The plan for these ranges, named by its digest. `into_source`: the target may be a topic that the feed reads.

    Raises UsageError, WindowIncomplete, WindowRetired, Refused.
    """
    if not into_source:
        _check_target(feed, state, wishes)
    # Windows overlap in no offset, but options may name one twice: it is sent once.
    wanted = by_key(requested)
    _check_there(feed.name, state, wanted)
    # Only landed offsets are sent: lost, skipped and retired ones have no rows.
    sources = tuple(
        Source(key.topic, key.partition, key.incarnation, landed)
        for key, ranges in sorted(wanted.items())
        if (landed := union(x for r in union(ranges) for x in intersect(state.landed.get(key, ()), r)))
    )
    tps = [s.key.tp for s in sources]
    # Two lives of a partition use the same offsets, and coordinates of sent records would be ambiguous.
    if twice := next((tp for tp in tps if tps.count(tp) > 1), None):
        raise Refused(
            f"rows of {twice} are of several lives of the topic, and one republish sends those of one",
            remedy="ask for windows of one life, or for the newest by --offsets",
            topic=twice.topic,
        )
    if (
        wishes.by is PartitionBy.SAME
        and (highest := max((s.partition for s in sources), default=-1)) >= wishes.partitions
    ):
        raise Refused(
            f"topic {wishes.to} has {many(wishes.partitions, 'partition')}, and there are rows of partition {highest}",
            remedy=f"give it {highest + 1} partitions, or choose another way: --partition-by key",
            topic=wishes.to,
        )
    # The digest names the plan: the same command, repeated after a crash, finds the progress of the first one. So the
    # time of creation is set after it.
    plan = Republish("", feed.stored, state.ledger_id, wishes, _in_lanes(sources))
    return replace(plan, id=plan.digest, created=created)


def _in_lanes(sources: Sequence[Source]) -> tuple[Source, ...]:
    """The same sources in lanes of about one length, as many as are worth their while. A source is in one lane: so its
    records keep their order."""
    many = max(1, min(len(sources), MOST_LANES, sum(s.span for s in sources) // LANE_OFFSETS))
    spans, lane_of = [0] * many, dict[Key, int]()
    for source in sorted(sources, key=lambda s: -s.span):
        lane_of[source.key] = lane = spans.index(min(spans))
        spans[lane] += source.span
    return tuple(replace(s, lane=lane_of[s.key]) for s in sources)


def asked_windows(feed: Feed, state: State, starts: Sequence[int]) -> list[tuple[Key, Range]]:
    """The offsets of these windows in every partition, also in lives that are over. Raises WindowIncomplete for one
    whose end is not known."""
    ranges, over = [], sorted({*state.origins}.difference(state.known()))
    for window in starts:
        for key in state.known():
            r = windows.find_range(state, key, window, feed.window)
            if r is None:
                raise WindowIncomplete(
                    f"window {feed.window.name(window)} is not complete: where it ends in {key} is not resolved",
                    remedy=f"land it first: sluice run {feed.name} --window {feed.window.name(window)}",
                )
            ranges.append((key, r))
        for key in over:
            first, last = (windows.find_boundary(state, key, t) for t in (window, feed.window.end_of(window)))
            if first is not None:  # a life that ended in the window has no boundary at the window's end
                lasts = Range(first, _ENDLESS if last is None else last)
                ranges += [(key, r) for r in intersect(state.list_accounted(key), lasts)]
    return ranges


def asked_offsets(feed: str, state: State, wanted: Sequence[AskedRange]) -> list[tuple[Key, Range]]:
    """These offsets of the topics' lives of now. Raises UsageError for a partition that the ledger does not know."""
    current = {key.tp: key for key in state.known()}
    for one in wanted:
        if (one.topic, one.partition) not in current:
            raise UsageError(
                f"the ledger knows no partition {one.topic}:{one.partition}", remedy=f"see: sluice status {feed}"
            )
    return [(current[one.topic, one.partition], Range(one.start, one.end)) for one in wanted]  # type: ignore[index]


def _check_target(feed: Feed, state: State, wishes: Wishes) -> None:
    if feed.topics.takes(wishes.to) or any(key.topic == wishes.to for key in state.origins):
        raise Refused(
            f"{feed.name} reads from {wishes.to}: records sent there land again",
            remedy="send to another topic, or confirm with --into-source",
            topic=wishes.to,
        )


def _check_there(feed: str, state: State, wanted: dict[Key, list[Range]]) -> None:
    """Everything asked for must be accounted for, and none of it retired."""
    for key, ranges in wanted.items():
        for r in union(ranges):
            if missing := subtract(r, state.list_accounted(key)):
                first = missing[0]
                raise WindowIncomplete(
                    f"{many(sum(m.span for m in missing), 'offset')} of {key} in {r} have not landed, the first of them"
                    f" {first.start}",
                    remedy=f"land them first: sluice run {feed} --offsets {key}:{first.start}-{first.end}",
                    topic=key.topic,
                    partition=key.partition,
                )
            if retired := intersect(state.retired.get(key, ()), r):
                again = f"sluice run {feed} --offsets {key}:{retired[0].start}-{retired[0].end} --replace"
                raise WindowRetired(
                    f"rows of {key} in {retired[0]} were retired: their files are gone",
                    remedy=f"while Kafka still has them, land them again: {again}"
                    if state.current.get(key.tp) == key
                    else "choose other windows: their topic was replaced since",
                    topic=key.topic,
                    partition=key.partition,
                )


def check_still_there(state: State, plan: Republish) -> None:
    """Raises WindowRetired, WindowIncomplete if rows of the plan are gone."""
    _check_there(plan.feed, state, {s.key: list(s.ranges) for s in plan.sources})


# -- kept


_PLAN = TypeAdapter(Republish)


def keep(lake: Lake, plan: Republish) -> Republish:
    """Put the plan into the lake; the one that is there already holds, with its lanes: marks are theirs."""
    path = paths.republish_plan_path(plan.feed, plan.id)
    if lake.put_if_absent(path, to_json(plan).encode()):
        return plan
    stored = load(lake, plan.feed, plan.id)
    if (stored.digest, stored.feed) != (plan.digest, plan.feed):
        raise Refused(
            f"republish {plan.id} of {stored.rows_name} is another one: to {stored.wishes.to}, "
            f"{many(stored.offsets, 'offset')}",
            remedy="choose another name with --id, or go on with that one: --resume " + plan.id,
        )
    return stored


def load(lake: Lake, feed: str, name: str) -> Republish:
    """A plan from the lake. Raises UsageError if there is none, LedgerCorrupt if it cannot be read."""
    data = lake.get(paths.republish_plan_path(feed, name))
    if data is None:
        there = ", ".join(names(lake, feed))
        remedy = f"there are: {there}" if there else f"none yet: sluice republish {feed} --topic TOPIC begins one"
        raise UsageError(f"{feed} has no republish {name}", remedy=remedy)
    try:
        return _PLAN.validate_json(data)
    except ValidationError:
        raise LedgerCorrupt(
            f"{paths.republish_plan_path(feed, name)} cannot be read", remedy="bring the file back from a backup"
        ) from None


def find_shape_of(plan: Republish, feed: Feed, state: State) -> Shape:
    """Returns the shape of the plan's rows, by the feed of today. Raises FeedError if it lacks their output."""
    return find_shape(find_output(feed, plan.wishes.output), state)


def names(lake: Lake, feed: str) -> list[str]:
    """The republishes of a feed, by name."""
    ids = (paths.republish_name(path) for path in lake.list(paths.republish_root(feed)))
    return [name for name in ids if name]
