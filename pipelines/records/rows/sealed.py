"""Encryption of quarantined records of feeds that protect fields: key, value and headers as one text in `value`.

AES-SIV (RFC 5297) with a 512-bit key that HMAC-SHA-512 derives from the feed's. The record's topic, partition and
offset are authenticated with it. Equal records of one offset have equal ciphertexts, so that a rescan can compare them.
"""

from __future__ import annotations

import hmac
import json
from base64 import b64decode, b64encode
from typing import Any

import pyarrow as pa
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from sluice.pipelines.records.rows.row_format import WITHHELD
from sluice.pipelines.schema.protection import Rule

_PARTS = ("key", "value", "headers", "topic", "partition", "offset")
_PLACE = "{topic}/{partition}/{offset}"


def seal_records(rule: Rule, records: pa.RecordBatch) -> pa.Array:
    """Returns the ciphertext of each record, which has the columns of raw rows. Raises ValueError without the key."""
    cipher = _make_cipher(rule)
    sealed = list[bytes]()
    for row in records.select(list(_PARTS)).to_pylist():
        headers = [[h["key"], _encode(h["value"])] for h in row["headers"] or ()]
        text = json.dumps([_encode(row["key"]), _encode(row["value"]), headers])
        sealed.append(cipher.encrypt(text.encode(), [_PLACE.format_map(row).encode()]))
    return pa.array(sealed, pa.binary())


def reveal_records(rule: Rule, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Returns quarantined rows with the records that the key decrypts, as if they had been stored as they came.

    Other rows stay as they are.
    """
    if rule.key is None or not rows.column(WITHHELD.name).is_valid().true_count:
        return rows
    cipher = _make_cipher(rule)
    schema, columns = rows.schema, dict(zip(rows.schema.names, rows.columns, strict=True))
    stored = rows.select([*_PARTS, WITHHELD.name]).to_pylist()
    revealed = [_reveal(cipher, row) or row for row in stored]
    for name in ("key", "value", "headers", WITHHELD.name):
        columns[name] = pa.array([row[name] for row in revealed], schema.field(name).type)
    return pa.RecordBatch.from_arrays([*columns.values()], schema=schema)


def _make_cipher(rule: Rule) -> AESSIV:
    if rule.key is None:
        raise ValueError("a rule without its key")
    return AESSIV(hmac.digest(rule.key.get_secret_value().encode(), b"sluice: quarantined records", "sha512"))


def _reveal(cipher: AESSIV, row: dict[str, Any]) -> dict[str, Any] | None:
    if row[WITHHELD.name] is None or not row["value"]:
        return None
    try:
        key, value, headers = json.loads(cipher.decrypt(row["value"], [_PLACE.format_map(row).encode()]))
    except InvalidTag:  # another key, or another record's text
        return None
    entries = [{"key": name, "value": _decode(text)} for name, text in headers]
    return row | {"key": _decode(key), "value": _decode(value), "headers": entries, WITHHELD.name: None}


def _encode(data: bytes | None) -> str | None:
    return None if data is None else b64encode(data).decode()


def _decode(text: str | None) -> bytes | None:
    return None if text is None else b64decode(text)
