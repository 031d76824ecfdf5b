"""The proof of a slice: its receipt is checked against the plan and the staged files themselves.

A receipt that passes may be published. Checked are the position and the counts against the range; names and paths; and
each file's size, footer (rows, own metadata) and the offsets that its row groups span. A receipt that fails becomes a
SliceFailure that says what does not add up. Nothing is repaired here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow.parquet as pq
from pydantic import TypeAdapter, ValidationError

from sluice.pipelines.lake import parquet, paths
from sluice.pipelines.landing.writer import file_metadata
from sluice.pipelines.ports import Lake
from sluice.pipelines.vocabulary.errors import PartUnreadable, ProofFailed, Retryable, SluiceError, Unknown
from sluice.pipelines.vocabulary.plans import Plan, Slice
from sluice.pipelines.vocabulary.ranges import Range
from sluice.pipelines.vocabulary.receipts import Counts, Outcome, Part, PartKind, Receipt, SliceFailure
from sluice.pipelines.vocabulary.side_by_side import each

_RECEIPT: TypeAdapter[Receipt] = TypeAdapter(Receipt)


def prove(plan: Plan, batch: int, outcomes: Iterable[Outcome], lake: Lake) -> tuple[list[Receipt], list[SliceFailure]]:
    """The proven receipts and the failures of a plan: one of the two for each slice, in the plan's order.

    A task that ran more than once may leave several receipts; the first that holds, in order of attempt, is chosen.
    """
    by_slice: dict[Slice, list[Outcome]] = {}
    for outcome in outcomes:
        by_slice.setdefault(outcome.slice, []).append(outcome)
    claim = Claim(plan.feed, batch, plan.hash)
    judged = each(lambda s: _judge(claim, s, by_slice.get(s, ()), lake), plan.slices)
    receipts = [o for o in judged if isinstance(o, Receipt)]
    return receipts, [o for o in judged if isinstance(o, SliceFailure)]


@dataclass(frozen=True, slots=True)
class Claim:
    """The batch and plan that parts must name as theirs."""

    feed: str
    batch: int
    plan_hash: str


def _judge(claim: Claim, s: Slice, outcomes: Sequence[Outcome], lake: Lake) -> Outcome:
    failures = [o for o in outcomes if isinstance(o, SliceFailure)]
    for receipt in sorted((o for o in outcomes if isinstance(o, Receipt)), key=lambda r: r.attempt):
        try:
            check(claim, receipt, lake)
            return receipt
        except SluiceError as e:
            failures.insert(0, failure(s, e))
    return failures[0] if failures else failure(s, _proof_failed(s, "no task reported this slice"))


def failure(s: Slice, error: Exception) -> SliceFailure:
    """The error as an outcome. It is fatal if a retry cannot help."""
    if isinstance(error, SluiceError):
        return SliceFailure(s, type(error).__name__, error.message, error.remedy, fatal=is_final(error))
    text = f"{type(error).__name__}: {error}"[:500]
    return SliceFailure(s, type(error).__name__, text, "run again; if it stays so, report it")


def is_final(error: Exception) -> bool:
    """Whether the same call would fail again until somebody changes something."""
    return isinstance(error, SluiceError) and not isinstance(error, Retryable | Unknown)


def check(claim: Claim, r: Receipt, lake: Lake) -> None:
    """Raises ProofFailed unless the receipt agrees with its files.

    Names are checked first, so that no other path is ever opened.
    """
    check_account(r)
    for kind in PartKind:
        parts = r.of(kind)
        _check_names(claim, r, parts)
        groups = [_row_groups(claim, r, part, lake) for part in parts]
        for follows in groups if r.slice.by_time else [[g for of_part in groups for g in of_part]]:
            _check_offsets(r.slice, follows)


def check_account(r: Receipt) -> None:
    """Raises ProofFailed unless the slice was read to its end and its counts add up (invariant 5)."""
    s, counts = r.slice, r.counts
    if r.position < s.end:
        raise _proof_failed(s, f"reading stopped at {r.position}, before the end")
    if counts.total != s.span or min(_each(counts)) < 0:
        raise _proof_failed(s, f"{counts} adds up to {counts.total}, the range spans {s.span}")
    for kind, expected in ((PartKind.LANDED, counts.landed), (PartKind.QUARANTINED, counts.quarantined)):
        rows = sum(p.rows for p in r.of(kind))
        if rows != expected:
            raise _proof_failed(s, f"{expected} records {kind}, {rows} rows in its parts")


def _each(counts: Counts) -> Iterator[int]:
    return (getattr(counts, name) for name in counts.__dataclass_fields__)


def _check_names(claim: Claim, r: Receipt, parts: Sequence[Part]) -> None:
    for sequence, part in enumerate(parts):
        folder = _folder(claim, r.slice, part)
        name = paths.part_name(r.slice, claim.batch, sequence)
        staged = paths.staged_path(claim.feed, claim.batch, r.attempt, part.kind, folder, name)
        path = paths.part_path(claim.feed, part.kind, folder, name)
        if (part.name, part.staged, part.path) != (name, staged, path):
            raise _proof_failed(r.slice, f"part {sequence} is called {part.path}, it should be {path}")


def _folder(claim: Claim, s: Slice, part: Part) -> str:
    if not s.by_time:
        return s.folder
    folder = paths.folder_of(part.path, claim.feed, part.kind)
    if not paths.is_window_folder(folder, s.by_time):
        raise _proof_failed(s, f"{part.path} lies in no folder of a time")
    return folder


def _row_groups(claim: Claim, r: Receipt, part: Part, lake: Lake) -> list[Range]:
    """Check the staged file against the receipt. Returns the offsets that each of its row groups spans."""
    size = lake.size(part.staged)
    if size != part.bytes:
        raise _proof_failed(r.slice, f"{part.staged} has {size} bytes, its receipt says {part.bytes}")
    try:
        with parquet.open_parquet(lake, part.staged) as file:
            footer = file.metadata
    except PartUnreadable as e:
        raise _proof_failed(r.slice, e.message) from None
    if footer.num_rows != part.rows:
        raise _proof_failed(r.slice, f"{part.staged} has {footer.num_rows} rows, its receipt says {part.rows}")
    said = {k.decode(): v.decode("utf-8", "replace") for k, v in (footer.metadata or {}).items()}
    for key, expected in file_metadata(claim.feed, claim.batch, claim.plan_hash, r.slice).items():
        if said.get(key) != expected:
            raise _proof_failed(r.slice, f"{part.staged} says {key} = {said.get(key)!r}, expected {expected!r}")
    return [_offsets(r.slice, part, footer, i) for i in range(footer.num_row_groups)]


def _offsets(s: Slice, part: Part, footer: pq.FileMetaData, index: int) -> Range:
    group = footer.row_group(index)
    columns = {c.path_in_schema: c for c in (group.column(i) for i in range(group.num_columns))}
    column = columns.get("kafka_offset") or columns.get("offset")
    statistics = column.statistics if column else None
    if statistics is None or not statistics.has_min_max or statistics.null_count:
        raise _proof_failed(s, f"{part.staged}: row group {index} does not say which offsets it holds")
    return Range(statistics.min, statistics.max + 1)


def _check_offsets(s: Slice, groups: Sequence[Range]) -> None:
    at = s.start
    for group in groups:
        if group.start < at or group.end > s.end:
            raise _proof_failed(s, f"a row group holds offsets {group}, expected within [{at}, {s.end})")
        at = group.end


def receipt_at(path: str, lake: Lake) -> Receipt | None:
    """The receipt at `path`; None if it is unsound, and its slice must be read again."""
    try:
        receipt = _RECEIPT.validate_json(lake.get(path) or b"")
        check_account(receipt)
    except (ValidationError, ProofFailed):
        return None
    return receipt


def files_stand(r: Receipt, lake: Lake) -> bool:
    """Whether every part of the receipt is in staging, with the size and SHA-256 that the receipt names."""
    return all(_stands(part, lake) for part in r.parts)


def _stands(part: Part, lake: Lake) -> bool:
    if lake.size(part.staged) != part.bytes:
        return False
    try:
        with lake.open(part.staged) as f:
            return sha256(f) == part.sha256
    except FileNotFoundError:
        return False


def sha256(file: BinaryIO) -> str:
    """The SHA-256 (hex) of the rest of an open file."""
    digest = hashlib.sha256()
    while data := file.read(1 << 20):
        digest.update(data)
    return digest.hexdigest()


def _proof_failed(s: Slice, why: str) -> ProofFailed:
    return ProofFailed(
        f"{s}: {why}",
        remedy="nothing of this slice is published; run again, and report it if it stays so",
        topic=s.topic,
        partition=s.partition,
        start=s.start,
        end=s.end,
    )
