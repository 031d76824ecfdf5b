"""Topic names: which are legal, and how each is encoded, reversibly, for paths."""

from __future__ import annotations

import hashlib
import re

MAX_ENCODED = 160
"""The most characters of an encoded topic. With partition, offsets and batch a file name stays under 255."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


def is_topic_name(name: str) -> bool:
    """Whether Kafka accepts it as a topic's name (`[a-zA-Z0-9._-]{1,249}`, not `.` or `..`)."""
    return _NAME.fullmatch(name) is not None and name not in (".", "..")


def encode_topic(name: str) -> str:
    """The topic's name, encoded for a file name. Raises ValueError when `name` is not a topic name.

    The result holds only a-z 0-9 . _ ~ and never starts with `.` or `_`, because tools treat such files as hidden.
    Lower-case letters, digits, `.` and `_` stay; `A` becomes `~a`, `-` becomes `~~`; a leading `.` or `_` gets a `~`.
    Different names get different encodings, also where case is ignored, and `decode_topic` reverses them. A result
    longer than MAX_ENCODED is cut and ends in `~1` and a SHA-256: still unique, but not reversible.
    """
    if not is_topic_name(name):
        raise ValueError("not a topic name")
    signs = [_encode_sign(c, first=i == 0) for i, c in enumerate(name)]
    encoded = "".join(signs)
    return encoded if len(encoded) <= MAX_ENCODED else _shorten(name, signs)


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
    """The topic whose encoding is `encoded`. Raises ValueError when there is none, or when it was cut."""
    name = re.sub(r"~(.)", lambda sign: "-" if sign[1] == "~" else sign[1].upper(), encoded)
    if not is_topic_name(name) or encode_topic(name) != encoded:
        raise ValueError("not an encoded topic name, or one that was cut")
    return name
