"""`sluice init` on a real Kafka: the records that it samples, the files that it writes, and a run with them.

`--local` is in tests/test_readme.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest

from sluice.resources.local.local_kafka import LocalKafka
from tests.cli.conftest import Sluice
from tests.resources.kafka.tools import produce

pytestmark = pytest.mark.kafka


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without a project, in an environment without the address of a Kafka."""
    monkeypatch.delenv("KAFKA_BOOTSTRAP", raising=False)
    monkeypatch.delenv("SLUICE_PROJECT", raising=False)
    folder = tmp_path / "new"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def orders(kafka: LocalKafka, fresh_topic: Callable[..., str]) -> str:
    topic = fresh_topic(partitions=2, name="Shop.Orders")
    for partition in range(2):
        produce(kafka, topic, 300, partition, value=order)
    return topic


def order(n: int) -> bytes | None:
    lines = [{"sku": f"s{n}", "quantity": n % 4}] * (n % 3)
    extra = {"note": None if n % 2 else "gift"} if n % 5 == 0 else {}
    placed = f"2026-11-20T10:{n % 60:02}:00Z"
    return None if n == 7 else json.dumps({"id": n, "at": placed, "paid": 1.5, "lines": lines} | extra).encode()


def test_a_json_topic_gets_a_schema_that_its_records_fit(
    empty: Path, kafka: LocalKafka, orders: str, sluice: Sluice
) -> None:
    proposal = sluice("init", "--bootstrap", kafka.bootstrap, "--topic", orders, "--json").document
    name = orders.lower().replace(".", "_").replace("-", "_")
    assert (proposal["feed"], proposal["partitions"], proposal["format"]) == (name, 2, "json")
    assert proposal["columns"] == {
        "id": "int64",
        "note": "string",
        "at": "timestamp",
        "paid": "float64",
        "lines": "list<struct<sku:string, quantity:int64>>",
    }
    assert proposal["sampled"] == proposal["fit"] == 600
    assert not re.search(r"\S#", proposal["text"])  # a comment begins after a space, or other readers of YAML refuse it
    assert sorted(p.name for p in empty.iterdir()) == [".gitignore", "feeds", "workspace.yaml"]
    assert (empty / "workspace.yaml").read_text() == (Path(__file__).parents[2] / "workspace.yaml").read_text()
    assert sluice("feeds", "check", "--json").code == 0
    assert sluice("plan", name, "--json").document["offsets"] == 600
    again = sluice("init", "--bootstrap", kafka.bootstrap, "--topic", orders)
    assert (again.code, "is there already" in again.err) == (2, True)
    other = sluice("init", "other", "--bootstrap", kafka.bootstrap, "--topic", orders, "--raw", "--json").document
    assert (other["format"], other["columns"], [Path(p).name for p in other["written"]]) == (
        "raw",
        None,
        ["other.yaml"],
    )


def test_topic_without_json_and_empty_topic_get_a_raw_feed(
    empty: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], sluice: Sluice
) -> None:
    topic = fresh_topic(name="clicks")
    there = ("--bootstrap", kafka.bootstrap, "--topic", topic)
    assert sluice("init", "before", *there, "--json").document["format"] == "raw"
    produce(kafka, topic, 50)
    proposal = sluice("init", "after", *there, "--group", "clicks-loader", "--json").document
    assert (proposal["format"], proposal["sampled"]) == ("raw", 50)
    assert "group: " in proposal["text"]
    assert sluice("feeds", "check", "--json").code == 0


def test_existing_content_of_project_files_is_kept(empty: Path, kafka: LocalKafka, orders: str, sluice: Sluice) -> None:
    (empty / ".gitignore").write_text("*.log")
    (empty / "workspace.yaml").write_text("load_from: []\n")
    assert sluice("init", "--bootstrap", kafka.bootstrap, "--topic", orders).code == 0
    assert (empty / ".gitignore").read_text() == "*.log\n.sluice/\n"
    assert (empty / "workspace.yaml").read_text() == "load_from: []\n"


def test_existing_dagster_project_gets_no_workspace_file(
    empty: Path, kafka: LocalKafka, orders: str, sluice: Sluice
) -> None:
    (empty / "pyproject.toml").write_text('[tool.dg]\ndirectory_type = "project"\n')
    result = sluice("init", "--bootstrap", kafka.bootstrap, "--topic", orders)
    assert (result.code, (empty / "workspace.yaml").exists()) == (0, False)
    assert "dg scaffold defs sluice.dagster.FeedsComponent" in result.out


def test_init_without_a_terminal_does_not_prompt_or_leave_files_on_error(
    empty: Path, kafka: LocalKafka, orders: str, sluice: Sluice
) -> None:
    nowhere = ("--bootstrap", "127.0.0.1:1", "--topic", orders, "--kafka", "bootstrap_timeout_ms=500")
    for arguments, code, says in (
        ((), 2, "which Kafka?"),
        (("--bootstrap", kafka.bootstrap, "--topic", "nobody"), 1, "no topic `nobody`"),
        (("../Orders", "--bootstrap", kafka.bootstrap, "--topic", orders), 2, "sluice init orders"),
        (("--bootstrap", "127.0.0.1", "--topic", orders), 2, "error: kafka.bootstrap: is not an address"),
        (nowhere, 1, "no broker answers"),
        (("--bootstrap", kafka.bootstrap, "--kafka", "sasl_mechanism"), 2, "KEY=VALUE"),
        (("--bootstrap", kafka.bootstrap, "--kafka", "nonsense=1"), 2, "nonsense"),
        (("--bootstrap", kafka.bootstrap, "--kafka", "sasl_plain_password=${NOWHERE}"), 2, "NOWHERE"),
        (("--bootstrap", kafka.bootstrap, "--kafka", "sasl_plain_password=hunter2"), 2, "set a variable"),
    ):
        result = sluice("init", *arguments)
        assert (result.code, says in result.err) == (code, True), result.err
        assert "hunter2" not in result.err
        assert list(empty.iterdir()) == []


def test_feed_is_written_to_the_feeds_folder_of_the_project(
    empty: Path, kafka: LocalKafka, orders: str, sluice: Sluice, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--bootstrap", kafka.bootstrap, "--topic", orders, "--raw")
    assert sluice("init", "one", *options).code == 0
    monkeypatch.chdir(empty / "feeds")
    assert sluice("init", "two", *options).code == 0
    (empty / "below").mkdir()
    monkeypatch.chdir(empty / "below")
    monkeypatch.setenv("SLUICE_PROJECT", str(empty))
    assert sluice("init", "three", *options).code == 0
    assert {p.name for p in (empty / "feeds").iterdir()} == {"one.yaml", "two.yaml", "three.yaml"}


def make_odd_record(n: int) -> bytes:
    text = json.dumps(
        {
            "id": n,
            "ID": str(n),
            "http.method": "GET",
            "": 1,
            "kafka_key": "k",
            "created": 1_795_000_000 + n,
            "updated_ms": 1_795_000_000_000 + n,
            "scores": {f"user-{n:04}": n, "2026-11-20": 1.5},
            "s": {"a.b": n},
        }
    )
    return (text.replace('"id": ', '"id": NaN, "x": ') if n % 50 == 7 else text).encode()


def test_proposed_feed_lands_odd_records(
    empty: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], sluice: Sluice
) -> None:
    topic = fresh_topic(partitions=1, name="odd")
    produce(kafka, topic, 500, 0, value=make_odd_record)
    proposal = sluice("init", "odd", "--bootstrap", kafka.bootstrap, "--topic", topic, "--json").document
    assert proposal["columns"] == {
        "id": "int64",
        "ID_2": 'string from "ID"',
        "http_method": 'string from "http.method"',
        "field": 'int64 from ""',
        "record_kafka_key": 'string from "kafka_key"',
        "created": "epoch(s)",
        "updated_ms": "epoch(ms)",
        "scores": "map<string, float64>",
        "s": 'struct<a_b:int64 from "a.b">',
    }
    assert (proposal["sampled"], proposal["fit"], proposal["extra"]) == (500, 490, [])
    output = sluice("init", "again", "--bootstrap", kafka.bootstrap, "--topic", topic).out
    assert "10 records would go to quarantine, more than 1 %" in output
    assert "10 records, the first at" in output
    assert "policies: {quarantine_limit: {share: 0.03}}" in output
    assert sluice("run", "odd").code == 0
    (row,) = duckdb.sql(
        f"select id, ID_2, http_method, field, record_kafka_key, created::varchar, epoch_ms(updated_ms), scores, s.a_b,"
        f" _extra from '{empty}/.sluice/lake/data/odd/**/*.parquet' where id = 3"
    ).fetchall()
    assert row[:5] == (3, "3", "GET", 1, "k")
    assert row[6:] == (1_795_000_000_003, {"user-0003": 3.0, "2026-11-20": 1.5}, 3, None)
