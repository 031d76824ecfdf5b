"""Cost of a complete `sluice republish`: landed rows, sent by tasks of Spark on this machine, several old
partitions to a task. It is the command that users type, from its start to its end, in a project of its own.

Memory is the kernel's count for each process: its highest resident size, that of the command, of Spark's JVM, and of
the largest of the Python processes that run its tasks.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kafka import KafkaAdminClient

from bench.measure import metering
from sluice.pipelines.errors import Failed, ProofFailed

Note = Callable[[str], None]

RECORDS = 2_000_000
PARTITIONS = 16
"""Old ones; as many as the target has."""
CORES = 2


@dataclass(frozen=True, slots=True)
class Whole:
    """One republish. `peaks`: bytes by kind of process, as `measure.Cost` has them."""

    records: int
    partitions: int
    lanes: int
    seconds: float
    peaks: dict[str, int]

    @property
    def task_memory(self) -> int:
        """Bytes of the largest process that ran tasks."""
        return self.peaks.get("worker", 0)


def measure(
    bootstrap: str, send: Callable[[str, int], None], folder: Path, note: Note, records: int = RECORDS
) -> Whole:
    """Land this number of records of `send`, and republish them. Raises Failed, ProofFailed."""
    name = f"bench_way_back_{secrets.token_hex(4)}"
    project, again = folder / name, f"{name}_again"
    with KafkaAdminClient(bootstrap_servers=bootstrap) as admin:
        admin.create_topics({t: {"num_partitions": PARTITIONS} for t in (name, again)}, wait_for_metadata=True)
        try:
            send(name, records)
            _project(project, bootstrap, name)
            (landed,) = _said(["run", "way_back"], project)["feeds"][0]["runs"]
            if (count := sum(b["landed"] for b in landed["batches"])) != records:
                raise ProofFailed(f"{count:,} records landed, and {records:,} were sent")
            return _sent_back(project, name, again, records, note)
        finally:
            admin.delete_topics([name, again])


def _project(folder: Path, bootstrap: str, topic: str) -> None:
    (folder / "feeds").mkdir(parents=True)
    settings = {
        "kafka": {"bootstrap": bootstrap},
        "topics": topic,
        "start": "earliest",
        "commit": "none",
        "spark": {"master": f"local[{CORES},3]"},
    }
    (folder / "feeds" / "way_back.yaml").write_text(json.dumps(settings))


def _sent_back(project: Path, topic: str, again: str, records: int, note: Note) -> Whole:
    per_partition = -(-records // PARTITIONS)
    ranges = [w for p in range(PARTITIONS) for w in ("--offsets", f"{topic}:{p}:0-{per_partition}")]
    words = ["republish", "way_back", "--topic", again, *ranges, "--keep-partitions", "--yes"]
    process = subprocess.Popen(_command(words), cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with metering(process.pid) as meter:
        out, errors = process.communicate()
    if process.returncode:
        raise Failed(f"sluice republish ended with {process.returncode}: {errors[-1500:]}")
    sent, cost = json.loads(out), meter.cost
    if sent["records"] != records:
        raise ProofFailed(f"{sent['records']:,} records were sent back, and {records:,} landed")
    note(f"sluice republish: {records:,} records in {cost.seconds:.1f} s, from its start to its end")
    return Whole(records, PARTITIONS, sent["lanes"], cost.seconds, dict(cost.peaks))


def _said(words: list[str], project: Path) -> Any:
    done = subprocess.run(_command(words), cwd=project, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"sluice {' '.join(words)} ended with {done.returncode}: {done.stderr[-1500:]}")
    return json.loads(done.stdout)


def _command(words: list[str]) -> list[str]:
    return [str(Path(sys.executable).with_name("sluice")), *words, "--json"]
