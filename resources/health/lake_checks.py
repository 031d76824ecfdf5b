"""Checks a lake and its ledgers, without writing: access, listings, sound ledgers, groups, ledgers without feed files.

Properties that only a write can show are checked by the first run, before it writes any ledger entry. Ledgers that do
not fit into the time limit are reported as not read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.pipelines.errors import SetupError, SluiceError, docs_command
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.stores import StoreSettings
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ledger.log import list_feeds_without_files
from sluice.pipelines.model.health import (
    Diagnosis,
    Health,
    report_failure,
    report_ok,
    report_skipped,
    report_warning,
)
from sluice.pipelines.operating.feed_status import read_status_through
from sluice.pipelines.ports import Ports
from sluice.pipelines.util import extras
from sluice.pipelines.util.parallel import map_parallel
from sluice.pipelines.util.units import join_first, many
from sluice.resources.health import Check, examine
from sluice.resources.health.machine_checks import room
from sluice.resources.lake.local_lake import LocalLake

if TYPE_CHECKING:
    from collections.abc import Callable


LEDGERS = "_sluice"


def examine_lake(address: str, settings: StoreSettings | None) -> list[Diagnosis]:
    """Returns all diagnoses of one lake. `settings` are those of its object store; None: it is a folder."""
    if settings is None:
        return examine(Path(os.path.realpath(address)), IN_A_FOLDER)
    from sluice.resources.health.store_checks import IN_A_STORE, open_hastily  # late: a folder needs none of it

    return examine(open_hastily(address, settings), IN_A_STORE)


# -- in a folder


def folder(path: Path) -> Iterator[Diagnosis]:
    """Check that this user may write to the folder or create it."""
    there = _nearest(path)
    name = f"{path}" if there == path else f"{path}, which the first run makes in {there},"
    if not there.is_dir():
        yield report_failure("folder", f"{there} is no folder", "name a folder in the feed's `lake:`")
    elif not os.access(there, os.W_OK | os.X_OK):
        read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        remedy = "mount it writable, or name another lake" if read_only else "give this user the right to write there"
        what = "is on a read-only file system" if read_only else "may not be written to by this user"
        yield report_failure("folder", f"{there} {what}", remedy)
    else:
        yield report_ok("folder", f"{name} may be written to")


def listing(path: Path) -> Iterator[Diagnosis]:
    """Check that its ledgers can be listed and read."""
    if not path.is_dir():
        yield report_skipped("listing", "the lake is empty")
        return
    lake = LocalLake(path)
    first = next(iter(lake.list(LEDGERS)), None)
    if first is not None and lake.get(first) is not None:
        yield report_ok("listing", "the ledger can be listed and read")
    else:
        yield report_ok("listing", "nothing has landed yet")


def space(path: Path) -> Iterator[Diagnosis]:
    yield room("space", _nearest(path), "`lake:` in the feed")


def links(path: Path) -> Iterator[Diagnosis]:
    """The ledger creates each entry by a hard link: an existing entry shows that it works."""
    logs = sorted(path.glob(f"{LEDGERS}/*/log/*.json"))[:1]
    if logs:
        yield report_ok("hard links", "they work: the ledger has entries")
    else:
        yield report_skipped("hard links", "only a write shows whether the file system has them; the first run tries")


IN_A_FOLDER: tuple[Check[Path], ...] = (
    Check("folder", folder),
    Check("listing", listing),
    Check("hard links", links),
    Check("space", space),
)


def _nearest(path: Path) -> Path:
    """Returns the folder itself, or its nearest existing parent."""
    return next(p for p in (path, *path.parents) if p.exists())


TITLE = "ledger"
SECONDS = 12.0
"""After that no further ledger is read: each answers within the rest of a check's time."""
HASTY_MS = 3_000
_SHOWN = 10


def examine_ledgers(feeds: Sequence[Feed], names: Collection[str]) -> list[Diagnosis]:
    """The state of the ledgers of these feeds, which share a lake. `names` are those of all feed files."""
    checks = [
        Check(TITLE, ledgers),
        Check(f"{TITLE}s", partial(without_files, names)),
        Check("catalogs", list_catalogs),
    ]
    return examine(tuple(feeds), checks)


def ledgers(feeds: Sequence[Feed]) -> Iterator[Diagnosis]:
    """Yields the findings about each feed, and one line for all feeds without any."""
    from sluice.resources.open_ports import share_ports  # late: it loads the clients

    until = time.monotonic() + SECONDS
    hasty = [_hasty(feed) for feed in feeds]
    with share_ports(hasty) as open_ports:
        results = map_parallel(lambda feed: _check_feed(open_ports, feed, until, alone=len(feeds) == 1), hasty)
    sound = [first for first, *_ in results if first.health is Health.OK]
    yield from (one for of_feed in results for one in of_feed if one.health is not Health.OK)
    if sound:
        yield sound[0] if len(feeds) == 1 else report_ok(f"{TITLE}s", f"{len(sound)} of {len(feeds)} are sound")


def _hasty(feed: Feed) -> Feed:
    waits = min(feed.kafka.bootstrap_timeout_ms or HASTY_MS, HASTY_MS)
    return feed.model_copy(update={"kafka": feed.kafka.model_copy(update={"bootstrap_timeout_ms": waits})})


def _check_feed(
    open_ports: Callable[[Feed], AbstractContextManager[Ports]], feed: Feed, until: float, *, alone: bool
) -> list[Diagnosis]:
    """Returns the findings, or that there are none. What passes by itself has lines of its own in other groups."""
    where = "" if alone else f"{feed.name}: "
    if time.monotonic() > until:
        return [report_skipped(f"{where}{TITLE}", "not read: the time limit was reached", f"sluice status {feed.name}")]
    try:
        with extras.name_missing(), open_ports(feed) as ports:
            ledger = Ledger(ports.lake, feed.stored, ports.clock, checkpoints=False)
            status = read_status_through(ports, feed, ledger, ())
            # Readers need no Kafka client: the group "Kafka" reports that it is not installed.
            setup = status.error.remedy if isinstance(status.error, SetupError) else None
            findings = [f for f in status.findings if (f.severe or not status.error) and f.remedy != setup]
            number = 0 if findings else ledger.read().number
    except SluiceError as error:
        return [report_skipped(f"{where}{TITLE}", f"not read: {error.message}")]
    if findings:
        titles = {"group": TITLE, "topics": "runs"}
        return [
            (report_failure if f.severe else report_warning)(f"{where}{titles.get(f.kind, f.kind)}", f.text, f.remedy)
            for f in findings
        ]
    entries = many(number, "entry", "entries") if number else "empty: nothing has landed yet"
    if status.error:
        text = f"{entries}; not compared with the group's offsets, which Kafka did not return"
    else:
        text = f"{entries}; no committed offset is of another ledger, or of an entry that is missing"
    return [report_ok(f"{where}{TITLE}", text)]


def list_catalogs(feeds: Sequence[Feed]) -> Iterator[Diagnosis]:
    """Yields the catalogs of Iceberg tables, which a backup of the lake lacks."""
    of_tables = [(d.table.iceberg, f.name) for f in feeds for d in f.table_feeds if d.table and d.table.iceberg]
    for address in dict.fromkeys(iceberg.address for iceberg, _ in of_tables):
        (first, feed), *more = [(i.name, name) for i, name in of_tables if i.address == address]
        others = f" and {many(len(more), 'more table')}" if more else ""
        back_up = f"back it up with the lake, or make tables again after a restore: sluice table rebuild {feed}"
        yield report_ok(
            "catalog", f"the catalog of table {first}{others} is outside of the lake ({address}): {back_up}"
        )


def without_files(names: Collection[str], feeds: Sequence[Feed]) -> Iterator[Diagnosis]:
    """The ledgers of feeds that were renamed or removed."""
    from sluice.resources.lake import open_lake

    if others := list_feeds_without_files(open_lake(feeds[0]), names):
        yield report_warning(
            f"{TITLE}s",
            f"without a feed file here: {join_first(others, _SHOWN)}",
            f"if a feed was renamed: {docs_command('deploying')} (Moving a feed); landed rows stay readable",
        )
