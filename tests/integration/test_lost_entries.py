"""A ledger that lost its newest entries, on a real Kafka: for any number of them a run is refused before it changes
anything, and after `sluice accept` the strictest audit reconciles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.audit.rescan import CurrentLog, rescan
from sluice.pipelines.audit.strict_audit import strict
from sluice.pipelines.batch.survey import take_survey
from sluice.pipelines.errors import EntriesLost
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import CommitMode
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger, checkpoint
from sluice.pipelines.operating.acceptance import accept_ledger
from sluice.pipelines.ports import Lake
from sluice.resources.lake import open_lake
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.spark.executor import Wiring
from tests.integration.conftest import Lines
from tests.integration.support import (
    FeedProject,
    commit_feed,
    consume_topic,
    open_feed_ledger,
    open_inline_ports,
    produce_values,
    read_rows,
    run,
)

ROOTS = ("_sluice/orders", "data/orders")


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], lake: Lines) -> FeedProject:
    feed_project = FeedProject(tmp_path, kafka, fresh_topic(partitions=2), lake())
    produce_values(feed_project, 40)
    return feed_project


def land(feed: Feed) -> None:
    run(feed)
    commit_feed(feed)


def check_reconciled(project: FeedProject, feed: Feed) -> None:
    """Check that `audit --strict --rescan` reconciles, and that every row is present once."""
    with open_inline_ports(feed) as ports, Wiring.of(feed).open(feed.isolation, feed.shape) as tools:
        ledger = open_feed_ledger(feed, ports)
        survey = take_survey(feed, ports, ledger)
        report = audit(ledger, ports.lake, hashes=True)
        log = CurrentLog(tools.fetcher, feed.isolation, survey.partitions)
        report = rescan(report, ledger, ports.lake, feed.shape, log)
        assert report.reconciled, report.problems
        assert strict(ledger, ports.lake, feed, survey, report).problems == ()
    assert read_rows(feed) == consume_topic(project.kafka, project.topic)


def read_files(lake: Lake) -> dict[str, bytes | None]:
    return {p: lake.get(p) for root in ROOTS for p in lake.list(root) if "/owners/" not in p}


def iterate_suffix_lengths(feed: Feed) -> Iterator[int]:
    yield from range(1, len(list(open_lake(feed).list(paths.log_folder("orders")))) + 1)


@pytest.mark.parametrize("fold", [False, True], ids=["", "with a checkpoint"])
@pytest.mark.parametrize("mode", [CommitMode.TRANSACTIONAL, CommitMode.NONE], ids=str)
def test_every_lost_suffix_is_detected_and_the_feed_continues(
    project: FeedProject, mode: CommitMode, fold: bool
) -> None:
    """In sequence: each loss hits the ledger that continued after the previous one."""
    feed = project.write_feed(commit=str(mode))
    land(feed)
    lake = open_lake(feed)
    for count in iterate_suffix_lengths(feed):
        if fold:
            state = Ledger(lake, "orders", lambda: 0).read()
            lake.put(paths.checkpoint_path("orders", state.number), checkpoint.dump(state))
            lake.remove(paths.tip_path("orders"))
        for path in list(lake.list(paths.log_folder("orders")))[-count:]:
            lake.remove(path)
        before = read_files(lake)
        with pytest.raises(EntriesLost, match="sluice accept orders ledger"):
            run(feed)
        assert read_files(lake) == before, "nothing was changed"
        with open_inline_ports(feed) as ports:
            accept_ledger(feed, ports, "the lake was restored from a backup of an hour ago")
        produce_values(project, 2)
        land(feed)
        check_reconciled(project, feed)
