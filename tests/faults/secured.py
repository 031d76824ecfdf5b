"""A production-like system: a secured Kafka, Spark workers without Sluice, a lake on S3.

Three brokers with TLS, SCRAM and ACLs that give each feed's user the least rights; a standalone Spark with two workers,
to which the runs send the pack; a store with the S3 API.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient

from bench.spark_cluster import LocalSpark
from sluice.pipelines.feed.rights import rights_of
from sluice.pipelines.ports import Lake
from sluice.resources.lake import open_lake
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.secured import USER, grant
from sluice.resources.spark import pack_archive
from tests.checker.gather import check_local
from tests.checker.invariants import NAMES, Verdict
from tests.checker.producers import Noting
from tests.cluster.conftest import configure_spark
from tests.cluster.executors import list_executors
from tests.faults.account import SEED, Account
from tests.faults.arena import Arena
from tests.faults.field import HEALED, Field, Running
from tests.faults.producers import run_transactions
from tests.resources.kafka.tools import wait_until
from tests.stores import Store

FIELDS = [{"note": "x" * 40}]
RANGES = 4
"""Offset ranges that finish between two kills."""
_SPARK_SECRET = "known-to-workers"


@dataclass
class Secured(Field):
    """A field on a secured Kafka. All clients but Sluice log in as administrator."""

    spark: LocalSpark = field(kw_only=True)

    @property
    def kafka(self) -> LocalKafka:
        return self.arena.kafka

    def send(self, ahead_ms: int, count: int) -> None:
        """Produce `count` records to each partition, with timestamps shifted by `ahead_ms`."""
        notes = self.add_notes("sent")
        producer = Noting(notes, notes.stem, self.kafka.bootstrap, ahead_ms=ahead_ms, **self.kafka.client())
        for partition in range(self.partitions):
            producer.send(self.topic, partition, count, FIELDS)
        producer.close()

    @contextmanager
    def run_producers(self, rate: int = 200) -> Iterator[None]:
        """Run transactions of about `rate` records a second inside the block, as administrator."""
        pause = 2 * self.partitions * 2.25 / rate  # records of half the partitions, 4.5 of each, at half the pause
        notes = self.add_notes("tied")
        with run_transactions(self.arena, self.topic, self.partitions, notes, SEED, FIELDS, pause):
            yield

    @cached_property
    def lake(self) -> Lake:
        return open_lake(self.write_feed())

    def kill_executors(self, running: Running, times: int) -> None:
        """Kill all executors `times` times, each time after some more offset ranges.

        AssertionError if the run ends before.
        """
        before = 0

        def has_staged_more() -> bool:
            assert running.process.poll() is None, running.wait().summary
            return self.count_staged() >= before + 2 * RANGES

        for _ in range(times):
            try:
                wait_until(has_staged_more, 600)
            except AssertionError:
                running.end()
                raise
            killed = list_executors(self.spark)
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            before = self.count_staged()
            self.account.log(f"{len(killed)} executor(s) killed (SIGKILL) amid a landing")
            self.account.count("executors killed", len(killed))

    def count_staged(self) -> int:
        """Returns the number of staged files of unpublished batches."""
        return len(list(self.lake.list(f"_sluice/{self.name}/staging")))

    def verify(self, *_: Any, **__: Any) -> Verdict:
        verdict = check_local(
            self.kafka,
            self.folder,
            self.root / f"evidence-{self.name}",
            self.notes,
            HEALED,
            self.foreign_commits,
            self.observed_entries,
            [self.topic],
        )
        self.account.record_verdict(verdict)
        assert verdict.holds, str(verdict)
        assert set(NAMES) <= set(verdict.decided), str(verdict)
        return verdict


@dataclass(frozen=True)
class Systems:
    """Kafka, Spark, the store, and the project's folder."""

    root: Path
    kafka: LocalKafka
    spark: LocalSpark
    store: Store

    def add_feed(self, name: str, partitions: int, account: Account, **conf: str) -> Secured:
        """Add a feed with a topic, and grant its user exactly the needed rights. `conf` adds Spark settings."""
        feed = Secured(Arena(self.kafka, {}), self.root, name, partitions, account, spark=self.spark, name=name)
        with KafkaAdminClient(bootstrap_servers=self.kafka.bootstrap, **self.kafka.client()) as admin:
            config = {"retention.ms": "-1", "min.insync.replicas": "2"}
            spec = {"num_partitions": partitions, "replication_factor": 3, "configs": config}
            admin.create_topics({feed.topic: spec}, wait_for_metadata=True)
        feed.settings |= self._build_settings(conf)
        rights = [r for r in rights_of(feed.write_feed()) if not r.optional]
        grant(self.kafka, rights)
        account.log(f"{USER} may {', '.join(map(str, rights))}, and nothing else")
        return feed

    def _build_settings(self, more: Mapping[str, str]) -> Mapping[str, str]:
        assert self.kafka.secured
        conf = {
            "spark.task.maxFailures": "40",
            "spark.authenticate": "true",
            "spark.authenticate.secret": f"${{file:{self._secret}}}",
            "spark.network.crypto.enabled": "true",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": f"file:{self._events}",
            "spark.eventLog.compress": "false",  # `check_no_secrets` reads plain text
            **more,
        }
        password = f"${{file:{self.kafka.secured.folder / f'{USER}.password'}}}"
        login = self.kafka.secured.client(USER) | {"bootstrap": self.kafka.bootstrap, "sasl_plain_password": password}
        return {
            "kafka": json.dumps(login),
            "limits": "{slice_bytes: 8KiB, task_bytes: 16KiB}",
            **configure_spark(self.spark, conf=conf),
            **self.store.build_feed_settings(),
        }

    def prepare(self) -> None:
        """Write Spark's secret and create its event folder."""
        self._secret.write_text(_SPARK_SECRET)
        self._events.mkdir()

    @property
    def _secret(self) -> Path:
        return self.root / "secret-of-spark"

    @property
    def _events(self) -> Path:
        return self.root / "events"

    def check_no_secrets(self, account: Account, *folders: Path) -> None:
        """Assert that no password is in the files of Spark, of the runs, and of these folders."""
        assert self.kafka.secured
        secrets = [self.kafka.secured.password().encode(), _SPARK_SECRET.encode()]
        paths = [
            *self.root.glob("run-*"),
            *self._events.rglob("*"),
            *self.spark.folder.glob("*.log"),
            *self.spark.folder.glob("worker-*/app-*/*/std*"),
            *(self.root / ".sluice").rglob("*"),
            *(p for folder in folders for p in folder.rglob("*")),
        ]
        files = [p for p in paths if p.is_file()]
        assert any("events" in p.parts for p in files)
        assert [p for p in files if any(s in p.read_bytes() for s in secrets)] == []
        account.log(f"no password in {len(files)} files of logs and events")


@contextmanager
def run_systems(root: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Systems]:
    """Run all three systems in a folder and delete it at the end.

    The environment's keys for the store are the checker's. Feeds have their own, which travel with the tasks.
    """
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "local")
    monkeypatch.setenv("AWS_DEFAULT_REGION", store.settings.region or "")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", store.settings.endpoint or "")
    pack_archive.pack()  # slow the first time
    environment = {
        "SPARK_DAEMON_JAVA_OPTS": f"-Dspark.authenticate=true -Dspark.authenticate.secret={_SPARK_SECRET}",
        "SPARK_WORKER_OPTS": "",  # keeps the output of executors, which is searched for passwords
    }
    with (
        LocalKafka(root / "kafka", brokers=3, keep=False, secure=True) as kafka,
        LocalSpark(root / "spark", environment=environment) as spark,
    ):
        systems = Systems(root, kafka, spark, store)
        systems.prepare()
        yield systems
