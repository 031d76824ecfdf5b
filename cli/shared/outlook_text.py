"""The outlook of a feed in words and as a document: records at risk first, then progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

from sluice.cli.terminal.output import bad, safe, warn
from sluice.cli.terminal.text_layout import count
from sluice.pipelines.util.units import DAY, many, show_about, show_instant

if TYPE_CHECKING:
    from sluice.pipelines.errors import SluiceError
    from sluice.pipelines.planning.held_back import HeldBack
    from sluice.pipelines.status.forecast import AtRisk
    from sluice.pipelines.status.outlook import Outlook

_TOLD = 5
"""How many partitions are named; the rest are counted."""


# -- for people


@dataclass(frozen=True, slots=True)
class Alarm:
    """Offsets that are lost, will be lost unless they land soon, or cannot land: each case, and the command to run."""

    sign: Callable[[str], Text]
    colour: str
    texts: Sequence[str]
    more: str
    remedy: str

    def lines(self, limit: int = _TOLD, where: str = "") -> Iterator[Text]:
        """The first few cases, how many more there are, and the way out."""
        for text in self.texts[:limit]:
            line = self.sign(f"{where}{text}")
            line.stylize(self.colour)
            yield line
        if len(self.texts) > limit:
            yield Text(f"  {many(len(self.texts) - limit, 'partition')} more {self.more}", style="dim")
        yield Text.assemble(("  → ", "bold"), safe(self.remedy))


def alarms(
    feed: str, outlook: Outlook, losses: Sequence[SluiceError], held_ranges: Sequence[HeldBack] = ()
) -> Iterator[Alarm]:
    """The worst first."""
    if losses:
        yield Alarm(bad, "red", [e.message for e in losses], "lost records, too", losses[0].remedy)
    if outlook.at_risk:
        risks = [r.describe(outlook.now) for r in outlook.at_risk]
        yield Alarm(warn, "yellow", risks, "are at risk too", f"{_in_time(outlook)}: sluice run {feed}")
    for held_range in held_ranges[:_TOLD]:
        yield held_back(held_range)


def settings_denied(outlook: Outlook) -> Iterator[Text]:
    """Says that nothing is known about retention, and which right shows it."""
    if warning := outlook.unwarned:
        yield from Alarm(warn, "yellow", [warning.text], "", warning.remedy).lines()


def held_back(held_range: HeldBack) -> Alarm:
    """Describes offsets held back by an open transaction, and the remedy."""
    return Alarm(warn, "yellow", [held_range.text], "", held_range.remedy)


def _in_time(outlook: Outlook) -> str:
    """Describe whether landing ends before deletion begins."""
    remaining = outlook.at_risk[0].at - outlook.now
    if outlook.falls_behind or (outlook.eta is not None and outlook.eta > max(remaining, 0)):
        return "land it now, with more machines: it takes longer than the time left"
    return "land it now" + ("" if outlook.eta is None else f", which takes about {show_about(outlook.eta)}")


def behind(lag: int | None, age: int | None, unstable: int) -> str:
    """`780 offsets behind, the oldest 2 h 10 min old; 20 more are not stable`."""
    if lag is None:
        return "lag unknown"
    oldest = "" if age is None or not lag else f", the oldest {show_about(age)} old"
    held_part = f"; {count(unstable)} more are not stable" if unstable else ""
    return (f"{many(lag, 'offset')} behind" if lag else "caught up") + oldest + held_part


def pace(outlook: Outlook) -> Iterator[tuple[str, str]]:
    """How fast it lands and how fast it grows, and when it will have caught up."""
    rates = [
        *([f"{_rate(outlook.landing)} land during a batch"] if outlook.landing else []),
        *([f"{_rate(outlook.production)} produced"] if outlook.production is not None else []),
    ]
    if rates:
        yield "rates", "; ".join(rates)
    if outlook.falls_behind:
        yield "caught up", "never, at these rates: use more machines or longer windows"
    elif outlook.lag and outlook.eta is not None:
        yield "caught up", f"after about {show_about(outlook.eta)} of landing"


def _rate(offsets: float | None) -> str:
    if offsets is None:
        return "–"
    return f"{offsets:,.0f} offsets/s" if offsets >= 10 or offsets == 0 else f"{offsets:.2g} offsets/s"


def list_expiries(outlook: Outlook) -> Iterator[tuple[str, str]]:
    """Describe what Kafka will soon expire or compact."""
    for expiry in outlook.expiries:
        if expiry.at < outlook.now + DAY:
            yield "Kafka expires", f"{expiry.describe(outlook.now)}. The ledger keeps them: nothing to do"
    if outlook.compacted:
        topics = ", ".join(outlook.compacted[:3]) + (" …" if len(outlook.compacted) > 3 else "")
        yield "compacted", f"{topics}: Kafka may delete older records of a key before they land"


def short(age: int | None) -> str:
    """An age, short enough for a table."""
    return "–" if age is None else show_about(age) if age else ""


# -- for programs


def build_document(outlook: Outlook, losses: Sequence[SluiceError]) -> dict[str, Any]:
    return {
        "lag_seconds": _to_seconds(outlook.age),
        "offsets_per_second": {"landing": _round(outlook.landing), "production": _round(outlook.production)},
        "catch_up_seconds": _to_seconds(outlook.eta),
        "falls_behind": outlook.falls_behind,
        "lost": [e.fields() for e in losses],
        "at_risk": [_at_risk(r, outlook.now) for r in outlook.at_risk],
        "expires": [{"what": e.what, "at": show_instant(e.at), "setting": e.why} for e in outlook.expiries],
        "compacted": list(outlook.compacted),
        "settings_denied": list(outlook.unwarned.topics) if outlook.unwarned else [],
    }


def _at_risk(r: AtRisk, now: int) -> dict[str, Any]:
    return {
        "topic": r.key.topic,
        "partition": r.key.partition,
        "ranges": [list(x) for x in r.ranges],
        "deleted_from": show_instant(r.at),
        "seconds_left": max(0, r.at - now) // 1000,
        "setting": r.why,
    }


def _to_seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000


def _round(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 3)
