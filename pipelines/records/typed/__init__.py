"""Typed feeds: JSON values → Arrow columns of the feed's schema, in compiled loops (docs/formats.md).

    schema (text → types) ─► tables (types → arrays) ─► scan (bytes → spans) ─► fill (spans → buffers) ─► columns

`schema` says what a feed asks for and is light; `format` is the Format over the rest. Importing `format` loads the
compiled loops from numba's cache, or compiles them the first time, which takes seconds.
"""
