"""The project's Dagster instance, its storage, and access to Dagster's internals."""
