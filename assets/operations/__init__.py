"""Operations on Dagster's runs: dead runs, recent runs, health, repair of the event log."""
