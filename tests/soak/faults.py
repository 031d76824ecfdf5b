"""The faults, one at a time or two at once, by the seed, with calm in between."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

from sluice.pipelines import errors
from tests.faults.clock import CLOCK
from tests.faults.field import REPOSITORY
from tests.resources.kafka.proxy import END_TXN, FETCH, JOIN_GROUP, LIST_OFFSETS, METADATA, Proxy
from tests.resources.lake.s3_faults import Rule
from tests.soak.commands import Commands, Weather
from tests.soak.feeds import FEEDS
from tests.soak.site import Site

SHORT, LONG = 8, 45
"""Seconds that a fault lasts."""
CALM = (10, 50)
"""Seconds between two of them."""
SKEW = 120
"""Seconds by which the clock of a run may be off."""
_KILLS = 20
YOUNG, OLD = 15, 60
"""Minutes: Dagster's processes are killed while the soak is young, or once they have lived long enough to be judged."""


@dataclass
class Chaos:
    """The faults of a site."""

    site: Site
    commands: Commands
    weather: Weather
    draw: random.Random
    ended: threading.Event = field(default_factory=threading.Event)
    """Faults end early once it is set."""
    versions: int = 0

    def play_fault(self) -> None:
        """Let one fault happen, or two of different groups, then a calm of a drawn length."""
        groups = self.draw.sample(range(len(FAULTS)), 2 if self.draw.random() < 0.3 else 1)
        with ExitStack() as stack:
            for group in sorted(groups):
                fault = self.draw.choice(FAULTS[group])
                name = fault.__name__.replace("_", " ").strip()
                stack.enter_context(self.weather.note_fault(name))
                self.site.journal.note("fault", name)
                stack.enter_context(fault(self))
            self.ended.wait(self.draw.uniform(SHORT, LONG))
        self.site.journal.note("healed", "nothing is wrong")
        self.ended.wait(self.draw.uniform(*CALM))

    def kill_resident(self, *names: str, part: bytes = b"") -> None:
        """Kill a unit, or its processes with `part` in their command, unless each must live on to be judged."""
        old = [n for n in names if self.site.journal.minutes - self.site.starts.get(n, 0) > OLD]
        if names := names if self.site.journal.minutes < YOUNG else tuple(old):
            self.site.kill(self.draw.choice(names), part)

    def pick_broker(self) -> int:
        return self.draw.choice(self.site.arena.kafka.broker_ids)


Fault = Callable[[Chaos], AbstractContextManager[None]]


# -- brokers


def _end_broker(chaos: Chaos, number: signal.Signals) -> Iterator[None]:
    kafka, broker = chaos.site.arena.kafka, chaos.pick_broker()
    kafka.kill_broker(broker, number)
    try:
        yield
    finally:
        kafka.start_broker(broker)


@contextmanager
def kill_one_broker(chaos: Chaos) -> Iterator[None]:
    yield from _end_broker(chaos, signal.SIGKILL)


@contextmanager
def shut_down_broker(chaos: Chaos) -> Iterator[None]:
    yield from _end_broker(chaos, signal.SIGTERM)


@contextmanager
def stop_broker(chaos: Chaos) -> Iterator[None]:
    kafka, broker = chaos.site.arena.kafka, chaos.pick_broker()
    kafka.kill_broker(broker, signal.SIGSTOP)
    try:
        yield
    finally:
        kafka.kill_broker(broker, signal.SIGCONT)


# -- the network


def _break_network(chaos: Chaos, damage: Callable[[Proxy], None], *, limit: int = 3) -> Iterator[None]:
    proxies = list(chaos.site.arena.proxies.values())
    chosen = chaos.draw.sample(proxies, chaos.draw.randint(1, limit))
    for proxy in chosen:
        damage(proxy)
    try:
        yield
    finally:
        for proxy in chosen:
            proxy.heal()


@contextmanager
def cut_network(chaos: Chaos) -> Iterator[None]:
    yield from _break_network(chaos, Proxy.cut)


@contextmanager
def hold_network(chaos: Chaos) -> Iterator[None]:
    yield from _break_network(chaos, Proxy.hold)


@contextmanager
def suppress_answers(chaos: Chaos) -> Iterator[None]:
    yield from _break_network(chaos, Proxy.mute, limit=1)


@contextmanager
def delay_answers(chaos: Chaos) -> Iterator[None]:
    seconds = chaos.draw.uniform(0.05, 0.4)
    yield from _break_network(chaos, lambda proxy: setattr(proxy, "delay", seconds))


@contextmanager
def lose_answers(chaos: Chaos) -> Iterator[None]:
    key, times = chaos.draw.choice([END_TXN, FETCH, JOIN_GROUP, LIST_OFFSETS, METADATA]), chaos.draw.randint(1, 4)

    def lose(proxy: Proxy) -> None:
        proxy.lose[key] = times

    yield from _break_network(chaos, lose)


# -- the store and the registry


def _fail_store(chaos: Chaos, *rules: Rule) -> Iterator[None]:
    proxy = chaos.site.store
    proxy.rules += rules
    try:
        yield
    finally:
        for rule in rules:
            proxy.rules.remove(rule)


@contextmanager
def withdraw_store(chaos: Chaos) -> Iterator[None]:
    yield from _fail_store(chaos, Rule(".", "refuse", -1))


@contextmanager
def refuse_some_requests(chaos: Chaos) -> Iterator[None]:
    status, code = chaos.draw.choice([(503, "SlowDown"), (500, "InternalError"), (429, "TooManyRequests")])
    yield from _fail_store(chaos, Rule(".", "refuse", chaos.draw.randint(5, 60), status, code))


@contextmanager
def lose_answers_of_store(chaos: Chaos) -> Iterator[None]:
    rules = (Rule("^(PUT|POST)", "lose", chaos.draw.randint(1, 8)), Rule("^GET", "cut", chaos.draw.randint(1, 8)))
    yield from _fail_store(chaos, *rules)


@contextmanager
def delay_store(chaos: Chaos) -> Iterator[None]:
    yield from _fail_store(chaos, Rule(".", "slow", -1, seconds=chaos.draw.uniform(0.05, 0.3)))


@contextmanager
def withdraw_registry(chaos: Chaos) -> Iterator[None]:
    """Writers use another version of the schema from now on, which no run knows yet."""
    registry = chaos.site.registry
    rule = Rule(".", chaos.draw.choice(["refuse", "reset"]), -1, 503)
    registry.rules.append(rule)
    chaos.versions += 1
    try:
        for feed in FEEDS:
            if feed.registry:
                chaos.site.register(feed, chaos.versions)
        yield
    finally:
        registry.rules.remove(rule)


# -- processes


@contextmanager
def kill_run(chaos: Chaos) -> Iterator[None]:
    """Kill a run of Dagster or a command of the second scheduler, as soon as there is one."""
    for _ in range(_KILLS):
        workers = chaos.site.list_workers()
        if workers and chaos.draw.random() < 0.6:
            worker = chaos.draw.choice(workers)
            worker.send(signal.SIGKILL)
            chaos.site.journal.note("kill", f"run of Dagster {worker.pid}")
            break
        if words := chaos.commands.kill_one(chaos.draw.choice):
            chaos.site.journal.note("kill", f"sluice {words}")
            break
        if chaos.ended.wait(1):
            break
    yield


@contextmanager
def kill_daemon(chaos: Chaos) -> Iterator[None]:
    chaos.kill_resident("daemon")
    yield


@contextmanager
def kill_code_server(chaos: Chaos) -> Iterator[None]:
    chaos.kill_resident("code")
    yield


@contextmanager
def kill_code_process(chaos: Chaos) -> Iterator[None]:
    """Kill the process that has loaded the code, but not its server, which starts another."""
    chaos.kill_resident("code", part=b"\0grpc\0")
    yield


@contextmanager
def kill_web_or_metrics(chaos: Chaos) -> Iterator[None]:
    chaos.kill_resident("web", "metrics")
    yield


# -- the clock


@contextmanager
def run_by_another_clock(chaos: Chaos) -> Iterator[None]:
    """Run one feed with a clock that is off by up to two minutes."""
    feed = chaos.draw.choice(FEEDS)
    seconds = chaos.draw.choice([-1, 1]) * chaos.draw.randint(10, SKEW)
    began = time.time()
    done = chaos.commands.run(
        "run",
        feed.name,
        "--no-dagster",
        environment={CLOCK: str(seconds), "PYTHONPATH": str(REPOSITORY)},
        program=BY_CLOCK,
        expected=(errors.ClockAhead,) if seconds > 0 else (),
    )
    chaos.site.journal.note("clock", f"{feed.name} by a clock {seconds:+} s off: {done}", seconds=time.time() - began)
    yield


_BY_CLOCK = """
import os, sys
import sluice.resources.lake.store_client
from sluice.cli.entry import main
from tests.faults.clock import CLOCK, shift_clock

with shift_clock(os.environ[CLOCK]):
    sys.exit(main())
"""
BY_CLOCK = (sys.executable, "-c", _BY_CLOCK)
"""`sluice` with a shifted clock."""

FAULTS: tuple[tuple[Fault, ...], ...] = (
    (kill_one_broker, kill_one_broker, stop_broker, shut_down_broker),
    (cut_network, hold_network, suppress_answers, delay_answers, lose_answers),
    (withdraw_store, refuse_some_requests, lose_answers_of_store, delay_store),
    (withdraw_registry,),
    (kill_run,),
    (kill_run, kill_run, kill_daemon, kill_code_server, kill_code_process, kill_web_or_metrics),
    (run_by_another_clock,),
)
"""By group: two at once are of two groups."""
