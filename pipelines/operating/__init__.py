"""Manual operations: show a feed's status, accept changes in Kafka, move committed offsets, repair a feed.

These modules back the commands of the same names and may know every other room. Nothing runs them on its own. Open
`acceptance` for the ways out of a refusal, `repairs` for the remains of dead runs, and `move_offsets` for consumer
groups.
"""
