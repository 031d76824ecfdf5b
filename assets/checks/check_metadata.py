"""Builds the metadata of the feed's checks: gaps, live batches, failures, late partitions, findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.assets.events.ledger_view import LedgerView
from sluice.assets.specs.metadata_tables import Metadata, table
from sluice.pipelines.batch.result import Landed
from sluice.pipelines.model.kafka import Key
from sluice.pipelines.model.ranges import Range
from sluice.pipelines.model.receipts import Met
from sluice.pipelines.planning import windows
from sluice.pipelines.status.outlook import Outlook
from sluice.pipelines.status.watch import WatchResult
from sluice.pipelines.util.units import show_window


@dataclass(frozen=True, slots=True)
class PartitionGaps:
    """The gaps of one partition, by the ledger.

    `holes` lie between the frontier and the last landed offset. `untried`: no batch has tried to land the first one.
    `reserved`: ranges of live batches.
    """

    key: Key
    origin: int
    frontier: int
    holes: tuple[Range, ...]
    reserved: tuple[Range, ...]
    untried: bool = False

    @property
    def is_complete(self) -> bool:
        return not self.holes[self.untried :] and not self.reserved


def find_gaps(books: LedgerView) -> list[PartitionGaps]:
    """Returns the gaps of each current partition."""
    return [_find_gaps(books, key) for key in books.state.known()]


def _find_gaps(books: LedgerView, key: Key) -> PartitionGaps:
    state = books.state
    origin, holes, reserved = state.origins[key].offset, state.holes(key), state.list_reserved(key)
    return PartitionGaps(key, origin, books.frontiers[key], holes, reserved, bool(holes) and books.is_untried(key))


def build_gaps_metadata(partitions: Sequence[PartitionGaps]) -> Metadata:
    rows: list[dict[str, str | int]] = [
        {
            "partition": str(p.key),
            "origin": p.origin,
            "frontier": p.frontier,
            "holes": _format_ranges(p.holes),
            "reserved": _format_ranges(p.reserved),
        }
        for p in sorted(partitions, key=lambda p: (p.is_complete, p.key))
    ]
    columns = {"partition": "string", "origin": "int", "frontier": "int", "holes": "string", "reserved": "string"}
    holes = sum(len(p.holes) for p in partitions)
    return {"partitions": len(partitions), "holes": holes, "account": table(rows, columns)}


def build_live_metadata(books: LedgerView, run: str) -> Metadata:
    """Returns the live batches of other runs: their state, and the commands that continue or end them."""
    rows: list[dict[str, str | int]] = [
        {
            "batch": m.batch,
            "state": str(m),
            "remedy": " or ".join(f"`{command}` {effect}" for command, effect in m.ways) or "wait for it to end",
        }
        for m in books.live
        if m.owner.run != run
    ]
    return {"live_batches": table(rows, {"batch": "int", "state": "string", "remedy": "string"})} if rows else {}


def build_failures_metadata(landed: Landed) -> Metadata:
    """Returns the offset ranges and partitions that a run did not land, and the losses that it accepted."""
    rows: list[dict[str, str | int]] = [
        {"range": str(f.offset_range), "error": f.error, "message": f.message}
        for b in landed.batches
        for f in b.failures
    ]
    rows += [{"range": str(r.tp), "error": type(r.error).__name__, "message": r.error.message} for r in landed.refusals]
    rows += [{"range": f"{x.key}:{x.range}", "error": "loss", "message": "accepted as lost"} for x in landed.losses]
    return {"failed": table(rows, dict.fromkeys(("range", "error", "message"), "string"))} if rows else {}


def _format_ranges(ranges: Sequence[Range]) -> str:
    more = f" … {len(ranges) - 3} more" if len(ranges) > 3 else ""
    return ", ".join(map(str, ranges[:3])) + more


# -- partitions behind a window


@dataclass(frozen=True, slots=True)
class PartitionBehind:
    """A partition whose frontier has not reached a window's end.

    `window`: the window (ms) that contains the frontier. `live`: the batch that reserves the offsets there.
    """

    key: Key
    frontier: int
    end: int | None
    window: int | None
    live: Met | None


def find_behind(books: LedgerView, window: int) -> list[PartitionBehind]:
    """Returns the partitions whose frontier has not passed a window."""
    ends, at = books.find_ends(window), books.frontiers
    return [_find_behind(books, k, at[k], end) for k, end in ends.items() if end is None or at[k] < end]


def _find_behind(books: LedgerView, key: Key, frontier: int, end: int | None) -> PartitionBehind:
    here = Range(frontier, frontier + 1)
    pieces = windows.cut_at_boundaries(books.state, key, here)
    owners = {b.id for b, s in books.state.list_live_ranges() if s.key == key and s.range.meets(here)}
    live = next((m for m in books.live if m.batch in owners), None)
    return PartitionBehind(key, frontier, end, pieces[0].window if pieces else None, live)


def build_behind_metadata(partitions: Sequence[PartitionBehind]) -> Metadata:
    rows: list[dict[str, str | int]] = [
        {
            "partition": str(b.key),
            "frontier": b.frontier,
            "window_end": "not resolved" if b.end is None else str(b.end),
            "waits_for": _describe_pending(b),
        }
        for b in partitions
    ]
    columns = {"partition": "string", "frontier": "int", "window_end": "string", "waits_for": "string"}
    return {"partitions_behind": len(partitions)} | ({"behind": table(rows, columns)} if rows else {})


def _describe_pending(b: PartitionBehind) -> str:
    where = "offsets before the first window" if b.window is None else f"window {show_window(b.window)}"
    return f"{where}, {f'reserved by {b.live},' if b.live else 'pending'} from offset {b.frontier} on"


# -- health


def build_health_metadata(watched: WatchResult) -> Metadata:
    """Returns the findings about a feed, and its lag."""
    rows: list[dict[str, str | int]] = [
        {"finding": f.text, "remedy": f.remedy, "severity": "error" if f.severe else "warning"}
        for f in watched.findings
    ]
    columns = dict.fromkeys(("finding", "remedy", "severity"), "string")
    findings = {"findings": table(rows, columns)} if rows else {}
    return findings | ({} if watched.outlook is None else _build_outlook_metadata(watched.outlook))


def _build_outlook_metadata(outlook: Outlook) -> Metadata:
    """Returns a feed's lag and pace, without unknown values."""
    values = {
        "lag_offsets": outlook.lag,
        "lag_seconds": _convert_ms(outlook.age),
        "catch_up_seconds": _convert_ms(outlook.eta),
        "landing_offsets_per_second": _round_rate(outlook.landing),
        "production_offsets_per_second": _round_rate(outlook.production),
        "ranges_at_risk": len(outlook.at_risk),
    }
    return {name: value for name, value in values.items() if value is not None}


def _convert_ms(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000


def _round_rate(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 3)
