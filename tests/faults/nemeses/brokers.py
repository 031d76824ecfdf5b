"""Brokers that die, are restarted, freeze, or lose their leadership, and the parts of brokers for a feed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from kafka.errors import KafkaError

from tests.faults.field import Field
from tests.faults.nemeses import seed_random
from tests.resources.kafka.tools import wait_until

PARTS: Mapping[str, Callable[[Field], int]] = {
    "leader": lambda field: field.arena.find_leaders(field.topic)[0],
    "coordinator": lambda field: field.arena.find_coordinator(field.group),
    "coordinator of transactions": lambda field: field.arena.find_transaction_coordinator(
        field.write_feed().transactional_id
    ),
    "controller": lambda field: field.arena.find_controller(),
}


def draw_broker(field: Field) -> int:
    return seed_random(field).choice(field.arena.kafka.broker_ids)


@contextmanager
def kill_brokers(field: Field, *brokers: int) -> Iterator[None]:
    """Kill brokers (SIGKILL), by default a random one, and start them again at the end of the block."""
    brokers = brokers or (draw_broker(field),)
    for broker in brokers:
        field.arena.kafka.kill_broker(broker)
    field.account.log(f"killed (SIGKILL): {_format_brokers(brokers)}")
    try:
        yield
    finally:
        field.arena.kafka.start_broker(*brokers)
        field.account.log(f"started again: {_format_brokers(brokers)}")


@contextmanager
def freeze_brokers(field: Field, *brokers: int) -> Iterator[None]:
    """Stop brokers (SIGSTOP), by default a random one, and continue them at the end. Connections stay open."""
    brokers = brokers or (draw_broker(field),)
    for broker in brokers:
        field.arena.kafka.kill_broker(broker, signal.SIGSTOP)
    field.account.log(f"stopped (SIGSTOP): {_format_brokers(brokers)}")
    try:
        yield
    finally:
        for broker in brokers:
            field.arena.kafka.kill_broker(broker, signal.SIGCONT)
        field.account.log(f"continued (SIGCONT): {_format_brokers(brokers)}")


def restart_in_turn(field: Field) -> Iterator[int]:
    """Shut down and start each broker in turn, as for an upgrade. Yields the broker while it is away."""
    brokers = list(field.arena.kafka.broker_ids)
    seed_random(field).shuffle(brokers)
    for broker in brokers:
        field.arena.kafka.kill_broker(broker, signal.SIGTERM)
        field.account.log(f"shut down (SIGTERM): {_format_brokers([broker])}")
        yield broker
        field.arena.heal()
        field.account.log(f"started again: {_format_brokers([broker])}")


def wait_until_deposed(field: Field, broker: int) -> None:
    """Wait until the broker leads no partition. Requests to it may time out."""

    def has_lost_leadership() -> bool:
        with suppress(KafkaError):
            return broker not in field.arena.find_leaders(field.topic).values()
        return False

    wait_until(has_lost_leadership, 120)
    field.account.log(f"others lead in place of broker {broker}")


def move_leaders(field: Field) -> None:
    """Move every partition to another leader."""
    ids, draw = field.arena.kafka.broker_ids, seed_random(field)
    leaders = field.arena.find_leaders(field.topic)
    new_leaders = {p: draw.choice([b for b in ids if b != leader]) for p, leader in leaders.items()}
    field.arena.move_leaders(field.topic, new_leaders)
    field.account.log(f"leaders moved from {leaders} to {new_leaders}")


def _format_brokers(brokers: object) -> str:
    return "broker " + ", ".join(map(str, brokers))  # type: ignore[call-overload]
