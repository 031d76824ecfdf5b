"""Asset specs: keys, partitions, descriptions, metadata tables."""
