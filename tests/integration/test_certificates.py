"""Certificates that are renewed, and expire, during a landing: it continues, and no record is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from kafka import KafkaProducer

from sluice.pipelines.batch.land import land
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.feed.rights import rights_of
from sluice.pipelines.model.receipts import Outcome, TaskTraffic
from sluice.pipelines.ports import Job
from sluice.resources.kafka.cluster.cluster import KafkaCluster
from sluice.resources.liveness import new_owner
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.secured import grant, revoke
from sluice.resources.spark import executor
from tests.integration.support import CATCH_UP, InlineEngine, commit_feed, open_inline_ports, read_rows

pytestmark = pytest.mark.kafka
RECORDS = 30_000


class RenewingEngine(InlineEngine):
    """An engine that renews all certificates after the first offset range."""

    def __init__(self, secured: LocalKafka) -> None:
        self._secured = secured
        self.before = self.offset_ranges = 0

    def run(self, job: Job, tasks: Sequence[int]) -> list[Outcome]:
        work, outcomes = executor.TaskWork.of(job, tasks, tries=1), []
        for row in executor.run(work, range(len(work.queues))):
            sent = executor.sent_in(*row)
            if isinstance(sent, TaskTraffic):
                continue
            outcomes.append(sent)
            self.offset_ranges += 1
            if not self.before:
                self._secured.renew()
                self.before = self.offset_ranges
        return outcomes


def test_certificates_are_renewed_during_a_landing_without_loss(
    secured: LocalKafka, tmp_path: Path, fresh_topic: Callable[..., str]
) -> None:
    """The brokers' and the client's, while connections of the landing are open; each task connects again."""
    assert secured.secured is not None
    topic = fresh_topic(partitions=3, cluster=secured, name="renewed")
    with closing(KafkaProducer(bootstrap_servers=secured.bootstrap, linger_ms=20, **secured.client())) as producer:
        for n in range(RECORDS):
            producer.send(topic, b"%d" % n, partition=n % 3)
        producer.flush()
    path = tmp_path / "feeds" / "orders.yaml"
    path.parent.mkdir()
    section = secured.secured.section(secured.certificate_bootstrap, tmp_path, by_certificate=True)
    # Small tasks, so that there are many in sequence.
    feed_lines = [f"topics: {topic}", "start: earliest", "limits: {slice_bytes: 20000, task_bytes: 20000}"]
    path.write_text("\n".join([*section, *feed_lines, ""]))
    feed = load_feed(path, {})
    old_certificate = secured.secured.broker_file(1).read_bytes()
    grant(secured, rights_of(feed))
    try:
        with open_inline_ports(feed) as ports:
            engine = RenewingEngine(secured)
            land(feed, replace(ports, engine=engine), CATCH_UP, new_owner("test"), lambda progress: None).check()
        assert 0 < engine.before < engine.offset_ranges
        commit_feed(feed)
        with closing(KafkaCluster(feed.kafka)) as cluster:
            assert sum(p.last_stable_offset for p in cluster.partitions([topic], feed.isolation)) == RECORDS
    finally:
        revoke(secured, rights_of(feed))
    assert secured.secured.broker_file(1).read_bytes() != old_certificate
    assert sorted(int(r["value"]) for r in read_rows(feed)) == list(range(RECORDS))
