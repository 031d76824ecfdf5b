"""The memory that batches are decompressed into, several at a time, so that one call of the loop decodes them all.

Promise: it never grows beyond `max_batch_bytes`, whatever a batch would expand to, and it shrinks again afterwards.
"""

from __future__ import annotations

import numpy as np

from sluice.pipelines.errors import CorruptBatch
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.kafka_batches.decode import codecs, loops
from sluice.pipelines.records.kafka_batches.decode.decode_errors import LogPlace
from sluice.pipelines.records.kafka_batches.decode.loops import Frame

_USUAL_BYTES = 4 << 20
_GROUP_BYTES = 1 << 20


class Scratch:
    """Holds one group of decompressed batches."""

    def __init__(self, origin: LogPlace, max_batch_bytes: int) -> None:
        self._place, self._most = origin, max_batch_bytes
        self._resize(0)

    @property
    def data(self) -> Array:
        """The bytes that `fill` wrote, read-only."""
        data = self._memory.view()
        data.flags.writeable = False
        return data

    def fill(self, view: memoryview, table: Array) -> tuple[int, CorruptBatch | None]:
        """Decompress the first frames of `table`, and note in it where their records are now.

        Returns how many frames are ready, and what is wrong with the next one. At least one is ready unless the first
        is damaged.
        """
        if len(self._memory) > _USUAL_BYTES:
            self._resize(0)
        used, cells = 0, table.data
        rows = table[:, loops.MODE : loops.TO + 1].tolist()
        for i, (mode, attributes, first, stop) in enumerate(rows):
            codec = attributes & loops.CODEC_BITS
            if not codec or mode == loops.PASS:
                continue
            if used >= _GROUP_BYTES:
                return i, None
            try:
                size = self._decompress(codec, view[first:stop], used)
            except codecs.Undecodable as e:
                if not used:
                    self._resize(0)
                frame = Frame(*table[i].tolist())
                reason = f"{codecs.CODECS[codec].name} data does not decompress: {e}"
                return i, self._place.corrupt(reason, frame.first, frame.last)
            if size < 0:
                return i, None
            cells[i, loops.SOURCE] = loops.SCRATCH
            cells[i, loops.FROM] = used
            used += size
            cells[i, loops.TO] = used
        return len(rows), None

    def _decompress(self, codec: int, data: memoryview, used: int) -> int:
        """How many bytes were written from byte `used` on; −1 when the earlier frames left too little room."""
        while True:
            try:
                return codecs.decompress(codec, data, self._view[used:])
            except codecs.NoRoom:
                if used:
                    return -1
            size = len(self._memory)
            if size >= self._most:
                raise codecs.Undecodable(f"damaged, or of more than {self._most:,} bytes")
            self._resize(min(max(4 * size, _USUAL_BYTES), self._most))

    def _resize(self, size: int) -> None:
        self._memory = np.empty(size, np.uint8)
        self._view = self._memory.data
