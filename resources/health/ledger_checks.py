"""The ledgers of a lake: whether each feed's is whole and its group is its own, and which ones have no feed file.

Read-only. Ends in time for any number of feeds: the remaining ledgers are reported as not read.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from sluice.pipelines.batch.survey import topics_read
from sluice.pipelines.errors import LedgerCorrupt, LedgerTooNew, Refused, SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import CommitMode
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ledger.marks import check_marks, check_owner
from sluice.pipelines.ledger.neighbours import feeds_without_files
from sluice.pipelines.model.health import Diagnosis, Health, of_error, ok, skipped, warning
from sluice.pipelines.model.pages import page
from sluice.pipelines.ports import Ports
from sluice.pipelines.publishing import lost
from sluice.pipelines.util.parallel import each
from sluice.pipelines.util.units import many
from sluice.resources.health.run_checks import Check, examine

if TYPE_CHECKING:
    from collections.abc import Callable

TITLE = "ledger"
SECONDS = 12.0
"""After that no further ledger is read: each answers within the rest of a check's time."""
HASTY_MS = 3_000
_SHOWN = 10


def examine_ledgers(feeds: Sequence[Feed], names: Collection[str]) -> list[Diagnosis]:
    """The state of the ledgers of these feeds, which share a lake. `names` are those of all feed files."""
    return examine(tuple(feeds), [Check(TITLE, ledgers), Check(f"{TITLE}s", partial(without_files, names))])


def ledgers(feeds: Sequence[Feed]) -> Iterator[Diagnosis]:
    """One line for each ledger that is not sound, and one for all others."""
    from sluice.resources.open_ports import shared_edges  # late: it loads the clients

    until = time.monotonic() + SECONDS
    hasty = [_hasty(feed) for feed in feeds]
    with shared_edges(hasty) as open_ports:
        results = each(lambda feed: _ledger(open_ports, feed, until, alone=len(feeds) == 1), hasty)
    yield from (one for one in results if one.health is not Health.OK)
    if sound := [one for one in results if one.health is Health.OK]:
        yield sound[0] if len(feeds) == 1 else ok(f"{TITLE}s", f"{len(sound)} of {len(feeds)} are sound")


def _hasty(feed: Feed) -> Feed:
    waits = min(feed.kafka.bootstrap_timeout_ms or HASTY_MS, HASTY_MS)
    return feed.model_copy(update={"kafka": feed.kafka.model_copy(update={"bootstrap_timeout_ms": waits})})


def _ledger(
    open_ports: Callable[[Feed], AbstractContextManager[Ports]], feed: Feed, until: float, *, alone: bool
) -> Diagnosis:
    """The state of one ledger. Errors of the lake or of Kafka have lines of their own in other groups."""
    title = TITLE if alone else f"{feed.name}: {TITLE}"
    if time.monotonic() > until:
        return skipped(title, "not read: the others took all the time", f"sluice status {feed.name}")
    try:
        with open_ports(feed) as edges:
            return _in_lake_and_group(title, feed, edges)
    except (Refused, LedgerCorrupt, LedgerTooNew) as error:
        return of_error(title, error)
    except SluiceError as error:
        return skipped(title, f"not read: {error.message}")


def _in_lake_and_group(title: str, feed: Feed, edges: Ports) -> Diagnosis:
    ledger = Ledger(edges.lake, feed.name, edges.clock, checkpoints=False)
    number = ledger.read().number
    lost.check_recent(ledger, edges.lake, feed)
    entries = many(number, "entry", "entries") if number else "empty: nothing has landed yet"
    try:
        partitions = edges.cluster.partitions(topics_read(feed, edges.cluster), feed.isolation)
        committed = edges.group.committed([p.tp for p in partitions])
    except SluiceError:
        return ok(title, f"{entries}; not compared with the group's offsets, which Kafka did not tell")
    state = check_marks(ledger, ledger.read(), committed)
    check_owner(ledger, state, committed, commits=feed.commit is not CommitMode.NONE)
    return ok(title, f"{entries}; no committed offset is of another ledger, or of an entry that is missing")


def without_files(names: Collection[str], feeds: Sequence[Feed]) -> Iterator[Diagnosis]:
    """The ledgers of feeds that were renamed or removed."""
    from sluice.resources.lake.open_lake import open_lake

    if others := feeds_without_files(open_lake(feeds[0]), names):
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        yield warning(
            f"{TITLE}s",
            f"without a feed file here: {', '.join(others[:_SHOWN])}{more}",
            f"if a feed was renamed: {page('deploying')} (Moving a feed); what landed stays readable",
        )
