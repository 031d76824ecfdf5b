"""JSON values as Arrow columns of the feed's schema, in compiled loops (docs/formats.md).

    scan_tables (schema → arrays) ─► scan (bytes → spans) ─► fill (spans → buffers) ─► columns ─► typer ─► format

Start with `format`: the port `Format` over the rest. For JSON Schema feeds, `schema_document` follows references and
compositions, `schema_reader` derives columns and expectations, and `format` strips the registry's envelope.
"""
