"""Schedules of real runs: all with few deviations, or random ones; and the shortest trace of a violation.

The choice of schedules depends on scenario, bounds and seed alone. If two schedules reach the same state (of the world,
and of the answers that each run got), only one is continued.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from sluice.pipelines.errors import (
    BatchIncomplete,
    EntriesLost,
    ForeignMarks,
    GroupMoved,
    LedgerCorrupt,
    ProofFailed,
    SluiceError,
    Terminal,
)
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.model.kafka import CommittedOffset
from tests.model.programs import Spec, build_program, forget_early, heal, run_deterministically
from tests.model.scheduler import Deviation, Outcome, Schedule
from tests.model.watch import Watch
from tests.model.world import DLQ, HOUR, KIND, START, World


@dataclass(frozen=True)
class Scenario:
    """A world and the programs that run on it. `actors` are kinds of programs and their arguments; `budgets` limit how
    often a fault or an event may happen. `prelude` runs first, in sequence: programs, `("event", label)` for an event
    of the world, `("until", words, program)` for a program that dies before the first effect with those words. `stamps`
    are hours, or pairs: the hour in which a record arrives, and by how many its producer's clock is ahead.
    """

    name: str
    actors: tuple[Spec, ...]
    logs: tuple[str, ...] = ("cc",)
    stamps: tuple[tuple[int | tuple[int, int], ...], ...] = ()
    committed: tuple[int | None, ...] = ()
    hours: int = 1
    prelude: tuple[Spec, ...] = ()
    budgets: Mapping[str, int] = field(default_factory=lambda: {"crash": 1})
    on_loss: str = "accept"
    start: str = "earliest"
    letters: bool = False
    by_windows: bool = False
    slow_copies: bool = False
    layout: str = "window"
    shared: bool = False
    """If true, offset ranges of a task share files."""
    outputs: bool = False
    """If true, the feed has `split`: records go to one of two outputs, or land raw without one."""

    @property
    def moved(self) -> bool:
        """Return True if others may move the group's offsets."""
        return any(self.budgets.get(b) for b in ("reset",)) or any(a[0] == "ext" for a in self.actors)

    @property
    def loses(self) -> bool:
        """Return True if the ledger lost entries."""
        return any(p[0] == "event" and p[1].startswith("the ledger loses") for p in self.prelude)

    @property
    def removed(self) -> bool:
        """Return True if the lake was removed: the group's offsets belong to a deleted ledger."""
        return any(p[:2] == ("event", "the lake is removed") for p in self.prelude)

    @property
    def erased(self) -> bool:
        return any(a[0] == "erase" for a in (*self.actors, *self.prelude))

    @property
    def retired(self) -> bool:
        return any(a[0] == "expire" for a in (*self.actors, *self.prelude))


@lru_cache(64)
def _load_feed(text: str) -> Feed:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "orders.yaml"
        path.write_text(text)
        return load_feed(path, {})


def build_feed(s: Scenario) -> Feed:
    policies = f"policies: {{on_loss: {s.on_loss}, quarantine_limit: {{share: 1}}}}\n"
    letters = f"dead_letters: {{topic: {DLQ}}}\n" if s.letters else ""
    into = "{a: {format: raw}, b: {format: raw}}"
    split = f"split: {{by: {{header: {KIND}}}, into: {into}, otherwise: raw}}\n" if s.outputs else ""
    return _load_feed(
        f"kafka: {{bootstrap: 'a:1'}}\ntopics: orders\nstart: {s.start}\nwindow: 1h\n"
        f"landing: {{layout: {s.layout}, shared_files: {str(s.shared).lower()}}}\n{policies}{letters}{split}"
    )


def prepare_world(s: Scenario) -> World:
    """Return the world after the prelude. Raises AssertionError if the prelude violates an invariant."""
    world = World(build_feed(s), s.logs, s.stamps)
    world.now = START + s.hours * HOUR
    world.slow_copies = s.slow_copies
    for n, offset in enumerate(s.committed):
        if offset is not None:
            world.group.offsets[world.partitions[n].tp] = CommittedOffset(offset)
    Watch(world)
    for at, (kind, *rest) in enumerate(s.prelude):
        name = f"before{at}"
        if kind == "event":
            next(e for e in world.list_events() if e.label == rest[0]).act()
        elif kind == "until":
            _run_until(world, name, rest[0], tuple(rest[1]))
        else:
            build_program(world, name, (kind, *rest))()
        assert not world.broken, f"{s.name}: the prelude: {world.broken}"
    return world


def _run_until(world: World, name: str, words: str, spec: Spec) -> None:
    budgets = {"crash": 1}
    run = Schedule(
        world.stage,
        {name: build_program(world, name, spec)},
        lambda: (),
        budgets,
        world.compute_fingerprint,
        lambda: "",
        world.release,
    )
    actor = run.actors[name]
    while actor.at is not None and words not in actor.at.label:
        world.stage.running = actor
        actor.resume()
        world.stage.running = None
    assert actor.at is not None, f"it ended before {words}: {actor.error or actor.result}"
    actor.kill()


@dataclass
class Violation(AssertionError):
    """A violated invariant, with the schedule and its trace."""

    scenario: Scenario
    deviations: tuple[Deviation, ...]
    text: str
    trace: list[str]

    def __str__(self) -> str:
        lines = "\n    ".join(self.trace)
        return f"{self.text}\n    {lines}\nscenario {self.scenario.name!r}, deviations {list(self.deviations)}"


class Explorer:
    """Runs schedules of one scenario. `runs`, `converged` and `steps` count schedules, early ends and steps."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.runs = self.converged = self.steps = 0
        self._world = prepare_world(scenario)
        self._seen: dict[int, int] = {}

    def run_schedule(
        self,
        deviations: Iterable[Deviation] = (),
        is_known: Callable[[int, int], bool] = lambda state, step: False,
        choose: Callable[[int, Sequence[str]], str] | None = None,
    ) -> Outcome:
        """Run one schedule; at its end, heal the faults and check the end state."""
        s, world = self.scenario, self._world.clone()
        watch = Watch(world)
        watch.take_over(self._world.watch)
        names = [f"{spec[0] if spec[0] == 'ext' else 'r'}{n + 1}" for n, spec in enumerate(s.actors)]
        programs = {name: build_program(world, name, spec) for name, spec in zip(names, s.actors, strict=True)}
        run = Schedule(
            world.stage,
            programs,
            world.list_events,
            s.budgets,
            world.compute_fingerprint,
            lambda: world.broken,
            world.release,
        )
        outcome = run.run(deviations, is_known, choose)
        self.runs += 1
        self.steps += len(outcome.choices)
        self.converged += outcome.converged
        outcome.broken = outcome.broken or self._find_false_alarm(run)
        if not outcome.broken and not outcome.converged:
            outcome.trace.append("-- every run that is left is dead; clean runs follow")
            how = {"moved": s.moved, "retired": s.retired, "erased": s.erased, "loses": s.loses, "removed": s.removed}
            healed = heal(world, by_windows=s.by_windows, **how)
            outcome.broken = healed or watch.check_end_state(moved=s.moved, letters=s.letters)
        return outcome

    def _find_false_alarm(self, run: Schedule) -> str:
        """Return a false error of a run; empty: none. Runs may be refused, and transient failures are allowed."""
        for a in run.actors.values():
            if a.error is None:
                continue
            if not isinstance(a.error, SluiceError):
                return f"A: {a.name} ends with {type(a.error).__name__}: {a.error}"
            s, e = self.scenario, a.error
            wrong = isinstance(e, LedgerCorrupt) or (isinstance(e, GroupMoved) and not s.moved)
            wrong |= isinstance(e, EntriesLost) and not s.loses
            wrong |= isinstance(e, ForeignMarks) and not s.removed
            if wrong:
                return f"A: {a.name} says {type(a.error).__name__}, which is not true: {a.error.message}"
            if isinstance(a.error, Terminal) and not isinstance(a.error, BatchIncomplete | ProofFailed):
                return f"A: {a.name} ends with {type(a.error).__name__}: {a.error.message}"
        return ""

    # -- systematic exploration

    def explore(self, max_runs: int, deviations: int = 2, seed: int = 1) -> None:
        """Run all schedules with at most `deviations` deviations, up to `max_runs` runs: fewer deviations first, and in
        random order among equals. Raises Violation."""
        chance = random.Random(seed)
        level: list[tuple[Deviation, ...]] = [()]
        for count in range(deviations + 1):
            level = _shuffle(level, chance)
            extended: list[tuple[Deviation, ...]] = []
            for plan in level:
                if self.runs >= max_runs:
                    return
                extended += self._try_plan(plan, deviations - count)
            level = extended

    def _try_plan(self, plan: tuple[Deviation, ...], remaining: int) -> list[tuple[Deviation, ...]]:
        def is_known(state: int, step: int) -> bool:
            if self._seen.get(state, -1) >= remaining:
                return True
            self._seen[state] = remaining
            return False

        outcome = self.run_schedule(plan, is_known)
        if outcome.broken:
            raise self.reduce_plan(plan, outcome)
        first = plan[-1][0] + 1 if plan else 0
        return [(*plan, (at, label)) for at in range(first, len(outcome.choices)) for label in outcome.choices[at][1:]]

    # -- random schedules

    def walk(self, seed: int, busy: float = 0.25) -> None:
        """Run one random schedule. Raises Violation."""
        chance = random.Random(seed)
        taken: list[Deviation] = []

        def choose(step: int, labels: Sequence[str]) -> str:
            if len(labels) == 1 or chance.random() > busy:
                return labels[0]
            label = chance.choice(labels[1:])
            taken.append((step, label))
            return label

        outcome = self.run_schedule(choose=choose)
        if outcome.broken:
            raise self.reduce_plan(tuple(taken), outcome)

    def reduce_plan(self, plan: tuple[Deviation, ...], outcome: Outcome) -> Violation:
        """Remove deviations as long as a violation remains. Return the violation."""
        again = True
        while again:
            again = False
            for leave in range(len(plan)):
                less = plan[:leave] + plan[leave + 1 :]
                tried = self.run_schedule(less)
                if tried.broken:
                    plan, outcome, again = less, tried, True
                    break
        return Violation(self.scenario, plan, outcome.broken, outcome.trace)


def _shuffle(level: list[tuple[Deviation, ...]], chance: random.Random) -> list[tuple[Deviation, ...]]:
    """Shuffle plans. Those with a fault or an event, which are fewer, alternate with those that only change turns."""
    chance.shuffle(level)
    turns = [plan for plan in level if all(" " not in label for _, label in plan)]
    faults = [plan for plan in level if any(" " in label for _, label in plan)]
    both = [plan for pair in zip(turns, faults, strict=False) for plan in pair]
    return both + turns[len(faults) :] + faults[len(turns) :]


def explore_scenario(s: Scenario, max_runs: int, deviations: int = 2, seed: int = 1) -> Explorer:
    """Explore a scenario. Raises Violation."""
    with run_deterministically(), forget_early():
        explorer = Explorer(s)
        explorer.explore(max_runs, deviations, seed)
    return explorer
