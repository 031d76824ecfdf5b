"""What an operator decides by name: accept, repair, move offsets."""
