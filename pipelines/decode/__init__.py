"""Kafka record bytes → Arrow columns, in compiled, bounds-checked loops (DESIGN §6).

`BatchDecoder` takes the fetch responses of one slice; `next_position` and `bytes_needed` tell the fetcher how far a
response reaches. Importing this package loads the compiled loops from numba's cache, or compiles them: `warm` says so.
"""

from sluice.pipelines.decode.columns import SCHEMA
from sluice.pipelines.decode.decoder import BatchDecoder, Counts
from sluice.pipelines.decode.frames import bytes_needed, next_position

__all__ = ["SCHEMA", "BatchDecoder", "Counts", "bytes_needed", "next_position"]
