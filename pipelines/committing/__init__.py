"""Offsets to the frontier, fenced by the group's coordinator."""
