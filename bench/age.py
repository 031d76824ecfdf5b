"""Cost of an hour for an old feed, whose ledger has a month, a year or five years of hours.

The lake is a folder on this disk, Kafka is simulated in memory (`simulated_cluster`) and nothing is read: measured is
the driver's own work, from the first read of the ledger to the committed offsets. The first hours are the product's.
Those that follow are copies of the last of them, entry for entry, moved on in time and in offsets, which the ledger
folds as it folds any other. `merged` is the same feed after each window was compacted once.

CPU is that of this process. Names, requests and bytes are counted at the lake's port, and are exact.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from rich.console import RenderableType

from bench.simulated_cluster import EvenCluster, UnreadEngine
from sluice.cli.terminal.output import heading, table
from sluice.cli.terminal.text_layout import count, size
from sluice.pipelines.audit import audit_cache
from sluice.pipelines.audit.audit import audit
from sluice.pipelines.audit.audit_cache import Audited
from sluice.pipelines.batch.land import LandingOptions, land
from sluice.pipelines.batch.preview import preview
from sluice.pipelines.batch.survey import open_ledger
from sluice.pipelines.committing.commit import CommitSettings, commit
from sluice.pipelines.errors import ProofFailed
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger, State, log
from sluice.pipelines.ledger.marks import Mark
from sluice.pipelines.ledger.tip import Tip
from sluice.pipelines.maintenance import compaction
from sluice.pipelines.model.kafka import CommittedOffset, Key, OffsetAtTime, TopicPartition
from sluice.pipelines.model.plans import OffsetRange, Request, RequestKind
from sluice.pipelines.model.receipts import Owner, PartKind, Progress
from sluice.pipelines.operating.feed_status import read_status
from sluice.pipelines.ports import Ports, Stat
from sluice.pipelines.publishing.manifest import write_manifests
from sluice.pipelines.util.units import DAY, HOUR, many
from sluice.resources.lake.local_lake import LocalLake
from sluice.testing.engine import MemoryLiveness
from sluice.testing.group import MemoryGroup

Note = Callable[[str], None]
One = TypeVar("One")

MONTHS = (1, 12)
MONTH = 730
"""Hours."""
PARTITIONS, BROKERS = 12, 3
FIRST_HOURS = 3
"""Landed by the product before hours are copied."""
BEGINS = 1_637_366_400_000
"""2021-11-20, in UTC."""
DAY_BYTES = PARTITIONS * (100 << 20)
PAGE = 1000
"""Names in one answer of S3 to LIST."""
_CATCH_UP = Request(RequestKind.CATCH_UP)


@dataclass(frozen=True, slots=True)
class Asked:
    """Requests of a piece of work to the lake. `names` are those in the folders that a local lake looks through;
    `requests` are those that S3 would get. `checkpoints`: how often one was read."""

    cpu: float
    names: int
    requests: dict[str, int]
    checkpoints: int


@dataclass(frozen=True, slots=True)
class Aged:
    """A feed of that age. `asked` is by kind of work."""

    months: int
    merged: bool
    entries: int
    checkpoint_bytes: int
    asked: dict[str, Asked]

    def __str__(self) -> str:
        return many(self.months, "month") + (", merged" if self.merged else "")


@dataclass(frozen=True, slots=True)
class AgeReport:
    aged: tuple[Aged, ...]

    def document(self) -> dict[str, Any]:
        return asdict(self)


def run(folder: Path, note: Note, months: Sequence[int] = MONTHS) -> AgeReport:
    """Each age in `folder`, plain and merged."""
    return AgeReport(tuple(_measure(folder, m, merged, note) for m in months for merged in (False, True)))


def _measure(folder: Path, months: int, merged: bool, note: Note) -> Aged:
    scratch = folder / f"age-{secrets.token_hex(4)}"
    try:
        world = _World(scratch, merged)
        note(f"{many(months, 'month')} of hours{', each merged' if merged else ''}")
        world.grow(months * MONTH)
        costs = {what: world.costing(work) for what, work in world.work().items()}
        newest = max((scratch / "lake" / paths.checkpoint_folder(world.feed.stored)).iterdir())
        number = world.ledger().read().number
        return Aged(months, merged, number, newest.stat().st_size, costs)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


# -- for people


def age_view(report: AgeReport) -> Iterator[RenderableType]:
    """A column for each age, for the terminal."""
    columns = [str(a) for a in report.aged]
    yield heading("age", f"{PARTITIONS} partitions, a window an hour; a lake in a folder, Kafka made up in memory")
    rows = [["entries", *(count(a.entries) for a in report.aged)]]
    rows.append(["a checkpoint", *(size(a.checkpoint_bytes) for a in report.aged)])
    for what in report.aged[0].asked:
        of = [a.asked[what] for a in report.aged]
        rows.append([f"{what}: CPU seconds", *(f"{a.cpu:,.2f}" for a in of)])
        rows.append(["  names read", *(count(a.names) for a in of)])
        rows.append(["  LIST, GET", *(f"{a.requests.get('LIST', 0)}, {a.requests.get('GET', 0)}" for a in of)])
        rows.append(["  checkpoints read", *(count(a.checkpoints) for a in of)])
    yield table(["", *columns], rows, right=" ".join(columns))


# -- one feed


class UnevenCluster(EvenCluster):
    """An `EvenCluster` whose hours differ in size, so that offsets are as hard to pack as real ones."""

    def first_offset(self, tp: TopicPartition, at: int) -> int:
        """Records stamped before the time."""
        hours, rest = divmod(max(at - BEGINS, 0), HOUR)
        mean = self._per_day[tp] * HOUR / DAY
        wobble = random.Random(f"{tp}{hours}").random()
        return int(mean * (hours + 0.5 * wobble + (rest / HOUR) * 0.4))

    def epoch_end(self, tp: TopicPartition) -> int:
        return self.first_offset(tp, self.now)

    def first(self, tp: TopicPartition, time: int) -> OffsetAtTime | None:
        at = self.first_offset(tp, time)
        return OffsetAtTime(at, max(time, BEGINS)) if at < self.epoch_end(tp) else None


class _Counted:
    """A lake that counts its requests."""

    def __init__(self, lake: LocalLake, counts: Counter[str]) -> None:
        self._lake, self._counts = lake, counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lake, name)

    def get(self, path: str) -> bytes | None:
        self._counts["GET"] += 1
        self._counts["checkpoints"] += "/checkpoints/" in path
        return self._lake.get(path)

    def size(self, path: str) -> int | None:
        self._counts["HEAD"] += 1
        self._counts["names"] += 1
        return self._lake.size(path)

    def put(self, path: str, data: bytes) -> None:
        self._counts["PUT"] += 1
        self._lake.put(path, data)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        self._counts["PUT"] += 1
        return self._lake.put_if_absent(path, data)

    def put_each_if_absent(self, files: Mapping[str, bytes]) -> frozenset[str]:
        self._counts["PUT"] += len(files)
        return self._lake.put_each_if_absent(files)

    def list(self, prefix: str, after: str = "") -> Iterator[str]:
        return self._listing(prefix, self._lake.list(prefix, after))

    def stats(self, prefix: str, after: str = "") -> Iterator[Stat]:
        return self._listing(prefix, self._lake.stats(prefix, after))

    def _listing(self, prefix: str, entries: Iterator[One]) -> Iterator[One]:
        began = time.process_time_ns()
        self._counts["names"] += sum(len(f) + len(n) for _, f, n in os.walk(self._lake.root / prefix))
        self._counts["counting"] += time.process_time_ns() - began
        count = 0
        try:
            for one in entries:
                count += 1
                yield one
        finally:
            self._counts["LIST"] += count // PAGE + 1


class _World:
    """One feed, its lake in a folder, and a cluster that is as old."""

    def __init__(self, folder: Path, merged: bool) -> None:
        self.merged = merged
        self.lake = LocalLake(folder / "lake")
        self.counts: Counter[str] = Counter()
        self.cluster = UnevenCluster(PARTITIONS, BROKERS, 1, BEGINS, DAY_BYTES)
        self.group = MemoryGroup()
        settings = {
            "feed": "age",
            "kafka": {"bootstrap": "127.0.0.1:9"},
            "topics": {"include": [r"topic-.*"]},
            "start": "earliest",
            "lake": str(folder / "lake"),
            "commit": "transactional",
        }
        self.feed = Feed.model_validate(settings, context={"root": folder})
        self.cluster.now += HOUR // 2
        for _ in range(FIRST_HOURS):
            self.cluster.now += HOUR
            self.run_hour()

    def ports(self) -> Ports:
        lake: Any = _Counted(self.lake, self.counts)
        clock = lambda: self.cluster.now  # noqa: E731
        return Ports(self.cluster, self.group, lake, UnreadEngine(), MemoryLiveness(), clock, None, parallelism=2)

    def ledger(self) -> Ledger:
        return Ledger(self.ports().lake, self.feed.stored, lambda: self.cluster.now)

    def run_hour(self) -> None:
        """Land and commit, as a run does without Dagster and Spark, with one ledger, which its steps share. The
        first run lands all that there is, as nothing before a window may stay pending."""
        ports, token = self.ports(), secrets.token_hex(8)
        ledger = open_ledger(self.feed, ports, token)
        window = self.feed.window.last_boundary(self.cluster.now) - HOUR
        request = Request(RequestKind.WINDOW, window=window) if self.group.offsets else _CATCH_UP
        options = LandingOptions(ledger)
        land(self.feed, ports, request, Owner(token, token, "here", 1, 0), _quiet, options).check()
        settings = CommitSettings(self.feed.commit, self.feed.transactional_id, self.feed.policies.on_group_moved)
        commit(ledger, ports.group, settings, None, ports.cluster)

    def work(self) -> dict[str, Callable[[], object]]:
        """Returns the measured work in order; each begins as in a new process."""

        def next_hour() -> None:
            self.cluster.now += HOUR
            self.run_hour()

        @contextmanager
        def open_ports(feed: Feed) -> Iterator[Ports]:
            yield self.ports()

        def status() -> object:
            return read_status(open_ports, self.feed, 24)

        compaction.compact(self.feed, self.ports(), None, Owner("merging", "", "here", 1, 0), _quiet)
        while self.ledger().pack():  # as a daily compaction does
            pass
        next_hour()  # reads everything once, and the files of the first run after it
        return {
            "next hour": next_hour,
            "status": status,
            "plan": lambda: preview(self.feed, self.ports(), _CATCH_UP),
            "compact --dry-run": lambda: compaction.foresee_compaction(self.feed, self.ports()),
            "fold without a checkpoint": self.fold_again,
            "audit --all": lambda: self.look(None),
            "an hour later": next_hour,
            "audit": lambda: self.look(audit_cache.load_audited(self.ports().lake, self.feed.stored)),
        }

    def fold_again(self) -> None:
        """Read the ledger from its start, as by a Sluice that knows no checkpoint of this format."""
        shutil.rmtree(self.lake.root / paths.checkpoint_folder(self.feed.stored))
        self.ledger().read()

    def look(self, previous: Audited | None) -> None:
        """An audit that keeps its proof. Raises ProofFailed."""
        ports = self.ports()
        report = audit(self.ledger(), ports.lake, previous=previous, at=self.cluster.now, quick=True)
        if report.problems:
            raise ProofFailed(f"the benchmark's own ledger does not close: {report.problems[0]}")
        audit_cache.keep(ports.lake, self.feed.stored, report.audited, previous, report.at)

    def costing(self, work: Callable[[], object]) -> Asked:
        log.load_checkpoint.cache_clear()
        self.counts.clear()
        began = time.process_time()
        work()
        took = time.process_time() - began - self.counts["counting"] / 1e9
        requests = {k: n for k, n in self.counts.items() if k.isupper()}
        return Asked(round(took, 3), self.counts["names"], requests, self.counts["checkpoints"])

    # -- hours that are copied

    def grow(self, hours: int) -> None:
        """Copy the newest hour until the ledger has this many; write their manifests, the committed offsets, a
        checkpoint. Without fsync: none of it has to outlive a crash."""
        ledger = self.ledger()
        copies = _Copies(self, ledger, ledger.read())
        with patch.object(os, "fsync", lambda handle: None):
            while (copies.window - BEGINS) // HOUR < hours:
                copies.hour()
            copies.end()
            write_manifests(self.ledger(), self.lake, self.feed.stored, self.feed.window)
        self.ledger().read()


class _Copies:
    """Writes entries as the product does, without reading the lake between them: the newest of each kind, in which
    times, offsets and names are others."""

    def __init__(self, world: _World, ledger: Ledger, state: State) -> None:
        self.world, self.feed = world, world.feed.name
        self.folder = world.lake.root / paths.log_folder(self.feed)
        self.ledger_id, self.number, self.head = state.ledger_id, state.number, state.head
        self.like = {(raw := json.loads(data))["kind"]: raw for _, _, data in ledger.raw(0)}
        self.plan = self.like["plan"]["plan"]
        self.offset_ranges = {_key(s): s for task in self.plan["tasks"] for s in task["slices"]}
        self.token = self.like["plan"]["owner"]["token"]
        self.keys = state.known()
        self.window = state.boundary_times[-1]
        self.at = {k: state.frontier(k) for k in self.keys}

    def _write(self, kind: str, **fields: Any) -> int:
        number = self.number
        at = self.window + HOUR + 600_000 + random.randrange(60_000)
        chain = {"number": number, "follows": self.head}
        data = _canonical(self.like[kind] | chain | {"write": secrets.token_hex(8), "at": at} | fields) + b"\n"
        (self.folder / f"{number:020d}.json").write_bytes(data)
        self.number, self.head = number + 1, sha256(data).hexdigest()
        return number

    def hour(self) -> None:
        """The hour that begins at the newest boundary: pin its end, land up to it, commit."""
        start, end = self.window, self.window + HOUR
        ends = {k: max(self.world.cluster.first_offset(k.tp, end), self.at[k]) for k in self.keys}
        like = self.like["boundary"]["items"][0] | {"by_clock": [], "by_marker": []}
        self._write("boundary", items=[like | {"key": k, "times": [end], "offsets": [ends[k]]} for k in self.keys])
        ranges = [s for k in self.keys if ends[k] > self.at[k] for s in [self._build_range(k, ends[k], start)]]
        batch = self._batch({"kind": RequestKind.WINDOW, "window": start}, ranges, [])
        if self.world.merged:
            replaces = [self._part(s, batch, i) for s in ranges for i in (0, 1)]
            self._batch({"kind": RequestKind.COMPACT, "window": None}, ranges, replaces)
        offsets = [{"key": k, "offset": o} for k, o in ends.items()]
        self.mark = self._write("intent", offsets=offsets)
        self._write("commit", offsets=offsets, mark=self.mark)
        self.window, self.at = end, ends

    def _build_range(self, key: Key, end: int, window: int) -> dict[str, Any]:
        like: dict[str, Any] = self.offset_ranges.get(key) or next(iter(self.offset_ranges.values())) | key._asdict()
        start, folder = self.at[key], paths.window_folder(window, HOUR, paths.PREFIX)
        size = {"estimated_bytes": 200 * (end - start)}
        return like | {"start": start, "end": end, "window": window, "folder": folder} | size

    def _batch(self, request: dict[str, Any], ranges: Sequence[dict[str, Any]], replaces: Sequence[str]) -> int:
        tasks = [t | {"slices": ranges[i :: len(self.plan["tasks"])]} for i, t in enumerate(self.plan["tasks"])]
        plan = self.plan | {"request": self.plan["request"] | request, "tasks": tasks, "replaces": replaces}
        batch = self._write("plan", plan=plan, hash=sha256(_canonical(plan)).hexdigest())
        receipts = [self._receipt(s) for t in tasks for s in t["slices"]]
        self._write("publish", batch=batch, token=self.token, receipts=receipts)
        return batch

    def _receipt(self, s: dict[str, Any]) -> dict[str, Any]:
        like: dict[str, Any] = self.like["publish"]["receipts"][0]
        counts = dict.fromkeys(like["counts"], 0) | {"compacted": s["end"] - s["start"]}
        return like | {"slice": s, "position": s["end"], "counts": counts}

    def _part(self, s: dict[str, Any], batch: int, sequence: int) -> str:
        name = paths.part_name(OffsetRange(*_key(s), s["start"], s["end"]), batch, sequence)
        return paths.part_path(self.feed, PartKind.LANDED, s["folder"], name)

    def end(self) -> None:
        """Bring the clock, the group and the note next to the log to where the copies end."""
        world = self.world
        world.cluster.now = self.window + HOUR // 2
        for key, offset in self.at.items():
            mark = Mark(self.ledger_id, self.mark, key.incarnation).dump()
            world.group.offsets[key.tp] = CommittedOffset(offset, -1, mark)
        world.lake.put(paths.tip_path(self.feed), Tip(self.ledger_id, self.number - 1).dump())


def _key(s: dict[str, Any]) -> Key:
    return Key(s["topic"], s["partition"], s["incarnation"])


def _canonical(raw: Any) -> bytes:
    """As plans are hashed and entries are written."""
    return json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()


def _quiet(progress: Progress) -> None: ...
