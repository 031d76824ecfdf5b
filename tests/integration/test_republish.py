"""Landed rows go back into a real Kafka: unchanged, once and in order, also through kills and lost brokers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kafka import KafkaAdminClient, KafkaProducer, TopicPartition
from kafka.partitioner.default import murmur2

from sluice.assets.factory import build
from sluice.cli.main import main
from sluice.cli.terminal.output import CommandOutput
from sluice.pipelines.errors import LakeUnavailable
from sluice.pipelines.model.receipts import Progress
from sluice.pipelines.republishing import republish_plan as plans
from sluice.pipelines.republishing import send_lane
from sluice.pipelines.republishing.lanes import LaneSender
from sluice.resources import republish_tasks
from sluice.resources.kafka.connection.connection_settings import KafkaAddress
from sluice.resources.kafka.produce.sender import KafkaTarget
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.project import Project
from tests.checker import tools
from tests.integration import dying_targets
from tests.integration.support import FeedProject, consume_topic, run
from tests.resources.kafka.tools import wait_until

ROOT = Path(__file__).parents[2]
STAMP = 1_700_000_000_000
REPUBLISH = "republish_many_feeds__republish"
RESUME = "sluice republish orders --resume bad"
CUT = (sys.executable, "-m", "tests.integration.republish_cut")


def produce(project: FeedProject, count: int, **changes: Any) -> None:
    producer = KafkaProducer(bootstrap_servers=project.kafka.bootstrap)
    for n in range(count):
        record = {
            "key": None if n % 11 == 0 else b"k%d" % (n % 17),
            "value": None if n % 11 == 3 else b"value %d" % n * 5,
            "headers": [("trace", b"%d" % n)] if n % 3 else None,
            "timestamp_ms": STAMP + n,
        }
        producer.send(project.topic, partition=n % 3, **record | {k: v(n) for k, v in changes.items()})
    producer.close()


def run_command(capfd: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    """Run a command, and check its exit code. Returns its document."""
    assert main([*words, "--json"]) == code
    return dict(json.loads(capfd.readouterr().out))


def run_until_killed(step: str, times: int, *words: str, lane_offsets: int = 250_000) -> None:
    """Run a command in a process that dies after the `times`-th execution of a step."""
    command = [*CUT, step, str(times), str(lane_offsets), *words]
    ended = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert ended.returncode == 9, ended.stdout + ended.stderr


def group_by_partition(records: list[dict[str, Any]]) -> dict[int, list[Any]]:
    by_partition: dict[int, list[Any]] = {}
    for r in records:
        headers = tuple((h["key"], h["value"]) for h in r["headers"] or ())
        by_partition.setdefault(r["partition"], []).append((r["key"], r["value"], r["timestamp"], headers))
    return by_partition


def wait_for_records(kafka: LocalKafka, topic: str, count: int) -> list[dict[str, Any]]:
    return list(wait_until(lambda: len(r := consume_topic(kafka, topic)) >= count and r))


def test_raw_rows_are_republished_unchanged_despite_kills(
    tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    project, target = FeedProject(tmp_path, kafka, fresh_topic(partitions=3)), fresh_topic(partitions=3)
    produce(project, 1200)
    run(project.write_feed())
    ranges = [word for p in range(3) for word in ("--offsets", f"{project.topic}:{p}:0-400")]
    command = ["republish", "orders", "--topic", target, *ranges, "--keep-partitions", "--keep-timestamps"]
    command += ["--project", str(tmp_path)]
    planned = run_command(capfd, *command, "--dry-run")
    assert (planned["applied"], planned["offsets"], planned["partitions"]) == (False, 1200, 3)
    assert [(s["partition"], s["rows"]) for s in planned["sources"]] == [(p, 400) for p in range(3)]
    assert consume_topic(kafka, target) == []

    for step, times in (("sent", 1), ("mapped", 2), ("committed", 2)):
        run_until_killed(step, times, *command, "--yes")
    done = run_command(capfd, *command, "--yes")
    assert done["records_in_all"] == 1200 > done["records"] > 0
    sent = wait_for_records(kafka, target, 1200)
    assert group_by_partition(sent) == group_by_partition(consume_topic(kafka, project.topic))
    assert run_command(capfd, *command, "--yes")["done_before"]
    assert len(consume_topic(kafka, target)) == 1200

    audited = run_command(capfd, "audit", "orders", "--republished", done["id"], "--project", str(tmp_path))
    assert (audited["holds"], audited["rows"], audited["compared"], audited["findings"]) == (True, 1200, 1200, [])
    links = run_command(capfd, "explain", "orders", f"{project.topic}:1:123", "--project", str(tmp_path))["republished"]
    (new,) = [r for r in sent if r["partition"] == 1 and r["timestamp"] == STAMP + 3 * 123 + 1]
    assert links == [{"republish": done["id"], "from": f"{project.topic}:1:123", "to": f"{target}:1:{new['offset']}"}]
    reverse_links = run_command(capfd, "explain", "orders", links[0]["to"], "--project", str(tmp_path))["republished"]
    assert reverse_links == links
    assert len(list((tmp_path / ".sluice/lake/_sluice/orders/republished").rglob("map/*.parquet"))) > 3


def test_lanes_in_spark_tasks_survive_kills(
    tmp_path: Path,
    kafka: LocalKafka,
    fresh_topic: Callable[..., str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    project, target = FeedProject(tmp_path, kafka, fresh_topic(partitions=3)), fresh_topic(partitions=2)
    produce(project, 1200)
    run(project.write_feed())
    project_options, words = ["--project", str(tmp_path)], list[str]()
    for p in range(3):
        words += ["--offsets", f"{project.topic}:{p}:0-{400 - p}"]
    command = ["republish", "orders", "--topic", target, *words, "--keep-timestamps", *project_options]
    monkeypatch.setattr(plans, "LANE_OFFSETS", 300)
    assert run_command(capfd, *command, "--dry-run")["lanes"] == 3
    for step, times in (("begun", 2), ("sent", 1), ("mapped", 1), ("committed", 2)):
        run_until_killed(step, times, *command, "--yes", "--here", lane_offsets=300)

    make_sender = republish_tasks.sending

    def make_mortal_sender(*arguments: Any) -> LaneSender:
        sender = make_sender(*arguments)
        return replace(sender, open_target=partial(dying_targets.open_dying_target, sender.open_target, tmp_path))

    monkeypatch.setattr(republish_tasks, "sending", make_mortal_sender)
    done = run_command(capfd, *command, "--yes")
    assert done["records_in_all"] == 1197
    name = f"sluice-republish-orders-{done['id']}"
    died = {f"died-{when}-{name}.{lane}" for when in ("after", "before") for lane in (1, 2)}
    assert {path.name for path in tmp_path.glob("died-*")} == died
    sent = wait_for_records(kafka, target, 1197)
    for r in sent:
        if r["key"] is not None:
            assert r["partition"] == (murmur2(r["key"]) & 0x7FFFFFFF) % 2
    for p in range(3):
        old = [r for r in consume_topic(kafka, project.topic) if r["partition"] == p][: 400 - p]
        by_stamp = {r["timestamp"]: r["value"] for r in sent if (r["timestamp"] - STAMP) % 3 == p}
        assert by_stamp == {r["timestamp"]: r["value"] for r in old}
        for new in range(2):
            stamps = [r["timestamp"] for r in sent if r["partition"] == new and (r["timestamp"] - STAMP) % 3 == p]
            assert stamps == sorted(stamps)
    audited = run_command(capfd, "audit", "orders", "--republished", done["id"], *project_options)
    assert (audited["holds"], audited["compared"], audited["findings"]) == (True, 1197, [])
    assert run_command(capfd, *command, "--yes")["done_before"]
    run_until_killed("lane", 3, *command, "--yes", "--here", "--id", "other", lane_offsets=300)
    done_all = run_command(capfd, *command, "--yes", "--id", "other")
    assert (done_all["records"], done_all["records_in_all"]) == (0, 1197)
    assert len(wait_for_records(kafka, target, 2 * 1197)) == 2 * 1197

    folder = tmp_path / f".sluice/lake/_sluice/orders/republished/{done['id']}/map"
    one, two = (next(folder.glob(f"{lane:04d}-*.parquet")) for lane in (1, 2))
    table, other_rows = pq.read_table(one), pq.read_table(two).to_pylist()
    rows = table.to_pylist()
    for r, t in zip(rows[:20], other_rows, strict=False):  # few: of very many findings the last ones are only counted
        r |= {n: t[n] for n in ("to_partition", "to_offset")}
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), one)
    report = run_command(capfd, "audit", "orders", "--republished", done["id"], *project_options, code=1)
    assert "the map names a new coordinate twice" in {f["text"] for f in report["findings"]}


def test_later_of_two_republish_runs_continues(
    tmp_path: Path,
    kafka: LocalKafka,
    fresh_topic: Callable[..., str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    project, target = FeedProject(tmp_path, kafka, fresh_topic(partitions=3)), fresh_topic()
    produce(project, 300)
    run(project.write_feed())
    command = [
        "republish",
        "orders",
        "--offsets",
        f"{project.topic}:0:0-100",
        "--topic",
        target,
        "--id",
        "twice",
        "--yes",
    ]
    command += ["--project", str(tmp_path)]
    lake = LocalLake(tmp_path / ".sluice/lake")
    begin, begun = KafkaTarget.begin, list[str]()

    def begin_overtaken(self: KafkaTarget) -> Any:
        if not begun:
            send_lane.claim(lake, plans.load(lake, "orders", "twice"))
        begun.append("later")
        return begin(self)

    monkeypatch.setattr(KafkaTarget, "begin", begin_overtaken)
    assert main(command) == 1
    assert "another run carries republish twice of orders out now" in capfd.readouterr().err
    assert consume_topic(kafka, target) == []
    begun.clear()

    def begin_fenced(self: KafkaTarget) -> Any:
        """Begin, and then let a late producer of the same transactional id fence this one."""
        result = begin(self)
        if not begun:
            begun.append("late")
            with closing(KafkaTarget(address, target, "sluice-republish-orders-twice")) as late:
                begin(late)
        return result

    address = KafkaAddress(kafka.bootstrap)
    monkeypatch.setattr(KafkaTarget, "begin", begin_fenced)
    assert run_command(capfd, *command)["records_in_all"] == 100
    assert len(wait_for_records(kafka, target, 100)) == 100


def test_republish_by_key_adds_coordinates_and_refuses_invalid_requests(
    tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    project, target = FeedProject(tmp_path, kafka, fresh_topic(partitions=3)), fresh_topic(partitions=2)
    produce(project, 300)
    run(project.write_feed())
    project_options = ["--project", str(tmp_path)]
    command = ["republish", "orders", "--offsets", f"{project.topic}:1:10-90", *project_options]
    refused = {
        "create the topic": ["--topic", f"{target}-not-there"],
        "land again": ["--topic", project.topic],
        "--partition-by key": ["--topic", target, "--keep-partitions", "--offsets", f"{project.topic}:2:0-5"],
        "have not landed": ["--topic", target, "--offsets", f"{project.topic}:0:90-101"],
        "no partition": ["--topic", target, "--offsets", f"{project.topic}:7:0-1"],
    }
    for reason, words in refused.items():
        assert main([*command, *words, "--yes"]) in (1, 2, 3, 75)
        assert reason in capfd.readouterr().err
    done = run_command(capfd, *command, "--topic", target, "--headers", "--yes")
    assert (done["records"], done["transactions"]) == (80, 1)
    sent = wait_for_records(kafka, target, 80)
    old = {r["offset"]: r for r in consume_topic(kafka, project.topic) if r["partition"] == 1}
    for r in sent:
        *own, topic, partition, offset = r["headers"]
        assert [topic["value"], partition["value"]] == [project.topic.encode(), b"1"]
        before = old.pop(int(offset["value"]))
        assert (before["key"], before["value"], before["headers"] or []) == (r["key"], r["value"], own)
        assert r["timestamp"] > STAMP + 10**9
        if r["key"] is not None:
            assert r["partition"] == (murmur2(r["key"]) & 0x7FFFFFFF) % 2
    assert len(old) == 20

    (tmp_path / "places.py").write_text("def last(rows, partitions):\n    return [partitions - 1] * len(rows)\n")
    filtered = [
        *command,
        "--topic",
        target,
        "--where",
        'partition = 1 and "offset" % 8 = 0 and key is not null',
        "--yes",
    ]
    chosen = run_command(capfd, *filtered, "--partition-by", "places.py:last")
    with_a_key = len([n for n in range(16, 90, 8) if (3 * n + 1) % 11])
    assert chosen["records"] == chosen["records_by_partition"]["1"] == with_a_key
    audited = run_command(capfd, "audit", "orders", "--republished", chosen["id"], *project_options)
    assert (audited["holds"], audited["rows"]) == (True, chosen["records"])
    assert main([*command, "--topic", target, "--where", "exists (from read_text('/etc/passwd'))", "--dry-run"]) == 2
    assert "disabled" in capfd.readouterr().err
    audited = run_command(capfd, "audit", "orders", "--republished", done["id"], *project_options)
    assert (audited["holds"], audited["rows"], audited["compared"]) == (True, 80, 80)


def test_round_robin_republish_respects_a_rate_limit(
    tmp_path: Path,
    kafka: LocalKafka,
    fresh_topic: Callable[..., str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    project, target = FeedProject(tmp_path, kafka, fresh_topic(partitions=3)), fresh_topic(partitions=2)
    produce(project, 300)
    run(project.write_feed())
    command = ["republish", "orders", "--offsets", f"{project.topic}:1:10-90", "--topic", target, "--headers", "--yes"]
    command += ["--partition-by", "round-robin", "--project", str(tmp_path)]
    clock = Clock()
    monkeypatch.setattr(send_lane, "time", clock)
    done = run_command(capfd, *command, "--rate", "40", "--id", "by-records")
    assert (done["records"], done["by"], done["records_by_partition"]) == (80, "round-robin", {"0": 40, "1": 40})
    sent = wait_for_records(kafka, target, 80)
    assert {int(r["headers"][-1]["value"]): r["partition"] for r in sent} == {n: n % 2 for n in range(10, 90)}
    assert clock.slept == pytest.approx(80 / 40)

    clock.slept = 0.0
    done = run_command(capfd, *command, "--rate", "1KB", "--id", "by-bytes")
    bytes_sent = sum(len(r["key"] or b"") + len(r["value"] or b"") for r in sent)
    assert bytes_sent / 1000 < clock.slept < 4 * bytes_sent / 1000
    assert clock.slept / done["transactions"] < send_lane.TRANSACTION_SECONDS + 2, (
        "no transaction stays open while the sender waits"
    )
    assert [done["records"], len(wait_for_records(kafka, target, 160))] == [80, 160]

    progress = list[Progress]()
    monkeypatch.setattr(CommandOutput, "progress", lambda self: nullcontext(progress.append))
    monkeypatch.setattr(KafkaTarget, "throttled_ms", 12_400)  # tests/faults shows that a quota sets it
    assert run_command(capfd, *command, "--rate", "20", "--id", "by-quota")["throttled_ms"] == 12_400
    sending = [p for p in progress if p.stage == "send"]
    assert {p.note for p in sending} == {"(paused by a quota for 12 s)"}
    assert (sending[-1].done, sending[-1].total) == (80, 80)
    lake = LocalLake(tmp_path / ".sluice/lake")
    assert send_lane.progress_of(lake, plans.load(lake, "orders", "by-quota"), 0) == (80, 12_400), "as tasks report it"


class Clock:
    """A clock that only `sleep` advances."""

    slept = 0.0

    def sleep(self, seconds: float) -> None:
        self.slept += seconds

    def monotonic(self) -> float:
        return self.slept


def test_audit_reports_differences_in_the_target(
    tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    project, target = FeedProject(tmp_path, kafka, fresh_topic(partitions=3)), fresh_topic(partitions=3)
    produce(project, 300)
    run(project.write_feed())
    ranges = [word for p in range(3) for word in ("--offsets", f"{project.topic}:{p}:0-100")]
    project_options = ["--project", str(tmp_path)]
    command = [
        "republish",
        "orders",
        "--topic",
        target,
        *ranges,
        "--keep-partitions",
        "--keep-timestamps",
        "--id",
        "once",
    ]
    audit = ["audit", "orders", "--republished", "once", *project_options]
    run_command(capfd, *command, *project_options, "--dry-run")
    assert main(audit) == 2
    assert "no republish once" in capfd.readouterr().err
    run_command(capfd, *command, *project_options, "--yes")
    wait_until(lambda: run_command(capfd, *audit)["compared"] == 300)  # a commit reaches one partition after another

    folder = tmp_path / ".sluice/lake/_sluice/orders/republished/once"
    (path,) = (folder / "map").iterdir()
    table = pq.read_table(path)
    rows = table.to_pylist()
    by_old = {(r["partition"], r["offset"]): r for r in rows}
    one, two = by_old[0, 10], by_old[0, 12]
    one["to_offset"], two["to_offset"] = two["to_offset"], one["to_offset"]
    by_old[1, 20]["to_offset"] = 100  # the transaction's marker
    by_old[1, 30]["to_offset"] = 900
    rows = [r for r in rows if (r["partition"], r["offset"]) != (2, 40)]
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)

    report = run_command(capfd, *audit, code=1)
    assert (report["holds"], report["rows"], report["compared"]) == (False, 300, 297)
    topic = project.topic
    assert {(f["old"].removeprefix(topic), f["text"].split(":")[0]) for f in report["findings"]} >= {
        (":0:10", "has another value than the row in the lake"),
        (":0:12", "has another value than the row in the lake"),
        (":0:12", "stands before an older record of its old partition"),
        (":1:20", "is not there for readers of committed records"),
        (":1:30", "lies beyond the end of the log"),
        (":2:40", "is in the lake, and was not sent"),
    }
    assert main(audit) == 1
    assert f"{topic}:0:10" in capfd.readouterr().out

    one = ["--topic", target, "--offsets", f"{topic}:0:0-1", "--keep-partitions", "--id", "one", *project_options]
    run_command(capfd, "republish", "orders", *one, "--yes")
    wait_until(lambda: run_command(capfd, "audit", "orders", "--republished", "one", *project_options)["compared"] == 1)
    (map_file,) = (folder.parent / "one/map").iterdir()
    table = pq.read_table(map_file)
    pq.write_table(pa.Table.from_pylist([table.to_pylist()[0] | {"to_offset": 102}], schema=table.schema), map_file)
    (finding,) = run_command(capfd, "audit", "orders", "--republished", "one", *project_options, code=1)["findings"]
    assert (finding["new"], "not there" in finding["text"]) == (f"{target}:0:102", True)

    with KafkaAdminClient(bootstrap_servers=kafka.bootstrap) as admin:
        admin.delete_records({TopicPartition(target, 2): 50})
    assert run_command(capfd, *audit, code=1)["gone"] == 49  # and one that is not in the map


def test_typed_rows_land_equal_and_quarantined_rows_keep_their_bytes(
    tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    project = FeedProject(tmp_path, kafka, fresh_topic(partitions=3))
    target, bad = fresh_topic(partitions=3), fresh_topic()
    typed = {
        "format": "json",
        "schema": "{id: int64, at: timestamp, amount: 'decimal(12,2)', tags: 'map<string, string>', "
        "lines: 'list<struct<sku:string, n:int32>>', share: float64, raw: json, day: date}",
        "policies": "{quarantine_limit: {share: 1}}",
    }

    def make_value(n: int) -> bytes | None:
        if n % 10 == 0:
            return None if n % 20 == 0 else b"no json %d" % n
        order = {
            "id": n,
            "at": f"2024-02-29T12:00:00.{n:03}Z",
            "amount": n / 4,
            "tags": {'a "b"\n': "é", "none": None},
            "lines": [{"sku": "x", "n": n}, None, {"n": None}],
            "share": n / 7,
            "raw": [1, {"deep": None}],
            "day": "2024-02-29",
            "new": {"n": n},
        }
        return json.dumps({k: v for i, (k, v) in enumerate(order.items()) if (n + i) % 6}).encode()

    produce(project, 300, key=lambda n: b"k%d" % n, value=make_value)
    run(project.write_feed(**typed))
    ranges = [word for p in range(3) for word in ("--offsets", f"{project.topic}:{p}:0-100")]
    command = ["republish", "orders", *ranges, "--keep-timestamps", "--project", str(tmp_path), "--yes"]
    assert run_command(capfd, *command, "--topic", target, "--keep-partitions")["records"] == 285
    assert run_command(capfd, *command, "--topic", bad, "--quarantined")["records"] == 15
    for name in plans.names(LocalLake(tmp_path / ".sluice/lake"), "orders"):
        assert run_command(capfd, "audit", "orders", "--republished", name, "--project", str(tmp_path))["holds"]
    assert sorted(r["value"] for r in wait_for_records(kafka, bad, 15)) == sorted(
        b"no json %d" % n for n in range(10, 300, 20)
    )

    other = FeedProject(tmp_path, kafka, target)
    run(other.write_feed("others", **typed))
    assert read_landed(other, "others") == read_landed(project, "orders")


def test_rejected_timestamps_and_lost_progress_end_a_republish(
    tmp_path: Path,
    kafka: LocalKafka,
    fresh_topic: Callable[..., str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    project = FeedProject(tmp_path, kafka, fresh_topic(partitions=3))
    recent, target = fresh_topic(config={"message.timestamp.before.max.ms": "3600000"}), fresh_topic()
    produce(project, 300)
    run(project.write_feed())
    command = ["republish", "orders", "--offsets", f"{project.topic}:0:0-100", "--project", str(tmp_path), "--yes"]
    assert main([*command, "--topic", recent, "--keep-timestamps"]) == 2
    error = capfd.readouterr().err
    assert f"does not take the record of {project.topic}:0:0" in error
    assert "message.timestamp" in error
    assert consume_topic(kafka, recent) == []
    assert run_command(capfd, *command, "--topic", recent)["records"] == 100

    def end(*_: object) -> None:
        raise LakeUnavailable("the lake is away")

    monkeypatch.setattr(send_lane, "TRANSACTION_BYTES", 1)
    monkeypatch.setattr(send_lane.Run, "_finish", end)
    assert main([*command, "--topic", target, "--id", "cut"]) == 1
    monkeypatch.undo()
    assert "--resume cut" in capfd.readouterr().err
    with KafkaAdminClient(bootstrap_servers=kafka.bootstrap) as admin:
        admin.delete_groups(["sluice-republish-orders-cut"])
    assert main([*command, "--topic", target, "--id", "cut"]) == 3
    assert "Kafka no longer has the progress" in capfd.readouterr().err


def test_republish_in_dagster_records_lineage_to_the_target(
    tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    project, target = FeedProject(tmp_path, kafka, fresh_topic(partitions=3)), fresh_topic(partitions=3)
    produce(project, 300)
    run(project.write_feed())
    dagster_project, sent = Project(tmp_path), dg.AssetKey(["orders", "republished"])
    assert sent not in build(dagster_project).resolve_asset_graph().get_all_asset_keys()
    ranges = [{"topic": project.topic, "partition": p, "start": 0, "end": 100} for p in range(3)]
    config = {"to": target, "offsets": ranges, "where": "partition < 2", "keep_partitions": True}

    with dg.DagsterInstance.ephemeral() as instance:

        def execute_republish(**changes: Any) -> dg.ExecuteInProcessResult:
            run_config = {"ops": {REPUBLISH: {"config": {"feed": "orders"} | config | changes}}}
            job = build(dagster_project).resolve_job_def("republish_many_feeds")
            return job.execute_in_process(instance=instance, run_config=run_config, raise_on_error=False)

        assert not execute_republish(keep_partitions=False, partition_by="nowhere.py:f", name="bad").success
        (failed,) = instance.fetch_observations(sent, limit=5).records
        observed = failed.asset_observation
        assert observed is not None
        failure = {k: v.value for k, v in observed.metadata.items()}
        assert (failure["republish"], failure["go_on"]) == ("bad", "run this again, or: " + RESUME)
        assert "nowhere.py" in failure["failed"]
        result = execute_republish()
        assert result.success
        (event,) = result.get_asset_materialization_events()
        metadata = {k: v.value for k, v in event.materialization.metadata.items()}
        assert (event.asset_key, metadata["to"], metadata["records"]) == (sent, target, 200)
        assert not execute_republish(resume=metadata["republish"], to="").success, "other options are refused on resume"
        resumed = {"ops": {REPUBLISH: {"config": {"feed": "orders", "resume": metadata["republish"]}}}}
        job = build(dagster_project).resolve_job_def("republish_many_feeds")
        assert job.execute_in_process(instance=instance, run_config=resumed).success
        assert not execute_republish(to="").success
    graph = build(dagster_project).resolve_asset_graph()
    assert graph.get(sent).parent_keys == {dg.AssetKey(["orders", "landed"])}
    assert graph.get(dg.AssetKey(["kafka", target])).parent_keys == {sent}
    audited = run_command(capfd, "audit", "orders", "--republished", metadata["republish"], "--project", str(tmp_path))
    assert (audited["holds"], audited["compared"]) == (True, 200)
    FeedProject(tmp_path, kafka, target).write_feed("others")
    graph = build(dagster_project).resolve_asset_graph()
    assert graph.get(dg.AssetKey(["kafka", target])).is_observable
    assert graph.get(dg.AssetKey(["kafka", target])).parent_keys == {sent}


@pytest.mark.faults
def test_republish_survives_broker_kills_and_a_fencing_second_run(
    tmp_path: Path,
    kafka3: LocalKafka,
    fresh_topic: Callable[..., str],
) -> None:
    project = FeedProject(tmp_path, kafka3, fresh_topic(partitions=3, cluster=kafka3))
    target = fresh_topic(partitions=3, cluster=kafka3)
    produce(project, 6000)
    run(project.write_feed())
    ranges = [word for p in range(3) for word in ("--offsets", f"{project.topic}:{p}:0-2000")]
    command = ["republish", "orders", "--topic", target, *ranges, "--keep-partitions", "--keep-timestamps"]
    command += ["--project", str(tmp_path), "--yes"]
    slowly = [*CUT, "sent", "0", "250000", *command, "--rate", "200"]
    codes: list[int] = []

    def send() -> None:
        while len(codes) < 20 and codes[-1:] != [0]:
            codes.append(subprocess.run(slowly, cwd=ROOT, check=False, capture_output=True).returncode)

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        for broker in kafka3.broker_ids:
            before = len(consume_topic(kafka3, target, committed=False))
            wait_until(
                lambda before=before: sending.done() or len(consume_topic(kafka3, target, committed=False)) > before
            )
            kafka3.kill_broker(broker)
            kafka3.start_broker(broker)
        assert main(command) == 0
        sending.result()
    assert codes[-1] == 0
    assert group_by_partition(wait_for_records(kafka3, target, 6000)) == group_by_partition(
        consume_topic(kafka3, project.topic)
    )
    expected = {
        (target, p): {r["offset"] for r in consume_topic(kafka3, target) if r["partition"] == p} for p in range(3)
    }
    java = tools.Java.of_local_kafka(kafka3)
    scanned = tools.scan(java, kafka3.bootstrap, [target], tmp_path / "seen", expected=expected)
    by_java = [json.loads(line) for line in scanned.read_text().splitlines()]
    assert {
        tp: {r["offset"] for r in by_java if (target, r["partition"]) == tp and "offset" in r} for tp in expected
    } == (expected)


def read_landed(project: FeedProject, feed: str) -> list[dict[str, Any]]:
    import duckdb

    files = str(project.root / ".sluice/lake/data" / feed / "**/*.parquet")
    query = """select * exclude (kafka_topic, kafka_offset) from read_parquet($files, hive_partitioning = false)
        order by kafka_partition, kafka_offset"""
    return list(duckdb.connect().sql(query, params={"files": files}).to_arrow_table().to_pylist())
