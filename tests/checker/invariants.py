"""Decides which of the invariants of docs/developers/design/invariants.md hold, from external evidence only.

 1 loss        each record that a consumer sees below the frontier is in a live part, in quarantine, or in a range that
               an entry names; so is each acknowledged and committed value, unless Kafka itself lost it
 2 duplicate   no offset of a life is in two rows of live parts; no two live receipts overlap
 3 phantom     each row has the bytes, time and coordinates of its record in the log; none is of a control batch or an
               aborted transaction; each file has the size and hash in the ledger
 4 tiling      ranges of plans neither overlap nor leave gaps; each planned range is published or failed; boundaries
               never decrease; complete windows have no gap; with `healed`, no gap below any landed range
 5 sums        a receipt's classes add up to its span, and to its files' rows; the segments have the same numbers of
               control and aborted records
 6 order       offsets strictly increase in a file; in a shared file, within each range, and each row is of one range
 7 ahead       no committed offset exceeds the frontier of the entry that its mark names, nor the frontier at its time
 8 back        committed offsets of one incarnation never decrease, except by hand; none of another ledger is
               overwritten that this ledger did not take over
 9 same        a plan's hash is that of its content; parts are named by range and number; attempts at a range agree
10 files       data/ and quarantine/ hold the live files, and no others
11 numbers     no entry number is missing or written twice: writes, marks, files and other readers' notes agree; the
               copies of old entries in segments equal the entries
12 ids         entries, plans, files and marks name Kafka's cluster and topic ids
13 stable      no range reaches beyond the log, or past a transaction that was open when it was planned
14 healed      with `healed`: frontier and committed offset equal the last stable offset
15 teeth       `test_teeth.py`
16 windows     no record in order is on the wrong side of a boundary that was looked up; a record that was planned
               before the boundary was pinned is in the window that was open then
19 erased      no row that counts is of an erased record, unless the erasure is still under way; a receipt calls only
               those records erased that an entry erased
20 on hold     no entry retires or erases records of a window that is on hold then
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
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from tests.checker import lake as files
from tests.checker.facts import TP, Committed, Evidence, EvidenceError, Life, Log, Record, Sent, find_value_id
from tests.checker.lake import Folder, Rows
from tests.checker.ledger import Book, Broken, Part, Pin, Plan, Receipt, fold_entries, locate, parse_staged_receipt

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
    19: "erased records stay erased",
    20: "windows on hold stay",
}
EXAMPLES = 5
"""The number of counter-examples to keep of each kind in each place."""


@dataclass(frozen=True)
class Settings:
    """Settings of a check.

    `group`: the consumer group that commits the feed's offsets. `healed`: faults are over, and runs completed.
    `elsewhere`: the evidence lacks the store to which the feed commits.
    `skew_ms`: the tolerated difference between clocks of runs and brokers; None: clocks are not compared.
    """

    group: str | None = None
    healed: bool = False
    elsewhere: bool = False
    skew_ms: int | None = 5_000


@dataclass
class Verdict:
    """The outcome of a check.

    `decided`: the evidence that decided each invariant; `undecided`: why others were not; `counts`: items checked.
    """

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
        """Returns the first counter-example of each broken invariant."""
        examples: dict[int, Broken] = {}
        for b in self.broken:
            examples.setdefault(b.invariant, b)
        return dict(sorted(examples.items()))

    def to_document(self) -> dict[str, Any]:
        first = [{"invariant": n, "text": b.text, "where": dict(b.where)} for n, b in self.first.items()]
        totals = {n: sum(b.invariant == n for b in self.broken) for n in self.first}
        return {
            "feed": self.feed,
            "holds": self.holds,
            "first": first,
            "found": totals,
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
    """Check each invariant for which there is evidence. Raises EvidenceError for evidence that contradicts itself."""
    return _Check(folder, evidence, settings).run()


@dataclass(frozen=True)
class _File:
    """A live part with its receipt and its rows; None if it was unreadable."""

    receipt: Receipt
    part: Part
    rows: Rows | None


class _Check:
    def __init__(self, folder: Folder, evidence: Evidence, settings: Settings) -> None:
        self.folder, self.evidence, self.settings = folder, evidence, settings
        self.book: Book = fold_entries(folder.read_entries())
        self.verdict = Verdict(folder.feed)
        self.committed_only = self.book.is_read_committed()
        self.files: list[_File] = []
        self.contents: dict[str, Rows | None] = {}
        """The rows of each file by path; offset ranges may share a file."""
        self.rows: dict[Life, dict[int, tuple[_File, int]]] = defaultdict(dict)
        self.copies: list[tuple[Life, int, _File, int]] = []
        """Rows of tombstones that another output has, too."""
        self.mismatched: set[tuple[Life, int]] = set()
        """Offset ranges with a lost or phantom record, for which sums differ from the log's anyway."""

    def run(self) -> Verdict:
        _check_agreement(self.evidence, self.committed_only)
        self.verdict.broken += self.book.broken
        self._read()
        for decide in (
            self._check_rows,
            self._check_folder_keys,
            self._compare_with_log,
            self._compare_with_producers,
            self._check_sums,
            self._check_windows,
            self._check_boundaries,
            self._check_attempts,
            self._check_visible_files,
            self._check_numbers,
            self._check_chain,
            self._check_segments,
            self._check_ids,
            self._check_stable,
            self._check_healed,
        ):
            self._add(decide())
        if self.evidence.offsets is not None:
            self._add(_Commits(self.book, self.evidence, self.settings, self.verdict).check())
        self._record_decisions()
        self.verdict.broken.sort(key=_get_sort_key)
        return self.verdict

    def _add(self, violations: Iterable[Broken]) -> None:
        self.verdict.broken += violations

    # -- files

    def _read(self) -> None:
        for r in self.book.list_live_receipts():
            for p in r.parts:
                self._add(self._read_part(r, p))
        self._add(self._check_shared_files())
        self.verdict.counts |= {
            "entries": len(self.book.entries),
            "live offset ranges": len(self.book.list_live_receipts()),
            "files": len({f.part.path for f in self.files}),
            "rows": sum(len(f.rows.records) for f in self.files if f.rows),
        }

    def _read_part(self, receipt: Receipt, part: Part) -> Iterator[Broken]:
        where = locate(receipt.life, receipt.start, path=part.path, number=receipt.number)
        size = self.folder.get_size(part.path)
        staged = size is None and self.folder.get_size(part.staged) is not None
        path = part.staged if staged else part.path
        if size is None and (self.settings.healed or not staged):
            yield Broken(1, f"{part.path} ({receipt}, {part.rows} rows) is missing", where)
        if size is None and not staged:
            self.files.append(_File(receipt, part, None))
            return
        if self.folder.get_size(path) != part.file_bytes or self.folder.hash_file(path) != part.sha256:
            yield Broken(3, f"{path}: its bytes are not those whose hash entry {receipt.number} holds", where)
        if path not in self.contents:
            try:
                self.contents[path] = self.folder.read_rows(path)
            except EvidenceError as e:
                self.contents[path] = None
                yield Broken(3, str(e), where)
        rows = self.contents[path]
        self.files.append(_File(receipt, part, rows.slice(part.first, part.rows) if rows and part.shared else rows))

    def _check_shared_files(self) -> Iterator[Broken]:
        """Check that each row of a file, and each unshared file, belongs to exactly one live range (2, 3)."""
        by_path: dict[str, list[_File]] = defaultdict(list)
        for f in self.files:
            by_path[f.part.path].append(f)
        for path, sharing in by_path.items():
            first = sharing[0]
            where = locate(first.receipt.life, first.receipt.start, path=path, number=first.receipt.number)
            if len(sharing) > 1 and not all(f.part.shared for f in sharing):
                yield Broken(
                    2, f"{path} is the file of {len(sharing)} offset ranges, and not shared by all of them", where
                )
            at = 0
            for start, rows in sorted((f.part.first, f.part.rows) for f in sharing) if first.part.shared else ():
                if start != at:
                    owners = "of two offset ranges" if start < at else "of no offset range that counts"
                    yield Broken(2, f"{path}: rows {min(at, start)} to {max(at, start)} are {owners}", where)
                at = max(at, start + rows)
            contents = self.contents.get(path) or self.contents.get(first.part.staged)
            if first.part.shared and (at != first.part.file_rows or (contents and len(contents.records) != at)):
                yield Broken(2, f"{path}: offset ranges that count have {at} of its {first.part.file_rows} rows", where)

    def _check_rows(self) -> Iterator[Broken]:
        """Check the order, coordinates and uniqueness of rows (2, 3, 6)."""
        for f in self.files:
            life, offsets = f.receipt.life, f.rows.offsets if f.rows else []
            for i, offset in enumerate(offsets):
                where = locate(life, offset, path=f.part.path, row=i)
                if i and offset < offsets[i - 1]:
                    yield Broken(6, f"{f.part.path}: offset {offset} in row {i} follows {offsets[i - 1]}", where)
                if (f.rows and f.rows.partitions[i] != life.tp) or not f.receipt.has_offset(offset):
                    yield Broken(
                        3, f"{f.part.path}: row {i} is of offset {offset}, the offset range is {f.receipt}", where
                    )
                    continue
                if offset in self.rows[life]:
                    other, row = self.rows[life][offset]
                    if self._is_copy(other, row) and self._is_copy(f, i) and _get_output(other) != _get_output(f):
                        self.copies.append((life, offset, f, i))
                    else:
                        yield Broken(2, f"{life}:{offset} is in {other.part.path} and in {f.part.path}", where)
                else:
                    self.rows[life][offset] = (f, i)
                since = None if self.settings.healed else f.receipt.number
                if self.book.is_erased(life, offset, since):
                    yield Broken(19, f"{f.part.path}: row {i} is of offset {offset}, which was erased", where)

    def _is_copy(self, f: _File, row: int) -> bool:
        """Returns whether other outputs may have the row's record: a landed tombstone of a feed that shares them."""
        typed = f.rows.tombstones if f.rows else ()
        return self.book.shares_tombstones and f.part.kind == "landed" and bool(typed and typed[row])

    def _check_folder_keys(self) -> Iterator[Broken]:
        """Check that the folders of all parts have the keys of the ledger's first schema (18)."""
        prefix = self.book.folder_prefix or ""
        allowed = [[f"{prefix}{level}" for level in ("date", "hour", "minute")[:n]] for n in range(4)]
        for f in self.files:
            levels = f.part.path.split("/")[2:-1]
            keys = [level.partition("=")[0] for level in (levels[1:] if {*levels[:1]} & self.book.outputs else levels)]
            if keys not in allowed:
                where = locate(f.receipt.life, f.receipt.start, path=f.part.path, number=f.receipt.number)
                yield Broken(18, f"{f.part.path}: keys of this ledger's folders begin with {prefix!r}", where)

    # -- the log

    def _find_log(self, life: Life) -> Log | None:
        """Returns the log of the life, if it is Kafka's current one."""
        log = self.evidence.logs.get(life.tp)
        if log is None or (log.topic_id and log.topic_id != life.topic_id):
            return None
        current = self.book.current.get(life.tp)
        return log if current and current.topic_id == life.topic_id else None

    def _find_cut(self, life: Life) -> int | None:
        """Returns the offset at which a later life of the same log begins: from there on, this life was truncated."""
        lives = self.book.lives.get(life.tp, [])
        later = lives[lives.index(life) + 1 :] if life in lives else []
        return min((self.book.origins[x] for x in later if x.topic_id == life.topic_id), default=None)

    def _build_filter(self, life: Life, log: Log) -> Callable[[int], bool]:
        """Returns a predicate for the offsets of the life that the log still holds."""
        cut = self._find_cut(life)
        return lambda offset: offset >= log.log_start and (cut is None or offset < cut)

    def _compare_with_log(self) -> Iterator[Broken]:
        """Compare the rows with the records that a consumer sees (1, 3)."""
        for life in sorted(self.book.origins):
            if log := self._find_log(life):
                yield from self._find_lost(life, log)
                yield from self._find_phantoms(life, log)
            else:
                self.verdict.counts["rows of logs that are gone"] += len(self.rows[life])

    def _find_lost(self, life: Life, log: Log) -> Iterator[Broken]:
        visible, is_comparable = log.list_visible(self.committed_only), self._build_filter(life, log)
        finder = _Finder([r for r in self.book.list_live_receipts() if r.life == life])
        missing: dict[int, list[int]] = defaultdict(list)
        for offset in sorted(o for o in visible or () if is_comparable(o)):
            at = finder.find_index(offset)
            if at is not None:
                self.verdict.counts["records compared with the log"] += 1
                if offset not in self.rows[life] and not self.book.is_erased(life, offset):
                    missing[at].append(offset)
            elif (span := self.book.find_span(life, offset)) and span.kind == "landed":
                text = f"{life}:{offset} landed by entry {span.number}, and nothing that counts holds it"
                yield Broken(1, text, locate(life, offset, number=span.number))
        landed = finder.receipts
        for s in self.book.spans.get(life, ()):
            present = [o for o in visible or () if s.kind == "lost" and s.start <= o < s.end and is_comparable(o)]
            if present and all(b.valid for b in log.batches or () if b.base <= min(present) <= b.last):
                text = f"{life}:{min(present)} is in the log, and entry {s.number} names {s.start}-{s.end} lost"
                yield Broken(1, text, locate(life, min(present), number=s.number))
        for at, offsets in missing.items():
            dropped = landed[at].counts["dropped"]
            if dropped < len(offsets):
                self.mismatched.add((life, landed[at].start))
                note = f", of which {dropped} were dropped" if dropped else ""
                text = f"{life}:{offsets[0]} is in the log, and neither landed nor in quarantine ({landed[at]}"
                yield Broken(
                    1, f"{text}: {len(offsets)} such{note})", locate(life, offsets[0], number=landed[at].number)
                )

    def _find_phantoms(self, life: Life, log: Log) -> Iterator[Broken]:
        visible, is_comparable = log.list_visible(self.committed_only), self._build_filter(life, log)
        first = ((offset, f, row) for offset, (f, row) in self.rows[life].items())
        copies = ((offset, f, row) for of, offset, f, row in self.copies if of == life)
        for offset, f, row in sorted((*first, *copies), key=lambda row: row[0]):
            if not is_comparable(offset) or visible is None or log.is_compacted(offset):
                self.verdict.counts["rows that the log no longer holds"] += 1
                continue
            where = locate(life, offset, path=f.part.path, row=row)
            if offset not in visible:
                self.mismatched.add((life, f.receipt.start))
                unknown = "nothing that a consumer sees" if log.batches is None else "beyond the log"
                kind = log.classes.get(offset, unknown)
                yield Broken(3, f"{life}:{offset} in {f.part.path} is {kind}", where)
                continue
            mended = _is_within(offset, f.receipt.mended)
            if (
                log.records is not None
                and not mended
                and (differs := _describe_difference(f, row, log, offset, self.book.sources))
            ):
                yield Broken(3, f"{life}:{offset} in {f.part.path}: {differs}", where)

    # -- producers

    def _compare_with_producers(self) -> Iterator[Broken]:
        """Compare the rows with the values that producers sent (1, 3)."""
        if self.evidence.produced is None:
            return
        landed = self._collect_value_ids()
        for sent in self.evidence.produced.values():
            yield from self._check_acknowledged(sent, landed)
        for (life, offset), value_id in sorted(landed.items()):
            yield from self._check_sent(life, offset, value_id)
        self.verdict.counts["values sent"] = len(self.evidence.produced)

    def _collect_value_ids(self) -> dict[tuple[Life, int], tuple[str, int]]:
        """Returns the producer and sequence number of each landed value, by life and offset."""
        ids = {}
        for life, rows in self.rows.items():
            for offset, (f, row) in rows.items():
                if _is_within(offset, f.receipt.mended) or f.rows is None:
                    continue
                record = f.rows.records[row]
                value_id = find_value_id(record.key, record.value) or (
                    _find_typed_id(f.rows.typed[row]) if f.rows.typed else None
                )
                if value_id:
                    ids[life, offset] = value_id
        return ids

    def _check_acknowledged(self, sent: Sent, landed: dict[tuple[Life, int], tuple[str, int]]) -> Iterator[Broken]:
        """Check that a value acknowledged with an offset landed, is named, is pending, or was lost by Kafka itself."""
        if not sent.certain or sent.offset is None:
            return
        lives = self.book.lives.get(sent.tp, [])
        for life in lives:
            if landed.get((life, sent.offset)) == sent.id:
                return
        if any(self.book.is_erased(life, sent.offset) for life in lives):
            self.verdict.counts["acknowledged values that were erased"] += 1
            return
        spans = [s for life in lives if (s := self.book.find_span(life, sent.offset))]
        if not lives or not spans or any(s.kind != "landed" for s in spans):
            self.verdict.counts["acknowledged values pending, passed over or named"] += 1
            return
        life, log = lives[-1], self.evidence.logs.get(sent.tp)
        record = log.records.get(sent.offset) if log and log.records is not None else None
        if any(sent.offset in self.rows[x] for x in lives) or any(self._has_drops(x, sent.offset) for x in lives):
            yield from self._check_other_record(sent, lives, log, landed)
            return
        if record is not None and find_value_id(record.key, record.value) == sent.id:
            return  # the comparison with the log reports it as lost
        if log is not None and sent.offset >= log.log_start:
            self.verdict.counts["acknowledged values that Kafka lost"] += 1
            return
        text = f"{_format_id(sent)} was acknowledged at {life}:{sent.offset}, and is nowhere"
        yield Broken(1, text, locate(life, sent.offset, producer=sent.id[0], sequence=sent.id[1]))

    def _check_other_record(
        self, sent: Sent, lives: list[Life], log: Log | None, landed: dict[tuple[Life, int], tuple[str, int]]
    ) -> Iterator[Broken]:
        """Report another record at the acknowledged offset. If the log still has the offset, it was compared above."""
        offset, other = sent.offset or 0, landed.get((lives[0], sent.offset or 0))
        is_unknown = log is None or offset < log.log_start or log.is_compacted(offset)
        if len(lives) == 1 and other and is_unknown:
            text = f"{lives[0]}:{offset} holds {other[0]}/{other[1]}, and {_format_id(sent)} was acknowledged there"
            yield Broken(3, text, locate(lives[0], offset, producer=sent.id[0], sequence=sent.id[1]))

    def _has_drops(self, life: Life, offset: int) -> bool:
        return any(
            r.life == life and r.has_offset(offset) and r.counts["dropped"] for r in self.book.list_live_receipts()
        )

    def _check_sent(self, life: Life, offset: int, value_id: tuple[str, int]) -> Iterator[Broken]:
        sent = (self.evidence.produced or {}).get(value_id)
        where = locate(life, offset, producer=value_id[0], sequence=value_id[1])
        if sent is None:
            yield Broken(3, f"{life}:{offset} holds {value_id[0]}/{value_id[1]}, which nobody sent", where)
        elif sent.tp != (life.topic, life.partition if sent.tp[1] >= 0 else -1):
            yield Broken(
                3, f"{life}:{offset} holds {_format_id(sent)}, which was sent to {sent.tp[0]}:{sent.tp[1]}", where
            )
        elif sent.ended == "aborted" and self.committed_only:
            text = f"{life}:{offset} holds {_format_id(sent)}, of transaction {sent.transaction}, which was aborted"
            yield Broken(3, text, where)

    # -- sums, windows, names

    def _check_sums(self) -> Iterator[Broken]:
        by_range = defaultdict(list)
        for f in self.files:
            by_range[f.receipt.number, f.receipt.life, f.receipt.start].append(f)
        for r in self.book.list_live_receipts():
            where = locate(r.life, r.start, number=r.number)
            copies = r.counts.get("copies", 0)
            if sum(r.counts.values()) - copies != r.span:
                yield Broken(5, f"{r}: classes add up to {sum(r.counts.values())}, the span is {r.span}", where)
            stored = sum(of == r.life and r.has_offset(offset) for of, offset, _, _ in self.copies)
            if copies != stored:
                yield Broken(5, f"{r}: entry {r.number} counts {copies} copies, the files hold {stored}", where)
            for kind, expected in (("landed", r.counts["landed"] + copies), ("quarantined", r.counts["quarantined"])):
                parts = [f for f in by_range[r.number, r.life, r.start] if f.part.kind == kind]
                rows = sum(len(f.rows.records) if f.rows else f.part.rows for f in parts)
                if expected != rows or sum(f.part.rows for f in parts) != rows:
                    yield Broken(5, f"{r}: entry {r.number} counts {expected} {kind}, the files hold {rows}", where)
            yield from self._compare_sums_with_log(r)

    def _compare_sums_with_log(self, r: Receipt) -> Iterator[Broken]:
        """Compare the counts of control and aborted records with the segments, if these still hold the whole range."""
        log = self._find_log(r.life)
        if log is None or log.batches is None or (r.life, r.start) in self.mismatched:
            return
        is_comparable, offsets = self._build_filter(r.life, log), range(r.start, r.end)
        if not all(o in log.classes and is_comparable(o) for o in offsets):
            return
        control, aborted = (sum(log.classes[o] == kind for o in offsets) for kind in ("control", "aborted"))
        aborted = aborted if self.committed_only else 0
        placed = sum(r.counts.get(kind, 0) for kind in ("landed", "quarantined", "dropped", "erased"))
        for kind, counted, actual in (
            ("control", r.counts["control"], control),
            ("aborted", r.counts["aborted"], aborted),
            ("visible", placed, r.span - control - aborted),
        ):
            if counted != actual:
                text = f"{r}: {counted} {kind} records counted, the segments hold {actual}"
                yield Broken(5, text, locate(r.life, r.start, number=r.number))

    def _check_windows(self) -> Iterator[Broken]:
        """Check that boundaries never decrease, and that windows with a manifest are complete (4)."""
        for life, pins in sorted(self.book.pins.items()):
            rows = sorted(pins.items())
            for (before, a), (time, b) in itertools.pairwise(rows):
                if b < a:
                    yield Broken(
                        4, f"{life}: the boundary at {time} is {b}, that at {before} is {a}", locate(life, b, time=time)
                    )
        for path, manifest in self.folder.read_manifests().items():
            for at in manifest["boundaries"]:
                yield from self._check_complete(path, manifest, at)

    def _check_boundaries(self) -> Iterator[Broken]:
        """Compare the boundaries with the timestamps of the log's records (16)."""
        for life, pins in sorted(self.book.resolved.items()):
            log = self._find_log(life)
            if log and log.records is not None and log.batches is not None and log.log_start <= self.book.origins[life]:
                stamps = _Stamps(log, self._build_filter(life, log), self.book.origins[life])
                self.verdict.counts["boundaries compared with stamps"] += len(pins)
                for pin in pins.values():
                    yield from self._check_side(life, stamps, pin)

    def _check_side(self, life: Life, stamps: _Stamps, pin: Pin) -> Iterator[Broken]:
        skew = self.settings.skew_ms
        late, early = stamps.find_too_late(pin, self.book.resolved[life].values()), stamps.find_too_early(pin, skew)
        for record, side in ((late, "at or above"), (early, "below")):
            if record and not (record is early and self.book.is_planned(life, record.offset, pin.number)):
                message = f"{life}:{record.offset} is stamped {record.stamp}, in order, and stands {side} the boundary"
                where = locate(life, record.offset, number=pin.number, time=pin.time)
                yield Broken(16, f"{message} at {pin.time}, which entry {pin.number} pinned to {pin.offset}", where)

    def _check_complete(self, path: str, manifest: dict[str, Any], at: dict[str, Any]) -> Iterator[Broken]:
        lives = [x for x in self.book.lives.get((at["topic"], at["partition"]), []) if x.topic_id == at["topic_id"]]
        spans = sorted(s for life in lives for s in self.book.spans.get(life, ()))
        reached = at["start"]
        for s in spans:
            reached = max(reached, s.end) if s.start <= reached else reached
        if reached < at["end"] and lives:
            text = f"{path} says complete, and {lives[-1]}:{reached}-{at['end']} is not accounted for"
            yield Broken(4, text, locate(lives[-1], reached, path=path))
        for life in lives:
            yield from self._check_first(path, manifest, life, at["start"])

    def _check_first(self, path: str, manifest: dict[str, Any], life: Life, start: int) -> Iterator[Broken]:
        """Check that the window in which the feed began has the records before the origin, too."""
        log = self._find_log(life)
        opens = min(self.book.pins.get(life, {}), default=None)
        before = [r for o, r in ((log and log.records) or {}).items() if o < start]
        if before and opens is not None and manifest["start_ms"] == opens <= (before[-1].timestamp or 0):
            text = f"{path} says complete, and {life}:{before[-1].offset} below its start has a later timestamp"
            yield Broken(4, text, locate(life, before[-1].offset, path=path))

    def _check_attempts(self) -> Iterator[Broken]:
        """Check that names and footers follow from plan and offset range, and attempts at a range agree (9, 11)."""
        for f in self.files:
            yield from self._check_name(f)
        attempts: dict[tuple[int, Life, int, int, str], dict[str, Any]] = {}
        for raw in self.folder.list_staged_receipts():
            batch = int(raw["from"].split("/")[3])
            r = parse_staged_receipt(raw, batch)
            content = {"counts": r.counts, "parts": sorted(self._describe_part(p) for p in r.parts)}
            first = attempts.setdefault((batch, r.life, r.start, r.end, r.format), content)
            if first != content:
                yield Broken(
                    9,
                    f"{raw['from']}: another attempt at {r} wrote other files",
                    locate(r.life, r.start, path=raw["from"]),
                )

    def _check_name(self, f: _File) -> Iterator[Broken]:
        r, plan = f.receipt, self.book.plans[f.receipt.batch]
        where = locate(r.life, r.start, path=f.part.path, number=r.batch)
        if "/rebuilt/" in f.part.staged:
            yield from self._check_rebuilt_name(f, where)
            return
        if f.part.shared:
            yield from self._check_shared_name(f, plan, where)
            return
        stem = files.format_part_name(r.life.topic, r.life.partition, r.start, r.end, r.batch, 0).removesuffix(
            ".parquet"
        )
        name = f.part.path.rpartition("/")[2].removesuffix(".parquet")
        rest = name.removeprefix(stem)
        if not name.startswith(stem) or (rest and not rest[1:].isdigit()):
            yield Broken(9, f"{f.part.path} is not how a part of {r} by plan {r.batch} is named", where)
        metadata = f.rows.metadata if f.rows else {}
        if metadata and metadata.get("sluice.plan_hash") != plan.hash:
            text = f"{f.part.path} was written for another plan {r.batch} than the one that stands there"
            yield Broken(11, text, where)
        if metadata and (
            metadata.get("sluice.topic_id") != r.life.incarnation or metadata.get("sluice.range") != str(r)
        ):
            text = f"{f.part.path} names {metadata.get('sluice.range')} of {metadata.get('sluice.topic_id')}, not {r}"
            yield Broken(12, text, where)

    def _check_rebuilt_name(self, f: _File, where: dict[str, Any]) -> Iterator[Broken]:
        """Check that a file that counts again is of a batch whose entries are lost, and of the same life."""
        number = int(f.part.path.rpartition("-b")[2].partition(".")[0].partition("-")[0])
        if not any(first <= number < after for first, after in self.book.gaps):
            yield Broken(9, f"{f.part.path} counts again, and entries of its batch are not lost", where)
        life = f.receipt.life
        if f.rows and f.rows.metadata.get("sluice.topic_id") != life.incarnation:
            yield Broken(12, f"{f.part.path} is of {f.rows.metadata.get('sluice.topic_id')}, not of {life}", where)

    def _check_shared_name(self, f: _File, plan: Plan, where: dict[str, Any]) -> Iterator[Broken]:
        """Check the name and footer of a shared file: its first range; all of its ranges, of one life of the topic."""
        r, path = f.receipt, f.part.path
        sharing = sorted((o for o in self.files if o.part.path == path), key=lambda o: o.part.first)
        first = sharing[0].receipt
        name = files.format_shared_name(first.life.topic, first.life.partition, first.start, first.end, r.batch)
        if path.rpartition("/")[2] != name:
            yield Broken(9, f"{path} is not how a file of {first} and others by plan {r.batch} is named", where)
        metadata = f.rows.metadata if f.rows else {}
        if metadata and metadata.get("sluice.plan_hash") != plan.hash:
            yield Broken(11, f"{path} was written for another plan {r.batch} than the one that stands there", where)
        ranges = [[str(o.receipt), o.part.rows] for o in sharing]
        if metadata and (
            metadata.get("sluice.topic_id") != r.life.incarnation or json.loads(metadata["sluice.slices"]) != ranges
        ):
            yield Broken(12, f"{path} names {metadata.get('sluice.slices')}, and not {ranges}", where)

    def _describe_part(self, part: Part) -> tuple[Any, ...]:
        """Returns the properties in which attempts at a range agree.

        The other ranges of a shared file, and so its hash, may differ.
        """
        if not part.shared:
            return part.name, part.rows, part.sha256
        try:
            rows = self.folder.read_rows(part.staged).slice(part.first, part.rows)
        except EvidenceError:  # left by an attempt that died
            return part.kind, part.rows, ""
        return part.kind, part.rows, hashlib.sha256(repr((rows.records, rows.typed)).encode()).hexdigest()

    def _check_visible_files(self) -> Iterator[Broken]:
        live = {f.part.path for f in self.files}
        published = {p.path for r in self.book.receipts for p in r.parts}
        for path in sorted(self.folder.list_visible() - live):
            if path in self.book.replaced or path in published:
                if self.settings.healed:
                    yield Broken(10, f"{path} does not count any more, and is still there", {"path": path})
                else:
                    self.verdict.counts["files that no longer count, still there"] += 1
            else:
                yield Broken(10, f"{path} is in no entry of the ledger", {"path": path})
        for path in sorted(live & self.book.replaced):
            yield Broken(10, f"{path} counts and was replaced", {"path": path})

    # -- numbers, ids, ends

    def _check_numbers(self) -> Iterator[Broken]:
        for number, write in self.evidence.observed:
            existing = self.book.entries.get(number, {}).get("write")
            if self.book.is_lost(number):
                self.verdict.counts["entries that were seen and are named as lost"] += existing != write
            elif existing != write:
                text = f"entry {number} was seen with write {write}, and {existing or 'nothing'} stands there"
                yield Broken(11, text, {"number": number})

    def _check_chain(self) -> Iterator[Broken]:
        """Compare each entry with its number and the SHA-256 of the entry before it; earlier releases wrote neither."""
        before = b""
        for number, entry in sorted(self.book.entries.items()):
            if any(first < number < after for first, after in self.book.gaps):
                continue  # written late; the entry at `first` names the loss, and the next one follows it
            if entry.get("number") is not None:
                self.verdict.counts["chained entries"] += 1
                follows = hashlib.sha256(before).hexdigest() if before else ""
                if (entry["number"], entry["follows"]) != (number, follows):
                    text = f"entry {number} is number {entry['number']}, or does not follow the entry before it"
                    yield Broken(11, text, {"number": number})
            before = self.folder.read_entry(number) or b""

    def _check_segments(self) -> Iterator[Broken]:
        """Compare segments with the ledger's log, entry by entry.

        A segment whose last entry differs from the log's belongs to another log, and is never read.
        """
        for s in self.folder.read_segments():
            numbers = list(s.entries)
            is_consistent = numbers == sorted(numbers) and s.name_range == (min(numbers, default=-1), s.end)
            if not is_consistent:
                yield Broken(11, f"{s.path} does not hold the entries that it is named for", {"path": s.path})
                continue
            if self.folder.read_entry(numbers[-1]) != s.entries[numbers[-1]]:
                self.verdict.counts["segments of another log"] += 1
                continue
            self.verdict.counts["entries in segments"] += len(numbers)
            missing = (n for n in range(*s.name_range) if n not in s.entries and not self.book.is_lost(n))
            wrong = (n for n in numbers if self.folder.read_entry(n) != s.entries[n])
            for number in sorted({*missing, *wrong}):
                where = {"number": number, "path": s.path}
                yield Broken(11, f"{s.path} does not say what entry {number} says", where)

    def _check_ids(self) -> Iterator[Broken]:
        for tp, log in sorted(self.evidence.logs.items()):
            life = self.book.current.get(tp)
            if life and log.topic_id and life.topic_id != log.topic_id and self.settings.healed:
                yield Broken(
                    12, f"{life} is topic id {life.topic_id} in the ledger, {log.topic_id} in Kafka", locate(life, 0)
                )
            if life and log.cluster and self.book.cluster != log.cluster:
                yield Broken(
                    12, f"the ledger's cluster is {self.book.cluster}, Kafka's is {log.cluster}", locate(life, 0)
                )

    def _check_stable(self) -> Iterator[Broken]:
        for plan in self.book.plans.values():
            if plan.kind not in ("compact", "replay", "erase"):
                for life, start, end in plan.offset_ranges:
                    yield from self._check_range_stable(plan.number, plan.at, life, start, end)

    def _check_range_stable(self, number: int, at: int, life: Life, start: int, end: int) -> Iterator[Broken]:
        log = self._find_log(life)
        if log is None or self._find_cut(life) is not None or end <= log.log_start:
            return
        where = locate(life, end, number=number)
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

    def _check_healed(self) -> Iterator[Broken]:
        if not self.settings.healed:
            return
        for tp, log in sorted(self.evidence.logs.items()):
            stable, life = log.find_last_stable_offset(self.committed_only), self.book.current.get(tp)
            if stable is None:
                continue
            frontier = self.book.get_frontier(life) if life else None
            if life is None or frontier is None or (frontier < stable and self._find_log(life)):
                where = {"topic": tp[0], "partition": tp[1], "offset": frontier}
                yield Broken(14, f"{tp[0]}:{tp[1]} landed up to {frontier}, the last stable offset is {stable}", where)
                yield from self._find_holes(life) if life else ()

    def _find_holes(self, life: Life) -> Iterator[Broken]:
        frontier = self.book.get_frontier(life)
        beyond = [s for s in self.book.spans.get(life, ()) if frontier is not None and s.start > frontier]
        if beyond:
            text = f"{life}:{frontier}-{beyond[0].start} is accounted for nowhere, and what follows is {beyond[0].kind}"
            yield Broken(4, text, locate(life, frontier or 0))

    # -- decided and undecided invariants

    def _record_decisions(self) -> None:
        e, decided = self.evidence, self.verdict.decided
        scanned = any(log.records is not None for log in e.logs.values())
        dumped = any(log.batches is not None for log in e.logs.values())
        by_log = " and ".join(w for w, on in (("Kafka's consumer", scanned), ("the segments", dumped)) if on)
        self._decide(1, bool(by_log), f"the lake compared with {by_log}", "neither a scan nor a dump was given")
        self._decide(
            3, scanned, f"every byte compared with {by_log}", "no scan was given: the log's bytes are not known"
        )
        decided |= dict.fromkeys((2, 4, 5, 6, 9, 10, 11, 12, 19, 20), "the ledger's files and the lake's")
        self._decide(13, dumped or scanned, by_log, "neither a scan nor a dump was given")
        if not dumped:
            self.verdict.undecided.setdefault(13, []).append("no dump was given: transactions are not known")
            self.verdict.undecided.setdefault(5, []).append("no dump was given: control and aborted counts")
        if e.produced is None:
            self.verdict.undecided.setdefault(1, []).append("no producers' log was given: what Kafka acknowledged")
        for n in (7, 8):
            self._decide(
                n,
                e.offsets is not None,
                "`__consumer_offsets` compared with the ledger",
                "no dump of `__consumer_offsets`",
            )
        self._decide(16, dumped and scanned, "stamps in the segments and the scan", "it takes both a scan and a dump")
        self._decide(14, self.settings.healed and bool(by_log), by_log, "faults were not said to be over")
        if self.settings.skew_ms is None:
            self.verdict.undecided.setdefault(7, []).append(
                "clocks were not to be compared: order by ledger numbers only"
            )

    def _decide(self, number: int, on: bool, how: str, why_not: str) -> None:
        if on:
            self.verdict.decided[number] = how
        else:
            self.verdict.undecided.setdefault(number, []).append(why_not)


# -- committed offsets


class _Commits:
    """Compares `__consumer_offsets` with the ledger (7, 8, and 11 and 12 as far as marks show them)."""

    def __init__(self, book: Book, evidence: Evidence, settings: Settings, verdict: Verdict) -> None:
        self.book, self.evidence, self.settings, self.verdict = book, evidence, settings, verdict
        self.highest: dict[Life, int] = {}
        self.standing: dict[TP, Committed] = {}
        self.ids = {book.id, *book.former, *book.taken}
        self.by_hand: set[TP] = set()
        """The partitions whose current offset another client committed."""

    def check(self) -> Iterator[Broken]:
        groups = {c.group for c in self._list_commits() if c.mark and c.mark[0] in self.ids}
        if self.settings.group:
            groups = {self.settings.group}
        for c in self._list_commits():
            if c.group in groups and c.tp in self.book.lives:
                self.verdict.counts["committed offsets"] += 1
                yield from self._check_commit(c)
                self.standing[c.tp] = c
        yield from self._check_final()

    def _list_commits(self) -> tuple[Committed, ...]:
        return self.evidence.offsets or ()

    def _check_commit(self, c: Committed) -> Iterator[Broken]:
        mark = c.mark
        if c.offset is None:
            return  # deleted, or expired: the next one still must not go back
        if mark and (self._is_taken_over(mark) or (mark[0] == self.book.id and self.book.is_lost(mark[1]))):
            yield from self._check_of_lost_entry(c, c.offset, Life(*c.tp, mark[2]))
        elif mark and mark[0] == self.book.id:
            yield from self._check_own(c, c.offset, mark[1], Life(*c.tp, mark[2]))
        else:
            yield from self._check_foreign(c, c.offset)

    def _is_taken_over(self, mark: tuple[str, int, str]) -> bool:
        """Returns whether this ledger continues the mark's ledger up to the mark's number."""
        return mark[0] in self.book.former or mark[1] <= self.book.taken.get(mark[0], -1)

    def _check_own(self, c: Committed, offset: int, number: int, life: Life) -> Iterator[Broken]:
        where = locate(life, offset, number=number, at=c.at)
        message = f"{life} was committed at {offset} ({c.at} of __consumer_offsets, mark {number})"
        last = self.standing.get(c.tp)
        other = last.mark if last and last.offset is not None else None
        if other and other[0] != self.book.id and not self._is_taken_over(other):
            yield Broken(8, f"{message}, over that of ledger {other[0]}, which nobody took over", where)
        if self.book.intents.get(number, {}).get(life) != offset:
            yield Broken(11, f"{message}, and entry {number} is no intent to do so", where)
        current = self.book.currents.get(number, {}).get(life.tp)
        if current != life and number in self.book.currents:
            yield Broken(12, f"{message} for topic id {life.incarnation}, the ledger was at {current}", where)
        published = self.book.get_frontier(life, number)
        if published is not None and offset > published:
            yield Broken(7, f"{message}, published was up to {published}", where)
        else:
            yield from self._check_time(c, life, offset, message, where)
        yield from self._check_backward(life, offset, message, where)

    def _check_of_lost_entry(self, c: Committed, offset: int, life: Life) -> Iterator[Broken]:
        """Check an offset committed by an entry that is named as lost.

        The frontier at that time is unknown. Still the offset must not go back, and in the end the frontier reaches it.
        """
        self.verdict.counts["committed offsets of entries that are named as lost"] += 1
        where, message = locate(life, offset, at=c.at), f"{life} was committed at {offset} ({c.at}), by a lost entry"
        yield from self._check_backward(life, offset, message, where)
        published = self.book.get_frontier(life)
        if self.settings.healed and (published is None or offset > published):
            yield Broken(7, f"{message}, published is up to {published}", where)

    def _check_time(
        self, c: Committed, life: Life, offset: int, message: str, where: dict[str, Any]
    ) -> Iterator[Broken]:
        """Check by the clocks, too, that the committed offset had been published."""
        if self.settings.skew_ms is None or c.time <= 0:
            return
        for number, entry in self.book.entries.items():
            reached = self.book.get_frontier(life, number)
            if reached is not None and reached >= offset:
                if entry["at"] > c.time + self.settings.skew_ms:
                    late = f"{message}, {entry['at'] - c.time} ms before entry {number} published that far"
                    yield Broken(7, late, where)
                return

    def _check_backward(self, life: Life, offset: int, message: str, where: dict[str, Any]) -> Iterator[Broken]:
        highest = self.highest.get(life, -1)
        if offset < highest and life.tp not in self.by_hand:
            yield Broken(8, f"{message}, after {highest}", where)
        self.highest[life] = offset
        self.by_hand.discard(life.tp)

    def _check_foreign(self, c: Committed, offset: int) -> Iterator[Broken]:
        """Check an offset without this ledger's mark: allowed if logged as moved by hand, or known to the ledger."""
        life = self.book.current[c.tp]
        where = locate(life, offset, at=c.at)
        self.by_hand.add(c.tp)
        if {(c.tp, offset), (c.tp, None)} & set(self.evidence.hands) or self._is_accepted(life, offset):
            self.verdict.counts["committed offsets moved by hand"] += 1
            return
        frontier, message = self.book.get_frontier(life), f"{life} was committed at {offset} ({c.at}) without a mark"
        if frontier is not None and offset > frontier:
            yield Broken(7, f"{message}, published is up to {frontier}", where)
        elif offset < self.highest.get(life, -1):
            yield Broken(8, f"{message}, after {self.highest[life]}", where)

    def _is_accepted(self, life: Life, offset: int) -> bool:
        origins = (i for e in self.book.entries.values() if e["kind"] == "origin" for i in e["items"])
        by_origin = any(Life(*i["key"]) == life and i["committed"] == offset for i in origins)
        return by_origin or any(x.tp == life.tp and o == offset for _, x, o in self.book.moved)

    def _check_final(self) -> Iterator[Broken]:
        if not self.settings.healed or self.settings.elsewhere:
            return
        for tp, life in sorted(self.book.current.items()):
            last, frontier = self.standing.get(tp), self.book.get_frontier(life)
            if life.is_over:
                continue
            if (self.highest or self.book.intents) and (last is None or last.offset != frontier):
                at = last.offset if last else None
                yield Broken(
                    14, f"{life} is committed at {at}, and landed up to {frontier}", locate(life, frontier or 0)
                )


class _Stamped(NamedTuple):
    """A record's timestamp; `before` is the latest timestamp before it in the log, aborted records included."""

    offset: int
    stamp: int
    before: int


class _Stamps:
    """The timestamps of one log's records, up to the first offset that compaction removed."""

    def __init__(self, log: Log, is_comparable: Callable[[int], bool], origin: int) -> None:
        self.batches = [b for b in log.batches or () if not b.control and is_comparable(b.base)]
        first_gap = next(
            (o for o in range(origin, log.log_end or 0) if o not in log.classes or not is_comparable(o)), None
        )
        self.records = [
            r
            for r in self._stamp_records(log.records or {})
            if origin <= r.offset and (first_gap is None or r.offset < first_gap)
        ]
        self.offsets = [r.offset for r in self.records]

    def _stamp_records(self, records: dict[int, Record]) -> Iterator[_Stamped]:
        before = -1
        for batch in self.batches:
            for offset in batch.offsets:
                if (record := records.get(offset)) is not None and record.timestamp is not None:
                    yield _Stamped(offset, record.timestamp, before)
                    before = max(before, record.timestamp)
            before = max(before, batch.time)

    def find_too_late(self, pin: Pin, pins: Iterable[Pin]) -> _Stamped | None:
        """Returns a record at or above the boundary, if all timestamps up to it are earlier than the boundary's.

        A boundary by the clock is the end of the log, so any later record belongs above it. The same holds for records
        above a boundary by the clock of a later time. If a boundary of an earlier time is higher, invariant 4 fails.
        """
        at = bisect_left(self.offsets, pin.offset)
        candidate = self.records[at] if at < len(self.records) else None
        if pin.by_clock or candidate is None or max(candidate.stamp, candidate.before) >= pin.time:
            return None
        explained = any(
            (p.by_clock and p.offset <= candidate.offset) if p.time > pin.time else p.offset > pin.offset for p in pins
        )
        return None if explained else candidate

    def find_too_early(self, pin: Pin, skew: int | None) -> _Stamped | None:
        """Returns a record below the boundary with the boundary's time or later.

        Against a boundary by the clock, only timestamps that are at least `skew` older than the pin count.
        """
        latest = -1 if skew is None else pin.at - skew
        for r in self.records[: bisect_left(self.offsets, pin.offset)]:
            if pin.against and any(later.offset > r.offset and later.stamp < r.stamp for later in self.records):
                continue
            if r.stamp >= pin.time and r.before <= r.stamp and not (pin.by_clock and r.stamp > latest):
                return None if pin.by_marker and not self._is_in_order(r, pin) else r
        return None

    def _is_in_order(self, first: _Stamped, pin: Pin) -> bool:
        """Returns whether all batches from the record up to the boundary have the boundary's time or later."""
        return all(b.time >= pin.time for b in self.batches if first.offset < b.base < pin.offset)


class _Finder:
    """Finds the receipt that holds an offset."""

    def __init__(self, receipts: Iterable[Receipt]) -> None:
        self.receipts = sorted(receipts, key=lambda r: r.start)
        self.starts = [r.start for r in self.receipts]

    def find_index(self, offset: int) -> int | None:
        """Returns the index of a receipt with the offset. Overlapping receipts are tried one by one."""
        last = bisect_right(self.starts, offset) - 1
        return next((i for i in range(last, -1, -1) if self.receipts[i].has_offset(offset)), None)


# -- single records


def _check_agreement(evidence: Evidence, committed_only: bool) -> None:
    """Check that the consumer saw the records in the segments. If not, the scan ended early, or ran at another time."""
    for log in evidence.logs.values():
        if log.records is None or log.batches is None:
            continue
        expected, consumed = log.list_visible(committed_only) or set(), {o for o in log.records if o >= log.log_start}
        if expected != consumed:
            offset, only = min(expected ^ consumed), "segments" if min(expected ^ consumed) in expected else "consumer"
            raise EvidenceError(
                f"{log.tp[0]}:{log.tp[1]}: offset {offset} is seen by the {only} only ({len(expected)} records in the "
                f"segments, {len(consumed)} consumed): scan and dump once nothing is written any more"
            )


_LEAST_OVERSIZED = 16 << 20


def _describe_stand_in(row: Record, log: Log, offset: int) -> str:
    """Returns the fault of an oversized record's row, which has no bytes, and whose batch has many; empty if none."""
    if (row.key, row.value, row.headers) != (None, None, ()):
        return "its reason is oversized, and it has bytes"
    spans = [(b.base, b.last) for b in log.batches or () if b.base <= offset <= b.last] or [(offset, offset)]
    records = [r for o, r in (log.records or {}).items() if spans[0][0] <= o <= spans[0][1]]
    parts = [p for r in records for p in (r.key, r.value, *(h for h, _ in r.headers))]
    size = sum(len(p or b"") for p in parts) + 16 * sum(len(r.headers) for r in records)
    if size < _LEAST_OVERSIZED:
        return f"its reason is oversized, and its batch has {size:,} bytes"
    newest = max((r.timestamp for r in records if r.timestamp is not None), default=None)
    return "" if row.timestamp == newest else f"its timestamp is {row.timestamp}, its batch's newest {newest}"


_Path = tuple[str | int, ...]
"""The place of a column's values in a record; empty for a header's, which are compared as headers."""


def _describe_difference(f: _File, row: int, log: Log, offset: int, sources: Mapping[str, _Path]) -> str:
    """Returns the difference between a row and the log's record; empty if they are equal."""
    if f.rows is None or log.records is None:
        return ""
    landed, logged = f.rows.records[row], log.records[offset]
    if f.rows.reasons and f.rows.reasons[row] == "oversized":
        return _describe_stand_in(landed, log, offset)
    for name, landed_field, logged_field in (
        ("key", landed.key, logged.key),
        ("timestamp", landed.timestamp, logged.timestamp),
    ):
        if landed_field != logged_field and not (
            name == "timestamp" and (landed_field is None or logged_field is None)
        ):
            return f"its {name} is {_truncate(landed_field)}, the log's {_truncate(logged_field)}"
    if landed.headers != logged.headers:
        return "its headers are not the log's"
    if f.rows.has_value:
        return (
            ""
            if landed.value == logged.value
            else f"its value is {_truncate(landed.value)}, the log's {_truncate(logged.value)}"
        )
    return _describe_typed_difference(f.rows.typed[row], logged.value, sources) if f.rows.typed else ""


def _describe_typed_difference(row: dict[str, Any], value: bytes | None, sources: Mapping[str, _Path]) -> str:
    """Compare the fields that have a column, as Python's JSON reader reads them."""
    try:
        fields = _parse(value) if value is not None else {}
    except ValueError:
        return "it landed, and the log's value is no JSON"
    for name, landed in row.items() if isinstance(fields, dict) else ():
        path = sources.get(name, (name,))
        sent = _find(fields, path) if path else landed
        if name != "_extra" and not name.startswith("key_") and not _is_same(landed, sent):
            return f"its field {name} is {_truncate(landed)}, the log's {_truncate(sent)}"
    return ""


def _find(value: Any, path: _Path) -> Any:
    """Returns the value at a path; None if there is none."""
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _parse(text: bytes | str) -> Any:
    return json.loads(text, parse_float=Decimal)


def _is_same(landed: Any, sent: Any) -> bool:
    """Returns whether a landed value equals the JSON value. Ignores members of structs with other names."""
    match landed, sent:
        case (None, _) | (_, None):
            return landed is None and (sent is None)
        case bool(), _:
            return landed is sent
        case (int() | Decimal(), int() | Decimal()):
            return not isinstance(sent, bool) and landed == sent
        case float(), int() | Decimal():
            return landed == float(sent) or (_is_single(landed) and math.isclose(landed, sent, rel_tol=2**-23))
        case ((int() | Decimal()), str()):
            return _is_same_number(Decimal(landed), sent)
        case datetime(), _:
            return _is_same_time(landed, sent)
        case date(), int():
            return (landed - _EPOCH.date()).days == sent
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


def _is_same_number(landed: Decimal, sent: str) -> bool:
    """Returns whether a number equals the one in the text, or the unscaled number in Base64."""
    try:
        return landed == Decimal(sent)
    except InvalidOperation:
        return int(landed.scaleb(-int(landed.as_tuple().exponent))) == int.from_bytes(
            base64.b64decode(sent), "big", signed=True
        )


def _is_same_time(landed: datetime, sent: Any) -> bool:
    """Returns whether a time equals the text, truncated to its unit, or the number, in some unit since 1970."""
    micros = (landed - _EPOCH) // timedelta(microseconds=1)
    if isinstance(sent, str) and sent.lstrip("-").isdecimal():
        return _is_same_time(landed, int(sent))
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


def _find_typed_id(row: dict[str, Any]) -> tuple[str, int] | None:
    producer, sequence = row.get("producer"), row.get("sequence")
    return (str(producer), sequence) if producer is not None and isinstance(sequence, int) else None


def _is_within(offset: int, ranges: Iterable[tuple[int, int]]) -> bool:
    return any(start <= offset < end for start, end in ranges)


def _format_id(sent: Sent) -> str:
    return f"{sent.id[0]}/{sent.id[1]}"


def _truncate(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _get_sort_key(b: Broken) -> tuple[int, str, int, int]:
    where = b.where
    return b.invariant, str(where.get("topic", "")), where.get("partition") or 0, where.get("offset") or 0


def _get_output(f: _File) -> str:
    """Returns the first folder of a file below those of its feed: an output, or a level of its window."""
    return f.part.path.split("/")[2]
