"""The ledger entry that makes a batch true, the files that follow it, and which files to read."""
