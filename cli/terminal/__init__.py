"""Output on a terminal: tables, text layout, progress, numbers, and the process."""
