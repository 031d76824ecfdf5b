"""The lake: where everything lies in it, and its Parquet files, opened with care."""
