"""Which of the invariants of docs/developers/design/invariants.md hold, by what can be seen from outside.

 1 loss        each record that a consumer sees below the frontier is in a live part, in quarantine, or in a range that
               an entry names; each value that was acknowledged for good is there, too, or was lost by Kafka itself
 2 duplicate   no offset of a life in two rows of live parts; no two live receipts meet
 3 phantom     each row has the log's bytes, time and place; none is of a control batch or an aborted transaction;
               each file has the bytes and the hash that the ledger says
 4 tiling      ranges of plans do not meet and leave nothing out; what is planned is published or failed; boundaries
               never decrease; a window declared complete is; with `healed`, no hole below what landed
 5 sums        a receipt's classes add up to its span, files have its rows; control and aborted as the segments have it
 6 order       offsets strictly increase in a file; where ranges share it, in each of them, and each row is of one range
 7 ahead       each committed offset lies at or below the frontier of the entry that its mark names, and of the time
 8 back        committed offsets of one incarnation never decrease, but by hand; none of another ledger is overwritten
               that nobody took over
 9 same        a plan's hash is that of its content, parts are named by range and number, two attempts of a range agree
10 files       below data/ and quarantine/ is what counts, and nothing else
11 numbers     no number is missing or written twice: writes, marks, files and other readers' notes agree on it; what
               segments hold of old entries is what these say
12 ids         entries, plans, files and marks name the cluster and the topic ids that Kafka has
13 stable      no range reaches beyond the log, or past a transaction that was open when it was planned
14 healed      with `healed`: the frontier is the last stable offset, and the committed offset is there, too
15 teeth       `test_teeth.py`
16 windows     by each boundary that was looked up: no record that was there, in order, lies on its wrong side; one that
               was planned before it was pinned is in the window that was open then
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import struct
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple

from tests.checker import lake as files
from tests.checker.facts import TP, Committed, Evidence, EvidenceError, Life, Log, Seen, Sent, who
from tests.checker.lake import Folder, Rows
from tests.checker.ledger import Book, Broken, Part, Pin, Plan, Receipt, _at, fold, receipt_of

NAMES = {
    1: "no loss",
    2: "no duplicate",
    3: "no phantom",
    4: "ranges tile",
    5: "classes add up",
    6: "offsets increase",
    7: "committed never ahead of published",
    8: "committed never goes back",
    9: "the same plan, the same files",
    10: "only files that count",
    11: "one creator a number",
    12: "cluster and topic ids agree",
    13: "nothing beyond the last stable offset",
    14: "healed: everything that is stable landed",
    16: "in order, in its window",
}
EXAMPLES = 5
"""Counter-examples that are kept of each kind in each place."""


@dataclass(frozen=True)
class Settings:
    """`group`: whose committed offsets are the feed's. `healed`: faults are over, and runs went on to the end.

    `elsewhere`: the evidence lacks the store to which the feed commits.
    `skew_ms`: how far clocks of runs and brokers may lie apart where order rests on them; None: they are not compared.
    """

    group: str | None = None
    healed: bool = False
    elsewhere: bool = False
    skew_ms: int | None = 5_000


@dataclass
class Verdict:
    """What was found. `decided`: by what each invariant was; `undecided`: why not; `counts`: how much was looked at."""

    feed: str
    broken: list[Broken] = field(default_factory=list)
    decided: dict[int, str] = field(default_factory=dict)
    undecided: dict[int, list[str]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    notes: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.broken

    @property
    def first(self) -> dict[int, Broken]:
        """Of each broken invariant the first counter-example."""
        found: dict[int, Broken] = {}
        for b in self.broken:
            found.setdefault(b.invariant, b)
        return dict(sorted(found.items()))

    def document(self) -> dict[str, Any]:
        first = [{"invariant": n, "text": b.text, "where": dict(b.where)} for n, b in self.first.items()]
        all_of = {n: sum(b.invariant == n for b in self.broken) for n in self.first}
        return {
            "feed": self.feed,
            "holds": self.holds,
            "first": first,
            "found": all_of,
            "decided": self.decided,
            "undecided": self.undecided,
            "counts": dict(self.counts),
            "notes": self.notes,
        }

    def __str__(self) -> str:
        lines = [f"checked {self.feed}: " + ", ".join(f"{n} {what}" for what, n in self.counts.items())]
        for n, name in NAMES.items():
            bad = self.first.get(n)
            more = sum(b.invariant == n for b in self.broken) - 1
            state = f"BROKEN {bad.text}" + (f" (and {more} more)" if more > 0 else "") if bad else "holds"
            if not bad and n not in self.decided:
                state = f"not decided: {'; '.join(self.undecided.get(n, ['nothing was given that tells']))}"
            elif not bad and n in self.undecided:
                state += f", but not decided: {'; '.join(self.undecided[n])}"
            lines.append(f"  I{n:<2} {name}: {state}")
        return "\n".join([*lines, *(f"  note: {n}" for n in self.notes)])


def check(folder: Folder, evidence: Evidence, settings: Settings = Settings()) -> Verdict:
    """Decide everything that the evidence decides. Raises EvidenceError for evidence that contradicts itself."""
    return _Check(folder, evidence, settings).run()


@dataclass(frozen=True)
class _File:
    """A live part with its receipt and, where it could be read, its rows."""

    receipt: Receipt
    part: Part
    rows: Rows | None


class _Check:
    def __init__(self, folder: Folder, evidence: Evidence, settings: Settings) -> None:
        self.folder, self.evidence, self.settings = folder, evidence, settings
        self.book: Book = fold(folder.entries())
        self.verdict = Verdict(folder.feed)
        self.committed_only = self.book.mode()
        self.files: list[_File] = []
        self.read: dict[str, Rows | None] = {}
        """What lies in each file, which offset ranges may share."""
        self.rows: dict[Life, dict[int, tuple[_File, int]]] = defaultdict(dict)
        self.differs: set[tuple[Life, int]] = set()
        """Offset ranges of which a record is lost or a phantom: their sums differ from the log's for that reason."""

    def run(self) -> Verdict:
        _agree(self.evidence, self.committed_only)
        self.verdict.broken += self.book.broken
        self._read()
        for decide in (
            self._placed,
            self._in_folders,
            self._against_log,
            self._against_producers,
            self._sums,
            self._windows,
            self._bounded,
            self._same,
            self._visible,
            self._numbers,
            self._copies,
            self._ids,
            self._stable,
            self._healed,
        ):
            self._found(decide())
        if self.evidence.offsets is not None:
            self._found(_Commits(self.book, self.evidence, self.settings, self.verdict).check())
        self._say()
        self.verdict.broken.sort(key=_order)
        return self.verdict

    def _found(self, found: Iterable[Broken]) -> None:
        self.verdict.broken += found

    # -- files

    def _read(self) -> None:
        for r in self.book.live():
            for p in r.parts:
                self._found(self._file(r, p))
        self._found(self._shared())
        self.verdict.counts |= {
            "entries": len(self.book.entries),
            "live offset ranges": len(self.book.live()),
            "files": len({f.part.path for f in self.files}),
            "rows": sum(len(f.rows.records) for f in self.files if f.rows),
        }

    def _file(self, r: Receipt, p: Part) -> Iterator[Broken]:
        where = _at(r.life, r.start, path=p.path, number=r.number)
        size = self.folder.size(p.path)
        staged = size is None and self.folder.size(p.staged) is not None
        path = p.staged if staged else p.path
        if size is None and (self.settings.healed or not staged):
            yield Broken(1, f"{p.path} ({r}, {p.rows} rows) is missing", where)
        if size is None and not staged:
            self.files.append(_File(r, p, None))
            return
        if self.folder.size(path) != p.file_bytes or self.folder.sha256(path) != p.sha256:
            yield Broken(3, f"{path}: its bytes are not those whose hash entry {r.number} holds", where)
        if path not in self.read:
            try:
                self.read[path] = self.folder.rows(path)
            except EvidenceError as e:
                self.read[path] = None
                yield Broken(3, str(e), where)
        rows = self.read[path]
        self.files.append(_File(r, p, rows.some(p.first, p.rows) if rows and p.shared else rows))

    def _shared(self) -> Iterator[Broken]:
        """Each row of a file is of exactly one range that counts (2, 3); a file that is not shared is of one
        range.
        """
        held: dict[str, list[_File]] = defaultdict(list)
        for f in self.files:
            held[f.part.path].append(f)
        for path, some in held.items():
            first = some[0]
            where = _at(first.receipt.life, first.receipt.start, path=path, number=first.receipt.number)
            if len(some) > 1 and not all(f.part.shared for f in some):
                yield Broken(
                    2, f"{path} is the file of {len(some)} offset ranges, and not shared by all of them", where
                )
            at = 0
            for begins, rows in sorted((f.part.first, f.part.rows) for f in some) if first.part.shared else ():
                if begins != at:
                    what = "of two offset ranges" if begins < at else "of no offset range that counts"
                    yield Broken(2, f"{path}: rows {min(at, begins)} to {max(at, begins)} are {what}", where)
                at = max(at, begins + rows)
            there = self.read.get(path) or self.read.get(first.part.staged)
            if first.part.shared and (at != first.part.file_rows or (there and len(there.records) != at)):
                yield Broken(2, f"{path}: offset ranges that count have {at} of its {first.part.file_rows} rows", where)

    def _placed(self) -> Iterator[Broken]:
        """Order, place and uniqueness of rows (2, 3, 6)."""
        for f in self.files:
            life, offsets = f.receipt.life, f.rows.offsets if f.rows else []
            for i, offset in enumerate(offsets):
                where = _at(life, offset, path=f.part.path, row=i)
                if i and offset < offsets[i - 1]:
                    yield Broken(6, f"{f.part.path}: offset {offset} in row {i} follows {offsets[i - 1]}", where)
                if (f.rows and f.rows.places[i] != life.tp) or not f.receipt.holds(offset):
                    yield Broken(
                        3, f"{f.part.path}: row {i} is of offset {offset}, the offset range is {f.receipt}", where
                    )
                    continue
                if offset in self.rows[life]:
                    other = self.rows[life][offset][0].part.path
                    yield Broken(2, f"{life}:{offset} is in {other} and in {f.part.path}", where)
                self.rows[life][offset] = (f, i)

    def _in_folders(self) -> Iterator[Broken]:
        """The folders of all parts have the keys with which the ledger began (18)."""
        prefix = self.book.folder_prefix or ""
        allowed = [[f"{prefix}{level}" for level in ("date", "hour", "minute")[:n]] for n in range(4)]
        for f in self.files:
            keys = [level.partition("=")[0] for level in f.part.path.split("/")[2:-1]]
            if keys not in allowed:
                where = _at(f.receipt.life, f.receipt.start, path=f.part.path, number=f.receipt.number)
                yield Broken(18, f"{f.part.path}: keys of this ledger's folders begin with {prefix!r}", where)

    # -- the log

    def _log(self, life: Life) -> Log | None:
        """The log of that life, if it is the one that Kafka has now."""
        log = self.evidence.logs.get(life.tp)
        if log is None or (log.topic_id and log.topic_id != life.topic_id):
            return None
        current = self.book.current.get(life.tp)
        return log if current and current.topic_id == life.topic_id else None

    def _cut(self, life: Life) -> int | None:
        """Where a later life of the same log begins: from there on, what this life held was truncated."""
        lives = self.book.lives.get(life.tp, [])
        later = lives[lives.index(life) + 1 :] if life in lives else []
        return min((self.book.origins[x] for x in later if x.topic_id == life.topic_id), default=None)

    def _comparable(self, life: Life, log: Log) -> Callable[[int], bool]:
        cut = self._cut(life)
        return lambda offset: offset >= log.log_start and (cut is None or offset < cut)

    def _against_log(self) -> Iterator[Broken]:
        """What a consumer sees, record by record (1, 3)."""
        for life in sorted(self.book.origins):
            if log := self._log(life):
                yield from self._lost(life, log)
                yield from self._phantoms(life, log)
            else:
                self.verdict.counts["rows of logs that are gone"] += len(self.rows[life])

    def _lost(self, life: Life, log: Log) -> Iterator[Broken]:
        visible, held = log.visible(self.committed_only), self._comparable(life, log)
        find = _Finder([r for r in self.book.live() if r.life == life])
        missing: dict[int, list[int]] = defaultdict(list)
        for offset in sorted(o for o in visible or () if held(o)):
            at = find.at(offset)
            if at is not None:
                self.verdict.counts["records compared with the log"] += 1
                if offset not in self.rows[life]:
                    missing[at].append(offset)
            elif (span := self.book.named(life, offset)) and span.kind == "landed":
                text = f"{life}:{offset} landed by entry {span.number}, and nothing that counts holds it"
                yield Broken(1, text, _at(life, offset, number=span.number))
        landed = find.receipts
        for s in self.book.spans.get(life, ()):
            there = [o for o in visible or () if s.kind == "lost" and s.start <= o < s.end and held(o)]
            if there and all(b.valid for b in log.batches or () if b.base <= min(there) <= b.last):
                text = f"{life}:{min(there)} is in the log, and entry {s.number} names {s.start}-{s.end} lost"
                yield Broken(1, text, _at(life, min(there), number=s.number))
        for at, offsets in missing.items():
            dropped = landed[at].counts["dropped"]
            if dropped < len(offsets):
                self.differs.add((life, landed[at].start))
                said = f", of which {dropped} were dropped" if dropped else ""
                text = f"{life}:{offsets[0]} is in the log, and neither landed nor in quarantine ({landed[at]}"
                yield Broken(1, f"{text}: {len(offsets)} such{said})", _at(life, offsets[0], number=landed[at].number))

    def _phantoms(self, life: Life, log: Log) -> Iterator[Broken]:
        visible, held = log.visible(self.committed_only), self._comparable(life, log)
        for offset, (f, row) in sorted(self.rows[life].items()):
            if not held(offset) or visible is None or log.compacted(offset):
                self.verdict.counts["rows that the log no longer holds"] += 1
                continue
            where = _at(life, offset, path=f.part.path, row=row)
            if offset not in visible:
                self.differs.add((life, f.receipt.start))
                unknown = "nothing that a consumer sees" if log.batches is None else "beyond the log"
                kind = log.classes.get(offset, unknown)
                yield Broken(3, f"{life}:{offset} in {f.part.path} is {kind}", where)
                continue
            mended = _within(offset, f.receipt.mended)
            if (
                log.seen is not None
                and not mended
                and (differs := _differs(f, row, log.seen[offset], self.book.sources))
            ):
                yield Broken(3, f"{life}:{offset} in {f.part.path}: {differs}", where)

    # -- producers

    def _against_producers(self) -> Iterator[Broken]:
        """What producers were told (1, 3)."""
        if self.evidence.produced is None:
            return
        here = self._values()
        for sent in self.evidence.produced.values():
            yield from self._acknowledged(sent, here)
        for (life, offset), name in sorted(here.items()):
            yield from self._sent(life, offset, name)
        self.verdict.counts["values sent"] = len(self.evidence.produced)

    def _values(self) -> dict[tuple[Life, int], tuple[str, int]]:
        """Who sent what landed, by place."""
        found = {}
        for life, rows in self.rows.items():
            for offset, (f, row) in rows.items():
                if _within(offset, f.receipt.mended) or f.rows is None:
                    continue
                record = f.rows.records[row]
                name = who(record.key, record.value) or (_typed_who(f.rows.typed[row]) if f.rows.typed else None)
                if name:
                    found[life, offset] = name
        return found

    def _acknowledged(self, sent: Sent, here: dict[tuple[Life, int], tuple[str, int]]) -> Iterator[Broken]:
        """Of a value whose offset the producer was told: it is there, or named, or pending, or Kafka itself lost it."""
        if not sent.certain or sent.offset is None:
            return
        lives = self.book.lives.get(sent.tp, [])
        for life in lives:
            if here.get((life, sent.offset)) == sent.who:
                return
        named = [s for life in lives if (s := self.book.named(life, sent.offset))]
        if not lives or not named or any(s.kind != "landed" for s in named):
            self.verdict.counts["acknowledged values pending, passed over or named"] += 1
            return
        life, log = lives[-1], self.evidence.logs.get(sent.tp)
        seen = log.seen.get(sent.offset) if log and log.seen is not None else None
        if any(sent.offset in self.rows[x] for x in lives) or any(self._drops(x, sent.offset) for x in lives):
            yield from self._other(sent, lives, log, here)
            return
        if seen is not None and who(seen.key, seen.value) == sent.who:
            return  # named as lost by the comparison with the log
        if log is not None and sent.offset >= log.log_start:
            self.verdict.counts["acknowledged values that Kafka lost"] += 1
            return
        text = f"{_name(sent)} was acknowledged at {life}:{sent.offset}, and is nowhere"
        yield Broken(1, text, _at(life, sent.offset, producer=sent.who[0], sequence=sent.who[1]))

    def _other(
        self, sent: Sent, lives: list[Life], log: Log | None, here: dict[tuple[Life, int], tuple[str, int]]
    ) -> Iterator[Broken]:
        """Another record stands where it was acknowledged: where the log holds it still, that was compared above."""
        offset, other = sent.offset or 0, here.get((lives[0], sent.offset or 0))
        gone = log is None or offset < log.log_start or log.compacted(offset)
        if len(lives) == 1 and other and gone:
            text = f"{lives[0]}:{offset} holds {other[0]}/{other[1]}, and {_name(sent)} was acknowledged there"
            yield Broken(3, text, _at(lives[0], offset, producer=sent.who[0], sequence=sent.who[1]))

    def _drops(self, life: Life, offset: int) -> bool:
        return any(r.life == life and r.holds(offset) and r.counts["dropped"] for r in self.book.live())

    def _sent(self, life: Life, offset: int, name: tuple[str, int]) -> Iterator[Broken]:
        sent = (self.evidence.produced or {}).get(name)
        where = _at(life, offset, producer=name[0], sequence=name[1])
        if sent is None:
            yield Broken(3, f"{life}:{offset} holds {name[0]}/{name[1]}, which nobody sent", where)
        elif sent.tp != (life.topic, life.partition if sent.tp[1] >= 0 else -1):
            yield Broken(3, f"{life}:{offset} holds {_name(sent)}, which was sent to {sent.tp[0]}:{sent.tp[1]}", where)
        elif sent.ended == "aborted" and self.committed_only:
            text = f"{life}:{offset} holds {_name(sent)}, of transaction {sent.transaction}, which was aborted"
            yield Broken(3, text, where)

    # -- sums, windows, names

    def _sums(self) -> Iterator[Broken]:
        held = defaultdict(list)
        for f in self.files:
            held[f.receipt.number, f.receipt.life, f.receipt.start].append(f)
        for r in self.book.live():
            where = _at(r.life, r.start, number=r.number)
            if sum(r.counts.values()) != r.span:
                yield Broken(5, f"{r}: classes add up to {sum(r.counts.values())}, the span is {r.span}", where)
            for kind in ("landed", "quarantined"):
                mine = [f for f in held[r.number, r.life, r.start] if f.part.kind == kind]
                rows = sum(len(f.rows.records) if f.rows else f.part.rows for f in mine)
                if r.counts[kind] != rows or sum(f.part.rows for f in mine) != rows:
                    yield Broken(
                        5, f"{r}: entry {r.number} counts {r.counts[kind]} {kind}, the files hold {rows}", where
                    )
            yield from self._sums_of_log(r)

    def _sums_of_log(self, r: Receipt) -> Iterator[Broken]:
        """Control and aborted records as the segments have them, where they still have every offset of the offset
        range.
        """
        log = self._log(r.life)
        if log is None or log.batches is None or (r.life, r.start) in self.differs:
            return
        held, offsets = self._comparable(r.life, log), range(r.start, r.end)
        if not all(o in log.classes and held(o) for o in offsets):
            return
        control, aborted = (sum(log.classes[o] == kind for o in offsets) for kind in ("control", "aborted"))
        aborted = aborted if self.committed_only else 0
        placed = sum(r.counts[kind] for kind in ("landed", "quarantined", "dropped"))
        for kind, mine, there in (
            ("control", r.counts["control"], control),
            ("aborted", r.counts["aborted"], aborted),
            ("visible", placed, r.span - control - aborted),
        ):
            if mine != there:
                text = f"{r}: {mine} {kind} records counted, the segments hold {there}"
                yield Broken(5, text, _at(r.life, r.start, number=r.number))

    def _windows(self) -> Iterator[Broken]:
        """Boundaries never decrease, and what a manifest calls complete is accounted for (4)."""
        for life, pins in sorted(self.book.pins.items()):
            rows = sorted(pins.items())
            for (before, a), (time, b) in itertools.pairwise(rows):
                if b < a:
                    yield Broken(
                        4, f"{life}: the boundary at {time} is {b}, that at {before} is {a}", _at(life, b, time=time)
                    )
        for path, manifest in self.folder.manifests().items():
            for at in manifest["boundaries"]:
                yield from self._complete(path, manifest, at)

    def _bounded(self) -> Iterator[Broken]:
        """Boundaries beside the stamps of the log's records (16)."""
        for life, pins in sorted(self.book.resolved.items()):
            log = self._log(life)
            if log and log.seen is not None and log.batches is not None and log.log_start <= self.book.origins[life]:
                held = _Stamps(log, self._comparable(life, log), self.book.origins[life])
                self.verdict.counts["boundaries compared with stamps"] += len(pins)
                for pin in pins.values():
                    yield from self._on_its_side(life, held, pin)

    def _on_its_side(self, life: Life, held: _Stamps, pin: Pin) -> Iterator[Broken]:
        skew = self.settings.skew_ms
        late, early = held.too_late(pin, self.book.resolved[life].values()), held.too_early(pin, skew)
        for record, side in ((late, "at or above"), (early, "below")):
            if record and not (record is early and self.book.planned(life, record.offset, pin.number)):
                said = f"{life}:{record.offset} is stamped {record.stamp}, in order, and stands {side} the boundary"
                where = _at(life, record.offset, number=pin.number, time=pin.time)
                yield Broken(16, f"{said} at {pin.time}, which entry {pin.number} pinned to {pin.offset}", where)

    def _complete(self, path: str, manifest: dict[str, Any], at: dict[str, Any]) -> Iterator[Broken]:
        lives = [x for x in self.book.lives.get((at["topic"], at["partition"]), []) if x.topic_id == at["topic_id"]]
        spans = sorted(s for life in lives for s in self.book.spans.get(life, ()))
        reached = at["start"]
        for s in spans:
            reached = max(reached, s.end) if s.start <= reached else reached
        if reached < at["end"] and lives:
            text = f"{path} says complete, and {lives[-1]}:{reached}-{at['end']} is not accounted for"
            yield Broken(4, text, _at(lives[-1], reached, path=path))

    def _same(self) -> Iterator[Broken]:
        """Names and footers follow from plan and offset range; attempts at one range agree (9, 11)."""
        for f in self.files:
            yield from self._named_right(f)
        attempts: dict[tuple[int, Life, int, int, str], dict[str, Any]] = {}
        for raw in self.folder.staged():
            batch = int(raw["from"].split("/")[3])
            r = receipt_of(raw, batch)
            mine = {"counts": r.counts, "parts": sorted(self._same_part(p) for p in r.parts)}
            first = attempts.setdefault((batch, r.life, r.start, r.end, r.format), mine)
            if first != mine:
                yield Broken(
                    9,
                    f"{raw['from']}: another attempt at {r} wrote other files",
                    _at(r.life, r.start, path=raw["from"]),
                )

    def _named_right(self, f: _File) -> Iterator[Broken]:
        r, plan = f.receipt, self.book.plans[f.receipt.batch]
        where = _at(r.life, r.start, path=f.part.path, number=r.batch)
        if f.part.shared:
            yield from self._shared_right(f, plan, where)
            return
        stem = files.part_name(r.life.topic, r.life.partition, r.start, r.end, r.batch, 0).removesuffix(".parquet")
        name = f.part.path.rpartition("/")[2].removesuffix(".parquet")
        rest = name.removeprefix(stem)
        if not name.startswith(stem) or (rest and not rest[1:].isdigit()):
            yield Broken(9, f"{f.part.path} is not how a part of {r} by plan {r.batch} is named", where)
        about = f.rows.about if f.rows else {}
        if about and about.get("sluice.plan_hash") != plan.hash:
            text = f"{f.part.path} was written for another plan {r.batch} than the one that stands there"
            yield Broken(11, text, where)
        if about and (about.get("sluice.topic_id") != r.life.incarnation or about.get("sluice.range") != str(r)):
            text = f"{f.part.path} says it holds {about.get('sluice.range')} of {about.get('sluice.topic_id')}, not {r}"
            yield Broken(12, text, where)

    def _shared_right(self, f: _File, plan: Plan, where: dict[str, Any]) -> Iterator[Broken]:
        """A shared file is named by its first range, and its footer names all ranges, of one life of the
        topic.
        """
        r, path = f.receipt, f.part.path
        mine = sorted((o for o in self.files if o.part.path == path), key=lambda o: o.part.first)
        first = mine[0].receipt
        name = files.shared_name(first.life.topic, first.life.partition, first.start, first.end, r.batch)
        if path.rpartition("/")[2] != name:
            yield Broken(9, f"{path} is not how a file of {first} and others by plan {r.batch} is named", where)
        about = f.rows.about if f.rows else {}
        if about and about.get("sluice.plan_hash") != plan.hash:
            yield Broken(11, f"{path} was written for another plan {r.batch} than the one that stands there", where)
        told = [[str(o.receipt), o.part.rows] for o in mine]
        if about and (about.get("sluice.topic_id") != r.life.incarnation or json.loads(about["sluice.slices"]) != told):
            yield Broken(12, f"{path} says it holds {about.get('sluice.slices')}, and not {told}", where)

    def _same_part(self, p: Part) -> tuple[Any, ...]:
        """What attempts at a range agree in. Which others share its file, and so its hash, may differ."""
        if not p.shared:
            return p.name, p.rows, p.sha256
        try:
            rows = self.folder.rows(p.staged).some(p.first, p.rows)
        except EvidenceError:  # of an attempt that died
            return p.kind, p.rows, ""
        return p.kind, p.rows, hashlib.sha256(repr((rows.records, rows.typed)).encode()).hexdigest()

    def _visible(self) -> Iterator[Broken]:
        live = {f.part.path for f in self.files}
        known = {p.path for r in self.book.receipts for p in r.parts}
        for path in sorted(self.folder.list_visible() - live):
            if path in self.book.replaced or path in known:
                if self.settings.healed:
                    yield Broken(10, f"{path} does not count any more, and is still there", {"path": path})
                else:
                    self.verdict.counts["files that no longer count, still there"] += 1
            else:
                yield Broken(10, f"{path} is in no entry of the ledger", {"path": path})
        for path in sorted(live & self.book.replaced):
            yield Broken(10, f"{path} counts and was replaced", {"path": path})

    # -- numbers, ids, ends

    def _numbers(self) -> Iterator[Broken]:
        for number, write in self.evidence.observed:
            stands = self.book.entries.get(number, {}).get("write")
            if self.book.lost(number):
                self.verdict.counts["entries that were seen and are named as lost"] += stands != write
            elif stands != write:
                text = f"entry {number} was seen with write {write}, and {stands or 'nothing'} stands there"
                yield Broken(11, text, {"number": number})

    def _copies(self) -> Iterator[Broken]:
        """A segment whose last entry is the log's says what the log says, entry by entry; any other is of another log,
        and nobody reads it."""
        for s in self.folder.segments():
            numbers = list(s.entries)
            whole = numbers == sorted(numbers) and s.named == (min(numbers, default=-1), s.end)
            if not whole:
                yield Broken(11, f"{s.path} does not hold the entries that it is named for", {"path": s.path})
                continue
            if self.folder.said(numbers[-1]) != s.entries[numbers[-1]]:
                self.verdict.counts["segments of another log"] += 1
                continue
            self.verdict.counts["entries in segments"] += len(numbers)
            missing = (n for n in range(*s.named) if n not in s.entries and not self.book.lost(n))
            wrong = (n for n in numbers if self.folder.said(n) != s.entries[n])
            for number in sorted({*missing, *wrong}):
                where = {"number": number, "path": s.path}
                yield Broken(11, f"{s.path} does not say what entry {number} says", where)

    def _ids(self) -> Iterator[Broken]:
        for tp, log in sorted(self.evidence.logs.items()):
            life = self.book.current.get(tp)
            if life and log.topic_id and life.topic_id != log.topic_id and self.settings.healed:
                yield Broken(
                    12, f"{life} is topic id {life.topic_id} in the ledger, {log.topic_id} in Kafka", _at(life, 0)
                )
            if life and log.cluster and self.book.cluster != log.cluster:
                yield Broken(12, f"the ledger's cluster is {self.book.cluster}, Kafka's is {log.cluster}", _at(life, 0))

    def _stable(self) -> Iterator[Broken]:
        for plan in self.book.plans.values():
            if plan.kind not in ("compact", "replay"):
                for life, start, end in plan.offset_ranges:
                    yield from self._ends_stable(plan.number, plan.at, life, start, end)

    def _ends_stable(self, number: int, at: int, life: Life, start: int, end: int) -> Iterator[Broken]:
        log = self._log(life)
        if log is None or self._cut(life) is not None or end <= log.log_start:
            return
        where = _at(life, end, number=number)
        if log.log_end is not None and end > log.log_end:
            yield Broken(
                13, f"plan {number}: {life}:{start}-{end} ends beyond the log, which ends at {log.log_end}", where
            )
        for t in log.transactions if self.committed_only else ():
            late = t.end is not None and self.settings.skew_ms is not None and t.time > at + self.settings.skew_ms
            if t.first < end and (t.end is None or late):
                when = f"ended {t.time - at} ms after it was planned" if t.end is not None else "is still open"
                text = f"plan {number}: {life}:{start}-{end} holds offset {t.first} of a transaction that {when}"
                yield Broken(13, text, where)

    def _healed(self) -> Iterator[Broken]:
        if not self.settings.healed:
            return
        for tp, log in sorted(self.evidence.logs.items()):
            stable, life = log.last_stable_offset(self.committed_only), self.book.current.get(tp)
            if stable is None:
                continue
            frontier = self.book.frontier(life) if life else None
            if life is None or frontier is None or (frontier < stable and self._log(life)):
                where = {"topic": tp[0], "partition": tp[1], "offset": frontier}
                yield Broken(14, f"{tp[0]}:{tp[1]} landed up to {frontier}, the last stable offset is {stable}", where)
                yield from self._holes(life) if life else ()

    def _holes(self, life: Life) -> Iterator[Broken]:
        frontier = self.book.frontier(life)
        beyond = [s for s in self.book.spans.get(life, ()) if frontier is not None and s.start > frontier]
        if beyond:
            text = f"{life}:{frontier}-{beyond[0].start} is accounted for nowhere, and what follows is {beyond[0].kind}"
            yield Broken(4, text, _at(life, frontier or 0))

    # -- what was decided

    def _say(self) -> None:
        e, decided = self.evidence, self.verdict.decided
        seen = any(log.seen is not None for log in e.logs.values())
        dumped = any(log.batches is not None for log in e.logs.values())
        by_log = " and ".join(w for w, on in (("Kafka's consumer", seen), ("the segments", dumped)) if on)
        self._by(1, bool(by_log), f"the lake beside {by_log}", "neither a scan nor a dump was given")
        self._by(3, seen, f"every byte beside {by_log}", "no scan was given: the log's bytes are not known")
        decided |= dict.fromkeys((2, 4, 5, 6, 9, 10, 11, 12), "the ledger's files and the lake's")
        self._by(13, dumped or seen, by_log, "neither a scan nor a dump was given")
        if not dumped:
            self.verdict.undecided.setdefault(13, []).append("no dump was given: transactions are not known")
            self.verdict.undecided.setdefault(5, []).append("no dump was given: control and aborted counts")
        if e.produced is None:
            self.verdict.undecided.setdefault(1, []).append("no producers' log was given: what Kafka acknowledged")
        for n in (7, 8):
            self._by(
                n, e.offsets is not None, "`__consumer_offsets` beside the ledger", "no dump of `__consumer_offsets`"
            )
        self._by(16, dumped and seen, "stamps in the segments and the scan", "it takes both a scan and a dump")
        self._by(14, self.settings.healed and bool(by_log), by_log, "faults were not said to be over")
        if self.settings.skew_ms is None:
            self.verdict.undecided.setdefault(7, []).append(
                "clocks were not to be compared: order by ledger numbers only"
            )

    def _by(self, number: int, on: bool, how: str, why_not: str) -> None:
        if on:
            self.verdict.decided[number] = how
        else:
            self.verdict.undecided.setdefault(number, []).append(why_not)


# -- committed offsets


class _Commits:
    """`__consumer_offsets` beside the ledger (7, 8, and what marks say of 11 and 12)."""

    def __init__(self, book: Book, evidence: Evidence, settings: Settings, verdict: Verdict) -> None:
        self.book, self.evidence, self.settings, self.verdict = book, evidence, settings, verdict
        self.highest: dict[Life, int] = {}
        self.standing: dict[TP, Committed] = {}
        self.ids = {book.id, *book.former, *book.taken}
        self.by_hand: set[TP] = set()
        """Where the offset that stands was put there by somebody else."""

    def check(self) -> Iterator[Broken]:
        groups = {c.group for c in self._all() if c.mark and c.mark[0] in self.ids}
        if self.settings.group:
            groups = {self.settings.group}
        for c in self._all():
            if c.group in groups and c.tp in self.book.lives:
                self.verdict.counts["committed offsets"] += 1
                yield from self._one(c)
                self.standing[c.tp] = c
        yield from self._at_last()

    def _all(self) -> tuple[Committed, ...]:
        return self.evidence.offsets or ()

    def _one(self, c: Committed) -> Iterator[Broken]:
        mark = c.mark
        if c.offset is None:
            return  # deleted, or expired: the next one must not go back all the same
        if mark and (self._taken(mark) or (mark[0] == self.book.id and self.book.lost(mark[1]))):
            yield from self._by_lost(c, c.offset, Life(*c.tp, mark[2]))
        elif mark and mark[0] == self.book.id:
            yield from self._ours(c, c.offset, mark[1], Life(*c.tp, mark[2]))
        else:
            yield from self._by_others(c, c.offset)

    def _taken(self, mark: tuple[str, int, str]) -> bool:
        """Whether this ledger goes on for the one of the mark, up to there."""
        return mark[0] in self.book.former or mark[1] <= self.book.taken.get(mark[0], -1)

    def _ours(self, c: Committed, offset: int, number: int, life: Life) -> Iterator[Broken]:
        where = _at(life, offset, number=number, at=c.at)
        said = f"{life} was committed at {offset} ({c.at} of __consumer_offsets, mark {number})"
        last = self.standing.get(c.tp)
        other = last.mark if last and last.offset is not None else None
        if other and other[0] != self.book.id and not self._taken(other):
            yield Broken(8, f"{said}, over that of ledger {other[0]}, which nobody took over", where)
        if self.book.intents.get(number, {}).get(life) != offset:
            yield Broken(11, f"{said}, and entry {number} is no intent to do so", where)
        known = self.book.currents.get(number, {}).get(life.tp)
        if known != life and number in self.book.currents:
            yield Broken(12, f"{said} for topic id {life.incarnation}, the ledger was at {known}", where)
        published = self.book.frontier(life, number)
        if published is not None and offset > published:
            yield Broken(7, f"{said}, published was up to {published}", where)
        else:
            yield from self._in_time(c, life, offset, said, where)
        yield from self._back(life, offset, said, where)

    def _by_lost(self, c: Committed, offset: int, life: Life) -> Iterator[Broken]:
        """By an entry that is named as lost: what was published then nobody can say. It holds all the same that it
        never goes back, and that what is below it is accounted for in the end."""
        self.verdict.counts["committed offsets of entries that are named as lost"] += 1
        where, said = _at(life, offset, at=c.at), f"{life} was committed at {offset} ({c.at}), by a lost entry"
        yield from self._back(life, offset, said, where)
        published = self.book.frontier(life)
        if self.settings.healed and (published is None or offset > published):
            yield Broken(7, f"{said}, published is up to {published}", where)

    def _in_time(self, c: Committed, life: Life, offset: int, said: str, where: dict[str, Any]) -> Iterator[Broken]:
        """By the clocks, too, what is committed had been published."""
        if self.settings.skew_ms is None or c.time <= 0:
            return
        for number, entry in self.book.entries.items():
            reached = self.book.frontier(life, number)
            if reached is not None and reached >= offset:
                if entry["at"] > c.time + self.settings.skew_ms:
                    late = f"{said}, {entry['at'] - c.time} ms before entry {number} published that far"
                    yield Broken(7, late, where)
                return

    def _back(self, life: Life, offset: int, said: str, where: dict[str, Any]) -> Iterator[Broken]:
        highest = self.highest.get(life, -1)
        if offset < highest and life.tp not in self.by_hand:
            yield Broken(8, f"{said}, after {highest}", where)
        self.highest[life] = offset
        self.by_hand.discard(life.tp)

    def _by_others(self, c: Committed, offset: int) -> Iterator[Broken]:
        """Without our mark: somebody's hand, as logged, as the ledger knows, or nobody's who may."""
        life = self.book.current[c.tp]
        where = _at(life, offset, at=c.at)
        self.by_hand.add(c.tp)
        if {(c.tp, offset), (c.tp, None)} & set(self.evidence.hands) or self._accepted(life, offset):
            self.verdict.counts["committed offsets moved by hand"] += 1
            return
        frontier, said = self.book.frontier(life), f"{life} was committed at {offset} ({c.at}) without a mark"
        if frontier is not None and offset > frontier:
            yield Broken(7, f"{said}, published is up to {frontier}", where)
        elif offset < self.highest.get(life, -1):
            yield Broken(8, f"{said}, after {self.highest[life]}", where)

    def _accepted(self, life: Life, offset: int) -> bool:
        origins = (i for e in self.book.entries.values() if e["kind"] == "origin" for i in e["items"])
        seen = any(Life(*i["key"]) == life and i["committed"] == offset for i in origins)
        return seen or any(x.tp == life.tp and o == offset for _, x, o in self.book.moved)

    def _at_last(self) -> Iterator[Broken]:
        if not self.settings.healed or self.settings.elsewhere:
            return
        for tp, life in sorted(self.book.current.items()):
            last, frontier = self.standing.get(tp), self.book.frontier(life)
            if life.is_over:
                continue
            if (self.highest or self.book.intents) and (last is None or last.offset != frontier):
                at = last.offset if last else None
                yield Broken(14, f"{life} is committed at {at}, and landed up to {frontier}", _at(life, frontier or 0))


class _Stamped(NamedTuple):
    """A record; `before` is the latest stamp of anything in the log before it, aborted or not."""

    offset: int
    stamp: int
    before: int


class _Stamps:
    """The records of one log, up to where compaction took something, with what tells which are in order."""

    def __init__(self, log: Log, held: Callable[[int], bool], origin: int) -> None:
        self.batches = [b for b in log.batches or () if not b.control and held(b.base)]
        gone = next((o for o in range(origin, log.log_end or 0) if o not in log.classes or not held(o)), None)
        self.records = [r for r in self._of(log.seen or {}) if origin <= r.offset and (gone is None or r.offset < gone)]
        self.offsets = [r.offset for r in self.records]

    def _of(self, seen: dict[int, Seen]) -> Iterator[_Stamped]:
        before = -1
        for batch in self.batches:
            for offset in batch.offsets:
                if (record := seen.get(offset)) is not None and record.timestamp is not None:
                    yield _Stamped(offset, record.timestamp, before)
                    before = max(before, record.timestamp)
            before = max(before, batch.time)

    def too_late(self, pin: Pin, pins: Iterable[Pin]) -> _Stamped | None:
        """One at or above the boundary, although nothing up to it is stamped so late.

        By the clock the boundary is the end of the log, and what comes later is late. So it is where a boundary of a
        later time was pinned so before. One below that of an earlier time is another invariant's.
        """
        at = bisect_left(self.offsets, pin.offset)
        found = self.records[at] if at < len(self.records) else None
        if pin.by_clock or found is None or max(found.stamp, found.before) >= pin.time:
            return None
        held = any(
            (p.by_clock and p.offset <= found.offset) if p.time > pin.time else p.offset > pin.offset for p in pins
        )
        return None if held else found

    def too_early(self, pin: Pin, skew: int | None) -> _Stamped | None:
        """One below the boundary that is stamped so late: by the clock only if that was not ahead of it, by `skew`."""
        known = -1 if skew is None else pin.at - skew
        for r in self.records[: bisect_left(self.offsets, pin.offset)]:
            if r.stamp >= pin.time and r.before <= r.stamp and not (pin.by_clock and r.stamp > known):
                return None if pin.by_marker and not self._in_order(r, pin) else r
        return None

    def _in_order(self, first: _Stamped, pin: Pin) -> bool:
        """Whether everything from there up to the boundary is stamped so late."""
        return all(b.time >= pin.time for b in self.batches if first.offset < b.base < pin.offset)


class _Finder:
    """Which receipt holds an offset."""

    def __init__(self, receipts: Iterable[Receipt]) -> None:
        self.receipts = sorted(receipts, key=lambda r: r.start)
        self.starts = [r.start for r in self.receipts]

    def at(self, offset: int) -> int | None:
        """The index of one that does; receipts that meet are looked at one by one."""
        last = bisect_right(self.starts, offset) - 1
        return next((i for i in range(last, -1, -1) if self.receipts[i].holds(offset)), None)


# -- single records


def _agree(evidence: Evidence, committed_only: bool) -> None:
    """What the consumer saw is what the segments hold; else the scan ended early, or was of another time."""
    for log in evidence.logs.values():
        if log.seen is None or log.batches is None:
            continue
        there, seen = log.visible(committed_only) or set(), {o for o in log.seen if o >= log.log_start}
        if there != seen:
            offset, only = min(there ^ seen), "segments" if min(there ^ seen) in there else "consumer"
            raise EvidenceError(
                f"{log.tp[0]}:{log.tp[1]}: offset {offset} is seen by the {only} only ({len(there)} records in the "
                f"segments, {len(seen)} consumed): scan and dump once nothing is written any more"
            )


def _differs(f: _File, row: int, log: Seen, sources: Mapping[str, str]) -> str:
    """How a row differs from the log's record; empty: it does not."""
    if f.rows is None:
        return ""
    mine = f.rows.records[row]
    for name, a, b in (("key", mine.key, log.key), ("timestamp", mine.timestamp, log.timestamp)):
        if a != b and not (name == "timestamp" and (a is None or b is None)):
            return f"its {name} is {_shown(a)}, the log's {_shown(b)}"
    if mine.headers != log.headers:
        return "its headers are not the log's"
    if f.rows.has_value:
        return "" if mine.value == log.value else f"its value is {_shown(mine.value)}, the log's {_shown(log.value)}"
    return _typed_differs(f.rows.typed[row], log.value, sources) if f.rows.typed else ""


def _typed_differs(row: dict[str, Any], value: bytes | None, sources: Mapping[str, str]) -> str:
    """Fields that have a column, as Python's JSON reader reads them."""
    try:
        fields = _parse(value) if value is not None else {}
    except ValueError:
        return "it landed, and the log's value is no JSON"
    for name, landed in row.items() if isinstance(fields, dict) else ():
        sent = fields.get(sources.get(name, name))
        if name != "_extra" and not name.startswith("key_") and not _is_same(landed, sent):
            return f"its field {name} is {_shown(landed)}, the log's {_shown(sent)}"
    return ""


def _parse(text: bytes | str) -> Any:
    return json.loads(text, parse_float=Decimal)


def _is_same(landed: Any, sent: Any) -> bool:
    """Returns whether a landed value is JSON's. Members of structs with other names are passed over."""
    match landed, sent:
        case (None, _) | (_, None):
            return landed is None and (sent is None)
        case bool(), _:
            return landed is sent
        case (int() | Decimal(), int() | Decimal()):
            return not isinstance(sent, bool) and landed == sent
        case float(), int() | Decimal():
            return landed == float(sent) or (_is_single(landed) and math.isclose(landed, sent, rel_tol=2**-23))
        case datetime(), _:
            return _is_same_time(landed, sent)
        case date(), _:
            return landed.isoformat() == sent
        case bytes(), str():
            return landed == base64.b64decode(sent)
        case dict(), dict():
            return all(_is_same(v, sent[k]) for k, v in landed.items() if k in sent)
        case list(), dict():
            return [k for k, _ in landed] == [*sent] and all(_is_same(v, sent[k]) for k, v in landed)
        case list(), list():
            return len(landed) == len(sent) and all(map(_is_same, landed, sent))
        case str(), _:
            return landed == sent or _is_document(landed, sent)
    return False


def _is_same_time(landed: datetime, sent: Any) -> bool:
    """Returns whether a time is the text's, cut to its unit, or the number's in some unit since 1970."""
    micros = (landed - _EPOCH) // timedelta(microseconds=1)
    if isinstance(sent, str):
        moment = datetime.fromisoformat(sent.upper())
        exact = ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH) // timedelta(microseconds=1)
        return micros in (exact, exact // 1000 * 1000)
    return any(micros == int(sent * per // 1000) for per in (10**9, 10**6, 10**3, 1))


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _is_single(number: float) -> bool:
    """Returns whether it is a float of 32 bits."""
    return abs(number) < 2**128 - 2**103 and struct.unpack("<f", struct.pack("<f", number))[0] == number


def _is_document(landed: str, sent: Any) -> bool:
    try:
        return bool(_parse(landed) == sent)
    except ValueError:
        return False


def _typed_who(row: dict[str, Any]) -> tuple[str, int] | None:
    producer, sequence = row.get("producer"), row.get("sequence")
    return (str(producer), sequence) if producer is not None and isinstance(sequence, int) else None


def _within(offset: int, ranges: Iterable[tuple[int, int]]) -> bool:
    return any(start <= offset < end for start, end in ranges)


def _name(sent: Sent) -> str:
    return f"{sent.who[0]}/{sent.who[1]}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _order(b: Broken) -> tuple[int, str, int, int]:
    where = b.where
    return b.invariant, str(where.get("topic", "")), where.get("partition") or 0, where.get("offset") or 0
