"""Commands around the product: docs, demo, completion, pack."""
