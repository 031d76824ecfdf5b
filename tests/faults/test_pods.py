"""A pod for each run, on one machine: processes with empty homes, which share a lake on S3 and Dagster's PostgreSQL.

`make production-like` runs it. The processes are those of infra/kubernetes: a code server that loads definitions and
evaluates a tick, runs by Dagster's own command, and `sluice` itself. Each has a new folder with only the feed file and
dagster.yaml, which is removed when it ends.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from kafka import KafkaProducer

from sluice.assets.specs.asset_specs import landed_key
from sluice.pipelines.util.units import HOUR, show_window
from sluice.resources.local.local_kafka import LocalKafka
from tests import postgres as servers
from tests.faults.account import Account
from tests.stores import Store

pytestmark = [pytest.mark.production, pytest.mark.kafka, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
DAY = 24 * HOUR
RECORDS = 50
CODE_SERVER = """
import json, sys, time
from datetime import UTC, datetime
from tests.faults.clock import shift_clock
with shift_clock(sys.argv[1]):
    import dagster as dg
    from sluice.assets.definitions import defs
    from sluice.assets.specs.asset_specs import landed_key
    key = landed_key("orders")
    partitions = list(defs.resolve_assets_def(key).partitions_def.get_partition_keys())
with dg.DagsterInstance.get() as instance:
    at = datetime.fromtimestamp(time.time(), UTC)
    context = dg.build_schedule_context(instance, at, repository_def=defs.get_repository_def())
    tick = defs.resolve_schedule_def("land_orders_windows").evaluate_tick(context)
    requests = [{"config": r.run_config, "tags": r.tags} for r in tick.run_requests]
    landed = sorted(instance.get_materialized_partitions(key))
    print(json.dumps({"partitions": partitions, "landed": landed, "requests": requests}))
"""


@dataclass(frozen=True)
class Cluster:
    """The pods of a feed. `shared` is the environment that infra/ gives each pod."""

    folder: Path
    feed: str
    shared: Mapping[str, str]
    numbers: Iterator[int]

    def run(self, program: str, *arguments: str, files: Mapping[str, str] | None = None) -> str:
        """Run a pod to its end. Returns its output."""
        home = self.folder / f"pod-{next(self.numbers)}"
        configuration = (ROOT / "infra" / "dagster.yaml").read_text()
        for path, text in {
            "feeds/orders.yaml": self.feed,
            "dagster/dagster.yaml": configuration,
            **(files or {}),
        }.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(text)
        environment = {"HOME": str(home), "DAGSTER_HOME": str(home / "dagster"), "SLUICE_PROJECT": str(home)}
        try:
            result = subprocess.run(
                [Path(sys.executable).with_name(program), *arguments],
                cwd=home,
                env={**os.environ, **self.shared, **environment},
                capture_output=True,
                text=True,
                timeout=400,
                check=False,
            )
        finally:
            shutil.rmtree(home)
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
        return result.stdout

    def serve(self) -> dict[str, Any]:
        """Returns the landed windows and today's requests of a code server, and its partitions in ten days."""
        output = self.run("python", "-c", CODE_SERVER, str(10 * DAY // 1000))
        answer: dict[str, Any] = json.loads(output.splitlines()[-1])
        return answer

    def execute(self, request: Mapping[str, Any]) -> None:
        """Run a request of the schedule."""
        job = ("job", "execute", "-m", "sluice.assets.definitions", "-j", "land_orders", "-c", "request.yaml")
        config = json.dumps(request["config"])
        self.run("dagster", *job, "--tags", json.dumps(request["tags"]), files={"request.yaml": config})


@pytest.fixture
def first(kafka: LocalKafka, fresh_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The start of the first of three hours eight days ago with records. The topic deletes nothing."""
    topic = fresh_topic(partitions=2)
    now = time.time_ns() // 1_000_000
    start = now - now % HOUR - 8 * DAY - 3 * HOUR
    with KafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
        for hour, i in itertools.product(range(3), range(RECORDS)):
            producer.send(topic, b'{"order_id": "%d"}' % i, partition=i % 2, timestamp_ms=start + hour * HOUR + i)
    monkeypatch.setenv("KAFKA_BOOTSTRAP", kafka.bootstrap)
    monkeypatch.setenv("ORDERS_TOPIC", topic)
    return start


@pytest.fixture
def cluster(tmp_path: Path, first: int, s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    programs = servers.find_programs()
    assert programs is not None, "no PostgreSQL here: infra/postgres.sh installs one"
    lines = {
        "topics": "${ORDERS_TOPIC}",
        "group": "${ORDERS_TOPIC}",
        "start": "earliest",
        "schedule": "own",
        "kafka": "{bootstrap: '${KAFKA_BOOTSTRAP}'}",
    } | s3_store.build_feed_settings()
    feed = "".join(f"{key}: {value}\n" for key, value in lines.items())
    with servers.run_server(programs) as postgres:
        shared = {
            "SLUICE_DAGSTER_DATABASE": postgres.build_address(postgres.create_database()),
            # As in the image, which has the compiled loops.
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"),
            "PYTHONPATH": str(ROOT),
        }
        monkeypatch.setenv("SLUICE_DAGSTER_DATABASE", shared["SLUICE_DAGSTER_DATABASE"])
        yield Cluster(tmp_path, feed, shared, itertools.count(1))


def test_code_server_lists_windows_of_runs_in_other_pods(cluster: Cluster, first: int, account: Account) -> None:
    hours = [show_window(first + n * HOUR) for n in range(3)]
    cluster.run("sluice", "run", "orders", "--window", hours[0])
    account.log(f"a pod landed {hours[0]}, eight days ago, and went away")
    answer = cluster.serve()
    assert hours[0] in answer["landed"]
    assert not {*hours[1:]} & {*answer["landed"]}
    assert answer["partitions"][0] == hours[0], "ten days later the landed hour is still a partition"
    request, *_ = answer["requests"]
    assert hours[1] in json.dumps(request), "the schedule requests the pending hours of eight days ago"
    cluster.execute(request)
    account.log("a pod landed the windows that the schedule requested")
    shutil.copy(ROOT / "infra" / "dagster.yaml", cluster.folder)
    with dg.DagsterInstance.from_config(str(cluster.folder)) as instance:
        assert {*hours} <= {*instance.get_materialized_partitions(landed_key("orders"))}
    cluster.run("sluice", "audit", "orders")
    account.log("a pod audited the lake")
