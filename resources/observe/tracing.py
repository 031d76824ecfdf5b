"""Traces of runs by OpenTelemetry (the extra `otel`), configured by its own environment variables (OTEL_…).

A trace has a span for each step of a run (`land orders`), in it one for each stage, and in `land` one for each task.
Every process that works for a run finds the run's trace by the run's id. Tasks return their start and end times, and
the driver reports them: workers need neither the library nor the collector's address and key.

Promises: without the library, or if the environment names no receiver, nothing happens. Spans hold names,
numbers and the class of an error, never a record, a setting or a secret. A collector that is away costs a run a few
seconds at its end and one line on stderr.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

from sluice.pipelines.errors import SluiceError
from sluice.pipelines.model.plans import Plan
from sluice.pipelines.model.receipts import Outcome, Progress, TaskTime, TaskTraffic
from sluice.pipelines.util import logs

log = logging.getLogger(f"{logs.OURS}.tracing")
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
EXPORTER = "OTEL_TRACES_EXPORTER"
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
SERVICE = "sluice"
FLUSH_SECONDS = 3.0
Attributes = Mapping[str, str | int | None]

_current: ContextVar[StepSpan | None] = ContextVar("step", default=None)
_run: ContextVar[str] = ContextVar("run", default="")


class StepSpan:
    """The span of a step, and of the stage that it is in. Any thread of the step's run may report progress to it."""

    def __init__(self, tracer: Any, span: Any) -> None:
        self._tracer, self._span, self._name = tracer, span, ""
        self._stage: Any = None
        self._lock = threading.Lock()

    def progress(self, progress: Progress) -> None:
        """A stage begins when it is first reported, and ends with the next one or with the step."""
        with self._lock:
            if progress.met or progress.stage == self._name:
                return
            self._end_stage()
            self._name = progress.stage
            self._stage = self._tracer.start_span(progress.stage, context=_under(self._span))

    def tasks(self, plan: Plan, batch: int, times: Sequence[TaskTime]) -> None:
        """A span for each task that came to its end, in the stage that the step is in."""
        with self._lock:
            above = _under(self._stage or self._span)
        for time in times:
            task = plan.tasks[time.task]
            about: Attributes = {
                "sluice.feed": plan.feed,
                "sluice.batch": batch,
                "sluice.task": time.task,
                "sluice.offset_ranges": len(task.offset_ranges),
                "sluice.offsets": sum(s.span for s in task.offset_ranges),
                "sluice.broker": task.leader,
                "sluice.attempt": time.attempt,
                "host.name": time.host,
                "process.pid": time.pid,
            }
            span = self._tracer.start_span("task", context=above, attributes=_known(about), start_time=time.began)
            span.end(time.ended)

    def close(self) -> None:
        with self._lock:
            self._end_stage()

    def _end_stage(self) -> None:
        if self._stage is not None:
            self._stage.end()
        self._stage, self._name = None, ""


@contextmanager
def step(name: str, run: str, **about: str | int | None) -> Iterator[None]:
    """Until the block ends, this thread works on a step of the run: a span, in the run's trace. An error that ends
    the block is recorded. Without tracing, nothing happens."""
    provider = _provider() if is_configured(os.environ) else None
    if provider is None:
        yield
        return
    from opentelemetry.context import Context

    before, tracer = _run.set(run), provider.get_tracer("sluice")
    attributes = _known({"sluice.run": run, **{f"sluice.{key}": value for key, value in about.items()}})
    span = tracer.start_span(name, context=Context(), attributes=attributes)
    current_step = StepSpan(tracer, span)
    inside = _current.set(current_step)
    try:
        with logs.log_context(trace=format(span.get_span_context().trace_id, "032x")):
            yield
    except BaseException as error:
        _record_failure(span, error)
        raise
    finally:
        current_step.close()
        span.end()
        _current.reset(inside)
        _run.reset(before)
        # `force_flush` heeds no time, and the process may exit at once.
        thread = threading.Thread(target=provider.force_flush, name="sluice-traces", daemon=True)
        thread.start()
        thread.join(FLUSH_SECONDS)


def current_step() -> StepSpan | None:
    """The step that this thread works on; None where nothing is traced."""
    return _current.get()


def trace_tasks(
    plan: Plan, batch: int, sent: Iterable[Outcome | TaskTraffic | TaskTime]
) -> list[Outcome | TaskTraffic]:
    """Add the tasks' times to this thread's step, where it is traced, and return everything else."""
    others: list[Outcome | TaskTraffic] = []
    times: list[TaskTime] = []
    for s in sent:
        if isinstance(s, TaskTime):
            times.append(s)
        else:
            others.append(s)
    if step := current_step():
        step.tasks(plan, batch, times)
    return others


def is_configured(environ: Mapping[str, str]) -> bool:
    """Returns whether the environment names a receiver of traces."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environ.get(EXPORTER, "").strip()
    return exporter != "none" and bool(exporter or any(environ.get(name) for name in ENDPOINTS))


def trace_of(run: str) -> int:
    """The id of the run's trace: 128 bits that are evenly spread, so that samplers by ratio take their share."""
    return int.from_bytes(hashlib.sha256(run.encode()).digest()[:16], "big")


def _record_failure(span: Any, error: BaseException) -> None:
    """Record the error in the span, with the message only of our own errors: those are known to hold no secret."""
    from opentelemetry.trace import Status, StatusCode

    cause = error.__cause__ if isinstance(error.__cause__, SluiceError) else error
    span.set_attribute("error.type", type(cause).__name__)
    span.set_status(Status(StatusCode.ERROR, cause.message if isinstance(cause, SluiceError) else None))


def _known(about: Attributes) -> dict[str, str | int]:
    return {k: v for k, v in about.items() if v is not None}


def _under(span: Any) -> Any:
    from opentelemetry.trace import set_span_in_context

    return set_span_in_context(span)


@cache
def _provider() -> Any:
    """This process's own provider: one that the host's application has is left alone. None if packages are missing
    or do not support the environment's settings."""
    try:
        if find_spec("opentelemetry.sdk") is None:
            return None
        return _make_tracer()
    except ModuleNotFoundError:
        return None  # not even the API is there
    except Exception as error:  # noqa: BLE001 - the run continues without it
        log.warning("no traces: OpenTelemetry's settings are wrong (%s)", type(error).__name__)
        return None


def _make_tracer() -> Any:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class ByRun(RandomIdGenerator):
        def generate_trace_id(self) -> int:
            return trace_of(_run.get())

    logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # that it gave up; not each try
    resource = Resource.create()
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": SERVICE}))
    provider = TracerProvider(resource=resource, id_generator=ByRun())
    # By OpenTelemetry's names.
    name = os.environ.get(EXPORTER, "").strip() or "otlp"
    if name == "otlp":
        protocol = next((os.environ[p] for p in PROTOCOLS if os.environ.get(p)), "http/protobuf")
        name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    entries = [*entry_points(group="opentelemetry_traces_exporter", name=name)]
    if not entries:
        raise LookupError(name)
    provider.add_span_processor(BatchSpanProcessor(entries[0].load()()))
    return provider
