"""Protected fields: canaries in values, keys and headers are in no byte that a feed's whole life writes; hashes are
Python's own, and join feeds of different formats.

The course: a landing that is killed after its tasks, its resumption, dead letters, replay, --replace, compaction,
republish, reports, rescans, tables, Dagster's record of the run, and the output of each command with debug logs.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import sqlite3
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kafka import KafkaProducer

from sluice.pipelines.feed.feed import Feed
from sluice.resources.lake import open_lake
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.canaries import Canaries, find_canaries, read_everything
from tests.integration.conftest import Call
from tests.integration.support import FeedProject, consume_topic, list_files, query_files, rescan_feed, run

KEY = "a key of which nobody knows: 7f3a91"
SCHEMA = {
    "id": "int64 not null",
    "email": "string",
    "number": "int64",
    "user": "struct<ip:string, name:string, ssn:string>",
    "card": "string",
    "lines": "list<struct<sku:string, ssn:string>>",
    "tags": "map<string, string>",
    "payload": "json",
    "plain": "string",
}
PROTECT = {
    "email": {"hmac": "${PROTECT_KEY}"},
    "number": {"hmac": "${PROTECT_KEY}"},
    "user.ip": "drop",
    "user.name": {"hmac": "${PROTECT_KEY}"},
    "card": {"keep_last": 4},
    "*.ssn": "drop",
    "*.token": {"hmac": "${PROTECT_KEY}"},
    "_key": {"hmac": "${PROTECT_KEY}"},
    "_headers.auth": "drop",
    "_headers.x-user": {"hmac": "${PROTECT_KEY}"},
}
SPLIT = {"by": {"header": "kind"}, "into": {"people": {"schema": SCHEMA}, "others": {"schema": {"id": "int64"}}}}
"""With a protected header: values that lead to no output are canaries."""
CONTRACT = {
    "expectations": [
        {
            "type": "expect_column_values_to_match_regex",
            "kwargs": {"column": "email", "regex": "@"},
            "severity": "critical",
        },
        {"type": "expect_column_values_to_be_unique", "kwargs": {"column": "email"}, "severity": "warning"},
        {
            "type": "expect_column_values_to_be_in_set",
            "kwargs": {"column": "card", "value_set": ["x"]},
            "severity": "warning",
        },
    ]
}
KILLED = """
import os, sys
from pathlib import Path
from sluice.pipelines.landing import proof
from sluice.pipelines.feed.load import load_feed
from tests.integration.support import run
proof.prove = lambda *_: os._exit(9)
run(load_feed(Path(sys.argv[1]), os.environ))
"""
COMMANDS = """
import json, sys
from sluice.cli.main import main
print(json.dumps([main(a) for a in json.loads(sys.argv[1])]))
"""
Record = tuple[bytes | None, bytes | None, list[tuple[str, bytes]]]


def hash_text(text: str) -> str:
    return hmac.new(KEY.encode(), text.encode(), hashlib.sha256).hexdigest()


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(partitions=2))


def write_feed(project: FeedProject, monkeypatch: pytest.MonkeyPatch, name: str = "people", **settings: Any) -> Feed:
    from sluice.pipelines.feed.load import load_feed

    monkeypatch.setenv("PROTECT_KEY", KEY)
    settings = {"format": "json", "schema": json.dumps(SCHEMA), "protect": json.dumps(PROTECT)} | settings
    (project.root / "feeds").mkdir(exist_ok=True)
    path = project.root / "feeds" / f"{name}.yaml"
    lines = {"topics": project.topic, "start": "earliest", "group": f"g-{project.topic}-{name}"} | settings
    text = f"kafka: {{bootstrap: '{project.kafka.bootstrap}'}}\n"
    path.write_text(text + "".join(f"{k}: {v}\n" for k, v in lines.items()))
    return load_feed(path, os.environ)


def produce(project: FeedProject, records: list[Record], topic: str = "", stamp: int | None = None) -> None:
    producer = KafkaProducer(bootstrap_servers=project.kafka.bootstrap)
    for n, (key, value, headers) in enumerate(records):
        producer.send(topic or project.topic, value, key, headers, n % 2, stamp)
    producer.close()


def choose_outputs(records: list[Record], canaries: Canaries) -> list[Record]:
    """Records with a header that leads to an output, to none, or is missing."""
    kinds = [*["people"] * 12, "others", canaries.take(), canaries.take(), ""]
    return [(k, v, [*h, *[("kind", o.encode())][: len(o)]]) for (k, v, h), o in zip(records, kinds, strict=True)]


def build_records(canaries: Canaries) -> list[Record]:
    """Good records, tombstones, and records that break each stage, with canaries in all of them."""
    values: list[bytes | None] = [canaries.make_value(id=n, number=n) for n in range(6)]
    values += [None, canaries.take().encode(), b'{"email": "' + canaries.take().encode()]
    values += [
        canaries.make_value(id=canaries.take()),
        canaries.make_value(id=None),
        canaries.make_value(user=canaries.take()),
    ]
    values += [canaries.make_value(email=canaries.take()) for _ in range(2)]  # these break the contract
    values += [b"\xff" + canaries.make_value(), canaries.make_value(number=canaries.take())]
    return [(canaries.make_key(), value, canaries.make_headers()) for value in values]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "otherwise", "encrypts"),
    [
        ("processes", None, False),
        pytest.param("spark", None, True, marks=pytest.mark.spark),
        ("processes", "quarantine", False),
        ("processes", "drop", True),
    ],
)
def test_no_canary_is_written_anywhere(
    project: FeedProject,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    otherwise: str | None,
    encrypts: bool,
    fresh_topic: Callable[..., str],
) -> None:
    """With `otherwise`, the feed has `split`."""
    canaries = Canaries()
    letters, back = fresh_topic(partitions=1), fresh_topic(partitions=2)
    stamp = 1_700_000_000_000
    records = build_records(canaries)
    produce(project, choose_outputs(records, canaries) if otherwise else records, stamp=stamp)
    (project.root / "feeds").mkdir()
    dataset, has_table = "people.people" if otherwise else "people", engine == "processes" and not otherwise
    (project.root / "feeds" / f"{dataset}.contract.json").write_text(json.dumps(CONTRACT))
    split = {"split": json.dumps(SPLIT | {"otherwise": otherwise}), "schema": ""} if otherwise else {}
    protect: dict[str, Any] = PROTECT | {"_headers.kind": {"hmac": "${PROTECT_KEY}"}}
    protect |= {"_quarantine": {"encrypt": "${PROTECT_KEY}"}} if encrypts else {}
    write_feed(
        project,
        monkeypatch,
        dead_letters=f"{{topic: {letters}}}",
        policies="{quarantine_limit: {share: 1}}",
        engine=engine,
        table="{delta: {}, quarantine: true}" if has_table else "",
        protect=json.dumps(protect),
        **split,
    )
    environ = os.environ | {"SLUICE_ENGINE": engine}
    environ.pop("DAGSTER_HOME", None)
    path = project.root / "feeds" / "people.yaml"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=environ, check=False)
    assert killed.returncode == 9, "the landing died after its tasks"
    at = f"{project.topic}:0"
    days = [
        ["plan", "people", "--debug"],
        ["run", "people", "--debug"],
        ["quarantine", "list", "people", "--json"],
        ["quarantine", "show", "people"],
        ["quarantine", "show", "people", "--json"],
        ["quarantine", "replay", "people", "--debug"],
        ["peek", f"{at}:0", "-n", "20"],
        ["peek", f"{at}:0", "-n", "20", "--json"],
        ["explain", "people", f"{at}:4"],
        ["contract", "check", "people", "--json"] if not otherwise else ["status"],
        ["contract", "check", "people"] if not otherwise else ["metrics", "people"],
        ["audit", "people", "--rescan", "--debug", "--json"],
        ["run", "people", "--replace", "--offsets", f"{at}:2-6", "--debug"],
        ["compact", "people", "--debug"],
        ["republish", "people", "--topic", back, "--offsets", f"{at}:0-8", "--id", "again", "--yes"]
        if not otherwise
        else ["files", "people.others", "--window", "2023-11-14T22", "--json"],
        ["audit", "people", "--rescan", "--hashes", "--strict", "--json"],
        ["report", "people", "--output", "report.html"],
        ["check", dataset, "2023-11-14T22"],
        ["check", dataset, "2023-11-14T22", "--json"],
        ["report", dataset, "2023-11-14T22", "--output", "report.html"],
        ["files", dataset, "--window", "2023-11-14T22", "--json"],
        ["status", "--json"],
        ["feeds", "list", "--json"],
        ["table", "status", "people"] if has_table else ["status"],
        ["doctor", "--json"],
    ]
    process = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(days)],
        cwd=project.root,
        env=environ,
        capture_output=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr.decode()[-3000:]
    codes = dict(zip(map(" ".join, days), json.loads(process.stdout.splitlines()[-1]), strict=True))
    failed = {command: code for command, code in codes.items() if code}
    assert failed == {}, process.stdout.decode()[-3000:] + process.stderr.decode()[-3000:]
    withheld = b"can land from Kafka alone: the feed protects fields" in b" ".join(process.stdout.split())
    assert withheld is not encrypts

    contents = [*read_everything(project.root), ("stdout", process.stdout), ("stderr", process.stderr)]
    sent = [r for topic in (letters, back) for r in consume_topic(project.kafka, topic)]
    contents += [("Kafka", repr(sent).encode())]
    forms = [*canaries.list_forms(), KEY.encode(), KEY.encode().hex().encode(), base64.b64encode(KEY.encode())]
    assert find_canaries(contents, forms) == set()
    searched = ("/log/", "/quarantine/", "/data/", "report.html", ".db", "stdout", "Kafka", "rows")
    names = {name for name, _ in contents}
    assert [text for text in searched if not any(text in name for name in names)] == []
    expected = {True} if otherwise else {True, False}
    assert {any(h["key"] == "sluice.reason" for h in r["headers"] or ()) for r in sent} == expected
    assert any(b"visible-extra" in data for name, data in contents if "rows" in name), "the search reads columns"


def test_the_search_detects_canaries_in_each_kind_of_file(tmp_path: Path) -> None:
    canaries = Canaries()
    text = canaries.take()
    table = pa.table({"a": pa.array([[{"key": "k", "value": text.encode()}]])})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd")
    pq.write_table(pa.table({"a": [text] * 1000}), tmp_path / "b.parquet", compression="gzip")
    (tmp_path / "c").write_text(base64.b64encode(b"ab" + text.encode()).decode())
    (tmp_path / "d").write_bytes(pa.compress(f"so {text} it is".encode(), "zstd", asbytes=True))
    (tmp_path / "e").write_text(text.encode().hex())
    with sqlite3.connect(tmp_path / "f.db") as db:
        db.execute("create table t (x blob)")
        db.execute("insert into t values (?)", (zlib.compress(text.encode()),))
    lines = find_canaries([*read_everything(tmp_path)], [*canaries.list_forms()])
    with_canary = {Path(line.split()[0].rstrip(":")).name for line in lines}
    assert with_canary == {"a.parquet", "b.parquet", "c", "d", "e", "f.db"}


def test_the_printed_remedy_lands_quarantined_records_again(
    project: FeedProject, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    value = json.dumps({"id": 1, "email": "no address", "card": "4111111111111234"}).encode()
    produce(project, [(b"ann", value, [("auth", b"secret")])] * 3)
    (project.root / "feeds").mkdir()
    contract = project.root / "feeds" / "people.contract.json"
    contract.write_text(json.dumps(CONTRACT))
    write_feed(project, monkeypatch, policies="{quarantine_limit: {share: 1}}")
    assert call("run", "people")[0] == 0
    contract.unlink()
    code, replayed = call("quarantine", "replay", "people", "--json")
    assert (code, replayed["tried"], replayed["landed"], replayed["withheld"]) == (0, 3, 0, 3)
    _, printed = call("quarantine", "show", "people")
    assert f"{len(value)} bytes, withheld" in " ".join(printed.split())
    _, text = call("quarantine", "replay", "people")
    (command,) = re.findall(r"sluice (run people --replace(?: --offsets \S+)+)", " ".join(text.split()))
    assert call(*command.split())[0] == 0
    feed = write_feed(project, monkeypatch, policies="{quarantine_limit: {share: 1}}")
    columns = "email, card, kafka_key, len(kafka_headers) as headers"
    rows = query_files(feed, f"select {columns} from read_parquet($files)", list_files(feed)).to_pylist()
    assert (
        rows
        == [
            {"email": hash_text("no address"), "card": "****1234", "kafka_key": hash_text("ann").encode(), "headers": 0}
        ]
        * 3
    )
    code, audited = call("audit", "people", "--rescan", "--json")
    assert (code, audited["compared"]) == (0, 3)


def test_rescan_finds_rows_that_are_not_protected(project: FeedProject, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with unprotected values differs from what its rules make of the log; without the key none is compared."""
    produce(project, [(b"ann", b'{"id": 1, "email": "ann@example.com"}', [])])
    feed = write_feed(project, monkeypatch)
    run(feed)
    report = rescan_feed(feed)
    assert (report.problems, report.compared) == ((), 1)
    monkeypatch.setattr(sys.modules[__name__], "KEY", "another key of which nobody knows")
    other = write_feed(project, monkeypatch)
    report = rescan_feed(other)
    assert (report.problems, report.compared, report.not_comparable) == ((), 0, 1)
    (path,) = list_files(feed)
    lake = open_lake(feed)
    file = Path(lake.locate(path))
    rows = pq.read_table(file)
    clear = rows.set_column(rows.schema.get_field_index("email"), "email", pa.array(["ann@example.com"]))
    file.unlink()
    pq.write_table(clear, file)
    monkeypatch.undo()
    assert any("differs from the landed row: email" in p.text for p in rescan_feed(feed).problems)


def test_outputs_and_raw_records_are_protected(project: FeedProject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes of one key join outputs; raw records without an output have protected keys and headers."""
    kinds = ["buyers", "sellers", "others"]
    records = [(b"ann", json.dumps({"email": "ann@x", "kind": k}).encode(), [("auth", b"s")]) for k in kinds]
    produce(project, records)
    rules = {"_key": {"hmac": "${PROTECT_KEY}"}, "_headers.auth": "drop"}
    into = {k: {"schema": {"email": "string"}} for k in kinds[:2]}
    split = {"by": {"field": "kind"}, "into": into, "otherwise": "raw"}
    feed = write_feed(project, monkeypatch, split=json.dumps(split), schema="", protect=json.dumps(rules))
    run(feed)
    rows = {path.split("/")[2]: pq.read_table(open_lake(feed).locate(path)).to_pylist() for path in list_files(feed)}
    assert {output: len(own) for output, own in rows.items()} == {"buyers": 1, "sellers": 1, "otherwise": 1}
    key = hash_text("ann").encode()
    assert [rows[k][0]["kafka_key"] for k in kinds[:2]] == [key, key]
    (raw,) = rows["otherwise"]
    assert (raw["key"], raw["headers"], json.loads(raw["value"])["email"]) == (key, [], "ann@x")
    report = rescan_feed(feed)
    assert (report.problems, report.compared, report.not_comparable) == ((), 3, 0)
    split["otherwise"] = "quarantine"
    rules |= {"email": {"hmac": "${PROTECT_KEY}"}, "kind": "drop"}
    into["buyers"]["schema"]["kind"] = "string"
    produce(project, [(key, (value or b"").replace(b"others", b"unknown"), headers) for key, value, headers in records])
    feed = write_feed(project, monkeypatch, split=json.dumps(split), schema="", protect=json.dumps(rules))
    run(feed)
    paths = [p for p in list_files(feed) if "/otherwise/" not in p]
    hashes = {row.get("email") for p in paths for row in pq.read_table(open_lake(feed).locate(p)).to_pylist()}
    assert hashes == {"ann@x", hash_text("ann@x")}, "rows of before stay as they are"
    report = rescan_feed(feed)
    assert (report.problems, report.compared, report.not_comparable) == ((), 5, 0)
    written = [*read_everything(project.root / ".sluice")]
    assert not any(b"kind = unknown" in data for _, data in written), "a reason quotes no protected value"
    assert any(b"kind has another value" in data for _, data in written)


@pytest.mark.parametrize(
    ("rules", "otherwise", "message"),
    [
        ({"emial": "drop"}, "drop", "protect: has emial, which is no field of the schema → did you mean `email`?"),
        ({"email": "drop", "id": "drop"}, "drop", "split.into.b.protect: drops all columns"),
        ({"email": "drop"}, "raw", "split.otherwise: is `raw`, whose values have no fields, with a rule for email"),
        ({"c": "drop"}, "drop", "split.into.c.protect: has c under `format: raw`"),
        ({"email": {"hmac": "short"}}, "drop", "protect.email"),
    ],
)
def test_rules_that_no_output_can_follow_are_refused(
    project: FeedProject, monkeypatch: pytest.MonkeyPatch, call: Call, rules: Any, otherwise: str, message: str
) -> None:
    into: dict[str, Any] = {"a": {"schema": {"id": "int64", "email": "string", "x": "json"}}}
    into["b"] = {"schema": {"id": "int64"}}
    into |= {"c": {"format": "raw"}} if "c" in rules else {}
    split = json.dumps({"by": {"header": "kind"}, "into": into, "otherwise": otherwise})
    with pytest.raises(Exception, match=r"people\.yaml"):
        write_feed(project, monkeypatch, split=split, schema="", protect=json.dumps(rules))
    code, printed = call("feeds", "check")
    assert code == 2, printed
    assert message in " ".join(printed.split()), printed


def test_encrypted_records_of_the_quarantine_land_after_a_fix(
    project: FeedProject, monkeypatch: pytest.MonkeyPatch, call: Call, fresh_topic: Callable[..., str]
) -> None:
    """Key, headers and value are as they were sent; another key, and another record's text, decrypt nothing."""
    letters = fresh_topic(partitions=1)
    sent = [{"id": n, "email": f"no address {n}", "card": "4111111111111234"} for n in range(6)]
    produce(project, [(b"ann", json.dumps(v).encode(), [("auth", b"secret"), ("x-user", b"ann")]) for v in sent])
    (project.root / "feeds").mkdir()
    contract = project.root / "feeds" / "people.contract.json"
    contract.write_text(json.dumps(CONTRACT))
    protect = json.dumps(PROTECT | {"_quarantine": {"encrypt": "${PROTECT_KEY}"}})
    settings = {"policies": "{quarantine_limit: {share: 1}}", "protect": protect}
    settings |= {"dead_letters": f"{{topic: {letters}}}"}
    write_feed(project, monkeypatch, **settings)
    assert call("run", "people")[0] == 0
    assert {r["value"] for r in consume_topic(project.kafka, letters)} == {None}
    assert call("audit", "people", "--rescan", "--strict")[0] == 0
    _, printed = call("quarantine", "show", "people")
    assert f"{len(json.dumps(sent[0]))} bytes, encrypted" in " ".join(printed.split())
    _, document = call("quarantine", "show", "people", "--json")
    assert {r["withheld_bytes"] for r in document["records"]} == {len(json.dumps(sent[0]))}
    _, checked = call("check", "people", "--json")
    samples = [s for group in checked["reasons_of_quarantine"] for s in group["samples"]]
    assert {(s["size"], s["excerpt"]) for s in samples} == {(len(json.dumps(sent[0])), None)}
    assert "not shown: the feed protects fields" in " ".join(call("check", "people")[1].split())
    monkeypatch.setattr(sys.modules[__name__], "KEY", "another key of which nobody knows")
    write_feed(project, monkeypatch, **settings)
    contract.unlink()
    code, replayed = call("quarantine", "replay", "people", "--json")
    assert (code, replayed["landed"], replayed["withheld"]) == (0, 0, 6)
    monkeypatch.undo()
    contract.write_text(
        json.dumps(
            {"expectations": [{**CONTRACT["expectations"][0], "kwargs": {"column": "email", "regex": "[0-3]$"}}]}
        )
    )
    feed = write_feed(project, monkeypatch, **settings)
    code, replayed = call("quarantine", "replay", "people", "--json")
    assert (code, replayed["tried"], replayed["landed"], replayed["withheld"]) == (0, 6, 4, 0)
    rows = query_files(
        feed, "select email, kafka_key, kafka_headers from read_parquet($files) order by id", list_files(feed)
    )
    headers = [{"key": "x-user", "value": hash_text("ann").encode()}]
    assert rows.to_pylist() == [
        {"email": hash_text(v["email"]), "kafka_key": hash_text("ann").encode(), "kafka_headers": headers}
        for v in sent[:4]
    ]
    written = [*read_everything(project.root)]
    assert not any(b"no address" in data for _, data in written), "those that stay are encrypted again"
    assert call("audit", "people", "--rescan", "--strict")[0] == 0
    contract.unlink()
    code, replayed = call("quarantine", "replay", "people", "--json")
    assert (code, replayed["landed"]) == (0, 2)
