"""Everything at once: a secured Kafka, Spark workers without Sluice, a lake on S3, executors that die.

`sluice run` in separate processes over the systems of `secured`, then the checker's verdict.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.pipelines.feed.sections import WindowSettings
from tests.cluster.executors import list_executors
from tests.faults.account import Account
from tests.faults.kinds import HOUR_MS, HOURS
from tests.faults.secured import Systems, run_systems
from tests.resources.kafka.tools import wait_until
from tests.stores import Store

pytestmark = [pytest.mark.cluster, pytest.mark.loss, pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow]
PARTITIONS, RECORDS = 12, 150
"""Records of a partition in each hour."""


@pytest.fixture
def everything(tmp_path: Path, s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Systems]:
    """The three systems, for one test."""
    with run_systems(tmp_path, s3_store, monkeypatch) as systems:
        yield systems


def test_executors_killed_on_secured_kafka_with_a_lake_on_s3(everything: Systems, account: Account) -> None:
    field = everything.add_feed("orders", PARTITIONS, account)
    now = int(time.time() * 1000)
    closed = WindowSettings().last_boundary(now)  # at any minute of the hour
    for hour in range(HOURS, 0, -1):
        field.send(closed - hour * HOUR_MS + HOUR_MS // 2 - now, RECORDS)
    field.account.log(f"{field.partitions * HOURS * RECORDS:,} records in {HOURS} hours that are over")
    with field.run_producers():
        hours = [_format_hour(closed - HOURS * HOUR_MS), _format_hour(closed)]
        running = field.start_cli("--from", hours[0], "--to", hours[1], "--windows-per-run", str(HOURS))
        field.kill_executors(running, 2)
        assert field.wait_for_run(running, about="a run of hours").clean
    field.wait_until_stable()
    running = field.start_cli()
    field.kill_executors(running, 1)
    assert field.wait_for_run(running, about="a run to catch up").clean
    field.verify()
    wait_until(lambda: not list_executors(field.spark), 60)
    everything.check_no_secrets(account)


def _format_hour(at: int) -> str:
    return time.strftime("%Y-%m-%dT%H", time.gmtime(at / 1000))
