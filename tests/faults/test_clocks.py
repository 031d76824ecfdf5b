"""Clocks that differ from the brokers': of runs, ahead, behind and jumping; of two runs; of records; of a store.

Windows last a minute here, so that an hour has sixty. A clock's error may shift the completion of windows, but records
must still land, each once.
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
from tests.resources.kafka.tools import wait_until
from tests.resources.lake.s3_faults import Proxy, Rule

pytestmark = pytest.mark.faults
BROKERS = 1
HOUR = 3600
LATEST = 3300
"""Seconds. Brokers refuse timestamps more than an hour ahead."""
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


def set_clock(field: Field, ahead: str) -> None:
    """Set the clock of later runs: seconds ahead, or jumps, separated by commas; "" for the right time."""
    field.environment.pop(CLOCK, None)
    if ahead:
        field.environment[CLOCK] = ahead
    field.account.log(f"the clock of runs is ahead by {ahead} s" if ahead else "the clock of runs is right")


def produce_stamped(field: Field, *ahead: int) -> None:
    """Produce records to every partition, with timestamps `ahead` seconds in the future."""
    for seconds in ahead:
        name = f"stamped{next(_numbers)}"
        producer = Noting(field.add_notes(name), name, field.arena.kafka.bootstrap, ahead_ms=seconds * 1000)
        for partition in range(field.partitions):
            producer.send(field.topic, partition, 5)
        producer.close()
    field.account.log(f"records were stamped {', '.join(f'{s:+}' for s in ahead)} s")


@pytest.mark.parametrize("ahead", [HOUR, -HOUR], ids=["ahead", "behind"])
def test_clock_of_runs_is_an_hour_off(minutes: Field, draw: random.Random, ahead: int) -> None:
    """From the first run, or after a run with the right clock."""
    with minutes.run_producers():
        if draw.random() < 0.5:
            minutes.run_baseline(1)
        for clock in (str(ahead), "", str(ahead), ""):
            set_clock(minutes, clock)
            produce_stamped(minutes, -200, -100, 0)
            if clock and ahead > 0:
                assert minutes.run().error == "ClockAhead", "no window is closed that is open by the brokers' clock"
            else:
                minutes.run_until_clean()
    minutes.verify(OFF)


def test_clock_of_runs_jumps_back_and_forth(minutes: Field, draw: random.Random) -> None:
    """Between runs, and at each reading within a run."""
    with minutes.run_producers():
        minutes.run_baseline(1)
        for _ in range(4):
            jumps = [draw.randint(-HOUR, HOUR) for _ in range(draw.choice((1, 5)))]
            set_clock(minutes, ",".join(map(str, jumps)))
            produce_stamped(minutes, draw.randint(-HOUR, 0))
            run = minutes.run()
            assert run.clean or (max(jumps) > 0 and run.error == "ClockAhead"), run
        set_clock(minutes, "")
        minutes.run_until_clean()
    minutes.verify(OFF)


def test_two_runs_with_clocks_two_hours_apart(minutes: Field) -> None:
    """A live run is not taken for dead, however old its heartbeat seems; a dead one on another machine is. Both clocks
    are behind the brokers' or as theirs: a run whose clock is ahead is refused."""
    minutes.environment[BOUND_MS] = str(WATCHED_MS)
    with minutes.run_producers():
        minutes.run_baseline(1)
        produce_stamped(minutes, 0)
        # The client id selects the fetches to hold: both runs also fetch to find boundaries.
        minutes.settings["kafka"] = f"{{bootstrap: '{minutes.arena.proxied_bootstrap}', client_id: at-work}}"
        live_run = minutes.start_paused("after plan", {CLOCK: str(-2 * HOUR), MACHINE: "another"})
        del minutes.settings["kafka"]
        for proxy in minutes.arena.proxies.values():
            proxy.hold(FETCH, client="at-work", committed=True)
        live_run.process.send_signal(signal.SIGCONT)
        wait_until(lambda: any(FETCH in proxy.held for proxy in minutes.arena.proxies.values()), 300)
        minutes.account.log("a run with a clock two hours behind lands, and its records are held")
        assert minutes.run().error == "PlanBusy"
        for proxy in minutes.arena.proxies.values():
            proxy.heal()
        assert minutes.wait_for_run(live_run).clean
        produce_stamped(minutes, 0)
        dead_run = minutes.start("before publish", {CLOCK: str(-2 * HOUR), MACHINE: "another"})
        assert minutes.wait_for_run(dead_run, about="a run (killed before publish, on another machine)").code < 0
        assert minutes.run().clean, "it was watched, and taken over"
        minutes.run_until_clean()
    minutes.verify(OFF)


def test_records_are_stamped_an_hour_ahead_and_behind(minutes: Field, draw: random.Random) -> None:
    with minutes.run_producers():
        produce_stamped(minutes, LATEST)
        minutes.run_baseline(1)
        for _ in range(3):
            produce_stamped(minutes, *draw.sample((LATEST, -HOUR, -2 * HOUR, 0, 240, 360), 3))
            minutes.run_until_clean()
    minutes.verify()


def test_clock_is_an_hour_off_from_the_store(remote: Field, store: Proxy, draw: random.Random) -> None:
    """The run is refused before it writes anything; by stores that check clocks also in mid-run."""
    skew = Rule(".", "skew", times=-1, seconds=draw.choice((-HOUR, HOUR)))
    with remote.run_producers():
        store.rules = [skew]
        remote.run().expect_error(SetupError, mentions="set this machine's clock (NTP)")
        assert remote.folder.read_entries() == {}, "nothing was written"
        store.rules = []
        remote.run_baseline(1)
        for rule in (skew, Rule("PUT .*/staging/", "refuse", -1, 403, "RequestTimeTooSkewed")):
            store.rules = [rule]
            remote.run().expect_error(SetupError, mentions="set this machine's clock (NTP)")
            store.rules = []
            remote.run_until_clean()
    remote.verify()
