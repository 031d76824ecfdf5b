"""An erasure in a process that is killed at one of its effects: a change of the lake, or a commit to a table."""

from __future__ import annotations

from pathlib import Path

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.maintenance.erasure import ErasureRequest, erase
from sluice.pipelines.operating.feed_tables import forget_snapshots
from sluice.pipelines.operating.record_search import Criteria, search
from sluice.resources.liveness import new_owner
from sluice.resources.open_ports import open_tables
from tests.faults.effects import run_command, run_until_killed
from tests.integration.support import open_inline_ports


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
    if person is None:
        return run_until_killed(effect, run_command, path.parent.parent, "repair", "orders")
    return run_until_killed(effect, _erase, path, person)


def _erase(path: Path, person: int) -> None:
    erase_person(load_feed(path, {}), person)
