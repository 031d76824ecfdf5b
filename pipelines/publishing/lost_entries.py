"""Lost entries of a ledger: the evidence in the lake, and its removal to a separate folder.

A plan is written before any file of its batch, and no file of a batch is visible before its publish entry exists. So
entries are lost if a file in the lake is newer than the newest entry, or if a file is visible of a batch that is still
planned in the ledger. Names are read before the ledger, and the ledger is read again before any conclusion. No file is
deleted here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import Layout
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import BatchStatus, Ledger, State
from sluice.pipelines.ledger.tip import BEYOND, Tip, Trace, build_lost_error, find_lost_entry
from sluice.pipelines.model.kafka import Key
from sluice.pipelines.planning import windows
from sluice.pipelines.ports import Lake
from sluice.pipelines.util.parallel import map_parallel

LOOKED_AT = 1000
"""The maximum number of part names that a run checks in an output: one page of a listing."""


# -- noticing


def check_near(ledger: Ledger, lake: Lake, feed: Feed) -> None:
    """Raises EntriesLost for visible parts of lost batches. Checks only the position of the next batch, in the folder
    of each output."""
    state, names = ledger.read(), list[str]()
    start = _find_start_folder(state, feed)
    for root in (paths.join(paths.visible_roots(feed.stored)[0], d.output) for d in feed.datasets):
        listed = lake.list(root, f"{root}/{start}" if start else "")
        names += islice((path for path in listed if not paths.is_ignored(path)), LOOKED_AT)
    check_names(ledger, state, names)


def check_recent(ledger: Ledger, lake: Lake, feed: Feed) -> None:
    """As `check_near`; checks staging, too."""
    check_near(ledger, lake, feed)
    check_names(ledger, ledger.read(), lake.list(paths.staging_root(feed.stored)))


def check_all(ledger: Ledger, lake: Lake) -> None:
    """Raises EntriesLost as `check_near` does. Looks everywhere, staging included."""
    check_names(ledger, ledger.read(), list(_list_names(lake, ledger.feed)))


def check_names(ledger: Ledger, state: State, names: Iterable[str]) -> State:
    """Returns the newest state. Raises EntriesLost if these lake paths belong to entries that are not in it."""
    listed = list(names)
    if not list(_find_traces(state, listed)):
        return state
    state = ledger.read()
    if traces := list(_find_traces(state, listed)):
        raise build_lost_error(ledger.feed, state.newest, traces)
    return state


def _find_start_folder(state: State, feed: Feed) -> str:
    """The folder after which new parts would be listed; empty if they may be anywhere."""
    opened = [_find_window(state, key, at) for key, at in state.frontiers().items()]
    if feed.landing.layout is not Layout.WINDOW or not opened or None in opened:
        return ""
    oldest = min(w for w in opened if w is not None)
    return paths.window_folder(feed.window.local(oldest), feed.window.length, state.folder_prefix)


def _find_window(state: State, key: Key, offset: int) -> int | None:
    """The newest window that begins at or before the offset; None if none is pinned."""
    pins = state.boundaries.get(key)
    if pins is None:
        return None
    at = bisect_right(pins.offsets, offset)
    return pins.times[at - 1] if at else None


def _list_names(lake: Lake, feed: str) -> Iterator[str]:
    """Every path that may name a batch."""
    roots = (
        *paths.visible_roots(feed),
        paths.staging_root(feed),
        paths.relanded_folder(feed),
        paths.batch_page_folder(feed),
    )
    return chain.from_iterable(lake.list(root) for root in roots)


def _find_traces(state: State, names: Iterable[str]) -> Iterator[Trace]:
    """One piece of evidence for each lost batch."""
    reported: set[int] = set()
    for path in names:
        batch = _find_lost_batch(state, path)
        if batch is not None and batch not in reported:
            reported.add(batch)
            yield Trace(batch, f"the name of {path} is of batch {batch}", sure=batch in state.batches)


def _find_lost_batch(state: State, path: str) -> int | None:
    """The batch that the path belongs to, if entries of that batch are gone; None otherwise."""
    visible = not path.startswith(f"{paths.SLUICE}/")
    part = paths.parse_part(path)
    batch = part.batch if visible and part else _parse_batch(path, part)
    if batch is None or batch >= BEYOND:
        return None
    planned = state.batches.get(batch)
    unpublished = visible and planned is not None and planned.status is BatchStatus.PLANNED
    return batch if batch >= state.number or unpublished else None


def _parse_batch(path: str, part: paths.PartName | None) -> int | None:
    """The batch whose staging, note or report the file is."""
    staged = paths.staged_batch(path)
    if staged is not None:
        return staged if paths.parse_receipt_path(path) or (part and part.batch == staged) else None
    noted = paths.relanded_batch(path)
    return paths.page_batch(path) if noted is None else noted


# -- continuing without them


def collect_traces(feed: Feed, lake: Lake, state: State) -> list[Trace]:
    """All evidence of entries that are not in the state, which is the fold of the entries that stand."""
    tip = find_lost_entry(feed.name, state, read_tip(lake, feed.stored))
    numbers = [(p, n) for p in lake.list(paths.checkpoint_folder(feed.stored)) if (n := paths.checkpoint_number(p))]
    folds = [Trace(n - 1, f"{p} is a fold up to entry {n - 1}") for p, n in numbers if state.number < n < BEYOND]
    return [*([tip] if tip else []), *folds, *_find_traces(state, _list_names(lake, feed.stored))]


def read_tip(lake: Lake, feed: str) -> Tip | None:
    return Tip.parse(lake.get(paths.tip_path(feed)))


def list_strays(feed: Feed, lake: Lake, state: State) -> list[str]:
    """Returns the files to set aside.

    These are files of lost entries and of live batches, newer checkpoints, and manifests of windows that are not
    complete without the lost entries.
    """
    live = {b.id for b in state.live()}
    of_lost = [
        p
        for p in _list_names(lake, feed.stored)
        if _find_lost_batch(state, p) is not None or paths.staged_batch(p) in live
    ]
    folds = lake.list(paths.checkpoint_folder(feed.stored))
    newer = [p for p in folds if (paths.checkpoint_number(p) or 0) > state.number]
    standing = {p: w[0] for p in lake.list(paths.manifest_folder(feed.stored)) if (w := paths.manifest_window(p))}
    done = windows.complete_of(state, standing.values(), feed.window)
    incomplete = [path for path, window in standing.items() if window not in done]
    return [*of_lost, *newer, *incomplete]


def set_aside(lake: Lake, feed: str, number: int, names: Iterable[str]) -> None:
    """Move the files into the folder of that number, where they do not count. Idempotent."""
    map_parallel(_build_mover(lake, feed, number), list(names))


def _build_mover(lake: Lake, feed: str, number: int) -> Callable[[str], None]:
    def move(path: str) -> None:
        with suppress(FileNotFoundError):
            lake.show(path, paths.aside_path(feed, number, path))
        lake.remove(path)

    return move
