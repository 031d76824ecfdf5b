"""Inputs made from other inputs: bytes changed at random, and JSON changed by its values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

INTEGERS = sorted(
    {s * (1 << bits) + d for bits in (0, 3, 7, 8, 15, 16, 31, 32, 62, 63, 64, 70) for s in (1, -1) for d in (-1, 0, 1)}
)
"""Numbers at which something may overflow."""
_MOST_BYTES = 1 << 16
_BYTES = [b"", b"\0", b"\xff", b"\x7f", b"\x80", b"\0" * 8, b"\xff" * 9, b"\x80" * 10, b"\xff\xff\xff\xff\x07"]


def mutate_bytes(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Return the bytes with one to eight random edits."""
    out = bytearray(data)
    for _ in range(1 << random.randrange(4)):
        _edit_bytes(random, out, others)
    return bytes(out[:_MOST_BYTES])


def _edit_bytes(random: Random, out: bytearray, others: Sequence[bytes]) -> None:
    at = random.randrange(len(out) + 1)
    to = min(len(out), at + random.choice((0, 1, 1, 1, 2, 4, 8, 40)))
    match random.randrange(9):
        case 0 | 1:
            if at < len(out):
                out[at] ^= 1 << random.randrange(8)
        case 2:
            if at < len(out):
                out[at] = random.randrange(256)
        case 3:
            out[at:to] = random.choice(_BYTES)
        case 4:
            out[at:to] = b""
        case 5:
            out[at:at] = out[at:to]
        case 6:
            size = random.choice((1, 2, 4, 8))
            number = random.choice(INTEGERS) & ((1 << 8 * size) - 1)
            out[at : at + size] = number.to_bytes(size, random.choice(("big", "little")))
        case 7:
            if random.randrange(4) == 0:
                del out[at:]
        case 8:
            other = random.choice(others) if others else b""
            begin = random.randrange(len(other) + 1)
            out[at:to] = other[begin : begin + random.choice((1, 4, 30, 1000))]


ODD: list[Any] = [
    None, True, False, "", [], {}, [[]], {"": None}, "x", "\0", "\ud800", "../../victim", "a" * 300, "9" * 50, "-1",
    0.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan"), *INTEGERS, 10**16, -(10**16), 253402300800000, 10**40,
]  # fmt: skip


def mutate_json(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Return the JSON document with values replaced, moved, doubled or removed; sometimes with its bytes changed."""
    if random.randrange(5) == 0:
        return mutate_bytes(random, data, others)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_bytes(random, data, others)
    for _ in range(1 << random.randrange(3)):
        value = _change_value(random, value)
    text = _write_json(random, value)
    if random.randrange(40) == 0:
        text = _extend(random, text)
    return text.encode("utf-8", "surrogatepass")[:_MOST_BYTES]


def _change_value(random: Random, value: Any) -> Any:
    """Return the value with one place changed; deeper places are changed less often."""
    if isinstance(value, dict) and value and random.randrange(8):
        name = random.choice(list(value))
        match random.randrange(10):
            case 0:
                return {k: v for k, v in value.items() if k != name}
            case 1:
                return value | {random.choice(["", name + "x", "\ud800", "kind", "format"]): value[name]}
            case 2:
                return value | {random.choice(list(value)): value[name]}
        return value | {name: _change_value(random, value[name])}
    if isinstance(value, list) and value and random.randrange(8):
        at = random.randrange(len(value))
        match random.randrange(10):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[:at] + [value[at]] * 2 + value[at + 1 :]
        return [*value[:at], _change_value(random, value[at]), *value[at + 1 :]]
    if isinstance(value, int) and random.randrange(2):
        return value + random.choice((-1, 1, 2, 1000, -1000, 1 << 31, 1 << 62))
    if isinstance(value, str) and value and random.randrange(2):
        at = random.randrange(len(value))
        return value[:at] + random.choice(("", "\0", "\ud800", "/", "..", "9", "ß", "\u202e")) + value[at + 1 :]
    return random.choice(ODD)


def _write_json(random: Random, value: Any) -> str:
    text = json.dumps(value, ensure_ascii=random.randrange(2) == 0)
    if random.randrange(10):
        return text
    # The same key twice, which a dict cannot have.
    return text.replace(
        '": ', f'": {random.choice(("null", "0", "[]"))}, "{random.choice(("kind", "format", "n"))}": ', 1
    )


def _extend(random: Random, text: str) -> str:
    """Return the text with a number of thousands of digits, or with nesting thousands deep."""
    marks = [i for i, c in enumerate(text) if c in "0123456789"] or [0]
    at = random.choice(marks)
    depth = random.choice((10, 200, 2000, 20000))
    return (
        text[:at]
        + random.choice(("9" * 5000, "[" * depth, "[" * depth + "]" * depth, '{"a":' * depth))
        + text[at + 1 :]
    )
