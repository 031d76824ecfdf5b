"""Consumer groups: membership, committed offsets, and every group of a cluster."""
