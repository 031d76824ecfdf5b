"""This machine: a local Kafka, a local S3, Java, processes."""
