"""Sluice as a peer: the product's own path from plan to visible Parquet, ledger and proof included, nothing left out.

Each landing goes into a lake of its own, so that everything is pending; the Spark session, or with
SLUICE_ENGINE=processes the workers' pool, stays, as in a service.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.formats import FORMATS, SCHEMA_ID
from bench.stand import PeerTask, Ready, serve
from bench.workloads import KINDS, OF_ALL_KINDS
from sluice import __version__
from sluice.cli.terminal.process import fast_imports
from sluice.pipelines.batch.land import land
from sluice.pipelines.batch.result import BatchResult
from sluice.pipelines.contract.suite import parse_contract
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake.schemas import KeptSchemas
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.model.receipts import ENGINE, EngineKind, Owner, Progress
from sluice.pipelines.records.rows.wire_format import RegisteredSchema, WireFormat
from sluice.pipelines.records.shape import READERS
from sluice.pipelines.status.batch_facts import sum_times
from sluice.resources.lake import open_lake
from sluice.resources.liveness import now
from sluice.resources.open_ports import open_ports


@contextmanager
def stand(task: PeerTask) -> Iterator[Ready]:
    with fast_imports():  # as every command that lands: loaded objects are no garbage
        import pyspark  # noqa: F401 - an engine would load it later
    versions = {name: version(name) for name in ("pyspark", "pyarrow")}
    yield Ready(partial(_land, task), {"sluice": __version__, **versions})


def _land(task: PeerTask, out: Path) -> dict[str, Any]:
    feed = feed_of(task, out)
    stages = _Stages()
    with open_ports(feed) as ports:
        # In a lake of its own, the catch-up of a group that never committed is the whole topic.
        result = land(feed, replace(ports, parallelism=task.cores), Request(RequestKind.CATCH_UP), _owner(), stages)
    result.check()
    return {"stages": stages.seconds(), "tasks": _activities(result.batches)}


def feed_of(task: PeerTask, out: Path) -> Feed:
    settings = {
        "feed": "bench",
        "kafka": {"bootstrap": task.bootstrap},
        "topics": task.topic,
        "start": "earliest",
        "lake": str(out),
        "commit": "none",
        "engine": os.environ.get(ENGINE) or EngineKind.SPARK,
        "spark": {"master": f"local[{task.cores},3]"},
        "landing": {"shared_files": False} if os.environ.get("SLUICE_BENCH_FILES_APART") else {},
    }
    if task.format:
        return _with_schema(task, settings, out)
    rows = os.environ.get("SLUICE_BENCH_ROWS", "")
    if rows == "split":
        return _with_outputs(task, settings, out)
    if task.schema:
        settings |= {"format": "json", "schema": task.schema | _MORE_COLUMNS.get(rows, {})}
    if rows == "protected":
        settings |= {"protect": {"sent": {"hmac": "a key of the benchmark"}}}
    feed = Feed.model_validate(settings, context={"root": out.parent})
    contract = parse_contract(task.contract.encode(), feed.columns) if task.contract else None
    return feed.model_copy(update={"contract": contract})


_MORE_COLUMNS = {rows: {"sent": "string header trace"} for rows in ("placed", "protected")}


def _with_outputs(task: PeerTask, settings: dict[str, Any], out: Path) -> Feed:
    """A feed with three outputs: the kinds of mixed events with their own columns, or orders by a field."""
    into: dict[str, Any] = {"web": {}, "stores": {"values": ["store", "app"]}, "phone": {}}
    columns, field = dict.fromkeys(into, task.schema), "channel"
    if "kind" in task.schema:
        columns, field = {kind: OF_ALL_KINDS | own for kind, own in KINDS.items()}, "kind"
        into = {kind: {} for kind in columns}
    context = {"root": out.parent}
    feed = Feed.model_validate(settings | {"split": {"by": {"field": field}, "into": into}}, context=context)
    typed = {kind: settings | {"format": "json", "schema": schema} for kind, schema in columns.items()}
    outputs = (Feed.model_validate(t, context=context).model_copy(update={"output": kind}) for kind, t in typed.items())
    return feed.model_copy(update={"outputs": tuple(outputs)})


def _with_schema(task: PeerTask, settings: dict[str, Any], out: Path) -> Feed:
    """A feed of a format with schemas of its own, whose lake has the records' schema since an earlier batch."""
    schema_reader = READERS[task.format]
    (text,) = schema_reader.read(FORMATS[task.format].schema, out, "")
    reader = schema_reader.make((text,), WireFormat.CONFLUENT)
    settings |= {"format": task.format, "schema": reader.columns.texts(), "registry": {"url": "http://127.0.0.1:9"}}
    feed = Feed.model_validate(settings | {"reader": reader}, context={"root": out.parent})
    KeptSchemas(open_lake(feed), feed.stored).keep(RegisteredSchema(SCHEMA_ID, schema_reader.registered, (text,)))
    return feed


def _owner() -> Owner:
    return Owner(uuid.uuid4().hex, "bench", os.uname().nodename, os.getpid(), now())


class _Stages:
    """Takes progress and keeps the seconds from each stage's first word to the next stage's."""

    def __init__(self) -> None:
        self._marks = [("start", time.perf_counter())]

    def __call__(self, progress: Progress) -> None:
        if progress.stage != self._marks[-1][0]:
            self._marks.append((progress.stage, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        took: Counter[str] = Counter()
        ends = [*(mark for _, mark in self._marks[1:]), time.perf_counter()]
        for (stage, begin), end in zip(self._marks, ends, strict=True):
            took[stage] += end - begin  # type: ignore[assignment]
        return {stage: round(seconds, 3) for stage, seconds in took.items()}


def _activities(batches: tuple[BatchResult, ...]) -> dict[str, float]:
    """Seconds by activity, over all tasks (which ran side by side)."""
    ns = sum_times(receipt for batch in batches for receipt in batch.receipts).ns
    return {activity: round(took / 1e9, 3) for activity, took in ns.items()}


if __name__ == "__main__":
    serve(stand)
