"""Protected fields: canaries in values, keys and headers are in no byte that a feed's whole life writes; hashes are
Python's own, and join feeds of different formats.

The course: a landing that is killed after its tasks, its resumption, dead letters, replay, --replace, compaction,
republish, reports, rescans, tables, Dagster's record of the run, and the output of each command with debug logs.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import hmac
import io
import json
import os
import secrets
import sqlite3
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kafka import KafkaProducer

from sluice.pipelines.feed.feed import Feed
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.support import (
    FeedProject,
    consume_topic,
)

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
from sluice.pipelines.batch import carry_out
from sluice.pipelines.feed.load import load_feed
from tests.integration.support import run
carry_out.prove = lambda *_: os._exit(9)
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


class Canaries:
    """Makes unique texts, and remembers them."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def take(self) -> str:
        self.texts.append(f"canary{secrets.token_hex(8)}")
        return self.texts[-1]

    def make_value(self, **other: Any) -> bytes:
        """A record's value with a canary in each protected field, and unknown fields at several depths."""
        own = {
            "id": 1,
            "email": f"{self.take()}@example.com",
            "user": {"ip": self.take(), "name": self.take(), "ssn": self.take(), "more": {"SSN": self.take()}},
            "card": f"{self.take()}1234",
            "lines": [{"sku": "a", "ssn": self.take()}, {"sku": "b", "other": [{"ssn": {"deep": self.take()}}]}],
            "tags": {"ssn": self.take(), "token": self.take(), "color": "red"},
            "payload": {"a": [{"ssn": self.take(), "token": [self.take(), {"x": self.take()}]}]},
            "plain": "visible-text",
            "unknown": {"ssn": self.take(), "token": self.take(), "kept": "visible-extra"},
            "ssn": self.take(),
        }
        return json.dumps(own | other).replace('"SSN"', '"\\u0053SN"').encode()

    def make_headers(self) -> list[tuple[str, bytes]]:
        secret = [("auth", self.take().encode()), ("X-User", self.take().encode())]
        return [*secret, ("trace", b"visible-header")]

    def make_key(self) -> bytes:
        return self.take().encode()

    def list_forms(self) -> Iterator[bytes]:
        """How a canary may be written: as text, in hex, and in base64 at each of its three beginnings."""
        for text in self.texts:
            yield from (text.encode(), text.encode().hex().encode(), text.encode().hex().upper().encode())
            for before in (b"", b"x", b"xx"):
                encoded = base64.b64encode(before + text.encode() + b"xx")
                yield encoded[4 : 4 * (len(text) // 3)]


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


def read_everything(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Each file with all that is compressed in it: columns of Parquet, cells of databases, documents."""
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        data = path.read_bytes()
        yield str(path), data
        for inflate in (gzip.decompress, zlib.decompress, lambda d: pa.decompress(d, 1 << 24, "zstd").to_pybytes()):
            try:
                yield f"{path} inflated", inflate(data)
            except Exception:  # noqa: BLE001 - it is not compressed like this
                continue
        if data.startswith(b"PAR1"):
            yield f"{path} rows", read_parquet(data)
        if data.startswith(b"SQLite format 3"):
            yield from read_cells(path)


def read_parquet(data: bytes) -> bytes:
    """All cells of the file, its metadata and its statistics."""
    file = pq.ParquetFile(io.BytesIO(data))
    texts = [repr(file.metadata.to_dict()), repr(file.schema), repr(file.read().to_pylist())]
    return "\n".join(texts).encode()


def read_cells(path: Path) -> Iterator[tuple[str, bytes]]:
    with sqlite3.connect(path) as db:
        for (name,) in db.execute("select name from sqlite_master where type = 'table'").fetchall():
            for row in db.execute(f'select * from "{name}"'):
                for cell in row:
                    data = cell.encode() if isinstance(cell, str) else cell if isinstance(cell, bytes) else b""
                    yield f"{path} {name}", data
                    if data.startswith(b"x"):
                        try:
                            yield f"{path} {name}", zlib.decompress(data)
                        except zlib.error:
                            continue


def find_canaries(contents: list[tuple[str, bytes]], forms: list[bytes]) -> set[str]:
    return {f"{name}: {form!r}" for name, data in contents for form in forms if form in data}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["processes", pytest.param("spark", marks=pytest.mark.spark)])
def test_no_canary_is_written_anywhere(
    project: FeedProject, monkeypatch: pytest.MonkeyPatch, engine: str, fresh_topic: Callable[..., str]
) -> None:
    canaries = Canaries()
    letters, back = fresh_topic(partitions=1), fresh_topic(partitions=2)
    stamp = 1_700_000_000_000
    produce(project, build_records(canaries), stamp=stamp)
    (project.root / "feeds").mkdir()
    (project.root / "feeds" / "people.contract.json").write_text(json.dumps(CONTRACT))
    feed = write_feed(
        project,
        monkeypatch,
        dead_letters=f"{{topic: {letters}}}",
        policies="{quarantine_limit: {share: 1}}",
        engine=engine,
        table="{delta: {}, quarantine: true}" if engine == "processes" else "",
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
        ["explain", f"{at}:4"],
        ["contract", "check", "people", "--json"],
        ["contract", "check", "people"],
        ["audit", "people", "--rescan", "--debug", "--json"],
        ["run", "people", "--replace", "--offsets", f"{at}:2-6", "--debug"],
        ["compact", "people", "--debug"],
        ["republish", "people", "--to", back, "--offsets", f"{at}:0-8", "--id", "again"],
        ["audit", "people", "--rescan", "--hashes", "--strict", "--json"],
        ["report", "people", "--output", "report.html"],
        ["check", "people", "2023-11-14T22"],
        ["files", "people", "2023-11-14T22", "--json"],
        ["status", "--json"],
        ["feeds", "list", "--json"],
        ["schema", "show", "people", "--json"],
        ["table", "update", "people"] if engine == "processes" else ["status"],
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
    for command in ("run people --debug", "audit people --rescan --debug --json", "peek " + f"{at}:0 -n 20"):
        assert codes[command] == 0, (command, process.stdout.decode()[-3000:], process.stderr.decode()[-3000:])

    contents = [*read_everything(project.root), ("stdout", process.stdout), ("stderr", process.stderr)]
    sent = [r for topic in (letters, back) for r in consume_topic(project.kafka, topic)]
    contents += [("Kafka", repr(sent).encode())]
    forms = [*canaries.list_forms()]
    assert find_canaries(contents, forms) == set()
    assert find_canaries(contents, [KEY.encode(), KEY.encode().hex().encode()]) == {
        f"{path}: {KEY!r}" for path in () if path
    }
    searched = ("/log/", "/quarantine/", "/data/", "staging", "report.html", ".db", "stdout", "Kafka", "rows")
    names = {name for name, _ in contents}
    assert {p for p in searched if not any(p in name for name in names)} <= {"staging"}
    assert sent, "dead letters and republished records were sent"
    assert any(b"visible-extra" in data for name, data in contents if "rows" in name), "the search reads columns"
    assert codes[" ".join(days[15])] == 0
    assert feed.shape.protection is not None
