"""A batch's report: one HTML file that says to people what a batch landed, what it refused, and how its columns look.

    account (ledger, receipts) ─► rejects, profiles (the batch's own files) ─► page ─► `_sluice/<feed>/reports/`

Promises: the file needs nothing but itself, runs no script, and stays below 300 kB; everything in it that came from
outside is escaped and cut; values of records stand in it and nowhere else, settings of Kafka and the lake never.
The same batch, asked of the same ledger and files, gives the same bytes. The SQL reports of windows are another thing.
"""
