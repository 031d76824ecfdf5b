"""A small feed, landed and committed by Sluice's own stages over ports in memory, in which faults can be planted.

`Sound` is a feed of two partitions with committed and aborted transactions, three batches and their commits. Its
evidence comes from the description of the log, never from Sluice's reads. A planted fault changes entries, rows and
hashes in the lake's files, and makes everything else agree with it.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines.committing.commit import CommitSettings, commit
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.feed.sections import CommitMode, OnGroupMoved
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.model.plans import AskedRange, Request, RequestKind
from sluice.testing.logs import ABORT, COMMIT, LogBatch, LogRecord
from tests.checker import facts
from tests.checker.facts import Committed, Evidence, Log, Record, Sent
from tests.checker.invariants import Settings, Verdict, check
from tests.checker.lake import Folder
from tests.checker.ledger import Receipt, fold_entries
from tests.pipelines.batch.test_batch import HOUR, PARTITIONS, Topic, World

FEED = "kafka: {bootstrap: 'a:1'}\ntopics: orders\nstart: earliest\n"
CATCH_UP = Request(RequestKind.CATCH_UP)
ZERO, ONE = PARTITIONS
Entry = dict[str, Any]


class Sound:
    """A feed in memory that violates no invariant; `write_lake` writes its lake to a folder, for planting faults."""

    def __init__(self, root: Path, more: str = "", *, shared: bool = False) -> None:
        text = FEED + more + ("landing: {shared_files: true}\n" if shared else "")
        (root / "orders.yaml").write_text(text)
        self.world, self.root = World(load_feed(root / "orders.yaml", {})), root / "lake"
        self.sent: dict[facts.ValueId, Sent] = {}
        self.offsets: list[Committed] = []
        self.hands: list[tuple[facts.TP, int | None]] = []
        self.observed: list[tuple[int, str]] = []
        self.name_prefix = "p"
        """The prefix of producers' names; it differs in another life of the log."""
        self.written: dict[str, bytes] = {}

    # -- events

    def produce(self, tp: TopicPartition, count: int, ended: str | None = None, lag: int = 0) -> None:
        """Produce values in one batch, stamped `lag` ms ago; with `ended`, in a transaction that ends like that now."""
        base, name = self.world.topic.log(tp).end, f"{self.name_prefix}{tp.partition}"
        first = sum(of == name for of, _ in self.sent)
        transaction = f"t-{tp.partition}-{base}" if ended else None
        for n in range(count):
            value_id = (name, first + n)
            self.sent[value_id] = Sent(value_id, tp, base + n, "acknowledged", transaction, ended or "committed")
        values = [json.dumps({"producer": name, "sequence": first + n}).encode() for n in range(count)]
        records = tuple(LogRecord(b"k", v, self.world.now - lag, (("h", b"x"), ("none", None))) for v in values)
        producer = 7 if ended else -1
        self.world.topic.batches[tp].append(LogBatch(records, producer=producer, transactional=bool(ended)))
        if ended in ("committed", "aborted"):
            marker = COMMIT if ended == "committed" else ABORT
            ended_at = (LogRecord(time=self.world.now),)
            self.world.topic.batches[tp].append(LogBatch(ended_at, producer=7, marker=marker))

    def land(self, request: Request = CATCH_UP, **options: Any) -> None:
        self.world.now += HOUR
        self.world.land(request, **options)

    def commit(self) -> None:
        before = dict(self.world.group.offsets)
        commit(self.world.ledger, self.world.group, CommitSettings(CommitMode.TRANSACTIONAL, "x", OnGroupMoved.REFUSE))
        for tp, current in self.world.group.offsets.items():
            if before.get(tp) != current:
                self.add_committed(tp, current.offset, current.metadata)

    def add_committed(self, tp: TopicPartition, offset: int, metadata: str = "", time: int | None = None) -> None:
        at = f"0:{len(self.offsets)}"
        self.offsets.append(Committed("g", tuple(tp), offset, metadata, time or self.world.now, at))  # type: ignore[arg-type]

    def grow(self) -> None:
        """Produce, land and commit three batches."""
        self.produce(ZERO, 4)
        self.produce(ZERO, 2, "committed")
        self.produce(ZERO, 2, "aborted")
        self.produce(ZERO, 2)
        self.produce(ONE, 5)
        self.land()
        self.commit()
        for _ in range(2):
            self.produce(ZERO, 3)
            self.produce(ONE, 1, "aborted")
            self.land()
            self.commit()

    # -- evidence

    def collect_evidence(self) -> Evidence:
        logs = {tuple(tp): self.log(tp) for tp in PARTITIONS}
        return Evidence(logs, self.sent, tuple(self.offsets), tuple(self.hands), tuple(self.observed))  # type: ignore[arg-type]

    def log(self, tp: TopicPartition) -> Log:
        return make_log(self.world.topic, tp)

    def write_lake(self) -> Folder:
        """Write the lake's files that Sluice changed since the last call to the folder; planted changes stay."""
        files = self.world.lake.files
        for path in set(files) | set(self.written):
            if files.get(path) == self.written.get(path):
                continue
            if path in files:
                (self.root / path).parent.mkdir(parents=True, exist_ok=True)
                (self.root / path).write_bytes(files[path])
            else:
                (self.root / path).unlink(missing_ok=True)
        self.written = dict(files)
        return Folder(self.root, "orders")

    def check(self, evidence: Evidence | None = None, *, healed: bool = True, chained: bool = True) -> Verdict:
        if chained:
            chain(self.write_lake())
        return check(self.write_lake(), evidence or self.collect_evidence(), Settings(healed=healed))

    # -- planted faults

    def get_entry_path(self, number: int) -> Path:
        return self.write_lake().root / "_sluice" / "orders" / "log" / f"{number:020d}.json"

    def list_numbers(self, kind: str) -> list[int]:
        return [n for n, e in self.write_lake().read_entries().items() if e["kind"] == kind]

    def rewrite(self, number: int, change: Callable[[Entry], Any]) -> None:
        """Change an existing entry."""
        raw = json.loads(self.get_entry_path(number).read_bytes())
        change(raw)
        self.get_entry_path(number).write_text(json.dumps(raw))

    def append(self, kind: str, **fields: Any) -> int:
        """Append an entry, stamped as Sluice stamps it."""
        return append(self.write_lake(), kind, **fields)

    def append_plan(self, *ranges: tuple[int, int], kind: str = "catch-up", replaces: Sequence[str] = ()) -> int:
        """Append a live plan over ranges of partition 0, with its correct hash."""
        (first, *_), raw = self.list_numbers("plan"), {}
        existing = self.write_lake().read_entries()[first]
        raw = json.loads(json.dumps(existing["plan"]))
        template = raw["tasks"][0]["slices"][0]
        raw["tasks"] = [
            raw["tasks"][0] | {"slices": [template | {"partition": 0, "start": a, "end": b} for a, b in ranges]}
        ]
        raw["request"]["kind"], raw["replaces"] = kind, list(replaces)
        return self.append("plan", plan=raw, hash=hash_plan(raw), owner=existing["owner"] | {"token": "planted"})

    def find_receipt(self, offset: int) -> tuple[int, int]:
        """Returns (entry number, index) of the receipt of partition 0 that holds the offset."""
        for number in self.list_numbers("publish"):
            for i, r in enumerate(self.write_lake().read_entries()[number]["receipts"]):
                s = r["slice"]
                if s["partition"] == 0 and s["start"] <= offset < s["end"]:
                    return number, i
        raise LookupError(offset)

    def change_rows(self, offset: int, change: Callable[[pa.Table], pa.Table], **counts: int) -> None:
        """Change the file that holds the offset, and adapt the ledger; `counts` are added to the receipt's counts."""
        number, i = self.find_receipt(offset)
        (part,) = self.write_lake().read_entries()[number]["receipts"][i]["parts"]
        path = self.root / part["path"]
        table = change(pq.read_table(path))
        pq.write_table(table, path)
        measures = measure_file(path) | {"rows": table.num_rows}

        def adapt(entry: Entry) -> None:
            receipt = entry["receipts"][i]
            receipt["parts"][0] |= measures
            for kind, more in counts.items():
                receipt["counts"][kind] += more

        self.rewrite(number, adapt)


def make_log(topic: Topic, tp: TopicPartition) -> Log:
    """Returns a log in memory as both a consumer and the segments show it."""
    log_in_memory, start = topic.log(tp), topic.log_start
    kinds = {None: "", COMMIT: "COMMIT", ABORT: "ABORT"}
    batches = tuple(
        facts.Batch(
            *(
                b.base,
                b.last,
                b.batch.producer,
                0,
                0,
                max(r.time for r in b.batch.records),
                b.batch.transactional or b.batch.marker is not None,
            ),
            *(kinds[b.batch.marker], b.offsets),
        )
        for b in log_in_memory.batches
        if b.last >= start
    )
    log = Log(tuple(tp), topic.topic_id, topic.id, start, batches=batches)  # type: ignore[arg-type]
    rows = log_in_memory.visible(start, log.find_last_stable_offset(True) or 0)
    log.records = {
        r["offset"]: Record(r["offset"], r["timestamp"], r["key"], r["value"], _convert_headers(r)) for r in rows
    }
    return log


def append(folder: Folder, kind: str, **fields: Any) -> int:
    """Append an entry, stamped as Sluice stamps it; returns its number."""
    entries = folder.read_entries()
    number, last = len(entries), entries[len(entries) - 1]
    stamp = {"format": 1, "write": f"w{number}", "run": "", "at": last["at"], "cluster": last["cluster"]}
    path = folder.root / "_sluice" / folder.feed / "log" / f"{number:020d}.json"
    path.write_text(json.dumps({"kind": kind, **stamp, **fields}))
    return number


def chain(folder: Folder) -> None:
    """Let each entry follow the one before it again, after planted changes."""
    before = b""
    for number in folder.read_entries():
        path = folder.root / "_sluice" / folder.feed / "log" / f"{number:020d}.json"
        follows = hashlib.sha256(before).hexdigest() if before else ""
        before = re.sub(rb'("follows": ?")[^"]*"', rb"\g<1>" + follows.encode() + b'"', path.read_bytes())
        path.write_bytes(before)


def pack(folder: Folder, first: int, end: int, forged: dict[int, bytes] | None = None) -> Path:
    """Copy entries into a segment, by docs/developers/design/ledger-growth.md; `forged` replaces some of the copies."""
    entries = {n: (forged or {}).get(n, folder.read_entry(n) or b"") for n in range(first, end)}
    sizes, body = [(n, len(data)) for n, data in entries.items()], b"".join(entries.values())
    head = {"format": 1, "end": end, "entries": sizes, "sha256": hashlib.sha256(body).hexdigest()}
    path = folder.root / "_sluice" / folder.feed / "segments" / f"{first:020d}-{end:020d}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(zlib.compress(json.dumps(head).encode() + b"\n" + body))
    return path


def tear(folder: Folder, choose: int) -> tuple[int, int]:
    """Remove a landed row, and adapt hashes and counts. Returns its (partition, offset). LookupError: no rows."""
    candidates = [
        (live, p) for live in fold_entries(folder.read_entries()).list_live_receipts() for p in live.parts if p.rows
    ]
    if not candidates:
        raise LookupError("nothing landed")
    live, landed_part = candidates[choose % len(candidates)]
    table = pq.read_table(folder.root / landed_part.path, partitioning=None)
    row = choose % table.num_rows
    offset = folder.read_rows(landed_part.path).offsets[row]
    pq.write_table(pa.concat_tables([table.slice(0, row), table.slice(row + 1)]), folder.root / landed_part.path)
    path = folder.root / "_sluice" / folder.feed / "log" / f"{live.number:020d}.json"
    entry = json.loads(path.read_bytes())
    for receipt in entry["receipts"]:
        for part in receipt["parts"]:
            if part["path"] == landed_part.path:
                part |= measure_file(folder.root / landed_part.path) | {"rows": table.num_rows - 1}
                receipt["counts"]["landed"] -= 1
                receipt["counts"]["compacted"] += 1
    path.write_text(json.dumps(entry))
    return live.life.partition, offset


def land_again(folder: Folder) -> tuple[int, int]:
    """Land the newest offset range with rows once more, by a separate plan. Returns its (partition, start)."""
    entries = folder.read_entries()
    newest = max(
        (r for r in fold_entries(entries).list_live_receipts() if r.parts), key=lambda r: (r.number, r.life, r.start)
    )
    number = newest.number
    receipt = next(r for r in entries[number]["receipts"] if r["slice"]["start"] == newest.start and _is_of(r, newest))
    template = entries[newest.batch]
    raw = json.loads(json.dumps(template["plan"]))
    raw["tasks"], raw["replaces"] = [raw["tasks"][0] | {"slices": [receipt["slice"]]}], []
    raw["request"] |= {"kind": "offsets", "replace": False}
    owner, plan_hash = template["owner"] | {"token": "planted"}, hash_plan(raw)
    plan = append(folder, "plan", plan=raw, hash=plan_hash, owner=owner)
    parts = [_copy_part(folder, p, entries[number]["batch"], plan, plan_hash) for p in receipt["parts"]]
    again = receipt | {"parts": parts}
    append(folder, "publish", batch=plan, token="planted", receipts=[again], failures=[], results=[])
    return newest.life.partition, newest.start


def _is_of(raw: Entry, r: Receipt) -> bool:
    s = raw["slice"]
    return (s["topic"], s["partition"], s["incarnation"]) == r.life


def _copy_part(folder: Folder, part: Entry, batch: int, plan: int, plan_hash: str) -> Entry:
    path = part["path"].replace(f"-b{batch}.", f"-b{plan}.")
    table = pq.read_table(folder.root / part["path"], partitioning=None)
    metadata = table.schema.metadata | {b"sluice.plan_hash": plan_hash.encode()}
    pq.write_table(table.replace_schema_metadata(metadata), folder.root / path)
    return part | {"path": path, "name": path.rpartition("/")[2]} | measure_file(folder.root / path)


def measure_file(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def hash_plan(plan: Entry) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def request_range(start: int, end: int, *, again: bool = False) -> Request:
    return Request(RequestKind.OFFSETS, ranges=(AskedRange("orders", 0, start, end),), replace=again)


def _convert_headers(row: dict[str, Any]) -> tuple[tuple[bytes, bool], ...]:
    return tuple((h["key"].encode() + b":" + (h["value"] or b""), h["value"] is None) for h in row["headers"] or ())
