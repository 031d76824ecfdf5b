"""Asset checks: windows, contracts, reconciliation, and their results after failed runs."""
