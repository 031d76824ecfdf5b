"""What one task does: fetch, decode and write staged parts; then the proof of those parts from their files.

`task` runs in the engine's workers, `proof` in the driver. The room knows the ports, the records and the feed's
sections. Only `sample`, which looks at records without landing them, also knows planning and the ledger. Open `task`
first, then `writer` (the Parquet files) and `proof` (what is checked before anything is published).
"""
