"""Faults of the network between Sluice and the brokers. Other clients reach the brokers without them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from tests.faults.field import Field, Running
from tests.faults.nemeses import seed_random
from tests.resources.kafka.proxy import Proxy
from tests.resources.kafka.tools import wait_until

Fault = Callable[..., AbstractContextManager[None]]


@contextmanager
def cut_connections(field: Field, *brokers: int) -> Iterator[None]:
    """Cut connections and refuse new ones."""
    with _apply_fault(field, "cut off", Proxy.cut, brokers):
        yield


@contextmanager
def block_traffic(field: Field, *brokers: int) -> Iterator[None]:
    """Keep connections open and pass nothing."""
    with _apply_fault(field, "nothing passes to or from", Proxy.hold, brokers):
        yield


@contextmanager
def block_answers(field: Field, *brokers: int) -> Iterator[None]:
    """Pass requests, which brokers carry out, but no answers."""
    with _apply_fault(field, "no answer comes from", Proxy.mute, brokers):
        yield


@contextmanager
def delay_answers(field: Field, *brokers: int, seconds: float = 0.4) -> Iterator[None]:
    """Delay each answer."""

    def delay(proxy: Proxy) -> None:
        proxy.delay = seconds

    with _apply_fault(field, f"{seconds:g} s late is each answer of", delay, brokers):
        yield


@contextmanager
def cut_at_random(field: Field, *brokers: int) -> Iterator[None]:
    """Cut off one random broker after another, each for up to a second."""
    draw, stopped = seed_random(field), threading.Event()
    chosen = [field.arena.proxies[b] for b in brokers or field.arena.proxies]

    def cut_and_heal() -> None:
        while not stopped.is_set():
            proxy = draw.choice(chosen)
            proxy.cut()
            stopped.wait(draw.uniform(0.1, 1))
            proxy.heal()
            stopped.wait(draw.uniform(0.1, 1))

    thread = threading.Thread(target=cut_and_heal)
    thread.start()
    field.account.log("connections come and go")
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        field.account.log("connections stay")


@contextmanager
def _apply_fault(
    field: Field, description: str, inject: Callable[[Proxy], None], brokers: tuple[int, ...]
) -> Iterator[None]:
    """Inject a fault at the brokers' proxies, by default all, and heal it after the block."""
    brokers = brokers or tuple(field.arena.proxies)
    for broker in brokers:
        inject(field.arena.proxies[broker])
    field.account.log(f"{description} broker {', '.join(map(str, brokers))}")
    try:
        yield
    finally:
        for broker in brokers:
            field.arena.proxies[broker].heal()
        field.account.log(f"the network is as ever at broker {', '.join(map(str, brokers))}")


@contextmanager
def hold_run_at(field: Field, key: int, *brokers: int) -> Iterator[Running]:
    """Start a run and hold its requests with the API key before the brokers until the block ends. Yields the run.

    If a run ends without that request, as without new records on the broker, the next one is started.
    """
    chosen = [field.arena.proxies[b] for b in brokers or field.arena.proxies]
    for proxy in chosen:
        proxy.hold(key)
    try:
        yield _start_until_held(field, chosen)
    finally:
        for proxy in chosen:
            proxy.heal()


def _start_until_held(field: Field, chosen: Sequence[Proxy]) -> Running:
    for _ in range(5):
        running = field.start()
        wait_until(lambda running=running: any(p.held for p in chosen) or running.process.poll() is not None, 120)
        if running.process.poll() is None:
            return running
        run = field.wait_for_run(running)
        assert run.clean, run
    raise AssertionError(f"no request came to {chosen} in five runs; the last one {run}")
