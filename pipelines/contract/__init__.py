"""Contracts: rules for a feed's rows, as a Great Expectations suite.

This room holds the contract's file, its words and its results. It knows the schema and the model, and no ledger.
It judges no rows: `records.contract_rows` does that in tasks, and `validation` judges whole batches in the driver.
Open `suite` first (it reads the file), then `catalogue` (what each expectation takes and means) and `results`.
"""
