"""Dagster loads every module of this folder."""
