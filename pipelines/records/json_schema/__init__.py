"""JSON Schema: the columns and expectations that follow from one, and records that are JSON behind a schema's number.

    document ─► keywords (references, compositions, what is refused) ─► reader (columns, expectations) ─► format

Records are decoded by `records.typed`: what the schema says beyond types becomes part of the feed's contract.
"""
