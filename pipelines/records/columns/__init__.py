"""Values of records as Arrow columns of the feed's schema: the part that all formats share.

    nodes (schema → places) ─► a format's loop (bytes → spans, slots) ─► builders (→ columns) ─► pieces ─► typed_format

Read in this order: `nodes` (places of a schema, room for a block), `spans` (the places of texts in bytes), `loops` and
`builders` (a column grows block by block), `pieces` (rows and refused records), `reasons` (codes as words and
sentences), `typed_format` (the port `Format`). This room imports `rows` and `compiled`, and no format; JSON adds
columns that parse text, `slots` columns of numbers that a loop has already read.
"""
