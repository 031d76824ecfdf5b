"""Typed rows held against a contract, whole columns at a time."""
