"""Plans a republish of a feed's rows, and measures it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from sluice.pipelines.errors import UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.plans import AskedRange
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.planning.schema_changes import find_shape
from sluice.pipelines.planning.windows import check_aligned
from sluice.pipelines.ports import Ports, Target
from sluice.pipelines.republishing import republish_plan as plans
from sluice.pipelines.republishing import row_filter
from sluice.pipelines.republishing.lanes import name_of
from sluice.pipelines.republishing.republish_plan import Republish, Source, Wishes
from sluice.pipelines.republishing.republish_rows import Shelf
from sluice.pipelines.util.documents import Flat

OpenTarget = Callable[[Feed, str], AbstractContextManager[Target]]
AddSchema = Callable[[Wishes, Feed, Iterable[str]], Wishes]


@dataclass(frozen=True, slots=True)
class RepublishRequest:
    """The rows to send: `offsets`, or windows by their starts (ms). `wishes` do not know the target's partitions yet.

    `name` is the republish's, empty for that of its plan. `into_source`: the feed may read from the target.
    """

    wishes: Wishes
    windows: Sequence[int] = ()
    offsets: Sequence[AskedRange] = ()
    name: str = ""
    into_source: bool = False


def plan_republish(
    feed: Feed, request: RepublishRequest, ports: Ports, open_target: OpenTarget, add_schema: AddSchema
) -> Republish:
    """Plan it. `add_schema` adds the schema by which values of the feed's typed rows are written.

    Raises as `republish_plan.plan_republish`, `open_target` and `add_schema`.
    """
    # A replay may move quarantined records to the quarantine of another output.
    if feed.split and request.wishes.kind is PartKind.LANDED:
        raise UsageError(
            f"landed rows of {feed.name} belong to its outputs, and one republish sends those of one",
            remedy=f"name an output: {', '.join(d.dataset for d in feed.datasets)}",
        )
    if feed.output and request.wishes.kind is PartKind.QUARANTINED:
        raise UsageError(
            f"quarantined records of {feed.dataset} are not sent without those of other outputs",
            remedy=f"name the feed, with --quarantined: {feed.name}",
        )
    state = Ledger(ports.lake, feed.stored, ports.clock).read()
    for start in request.windows:
        check_aligned(start, feed.window)
    offsets, windows = (
        plans.asked_offsets(feed.name, state, request.offsets),
        plans.asked_windows(feed, state, request.windows),
    )
    with open_target(feed, request.wishes.to) as target:
        wishes = replace(request.wishes, partitions=target.partitions(), output=feed.output)
    wishes = add_schema(wishes, feed, {key.topic for key, _ in (*offsets, *windows)})
    ranges, now, into_source = [*offsets, *windows], ports.clock(), request.into_source
    plan = plans.plan_republish(feed, state, wishes, ranges, now, into_source=into_source).rename(request.name)
    row_filter.check(plan.wishes, find_shape(feed, state).landed_columns)
    return plan


def resume_republish(feed: Feed, name: str, ports: Ports) -> Republish:
    """Returns a plan from the lake. Raises UsageError, LedgerCorrupt, FeedError."""
    plan = plans.load(ports.lake, feed.stored, name_of(name))
    if feed.output not in ("", plan.wishes.output):
        raise UsageError(
            f"republish {plan.id} sends rows of {plan.rows_name}, and none of {feed.dataset}",
            remedy=f"sluice republish {plan.rows_name} --resume {plan.id}",
        )
    state = Ledger(ports.lake, feed.stored, ports.clock).read()
    row_filter.check(plan.wishes, plans.find_shape_of(plan, feed, state).landed_columns)
    return plan


@dataclass(frozen=True, slots=True)
class SourceAmount:
    """A source, with upper bounds of its rows and of the bytes of their files."""

    source: Flat[Source]
    rows: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class RepublishPreview:
    """A plan, its sources, and whether it is done."""

    plan: Flat[Republish]
    sources: tuple[SourceAmount, ...]
    done: bool


def preview_republish(plan: Republish, ports: Ports) -> RepublishPreview:
    ledger = Ledger(ports.lake, plan.feed, ports.clock)
    shelf = Shelf(ports.lake, ledger, ledger.read(), plan)
    done = ports.lake.get(paths.republish_done_path(plan.feed, plan.id)) is not None
    return RepublishPreview(plan, tuple(SourceAmount(s, *shelf.amount(n)) for n, s in enumerate(plan.sources)), done)
