"""Checks rows against a contract, whole columns at a time. Open `format` first, then `rows` and `checks`."""
