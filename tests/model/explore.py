"""Schedules of real runs: all with few deviations, or random ones; and the shortest trace of a violation.

What is tried depends on scenario, bounds and seed alone. Two schedules that come to one state (of the world, and of all
that each run has seen) go on from there once.
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
from tests.model.programs import Spec, as_one, forgetful, heal, program
from tests.model.scheduler import Deviation, Ran, Schedule
from tests.model.watch import Watch
from tests.model.world import DLQ, HOUR, START, World


@dataclass(frozen=True)
class Scenario:
    """Who runs over what. `actors` are kinds of programs and what they ask for; `budgets` say how often a fault or an
    event may happen; `prelude` runs first, one after the other: programs, `("event", label)` for what happens by
    itself, `("until", words, program)` for one that dies before the first effect with those words.
    """

    name: str
    actors: tuple[Spec, ...]
    logs: tuple[str, ...] = ("cc",)
    stamps: tuple[tuple[int, ...], ...] = ()
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
    """Whether offset ranges of a task share files."""

    @property
    def moved(self) -> bool:
        """Whether somebody else may move the group's offsets."""
        return any(self.budgets.get(b) for b in ("reset",)) or any(a[0] == "ext" for a in self.actors)

    @property
    def loses(self) -> bool:
        """Whether the ledger lost entries."""
        return any(p[0] == "event" and p[1].startswith("the ledger loses") for p in self.prelude)

    @property
    def removed(self) -> bool:
        """Whether the lake was removed: the group's offsets are of a ledger that is gone."""
        return any(p[:2] == ("event", "the lake is removed") for p in self.prelude)

    @property
    def retired(self) -> bool:
        return any(a[0] == "expire" for a in (*self.actors, *self.prelude))


@lru_cache(64)
def _feed(text: str) -> Feed:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "orders.yaml"
        path.write_text(text)
        return load_feed(path, {})


def feed_of(s: Scenario) -> Feed:
    policies = f"policies: {{on_loss: {s.on_loss}, quarantine_limit: {{share: 1}}}}\n"
    letters = f"dead_letters: {{topic: {DLQ}}}\n" if s.letters else ""
    return _feed(
        f"kafka: {{bootstrap: 'a:1'}}\ntopics: orders\nstart: {s.start}\nwindow: 1h\n"
        f"landing: {{layout: {s.layout}, shared_files: {str(s.shared).lower()}}}\n{policies}{letters}"
    )


def prepared(s: Scenario) -> World:
    """The world once the prelude has run. Raises AssertionError when that breaks something."""
    world = World(feed_of(s), s.logs, s.stamps)
    world.now = START + s.hours * HOUR
    world.slow_copies = s.slow_copies
    for n, offset in enumerate(s.committed):
        if offset is not None:
            world.group.offsets[world.partitions[n].tp] = CommittedOffset(offset)
    Watch(world)
    for at, (kind, *rest) in enumerate(s.prelude):
        name = f"before{at}"
        if kind == "event":
            next(e for e in world.events() if e.label == rest[0]).act()
        elif kind == "until":
            _until(world, name, rest[0], tuple(rest[1]))
        else:
            program(world, name, (kind, *rest))()
        assert not world.broken, f"{s.name}: the prelude: {world.broken}"
    return world


def _until(world: World, name: str, words: str, spec: Spec) -> None:
    budgets = {"crash": 1}
    run = Schedule(
        world.stage,
        {name: program(world, name, spec)},
        lambda: (),
        budgets,
        world.fingerprint,
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
    """What broke, by which schedule, and the trace of it."""

    scenario: Scenario
    deviations: tuple[Deviation, ...]
    text: str
    trace: list[str]

    def __str__(self) -> str:
        lines = "\n    ".join(self.trace)
        return f"{self.text}\n    {lines}\nscenario {self.scenario.name!r}, deviations {list(self.deviations)}"


class Explorer:
    """Runs schedules of one scenario. `runs`, `converged` and `steps` count what was done."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.runs = self.converged = self.steps = 0
        self._world = prepared(scenario)
        self._seen: dict[int, int] = {}

    def one(
        self,
        deviations: Iterable[Deviation] = (),
        known: Callable[[int, int], bool] = lambda state, left: False,
        choose: Callable[[int, Sequence[str]], str] | None = None,
    ) -> Ran:
        """One schedule, healed at its end."""
        s, world = self.scenario, self._world.clone()
        watch = Watch(world)
        watch.take_over(self._world.watch)
        names = [f"{spec[0] if spec[0] == 'ext' else 'r'}{n + 1}" for n, spec in enumerate(s.actors)]
        programs = {name: program(world, name, spec) for name, spec in zip(names, s.actors, strict=True)}
        run = Schedule(
            world.stage, programs, world.events, s.budgets, world.fingerprint, lambda: world.broken, world.release
        )
        ran = run.run(deviations, known, choose)
        self.runs += 1
        self.steps += len(ran.choices)
        self.converged += ran.converged
        ran.broken = ran.broken or self._alarm(run)
        if not ran.broken and not ran.converged:
            ran.trace.append("-- every run that is left is dead; clean runs follow")
            how = {"moved": s.moved, "retired": s.retired, "loses": s.loses, "removed": s.removed}
            healed = heal(world, by_windows=s.by_windows, **how)
            ran.broken = healed or watch.at_last(moved=s.moved, letters=s.letters)
        return ran

    def _alarm(self, run: Schedule) -> str:
        """A run may be refused, or fail in a way that passes; what it says must be true."""
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

    # -- all of them

    def systematic(self, most: int, deviations: int = 2, seed: int = 1) -> None:
        """Every schedule with so few deviations, as far as `most` runs reach: those with fewer first, and of those with
        as many a random choice. Raises Violation."""
        chance = random.Random(seed)
        level: list[tuple[Deviation, ...]] = [()]
        for count in range(deviations + 1):
            level = _mixed(level, chance)
            found: list[tuple[Deviation, ...]] = []
            for plan in level:
                if self.runs >= most:
                    return
                found += self._tried(plan, deviations - count)
            level = found

    def _tried(self, plan: tuple[Deviation, ...], left: int) -> list[tuple[Deviation, ...]]:
        def known(state: int, step: int) -> bool:
            if self._seen.get(state, -1) >= left:
                return True
            self._seen[state] = left
            return False

        ran = self.one(plan, known)
        if ran.broken:
            raise self.shortest(plan, ran)
        first = plan[-1][0] + 1 if plan else 0
        return [(*plan, (at, label)) for at in range(first, len(ran.choices)) for label in ran.choices[at][1:]]

    # -- random ones

    def walk(self, seed: int, busy: float = 0.25) -> None:
        """One random schedule. Raises Violation."""
        chance = random.Random(seed)
        taken: list[Deviation] = []

        def choose(step: int, labels: Sequence[str]) -> str:
            if len(labels) == 1 or chance.random() > busy:
                return labels[0]
            label = chance.choice(labels[1:])
            taken.append((step, label))
            return label

        ran = self.one(choose=choose)
        if ran.broken:
            raise self.shortest(tuple(taken), ran)

    def shortest(self, plan: tuple[Deviation, ...], ran: Ran) -> Violation:
        """The violation with as few deviations as still show one."""
        again = True
        while again:
            again = False
            for leave in range(len(plan)):
                less = plan[:leave] + plan[leave + 1 :]
                tried = self.one(less)
                if tried.broken:
                    plan, ran, again = less, tried, True
                    break
        return Violation(self.scenario, plan, ran.broken, ran.trace)


def _mixed(level: list[tuple[Deviation, ...]], chance: random.Random) -> list[tuple[Deviation, ...]]:
    """In random order; those with a fault or an event, which are fewer, as often as those that only change turns."""
    chance.shuffle(level)
    turns = [plan for plan in level if all(" " not in label for _, label in plan)]
    faults = [plan for plan in level if any(" " in label for _, label in plan)]
    both = [plan for pair in zip(turns, faults, strict=False) for plan in pair]
    return both + turns[len(faults) :] + faults[len(turns) :]


def explored(s: Scenario, most: int, deviations: int = 2, seed: int = 1) -> Explorer:
    """Raises Violation."""
    with as_one(), forgetful():
        explorer = Explorer(s)
        explorer.systematic(most, deviations, seed)
    return explorer
