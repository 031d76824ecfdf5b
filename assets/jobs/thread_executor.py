"""Dagster's steps of many feeds, side by side: an executor with a thread for each step, in one process with one Spark.

Dagster itself runs steps in one process one after the other, or in a process each, with a Spark each. This one has
the guarantees of Dagster's executors: every event is stored as it happens, a failed step ends no other, an interrupt
ends the run, and a step waits for its dependencies in the plan. It uses private names of Dagster, by `internals`.
Without one of them, Dagster's own executor runs the steps one after the other.

A thread takes no signal: the main thread takes it, and asks each step to stop (`stopping.Stop`). A step that does not
obey is given up: the run continues, or ends, without it.
"""

from __future__ import annotations

import contextvars
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import dagster as dg

from sluice.assets.instance.internals import build_stored, find_private
from sluice.pipelines.feed.project_files import FleetSettings
from sluice.running import STOP_SECONDS, Stop, build_feed_timeout

_NAMES = (
    *("EngineEventData", "ExecuteRunWithPlanIterable", "PlanExecutionContextManager"),
    *("dagster_event_sequence_for_step", "raise_execution_interrupts"),
)
"""Private names that the executor needs."""


class _Private:
    """The private names, as attributes."""

    def __getattr__(self, name: str) -> Any:
        return find_private(name)


private = _Private()
_WAIT_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class RunningFeed:
    """A feed whose steps run: its name, its resource shared with others (its Kafka), and its stop signal.

    `begins`: whether the step is the feed's first one, which may be left out.
    """

    feed: str
    kafka: str
    stop: Stop
    begins: bool


class Work(Protocol):
    """The work of the steps: its limits, context and summary."""

    @property
    def limits(self) -> FleetSettings: ...

    def attend(self, instance: dg.DagsterInstance, run: str) -> AbstractContextManager[None]:
        """A context in which the run is carried out."""
        ...

    def lane(self, step: str) -> RunningFeed | None:
        """The feed of a step, by the step's key; None for a step of no feed."""
        ...

    def leave(self, feed: str) -> None:
        """The feed has not begun, and does not begin in this run."""
        ...

    def fail(self, feed: str) -> None:
        """A step of the feed failed."""
        ...

    def summary(self, instance: dg.DagsterInstance, run: str) -> tuple[str, Mapping[str, Any]]:
        """Returns the outcome of the feeds for the run's log: a sentence, and metadata."""
        ...


def executor(work: Work) -> dg.ExecutorDefinition:
    """The executor of a job whose steps belong to that work."""
    if not _is_possible():
        return dg.in_process_executor
    return dg.ExecutorDefinition(
        name="side_by_side",
        executor_creation_fn=lambda init: SideBySide(work, init),
        description="Steps of several feeds at once, in threads of one process.",
    )


def _is_possible() -> bool:
    names = all(find_private(name) is not None for name in _NAMES)
    return names and _build_failure(None) is not None


def _build_failure(error: BaseException | None) -> Any:
    """The data of a failed step; None where Dagster has other ones."""
    info = {
        "__class__": "SerializableErrorInfo",
        "message": f"{error}\n",
        "stack": [],
        "cls_name": type(error).__name__,
    }
    return build_stored("StepFailureData", error=info, user_failure_data=None)


class SideBySide(dg.Executor):
    """The executor. Steps of a feed run one after the other, those of several feeds at once within the limits."""

    def __init__(self, work: Work, init: dg.InitExecutorContext) -> None:
        self._work = work
        without_retries = init._replace(executor_config={"retries": {"disabled": {}}})
        create: Any = dg.in_process_executor.executor_creation_fn
        self._dagsters: dg.Executor = create(without_retries)

    @property
    def retries(self) -> Any:
        return self._dagsters.retries

    def execute(self, plan_context: Any, execution_plan: Any) -> Iterator[dg.DagsterEvent]:
        pid, steps = os.getpid(), execution_plan.step_keys_to_execute
        yield dg.DagsterEvent.engine_event(
            plan_context,
            f"Steps side by side in one process (pid: {pid})",
            private.EngineEventData.in_process(pid, steps),
        )
        with self._work.attend(plan_context.instance, plan_context.run_id):
            yield from private.ExecuteRunWithPlanIterable(
                execution_plan=execution_plan,
                iterator=partial(_run_steps, self._work),
                execution_context_manager=private.PlanExecutionContextManager(
                    job=plan_context.job,
                    retry_mode=plan_context.retry_mode,
                    execution_plan=execution_plan,
                    run_config=plan_context.run_config,
                    dagster_run=plan_context.dagster_run,
                    instance=plan_context.instance,
                    raise_on_error=plan_context.raise_on_error,
                    output_capture=plan_context.output_capture,
                    step_dependency_config=self.step_dependency_config,
                ),
            )
        text, metadata = self._work.summary(plan_context.instance, plan_context.run_id)
        yield dg.DagsterEvent.engine_event(plan_context, text, private.EngineEventData(metadata=metadata))


def _run_steps(work: Work, job_context: Any, execution_plan: Any) -> Iterator[dg.DagsterEvent]:
    with (
        execution_plan.start(
            retry_mode=job_context.retry_mode,
            step_dependency_config=job_context.step_dependency_config,
        ) as active,
        ExitStack() as captured,
    ):
        yield from _capture_output(job_context, execution_plan, captured)
        yield from _Threads(work, job_context, active).run()


def _capture_output(job_context: Any, execution_plan: Any, stack: ExitStack) -> Iterator[dg.DagsterEvent]:
    """Capture the output of steps in one log for the process."""
    logs, keys = job_context.instance.compute_log_manager, [*execution_plan.step_keys_to_execute]
    log_key = logs.build_log_key_for_run(job_context.run_id, secrets.token_hex(4))
    with suppress(OSError):  # a run without its output is still a run
        context = stack.enter_context(logs.capture_logs(log_key))
        yield dg.DagsterEvent.capture_logs(job_context, keys, [*log_key], context)


@dataclass
class _Step:
    """A step at work. `stop_requested_at`: in seconds; `ended`: its last event is there; `over`: its thread has ended,
    or was given up."""

    context: Any
    lane: RunningFeed | None
    since: float = field(default_factory=time.monotonic)
    stop_requested_at: float | None = None
    ended: bool = False
    over: bool = False

    @property
    def key(self) -> str:
        return str(self.context.step.key)


_Message = tuple[_Step, list[dg.DagsterEvent] | BaseException | None]
"""A step's events, the error that ended its thread, or that the thread has ended."""
_EVENTS_AT_ONCE = 100
"""The most events of a message: Dagster has stored each, so the main thread needs them when the step ends."""


class _Threads:
    """The steps at work, and those that wait for room."""

    def __init__(self, work: Work, job_context: Any, active: Any) -> None:
        self._work, self._context, self._active = work, job_context, active
        self._began = time.monotonic()
        self._waiting: list[tuple[Any, RunningFeed | None]] = []
        self._running: dict[str, _Step] = {}
        self._messages: SimpleQueue[_Message] = SimpleQueue()
        self._given_up = 0
        self._has_news = True
        """Whether a step has ended since Dagster was asked for the next ones, which takes longer the more there are."""

    def run(self) -> Iterator[dg.DagsterEvent]:
        try:
            while self._running or not self._active.is_complete:
                yield from self._find_next()
                yield from self._skip_late()
                self._begin()
                if not self._running:
                    self._has_news = True
                    continue  # the step left out may have been the last
                with private.raise_execution_interrupts():
                    message = self._wait_for_message()
                yield from self._handle(message)
                yield from self._stop_overdue()
        except (KeyboardInterrupt, dg.DagsterExecutionInterruptedError) as interrupt:
            yield from self._stop_all(interrupt)
            raise
        except Exception as error:
            yield from self._stop_all(error)  # before shared resources are closed
            raise

    def _wait_for_message(self) -> _Message | None:
        with suppress(Empty):
            return self._messages.get(timeout=_WAIT_SECONDS)
        return None

    # -- what begins

    def _find_next(self) -> Iterator[dg.DagsterEvent]:
        """Queue the steps that can begin since others have ended."""
        if self._has_news:
            self._has_news = False
            yield from self._active.plan_events_iterator(self._context)
            self._queue(self._active.get_steps_to_execute())

    def _queue(self, steps: Sequence[Any]) -> None:
        """Have steps wait: those of no feed come first, then those that commit, then the first ones of feeds."""
        if steps:
            self._waiting += [(step, self._work.lane(step.key)) for step in steps]
            self._waiting.sort(key=lambda of: 0 if of[1] is None else 2 if of[1].begins else 1)

    def _begin(self) -> None:
        """Start the steps for which there is room."""
        limits, at_work = self._work.limits, Counter(s.lane.kafka for s in self._running.values() if s.lane)
        still = list[tuple[Any, RunningFeed | None]]()
        for number, (step, lane) in enumerate(self._waiting):
            if lane is not None:
                if at_work.total() >= limits.feeds_at_once:
                    still += self._waiting[number:]
                    break
                if at_work[lane.kafka] >= limits.per_kafka:
                    still.append((step, lane))
                    continue
                at_work[lane.kafka] += 1
            self._start(_Step(self._context.for_step(step, self._active.get_known_state()), lane))
        self._waiting = still

    def _start(self, step: _Step) -> None:
        self._running[step.key] = step
        body = partial(contextvars.copy_context().run, self._run_step, step)
        # No pool: its threads would be waited for at this process's end, also one that hangs.
        threading.Thread(target=body, name=f"sluice-{step.key}", daemon=True).start()

    def _run_step(self, step: _Step) -> None:
        events = list[dg.DagsterEvent]()
        failed: BaseException | None = None
        try:
            for event in private.dagster_event_sequence_for_step(step.context):
                events.append(event)
                if len(events) == _EVENTS_AT_ONCE:
                    self._messages.put((step, events))
                    events = []
        except BaseException as error:  # noqa: BLE001 - the main thread judges it
            failed = error
        self._messages.put((step, events))
        if failed is not None:
            self._messages.put((step, failed))
        self._messages.put((step, None))

    def _skip_late(self) -> Iterator[dg.DagsterEvent]:
        """Feeds that will not begin: their steps are skipped, not failed."""
        is_late = time.monotonic() - self._began > self._work.limits.deadline / 1000
        if not is_late and self._given_up < self._work.limits.feeds_at_once:
            return
        for waiting in [*self._waiting]:
            step, lane = waiting
            if lane and lane.begins:
                self._waiting.remove(waiting)
                self._work.leave(lane.feed)
                yield dg.DagsterEvent.step_skipped_event(self._context.for_step(step))
                self._active.mark_skipped(step.key)
                self._has_news = True

    def _handle(self, message: _Message | None) -> Iterator[dg.DagsterEvent]:
        if message is None or message[0].over:
            return
        step, what = message
        if isinstance(what, list):
            for event in what:
                self._active.handle_event(event)
                step.ended = step.ended or event.is_step_failure or event.is_step_success
                if event.is_step_failure and step.lane:
                    self._work.fail(step.lane.feed)
                yield event
        elif what is None:
            self._remove(step)
            self._active.verify_complete(self._context, step.key)
            yield from self._active.plan_events_iterator(self._context)  # finds the steps that it made
        elif isinstance(what, Exception) and step.lane and not step.ended:
            step.lane.stop.ask(what)  # the thread could not even store that the step failed
            yield from self._fail(step)
        elif step.lane is None or step.lane.stop.why is None:
            raise what  # an interrupt that only this thread had, or a mistake of Dagster's
        # else: it was asked to stop, and its failure is reported

    def _remove(self, step: _Step) -> None:
        step.over = self._has_news = True
        del self._running[step.key]

    # -- ending steps

    def _stop_overdue(self) -> Iterator[dg.DagsterEvent]:
        limit, now = self._work.limits.feed_time, time.monotonic()
        for step in [*self._running.values()]:
            if step.lane is None:
                continue
            if step.stop_requested_at is None and now - step.since > limit / 1000:
                step.stop_requested_at = now
                step.lane.stop.ask(build_feed_timeout(step.lane.feed, limit))
            if step.stop_requested_at is not None and now - step.stop_requested_at > STOP_SECONDS:
                self._given_up += 1
                yield from self._fail(step)

    def _fail(self, step: _Step) -> Iterator[dg.DagsterEvent]:
        """Report that the step failed, in place of its thread."""
        why = step.lane.stop.why if step.lane else None
        event = dg.DagsterEvent.step_failure_event(step.context, _build_failure(why))
        self._remove(step)
        if step.lane:
            self._work.fail(step.lane.feed)
        self._active.handle_event(event)
        yield event

    def _stop_all(self, why: BaseException) -> Iterator[dg.DagsterEvent]:
        """Ask every step to stop, and forward their events until they have stopped or time is up."""
        until = time.monotonic() + STOP_SECONDS
        for step in self._running.values():
            if step.lane:
                step.lane.stop.ask(why)
        while self._running and time.monotonic() < until:
            with suppress(KeyboardInterrupt, dg.DagsterExecutionInterruptedError):
                yield from self._handle(self._wait_for_message())
