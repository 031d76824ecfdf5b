"""Utilities without a domain: units, logs, scratch folders, extras, parallel calls."""
