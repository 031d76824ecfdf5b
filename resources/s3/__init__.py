"""The lake on S3."""
