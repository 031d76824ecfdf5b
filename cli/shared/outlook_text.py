"""The findings about a feed, and its outlook, in words and as a document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from sluice.cli.terminal.output import bad, safe, warn
from sluice.cli.terminal.text_layout import count
from sluice.pipelines.util.units import DAY, many, show_about, show_instant

if TYPE_CHECKING:
    from sluice.pipelines.errors import SluiceError
    from sluice.pipelines.status.forecast import AtRisk
    from sluice.pipelines.status.outlook import Outlook

# -- for people


def show_problem(text: str, remedy: str, *, severe: bool = False, where: str = "") -> Iterator[Text]:
    """Yields a finding or held offsets, and below it the remedy."""
    yield (bad if severe else warn)(f"{where}{text}")
    yield Text.assemble(("  → ", "bold"), safe(remedy))


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
