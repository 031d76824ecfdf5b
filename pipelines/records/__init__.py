"""Record bytes to Arrow rows of one shape: what a worker does with what it fetched."""
