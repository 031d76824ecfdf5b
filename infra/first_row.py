"""Time the way from an empty folder to a first row, and the same for dlt: `make first-row`.

    python3.11 infra/first_row.py           builds the wheel and prints a table in Markdown

Needs Java 17, PyPI and Maven Central. Environments, caches and data are in a temporary folder that is also HOME, so no
cache of the user helps. `KAFKA=FOLDER` names a folder of Kafka's jars, such as `~/.cache/sluice/kafka-…`, which is
copied instead of downloaded. Processes that remain are found by this HOME and ended by their id.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = "land,ui"
"""The extras of the tutorial."""
DLT = ("dlt[filesystem,parquet]==1.31.0", "confluent-kafka>=2.16", "duckdb>=1.4")
MORE = "100"
"""Records that are produced before the warm run."""
WAIT = 120.0
"""Limit in seconds on processes that work in the background after an answer."""
FETCH_KAFKA = """
from sluice.resources.local import java, local_kafka
java.jars(f"kafka-{local_kafka.VERSION}", local_kafka.ARTIFACTS)
"""
FIND_KAFKA = """
from pathlib import Path
from sluice.resources.local.local_kafka import LocalKafka
print(LocalKafka.attach(Path(".sluice/kafka")).bootstrap)
"""
QUERY = """
import sys, sluice
orders = sluice.read("orders", sys.argv[1]).duckdb()
print(orders.aggregate("currency, count(*) AS orders, round(sum(amount), 2) AS revenue", "currency"))
"""
DLT_RUN = """
import json, pathlib, sys
import dlt
from confluent_kafka import Consumer, TopicPartition

@dlt.resource(name="orders", write_disposition="append")
def orders(bootstrap):
    following = dlt.current.resource_state().setdefault("offsets", {})
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "dlt", "enable.auto.commit": False})
    for partition in consumer.list_topics("orders").topics["orders"].partitions:
        first, end = consumer.get_watermark_offsets(TopicPartition("orders", partition))
        position = following.get(str(partition), first)
        consumer.assign([TopicPartition("orders", partition, position)])
        while position < end:
            for message in consumer.consume(min(10_000, end - position), 1.0):
                position = message.offset() + 1
                if message.value() is not None:
                    yield json.loads(message.value())
        following[str(partition)] = position
    consumer.close()

lake = dlt.destinations.filesystem(pathlib.Path("lake").absolute().as_uri())
pipeline = dlt.pipeline("orders", pipelines_dir="pipelines", destination=lake, dataset_name="shop")
pipeline.run(orders(sys.argv[1]), loader_file_format="parquet")
print(pipeline.last_trace.last_normalize_info.row_counts)
"""
DLT_QUERY = """
import duckdb
orders = duckdb.read_parquet("lake/**/orders/*.parquet")
print(orders.aggregate("currency, count(*) AS orders, round(sum(amount), 2) AS revenue", "currency"))
"""


class Timer:
    """Runs commands in one folder and keeps the seconds of each step."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = dict(environment)
        self.seconds: dict[str, float] = {}

    def run(self, step: str, *command: str | Path, folder: Path | None = None) -> str:
        """Run a command and return its output. Raises SystemExit with the output if it fails."""
        print(f"{step} …", file=sys.stderr, flush=True)
        began = time.monotonic()
        result = subprocess.run(
            command,
            cwd=folder or self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self.seconds[step] = self.seconds.get(step, 0.0) + time.monotonic() - began
        print(f"{step}: {self.seconds[step]:.1f} s", file=sys.stderr, flush=True)
        if result.returncode:
            raise SystemExit(f"{step} failed with {result.returncode}\n{result.stdout}")
        return result.stdout

    def install(self, python: Path, *requirements: str) -> None:
        """Install into a new environment. Building a source distribution is part of the download."""
        self.run("environment", sys.executable, "-m", "venv", python.parents[1])
        wheels = self._folder / f"{python.parents[1].name}.wheels"
        pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
        self.run("download", *pip, "wheel", "--wheel-dir", wheels, *requirements)
        self.run("install", *pip, "install", "--no-index", "--find-links", wheels, *requirements)


def main() -> None:
    # Not below the checkout: a project is also looked for in the folders above.
    with tempfile.TemporaryDirectory(prefix="first-row.") as name:
        home = Path(name).resolve()
        load = os.getloadavg()
        try:
            ours, theirs = measure(home)
        finally:
            end_processes(home)
        print(render(ours, theirs, load))


def measure(home: Path) -> tuple[dict[str, float], dict[str, float] | str]:
    """Return the seconds of each step, and those of dlt or the reason why there are none."""
    environment = make_environment(home)
    timer = Timer(home, environment)
    wheel = timer.run("make wheel", "make", "--no-print-directory", "wheel", folder=ROOT).split()[-1]
    python = home / "sluice" / "bin" / "python"
    timer.install(python, f"{ROOT / wheel}[{EXTRAS}]")
    if jars := os.environ.get("KAFKA"):
        shutil.copytree(jars, home / ".cache" / "sluice" / Path(jars).name)
    timer.run("download Kafka", python, "-c", FETCH_KAFKA)

    shop = home / "shop"
    shop.mkdir()
    project = Timer(shop, environment)
    sluice = python.with_name("sluice")
    project.run("local Kafka with a topic", sluice, "init", "--local")
    project.run("first run", sluice, "run", "orders")
    hour = f"{datetime.now(UTC) - timedelta(hours=2):%Y-%m-%dT%H}"
    print(project.run("query", python, "-c", QUERY, hour), file=sys.stderr)
    print(project.run("check", sluice, "check", "orders", hour), file=sys.stderr)
    began = time.monotonic()
    wait_for_archives(home)
    project.seconds["background"] = time.monotonic() - began
    bootstrap = project.run("address", python, "-c", FIND_KAFKA).strip()
    produce = (sluice, "produce", "orders", "--records", MORE)
    project.run("produce", *produce)
    project.run("warm run", sluice, "run", "orders")
    theirs: dict[str, float] | str
    try:
        theirs = measure_dlt(home, environment, bootstrap, lambda: project.run("produce", *produce))
    except SystemExit as failure:
        print(failure, file=sys.stderr)
        theirs = f"dlt was not measured: {str(failure).splitlines()[0]}"
    project.run("stop", sluice, "kafka", "stop")
    return timer.seconds | project.seconds, theirs


def measure_dlt(
    home: Path, environment: Mapping[str, str], bootstrap: str, produce: Callable[[], object]
) -> dict[str, float]:
    """Return the seconds of each step of a pipeline from the same topic to Parquet."""
    timer, python = Timer(home, environment), home / "dlt" / "bin" / "python"
    timer.install(python, *DLT)
    print(timer.run("first run", python, "-c", DLT_RUN, bootstrap), file=sys.stderr)
    print(timer.run("query", python, "-c", DLT_QUERY), file=sys.stderr)
    produce()
    timer.run("warm run", python, "-c", DLT_RUN, bootstrap)
    return timer.seconds


def make_environment(home: Path) -> dict[str, str]:
    """Return the environment of all commands: this HOME, and none of the settings that would find another cache."""
    dropped = ("XDG_", "SLUICE_", "DAGSTER_", "KAFKA", "NUMBA_", "SPARK_", "PYTHON", "VIRTUAL_ENV", "MAKE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return environment | {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "DLT_DATA_DIR": str(home / ".dlt"),  # as root it is not below HOME
        "RUNTIME__DLTHUB_TELEMETRY": "false",
        "DO_NOT_TRACK": "1",
    }


def wait_for_archives(home: Path) -> None:
    """Wait for the processes that archive the classes of Spark's JVM after a first run."""
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline and any(
        "sluice.resources.spark" in command for _, command in list_processes(home)
    ):
        time.sleep(0.1)


def end_processes(home: Path) -> None:
    """End the processes that were started with this HOME, first in order."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + 20
        for pid, _ in list_processes(home):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while list(list_processes(home)) and time.monotonic() < deadline:
            time.sleep(0.1)


def list_processes(home: Path) -> Iterator[tuple[int, str]]:
    """Yield the id and the command of every process that was started with this HOME."""
    mark = f"HOME={home}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


ROWS = {
    "make wheel": "`make wheel`",
    "environment": "new environment",
    "download": f"download of packages (`[{EXTRAS}]`)",
    "install": "install without the download",
    "download Kafka": "download of Kafka",
    "local Kafka with a topic": "`sluice init --local`: start Kafka, 20,000 records, the feed file",
    "first run": "first run",
    "query": "query of the rows",
    "check": "`sluice check`",
    "warm run": f"warm run of {MORE} records",
}


def render(ours: Mapping[str, float], theirs: Mapping[str, float] | str, load: tuple[float, float, float]) -> str:
    """Return the table in Markdown, with the machine and its load."""
    seconds = theirs if not isinstance(theirs, str) else {}
    lines = ["| seconds | Sluice | dlt |", "|---|--:|--:|"]
    for step, text in ROWS.items():
        cells = (f"{column[step]:.1f}" if step in column else "" for column in (ours, seconds))
        lines.append(f"| {text} | {' | '.join(cells)} |")
    now = " ".join(f"{value:.1f}" for value in os.getloadavg())
    machine = (
        f"{datetime.now(UTC):%d %B %Y}, {os.cpu_count()} cores ({platform.machine()}), Python"
        f" {platform.python_version()}; load {' '.join(f'{value:.1f}' for value in load)} before, {now} after"
        " (averages of 1, 5 and 15 minutes)"
    )
    background = (
        f"Classes of Spark's JVM were archived in the background until {ours['background']:.1f} s after `check`."
    )
    return "\n".join((machine, "", *lines, "", background, *([theirs] if isinstance(theirs, str) else [])))


if __name__ == "__main__":
    main()
