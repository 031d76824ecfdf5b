"""`sluice check` on a real Kafka, with planted late and repeated records, compared with DuckDB over the same files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import pyarrow.parquet as pq
import pytest
from kafka import KafkaAdminClient, KafkaProducer, TopicPartition

import sluice
import sluice.dagster
from sluice.assets.events.landed_metadata import describe_hour
from sluice.cli.main import main
from sluice.pipelines.errors import PartUnreadable
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.operating import check_window
from sluice.pipelines.status.repeats import Cause
from sluice.pipelines.status.window_rows import read_rows
from sluice.resources.lake import open_lake
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.support import FeedProject, consume_topic, request_offsets, run
from tests.pipelines.batch_report.test_page import Outline, parse

HOUR, MINUTE = 3_600_000, 60_000
START = 1_795_183_200_000
FIRST, SECOND, THIRD = "2026-11-20T14", "2026-11-20T15", "2026-11-20T16"
QUERY = """
    with stamped as (select *, epoch_ms(kafka_timestamp) as ms from read_parquet($files, hive_partitioning = false))
    select count(*), count(*) filter (ms < $start), max($start - ms), count(distinct kafka_key),
        count(distinct (kafka_key, id)), min(kafka_offset) filter (kafka_partition = 0) from stamped
"""


class Producer:
    """Sends records to one topic, and waits for each acknowledgement before the next record."""

    def __init__(self, project: FeedProject, **settings: Any) -> None:
        self._topic = project.topic
        self.kafka = KafkaProducer(bootstrap_servers=project.kafka.bootstrap, **settings)

    def send(self, key: str, value: bytes | None, minutes: int, partition: int = 0) -> None:
        stamp = START + minutes * MINUTE
        self.kafka.send(self._topic, value, key.encode(), partition=partition, timestamp_ms=stamp).get(30)


def plant(project: FeedProject) -> None:
    """Plant records of two hours.

    They include late ones, a retry, an event sent twice, an update, two deletes, an invalid one and two transactions.
    """
    producer = Producer(project)
    producer.send("a", b'{"id": 1}', 1)
    producer.send("first", b'{"id": 2}', 61)
    producer.send("late", b'{"id": 3}', 59)
    producer.send("late", b'{"id": 4}', 20)
    for _ in range(2):
        producer.send("retried", b'{"id": 5}', 62)
    producer.send("retried", b'{"id": 5}', 62, partition=1)
    for minutes in (63, 80):
        producer.send("sent", b'{"id": 6}', minutes)
    for number in (7, 8):
        producer.send("updated", b'{"id": %d}' % number, 64)
    for minutes in (65, 66):
        producer.send("deleted", None, minutes)
    producer.send("bad", b"no json", 65)
    for end in ("commit_transaction", "abort_transaction"):
        writer = Producer(project, transactional_id=f"{project.topic}-{end}")
        writer.kafka.init_transactions()
        writer.kafka.begin_transaction()
        writer.send(end, b'{"id": 9}', 66)
        getattr(writer.kafka, end)()
        writer.kafka.close()
    for partition in range(3):
        producer.send("next", b'{"id": 10}', 181, partition)
    producer.kafka.close()


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> FeedProject:
    feed_project = FeedProject(tmp_path, kafka, fresh_topic(partitions=3, config={"retention.ms": "-1"}), {})
    plant(feed_project)
    run(feed_project.write_feed(format="json", schema="{id: int64}"))
    return feed_project


def run_command(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    """Returns the exit code and the document of a command."""
    capfd.readouterr()
    code = main([*arguments, "--json"])
    return code, json.loads(capfd.readouterr().out)


@pytest.mark.kafka
def test_check_counts_match_duckdb(
    project: FeedProject, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.root)
    code, document = run_command(capfd, "check", "orders", SECOND)
    files = [f["address"] for f in document["files"] if f["kind"] == "landed"]
    landed, late, furthest, keys, pairs, first = duckdb.execute(
        QUERY, {"files": files, "start": START + HOUR}
    ).fetchall()[0]
    repeats = document["repeats"]
    assert (code, document["complete"], document["landed"], document["quarantined"]) == (0, True, landed, 1)
    assert (document["late"]["records"], document["late"]["furthest_seconds"]) == (late, furthest / 1000) == (2, 2400)
    assert document["late"]["windows"] == {"2026-11-20T14:00": 2}
    assert (repeats["keys"], repeats["updates"]) == (keys, pairs - keys)
    assert sum(c["records"] for c in repeats["copies"]) == landed - pairs
    assert {c["cause"]: c["records"] for c in repeats["copies"]} == {
        "retried": 1,
        "written again": 1,
        "sent again": 1,
        "deleted again": 1,
    }
    assert [r["reason"] for r in document["reasons_of_quarantine"]] == ["not_json"]
    assert document["aborted"] == 1
    assert document["control"] in (1, 2), "the last marker may be the boundary, or follow it"
    partition = document["partitions"][0]
    assert partition["first"]["offset"] == first == partition["start"] == 1
    assert partition["end"] - partition["start"] == sum(
        partition[name] for name in ("landed", "quarantined", "control", "aborted")
    )
    _, by_id = run_command(capfd, "check", "orders", SECOND, "--key", "id")
    assert by_id["repeats"]["keys"] == duckdb.read_parquet(files).aggregate("count(distinct id)").fetchall()[0][0]
    assert sluice.check("orders", SECOND, project=project.root).rows.late.records == 2


@pytest.mark.kafka
@pytest.mark.parametrize("schema", [{}, {"format": "json", "schema": "{id: int64}"}])
def test_copies_with_broker_timestamps_have_no_cause_by_time(
    schema: dict[str, str], tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]
) -> None:
    topic = fresh_topic(config={"message.timestamp.type": "LogAppendTime"})
    project = FeedProject(tmp_path, kafka, topic, {})
    producer = Producer(project)
    for value in (b'{"id": 1}', b'{"id": 1}', None, None):
        producer.send("a", value, 0)
    producer.kafka.close()
    feed = project.write_feed(**schema)
    receipts = [r for b in run(feed, request_offsets(topic, 0, 0, 4)).batches for r in b.receipts]
    parts = [(r.offset_range, p) for r in receipts for p in r.of(PartKind.LANDED)]
    rows = read_rows(open_lake(feed), parts, 0, feed.window, (), lambda progress: None)
    assert {c.cause: c.records for c in rows.repeats.copies} == {Cause.BROKER_TIME: 1, Cause.DELETED_AGAIN: 1}
    files = [str(path) for path in (tmp_path / ".sluice/lake/data").rglob("*.parquet")]
    column = "kafka_timestampType" if schema else "timestampType"
    assert duckdb.read_parquet(files).aggregate(f'min("{column}")').fetchall() == [(1,)]


@pytest.mark.kafka
def test_check_accepts_an_empty_hour_and_rejects_an_unknown_column(
    project: FeedProject, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.root)
    code, document = run_command(capfd, "check", "orders", THIRD)
    assert (code, document["empty"], document["landed"], document["files"]) == (0, True, 0, [])
    code, error = run_command(capfd, "check", "orders", FIRST, "--key", "order")
    assert (code, error["error"]) == (2, "UsageError")
    assert "no column `order`" in error["message"]


def read_page(project: FeedProject, capfd: pytest.CaptureFixture[str], window: str) -> tuple[Outline, Any]:
    """Returns the page of a window, and the document that `sluice report` prints for it."""
    page = project.root / "page.html"
    code, document = run_command(capfd, "report", "orders", window, "--output", str(page))
    assert code == 0
    assert Path(document["path"]).read_bytes() == page.read_bytes()
    return parse(page.read_bytes()), document


@pytest.mark.kafka
def test_hour_page_shows_figures_of_the_check_and_the_remedy_that_completes_the_hour(
    project: FeedProject, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.root)
    _, checked = run_command(capfd, "check", "orders", SECOND)
    files = [Path(f["address"]) for f in checked["files"] if f["kind"] == "landed"]
    parameters = {"files": [str(f) for f in files], "start": START + HOUR}
    landed, late, _, _, pairs, _ = duckdb.execute(QUERY, parameters).fetchall()[0]
    page, document = read_page(project, capfd, SECOND)
    assert {name: document[name] for name in checked} == checked
    assert document["columns"] == {"id": "int64"}
    assert [b["records"] for b in document["batches"]] == [landed + 1]
    for words in (
        "orders · 2026-11-20T15:00",
        f"{landed} records landed 1 quarantined, {100 / (landed + 1):.2f} %",
        f"{late} late: stamped in an earlier window {landed - pairs} copies of an earlier record",
        "not_json",
        "o json",
        "2026-11-20T14:00 2",
        *(c["likely"] for c in checked["repeats"]["copies"]),
        *(f["address"].partition("lake/")[2] for f in checked["files"]),
    ):
        assert words in page.text, words
    assert "Window 2026-11-20T15:00 is complete" in page.text
    files[0].unlink()
    page, document = read_page(project, capfd, SECOND)
    assert (document["complete"], document["late"]) == (False, None)
    assert "Window 2026-11-20T15:00 is not complete" in page.text
    assert "– late: stamped in an earlier window – copies of an earlier record" in page.text
    command = re.search(r"sluice (run orders --offsets \S+ --replace)", page.text)
    assert command is not None
    assert main(command[1].split()) == 0
    page, document = read_page(project, capfd, SECOND)
    assert (document["complete"], document["landed"]) == (True, landed)
    assert "Window 2026-11-20T15:00 is complete" in page.text


ODD = "\x1b[31mno json \u202e%d"


@pytest.mark.kafka
def test_check_page_and_dagster_have_the_same_samples_of_quarantine(
    tmp_path: Path,
    kafka: LocalKafka,
    fresh_topic: Callable[..., str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names and values of records are escaped, Dagster gets coordinates, and few row groups are read."""
    monkeypatch.chdir(tmp_path)
    project = FeedProject(tmp_path, kafka, fresh_topic(partitions=2, config={"retention.ms": "-1"}), {})
    producer = Producer(project)
    for n in range(40):
        wrong = {"id": "few", "a": "x" * 3000} if n % 4 == 3 else {"id": n, "\x1b[32m" + "y" * 300: 1}
        producer.send("k", (ODD % n).encode() if n < 30 and n % 4 != 3 else json.dumps(wrong).encode(), 1, n % 2)
    for partition in range(2):
        producer.send("next", b'{"id": 1}', 181, partition)
    producer.kafka.close()
    settings = {"quarantine_limit": {"share": 1}, "on_drift": "quarantine"}
    run(
        project.write_feed(
            format="json", schema="{id: int64}", policies=json.dumps(settings), tuning="{row_group_rows: 4}"
        )
    )
    _, document = run_command(capfd, "check", "orders", FIRST)
    query = """select reason, field, detail, count(*), list(topic || ':' || partition || ':' || "offset"
        order by topic, partition, "offset") from read_parquet('.sluice/lake/quarantine/**/*.parquet') group by all"""
    expected = {(*kind, records): positions for *kind, records, positions in duckdb.execute(query).fetchall()}
    groups = document["reasons_of_quarantine"]
    assert {(g["reason"], g["field"], g["detail"], g["records"]) for g in groups} == {*expected}
    for g in groups:
        positions = [s["position"] for s in g["samples"]]
        assert 1 <= len(positions) <= 2
        assert positions == expected[g["reason"], g["field"], g["detail"], g["records"]][: len(positions)]
    samples = [s for g in groups for s in g["samples"]]
    assert {s["excerpt"] for s in samples if "no json" in s["excerpt"]} == {ODD % 0, ODD % 2}
    assert all(len(s["excerpt"]) < 260 for s in samples)
    page, _ = read_page(project, capfd, FIRST)
    check = sluice.check("orders", FIRST, project=project.root)
    dagster = describe_hour(check, "")[1]
    for columns in ("60", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["check", "orders", FIRST]) == 0
        printed = capfd.readouterr().out
        assert "\x1b" not in printed
        assert "\u202e" not in printed
        assert r"\x1b[31mno json \u202e0" in printed
        for s in samples:
            assert all(s["position"] in text for text in (printed, page.text, dagster))
    assert "no json" not in dagster

    # Bounded: values of other row groups than those of the first records may be anything.
    (first,) = {g["first"] for g in groups if g["reason"] == "not_json"}
    for path in project.root.glob(".sluice/lake/quarantine/**/*.parquet"):
        footer = pq.read_metadata(path)
        data = bytearray(path.read_bytes())
        for group in map(footer.row_group, range(footer.num_row_groups)):
            columns = {c.path_in_schema: c for c in map(group.column, range(group.num_columns))}
            offsets, value = columns["offset"].statistics, columns["value"]
            if not any(offsets.min <= int(g["first"].split(":")[2]) <= offsets.max for g in groups):
                start = value.dictionary_page_offset or value.data_page_offset
                data[start : start + value.total_compressed_size] = bytes(value.total_compressed_size)
                assert first
        path.write_bytes(data)
    assert run_command(capfd, "check", "orders", FIRST)[1]["reasons_of_quarantine"] == groups


def list_outcomes(
    project: FeedProject, capfd: pytest.CaptureFixture[str], path: Path
) -> tuple[Any, set[tuple[int, bool]]]:
    """Returns the document of `check`, and the exit code of each other reader with whether it names the file."""
    _, document = run_command(capfd, "check", "orders", SECOND)
    outcomes = set()
    for words in (("files", "orders"), ("wait", "orders", "--timeout", "1s")):
        code, error = run_command(capfd, *words, "--window", SECOND)
        outcomes.add((code, path.name in error["message"]))
    with pytest.raises(PartUnreadable) as caught:
        sluice.read("orders", SECOND, project=project.root).arrow()
    return document, {*outcomes, (caught.value.exit_code, path.name in caught.value.message)}


@pytest.mark.kafka
def test_readers_stop_at_changed_file_and_the_printed_remedy_restores_it(
    project: FeedProject, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.root)
    window = sluice.read("orders", SECOND, project=project.root)
    path, rows = Path(window.paths[0]), window.rows
    table = pq.read_table(path)
    for change in (lambda: path.unlink(), lambda: pq.write_table(table.slice(1), path)):
        change()
        document, outcomes = list_outcomes(project, capfd, path)
        assert outcomes == {(1, True)}
        assert (document["exit_code"], document["complete"]) == (1, False)
        assert [document[name] for name in ("late", "repeats", "landed_twice")] == [None] * 3
        (reason,) = document["reasons"]
        assert path.name in reason["text"]
        command = re.search(r"sluice (run orders --offsets \S+ --replace)", reason["remedy"])
        assert command is not None
    assert main(command[1].split()) == 0
    code, document = run_command(capfd, "check", "orders", SECOND)
    assert (code, document["complete"], document["landed"]) == (0, True, rows)
    assert sluice.read("orders", SECOND, project=project.root).arrow().num_rows == rows


@pytest.mark.kafka
def test_missing_files_land_again_in_one_run_and_lost_ones_are_named(
    project: FeedProject, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.root)
    command = ("run", "orders", "--missing-files", "--engine", "processes", "--no-dagster")
    first, second = (sluice.read("orders", window, project=project.root) for window in (FIRST, SECOND))
    rows, untouched = second.arrow(), [Path(path).stat().st_mtime_ns for path in first.paths]
    for path in second.paths:
        Path(path).unlink()
    code, audited = run_command(capfd, "audit", "orders")
    assert (code, len(audited["problems"])) == (1, len(second.paths))
    assert main(["audit", "orders"]) == 1
    assert "sluice run orders --missing-files" in capfd.readouterr().out
    code, document = run_command(capfd, *command)
    assert (code, len(document["feeds"][0]["runs"])) == (0, 1)
    assert sluice.read("orders", SECOND, project=project.root).arrow().equals(rows)
    assert [Path(path).stat().st_mtime_ns for path in first.paths] == untouched
    assert run_command(capfd, "audit", "orders", "--strict")[0] == 0
    assert main([*command]) == 0
    assert main(["plan", "orders", "--missing-files"]) == 0
    assert capfd.readouterr().out.count("no file is missing") == 2

    Path(first.paths[0]).unlink()
    admin = KafkaAdminClient(bootstrap_servers=project.kafka.bootstrap)
    admin.delete_records({TopicPartition(project.topic, 0): 2})
    admin.close()
    code, error = run_command(capfd, *command)
    assert (code, error["error"]) == (1, "Failed")
    assert f"Kafka no longer has {project.topic}:0:0-1" in error["message"]
    assert sluice.read("orders", SECOND, project=project.root).arrow().equals(rows)


@pytest.mark.kafka
def test_readers_stop_at_changed_bits_of_pages(project: FeedProject, monkeypatch: pytest.MonkeyPatch) -> None:
    window = sluice.read("orders", SECOND, project=project.root)
    path = Path(window.paths[0])
    data, group = path.read_bytes(), pq.read_metadata(path).row_group(0)
    for column in (group.column(i) for i in range(group.num_columns)):
        first = column.dictionary_page_offset or column.data_page_offset
        last = first + column.total_compressed_size - 1
        path.write_bytes(data[:last] + bytes([data[last] ^ 4]) + data[last + 1 :])
        with pytest.raises(PartUnreadable, match=re.escape(path.name)):
            sluice.read("orders", SECOND, project=project.root).arrow()
        for read in ("polars", "duckdb", "dataset"):  # small files are compared with the ledger's hashes
            with pytest.raises(PartUnreadable, match=re.escape(path.name)):
                getattr(sluice.read("orders", SECOND, project=project.root), read)()
        with monkeypatch.context() as patch:
            patch.setattr("sluice.reading.SMALL_BYTES", 0)
            frame = sluice.read("orders", SECOND, project=project.root).polars()
            with pytest.raises(OSError, match=r"checksum|CRC"):
                frame.collect()
        check = sluice.check("orders", SECOND, project=project.root)
        if column.path_in_schema == "id":
            assert check.rows is None
            assert path.name in check.reasons[0].text
    path.write_bytes(data)
    assert sluice.check("orders", SECOND, project=project.root).complete


@pytest.mark.kafka
def test_readers_follow_window_that_lands_again(project: FeedProject, monkeypatch: pytest.MonkeyPatch) -> None:
    feed, start = load_feed(project.root / "feeds" / "orders.yaml", {}), START + HOUR
    again = Request(RequestKind.WINDOW, window=start, replace=True)
    before = sluice.read("orders", SECOND, project=project.root)
    run(feed, again)
    after = sluice.read("orders", SECOND, project=project.root)
    assert before.paths != after.paths
    assert before.arrow().equals(after.arrow())
    assert len(before.polars().collect()) == len(before.duckdb().fetchall()) == after.rows
    real, replaced = check_window.read_rows, list[bool]()

    def replace_first(*arguments: Any) -> Any:
        if not replaced:
            replaced.append(True)
            run(feed, again)
        return real(*arguments)

    monkeypatch.setattr(check_window, "read_rows", replace_first)
    assert sluice.check("orders", SECOND, project=project.root).complete
    assert replaced


@pytest.mark.kafka
def test_rows_of_an_event_hour_are_those_of_duckdb(
    project: FeedProject, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.root)
    code, document = run_command(capfd, "check", "orders", "--event-hour", FIRST)
    query = """select kafka_window_date || 'T' || lpad(kafka_window_hour::text, 2, '0') || ':00', count(*)
        from read_parquet('.sluice/lake/data/orders/**/*.parquet', hive_partitioning = true, hive_types_autocast = 0)
        where epoch_ms(kafka_timestamp) between $1 and $1 + 3599999 group by all order by all"""
    expected = duckdb.execute(query, [START]).fetchall()
    assert [(w["window"], w["rows"]) for w in document["windows"]] == expected
    assert expected == [("2026-11-20T14:00", 1), ("2026-11-20T15:00", 2)]
    assert (code, document["rows"], document["late"], document["complete_before"]) == (0, 3, 2, None)
    code, document = run_command(capfd, "check", "orders", "--event-hour", SECOND)
    assert [(w["window"], w["quarantined"]) for w in document["windows"]] == [("2026-11-20T15:00", 1)]
    code, day = run_command(capfd, "check", "orders", "--event-hour", "2026-11-20")
    assert (day["late"], day["rows"]) == (0, sum(w["rows"] for w in day["windows"]))
    assert run_command(capfd, "check", "orders", "--event-hour", FIRST, "--event-time", "id")[0] == 2

    # A window that is due and has not landed may have more of them; a file that is gone makes no answer.
    run(project.write_feed("part", format="json", schema="{id: int64}"), Request(RequestKind.WINDOW, (), START))
    code, document = run_command(capfd, "check", "part", "--event-hour", FIRST)
    assert (code, document["late"], document["complete_before"]) == (1, 0, "2026-11-20T15:00")
    victim = next(project.root.glob("**/data/**/kafka_window_hour=15/*.parquet"))
    victim.unlink()
    assert run_command(capfd, "check", "orders", "--event-hour", FIRST)[1]["error"] == "PartUnreadable"


@pytest.mark.kafka
def test_late_rows_start_corrections_of_their_hours(
    project: FeedProject, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.root)
    assert sluice.find_late_hours("orders").hours == {}
    begun = sluice.find_late_hours("orders", -1)
    assert begun.hours == {"2026-11-20T14:00": {"2026-11-20T15:00": 2}}
    assert sluice.find_late_hours("orders", begun.number).hours == {}

    orders = sluice.dagster.feed_assets("orders", "feeds")
    reports = dict[str, int]()

    @dg.asset(partitions_def=orders.partitions_def, name="hourly_report")
    def make_hourly_report(context) -> None:  # type: ignore[no-untyped-def] # Dagster reads annotations
        query = "select count(*) from read_parquet($1) where strftime(kafka_timestamp, '%Y-%m-%dT%H:00') = $2"
        parameters = [f"{project.root}/.sluice/lake/data/orders/**/*.parquet", context.partition_key]
        ((reports[context.partition_key],),) = duckdb.execute(query, parameters).fetchall()

    page = (Path(__file__).parents[2] / "docs" / "reading.md").read_text()
    (code,) = re.findall(r"```py\n(corrections = .*?)```", page, re.S)
    documented = {"sluice": sluice, "dg": dg, "hourly_report": make_hourly_report}
    exec(code, documented)
    (sensor,) = documented["defs"].sensors
    hour = "2026-11-20T14:00"
    with dg.DagsterInstance.ephemeral() as instance:
        before = sensor(dg.build_sensor_context(instance))
        assert (before.run_requests, before.cursor) == ([], str(begun.number))
        producer = Producer(project)
        producer.send("late", b'{"id": 11}', 59)
        producer.send("late", b'{"id": 12}', -600_000)
        producer.kafka.close()
        dg.materialize([make_hourly_report], partition_key=hour, instance=instance)
        run(load_feed(project.root / "feeds" / "orders.yaml", {}))
        again = sensor(dg.build_sensor_context(instance, cursor=before.cursor))
        assert [(r.partition_key, r.tags["sluice/late_rows"]) for r in again.run_requests] == [(hour, "1")]
        stale = reports[hour]
        dg.materialize([make_hourly_report], partition_key=again.run_requests[0].partition_key, instance=instance)
    stamped = [r["timestamp"] // HOUR for r in consume_topic(project.kafka, project.topic)].count(START // HOUR)
    assert (stale, reports[hour]) == (stamped - 1, stamped), "the records of the hour in Kafka"
    assert run_command(capfd, "compact", "orders")[0] == 0
    with dg.DagsterInstance.ephemeral() as instance:
        assert sensor(dg.build_sensor_context(instance, cursor=again.cursor)).run_requests == []
