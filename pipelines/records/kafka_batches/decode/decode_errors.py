"""Turns codes of the compiled loops into errors in words: CorruptBatch and UnsupportedBatch.

Each error names the topic, the partition, the batch's offsets, the byte and the reason. `start` is the batch's base
offset and `end` one past its last, where the header tells them. A CorruptBatch may have been damaged on the way, so
reading it once more is worth it. An UnsupportedBatch stays what it is.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    loops.BAD_RECORD_LENGTH: "a record is longer than what is left, or shorter than any",
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

    def corrupt(self, reason: str, base: int, last: int | None = None, at: int | None = None) -> CorruptBatch:
        """The error for a damaged batch of offsets `base` to `last`; `at` is a byte of the response or its records."""
        return CorruptBatch(
            self._message(reason, base, at),
            remedy=_CORRUPT,
            topic=self.topic,
            partition=self.partition,
            start=base,
            end=None if last is None else last + 1,
        )

    def unsupported(self, reason: str, base: int, last: int | None = None) -> UnsupportedBatch:
        """The error for a batch, at offset `base`, of a kind that Sluice cannot read."""
        return UnsupportedBatch(
            self._message(reason, base, None),
            remedy=_UNSUPPORTED,
            topic=self.topic,
            partition=self.partition,
            start=base,
            end=None if last is None else last + 1,
        )

    def _message(self, reason: str, base: int, at: int | None) -> str:
        where = "record bytes" if self.topic is None else f"{self.topic}:{self.partition}"
        byte = "" if at is None else f" (byte {at})"
        return f"{where}: batch at offset {base}: {reason}{byte}"


def frame_error(origin: LogPlace, raw: Array, at: int, code: int) -> BatchProblem | None:
    """The error for a code that `loops.scan` returned for the frame at byte `at`; None for DONE."""
    if code == loops.DONE:
        return None
    base = int.from_bytes(raw[at : at + 8].tobytes(), "big", signed=True)
    if code == loops.BAD_MAGIC:
        return origin.unsupported(f"record format {int(raw[at + 16])}", base)
    return origin.corrupt(REASONS[code], base, at=at)
