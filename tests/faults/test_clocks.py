"""Clocks that are not the brokers': of runs, ahead, behind and jumping; of two runs; of records; of a store.

Windows last a minute here, so that an hour is sixty of them. What is complete, and when, may be wrong by what a clock
is off; what lands, and that it does so once, must not.
"""

from __future__ import annotations

import itertools
import random
import signal

import pytest

from sluice.pipelines.errors import SetupError
from tests.checker.invariants import Settings
from tests.checker.producers import Noting
from tests.faults.account import SEED
from tests.faults.clock import CLOCK
from tests.faults.field import Field
from tests.faults.runner import BOUND_MS, MACHINE
from tests.resources.kafka.proxy import FETCH
from tests.resources.kafka.tools import until
from tests.resources.lake.s3_faults import Proxy, Rule

pytestmark = pytest.mark.faults
BROKERS = 1
HOUR = 3600
LATEST = 3300
"""Seconds: brokers refuse what is stamped an hour ahead of them."""
OFF = Settings(healed=True, skew_ms=2 * HOUR * 1000 + 60_000)
WATCHED_MS = 10_000
_numbers = itertools.count(1)


@pytest.fixture
def draw() -> random.Random:
    return random.Random(SEED)


@pytest.fixture
def minutes(field: Field) -> Field:
    """A feed with windows of a minute that are closed at once."""
    return field.with_settings(window="{length: 1m, grace: 1s, max_skew: 5m}")


def by_clock(field: Field, ahead: str) -> None:
    """From now on runs go by a clock that is so many seconds ahead, or jumps like that; "": right."""
    field.environment.pop(CLOCK, None)
    if ahead:
        field.environment[CLOCK] = ahead
    field.account.did(f"the clock of runs is ahead by {ahead} s" if ahead else "the clock of runs is right")


def stamped(field: Field, *ahead: int) -> None:
    """Records in every partition, stamped so many seconds ahead."""
    for seconds in ahead:
        name = f"stamped{next(_numbers)}"
        producer = Noting(field.noted(name), name, field.arena.kafka.bootstrap, ahead_ms=seconds * 1000)
        for partition in range(field.partitions):
            producer.send(field.topic, partition, 5)
        producer.close()
    field.account.did(f"records were stamped {', '.join(f'{s:+}' for s in ahead)} s")


@pytest.mark.parametrize("ahead", [HOUR, -HOUR], ids=["ahead", "behind"])
def test_clock_of_runs_is_an_hour_off(minutes: Field, draw: random.Random, ahead: int) -> None:
    """From the first run on, or after a right one."""
    with minutes.producing():
        if draw.random() < 0.5:
            minutes.normal(1)
        for clock in (str(ahead), "", str(ahead), ""):
            by_clock(minutes, clock)
            stamped(minutes, -200, -100, 0)
            minutes.recovered()
    minutes.proven(OFF)


def test_clock_of_runs_jumps_back_and_forth(minutes: Field, draw: random.Random) -> None:
    """Between runs, and with each look within one."""
    with minutes.producing():
        minutes.normal(1)
        for _ in range(4):
            jumps = [draw.randint(-HOUR, HOUR) for _ in range(draw.choice((1, 5)))]
            by_clock(minutes, ",".join(map(str, jumps)))
            stamped(minutes, draw.randint(-HOUR, 0))
            minutes.recovered()
        by_clock(minutes, "")
        minutes.recovered()
    minutes.proven(OFF)


def test_two_runs_with_clocks_two_hours_apart(minutes: Field) -> None:
    """One at work is not taken for dead, however old its heartbeat looks; one that died is, on another machine."""
    minutes.environment[BOUND_MS] = str(WATCHED_MS)
    with minutes.producing():
        minutes.normal(1)
        stamped(minutes, 0)
        # What is held is told by its client: looks for boundaries fetch, too, the other run's as well.
        minutes.settings["kafka"] = f"{{bootstrap: '{minutes.arena.behind}', client_id: at-work}}"
        at_work = minutes.paused("after plan", {CLOCK: str(-HOUR), MACHINE: "another"})
        del minutes.settings["kafka"]
        for proxy in minutes.arena.proxies.values():
            proxy.hold(FETCH, client="at-work")
        at_work.process.send_signal(signal.SIGCONT)
        until(lambda: any(FETCH in proxy.held for proxy in minutes.arena.proxies.values()), 300)
        minutes.account.did("a run with a clock an hour behind lands, and its records are held")
        by_clock(minutes, str(HOUR))
        assert minutes.run().error == "PlanBusy"
        for proxy in minutes.arena.proxies.values():
            proxy.heal()
        assert minutes.ended(at_work).clean
        stamped(minutes, 0)
        dies = minutes.start("before publish", {CLOCK: str(-HOUR), MACHINE: "another"})
        assert minutes.ended(dies, about="a run (killed before publish, on another machine)").code < 0
        assert minutes.run().clean, "it was watched, and taken over"
        by_clock(minutes, "")
        minutes.recovered()
    minutes.proven(OFF)


def test_records_are_stamped_an_hour_ahead_and_behind(minutes: Field, draw: random.Random) -> None:
    with minutes.producing():
        stamped(minutes, LATEST)
        minutes.normal(1)
        for _ in range(3):
            stamped(minutes, *draw.sample((LATEST, -HOUR, -2 * HOUR, 0, 240, 360), 3))
            minutes.recovered()
    minutes.proven()


def test_clock_is_an_hour_off_the_stores(remote: Field, store: Proxy, draw: random.Random) -> None:
    """It is refused before anything is written; by stores that look, in mid-run."""
    apart = Rule(".", "skew", times=-1, seconds=draw.choice((-HOUR, HOUR)))
    with remote.producing():
        store.rules = [apart]
        remote.run().stopped_by(SetupError, says="set this machine's clock (NTP)")
        assert remote.folder.entries() == {}, "nothing was written"
        store.rules = []
        remote.normal(1)
        for wrong in (apart, Rule("PUT .*/staging/", "refuse", -1, 403, "RequestTimeTooSkewed")):
            store.rules = [wrong]
            remote.run().stopped_by(SetupError, says="set this machine's clock (NTP)")
            store.rules = []
            remote.recovered()
    remote.proven()
