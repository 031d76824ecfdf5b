"""Turns fetched record bytes into Arrow rows of one shape, in a worker.

    kafka_batches (bytes → columns) ─► json, avro, protobuf (values → typed columns) ─► contract_rows (checks)

This room imports the schema, the contract and the model, but no Kafka client, lake or ledger. Open `rows.row_format`
first (the port `Format`), then `shape` (which format a feed gets), then `columns` (the part that all formats share).
No format imports another one. `slots` is the base of the binary formats, `compiled` compiles and loads the loops.
"""
