"""The evidence as plain data, and the JSON lines in which it is stored.

    produced   {"producer": "p1", "sequence": 7, "topic": "orders", "partition": 0 or -1, "offset": 12 or null,
                "outcome": "acknowledged"|"failed"|"unknown", "transaction": "t-3" or null}
               {"transaction": "t-3", "ended": "committed"|"aborted"|"unknown"}        a separate, later line
    scan       {"topic", "partition", "offset", "timestamp", "key", "value", "headers"}   bytes in base64, null: none
               {"topic", "partition", "log_start", "log_end"}                            one line a partition
    log        {"topic", "partition", "topic_id", "base", "last", "producer", "epoch", "leader_epoch", "time",
                "transactional", "control": null|"COMMIT"|"ABORT"|..., "offsets": [...], "valid"}   a batch a line
               {"topic", "partition", "topic_id", "log_start", "cluster"}                one line a partition
    offsets    {"group", "topic", "partition", "offset" or null, "metadata", "time", "at"}   in order of taking effect
    hands      {"topic", "partition", "offset" or null}         offsets that another client committed; null: any
    observed   {"number", "write"}                           ledger entries as other readers saw them during the run

A value names its producer and sequence number: JSON or any other text with `producer` and `sequence`; for a tombstone
the key does. `7.12`, as Kafka's VerifiableProducer writes it with `--value-prefix 7`, means producer 7, sequence 12.
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

TP = tuple[str, int]
"""Topic and partition."""
ValueId = tuple[str, int]
"""Producer and sequence number, which identify a value."""

_VALUE_ID = re.compile(
    rb"""producer["']?\s*[:=]\s*["']?([\w.-]+)["']?\s*[,;& ]\s*["']?sequence["']?\s*[:=]\s*["']?([0-9]{1,18})"""
)
_VERIFIABLE = re.compile(rb"([0-9]{1,9})\.([0-9]{1,18})")


class EvidenceError(Exception):
    """The evidence is unreadable or contradicts itself, so nothing can be decided."""


class Life(NamedTuple):
    """A partition during one life of its log, identified as in the ledger."""

    topic: str
    partition: int
    incarnation: str

    @property
    def tp(self) -> TP:
        return self.topic, self.partition

    @property
    def topic_id(self) -> str:
        return self.incarnation.partition("#")[0]

    @property
    def is_over(self) -> bool:
        """Returns whether an operator accepted that Kafka no longer has the partition."""
        return "#gone" in self.incarnation

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}"


@dataclass(frozen=True, slots=True)
class Sent:
    """A value that a producer sent. Partition −1: the producer did not log it.

    `ended` is how its transaction ended; "committed" outside of one.
    """

    id: ValueId
    tp: TP
    offset: int | None
    outcome: str
    transaction: str | None
    ended: str

    @property
    def certain(self) -> bool:
        """Kafka acknowledged the value, and its transaction, if any, was committed."""
        return self.outcome == "acknowledged" and self.ended == "committed"


@dataclass(frozen=True, slots=True)
class Record:
    """A record as a consumer sees it. Each header is (`key:value`, whether the value is null)."""

    offset: int
    timestamp: int | None
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[bytes, bool], ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of a log segment; `control` is the marker's type, empty for data."""

    base: int
    last: int
    producer: int
    epoch: int
    leader_epoch: int
    time: int
    transactional: bool
    control: str
    offsets: tuple[int, ...]
    valid: bool = True


class Transaction(NamedTuple):
    """A transaction's part of a log: `end` is its marker's offset (None: open), `time` the marker's."""

    first: int
    producer: int
    end: int | None
    marker: str
    time: int


@dataclass
class Log:
    """A partition's log as the consumer (`records`), the segments (`batches`), or both show it."""

    tp: TP
    topic_id: str = ""
    cluster: str = ""
    log_start: int = 0
    log_end: int | None = None
    high: int | None = None
    """The high watermark, if the consumer's tools reported it; no consumer sees records above it."""
    records: dict[int, Record] | None = None
    batches: tuple[Batch, ...] | None = None
    classes: dict[int, str] = field(default_factory=dict)
    transactions: tuple[Transaction, ...] = ()

    def __post_init__(self) -> None:
        if self.batches is not None:
            self.set_batches(self.batches)

    def set_batches(self, batches: tuple[Batch, ...]) -> None:
        """Set the batches, and classify their offsets as control, aborted, open or data.

        An offset in no class was compacted away or never existed.
        """
        self.batches, self.classes, done = batches, {}, []
        begun: dict[int, list[Batch]] = {}
        for b in batches:
            self.classes |= dict.fromkeys(b.offsets, "control" if b.control else "data")
            if b.control in ("COMMIT", "ABORT"):
                mine = begun.pop(b.producer, [])
                done += [Transaction(mine[0].base, b.producer, b.base, b.control, b.time)] if mine else []
                if b.control == "ABORT":
                    self.classes |= {o: "aborted" for m in mine for o in m.offsets}
            elif b.transactional:
                begun.setdefault(b.producer, []).append(b)
        for producer, mine in begun.items():
            done.append(Transaction(mine[0].base, producer, None, "", 0))
            self.classes |= {o: "open" for m in mine for o in m.offsets}
        self.transactions = tuple(sorted(done))
        self.log_end = max(self.log_end or 0, batches[-1].last + 1 if batches else 0)

    def find_last_stable_offset(self, committed_only: bool) -> int | None:
        """Returns the last stable offset, or the high watermark for `read_uncommitted`."""
        opened = [t.first for t in self.transactions if t.end is None] if committed_only else []
        ends = [e for e in (self.high, self.log_end) if e is not None]
        return min([*opened, *ends], default=None)

    def is_compacted(self, offset: int) -> bool:
        """Returns whether compaction may have removed a record at the offset: it is in the log, but in no segment."""
        return self.batches is not None and offset not in self.classes and offset < (self.log_end or 0)

    def list_visible(self, committed_only: bool) -> set[int] | None:
        """Returns the offsets at or above the log start that a consumer must see."""
        if self.batches is not None:
            kinds = {"data"} if committed_only else {"data", "aborted", "open"}
            offsets = {o for o, c in self.classes.items() if c in kinds and o >= self.log_start}
            stable = self.find_last_stable_offset(committed_only)
            return {o for o in offsets if stable is None or o < stable}
        return None if self.records is None else {o for o in self.records if o >= self.log_start}


class Committed(NamedTuple):
    """A committed offset in `__consumer_offsets`, in the order of taking effect; None: deleted or expired."""

    group: str
    tp: TP
    offset: int | None
    metadata: str
    time: int
    at: str

    @property
    def mark(self) -> tuple[str, int, str] | None:
        """(ledger, number, incarnation) from Sluice's metadata; None for an offset that another client committed."""
        try:
            raw = json.loads(self.metadata)
            return str(raw["sluice"]), int(raw["n"]), str(raw["i"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None


@dataclass
class Evidence:
    """All evidence but the lake. A field that is None was not given; invariants that need it are not decided."""

    logs: dict[TP, Log] = field(default_factory=dict)
    produced: dict[ValueId, Sent] | None = None
    offsets: tuple[Committed, ...] | None = None
    hands: tuple[tuple[TP, int | None], ...] = ()
    observed: tuple[tuple[int, str], ...] = ()


def find_value_id(key: bytes | None, value: bytes | None) -> ValueId | None:
    """Returns the producer and sequence number that a record names."""
    match = _VERIFIABLE.fullmatch(value or b"") or _VALUE_ID.search(value or b"") or _VALUE_ID.search(key or b"")
    return (match[1].decode(), int(match[2])) if match else None


# -- JSON lines


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file of JSON lines. Skips a last line that a kill cut off."""
    text = path.read_bytes().split(b"\n")
    for number, line in enumerate(text, 1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except ValueError as e:
            if number == len(text):
                return
            raise EvidenceError(f"{path}:{number} is not JSON: {e}") from None


def write_lines(path: Path, objects: Iterable[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(o, separators=(",", ":")) + "\n" for o in objects)
    return path


def read_produced(paths: Iterable[Path]) -> dict[ValueId, Sent]:
    """Read producers' logs. A transaction without a logged end is unknown."""
    records: list[dict[str, Any]] = []
    ended: dict[str, str] = {}
    for raw in (raw for path in paths for raw in read_lines(path)):
        if "sequence" in raw:
            records.append(raw)
        else:
            ended[raw["transaction"]] = raw["ended"]
    sent = [_parse_sent(raw, ended) for raw in records]
    twice = [w for w, n in Counter(s.id for s in sent).items() if n > 1]
    if twice:
        raise EvidenceError(f"producers logged {twice[0]} more than once: a value is sent once, or is another value")
    return {s.id: s for s in sent}


def _parse_sent(raw: dict[str, Any], ended: Mapping[str, str]) -> Sent:
    transaction = raw.get("transaction")
    how = raw.get("ended") or (ended.get(transaction, "unknown") if transaction else "committed")
    value_id = str(raw["producer"]), int(raw["sequence"])
    return Sent(value_id, (raw["topic"], raw["partition"]), raw.get("offset"), raw["outcome"], transaction, how)


def read_logs(scan: Path | None, dump: Path | None) -> dict[TP, Log]:
    """Read the logs from a consumer's scan, a dump of segments, or both."""
    logs: dict[TP, Log] = {}
    batches: dict[TP, list[Batch]] = {}
    for raw in read_lines(dump) if dump else ():
        tp = (raw["topic"], raw["partition"])
        log = logs.setdefault(tp, Log(tp))
        if "log_start" in raw:
            log.topic_id, log.log_start, log.cluster = raw["topic_id"], raw["log_start"], raw["cluster"]
            batches.setdefault(tp, [])
        else:
            batches.setdefault(tp, []).append(_parse_batch(raw))
    for tp, of_partition in batches.items():
        logs[tp].set_batches(tuple(sorted(of_partition, key=lambda b: b.base)))
    for raw in read_lines(scan) if scan else ():
        _add_scanned(logs, raw)
    return logs


def _parse_batch(raw: dict[str, Any]) -> Batch:
    fields = (raw["base"], raw["last"], raw["producer"], raw["epoch"], raw["leader_epoch"], raw["time"])
    return Batch(*fields, raw["transactional"], raw["control"] or "", tuple(raw["offsets"]), raw["valid"])


def _add_scanned(logs: dict[TP, Log], raw: dict[str, Any]) -> None:
    tp = (raw["topic"], raw["partition"])
    log = logs.setdefault(tp, Log(tp))
    log.records = {} if log.records is None else log.records
    if "log_start" in raw:
        log.log_start, log.high = max(log.log_start, raw["log_start"]), raw["log_end"]
        log.log_end = max(log.log_end or 0, raw["log_end"])
    else:
        headers = tuple((_decode_base64(h[0]) or b"", bool(h[1])) for h in raw["headers"])
        log.records[raw["offset"]] = Record(
            raw["offset"], raw["timestamp"], _decode_base64(raw["key"]), _decode_base64(raw["value"]), headers
        )


def read_committed_offsets(path: Path) -> tuple[Committed, ...]:
    return tuple(
        Committed(r["group"], (r["topic"], r["partition"]), r["offset"], r["metadata"], r["time"], r["at"])
        for r in read_lines(path)
    )


def read_manual_commits(path: Path) -> tuple[tuple[TP, int | None], ...]:
    return tuple(((r["topic"], r["partition"]), r["offset"]) for r in read_lines(path))


def read_observed(path: Path) -> tuple[tuple[int, str], ...]:
    return tuple((r["number"], r["write"]) for r in read_lines(path))


def _decode_base64(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


def encode_base64(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()
