"""Headers of the batches in a fetch's record bytes: position, kind and timestamps of each.

Promises: nothing is decompressed, and no checksum computed; a batch that was cut off behind its header counts. Every
number is checked for plausibility: offsets go up, and no batch ends below the position that was requested.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_OVERHEAD = 12  # offset and size, which the size does not count
_MAGIC_AT = 16
_BATCH = struct.Struct(">qiibIhiqq")  # up to the largest timestamp
_MESSAGE = struct.Struct(">qiIbbq")  # of the formats before Kafka 0.11
_LEAST_BATCH, _LEAST_MESSAGE = 49, 14
_CODEC, _APPEND_TIME, _CONTROL, _HORIZON = 0x07, 0x08, 0x20, 0x40


class Unreadable(Exception):
    """The bytes do not begin with a plausible batch."""


@dataclass(frozen=True, slots=True)
class Header:
    """A batch of offsets `base` to `last` that takes `size` bytes.

    `latest` is its largest stamp, `first` that of its first record; None: only its records have it.
    """

    base: int
    last: int
    size: int
    control: bool
    first: int | None
    latest: int


def headers(records: memoryview, position: int) -> list[Header]:
    """Return the batches in the answer to a fetch from `position`, also a cut-off one whose header is there.

    Raises Unreadable if the first is no batch; a later one that is none ends the list.
    """
    batches: list[Header] = []
    try:
        for header in _walk(records, position):
            batches.append(header)
    except Unreadable:
        if not batches:
            raise
    return batches


def _walk(records: memoryview, position: int) -> Iterator[Header]:
    at = 0
    while at + _MAGIC_AT < len(records):
        try:
            header = _one(records, at, position)
        except struct.error:
            return  # cut off in the header
        if not position <= header.last or header.base < 0 or header.base > header.last:
            raise Unreadable
        yield header
        position, at = header.last + 1, at + header.size


def _one(records: memoryview, at: int, position: int) -> Header:
    magic = records[at + _MAGIC_AT]
    if magic < 2:
        return _message(records, at, position)
    if magic > 2:
        raise Unreadable
    base, size, _, _, _, attributes, delta, first, latest = _BATCH.unpack_from(records, at)
    if size < _LEAST_BATCH or delta < 0:
        raise Unreadable
    # A batch that compaction marked for later removal has that time in place of its first stamp (KIP-534).
    timestamp = latest if attributes & _APPEND_TIME else None if attributes & _HORIZON else first
    return Header(base, base + delta, size + _OVERHEAD, bool(attributes & _CONTROL), timestamp, latest)


def _message(records: memoryview, at: int, position: int) -> Header:
    """Return a message of the old formats: never a marker, and never stamped in the oldest one."""
    offset, size, _, magic, attributes, stamp = _MESSAGE.unpack_from(records, at)
    if size < _LEAST_MESSAGE:
        raise Unreadable
    stamp = stamp if magic else -1
    if attributes & _CODEC:  # several in one, named by the last of them
        return Header(min(position, offset), offset, size + _OVERHEAD, False, None, stamp)
    return Header(offset, offset, size + _OVERHEAD, False, stamp, stamp)
