"""Avro: schemas, the columns that follow from one, and records of any writer's schema as rows of these columns.

    schema ─► reader (the feed's own schema, its columns) ─► programs (writer's and reader's schema → operations)
                                                             └─► loops (record bytes → slots) ─► columns ─► format

`reader` and `schema` are light; the others load Arrow and the compiled loops.
"""
