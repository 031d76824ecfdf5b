"""Commands, reads and the code location next to plain scripts that do the same (`bench.plain`): CPU of new processes.

The feeds: `small`, an hour of 900 records; `hour`, one of 1,000,000; `month`, 720 small hours in three partitions.
Where a plain script exists, its answer about the rows must equal Sluice's, or nothing is reported.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from kafka import KafkaAdminClient
from rich.console import RenderableType

from bench import plain
from bench.load import ensure
from bench.measure import metering
from bench.start import adopting_orphans, environment, reap, removing
from bench.workloads import TYPED_ORDERS
from sluice.cli.terminal.output import heading, table
from sluice.pipelines.errors import Failed, ProofFailed
from sluice.pipelines.feed.kafka_section import KafkaSettings
from sluice.pipelines.records.kafka_batches.encode import Accumulator
from sluice.pipelines.util.units import HOUR, show_window
from sluice.resources.kafka.connection.connection_settings import KafkaAddress
from sluice.resources.kafka.produce.sender import KafkaSender
from sluice.resources.local import events
from sluice.resources.local.local_kafka import LocalKafka

Note = Callable[[str], None]

HOUR_RECORDS, HOURS, HOUR_OF_MONTH, PARTITIONS = 1_000_000, 720, 300, 3
BIG_HOUR = "2025-01-01T00"
"""All records of `bench.workloads` are stamped in it."""
FEEDS = (200, 1000)
REPEAT = 3


@dataclass(frozen=True, slots=True)
class Wait:
    """Medians in CPU seconds (or another unit); `plain` is None where no script does the same."""

    what: str
    sluice: float
    plain: float | None
    goal: str
    unit: str = "s"

    def __str__(self) -> str:
        return f"{self.sluice:,.2f} {self.unit}"

    @property
    def ratio(self) -> str:
        return f"{self.sluice / self.plain:.1f}" if self.plain else ""

    @property
    def row(self) -> list[str]:
        alone = "" if self.plain is None else f"{self.plain:,.2f} {self.unit}"
        return [self.what, str(self), alone, self.ratio, self.goal]


COLUMNS = ("what", "Sluice", "plain", "ratio", "goal")


@dataclass(frozen=True, slots=True)
class WaitReport:
    waits: tuple[Wait, ...]

    def document(self) -> dict[str, Any]:
        return asdict(self)


def run(folder: Path, note: Note, repeat: int = REPEAT) -> WaitReport:
    """Measure them in `folder`, in turn. Raises SetupError, Failed, ProofFailed."""
    with LocalKafka(folder / "kafka-1") as kafka, removing(folder / f"waits-{secrets.token_hex(4)}") as scratch:
        adopting_orphans()
        project = _Project.build(scratch, kafka.bootstrap, folder / "topics", note)
        try:
            return WaitReport(tuple(project.measure(repeat)))
        finally:
            with KafkaAdminClient(bootstrap_servers=kafka.bootstrap) as admin:
                admin.delete_topics([project.read_topic("small"), project.read_topic("month")])


def wait_view(report: WaitReport) -> Iterator[RenderableType]:
    """For the terminal."""
    yield heading("waits", "CPU of new processes, medians")
    yield table(COLUMNS, [w.row for w in report.waits], right="Sluice plain ratio goal")


@dataclass
class _Project:
    folder: Path
    bootstrap: str
    month: tuple[int, int]
    note: Note
    fresh: Iterator[int] = field(default_factory=count)

    @classmethod
    def build(cls, folder: Path, bootstrap: str, topics: Path, note: Note) -> _Project:
        """Land the feeds, and write a feed file for each backfill to come."""
        big = ensure(TYPED_ORDERS.of(HOUR_RECORDS), bootstrap, topics, note).topic
        end = (time.time_ns() // 1_000_000 - HOUR // 4) // HOUR * HOUR  # an hour whose grace period is over
        project = cls(folder, bootstrap, (end - HOURS * HOUR, end), note)
        names = [f"waits-{secrets.token_hex(4)}-{name}" for name in ("small", "month")]
        events.create(KafkaSettings(bootstrap=bootstrap), names, PARTITIONS)
        _send(bootstrap, names[0], 3 * HOUR_OF_MONTH, end - HOUR, end - 1)
        _send(bootstrap, names[1], HOURS * HOUR_OF_MONTH, *project.month)
        for name, topic in zip(("small", "month", "hour"), (*names, big), strict=True):
            project.write_feed(name, topic)
            note(f"landing {name}")
            project.ask("run", name, "--no-dagster")
        return project

    def write_feed(self, name: str, topic: str) -> str:
        settings = {
            "kafka": {"bootstrap": self.bootstrap},
            "topics": topic,
            "group": f"{topic}-{name}-{self.folder.name}",  # the topic of the big hour stays for the next time
            "start": "earliest",
            "format": "json",
            "engine": "processes",
            "schema": dict(TYPED_ORDERS.schema),
        }
        (self.folder / "feeds").mkdir(parents=True, exist_ok=True)
        text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items())
        (self.folder / "feeds" / f"{name}.yaml").write_text(text)
        return name

    def read_topic(self, feed: str) -> str:
        line = (self.folder / "feeds" / f"{feed}.yaml").read_text().splitlines()[1]
        return str(json.loads(line.removeprefix("topics: ")))

    def find_rows(self, feed: str) -> str:
        return str(self.folder / ".sluice" / "lake" / "data" / feed)

    def measure(self, repeat: int) -> Iterator[Wait]:
        """Yields each line of the table."""
        ask, script, ours = self.ask, self.run_script, partial(self.run_script, "read_ours")
        start, to = map(show_window, self.month)
        topic = self.read_topic("month")

        def catch_up() -> Any:
            name = self.write_feed(f"month{next(self.fresh)}", topic)
            self.ask("run", name, "--no-dagster")
            return plain.read_duckdb(self.find_rows(name))

        def check_hour() -> Any:
            rows = ask("check", "hour", BIG_HOUR)["partitions"]
            return [[p["partition"], p["start"], p["end"], p["landed"]] for p in rows]

        def rescan() -> Any:
            rows = ask("audit", "month", "--rescan", "--all")["partitions"]
            return sum(p["landed"] for p in rows)

        def land() -> Any:
            return script("land_topic", self.bootstrap, topic, self.folder / f"plain-{next(self.fresh)}")

        pairs: Sequence[tuple[str, Callable[[], Any], Callable[[], Any] | None, str]] = (
            (
                "`check` of an hour of 1,000,000 rows",
                check_hour,
                partial(script, "check_window", self.find_rows("hour")),
                "≤ 2.5×",
            ),
            ("`audit --rescan --all` of 216,000 records in 2,160 ranges", rescan, lambda: land()[0], "≤ 1.3×"),
            ("backfill of 720 small hours, 3 partitions", catch_up, land, "≤ 1.5×"),
            *(
                (
                    f"`read({feed}).{kind}()`",
                    partial(ours, kind, feed, *span),
                    partial(script, f"read_{kind}", self.find_rows(feed)),
                    "≤ 1.5×",
                )
                for feed, kind, span in (
                    ("month", "polars", (start, to)),
                    ("month", "duckdb", (start, to)),
                    ("hour", "arrow", (BIG_HOUR, "2025-01-01T01")),
                )
            ),
            ("`run`, nothing pending, without Dagster", partial(ask, "run", "small", "--no-dagster"), None, "≤ 0.6 s"),
            ("`run`, nothing pending, through Dagster", partial(ask, "run", "small"), None, "≤ 2 s"),
            *(
                (f"`{words[0]}` of a small feed", partial(ask, *words), None, "≤ 0.4 s")
                for words in (
                    ("status", "small"),
                    ("check", "small"),
                    ("plan", "small"),
                    ("explain", "small", f"{self.read_topic('small')}:0:5"),
                    ("files", "small", "--window", show_window(self.month[1] - HOUR)),
                )
            ),
            ("`--help`", partial(self.tell, "--help"), None, "≤ 0.15 s"),
            ("a wrong option of `run`", partial(self.tell, "run", "--wrong"), None, "≤ 0.2 s"),
        )
        for what, of_sluice, of_script, goal in pairs:
            self.note(what)
            costs, others = [], []
            for _ in range(repeat):
                answer, cost = _measure(of_sluice)
                costs.append(cost)
                if of_script:
                    expected, cost = _measure(of_script)
                    others.append(cost)
                    if json.dumps(answer) != json.dumps(expected):
                        raise ProofFailed(f"{what}: {answer} of Sluice, {expected} of a plain script")
            yield Wait(what, median(costs), median(others) if others else None, goal)
        yield from self.measure_locations()
        yield self.look_up()

    def measure_locations(self) -> Iterator[Wait]:
        for feeds in FEEDS:
            self.note(f"code location of {feeds} feeds")
            fleet = _Project(self.folder / f"fleet-{feeds}", self.bootstrap, self.month, self.note)
            for number in range(feeds):
                fleet.write_feed(f"feed_{number:04}", f"topic_{number:04}")
            ours, cost = _measure(partial(fleet.run_script, "load_ours"))
            theirs, other = _measure(partial(fleet.run_script, "load_location", feeds))
            yield Wait(f"code location of {feeds} feeds, load and snapshot", cost, other, "≤ 1.5×")
            yield Wait(
                f"… its snapshot ({ours['jobs']} jobs)", ours["bytes"] / 1e6, theirs["bytes"] / 1e6, "≤ 2×", "MB"
            )

    def look_up(self) -> Wait:
        """A look-up in our files next to one in the same rows as DuckDB writes them."""
        import duckdb

        self.note("look-up by a text column")
        theirs = self.folder / "written" / "rows.parquet"
        theirs.parent.mkdir()
        rows = duckdb.read_parquet(plain.list_files(self.find_rows("hour")), hive_partitioning=False)
        rows.write_parquet(str(theirs), compression="zstd")
        ours, other = (self.run_script("look_up", f, "order_id") for f in (self.find_rows("hour"), theirs.parent))
        if ours["rows"] != other["rows"]:
            raise ProofFailed(f"{ours['rows']} rows in our files, {other['rows']} in DuckDB's")
        return Wait("look-up by a text column, our files next to DuckDB's", ours["cpu"], other["cpu"], "≤ 1×")

    def ask(self, *words: str) -> Any:
        return json.loads(self.tell(*words, "--json"))

    def tell(self, *words: str) -> str:
        """Raises Failed if the command fails, unless by its usage."""
        return _run([str(Path(sys.executable).with_name("sluice")), *words], self.folder, (0, 2))

    def run_script(self, *words: object) -> Any:
        return json.loads(_run([sys.executable, "-m", "bench.plain", *map(str, words)], self.folder, (0,)))


def _run(command: Sequence[str], folder: Path, codes: Sequence[int]) -> str:
    root = str(Path(__file__).parents[1])
    paths = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), root) if p)
    env: Mapping[str, str] = environment() | {"PYTHONPATH": paths}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env, check=False)
    if done.returncode not in codes:
        raise Failed(f"{' '.join(command)[:200]} ended with {done.returncode}: {done.stderr[-1500:]}")
    return done.stdout


def _measure(work: Callable[[], Any]) -> tuple[Any, float]:
    """Returns the answer, and CPU seconds of the processes that gave it."""
    own = time.process_time()
    with metering(os.getpid()) as meter:
        answer = work()
        reap()
    return answer, (meter.cost.cpu or 0.0) - (time.process_time() - own)


def _send(bootstrap: str, topic: str, records: int, start: int, end: int) -> None:
    """Send orders stamped evenly, in turn to each partition."""
    with closing(KafkaSender.connect(KafkaAddress(bootstrap, {}))) as sender:
        sender.begin()
        waiting, numbers = Accumulator(), np.arange(records)
        batch = events.to_send([*events.orders(events.Mix(1), records, start, end - 1)])
        sender.send(topic, waiting.add(batch, numbers % PARTITIONS, numbers))
        sender.send(topic, waiting.flush())
        sender.flush(topic)
