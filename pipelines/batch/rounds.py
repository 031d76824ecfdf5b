"""The progress of one call of `land`, batch by batch: the end of the next batch, and slices not to retry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from sluice.pipelines.batch.result import BatchResult, registry_failed
from sluice.pipelines.batch.survey import sizing
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.kafka import Key
from sluice.pipelines.model.plans import Plan
from sluice.pipelines.model.progress import Reporter
from sluice.pipelines.model.ranges import Range, subtract, union
from sluice.pipelines.planning import plan as planning
from sluice.pipelines.planning.assignment import Sizing
from sluice.pipelines.planning.plan import Owed
from sluice.pipelines.ports import Ports
from sluice.pipelines.util.units import many

BATCH_SLICES, SLICES_A_CORE = 500, 4
"""The usual number of slices in a batch: a publish entry of half a megabyte. A batch has more if one window or
SLICES_A_CORE per core of the engine need them."""


@dataclass
class Rounds:
    """The progress of one call: the part of the run's limits that its batches used, and slices not to retry."""

    feed: Feed
    edges: Ports
    taken: list[Plan] = field(default_factory=list)
    failed: dict[Key, tuple[Range, ...]] = field(default_factory=dict)
    total: int = 0
    """The pending offsets at the first plan."""
    rest: bool = False
    """Returns whether the last plan left a rest to the next."""
    windows: int = 0
    """The number of pending windows without those of the last plan."""

    @property
    def sizes(self) -> Sizing:
        """The sizes of the next plan, within the rest of the run's limits."""
        sizes = sizing(self.feed, self.edges)
        return replace(
            sizes,
            max_records=sizes.max_records and sizes.max_records - sum(p.span for p in self.taken),
            max_bytes=sizes.max_bytes and sizes.max_bytes - sum(p.estimated_bytes for p in self.taken),
            max_slices=max(BATCH_SLICES, SLICES_A_CORE * sizes.parallelism),
        )

    def untried(self, owed: Iterable[Owed]) -> list[Owed]:
        """Returns the pending ranges without the slices that failed in this call: none is read twice."""
        remaining = (replace(o, ranges=self._untried(o.key, o.ranges)) for o in owed)
        return [o for o in remaining if o.ranges or o.lost]

    def _untried(self, key: Key, ranges: Sequence[Range]) -> tuple[Range, ...]:
        failed = self.failed.get(key)
        return tuple(x for r in ranges for x in subtract(r, failed)) if failed else tuple(ranges)

    def planned(self, plan: Plan, owed: Sequence[Owed], sizes: Sizing, windows: int) -> None:
        """Record the plan of the next batch, cut from `owed` by `sizes`, of `windows` pending windows."""
        self.taken.append(plan)
        owes, share = sum(o.span for o in owed), planning.share_within(owed, sizes)
        self.total = self.total or int(owes * share)
        self.windows = windows - len({s.window for s in plan.slices} - {None})
        self.rest = plan.span < (owes if share == 1.0 else int(owes * share) - len(owed))  # limits round down

    def goes_on(self, result: BatchResult) -> bool:
        """Record the result. Returns whether another batch follows."""
        for f in result.failures:
            self.failed[f.slice.key] = union((*self.failed.get(f.slice.key, ()), f.slice.range))
        return self.rest and result.number is not None and not registry_failed(result)

    @property
    def note(self) -> str:
        return f"batch {len(self.taken) + 1}, {many(self.windows, 'window')} to go" if self.taken else ""

    def telling(self, report: Reporter) -> Reporter:
        """Returns a reporter of the progress of all batches, if there are several."""
        before = sum(p.span for p in self.taken[:-1])
        if not before and not self.rest:
            return report
        return lambda p: report(replace(p, done=before + p.done, total=max(self.total, p.total)) if p.total else p)
