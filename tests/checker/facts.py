"""The evidence as plain data, and as the JSON lines in which it is kept.

    produced   {"producer": "p1", "sequence": 7, "topic": "orders", "partition": 0 or -1, "offset": 12 or null,
                "outcome": "acknowledged"|"failed"|"unknown", "transaction": "t-3" or null}
               {"transaction": "t-3", "ended": "committed"|"aborted"|"unknown"}        a line of its own, later
    scan       {"topic", "partition", "offset", "timestamp", "key", "value", "headers"}   bytes in base64, null: none
               {"topic", "partition", "log_start", "log_end"}                            one line a partition
    log        {"topic", "partition", "topic_id", "base", "last", "producer", "epoch", "leader_epoch", "time",
                "transactional", "control": null|"COMMIT"|"ABORT"|..., "offsets": [...], "valid"}   a batch a line
               {"topic", "partition", "topic_id", "log_start", "cluster"}                one line a partition
    offsets    {"group", "topic", "partition", "offset" or null, "metadata", "time", "at"}   in order of taking effect
    hands      {"topic", "partition", "offset" or null}         offsets that somebody else committed; null: any
    observed   {"number", "write"}                           entries of the ledger as others saw them meanwhile

A value says who sent it: JSON, or any text, that holds `producer` and `sequence`; a tombstone's key does. So does
`7.12`, as Kafka's VerifiableProducer writes it with `--value-prefix 7`: producer 7, sequence 12.
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
Who = tuple[str, int]
"""Producer and sequence."""

_WHO = re.compile(
    rb"""producer["']?\s*[:=]\s*["']?([\w.-]+)["']?\s*[,;& ]\s*["']?sequence["']?\s*[:=]\s*["']?([0-9]{1,18})"""
)
_VERIFIABLE = re.compile(rb"([0-9]{1,9})\.([0-9]{1,18})")


class EvidenceError(Exception):
    """The evidence cannot be read, or does not agree with itself: nothing can be decided on it."""


class Life(NamedTuple):
    """A partition during one life of its log, as the ledger names it."""

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
    """One value that a producer sent; partition −1: the producer did not say. `ended` is how its transaction ended,
    "committed" outside of one."""

    who: Who
    tp: TP
    offset: int | None
    outcome: str
    transaction: str | None
    ended: str

    @property
    def certain(self) -> bool:
        """Kafka said that it has it, for good."""
        return self.outcome == "acknowledged" and self.ended == "committed"


@dataclass(frozen=True, slots=True)
class Seen:
    """A record as a consumer sees it. `headers` are (key and value with a colon between, whether the value is null)."""

    offset: int
    timestamp: int | None
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[bytes, bool], ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of a log segment; `control` is what a marker says, empty for data."""

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
    """What is known of a partition's log: by the consumer (`seen`), by the segments (`batches`), or by both."""

    tp: TP
    topic_id: str = ""
    cluster: str = ""
    log_start: int = 0
    log_end: int | None = None
    high: int | None = None
    """The high watermark, where the consumer's tools told: what the segments hold above it nobody sees."""
    seen: dict[int, Seen] | None = None
    batches: tuple[Batch, ...] | None = None
    classes: dict[int, str] = field(default_factory=dict)
    transactions: tuple[Transaction, ...] = ()

    def __post_init__(self) -> None:
        if self.batches is not None:
            self.classify(self.batches)

    def classify(self, batches: tuple[Batch, ...]) -> None:
        """Which offsets are control, aborted, open or data; what is in none was compacted away or never there."""
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

    def last_stable_offset(self, committed: bool) -> int | None:
        """The last stable offset, or the high watermark for whoever reads uncommitted."""
        opened = [t.first for t in self.transactions if t.end is None] if committed else []
        ends = [e for e in (self.high, self.log_end) if e is not None]
        return min([*opened, *ends], default=None)

    def compacted(self, offset: int) -> bool:
        """Whether a record may have been at the offset that compaction took: the segments have none inside the log."""
        return self.batches is not None and offset not in self.classes and offset < (self.log_end or 0)

    def visible(self, committed: bool) -> set[int] | None:
        """The offsets of records that a consumer must see, of what the log still holds."""
        if self.batches is not None:
            kinds = {"data"} if committed else {"data", "aborted", "open"}
            held = {o for o, c in self.classes.items() if c in kinds and o >= self.log_start}
            stable = self.last_stable_offset(committed)
            return {o for o in held if stable is None or o < stable}
        return None if self.seen is None else {o for o in self.seen if o >= self.log_start}


class Committed(NamedTuple):
    """A committed offset as `__consumer_offsets` holds it, in the order of taking effect; None: deleted or expired."""

    group: str
    tp: TP
    offset: int | None
    metadata: str
    time: int
    at: str

    @property
    def mark(self) -> tuple[str, int, str] | None:
        """(ledger, number, incarnation) that Sluice stored beside it; None for what others committed."""
        try:
            raw = json.loads(self.metadata)
            return str(raw["sluice"]), int(raw["n"]), str(raw["i"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None


@dataclass
class Evidence:
    """Everything but the lake. What is None was not given, and what rests on it is not decided."""

    logs: dict[TP, Log] = field(default_factory=dict)
    produced: dict[Who, Sent] | None = None
    offsets: tuple[Committed, ...] | None = None
    hands: tuple[tuple[TP, int | None], ...] = ()
    observed: tuple[tuple[int, str], ...] = ()


def who(key: bytes | None, value: bytes | None) -> Who | None:
    """The producer and sequence that a record names."""
    found = _VERIFIABLE.fullmatch(value or b"") or _WHO.search(value or b"") or _WHO.search(key or b"")
    return (found[1].decode(), int(found[2])) if found else None


# -- JSON lines


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a file of JSON lines. A last line that was cut off by a kill is passed over."""
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


def produced(paths: Iterable[Path]) -> dict[Who, Sent]:
    """What producers logged; a transaction of which no end was logged is unknown."""
    records: list[dict[str, Any]] = []
    ended: dict[str, str] = {}
    for raw in (raw for path in paths for raw in lines(path)):
        if "sequence" in raw:
            records.append(raw)
        else:
            ended[raw["transaction"]] = raw["ended"]
    sent = [_sent(raw, ended) for raw in records]
    twice = [w for w, n in Counter(s.who for s in sent).items() if n > 1]
    if twice:
        raise EvidenceError(f"producers logged {twice[0]} more than once: a value is sent once, or is another value")
    return {s.who: s for s in sent}


def _sent(raw: dict[str, Any], ended: Mapping[str, str]) -> Sent:
    transaction = raw.get("transaction")
    how = raw.get("ended") or (ended.get(transaction, "unknown") if transaction else "committed")
    who = str(raw["producer"]), int(raw["sequence"])
    return Sent(who, (raw["topic"], raw["partition"]), raw.get("offset"), raw["outcome"], transaction, how)


def logs(scan: Path | None, dump: Path | None) -> dict[TP, Log]:
    """The logs, of both kinds of evidence together."""
    found: dict[TP, Log] = {}
    batches: dict[TP, list[Batch]] = {}
    for raw in lines(dump) if dump else ():
        tp = (raw["topic"], raw["partition"])
        log = found.setdefault(tp, Log(tp))
        if "log_start" in raw:
            log.topic_id, log.log_start, log.cluster = raw["topic_id"], raw["log_start"], raw["cluster"]
            batches.setdefault(tp, [])
        else:
            batches.setdefault(tp, []).append(_batch(raw))
    for tp, held in batches.items():
        found[tp].classify(tuple(sorted(held, key=lambda b: b.base)))
    for raw in lines(scan) if scan else ():
        _scanned(found, raw)
    return found


def _batch(raw: dict[str, Any]) -> Batch:
    fields = (raw["base"], raw["last"], raw["producer"], raw["epoch"], raw["leader_epoch"], raw["time"])
    return Batch(*fields, raw["transactional"], raw["control"] or "", tuple(raw["offsets"]), raw["valid"])


def _scanned(found: dict[TP, Log], raw: dict[str, Any]) -> None:
    tp = (raw["topic"], raw["partition"])
    log = found.setdefault(tp, Log(tp))
    log.seen = {} if log.seen is None else log.seen
    if "log_start" in raw:
        log.log_start, log.high = max(log.log_start, raw["log_start"]), raw["log_end"]
        log.log_end = max(log.log_end or 0, raw["log_end"])
    else:
        headers = tuple((_bytes(h[0]) or b"", bool(h[1])) for h in raw["headers"])
        log.seen[raw["offset"]] = Seen(
            raw["offset"], raw["timestamp"], _bytes(raw["key"]), _bytes(raw["value"]), headers
        )


def committed(path: Path) -> tuple[Committed, ...]:
    return tuple(
        Committed(r["group"], (r["topic"], r["partition"]), r["offset"], r["metadata"], r["time"], r["at"])
        for r in lines(path)
    )


def hands(path: Path) -> tuple[tuple[TP, int | None], ...]:
    return tuple(((r["topic"], r["partition"]), r["offset"]) for r in lines(path))


def observed(path: Path) -> tuple[tuple[int, str], ...]:
    return tuple((r["number"], r["write"]) for r in lines(path))


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


def base(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()
