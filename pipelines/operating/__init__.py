"""What commands, Python and orchestrators compute about a feed: status, figures, tables, records, repairs.

Each is a function over ports with a typed result, and may know every other room. Nothing runs them on its own. Open
`acceptance` for the ways out of a refusal, `repairs` for the remains of dead runs, and `move_offsets` for consumer
groups.
"""
