"""Leftovers of dead runs in a feed's ledger and lake: find, fix where no other process will, and report them.

Promises: nothing of a live owner is touched, and nothing under `data/` that the ledger does not know is deleted. Names
are read first and the ledger afterwards, because a name that the fold does not know may be newer than the fold
(docs/developers/design/model-rules.md). Repair is idempotent. Over a `Pretended` lake it is the dry run: the same
code without writes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from io import BytesIO
from typing import BinaryIO

from sluice.pipelines.audit.audit import list_live_receipts
from sluice.pipelines.errors import PlanBusy, UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Batch, BatchStatus, Ledger, State
from sluice.pipelines.ledger.fold import by_key
from sluice.pipelines.maintenance.expiry import remove_retired
from sluice.pipelines.model.kafka import Isolation, union
from sluice.pipelines.model.plans import AskedRange, OffsetRange
from sluice.pipelines.model.receipts import Met, Owner, Verdict, group_by_sharing
from sluice.pipelines.planning.origins import find_key
from sluice.pipelines.ports import Lake, Liveness, Ports, Stat
from sluice.pipelines.publishing import lost_entries, published_files
from sluice.pipelines.publishing import publish as owners
from sluice.pipelines.publishing.manifest import find_wrong_files, write_manifests
from sluice.pipelines.publishing.publish import abandon, roll_forward
from sluice.pipelines.util.documents import Derived, Internal
from sluice.pipelines.util.units import many

STALE_MS = 3_600_000
"""How long an unfinished write must have stood still before it counts as that of a killed process."""


class RepairKind(StrEnum):
    """The kinds of findings. The last five are reported and left to others."""

    SHOWN = "published, not visible"
    HIDDEN = "replaced, still visible"
    STAGING = "unused staging"
    ABANDONED = "abandoned batch"
    MANIFEST = "window without manifest"
    HEARTBEAT = "heartbeat of a dead run"
    UNFINISHED = "unfinished write"
    EMPTY = "empty folder"
    UNTOLD = "not reported to Dagster"
    ERASING = "erasure not finished"
    WAITING = "batch of a dead run"
    AT_WORK = "running batch"
    STRANGER = "unknown file"
    MISSING = "published part missing"
    OVERTOLD = "reported only to Dagster"


@dataclass(frozen=True, slots=True)
class RepairFinding:
    """One finding. `act` is the repair, as a participle ("removed"); empty: nothing was changed, and `remedy` lists
    the ways out. `why` is the evidence, `items` are paths, windows or batches.
    """

    kind: Internal[RepairKind]
    text: str
    act: str = ""
    remedy: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    why: str = ""

    @property
    def what(self) -> Derived[str]:
        return self.kind.name.lower()


@dataclass(frozen=True, slots=True)
class RepairTarget:
    """One feed's ledger and lake. `ledger` reads from `lake`."""

    feed: str
    ledger: Ledger
    lake: Lake
    liveness: Liveness
    windows: WindowSettings

    @classmethod
    def of(cls, feed: Feed, ports: Ports) -> RepairTarget:
        ledger = Ledger.offline(ports.lake, feed.stored, ports.clock, "repair")
        return cls(feed.stored, ledger, ports.lake, ports.liveness, feed.window)


def repair(target: RepairTarget, giving_up: Sequence[int] = ()) -> Iterator[RepairFinding]:
    """Fix the lake, in this order: plans to give up, `data/`, manifests, leftovers. Then report missing files.

    Raises EntriesLost when the ledger lost entries, and PlanBusy or UsageError for batches that cannot be given up.
    Then nothing has changed.
    """
    # Files of lost entries look like leftovers. So this check comes first, before a step would remove them.
    lost_entries.check_all(target.ledger, target.lake)
    all_owners = (*target.liveness.owners(), *(b.owner for b in target.ledger.read().live()))
    verdicts = target.liveness.judge(dict.fromkeys(all_owners))
    # All are checked before the first is given up: a refusal leaves everything as it was.
    _check_dead(target, giving_up, verdicts)
    yield from _given_up(target, giving_up)
    yield from _rolled_forward(target)
    yield from _replaced_files(target)
    for batch in target.ledger.read().live():
        met = owners.report_met(target.feed, batch, verdicts.get(batch.owner.token, owners.NEW))
        yield _waiting(target, batch, met) if met.verdict.dead else _make_finding(RepairKind.AT_WORK, met, met.text)
    yield from _manifests(target)
    yield from _orphans(target)
    yield from _unfinished_writes(target)
    yield from _beats(target, {o.token: o for o in all_owners}, verdicts)
    # The ledger knows the offsets whose files are not clean. A note without offsets: the files are, and snapshots of
    # tables may still name older ones.
    offsets = sum(r.span for ranges in target.ledger.read().erasing.values() for r in ranges)
    notes = map(paths.parse_erasing_path, target.lake.list(paths.get_erasing_folder(target.feed)))
    tokens = [note[1] for note in notes if note]
    if any(not verdicts[token].dead for token in tokens if token in verdicts):
        yield RepairFinding(RepairKind.AT_WORK, "an erasure by a live process")
    elif offsets or tokens:
        where = (
            f"{many(offsets, 'record')} may still be in files" if offsets else "rows may still be in older snapshots"
        )
        text = f"an erasure was interrupted: {where}"
        yield RepairFinding(RepairKind.ERASING, text, remedy=(f"sluice erase {target.feed} --yes",))
    yield from _strangers(target)


Verdicts = Mapping[str, Verdict]
"""By token. An owner that is not in it began after we looked, and is alive."""


# -- plans


def _check_dead(target: RepairTarget, giving_up: Sequence[int], verdicts: Verdicts) -> None:
    state = target.ledger.read()
    for batch in [_known_batch(target, state, number) for number in giving_up]:
        verdict = verdicts.get(batch.owner.token, owners.NEW)
        if batch.status is BatchStatus.PLANNED and not verdict.dead:
            raise PlanBusy(
                str(owners.report_met(target.feed, batch, verdict)),
                remedy=owners.find_remedy(target.feed, batch, verdict),
            )


def _known_batch(target: RepairTarget, state: State, batch: int) -> Batch:
    if batch not in state.batches:
        live = ", ".join(str(b.id) for b in state.live())
        raise UsageError(f"feed {target.feed} has no batch {batch}", remedy=f"its live batches: {live or 'none'}")
    return state.batches[batch]


def _given_up(target: RepairTarget, giving_up: Sequence[int]) -> Iterator[RepairFinding]:
    for number in giving_up:
        batch = target.ledger.read().batches[number]
        finished, _ = owners.count_finished(target.lake, target.feed, batch)
        if abandon(target.ledger, number, "given up by `sluice repair`: its run is dead", batch.owner) is None:
            yield RepairFinding(RepairKind.ABANDONED, f"batch {number} is {batch.status} already", items=(str(number),))
            continue
        lost = f"; {many(finished, 'finished offset range')} will be read again" if finished else ""
        yield RepairFinding(
            RepairKind.ABANDONED, f"batch {number} ({batch.request}){lost}", "abandoned", items=(str(number),)
        )


def _waiting(target: RepairTarget, batch: Batch, met: Met) -> RepairFinding:
    files, ways = owners.describe_outlook(target.lake, target.feed, batch)
    return _make_finding(RepairKind.WAITING, met, f"{met.text}; {files}", ways)


def _make_finding(kind: RepairKind, met: Met, text: str, ways: tuple[str, ...] = ()) -> RepairFinding:
    return RepairFinding(kind, text, remedy=ways, items=(str(met.batch),), why=met.verdict.why)


# -- what readers see


def _rolled_forward(target: RepairTarget) -> Iterator[RepairFinding]:
    done = roll_forward(target.ledger, target.lake, target.feed)
    if done.shown:
        yield RepairFinding(RepairKind.SHOWN, many(len(done.shown), "published file"), "made visible", items=done.shown)
    if done.hidden:
        text = f"{many(len(done.hidden), 'visible file')} that another batch replaced"
        yield RepairFinding(RepairKind.HIDDEN, text, "removed", items=done.hidden)
    state = target.ledger.read()
    for batch in done.cleaned:
        text = f"staging of batch {batch}, which is {state.batches[batch].status}"
        yield RepairFinding(RepairKind.STAGING, text, "removed", items=(str(batch),))


def _replaced_files(target: RepairTarget) -> Iterator[RepairFinding]:
    """Visible files that were replaced, merged or retired, and the manifests of windows with retired rows."""
    removed = remove_retired(target.ledger, target.lake)
    if removed.parts:
        text = f"{many(len(removed.parts), 'visible file')} that do not count any more"
        yield RepairFinding(RepairKind.HIDDEN, text, "removed", items=removed.parts)
    if removed.manifests:
        text = f"the manifest of {many(len(removed.manifests), 'window')} whose rows were retired"
        yield RepairFinding(RepairKind.MANIFEST, text, "removed", items=removed.manifests)
    if removed.pages:
        text = f"{many(len(removed.pages), 'report or note', 'reports and notes')} of batches of which nothing is left"
        yield RepairFinding(RepairKind.HIDDEN, text, "removed", items=removed.pages)


def _manifests(target: RepairTarget) -> Iterator[RepairFinding]:
    done = write_manifests(target.ledger, target.lake, target.feed, target.windows, everywhere=True)
    if done:
        names = tuple(map(target.windows.name, done))
        text = f"the manifest of {many(len(done), 'complete window')}, {ends(names)}"
        yield RepairFinding(RepairKind.MANIFEST, text, "written", items=names)


def _strangers(target: RepairTarget) -> Iterator[RepairFinding]:
    """Files under `data/` that the ledger does not know, and parts that are missing. They are only reported."""
    listed = (p for root in paths.visible_roots(target.feed) for p in target.lake.list(root))
    visible = {p for p in listed if not paths.is_ignored(p)}
    state = target.ledger.read()
    receipts = list_live_receipts(target.ledger, state)
    parts = list({p.path: p for r in receipts for p in r.parts}.values())
    unknown = visible - {p.path for p in parts}
    strangers = tuple(
        sorted(
            unknown
            - target.ledger.list_replaced(unknown, state)
            - published_files.read_pending_removals(target.lake, target.feed).foreign
        )
    )
    if strangers:
        text = f"{many(len(strangers), 'file')} unknown to the ledger: {ends(strangers)}"
        remedy = "readers of the folder count their rows: check where they come from, then move them elsewhere"
        yield RepairFinding(RepairKind.STRANGER, text, remedy=(remedy,), items=strangers)
    size = target.lake.size  # parts move from `staged` to `path`: looked for in this order
    lacking = [p for p in parts if p.path not in visible and size(p.staged) is None and size(p.path) is None]
    replaced = target.ledger.list_replaced(p.path for p in lacking)
    if missing := tuple(p.path for p in lacking if p.path not in replaced):
        text = f"{many(len(missing), 'published file')} missing: {ends(missing)}"
        again = f"sluice run {target.feed} --missing-files   lands their offsets again"
        yield RepairFinding(RepairKind.MISSING, text, remedy=("restore them from a backup, or", again), items=missing)


def find_missing_files(feed: Feed, ports: Ports) -> tuple[list[list[AskedRange]], list[AskedRange]]:
    """Returns the offset ranges of files that are missing or have another size: those that can land again, by run (all
    in one, or with limits file by file), and those of files of which Kafka no longer has all. Raises KafkaUnavailable.
    """
    ledger = Ledger(ports.lake, feed.stored, ports.clock)
    state = ledger.read()
    receipts = list_live_receipts(ledger, state)
    errors = find_wrong_files(ports.lake, (p for r in receipts for p in r.parts))
    wrong = {path for path, error in errors.items() if error}
    wrong -= {*ledger.list_replaced(wrong)}
    # The offset ranges of a file land again together.
    groups = [g for g in group_by_sharing(receipts) if any(p.path in wrong for r in g for p in r.parts)]
    topics = {r.offset_range.topic for g in groups for r in g} & ports.cluster.topics().keys()
    there = ports.cluster.partitions(topics, Isolation.READ_COMMITTED) if topics else ()
    starts = {find_key(state, p): p.log_start for p in there}
    landable, lost = list[list[OffsetRange]](), list[OffsetRange]()
    for group in groups:
        in_kafka = all(s.start >= starts.get(s.key, s.end) for s in (r.offset_range for r in group))
        of_wrong = [r.offset_range for r in group if any(p.path in wrong for p in r.parts)]
        landable.append(of_wrong) if in_kafka else lost.extend(of_wrong)
    if not (feed.limits.records or feed.limits.bytes):  # a run replaces all of its files or none
        landable = [[s for of_file in landable for s in of_file]]
    return [_join_ranges(run) for run in landable if run], _join_ranges(lost)


def _join_ranges(ranges: Iterable[OffsetRange]) -> list[AskedRange]:
    of_keys = by_key((s.key, s.range) for s in ranges)
    return [AskedRange(k.topic, k.partition, *r) for k, of_key in sorted(of_keys.items()) for r in union(of_key)]


# -- leftovers


def _orphans(target: RepairTarget) -> Iterator[RepairFinding]:
    """Staging without a batch. A plan is in the ledger before anything of it is staged."""
    staged: dict[int, list[str]] = {}
    for path in target.lake.list(paths.staging_root(target.feed)):
        if (batch := paths.staged_batch(path)) is not None:
            staged.setdefault(batch, []).append(path)
    state = target.ledger.read()
    for batch in sorted(staged.keys() - state.batches.keys()):
        if batch >= state.number:
            continue  # newer than our read of the ledger, or not a name that Sluice writes
        for path in staged[batch]:
            target.lake.remove(path)
        text = f"staging of batch {batch}, {many(len(staged[batch]), 'file')} unknown to the ledger"
        yield RepairFinding(RepairKind.STAGING, text, "removed", items=tuple(staged[batch]))


def _unfinished_writes(target: RepairTarget) -> Iterator[RepairFinding]:
    """Writes that a killed process began. Those in the staging of a live batch may still go on."""
    roots = (paths.feed_root(target.feed), *paths.visible_roots(target.feed))
    begun = [one for root in roots for one in target.lake.list_unfinished(root)]
    state = target.ledger.read()
    done = tuple(name for name, age in begun if _is_left(state, paths.staged_batch(name), age))
    for name in done:
        target.lake.discard(name)
    folders = tuple(name for name in done if name.endswith("/"))
    if writes := tuple(name for name in done if name not in folders):
        text = f"{many(len(writes), 'write')} that killed processes never ended"
        yield RepairFinding(RepairKind.UNFINISHED, text, "removed", items=writes)
    if folders:
        yield RepairFinding(RepairKind.EMPTY, many(len(folders), "empty folder"), "removed", items=folders)


def _is_left(state: State, batch: int | None, age: int) -> bool:
    owner_batch = state.batches.get(-1 if batch is None else batch)
    if owner_batch is None:
        return age > STALE_MS
    return owner_batch.status is not BatchStatus.PLANNED


def _beats(target: RepairTarget, owners: Mapping[str, Owner], verdicts: Verdicts) -> Iterator[RepairFinding]:
    for token, owner in owners.items():
        path = paths.owner_path(target.feed, token)
        if verdicts[token].dead and target.lake.size(path) is not None:
            target.lake.remove(path)
            who = owner.describe() if owner.run else f"owner {token[:8]}"
            text = f"the sign of life of {who}, which is dead"
            yield RepairFinding(RepairKind.HEARTBEAT, text, "removed", items=(token,), why=verdicts[token].why)


# -- words


def ends(names: Collection[str]) -> str:
    """The first and the last of some names."""
    first, *rest = names
    return f"{first} … {rest[-1]}" if rest else first


# -- the dry run


class Pretended:
    """A lake that is read as it is, and keeps every write and removal in memory only."""

    def __init__(self, real: Lake) -> None:
        self._real = real
        self._written: dict[str, bytes] = {}
        self._shown: dict[str, str] = {}
        self._gone: set[str] = set()

    @property
    def uri(self) -> str:
        return self._real.uri

    @property
    def copies(self) -> bool:
        return self._real.copies

    def put_if_absent(self, path: str, data: bytes) -> bool:
        if self.size(path) is not None:
            return False
        self.put(path, data)
        return True

    def put_each_if_absent(self, files: Mapping[str, bytes]) -> frozenset[str]:
        return frozenset(path for path, data in files.items() if self.put_if_absent(path, data))

    def put(self, path: str, data: bytes) -> None:
        self._written[path] = data
        self._gone.discard(path)

    def get(self, path: str) -> bytes | None:
        return self._written[path] if path in self._written else self._real.get(path)

    def list(self, prefix: str, after: str = "") -> Iterator[str]:
        new = (*self._written, *self._shown)
        names = (p for p in new if p.startswith(f"{prefix.rstrip('/')}/") and p > after)
        return iter(sorted({*self._real.list(prefix, after), *names} - self._gone))

    def stats(self, prefix: str, after: str = "") -> Iterator[Stat]:
        return (Stat(path, self.size(path) or 0, "") for path in self.list(prefix, after))

    def size(self, path: str) -> int | None:
        if path in self._gone:
            return None
        return len(self._written[path]) if path in self._written else self._real.size(self._shown.get(path, path))

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        yield BytesIO()

    def open(self, path: str) -> BinaryIO:
        return BytesIO(self._written[path]) if path in self._written else self._real.open(path)

    def show(self, source: str, target: str) -> None:
        if self._real.size(source) is None:
            raise FileNotFoundError(source)
        self._shown[target] = source

    def remove(self, path: str) -> None:
        self._written.pop(path, None)
        self._gone.add(path)

    def locate(self, path: str) -> str:
        return self._real.locate(path)

    def folders(self, prefix: str) -> Iterator[str]:
        return self._real.folders(prefix)

    def list_unfinished(self, prefix: str) -> Iterator[tuple[str, int]]:
        return self._real.list_unfinished(prefix)

    def discard(self, name: str) -> None: ...
