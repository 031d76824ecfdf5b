"""Lists the files of windows from the ledger, never from folders, and the files that snapshots of a table retain.

Guarantee: the files of a window are complete, visible, of the ledger's sizes, and hold each record once. A window that
is not complete, or whose files are not all visible, raises WindowIncomplete, unless the caller requests the visible
files. A file that is missing or has another size raises PartUnreadable.

A note next to the ledger marks a feed, or an output, with a table. It is written before the table names the first
file, and while it exists, only the table's publisher removes published files, after the snapshots that name them have
expired. So readers of older snapshots find all their files. Readers of the plain folder, instead of the table or
`sluice files`, may read rows twice until then.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from typing import Any

from sluice.pipelines.errors import WindowIncomplete
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Part, PartKind, Receipt
from sluice.pipelines.planning.schema_changes import describe_protection, find_protection
from sluice.pipelines.planning.windows import check_aligned, check_begun, complete
from sluice.pipelines.ports import Lake, Table
from sluice.pipelines.publishing import manifest
from sluice.pipelines.publishing.manifest import WindowFiles
from sluice.pipelines.util.documents import Internal
from sluice.pipelines.util.parallel import map_parallel


@dataclass(frozen=True, slots=True)
class File:
    """Rows of `[start, end)` of a partition, in offset order, in a Parquet file of a window.

    `address` is the absolute path or URL for other tools, `path` the path in the lake. In a file that offset ranges
    share, the rows begin at row `first`, and `bytes` is their share.
    """

    window: str
    kind: PartKind
    address: str
    path: Internal[str]
    topic: str
    partition: int
    start: int
    end: int
    rows: int
    bytes: int
    sha256: str
    first: int = 0


def order_files(files: Sequence[File]) -> list[File]:
    """Returns one entry for each Parquet file, ordered so that the rows of each partition are in offset order.

    If offset ranges share files, there may be no log order. Then the files have the order of their first ranges.
    """
    first: dict[str, File] = {}
    for f in files:
        first.setdefault(f.path, f)
    if len(first) == len(files):
        return list(files)
    last: dict[tuple[str, int], str] = {}
    after: dict[str, dict[str, None]] = {path: {} for path in first}
    for f in files:
        before = last.get((f.topic, f.partition), f.path)
        last[f.topic, f.partition] = f.path
        if before != f.path:
            after[before][f.path] = None
    return [first[path] for path in _sort_topologically(after)]


def _sort_topologically(after: Mapping[str, Mapping[str, None]]) -> list[str]:
    """Returns the names in topological order; in their own order if there is a cycle."""
    position = {name: i for i, name in enumerate(after)}
    waits = dict.fromkeys(after, 0)
    for name in (n for names in after.values() for n in names):
        waits[name] += 1
    ready = [i for name, i in position.items() if not waits[name]]
    names, out = list(after), list[str]()
    while ready:
        out.append(names[heappop(ready)])
        for name in after[out[-1]]:
            waits[name] -= 1
            if not waits[name]:
                heappush(ready, position[name])
    return out if len(out) == len(names) else names


def list_files(
    feed: Feed,
    lake: Lake,
    windows: Sequence[int],
    kind: PartKind = PartKind.LANDED,
    *,
    partial: bool = False,
    ledger: Ledger | None = None,
) -> tuple[File, ...]:
    """Returns the files of the windows (their starts, ms), by window and in log order; with `partial`, visible ones.

    Of a split feed, those of all outputs; of one output of it, its own. Raises WindowIncomplete, WindowRetired,
    PartUnreadable for a file that is missing or has another size, and UsageError for a time that is not a window.
    """
    ledger = ledger or Ledger(lake, feed.stored, lambda: 0)
    name, settings, state = feed.name, feed.window, ledger.read()
    is_open = bool(windows) and not partial and not complete(state, windows[-1], settings)
    for window in windows:
        check_begun(name, window, settings, state)
        if not partial:
            manifest.demand_kept(ledger, state, name, window, settings)
        if is_open:  # ends at the first such window, also of millions up to a wrong year
            check_aligned(window, settings)
            manifest.demand_complete(WindowFiles(window, complete(state, window, settings), ()), name, settings)
    while True:
        # Files replaced since the ledger was read are gone: the ledger has the new ones.
        window_files = manifest.read_windows(ledger, windows, settings)
        if feed.output:
            window_files = tuple(f.of_output(feed.output) for f in window_files)
        wrong = manifest.find_wrong_files(lake, (p for f in window_files for p in f.of(kind)))
        if not wrong or not ledger.list_replaced(wrong):
            break
    if damage := next(filter(None, wrong.values()), None):
        raise damage
    if not partial:
        _check_complete(window_files, wrong, name, settings)
    placed = ((f.window, s, p) for f in window_files for s, p in f.placed if p.kind is kind and p.path not in wrong)
    locate, name_of = cache(lake.locate), cache(settings.name)
    return tuple(build_file(locate(p.path), name_of(w), s, p) for w, s, p in placed)


def describe_protection_then(feed: Feed, ledger: Ledger, state: State, receipts: Iterable[Receipt]) -> str:
    """Returns how landed rows were protected in another way than the feed protects rows now; empty if they were not."""
    now, changes = feed.shape.protection, dict[str, None]()
    for name in dict.fromkeys(r.format for r in receipts):
        changes |= dict.fromkeys(describe_protection(find_protection(ledger, state, name), now))
    return f"landed under other rules than now: {'; '.join(changes)}" if changes else ""


def _check_complete(
    windows: Sequence[WindowFiles], staged: Collection[str], feed: str, settings: WindowSettings
) -> None:
    for window in windows:
        manifest.demand_complete(window, feed, settings)
        if unseen := len({p.path for p in window.parts}.intersection(staged)):
            window_text = settings.name(window.window)
            raise WindowIncomplete(
                f"window {window_text} of feed {feed} has landed, but {unseen} of its files are not visible yet",
                remedy=f"wait for the run that publishes them; if it is dead, run: sluice run {feed}",
            )


def build_file(address: str, window: str, s: OffsetRange, p: Part) -> File:
    """Returns the entry of a visible part, with the rows of an offset range."""
    first = p.shared.first if p.shared else 0
    return File(window, p.kind, address, p.path, s.topic, s.partition, s.start, s.end, p.rows, p.bytes, p.sha256, first)


def remove_unless_named(lake: Lake, feed: str, parts: Sequence[str]) -> list[str]:
    """Remove visible parts that do not count, unless a table may name them. Returns the removed ones."""
    roots = list_table_roots(lake, feed) if parts else ()
    removing = [path for path in parts if not path.startswith(roots)]
    map_parallel(lake.remove, removing)
    return removing


def list_table_roots(lake: Lake, feed: str) -> tuple[str, ...]:
    """Returns the folders, each with a slash at its end, whose files tables of the feed name, or did once."""
    notes = {path: paths.parse_table_note(path) for path in lake.list(paths.get_table_notes_folder(feed))}
    outputs = [output for output in notes.values() if output]
    outputs += [""] if lake.size(paths.table_note_path(feed)) is not None else []
    return tuple(f"{paths.join(root, output)}/" for root in paths.visible_roots(feed) for output in outputs)


def note_table(lake: Lake, feed: str, table: Table) -> bool:
    """Note that the table names files of the feed, or of its output. Returns whether this is new."""
    path = paths.table_note_path(feed, table.output)
    return lake.size(path) is None and lake.put_if_absent(path, _dump({"table": table.name}))


@dataclass(frozen=True, slots=True)
class PendingRemovals:
    """The lake paths that a table's publisher removes once no snapshot names them: of parts that do not count, and of
    `foreign` files, which other writers made. `notes` are the notes with them.
    """

    parts: frozenset[str] = frozenset()
    foreign: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def read_pending_removals(lake: Lake, feed: str) -> PendingRemovals:
    """Returns the removals in all notes."""
    table_note, folder = paths.table_note_path(feed), paths.get_removals_folder(feed)
    notes = {path: _parse(lake.get(path)) for path in (table_note, *lake.list(folder))}
    listed = {name: [p for n in notes.values() for p in _list_paths(n, feed, name)] for name in ("removing", "foreign")}
    foreign = frozenset(path for path in listed["foreign"] if may_be_foreign(path))
    return PendingRemovals(
        frozenset(listed["removing"]), foreign, tuple(p for p, n in notes.items() if n.keys() & listed)
    )


def note_removals(lake: Lake, feed: str, parts: Collection[str] = (), foreign: Collection[str] = ()) -> None:
    """Note removals. Each note is a file of its own, so publishers at the same time lose none."""
    if parts or foreign:
        note = {"removing": sorted(parts), "foreign": sorted(foreign)}
        lake.put(paths.build_removals_path(feed, secrets.token_hex(8)), _dump(note))


def settle_removals(
    lake: Lake, feed: str, done: PendingRemovals, parts: Collection[str], foreign: Collection[str]
) -> None:
    """Put a note of the remaining `parts` and `foreign` files in the place of the notes that were read."""
    if len(done.notes) == 1 and (done.parts, done.foreign) == (frozenset(parts), frozenset(foreign)):
        return
    note_removals(lake, feed, parts, foreign)
    for path in done.notes:
        if path != paths.table_note_path(feed):
            lake.remove(path)
        else:  # of an earlier release
            lake.put(path, _dump({"table": _parse(lake.get(path)).get("table", "")}))


def may_be_foreign(path: str) -> bool:
    """Returns whether no part of a feed can have this name: the file may be removed although the ledger lacks it."""
    return paths.parse_part(path) is None and not paths.is_ignored(path)


def _dump(note: Mapping[str, object]) -> bytes:
    return json.dumps(note).encode() + b"\n"


def _parse(data: bytes | None) -> Mapping[str, Any]:
    try:
        note = json.loads(data or b"{}")
    except ValueError:
        return {}
    return note if isinstance(note, dict) else {}


def _list_paths(note: Mapping[str, Any], feed: str, name: str) -> Iterator[str]:
    listed = note.get(name) or ()
    roots = paths.visible_roots(feed)
    return (p for p in listed if isinstance(p, str) and p.startswith(roots))
