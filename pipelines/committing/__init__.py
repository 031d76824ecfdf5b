"""Moves the consumer group's committed offsets to the frontier, and sends the dead letters that are due.

It knows the ledger, the group's port and `quarantine.letters`; it knows nothing of plans or files, and landing never
waits for it. Everything is in `commit`, whose numbered steps are the protocol.
"""
