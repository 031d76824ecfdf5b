"""Printed remedies followed to their end on a real Kafka: each command is taken from the output before it.

The oracle is DuckDB over the files of the lake: rows have the numbers of the records that were written.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import duckdb
import pytest
from kafka import KafkaAdminClient, KafkaProducer, TopicPartition
from kafka.structs import OffsetAndMetadata

import sluice
from sluice.pipelines.errors import WindowRetired
from sluice.pipelines.util.units import show_window
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.conftest import Call
from tests.integration.support import FeedProject
from tests.integration.test_lives import find_hour, recreate

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
YES = ("--reason", "test", "--yes")
TYPED = {"format": "json", "schema": "{id: int64}", "policies": "{quarantine_limit: {share: 1}}"}


@pytest.fixture
def project(
    tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> FeedProject:
    monkeypatch.setenv("COLUMNS", "400")
    return FeedProject(tmp_path, kafka, fresh_topic(partitions=5))


def produce(
    project: FeedProject, numbers: range, hour: int, partitions: int = 1, headers: Sequence[tuple[str, bytes]] = ()
) -> None:
    with KafkaProducer(bootstrap_servers=project.kafka.bootstrap) as producer:
        for i in numbers:
            value, at = b'{"id": %d}' % i, {"partition": i % partitions, "timestamp_ms": hour + i}
            producer.send(project.topic, value, headers=[*headers], **at)


def delete_records(project: FeedProject, ends: Mapping[int, int]) -> None:
    """Delete records as retention does."""
    with KafkaAdminClient(bootstrap_servers=project.kafka.bootstrap) as admin:
        admin.delete_records({TopicPartition(project.topic, p): end for p, end in ends.items()})


def commit_offsets(project: FeedProject, offsets: Mapping[int, int]) -> None:
    """Move committed offsets of the feed's group as another client does."""
    group = f"g-{project.topic}-orders"
    moved = {TopicPartition(project.topic, p): OffsetAndMetadata(offset, "", None) for p, offset in offsets.items()}
    with KafkaAdminClient(bootstrap_servers=project.kafka.bootstrap) as admin:
        admin.alter_group_offsets(group, moved)


def list_files(project: FeedProject, feed: str = "orders") -> list[Path]:
    return sorted((project.root / ".sluice" / "lake" / "data" / feed).rglob("*.parquet"))


def read_ids(project: FeedProject, feed: str = "orders") -> list[int]:
    files = [str(p) for p in list_files(project, feed)]
    rows = duckdb.execute("select id from read_parquet($1, hive_partitioning = false)", [files]).fetchall()
    return [i for (i,) in rows]


def check_rows(project: FeedProject, expected: Sequence[int], feed: str = "orders") -> None:
    """Compare the rows of the folder with the numbers that are to be there, each once."""
    assert Counter(read_ids(project, feed)) == Counter(expected)


def find_commands(text: str, begin: str) -> list[str]:
    """Returns the commands of a text that begin like this."""
    commands = re.findall(rf"sluice ({re.escape(begin)}[^;`,\n→]*?)(?=\s*(?:--reason …|   |[;`,)\n→]|$))", text)
    return [*dict.fromkeys(commands)]


def follow(call: Call, text: str, begin: str, *more: str) -> str:
    """Run the only command of a text that begins like this. Returns its output."""
    commands = find_commands(text, begin)
    assert len(commands) == 1, (begin, commands, text)
    code, output = call(*commands[0].split(), *more, *(["--no-dagster"] if begin.startswith("run") else []))
    assert code == 0, (commands, output)
    return str(output)


def check_sound(call: Call, feed: str = "orders") -> None:
    code, audited = call("audit", feed, "--all", "--hashes", "--strict", "--rescan", "--json")
    assert code == 0, audited


def test_a_lost_file_of_which_kafka_has_a_part_is_given_up_and_that_part_lands(
    project: FeedProject, call: Call
) -> None:
    project.write_feed(**TYPED)
    produce(project, range(100), find_hour(3))
    assert call("run", "orders", "--no-dagster")[0] == 0
    (file,) = list_files(project)
    file.unlink()
    delete_records(project, {0: 40})
    code, text = call("run", "orders", "--missing-files", "--no-dagster")
    assert code == 1
    code, text = call(*find_commands(text, "audit orders")[0].split())
    assert code == 1
    offsets = f"{project.topic}:0:0-100"
    code, refused = call("run", "orders", "--offsets", offsets, "--replace", "--no-dagster")
    assert (code, f"sluice accept orders damaged --offsets {offsets}" in refused) == (3, True), refused
    accepted = follow(call, text, "accept orders damaged", *YES)
    follow(call, accepted, "run orders --offsets")
    check_rows(project, range(40, 100))
    check_sound(call)
    code, text = call("check", "orders", show_window(find_hour(3)))
    assert (code, f"{project.topic}:0:0-40" in text) == (1, True), "the rest is named as retired"


def test_a_shared_file_of_which_kafka_lacks_a_range_does_not_stop_the_others(project: FeedProject, call: Call) -> None:
    project.write_feed(**TYPED, landing="{shared_files: true}")
    produce(project, range(100), find_hour(4), 5)
    produce(project, range(100, 200), find_hour(3), 5)
    assert call("run", "orders", "--no-dagster")[0] == 0
    for file in list_files(project):
        file.unlink()
    delete_records(project, {0: 20})
    code, text = call("run", "orders", "--missing-files", "--no-dagster")
    assert (code, "cannot land again" in text) == (0, True), text
    assert {*read_ids(project)} >= {*range(100, 200)}
    code, text = call(*find_commands(text, "audit orders")[0].split())
    accepted = follow(call, text, "accept orders damaged", *YES)
    follow(call, accepted, "run orders --offsets")
    check_rows(project, [i for i in range(200) if i >= 100 or i % 5])
    check_sound(call)


def test_files_with_other_bits_are_not_taken_for_missing_ones(project: FeedProject, call: Call) -> None:
    project.write_feed(**TYPED, landing="{shared_files: false}")
    produce(project, range(100), find_hour(3), 2)
    assert call("run", "orders", "--no-dagster")[0] == 0
    for file in list_files(project):
        data = bytearray(file.read_bytes())
        data[len(data) // 3] ^= 1
        file.write_bytes(data)
    code, text = call("audit", "orders", "--hashes")
    assert (code, "--missing-files" in text) == (1, False), text
    commands = find_commands(text, "run orders --offsets")
    assert len(commands) == 2
    for command in commands:
        assert call(*command.split(), "--no-dagster")[0] == 0
    check_rows(project, range(100))
    check_sound(call)


def test_remedies_for_offsets_moved_back_ahead_and_beyond_the_log(project: FeedProject, call: Call) -> None:
    project.write_feed(**TYPED)
    produce(project, range(150), find_hour(3), 3)
    assert call("run", "orders", "--no-dagster")[0] == 0
    produce(project, range(150, 300), find_hour(2), 3)
    commit_offsets(project, {0: 10, 1: 70, 2: 900})
    code, text = call("offsets", "show", "orders")
    assert code == 3, text
    assert find_commands(text, "accept orders moved --adopt") == [
        f"accept orders moved --adopt --only {project.topic}:1"
    ]
    follow(call, text, f"accept orders moved --adopt --only {project.topic}:1", *YES)
    assert "accept orders moved" in find_commands(text, "accept orders moved")
    assert call("accept", "orders", "moved", *YES)[0] == 0
    follow(call, text, "run orders --offsets")
    assert call("run", "orders", "--no-dagster")[0] == 0
    check_rows(project, [i for i in range(300) if not (i % 3 == 1 and 50 <= i // 3 < 70)])
    check_sound(call)
    assert call("offsets", "show", "orders")[0] == 0
    _, text = call("offsets", "reset", "orders", "--to-earliest", "--only", f"{project.topic}:0", "--yes")
    follow(call, text, "run orders --offsets")
    check_rows(project, [i for i in range(300) if not (i % 3 == 1 and 50 <= i // 3 < 70)])
    check_sound(call)


def test_remedies_about_an_output_name_commands_that_take_it(project: FeedProject, call: Call) -> None:
    split = "{by: {header: kind}, into: {push: {schema: {id: int64}}, pull: {schema: {id: string}}}}"
    project.write_feed(format="json", split=split, policies=TYPED["policies"])
    hour = show_window(find_hour(3))
    produce(project, range(50), find_hour(3), 2, [("kind", b"push")])
    produce(project, range(50, 60), find_hour(3), 2, [("kind", b"pull")])
    code, text = call("wait", "orders.push", "--window", hour, "--timeout", "1s")
    assert (code, find_commands(text, "run orders")) == (75, [f"run orders --window {hour}"]), text
    follow(call, text, "run orders --window")
    code, text = call("check", "orders.pull", hour)
    listed = follow(call, text, "quarantine list orders")
    assert "wrong_type" in listed
    check_rows(project, range(50), "orders/push")
    assert call("hold", "orders", "--from", hour, "--reason", "case 12")[0] == 0
    code, text = call("erase", "orders.push", "--where", "id = 7")
    follow(call, text, "hold orders --release", "--reason", "test")
    assert call("erase", "orders.push", "--where", "id = 7", *YES)[0] == 0
    check_rows(project, [i for i in range(50) if i != 7], "orders/push")
    check_sound(call)


def test_a_refused_batch_lists_its_records_and_lands_after_a_fix(project: FeedProject, call: Call) -> None:
    project.write_feed(format="json", schema="{id: string}", policies="{quarantine_limit: {share: 0, at_least: 1}}")
    produce(project, range(20), find_hour(3), 2)
    code, text = call("run", "orders", "--no-dagster")
    assert code == 3
    assert "wrong_type" in follow(call, text, "quarantine list orders")
    assert '{"id": 0}' in follow(call, text, f"peek {project.topic}:0:0 -n 1")
    project.write_feed(format="json", schema="{id: int64}")
    _, text = call("status", "orders")
    assert "run orders" in find_commands(text, "run orders"), text
    assert call("run", "orders", "--no-dagster")[0] == 0
    check_rows(project, range(20))
    check_sound(call)


def test_expired_rows_return_by_the_printed_command_and_pending_ones_land_first(
    project: FeedProject, call: Call
) -> None:
    project.write_feed(**TYPED)
    hours = [find_hour(ago) for ago in (5, 4, 3)]
    for n, hour in enumerate(hours):
        produce(project, range(20 * n, 20 * n + 20), hour, 2)
    names = [show_window(hour) for hour in hours]
    assert call("run", "orders", "--window", names[2], "--no-dagster")[0] == 0
    code, text = call("expire", "orders", "--before", names[2], *YES)
    assert code != 0
    follow(call, text, "run orders --from")
    check_rows(project, range(60))
    assert call("expire", "orders", "--before", names[2], *YES)[0] == 0
    check_rows(project, range(40, 60))
    with pytest.raises(WindowRetired) as retired:
        sluice.read("orders", names[0], project=project.root)
    follow(call, retired.value.remedy, "run orders --window")
    check_rows(project, [*range(20), *range(40, 60)])
    check_sound(call)


def test_a_topic_created_again_is_accepted_by_the_feeds_name(project: FeedProject, call: Call) -> None:
    project.write_feed(**TYPED)
    produce(project, range(20), find_hour(3), 2)
    assert call("run", "orders", "--no-dagster")[0] == 0
    recreate(project, project.topic, 5)
    produce(project, range(20, 40), find_hour(3), 2)
    code, text = call("offsets", "reset", "orders", "--to-earliest", "--yes")
    assert code == 3, text
    follow(call, text, "accept orders recreated", *YES)
    assert call("run", "orders", "--no-dagster")[0] == 0
    check_rows(project, range(40))
    check_sound(call)
