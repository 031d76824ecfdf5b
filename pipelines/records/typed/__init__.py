"""Typed feeds: JSON values → Arrow columns of the feed's schema, in compiled loops (docs/formats.md).

    schema (text → types) ─► tables (types → arrays) ─► scan (bytes → spans) ─► fill (spans → buffers) ─► columns

Open `format` first: it is the port `Format` over the rest. Importing it loads the compiled loops from numba's cache, or
compiles them the first time, which takes seconds (`records.ready` does that before anybody waits).
"""
