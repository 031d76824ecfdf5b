"""What a course has in which everything is asked for: a Kafka that asks who comes, bare Spark workers, a lake on S3.

Three brokers with TLS, SCRAM and ACLs, of which each feed's user has exactly the least; a standalone Spark with two
workers, to which the runs send the pack; a store that speaks S3.
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
from tests.checker.gather import checked
from tests.checker.invariants import NAMES, Verdict
from tests.checker.producers import Noting
from tests.cluster.conftest import on
from tests.cluster.executors import executors
from tests.faults.account import SEED, Account
from tests.faults.arena import Arena
from tests.faults.field import HEALED, Field, Running
from tests.faults.producers import transactions
from tests.resources.kafka.tools import until
from tests.stores import Store

FIELDS = [{"note": "x" * 40}]
RANGES = 4
"""So many offset ranges are finished between two kills."""
_SPARK_SECRET = "known-to-workers"


@dataclass
class Secured(Field):
    """A field on a Kafka that asks who comes: whoever is not Sluice comes as its administrator."""

    spark: LocalSpark = field(kw_only=True)

    @property
    def kafka(self) -> LocalKafka:
        return self.arena.kafka

    def send(self, ahead_ms: int, count: int) -> None:
        """So many records to each partition, stamped by a clock that is so far ahead."""
        notes = self.noted("sent")
        producer = Noting(notes, notes.stem, self.kafka.bootstrap, ahead_ms=ahead_ms, **self.kafka.client())
        for partition in range(self.partitions):
            producer.send(self.topic, partition, count, FIELDS)
        producer.close()

    @contextmanager
    def producing(self, rate: int = 200) -> Iterator[None]:
        """Transactions while the block lasts, by a producer with a right to all: about so many records a second."""
        pause = 2 * self.partitions * 2.25 / rate  # records of half the partitions, 4.5 of each, at half the pause
        notes = self.noted("tied")
        with transactions(self.arena, self.topic, self.partitions, notes, SEED, FIELDS, pause):
            yield

    @cached_property
    def lake(self) -> Lake:
        return open_lake(self.feed())

    def kill_executors(self, running: Running, times: int) -> None:
        """All of them, so many times, each time when some offset ranges are finished. AssertionError if the run was
        faster.
        """
        before = 0

        def more() -> bool:
            assert running.process.poll() is None, running.wait().told
            return self.staged() >= before + 2 * RANGES

        for _ in range(times):
            try:
                until(more, 600)
            except AssertionError:
                running.end()
                raise
            killed = executors(self.spark)
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            before = self.staged()
            self.account.did(f"{len(killed)} executor(s) killed (SIGKILL) amid a landing")
            self.account.count("executors killed", len(killed))

    def staged(self) -> int:
        """How many files tasks have staged, of batches that are not published."""
        return len(list(self.lake.list(f"_sluice/{self.name}/staging")))

    def proven(self, *_: Any, **__: Any) -> Verdict:
        verdict = checked(
            self.kafka,
            self.folder,
            self.root / f"evidence-{self.name}",
            self.notes,
            HEALED,
            self.hands,
            self.observed,
            [self.topic],
        )
        self.account.checked(verdict)
        assert verdict.holds, str(verdict)
        assert set(NAMES) <= set(verdict.decided), str(verdict)
        return verdict


@dataclass(frozen=True)
class Systems:
    """The three of them, and the project's folder."""

    root: Path
    kafka: LocalKafka
    spark: LocalSpark
    store: Store

    def feed(self, name: str, partitions: int, account: Account, **conf: str) -> Secured:
        """A feed with a topic of its own, whose user has exactly the rights that it needs. `conf`: more of Spark's."""
        made = Secured(Arena(self.kafka, {}), self.root, name, partitions, account, spark=self.spark, name=name)
        with KafkaAdminClient(bootstrap_servers=self.kafka.bootstrap, **self.kafka.client()) as admin:
            wanted = {"retention.ms": "-1", "min.insync.replicas": "2"}
            shape = {"num_partitions": partitions, "replication_factor": 3, "configs": wanted}
            admin.create_topics({made.topic: shape}, wait_for_metadata=True)
        made.settings |= self._lines(conf)
        rights = [r for r in rights_of(made.feed()) if not r.optional]
        grant(self.kafka, rights)
        account.did(f"{USER} may {', '.join(map(str, rights))}, and nothing else")
        return made

    def _lines(self, more: Mapping[str, str]) -> Mapping[str, str]:
        assert self.kafka.secured
        conf = {
            "spark.task.maxFailures": "40",
            "spark.authenticate": "true",
            "spark.authenticate.secret": f"${{file:{self._secret}}}",
            "spark.network.crypto.enabled": "true",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": f"file:{self._events}",
            "spark.eventLog.compress": "false",  # or `no_secrets` would find nothing, whatever is there
            **more,
        }
        password = f"${{file:{self.kafka.secured.folder / f'{USER}.password'}}}"
        login = self.kafka.secured.client(USER) | {"bootstrap": self.kafka.bootstrap, "sasl_plain_password": password}
        return {
            "kafka": json.dumps(login),
            "limits": "{slice_bytes: 8KiB, task_bytes: 16KiB}",
            **on(self.spark, conf=conf),
            **self.store.lines(),
        }

    def prepare(self) -> None:
        """Spark's secret and the folder of its events."""
        self._secret.write_text(_SPARK_SECRET)
        self._events.mkdir()

    @property
    def _secret(self) -> Path:
        return self.root / "secret-of-spark"

    @property
    def _events(self) -> Path:
        return self.root / "events"

    def no_secrets(self, account: Account, *more: Path) -> None:
        """No password stands in what Spark and the runs wrote, nor in what lies in these folders."""
        assert self.kafka.secured
        secrets = [self.kafka.secured.password().encode(), _SPARK_SECRET.encode()]
        written = [
            *self.root.glob("run-*"),
            *self._events.rglob("*"),
            *self.spark.folder.glob("*.log"),
            *self.spark.folder.glob("worker-*/app-*/*/std*"),
            *(self.root / ".sluice").rglob("*"),
            *(p for folder in more for p in folder.rglob("*")),
        ]
        files = [p for p in written if p.is_file()]
        assert any("events" in p.parts for p in files)
        assert [p for p in files if any(s in p.read_bytes() for s in secrets)] == []
        account.did(f"no password in {len(files)} files of logs and events")


@contextmanager
def systems(root: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Systems]:
    """All of them in a folder, thrown away at the end. Who checks has the store's keys: feeds have their own, which
    travel with the tasks."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "local")
    monkeypatch.setenv("AWS_DEFAULT_REGION", store.settings.region or "")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", store.settings.endpoint or "")
    pack_archive.pack()  # what takes long once is no part of a course
    own = {
        "SPARK_DAEMON_JAVA_OPTS": f"-Dspark.authenticate=true -Dspark.authenticate.secret={_SPARK_SECRET}",
        "SPARK_WORKER_OPTS": "",  # what executors printed stays: it is searched for passwords
    }
    with (
        LocalKafka(root / "kafka", brokers=3, keep=False, secure=True) as kafka,
        LocalSpark(root / "spark", environment=own) as spark,
    ):
        made = Systems(root, kafka, spark, store)
        made.prepare()
        yield made
