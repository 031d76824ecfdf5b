"""A batch's report: one HTML file that tells people what a batch landed, what it refused, and how its columns look.

    account (ledger, receipts) ─► rejects, profiles (the batch's own files) ─► page ─► `_sluice/<feed>/reports/`

It reads the ledger, the batch's files and what `watching` knows, and writes one file. Open `store` first, which makes
and keeps a report; `page` puts it together, `amounts` and `quality` are its sections, `markup` and `plots` its tools.

Promises: the file needs nothing but itself, runs no script, and stays below 300 kB. Everything in it that came from
outside is escaped and cut. Values of records appear only here; settings of Kafka and the lake never do. The same batch,
with the same ledger and files, gives the same bytes. The SQL reports of windows are something else.
"""
