"""The network between Sluice and the brokers: cut, held, mute, slow, flapping. Others reach the brokers as ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from tests.faults.field import Field, Running
from tests.faults.nemeses import drawn
from tests.resources.kafka.proxy import Proxy
from tests.resources.kafka.tools import until

Fault = Callable[..., AbstractContextManager[None]]


@contextmanager
def cut(field: Field, *brokers: int) -> Iterator[None]:
    """Connections end, and new ones are refused."""
    with _wrong(field, "cut off", Proxy.cut, brokers):
        yield


@contextmanager
def held(field: Field, *brokers: int) -> Iterator[None]:
    """A black hole: connections stay, nothing passes."""
    with _wrong(field, "nothing passes to or from", Proxy.hold, brokers):
        yield


@contextmanager
def mute(field: Field, *brokers: int) -> Iterator[None]:
    """One way only: requests arrive and are carried out, answers do not come back."""
    with _wrong(field, "no answer comes from", Proxy.mute, brokers):
        yield


@contextmanager
def slow(field: Field, *brokers: int, seconds: float = 0.4) -> Iterator[None]:
    """Each answer takes so much longer."""

    def delay(proxy: Proxy) -> None:
        proxy.delay = seconds

    with _wrong(field, f"{seconds:g} s late is each answer of", delay, brokers):
        yield


@contextmanager
def flapping(field: Field, *brokers: int) -> Iterator[None]:
    """One broker after the other is cut off for a moment."""
    draw, ended = drawn(field), threading.Event()
    chosen = [field.arena.proxies[b] for b in brokers or field.arena.proxies]

    def flap() -> None:
        while not ended.is_set():
            proxy = draw.choice(chosen)
            proxy.cut()
            ended.wait(draw.uniform(0.1, 1))
            proxy.heal()
            ended.wait(draw.uniform(0.1, 1))

    thread = threading.Thread(target=flap)
    thread.start()
    field.account.did("connections come and go")
    try:
        yield
    finally:
        ended.set()
        thread.join()
        field.account.did("connections stay")


@contextmanager
def _wrong(field: Field, what: str, do: Callable[[Proxy], None], brokers: tuple[int, ...]) -> Iterator[None]:
    """With the brokers, or all of them if none is named."""
    brokers = brokers or tuple(field.arena.proxies)
    for broker in brokers:
        do(field.arena.proxies[broker])
    field.account.did(f"{what} broker {', '.join(map(str, brokers))}")
    try:
        yield
    finally:
        for broker in brokers:
            field.arena.proxies[broker].heal()
        field.account.did(f"the network is as ever at broker {', '.join(map(str, brokers))}")


@contextmanager
def caught(field: Field, key: int, *brokers: int) -> Iterator[Running]:
    """A run, at the moment when a request of this kind (a key of Kafka's API) waits before a broker; then it passes.

    A run for which no partition of that broker has new records asks it for none: the next one is tried.
    """
    chosen = [field.arena.proxies[b] for b in brokers or field.arena.proxies]
    for proxy in chosen:
        proxy.hold(key)
    try:
        yield _start_caught(field, chosen)
    finally:
        for proxy in chosen:
            proxy.heal()


def _start_caught(field: Field, chosen: Sequence[Proxy]) -> Running:
    for _ in range(5):
        running = field.start()
        until(lambda running=running: any(p.held for p in chosen) or running.process.poll() is not None, 120)
        if running.process.poll() is None:
            return running
        ran = field.ended(running)
        assert ran.clean, ran
    raise AssertionError(f"no request came to {chosen} in five runs; the last one {ran}")
