"""The work of one task: fetch, decode and write staged parts; then the proof of those parts from their files.

`task` runs in the engine's workers, `proof` in the driver. The room depends on the ports, the records and the feed's
sections. Only `sample`, which reads records without landing them, also depends on planning and the ledger. Read `task`
first, then `writer` (the Parquet files) and `proof` (the checks before publishing).
"""
