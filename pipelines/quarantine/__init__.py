"""Quarantined records: the limit of a batch, the stored records, and their dead letters.

It reads quarantined parts through the ledger and the lake, and changes none; landing fills the quarantine, and replay
empties it. Open `limit` for the kinds of faults and the limit, `listing` for the stored records, `dead_letters`
for the dead-letter topic.
"""
