"""Writers of a table whose clocks differ: the clocks of Sluice's publisher and of PyIceberg are moved."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from sluice.pipelines.tables.sync import Synced, sync
from sluice.resources.open_ports import open_tables
from tests.pipelines.tables.worlds import TableWorld

MOVES = (0, 7200, 0, -600, 40 * 86400, 300)
"""Seconds by which the clock of one writer after another is moved."""


@contextmanager
def move_clock(seconds: int) -> Iterator[None]:
    """Move the clock of whatever writes to an Iceberg table."""

    def read_clock(tz: dt.tzinfo | None = None) -> dt.datetime:
        return dt.datetime.now(tz) + dt.timedelta(seconds=seconds)

    class Moved(dt.datetime):
        now: Any = staticmethod(read_clock)

    moved = SimpleNamespace(
        time=lambda: time.time() + seconds,
        time_ns=lambda: time.time_ns() + seconds * 10**9,
        monotonic=time.monotonic,
        sleep=time.sleep,
    )
    with (
        mock.patch("pyiceberg.table.snapshots.time", moved),
        mock.patch("pyiceberg.table.update.datetime", Moved),
        mock.patch("pyiceberg.table.metadata.datetime", SimpleNamespace(datetime=Moved)),
        mock.patch("sluice.resources.tables.iceberg.time", moved),
    ):
        yield


def sync_all(world: TableWorld, seconds: int, expire_before: int | None = None) -> Synced:
    """Sync the feed's tables as a process whose clock is moved."""
    with move_clock(seconds), open_tables(world.feed, world.lake) as tables:
        return sync(world.reopen_ledger(), world.lake, tables, expire_before=expire_before)
