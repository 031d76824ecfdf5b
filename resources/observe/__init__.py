"""Reports runs to other systems: traces, lineage, metrics, notifications."""
