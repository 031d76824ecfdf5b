"""Turns Kafka record bytes into Arrow columns, in compiled, bounds-checked loops (docs/developers/design/decoding.md).

    response ─► frames (headers) ─► decoder (CRC, transactions) ─► decompression ─► columns (rows) ─► chunks

`BatchDecoder` takes the responses of one offset range. `next_position` and `find_batches` tell the fetcher how far a
response reaches, and where a range lies in it. Importing this package loads the library of compiled loops.
"""

from sluice.pipelines.records.kafka_batches.decode.columns import SCHEMA, DecodeOptions
from sluice.pipelines.records.kafka_batches.decode.decoder import BatchDecoder, OffsetCounts
from sluice.pipelines.records.kafka_batches.decode.decompression import find_batches, next_position

__all__ = ["SCHEMA", "BatchDecoder", "DecodeOptions", "OffsetCounts", "find_batches", "next_position"]
