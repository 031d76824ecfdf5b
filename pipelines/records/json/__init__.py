"""JSON values as Arrow columns of the feed's schema, in compiled loops (docs/formats.md).

    schema (text → types) ─► scan_tables (types → arrays) ─► scan (bytes → spans) ─► fill (spans → buffers) ─► columns

Start with `format`: the port `Format` over the rest. The loops come from numba's cache, or are compiled on first import
(`compiled.cache` does that ahead of time). JSON Schema feeds go the same way: `schema_document` follows references and
compositions, `schema_reader` derives columns and expectations, `schema_format` strips the envelope of a registry.
"""
