"""Checks rows against a contract, whole columns at a time. Open `contract_format` first, then `row_checks`."""
