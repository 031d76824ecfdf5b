"""Kafka record bytes → Arrow columns, in compiled, bounds-checked loops (DESIGN §6).

    fetch response ─► frames (headers) ─► checks (CRC, transactions) ─► scratch (codecs) ─► rows (Arrow)

`BatchDecoder` takes the responses of one slice; `next_position` and `bytes_needed` tell the fetcher how far one
reaches. Importing this package loads the compiled loops from numba's cache beside the source (or, where that cannot
be written, in the user's), and compiles them the first time, which takes seconds.
"""

from sluice.pipelines.records.decode.columns import SCHEMA
from sluice.pipelines.records.decode.decoder import BatchDecoder, OffsetCounts
from sluice.pipelines.records.decode.frames import bytes_needed, next_position

__all__ = ["SCHEMA", "BatchDecoder", "OffsetCounts", "bytes_needed", "next_position"]
