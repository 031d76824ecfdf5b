"""The sample order events as Avro: for feeds of `format: avro`."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any

SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "namespace": "sample",
    "fields": [
        {"name": "order_id", "type": "string"},
        {"name": "customer", "type": "string"},
        {"name": "ts", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "amount", "type": {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}},
        {"name": "currency", "type": "string"},
        {"name": "items", "type": "int"},
        {"name": "country", "type": "string"},
        {"name": "channel", "type": ["null", "string"], "default": None},
        {"name": "status", "type": "string"},
    ],
}
"""Avro schema of the events."""


def encoded(order: dict[str, Any]) -> bytes:
    """An order as Avro's bytes, by SCHEMA."""
    stamp = int(datetime.fromisoformat(order["ts"]).timestamp() * 1000 + 0.5)
    cents = int(Decimal(str(order["amount"])) * 100)
    amount = cents.to_bytes(cents.bit_length() // 8 + 1, "big", signed=True)
    return b"".join(
        (
            _text(order["order_id"]),
            _text(order["customer"]),
            _long(stamp),
            _long(len(amount)) + amount,
            _text(order["currency"]),
            _long(order["items"]),
            _text(order["country"]),
            b"\x02" + _text(order["channel"]),
            _text(order["status"]),
        )
    )


def _text(text: str) -> bytes:
    data = text.encode()
    return _long(len(data)) + data


def _long(number: int) -> bytes:
    remaining = (number << 1) ^ (number >> 63)
    out = bytearray()
    while remaining > 0x7F:
        out.append(remaining & 0x7F | 0x80)
        remaining >>= 7
    out.append(remaining)
    return bytes(out)
