"""The types of a feed's columns, and small helpers over Arrow arrays. Imports nothing of ours."""
