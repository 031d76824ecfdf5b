"""Everything at once: a Kafka that asks who comes, a Spark whose workers are bare, a lake on S3, executors that die.

`sluice run` as processes of its own over the systems of `secured`. Then the checker's verdict.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.pipelines.feed.sections import WindowSettings
from tests.cluster.executors import executors
from tests.faults.account import Account
from tests.faults.kinds import HOUR_MS, HOURS
from tests.faults.secured import Systems, systems
from tests.resources.kafka.tools import until
from tests.stores import Store

pytestmark = [pytest.mark.cluster, pytest.mark.loss, pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow]
PARTITIONS, RECORDS = 12, 150
"""Records of a partition in each hour."""


@pytest.fixture
def everything(tmp_path: Path, s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Systems]:
    """The three systems, for one test."""
    with systems(tmp_path, s3_store, monkeypatch) as made:
        yield made


def test_everything_at_once(everything: Systems, account: Account) -> None:
    field = everything.feed("orders", PARTITIONS, account)
    now = int(time.time() * 1000)
    closed = WindowSettings().last_boundary(now)  # whatever the minute is
    for hour in range(HOURS, 0, -1):
        field.send(closed - hour * HOUR_MS + HOUR_MS // 2 - now, RECORDS)
    field.account.did(f"{field.partitions * HOURS * RECORDS:,} records in {HOURS} hours that are over")
    with field.producing():
        hours = [_hour(closed - HOURS * HOUR_MS), _hour(closed)]
        running = field.start_cli("--from", hours[0], "--to", hours[1], "--windows-per-run", str(HOURS))
        field.kill_executors(running, 2)
        assert field.ended(running, about="a run of hours").clean
    field.settled()
    running = field.start_cli()
    field.kill_executors(running, 1)
    assert field.ended(running, about="a run to catch up").clean
    field.proven()
    until(lambda: not executors(field.spark), 60)
    everything.no_secrets(account)


def _hour(at: int) -> str:
    return time.strftime("%Y-%m-%dT%H", time.gmtime(at / 1000))
