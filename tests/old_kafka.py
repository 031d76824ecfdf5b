"""Kafka before 4.0 as an oracle: a 3.9.1 broker in ZooKeeper mode, and the old high-level consumers.

Both run on Java 17; the jars are fetched once from Maven Central, as those of the local Kafka are.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sluice.resources.local import java
from sluice.resources.local.java import Artifact
from sluice.resources.local.process import Process, spawn
from tests.zookeepers import LocalZooKeeper, free_port

BROKER = (Artifact("org.apache.kafka", "kafka_2.13", "3.9.1"), Artifact("org.slf4j", "slf4j-simple", "1.7.36"))
VERSIONS = ("0.8.2.2", "0.10.2.2", "1.1.1")


@dataclass
class OldKafka:
    """One broker of 3.9.1, registered in ZooKeeper, where the old consumers look it up. It has topic ids."""

    root: Path
    zookeeper: LocalZooKeeper
    port: int = 0
    process: Process | None = None

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, seconds: float = 90) -> OldKafka:
        self.root.mkdir(parents=True, exist_ok=True)
        self.port = self.port or free_port()
        (self.root / "server.properties").write_text(
            f"broker.id=1\nzookeeper.connect={self.zookeeper.connect}\nlisteners=PLAINTEXT://127.0.0.1:{self.port}\n"
            f"log.dirs={self.root / 'data'}\noffsets.topic.replication.factor=1\noffsets.topic.num.partitions=1\n"
            "transaction.state.log.replication.factor=1\ntransaction.state.log.min.isr=1\n"
            "transaction.state.log.num.partitions=1\ngroup.initial.rebalance.delay.ms=0\nlog.retention.ms=-1\n"
            "auto.create.topics.enable=false\n"
        )
        command: list[str | Path] = [
            *(java.find_java(), "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
            *("-cp", f"{java.jars('old-kafka-3.9.1', BROKER)}/*", "kafka.Kafka", self.root / "server.properties"),
        ]
        self.process = spawn(command, self.root, self.root / "server.log")
        until = time.monotonic() + seconds
        while not self._is_registered():
            if not self.process.alive or time.monotonic() > until:
                raise AssertionError((self.root / "server.log").read_text()[-3000:])
            time.sleep(0.2)
        return self

    def _is_registered(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return "1" in self.zookeeper.list_children("/brokers/ids")
        return False

    def stop(self) -> None:
        if self.process is not None:
            self.process.end(5)
            self.process = None


def pad_word(word: str) -> str:
    """Pad a record's text beyond Java's output buffer, so that the consumer prints it at once."""
    return f"{word} {'x' * 9000}"


@dataclass
class OldConsumer:
    """A running old high-level consumer of a group. Its output holds the records that it has read."""

    process: Process
    output: Path
    log: Path

    def read_words(self) -> list[str]:
        """Returns the first word of each record. Java buffers short lines: `pad_word` makes them long enough."""
        return [line.split(" ")[0] for line in self.output.read_text().splitlines()]

    def wait_for(self, count: int, seconds: float = 60) -> list[str]:
        """Wait until there are that many words, and return them."""
        until = time.monotonic() + seconds
        while len(words := self.read_words()) < count:
            assert self.process.alive, self.log.read_text()[-3000:]
            assert time.monotonic() < until, f"{words}\n{self.log.read_text()[-3000:]}"
            time.sleep(0.2)
        return words

    def leave(self) -> None:
        """End the consumer by SIGTERM: it commits its offsets and releases its partitions."""
        self.process.end(15)


@contextlib.contextmanager
def run_old_consumer(
    version: str, zookeeper: LocalZooKeeper, root: Path, group: str, *topics: str, strategy: str = "range"
) -> Iterator[OldConsumer]:
    """Run `kafka.tools.ConsoleConsumer --zookeeper` of that version; it leaves when the block ends.

    A group without offsets needs --from-beginning: the tool ignores the setting in its properties file.
    """
    jars = java.jars(f"old-consumer-{version}", (Artifact("org.apache.kafka", "kafka_2.11", version),))
    root.mkdir(parents=True, exist_ok=True)
    number = len(list(root.glob("*.out")))
    output, log = root / f"{number}.out", root / f"{number}.log"
    config = root / f"{number}.properties"
    config.write_text(
        f"group.id={group}\nauto.commit.interval.ms=300\npartition.assignment.strategy={strategy}\n"
        "zookeeper.session.timeout.ms=4000\n"
        "zookeeper.sync.time.ms=500\nrebalance.backoff.ms=500\nrebalance.max.retries=10\noffsets.storage=zookeeper\n"
    )
    (root / "log4j.properties").write_text(
        "log4j.rootLogger=INFO, err\nlog4j.appender.err=org.apache.log4j.ConsoleAppender\n"
        "log4j.appender.err.target=System.err\nlog4j.appender.err.layout=org.apache.log4j.PatternLayout\n"
        "log4j.appender.err.layout.ConversionPattern=%d %p %m (%c)%n\n"
    )
    command = [
        *(str(java.find_java()), "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
        *(f"-Dlog4j.configuration=file:{root / 'log4j.properties'}", "-cp", f"{jars}/*"),
        *("kafka.tools.ConsoleConsumer", "--zookeeper", zookeeper.connect, "--whitelist", "|".join(topics)),
        *("--consumer.config", str(config)),
        *([] if zookeeper.list_children(f"/consumers/{group}/offsets") else ["--from-beginning"]),
    ]
    process = spawn(["/bin/sh", "-c", f'exec "$@" > {output}', "sh", *command], root, log)
    output.touch()
    consumer = OldConsumer(process, output, log)
    try:
        yield consumer
    finally:
        consumer.leave()
