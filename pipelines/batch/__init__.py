"""The conductor: it takes one request from the feed's topics to visible Parquet files.

This room alone puts the stages in sequence (planning, landing, validation, publishing), so it may know all of them and
gets the whole feed. It does not commit; that is `committing`. Open `land` first, which reads from top to bottom;
`carry_out` is one plan, and `preview` is the dry run.
"""
