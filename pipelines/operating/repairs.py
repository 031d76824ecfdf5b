"""What dead runs left in a feed's ledger and lake: find it, mend what nobody else will mend, and report each finding.

Promises: nothing of a live owner is touched, and nothing under `data/` that the ledger does not know is deleted. Names
are read first and the ledger afterwards, because a name that the fold does not know may be newer than the fold
(docs/design/model-rules.md). Repair is idempotent. Over a `Pretended` lake it is the dry run: the same code without
writes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from io import BytesIO
from typing import BinaryIO

from sluice.pipelines.audit.audit import live_receipts
from sluice.pipelines.errors import PlanBusy, UsageError
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Batch, BatchStatus, Ledger, State
from sluice.pipelines.maintenance.expiry import remove_retired
from sluice.pipelines.model.plans import AskedRange, Request, RequestKind
from sluice.pipelines.model.receipts import Met, Owner, Part, Receipt, Verdict
from sluice.pipelines.model.stat import Stat
from sluice.pipelines.ports import Lake, Liveness
from sluice.pipelines.publishing import kept, lost, owners
from sluice.pipelines.publishing.manifest import write_manifests
from sluice.pipelines.publishing.publish import abandon, roll_forward
from sluice.pipelines.util.units import many, show_window

STALE_MS = 3_600_000
"""How long an unfinished write must have stood still before it counts as that of a killed process."""


class RepairKind(StrEnum):
    """The kinds of findings. The last four are reported and left to others."""

    SHOWN = "published, not visible"
    HIDDEN = "replaced, still visible"
    STAGING = "staging that nobody needs"
    ABANDONED = "batch given up"
    MANIFEST = "window without manifest"
    BEAT = "beat of a dead run"
    UNFINISHED = "write that never ended"
    EMPTY = "empty folder"
    UNTOLD = "unknown to Dagster"
    WAITING = "batch of a dead run"
    AT_WORK = "batch at work"
    STRANGER = "file of nobody"
    MISSING = "published part missing"
    OVERTOLD = "known to Dagster alone"


@dataclass(frozen=True, slots=True)
class RepairFinding:
    """One finding. `act` says what was done, as a participle ("removed"). When it is empty, nothing was done, and
    `remedy` lists what to do, one way each. `why` is the evidence, `items` are paths, windows or batches.
    """

    kind: RepairKind
    text: str
    act: str = ""
    remedy: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class RepairTarget:
    """What to repair: one feed's ledger and lake. `ledger` reads from `lake`."""

    feed: str
    ledger: Ledger
    lake: Lake
    liveness: Liveness
    windows: WindowSettings


def repair(place: RepairTarget, giving_up: Sequence[int] = ()) -> Iterator[RepairFinding]:
    """Mend the lake, in this order: plans to give up, `data/`, manifests, leftovers. Then report what is missing.

    Raises EntriesLost when the ledger lost entries, and PlanBusy or UsageError for batches that cannot be given up.
    Then nothing has changed.
    """
    lost.check_all(place.ledger, place.lake)
    known = (*place.liveness.owners(), *(b.owner for b in place.ledger.read().live()))
    verdicts = place.liveness.judge(dict.fromkeys(known))
    _check_dead(place, giving_up, verdicts)
    yield from _given_up(place, giving_up)
    yield from _rolled_forward(place)
    yield from _replaced_files(place)
    yield from _live(place, verdicts)
    yield from _manifests(place)
    yield from _orphans(place)
    yield from _unfinished_writes(place)
    yield from _beats(place, {o.token: o for o in known}, verdicts)
    yield from _strangers(place)


Verdicts = Mapping[str, Verdict]
"""By token. An owner that is not in it began after we looked, and is alive."""


# -- plans


WAYS = 5
"""The most commands that one finding names."""


def _check_dead(place: RepairTarget, giving_up: Sequence[int], verdicts: Verdicts) -> None:
    state = place.ledger.read()
    for batch in [_known_batch(place, state, number) for number in giving_up]:
        seen = verdicts.get(batch.owner.token, owners.NEW)
        if batch.status is BatchStatus.PLANNED and not seen.dead:
            raise PlanBusy(str(owners.met(place.feed, batch, seen)), remedy=owners.way_out(place.feed, batch, seen))


def _known_batch(place: RepairTarget, state: State, batch: int) -> Batch:
    if batch not in state.batches:
        live = ", ".join(str(b.id) for b in state.live())
        raise UsageError(f"feed {place.feed} has no batch {batch}", remedy=f"its live batches: {live or 'none'}")
    return state.batches[batch]


def _given_up(place: RepairTarget, giving_up: Sequence[int]) -> Iterator[RepairFinding]:
    for number in giving_up:
        batch = place.ledger.read().batches[number]
        finished, _ = owners.finished_slices(place.lake, place.feed, batch)
        if abandon(place.ledger, number, "given up by `sluice repair`: its run is dead", batch.owner) is None:
            yield RepairFinding(RepairKind.ABANDONED, f"batch {number} is {batch.status} already", items=(str(number),))
            continue
        lost = f"; {many(finished, 'finished slice')} will be read again" if finished else ""
        yield RepairFinding(
            RepairKind.ABANDONED, f"batch {number} ({batch.request}){lost}", "abandoned", items=(str(number),)
        )


def _live(place: RepairTarget, verdicts: Verdicts) -> Iterator[RepairFinding]:
    for batch in place.ledger.read().live():
        met = owners.met(place.feed, batch, verdicts.get(batch.owner.token, owners.NEW))
        yield _waiting(place, batch, met) if met.verdict.dead else _found(RepairKind.AT_WORK, met, met.text)


def _waiting(place: RepairTarget, batch: Batch, met: Met) -> RepairFinding:
    kept, ways = owners.outlook(place.lake, place.feed, batch)
    return _found(RepairKind.WAITING, met, f"{met.text}; {kept}", ways)


def _found(kind: RepairKind, met: Met, text: str, ways: tuple[str, ...] = ()) -> RepairFinding:
    return RepairFinding(kind, text, remedy=ways, items=(str(met.batch),), why=met.verdict.why)


# -- what readers see


def _rolled_forward(place: RepairTarget) -> Iterator[RepairFinding]:
    done = roll_forward(place.ledger, place.lake, place.feed)
    if done.shown:
        yield RepairFinding(RepairKind.SHOWN, many(len(done.shown), "published file"), "made visible", items=done.shown)
    if done.hidden:
        text = f"{many(len(done.hidden), 'visible file')} that another batch replaced"
        yield RepairFinding(RepairKind.HIDDEN, text, "removed", items=done.hidden)
    state = place.ledger.read()
    for batch in done.cleaned:
        text = f"staging of batch {batch}, which is {state.batches[batch].status}"
        yield RepairFinding(RepairKind.STAGING, text, "removed", items=(str(batch),))


def _replaced_files(place: RepairTarget) -> Iterator[RepairFinding]:
    """Visible files that were replaced, merged or retired, and the manifests of windows with retired rows."""
    gone = remove_retired(place.ledger, place.lake)
    if gone.parts:
        text = f"{many(len(gone.parts), 'visible file')} that do not count any more"
        yield RepairFinding(RepairKind.HIDDEN, text, "removed", items=gone.parts)
    if gone.manifests:
        text = f"the manifest of {many(len(gone.manifests), 'window')} whose rows were retired"
        yield RepairFinding(RepairKind.MANIFEST, text, "removed", items=gone.manifests)
    if gone.pages:
        text = f"{many(len(gone.pages), 'report or note', 'reports and notes')} of batches of which nothing is left"
        yield RepairFinding(RepairKind.HIDDEN, text, "removed", items=gone.pages)


def _manifests(place: RepairTarget) -> Iterator[RepairFinding]:
    done = write_manifests(place.ledger, place.lake, place.feed, place.windows, everywhere=True)
    if done:
        names = tuple(map(show_window, done))
        text = f"the manifest of {many(len(done), 'complete window')}, {ends(names)}"
        yield RepairFinding(RepairKind.MANIFEST, text, "written", items=names)


def _strangers(place: RepairTarget) -> Iterator[RepairFinding]:
    """Files under `data/` that the ledger does not know, and parts that are missing. They are only reported."""
    visible = _visible(place)
    state = place.ledger.read()
    receipts = live_receipts(place.ledger, state)
    parts = list({p.path: p for r in receipts for p in r.parts}.values())
    unknown = visible - {p.path for p in parts}
    nobodys = tuple(sorted(unknown - place.ledger.replaced(unknown, state) - kept.foreign(place.lake, place.feed)))
    if nobodys:
        text = f"{many(len(nobodys), 'file')} of which the ledger knows nothing: {ends(nobodys)}"
        remedy = "who reads the folder counts their rows: see where they come from, and move them away by hand"
        yield RepairFinding(RepairKind.STRANGER, text, remedy=(remedy,), items=nobodys)
    lacking = [p for p in parts if p.path not in visible and _is_nowhere(place.lake, p)]
    replaced = place.ledger.replaced(p.path for p in lacking)
    if missing := tuple(p.path for p in lacking if p.path not in replaced):
        text = f"{many(len(missing), 'published file')} missing: {ends(missing)}"
        ways = tuple(dict.fromkeys(_anew(place, r) for r in receipts if any(p.path in missing for p in r.parts)))
        yield RepairFinding(
            RepairKind.MISSING, text, remedy=("restore them from a backup, or", *ways[:WAYS]), items=missing
        )


def _anew(place: RepairTarget, r: Receipt) -> str:
    """The command that lands a receipt's slice again; with its window, if it has one."""
    s, window = r.slice, r.slice.window
    slices = Request(RequestKind.OFFSETS, (AskedRange(s.topic, s.partition, s.start, s.end),), replace=True)
    whole = Request(RequestKind.WINDOW, window=window and place.windows.start_of(window), replace=True)
    return f"{owners.asking(place.feed, slices if window is None else whole)}   lands their offsets anew"


def _visible(place: RepairTarget) -> set[str]:
    found = (p for root in paths.visible_roots(place.feed) for p in place.lake.list(root))
    return {p for p in found if not paths.is_table_log(p)}


def _is_nowhere(lake: Lake, part: Part) -> bool:
    """Whether a part is neither staged nor visible. Looks in the order in which parts move."""
    return lake.size(part.staged) is None and lake.size(part.path) is None


# -- leftovers


def _orphans(place: RepairTarget) -> Iterator[RepairFinding]:
    """Staging without a batch. A plan is in the ledger before anything of it is staged."""
    staged: dict[int, list[str]] = {}
    for path in place.lake.list(paths.staging_root(place.feed)):
        if (batch := paths.staged_batch(path)) is not None:
            staged.setdefault(batch, []).append(path)
    state = place.ledger.read()
    for batch in sorted(staged.keys() - state.batches.keys()):
        if batch >= state.number:
            continue  # newer than our read of the ledger, or not a name that Sluice writes
        for path in staged[batch]:
            place.lake.remove(path)
        text = f"staging of batch {batch}, {many(len(staged[batch]), 'file')}, of which the ledger knows nothing"
        yield RepairFinding(RepairKind.STAGING, text, "removed", items=tuple(staged[batch]))


def _unfinished_writes(place: RepairTarget) -> Iterator[RepairFinding]:
    """Writes that a killed process began. Those in the staging of a live batch may still go on."""
    roots = (paths.feed_root(place.feed), *paths.visible_roots(place.feed))
    begun = [one for root in roots for one in place.lake.unfinished(root)]
    state = place.ledger.read()
    done = tuple(name for name, age in begun if _is_left(state, paths.staged_batch(name), age))
    for name in done:
        place.lake.discard(name)
    folders = tuple(name for name in done if name.endswith("/"))
    if writes := tuple(name for name in done if name not in folders):
        text = f"{many(len(writes), 'write')} that killed processes never ended"
        yield RepairFinding(RepairKind.UNFINISHED, text, "removed", items=writes)
    if folders:
        yield RepairFinding(RepairKind.EMPTY, many(len(folders), "empty folder"), "removed", items=folders)


def _is_left(state: State, batch: int | None, age: int) -> bool:
    held = state.batches.get(-1 if batch is None else batch)
    if held is None:
        return age > STALE_MS
    return held.status is not BatchStatus.PLANNED


def _beats(place: RepairTarget, owners: Mapping[str, Owner], verdicts: Verdicts) -> Iterator[RepairFinding]:
    for token, owner in owners.items():
        path = paths.owner_path(place.feed, token)
        if verdicts[token].dead and place.lake.size(path) is not None:
            place.lake.remove(path)
            who = owner.describe() if owner.run else f"owner {token[:8]}"
            text = f"the sign of life of {who}, which is dead"
            yield RepairFinding(RepairKind.BEAT, text, "removed", items=(token,), why=verdicts[token].why)


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
        shown = (p for p in new if p.startswith(f"{prefix.rstrip('/')}/") and p > after)
        return iter(sorted({*self._real.list(prefix, after), *shown} - self._gone))

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

    def unfinished(self, prefix: str) -> Iterator[tuple[str, int]]:
        return self._real.unfinished(prefix)

    def discard(self, name: str) -> None: ...
