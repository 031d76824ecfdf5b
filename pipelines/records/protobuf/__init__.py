"""Protobuf: `.proto` files, the columns that follow from a message, and records as rows of these columns.

    .proto ─► compiling (protoc, once) ─► schema (descriptors → one message) ─► reader_schema (its columns)
                                                      └─► programs (tables) ─► loops (record bytes → slots)
                                                                               └─► columns ─► format

A compiled schema is a text, `{"files": …, "message": …}`, which the ledger and the lake store, so that it is compiled
once. `compiling`, `schema` and `reader_schema` are light; the others load Arrow and the compiled loops.
"""
