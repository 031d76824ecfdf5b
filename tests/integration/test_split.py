"""Feeds with `split` on a real Kafka: one topic becomes several datasets, compared with a plain consumer's records."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dagster import AssetCheckKey, AssetKey, DagsterInstance
from kafka import KafkaProducer

from sluice.assets.factory import build
from sluice.assets.instance.instance import open_instance
from sluice.assets.runs.run_session import RunSession
from sluice.pipelines.errors import EntriesLost
from sluice.pipelines.feed.feed import Feed
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.project import Project
from tests.integration.conftest import Call, Lines
from tests.integration.support import FeedProject, commit_feed, consume_topic, rescan_feed, run

pytestmark = pytest.mark.usefixtures("default_engine")

KIND = "X-GitHub-Event"
SPLIT = {
    "by": {"header": KIND},
    "into": {
        "push": {"schema": {"ref": "string not null", "n": "int64"}},
        "issues": {"values": ["issues", "issue_comment"], "schema": {"number": "int64", "n": "int64"}},
    },
}


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], lake: Lines) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(partitions=3), lake())


def write_split_feed(project: FeedProject, split: Mapping[str, Any] = SPLIT, **settings: Any) -> Feed:
    lines = {"format": "json", "window": "15m", "split": json.dumps(split)} | settings
    return project.write_feed("github", **lines)


def produce(project: FeedProject, count: int, start: int = 1_700_000_000_000) -> None:
    """Write bodies of four kinds: one has no output, some records have no kind, and some do not fit."""
    producer = KafkaProducer(bootstrap_servers=project.kafka.bootstrap, linger_ms=5)
    for i in range(count):
        kind = ("push", "issues", "issue_comment", "star", "push")[i % 5]
        body: dict[str, Any] = {"ref": f"refs/{i}", "n": i} if kind == "push" else {"number": i, "n": i}
        headers = [(KIND, b"star"), (KIND, kind.encode())]  # the last one counts
        if i % 50 == 7:
            headers = []
        if i % 50 == 11:
            body["n"] = "many"
        value = b"{" if i % 50 == 16 else json.dumps(body | {"meta": {"kind": kind}}).encode()
        producer.send(project.topic, value, f"k{i}".encode(), headers, i % 3, start + i * 1000)
    producer.close()


def choose_by_header(record: dict[str, Any]) -> str | None:
    kinds = [h["value"].decode() for h in record["headers"] or () if h["key"] == KIND]
    return {"push": "push", "issues": "issues", "issue_comment": "issues"}.get(kinds[-1]) if kinds else None


def choose_by_path(record: dict[str, Any]) -> str | None:
    try:
        kind = json.loads(record["value"])["meta"]["kind"]
    except ValueError:
        return None
    return {"push": "push", "issues": "issues", "issue_comment": "issues"}.get(kind)


COLUMNS = {"push": ("ref", "n"), "issues": ("number", "n")}
Place = tuple[int, int]


def expect(project: FeedProject, choose: Callable[[dict[str, Any]], str | None]) -> dict[str, dict[Place, Any]]:
    """Returns the rows of each output by partition and offset, and under `refused` the outputs of the others."""
    expected: dict[str, dict[Place, Any]] = {"push": {}, "issues": {}, "refused": {}}
    for record in consume_topic(project.kafka, project.topic):
        at, output = (record["partition"], record["offset"]), choose(record)
        try:
            body = json.loads(record["value"])
        except ValueError:
            body = {"n": "no JSON"}
        fits = output is not None and isinstance(body["n"], int)
        if output == "push" and "ref" not in body:
            fits = False
        if fits and output:
            expected[output][at] = tuple(body.get(name) for name in COLUMNS[output])
        else:
            expected["refused"][at] = output or ""
    return expected


def read_output(feed: Feed, output: str) -> dict[Place, Any]:
    """Returns the rows in the files of the output's folder, read by Arrow alone."""
    rows: dict[Place, Any] = {}
    for path in sorted(Path(feed.lake).rglob("*.parquet")):
        parts = path.relative_to(feed.lake).parts
        if parts[:3] == ("data", feed.name, output):
            for row in pq.ParquetFile(path).read().to_pylist():
                at = row["kafka_partition"], row["kafka_offset"]
                assert at not in rows
                rows[at] = tuple(row[name] for name in COLUMNS[output])
    return rows


def read_quarantine(feed: Feed) -> dict[Place, str]:
    """Returns the output of each quarantined record, by the folder in which it lies."""
    rows: dict[Place, str] = {}
    for path in sorted(Path(feed.lake).rglob("*.parquet")):
        parts = path.relative_to(feed.lake).parts
        if parts[:2] == ("quarantine", feed.name):
            output = parts[2] if "=" not in parts[2] else ""
            for row in pq.ParquetFile(path).read(["partition", "offset"]).to_pylist():
                at = row["partition"], row["offset"]
                assert at not in rows
                rows[at] = output
    return rows


LENIENT = "{quarantine_limit: {share: 1}}"


def check_rows(project: FeedProject, feed: Feed, choose: Callable[[dict[str, Any]], str | None]) -> None:
    """Compare all rows with the oracle's, and audit the feed value by value."""
    expected = expect(project, choose)
    for output in COLUMNS:
        assert read_output(feed, output) == expected[output]
    assert read_quarantine(feed) == expected["refused"]
    report = rescan_feed(feed)
    assert report.reconciled, report.problems
    assert report.compared == len(expected["push"]) + len(expected["issues"])


@pytest.mark.parametrize("shared", ["true", "false"])
def test_one_topic_becomes_datasets_by_a_header(project: FeedProject, shared: str) -> None:
    produce(project, 300)
    feed = write_split_feed(project, policies=LENIENT, landing=f"{{shared_files: {shared}}}")
    run(feed)
    check_rows(project, feed, choose_by_header)
    produce(project, 100, 1_700_000_900_000)
    run(feed)
    check_rows(project, feed, choose_by_header)


def test_one_topic_becomes_datasets_by_a_path(project: FeedProject) -> None:
    produce(project, 300)
    feed = write_split_feed(project, SPLIT | {"by": {"at": "meta.kind"}}, policies=LENIENT)
    run(feed)
    check_rows(project, feed, choose_by_path)


def test_a_replay_routes_again_by_todays_rule(project: FeedProject, call: Call) -> None:
    produce(project, 300)
    feed = write_split_feed(project, policies=LENIENT)
    run(feed)
    wider = {"values": ["issues", "issue_comment", "star"], "schema": {"number": "int64", "n": "int64"}}
    again = write_split_feed(project, SPLIT | {"into": SPLIT["into"] | {"issues": wider}}, policies=LENIENT)  # type: ignore[operator]
    code, printed = call("quarantine", "replay", "github")
    assert code == 0, printed
    rows = read_output(again, "issues")
    expected = {}
    for record in consume_topic(project.kafka, project.topic):
        kinds = [h["value"].decode() for h in record["headers"] or ()]
        if kinds and kinds[-1] != "push" and record["value"] != b"{":
            body = json.loads(record["value"])
            if isinstance(body["n"], int):
                expected[record["partition"], record["offset"]] = (body["number"], body["n"])
    assert rows == expected
    before = expect(project, choose_by_header)
    assert read_output(again, "push") == before["push"]
    assert read_quarantine(again).keys() == before["refused"].keys() - expected.keys()
    report = rescan_feed(again)
    assert report.reconciled, report.problems


def test_a_rescan_after_a_replay_follows_former_rules(project: FeedProject, call: Call) -> None:
    """A replay moves quarantined records alone: landed ones stay in the output that took them, in their old columns."""
    produce(project, 300)
    settings = {"policies": LENIENT, "landing": "{shared_files: false}"}
    run(write_split_feed(project, **settings))
    into = {
        "push": {"values": ["push", "issue_comment"], "schema": {"ref": "string", "n": "int64", "meta": "json"}},
        "stars": {"values": ["star"], "schema": {"n": "int64"}},
        "issues": {"schema": {"number": "int64", "n": "int64", "ref": "string"}},
    }
    feed = write_split_feed(project, SPLIT | {"into": into}, **settings)
    code, printed = call("quarantine", "replay", "github")
    assert code == 0, printed
    report = rescan_feed(feed)
    assert report.reconciled, report.problems
    assert report.compared > 250
    for path in Path(feed.lake, "data").rglob("*.parquet"):
        rows = pq.read_table(path, partitioning=None)
        pq.write_table(rows.set_column(rows.schema.get_field_index("n"), "n", pa.array(range(len(rows)))), path)
    assert not rescan_feed(feed).reconciled


def test_commands_take_outputs_or_name_the_feed(project: FeedProject, call: Call) -> None:
    produce(project, 300)
    feed = write_split_feed(project, policies=LENIENT)
    run(feed)
    expected = expect(project, choose_by_header)
    code, printed = call("check", "github.push", "2023-11-14T22:15", "--json")
    assert code == 0, printed
    assert printed["complete"]
    of_push = printed["landed"]
    code, printed = call("check", "github", "2023-11-14T22:15", "--json")
    assert code == 0, printed
    assert not printed["landed_twice"]
    code, of_issues = call("check", "github.issues", "2023-11-14T22:15", "--json")
    assert code == 0, of_issues
    assert printed["landed"] == of_push + of_issues["landed"] > of_push > 0
    code, printed = call("files", "github.push", "--from", "2023-11-14T22:00", "--to", "2023-11-14T22:30", "--json")
    assert code == 0
    assert printed["rows"] == len(expected["push"])
    for words in (["run"], ["plan"], ["audit"], ["compact"]):
        code, printed = call(*words, "github.push")
        assert code == 2, printed
        assert "output of feed github" in printed
        assert "github" in printed
    code, printed = call("check", "github.stars")
    assert code == 2
    assert "github.push, github.issues" in printed


def test_merged_files_of_outputs_have_the_same_rows(project: FeedProject, call: Call) -> None:
    produce(project, 300)
    settings = {"window": "1h", "landing": "{shared_files: false}", "limits": "{records: 60}"}
    feed = write_split_feed(project, policies=LENIENT, **settings)
    for _ in range(6):
        run(feed)
    before = {output: read_output(feed, output) for output in COLUMNS}
    code, printed = call("compact", "github", "--json")
    assert code == 0, printed
    assert printed["batches"]
    assert {output: read_output(feed, output) for output in COLUMNS} == before
    check_rows(project, feed, choose_by_header)


def test_each_output_is_an_asset_and_has_its_checks(project: FeedProject, call: Call) -> None:
    expectation = {"type": "expect_column_values_to_be_between", "kwargs": {"column": "n", "max_value": 99}}
    suite = {"name": "push", "expectations": [expectation], "meta": {"great_expectations_version": "1.24.1"}}
    (project.root / "feeds").mkdir()
    (project.root / "feeds" / "github.push.contract.json").write_text(json.dumps(suite))
    produce(project, 300, int(time.time() * 1000) - 3_600_000)
    write_split_feed(project, policies=LENIENT)
    code, printed = call("run", "github", "--engine", "processes")
    assert code == 0, printed
    expected = expect(project, choose_by_header)
    within = {at for at, (_, n) in expected["push"].items() if n <= 99}
    feed = Project(project.root).feed("github")
    assert read_output(feed, "push").keys() == within
    assert len(read_quarantine(feed)) == len(expected["refused"]) + len(expected["push"]) - len(within)
    with open_instance(Project(project.root)) as instance:
        rows = {output: count_rows(instance, AssetKey(["github", output])) for output in COLUMNS}
        assert rows == {"push": len(within), "issues": len(expected["issues"])}
        assert count_rows(instance, AssetKey(["github", "landed"])) == sum(rows.values())
        names = {
            ("push", "contract_numeric"): False,
            ("push", "schema_drift"): False,
            ("issues", "schema_drift"): False,
            ("landed", "schema_drift"): False,
            ("landed", "no_gaps"): True,
        }
        results: dict[tuple[str, str], dict[str | None, bool]] = {}
        for (asset, name), passed in names.items():
            check = AssetCheckKey(AssetKey(["github", asset]), name)
            records = instance.event_log_storage.get_asset_check_execution_history(check, limit=50)
            events = [r.event.dagster_event for r in records if r.event]
            evaluations = [e.asset_check_evaluation_data for e in events if e]
            results[asset, name] = {e.partition: e.passed for e in evaluations}
            assert evaluations, name
            assert all(e.passed for e in evaluations) is passed, name
        key = AssetKey(["github", "push"])
        oldest = min(instance.get_materialized_partitions(key))
        newest = max(instance.get_materialized_partitions(key))
        for tags, partition in (({"dagster/partition": oldest}, oldest), ({}, newest)):
            checks = execute_checks(project, instance, key, tags)
            assert {*checks} == {"contract_numeric", "schema_drift"}
            assert {c.partition for c in checks.values()} == {partition}
            assert checks["contract_numeric"].passed is results["push", "contract_numeric"][partition]


def execute_checks(
    project: FeedProject, instance: DagsterInstance, key: AssetKey, tags: Mapping[str, str]
) -> dict[str, dg.AssetCheckEvaluation]:
    """Execute the checks of an asset, as from its page. Returns the results by name."""
    own = Project(project.root)
    job = dg.define_asset_job("look", dg.AssetSelection.checks_for_assets(key))
    definitions = dg.Definitions.merge(build(own, RunSession(own)), dg.Definitions(jobs=[job]))
    result = definitions.resolve_job_def("look").execute_in_process(instance=instance, tags=dict(tags))
    assert result.success
    return {e.check_name: e for e in result.get_asset_check_evaluations()}


def count_rows(instance: DagsterInstance, key: AssetKey) -> int:
    """Returns the sum of the rows of the asset's newest materialization of each partition."""
    records = instance.fetch_materializations(key, limit=100).records
    newest = {r.partition_key: r.asset_materialization for r in reversed(records) if r.partition_key}
    return sum(int(m.metadata["rows"].value) for m in newest.values() if m)  # type: ignore[arg-type]


@pytest.mark.parametrize(("otherwise", "landed"), [("raw", True), ("drop", False)])
def test_records_without_an_output_land_raw_or_are_counted(
    project: FeedProject, otherwise: str, landed: bool, call: Call
) -> None:
    produce(project, 200)
    feed = write_split_feed(project, SPLIT | {"otherwise": otherwise}, policies=LENIENT)
    run(feed)
    expected = expect(project, choose_by_header)
    unrouted = {at for at, output in expected["refused"].items() if not output}
    refused = {at: output for at, output in expected["refused"].items() if output}
    assert read_quarantine(feed) == refused
    raw = Path(feed.lake, "data", "github", "otherwise")
    there = {
        (row["partition"], row["offset"])
        for path in raw.rglob("*.parquet")
        for row in pq.ParquetFile(path).read(["partition", "offset"]).to_pylist()
    }
    assert there == (unrouted if landed else set())
    report = rescan_feed(feed)
    assert report.reconciled, report.problems
    code, printed = call("audit", "github", "--json")
    assert code == 0, printed
    assert sum(p["dropped"] for p in printed["partitions"]) == (0 if landed else len(unrouted))


def test_a_changed_row_of_an_output_is_noticed(project: FeedProject) -> None:
    """The oracle of the rescan: a row of one output in another's file, and a changed value."""
    produce(project, 60)
    feed = write_split_feed(project, policies=LENIENT, landing="{shared_files: false}")
    run(feed)
    (path, *_) = sorted(Path(feed.lake, "data", "github", "issues").rglob("*.parquet"))
    rows = pq.ParquetFile(path).read()
    changed = rows.set_column(rows.schema.get_field_index("n"), "n", pa.array([7] * rows.num_rows, pa.int64()))
    pq.write_table(changed, path, store_schema=False)
    report = rescan_feed(feed)
    assert not report.reconciled
    assert any("differs" in p.text for p in report.problems), report.problems


def test_entries_lost_from_the_ledger_show_in_each_output(project: FeedProject) -> None:
    """`issues` comes before the windows' folders in a listing of the feed's, and `push` behind them."""
    produce(project, 60)
    feed = write_split_feed(project, policies=LENIENT)
    run(feed)
    ledger = Path(feed.lake, "_sluice")
    copy = shutil.copytree(ledger, project.root / "copy")
    produce(project, 60, 1_700_010_000_000)
    run(feed)
    for output in COLUMNS:
        shutil.rmtree(ledger)
        shutil.copytree(copy, ledger)
        hidden = Path(feed.lake, "data", "github", *({*COLUMNS} - {output}))
        hidden.rename(project.root / "hidden")
        with pytest.raises(EntriesLost):
            run(feed)
        (project.root / "hidden").rename(hidden)


def test_a_contract_of_the_feed_itself_is_refused(project: FeedProject, call: Call) -> None:
    write_split_feed(project)
    code, printed = call("contract", "init", "github")
    assert code == 2, printed
    assert "github.push, github.issues" in printed
    for name, remedy in {"github": "github.push.contract.json", "github.stars": "push, issues"}.items():
        path = project.root / "feeds" / f"{name}.contract.json"
        path.write_text("{}")
        code, printed = call("feeds", "check")
        assert code == 2, printed
        assert remedy in " ".join(printed.split()), printed
        path.unlink()


def test_a_contract_is_proposed_and_tried_for_one_output(project: FeedProject, call: Call) -> None:
    """By its records alone: those of `push` break an expectation, and those of `issues` do not count."""
    produce(project, 600)
    write_split_feed(project, policies=LENIENT)
    expected = expect(project, choose_by_header)
    code, printed = call("contract", "init", "github.push", "--json")
    assert code == 0, printed
    assert printed["sample"]["landed"] == len(expected["push"])
    assert printed["sample"]["quarantined"] == sum(of == "push" for of in expected["refused"].values())
    assert {p["kwargs"]["column"] for p in printed["proposals"]} <= {"ref", "n", "kafka_key"}
    proposed = Path(printed["file"])
    assert proposed.name == "github.push.contract.proposed.json"
    proposed.rename(proposed.with_name("github.push.contract.json"))
    code, printed = call("contract", "check", "github.push", "--json")
    assert (code, printed["published"]) == (0, True), printed
    expectation = {"type": "expect_column_values_to_be_between", "kwargs": {"column": "n", "max_value": 99}}
    suite = {"name": "push", "expectations": [expectation], "meta": {"great_expectations_version": "1.24.1"}}
    (project.root / "feeds" / "github.push.contract.json").write_text(json.dumps(suite))
    code, printed = call("contract", "check", "github.push", "--json")
    (outcome,) = printed["expectations"]
    assert outcome["unexpected"] == sum(n > 99 for _, n in expected["push"].values())
    assert outcome["checked"] == len(expected["push"])
    code, printed = call("contract", "check", "github.issues")
    assert code == 2, printed
    assert "sluice contract init github.issues" in printed


def test_dead_letters_of_outputs_are_in_log_order(project: FeedProject, fresh_topic: Callable[..., str]) -> None:
    produce(project, 300)
    letters = fresh_topic(partitions=3)
    feed = write_split_feed(project, policies=LENIENT, dead_letters=f"{{topic: {letters}}}")
    run(feed)
    commit_feed(feed)
    sent: dict[int, list[int]] = {}
    for record in consume_topic(project.kafka, letters):
        headers = {h["key"]: h["value"] for h in record["headers"]}
        assert int(headers["sluice.partition"]) == record["partition"]
        sent.setdefault(record["partition"], []).append(int(headers["sluice.offset"]))
    assert all(offsets == sorted(offsets) for offsets in sent.values())
    expected = expect(project, choose_by_header)["refused"].keys()
    assert {(p, offset) for p, offsets in sent.items() for offset in offsets} == expected


def test_keys_of_all_outputs_are_typed(project: FeedProject) -> None:
    producer = KafkaProducer(bootstrap_servers=project.kafka.bootstrap)
    for i in range(60):
        key = b"no JSON" if i % 20 == 9 else json.dumps({"id": i}).encode()
        body = {"n": i, "ref": "r", "number": i}
        producer.send(project.topic, json.dumps(body).encode(), key, [(KIND, b"issues" if i % 3 else b"push")], i % 3)
    producer.close()
    path = project.root / "schemas" / "key.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}))
    key_section = "{format: json_schema, schema_file: schemas/key.json, wire_format: bare}"
    feed = write_split_feed(project, policies=LENIENT, key=key_section)
    run(feed)
    rows = [
        (path.parts[-4], row["key_id"], row["n"])
        for path in Path(feed.lake, "data").rglob("*.parquet")
        for row in pq.ParquetFile(path).read().to_pylist()
    ]
    expected = {(i, i) for i in range(60) if i % 20 != 9}
    assert {row[1:] for row in rows} == expected
    assert len(rows) == len(expected)
    assert {at[1] for at in read_quarantine(feed)} != set()
    report = rescan_feed(feed)
    assert (report.problems, report.compared) == ((), 57)


TOMBSTONE_SPLIT = {
    "by": {"field": "kind"},
    "into": {
        "push": {"schema": {"n": "int64"}},
        "issues": {"schema": {"n": "int64", "trace": "string header trace"}},
    },
    "tombstones": "all",
}


def produce_tombstones(project: FeedProject, count: int) -> None:
    """Write records of two kinds, of which a fifth are tombstones, some with a header that does not fit."""
    producer = KafkaProducer(bootstrap_servers=project.kafka.bootstrap, linger_ms=5)
    for i in range(count):
        value = None if i % 5 == 3 else json.dumps({"kind": ("push", "issues")[i % 2], "n": i}).encode()
        headers = [("trace", b"\xff" if i % 25 == 13 else b"t")]
        producer.send(project.topic, value, f"k{i % 40}".encode(), headers, i % 3, 1_700_000_000_000 + i * 1000)
    producer.close()


def expect_tombstones(project: FeedProject) -> tuple[dict[str, dict[Place, int | None]], set[Place]]:
    """Returns `n` by output and place, None for tombstones, and the tombstones that one output cannot read."""
    expected: dict[str, dict[Place, int | None]] = {"push": {}, "issues": {}}
    refused = set()
    for record in consume_topic(project.kafka, project.topic):
        at = record["partition"], record["offset"]
        if record["value"] is not None:
            body = json.loads(record["value"])
            expected[body["kind"]][at] = body["n"]
        elif record["headers"][0]["value"] == b"\xff":
            refused.add(at)
        else:
            for rows in expected.values():
                rows[at] = None
    return expected, refused


def read_numbers(feed: Feed) -> dict[str, dict[Place, int | None]]:
    return {output: {at: row[1] for at, row in read_output(feed, output).items()} for output in ("push", "issues")}


@pytest.fixture
def tombstones(project: FeedProject, monkeypatch: pytest.MonkeyPatch) -> FeedProject:
    monkeypatch.setitem(COLUMNS, "push", ("kafka_tombstone", "n"))
    monkeypatch.setitem(COLUMNS, "issues", ("kafka_tombstone", "n"))
    produce_tombstones(project, 300)
    return project


@pytest.mark.parametrize("shared", ["true", "false"])
def test_tombstones_of_all_outputs_land_in_each_or_in_none(tombstones: FeedProject, shared: str, call: Call) -> None:
    """One that an output cannot read is in no output. Merging and erasing count records, not rows."""
    project, landing = tombstones, f"{{shared_files: {shared}}}"
    feed = write_split_feed(project, TOMBSTONE_SPLIT, policies=LENIENT, landing=landing, limits="{records: 60}")
    for _ in range(6):
        run(feed)
    expected, refused = expect_tombstones(project)
    assert read_numbers(feed) == expected
    assert read_quarantine(feed) == dict.fromkeys(refused, "")
    report = rescan_feed(feed)
    assert (report.problems, report.compared) == ((), 300 - len(refused))
    code, printed = call("audit", "github", "--json")
    assert code == 0, printed
    landed, quarantined = (sum(p[name] for p in printed["partitions"]) for name in ("landed", "quarantined"))
    assert (landed, quarantined) == (300 - len(refused), len(refused))

    at = next(at for at, n in expected["push"].items() if n is None)
    code, printed = call("explain", "github", f"{project.topic}:{at[0]}:{at[1]}", "--json")
    assert code == 0, printed
    assert printed["text"].endswith("; also in issues") or printed["text"].endswith("; also in push")
    code, of_feed = call("check", "github", "2023-11-14T22:15", "--json")
    assert code == 0, of_feed
    code, of_push = call("check", "github.push", "2023-11-14T22:15", "--json")
    code, of_issues = call("check", "github.issues", "2023-11-14T22:15", "--json")
    assert of_feed["landed"] < of_push["landed"] + of_issues["landed"]
    assert not of_feed["landed_twice"]

    code, printed = call("compact", "github", "--json")
    assert code == 0, printed
    assert read_numbers(feed) == expected
    assert rescan_feed(feed).reconciled

    code, printed = call("erase", "github", "--where", "kafka_key = 'k3'", "--reason", "a test", "--yes")
    assert code == 0, printed
    erased = {(r["partition"], r["offset"]) for r in consume_topic(project.kafka, project.topic) if r["key"] == b"k3"}
    assert erased
    assert read_numbers(feed) == {of: {a: n for a, n in r.items() if a not in erased} for of, r in expected.items()}
    assert rescan_feed(feed).reconciled


def test_a_changed_tombstone_of_one_output_is_noticed(tombstones: FeedProject) -> None:
    feed = write_split_feed(tombstones, TOMBSTONE_SPLIT, policies=LENIENT, landing="{shared_files: false}")
    run(feed)
    for path in Path(feed.lake, "data", "github", "issues").rglob("*.parquet"):
        rows = pq.ParquetFile(path).read()
        keys = pa.compute.if_else(rows["kafka_tombstone"], b"other", rows["kafka_key"])
        pq.write_table(rows.set_column(rows.schema.get_field_index("kafka_key"), "kafka_key", keys), path)
    report = rescan_feed(feed)
    assert not report.reconciled
    assert any("differs from the landed row: kafka_key" in p.text for p in report.problems), report.problems


def test_tombstones_in_quarantine_land_in_all_outputs_once_they_may(tombstones: FeedProject, call: Call) -> None:
    """The former rule leads tombstones to `otherwise`."""
    former = {k: v for k, v in TOMBSTONE_SPLIT.items() if k != "tombstones"}
    feed = write_split_feed(tombstones, former, policies=LENIENT)
    run(feed)
    expected, refused = expect_tombstones(tombstones)
    assert len(read_quarantine(feed)) == 60
    feed = write_split_feed(tombstones, TOMBSTONE_SPLIT, policies=LENIENT)
    code, printed = call("quarantine", "replay", "github")
    assert code == 0, printed
    assert read_numbers(feed) == expected
    assert read_quarantine(feed) == dict.fromkeys(refused, "")
    assert rescan_feed(feed).reconciled
