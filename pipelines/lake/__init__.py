"""The lake's layout, and its Parquet files read with care.

This room knows where every file of a feed lies and how a damaged one is reported. It knows the port `Lake` and the
model, and nothing of what the files mean. Open `paths` first; `parquet` opens what lies there.
"""
