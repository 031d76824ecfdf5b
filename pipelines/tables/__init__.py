"""A feed's table: landed rows by name and by SQL. The files are the lake's own: no row is copied.

Open `sync` first: it makes the table what the ledger says. `owed` reads from the ledger what the table lacks, `check`
compares the two file by file. `windows` keeps a small table of the complete windows beside it. The tables themselves
are behind the port `Table`.
"""
