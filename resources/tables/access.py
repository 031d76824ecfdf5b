"""How a library of tables reaches a feed's lake on S3: as the feed itself does."""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.s3_section import bucket_and_prefix
from sluice.pipelines.util import extras


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """An address and credentials, as boto3 found them at this moment."""

    endpoint: str
    region: str
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    token: str | None = field(repr=False)


def access_of(feed: Feed) -> StoreAccess | None:
    """How to reach the feed's lake on S3; None for a lake in a folder. Raises NotAuthorized, SetupError."""
    if not feed.lake.startswith("s3://"):
        return None
    with extras.name_missing():
        from sluice.resources.lake.s3_client import Bucket
    bucket = Bucket(bucket_and_prefix(feed.lake)[0], feed.s3)
    credentials, meta = bucket.credentials, bucket.client.meta
    return StoreAccess(
        meta.endpoint_url, meta.region_name, credentials.access_key, credentials.secret_key, credentials.token
    )
