"""What Dagster shows of a commit, and of the partitions whose frontier is behind a window's end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.assets.events.ledger_view import LedgerView
from sluice.assets.specs.metadata_tables import Metadata, table
from sluice.pipelines.committing.commit import CommitResult
from sluice.pipelines.model.kafka import Key
from sluice.pipelines.model.ranges import Range
from sluice.pipelines.model.receipts import Met
from sluice.pipelines.planning import windows
from sluice.pipelines.util.units import show_window


def commit_metadata(group: str, result: CommitResult) -> Metadata:
    rows: list[dict[str, str | int]] = [
        {"partition": str(m.key), "before": "none" if m.before is None else str(m.before), "after": m.after}
        for m in result.offsets
    ]
    return {
        "group": group,
        "status": str(result.status),
        "committed_offsets": sum(m.after for m in result.offsets),
        **({"mark": result.mark} if result.mark >= 0 else {}),
        **({"dead_letters": result.letters, "dead_letters_to": result.letters_to} if result.letters else {}),
        "frontier": table(rows, {"partition": "string", "before": "string", "after": "int"}),
    }


@dataclass(frozen=True, slots=True)
class PartitionBehind:
    """A partition whose frontier has not reached a window's end; `window` (ms) is the one that it stands in, `live` the
    batch that reserves what is pending there."""

    key: Key
    frontier: int
    end: int | None
    window: int | None
    live: Met | None


def behind(books: LedgerView, window: int) -> list[PartitionBehind]:
    """Returns the ranges that keep the frontier from passing a window, by partition; empty if it has passed."""
    ends, at = books.ends(window), books.frontiers
    return [_behind(books, k, at[k], end) for k, end in ends.items() if end is None or at[k] < end]


def _behind(books: LedgerView, key: Key, frontier: int, end: int | None) -> PartitionBehind:
    here = Range(frontier, frontier + 1)
    pieces = windows.cut_at_boundaries(books.state, key, here)
    holding = {b.id for b, s in books.state.live_slices() if s.key == key and s.range.meets(here)}
    live = next((m for m in books.live if m.batch in holding), None)
    return PartitionBehind(key, frontier, end, pieces[0].window if pieces else None, live)


def behind_metadata(found: Sequence[PartitionBehind]) -> Metadata:
    rows: list[dict[str, str | int]] = [
        {
            "partition": str(b.key),
            "frontier": b.frontier,
            "end of the window": "not resolved" if b.end is None else str(b.end),
            "held by": _held_by(b),
        }
        for b in found
    ]
    columns = {"partition": "string", "frontier": "int", "end of the window": "string", "held by": "string"}
    return {"partitions_behind": len(found)} | ({"behind": table(rows, columns)} if rows else {})


def _held_by(b: PartitionBehind) -> str:
    where = "what lies before the first window" if b.window is None else f"window {show_window(b.window)}"
    return f"{where}, {f'where {b.live},' if b.live else 'pending'} from offset {b.frontier} on"
