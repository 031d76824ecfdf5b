"""Requests after a run that was killed at any write: each succeeds, or is refused with commands that work.

One pass of the killed run (the rival) yields each world in which it may have died. In each of them a catch-up finishes
or abandons its batch. Every other request names the batch, and each printed command ends it and unblocks the request.
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
from tests.model.explore import Scenario, prepare_world
from tests.model.programs import Spec, _end_faults, build_program, make_owner, run_deterministically
from tests.model.scenarios import PIECES
from tests.model.scheduler import Schedule
from tests.model.world import FEED, HOUR, START, TOPIC, World

RIVAL = "rival"
CATCH_UP = Request(RequestKind.CATCH_UP)


def make_offsets_request(start: int, end: int, replacing: bool = False) -> Request:
    return Request(RequestKind.OFFSETS, (AskedRange(TOPIC, 0, start, end),), replace=replacing)


@dataclass
class Asker:
    """A run or operator that makes one request, and collects the reports about other runs' batches."""

    world: World
    name: str = "asker"
    met: dict[int, Met] = field(default_factory=dict)

    def report(self, progress: Progress) -> None:
        self.note([progress.met] if progress.met else [])

    def note(self, others: list[Met] | tuple[Met, ...]) -> None:
        self.met |= {m.batch: m for m in others}

    def land(self, request: Request) -> None:
        land(self.world.feed, self.world.open_ports(self.name), request, make_owner(self.name), self.report).check()

    def compact(self) -> None:
        self.note(
            compact(self.world.feed, self.world.open_ports(self.name), None, make_owner(self.name), self.report).met
        )

    def replay(self) -> None:
        ports = self.world.open_ports(self.name)
        self.note(replay(self.world.feed, ports, Filter(), None, make_owner(self.name), self.report).met)

    def expire(self) -> None:
        feed, ports, before = self.world.feed, self.world.open_ports(self.name), START + HOUR
        expire(
            self.world.open_ledger(self.name),
            ports.lake,
            RetireRequest(before, "old"),
            feed.window,
            ports.liveness,
            self.report,
        )

    def repair(self, batch: int) -> None:
        ports = self.world.open_ports(self.name)
        target = RepairTarget(
            FEED, self.world.open_ledger(self.name), ports.lake, ports.liveness, self.world.feed.window
        )
        list(repair(target, [batch]))


REQUESTS: dict[str, Callable[[Asker], None]] = {
    "catch-up": lambda a: a.land(CATCH_UP),
    "catch-up of a partition": lambda a: a.land(Request(RequestKind.CATCH_UP, only=(TopicPartition(TOPIC, 1),))),
    "window": lambda a: a.land(Request(RequestKind.WINDOW, window=START)),
    "another window": lambda a: a.land(Request(RequestKind.WINDOW, window=START + HOUR)),
    "offsets": lambda a: a.land(make_offsets_request(0, 1)),
    "again": lambda a: a.land(make_offsets_request(1, 2, True)),
    "compaction": lambda a: a.compact(),
    "replay": lambda a: a.replay(),
    "expiry": lambda a: a.expire(),
}
MEETS = ("catch-up of a partition", "window", "another window", "offsets", "again")
"""The requests that report every unfinished batch, even one outside of their range."""


def run_command(world: World, command: str) -> None:
    """Carry out a printed command."""
    words, a = shlex.split(command), Asker(world, "obeys")
    assert words[0] == "sluice"
    match words[1:]:
        case ["run", _, *options]:
            a.land(parse_request(options))
        case ["compact", _]:
            a.compact()
        case ["quarantine", "replay", _]:
            a.replay()
        case ["repair", _, "--abandon", number]:
            a.repair(int(number))
        case _:
            pytest.fail(f"nobody knows `{command}`")
    world.dead.add(a.name)


def parse_request(options: list[str]) -> Request:
    """Return the request of these options of `sluice run`."""
    replacing, pairs = "--replace" in options, list(pairwise(options))
    ranges = tuple(_parse_range(v) for o, v in pairs if o == "--offsets")
    if ranges:
        return Request(RequestKind.OFFSETS, ranges, replace=replacing)
    windows = [parse_window(v) for o, v in pairs if o == "--window"]
    only = tuple(TopicPartition(v.split(":")[0], int(v.split(":")[1])) for o, v in pairs if o == "--only")
    return Request(RequestKind.WINDOW, window=windows[0], only=only, replace=replacing) if windows else CATCH_UP


def _parse_range(text: str) -> AskedRange:
    topic, number, span = text.split(":")
    return AskedRange(topic, int(number), *map(int, span.split("-")))


# -- the worlds in which the rival may have died


def kill_at_each_write(spec: Spec, scenario: Scenario, retention: bool) -> Iterator[World]:
    """Yield the world after each write of the rival, as if it died there. With `retention`, Kafka has deleted the first
    record since."""
    world = prepare_world(scenario)
    run = Schedule(
        world.stage,
        {RIVAL: build_program(world, RIVAL, spec)},
        lambda: (),
        {},
        world.compute_fingerprint,
        lambda: "",
        world.release,
    )
    actor, before = run.actors[RIVAL], world.compute_fingerprint()
    try:
        while actor.at is not None:
            world.stage.running = actor
            actor.resume()
            world.stage.running = None
            if (now := world.compute_fingerprint()) != before and actor.at is not None:
                before, after = now, world.clone()
                after.dead.add(RIVAL)
                _end_faults(after)
                if retention:
                    next(e for e in after.list_events() if e.label == "0: log start 1").act()
                yield after
    finally:
        world.stage.running = None
        actor.kill()


def list_rival_batches(world: World) -> list[Batch]:
    return [b for b in world.open_ledger("looks").read().live() if b.owner.token == RIVAL]


def _build_rival(spec: Spec, *logs: str, prelude: tuple[Spec, ...] = (), **how: Any) -> tuple[Spec, Scenario]:
    return spec, Scenario(spec[0], (), logs=logs, hours=4, prelude=prelude, **how)


RIVALS = {
    "landing": _build_rival(("catch",), "cb", "c"),
    "window": _build_rival(("win", 0), "cb", "c"),
    "below the origin": _build_rival(("bf", 0, 0, 2), "ccc", "c", prelude=(("catch",),), committed=(2, None)),
    "again": _build_rival(("rep", 0, 0, 1), "cb", "c", prelude=PIECES),
    "compaction": _build_rival(("compact",), "cc", "c", prelude=(*PIECES, ("catch",))),
    "replay": _build_rival(("replay",), "cb", "c", prelude=(*PIECES, ("catch",))),
}


@pytest.mark.parametrize("retention", [False, True], ids=["kept", "retention"])
@pytest.mark.parametrize("rival", RIVALS)
def test_remains_of_a_killed_rival_are_handled_or_have_a_working_remedy(rival: str, retention: bool) -> None:
    with run_deterministically():
        worlds = [w for w in kill_at_each_write(*RIVALS[rival], retention) if list_rival_batches(w)]
        assert len(worlds) >= 2, "it left something to be met"
        _check_all(worlds)


def _nothing_else(patch: pytest.MonkeyPatch) -> None:
    """Disable the rule that a run also handles batches outside of its range, and reports them."""
    patch.setattr(landing, "finish_others", lambda *_: [])


def _by_overlap_alone(patch: pytest.MonkeyPatch) -> None:
    """Disable the rule by which a replacement recognises its own plan after Kafka deleted its records."""
    real = plan.find_overlapping
    patch.setattr(
        plan, "find_overlapping", lambda state, request, ranges: real(state, replace(request, replace=False), ranges)
    )


@pytest.mark.parametrize("rule", [_nothing_else, _by_overlap_alone])
def test_missing_rule_leaves_a_blocked_feed(
    rule: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule(monkeypatch)
    with run_deterministically():
        worlds = [w for w in kill_at_each_write(*RIVALS["again"], retention=True) if list_rival_batches(w)]
        with pytest.raises(AssertionError):
            _check_all(worlds)


def _check_all(worlds: list[World]) -> None:
    for world in worlds:
        check(world, list_rival_batches(world)[0])


def check(world: World, batch: Batch) -> None:
    _catch_up_leaves_nothing(world.clone())
    for command, _ in publish.list_commands(FEED, batch):
        _check_command(world.clone(), command)
    for name, ask in REQUESTS.items():
        _check_request(world, name, ask, batch)


def catch_error(act: Callable[[], None]) -> SluiceError | None:
    """Return the error that the action raises; None without one."""
    try:
        act()
    except SluiceError as error:
        return error
    return None


def _catch_up_leaves_nothing(world: World) -> None:
    asker, batches = Asker(world), list_rival_batches(world)
    # If Kafka deleted the planned records, the batch fails, and the next run continues.
    assert isinstance(catch_error(lambda: asker.land(CATCH_UP)), BatchIncomplete | None)
    assert [b.id for b in world.open_ledger("looks").read().live()] == [], "a catch-up leaves nothing of the dead"
    assert set(asker.met) == {b.id for b in batches}, "and reports each of them"


def _check_command(world: World, command: str) -> None:
    # A plan that can never be carried out is abandoned, and its request fails.
    assert isinstance(catch_error(lambda: run_command(world, command)), BatchIncomplete | None)
    assert list_rival_batches(world) == [], f"`{command}` ends it"


OTHERS = BatchIncomplete | NothingToAccept | WindowIncomplete | OffsetsLost
"""Errors for lost and pending records, which have remedies of their own."""


def _check_request(world: World, name: str, ask: Callable[[Asker], None], batch: Batch) -> None:
    here = world.clone()
    asker = Asker(here)
    error = catch_error(lambda: ask(asker))
    if isinstance(error, PlanBusy):
        assert f"batch {batch.id} " in error.message
        assert " is dead: " in error.message
        commands = re.findall(r"`(sluice [^`]*)`", error.remedy)
        assert commands, f"{name} is refused without a way out: {error}"
        for command in commands:
            _check_request_after(world.clone(), name, ask, command)
        return
    assert isinstance(error, OTHERS | None), f"{name}: {error}"
    if error is None and name in MEETS and list_rival_batches(here):
        assert asker.met[batch.id].ways, f"{name} goes on without a word"


def _check_request_after(world: World, name: str, ask: Callable[[Asker], None], command: str) -> None:
    _check_command(world, command)
    error = catch_error(lambda: ask(Asker(world, "again")))
    assert not isinstance(error, PlanBusy), f"{name} is still refused after `{command}`: {error}"
