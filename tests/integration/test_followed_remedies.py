"""Printed remedies followed to their end on a real Kafka: each command is taken from the output before it.

The oracle is DuckDB over the files of the lake: rows have the numbers of the records that were written.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import deltalake
import duckdb
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from kafka import KafkaAdminClient, KafkaProducer, TopicPartition
from kafka.structs import OffsetAndMetadata

import sluice
from sluice.pipelines.batch import land
from sluice.pipelines.errors import FeedError, LakeUnavailable, PartUnreadable, WindowRetired
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.republishing import send_lane
from sluice.pipelines.util.units import show_window
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.local_registry import LocalRegistry
from tests.faults.effects import run_command, run_until_killed
from tests.integration.conftest import Call
from tests.integration.support import FeedProject, consume_topic
from tests.integration.test_lives import find_hour, recreate
from tests.resources.kafka.tools import wait_until

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
    project: FeedProject,
    numbers: range,
    hour: int,
    partitions: int = 1,
    headers: Sequence[tuple[str, bytes]] = (),
    more: str = "",
) -> None:
    with KafkaProducer(bootstrap_servers=project.kafka.bootstrap) as producer:
        for i in numbers:
            value, at = f'{{"id": {i}{more}}}'.encode(), {"partition": i % partitions, "timestamp_ms": hour + i}
            producer.send(project.topic, value, headers=[*headers], **at)


def delete_records(project: FeedProject, ends: Mapping[int, int]) -> None:
    """Delete records as retention does."""
    with KafkaAdminClient(bootstrap_servers=project.kafka.bootstrap) as admin:
        admin.delete_records({TopicPartition(project.topic, p): end for p, end in ends.items()})


def delete_topic(project: FeedProject, topic: str) -> None:
    with KafkaAdminClient(bootstrap_servers=project.kafka.bootstrap) as admin:
        admin.delete_topics([topic])
        wait_until(lambda: topic not in admin.list_topics())


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


def read_codes(project: FeedProject, feed: str = "orders") -> list[tuple[int, int, str]]:
    """Returns the rows' numbers and codes, and DuckDB's type of the latter."""
    files = [str(p) for p in list_files(project, feed)]
    query = "select id, code, typeof(code) from read_parquet($1, hive_partitioning = false) order by id"
    return duckdb.execute(query, [files]).fetchall()


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
    _, text = call("status", "orders")
    follow(call, text, "repair orders --abandon")
    assert call("run", "orders", "--no-dagster")[0] == 3, "refused again"
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


def test_offsets_that_a_reset_would_pass_over_are_skipped_by_the_printed_command(
    project: FeedProject, call: Call
) -> None:
    project.write_feed(**TYPED)
    produce(project, range(60), find_hour(3), 3)
    assert call("run", "orders", "--no-dagster")[0] == 0
    produce(project, range(60, 90), find_hour(2), 3)
    code, text = call("offsets", "reset", "orders", "--to-latest", "--yes")
    assert (code, find_commands(text, "run orders")) == (3, ["run orders", "run orders --skip-to latest"]), text
    follow(call, text, "run orders --skip-to", "--reason", "test")
    produce(project, range(90, 120), find_hour(2), 3)
    assert call("run", "orders", "--no-dagster")[0] == 0
    check_rows(project, [*range(60), *range(90, 120)])
    check_sound(call)
    commit_offsets(project, {0: 3, 1: 5})
    code, text = call("offsets", "show", "orders")
    follow(call, text, "offsets reset orders --to-frontier", "--yes")
    assert call("offsets", "show", "orders")[0] == 0
    code, text = call("offsets", "diff", "orders", "--with", "nobody")
    exported = project.root / "offsets.csv"
    assert (code, "sluice offsets export" in text) == (2, True), text
    assert call("offsets", "export", "orders", "--file", str(exported))[0] == 0
    commit_offsets(project, {0: 3})
    assert call("offsets", "diff", "orders", "--with", str(exported))[0] in (0, 1)
    assert call("offsets", "import", "orders", str(exported), *YES)[0] == 0
    assert call("offsets", "show", "orders")[0] == 0
    produce(project, range(120, 130), find_hour(2), 3)
    assert call("run", "orders", "--no-dagster")[0] == 0
    check_rows(project, [*range(60), *range(90, 130)])


def test_the_only_topic_of_a_feed_gets_the_other_name_by_the_printed_command(project: FeedProject, call: Call) -> None:
    project.write_feed(**TYPED)
    produce(project, range(20), find_hour(3), 2)
    assert call("run", "orders", "--no-dagster")[0] == 0
    code, text = call("feeds", "move-topic", project.topic, "orders", "sales", "--yes")
    assert code == 2
    follow(call, text, "feeds rename orders sales", "--yes")
    produce(project, range(20, 40), find_hour(3), 2)
    assert call("run", "sales", "--no-dagster")[0] == 0
    check_rows(project, range(40))
    for name in ("sales", "orders"):
        check_sound(call, name)
    list_files(project)[0].unlink()
    code, text = call("audit", "sales", "--all")
    assert code == 1
    follow(call, text, "run sales --offsets")
    check_rows(project, range(40))
    check_sound(call, "sales")


def test_a_topic_that_is_gone_or_is_another_feeds_leaves_by_the_printed_commands(
    project: FeedProject, call: Call, fresh_topic: Callable[..., str]
) -> None:
    clicks, other = fresh_topic(partitions=2), fresh_topic()
    project.write_feed(**TYPED | {"topics": f"[{project.topic}, {clicks}]"})
    project.write_feed("web", **TYPED | {"topics": f"[{clicks}, {other}]"})
    produce(project, range(20), find_hour(3), 2)
    produce(replace(project, topic=clicks), range(20, 40), find_hour(3), 2)
    assert call("run", "--all", "--no-dagster")[0] == 0
    code, text = call("feeds", "move-topic", clicks, "orders", "web", "--yes")
    assert code == 2, text
    project.write_feed("web", **TYPED | {"topics": other})
    follow(call, text, "accept web gone", *YES)
    assert call("feeds", "move-topic", clicks, "orders", "web", "--yes")[0] == 0
    produce(replace(project, topic=clicks), range(40, 60), find_hour(3), 2)
    assert call("run", "--all", "--no-dagster")[0] == 0
    check_rows(project, range(40))
    check_rows(project, range(20, 60), "web")
    delete_topic(project, clicks)
    code, text = call("feeds", "move-topic", clicks, "web", "orders", "--yes")
    assert (code, f"Kafka lacks partitions of {clicks}" in text) == (2, True), text
    project.write_feed("web", **TYPED | {"topics": other})
    follow(call, text, "accept web gone", *YES)
    assert call("run", "--all", "--no-dagster")[0] == 0
    for name in ("orders", "web"):
        assert call("audit", name, "--all", "--hashes")[0] == 0
    check_rows(project, range(20, 60), "web")


@pytest.mark.parametrize("policy", ["extra", "evolve"])
def test_a_type_is_corrected_by_the_printed_commands(project: FeedProject, call: Call, policy: str) -> None:
    right, without = "{id: int64, code: int64}", "{id: int64}"
    typed = TYPED | {"policies": f"{{on_drift: {policy}}}"}
    project.write_feed(**typed | {"schema": "{id: int64, code: float64}"})
    for n, ago in enumerate((14, 13, 11, 9, 7, 5, 3)):
        for i in range(10 * n, 10 * n + 10):
            produce(project, range(i, i + 1), find_hour(ago), 2, more=f', "code": {i}')
    assert call("run", "orders", "--no-dagster")[0] == 0
    produce(project, range(70, 80), find_hour(0), 2, more=', "code": 5')
    assert call("run", "orders", "--no-dagster")[0] == 0
    project.write_feed(**typed | {"schema": right})
    code, text = call("run", "orders", "--no-dagster")
    first = f"run orders --from {show_window(find_hour(14))} --to {show_window(find_hour(12))} --replace"
    followed: list[str] = []
    assert (code, find_commands(text, "run orders --")[0], "; and 3 more" in text) == (3, first, True), text
    while code == 3:
        assert ("leave code out, with `on_drift: extra`" in text) == (policy == "evolve"), text
        commands = find_commands(text, "run orders --")
        project.write_feed(**TYPED | {"schema": without})
        for command in commands:
            assert call(*command.split(), "--no-dagster")[0] == 0
        project.write_feed(**typed | {"schema": right})
        code, text = call("run", "orders", "--no-dagster")
        followed += commands
    for command in followed:
        assert call(*command.split(), "--no-dagster")[0] == 0
    assert read_codes(project) == [(i, min(i, 5) if i >= 70 else i, "BIGINT") for i in range(80)]
    check_sound(call)


def test_a_type_of_an_output_is_corrected_where_kafka_has_the_records(project: FeedProject, call: Call) -> None:
    """Of a topic that was created again, rows of the former one stay until they expire."""

    def write(columns: str) -> None:
        outputs = f"{{push: {{schema: {columns}}}, pull: {{schema: {{id: int64}}}}}}"
        project.write_feed(format="json", split=f"{{by: {{header: kind}}, into: {outputs}}}")

    push = [("kind", b"push")]
    write("{id: int64, code: float64}")
    produce(project, range(10), find_hour(5), headers=push, more=', "code": 7')
    assert call("run", "orders", "--no-dagster")[0] == 0
    recreate(project, project.topic, 5)
    assert call("accept", "orders", "recreated", *YES)[0] == 0
    produce(project, range(10, 20), find_hour(3), headers=push, more=', "code": 8')
    assert call("run", "orders", "--no-dagster")[0] == 0
    write("{id: int64, code: int64}")
    code, text = call("run", "orders", "--no-dagster")
    (command,) = find_commands(text, "run orders --")
    assert (code, "leave push/code out" in text, show_window(find_hour(5)) in command) == (3, True, False), text
    write("{id: int64}")
    assert call(*command.split(), "--no-dagster")[0] == 0
    write("{id: int64, code: int64}")
    code, text = call("run", "orders", "--no-dagster")
    assert (code, "keep the old type until they expire" in text, find_commands(text, "run orders --")) == (3, True, [])
    assert call("expire", "orders", "--before", show_window(find_hour(4)), *YES)[0] == 0
    assert call("run", "orders", "--no-dagster")[0] == 0
    assert call(*command.split(), "--no-dagster")[0] == 0
    assert read_codes(project, "orders/push") == [(i, 8, "BIGINT") for i in range(10, 20)]
    check_sound(call)


def test_no_command_is_printed_for_the_type_of_a_column_that_records_added(project: FeedProject, call: Call) -> None:
    """Left out of the file, it stays a column."""
    project.write_feed(**TYPED | {"policies": "{on_drift: evolve}"})
    for n, ago in enumerate((5, 4)):
        produce(project, range(10 * n, 10 * n + 10), find_hour(ago), more=', "code": 1.5')
        assert call("run", "orders", "--no-dagster")[0] == 0
    project.write_feed(**TYPED | {"schema": "{id: int64, code: int64}"})
    code, text = call("run", "orders", "--no-dagster")
    assert (code, "has landed as float64" in text, "--replace" in text) == (3, True, False), text


def test_a_type_is_corrected_from_a_raw_feed_once_rows_that_kafka_no_longer_has_expire(
    project: FeedProject, call: Call, fresh_topic: Callable[..., str]
) -> None:
    """Landing again without the column, the other way, is refused: it would lose the rows."""
    hours = [show_window(find_hour(ago)) for ago in (5, 4)]
    wrong, right = ({"schema": f"{{id: int64, code: {type_}}}"} for type_ in ("float64", "int64"))
    project.write_feed(**TYPED | wrong)
    project.write_feed("raw")
    produce(project, range(20), find_hour(5), more=', "code": 7')
    assert call("run", "--all", "--no-dagster")[0] == 0
    delete_records(project, {0: 20})
    produce(project, range(20, 40), find_hour(3), more=', "code": 8')
    project.write_feed(**TYPED | right)
    code, text = call("run", "orders", "--no-dagster")
    (command,) = find_commands(text, "run orders --from")
    assert (code, "keep the old type until they expire" in text) == (3, True), text
    project.write_feed(**TYPED)
    code, text = call(*command.split(), "--no-dagster")
    assert (code != 0, "Kafka" in text) == (True, True), text
    check_rows(project, range(20))
    project.write_feed(**TYPED | right)
    assert call("run", "orders", "--no-dagster")[0] == 3
    assert call("expire", "orders", "--before", hours[1], *YES)[0] == 0
    assert call("run", "orders", "--no-dagster")[0] == 0
    check_rows(project, range(20, 40))
    again = fresh_topic()
    assert call("republish", "raw", "--topic", again, "--window", hours[0], "--yes")[0] == 0
    project.write_feed(**TYPED | right | {"topics": f"[{project.topic}, {again}]"})
    assert call("run", "orders", "--no-dagster")[0] == 0
    assert read_codes(project) == [(i, 7 if i < 20 else 8, "BIGINT") for i in range(40)]
    check_sound(call)


def test_windows_on_hold_expire_after_the_printed_release(project: FeedProject, call: Call) -> None:
    project.write_feed(**TYPED)
    for n, ago in enumerate((5, 4)):
        produce(project, range(20 * n, 20 * n + 20), find_hour(ago), 2)
    produce(project, range(40, 50), find_hour(3), 2)
    assert call("run", "orders", "--no-dagster")[0] == 0
    first, second = show_window(find_hour(5)), show_window(find_hour(4))
    assert call("hold", "orders", "--from", first, "--to", second, "--reason", "case 12")[0] == 0
    expire = ("expire", "orders", "--before", show_window(find_hour(3)), *YES)
    code, text = call(*expire)
    check_rows(project, [*range(20), *range(40, 50)])
    code, refused = call("hold", "orders", "--release", "4711", "--reason", "test")
    assert (code, find_commands(refused, "hold orders")) == (2, find_commands(text, "hold orders")), refused
    listed = follow(call, text, "hold orders")
    (number,) = re.findall(r"(?m)^\W*(\d+)\b.*case 12", listed)
    assert call("hold", "orders", "--release", number, "--reason", "test")[0] == 0
    assert call(*expire)[0] == 0
    check_rows(project, range(40, 50))
    check_sound(call)


def test_a_lost_file_of_a_former_life_is_given_up_by_the_printed_commands(project: FeedProject, call: Call) -> None:
    """The same offsets of the new life, which Kafka has, do not take its place."""
    project.write_feed(**TYPED)
    produce(project, range(20), find_hour(4))
    assert call("run", "orders", "--no-dagster")[0] == 0
    (former,) = list_files(project)
    recreate(project, project.topic, 5)
    produce(project, range(20, 40), find_hour(3))
    assert call("accept", "orders", "recreated", *YES)[0] == 0
    assert call("run", "orders", "--no-dagster")[0] == 0
    former.write_bytes(former.read_bytes()[:-9])
    window = show_window(find_hour(4))
    with pytest.raises(PartUnreadable) as unreadable:
        sluice.read("orders", window, project=project.root).arrow()
    (command,) = find_commands(unreadable.value.remedy, "audit orders")
    code, text = call(*command.split())
    assert (code, find_commands(text, "run orders")) == (1, []), text
    code, checked = call("check", "orders", window)
    assert find_commands(checked, "accept orders damaged") == find_commands(text, "accept orders damaged")
    accepted = follow(call, text, "accept orders damaged", *YES)
    assert find_commands(accepted, "run orders --offsets") == []
    check_rows(project, range(20, 40))
    check_sound(call)


def test_missing_files_of_a_feed_with_limits_land_again_file_by_file(project: FeedProject, call: Call) -> None:
    project.write_feed(**TYPED, limits="{records: 60}")
    for n, ago in enumerate((5, 4, 3)):
        produce(project, range(50 * n, 50 * n + 50), find_hour(ago), 2)
    while call("run", "orders", "--no-dagster")[0] != 0 or len(read_ids(project)) < 150:
        pass
    for file in list_files(project):
        file.unlink()
    code, text = call("audit", "orders", "--all")
    assert code == 1
    follow(call, text, "run orders --missing-files")
    check_rows(project, range(150))
    check_sound(call)


def test_an_output_whose_catalog_is_lost_or_newer_than_the_lake_is_rebuilt(project: FeedProject, call: Call) -> None:
    catalog = {"type": "sql", "uri": f"sqlite:///{project.root}/catalog.db"}
    push = {"schema": {"id": "int64"}, "table": {"iceberg": {"name": "gh.push", "catalog": catalog}}}
    split = {"by": {"header": "kind"}, "into": {"push": push, "pull": {"schema": {"id": "int64"}}}}
    project.write_feed(format="json", split=json.dumps(split), policies=TYPED["policies"])
    produce(project, range(20), find_hour(4), 2, [("kind", b"push")])
    assert call("run", "orders", "--no-dagster")[0] == 0
    assert call("table", "sync", "orders.push")[0] == 0
    lake = project.root / ".sluice" / "lake"
    copy = shutil.copytree(lake, project.root / "backup")
    produce(project, range(20, 40), find_hour(3), 2, [("kind", b"push")])
    assert call("run", "orders", "--no-dagster")[0] == 0
    assert call("table", "sync", "orders.push")[0] == 0
    assert read_table(catalog) == [*range(40)]
    shutil.rmtree(lake)
    shutil.copytree(copy, lake)
    code, text = call("run", "orders", "--no-dagster")
    follow(call, text, "accept orders ledger", "--reason", "test")
    code, text = call("run", "orders", "--no-dagster")
    code, text = call("table", "sync", "orders.push")
    follow(call, text, "table rebuild orders.push", "--yes")
    assert read_table(catalog) == [*range(40)]
    (project.root / "catalog.db").unlink()
    code, text = call("table", "check", "orders.push")
    assert code == 1, text
    follow(call, text, "table sync orders.push")
    assert read_table(catalog) == [*range(40)]
    check_rows(project, range(40), "orders/push")
    check_sound(call)


def test_rows_that_another_client_deleted_from_a_table_are_erased_or_come_back(
    project: FeedProject, call: Call
) -> None:
    project.write_feed(**TYPED, table="{delta: {}}")
    produce(project, range(20), find_hour(3), 2)
    assert call("run", "orders", "--no-dagster")[0] == 0
    code, text = call("table", "sync", "orders")
    assert code == 0, text
    folder = project.root / ".sluice" / "lake" / "data" / "orders"
    deltalake.DeltaTable(folder).delete("id = 7 or id = 8")
    text = call("table", "check", "orders")[1]
    (begin,) = find_commands(text, "erase orders --where")
    code, text = call(*begin.replace(" …", "").split(), "id = 7", *YES)
    assert (code, "the table may still have the rows" in text) == (1, True), text
    follow(call, text, "table sync orders --repair")
    follow(call, text, "erase orders --yes")
    rows = deltalake.DeltaTable(folder).to_pyarrow_table().column("id").to_pylist()
    assert sorted(rows) == sorted({*range(20)} - {7})
    assert call("table", "check", "orders")[0] == 0
    check_sound(call)


@pytest.mark.parametrize("remedy", ["compact orders", "repair orders --abandon"])
def test_the_batch_of_a_killed_compaction_ends_by_the_printed_commands(
    project: FeedProject, call: Call, remedy: str
) -> None:
    project.write_feed(**TYPED, landing="{shared_files: false}", limits="{records: 20}")
    produce(project, range(60), find_hour(3), 2)
    for _ in range(3):
        assert call("run", "orders", "--no-dagster")[0] == 0
    for effect in itertools.count(1):
        assert run_until_killed(effect, run_command, project.root, "compact", "orders")
        _, text = call("status", "orders")
        if find_commands(text, remedy):
            break
    follow(call, text, remedy)
    check_rows(project, range(60))
    code, text = call("compact", "orders")
    assert (code, len(list_files(project))) == (0, 2), text
    check_rows(project, range(60))
    check_sound(call)


def test_a_cut_republish_goes_on_by_the_printed_command(
    project: FeedProject, call: Call, fresh_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write_feed(**TYPED)
    produce(project, range(100), find_hour(3), 2)
    assert call("run", "orders", "--no-dagster")[0] == 0
    target = fresh_topic()

    def end(*_: object) -> None:
        raise LakeUnavailable("the lake is away")

    monkeypatch.setattr(send_lane, "TRANSACTION_BYTES", 1)
    monkeypatch.setattr(send_lane.Run, "_finish", end)
    code, text = call("republish", "orders", "--topic", target, "--window", show_window(find_hour(3)), "--yes")
    assert code == 1, text
    monkeypatch.undo()
    monkeypatch.setenv("COLUMNS", "400")
    (name,) = re.findall(r"--resume (\w+)", text)
    follow(call, text, "republish orders --resume", "--yes")
    sent = [json.loads(r["value"])["id"] for r in consume_topic(project.kafka, target)]
    assert sorted(sent) == [*range(100)]
    assert call("audit", "orders", "--republished", name)[0] == 0


def test_an_unknown_republish_is_begun_by_the_printed_command(
    project: FeedProject, call: Call, fresh_topic: Callable[..., str]
) -> None:
    project.write_feed(**TYPED)
    produce(project, range(20), find_hour(3), 2)
    assert call("run", "orders", "--no-dagster")[0] == 0
    target = fresh_topic()
    code, text = call("republish", "orders", "--resume", "nothing")
    (command,) = find_commands(text, "republish orders --topic")
    assert code == 2
    words = command.removesuffix(" TOPIC begins one").split()
    code, text = call(*words, target, "--window", show_window(find_hour(3)), "--yes")
    assert code == 0, text
    assert sorted(json.loads(r["value"])["id"] for r in consume_topic(project.kafka, target)) == [*range(20)]


def read_table(catalog: Mapping[str, str]) -> list[int]:
    """Returns the ids that PyIceberg reads."""
    from pyiceberg.catalog import load_catalog

    return sorted(load_catalog("sluice", **catalog).load_table("gh.push").scan().to_arrow().column("id").to_pylist())


# -- the first steps of a project, of a feed and of its records


def test_a_folder_becomes_a_project_by_the_printed_commands(project: FeedProject, call: Call) -> None:
    produce(project, range(40), find_hour(3), 2)
    options = ("--bootstrap", project.kafka.bootstrap, "--topic", project.topic)
    code, text = call("status")
    assert (code, find_commands(text, "init")) == (2, ["init begins a project"]), text
    code, text = call("init", "Web Orders!", *options)
    assert code == 2
    written = follow(call, text, "init web_orders", *options)
    follow(call, written, "plan web_orders")
    follow(call, written, "run web_orders")
    check_rows(project, range(40), "web_orders")
    check_sound(call, "web_orders")
    code, text = call("init", "web_orders", *options)
    assert (code, find_commands(text, "init")) == (2, ["init NAME"]), text


def test_doctor_and_dbt_name_the_command_that_writes_a_first_feed(project: FeedProject, call: Call) -> None:
    produce(project, range(10), find_hour(3))
    (project.root / "feeds").mkdir()
    assert "init" in find_commands(call("dbt", "sources")[1], "init")
    (command,) = find_commands(call("doctor")[1], "init")
    options = ("--bootstrap", project.kafka.bootstrap, "--topic", project.topic)
    code, text = call(command.removesuffix(" writes one"), "orders", *options)
    assert code == 0, text
    assert find_commands(call("doctor")[1], "init") == []
    assert call("run", "orders", "--no-dagster")[0] == 0
    check_rows(project, range(10))


def test_a_missing_schema_file_is_fetched_by_the_printed_command(
    project: FeedProject, call: Call, registry: LocalRegistry
) -> None:
    schema = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
    with SchemaRegistryClient({"url": registry.url, "timeout": 20}) as client:
        number = client.register_schema(f"{project.topic}-value", Schema(json.dumps(schema), "AVRO"))
    with KafkaProducer(bootstrap_servers=project.kafka.bootstrap) as producer:
        for i in range(20):  # by zigzag, one byte is a number below 64
            value = struct.pack(">bIB", 0, number, 2 * i)
            producer.send(project.topic, value, partition=0, timestamp_ms=find_hour(3) + i)
    with pytest.raises(FeedError, match="does not exist"):
        project.write_feed(format="avro", schema_file="orders.avsc", registry=f"{{url: '{registry.url}'}}")
    code, text = call("run", "orders", "--no-dagster")
    assert code == 2
    follow(call, text, "schema pull orders")
    assert call("run", "orders", "--no-dagster")[0] == 0
    check_rows(project, range(20))
    check_sound(call)


def test_a_missing_contract_is_proposed_by_the_printed_command(project: FeedProject, call: Call) -> None:
    project.write_feed(**TYPED)
    produce(project, range(300), find_hour(3), 2)
    code, text = call("contract", "check", "orders")
    assert code == 2
    follow(call, text, "contract init orders")
    (proposed,) = (project.root / "feeds").glob("*.proposed.json")
    suite = json.loads(proposed.read_text())["expectations"]
    assert {"expect_column_values_to_not_be_null"} <= {e["type"] for e in suite if e["kwargs"].get("column") == "id"}
    proposed.rename(proposed.with_name("orders.contract.json"))
    assert call("contract", "check", "orders")[0] == 0
    with KafkaProducer(bootstrap_servers=project.kafka.bootstrap) as producer:
        producer.send(project.topic, b"{}", partition=0, timestamp_ms=find_hour(3))
    code, text = call("run", "orders", "--no-dagster")
    assert (code, "broken by 1 of 301 rows" in text) == (0, True), text


def test_sample_events_reach_another_kafka_by_the_printed_command(project: FeedProject, call: Call) -> None:
    project.write_feed(schema="{order_id: string}", format="json")
    code, text = call("produce", "orders", "--records", "30")
    assert (code, consume_topic(project.kafka, project.topic)) == (3, [])
    follow(call, text, "produce orders --records")
    assert len(consume_topic(project.kafka, project.topic)) == 30


# -- runs of Dagster and of several feeds


def test_a_killed_run_is_ended_by_the_printed_command(project: FeedProject, call: Call) -> None:
    project.write_feed(**TYPED)
    produce(project, range(30), find_hour(3), 2)
    home = project.root / ".sluice" / "dagster"
    for effect in itertools.count(1):
        assert run_until_killed(effect, run_command, project.root, "run", "orders")
        text = call("doctor")[1]
        if find_commands(text, "unstick"):
            break
    with dg.DagsterInstance.from_config(str(home)) as instance:
        (run,) = instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED]))
    follow(call, text, "unstick")
    with dg.DagsterInstance.from_config(str(home)) as instance:
        ended = instance.get_run_by_id(run.run_id)
        assert (ended and ended.status) == dg.DagsterRunStatus.FAILURE
    assert find_commands(call("doctor")[1], "unstick") == []
    assert call("run", "orders")[0] == 0
    check_rows(project, range(30))
    check_sound(call)


def test_logs_of_runs_are_removed_by_the_command_in_dagsters_settings(project: FeedProject, call: Call) -> None:
    project.write_feed(**TYPED)
    produce(project, range(30), find_hour(3), 2)
    assert call("run", "orders")[0] == 0
    home = project.root / ".sluice" / "dagster"
    (command,) = find_commands((home / "dagster.yaml").read_text(), "prune")
    assert call(command)[0] == 0

    def read_history() -> tuple[int, set[str]]:
        with dg.DagsterInstance.from_config(str(home)) as instance:
            (run,) = instance.get_runs()
            return len(instance.all_logs(run.run_id)), instance.get_materialized_partitions(
                dg.AssetKey(["orders", "landed"])
            )

    entries, partitions = read_history()
    assert (entries > 10, bool(partitions)) == (True, True), "only old runs"
    code, text = call(command, "--older", "0s")
    assert code == 0, text
    assert read_history() == (0, partitions)
    produce(project, range(30, 40), find_hour(2), 2)
    assert call("run", "orders")[0] == 0
    check_rows(project, range(40))
    check_sound(call)


def test_a_failure_among_several_feeds_is_repeated_with_its_traceback(
    project: FeedProject, call: Call, fresh_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write_feed(**TYPED)
    project.write_feed("web", **TYPED | {"topics": fresh_topic()})
    produce(project, range(20), find_hour(3), 2)
    survey = land.take_survey

    def fail(feed: Feed, *more: Any) -> Any:
        if feed.name == "orders":
            raise ZeroDivisionError("a bug")
        return survey(feed, *more)

    monkeypatch.setattr(land, "take_survey", fail)
    code, text = call("run", "--all", "--no-dagster")
    (command,) = find_commands(text, "run orders --debug")
    assert code != 0
    code, text = call(*command.split(), "--no-dagster")
    assert (code, "Traceback" in text, "ZeroDivisionError: a bug" in text) == (1, True, True), text
    monkeypatch.setattr(land, "take_survey", survey)
    assert call("run", "--all", "--no-dagster")[0] == 0
    check_rows(project, range(20))


# -- two environments


def test_environments_with_a_group_in_common_are_refused_until_each_has_its_own(
    project: FeedProject, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The feed file of docs/deploying.md: one for staging and production, which differ in a variable."""
    produce(project, range(40), find_hour(1), partitions=2)
    project.write_feed(**TYPED)
    path = project.root / "feeds" / "orders.yaml"
    text, group = path.read_text(), f"g-{project.topic}-orders"
    path.write_text(text + "lake: .sluice/${STAGE}\n")
    for stage in ("production", "staging"):
        monkeypatch.setenv("STAGE", stage)
        code, output = call("run", "orders", "--no-dagster")
    assert code == 3, output
    assert "offsets belong to another ledger; nothing was changed" in output
    assert "give orders one of its own by `group:`" in output
    path.write_text(text.replace(f"group: {group}", f"group: {group}-${{STAGE}}") + "lake: .sluice/${STAGE}\n")
    for stage, number in (("staging", 40), ("test", 40), ("staging", 55)):
        monkeypatch.setenv("STAGE", stage)
        produce(project, range(40, number), find_hour(1), partitions=2)
        code, output = call("run", "orders", "--no-dagster")
        assert code == 0, output
        files = [str(p) for p in (project.root / ".sluice" / stage / "data").rglob("*.parquet")]
        rows = duckdb.execute("select id from read_parquet($1, hive_partitioning = false)", [files]).fetchall()
        assert Counter(i for (i,) in rows) == Counter(range(number)), stage
    monkeypatch.delenv("STAGE")
    code, output = call("run", "orders", "--no-dagster")
    assert code == 2
    assert "needs the environment variable STAGE, which is not set" in output
