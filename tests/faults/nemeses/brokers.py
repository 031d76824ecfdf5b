"""Brokers that die, are restarted, freeze, or lose their leadership; and who plays which part for a feed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from kafka.errors import KafkaError

from tests.faults.field import Field
from tests.faults.nemeses import drawn
from tests.resources.kafka.tools import until

PARTS: Mapping[str, Callable[[Field], int]] = {
    "leader": lambda field: field.arena.leaders(field.topic)[0],
    "coordinator": lambda field: field.arena.coordinator(field.group),
    "coordinator of transactions": lambda field: field.arena.coordinator_of_transactions(field.feed().transactional_id),
    "controller": lambda field: field.arena.controller(),
}


def drawn_broker(field: Field) -> int:
    return drawn(field).choice(field.arena.kafka.broker_ids)


@contextmanager
def killed(field: Field, *brokers: int) -> Iterator[None]:
    """Brokers die (SIGKILL; one of them if none is named) and are started again."""
    brokers = brokers or (drawn_broker(field),)
    for broker in brokers:
        field.arena.kafka.kill_broker(broker)
    field.account.did(f"killed (SIGKILL): {_named(brokers)}")
    try:
        yield
    finally:
        field.arena.kafka.start_broker(*brokers)
        field.account.did(f"started again: {_named(brokers)}")


@contextmanager
def stopped(field: Field, *brokers: int) -> Iterator[None]:
    """Brokers freeze (SIGSTOP; one of them if none is named), connections stay open; they go on as if nothing were."""
    brokers = brokers or (drawn_broker(field),)
    for broker in brokers:
        field.arena.kafka.kill_broker(broker, signal.SIGSTOP)
    field.account.did(f"stopped (SIGSTOP): {_named(brokers)}")
    try:
        yield
    finally:
        for broker in brokers:
            field.arena.kafka.kill_broker(broker, signal.SIGCONT)
        field.account.did(f"continued (SIGCONT): {_named(brokers)}")


def bounced(field: Field) -> Iterator[int]:
    """Each broker in turn is shut down, as for an upgrade, and started again; given while it is away."""
    brokers = list(field.arena.kafka.broker_ids)
    drawn(field).shuffle(brokers)
    for broker in brokers:
        field.arena.kafka.kill_broker(broker, signal.SIGTERM)
        field.account.did(f"shut down (SIGTERM): {_named([broker])}")
        yield broker
        field.arena.heal()
        field.account.did(f"started again: {_named([broker])}")


def deposed(field: Field, broker: int) -> None:
    """Wait until it leads no partition any more. Who asks may meet it and wait in vain."""

    def others_lead() -> bool:
        with suppress(KafkaError):
            return broker not in field.arena.leaders(field.topic).values()
        return False

    until(others_lead, 120)
    field.account.did(f"others lead in place of broker {broker}")


def leaders_moved(field: Field) -> None:
    """Every partition gets another leader."""
    ids, draw = field.arena.kafka.broker_ids, drawn(field)
    now = field.arena.leaders(field.topic)
    wanted = {p: draw.choice([b for b in ids if b != leader]) for p, leader in now.items()}
    field.arena.lead(field.topic, wanted)
    field.account.did(f"leaders moved from {now} to {wanted}")


def _named(brokers: object) -> str:
    return "broker " + ", ".join(map(str, brokers))  # type: ignore[call-overload]
