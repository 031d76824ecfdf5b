"""The feed file: its sections, what is wrong with one, and which topics it matches."""
