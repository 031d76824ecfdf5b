"""A feed's table: landed rows by name and by SQL. The files are the lake's own: no row is copied.

Open `sync` first: it brings the table up to the ledger. `pending` reads the missing files from the ledger, `check`
compares the two file by file. `table_windows` keeps a small table of the complete windows. The tables themselves
are behind the port `Table`.
"""
