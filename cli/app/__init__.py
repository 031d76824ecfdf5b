"""The frame of every command: its options, errors, menu and completion."""
