"""A project over a year: producers, commands as processes, and the oracle over its files.

The oracle shares no code with Sluice: it knows the number in each record that a producer wrote, and DuckDB reads the
landed rows. Commands come from a page, whose text must have them, or from the output of the command before.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
from kafka import KafkaAdminClient, KafkaProducer, TopicPartition

from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.support import SLUICE

REPOSITORY = Path(__file__).parents[2]


@dataclass
class Year:
    """One project. `expected` are the numbers whose rows are to be in the lake; `steps` have their seconds."""

    root: Path
    kafka: LocalKafka
    expected: set[int] = field(default_factory=set)
    number: int = 0
    steps: list[tuple[str, float]] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    @property
    def lake(self) -> Path:
        return self.root / ".sluice" / "lake"

    def write_feed(self, name: str, topics: str, more: str = "", columns: str = "", limit: str = "share: 1") -> None:
        """Write a feed's file; `columns`: besides `id`; `limit`: of its quarantine."""
        (self.root / "feeds").mkdir(exist_ok=True)
        schema = f"format: json\nschema: {{id: int64{columns}}}\npolicies: {{quarantine_limit: {{{limit}}}}}\n"
        kafka = [f"kafka: {{bootstrap: '{self.kafka.bootstrap}'}}"]
        if self.kafka.secured:
            kafka = self.kafka.secured.section(self.kafka.bootstrap, self.root)
        lines = (*kafka, f"topics: {topics}", "start: earliest", schema + more)
        (self.root / "feeds" / f"{name}.yaml").write_text("\n".join(lines))

    def produce(self, topic: str, count: int, partitions: int = 2, hours_ago: int = 0, **fields: object) -> list[int]:
        """Write records with the next numbers, which are to land, and as their keys k0, k1 … Returns the numbers."""
        at = (int(time.time()) - 3600 * hours_ago) * 1000
        numbers = [*range(self.number, self.number + count)]
        self.number += count
        more = "".join(f', "{name}": {value}' for name, value in fields.items())
        with closing(KafkaProducer(bootstrap_servers=self.kafka.bootstrap, **self.kafka.client())) as producer:
            for i in numbers:
                value = f'{{"id": {i}{more}}}'.encode()
                producer.send(topic, value, f"k{i}".encode(), partition=i % partitions, timestamp_ms=at)
        self.expected.update(numbers)
        return numbers

    def connect_admin(self) -> closing[KafkaAdminClient]:
        return closing(KafkaAdminClient(bootstrap_servers=self.kafka.bootstrap, **self.kafka.client()))

    def delete_records(self, topic: str, ends: Iterable[int]) -> None:
        with self.connect_admin() as admin:
            admin.delete_records({TopicPartition(topic, p): end for p, end in enumerate(ends)})

    def run(self, *words: str, code: int | None = 0) -> str:
        """Run a command as a process of its own, and return its output."""
        done = subprocess.run(
            (*SLUICE, *words), **self._process(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        assert code in (None, done.returncode), f"sluice {' '.join(words)}: exit {done.returncode}\n{done.stdout}"
        return str(done.stdout)

    def land(self, feed: str = "orders", *more: str, code: int | None = 0) -> str:
        return self.run("run", feed, "--no-dagster", *more, code=code)

    def follow(self, page: str, command: str, *more: str, code: int | None = 0) -> str:
        """Run a command that a page shows, with options that it leaves open: `--reason …`."""
        text = " ".join((REPOSITORY / "docs" / page).read_text().split())
        assert command in text, f"docs/{page} has no `{command}`"
        return self.run(*command.replace("FEED", "orders").split()[1:], *more, code=code)

    def follow_remedy(self, output: str, begin: str, *more: str, code: int = 0) -> str:
        """Run the command in an output that begins with this text."""
        (match,) = set(re.findall(rf"{re.escape(begin)}[^;`\n]*?(?=\s*(?:--reason …|   |;|`|\n|$))", output)) or {""}
        assert match, f"{output}\nhas no `{begin}`"
        return self.run(*match.split()[1:], *more, code=code)

    def kill_run(self, feed: str) -> None:
        """Start a run, and kill its processes once it has planned a batch."""
        log = self.lake / "_sluice" / feed / "log"
        before = len([*log.glob("*.json")])
        process = self.start_run(feed)
        while process.poll() is None and len([*log.glob("*.json")]) < before + 2:
            time.sleep(0.005)
        assert process.poll() is None, "the run has ended before the kill"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def start_run(self, feed: str) -> subprocess.Popen[str]:
        return subprocess.Popen((*SLUICE, "run", feed, "--no-dagster"), **self._process(), start_new_session=True,
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip

    def _process(self) -> dict[str, object]:
        return {
            "cwd": self.root,
            "text": True,
            "env": {**os.environ, "SLUICE_PROJECT": str(self.root), "COLUMNS": "400"},
        }

    def check(self, event: str, feeds: Iterable[str] = ("orders",)) -> None:
        """Compare the rows of these feeds' folders with the numbers that are to be there, each once."""
        files = [str(p) for feed in feeds for p in (self.lake / "data" / feed).rglob("*.parquet")]
        query = "select id from read_parquet($1, hive_partitioning = false, union_by_name = true)"
        rows = Counter(i for (i,) in duckdb.execute(query, [files]).fetchall())
        twice = sorted(i for i, n in rows.items() if n > 1)
        lost, strange = sorted(self.expected - rows.keys()), sorted(rows.keys() - self.expected)
        assert (twice, lost, strange) == ([], [], []), event
        self.steps.append((event, time.monotonic() - self._began))
        self._began = time.monotonic()

    def read(self, column: str, where: str) -> list[object]:
        """Returns the values of a column in the rows of `orders`, in order, by DuckDB."""
        query = f"select {column} from read_parquet($1, hive_partitioning = false, union_by_name = true) where {where}"
        files = f"{self.lake}/data/orders/**/*.parquet"
        return sorted(value for (value,) in duckdb.execute(query, [files]).fetchall())

    def back_up(self) -> Path:
        copy = self.root / "backup"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.lake, copy)
        return copy

    def restore(self, copy: Path) -> None:
        shutil.rmtree(self.lake)
        shutil.copytree(copy, self.lake)
