"""Keys of headers as text. Kafka keeps them as bytes, and a column of them is text in every reader.

Promise: a key that is UTF-8 is its text. Any other key is `sluice.hex:` and its bytes in hex, and so is a key that
begins with `sluice.hex:` itself; so `key_bytes` returns the bytes of every key, and no two keys have one text. Columns
without such keys are passed on as they are.
"""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.compute as pc

MARK = "sluice.hex:"

_ESCAPED = re.compile(rf"{re.escape(MARK)}((?:[0-9a-f]{{2}})+)")
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]?")


def key_text(key: bytes) -> str:
    """The text of a header's key."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return MARK + key.hex()
    return MARK + key.hex() if text.startswith(MARK) else text


def key_bytes(text: str) -> bytes:
    """The key of which this is the text."""
    escaped = _ESCAPED.fullmatch(text)
    return bytes.fromhex(escaped[1]) if escaped else text.encode()


def former_key_text(text: str) -> str:
    """The text that a key had in files that were written before keys were escaped: U+FFFD for what is not UTF-8."""
    escaped = _ESCAPED.fullmatch(text)
    return as_java_reads(bytes.fromhex(escaped[1])) if escaped else text


def as_java_reads(key: bytes) -> str:
    """Decode UTF-8 with one U+FFFD for each maximal part of a bad sequence, and one for a surrogate, cut or not.

    Java does so; Python puts one for each byte of a surrogate.
    """
    return _SURROGATE.sub(b"\xef\xbf\xbd", key).decode("utf-8", "replace")


def key_column(keys: pa.Array) -> pa.Array:
    """The text of binary keys, without a copy where each of them is its own text."""
    text = keys.view(pa.string())
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        return pa.array(map(key_text, keys.to_pylist()), pa.string())
    data = keys.buffers()[2]
    if data is None or MARK.encode() not in data.to_pybytes():
        return text
    return pa.array(map(key_text, keys.to_pylist()), pa.string())


def bytes_column(keys: pa.Array) -> pa.Array:
    """The bytes of keys whose text this is, without a copy where none is escaped."""
    if not pc.any(pc.starts_with(keys, MARK)).as_py():
        return keys.cast(pa.binary())
    return pa.array(map(key_bytes, keys.to_pylist()), pa.binary())
