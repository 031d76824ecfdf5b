"""Erasure over a real Kafka: of two persons, one is in no byte of the lake afterwards, and the other is complete.

Everything that is compressed is searched, too: columns, statistics, dictionaries, logs and manifests of tables.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from kafka import KafkaProducer

from sluice.pipelines.maintenance.erasure import decide
from sluice.pipelines.operating.record_search import Criteria, search
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.canaries import Canaries, find_canaries, read_everything
from tests.integration.conftest import Call
from tests.integration.support import FeedProject, open_feed_ledger, open_inline_ports

STAMP, WINDOWS = 1_700_000_000_000, ("2023-11-14T22", "2023-11-14T23")
SCHEMA = {"id": "int64 not null", "email": "string", "tags": "map<string, string>"}
ONE, OTHER = 4_817_161_514_131_211, 4_818_171_615_141_312
"""Ids of two persons, which statistics and bounds hold in eight bytes."""
TABLES = {
    "no table": "",
    "delta": "{delta: {}, quarantine: true}",
    "iceberg": "{iceberg: {name: db.people}, quarantine: true}",
    "current": "{iceberg: {name: db.people}, current: db.people_now}",
}
pytestmark = pytest.mark.usefixtures("default_engine")


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(partitions=2))


def produce_person(project: FeedProject, person: int, canaries: Canaries, hours: int = 2, partitions: int = 2) -> int:
    """Produce good records, some with unknown fields and headers, and ones that do not fit. Returns their number."""
    producer, n = KafkaProducer(bootstrap_servers=project.kafka.bootstrap), 0
    email = canaries.take()
    for hour in range(hours):
        for i in range(8):
            value: dict[str, Any] = {"id": person, "email": email, "tags": {"a": canaries.take()}}
            value |= {"more": canaries.take()} if i % 2 else {}
            value |= {"tags": canaries.take()} if i == 7 else {}  # quarantined
            headers = [("x", canaries.take().encode())]
            key, stamp = f"person-{person}".encode(), STAMP + hour * 3_600_000 + i * 1000
            producer.send(project.topic, json.dumps(value).encode(), key, headers, i % partitions, stamp)
            n += 1
    producer.close()
    return n


def list_id_forms(person: int) -> tuple[bytes, ...]:
    return str(person).encode(), struct.pack("<q", person), struct.pack(">q", person)


def list_live_files(call: Call) -> list[str]:
    listed = [call("files", "people", "--window", w, "--json")[1]["files"] for w in WINDOWS]
    return [f["address"] for files in listed for f in files if f["kind"] == "landed"]


def read_ids(call: Call) -> list[int]:
    return [i for path in dict.fromkeys(list_live_files(call)) for i in pq.read_table(path).column("id").to_pylist()]


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES, ids=str)
def test_one_person_is_erased_and_the_other_is_complete(
    project: FeedProject, call: Call, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Canaries(), Canaries()
    partitions = 1 if table == "current" else 2
    sent = produce_person(project, ONE, one, partitions=partitions)
    assert produce_person(project, OTHER, other, partitions=partitions) == sent
    lines: dict[str, Any] = {"format": "json", "schema": json.dumps(SCHEMA), "commit": "none"}
    lines |= {"policies": "{quarantine_limit: {share: 1}}"} | ({"table": TABLES[table]} if TABLES[table] else {})
    lines |= {"changes": "{format: upsert, key: [id]}"} if table == "current" else {}
    project.write_feed("people", **lines)
    assert call("run", "people")[0] == 0
    assert call("report", "people")[0] == 0
    assert [call("report", "people", window)[0] for window in WINDOWS] == [0, 0]

    code, preview = call("erase", "people", "--where", f"id = {ONE}", "--json")
    assert (code, preview["applied"], preview["landed"], preview["quarantined"]) == (0, False, sent - 2, 2)
    assert read_ids(call).count(ONE) == sent - 2
    refused, text = call("erase", "people", "--where", f"id = {ONE}", "--yes")
    assert refused != 0
    assert "--reason" in text
    code, done = call("erase", "people", "--where", f"id = {ONE}", "--reason", "request 4711", "--yes", "--json")
    assert (code, done["applied"], done["landed"]) == (0, True, sent - 2)

    contents = [*read_everything(project.root), ("output", json.dumps([preview, done]).encode())]
    assert find_canaries(contents, [*one.list_forms(), *list_id_forms(ONE)]) == set()
    assert find_canaries(contents, [*other.list_forms()]), "the search finds the other person"
    assert find_canaries(contents, [*list_id_forms(OTHER)])
    assert read_ids(call) == [OTHER] * (sent - 2)

    code, audited = call("audit", "people", "--rescan", "--hashes", "--json")
    assert (code, audited["problems"]) == (0, [])
    assert sum(p["erased"] for p in audited["partitions"]) == sent
    assert call("check", "people", "2023-11-14T22")[0] == 0
    code, explained = call("explain", "people", f"{project.topic}:0:0", "--json")
    assert (code, explained["class"]) == (0, "erased")
    assert "request 4711" in explained["text"]
    if TABLES[table]:
        assert call("table", "check", "people")[0] == 0

    # Nothing brings the person back.
    assert call("run", "people", "--window", "2023-11-14T22", "--replace")[0] == 0
    assert call("quarantine", "replay", "people")[0] == 0
    assert call("compact", "people")[0] == 0
    os.remove(list_live_files(call)[0])
    code, broken = call("audit", "people", "--json")
    assert code != 0
    remedy = broken["problems"][0]["remedy"]
    (command,) = re.findall(r"sluice (run people --offsets \S+ --replace)", remedy)
    assert call(*command.split())[0] == 0
    assert call("audit", "people", "--rescan", "--hashes")[0] == 0
    assert sorted(read_ids(call)) == [OTHER] * (sent - 2)
    assert find_canaries([*read_everything(project.root)], [*one.list_forms(), *list_id_forms(ONE)]) == set()


def test_keys_file_erases_by_key_or_column(project: FeedProject, call: Call, tmp_path: Path) -> None:
    people = [Canaries() for _ in range(4)]
    for n, person in enumerate(people):
        produce_person(project, n, person, hours=1)
    settings = {"format": "json", "schema": json.dumps(SCHEMA), "policies": "{quarantine_limit: {share: 1}}"}
    project.write_feed("people", **settings)
    assert call("run", "people")[0] == 0
    (tmp_path / "keys").write_text("person-0\nperson-1\n\n")
    (tmp_path / "emails").write_text(people[2].texts[0] + "\n")
    by_key = ("erase", "people", "--keys-file", str(tmp_path / "keys"), "--reason", "r", "--yes", "--json")
    code, done = call(*by_key)
    assert (code, done["landed"], done["quarantined"]) == (0, 14, 2)
    by_email = ("--keys-file", str(tmp_path / "emails"), "--column", "email", "--reason", "r", "--yes", "--json")
    code, done = call("erase", "people", *by_email)
    assert (code, done["landed"], done["quarantined"]) == (0, 7, 1)
    assert read_ids(call) == [3] * 7
    (tmp_path / "keys").unlink()
    (tmp_path / "emails").unlink()
    contents = [*read_everything(project.root)]
    forms = [form for person in people[:3] for form in person.list_forms()]
    assert find_canaries(contents, forms) == set()
    (tmp_path / "ids").write_text("1\nx\n")
    code, text = call("erase", "people", "--keys-file", str(tmp_path / "ids"), "--column", "id")
    assert code == 2
    assert "line 2 of the keys is no int64" in text
    code, text = call("erase", "people", "--keys-file", str(tmp_path / "ids"), "--column", "idd")
    assert code == 2
    assert "columns: id, email" in text


def test_windows_on_hold_are_neither_expired_nor_erased(project: FeedProject, call: Call) -> None:
    """The printed remedy ends the hold, and then both commands take the rows."""
    produce_person(project, ONE, Canaries(), hours=3)
    lines = {"format": "json", "schema": json.dumps(SCHEMA), "policies": "{quarantine_limit: {share: 1}}"}
    project.write_feed("people", commit="none", window="1h", **lines)
    assert call("run", "people", "--no-dagster")[0] == 0
    hold = ("hold", "people", "--from", WINDOWS[1], "--to", "2023-11-15T00")
    assert call(*hold)[0] == call("hold", "people", "--release", "3")[0] == 2
    assert call("hold", "people", "--json")[1]["holds"] == []
    code, document = call(*hold, "--reason", "case 12", "--json")
    assert (code, [h["reason"] for h in document["holds"]]) == (0, ["case 12"]), document
    code, text = call("hold", "people")
    assert all(word in text for word in (WINDOWS[1], "2023-11-15T00", "case 12"))
    expected = f"from {WINDOWS[1]}:00 to 2023-11-15T00:00, by "
    for command in (("status", "people"), ("check", "people", WINDOWS[1]), ("files", "people", "--window", WINDOWS[1])):
        text = " ".join(call(*command)[1].split())
        assert expected in text, text
        assert "case 12" in text
    assert call("files", "people", "--window", WINDOWS[0], "--json")[1]["holds"] == []
    assert call("check", "people", WINDOWS[0], "--json")[1]["holds"] == []
    assert [h["reason"] for h in call("status", "people", "--json")[1]["feeds"][0]["holds"]] == ["case 12"]
    outside = f"id = {ONE} AND kafka_timestamp < '{WINDOWS[1]}:00:00Z'"
    assert call("erase", "people", "--where", outside, "--json")[1]["holds"] == []
    code, preview = call("erase", "people", "--where", f"id = {ONE}")
    assert code == 0
    assert expected in " ".join(preview.split())

    expire = ("expire", "people", "--before", "2023-11-15T01", "--reason", "old", "--yes")
    code, text = call(*expire[:4], "--dry-run")
    assert "kept: 1 window on hold: sluice hold people" in text
    code, done = call(*expire, "--json")
    assert (code, [w["window"] for w in done["windows"]]) == (0, [f"{WINDOWS[0]}:00", "2023-11-15T00:00"])
    assert done["on_hold"] == [f"{WINDOWS[1]}:00"]
    assert call("files", "people", "--window", WINDOWS[1])[0] == 0
    erase = ("erase", "people", "--where", f"id = {ONE}", "--reason", "request 4711", "--yes")
    code, text = call(*erase)
    assert code == 3
    assert "is on hold" in text
    assert "case 12" in text
    assert call("files", "people", "--window", WINDOWS[1])[0] == 0
    assert call("audit", "people", "--rescan")[0] == 0
    (command,) = re.findall(r"sluice (hold people --release \d+ --reason)", " ".join(text.split()))
    assert f"sluice {command}" in preview
    code, done = call(*command.split(), "closed", "--json")
    assert (code, done["holds"]) == (0, [])
    assert call(*erase)[0] == 0
    code, text = call("expire", "people", "--yes")
    assert (code, "nothing expires without --before" in text) == (0, True), text
    project.write_feed("people", commit="none", window="1h", retention="30d", **lines)
    code, done = call("expire", "people", "--yes", "--json")
    assert (code, [w["window"] for w in done["windows"]]) == (0, [f"{WINDOWS[1]}:00"]), done
    assert call("files", "people", "--window", WINDOWS[1])[0] != 0
    assert call("audit", "people", "--rescan")[0] == 0


def test_audit_names_the_command_that_finishes_an_erasure_and_repair_finishes_it(
    project: FeedProject, call: Call
) -> None:
    """The command was killed behind its entry: the records are still in the files."""
    for person in (ONE, OTHER):
        produce_person(project, person, Canaries(), hours=1)
    settings = {"format": "json", "schema": json.dumps(SCHEMA), "policies": "{quarantine_limit: {share: 1}}"}
    feed = project.write_feed("people", commit="none", **settings)
    assert call("run", "people")[0] == 0
    assert "sluice erase" not in call("repair", "people")[1]
    with open_inline_ports(feed) as ports:
        matches = search(feed, ports, Criteria(f"id = {ONE}"), lambda progress: None)
        ledger = open_feed_ledger(feed, ports)
        decide(ledger, ports.liveness, matches.offsets, "request 4711", lambda progress: None)
    for command in ("audit people", "repair people --dry-run"):
        assert "sluice erase people --yes" in call(*command.split())[1]
    assert len(read_ids(call)) == 14
    assert "finished: an erasure was interrupted: 8 records" in call("repair", "people")[1]
    assert "erasure" not in call("repair", "people")[1]
    assert call("audit", "people")[0] == 0
    assert read_ids(call) == [OTHER] * 7
    assert any(path.endswith(".db") for path, _ in read_everything(project.root)), "also Dagster's storage is searched"

    assert call("run", "people", "--window", WINDOWS[0], "--replace")[0] == 0
    code, _ = call("report", "people", "--output", str(project.root / "page.html"))
    page = (project.root / "page.html").read_text()
    assert (code, re.findall(r"<th[^>]*>erased</th>", page) != []) == (0, True)


def test_bad_conditions_name_the_columns(project: FeedProject, call: Call) -> None:
    produce_person(project, ONE, Canaries(), hours=1)
    project.write_feed("people", format="json", schema=json.dumps(SCHEMA), policies="{quarantine_limit: {share: 1}}")
    assert call("run", "people")[0] == 0
    for where in ("customer = 1", "id +", "id"):
        code, text = call("erase", "people", "--where", where)
        assert code == 2, text
        assert "columns: id, email, tags" in " ".join(text.split())


@pytest.mark.slow
def test_rows_that_another_client_deleted_are_erased_or_come_back(project: FeedProject, call: Call) -> None:
    """The remedy has both ways: after the erasure, the repair brings the other person's rows alone."""
    pyiceberg = pytest.importorskip("pyiceberg.catalog")
    for person in (ONE, OTHER):
        produce_person(project, person, Canaries(), hours=1)
    catalog = {"type": "sql", "uri": f"sqlite:///{project.root}/catalog.db"}
    lines = {"format": "json", "schema": json.dumps(SCHEMA), "policies": "{quarantine_limit: {share: 1}}"}
    table = json.dumps({"iceberg": {"name": "db.people", "catalog": catalog}})
    project.write_feed("people", commit="none", table=table, **lines)
    assert call("run", "people")[0] == 0
    warehouse = f"file://{project.root}/.sluice/lake/tables"

    def read_table() -> list[int]:
        with contextlib.closing(pyiceberg.load_catalog("sluice", **catalog, warehouse=warehouse)) as opened:
            return sorted(opened.load_table("db.people").scan().to_arrow().column("id").to_pylist())

    with contextlib.closing(pyiceberg.load_catalog("sluice", **catalog, warehouse=warehouse)) as opened:
        opened.load_table("db.people").delete(f"id == {ONE}")
    assert read_table() == [OTHER] * 7
    for command in (("table", "check", "people"), ("table", "sync", "people")):
        code, text = call(*command)
        assert code != 0
        assert "sluice table sync people --repair" in " ".join(text.split())
        assert "sluice erase people --where" in " ".join(text.split())
    code, text = call("erase", "people", "--where", f"id = {ONE}", "--reason", "r", "--yes")
    assert code == 1
    assert "sluice table sync people --repair" in " ".join(text.split())
    assert call("table", "sync", "people", "--repair")[0] == 0
    assert read_table() == [OTHER] * 7
    assert call("erase", "people", "--yes")[0] == 0
    assert call("table", "check", "people")[0] == 0
    assert find_canaries([*read_everything(project.root)], [*list_id_forms(ONE)]) == set()


def test_outputs_are_erased_one_by_one_or_together(project: FeedProject, call: Call) -> None:
    people = [Canaries() for _ in range(2)]
    producer = KafkaProducer(bootstrap_servers=project.kafka.bootstrap)
    for n, person in enumerate(people):
        for kind in ("a", "b", "c"):
            value = json.dumps({"id": n, "email": person.take()}).encode()
            producer.send(project.topic, value, None, [("kind", kind.encode())], 0, STAMP)
    producer.close()
    into = {"a": {"schema": {"id": "int64", "email": "string"}}, "b": {"schema": {"id": "int64", "email": "string"}}}
    split = json.dumps({"by": {"header": "kind"}, "into": into, "otherwise": "quarantine"})
    project.write_feed("people", format="json", split=split, policies="{quarantine_limit: {share: 1}}")
    assert call("run", "people")[0] == 0
    code, done = call("erase", "people.a", "--where", "id = 0", "--reason", "r", "--yes", "--json")
    assert (code, done["landed"], done["quarantined"]) == (0, 1, 0)
    assert [text in _read_all(project) for text in people[0].texts] == [False, True, True]
    code, done = call("erase", "people", "--where", "id = 0", "--reason", "r", "--yes", "--json")
    assert (code, done["landed"], done["quarantined"]) == (0, 1, 1)
    assert [text in _read_all(project) for text in people[0].texts] == [False, False, False]
    assert [text in _read_all(project) for text in people[1].texts] == [True, True, True]
    assert call("audit", "people", "--rescan", "--hashes")[0] == 0
    for dataset in ("people", "people.a"):
        assert call("check", dataset, WINDOWS[0])[0] == 0


def _read_all(project: FeedProject) -> str:
    return "\n".join(data.decode("latin-1") for _, data in read_everything(project.root))
