"""The types of a feed's columns, and small helpers over Arrow arrays.

The lowest room: it imports nothing of ours. Open `schema` first (types as feed files spell them, and their Arrow
types), then `wider` (which type holds the values of another).
"""
