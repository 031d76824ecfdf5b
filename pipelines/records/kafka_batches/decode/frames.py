"""Reads the headers of a fetch response, and names errors: the table of frames, and how far the response reaches.

Nothing is decoded here. An error names the topic, the partition, the batch's offsets, the byte and the reason; its
`start` is the batch's base offset and its `end` one past the last, where the header has them. A CorruptBatch may come
from the network, so read it again. An UnsupportedBatch does not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sluice.pipelines.errors import CorruptBatch, UnsupportedBatch
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.kafka_batches.decode import loops

BatchProblem = CorruptBatch | UnsupportedBatch

_CORRUPT = (
    "read it again; if it stays so, this replica's log is damaged: compare it with other replicas "
    "(kafka-dump-log --deep-iteration), or accept the range as lost"
)
_UNSUPPORTED = "check with kafka-dump-log what wrote it; a newer Sluice may read it, or accept the range as lost"

REASONS = {
    loops.BAD_SIZE: "the size field is smaller than any batch",
    loops.BAD_OFFSETS: "its offsets are negative or out of bounds",
    loops.OUT_OF_ORDER: "its offsets do not follow those of the batch before",
    loops.BAD_VARINT: "a varint is cut or too long",
    loops.BAD_RECORD_LENGTH: "a record is longer than the rest of its batch, or shorter than any",
    loops.BAD_OFFSET: "a record's offset goes back or leaves the batch",
    loops.BAD_KEY: "a key runs past its record",
    loops.BAD_VALUE: "a value runs past its record",
    loops.BAD_HEADER_COUNT: "a record claims more headers than it can hold",
    loops.BAD_HEADER_KEY: "a header's key is null or runs past its record",
    loops.BAD_HEADER_VALUE: "a header's value runs past its record",
    loops.BAD_RECORD_END: "a record's fields end before or after its length",
    loops.BAD_BATCH_END: "bytes are left over after the last record",
    loops.BAD_COUNT: "the record count does not fit offsets and bytes",
    loops.BAD_MESSAGE: "a message is cut or of another format than its set",
    loops.BAD_MESSAGE_CRC: "a message does not match its CRC-32",
    loops.NESTED: "a compressed message inside of a compressed message",
    loops.NO_MESSAGES: "a compressed set without readable messages",
}


@dataclass(frozen=True, slots=True)
class LogPlace:
    """Where in the log a decoder works. Its errors name it."""

    topic: str | None
    partition: int | None

    def make_corrupt(self, reason: str, base: int, last: int | None = None, at: int | None = None) -> CorruptBatch:
        """Returns the error for a damaged batch of offsets `base` to `last`; `at` is its byte."""
        return CorruptBatch(
            self._format_message(reason, base, at),
            remedy=_CORRUPT,
            topic=self.topic,
            partition=self.partition,
            start=base,
            end=None if last is None else last + 1,
        )

    def make_unsupported(self, reason: str, base: int, last: int | None = None) -> UnsupportedBatch:
        """The error for a batch, at offset `base`, of a kind that Sluice cannot read."""
        return UnsupportedBatch(
            self._format_message(reason, base, None),
            remedy=_UNSUPPORTED,
            topic=self.topic,
            partition=self.partition,
            start=base,
            end=None if last is None else last + 1,
        )

    def _format_message(self, reason: str, base: int, at: int | None) -> str:
        where = "record bytes" if self.topic is None else f"{self.topic}:{self.partition}"
        byte = "" if at is None else f" (byte {at})"
        return f"{where}: batch at offset {base}: {reason}{byte}"


def make_frame_error(origin: LogPlace, raw: Array, at: int, code: int) -> BatchProblem | None:
    """The error for a code that `loops.scan` returned for the frame at byte `at`; None for DONE."""
    if code == loops.DONE:
        return None
    base = int.from_bytes(raw[at : at + 8].tobytes(), "big", signed=True)
    if code == loops.BAD_MAGIC:
        return origin.make_unsupported(f"record format {int(raw[at + 16])}", base)
    return origin.make_corrupt(REASONS[code], base, at=at)


def read_only(records: bytes | memoryview) -> Array:
    """The bytes as a read-only array, without a copy."""
    return np.frombuffer(memoryview(records).toreadonly().cast("B"), np.uint8)


def read_frames(raw: Array, origin: LogPlace) -> tuple[Array, int, BatchProblem | None]:
    """The headers of all complete frames (rows of `loops.FIELDS` numbers), their bytes, and the next error."""
    # One row for the smallest frame there is: memory that is not written to costs nothing.
    table = np.empty((raw.size // loops.MESSAGE_OVERHEAD[0] + 1, loops.FIELDS), np.int64)
    frames, at, code = loops.scan(raw, table)
    return table[:frames], at, make_frame_error(origin, raw, at, code)


def next_position(
    records: bytes | memoryview, position: int, topic: str | None = None, partition: int | None = None
) -> int:
    """The position after the last complete batch of a response that was fetched at `position`.

    Reads headers only: nothing is decompressed and no checksum is computed. Returns `position` unchanged when there is
    no complete batch. Raises CorruptBatch or UnsupportedBatch when the first batch is bad. A
    bad batch further on ends the walk, and is found again at its own position.
    """
    if not len(records):
        return position
    frames, _, problem = read_frames(read_only(records), LogPlace(topic, partition))
    if len(frames):
        return max(position, int(frames[-1, loops.LAST]) + 1)
    if problem:
        raise problem
    return position
