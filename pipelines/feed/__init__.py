"""The feed file: its sections, the problems in one, and which topics it matches.

This room turns `feeds/*.yaml` into frozen settings. It knows the schema, the contract and the shape that a feed names,
and nothing of Kafka, the lake or the ledger. Open `feed` first, then `sections` (what each key means) and `load` (how
a file is read).
"""
