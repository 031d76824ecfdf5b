"""Checks whether a lake can be reached, listed and written to, as far as that shows without writing.

Properties that only a write can show are checked by the first run, before it writes any ledger entry.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.pipelines.feed.s3_section import S3Settings, bucket_and_prefix
from sluice.pipelines.model.health import Diagnosis, failed, ok, skipped
from sluice.resources.health.machine_checks import room
from sluice.resources.health.run_checks import Check, examine
from sluice.resources.lake.local_lake import LocalLake

if TYPE_CHECKING:
    from sluice.resources.lake.s3_client import Bucket

LEDGERS = "_sluice"
_HASTY_MS = 5_000


def examine_lake(address: str, settings: S3Settings) -> list[Diagnosis]:
    """Returns all diagnoses of one lake."""
    if address.startswith("s3://"):
        return examine(Bucketed(address, settings), ON_S3)
    return examine(Path(os.path.realpath(address)), IN_A_FOLDER)


# -- in a folder


def folder(path: Path) -> Iterator[Diagnosis]:
    """Check that this user may write to the folder or create it."""
    there = _nearest(path)
    name = f"{path}" if there == path else f"{path}, which the first run makes in {there},"
    if not there.is_dir():
        yield failed("folder", f"{there} is no folder", "name a folder in the feed's `lake:`")
    elif not os.access(there, os.W_OK | os.X_OK):
        read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        remedy = "mount it writable, or name another lake" if read_only else "give this user the right to write there"
        what = "is on a read-only file system" if read_only else "may not be written to by this user"
        yield failed("folder", f"{there} {what}", remedy)
    else:
        yield ok("folder", f"{name} may be written to")


def listing(path: Path) -> Iterator[Diagnosis]:
    """Check that its ledgers can be listed and read."""
    if not path.is_dir():
        yield skipped("listing", "there is nothing yet")
        return
    lake = LocalLake(path)
    first = next(iter(lake.list(LEDGERS)), None)
    if first is not None and lake.get(first) is not None:
        yield ok("listing", "the ledger can be listed and read")
    else:
        yield ok("listing", "nothing has landed yet")


def space(path: Path) -> Iterator[Diagnosis]:
    yield room("space", _nearest(path), "`lake:` in the feed")


def links(path: Path) -> Iterator[Diagnosis]:
    """The ledger creates each entry by a hard link: an existing entry shows that it works."""
    logs = sorted(path.glob(f"{LEDGERS}/*/log/*.json"))[:1]
    if logs:
        yield ok("hard links", "they work: the ledger has entries")
    else:
        yield skipped("hard links", "only a write tells whether the file system has them; the first run tries")


IN_A_FOLDER: tuple[Check[Path], ...] = (
    Check("folder", folder),
    Check("listing", listing),
    Check("hard links", links),
    Check("space", space),
)


def _nearest(path: Path) -> Path:
    """Returns the folder itself, or its nearest existing parent."""
    return next(p for p in (path, *path.parents) if p.exists())


# -- on S3


@dataclass(frozen=True)
class Bucketed:
    """A lake on S3. Requests use short timeouts, regardless of the feed's settings."""

    address: str
    settings: S3Settings

    @cached_property
    def prefix(self) -> str:
        return bucket_and_prefix(self.address)[1]

    @cached_property
    def bucket(self) -> Bucket:
        from sluice.resources.lake.s3_client import Bucket  # late: a local lake does without boto3

        s = self.settings
        hasty = {n: min(_HASTY_MS, getattr(s, n)) for n in ("connect_timeout_ms", "read_timeout_ms")}
        return Bucket(bucket_and_prefix(self.address)[0], s.model_copy(update=hasty | {"retries": 1}))


def reached(lake: Bucketed) -> Iterator[Diagnosis]:
    """List once: checks address, region, credentials, bucket and the right to list."""
    from sluice.resources.lake.s3_client import skew, told_skew
    from sluice.resources.lake.store_probe import MAX_SKEW_S

    answer = lake.bucket.call("list_objects_v2", "", Prefix=f"{lake.prefix}{LEDGERS}/", MaxKeys=1)
    summary = "the ledger can be listed" if answer.get("KeyCount") else "it can be listed, and nothing has landed yet"
    yield ok("listing", f"{lake.address}: {summary}")
    ahead = skew(answer)
    if abs(ahead) > MAX_SKEW_S:
        yield failed("clock", f"{told_skew(ahead)} of the store's", "set this machine's clock (NTP)")
    else:
        yield ok("clock", "as the store's, to the second" if abs(ahead) < 2 else f"{told_skew(ahead)} of the store's")


def conditional_writes(lake: Bucketed) -> Iterator[Diagnosis]:
    """Check for the note of the first writing process, which shows that the store passed the probe."""
    from sluice.resources.lake.s3_client import NotThere
    from sluice.resources.lake.store_probe import NOTE

    with suppress(NotThere):
        lake.bucket.call("head_object", lake.prefix + NOTE)
        yield ok("conditional writes", f"the store keeps them: tested by a run, which left {NOTE}")
        return
    yield skipped("conditional writes", "only a write tells; the first run tests them before it writes anything else")


ON_S3: tuple[Check[Bucketed], ...] = (
    Check("listing", reached),
    Check("conditional writes", conditional_writes),
)
