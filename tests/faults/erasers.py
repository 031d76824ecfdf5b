"""An erasure in a process that is killed at one of its effects: a change of the lake, or a commit to a table."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sluice.cli.main import main
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.maintenance.erasure import ErasureRequest, erase
from sluice.pipelines.operating.feed_tables import forget_snapshots
from sluice.pipelines.operating.record_search import Criteria, search
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.liveness import new_owner
from sluice.resources.open_ports import open_tables
from tests.integration.support import open_inline_ports

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__, "pyiceberg.catalog.sql", "pyiceberg.io.pyarrow", "deltalake", "duckdb"])


def erase_person(feed: Feed, person: int) -> None:
    """Erase one person's records, by what `sluice erase` calls."""
    with open_inline_ports(feed) as ports:
        matches = search(feed, ports, Criteria(f"id = {person}"), lambda progress: None)
        request = ErasureRequest(matches.offsets, "asked", "test")
        done = erase(feed, ports, request, new_owner("erase"), lambda progress: None)
    for dataset in feed.table_feeds:
        with open_inline_ports(feed) as ports, open_tables(dataset, ports.lake) as tables:
            forget_snapshots(dataset, ports, tables)
    with open_inline_ports(feed) as ports:
        for note in done.notes:
            ports.lake.remove(note)


def erase_until_killed(path: Path, person: int | None, effect: int) -> bool:
    """Erase in a process that is killed before its effect of that number; without a person, run `sluice repair`.

    Returns whether it was killed.
    """
    process = _PROCESSES.Process(target=_run, args=(path, person, effect), daemon=True)
    process.start()
    process.join(300)
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return process.exitcode != 0


def _run(path: Path, person: int | None, effect: int) -> None:
    from deltalake import DeltaTable
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.io.pyarrow import PyArrowFileIO

    count = itertools.count(1)

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **more: Any) -> Any:
            if next(count) == effect:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **more)

        return wrapper

    effects: list[tuple[Any, str]] = [
        (LocalLake, name) for name in ("put_if_absent", "put", "create", "show", "remove")
    ]
    effects += [(DeltaTable, "create_write_transaction"), (SqlCatalog, "commit_table"), (PyArrowFileIO, "delete")]
    for owner, name in effects:
        setattr(owner, name, wrap(getattr(owner, name)))
    if person is None:
        assert main(["repair", "orders", "--project", str(path.parent.parent)]) == 0
    else:
        erase_person(load_feed(path, {}), person)
