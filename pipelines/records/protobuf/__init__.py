"""Protobuf: `.proto` files, the columns that follow from a message, and records as rows of these columns.

    .proto ─► compiling (protoc, once) ─► schema (descriptors → one message) ─► reader (its columns)
                                                             └─► programs (tables) ─► loops (record bytes → slots)
                                                                                       └─► columns ─► typer ─► format

A compiled schema is a text of its own, `{"files": …, "message": …}`: what the ledger and the lake keep of it, so that
nobody compiles it again. `schema`, `compiling` and `reader` are light; the others load Arrow and the compiled loops.
"""
