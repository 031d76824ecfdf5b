"""A bucket as Arrow's own S3 file system reads it: in parallel, outside Python. Only readers use it.

It uses boto3's endpoint, region and credentials, as they are at the moment at which it is made.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

from sluice.pipelines.feed.s3_section import S3Settings, bucket_and_prefix
from sluice.resources.lake.s3_client import Bucket


def filesystem(address: str, settings: S3Settings) -> S3FileSystem:
    """A file system for paths `bucket/key`. Raises NotAuthorized, SetupError."""
    bucket = Bucket(bucket_and_prefix(address)[0], settings)
    client, credentials = bucket.client, bucket.credentials
    endpoint = urlsplit(client.meta.endpoint_url)
    elsewhere = {"scheme": endpoint.scheme, "endpoint_override": endpoint.netloc}
    return S3FileSystem(
        access_key=credentials.access_key,
        secret_key=credentials.secret_key,
        session_token=credentials.token,
        region=client.meta.region_name,
        connect_timeout=settings.connect_timeout_ms / 1000,
        request_timeout=settings.read_timeout_ms / 1000,
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=settings.retries + 1),
        tls_ca_file_path=settings.ca_bundle,
        force_virtual_addressing=settings.path_style is False,
        **({} if endpoint.netloc.endswith(".amazonaws.com") else elsewhere),
    )
