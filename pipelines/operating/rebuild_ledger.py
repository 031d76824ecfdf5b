"""Rebuilds a lost ledger's account from visible files, where Kafka no longer has the records to land them again.

A file names its offsets, batch and life of the topic; its folder names the window. So rows, windows and origins are
known again. Of offsets without a row it is unknown whether they were markers of transactions, aborted, dropped, or
compacted away: they count as compacted. Ranges without any file, and everything else that only entries told
(erasures, holds, losses, skips, results of contracts), are not known again.

Where files of several batches have the same records, those of the newest batch count, as a batch replaces older ones.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines.errors import PartUnreadable, UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import Layout, WindowSettings
from sluice.pipelines.lake import paths
from sluice.pipelines.landing.proof import hash_file
from sluice.pipelines.landing.writer import split_shared_part
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.entries import (
    Boundaries,
    BoundaryEntry,
    KeyRange,
    OriginEntry,
    OriginItem,
    PlanEntry,
    PublishEntry,
)
from sluice.pipelines.model.kafka import Key, PartitionState, TopicPartition
from sluice.pipelines.model.plans import OffsetRange, Plan, Request, RequestKind, Task, parse_offset_range
from sluice.pipelines.model.receipts import Counts, Owner, Part, PartKind, Receipt
from sluice.pipelines.planning import schema_changes, windows
from sluice.pipelines.ports import Lake, Ports
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.schema.schema import EXTRA, KAFKA
from sluice.pipelines.util.parallel import map_parallel
from sluice.pipelines.util.units import parse_window

TOGETHER = 1000
"""Receipts in one publish entry."""


@dataclass(frozen=True, slots=True)
class StandingFile:
    """A visible Parquet file, with its offset ranges and their rows."""

    path: str
    kind: PartKind
    folder: str
    batch: int
    ranges: tuple[tuple[OffsetRange, int], ...]

    def read_offsets(self, lake: Lake) -> set[tuple[int, int]]:
        """Returns partition and offset of each row."""
        with lake.open(self.path) as file:
            names = pq.read_schema(file).names
            prefix = "kafka_" if "kafka_offset" in names else ""
            rows = pq.read_table(file, columns=[f"{prefix}partition", f"{prefix}offset"])
        return set(zip(*(column.to_pylist() for column in rows.columns), strict=True))


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The files that count again, their rows, and the offsets in their ranges of which no row tells anything."""

    files: tuple[str, ...] = ()
    rows: int = 0
    without_row: int = 0
    holes: tuple[KeyRange, ...] = ()


def list_standing(feed: Feed, lake: Lake, state: State, partitions: Sequence[PartitionState]) -> list[StandingFile]:
    """Returns the files of which the ledger has no entry, and Kafka not all records, unless newer files replace them.

    Raises UsageError for rows that the feed's schema has no columns for, PartUnreadable.
    """
    if feed.landing.layout is not Layout.WINDOW:
        raise UsageError(
            f"feed {feed.name} lands by record time: its files do not name windows", remedy="leave out --from-files"
        )
    roots = zip(PartKind, paths.visible_roots(feed.stored), strict=True)
    names = [
        (p, kind) for kind, root in roots for p in lake.list(root) if paths.parse_part(p) and not paths.is_ignored(p)
    ]
    starts = {Key(*p.tp, p.topic_id): p.log_start for p in partitions}
    files = [f for f in map_parallel(lambda pair: _look(feed, lake, *pair), names) if _is_needed(f, state, starts)]
    return _drop_replaced(lake, sorted(files, key=lambda f: -f.batch))


def _look(feed: Feed, lake: Lake, path: str, kind: PartKind) -> StandingFile:
    below = paths.folder_of(path, feed.stored, kind)
    output, _, folder = below.partition("/")
    output, folder = ("", below) if "=" in output else (output, folder)
    try:
        with lake.open(path) as file:
            footer = pq.read_metadata(file)
    except (OSError, ValueError) as error:
        raise PartUnreadable(f"{path} cannot be read: {error}", remedy="restore it, or move it away") from None
    if kind is PartKind.LANDED and (
        wrong := _find_strange(feed.shape.datasets[output], footer.schema.to_arrow_schema())
    ):
        text = f"{path} has columns that feed {feed.name} lacks, or has otherwise: {wrong}"
        raise UsageError(text, remedy="add them to the feed's schema")
    about = footer.metadata or {}
    life, window = about.get(b"sluice.topic_id", b"").decode(), _find_window(folder, feed.window)
    name = paths.parse_part(path)
    batch = name.batch if name else 0
    if b"sluice.slices" in about:
        texts = json.loads(about[b"sluice.slices"])
    else:
        texts = [(about.get(b"sluice.range", b"").decode(), footer.num_rows)]
    parsed = [(parse_offset_range(text), rows) for text, rows in texts]
    ranges = tuple(
        (OffsetRange(r.topic, r.partition, life, r.start, r.end, window=window, folder=folder), rows)
        for r, rows in parsed
    )
    return StandingFile(path, kind, below, batch, ranges)


def _find_strange(shape: Shape, there: pa.Schema) -> str:
    """Returns the columns of a file that rows of this shape do not have, Kafka's aside."""
    own = shape.landed.names
    fields = [f for f in there if f.name != EXTRA and not f.name.startswith(KAFKA)] if shape.columns else []
    return ", ".join(
        f"{f.name}: {f.type}" for f in fields if f.name not in own or shape.landed.field(f.name).type != f.type
    )


def _find_window(folder: str, settings: WindowSettings) -> int | None:
    """Returns the start of the window that has this folder; None for the folder of records outside of windows."""
    levels = [level.partition("=")[2] for level in folder.split("/")]
    try:
        text = f"{levels[0]}T{':'.join([*levels[1:], '00', '00'][:2])}"
        local = parse_window(text)
    except ValueError:
        return None
    near = settings.number_of(local)
    return next((w for n in (near, near - 1, near + 1) if settings.local(w := settings.start_at(n)) == local), None)


def _is_needed(file: StandingFile, state: State, starts: Mapping[Key, int]) -> bool:
    """Returns whether Kafka lacks records of a range, and the ledger has no account of any."""
    return any(s.start < starts.get(s.key, s.end) for s, _ in file.ranges) and not any(
        state.current.get(s.tp, s.key) != s.key or any(s.range.meets(r) for r in state.list_accounted(s.key))
        for s, _ in file.ranges
    )


def _drop_replaced(lake: Lake, files: Sequence[StandingFile]) -> list[StandingFile]:
    """Returns the files without those that have records of a newer one. A replay leaves files of the same ranges."""
    out, by_day = list[StandingFile](), defaultdict[tuple[TopicPartition, str], list[StandingFile]](list)
    for file in files:
        near = {(s.tp, file.folder.partition("/")[0] if "=" in file.folder else "") for s, _ in file.ranges}
        newer = {
            n.path: n
            for key in near
            for n in by_day[key]
            if n.batch > file.batch
            and any(a.key == b.key and a.range.meets(b.range) for a, _ in n.ranges for b, _ in file.ranges)
        }
        own = file.read_offsets(lake) if newer else set()
        if any(own & n.read_offsets(lake) for n in newer.values()):
            continue
        out.append(file)
        for key in near:
            by_day[key].append(file)
    return out


def rebuild(
    feed: Feed, ports: Ports, ledger: Ledger, files: Sequence[StandingFile], partitions: Sequence[PartitionState]
) -> Rebuilt:
    """Write origins, boundaries and publications of the files. Continues after a kill, with the remaining files."""
    schema_changes.declare(feed, ledger)
    by_key = defaultdict[Key, list[OffsetRange]](list)
    for s in sorted((s for f in files for s, _ in f.ranges), key=lambda s: s.start):
        by_key[s.key].append(s)
    committed = ports.group.fetch_committed([k.tp for k in by_key])
    ledger.append(lambda state: _build_origins(state, by_key, {tp: c.offset for tp, c in committed.items() if c}))
    pins = tuple(b for key, ranges in by_key.items() if (b := _build_boundaries(key, ranges)).times)
    ledger.append(lambda state: windows.clamp_boundaries(state, BoundaryEntry(items=pins)))
    receipts = _build_receipts(ports.lake, files)
    for chunk in (receipts[at : at + TOGETHER] for at in range(0, len(receipts), TOGETHER)):
        _publish(feed, ports, ledger, chunk)
    state = ledger.read()
    ends = {Key(*p.tp, p.topic_id): p.log_start for p in partitions}
    holes = tuple(
        KeyRange(key=k, range=r) for k in by_key for r in state.pending(k, ends.get(k, state.find_known_end(k)))
    )
    without = sum(r.counts.compacted for r in receipts)
    return Rebuilt(tuple(f.path for f in files), sum(r.counts.rows for r in receipts), without, holes)


def _build_origins(
    state: State, by_key: Mapping[Key, Sequence[OffsetRange]], committed: Mapping[TopicPartition, int]
) -> OriginEntry | None:
    why = "the ledger lost its origin: the first offset of a file"
    items = tuple(
        OriginItem(key=k, offset=r[0].start, committed=committed.get(k.tp), why=why, opens=r[0].window)
        for k, r in by_key.items()
        if k.tp not in state.current
    )
    return OriginEntry(items=items) if items else None


def _build_boundaries(key: Key, ranges: Iterable[OffsetRange]) -> Boundaries:
    """Returns the boundaries between a partition's windows: each begins with its first file."""
    first = dict[int, int]()
    for s in ranges:
        if s.window is not None and s.window >= max(first, default=s.window):
            first.setdefault(s.window, s.start)
    return Boundaries(key=key, times=tuple(first), offsets=tuple(first.values()))


def _build_receipts(lake: Lake, files: Sequence[StandingFile]) -> list[Receipt]:
    """Returns a receipt for each group of ranges that overlap: files of a range, and of its replay."""
    parts = dict(zip((f.path for f in files), map_parallel(lambda f: _read_parts(lake, f), files), strict=True))
    ranges = sorted(
        ((s, rows, f) for f in files for s, rows in f.ranges), key=lambda x: (x[0].key, x[0].start, -x[0].end)
    )
    groups = list[list[tuple[OffsetRange, int, StandingFile]]]()
    for one in ranges:
        last = groups[-1] if groups else None
        if last and last[0][0].key == one[0].key and one[0].start < max(s.end for s, _, _ in last):
            last.append(one)
        else:
            groups.append([one])
    return [_build_receipt(lake, group, parts) for group in groups]


def _read_parts(lake: Lake, file: StandingFile) -> dict[OffsetRange, Part]:
    """Returns the parts of a file by their ranges, with the hash of its bytes."""
    with lake.open(file.path) as opened:
        digest = hash_file(opened)
    name, rows = file.path.rpartition("/")[2], sum(n for _, n in file.ranges)
    part = Part(name, file.kind, "", file.path, rows, lake.size(file.path) or 0, digest)
    shared = name.endswith("-shared.parquet")
    return split_shared_part(part, file.ranges) if shared else {file.ranges[0][0]: part}


def _build_receipt(
    lake: Lake,
    group: Sequence[tuple[OffsetRange, int, StandingFile]],
    parts_of: Mapping[str, Mapping[OffsetRange, Part]],
) -> Receipt:
    of = replace(group[0][0], end=max(s.end for s, _, _ in group))
    parts = tuple(parts_of[f.path][s] for s, rows, f in group if rows)
    landed, quarantined = (sum(p.rows for p in parts if p.kind is kind) for kind in PartKind)
    records = landed
    outputs = {p.output for p in parts if p.kind is PartKind.LANDED}
    if len(outputs) > 1:  # a record may have a row in each
        rows = {x for _, _, f in group if f.kind is PartKind.LANDED for x in f.read_offsets(lake)}
        records = sum(p == of.partition and of.start <= o < of.end for p, o in rows)
    counts = Counts(
        landed=records, quarantined=quarantined, compacted=of.span - records - quarantined, copies=landed - records
    )
    return Receipt(of, of.end, counts, parts, "rebuilt")


def _publish(feed: Feed, ports: Ports, ledger: Ledger, receipts: Sequence[Receipt]) -> None:
    """Write a batch of these receipts, under an owner that ends with this process."""
    owner = Owner(secrets.token_hex(16), "", socket.gethostname(), os.getpid(), 0)
    tasks = (Task(0, -1, tuple(r.offset_range for r in receipts)),)
    plan = Plan(feed.stored, ports.cluster.cluster_id(), Request(RequestKind.OFFSETS), feed.isolation, tasks)
    planned = ledger.append(lambda state: PlanEntry(plan=plan, hash=plan.hash, owner=owner))
    batch, shape = planned.number if planned else 0, feed.shape.name

    def give_path(part: Part) -> Part:
        folder = paths.folder_of(part.path, feed.stored, part.kind)
        return replace(part, staged=paths.staged_path(feed.stored, batch, "rebuilt", part.kind, folder, part.name))

    placed = tuple(replace(r, format=shape, parts=tuple(map(give_path, r.parts))) for r in receipts)
    ledger.append(lambda state: PublishEntry(batch=batch, token=owner.token, receipts=placed))
