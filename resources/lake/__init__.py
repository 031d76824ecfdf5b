"""The lake: a local folder or a bucket on S3, behind one port."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ports import Lake
from sluice.pipelines.util import extras
from sluice.resources.lake.local_lake import LocalLake

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem


CLIENT_BYTES = 48 << 20
"""Bytes that boto3 and its connections take in a process."""


def open_lake(feed: Feed) -> Lake:
    """The feed's lake. Picklable; it opens nothing before the first call."""
    if not feed.lake.startswith("s3://"):
        return LocalLake(Path(feed.lake))
    with extras.name_missing():
        from sluice.resources.lake.s3_lake import S3Lake  # imported late: a local lake needs no boto3

    return S3Lake(feed.lake, feed.s3)


def memory_of(feed: Feed) -> int:
    """Bytes of a task's memory that its lake takes: on S3, the client and the data that waits for upload."""
    return CLIENT_BYTES + feed.s3.buffer_bytes if feed.lake.startswith("s3://") else 0


def arrow_files(feed: Feed) -> FileSystem | None:
    """The file system by which Arrow reads addresses in the feed's lake; None if they are paths."""
    if not feed.lake.startswith("s3://"):
        return None
    from sluice.resources.lake.s3_lake import filesystem

    return filesystem(feed.lake, feed.s3)
