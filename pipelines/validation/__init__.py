"""What a whole batch is held against in the driver: its contract, and drift from its schema."""
