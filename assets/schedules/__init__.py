"""Schedules and sensors: which windows to request, and when."""
