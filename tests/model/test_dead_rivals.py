"""A rival that is killed at any write, and then anybody else: each goes on, or is refused with ways out that work.

One pass of a rival shows every world in which it may have been killed. In each of them a catch-up leaves nothing of it;
whatever else is asked for names what the rival left, and each command that is printed ends it and lets the asker go on.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from sluice.pipelines.batch import land as landing
from sluice.pipelines.batch.land import land
from sluice.pipelines.errors import (
    BatchIncomplete,
    NothingToAccept,
    OffsetsLost,
    PlanBusy,
    SluiceError,
    WindowIncomplete,
)
from sluice.pipelines.ledger import Batch
from sluice.pipelines.maintenance.compaction import compact
from sluice.pipelines.maintenance.expiry import RetireRequest, expire
from sluice.pipelines.maintenance.replay import replay
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.model.plans import AskedRange, Request, RequestKind
from sluice.pipelines.model.receipts import Met, Progress
from sluice.pipelines.operating.repairs import RepairTarget, repair
from sluice.pipelines.planning import plan
from sluice.pipelines.publishing import publish
from sluice.pipelines.quarantine.listing import Filter
from sluice.pipelines.util.units import parse_window
from tests.model.explore import Scenario, prepared
from tests.model.programs import Spec, _calm, as_one, owner, program
from tests.model.scenarios import PIECES
from tests.model.scheduler import Schedule
from tests.model.world import FEED, HOUR, START, TOPIC, World

RIVAL = "rival"
CATCH_UP = Request(RequestKind.CATCH_UP)


def offsets(start: int, end: int, replacing: bool = False) -> Request:
    return Request(RequestKind.OFFSETS, (AskedRange(TOPIC, 0, start, end),), replace=replacing)


@dataclass
class Asker:
    """Somebody who does one thing, and hears what is said of other runs' batches."""

    world: World
    name: str = "asker"
    met: dict[int, Met] = field(default_factory=dict)

    def report(self, progress: Progress) -> None:
        self.note([progress.met] if progress.met else [])

    def note(self, found: list[Met] | tuple[Met, ...]) -> None:
        self.met |= {m.batch: m for m in found}

    def land(self, request: Request) -> None:
        land(self.world.feed, self.world.edges(self.name), request, owner(self.name), self.report).check()

    def compact(self) -> None:
        self.note(compact(self.world.feed, self.world.edges(self.name), None, owner(self.name), self.report).met)

    def replay(self) -> None:
        edges = self.world.edges(self.name)
        self.note(replay(self.world.feed, edges, Filter(), None, owner(self.name), self.report).met)

    def expire(self) -> None:
        feed, edges, before = self.world.feed, self.world.edges(self.name), START + HOUR
        expire(
            self.world.ledger(self.name),
            edges.lake,
            RetireRequest(before, "old"),
            feed.window,
            edges.liveness,
            self.report,
        )

    def repair(self, batch: int) -> None:
        edges = self.world.edges(self.name)
        place = RepairTarget(FEED, self.world.ledger(self.name), edges.lake, edges.liveness, self.world.feed.window)
        list(repair(place, [batch]))


ASKED: dict[str, Callable[[Asker], None]] = {
    "catch-up": lambda a: a.land(CATCH_UP),
    "catch-up of a partition": lambda a: a.land(Request(RequestKind.CATCH_UP, only=(TopicPartition(TOPIC, 1),))),
    "window": lambda a: a.land(Request(RequestKind.WINDOW, window=START)),
    "another window": lambda a: a.land(Request(RequestKind.WINDOW, window=START + HOUR)),
    "offsets": lambda a: a.land(offsets(0, 1)),
    "again": lambda a: a.land(offsets(1, 2, True)),
    "compaction": lambda a: a.compact(),
    "replay": lambda a: a.replay(),
    "expiry": lambda a: a.expire(),
}
MEETS = ("catch-up of a partition", "window", "another window", "offsets", "again")
"""Those that say what they come upon, whatever it is that they were asked for."""


def obey(world: World, command: str) -> None:
    """Do what a printed command says."""
    words, a = shlex.split(command), Asker(world, "obeys")
    assert words[0] == "sluice"
    match words[1:]:
        case ["run", _, *options]:
            a.land(asked(options))
        case ["compact", _]:
            a.compact()
        case ["quarantine", "replay", _]:
            a.replay()
        case ["repair", _, "--abandon", number]:
            a.repair(int(number))
        case _:
            pytest.fail(f"nobody knows `{command}`")
    world.dead.add(a.name)


def asked(options: list[str]) -> Request:
    """The request that these options of `sluice run` make."""
    replacing, given = "--replace" in options, list(pairwise(options))
    ranges = tuple(_range(v) for o, v in given if o == "--offsets")
    if ranges:
        return Request(RequestKind.OFFSETS, ranges, replace=replacing)
    windows = [parse_window(v) for o, v in given if o == "--window"]
    only = tuple(TopicPartition(v.split(":")[0], int(v.split(":")[1])) for o, v in given if o == "--only")
    return Request(RequestKind.WINDOW, window=windows[0], only=only, replace=replacing) if windows else CATCH_UP


def _range(text: str) -> AskedRange:
    topic, number, span = text.split(":")
    return AskedRange(topic, int(number), *map(int, span.split("-")))


# -- the worlds in which a rival may have been killed


def killed(spec: Spec, scenario: Scenario, retention: bool) -> Iterator[World]:
    """The world after each write of the rival, as its death there would leave it; with `retention`, Kafka has forgotten
    the first record since."""
    world = prepared(scenario)
    run = Schedule(
        world.stage, {RIVAL: program(world, RIVAL, spec)}, lambda: (), {}, world.fingerprint, lambda: "", world.release
    )
    actor, before = run.actors[RIVAL], world.fingerprint()
    try:
        while actor.at is not None:
            world.stage.running = actor
            actor.resume()
            world.stage.running = None
            if (now := world.fingerprint()) != before and actor.at is not None:
                before, left = now, world.clone()
                left.dead.add(RIVAL)
                _calm(left)
                if retention:
                    next(e for e in left.events() if e.label == "0: log start 1").act()
                yield left
    finally:
        world.stage.running = None
        actor.kill()


def left_by_rival(world: World) -> list[Batch]:
    return [b for b in world.ledger("looks").read().live() if b.owner.token == RIVAL]


def _rival(spec: Spec, *logs: str, prelude: tuple[Spec, ...] = (), **how: Any) -> tuple[Spec, Scenario]:
    return spec, Scenario(spec[0], (), logs=logs, hours=4, prelude=prelude, **how)


RIVALS = {
    "landing": _rival(("catch",), "cb", "c"),
    "window": _rival(("win", 0), "cb", "c"),
    "below the origin": _rival(("bf", 0, 0, 2), "ccc", "c", prelude=(("catch",),), committed=(2, None)),
    "again": _rival(("rep", 0, 0, 1), "cb", "c", prelude=PIECES),
    "compaction": _rival(("compact",), "cc", "c", prelude=(*PIECES, ("catch",))),
    "replay": _rival(("replay",), "cb", "c", prelude=(*PIECES, ("catch",))),
}


@pytest.mark.parametrize("retention", [False, True], ids=["kept", "retention"])
@pytest.mark.parametrize("rival", RIVALS)
def test_whoever_meets_what_a_killed_rival_left_goes_on_or_is_told_a_way_out_that_works(
    rival: str, retention: bool
) -> None:
    with as_one():
        worlds = [w for w in killed(*RIVALS[rival], retention) if left_by_rival(w)]
        assert len(worlds) >= 2, "it left something to be met"
        _check_all(worlds)


def _nothing_else(patch: pytest.MonkeyPatch) -> None:
    """A run does nothing about what is not in its way, and does not mention it."""
    patch.setattr(landing, "finish_others", lambda *_: [])


def _by_overlap_alone(patch: pytest.MonkeyPatch) -> None:
    """A replacing does not know its own plan again once Kafka does not hold what it reads any more."""
    real = plan.find_overlapping
    patch.setattr(
        plan, "find_overlapping", lambda state, request, found: real(state, replace(request, replace=False), found)
    )


@pytest.mark.parametrize("rule", [_nothing_else, _by_overlap_alone])
def test_without_the_rule_something_stays_in_the_way(
    rule: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule(monkeypatch)
    with as_one():
        worlds = [w for w in killed(*RIVALS["again"], retention=True) if left_by_rival(w)]
        with pytest.raises(AssertionError):
            _check_all(worlds)


def _check_all(worlds: list[World]) -> None:
    for world in worlds:
        check(world, left_by_rival(world)[0])


def check(world: World, left: Batch) -> None:
    _catch_up_leaves_nothing(world.clone())
    for command, _ in publish.list_commands(FEED, left):
        _ends_it(world.clone(), command)
    for name, ask in ASKED.items():
        _goes_on(world, name, ask, left)


def stopped(act: Callable[[], None]) -> SluiceError | None:
    """What stops it, if anything does."""
    try:
        act()
    except SluiceError as error:
        return error
    return None


def _catch_up_leaves_nothing(world: World) -> None:
    asker, left = Asker(world), left_by_rival(world)
    # What was to be read may be gone from Kafka: then the next one goes on.
    assert isinstance(stopped(lambda: asker.land(CATCH_UP)), BatchIncomplete | None)
    assert [b.id for b in world.ledger("looks").read().live()] == [], "a catch-up leaves nothing of the dead"
    assert set(asker.met) == {b.id for b in left}, "and says so"


def _ends_it(world: World, command: str) -> None:
    # What can never be carried out is given up, and fails who asked for it.
    assert isinstance(stopped(lambda: obey(world, command)), BatchIncomplete | None)
    assert left_by_rival(world) == [], f"`{command}` ends it"


OTHERS = BatchIncomplete | NothingToAccept | WindowIncomplete | OffsetsLost
"""What Kafka lost, and what is pending: named by errors with ways of their own."""


def _goes_on(world: World, name: str, ask: Callable[[Asker], None], left: Batch) -> None:
    here = world.clone()
    asker = Asker(here)
    error = stopped(lambda: ask(asker))
    if isinstance(error, PlanBusy):
        assert f"batch {left.id} " in error.message
        assert " is dead: " in error.message
        commands = re.findall(r"`(sluice [^`]*)`", error.remedy)
        assert commands, f"{name} is refused without a way out: {error}"
        for command in commands:
            _lets_go_on(world.clone(), name, ask, command)
        return
    assert isinstance(error, OTHERS | None), f"{name}: {error}"
    if error is None and name in MEETS and left_by_rival(here):
        assert asker.met[left.id].ways, f"{name} goes on without a word"


def _lets_go_on(world: World, name: str, ask: Callable[[Asker], None], command: str) -> None:
    _ends_it(world, command)
    error = stopped(lambda: ask(Asker(world, "again")))
    assert not isinstance(error, PlanBusy), f"{name} is still refused after `{command}`: {error}"
