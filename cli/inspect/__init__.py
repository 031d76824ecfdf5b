"""Commands that inspect: plan, files, table, wait, explain, peek, report, doctor, metrics."""
