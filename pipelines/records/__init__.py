"""Turns fetched record bytes into Arrow rows of one shape, in a worker.

    decode (bytes → columns) ─► typed (JSON → typed columns) ─► checked (rows against the contract)

This room knows the schema, the contract and the model: no Kafka client, lake or ledger. Open `format` first (the
port `Format`), then `shape` (which format a feed gets). `compiled` explains the compiled loops, `ready` when they are
compiled.
"""
