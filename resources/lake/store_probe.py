"""Checks whether a store keeps the promises that the ledger relies on, before a process writes its first entry.

If a store answered "created" twice to the same conditional write, two runs could own one number. If its listings
lagged, they would hide entries. If its clock were off, windows would close too early. Each of these is refused by name.
A store that passes gets a note in the lake: later processes ask for the note, and the time, in one request.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from typing import Any

from sluice.pipelines.errors import SetupError, SluiceError
from sluice.resources.lake.s3_client import Bucket, NotKnown, NotThere, Taken, skew, told_skew

MAX_SKEW_S = 300
NOTE = "_sluice/.probe.json"
FOLDER = "_sluice/.probe/"

_checked: set[tuple[object, ...]] = set()


def check(bucket: Bucket, prefix: str) -> None:
    """Check each lake once in a process. Raises SetupError for a store, or a clock, that would lose or double data."""
    lake = (os.getpid(), bucket.settings.endpoint, bucket.name, prefix)
    if lake not in _checked:
        _check(bucket, prefix)
        _checked.add(lake)


def _check(bucket: Bucket, prefix: str) -> None:
    with suppress(NotThere):
        return _check_clock(bucket.call("head_object", prefix + NOTE))
    key = f"{prefix}{FOLDER}{secrets.token_hex(8)}"
    try:
        _check_clock(_check_condition(bucket, key))
        _check_sight(bucket, key)
    finally:
        with suppress(SluiceError, NotThere):
            bucket.call("delete_object", key)
    note = {"format": 1, "conditional_writes": True, "fresh_listings": True}
    bucket.send("put_object", prefix + NOTE, json.dumps(note).encode(), **bucket.written_with)


def _check_condition(bucket: Bucket, key: str) -> Any:
    """Of two writes that create the same object, the second must be refused. Returns the answer to the first."""
    try:
        first = bucket.send("put_object", key, _FIRST, IfNoneMatch="*", **bucket.written_with)
        bucket.send("put_object", key, _SECOND, IfNoneMatch="*", **bucket.written_with)
    except Taken:
        if bucket.fetch(key).data == _FIRST:
            return first
    except NotKnown:
        pass
    raise SetupError(
        f"the store of s3://{bucket.name} does not honour conditional writes (If-None-Match): two runs could write "
        "the same ledger entry",
        remedy="use a store that does (Amazon S3, MinIO, Ceph, R2 of today), or a lake in a folder",
    )


def _check_sight(bucket: Bucket, key: str) -> None:
    """An object that was just written must be there for every reader, and in a listing that begins before it."""
    folder = key.rpartition("/")[0] + "/"
    pages = bucket.pages("list_objects_v2", Prefix=folder, StartAfter=key[:-1])
    listed = any(one["Key"] == key for page in pages for one in page.get("Contents", ()))
    if not listed:
        raise SetupError(
            f"the store of s3://{bucket.name} does not list what was just written: a reader could miss ledger entries",
            remedy="use a store whose listings are consistent, or a lake in a folder",
        )


def _check_clock(answer: Any) -> None:
    ahead = skew(answer)
    if abs(ahead) > MAX_SKEW_S:
        raise SetupError(
            f"{told_skew(ahead)} of the store's: windows would be closed by a wrong time",
            remedy="set this machine's clock (NTP), then run again",
        )


_FIRST, _SECOND = b"first", b"second"
