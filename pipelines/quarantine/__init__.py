"""Records that were refused: how many a batch may have, what is held, and dead letters."""
