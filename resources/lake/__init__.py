"""The lake: a local folder, or a bucket of an object store, behind one port."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.stores import StoreSettings, place, scheme
from sluice.pipelines.ports import Lake
from sluice.pipelines.util import extras
from sluice.resources.lake.local_lake import LocalLake

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

    from sluice.resources.lake.object_lake import ObjectLake
    from sluice.resources.lake.store_client import StoreClient


class Client(NamedTuple):
    """The class of a store's client: its module, its name, and the package that it needs, which is imported late."""

    module: str
    name: str
    package: str


CLIENTS = {
    "s3": Client("s3", "S3Client", "boto3"),
    "gs": Client("google", "GoogleClient", "obstore"),
    "az": Client("azure", "AzureClient", "obstore"),
    "abfss": Client("azure", "AzureClient", "obstore"),
}
"""By the scheme of addresses."""


def open_lake(feed: Feed) -> Lake:
    """The feed's lake. Picklable; it opens nothing before the first call."""
    return open_store(feed.lake, feed.store) if feed.store else LocalLake(Path(feed.lake))


def open_store(address: str, settings: StoreSettings) -> ObjectLake:
    """The lake at that address of an object store."""
    client = open_client(address, settings)
    from sluice.resources.lake.object_lake import ObjectLake  # late: a local lake needs none of it

    return ObjectLake(address, client)


def open_client(address: str, settings: StoreSettings) -> StoreClient:
    """The client of the bucket or container at that address. Raises SetupError without its package."""
    entry = CLIENTS[scheme(address)]
    with extras.name_missing():
        client: StoreClient = getattr(import_module(f"{__name__}.{entry.module}"), entry.name)(place(address), settings)
    return client


def strip_scheme(address: str) -> str:
    """The path of a file for `arrow_files`: `bucket/key`, or the address itself outside of a store."""
    if not scheme(address):
        return address
    root = place(address)
    return f"{root.bucket}/{address.removeprefix(f'{root.root}/')}"


def arrow_files(feed: Feed) -> FileSystem | None:
    """The file system by which Arrow reads addresses in the feed's lake; None if they are paths."""
    return open_client(feed.lake, feed.store).open_filesystem() if feed.store else None
