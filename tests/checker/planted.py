"""A small feed, landed and committed by Sluice's own stages over ports in memory, in which faults can be planted.

`Sound` is a feed of two partitions with transactions, committed and aborted, three batches and their commits. Its
evidence is made from the description of the log, never from what Sluice read. What is planted changes files as
somebody would who holds the lake: entries, rows, hashes; everything else is made to agree with the fault.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from tests.checker.facts import Committed, Evidence, Log, Seen, Sent, Transaction
from tests.checker.invariants import Settings, Verdict, check
from tests.checker.lake import Folder
from tests.checker.ledger import Receipt, fold
from tests.pipelines.batch.test_batch import HOUR, PARTITIONS, Topic, World

FEED = "kafka: {bootstrap: 'a:1'}\ntopics: orders\nstart: earliest\n"
CATCH_UP = Request(RequestKind.CATCH_UP)
ZERO, ONE = PARTITIONS
Entry = dict[str, Any]


class Sound:
    """A feed that keeps every promise, in memory; `place` puts its lake into a folder, where faults are planted."""

    def __init__(self, root: Path, more: str = "", *, shared: bool = False) -> None:
        said = FEED + more + ("landing: {shared_files: true}\n" if shared else "")
        (root / "orders.yaml").write_text(said)
        self.world, self.root = World(load_feed(root / "orders.yaml", {})), root / "lake"
        self.sent: dict[facts.Who, Sent] = {}
        self.offsets: list[Committed] = []
        self.hands: list[tuple[facts.TP, int | None]] = []
        self.observed: list[tuple[int, str]] = []
        self.names = "p"
        """What producers' names begin with: in another life of the log they are others."""
        self.placed: dict[str, bytes] = {}

    # -- what happens

    def produce(self, tp: TopicPartition, count: int, ended: str | None = None, lag: int = 0) -> None:
        """Values in one batch, stamped `lag` ms ago; in a transaction that ends so now, when it is said."""
        base, name = self.world.topic.log(tp).end, f"{self.names}{tp.partition}"
        first = sum(of == name for of, _ in self.sent)
        transaction = f"t-{tp.partition}-{base}" if ended else None
        for n in range(count):
            who = (name, first + n)
            self.sent[who] = Sent(who, tp, base + n, "acknowledged", transaction, ended or "committed")
        values = [json.dumps({"producer": name, "sequence": first + n}).encode() for n in range(count)]
        records = tuple(LogRecord(b"k", v, self.world.now - lag, (("h", b"x"), ("none", None))) for v in values)
        producer = 7 if ended else -1
        self.world.topic.batches[tp].append(LogBatch(records, producer=producer, transactional=bool(ended)))
        if ended in ("committed", "aborted"):
            marker = COMMIT if ended == "committed" else ABORT
            ended_at = (LogRecord(time=self.world.now),)
            self.world.topic.batches[tp].append(LogBatch(ended_at, producer=7, marker=marker))

    def land(self, request: Request = CATCH_UP, **how: Any) -> None:
        self.world.now += HOUR
        self.world.land(request, **how)

    def commit(self) -> None:
        before = dict(self.world.group.offsets)
        commit(self.world.ledger, self.world.group, CommitSettings(CommitMode.TRANSACTIONAL, "x", OnGroupMoved.REFUSE))
        for tp, held in self.world.group.offsets.items():
            if before.get(tp) != held:
                self.committed(tp, held.offset, held.metadata)

    def committed(self, tp: TopicPartition, offset: int, metadata: str = "", time: int | None = None) -> None:
        at = f"0:{len(self.offsets)}"
        self.offsets.append(Committed("g", tuple(tp), offset, metadata, time or self.world.now, at))  # type: ignore[arg-type]

    def grow(self) -> None:
        """A whole life: three batches, each committed."""
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

    # -- what is seen

    def evidence(self) -> Evidence:
        logs = {tuple(tp): self.log(tp) for tp in PARTITIONS}
        return Evidence(logs, self.sent, tuple(self.offsets), tuple(self.hands), tuple(self.observed))  # type: ignore[arg-type]

    def log(self, tp: TopicPartition) -> Log:
        return log_of(self.world.topic, tp)

    def place(self) -> Folder:
        """The lake as a folder: what Sluice wrote since goes there, what was planted stays."""
        files = self.world.lake.files
        for path in set(files) | set(self.placed):
            if files.get(path) == self.placed.get(path):
                continue
            if path in files:
                (self.root / path).parent.mkdir(parents=True, exist_ok=True)
                (self.root / path).write_bytes(files[path])
            else:
                (self.root / path).unlink(missing_ok=True)
        self.placed = dict(files)
        return Folder(self.root, "orders")

    def check(self, evidence: Evidence | None = None, *, healed: bool = True) -> Verdict:
        return check(self.place(), evidence or self.evidence(), Settings(healed=healed))

    # -- what is planted

    def entry(self, number: int) -> Path:
        return self.place().root / "_sluice" / "orders" / "log" / f"{number:020d}.json"

    def numbers(self, kind: str) -> list[int]:
        return [n for n, e in self.place().entries().items() if e["kind"] == kind]

    def rewrite(self, number: int, change: Callable[[Entry], Any]) -> None:
        """Change an entry that stands."""
        raw = json.loads(self.entry(number).read_bytes())
        change(raw)
        self.entry(number).write_text(json.dumps(raw))

    def append(self, kind: str, **fields: Any) -> int:
        """Put one more entry, as Sluice would stamp it."""
        return append(self.place(), kind, **fields)

    def append_plan(self, *ranges: tuple[int, int], kind: str = "catch-up", replaces: Sequence[str] = ()) -> int:
        """A live plan over ranges of partition 0, with its right hash."""
        (first, *_), raw = self.numbers("plan"), {}
        standing = self.place().entries()[first]
        raw = json.loads(json.dumps(standing["plan"]))
        template = raw["tasks"][0]["slices"][0]
        raw["tasks"] = [
            raw["tasks"][0] | {"slices": [template | {"partition": 0, "start": a, "end": b} for a, b in ranges]}
        ]
        raw["request"]["kind"], raw["replaces"] = kind, list(replaces)
        return self.append("plan", plan=raw, hash=hash_of(raw), owner=standing["owner"] | {"token": "planted"})

    def receipt(self, offset: int) -> tuple[int, int]:
        """(entry, index) of the receipt of partition 0 that holds the offset."""
        for number in self.numbers("publish"):
            for i, r in enumerate(self.place().entries()[number]["receipts"]):
                s = r["slice"]
                if s["partition"] == 0 and s["start"] <= offset < s["end"]:
                    return number, i
        raise LookupError(offset)

    def change_rows(self, offset: int, change: Callable[[pa.Table], pa.Table], **counts: int) -> None:
        """Change the file that holds the offset, and let the ledger agree; `counts` are added to the receipt's."""
        number, i = self.receipt(offset)
        (part,) = self.place().entries()[number]["receipts"][i]["parts"]
        path = self.root / part["path"]
        table = change(pq.read_table(path))
        pq.write_table(table, path)
        said = sized(path) | {"rows": table.num_rows}

        def agree(entry: Entry) -> None:
            receipt = entry["receipts"][i]
            receipt["parts"][0] |= said
            for kind, more in counts.items():
                receipt["counts"][kind] += more

        self.rewrite(number, agree)


def log_of(topic: Topic, tp: TopicPartition) -> Log:
    """A log in memory as a consumer sees it and as the segments have it."""
    held, start = topic.log(tp), topic.log_start
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
        for b in held.batches
        if b.last >= start
    )
    log = Log(tuple(tp), topic.topic_id, topic.id, start, batches=batches)  # type: ignore[arg-type]
    rows = held.visible(start, log.last_stable_offset(True) or 0)
    log.seen = {r["offset"]: Seen(r["offset"], r["timestamp"], r["key"], r["value"], _headers(r)) for r in rows}
    return log


def append(folder: Folder, kind: str, **fields: Any) -> int:
    """Put one more entry, as Sluice would stamp it."""
    entries = folder.entries()
    number, last = len(entries), entries[len(entries) - 1]
    stamp = {"format": 1, "write": f"w{number}", "run": "", "at": last["at"], "cluster": last["cluster"]}
    path = folder.root / "_sluice" / folder.feed / "log" / f"{number:020d}.json"
    path.write_text(json.dumps({"kind": kind, **stamp, **fields}))
    return number


def pack(folder: Folder, first: int, end: int, forged: dict[int, bytes] | None = None) -> Path:
    """Copy entries into a segment, by docs/developers/design/ledger-growth.md; those that are `forged` say something
    else.
    """
    said = {n: (forged or {}).get(n, folder.said(n) or b"") for n in range(first, end)}
    sizes, rest = [(n, len(data)) for n, data in said.items()], b"".join(said.values())
    head = {"format": 1, "end": end, "entries": sizes, "sha256": hashlib.sha256(rest).hexdigest()}
    path = folder.root / "_sluice" / folder.feed / "segments" / f"{first:020d}-{end:020d}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(zlib.compress(json.dumps(head).encode() + b"\n" + rest))
    return path


def tear(folder: Folder, choose: int) -> tuple[int, int]:
    """Take one landed row away, hashes and counts agreeing; (partition, offset) of the row. LookupError: no rows."""
    held = [(r, p) for r in fold(folder.entries()).live() for p in r.parts if p.rows]
    if not held:
        raise LookupError("nothing landed")
    r, part = held[choose % len(held)]
    table = pq.read_table(folder.root / part.path, partitioning=None)
    row = choose % table.num_rows
    offset = folder.rows(part.path).offsets[row]
    pq.write_table(pa.concat_tables([table.slice(0, row), table.slice(row + 1)]), folder.root / part.path)
    place = folder.root / "_sluice" / folder.feed / "log" / f"{r.number:020d}.json"
    entry = json.loads(place.read_bytes())
    for receipt in entry["receipts"]:
        for said in receipt["parts"]:
            if said["path"] == part.path:
                said |= sized(folder.root / part.path) | {"rows": table.num_rows - 1}
                receipt["counts"]["landed"] -= 1
                receipt["counts"]["compacted"] += 1
    place.write_text(json.dumps(entry))
    return r.life.partition, offset


def land_again(folder: Folder) -> tuple[int, int]:
    """The newest offset range with rows, landed once more by a plan of its own; its (partition, start)."""
    entries = folder.entries()
    newest = max((r for r in fold(entries).live() if r.parts), key=lambda r: (r.number, r.life, r.start))
    number = newest.number
    receipt = next(r for r in entries[number]["receipts"] if r["slice"]["start"] == newest.start and _of(r, newest))
    standing = entries[newest.batch]
    raw = json.loads(json.dumps(standing["plan"]))
    raw["tasks"], raw["replaces"] = [raw["tasks"][0] | {"slices": [receipt["slice"]]}], []
    raw["request"] |= {"kind": "offsets", "replace": False}
    owner, hashed = standing["owner"] | {"token": "planted"}, hash_of(raw)
    plan = append(folder, "plan", plan=raw, hash=hashed, owner=owner)
    parts = [_copied(folder, p, entries[number]["batch"], plan, hashed) for p in receipt["parts"]]
    again = receipt | {"parts": parts}
    append(folder, "publish", batch=plan, token="planted", receipts=[again], failures=[], results=[])
    return newest.life.partition, newest.start


def _of(raw: Entry, r: Receipt) -> bool:
    s = raw["slice"]
    return (s["topic"], s["partition"], s["incarnation"]) == r.life


def _copied(folder: Folder, part: Entry, batch: int, plan: int, hashed: str) -> Entry:
    path = part["path"].replace(f"-b{batch}.", f"-b{plan}.")
    table = pq.read_table(folder.root / part["path"], partitioning=None)
    about = table.schema.metadata | {b"sluice.plan_hash": hashed.encode()}
    pq.write_table(table.replace_schema_metadata(about), folder.root / path)
    return part | {"path": path, "name": path.rpartition("/")[2]} | sized(folder.root / path)


def sized(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def hash_of(plan: Entry) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def asked(start: int, end: int, *, again: bool = False) -> Request:
    return Request(RequestKind.OFFSETS, ranges=(AskedRange("orders", 0, start, end),), replace=again)


def late(t: Transaction, by: int) -> Transaction:
    return t._replace(time=t.time + by)


def moved(sent: Sent, tp: facts.TP) -> Sent:
    return replace(sent, tp=tp)


def _headers(row: dict[str, Any]) -> tuple[tuple[bytes, bool], ...]:
    return tuple((h["key"].encode() + b":" + (h["value"] or b""), h["value"] is None) for h in row["headers"] or ())
