"""The lake: a local folder or a bucket on S3, behind one port."""
