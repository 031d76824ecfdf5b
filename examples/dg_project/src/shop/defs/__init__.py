"""Everything below this folder is loaded."""
