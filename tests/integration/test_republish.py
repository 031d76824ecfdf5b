"""Landed rows back into a real Kafka: as they were, once, in order, whatever happens on the way."""

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
from tests.integration.support import Place, consumed, run
from tests.resources.kafka.tools import until

ROOT = Path(__file__).parents[2]
STAMP = 1_700_000_000_000
REPUBLISH = "republish_many_feeds__republish"
RESUME = "sluice republish orders --resume bad"
CUT = (sys.executable, "-m", "tests.integration.republish_cut")


def produce(place: Place, count: int, **changes: Any) -> None:
    producer = KafkaProducer(bootstrap_servers=place.kafka.bootstrap)
    for n in range(count):
        record = {
            "key": None if n % 11 == 0 else b"k%d" % (n % 17),
            "value": None if n % 11 == 3 else b"value %d" % n * 5,
            "headers": [("trace", b"%d" % n)] if n % 3 else None,
            "timestamp_ms": STAMP + n,
        }
        producer.send(place.topic, partition=n % 3, **record | {k: v(n) for k, v in changes.items()})
    producer.close()


def said(capfd: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    """The document of a command."""
    assert main([*words, "--json"]) == code
    return dict(json.loads(capfd.readouterr().out))


def killed(step: str, times: int, *words: str, lane_offsets: int = 250_000) -> None:
    """A command in a process that dies after it did a step so many times."""
    command = [*CUT, step, str(times), str(lane_offsets), *words]
    ended = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert ended.returncode == 9, ended.stdout + ended.stderr


def contents(found: list[dict[str, Any]]) -> dict[int, list[Any]]:
    by_partition: dict[int, list[Any]] = {}
    for r in found:
        headers = tuple((h["key"], h["value"]) for h in r["headers"] or ())
        by_partition.setdefault(r["partition"], []).append((r["key"], r["value"], r["timestamp"], headers))
    return by_partition


def seen(kafka: LocalKafka, topic: str, count: int) -> list[dict[str, Any]]:
    return list(until(lambda: len(r := consumed(kafka, topic)) >= count and r))


def test_raw_rows_go_back_byte_by_byte_through_kills(
    tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    place, again = Place(tmp_path, kafka, fresh_topic(partitions=3)), fresh_topic(partitions=3)
    produce(place, 1200)
    run(place.feed())
    ranges = [word for p in range(3) for word in ("--offsets", f"{place.topic}:{p}:0-400")]
    asked = ["republish", "orders", "--topic", again, *ranges, "--keep-partitions", "--keep-timestamps"]
    asked += ["--project", str(tmp_path)]
    planned = said(capfd, *asked, "--dry-run")
    assert (planned["applied"], planned["offsets"], planned["to_partitions"]) == (False, 1200, 3)
    assert [(s["partition"], s["rows"]) for s in planned["sources"]] == [(p, 400) for p in range(3)]
    assert consumed(kafka, again) == []

    for step, times in (("sent", 1), ("mapped", 2), ("committed", 2)):
        killed(step, times, *asked, "--yes")
    done = said(capfd, *asked, "--yes")
    assert done["records_in_all"] == 1200 > done["records"] > 0
    found = seen(kafka, again, 1200)
    assert contents(found) == contents(consumed(kafka, place.topic))
    assert said(capfd, *asked, "--yes")["done_before"]
    assert len(consumed(kafka, again)) == 1200

    audited = said(capfd, "audit", "orders", "--republished", done["id"], "--project", str(tmp_path))
    assert (audited["holds"], audited["rows"], audited["compared"], audited["findings"]) == (True, 1200, 1200, [])
    told = said(capfd, "explain", "orders", f"{place.topic}:1:123", "--project", str(tmp_path))["republished"]
    (new,) = [r for r in found if r["partition"] == 1 and r["timestamp"] == STAMP + 3 * 123 + 1]
    assert told == [{"republish": done["id"], "from": f"{place.topic}:1:123", "to": f"{again}:1:{new['offset']}"}]
    back = said(capfd, "explain", "orders", told[0]["to"], "--project", str(tmp_path))["republished"]
    assert back == told
    assert len(list((tmp_path / ".sluice/lake/_sluice/orders/republished").rglob("map/*.parquet"))) > 3


def test_lanes_in_tasks_of_spark_through_kills(
    tmp_path: Path,
    kafka: LocalKafka,
    fresh_topic: Callable[..., str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, again = Place(tmp_path, kafka, fresh_topic(partitions=3)), fresh_topic(partitions=2)
    produce(place, 1200)
    run(place.feed())
    project, words = ["--project", str(tmp_path)], list[str]()
    for p in range(3):
        words += ["--offsets", f"{place.topic}:{p}:0-{400 - p}"]
    asked = ["republish", "orders", "--topic", again, *words, "--keep-timestamps", *project]
    monkeypatch.setattr(plans, "LANE_OFFSETS", 300)
    assert said(capfd, *asked, "--dry-run")["lanes"] == 3
    for step, times in (("begun", 2), ("sent", 1), ("mapped", 1), ("committed", 2)):
        killed(step, times, *asked, "--yes", "--here", lane_offsets=300)

    honest = republish_tasks.sending

    def mortal(*given: Any) -> LaneSender:
        made = honest(*given)
        return replace(made, open_target=partial(dying_targets.opened, made.open_target, tmp_path))

    monkeypatch.setattr(republish_tasks, "sending", mortal)
    done = said(capfd, *asked, "--yes")
    assert done["records_in_all"] == 1197
    name = f"sluice-republish-orders-{done['id']}"
    died = {f"died-{when}-{name}.{lane}" for when in ("after", "before") for lane in (1, 2)}
    assert {path.name for path in tmp_path.glob("died-*")} == died
    found = seen(kafka, again, 1197)
    for r in found:
        if r["key"] is not None:
            assert r["partition"] == (murmur2(r["key"]) & 0x7FFFFFFF) % 2
    for p in range(3):
        old = [r for r in consumed(kafka, place.topic) if r["partition"] == p][: 400 - p]
        by_stamp = {r["timestamp"]: r["value"] for r in found if (r["timestamp"] - STAMP) % 3 == p}
        assert by_stamp == {r["timestamp"]: r["value"] for r in old}
        for new in range(2):
            stamps = [r["timestamp"] for r in found if r["partition"] == new and (r["timestamp"] - STAMP) % 3 == p]
            assert stamps == sorted(stamps)
    audited = said(capfd, "audit", "orders", "--republished", done["id"], *project)
    assert (audited["holds"], audited["compared"], audited["findings"]) == (True, 1197, [])
    assert said(capfd, *asked, "--yes")["done_before"]
    killed("lane", 3, *asked, "--yes", "--here", "--id", "other", lane_offsets=300)
    done_all = said(capfd, *asked, "--yes", "--id", "other")
    assert (done_all["records"], done_all["records_in_all"]) == (0, 1197)
    assert len(seen(kafka, again, 2 * 1197)) == 2 * 1197

    folder = tmp_path / f".sluice/lake/_sluice/orders/republished/{done['id']}/map"
    one, two = (next(folder.glob(f"{lane:04d}-*.parquet")) for lane in (1, 2))
    whole, theirs = pq.read_table(one), pq.read_table(two).to_pylist()
    taken = whole.to_pylist()
    for r, t in zip(taken[:20], theirs, strict=False):  # few: what comes last of very many findings is only counted
        r |= {n: t[n] for n in ("to_partition", "to_offset")}
    pq.write_table(pa.Table.from_pylist(taken, schema=whole.schema), one)
    told = said(capfd, "audit", "orders", "--republished", done["id"], *project, code=1)
    assert "the map names a new coordinate twice" in {f["text"] for f in told["findings"]}


def test_of_two_runs_the_one_that_began_last_goes_on(
    tmp_path: Path,
    kafka: LocalKafka,
    fresh_topic: Callable[..., str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, again = Place(tmp_path, kafka, fresh_topic(partitions=3)), fresh_topic()
    produce(place, 300)
    run(place.feed())
    asked = ["republish", "orders", "--offsets", f"{place.topic}:0:0-100", "--topic", again, "--id", "twice", "--yes"]
    asked += ["--project", str(tmp_path)]
    lake = LocalLake(tmp_path / ".sluice/lake")
    begin, begun = KafkaTarget.begin, list[str]()

    def overtaken(self: KafkaTarget) -> Any:
        if not begun:
            send_lane.claim(lake, plans.load(lake, "orders", "twice"))
        begun.append("later")
        return begin(self)

    monkeypatch.setattr(KafkaTarget, "begin", overtaken)
    assert main(asked) == 1
    assert "another run carries republish twice of orders out now" in capfd.readouterr().err
    assert consumed(kafka, again) == []
    begun.clear()

    def fenced(self: KafkaTarget) -> Any:
        """One that was begun before, and comes late."""
        found = begin(self)
        if not begun:
            begun.append("late")
            with closing(KafkaTarget(address, again, "sluice-republish-orders-twice")) as late:
                begin(late)
        return found

    address = KafkaAddress(kafka.bootstrap)
    monkeypatch.setattr(KafkaTarget, "begin", fenced)
    assert said(capfd, *asked)["records_in_all"] == 100
    assert len(seen(kafka, again, 100)) == 100


def test_by_key_with_coordinates_and_what_is_refused(
    tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    place, again = Place(tmp_path, kafka, fresh_topic(partitions=3)), fresh_topic(partitions=2)
    produce(place, 300)
    run(place.feed())
    project = ["--project", str(tmp_path)]
    asked = ["republish", "orders", "--offsets", f"{place.topic}:1:10-90", *project]
    refused = {
        "create the topic": ["--topic", f"{again}-not-there"],
        "land again": ["--topic", place.topic],
        "--partition-by key": ["--topic", again, "--keep-partitions", "--offsets", f"{place.topic}:2:0-5"],
        "have not landed": ["--topic", again, "--offsets", f"{place.topic}:0:90-101"],
        "no partition": ["--topic", again, "--offsets", f"{place.topic}:7:0-1"],
    }
    for why, words in refused.items():
        assert main([*asked, *words, "--yes"]) in (1, 2, 3, 75)
        assert why in capfd.readouterr().err
    done = said(capfd, *asked, "--topic", again, "--headers", "--yes")
    assert (done["records"], done["transactions"]) == (80, 1)
    found = seen(kafka, again, 80)
    old = {r["offset"]: r for r in consumed(kafka, place.topic) if r["partition"] == 1}
    for r in found:
        *own, topic, partition, offset = r["headers"]
        assert [topic["value"], partition["value"]] == [place.topic.encode(), b"1"]
        before = old.pop(int(offset["value"]))
        assert (before["key"], before["value"], before["headers"] or []) == (r["key"], r["value"], own)
        assert r["timestamp"] > STAMP + 10**9
        if r["key"] is not None:
            assert r["partition"] == (murmur2(r["key"]) & 0x7FFFFFFF) % 2
    assert len(old) == 20

    (tmp_path / "places.py").write_text("def last(rows, partitions):\n    return [partitions - 1] * len(rows)\n")
    some = [*asked, "--topic", again, "--where", 'partition = 1 and "offset" % 8 = 0 and key is not null', "--yes"]
    chosen = said(capfd, *some, "--partition-by", "places.py:last")
    assert chosen["records"] == chosen["partitions"]["1"] == len([n for n in range(16, 90, 8) if (3 * n + 1) % 11])
    audited = said(capfd, "audit", "orders", "--republished", chosen["id"], *project)
    assert (audited["holds"], audited["rows"]) == (True, chosen["records"])
    assert main([*asked, "--topic", again, "--where", "exists (from read_text('/etc/passwd'))", "--dry-run"]) == 2
    assert "disabled" in capfd.readouterr().err
    audited = said(capfd, "audit", "orders", "--republished", done["id"], *project)
    assert (audited["holds"], audited["rows"], audited["compared"]) == (True, 80, 80)


def test_one_after_the_other_at_most_so_many_a_second(
    tmp_path: Path,
    kafka: LocalKafka,
    fresh_topic: Callable[..., str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, again = Place(tmp_path, kafka, fresh_topic(partitions=3)), fresh_topic(partitions=2)
    produce(place, 300)
    run(place.feed())
    asked = ["republish", "orders", "--offsets", f"{place.topic}:1:10-90", "--topic", again, "--headers", "--yes"]
    asked += ["--partition-by", "round-robin", "--project", str(tmp_path)]
    clock = Clock()
    monkeypatch.setattr(send_lane, "time", clock)
    done = said(capfd, *asked, "--rate", "40", "--id", "by-records")
    assert (done["records"], done["partition_by"], done["partitions"]) == (80, "round-robin", {"0": 40, "1": 40})
    found = seen(kafka, again, 80)
    assert {int(r["headers"][-1]["value"]): r["partition"] for r in found} == {n: n % 2 for n in range(10, 90)}
    assert clock.slept == pytest.approx(80 / 40)

    clock.slept = 0.0
    done = said(capfd, *asked, "--rate", "1KB", "--id", "by-bytes")
    bytes_sent = sum(len(r["key"] or b"") + len(r["value"] or b"") for r in found)
    assert bytes_sent / 1000 < clock.slept < 4 * bytes_sent / 1000
    assert clock.slept / done["transactions"] < send_lane.TRANSACTION_SECONDS + 2, "none stays open while it waits"
    assert [done["records"], len(seen(kafka, again, 160))] == [80, 160]

    told = list[Progress]()
    monkeypatch.setattr(CommandOutput, "progress", lambda self: nullcontext(told.append))
    monkeypatch.setattr(KafkaTarget, "throttled_ms", 12_400)  # that a quota does this: tests/faults
    assert said(capfd, *asked, "--rate", "20", "--id", "by-quota")["throttled"] == 12.4
    sent = [p for p in told if p.stage == "send"]
    assert {p.note for p in sent} == {"(paused by a quota for 12 s)"}
    assert (sent[-1].done, sent[-1].total) == (80, 80)
    lake = LocalLake(tmp_path / ".sluice/lake")
    assert send_lane.progress_of(lake, plans.load(lake, "orders", "by-quota"), 0) == (80, 12_400), "as tasks tell it"


class Clock:
    """Time that passes by sleeping alone."""

    slept = 0.0

    def sleep(self, seconds: float) -> None:
        self.slept += seconds

    def monotonic(self) -> float:
        return self.slept


def test_an_audit_names_what_the_target_holds_otherwise(
    tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    place, again = Place(tmp_path, kafka, fresh_topic(partitions=3)), fresh_topic(partitions=3)
    produce(place, 300)
    run(place.feed())
    ranges = [word for p in range(3) for word in ("--offsets", f"{place.topic}:{p}:0-100")]
    project = ["--project", str(tmp_path)]
    asked = ["republish", "orders", "--topic", again, *ranges, "--keep-partitions", "--keep-timestamps", "--id", "once"]
    audit = ["audit", "orders", "--republished", "once", *project]
    said(capfd, *asked, *project, "--dry-run")
    assert main(audit) == 2
    assert "no republish once" in capfd.readouterr().err
    said(capfd, *asked, *project, "--yes")
    until(lambda: said(capfd, *audit)["compared"] == 300)  # a commit reaches one partition after another

    folder = tmp_path / ".sluice/lake/_sluice/orders/republished/once"
    (path,) = (folder / "map").iterdir()
    whole = pq.read_table(path)
    rows = whole.to_pylist()
    by_old = {(r["partition"], r["offset"]): r for r in rows}
    one, two = by_old[0, 10], by_old[0, 12]
    one["to_offset"], two["to_offset"] = two["to_offset"], one["to_offset"]
    by_old[1, 20]["to_offset"] = 100  # the transaction's marker
    by_old[1, 30]["to_offset"] = 900
    rows = [r for r in rows if (r["partition"], r["offset"]) != (2, 40)]
    pq.write_table(pa.Table.from_pylist(rows, schema=whole.schema), path)

    told = said(capfd, *audit, code=1)
    assert (told["holds"], told["rows"], told["compared"]) == (False, 300, 297)
    topic = place.topic
    assert {(f["old"].removeprefix(topic), f["text"].split(":")[0]) for f in told["findings"]} >= {
        (":0:10", "has another value than the row in the lake"),
        (":0:12", "has another value than the row in the lake"),
        (":0:12", "stands before an older record of its old partition"),
        (":1:20", "is not there for readers of committed records"),
        (":1:30", "lies beyond the end of the log"),
        (":2:40", "is in the lake, and was not sent"),
    }
    assert main(audit) == 1
    assert f"{topic}:0:10" in capfd.readouterr().out

    one = ["--topic", again, "--offsets", f"{topic}:0:0-1", "--keep-partitions", "--id", "one", *project]
    said(capfd, "republish", "orders", *one, "--yes")
    until(lambda: said(capfd, "audit", "orders", "--republished", "one", *project)["compared"] == 1)
    (alone,) = (folder.parent / "one/map").iterdir()
    whole = pq.read_table(alone)
    pq.write_table(pa.Table.from_pylist([whole.to_pylist()[0] | {"to_offset": 102}], schema=whole.schema), alone)
    (finding,) = said(capfd, "audit", "orders", "--republished", "one", *project, code=1)["findings"]
    assert (finding["new"], "not there" in finding["text"]) == (f"{again}:0:102", True)

    with KafkaAdminClient(bootstrap_servers=kafka.bootstrap) as admin:
        admin.delete_records({TopicPartition(again, 2): 50})
    assert said(capfd, *audit, code=1)["gone"] == 49  # and one that is not in the map


def test_typed_rows_land_the_same_again_and_quarantined_ones_keep_their_bytes(
    tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    place = Place(tmp_path, kafka, fresh_topic(partitions=3))
    again, bad = fresh_topic(partitions=3), fresh_topic()
    typed = {
        "format": "json",
        "schema": "{id: int64, at: timestamp, amount: 'decimal(12,2)', tags: 'map<string, string>', "
        "lines: 'list<struct<sku:string, n:int32>>', share: float64, raw: json, day: date}",
        "policies": "{quarantine_limit: {share: 1}}",
    }

    def value(n: int) -> bytes | None:
        if n % 10 == 0:
            return None if n % 20 == 0 else b"no json %d" % n
        made = {
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
        return json.dumps({k: v for i, (k, v) in enumerate(made.items()) if (n + i) % 6}).encode()

    produce(place, 300, key=lambda n: b"k%d" % n, value=value)
    run(place.feed(**typed))
    ranges = [word for p in range(3) for word in ("--offsets", f"{place.topic}:{p}:0-100")]
    asked = ["republish", "orders", *ranges, "--keep-timestamps", "--project", str(tmp_path), "--yes"]
    assert said(capfd, *asked, "--topic", again, "--keep-partitions")["records"] == 285
    assert said(capfd, *asked, "--topic", bad, "--quarantined")["records"] == 15
    for name in plans.names(LocalLake(tmp_path / ".sluice/lake"), "orders"):
        assert said(capfd, "audit", "orders", "--republished", name, "--project", str(tmp_path))["holds"]
    assert sorted(r["value"] for r in seen(kafka, bad, 15)) == sorted(b"no json %d" % n for n in range(10, 300, 20))

    other = Place(tmp_path, kafka, again)
    run(other.feed("others", **typed))
    assert landed(other, "others") == landed(place, "orders")


def test_times_that_the_target_does_not_take_and_a_mark_that_was_forgotten(
    tmp_path: Path,
    kafka: LocalKafka,
    fresh_topic: Callable[..., str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Place(tmp_path, kafka, fresh_topic(partitions=3))
    recent, again = fresh_topic(config={"message.timestamp.before.max.ms": "3600000"}), fresh_topic()
    produce(place, 300)
    run(place.feed())
    asked = ["republish", "orders", "--offsets", f"{place.topic}:0:0-100", "--project", str(tmp_path), "--yes"]
    assert main([*asked, "--topic", recent, "--keep-timestamps"]) == 2
    told = capfd.readouterr().err
    assert f"does not take the record of {place.topic}:0:0" in told
    assert "message.timestamp" in told
    assert consumed(kafka, recent) == []
    assert said(capfd, *asked, "--topic", recent)["records"] == 100

    def end(*_: object) -> None:
        raise LakeUnavailable("the lake is away")

    monkeypatch.setattr(send_lane, "TRANSACTION_BYTES", 1)
    monkeypatch.setattr(send_lane.Run, "_finish", end)
    assert main([*asked, "--topic", again, "--id", "cut"]) == 1
    monkeypatch.undo()
    assert "--resume cut" in capfd.readouterr().err
    with KafkaAdminClient(bootstrap_servers=kafka.bootstrap) as admin:
        admin.delete_groups(["sluice-republish-orders-cut"])
    assert main([*asked, "--topic", again, "--id", "cut"]) == 3
    assert "Kafka no longer has the progress" in capfd.readouterr().err


def test_in_dagster_with_lineage_to_the_target(
    tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    place, again = Place(tmp_path, kafka, fresh_topic(partitions=3)), fresh_topic(partitions=3)
    produce(place, 300)
    run(place.feed())
    project, sent = Project(tmp_path), dg.AssetKey(["orders", "republished"])
    assert sent not in build(project).resolve_asset_graph().get_all_asset_keys()
    ranges = [{"topic": place.topic, "partition": p, "start": 0, "end": 100} for p in range(3)]
    config = {"to": again, "offsets": ranges, "where": "partition < 2", "keep_partitions": True}

    with dg.DagsterInstance.ephemeral() as instance:

        def carried_out(**changes: Any) -> dg.ExecuteInProcessResult:
            run_config = {"ops": {REPUBLISH: {"config": {"feed": "orders"} | config | changes}}}
            job = build(project).resolve_job_def("republish_many_feeds")
            return job.execute_in_process(instance=instance, run_config=run_config, raise_on_error=False)

        assert not carried_out(keep_partitions=False, partition_by="nowhere.py:f", name="bad").success
        (failed,) = instance.fetch_observations(sent, limit=5).records
        observed = failed.asset_observation
        assert observed is not None
        told = {k: v.value for k, v in observed.metadata.items()}
        assert (told["republish"], told["go_on"]) == ("bad", "run this again, or: " + RESUME)
        assert "nowhere.py" in told["failed"]
        made = carried_out()
        assert made.success
        (event,) = made.get_asset_materialization_events()
        metadata = {k: v.value for k, v in event.materialization.metadata.items()}
        assert (event.asset_key, metadata["to"], metadata["records"]) == (sent, again, 200)
        assert not carried_out(resume=metadata["republish"], to="").success, "it repeats what is planned"
        resumed = {"ops": {REPUBLISH: {"config": {"feed": "orders", "resume": metadata["republish"]}}}}
        job = build(project).resolve_job_def("republish_many_feeds")
        assert job.execute_in_process(instance=instance, run_config=resumed).success
        assert not carried_out(to="").success
    graph = build(project).resolve_asset_graph()
    assert graph.get(sent).parent_keys == {dg.AssetKey(["orders", "landed"])}
    assert graph.get(dg.AssetKey(["kafka", again])).parent_keys == {sent}
    audited = said(capfd, "audit", "orders", "--republished", metadata["republish"], "--project", str(tmp_path))
    assert (audited["holds"], audited["compared"]) == (True, 200)
    Place(tmp_path, kafka, again).feed("others")
    graph = build(project).resolve_asset_graph()
    assert graph.get(dg.AssetKey(["kafka", again])).is_observable
    assert graph.get(dg.AssetKey(["kafka", again])).parent_keys == {sent}


@pytest.mark.faults
def test_brokers_that_die_on_the_way_and_a_second_one_that_fences(
    tmp_path: Path,
    kafka3: LocalKafka,
    fresh_topic: Callable[..., str],
) -> None:
    place = Place(tmp_path, kafka3, fresh_topic(partitions=3, cluster=kafka3))
    again = fresh_topic(partitions=3, cluster=kafka3)
    produce(place, 6000)
    run(place.feed())
    ranges = [word for p in range(3) for word in ("--offsets", f"{place.topic}:{p}:0-2000")]
    asked = ["republish", "orders", "--topic", again, *ranges, "--keep-partitions", "--keep-timestamps"]
    asked += ["--project", str(tmp_path), "--yes"]
    slowly = [*CUT, "sent", "0", "250000", *asked, "--rate", "200"]
    codes: list[int] = []

    def send() -> None:
        while len(codes) < 20 and codes[-1:] != [0]:
            codes.append(subprocess.run(slowly, cwd=ROOT, check=False, capture_output=True).returncode)

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        for broker in kafka3.broker_ids:
            before = len(consumed(kafka3, again, committed=False))
            until(lambda before=before: sending.done() or len(consumed(kafka3, again, committed=False)) > before)
            kafka3.kill_broker(broker)
            kafka3.start_broker(broker)
        assert main(asked) == 0
        sending.result()
    assert codes[-1] == 0
    assert contents(seen(kafka3, again, 6000)) == contents(consumed(kafka3, place.topic))
    expected = {(again, p): {r["offset"] for r in consumed(kafka3, again) if r["partition"] == p} for p in range(3)}
    java = tools.Java.of_local_kafka(kafka3)
    scanned = tools.scan(java, kafka3.bootstrap, [again], tmp_path / "seen", expected=expected)
    by_java = [json.loads(line) for line in scanned.read_text().splitlines()]
    assert {
        tp: {r["offset"] for r in by_java if (again, r["partition"]) == tp and "offset" in r} for tp in expected
    } == (expected)


def landed(place: Place, feed: str) -> list[dict[str, Any]]:
    import duckdb

    files = str(place.root / ".sluice/lake/data" / feed / "**/*.parquet")
    query = """select * exclude (kafka_topic, kafka_offset) from read_parquet($files, hive_partitioning = false)
        order by kafka_partition, kafka_offset"""
    return list(duckdb.connect().sql(query, params={"files": files}).to_arrow_table().to_pylist())
