"""Avro: schemas, the columns that follow from one, and records of any writer's schema as rows of these columns.

    schema ─► reader_schema (the feed's columns) ─► programs (writer's and reader's schema → operations)
                                                    └─► loops (record bytes → slots) ─► format (columns, rows)

`schema` and `reader_schema` are light; the others load Arrow and the compiled loops.
"""
