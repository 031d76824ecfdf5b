"""A run: its session, configuration, cached ledgers and stop signal."""
