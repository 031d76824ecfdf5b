"""Words that every stage uses: partitions and offsets, plans, receipts, ranges, errors, paths in the lake, units."""
