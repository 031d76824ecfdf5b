"""The judgement of a whole batch in the driver: its contract, and its drift from the schema.

This room decides whether proven receipts may be published. It reads staged parts and the ledger's history, knows the
contract, the ports and the records' shape, and writes nothing. Open `decision` first, then `whole` (expectations about
all rows) and `drift`.
"""
