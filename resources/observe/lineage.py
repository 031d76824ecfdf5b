"""Lineage of runs by OpenLineage (the extra `openlineage`), configured by its own environment variables and files.

A feed is a job, and each landing is a run of that job: START, and then COMPLETE, FAIL or ABORT with the
topics that were read (`kafka://host:9092`, the topic), their offsets, and the feed's folder in the lake (`s3://bucket`
and the prefix; `file` and the path). Names are those of OpenLineage's naming spec, so lineage of other tools joins.

Promises: without the library, or if the environment names no receiver, nothing happens. Events hold names,
numbers, columns' types and our own errors' words, never a record or a setting. Who does not listen costs a run some
seconds and one warning.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec
from threading import Thread
from typing import Any

from sluice.pipelines.batch.result import BatchResult, Landed
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.stores import place, scheme
from sluice.pipelines.lake import paths
from sluice.pipelines.status.batch_facts import BatchFacts
from sluice.pipelines.util import logs
from sluice.pipelines.util.extras import VERSION
from sluice.resources.lake import open_lake

log = logging.getLogger(f"{logs.OURS}.lineage")
NAMED_BY = ("OPENLINEAGE_URL", "OPENLINEAGE_CONFIG")
TRANSPORT = "OPENLINEAGE__TRANSPORT"
NAMESPACE = "OPENLINEAGE_NAMESPACE"
EMIT_SECONDS = 60.0
"""Limit for an event, with the client's retries."""
MOST_RANGES = 1000
"""Maximum number of offset ranges in an event; the sums cover all."""
PRODUCER = f"urn:sluice:{VERSION}"


@dataclass(frozen=True, slots=True)
class Landing:
    """Part of a feed that a Dagster run lands: `window` (start and end, ms) if one is requested, `alone` where the
    run
    is for this feed only."""

    feed: Feed
    run: str
    window: tuple[int, int] | None = None
    alone: bool = True


def is_configured(environ: Mapping[str, str]) -> bool:
    """Returns whether the environment names a receiver of lineage."""
    if environ.get("OPENLINEAGE_DISABLED", "").strip().lower() == "true":
        return False
    return any(environ.get(n) for n in NAMED_BY) or any(n.startswith(TRANSPORT) for n in environ)


@contextmanager
def report_landing(landing: Landing, landed: Callable[[], Landed | None]) -> Iterator[None]:
    """Report the landing in the block. `landed` returns it at the end, also after an error."""
    client = _client() if is_configured(os.environ) else None
    if client is None:
        yield
        return
    events = _Events(landing)
    _emit(client, lambda: events.make("START"))
    try:
        yield
    except BaseException as error:
        kind, why = "FAIL" if isinstance(error, Exception) else "ABORT", error
        _emit(client, lambda: events.make(kind, landed(), why))
        raise
    _emit(client, lambda: events.make("COMPLETE", landed()))


def _emit(client: Any, event: Callable[[], Any]) -> None:
    """Send the event in a thread: the client's own time-out restarts with each byte of an answer."""
    problem: str | None = "TimeoutError"

    def send() -> None:
        nonlocal problem
        try:
            client.emit(event())
            problem = None
        except Exception as error:  # noqa: BLE001 - transports have no common error, and a run does not end for lineage
            problem = type(error).__name__  # its message could hold an address with a key in it

    sender = Thread(target=send, name="sluice-lineage", daemon=True)
    sender.start()
    sender.join(EMIT_SECONDS)
    if problem:
        log.warning("the event was not sent to OpenLineage (%s); the landing is not affected", problem)


@cache
def _client() -> Any:
    try:
        if find_spec("openlineage.client") is None:
            return None
        from openlineage.client import OpenLineageClient

        logging.getLogger("openlineage").setLevel(logging.CRITICAL)  # we report failures
        return OpenLineageClient()
    except ModuleNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 - the run continues without it
        log.warning("no lineage: OpenLineage's settings are wrong (%s)", type(error).__name__)
        return None


class _Events:
    """The events of one landing."""

    def __init__(self, landing: Landing) -> None:
        self._landing, self._namespace = landing, os.environ.get(NAMESPACE) or "sluice"

    def make(self, kind: str, landed: Landed | None = None, error: BaseException | None = None) -> Any:
        from openlineage.client.event_v2 import Job, Run, RunEvent, RunState

        inputs, outputs = list_datasets(self._landing.feed, landed) if landed else ([], [])
        return RunEvent(
            eventType=RunState[kind],
            eventTime=_time(datetime.now(UTC)),
            run=Run(runId=self._run_id(), facets=self._run_facets(error)),
            job=Job(namespace=self._namespace, name=self._landing.feed.name, facets=self._job_facets()),
            producer=PRODUCER,
            inputs=inputs,
            outputs=outputs,
        )

    def _run_id(self) -> str:
        """The id of Dagster's run, which is a UUID; of a run over many feeds, one of each feed."""
        if self._landing.alone:
            return self._landing.run
        return str(uuid.uuid5(uuid.UUID(self._landing.run), self._landing.feed.name))

    def _run_facets(self, error: BaseException | None) -> dict[str, Any]:
        from openlineage.client.facet_v2 import error_message_run, nominal_time_run, parent_run, processing_engine_run

        facets: dict[str, Any] = {
            "processing_engine": processing_engine_run.ProcessingEngineRunFacet(VERSION, "Sluice")
        }
        if window := self._landing.window:
            start, end = (_time(datetime.fromtimestamp(ms / 1000, UTC)) for ms in window)
            facets["nominalTime"] = nominal_time_run.NominalTimeRunFacet(start, end)
        if not self._landing.alone:
            job = parent_run.Job(namespace=self._namespace, name="many feeds")
            facets["parent"] = parent_run.ParentRunFacet(run=parent_run.Run(self._landing.run), job=job)
        if error is not None:
            message = (
                f"{type(error).__name__}: {error.message}" if isinstance(error, SluiceError) else type(error).__name__
            )
            facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(message, "PYTHON")
        return facets

    def _job_facets(self) -> dict[str, Any]:
        from openlineage.client.facet_v2 import documentation_job, job_type_job

        facets: dict[str, Any] = {"jobType": job_type_job.JobTypeJobFacet("BATCH", "SLUICE", "FEED")}
        if description := self._landing.feed.description:
            facets["documentation"] = documentation_job.DocumentationJobFacet(description)
        return facets


def _time(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


# -- datasets


def kafka_namespace(feed: Feed) -> str:
    """`kafka://host:port` of the first broker that the feed names."""
    return f"kafka://{feed.kafka.bootstrap.split(',')[0].strip()}"


def lake_name(feed: Feed) -> tuple[str, str]:
    """Namespace and name of the folder with the feed's rows."""
    return _name_folder(feed, paths.join(paths.visible_roots(feed.stored)[0], feed.output))


def _name_folder(feed: Feed, folder: str) -> tuple[str, str]:
    location = open_lake(feed).locate(folder)
    if not scheme(location):
        return "file", location
    root = place(location).root
    return root, location.removeprefix(f"{root}/")


def list_datasets(feed: Feed, landed: Landed) -> tuple[list[Any], list[Any]]:
    """Returns the topics and the rows of a landing, as OpenLineage's inputs and outputs."""
    batches = [b for b in landed.batches if b.number is not None]
    topics = sorted({s.topic for b in batches for s in b.plan.offset_ranges})
    outputs = [o for d in feed.datasets for o in (_rows(d, batches), *_list_tables(d))] if batches else []
    return [_topic(feed, topic, batches) for topic in topics], outputs


def _list_tables(feed: Feed) -> Iterator[Any]:
    """Yields the tables that the run brings up after the landing. A Delta table of all rows is their folder."""
    from openlineage.client.event_v2 import OutputDataset

    if feed.table is None:
        return
    if feed.table.iceberg:
        names = [feed.table.iceberg.name, *([str(feed.table.current)] if feed.table.current else [])]
        yield from (OutputDataset(namespace=feed.table.iceberg.address, name=name) for name in names)
    elif feed.table.current:
        yield OutputDataset(*_name_folder(feed, paths.get_current_table_root(feed.stored_dataset)))


def _topic(feed: Feed, topic: str, batches: Sequence[BatchResult]) -> Any:
    from openlineage.client.event_v2 import InputDataset
    from openlineage.client.facet_v2 import input_statistics_input_dataset as statistics

    facts = BatchFacts([r for b in batches for r in b.receipts if r.offset_range.topic == topic])
    ranges = sorted(
        (r.offset_range.partition, r.offset_range.start, r.offset_range.end, r.offset_range.incarnation)
        for r in facts.receipts
    )
    return InputDataset(
        namespace=kafka_namespace(feed),
        name=topic,
        inputFacets={
            "inputStatistics": statistics.InputStatisticsInputDatasetFacet(
                rowCount=facts.counts.records + facts.counts.dropped, size=facts.input_bytes
            ),
            "sluice_offsets": _offsets(ranges),
        },
    )


def _offsets(ranges: Sequence[tuple[int, int, int, str]]) -> Any:
    """Which offsets were read, `end` excluded: a facet of our own."""
    import attr
    from openlineage.client.facet_v2 import InputDatasetFacet

    @attr.define
    class SluiceOffsetsInputDatasetFacet(InputDatasetFacet):
        offsets: int
        ranges: list[dict[str, Any]]
        left_out: int

    excerpt = [
        {"partition": partition, "topicId": life, "start": start, "end": end}
        for partition, start, end, life in ranges[:MOST_RANGES]
    ]
    total = sum(end - start for _, start, end, _ in ranges)
    return SluiceOffsetsInputDatasetFacet(total, excerpt, len(ranges) - len(excerpt))


def _rows(feed: Feed, batches: Sequence[BatchResult]) -> Any:
    from openlineage.client.event_v2 import OutputDataset
    from openlineage.client.facet_v2 import dataset_version_dataset, schema_dataset
    from openlineage.client.facet_v2 import output_statistics_output_dataset as statistics

    from sluice.pipelines.records.rows.row_format import landed_schema

    namespace, name = lake_name(feed)
    receipts = [r for b in batches for r in b.receipts]
    facts = BatchFacts([r.of_output(feed.output) for r in receipts] if feed.output else receipts)
    fields = [
        schema_dataset.SchemaDatasetFacetFields(
            name=f.name, type=str(f.type), description=feed.descriptions.get(f.name)
        )
        for f in landed_schema(feed.landed_columns)
    ]
    return OutputDataset(
        namespace=namespace,
        name=name,
        facets={
            "schema": schema_dataset.SchemaDatasetFacet(fields),
            "version": dataset_version_dataset.DatasetVersionDatasetFacet(str(max(b.number or 0 for b in batches))),
        },
        outputFacets={
            "outputStatistics": statistics.OutputStatisticsOutputDatasetFacet(
                rowCount=facts.counts.landed, size=facts.bytes, fileCount=facts.files
            )
        },
    )
