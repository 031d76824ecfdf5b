"""Others in our group: they hold it, come in while we commit, move its offsets or take them away."""

from __future__ import annotations

from collections import Counter
from contextlib import closing

import pytest
from kafka import KafkaConsumer
from kafka import TopicPartition as Plain

from tests.checker.producers import Noting
from tests.faults.field import Field
from tests.faults.nemeses import groups
from tests.faults.nemeses.logs import accepted, commanded, written
from tests.resources.kafka.tools import until

pytestmark = pytest.mark.faults
BROKERS = 1
EACH = {0: 50, 1: 50, 2: 50}
TXN_OFFSET_COMMIT = 28


# -- members


def test_an_ordinary_consumer_holds_the_group_and_commits(field: Field) -> None:
    with field.producing():
        field.normal(1)
        with groups.joined(field) as commits:
            assert field.run().error == "GroupHeld"
            commits()
        assert field.run().error == "GroupMoved"
        accepted(field, "moved")
        field.recovered()
    field.proven()


def test_a_consumer_joins_between_our_join_and_our_commit(field: Field) -> None:
    with field.producing():
        field.normal(1)
        for proxy in field.arena.proxies.values():
            proxy.hold(TXN_OFFSET_COMMIT)
        running = field.start()
        until(lambda: any(proxy.held for proxy in field.arena.proxies.values()), 120)
        field.account.did("a run is about to commit")
        with groups.joined(field):
            for proxy in field.arena.proxies.values():
                proxy.heal()
            assert field.ended(running).error == "CommitFenced"
            assert field.run().error == "GroupHeld"
        field.recovered()
    field.proven()


def test_a_consumer_of_the_newer_protocol_holds_the_group(field: Field) -> None:
    with field.producing():
        field.normal(1)
        with groups.joined_by_the_newer_protocol(field):
            assert field.run().error == "GroupHeld"
        field.recovered()
    field.proven()


# -- moved offsets


def moved_three_ways(field: Field) -> dict[int, int]:
    """Runs land 30 records each: one offset goes back, one forward over what is pending, one beyond the end of the
    log."""
    field.settings["limits"] = "{records: 30}"
    written(field, EACH)
    field.normal(1)
    at = {0: 5, 1: 50, 2: 1000}
    groups.moved(field, at)
    return at


def test_offsets_moved_by_hand_are_refused_and_accepted(field: Field) -> None:
    moved_three_ways(field)
    refused = field.run()
    assert refused.error == "GroupMoved"
    assert all(
        f"{field.topic}:{p}: the group holds {o}" in refused.noise + str(refused.said) for p, o in ((0, 5), (2, 1000))
    )
    assert commanded(field, "offsets", "show", field.name)[0] == 3
    accepted(field, "moved")
    field.recovered()
    del field.settings["limits"]
    verdict = field.proven()
    assert (verdict.counts["rows"], verdict.counts["committed offsets moved by hand"]) == (150, 3)


def test_offsets_moved_by_hand_are_overwritten(field: Field) -> None:
    field.settings["policies"] = "{on_group_moved: overwrite}"
    moved_three_ways(field)
    field.recovered()
    del field.settings["limits"]
    assert field.proven().counts["rows"] == 150


def test_offsets_moved_by_hand_are_adopted(field: Field) -> None:
    field.settings["policies"] = "{on_group_moved: adopt}"
    moved_three_ways(field)
    refused = field.run()
    assert refused.error == "GroupMoved", refused
    accepted(field, "moved", "--only", f"{field.topic}:2")
    field.recovered()
    del field.settings["limits"]
    written(field, EACH)
    verdict = field.proven()
    assert verdict.counts["rows"] == 300 - 20, "of partition 1 [30, 50) was passed over"


def test_offsets_moved_by_kafkas_own_tool(field: Field) -> None:
    written(field, EACH)
    with field.producing():
        field.normal(1)
        groups.moved_by_the_tool(field, "--to-earliest")
        assert field.run().error == "GroupMoved"
        code, _ = commanded(field, "offsets", "reset", field.name, "--to-frontier", "--yes", "--reason", "a tool")
        assert code == 0
        field.recovered()
        groups.moved_by_the_tool(field, "--to-latest")
        field.run()
        accepted(field, "moved")
        field.recovered()
    field.proven()


@pytest.mark.parametrize("what", ["offsets", "group"])
def test_offsets_are_gone(field: Field, what: str) -> None:
    written(field, EACH)
    with field.producing():
        field.normal(1)
        groups.deleted(field, group=what == "group")
        field.recovered()
    field.proven()


def test_letters_go_once_although_offsets_are_moved(field: Field) -> None:
    letters = f"{field.topic}-dlq"
    field.arena.create(letters, 1)
    field.settings |= {
        "format": "json",
        "schema": "{producer: string, sequence: int64, amount: int32}",
        "dead_letters": f"{{topic: {letters}}}",
        "policies": "{quarantine_limit: {share: 1.0}}",
    }
    bad(field, 10)
    field.normal(1)
    groups.moved(field, {0: 3})
    bad(field, 10)
    assert field.run().error == "GroupMoved"
    accepted(field, "moved")
    field.recovered()
    groups.deleted(field, group=False)
    bad(field, 10)
    field.recovered()
    verdict = field.proven(topics=[field.topic])
    assert verdict.counts["rows"] == 180
    found = sent(field, letters)
    assert (len(found), set(found.values())) == (90, {1})


def bad(field: Field, count: int) -> None:
    """To each partition so many values that fit, and as many that do not."""
    notes = field.root / f"bad-{len(field.notes)}.jsonl"
    field.notes.append(notes)
    producer = Noting(notes, notes.stem, field.arena.kafka.bootstrap)
    for partition in range(field.partitions):
        producer.send(field.topic, partition, 2 * count, [{"amount": 1}, {"amount": "many"}])
    producer.close()


def sent(field: Field, topic: str) -> Counter[bytes]:
    """The letters that a consumer of what is committed sees, by their values."""
    with closing(
        KafkaConsumer(bootstrap_servers=field.arena.kafka.bootstrap, isolation_level="read_committed", group_id=None)
    ) as consumer:
        tp = Plain(topic, 0)
        consumer.assign([tp])
        consumer.seek_to_beginning(tp)
        end, found = consumer.end_offsets([tp])[tp], Counter[bytes]()
        while consumer.position(tp) < end:
            found.update(r.value for batch in consumer.poll(200).values() for r in batch)
        return found
