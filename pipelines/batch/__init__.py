"""The conductor: one request from topics to visible Parquet. It alone puts the stages in sequence."""
