"""What Dagster shows of a feed's account: its partitions, live batches and failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.assets.events.ledger_view import LedgerView
from sluice.assets.specs.metadata_tables import Metadata, table
from sluice.pipelines.batch.result import Landed
from sluice.pipelines.model.kafka import Key
from sluice.pipelines.model.ranges import Range


@dataclass(frozen=True, slots=True)
class PartitionStanding:
    """How far one partition's account is closed. `holes` lie between the frontier and the furthest landed offset;
    `untried`: the first of them is what nothing was done about yet.
    """

    key: Key
    origin: int
    frontier: int
    holes: tuple[Range, ...]
    reserved: tuple[Range, ...]
    untried: bool = False

    @property
    def whole(self) -> bool:
        return not self.holes[self.untried :] and not self.reserved


def standings(books: LedgerView) -> list[PartitionStanding]:
    """Every current partition's account, by the ledger alone."""
    return [_standing(books, key) for key in books.state.known()]


def _standing(books: LedgerView, key: Key) -> PartitionStanding:
    state = books.state
    origin, holes, reserved = state.origins[key].offset, state.holes(key), state.reserved(key)
    return PartitionStanding(key, origin, books.frontiers[key], holes, reserved, bool(holes) and books.untried(key))


def standings_metadata(found: Sequence[PartitionStanding]) -> Metadata:
    rows: list[dict[str, str | int]] = [
        {
            "partition": str(s.key),
            "origin": s.origin,
            "frontier": s.frontier,
            "holes": _range_list(s.holes),
            "reserved": _range_list(s.reserved),
        }
        for s in sorted(found, key=lambda s: (s.whole, s.key))
    ]
    columns = {"partition": "string", "origin": "int", "frontier": "int", "holes": "string", "reserved": "string"}
    return {"partitions": len(found), "holes": sum(len(s.holes) for s in found), "account": table(rows, columns)}


def live_metadata(books: LedgerView, run: str) -> Metadata:
    """The live batches of other runs: how those stand, and what goes on when they are dead."""
    rows: list[dict[str, str | int]] = [
        {
            "batch": m.batch,
            "standing": str(m),
            "way out": " or ".join(f"`{command}` {what}" for command, what in m.ways) or "wait for it to end",
        }
        for m in books.live
        if m.owner.run != run
    ]
    columns = {"batch": "int", "standing": "string", "way out": "string"}
    return {"live_batches": table(rows, columns)} if rows else {}


def failures_metadata(landed: Landed) -> Metadata:
    """The slices and partitions that a run could not land, and losses that it accepted."""
    rows: list[dict[str, str | int]] = [
        {"range": str(f.slice), "error": f.error, "message": f.message} for b in landed.batches for f in b.failures
    ]
    rows += [{"range": str(r.tp), "error": type(r.error).__name__, "message": r.error.message} for r in landed.refusals]
    rows += [{"range": f"{x.key}:{x.range}", "error": "loss", "message": "accepted as lost"} for x in landed.losses]
    return {"failed": table(rows, dict.fromkeys(("range", "error", "message"), "string"))} if rows else {}


def _range_list(ranges: Sequence[Range]) -> str:
    more = f" … {len(ranges) - 3} more" if len(ranges) > 3 else ""
    return ", ".join(map(str, ranges[:3])) + more
