"""The proof of an offset range: checks its receipt against the plan and the staged files.

A receipt that passes may be published. Checked are the position and the counts against the range; names and paths; and
each file's size, footer (rows, own metadata) and the offsets that its row groups span. In a file that ranges share,
partition and offset of each row are read: every row belongs to a range whose receipt is there. A receipt that fails
becomes a RangeFailure with the reason; receipts that share a file with it fail, too. Nothing is repaired here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines.errors import OffsetsLost, PartUnreadable, ProofFailed, Retryable, SluiceError, Unknown
from sluice.pipelines.lake import parquet, paths, receipt_files
from sluice.pipelines.landing.writer import build_metadata, build_shared_metadata, split_shared_part
from sluice.pipelines.ledger.fold import by_key
from sluice.pipelines.model.kafka import Range, intersect, union
from sluice.pipelines.model.plans import OffsetRange, Plan
from sluice.pipelines.model.receipts import Outcome, Part, PartKind, RangeFailure, Receipt, group_by_sharing
from sluice.pipelines.ports import Lake
from sluice.pipelines.schema.arrays import int64s, view_int32s
from sluice.pipelines.util.grouping import group_by
from sluice.pipelines.util.parallel import map_parallel
from sluice.pipelines.util.units import many


def prove(plan: Plan, batch: int, outcomes: Iterable[Outcome], lake: Lake) -> tuple[list[Receipt], list[RangeFailure]]:
    """The proven receipts and the failures of a plan: one of the two for each offset range, in the plan's order.

    A task that ran more than once may leave several receipts; the first that holds, in order of attempt, is chosen.
    Those that share a file are chosen together, or not at all.
    """
    reported = list(outcomes)
    failures = group_by((o for o in reported if isinstance(o, RangeFailure)), lambda o: o.offset_range)
    claim = Claim(plan.feed, batch, plan.hash)
    groups = group_by_sharing(sorted((o for o in reported if isinstance(o, Receipt)), key=lambda r: r.attempt))
    chosen: dict[OffsetRange, Receipt] = {}
    for group, wrong in zip(groups, map_parallel(lambda g: _find_error(claim, g, lake), groups), strict=True):
        if wrong is not None:
            for r in group:
                failures.setdefault(r.offset_range, []).insert(0, to_failure(r.offset_range, wrong))
        elif not any(r.offset_range in chosen for r in group):
            chosen |= {r.offset_range: r for r in group}
    receipts = [chosen[s] for s in plan.offset_ranges if s in chosen]
    failed = [
        failures[s][0] if s in failures else to_failure(s, _build_proof_error(s, "no task reported this offset range"))
        for s in plan.offset_ranges
        if s not in chosen
    ]
    return receipts, failed


@dataclass(frozen=True, slots=True)
class Claim:
    """The batch and plan that parts must name as theirs."""

    feed: str
    batch: int
    plan_hash: str


def find_lost_rows(feed: str, before: Sequence[Receipt], after: Sequence[Receipt]) -> list[RangeFailure]:
    """Returns a failure for each landed range of which fewer records remain in the receipts `after` than `before`.

    Offsets without a record only become more: compaction removes records, and nothing brings them back.
    """
    out = []
    for key, ranges in by_key((r.offset_range.key, r.offset_range.range) for r in before).items():
        for landed in union(ranges):
            had, has = (
                [r for r in of if r.offset_range.key == key and landed.meets(r.offset_range.range)]
                for of in (before, after)
            )
            if (lost := sum(r.counts.no_record for r in has) - sum(r.counts.no_record for r in had)) > 0:
                s = replace(had[0].offset_range, start=landed.start, end=landed.end)
                out.append(to_failure(s, _build_fewer_error(feed, s, lost)))
    return out


def _build_fewer_error(feed: str, s: OffsetRange, lost: int) -> OffsetsLost:
    return OffsetsLost(
        f"{s} has landed, and Kafka no longer has {many(lost, 'record')} of it: landing it again would lose them",
        remedy="landed rows stay. If their file is missing or damaged, bring it back from a backup, or give it up:"
        f" sluice accept {feed} damaged --offsets {s} --reason …",
    )


def _find_error(claim: Claim, group: Sequence[Receipt], lake: Lake) -> SluiceError | None:
    try:
        check_together(claim, group, lake)
    except SluiceError as e:
        return e
    return None


def to_failure(s: OffsetRange, error: Exception) -> RangeFailure:
    """The error as an outcome. It is fatal if a retry cannot help."""
    if isinstance(error, SluiceError):
        return RangeFailure(s, type(error).__name__, error.message, error.remedy, fatal=is_final(error))
    text = f"{type(error).__name__}: {error}"[:500]
    return RangeFailure(s, type(error).__name__, text, "run again; if it stays so, report it")


def is_final(error: Exception) -> bool:
    """Returns whether the same call would fail again until somebody changes something."""
    return isinstance(error, SluiceError) and not isinstance(error, Retryable | Unknown)


def check_together(claim: Claim, group: Sequence[Receipt], lake: Lake) -> None:
    """Raises ProofFailed unless receipts that share files, and no others, agree with these and with their own files.

    Names are checked first, so that no other path is ever opened.
    """
    shared: dict[str, list[tuple[Receipt, Part]]] = {}
    for r in group:
        check_account(r)
        for kind, output in product(PartKind, r.outputs):
            parts = tuple(p for p in r.of(kind) if p.output == output)
            if len(parts) == 1 and parts[0].shared:
                shared.setdefault(parts[0].staged, []).append((r, parts[0]))
                continue
            _check_names(claim, r, parts)
            groups = [_read_row_groups(claim, r, part, lake) for part in parts]
            for follows in groups if r.offset_range.by_time else [[g for of_part in groups for g in of_part]]:
                _check_offsets(r.offset_range, follows)
    for claims in shared.values():
        _check_shared(claim, sorted(claims, key=lambda rp: rp[1].shared.first if rp[1].shared else 0), lake)


def check_account(r: Receipt) -> None:
    """Raises ProofFailed unless the offset range was read to its end, and counts and rows add up (invariant 5)."""
    check_classes(r)
    counts = r.counts
    for kind, expected in ((PartKind.LANDED, counts.landed_rows), (PartKind.QUARANTINED, counts.quarantined)):
        rows = sum(p.rows for p in r.of(kind))
        if rows != expected:
            raise _build_proof_error(r.offset_range, f"{expected} rows {kind} by its counts, {rows} in its parts")


def check_classes(r: Receipt) -> None:
    """Raises ProofFailed unless the offset range was read to its end and its counts add up to its span."""
    s, counts = r.offset_range, r.counts
    if r.position < s.end:
        raise _build_proof_error(s, f"reading stopped at {r.position}, before the end")
    if counts.total != s.span or min(getattr(counts, name) for name in counts.__dataclass_fields__) < 0:
        raise _build_proof_error(s, f"{counts} adds up to {counts.total}, the range spans {s.span}")
    if counts.erased != sum(x.span for x in intersect(r.erased, s.range)):
        raise _build_proof_error(s, f"{counts.erased} records are erased, and its erased offsets are {r.erased}")


def _check_names(claim: Claim, r: Receipt, parts: Sequence[Part]) -> None:
    for sequence, part in enumerate(parts):
        folder = _find_folder(claim, r.offset_range, part)
        name = paths.part_name(r.offset_range, claim.batch, sequence)
        staged = paths.staged_path(claim.feed, claim.batch, r.attempt, part.kind, folder, name)
        path = paths.part_path(claim.feed, part.kind, folder, name)
        if (part.name, part.staged, part.path) != (name, staged, path) or part.shared:
            raise _build_proof_error(r.offset_range, f"part {sequence} is called {part.path}, it should be {path}")


def _find_folder(claim: Claim, s: OffsetRange, part: Part) -> str:
    if not s.by_time:
        return paths.join(part.output, s.folder)
    folder = paths.folder_of(part.path, claim.feed, part.kind)
    own = folder.removeprefix(f"{part.output}/")
    if not paths.is_window_folder(own, s.by_time, paths.prefix_of(s.folder)):
        raise _build_proof_error(s, f"{part.path} lies in no folder of a time")
    return folder


def _read_row_groups(claim: Claim, r: Receipt, part: Part, lake: Lake) -> list[Range]:
    """Check the staged file against the receipt. Returns the offsets that each of its row groups spans."""
    size = lake.size(part.staged)
    if size != part.bytes:
        raise _build_proof_error(r.offset_range, f"{part.staged} has {size} bytes, its receipt says {part.bytes}")
    try:
        with parquet.open_parquet(lake, part.staged) as file:
            footer = file.metadata
    except PartUnreadable as e:
        raise _build_proof_error(r.offset_range, e.message) from None
    if footer.num_rows != part.rows:
        raise _build_proof_error(
            r.offset_range, f"{part.staged} has {footer.num_rows} rows, its receipt says {part.rows}"
        )
    _check_metadata(
        r.offset_range, part, footer, build_metadata(claim.feed, claim.batch, claim.plan_hash, r.offset_range)
    )
    return [_read_offsets(r.offset_range, part, footer, i) for i in range(footer.num_row_groups)]


def _check_metadata(s: OffsetRange, part: Part, footer: pq.FileMetaData, wanted: dict[str, str]) -> None:
    metadata = {k.decode(): v.decode("utf-8", "replace") for k, v in (footer.metadata or {}).items()}
    for key, expected in wanted.items():
        if metadata.get(key) != expected:
            raise _build_proof_error(s, f"{part.staged} says {key} = {metadata.get(key)!r}, expected {expected!r}")


def _check_shared(claim: Claim, receipts: Sequence[tuple[Receipt, Part]], lake: Lake) -> None:
    """Check a file that offset ranges share, given in its order, against all of their receipts."""
    (r, part), s = receipts[0], receipts[0][0].offset_range
    name, kind, folder = paths.shared_name(s, claim.batch), part.kind, paths.join(part.output, s.folder)
    staged = paths.staged_path(claim.feed, claim.batch, r.attempt, kind, folder, name)
    path = paths.part_path(claim.feed, kind, folder, name)
    ranges = [(other.offset_range, p.rows) for other, p in receipts]
    rows, size = sum(n for _, n in ranges), part.file_bytes
    file_part = Part(name, kind, staged, path, rows, size, part.sha256)
    shares = split_shared_part(file_part, ranges) if rows else {}
    lot = (s.topic, s.incarnation, s.window, s.folder, 0)
    for other, p in receipts:
        o = other.offset_range
        if p != shares.get(o) or (o.topic, o.incarnation, o.window, o.folder, o.by_time) != lot:
            raise _build_proof_error(o, f"its rows are not where its receipt says, in {p.path}, with those of {s}")
    spans = [((o.partition, o.start), (o.partition, o.end)) for o, _ in ranges]
    if any(after < end for (_, end), (after, _) in pairwise(spans)):
        raise _build_proof_error(s, f"the offset ranges in {path} do not follow each other")
    if lake.size(staged) != size:
        raise _build_proof_error(s, f"{staged} has {lake.size(staged)} bytes, its receipts say {size}")
    try:
        with parquet.open_parquet(lake, staged) as file:
            footer, names = file.metadata, file.schema_arrow.names
            columns = [f"{'kafka_' if 'kafka_offset' in names else ''}{n}" for n in ("partition", "offset")]
            if footer.num_rows != rows:
                raise _build_proof_error(s, f"{staged} has {footer.num_rows} rows, its receipts say {rows}")
            _check_metadata(s, part, footer, build_shared_metadata(claim.feed, claim.batch, claim.plan_hash, ranges))
            _check_rows(staged, ranges, file.read(columns=columns, use_threads=False))
    except PartUnreadable as e:
        raise _build_proof_error(s, e.message) from None


def _check_rows(staged: str, ranges: Sequence[tuple[OffsetRange, int]], columns: pa.Table) -> None:
    """Every row is one of its offset range, in order of offsets."""
    partitions, offsets = (np.concatenate([fixed(c) for c in columns.column(i).chunks]) for i, fixed in _COORDINATES)
    at = 0
    for s, rows in ranges:
        mine, whose = offsets[at : at + rows], partitions[at : at + rows]
        inside = rows and mine[0] >= s.start and mine[-1] < s.end and bool(np.all(mine[1:] > mine[:-1]))
        if not inside or bool(np.any(whose != s.partition)):
            raise _build_proof_error(s, f"the rows from {at} on in {staged} are not those of its range, in order")
        at += rows


_COORDINATES = ((0, view_int32s), (1, int64s))


def _read_offsets(s: OffsetRange, part: Part, footer: pq.FileMetaData, index: int) -> Range:
    group = footer.row_group(index)
    columns = {c.path_in_schema: c for c in (group.column(i) for i in range(group.num_columns))}
    column = columns.get("kafka_offset") or columns.get("offset")
    statistics = column.statistics if column else None
    if statistics is None or not statistics.has_min_max or statistics.null_count:
        raise _build_proof_error(s, f"{part.staged}: row group {index} does not say which offsets it holds")
    return Range(statistics.min, statistics.max + 1)


def _check_offsets(s: OffsetRange, groups: Sequence[Range]) -> None:
    at = s.start
    for group in groups:
        if group.start < at or group.end > s.end:
            raise _build_proof_error(s, f"a row group holds offsets {group}, expected within [{at}, {s.end})")
        at = group.end


def read_receipts(path: str, lake: Lake) -> tuple[Receipt, ...]:
    """The receipts at `path`; none if one is unsound, and their offset ranges must be read again."""
    receipts = receipt_files.read(path, lake)
    try:
        for receipt in receipts:
            check_account(receipt)
    except ProofFailed:
        return ()
    return receipts


def are_files_intact(receipts: Sequence[Receipt], lake: Lake, *, visible: bool = False) -> bool:
    """Returns whether every file of the receipts is in staging, or `visible`, with the size and SHA-256 that they
    name.
    """
    files = {(p.path if visible else p.staged, p.file_bytes, p.sha256) for r in receipts for p in r.parts}
    return all(_is_intact(*file, lake) for file in files)


def _is_intact(path: str, size: int, digest: str, lake: Lake) -> bool:
    if lake.size(path) != size:
        return False
    try:
        with lake.open(path) as f:
            return hash_file(f) == digest
    except FileNotFoundError:
        return False


def hash_file(file: BinaryIO) -> str:
    """The SHA-256 (hex) of the rest of an open file."""
    digest = hashlib.sha256()
    while data := file.read(1 << 20):
        digest.update(data)
    return digest.hexdigest()


def _build_proof_error(s: OffsetRange, why: str) -> ProofFailed:
    return ProofFailed(
        f"{s}: {why}",
        remedy="nothing of this offset range is published; run again, and report it if it stays so",
        topic=s.topic,
        partition=s.partition,
        start=s.start,
        end=s.end,
    )
