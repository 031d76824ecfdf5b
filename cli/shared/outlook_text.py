"""The findings about a feed, and its outlook, in words and as a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from sluice.cli.terminal.output import bad, safe, warn
from sluice.cli.terminal.text_layout import count
from sluice.pipelines.util.units import DAY, many, show_about

if TYPE_CHECKING:
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
    units = {"s": 1, "min": 60, "h": 3600, "day": 86_400}
    unit = next((u for u, seconds in units.items() if offsets * seconds >= 1), "day") if offsets else "s"
    n = offsets * units[unit]
    return f"{n:,.{0 if n >= 10 or n == 0 else 1}f} offsets/{unit}"


def list_expiries(outlook: Outlook) -> Iterator[tuple[str, str]]:
    """Describe what Kafka will soon expire or compact."""
    for expiry in outlook.expires:
        if expiry.at < outlook.now + DAY:
            yield "Kafka expires", f"{expiry.describe(outlook.now)}. The ledger keeps them: nothing to do"
    if outlook.compacted:
        topics = ", ".join(outlook.compacted[:3]) + (" …" if len(outlook.compacted) > 3 else "")
        yield "compacted", f"{topics}: Kafka may delete older records of a key before they land"


def short(age: int | None) -> str:
    """An age, short enough for a table."""
    return "–" if age is None else show_about(age) if age else ""
