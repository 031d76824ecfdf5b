"""Moves the consumer group's committed offsets to the frontier, and sends the pending dead letters.

It depends on the ledger, the group's port and `quarantine.dead_letters`, not on plans or files; landing never waits for
it. The numbered steps of `commit` are the protocol.
"""
