"""The lake: a local folder, or a bucket of an object store, behind one port."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.stores import StoreSettings, place, scheme
from sluice.pipelines.ports import Lake
from sluice.pipelines.util import extras
from sluice.resources.lake.local_lake import LocalLake

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem


_LAKES = {
    "s3": ("s3_lake", "S3Lake"),
    "gs": ("cloud_lake", "CloudLake"),
    "az": ("cloud_lake", "CloudLake"),
    "abfss": ("cloud_lake", "CloudLake"),
}
"""Modules and classes by the scheme of their addresses; imported late, since each needs an extra."""


def open_lake(feed: Feed) -> Lake:
    """The feed's lake. Picklable; it opens nothing before the first call."""
    return open_store(feed.lake, feed.store) if feed.store else LocalLake(Path(feed.lake))


def open_store(address: str, settings: StoreSettings) -> Lake:
    """The lake at that address of an object store."""
    module, name = _LAKES[scheme(address)]
    with extras.name_missing():
        lake: Lake = getattr(import_module(f"{__name__}.{module}"), name)(address, settings)
    return lake


def strip_scheme(address: str) -> str:
    """The path of a file for `arrow_files`: `bucket/key`, or the address itself outside of a store."""
    if not scheme(address):
        return address
    root = place(address)
    return f"{root.bucket}/{address.removeprefix(f'{root.root}/')}"


def arrow_files(feed: Feed) -> FileSystem | None:
    """The file system by which Arrow reads addresses in the feed's lake; None if they are paths."""
    if feed.store is None:
        return None
    module = import_module(f"{__name__}.{_LAKES[scheme(feed.lake)][0]}")
    files: FileSystem = module.open_filesystem(feed.lake, feed.store)
    return files
