"""Landed rows of one output of a split feed go back into a real Kafka, and a plain consumer reads them there."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import fastavro
import pytest

from sluice.assets.factory import build
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.project import Project
from tests.integration.conftest import Call
from tests.integration.support import FeedProject, consume_topic, run
from tests.integration.test_protection import hash_text
from tests.integration.test_protection import produce as produce_records
from tests.integration.test_protection import write_feed as write_protected_feed
from tests.integration.test_republish import REPUBLISH, group_by_partition, run_until_killed, wait_for_records
from tests.integration.test_split import LENIENT, SPLIT, choose_by_header, expect, produce, write_split_feed

WINDOWS = ("--from", "2023-11-14T22:00", "--to", "2023-11-14T22:30")
AS_BEFORE = ("--keep-partitions", "--keep-timestamps", "--yes", "--json")


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(partitions=3))


def list_records(project: FeedProject, output: str) -> dict[int, list[Any]]:
    """Returns the records that landed in an output as they were sent, by partition in their order."""
    landed = expect(project, choose_by_header)[output]
    records = consume_topic(project.kafka, project.topic)
    return group_by_partition([r for r in records if (r["partition"], r["offset"]) in landed])


def with_parsed_values(by_partition: dict[int, list[Any]]) -> dict[int, list[Any]]:
    return {p: [(r[0], json.loads(r[1]), *r[2:]) for r in records] for p, records in by_partition.items()}


def check_audit(call: Call, name: str, **expected: Any) -> dict[str, Any]:
    code, printed = call("audit", "github", "--republished", name, "--json")
    assert code == (0 if expected.get("holds", True) else 1), printed
    assert {k: printed[k] for k in expected} == expected
    return dict(printed)


@pytest.mark.parametrize("shared", ["true", "false"])
def test_rows_of_one_output_are_sent_once_and_in_order(
    project: FeedProject, call: Call, fresh_topic: Callable[..., str], shared: str
) -> None:
    produce(project, 300)
    write = {"policies": LENIENT, "landing": f"{{shared_files: {shared}}}"}
    feed, target = write_split_feed(project, **write), fresh_topic(partitions=3)
    run(feed)
    sources = list_records(project, "push")
    count = sum(map(len, sources.values()))
    command = ("republish", "github.push", "--topic", target, *WINDOWS)
    code, planned = call(*command, "--dry-run", "--json")
    assert code == 0, planned
    assert (planned["output"], sum(s["rows"] for s in planned["sources"])) == ("push", count)
    for step, times in (("sent", 1), ("committed", 2)):
        run_until_killed(step, times, *command, *AS_BEFORE, "--project", str(project.root))
    code, done = call(*command, *AS_BEFORE)
    assert code == 0, done
    assert done["records_in_all"] == count > done["records"] > 0
    sent = wait_for_records(project.kafka, target, count)
    assert with_parsed_values(group_by_partition(sent)) == with_parsed_values(sources)
    check_audit(call, done["id"], holds=True, rows=count, compared=count, output="push")

    for dataset in ("github", "github.push"):
        code, again = call("republish", dataset, "--resume", done["id"], "--yes", "--json")
        assert (code, again["done_before"], again["records_in_all"]) == (0, True, count)
    assert len(consume_topic(project.kafka, target)) == count

    plan = Path(feed.lake, "_sluice", "github", "republished", done["id"], "plan.json")
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"wishes": read_wishes(plan) | {"output": "issues"}}))
    others = len(expect(project, choose_by_header)["issues"])
    wrong = check_audit(call, done["id"], holds=False, rows=others, compared=0)
    assert wrong["findings_in_all"] == count + others


def read_wishes(plan: Path) -> dict[str, Any]:
    return dict(json.loads(plan.read_text())["wishes"])


def test_offsets_and_conditions_choose_rows_of_the_output(
    project: FeedProject, call: Call, fresh_topic: Callable[..., str]
) -> None:
    produce(project, 300)
    run(write_split_feed(project, policies=LENIENT))
    target, other = fresh_topic(), fresh_topic()
    rows = expect(project, choose_by_header)["issues"]
    wanted = {n for (p, offset), (_, n) in rows.items() if p == 1 and 10 <= offset < 60 and n > 99}
    offsets = ("--offsets", f"{project.topic}:1:10-60")
    command = ("republish", "github.issues", "--topic", target, *offsets, "--where", "n > 99")
    code, done = call(*command, "--headers", "--id", "some", "--yes", "--json")
    assert code == 0, done
    sent = wait_for_records(project.kafka, target, len(wanted))
    assert {json.loads(r["value"])["n"] for r in sent} == wanted
    assert len(sent) == len(wanted) > 0
    for r in sent:
        headers = {h["key"]: h["value"] for h in r["headers"]}
        old = int(headers["sluice.partition"]), int(headers["sluice.offset"])
        assert rows[old][1] == json.loads(r["value"])["n"]
    check_audit(call, "some", holds=True, rows=len(wanted), compared=len(wanted))
    code, links = call("explain", "github", f"{target}:0:0", "--json")
    assert (code, [link["republish"] for link in links["republished"]]) == (0, ["some"])

    words = ("republish", "github.push", "--topic", other, *offsets)
    code, printed = call(*words, "--where", "number > 99", "--yes")
    assert code == 2, printed
    assert "number" in printed, "a column of another output"
    code, printed = call(*words, "--id", "some", "--yes")
    assert code == 3, printed
    assert "some of github.issues is another one" in printed
    code, printed = call("republish", "github.push", "--resume", "some", "--yes")
    assert code == 2, printed
    assert "sluice republish github.issues --resume some" in " ".join(printed.split())


def test_quarantined_records_are_sent_for_all_outputs(
    project: FeedProject, call: Call, fresh_topic: Callable[..., str]
) -> None:
    """A replay then lands some of them, which no audit reports: neither that of these, nor that of an output."""
    produce(project, 300)
    run(write_split_feed(project, policies=LENIENT))
    target, bad = fresh_topic(partitions=3), fresh_topic(partitions=3)
    code, printed = call("republish", "github", "--topic", target, *WINDOWS, "--yes")
    assert code == 2, printed
    assert "github.push, github.issues" in printed
    code, printed = call("republish", "github.issues", "--topic", bad, *WINDOWS, "--quarantined", "--yes")
    assert code == 2, printed
    assert "name the feed, with --quarantined: github" in printed
    code, of_all = call("republish", "github", "--topic", bad, *WINDOWS, "--quarantined", *AS_BEFORE)
    assert code == 0, of_all
    code, of_issues = call("republish", "github.issues", "--topic", target, *WINDOWS, *AS_BEFORE)
    assert code == 0, of_issues
    expected = expect(project, choose_by_header)
    sent = group_by_partition(wait_for_records(project.kafka, bad, len(expected["refused"])))
    records = [
        r for r in consume_topic(project.kafka, project.topic) if (r["partition"], r["offset"]) in expected["refused"]
    ]
    assert sent == group_by_partition(records)
    check_audit(call, of_all["id"], holds=True, replayed=0)
    wider = {"values": ["issues", "issue_comment", "star"], "schema": {"number": "int64", "n": "int64"}}
    write_split_feed(project, SPLIT | {"into": SPLIT["into"] | {"issues": wider}}, policies=LENIENT)  # type: ignore[operator]
    code, printed = call("quarantine", "replay", "github")
    assert code == 0, printed
    replayed = check_audit(call, of_all["id"], holds=True)["replayed"]
    check_audit(call, of_issues["id"], holds=True, compared=len(expected["issues"]), replayed=replayed)
    assert replayed > 0


def test_raw_records_without_an_output_are_sent_by_dagsters_job(
    project: FeedProject, call: Call, fresh_topic: Callable[..., str]
) -> None:
    produce(project, 300)
    run(write_split_feed(project, SPLIT | {"otherwise": "raw"}, policies=LENIENT))
    target = fresh_topic(partitions=3)
    choice = {"window": "2023-11-14T22:00", "until": "2023-11-14T22:30"}
    settings = {"feed": "github.otherwise", "to": target, "keep_partitions": True, "keep_timestamps": True} | choice
    with dg.DagsterInstance.ephemeral() as instance:
        job = build(Project(project.root)).resolve_job_def("republish_many_feeds")
        result = job.execute_in_process(instance=instance, run_config={"ops": {REPUBLISH: {"config": settings}}})
        (event,) = result.get_asset_materialization_events()
    metadata = {k: v.value for k, v in event.materialization.metadata.items()}
    assert (event.asset_key, metadata["of"]) == (dg.AssetKey(["github", "republished"]), "github.otherwise")
    rest = {at for at, output in expect(project, choose_by_header)["refused"].items() if not output}
    records = [r for r in consume_topic(project.kafka, project.topic) if (r["partition"], r["offset"]) in rest]
    assert group_by_partition(wait_for_records(project.kafka, target, len(rest))) == group_by_partition(records)
    check_audit(call, str(metadata["republish"]), holds=True, compared=len(rest), output="otherwise")


def test_protected_values_are_sent_as_they_landed(
    project: FeedProject, call: Call, monkeypatch: pytest.MonkeyPatch, fresh_topic: Callable[..., str]
) -> None:
    kinds, target = ["buyers", "sellers"] * 4, fresh_topic(partitions=2)
    values = [json.dumps({"email": f"ann{n}@x", "kind": k, "user": {"ip": "1.2.3.4"}}) for n, k in enumerate(kinds)]
    produce_records(project, [(b"ann", v.encode(), [("auth", b"s")]) for v in values], stamp=1_700_000_000_000)
    rules = {"_key": {"hmac": "${PROTECT_KEY}"}, "_headers.auth": "drop", "email": {"hmac": "${PROTECT_KEY}"}}
    user = {"schema": {"email": "string", "user": "struct<ip:string>"}}
    placed = {"schema": {"email": "string", "ip": "string at user.ip"}}
    split: dict[str, Any] = {"by": {"field": "kind"}, "into": {"buyers": user, "sellers": placed}}
    settings = {"schema": "", "protect": json.dumps(rules), "window": "15m"}
    run(write_protected_feed(project, monkeypatch, "github", split=json.dumps(split), **settings))
    for output in split["into"]:
        words = ("republish", f"github.{output}", "--topic", target, "--id", output, "--window", "2023-11-14T22:00")
        code, done = call(*words, *AS_BEFORE)
        assert code == 0, done
        check_audit(call, output, holds=True, compared=4)
    sent = wait_for_records(project.kafka, target, 8)
    assert {r["key"] for r in sent} == {hash_text("ann").encode()}
    assert not any(h["key"] == "auth" for r in sent for h in r["headers"] or ())
    expected = [{"email": hash_text(f"ann{n}@x"), "kind": k, "user": {"ip": "1.2.3.4"}} for n, k in enumerate(kinds)]
    assert sorted((json.loads(r["value"]) for r in sent), key=str) == sorted(expected, key=str)


def test_avro_of_an_output_is_written_by_its_own_schema(
    project: FeedProject, call: Call, monkeypatch: pytest.MonkeyPatch, fresh_topic: Callable[..., str]
) -> None:
    """An output with a protected number is refused by its name: its schema has no room for a hash."""
    fields = {"orders": {"n": "long", "ref": "string"}, "people": {"email": "string", "age": "int"}}
    records, into, target = [], dict[str, Any](), fresh_topic(partitions=2)
    for name, types in fields.items():
        schema = {"type": "record", "name": name, "fields": [{"name": f, "type": t} for f, t in types.items()]}
        (project.root / f"{name}.avsc").write_text(json.dumps(schema))
        into[name] = {"format": "avro", "schema_file": f"{name}.avsc"}
        for n in range(4):
            value = io.BytesIO()
            fastavro.schemaless_writer(value, schema, {"n": n, "ref": f"é{n}", "email": "ann@x", "age": 7})
            records.append((b"k", value.getvalue(), [("kind", name.encode())]))
    produce_records(project, records, stamp=1_700_000_000_000)
    split = {"by": {"header": "kind"}, "into": into}
    settings = {"schema": "", "format": "avro", "wire_format": "bare", "window": "15m"}
    rules = json.dumps({"age": {"hmac": "${PROTECT_KEY}"}})
    run(write_protected_feed(project, monkeypatch, "github", split=json.dumps(split), protect=rules, **settings))
    words = ("--topic", target, "--window", "2023-11-14T22:00", *AS_BEFORE)
    code, done = call("republish", "github.orders", *words)
    assert code == 0, done
    sent = wait_for_records(project.kafka, target, 4)
    sources = [r for r in consume_topic(project.kafka, project.topic) if r["headers"][-1]["value"] == b"orders"]
    assert group_by_partition(sent) == group_by_partition(sources)
    check_audit(call, done["id"], holds=True, compared=4)
    code, printed = call("republish", "github.people", *words[:-1])
    assert code == 2, printed
    assert "github.people protects columns, and its schema has no room" in " ".join(printed.split())
