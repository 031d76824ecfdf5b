"""Cost of a cluster: one landing by `local[2]`, and by a standalone Spark of two workers with one core each.

Both on this machine, so the network is not measured, but a master, executors of their own, the pack that is sent, and
what executors are asked before. Each is landed twice in one process: the first landing starts Spark.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from os import getpid
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from bench.load import ensure
from bench.measure import Cost, metering
from bench.spark_cluster import LocalSpark
from bench.workloads import TYPED_ORDERS
from sluice.cli.terminal.output import heading, table
from sluice.cli.terminal.text_layout import size
from sluice.pipelines.batch.land import land
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.resources.liveness import new_owner
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.open_ports import open_ports
from sluice.resources.spark import pack_archive
from sluice.resources.spark.engine import context

Note = Callable[[str], None]

RECORDS = 1_000_000
WORKERS = 2


@dataclass(frozen=True, slots=True)
class Landing:
    """One landing of the whole topic: seconds, and CPU of all processes."""

    seconds: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Side:
    """One Spark: its first landing, and the fastest of those that followed."""

    spark: str
    first: Landing
    warm: Landing


@dataclass(frozen=True, slots=True)
class ClusterReport:
    records: int
    pack_bytes: int
    sides: tuple[Side, ...]

    def document(self) -> dict[str, Any]:
        return asdict(self)


def run(records: int, repeat: int, folder: Path, note: Note) -> ClusterReport:
    """Measure both in `folder`, where the topic stays loaded. Raises SetupError, Failed."""
    packed = pack_archive.pack()  # once for a version: no cost of a landing
    with LocalKafka(folder / "kafka-1") as kafka:
        topic = ensure(TYPED_ORDERS.of(records), kafka.bootstrap, folder / "topics", note).topic
        scratch = folder / f"cluster-{secrets.token_hex(4)}"
        try:
            settings = {"kafka": {"bootstrap": kafka.bootstrap}, "topics": topic}
            here = _side(scratch, f"local[{WORKERS}]", settings, {"master": f"local[{WORKERS},3]"}, repeat, note)
            with LocalSpark(scratch / "spark", workers=WORKERS) as cluster:
                spark = {"master": cluster.master, "conf": cluster.conf}
                there = _side(scratch, f"{WORKERS} workers of one core", settings, spark, repeat, note)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return ClusterReport(records, packed.bytes, (here, there))


def _side(folder: Path, name: str, settings: dict[str, Any], spark: dict[str, Any], repeat: int, note: Note) -> Side:
    costs = []
    for turn in range(repeat + 1):
        note(f"{name}: {f'landing {turn} of {repeat}' if turn else 'starting'}")
        lake = folder / f"lake-{secrets.token_hex(4)}"
        feed = Feed.model_validate(
            {
                "feed": "bench",
                "start": "earliest",
                "commit": "none",
                "format": "json",
                "schema": dict(TYPED_ORDERS.schema),
                "lake": str(lake),
                "spark": spark,
                **settings,
            },
            context={"root": folder},
        )
        costs.append(_landing(feed))
        shutil.rmtree(lake, ignore_errors=True)
    context(feed.spark).stop()
    first, *others = (Landing(c.seconds, c.cpu or 0.0) for c in costs)
    return Side(name, first, min(others, key=lambda landing: landing.seconds))


def _landing(feed: Feed) -> Cost:
    with metering(getpid()) as meter, open_ports(feed) as ports:
        land(feed, ports, Request(RequestKind.CATCH_UP), new_owner("bench"), lambda progress: None).check()
    return meter.cost


def cluster_view(report: ClusterReport) -> Iterator[RenderableType]:
    """For the terminal."""
    about = f"{report.records:,} records typed into Parquet; the pack of {size(report.pack_bytes)} was made before"
    yield heading("cluster", about)
    rows = [
        (
            side.spark,
            f"{side.first.seconds:.1f}",
            f"{side.first.cpu:.1f}",
            f"{side.warm.seconds:.2f}",
            f"{side.warm.cpu:.2f}",
            f"{report.records / side.warm.seconds:,.0f}",
        )
        for side in report.sides
    ]
    columns = ("Spark", "first s", "its CPU", "warm s", "CPU of it", "records/s")
    yield table(columns, rows, right="first its warm CPU records/s", optional="its CPU")
