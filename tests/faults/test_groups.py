"""Foreign clients in the feed's group: they hold it, join during a commit, move or delete its offsets."""

from __future__ import annotations

from collections import Counter
from contextlib import closing

import pytest
from kafka import KafkaConsumer
from kafka import TopicPartition as Plain

from tests.checker.producers import Noting
from tests.faults.field import Field
from tests.faults.nemeses import groups
from tests.faults.nemeses.logs import accept_event, produce, run_sluice
from tests.resources.kafka.tools import wait_until

pytestmark = pytest.mark.faults
BROKERS = 1
EACH = {0: 50, 1: 50, 2: 50}
TXN_OFFSET_COMMIT = 28


# -- members


def test_foreign_consumer_is_a_member_and_commits(field: Field) -> None:
    with field.run_producers():
        field.run_baseline(1)
        with groups.join_group(field) as commit:
            assert field.run().error == "GroupHeld"
            commit()
        assert field.run().error == "GroupMoved"
        accept_event(field, "moved")
        field.run_until_clean()
    field.verify()


def test_consumer_joins_between_join_and_commit_of_a_run(field: Field) -> None:
    with field.run_producers():
        field.run_baseline(1)
        for proxy in field.arena.proxies.values():
            proxy.hold(TXN_OFFSET_COMMIT)
        running = field.start()
        wait_until(lambda: any(proxy.held for proxy in field.arena.proxies.values()), 120)
        field.account.log("a run is about to commit")
        with groups.join_group(field):
            for proxy in field.arena.proxies.values():
                proxy.heal()
            assert field.wait_for_run(running).error == "CommitFenced"
            assert field.run().error == "GroupHeld"
        field.run_until_clean()
    field.verify()


def test_consumer_of_the_newer_protocol_is_a_member(field: Field) -> None:
    with field.run_producers():
        field.run_baseline(1)
        with groups.join_by_newer_protocol(field):
            assert field.run().error == "GroupHeld"
        field.run_until_clean()
    field.verify()


# -- moved offsets


def move_offsets_three_ways(field: Field) -> dict[int, int]:
    """Move one offset back, one forward over pending records, one beyond the log's end. Runs land 30 records each."""
    field.settings["limits"] = "{records: 30}"
    produce(field, EACH)
    field.run_baseline(1)
    offsets = {0: 5, 1: 50, 2: 1000}
    groups.move_offsets(field, offsets)
    return offsets


def test_manually_moved_offsets_are_refused_and_accepted(field: Field) -> None:
    move_offsets_three_ways(field)
    refused = field.run()
    assert refused.error == "GroupMoved"
    assert all(
        f"{field.topic}:{p}: the group holds {o}" in refused.stderr + str(refused.lines) for p, o in ((0, 5), (2, 1000))
    )
    assert run_sluice(field, "offsets", "show", field.name)[0] == 3
    accept_event(field, "moved")
    field.run_until_clean()
    del field.settings["limits"]
    verdict = field.verify()
    assert (verdict.counts["rows"], verdict.counts["committed offsets moved by hand"]) == (150, 3)


def test_manually_moved_offsets_are_overwritten(field: Field) -> None:
    field.settings["policies"] = "{on_group_moved: overwrite}"
    move_offsets_three_ways(field)
    field.run_until_clean()
    del field.settings["limits"]
    assert field.verify().counts["rows"] == 150


def test_manually_moved_offsets_are_adopted(field: Field) -> None:
    field.settings["policies"] = "{on_group_moved: adopt}"
    move_offsets_three_ways(field)
    refused = field.run()
    assert refused.error == "GroupMoved", refused
    accept_event(field, "moved", "--only", f"{field.topic}:2")
    field.run_until_clean()
    del field.settings["limits"]
    produce(field, EACH)
    verdict = field.verify()
    assert verdict.counts["rows"] == 300 - 20, "of partition 1 [30, 50) was passed over"


def test_offsets_moved_by_kafka_command_line_tool(field: Field) -> None:
    produce(field, EACH)
    with field.run_producers():
        field.run_baseline(1)
        groups.reset_offsets_by_tool(field, "--to-earliest")
        assert field.run().error == "GroupMoved"
        code, _ = run_sluice(field, "offsets", "reset", field.name, "--to-frontier", "--yes", "--reason", "a tool")
        assert code == 0
        field.run_until_clean()
        groups.reset_offsets_by_tool(field, "--to-latest")
        field.run()
        accept_event(field, "moved")
        field.run_until_clean()
    field.verify()


@pytest.mark.parametrize("what", ["offsets", "group"])
def test_offsets_are_deleted(field: Field, what: str) -> None:
    produce(field, EACH)
    with field.run_producers():
        field.run_baseline(1)
        groups.delete_offsets(field, group=what == "group")
        field.run_until_clean()
    field.verify()


def test_letters_are_sent_once_although_offsets_are_moved(field: Field) -> None:
    letters = f"{field.topic}-dlq"
    field.arena.create(letters, 1)
    field.settings |= {
        "format": "json",
        "schema": "{producer: string, sequence: int64, amount: int32}",
        "dead_letters": f"{{topic: {letters}}}",
        "policies": "{quarantine_limit: {share: 1.0}}",
    }
    produce_half_invalid(field, 10)
    field.run_baseline(1)
    groups.move_offsets(field, {0: 3})
    produce_half_invalid(field, 10)
    assert field.run().error == "GroupMoved"
    accept_event(field, "moved")
    field.run_until_clean()
    groups.delete_offsets(field, group=False)
    produce_half_invalid(field, 10)
    field.run_until_clean()
    verdict = field.verify(topics=[field.topic])
    assert verdict.counts["rows"] == 180
    letter_counts = count_letters(field, letters)
    assert (len(letter_counts), set(letter_counts.values())) == (90, {1})


def produce_half_invalid(field: Field, count: int) -> None:
    """Produce `count` valid and as many invalid values to each partition."""
    notes = field.root / f"bad-{len(field.notes)}.jsonl"
    field.notes.append(notes)
    producer = Noting(notes, notes.stem, field.arena.kafka.bootstrap)
    for partition in range(field.partitions):
        producer.send(field.topic, partition, 2 * count, [{"amount": 1}, {"amount": "many"}])
    producer.close()


def count_letters(field: Field, topic: str) -> Counter[bytes]:
    """Returns the dead letters that a read_committed consumer sees, by their values."""
    with closing(
        KafkaConsumer(bootstrap_servers=field.arena.kafka.bootstrap, isolation_level="read_committed", group_id=None)
    ) as consumer:
        tp = Plain(topic, 0)
        consumer.assign([tp])
        consumer.seek_to_beginning(tp)
        end, counts = consumer.end_offsets([tp])[tp], Counter[bytes]()
        while consumer.position(tp) < end:
            counts.update(r.value for batch in consumer.poll(200).values() for r in batch)
        return counts
