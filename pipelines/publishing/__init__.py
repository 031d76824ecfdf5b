"""From proven receipts to files that readers see, and who may do that.

It writes the entry that publishes a batch, makes `data/` agree with it, declares windows complete and answers which
files a window has. It knows planning, the ledger and the lake; it never asks Kafka. Open `publish` first. `owners`
judges other runs' batches, `manifest` and `files` serve readers, `lost` notices that the ledger lost entries.
"""
