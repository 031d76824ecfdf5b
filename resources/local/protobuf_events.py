"""The sample order events as Protobuf: for feeds of `format: protobuf`."""

from __future__ import annotations

import struct
from datetime import datetime
from typing import Any

from sluice.pipelines.records.rows.wire_format import reference, varint

SCHEMA = """\
syntax = "proto3";

package sample;

import "google/protobuf/timestamp.proto";

message Order {
  string order_id = 1;
  string customer = 2;
  google.protobuf.Timestamp ts = 3;
  double amount = 4;
  string currency = 5;
  int32 items = 6;
  string country = 7;
  optional string channel = 8;
  string status = 9;
}
"""
"""Protobuf schema of the events."""
INDEXES = b"\0"
"""Names the message as Confluent's serializers do: the first of its file."""
NAME = reference("Order")
"""Names it as Apicurio's serializers do."""


def encoded(order: dict[str, Any]) -> bytes:
    """An order as Protobuf's bytes, by SCHEMA."""
    stamp = int(datetime.fromisoformat(order["ts"]).timestamp() * 1000 + 0.5)
    time = b"\x08" + varint(stamp // 1000) + b"\x10" + varint(stamp % 1000 * 1_000_000)
    return b"".join(
        (
            _text(1, order["order_id"]),
            _text(2, order["customer"]),
            b"\x1a" + varint(len(time)) + time,
            b"\x21" + struct.pack("<d", order["amount"]),
            _text(5, order["currency"]),
            b"\x30" + varint(order["items"]),
            _text(7, order["country"]),
            _text(8, order["channel"]),
            _text(9, order["status"]),
        )
    )


def _text(number: int, text: str) -> bytes:
    data = text.encode()
    return bytes([number << 3 | 2]) + varint(len(data)) + data
