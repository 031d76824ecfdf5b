"""A window's manifest: the answer to "may I read hour 14?".

It confirms that every partition's range of the window is accounted for. It names the boundaries and never the parts,
since a replacement or a compaction changes those. It is written once, because a complete window stays complete, and
removed when rows of the window are retired. Parts come from the ledger, so a reader never sees half of a change.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from sluice.pipelines.errors import LedgerCorrupt, PartUnreadable, SluiceError, WindowIncomplete, WindowRetired
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.lake import paths, receipt_files
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.account import list_unread
from sluice.pipelines.ledger.columns import NOTHING_SUPERSEDED
from sluice.pipelines.ledger.entries import PublishEntry, RetireEntry
from sluice.pipelines.ledger.fold import by_key
from sluice.pipelines.model.kafka import Key, Range, is_covered, subtract
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Part, PartKind, Receipt, group_by_sharing
from sluice.pipelines.planning import windows
from sluice.pipelines.ports import Lake
from sluice.pipelines.util.parallel import map_parallel
from sluice.pipelines.util.units import show_instant, show_window

FORMAT = 1
_TOGETHER = 128
"""The most manifests written by one call upon the lake: they are in memory until then."""


@dataclass(frozen=True, slots=True)
class WindowFiles:
    """The parts of one window, each with its offset range. `complete`: nothing of the window is pending any more."""

    window: int
    complete: bool
    placed: tuple[tuple[OffsetRange, Part], ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for _, part in self.placed)

    def of(self, kind: PartKind) -> tuple[Part, ...]:
        return tuple(p for p in self.parts if p.kind is kind)

    def of_output(self, output: str) -> WindowFiles:
        """Returns the files of one output of a split feed."""
        return WindowFiles(self.window, self.complete, tuple((s, p) for s, p in self.placed if p.output == output))


def write_manifests(
    ledger: Ledger, lake: Lake, feed: str, settings: WindowSettings, *, everywhere: bool = False
) -> tuple[int, ...]:
    """Write the manifest of every complete window that has all its rows and none yet; return these. Idempotent.

    Checks only windows that may have become complete since the last call, by a note in the lake. With `everywhere`, or
    without a valid note, it checks all of them.
    """
    state = ledger.read()
    noted = None if everywhere else _Declared.read(lake, feed)
    new = noted.since(state, settings) if noted else None
    candidates = windows.list_manifest_windows(state, settings, new)
    if new is None:
        declared_windows = set(map(paths.manifest_window, lake.list(paths.manifest_folder(feed))))
        there = {t for t in candidates if (t, settings.length_of(t)) in declared_windows}
    else:
        there = {t for t in candidates if is_declared(lake, feed, t, settings)}
    fresh = (t for t in candidates if t not in there and not is_retired(state, t, settings))
    done = windows.complete_of(state, fresh, settings)
    receipts = group_receipts(ledger, state, done, settings)
    boundaries, declared = _Boundaries(), list(done)
    for chunk in (declared[at : at + _TOGETHER] for at in range(0, len(declared), _TOGETHER)):
        dumps = {w: _dump(state, boundaries.of(done[w]), receipts[w], feed, w, settings) for w in chunk}
        lake.put_each_if_absent({paths.window_path(feed, w, settings.length_of(w)): dump for w, dump in dumps.items()})
    declared = _take_back_retired(ledger, lake, declared, settings)
    now = _Declared.of(state, settings)
    if now != noted and not everywhere:
        with suppress(SluiceError):  # the next run checks more
            lake.put(paths.declared_path(feed), now.dump())
    return tuple(declared)


def _take_back_retired(ledger: Ledger, lake: Lake, declared: list[int], settings: WindowSettings) -> list[int]:
    """Remove manifests just written of windows whose rows have been retired since. Returns the other windows."""
    state = ledger.read() if declared else None
    retired = {w for w in declared if state is not None and is_retired(state, w, settings)}
    map_parallel(lake.remove, [paths.window_path(ledger.feed, w, settings.length_of(w)) for w in retired])
    return [w for w in declared if w not in retired]


class _Declared(NamedTuple):
    """Every window that was complete below entry `number` has its manifest. Windows were of this `length` (`grain`)
    then; boundaries were pinned up to `pinned` in every partition. `otherwise` stands for all that completes a
    window other than publications, `witness` for the log: a lake restored from a copy may have the note of
    another."""

    ledger: str
    number: int
    length: int | str
    pinned: int | None
    otherwise: str
    witness: str

    @classmethod
    def of(cls, state: State, settings: WindowSettings) -> _Declared:
        facts = (state.lost, state.skipped, state.retired, state.current, state.gaps, state.boundary_times[:1])
        text = repr([sorted(x.items()) if isinstance(x, dict) else x for x in facts])
        otherwise = hashlib.sha256(text.encode()).hexdigest()[:16]
        pinned, witness = windows.find_pinned_end(state), state.batches.witness()
        return cls(state.ledger_id, state.number, settings.grain, pinned, otherwise, witness)

    @classmethod
    def read(cls, lake: Lake, feed: str) -> _Declared | None:
        """Returns None for anything but a note."""
        try:
            return cls(**json.loads(lake.get(paths.declared_path(feed)) or b""))
        except (ValueError, TypeError, RecursionError):
            return None

    def dump(self) -> bytes:
        return json.dumps(self._asdict()).encode() + b"\n"

    def since(self, state: State, settings: WindowSettings) -> set[int] | None:
        """The starts of windows that may have become complete since; None if it may be any."""
        now = self.of(state, settings)
        if self._replace(number=now.number, pinned=now.pinned, witness=now.witness) != now:
            return None
        if type(self.number) is not int or type(self.pinned) is not int or type(self.witness) is not str:
            return None
        if self.number > now.number or not state.batches.bears(self.witness):
            return None
        published = state.published_in.since(self.number)
        if None in published:
            return None
        first = bisect_left(state.boundary_times, settings.before(self.pinned))
        return {settings.start_of(w) for w in published if w is not None} | {*state.boundary_times[first:]}


def _dump(
    state: State, boundaries: str, receipts: Sequence[Receipt], feed: str, window: int, settings: WindowSettings
) -> bytes:
    content: dict[str, Any] = {
        "format": FORMAT,
        "feed": feed,
        "window": settings.name(window),
        "start_ms": window,
        "end_ms": settings.end_of(window),
        "complete": True,
        "ledger": state.ledger_id,
        "number": state.number,
        "folders": sorted({paths.folder_of(p.path, feed, p.kind) for r in receipts for p in r.parts}),
    }
    lines_by_name = {name: json.dumps(value) for name, value in content.items()} | {"boundaries": boundaries}
    lines = ",\n".join(f" {json.dumps(name)}: {text}" for name, text in sorted(lines_by_name.items()))
    return f"{{\n{lines}\n}}\n".encode()


class _Boundaries:
    """Windows' boundaries as JSON, much faster than `json`: a first hour of many partitions has a hundred manifests of
    many lines, and most of them, in a silence, have the same ones."""

    def __init__(self) -> None:
        self._last: tuple[Mapping[Key, Range], str] = {}, "[]"
        self._around: dict[Key, tuple[str, str]] = {}

    def of(self, ranges: Mapping[Key, Range]) -> str:
        if ranges != self._last[0]:
            self._last = ranges, f"[{', '.join(self._line(k, *r) for k, r in ranges.items())}]"
        return self._last[1]

    def _line(self, key: Key, start: int, end: int) -> str:
        if key not in self._around:
            topic_text = f'"topic": {json.dumps(key.topic)}, "topic_id": {json.dumps(key.topic_id)}'
            self._around[key] = f', "partition": {key.partition}, "start": ', f", {topic_text}}}"
        between, rest = self._around[key]
        return f'{{"end": {end}{between}{start}{rest}'


def is_declared(lake: Lake, feed: str, window: int, settings: WindowSettings) -> bool:
    """Returns whether the window was declared complete."""
    return receipt_files.find_manifest(lake, feed, window, settings.length_of(window)) is not None


def withdraw(ledger: Ledger, lake: Lake) -> tuple[str, ...]:
    """Remove the manifests of windows with retired rows; return their paths. Idempotent.

    One whose window has landed again by the time it is removed is put back.
    """
    state = ledger.read()
    listed = {p: paths.manifest_window(p) for p in lake.list(paths.manifest_folder(ledger.feed))}
    withdrawn = {p: lasts for p, lasts in listed.items() if lasts and retires(state, *lasts)}
    if not withdrawn:
        return ()
    contents = dict(zip(withdrawn, map_parallel(lake.get, [*withdrawn]), strict=True))
    map_parallel(lake.remove, [*withdrawn])
    state = ledger.read()
    again = [p for p, lasts in withdrawn.items() if not retires(state, *lasts)]
    lake.put_each_if_absent({p: data for p in again if (data := contents[p]) is not None})
    return tuple(p for p in withdrawn if p not in again)


def is_retired(state: State, window: int, settings: WindowSettings) -> bool:
    """Returns whether rows of the window have been retired: the rest is no longer the window."""
    return retires(state, window, settings.length_of(window))


def retires(state: State, window: int, length: int) -> bool:
    """Returns the same for a window that lasts `length` (ms)."""
    return next(_list_retired(state, window, length), None) is not None


def _list_retired(state: State, window: int, length: int) -> Iterator[tuple[Key, Range]]:
    for key, ranges in state.retired.items():
        lasts = _find_lasting_range(state, key, window, window + length) if ranges else None
        yield from ((key, r) for r in ranges if lasts and r.meets(lasts))


def _find_lasting_range(state: State, key: Key, start: int, end: int) -> Range | None:
    """The offsets between two times; without an end if the partition's life ended in between."""
    first, last = (windows.find_boundary(state, key, t) for t in (start, end))
    return None if first is None else Range(first, _ENDLESS if last is None else last)


_ENDLESS = 1 << 63


def demand_kept(ledger: Ledger, state: State, feed: str, window: int, settings: WindowSettings) -> None:
    """Raises WindowRetired for a window with retired rows."""
    retired = list(_list_retired(state, window, settings.length_of(window)))
    if not retired:
        return
    window_text, (key, r) = settings.name(window), retired[0]
    spans = {k: windows.find_range(state, k, window, settings) for k in state.known()}
    partly = any(s and s.span and not is_covered(state.retired.get(k, ()), s) for k, s in spans.items())
    there = [f" --offsets {k}:{x.start}-{x.end}" for k, x in retired if state.current.get(k.tp) == k]
    request = "".join(there) if partly else f" --window {window_text}"
    again = f"while Kafka has them they can be landed again: sluice run {feed}{request} --replace"
    raise WindowRetired(
        f"window {window_text} of feed {feed} was {describe_retirement(ledger, state, key, r)}",
        remedy=f"its rows are not in the lake any longer; {again if there else 'their topic was replaced since'}",
    )


def describe_retirement(ledger: Ledger, state: State, key: Key, r: Range) -> str:
    """When, by whom and why rows in the range were retired: `retired on … by …: …`."""
    numbers = (at for at, superseded in reversed(state.superseded.get(key, NOTHING_SUPERSEDED)) if superseded.meets(r))
    entry = next(e for n in numbers if isinstance(e := ledger.entry(n), RetireEntry))
    return f"retired on {show_instant(entry.at)}{f' by {entry.run}' if entry.run else ''}: {entry.reason}"


def read_window_files(ledger: Ledger, window: int, settings: WindowSettings) -> WindowFiles:
    """The window's live parts, in log order, from the ledger. Raises UsageError for a time that is not a window."""
    (window_files,) = read_windows(ledger, (window,), settings)
    return window_files


def read_windows(ledger: Ledger, requested: Sequence[int], settings: WindowSettings) -> tuple[WindowFiles, ...]:
    """The live parts of several windows; an entry with parts of many of them is read once."""
    for window in requested:
        windows.check_aligned(window, settings)
    state = ledger.read()
    receipts = group_receipts(ledger, state, requested, settings)
    complete, out = windows.complete_of(state, requested, settings), list[WindowFiles]()
    for window in requested:
        in_order = sorted(receipts[window], key=lambda r: (r.offset_range.key, r.offset_range.start))
        _demand_proven(ledger, state, window, complete.get(window, {}), in_order)
        placed = tuple((r.offset_range, p) for r in in_order for p in r.parts)
        out.append(WindowFiles(window, window in complete, placed))
    return tuple(out)


def _demand_proven(
    ledger: Ledger, state: State, window: int, ranges: Mapping[Key, Range], receipts: Sequence[Receipt]
) -> None:
    """Raises LedgerCorrupt if no entry has landed offsets of a complete window that the ledger counts as landed.

    Nothing is pending in its `ranges`: so says the fold, and so must the entries themselves.
    """
    own = by_key((r.offset_range.key, r.offset_range.range) for r in receipts)
    for key, span in ranges.items():
        if is_covered(own.get(key, ()), span):
            continue
        other = (r for unread in list_unread(state, key).values() for r in unread)
        if rest := subtract(span, [*own.get(key, ()), *other]):
            # offsets that landed before their window had a boundary are in another one's receipts
            near = read_receipts_meeting(ledger, state, ((key, r) for r in rest))
            if any(subtract(r, [x.offset_range.range for x in near if x.offset_range.key == key]) for r in rest):
                raise LedgerCorrupt(
                    f"window {show_window(window)} of feed {ledger.feed}: the ledger counts offsets of {key} as landed,"
                    " and no entry of it has landed them",
                    remedy=f"an entry was replaced: restore _sluice/{ledger.feed}/log from a backup, then: sluice audit"
                    f" {ledger.feed} --all",
                )


def group_receipts(
    ledger: Ledger, state: State, requested: Iterable[int], settings: WindowSettings
) -> dict[int, list[Receipt]]:
    """The receipts that count, by the window that their offset ranges lie in.

    A feed's windows may have been shorter once. What lay in a shorter window lies in the one that holds it now.
    """
    out: dict[int, list[Receipt]] = {window: [] for window in requested}
    for r in read_receipts_in(
        ledger, state, {t for window in out for t in windows.list_windows_within(state, window, settings)}
    ):
        out[settings.start_of(r.offset_range.window or 0)].append(r)
    return out


def read_receipts_lying(ledger: Ledger, state: State, wanted: Callable[[int | None], bool]) -> Iterator[Receipt]:
    """The receipts that count, in publishing order, of offset ranges in `wanted` windows (None: outside windows). Asks
    of each window that there is: who knows which they are asks `read_receipts_in`.
    """
    return read_receipts_in(ledger, state, {w for w in state.published_in if wanted(w)})


def read_receipts_in(ledger: Ledger, state: State, lie_in: Collection[int | None]) -> Iterator[Receipt]:
    """The receipts that count, in publishing order, of offset ranges in these windows (None: outside windows)."""
    for number in sorted({n for w in lie_in for n in state.published_in.get(w, ())}):
        entry = ledger.entry(number)
        for r in state.receipts(number, entry) if isinstance(entry, PublishEntry) else ():
            if r.offset_range.window in lie_in:
                yield r


def read_receipts_meeting(ledger: Ledger, state: State, wanted: Iterable[tuple[Key, Range]]) -> list[Receipt]:
    """The receipts that count and share an offset with one of the ranges."""
    ranges_of = by_key(wanted)
    lie_in = {
        p.window for key, ranges in ranges_of.items() for r in ranges for p in windows.cut_at_boundaries(state, key, r)
    }
    numbers = {n for w in (*lie_in, None) for n in state.published_in.get(w, ())}
    published = ((n, e) for n in sorted(numbers) if isinstance(e := ledger.entry(n), PublishEntry))
    receipts = (r for n, e in published for r in state.receipts(n, e))
    return [r for r in receipts if any(r.offset_range.range.meets(x) for x in ranges_of.get(r.offset_range.key, ()))]


def with_sharers(ledger: Ledger, state: State, receipts: Sequence[Receipt]) -> list[Receipt]:
    """The receipts, and every other that counts and shares a file with one of them, directly or through others.

    The offset ranges of a file lie in one window, so those of its window are read.
    """
    if not any(p.shared for r in receipts for p in r.parts):
        return list(receipts)
    given_ranges = {(r.offset_range, r.attempt) for r in receipts}
    lie_in = {r.offset_range.window for r in receipts if any(p.shared for p in r.parts)}
    neighbours = read_receipts_in(ledger, state, lie_in)
    others = [r for r in neighbours if (r.offset_range, r.attempt) not in given_ranges]
    groups = group_by_sharing([*receipts, *others])
    return [r for g in groups if any((r.offset_range, r.attempt) in given_ranges for r in g) for r in g]


def demand_complete(files: WindowFiles, feed: str, settings: WindowSettings) -> None:
    """Raises WindowIncomplete while part of the window is pending, or one of its boundaries is not resolved."""
    if not files.complete:
        window_text = settings.name(files.window)
        raise WindowIncomplete(
            f"window {window_text} of feed {feed} is not complete",
            remedy=f"land it: sluice run {feed} --window {window_text}; or wait for it: sluice wait {feed} --window"
            f" {window_text}",
        )


def find_wrong_files(lake: Lake, parts: Iterable[Part]) -> dict[str, PartUnreadable | None]:
    """Returns, by path, why published files cannot be read as the ledger names them: None while they are staged.

    Sizes come from listings: no file is opened. A caller reads the ledger again before it reports a missing file, which
    may have been replaced.
    """
    wanted = {p.path: p for p in parts}
    sizes = {s.path: s.size for folder in {path.rpartition("/")[0] for path in wanted} for s in lake.stats(folder)}
    out: dict[str, PartUnreadable | None] = {}
    for path, part in wanted.items():
        size = sizes.get(path)
        if size is None and lake.size(part.staged) is not None:
            out[path] = None
        elif size != part.file_bytes and (size := lake.size(path)) != part.file_bytes:  # a run may have shown it
            what = "is missing" if size is None else f"has {size} bytes, the ledger says {part.file_bytes}"
            out[path] = PartUnreadable(f"{path} {what}", remedy=paths.find_remedy(path), path=path, gone=size is None)
    return out
