"""Compiled loops: how they are compiled and cached, and taking rows out of columns."""
