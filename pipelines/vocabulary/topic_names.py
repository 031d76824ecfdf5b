"""Topic names: which are legal, and how each is spelled reversibly in paths."""

from __future__ import annotations

import hashlib
import re

MAX_ENCODED = 160
"""Characters of an encoded topic; with partition, offsets and batch behind it a name stays under 255."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


def is_topic_name(name: str) -> bool:
    """Whether Kafka accepts it as a topic's name (`[a-zA-Z0-9._-]{1,249}`, not `.` or `..`)."""
    return _NAME.fullmatch(name) is not None and name not in (".", "..")


def encode_topic(name: str) -> str:
    """The topic's name for use in a file's name: of a-z 0-9 . _ ~ only, never starting with `.` or `_`.

    Lower-case letters, digits, `.` and `_` stay; `A` becomes `~a`, `-` becomes `~~`; a leading `.` or `_`
    gets a `~` (tools take such files for hidden). Injective, also where case is ignored; `decode_topic`
    reverses it.
    What would exceed MAX_ENCODED is cut and ends in `~1` and a SHA-256: still injective, not reversible.
    Raises ValueError when `name` is no topic name.
    """
    if not is_topic_name(name):
        raise ValueError("not a topic name")
    signs = [_encode_sign(c, first=i == 0) for i, c in enumerate(name)]
    whole = "".join(signs)
    return whole if len(whole) <= MAX_ENCODED else _shorten(name, signs)


def _encode_sign(c: str, *, first: bool) -> str:
    if c == "-":
        return "~~"
    return f"~{c.lower()}" if c.isupper() or (first and c in "._") else c


def _shorten(name: str, signs: list[str]) -> str:
    tail = "~1" + hashlib.sha256(name.encode()).hexdigest()
    while sum(map(len, signs)) > MAX_ENCODED - len(tail):
        signs.pop()
    return "".join(signs) + tail


def decode_topic(encoded: str) -> str:
    """The topic whose `encode_topic` is `encoded`. Raises ValueError when there is none, or it was cut."""
    name = re.sub(r"~(.)", lambda sign: "-" if sign[1] == "~" else sign[1].upper(), encoded)
    if not is_topic_name(name) or encode_topic(name) != encoded:
        raise ValueError("not an encoded topic name, or one that was cut")
    return name
