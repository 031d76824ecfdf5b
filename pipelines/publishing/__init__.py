"""From proven receipts to visible files, and the ownership of batches.

It writes the entry that publishes a batch, makes `data/` agree with it, declares windows complete and lists the files
of a window. It depends on planning, the ledger and the lake, not on Kafka. Read `publish` first; it judges other runs'
batches, too. `manifest` and `published_files` serve readers, `lost_entries` detects lost entries of the ledger.
"""
