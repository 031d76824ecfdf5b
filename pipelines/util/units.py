"""Sizes, durations, instants and numbers of things, as people write them. Parsers return bytes and ms.

Every parser takes a value from a feed file or a command line, and raises ValueError with the accepted spellings. No
message repeats the value, which may have come from a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from decimal import Decimal

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
TICKS_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
"""Of the units of times in Arrow."""
CALENDAR_ENDS = 253_402_300_800_000
"""The year 10000 in ms since the epoch: no datetime is later."""
_SIZES = {"B": 1} | {
    f"{prefix}{unit}": base ** (power + 1)
    for power, prefix in enumerate("KMGT")
    for unit, base in (("iB", 1024), ("B", 1000))
}
_DURATIONS = {"ms": 1, "s": 1000, "m": MINUTE, "h": HOUR, "d": DAY}
_WINDOW = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})(?:T([0-9]{2})(?::?([0-9]{2}))?)?(?::00)?Z?")
_AMOUNT = re.compile(r"([0-9]{1,15})\s*([A-Za-z]*)")


def parse_size(value: object) -> int:
    """The bytes that `1048576`, `128MiB` or `2 GB` means. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return _parse_amount(value, _SIZES, default="B", wanted="a size: bytes as a number, or such as 64KiB, 128MiB, 2GiB")


def parse_duration(value: object) -> int:
    """The milliseconds that `250ms`, `30s`, `30m`, `12h` or `7d` means. Raises ValueError."""
    return _parse_amount(value, _DURATIONS, default="", wanted="a duration such as 30s, 30m, 12h or 7d")


def _parse_amount(value: object, units: dict[str, int], default: str, wanted: str) -> int:
    match = _AMOUNT.fullmatch(value.strip()) if isinstance(value, str) else None
    factor = units.get(match[2] or default) if match else None
    if match is None or factor is None:
        raise ValueError(f"is not {wanted}")
    return int(match[1]) * factor


def parse_instant(value: object) -> int:
    """An ISO 8601 time with zone, from 1970 on, as ms since the epoch. Raises ValueError."""
    if isinstance(value, datetime):
        return _to_ms(value)
    try:
        return _to_ms(datetime.fromisoformat(str(value).strip()))
    except (ValueError, OverflowError):
        pass
    raise ValueError("is not an ISO time with zone such as 2026-11-20T14:00:00Z, from 1970 on")


def _to_ms(moment: datetime) -> int:
    if moment.tzinfo is None or moment < EPOCH:
        raise ValueError("no zone, or before 1970")
    return (moment - EPOCH) // timedelta(milliseconds=1)


def show_duration(ms: int) -> str:
    """The shortest text that `parse_duration` reads back to the same number."""
    unit = next(u for u, f in reversed(_DURATIONS.items()) if ms % f == 0) if ms else "s"
    return f"{ms // _DURATIONS[unit]}{unit}"


def show_instant(ms: int) -> str:
    """An ISO time in UTC. Where the calendar ends (timestamps may be absurd), the number itself."""
    try:
        moment = EPOCH + timedelta(milliseconds=ms)
    except OverflowError:
        return f"{ms} ms"
    return moment.isoformat(timespec="milliseconds" if ms % 1000 else "seconds").replace("+00:00", "Z")


def parse_window(value: object) -> int:
    """A window's start as ms since the epoch. Raises ValueError.

    People write it in UTC: `2026-11-20`, `2026-11-20T14` or `2026-11-20T14:15`.
    """
    return parse_period(value)[0]


def parse_period(value: object) -> tuple[int, int]:
    """Returns the start (ms) and the length of a day or an hour; the length of `2026-11-20T14:15` is 0.

    Raises ValueError.
    """
    match = _WINDOW.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("is not a window: write its start in UTC, such as 2026-11-20T14 or 2026-11-20T14:15")
    year, month, day, hour, minute = (int(part or 0) for part in match.groups())
    length = DAY if match[4] is None else HOUR if match[5] is None else 0
    try:
        return _to_ms(datetime(year, month, day, hour, minute, tzinfo=UTC)), length
    except ValueError:
        raise ValueError("is not a time that the calendar has, from 1970 on") from None


def show_window(ms: int) -> str:
    """A window's start in UTC, such as `2026-11-20T14:00`. `parse_window` reads it back."""
    return (EPOCH + timedelta(milliseconds=ms)).strftime("%Y-%m-%dT%H:%M")


def show_about(ms: int) -> str:
    """A span of time in at most two units: `40 s`, `12 min`, `3 h 20 min`, `2 d 4 h`."""
    seconds = max(ms, 0) // 1000
    spoken = ((unit, divmod(seconds, length), lesser) for unit, length, lesser in _SPOKEN if seconds >= 2 * length)
    unit, (count, rest), (small, part) = next(spoken, ("s", (seconds, 0), ("", 1)))
    return f"{count} {unit}" + (f" {rest // part} {small}" if small and count < 10 and rest >= part else "")


_SPOKEN = (("d", 86_400, ("h", 3600)), ("h", 3600, ("min", 60)), ("min", 60, ("", 1)))
"""A unit, its length in seconds, and the smaller unit shown with it. A unit is used from two of them on."""


def many(n: int, thing: str, things: str = "") -> str:
    """`1 feed`, `3 feeds`."""
    return f"{n:,} {thing}" if n == 1 else f"{n:,} {things or f'{thing}s'}"


def show_float(value: float, digits: int = 0) -> str:
    """A float to as many digits (0: all), without an exponent unless it is huge or tiny: `0.000085`, `8.5 × 10⁻¹²`."""
    text = f"{value:.{digits}g}" if digits else repr(value)
    mantissa, sign, power = text.partition("e")
    if not sign:
        return f"{value:,.{digits}g}" if digits else f"{value:,}"
    return f"{Decimal(text):,f}" if -10 < int(power) < 15 else f"{mantissa} × 10{str(int(power)).translate(_RAISED)}"


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def join_first(items: Iterable[object], limit: int, more: str = " and {:,} more", between: str = ", ") -> str:
    """`a, b, c and 4 more`."""
    texts = [*map(str, items)]
    return between.join(texts[:limit]) + (more.format(len(texts) - limit) if len(texts) > limit else "")


def escape_unprintable(text: str, unchanged: str = "") -> str:
    """Text from outside with escapes, such as `\\x1b`, in place of unprintable characters, except those `unchanged`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in unchanged else ascii(c)[1:-1] for c in text)


def sanitize(text: str, limit: int = 80) -> str:
    """Text from outside, for an error: at most `limit` characters, on one line, all printable."""
    return "".join(c if c.isprintable() else "�" for c in text[:limit])
