"""The checks of `sluice doctor`: the machine, Kafka, the lake, Spark. Nothing here writes.

A file for each; in it a list of checks. A new check is a function that yields diagnoses, and a line in that list.
"""
