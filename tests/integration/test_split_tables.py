"""Tables of the outputs of a split feed on a real Kafka, read by PyIceberg, deltalake and DuckDB alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyiceberg")
pytest.importorskip("deltalake")

import pyarrow.parquet as pq
from dagster import AssetCheckKey, AssetKey, DagsterInstance
from kafka import KafkaProducer

from sluice.assets.instance.instance import open_instance
from sluice.pipelines.feed.feed import Feed
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.project import Project
from tests.integration.canaries import read_everything
from tests.integration.conftest import Call
from tests.integration.support import FeedProject, rescan_feed
from tests.integration.test_protection import hash_text
from tests.integration.test_protection import produce as produce_records
from tests.integration.test_protection import write_feed as write_protected_feed
from tests.integration.test_split import (
    COLUMNS,
    KIND,
    LENIENT,
    SPLIT,
    Place,
    choose_by_header,
    expect,
    produce,
    read_output,
    read_quarantine,
    write_split_feed,
)
from tests.table_readers import DeltaReader, IcebergReader, Reader, read_by_duckdb

PLACE = ("kafka_partition", "kafka_offset")
HOURS = ("--from", "2023-11-14T22:00", "--to", "2023-11-14T23:00")


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(partitions=3))


def add_tables(root: Path, **tables: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the split rule with a table for each output: Iceberg with the quarantine's, and Delta."""
    catalog = {"type": "sql", "uri": f"sqlite:///{root}/catalog.db"}
    usual = {"push": {"iceberg": {"name": "gh.push", "catalog": catalog}, "quarantine": True}, "issues": {"delta": {}}}
    into: Any = SPLIT["into"]
    chosen = {name: {"table": table} for name, table in (usual | tables).items() if table is not None}
    return SPLIT | {"into": {name: output | chosen.get(name, {}) for name, output in into.items()}}


class Tables:
    """The tables of a project's outputs, by independent readers."""

    def __init__(self, project: FeedProject) -> None:
        self.project, lake = project, f"{project.root}/.sluice/lake"
        catalog = {"type": "sql", "uri": f"sqlite:///{project.root}/catalog.db"}
        self.readers: dict[str, Reader] = {
            "push": IcebergReader("gh.push", catalog),
            "issues": DeltaReader(f"{lake}/data/github/issues"),
        }
        self.refused: Reader = IcebergReader("gh.push_quarantine", catalog)
        self.windows: dict[str, Reader] = {
            "push": IcebergReader("gh.push_windows", catalog),
            "issues": DeltaReader(f"{lake}/tables/github.issues_windows"),
        }

    def read(self, output: str, snapshot: int | None = None) -> dict[Place, Any]:
        """Returns the rows of an output's table, by partition and offset."""
        reader, columns = self.readers[output], (*PLACE, *COLUMNS[output])
        newest = reader.list_snapshots()[-1] if snapshot is None else snapshot
        rows = reader.read_rows(newest, columns)
        if snapshot is None:
            assert read_by_duckdb(reader.list_files(newest), columns) == rows
        by_place = {row[:2]: row[2:] for row in rows}
        assert len(by_place) == len(rows), "a row is there twice"
        return by_place

    def check(self) -> None:
        """Check the newest snapshots against Kafka, and that each older one has rows of Kafka only, once."""
        expected = expect(self.project, choose_by_header)
        for output in COLUMNS:
            assert self.read(output) == expected[output]
            for snapshot in self.readers[output].list_snapshots():
                assert self.read(output, snapshot).items() <= expected[output].items()
        snapshots = self.refused.list_snapshots()
        refused = self.refused.read_rows(snapshots[-1], ("partition", "offset")) if snapshots else []
        assert sorted(refused) == sorted(at for at, of in expected["refused"].items() if of == "push")


def list_files(feed: Feed, output: str) -> set[str]:
    return {p.name for p in Path(feed.lake, "data", "github", output).rglob("*-b*.parquet")}


def test_each_output_has_its_table(project: FeedProject, call: Call) -> None:
    """Through landing, landing again, merging, a replay, expiry, and tables that are dropped and made again."""
    tables, rule = Tables(project), add_tables(project.root)
    settings = {"policies": LENIENT, "landing": "{shared_files: false}", "limits": "{records: 60}", "window": "1h"}
    produce(project, 300)
    write_split_feed(project, rule, **settings)
    for _ in range(4):
        code, printed = call("run", "github", "--no-dagster")
        assert code == 0, printed
    produce(project, 200, 1_700_010_000_000)
    write_split_feed(project, rule, **settings | {"limits": "{}"})
    code, printed = call("run", "github", "--no-dagster")
    assert code == 0, printed
    tables.check()
    code, printed = call("table", "status", "github", "--json")
    assert [(t["feed"], t["pending"]["files"]) for t in printed["outputs"]] == [
        ("github.push", 0),
        ("github.issues", 0),
    ]
    code, printed = call("compact", "github")
    assert code == 0, printed
    assert "table gh.push:" in printed
    assert "table data/github/issues:" in printed
    tables.check()
    code, printed = call("run", "github", "--no-dagster", "--window", "2023-11-14T22:00", "--replace")
    assert code == 0, printed
    tables.check()
    for words in (["table", "check", "github"], ["table", "check", "github.push"], ["audit", "github", "--table"]):
        code, printed = call(*words)
        assert code == 0, printed
    for output in COLUMNS:
        starts = tables.windows[output].read_rows(tables.windows[output].list_snapshots()[-1], ("window_start",))
        assert "2023-11-14 22:00" in str(starts[0][0])
    code, printed = call("table", "rebuild", "github.issues", "--yes", "--json")
    assert (code, printed["feed"], printed["created"]) == (0, "github.issues", True), printed
    tables.check()
    tables.readers["push"].drop()  # type: ignore[attr-defined]
    code, printed = call("table", "sync", "github", "--json")
    assert [(t["feed"], t["created"]) for t in printed["outputs"]] == [("github.push", True), ("github.issues", False)]
    tables.check()
    code, printed = call("table", "rebuild", "github", "--yes")
    assert code == 0, printed
    tables.check()


def test_tables_have_protected_values_only(project: FeedProject, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    """Values of addresses, keys and headers are in no file; hashes in the tables are those that Python makes."""
    kinds = ["buyers", "sellers"] * 6 + ["buyers"]
    addresses = [f"canary{n}@example.com" for n in range(len(kinds))]
    values = [
        {"email": e, "kind": k, "user": {"ip": f"canary-ip-{n}"}}
        for n, (e, k) in enumerate(zip(addresses, kinds, strict=True))
    ]
    values[-1]["n"] = "canary-n"  # an integer by its schema
    records = [(b"canary-key", json.dumps(v).encode(), [("auth", b"canary-auth")]) for v in values]
    produce_records(project, records, stamp=1_700_000_000_000)
    table = {"delta": {}, "quarantine": True}
    schemas = {"buyers": {"email": "string", "user": "struct<ip:string>"}, "sellers": {"email": "string"}}
    into = {name: {"schema": schema | {"n": "int64"}, "table": table} for name, schema in schemas.items()}
    rules = {"email": {"hmac": "${PROTECT_KEY}"}, "*.ip": "drop", "_key": {"keep_last": 2}, "_headers.auth": "drop"}
    settings = {"schema": "", "protect": json.dumps(rules), "policies": LENIENT}
    split = {"by": {"field": "kind"}, "into": into}
    write_protected_feed(project, monkeypatch, "github", split=json.dumps(split), **settings)
    assert call("run", "github")[0] == 0
    for output in into:
        reader = DeltaReader(f"{project.root}/.sluice/lake/data/github/{output}")
        snapshot = reader.list_snapshots()[-1]
        columns = ("email", "kafka_key")
        rows = reader.read_rows(snapshot, columns)
        own = [hash_text(e) for e, k in zip(addresses[:-1], kinds[:-1], strict=True) if k == output]
        assert [email for email, _ in rows] == sorted(own)
        assert {key for _, key in rows} == {b"****ey"}
        assert read_by_duckdb(reader.list_files(snapshot), columns) == rows
    quarantine = DeltaReader(f"{project.root}/.sluice/lake/quarantine/github/buyers")
    ((value, withheld),) = quarantine.read_rows(quarantine.list_snapshots()[-1], ("value", "withheld_bytes"))
    assert (value, withheld) == (None, len(records[-1][1] or b""))
    written = [*read_everything(project.root / ".sluice")]
    assert [name for name, data in written if b"canary" in data] == []
    assert any(hash_text(addresses[0]).encode() in data for name, data in written if name.endswith("rows"))


def test_a_replay_and_expiry_are_in_the_tables_of_their_outputs(project: FeedProject, call: Call) -> None:
    tables = Tables(project)
    produce(project, 300)
    write_split_feed(project, add_tables(project.root), policies=LENIENT, window="1h")
    assert call("run", "github", "--no-dagster")[0] == 0
    before = tables.read("issues")
    rule = add_tables(project.root)
    rule["into"]["issues"]["values"] = ["issues", "issue_comment", "star"]
    write_split_feed(project, rule, policies=LENIENT, window="1h")
    code, printed = call("quarantine", "replay", "github")
    assert code == 0, printed
    replayed = tables.read("issues")
    assert before.items() < replayed.items()
    assert any(n % 5 == 3 for _, n in replayed.values()), "the fourth of five is a star"
    tables_of_push = tables.readers["push"].list_snapshots()
    code, printed = call("expire", "github", "--before", "2023-11-14T23:00", "--reason", "old", "--yes")
    assert code == 0, printed
    assert tables.read("push") == tables.read("issues") == {}
    assert len(tables.read("push", tables_of_push[-1])) > 0, "time travel finds its files"
    assert call("table", "check", "github")[0] == 0


def test_outputs_take_in_new_fields_each_for_itself(project: FeedProject, call: Call) -> None:
    """With `on_drift: evolve`, a field of one kind becomes a column of its output and table alone; wider values wait in
    quarantine for the column that holds them."""

    def write_records(first: int, *, later: bool) -> None:
        producer = KafkaProducer(bootstrap_servers=project.kafka.bootstrap)
        for i in range(first, first + 60):
            kind = ("push", "issues")[i % 2]
            body: dict[str, Any] = {"ref": f"r{i}", "n": i} if kind == "push" else {"number": i, "n": i}
            if later:
                body |= {"forced": i % 4 == 0} if kind == "push" else {"labels": [{"name": f"l{i}"}]}
                if kind == "issues" and i % 5 == 0:
                    body["n"] = 2**40 + i
            producer.send(
                project.topic,
                json.dumps(body).encode(),
                None,
                [(KIND, kind.encode())],
                i % 3,
                1_700_000_000_000 + first * 60_000,
            )
        producer.close()

    catalog = {"type": "sql", "uri": f"sqlite:///{project.root}/catalog.db"}
    rule = add_tables(project.root, issues={"iceberg": {"name": "gh.issues", "catalog": catalog}})
    rule["into"]["issues"]["schema"] = {"number": "int64", "n": "int32"}
    policies = "{on_drift: evolve, quarantine_limit: {share: 1}}"
    feed = write_split_feed(project, rule, policies=policies, window="1h")
    for first, later in ((0, False), (60, True), (120, True)):
        write_records(first, later=later)
        code, printed = call("run", "github", "--no-dagster")
        assert code == 0, printed
    code, printed = call("quarantine", "replay", "github")
    assert code == 0, printed
    code, printed = call("quarantine", "list", "github", "--json")
    assert (code, printed["records"]) == (0, 0), printed

    folders = {o: [*Path(feed.lake, "data", "github", o).rglob("*-b*.parquet")] for o in COLUMNS}
    names = {o: {n for p in paths for n in pq.read_schema(p).names} for o, paths in folders.items()}
    assert "forced" in names["push"] - names["issues"]
    assert "labels" in names["issues"] - names["push"]
    push, issues = (IcebergReader(name, catalog) for name in ("gh.push", "gh.issues"))
    rows = push.read_rows(push.list_snapshots()[-1], ("n", "forced"))
    assert sorted(rows) == sorted((n, n % 4 == 0 if n >= 120 else None) for n in range(0, 180, 2))
    wide = {n: 2**40 + n if n >= 60 and n % 5 == 0 else n for n in range(1, 180, 2)}
    assert dict(issues.read_rows(issues.list_snapshots()[-1], ("number", "n"))) == wide
    report = rescan_feed(feed)
    assert (report.problems, report.compared) == ((), 180)


def test_files_go_by_the_tables_of_their_output(project: FeedProject, call: Call) -> None:
    """Only `push` has a table: replaced files of `issues` go at once, and those of `push` after its snapshots. A sync
    of one table leaves the notes of the other's files."""
    settings = {"policies": LENIENT, "landing": "{shared_files: false}", "window": "1h"}
    produce(project, 100)
    feed = write_split_feed(project, add_tables(project.root, issues=None), **settings)
    assert call("run", "github", "--no-dagster")[0] == 0
    first = {output: list_files(feed, output) for output in COLUMNS}
    again = ("run", "github", "--no-dagster", "--window", "2023-11-14T22:00", "--replace")
    assert call(*again)[0] == 0
    assert first["issues"].isdisjoint(list_files(feed, "issues"))
    assert first["push"] < list_files(feed, "push")
    assert call("audit", "github", "--table")[0] == 0
    write_split_feed(project, add_tables(project.root), **settings)
    assert call("table", "sync", "github.issues")[0] == 0
    second = {output: list_files(feed, output) for output in COLUMNS}
    assert call(*again)[0] == 0
    assert second["issues"] < list_files(feed, "issues"), "there is a table now"
    without_history = add_tables(project.root, issues={"delta": {}, "keep_snapshots": "0s"})
    write_split_feed(project, without_history, **settings)
    time.sleep(0.01)
    assert call("table", "sync", "github.issues")[0] == 0
    assert second["issues"].isdisjoint(list_files(feed, "issues")), "no snapshot names them"
    assert second["push"] < list_files(feed, "push"), "they belong to the other table"
    table = without_history["into"]["push"]["table"] | {"keep_snapshots": "0s"}
    write_split_feed(project, add_tables(project.root, push=table), **settings)
    assert call("table", "sync", "github.push")[0] == 0
    assert second["push"].isdisjoint(list_files(feed, "push"))
    Tables(project).check()
    assert call("audit", "github", "--table")[0] == 0


def test_tables_with_swapped_names_are_refused(project: FeedProject, call: Call) -> None:
    """The oracle of "its rows only": another output's table, of the same ledger, is not taken."""
    catalog = {"type": "sql", "uri": f"sqlite:///{project.root}/catalog.db"}
    names = [{"iceberg": {"name": name, "catalog": catalog}} for name in ("gh.push", "gh.issues")]
    produce(project, 100)
    write_split_feed(project, add_tables(project.root, push=names[0], issues=names[1]), policies=LENIENT)
    assert call("run", "github", "--no-dagster")[0] == 0
    write_split_feed(project, add_tables(project.root, push=names[1], issues=names[0]), policies=LENIENT)
    produce(project, 100, 1_700_000_900_000)
    code, printed = call("run", "github", "--no-dagster")
    assert code == 0, printed
    printed = " ".join(printed.split())
    assert "table gh.issues is there and belongs to github.issues, not to feed github.push" in printed
    assert "table gh.push is there and belongs to github.push, not to feed github.issues" in printed
    code, printed = call("table", "sync", "github.push")
    assert code == 3, printed
    write_split_feed(project, add_tables(project.root, push=names[0], issues=names[1]), policies=LENIENT)
    code, printed = call("table", "sync", "github")
    assert code == 0, printed
    assert call("table", "check", "github")[0] == 0


def test_one_broken_table_leaves_the_other_up_to_date(project: FeedProject, call: Call) -> None:
    produce(project, 100)
    feed = write_split_feed(project, add_tables(project.root), policies=LENIENT)
    (project.root / "catalog.db").write_bytes(b"no database")
    code, printed = call("run", "github", "--no-dagster")
    assert code == 0, printed
    assert "the table is not up to date: " in printed
    tables = Tables(project)
    assert tables.read("issues") == read_output(feed, "issues")
    (project.root / "catalog.db").unlink()
    assert call("table", "sync", "github")[0] == 0
    tables.check()


def test_problems_of_tables_name_the_output(project: FeedProject, call: Call) -> None:
    def check(rule: Mapping[str, Any], **settings: Any) -> str:
        path = project.root / "feeds" / "github.yaml"
        path.parent.mkdir(exist_ok=True)
        lines = {"topics": project.topic, "start": "earliest", "format": "json", "split": json.dumps(rule)} | settings
        path.write_text("".join(f"{k}: {v}\n" for k, v in lines.items()) + "kafka: {bootstrap: '127.0.0.1:1'}\n")
        code, printed = call("feeds", "check")
        assert code == 2, printed
        return " ".join(printed.split())

    printed = check(SPLIT, table="{delta: {}}")
    assert "table: names a table for all rows of a feed with `split`" in printed
    assert "move it to `split.into.NAME.table`" in printed
    same = {"iceberg": {"name": "gh.all"}}
    printed = check(add_tables(project.root, push=same, issues=same))
    assert "split.into.issues.table.iceberg.name: `gh.all` would be a table of feed `github.issues` and" in printed
    printed = check(add_tables(project.root, push=same, issues={"iceberg": {"name": "gh.all_windows"}}))
    assert "`gh.all_windows` would be a table of feed `github.issues` and of feed `github.push`" in printed
    printed = check(add_tables(project.root, push={"iceberg": {"name": "push"}}))
    assert "split.into.push.table.iceberg.name: is not namespace.table" in printed
    assert "write namespace.table" in printed
    rule = add_tables(project.root)
    rule["into"]["issues"]["schema"] = {"n": "uint64"}
    printed = check(rule)
    assert "split.into.issues.table: cannot hold n, which is uint64: Delta does not have that type" in printed
    (project.root / "feeds" / "other.yaml").write_text(
        "topics: other\nstart: earliest\ntable: {iceberg: {name: gh.one}}\nkafka: {bootstrap: '127.0.0.1:2'}\n"
    )
    printed = check(add_tables(project.root, push={"iceberg": {"name": "gh.one"}}))
    assert "would be a table of feed `" in printed
    assert "github.push" in printed


def test_each_table_is_an_asset_of_its_output(project: FeedProject, call: Call) -> None:
    produce(project, 300, int(time.time() * 1000) - 3_600_000)
    write_split_feed(project, add_tables(project.root), policies=LENIENT)
    code, printed = call("run", "github")
    assert code == 0, printed
    feed = Project(project.root).feed("github")
    with open_instance(Project(project.root)) as instance:
        for output in COLUMNS:
            key = AssetKey(["github", output, "table"])
            (record,) = instance.fetch_materializations(key, limit=1).records
            assert record.asset_materialization
            rows = record.asset_materialization.metadata["dagster/row_count"].value
            assert rows == len(read_output(feed, output))
            assert all(list_results(instance, AssetCheckKey(key, "matches_ledger")))
    Tables(project).check()
    assert read_quarantine(feed)


def list_results(instance: DagsterInstance, key: AssetCheckKey) -> Iterator[bool]:
    records = instance.event_log_storage.get_asset_check_execution_history(key, limit=50)
    events = [r.event.dagster_event for r in records if r.event]
    assert events
    return (e.asset_check_evaluation_data.passed for e in events if e)
