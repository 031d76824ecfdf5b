"""All writers of a feed with tables, each in a separate process, which may be killed: runs, compactions, replays,
repeated landings, publishers. They are started by name. The feed file must exist."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.maintenance.compaction import compact
from sluice.pipelines.maintenance.fixers import Fixer, Record
from sluice.pipelines.maintenance.replay import replay
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.quarantine.listing import Filter
from sluice.pipelines.tables.sync import sync
from sluice.pipelines.util.units import MINUTE
from sluice.resources.liveness import new_owner
from sluice.resources.open_ports import open_tables
from tests.integration.support import open_feed_ledger, open_inline_ports, run

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__, "pyiceberg.catalog.sql", "pyiceberg.io.pyarrow", "deltalake"])


def land(feed: Feed) -> None:
    run(feed)


def land_again(feed: Feed) -> None:
    now = time.time_ns() // 1_000_000
    run(feed, Request(RequestKind.WINDOW, window=now - now % MINUTE - MINUTE, replace=True))


def merge(feed: Feed) -> None:
    with open_inline_ports(feed) as opened:
        compact(feed, opened, None, new_owner("compact"), lambda progress: None)


def fix(feed: Feed) -> None:
    with open_inline_ports(feed) as opened:
        replay(feed, opened, Filter(), Fixer(_repair_record, __file__), new_owner("replay"), lambda progress: None)


def bring_up(feed: Feed) -> None:
    """Bring the tables up to date, and expire snapshots older than ten seconds, so that files are removed, too."""
    for dataset in feed.table_feeds:
        with open_inline_ports(feed) as opened, open_tables(dataset, opened.lake) as tables:
            sync(open_feed_ledger(feed, opened), opened.lake, tables, expire_before=opened.clock() - 10_000)


def _repair_record(record: Record) -> Any:
    return {k: int(v) for k, v in json.loads(record.value or b"").items()}


WRITERS = {w.__name__: w for w in (land, land_again, merge, fix, bring_up)}


def start_writer(root: Path, name: str) -> Any:
    """Start a writer by its name."""
    process = _PROCESSES.Process(target=_run_writer, args=(root, name), daemon=True)
    process.start()
    return process


def _run_writer(root: Path, name: str) -> None:
    """Run a writer in its process, and leave a note of its end."""
    note = root / "ended" / f"{name}-{os.getpid()}"
    try:
        WRITERS[name](load_feed(root / "feeds" / "orders.yaml", {}))
        note.write_text("done")
    except SluiceError as error:
        note.write_text(f"{type(error).__name__}: {error.message}")
