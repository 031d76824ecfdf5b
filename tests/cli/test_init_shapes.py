"""`sluice init` on topics of several shapes, envelopes and mixed types, on a real Kafka.

Each proposal is followed to its end: the written feed is checked and run, and DuckDB compares its rows with the records
that a plain consumer reads.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import duckdb
import pytest
from deltalake import DeltaTable
from kafka import KafkaProducer

from sluice.resources.local.local_kafka import LocalKafka
from tests.cli.conftest import Sluice
from tests.integration.support import consume_topic

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
Sent = tuple[Mapping[str, str], Any]
"""Headers, and a value: bytes, an object for JSON, or None for a tombstone."""
Place = tuple[int, int]
START = 1_795_000_000_000


class Topic:
    """A topic of two partitions with records, and a new project next to it."""

    def __init__(self, folder: Path, kafka: LocalKafka, topic: str, sluice: Sluice) -> None:
        self.folder, self.kafka, self.topic, self.sluice = folder, kafka, topic, sluice

    def send(self, records: Iterable[Sent], keys: Iterable[Any] = ()) -> None:
        """Send the records with these keys, which are JSON, or with texts."""
        names, producer = iter(keys), KafkaProducer(bootstrap_servers=self.kafka.bootstrap, linger_ms=5)
        for i, (headers, value) in enumerate(records):
            data = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
            pairs = [(name, text.encode()) for name, text in headers.items()]
            key = json.dumps(name).encode() if (name := next(names, None)) is not None else b"k%d" % i
            producer.send(self.topic, data, key, pairs, i % 2, START + i)
        producer.close()

    def init(self) -> dict[str, Any]:
        """Propose a feed, check its file, and land the topic by it."""
        proposal = self.sluice("init", "feed", "--bootstrap", self.kafka.bootstrap, "--topic", self.topic, "--json")
        assert proposal.code == 0, proposal.err
        checked = self.sluice("feeds", "check", "--json")
        assert checked.code == 0, (checked.err, proposal.document["text"])
        ran = self.sluice("run", "feed", "--no-dagster", "--engine", "processes")
        assert ran.code == 0, (ran.err, proposal.document["text"])
        return proposal.document

    def read(self, columns: str, output: str = "") -> dict[Place, tuple[Any, ...]]:
        """The landed rows by partition and offset, read by DuckDB."""
        files = f"{self.folder}/.sluice/lake/data/feed/{output}{'/' * bool(output)}**/*.parquet"
        rows = duckdb.sql(f"select kafka_partition, kafka_offset, {columns} from '{files}'").fetchall()
        assert len({row[:2] for row in rows}) == len(rows)
        return {row[:2]: row[2:] for row in rows}

    def read_quarantine(self) -> dict[Place, str]:
        if not (self.folder / ".sluice/lake/quarantine/feed").exists():
            return {}
        files = f"{self.folder}/.sluice/lake/quarantine/feed/**/*.parquet"
        return {r[:2]: r[2] for r in duckdb.sql(f'select "partition", "offset", reason from \'{files}\'').fetchall()}

    def consume(self) -> dict[Place, tuple[dict[str, str], Any]]:
        """All records by partition and offset, with their headers and values: objects if they are JSON."""
        return {
            (r["partition"], r["offset"]): (
                {h["key"]: h["value"].decode() for h in r["headers"] or ()},
                _parse(r["value"]),
            )
            for r in consume_topic(self.kafka, self.topic)
        }


def _parse(value: bytes | None) -> Any:
    try:
        return None if value is None else json.loads(value)
    except ValueError:
        return value


@pytest.fixture
def topic(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kafka: LocalKafka,
    fresh_topic: Callable[..., str],
    sluice: Sluice,
) -> Topic:
    monkeypatch.delenv("KAFKA_BOOTSTRAP", raising=False)
    monkeypatch.delenv("SLUICE_PROJECT", raising=False)
    folder = tmp_path / "new"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return Topic(folder, kafka, fresh_topic(partitions=2), sluice)


def find_output(proposal: Mapping[str, Any], name: str) -> dict[str, Any]:
    (output,) = (o for o in proposal["outputs"] if o["name"] == name)
    return {**output, "columns": {c["name"]: c["type"] for c in output["columns"]}}


# -- several shapes

KIND = "X-GitHub-Event"


def make_webhook(i: int) -> Sent:
    kind = "ping" if i % 250 == 9 else ("push", "issues", "push", "pull_request.review")[i % 4]
    body = {
        "push": {"ref": f"refs/{i}", "commits": [{"id": str(i), "at": "2026-11-20T10:00:00Z"}], "forced": i % 8 == 0},
        "issues": {"action": ("opened", "closed")[i % 3 // 2], "issue": {"number": i, "title": f"t{i}"}},
        "pull_request.review": {"action": "submitted", "review": {"id": i, "state": "approved"}, "pull": {"number": i}},
        "ping": {"zen": "x", "hook_id": i},
    }[kind]
    return {KIND: kind, "X-GitHub-Delivery": str(i)}, body | {"repository": {"id": 1, "name": "shop"}, "sender": "ann"}


def test_webhooks_of_several_events_are_split_by_a_header(topic: Topic) -> None:
    topic.send(map(make_webhook, range(800)))
    proposal = topic.init()
    assert (proposal["split"], proposal["rest"]) == ({"header": KIND}, {"ping": 4})
    assert [(o["name"], o["values"], o["records"]) for o in proposal["outputs"]] == [
        ("push", [], 400),
        ("issues", [], 198),
        ("pull_request_review", ["pull_request.review"], 198),
    ]
    assert "# 400 of 800 records" in proposal["text"]
    assert '# 4 "ping"' in proposal["text"]
    assert find_output(proposal, "issues")["columns"] == {
        "action": "string",
        "issue": "struct<number:int64, title:string>",
        "repository": "struct<id:int64, name:string>",
        "sender": "string",
    }
    assert (proposal["fit"], {m["reason"] for m in proposal["misfits"]}) == (796, {"no output"})
    printed = topic.sluice("init", "again", "--bootstrap", topic.kafka.bootstrap, "--topic", topic.topic).out
    for words in ("header X-GitHub-Event", "push 400", '4 "ping"', "796 of 800 sampled records fit"):
        assert words in " ".join(printed.split()), printed
    records = topic.consume()
    of = {kind: {at: v for at, (h, v) in records.items() if h[KIND] == kind} for kind in ("push", "issues")}
    rows = topic.read("ref, commits[1].id, commits[1].at::varchar, forced, repository.name, _extra", "push")
    assert rows == {
        at: (v["ref"], v["commits"][0]["id"], "2026-11-20 10:00:00+00", v["forced"], "shop", None)
        for at, v in of["push"].items()
    }
    assert topic.read("action, issue.number, issue.title, sender, _extra", "issues") == {
        at: (v["action"], v["issue"]["number"], v["issue"]["title"], "ann", None) for at, v in of["issues"].items()
    }
    assert topic.read_quarantine() == {at: "no output" for at, (h, _) in records.items() if h[KIND] == "ping"}


def make_event(i: int) -> Sent:
    kind = ("order", "user", "refund")[i % 3]
    payload = {
        "order": {"order_id": i, "amount": i / 4},
        "user": {"email": f"{i}@example.com", "plan": "free"},
        "refund": {"refund_of": i, "reason": "late"},
    }[kind]
    meta = {"kind": kind, "ts_ms": START + i, "source": "ab"[i % 2]}
    status = {"status": ("new", "done")[i % 2]}
    return {"region": ("eu", "us")[i % 2]}, {"meta": meta, "trace": f"t{i}", "payload": payload} | status


def test_bus_of_several_kinds_is_split_by_a_nested_field(topic: Topic) -> None:
    topic.send(map(make_event, range(300)))
    proposal = topic.init()
    assert (proposal["split"], proposal["rest"]) == ({"at": "meta.kind"}, {})
    assert {o["name"]: o["records"] for o in proposal["outputs"]} == {"order": 100, "user": 100, "refund": 100}
    assert (proposal["fit"], proposal["misfits"]) == (300, [])
    values = {at: value for at, (_, value) in topic.consume().items()}
    assert topic.read("payload.order_id, payload.amount, epoch_ms(meta.ts_ms), trace, status, _extra", "order") == {
        at: (*v["payload"].values(), v["meta"]["ts_ms"], v["trace"], v["status"], None)
        for at, v in values.items()
        if v["meta"]["kind"] == "order"
    }
    assert topic.read("payload.email", "user").keys() | topic.read("payload.reason", "refund").keys() == {
        at for at, v in values.items() if v["meta"]["kind"] != "order"
    }


def test_split_is_loaded_and_lands_with_a_large_rest(topic: Topic) -> None:
    """Without the policy in the file, a batch with 150 quarantined records of 1,500 would be refused."""
    records = [make_event(i) for i in range(1500)]
    for i in range(0, 1500, 10):
        records[i][1]["meta"]["kind"] = f"rare{i % 37}"  # type: ignore[index]
    topic.send(records)
    proposal = topic.init()
    assert proposal["split"] == {"at": "meta.kind"}
    assert "policies: {quarantine_limit: {share: 0.11}}" in proposal["text"]
    assert len(topic.read_quarantine()) == 150


def make_order(i: int) -> Sent:
    status = ("pending", "paid", "shipped", "refunded")[i % 4]
    own: dict[str, Any] = {"paid": {"paid_at": "2026-11-20"}, "shipped": {"carrier": "x", "tracking": "y"}}.get(
        status, {}
    )
    order = {"id": i, "customer": f"c{i}", "items": [{"sku": "a"}], "total": i / 4, "currency": "EUR"}
    return {"region": ("eu", "us")[i % 2]}, order | {"status": status} | own


def test_status_of_one_shape_does_not_split(topic: Topic) -> None:
    topic.send(map(make_order, range(400)))
    proposal = topic.init()
    assert (proposal["split"], proposal["fit"]) == ({}, 400)
    expected = {at: (v["status"], v.get("carrier"), None) for at, (_, v) in topic.consume().items()}
    assert topic.read("status, carrier, _extra") == expected


# -- envelopes

DECIMAL = "org.apache.kafka.connect.data.Decimal"
ROW = [
    {"field": "id", "type": "int64", "optional": False},
    {
        "field": "amount",
        "type": "bytes",
        "name": DECIMAL,
        "parameters": {"scale": "2", "connect.decimal.precision": "10"},
    },
    {"field": "born", "type": "int32", "name": "io.debezium.time.Date"},
    {"field": "changed", "type": "int64", "name": "io.debezium.time.MicroTimestamp"},
    {"field": "zoned", "type": "string", "name": "io.debezium.time.ZonedTimestamp"},
    {"field": "tags", "type": "array", "items": {"type": "string"}},
    {"field": "small", "type": "int16"},
]
SCHEMA = {
    "type": "struct",
    "name": "shop.orders.Envelope",
    "fields": [
        {"field": "before", "type": "struct", "fields": ROW, "optional": True},
        {"field": "after", "type": "struct", "fields": ROW, "optional": True},
        {"field": "op", "type": "string"},
    ],
}


def make_row(i: int) -> dict[str, Any]:
    cents = (-1) ** i * (i * 7919 % 100_000)
    size = max(1, (cents.bit_length() + 8) // 8)
    return {
        "id": i,
        "amount": base64.b64encode(cents.to_bytes(size, "big", signed=True)).decode(),
        "born": -3_000 + i,
        "changed": START * 1000 + i,
        "zoned": "2026-11-20T10:00:00.123456Z",
        "tags": [f"t{i}"],
        "small": i % 300,
    }


def make_change(i: int, row: dict[str, Any]) -> dict[str, Any]:
    op = "crud"[i % 4]
    source = {"version": "3.0", "ts_ms": START + i, "schema": "public", "table": "orders", "lsn": i}
    before, after = (row if op in "ud" else None), (row if op != "d" else None)
    return {"before": before, "after": after, "source": source, "op": op, "ts_ms": START + i}


def test_debezium_with_its_schema_lands_rows(topic: Topic) -> None:
    topic.send(
        ({}, None if i % 50 == 49 else {"schema": SCHEMA, "payload": make_change(i, make_row(i))}) for i in range(300)
    )
    proposal = topic.init()
    assert "change events of Debezium" in proposal["envelope"]
    assert f"# The records are {proposal['envelope']}." in proposal["text"]
    assert proposal["columns"] == {
        "id": "int64 at payload.after.id",
        "amount": "decimal(10,2) from base64 at payload.after.amount",
        "born": "date from days at payload.after.born",
        "changed": "epoch(us) at payload.after.changed",
        "zoned": "timestamp at payload.after.zoned",
        "tags": "list<string> at payload.after.tags",
        "small": "int16 at payload.after.small",
        "__op": "string at payload.op",
        "__ts_ms": "epoch(ms) at payload.ts_ms",
        "__source_ts_ms": "epoch(ms) at payload.source.ts_ms",
        "__source_schema": "string at payload.source.schema",
        "__source_table": "string at payload.source.table",
        "__before": "json at payload.before",
    }
    assert (proposal["fit"], proposal["misfits"]) == (300, [])
    expected = {}
    for at, (_, value) in topic.consume().items():
        change = value["payload"] if value else {}
        row = change.get("after") or {}
        cents = int.from_bytes(base64.b64decode(row["amount"]), "big", signed=True) if row else None
        before = change.get("before")
        expected[at] = (row.get("id"), cents, row.get("born"), row.get("changed"), change.get("op"), before, not value)
    rows = topic.read(
        "id, (amount * 100)::bigint, born - date '1970-01-01', epoch_us(changed), __op, __before, kafka_tombstone"
    )
    assert {at: (*row[:5], row[5] and json.loads(row[5]), row[6]) for at, row in rows.items()} == expected


@pytest.mark.parametrize(("has_schema", "is_text"), [(True, False), (False, False), (True, True), (False, True)])
def test_debezium_with_keys_is_changes_of_rows(topic: Topic, has_schema: bool, is_text: bool) -> None:
    """The proposal with a table added gives the rows as of now. Keys are objects, or the text of a field."""

    def wrap(part: Any) -> Any:
        return {"schema": SCHEMA, "payload": part} if has_schema else part

    rows = [make_row(i // 4 * 2 + i % 2) for i in range(200)]
    changes = [make_change(i // 2, row) for i, row in enumerate(rows)]
    keys = [row["id"] if is_text else wrap({"id": row["id"]}) for row in rows]
    topic.send((({}, wrap(change)) for change in changes), keys)
    proposal = topic.init()
    assert proposal["key"] == ["id"]
    assert "changes: {format: debezium, key: [id]}" in proposal["text"]
    assert set(proposal["columns"]) == {*rows[0]}
    assert (proposal["fit"], proposal["misfits"]) == (200, [])
    if has_schema:
        assert proposal["columns"]["amount"] == "decimal(10,2) from base64"
        assert proposal["columns"]["born"] == "date from days"
    path = topic.folder / "feeds" / "feed.yaml"
    path.write_text(path.read_text() + "table: {delta: {}, current: true}\n")
    done = topic.sluice("table", "sync", "feed")
    assert done.code == 0, done.err
    current = {row["id"]: change["after"] for row, change in zip(rows, changes, strict=True)}
    expected = {id: row and row["tags"] for id, row in current.items() if row}
    read = DeltaTable(f"{topic.folder}/.sluice/lake/tables/feed_current").to_pyarrow_table().to_pylist()
    assert {row["id"]: row["tags"] for row in read} == expected
    assert topic.sluice("table", "check", "feed").code == 0


def test_debezium_without_schema_lands_rows_by_sampled_values(topic: Topic) -> None:
    def make_plain(i: int) -> dict[str, Any]:
        price = f"{(-1) ** i * i // 3}.{i % 100:02}"
        return {
            "id": i,
            "price": price,
            "order_date": 20_000 + i,
            "created_at": START * 1000 + i,
            "note": f"{i}.5"[-4:],
        }

    topic.send(({}, make_change(i, make_plain(i))) for i in range(200))
    proposal = topic.init()
    types = {name: proposal["columns"][name] for name in ("id", "price", "order_date", "created_at", "__op")}
    assert types == {
        "id": "int64 at after.id",
        "price": "decimal(38,2) from text at after.price",
        "order_date": "date from days at after.order_date",
        "created_at": "epoch(us) at after.created_at",
        "__op": 'string from "op"',
    }
    expected = {}
    for at, (_, change) in topic.consume().items():
        row = change["after"] or {}
        expected[at] = (row.get("id"), row.get("price"), row.get("order_date"), row.get("created_at"), change["op"])
    rows = topic.read("id, price::varchar, order_date - date '1970-01-01', epoch_us(created_at), __op")
    assert rows == expected
    assert not topic.read_quarantine()


def make_cloud_event(i: int) -> dict[str, Any]:
    kind = ("com.shop.order.placed", "com.shop.user.joined")[i % 2]
    data = ({"id": i, "amount": i / 4}, {"id": f"u{i}", "email": "a@example.com", "plan": "free"})[i % 2]
    head = {"specversion": "1.0", "id": f"e{i}", "source": "/shop", "type": kind, "time": "2026-11-20T10:00:00Z"}
    return head | {"data": data}


def test_structured_cloud_events_become_an_output_for_each_type(topic: Topic) -> None:
    topic.send(({}, make_cloud_event(i)) for i in range(200))
    proposal = topic.init()
    assert "CloudEvents" in proposal["envelope"]
    assert (proposal["split"], proposal["rest"]) == ({"field": "type"}, {})
    assert find_output(proposal, "com_shop_order_placed")["columns"] == {
        "id": "int64 at data.id",
        "amount": "float64 at data.amount",
        "ce_specversion": 'string from "specversion"',
        "ce_id": 'string from "id"',
        "ce_source": 'string from "source"',
        "ce_type": 'string from "type"',
        "ce_time": 'timestamp from "time"',
    }
    values = {at: v for at, (_, v) in topic.consume().items()}
    assert topic.read("id, amount, ce_id, ce_time::varchar, _extra", "com_shop_order_placed") == {
        at: (*v["data"].values(), v["id"], "2026-11-20 10:00:00+00", None)
        for at, v in values.items()
        if v["type"] == "com.shop.order.placed"
    }
    assert len(topic.read("email", "com_shop_user_joined")) == 100


def test_binary_cloud_events_of_one_type_get_columns_from_headers(topic: Topic) -> None:
    events = [make_cloud_event(2 * i) for i in range(100)]
    topic.send(({f"ce_{name}": v for name, v in e.items() if name != "data"}, e["data"]) for e in events)
    proposal = topic.init()
    assert "binary mode" in proposal["envelope"]
    assert proposal["columns"] == {
        "id": "int64",
        "amount": "float64",
        **{f"ce_{n}": f"string header ce_{n}" for n in ("specversion", "id", "source", "type", "time")},
    }
    expected = {at: (v["id"], v["amount"], h["ce_id"], h["ce_type"], None) for at, (h, v) in topic.consume().items()}
    assert topic.read("id, amount, ce_id, ce_type, _extra") == expected


# -- types by majority, and strays


def test_a_few_numbers_among_texts_are_quarantined_and_named(topic: Topic) -> None:
    topic.send(({}, {"n": i, "code": i if i % 150 == 7 else f"c{i}"}) for i in range(917))
    proposal = topic.init()
    assert proposal["columns"] == {"n": "int64", "code": "string"}
    assert "911 text, 6 number: 6 records would be quarantined" not in proposal["text"]
    assert "910 text, 7 number: 7 records would be quarantined" in proposal["text"]
    values = {at: v for at, (_, v) in topic.consume().items()}
    numbers = {at for at, v in values.items() if isinstance(v["code"], int)}
    assert {(m["partition"], m["offset"]) for m in proposal["misfits"]} == numbers
    assert proposal["fit"] == 910
    assert topic.read_quarantine() == dict.fromkeys(numbers, "wrong_type")
    expected = {at: (v["n"], v["code"]) for at, v in values.items() if at not in numbers}
    assert topic.read("n, code") == expected


def test_many_numbers_among_texts_are_json(topic: Topic) -> None:
    topic.send(({}, {"n": i, "code": i if i % 5 == 0 else f"c{i}"}) for i in range(300))
    proposal = topic.init()
    assert proposal["columns"] == {"n": "int64", "code": "json"}
    assert "240 text, 60 number: json has all" in proposal["text"]
    expected = {at: (v["n"], v["code"]) for at, (_, v) in topic.consume().items()}
    assert {at: (n, json.loads(code)) for at, (n, code) in topic.read("n, code").items()} == expected


def test_strays_of_another_shape_get_no_columns(topic: Topic) -> None:
    stray = {"error": {f"field_{i}": {"code": i, "detail": "x"} for i in range(30)}, "id": "none"}

    def make(i: int) -> Any:
        plain = {"id": i, "at": "2026-11-20T10:00:00Z", "customer": f"c{i}", "total": i / 4}
        return stray if i % 250 == 3 else plain

    topic.send(({}, make(i)) for i in range(1000))
    proposal = topic.init()
    assert proposal["columns"] == {"id": "int64", "at": "timestamp", "customer": "string", "total": "float64"}
    values = {at: v for at, (_, v) in topic.consume().items()}
    strays = {at for at, v in values.items() if "error" in v}
    assert set(proposal["outputs"][0]["strays"]) == {f"{p}:{o}" for p, o in strays}
    assert "4 records of another shape, in _extra or quarantine: " in proposal["text"]
    assert max(map(len, proposal["text"].splitlines())) < 160
    assert (proposal["fit"], {(m["partition"], m["offset"]) for m in proposal["misfits"]}) == (996, strays)
    assert topic.read_quarantine().keys() == strays
    expected = {at: (v["id"], v["customer"], v["total"]) for at, v in values.items() if at not in strays}
    assert topic.read("id, customer, total") == expected
    printed = topic.sluice("init", "again", "--bootstrap", topic.kafka.bootstrap, "--topic", topic.topic).out
    assert "996 of 1,000 sampled records fit this schema; these do not: " in " ".join(printed.split())


def test_output_of_texts_lands_raw(topic: Topic) -> None:
    def make(i: int) -> Sent:
        return ({"type": "log"}, b"line %d" % i) if i % 3 == 0 else ({"type": "order"}, {"id": i, "total": i / 4})

    topic.send(map(make, range(300)))
    proposal = topic.init()
    assert [(o["name"], o["format"]["value"]) for o in proposal["outputs"]] == [("order", "json"), ("log", "raw")]
    assert proposal["fit"] == 300
    files = f"{topic.folder}/.sluice/lake/data/feed/log/**/*.parquet"
    assert len(duckdb.sql(f"select value from '{files}' where value::blob is not null").fetchall()) == 100
