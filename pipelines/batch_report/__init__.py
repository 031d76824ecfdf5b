"""A batch's report: one HTML file with a batch's landed rows, refused records and column profiles.

    batch_facts (ledger, receipts) ─► rejects, column_profiles (its files) ─► report_page ─► `_sluice/<feed>/reports/`

It reads the ledger, the batch's files and what `status` reports, and writes one file. Open `store` first, which makes
and keeps a report; `report_page` composes it; `amounts` and `quality` are its sections, `markup` and `plots` its
tools.

Promises: the file needs nothing but itself, runs no script, and stays below 300 kB. Everything in it that came from
outside is escaped and cut. Values of records appear only here; settings of Kafka and the lake never do. The same batch,
with the same ledger and files, gives the same bytes. The SQL reports of windows are something else.
"""
