"""JSON values as Arrow columns of the feed's schema, in compiled loops (docs/formats.md).

    scan_tables (schema → arrays) ─► scan (bytes → spans) ─► fill (spans → buffers) ─► columns ─► typer ─► format

Start with `format`. `records.columns` has its base, `TypedFormat`, and all that other formats share with JSON. For
JSON Schema feeds, `schema_document` follows references and compositions, and `schema_reader` derives columns and
expectations.
"""
