"""The registry of peers, and a handle on a peer in its own process.

Promises: a peer's process and its children end with the `with` block that opened it; a failure is reported with
its own last words.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from bench.check import TYPED, PeerLayout
from bench.packages import make_python_path, packages
from bench.stand import PeerTask
from sluice.pipelines.errors import Failed, UsageError
from sluice.pipelines.model.receipts import ENGINE, EngineKind
from sluice.resources.local import java
from sluice.resources.spark.daemon import WORKERS_ENVIRONMENT

_GRACE_SECONDS = 20.0
_SPARK = "org.apache.spark"
_TOKENS = "spark-token-provider-kafka-0-10_2.13"
_IN_SPARK = (
    "org.scala-lang:scala-library",
    "org.scala-lang.modules:scala-parallel-collections_2.13",
    "org.apache.spark:spark-tags_2.13",
    "org.apache.hadoop:hadoop-client-api",
    "org.apache.hadoop:hadoop-client-runtime",
    "org.slf4j:slf4j-api",
    "com.google.code.findbugs:jsr305",
    "at.yawk.lz4:lz4-java",
    "org.lz4:lz4-java",
    "com.github.luben:zstd-jni",
    "org.xerial.snappy:snappy-java",
)
"""What Spark's connector asks for and pyspark's jars hold already."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Jars and packages."""

    artifacts: tuple[java.Artifact, ...] = ()
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to land a topic. `module` runs it; `warms_up` is false if the first landing is as fast as later ones; one
    that `validates` checks rows against the workload's contract: it lands below `data` and `quarantine`. `layout` is
    how its rows lie, unless they lie as Spark's connector would have them; `environment` is its process's own.

    A `program` lands in a new process each time, which the peer's own only starts. `tool` is a required command.
    `for_format` has additional needs by the format of values.
    """

    name: str
    title: str
    module: str
    warms_up: bool = True
    validates: bool = False
    layout: PeerLayout | None = None
    artifacts: tuple[java.Artifact, ...] = ()
    packages: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    program: bool = False
    tool: str = ""
    for_format: Mapping[str, Needs] = field(default_factory=dict, hash=False)

    def of(self, format_: str) -> Peer:
        """Returns the peer with all that it needs for values of this format."""
        if format_ not in self.for_format:
            return self
        more = self.for_format[format_]
        artifacts, needed = (*self.artifacts, *more.artifacts), (*self.packages, *more.packages)
        return replace(self, artifacts=artifacts, packages=needed)


SLUICE = Peer("sluice", "Sluice on Spark", "bench.peer_sluice", validates=True)
SLUICE_PROCESSES = Peer(
    "sluice-processes",
    "Sluice in processes",
    "bench.peer_sluice",
    validates=True,
    environment={ENGINE: EngineKind.PROCESSES},
)
SLUICE_APART = Peer(
    "sluice-apart",
    "Sluice, a file for each offset range",
    "bench.peer_sluice",
    environment={"SLUICE_BENCH_FILES_APART": "yes"},
)
_ROWS = {
    "placed": Peer("sluice-placed", "with a header as a column", "bench.peer_sluice"),
    # The header itself is hashed as well.
    "protected": Peer(
        "sluice-protected", "with the hash of a header", "bench.peer_sluice", layout=replace(TYPED, headers="")
    ),
    "split": Peer("sluice-split", "split in three by a field", "bench.peer_sluice"),
}
SLUICE_PLACED, SLUICE_PROTECTED, SLUICE_SPLIT = (
    replace(peer, environment={"SLUICE_BENCH_ROWS": rows}) for rows, peer in _ROWS.items()
)
SPARK = Peer(
    "spark",
    "Spark's Kafka connector",
    "bench.peer_spark",
    # The newest connector on Maven Central whose parts resolve; it runs on the pyspark that Sluice pins.
    artifacts=(
        java.Artifact(_SPARK, "spark-sql-kafka-0-10_2.13", "4.2.0", (*_IN_SPARK, f"{_SPARK}:{_TOKENS}")),
        java.Artifact(_SPARK, _TOKENS, "4.0.0", (*_IN_SPARK, "org.apache.kafka:kafka-clients")),
    ),
    for_format={
        "avro": Needs((java.Artifact(_SPARK, "spark-avro_2.13", "4.1.1", (*_IN_SPARK, "org.tukaani:xz")),)),
    },
)
_CONFLUENT, _ORJSON = "confluent-kafka==2.16.1", "orjson==3.13.0"
CONFLUENT_KAFKA = Peer(
    "confluent-kafka",
    "confluent-kafka loop",
    "bench.peer_confluent_kafka",
    warms_up=False,
    packages=(_CONFLUENT, _ORJSON),
    for_format={"avro": Needs(packages=("fastavro==1.13.1",))},
)
RUST = Peer("rust", "Rust: rdkafka, arrow, parquet", "bench.peer_rust", warms_up=False, program=True, tool="cargo")
POLARS = Peer(
    "polars",
    "confluent-kafka and Polars, a process for each core",
    "bench.peer_polars",
    warms_up=False,
    program=True,
    packages=(_CONFLUENT, "polars==2.1.0", "polars-runtime-32==2.1.0"),
)
_KAFKA_COLUMNS = PeerLayout(
    topic="kafka_topic",
    partition="kafka_partition",
    offset="kafka_offset",
    key="kafka_key",
    value="value",
    time="kafka_timestamp",
    time_type="0",
    headers="kafka_headers",
)
CHDB = Peer(
    "chdb",
    "chDB (ClickHouse's Kafka engine)",
    "bench.peer_chdb",
    warms_up=False,
    program=True,
    layout=_KAFKA_COLUMNS,
    # The newest whose Kafka engine starts: 4.4 shuts its background threads down before.
    packages=("chdb==3.6.0",),
)
_FLINK, _FLINK_VERSION = "org.apache.flink", "2.2.0"
FLINK = Peer(
    "flink",
    "Flink, batch SQL",
    "bench.peer_flink",
    layout=replace(
        _KAFKA_COLUMNS,
        time_type="CASE kafka_timestampType WHEN 'CreateTime' THEN 0 END",
        headers="map_entries(kafka_headers)",
        files="part-*",
    ),
    artifacts=(
        *(
            java.Artifact(_FLINK, f"flink-{name}", _FLINK_VERSION)
            for name in ("clients", "table-planner-loader", "table-runtime", "table-api-java-bridge")
        ),
        *(java.Artifact(_FLINK, f"flink-{name}", _FLINK_VERSION) for name in ("connector-files", "json", "parquet")),
        java.Artifact(_FLINK, "flink-connector-kafka", "5.0.0-2.2"),
    ),
)
_CONNECT, _ICEBERG = "org.apache.kafka", "org.apache.iceberg"
CONNECT = Peer(
    "connect",
    "Kafka Connect, Iceberg's sink",
    "bench.peer_connect",
    warms_up=False,
    program=True,
    # A record's key is its customer.
    layout=replace(
        _KAFKA_COLUMNS,
        key="encode(json_extract_string(decode(value), '$.customer'))",
        typed_key="encode(customer)",
        headers="",
    ),
    artifacts=(
        *(java.Artifact(_CONNECT, f"connect-{name}", "4.3.1") for name in ("runtime", "json", "transforms")),
        *(java.Artifact(_ICEBERG, f"iceberg-{name}", "1.12.0") for name in ("kafka-connect", "parquet", "orc")),
        java.Artifact("org.xerial", "sqlite-jdbc", "3.54.1.0"),
        java.Artifact("org.slf4j", "slf4j-simple", "2.0.18"),  # its words for the log
    ),
)
KAFKA_PYTHON = Peer(
    "kafka-python",
    "kafka-python loop",
    "bench.peer_kafka_python",
    warms_up=False,
    packages=("lz4==4.4.5", _ORJSON),
)
DLT = Peer(
    "dlt",
    "dlt's Kafka source",
    "bench.peer_dlt",
    layout=PeerLayout(
        topic="_kafka__topic",
        partition="_kafka__partition",
        offset="_kafka__offset",
        key="encode(_kafka__key)",
        value="encode(_kafka__data)",
        time="_kafka__ts__value",
        time_type="_kafka__ts__type - 1",
        headers="",
        files="data/[!_]*/*.parquet",
    ),
    packages=(
        "dlt==1.31.0",
        _CONFLUENT,
        # Dependencies of dlt that Sluice does not bring.
        _ORJSON,
        "croniter==7.0.0",
        "giturlparse==0.16.0",
        "humanize==4.17.0",
        "pathvalidate==3.3.1",
        "pendulum==3.3.0",
        "requirements-parser==0.13.1",
        "rich-argparse==1.8.0",
        "semver==3.1.1",
        "simplejson==4.3.0",
        "sqlglot==30.30.0",
        "tenacity==9.2.1",
    ),
)
DAFT = Peer(
    "daft",
    "Daft's read_kafka",
    "bench.peer_daft",
    layout=PeerLayout(
        topic="topic",
        partition='"partition"',
        offset='"offset"',
        key="key",
        value="value",
        time="make_timestamp_ms(timestamp_ms)",
        time_type="0",
        headers="",
    ),
    packages=("daft==0.7.26", _CONFLUENT),
)
BUDGET = Peer("budget", "Sluice's parts by themselves", "bench.budget", environment=WORKERS_ENVIRONMENT)
"""Not a peer that lands: it measures the parts of Sluice's work."""
PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        *(
            SLUICE,
            SLUICE_PROCESSES,
            SLUICE_APART,
            SPARK,
            RUST,
            POLARS,
            CHDB,
            FLINK,
            CONNECT,
            CONFLUENT_KAFKA,
            KAFKA_PYTHON,
            DAFT,
            DLT,
        ),
    )
}


def find_peer(name: str) -> Peer:
    """The peer of that name. Raises UsageError."""
    if name not in PEERS:
        raise UsageError(f"no peer {name!r}", remedy=f"peers: {', '.join(PEERS)}")
    return PEERS[name]


def select_available(peers: Iterable[Peer], note: Callable[[str], None]) -> list[Peer]:
    """The peers whose tools are on this machine; a note names each that is left out. Raises UsageError for none."""
    chosen = list(peers)
    able = [peer for peer in chosen if not peer.tool or shutil.which(peer.tool)]
    for peer in chosen:
        if peer not in able:
            note(f"{peer.title}: left out, since {peer.tool} is not on this machine")
    if not able:
        raise UsageError("no peer is left", remedy=f"install {chosen[0].tool}, or name other peers")
    return able


class Running:
    """A peer that stands by."""

    def __init__(self, peer: Peer, process: subprocess.Popen[str], log: Path) -> None:
        self.peer, self.pid = peer, process.pid
        self._process, self._log = process, log
        self.versions: dict[str, str] = self._answer()["versions"]

    def land(self, out: Path) -> dict[str, Any]:
        """Land the assigned topic below `out` and return the peer's answer. Raises Failed."""
        _write(self._process.stdin, json.dumps({"out": str(out)}))
        detail: dict[str, Any] = self._answer()["detail"]
        return detail

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            words = self._log.read_text(errors="replace").splitlines()[-25:]
            raise Failed(
                "\n".join([f"{self.peer.title} ended with {self._process.wait()}; its log:", *words]),
                remedy=f"read {self._log}, or leave this peer out with --peer",
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def running(peer: Peer, assignment: PeerTask, folder: Path) -> Iterator[Running]:
    """The peer, started and ready; it ends with the block. Its output goes to a log in `folder`."""
    log = folder / f"{peer.name}.log"
    with log.open("w") as words:
        process = subprocess.Popen(
            [sys.executable, "-m", peer.module],
            env=_environment(peer, folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
            start_new_session=True,
        )
    try:
        _write(process.stdin, assignment.to_json())
        yield Running(peer, process, log)
    except BaseException:
        _kill(process)
        raise
    finally:
        _end(process)


def _environment(peer: Peer, folder: Path) -> dict[str, str]:
    own = {"JAVA_HOME": str(java.java_home()), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    own |= make_python_path(*([packages(peer.packages, folder)] if peer.packages else []))
    return {**os.environ, **own, **peer.environment}


def connector_jars(peer: Peer) -> str:
    """The folder with the peer's jars, fetched when it is not there; empty when it needs none. Raises SetupError."""
    return str(java.jars(f"bench-{peer.name}", peer.artifacts)) if peer.artifacts else ""


def _write(pipe: IO[str] | None, line: str) -> None:
    # The end of a peer is reported when its answer is read.
    if pipe:
        with suppress(BrokenPipeError):
            pipe.write(line + "\n")
            pipe.flush()


def _end(process: subprocess.Popen[str]) -> None:
    """Close its input, so that it ends, and kill it if it does not."""
    for pipe in (process.stdin, process.stdout):
        if pipe:
            with suppress(BrokenPipeError):
                pipe.close()
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """End the peer and its children, which are in its session."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
