"""Options that several commands share, and parsers of their values."""
