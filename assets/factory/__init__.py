"""Makes Dagster's definitions from feed files."""
