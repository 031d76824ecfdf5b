"""How far one call of `land` has come, batch by batch: where the next batch ends, and what is not tried again."""

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
"""About how many slices a batch has: a publish entry of half a megabyte. A batch has more if one window needs them, or
so many for each core of the engine."""


@dataclass
class Rounds:
    """How far one call has come: what its own batches have taken of the run's limits, and what it tries no more."""

    feed: Feed
    edges: Ports
    taken: list[Plan] = field(default_factory=list)
    failed: dict[Key, tuple[Range, ...]] = field(default_factory=dict)
    total: int = 0
    """The offsets that the call owed when it first planned."""
    rest: bool = False
    """Whether the last plan left something to the next."""
    windows: int = 0
    """How many windows are owed beside those of the last plan."""

    @property
    def sizes(self) -> Sizing:
        """How the next plan is cut: within what the batches before it left of the run's limits."""
        sizes = sizing(self.feed, self.edges)
        return replace(
            sizes,
            max_records=sizes.max_records and sizes.max_records - sum(p.span for p in self.taken),
            max_bytes=sizes.max_bytes and sizes.max_bytes - sum(p.estimated_bytes for p in self.taken),
            max_slices=max(BATCH_SLICES, SLICES_A_CORE * sizes.parallelism),
        )

    def untried(self, owed: Iterable[Owed]) -> list[Owed]:
        """What is owed, without the slices that failed in this call: it reads none of them twice."""
        remaining = (replace(o, ranges=self._untried(o.key, o.ranges)) for o in owed)
        return [o for o in remaining if o.ranges or o.lost]

    def _untried(self, key: Key, ranges: Sequence[Range]) -> tuple[Range, ...]:
        failed = self.failed.get(key)
        return tuple(x for r in ranges for x in subtract(r, failed)) if failed else tuple(ranges)

    def planned(self, plan: Plan, owed: Sequence[Owed], sizes: Sizing, windows: int) -> None:
        """The next batch is this one: of what is owed, cut in that way. `windows`: how many are owed with it."""
        self.taken.append(plan)
        owes, share = sum(o.span for o in owed), planning.share_within(owed, sizes)
        self.total = self.total or int(owes * share)
        self.windows = windows - len({s.window for s in plan.slices} - {None})
        self.rest = plan.span < (owes if share == 1.0 else int(owes * share) - len(owed))  # limits round down

    def goes_on(self, result: BatchResult) -> bool:
        """Whether another batch follows the one that was just carried out."""
        for f in result.failures:
            self.failed[f.slice.key] = union((*self.failed.get(f.slice.key, ()), f.slice.range))
        return self.rest and result.number is not None and not registry_failed(result)

    @property
    def note(self) -> str:
        return f"batch {len(self.taken) + 1}, {many(self.windows, 'window')} to go" if self.taken else ""

    def telling(self, report: Reporter) -> Reporter:
        """Progress of the whole call, where it has several batches."""
        before = sum(p.span for p in self.taken[:-1])
        if not before and not self.rest:
            return report
        return lambda p: report(replace(p, done=before + p.done, total=max(self.total, p.total)) if p.total else p)
