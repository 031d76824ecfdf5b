"""Everything at once: a Kafka that asks who comes, a Spark whose workers are bare, a lake on S3, executors that die.

Three brokers with TLS, SCRAM and ACLs, of which the feed's user has exactly the least; a standalone Spark with two
workers, to which the runs send the pack; `sluice run` as processes of its own. Then the checker's verdict.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaConsumer
from kafka import TopicPartition as Plain

from sluice.pipelines.feed.rights import rights_of
from sluice.resources.lakes import open_lake
from sluice.resources.local.granting import grant
from sluice.resources.local.kafka import LocalKafka
from sluice.resources.local.secured import USER
from sluice.resources.local.spark_cluster import LocalSpark
from sluice.resources.spark import pack
from tests.checker.gather import checked
from tests.checker.invariants import NAMES, Verdict
from tests.checker.producers import Noting
from tests.cluster.conftest import on
from tests.cluster.executors import executors
from tests.faults.account import SEED, Account
from tests.faults.arena import Arena
from tests.faults.field import HEALED, Field, Running
from tests.faults.kinds import HOUR_MS, HOURS
from tests.resources.kafka.tools import until
from tests.stores import Store

pytestmark = [pytest.mark.cluster, pytest.mark.loss, pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow]
PARTITIONS, RECORDS = 12, 150
"""Records of a partition in each hour."""
FIELDS = [{"note": "x" * 40}]
SLICES = 4
"""So many slices are finished between two kills."""


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
        """Transactions while the block lasts, one of three aborted: a producer with a right to all."""
        ended = threading.Event()
        thread = threading.Thread(target=self._transact, args=(self.noted("tied"), rate, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _transact(self, notes: Path, rate: int, ended: threading.Event) -> None:
        draw = random.Random(SEED)
        producer = Noting(notes, "tied", self.kafka.bootstrap, f"writes-{self.topic}", **self.kafka.client())
        while not ended.wait(PARTITIONS / rate):
            with producer.transaction(commits=draw.random() > 1 / 3):
                for partition in draw.sample(range(self.partitions), 4):
                    producer.send(self.topic, partition, 3, FIELDS)
        producer.close()

    def kill_executors(self, running: Running, times: int) -> None:
        """All of them, so many times, each time when some slices are finished. AssertionError if the run was faster."""
        lake, before = open_lake(self.feed()), 0
        place = f"_sluice/{self.name}/staging"

        def more() -> bool:
            assert running.process.poll() is None, running.wait().told
            return len(list(lake.list(place))) >= before + 2 * SLICES

        for _ in range(times):
            try:
                until(more, 600)
            except AssertionError:
                running.end()
                raise
            killed = executors(self.spark)
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            before = len(list(lake.list(place)))
            self.account.did(f"{len(killed)} executor(s) killed (SIGKILL) amid a landing")
            self.account.count("executors killed", len(killed))

    def proven(self, *_: Any, **__: Any) -> Verdict:
        verdict = checked(
            self.kafka, self.folder, self.root / "evidence", self.notes, HEALED, self.hands, self.observed, [self.topic]
        )
        self.account.checked(verdict)
        assert verdict.holds, str(verdict)
        assert set(NAMES) <= set(verdict.decided), str(verdict)
        return verdict

    def _ends(self, isolation: str) -> dict[Any, int]:
        given = {"isolation_level": isolation, "group_id": None, **self.kafka.client()}
        with KafkaConsumer(bootstrap_servers=self.kafka.bootstrap, **given) as consumer:
            ends: dict[Any, int] = consumer.end_offsets([Plain(self.topic, p) for p in range(self.partitions)])
        return ends


@pytest.fixture
def everything(tmp_path: Path, s3_store: Store, account: Account, monkeypatch: pytest.MonkeyPatch) -> Iterator[Secured]:
    """The three systems, for one test, and a feed over them whose user has exactly the rights that it needs."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "local")  # of whoever checks: the feed has its own, which travel with the tasks
    monkeypatch.setenv("AWS_DEFAULT_REGION", s3_store.settings.region or "")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_store.settings.endpoint or "")
    pack.pack()  # what takes long once is no part of a course
    own = {
        "SPARK_DAEMON_JAVA_OPTS": "-Dspark.authenticate=true -Dspark.authenticate.secret=known-to-workers",
        "SPARK_WORKER_OPTS": "",  # what executors printed stays: it is searched for passwords
    }
    with (
        LocalKafka(tmp_path / "kafka", brokers=3, keep=False, secure=True) as kafka,
        LocalSpark(tmp_path / "spark", environment=own) as spark,
    ):
        made = Secured(Arena(kafka, {}), tmp_path, "orders", PARTITIONS, account, spark=spark)
        with KafkaAdminClient(bootstrap_servers=kafka.bootstrap, **kafka.client()) as admin:
            wanted = {"retention.ms": "-1", "min.insync.replicas": "2"}
            shape = {"num_partitions": PARTITIONS, "replication_factor": 3, "configs": wanted}
            admin.create_topics({made.topic: shape}, wait_for_metadata=True)
        made.settings |= _lines(kafka, spark, s3_store, tmp_path)
        rights = [r for r in rights_of(made.feed()) if not r.optional]
        grant(kafka, rights)
        account.did(f"{USER} may {', '.join(map(str, rights))}, and nothing else")
        yield made


def _lines(kafka: LocalKafka, spark: LocalSpark, store: Store, root: Path) -> Mapping[str, str]:
    assert kafka.secured
    secret = root / "secret-of-spark"
    secret.write_text("known-to-workers")
    (root / "events").mkdir()
    conf = {
        "spark.task.maxFailures": "40",
        "spark.authenticate": "true",
        "spark.authenticate.secret": f"${{file:{secret}}}",
        "spark.network.crypto.enabled": "true",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"file:{root}/events",
        "spark.eventLog.compress": "false",  # or the search below would find nothing, whatever is there
    }
    password = f"${{file:{kafka.secured.folder / f'{USER}.password'}}}"
    login = kafka.secured.client(USER) | {"bootstrap": kafka.bootstrap, "sasl_plain_password": password}
    return {
        "kafka": json.dumps(login),
        "limits": "{slice_bytes: 8KiB, task_bytes: 16KiB}",
        **on(spark, conf=conf),
        **store.lines(),
    }


def test_everything_at_once(everything: Secured) -> None:
    field = everything
    now = int(time.time() * 1000)
    for hour in range(HOURS, 0, -1):
        field.send(-hour * HOUR_MS, RECORDS)
    field.account.did(f"{field.partitions * HOURS * RECORDS:,} records in {HOURS} hours that are over")
    with field.producing():
        hours = [_hour(now - HOURS * HOUR_MS), _hour(now)]
        running = field.start_cli("--from", hours[0], "--to", hours[1], "--windows-per-run", str(HOURS))
        field.kill_executors(running, 2)
        assert field.ended(running, about="a run of hours").clean
    field.settled()
    running = field.start_cli()
    field.kill_executors(running, 1)
    assert field.ended(running, about="a run to catch up").clean
    field.proven()
    until(lambda: not executors(field.spark), 60)
    _nothing_secret(field)


def _hour(at: int) -> str:
    return time.strftime("%Y-%m-%dT%H", time.gmtime(at / 1000))


def _nothing_secret(field: Secured) -> None:
    """No password stands in what Spark and the runs wrote."""
    assert field.kafka.secured
    secrets = [field.kafka.secured.password().encode(), b"known-to-workers"]
    written = [
        *(p for p in field.root.glob("run-*")),
        *(p for p in (field.root / "events").rglob("*")),
        *(p for p in field.spark.folder.glob("*.log")),
        *(p for p in field.spark.folder.glob("worker-*/app-*/*/std*")),
        *(p for p in (field.root / ".sluice").rglob("*")),
    ]
    files = [p for p in written if p.is_file()]
    assert any("events" in p.parts for p in files)
    assert [p for p in files if any(s in p.read_bytes() for s in secrets)] == []
    field.account.did(f"no password in {len(files)} files of logs and events")
