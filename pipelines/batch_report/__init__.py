"""A batch's report: one HTML file with a batch's landed rows, refused records and column profiles.

    batch_account (ledger, receipts) ─► rejects, column_profiles (its files) ─► report_page ─► `_sluice/<feed>/reports/`

It reads the ledger, the batch's files and its status, and writes one file. Open `report_page` first, which makes and
stores a report; `amounts` and `quality` are its sections, `markup` its elements, plots and style.

Promises: the file needs nothing but itself, runs no script, and stays below 300 kB. Text from outside is escaped and
cut. Values of records appear only here; settings of Kafka and the lake never do. The same batch, with the same ledger
and files, gives the same bytes. The SQL reports of windows are something else.
"""
