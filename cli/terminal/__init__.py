"""Output on a terminal: tables, text layout, progress, numbers, signals."""
