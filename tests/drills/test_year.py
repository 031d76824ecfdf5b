"""Events of a year, one after the other, on one project. Each ends with the oracle; audits prove the end."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest
from kafka import TopicPartition
from kafka.admin import ScramMechanism, UserScramCredentialUpsertion
from kafka.structs import OffsetAndMetadata
from pyiceberg.catalog import load_catalog

from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.feed.rights import rights_of
from sluice.pipelines.util.units import HOUR, show_window
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.secured import USER, grant
from tests.drills.year import Year

pytestmark = pytest.mark.drills
REASON = ("--reason", "drill")
YES = (*REASON, "--yes")
BOTH = ("orders", "web")
STRICT = "share: 0, at_least: 1"


@pytest.fixture
def year(tmp_path: Path, kafka: LocalKafka) -> Year:
    return Year(tmp_path, kafka)


def test_a_year(year: Year, fresh_topic: Callable[..., str]) -> None:
    topic, clicks = (fresh_topic(partitions=2, config={"retention.ms": "-1"}) for _ in range(2))
    year.write_feed("orders", f'["{topic}", "{clicks}"]')
    grow(year, topic, clicks)
    lose_records(year, topic)
    change_feeds(year, topic, clicks)
    break_lake(year, topic)
    rewrite_files(year, topic)
    for feed in BOTH:
        year.run("audit", feed, "--all", "--hashes", "--strict", "--rescan")
    year.run("doctor", code=None)
    year.check("audits of everything", BOTH)
    print(*(f"{seconds:6.1f} s  {event}" for event, seconds in year.steps), sep="\n")


def test_a_password_is_rotated(tmp_path: Path, secured: LocalKafka, fresh_topic: Callable[..., str]) -> None:
    year, topic = Year(tmp_path, secured), fresh_topic(cluster=secured, partitions=2)
    year.write_feed("orders", topic)
    grant(secured, rights_of(load_feed(tmp_path / "feeds" / "orders.yaml", {})))
    year.produce(topic, 100)
    year.land()
    year.check("first run")
    with year.connect_admin() as admin:
        changed = UserScramCredentialUpsertion(USER, ScramMechanism.SCRAM_SHA_512, "another password")
        assert admin.alter_user_scram_credentials([changed]) == {USER: None}
    year.produce(topic, 50)
    refused = year.land(code=None)
    assert "SASL_AUTHENTICATION_FAILED" in refused, refused
    assert secured.secured
    (secured.secured.folder / f"{USER}.password").write_text("another password")
    year.land()
    year.check("the file has the new password")


def test_brokers_restart_in_turn(tmp_path: Path, kafka3: LocalKafka, fresh_topic: Callable[..., str]) -> None:
    year, topic = Year(tmp_path, kafka3), fresh_topic(cluster=kafka3, partitions=3)
    year.write_feed("orders", topic)
    year.produce(topic, 60_000, 3)
    process = year.start_run("orders")
    for broker in (1, 2, 3):
        kafka3.kill_broker(broker, signal.SIGTERM)
        year.produce(topic, 300, 3)
        year.land(code=None)
        kafka3.start_broker(broker)
    process.wait()
    year.land()
    year.check("three brokers were restarted, one after the other")
    year.run("audit", "orders", "--hashes", "--strict", "--rescan")


def test_the_dagster_home_is_lost(year: Year, fresh_topic: Callable[..., str]) -> None:
    topic = fresh_topic(partitions=2, config={"retention.ms": "-1"})
    year.write_feed("orders", topic)
    for hours_ago in (4, 3):
        year.produce(topic, 40, hours_ago=hours_ago)
    year.run("run", "orders")
    home = year.root / ".sluice" / "dagster"
    before = list_materialized(home)
    assert len(before) >= 2
    shutil.rmtree(home)
    year.produce(topic, 40, hours_ago=2)
    year.run("run", "orders")
    year.follow("operating.md", "sluice repair")
    assert list_materialized(home) >= before
    year.check("Dagster's home is lost")


def test_wrong_types_are_corrected(year: Year, fresh_topic: Callable[..., str]) -> None:
    topic = fresh_topic(partitions=2, config={"retention.ms": "-1"})
    starts = [time.time_ns() // 1_000_000 // HOUR * HOUR - ago * HOUR for ago in (4, 3, 0)]
    hours = [*map(show_window, starts)]
    year.write_feed("orders", topic, columns=", code: int64", limit=STRICT)
    year.produce(topic, 40, hours_ago=4, code=7)
    year.produce(topic, 20, hours_ago=3, code='"007"')
    refused = year.land(code=3)
    assert "wrong_type" in year.follow_remedy(refused, "sluice quarantine list orders")
    year.write_feed("orders", topic, columns=", code: string", limit=STRICT)
    refused = year.land(code=3)
    assert "leave code out" in refused
    year.write_feed("orders", topic, limit=STRICT)
    year.land()
    year.follow_remedy(refused, "sluice run orders --from", "--no-dagster")
    year.write_feed("orders", topic, columns=", code: string")
    year.follow("operating.md", "sluice run FEED --from", hours[0], "--to", hours[2], "--replace", "--no-dagster")
    year.produce(topic, 20, hours_ago=3, code='"008"')
    year.land()
    assert year.read("code", "code is not null") == ["007"] * 20 + ["008"] * 20
    year.expected -= {*range(40)}  # numbers, which are no text
    year.check("a type is corrected under its name")

    year.follow("deploying.md", "sluice feeds rename orders sales", "--yes")
    year.write_feed("sales", topic, "stored_as: orders\ngroup: sluice-orders\n", columns=", code: json")
    year.follow("operating.md", "sluice quarantine list orders")
    year.follow("operating.md", "sluice quarantine replay orders")
    year.expected |= {*range(40)}
    year.check("quarantined records land after a rename")

    output = year.follow("reading.md", "sluice explain orders --key", "k17", "--json")
    assert [r["record"]["id"] for r in json.loads(output)["records"]] == [17]
    output = year.follow("reading.md", "sluice explain orders --where", "id = 55", "--window", hours[1], "--json")
    (record,) = json.loads(output)["records"]
    assert (record["record"]["code"], record["class"]) == ("007", "landed")
    output = year.follow("reading.md", "sluice check orders --event-hour", hours[1], "--json")
    stamped = f"epoch_ms(kafka_timestamp) between {starts[1]} and {starts[1] + HOUR - 1}"
    assert json.loads(output)["rows"] == len(year.read("id", stamped)) >= 20
    year.run("audit", "sales", "--all", "--hashes", "--strict", "--rescan")


def test_a_lake_is_restored_and_its_catalog_is_not(year: Year, fresh_topic: Callable[..., str]) -> None:
    topic = fresh_topic(partitions=2, config={"retention.ms": "-1"})
    catalog = {"type": "sql", "uri": f"sqlite:///{year.root}/catalog.db"}
    table = json.dumps({"iceberg": {"name": "db.orders", "catalog": catalog}})
    year.write_feed("orders", topic, f"table: {table}")
    year.produce(topic, 40, hours_ago=3)
    year.land()
    year.follow("tables.md", "sluice table sync orders")
    assert "outside of the lake" in year.follow("deploying.md", "sluice doctor", code=None)
    copy = year.back_up()
    year.produce(topic, 40, hours_ago=3)
    year.land()
    year.follow("tables.md", "sluice table sync orders")
    year.restore(copy)
    year.follow("deploying.md", "sluice status orders", code=3)
    year.follow("deploying.md", "sluice audit orders --all --hashes")
    year.run("audit", "orders", "--strict", code=3)
    year.follow("deploying.md", "sluice accept orders ledger", *REASON)
    year.follow("deploying.md", "sluice run orders", code=None)
    year.follow("deploying.md", "sluice table rebuild orders --yes")
    year.follow("deploying.md", "sluice run orders")
    year.follow("tables.md", "sluice table sync orders")
    year.follow("deploying.md", "sluice audit orders --all --strict")
    year.check("the catalog is newer than the lake")
    rows = load_catalog("sluice", **catalog).load_table("db.orders").scan().to_arrow().column("id").to_pylist()
    assert sorted(rows) == sorted(year.expected)


def list_materialized(home: Path) -> set[str]:
    with dg.DagsterInstance.from_config(str(home)) as instance:
        return instance.get_materialized_partitions(dg.AssetKey(["orders", "landed"]))


def grow(year: Year, topic: str, clicks: str) -> None:
    year.produce(topic, 200)
    year.produce(clicks, 100)
    year.follow("operating.md", "sluice run FEED", "--no-dagster")
    year.check("first run")

    with year.connect_admin() as admin:
        admin.create_partitions({topic: 3})
    year.produce(topic, 90, 3)
    year.land()
    year.check("a partition is added")

    year.produce(topic, 60_000, 3)
    year.kill_run("orders")
    year.land()
    year.check("a run is killed")

    year.produce(topic, 30, 3, **{f"field_{n}": n for n in range(9)})
    output = year.land()
    listed = json.loads(year.follow_remedy(output, "sluice report orders --batch"))
    assert {d["field"].strip("/") for d in listed["drift"]} == {f"field_{n}" for n in range(9)}
    year.check("records have nine new fields")


def lose_records(year: Year, topic: str) -> None:
    deleted = year.produce(topic, 30, 3)
    year.delete_records(topic, [-1, -1, -1])  # up to the end
    year.expected -= {*deleted}
    year.produce(topic, 30, 3)
    refused = year.land(code=3)
    year.follow_remedy(refused, "sluice accept orders lost", *YES)
    year.land()
    year.check("retention deletes pending records")

    with year.connect_admin() as admin:
        admin.alter_group_offsets("sluice-orders", {TopicPartition(topic, 0): OffsetAndMetadata(5, "", None)})
    year.produce(topic, 30, 3)
    assert "sluice accept orders moved" in year.land(code=3)
    year.follow("operating.md", "sluice accept orders moved", *YES)
    year.land()
    year.check("another client moves the group's offsets")


def change_feeds(year: Year, topic: str, clicks: str) -> None:
    year.follow("deploying.md", "sluice feeds rename orders sales", "--yes")
    year.produce(topic, 30, 3)
    year.land("sales")
    year.run("feeds", "rename", "sales", "orders", "--yes")
    year.check("a feed is renamed, and back")

    year.follow("deploying.md", "sluice feeds move-topic", clicks, "orders", "web", "--yes")
    year.produce(topic, 30, 3)
    year.produce(clicks, 30)
    year.run("run", "--all", "--no-dagster")
    year.check("a feed is split in two", BOTH)

    year.run("feeds", "retire", "web", "--yes")
    pending = year.produce(clicks, 20)
    year.expected -= {*pending}
    year.run("run", "--all", "--no-dagster")
    assert "web" not in json.dumps(json.loads(year.run("status", "--json"))["feeds"])
    year.check("a feed is retired", BOTH)
    year.run("feeds", "retire", "web", "--undo", "--yes")
    year.expected |= {*pending}
    year.run("run", "--all", "--no-dagster")
    year.check("it returns", BOTH)


def break_lake(year: Year, topic: str) -> None:
    copy = year.back_up()
    year.produce(topic, 60, 3)
    year.land()
    newest = max((year.lake / "data" / "orders").rglob("*.parquet"), key=lambda p: p.stat().st_mtime)
    newest.unlink()
    audited = year.run("audit", "orders", "--strict", code=1)
    assert "sluice run orders" in audited, audited
    year.land("orders", "--missing-files")
    year.check("a file is lost", BOTH)

    year.produce(topic, 60, 3)
    year.land()
    year.restore(copy)
    refused = year.land(code=3)
    year.follow_remedy(refused, "sluice accept orders ledger", *REASON)
    year.land()
    year.check("the lake is restored from an older copy", BOTH)

    shutil.rmtree(year.lake / "_sluice" / "orders")
    year.delete_records(topic, [-1, -1, -1])
    year.land(code=3)
    year.follow("operating.md", "sluice accept orders ledger --from-files", *REASON)
    year.follow("operating.md", "sluice accept FEED gone", *YES)  # of a topic that was moved away
    refused = year.land(code=None)
    if "sluice accept orders lost" in refused:
        year.follow_remedy(refused, "sluice accept orders lost", *YES)
    year.produce(topic, 30, 3)
    year.land()
    year.check("the ledger is lost, and Kafka has no records", BOTH)


def rewrite_files(year: Year, topic: str) -> None:
    year.follow("operating.md", "sluice compact FEED")
    year.check("files are merged", BOTH)
    year.follow("erasing.md", "sluice erase orders", "--where", "id = 7", *YES)
    year.expected -= {7}
    year.produce(topic, 30, 3)
    year.land()
    year.check("a record is erased", BOTH)
