"""Stores that fail during runs on a real Kafka: one clear error each, and every row once after recovery."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer

from sluice.cli.main import main
from sluice.pipelines.errors import LakeUnavailable, NotAuthorized, SetupError, SluiceError, Unknown
from sluice.pipelines.feed.feed import Feed
from sluice.resources.liveness import new_owner
from sluice.resources.local.local_kafka import LocalKafka
from tests.clouds import DELETES, RETENTION, CloudStore
from tests.integration.support import FeedProject, commit_feed, consume_topic, read_rows, rescan_feed, run
from tests.resources.lake.s3_faults import Proxy, Rule, run_proxy

pytest.importorskip("obstore")
COUNT = 40


@dataclass(frozen=True)
class Project:
    """A feed whose lake is in a store behind a proxy, over a topic of two partitions."""

    folder: FeedProject
    store: CloudStore
    proxy: Proxy
    address: str

    def make_feed(self, store: CloudStore | None = None, **settings: Any) -> Feed:
        store = (store or self.store).pass_through(self.proxy.endpoint)
        store = replace(store, settings=store.settings.model_copy(update={"retries": 1, **settings}))
        return self.folder.write_feed(**{**store.build_feed_settings(), "lake": self.address})

    def produce(self) -> None:
        with KafkaProducer(bootstrap_servers=self.folder.kafka.bootstrap) as producer:
            for number in range(COUNT):
                producer.send(self.folder.topic, b"%d" % number, partition=number % 2)

    def land(self, feed: Feed) -> None:
        """Land with the pid of a process that has ended, so that later runs find the owner dead."""
        ended = subprocess.Popen(["true"])
        ended.wait()
        run(feed, owner=replace(new_owner("test"), pid=ended.pid))
        commit_feed(feed)

    def fail(self, feed: Feed, *kinds: type[SluiceError]) -> SluiceError:
        """Expect one of these errors from a run. Returns it."""
        with pytest.raises(kinds) as failed:
            self.land(feed)
        assert failed.value.remedy
        return failed.value

    def recover(self) -> None:
        """Land the rest by another run without faults, and check that `sluice audit --rescan` agrees with Kafka."""
        self.proxy.rules.clear()
        feed = self.make_feed(retries=5)
        self.land(feed)
        assert rescan_feed(feed).reconciled
        assert read_rows(feed) == consume_topic(self.folder.kafka, self.folder.topic)


@pytest.fixture(params=["azure", "google"])
def project(
    tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], request: pytest.FixtureRequest
) -> Iterator[Project]:
    store: CloudStore = request.getfixturevalue(f"{request.param}_store")
    with run_proxy(store.settings.endpoint or "") as proxy:
        project = Project(FeedProject(tmp_path, kafka, fresh_topic(partitions=2)), store, proxy, store.make_address())
        project.produce()
        project.land(project.make_feed())
        project.produce()
        yield project


def count_requests(project: Project) -> int:
    """Count the requests of a run without faults."""
    project.proxy.requests.clear()
    project.land(project.make_feed())
    project.produce()
    return len(project.proxy.requests)


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_store_that_becomes_unreachable_during_a_run_is_reported(project: Project, share: float) -> None:
    before = int(count_requests(project) * share)
    project.proxy.rules[:] = [Rule(".", "pass", times=before), Rule(".", "reset", times=-1)]
    project.fail(project.make_feed(), LakeUnavailable, Unknown)
    project.recover()


def test_run_waits_for_a_temporarily_unreachable_store(project: Project) -> None:
    before = count_requests(project) // 2
    project.proxy.rules[:] = [Rule(".", "pass", times=before), Rule(".", "reset", times=12)]
    project.land(project.make_feed(retries=12))
    project.recover()


@pytest.mark.parametrize("status", [429, 500, 503])
def test_transient_refusals_are_retried(project: Project, status: int) -> None:
    kinds = ("^PUT .*log", "^PUT .*staging", "^PUT .*data", "^GET .*(comp=list|list-type)", "^HEAD", DELETES)
    project.proxy.rules[:] = [Rule(kind, "refuse", status=status, code="ServerBusy") for kind in kinds]
    project.land(project.make_feed(retries=3))
    assert sum(rule.times for rule in project.proxy.rules) <= 1, "all but one were played"
    project.recover()


def test_persistent_refusals_are_one_error(project: Project) -> None:
    project.proxy.rules[:] = [Rule("^PUT .*log", "refuse", times=-1, status=503, code="ServerBusy")]
    failed = project.fail(project.make_feed(), LakeUnavailable, Unknown)
    assert "run again" in failed.remedy
    project.recover()


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_credentials_that_expire_during_a_run_are_reported(project: Project, share: float) -> None:
    before = int(count_requests(project) * share)
    refusal: dict[str, Any] = {"status": 401 if project.store.scheme == "gs" else 403, "code": "AuthenticationFailed"}
    project.proxy.rules[:] = [Rule(".", "pass", times=before), Rule(".", "refuse", times=-1, **refusal)]
    failed = project.fail(project.make_feed(), NotAuthorized)
    assert failed.remedy
    project.recover()


@pytest.mark.parametrize("project", ["azure"], indirect=True)
@pytest.mark.parametrize("at", ["^PUT .*staging", "^PUT .*log", "^PUT .*data", DELETES])
def test_sas_token_that_expires_during_a_run_is_reported(project: Project, at: str) -> None:
    """A real token: a request is delayed until the token has expired."""
    feed = project.make_feed(project.store.with_token("rcwdl", 8))
    end = feed.azure.token_end if feed.azure else None
    assert end is not None
    rule = Rule(at, "slow")
    project.proxy.rules[:] = [rule]
    rule.seconds = max(0.0, end.timestamp() - time.time()) + 1
    failed = project.fail(feed, NotAuthorized)
    assert "the SAS token for az://lake" in failed.message
    assert "expired at" in failed.message
    assert "azure.sas_token" in failed.remedy
    project.recover()


def test_retention_lock_on_a_lake_is_reported(project: Project) -> None:
    """The store accepts new objects and refuses to delete any."""
    lock = RETENTION[project.store.scheme]
    project.proxy.rules[:] = [Rule(DELETES, "refuse", times=-1, **lock)]
    failed = project.fail(project.make_feed(), SetupError)
    assert "a retention policy keeps" in failed.message
    assert "without retention" in failed.remedy
    project.recover()


@pytest.mark.parametrize("project", ["azure"], indirect=True)
def test_reader_needs_only_two_sas_permissions(project: Project) -> None:
    feed = project.make_feed(project.store.with_token("rl"))
    folder = ["--project", str(project.folder.root)]
    assert main(["status", "orders", *folder]) == 0
    assert len(read_rows(feed)) == COUNT
    assert main(["audit", "orders", *folder]) == 0
    assert main(["doctor", "orders", *folder]) == 1, "it lacks the rights of a writer"
