"""The lake's layout, and safe reading of its Parquet files.

This room defines the path of every file of a feed and reports damaged ones. It depends on the port `Lake` and the
model, and does not interpret the files. Read `paths` first; `parquet` opens files.
"""
