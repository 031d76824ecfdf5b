"""`WindowCompleteSensor` waits until a window is complete, in the triggerer by default. It reads the lake only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from sluice.airflow.hooks import BaseSensorOperator, Context, SluiceHook, as_airflow_error, build_request
from sluice.pipelines.errors import Retryable, SluiceError, UsageError
from sluice.pipelines.operating.check_window import watch_window
from sluice.pipelines.util.units import show_window
from sluice.resources.open_ports import open_ports
from sluice.resources.project import Project
from sluice.running import list_requested


class WindowTrigger(BaseTrigger):
    """Fires when the windows (their starts, ms) are complete, or with `at` (s since the epoch) at that time.

    Its event is `{"error": ""}`, or the message of an error that waiting does not end.
    """

    def __init__(
        self, feed: str, windows: Sequence[int] = (), project: str = "", at: float | None = None, poll: float = 5.0
    ) -> None:
        super().__init__()
        self.feed, self.windows, self.project, self.at, self.poll = feed, list(windows), project, at, poll

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Returns the path of the class and its arguments."""
        names = ("feed", "windows", "project", "at", "poll")
        return "sluice.airflow.sensors.WindowTrigger", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yields one event."""
        error = ""
        try:
            while not await self._is_due():
                await asyncio.sleep(self.poll if self.at is None else max(0.0, min(60.0, self.at - time.time())))
        except SluiceError as problem:
            error = f"{problem.message} → {problem.remedy}"
        yield TriggerEvent({"error": error})

    async def _is_due(self) -> bool:
        if self.at is not None:
            return time.time() >= self.at
        try:
            return await asyncio.to_thread(is_complete, self.project, self.feed, self.windows)
        except Retryable as error:
            self.log.warning("%s: %s", type(error).__name__, error.message)
            return False


def is_complete(project: str, feed: str, windows: Sequence[int]) -> bool:
    """Returns whether readers can read all of the windows (their starts, ms). Raises FeedError, UsageError."""
    readable = Project(Path(project)).readable_feed(feed)
    with open_ports(readable) as ports:
        return all(watch_window(readable, ports, window)()[1] for window in windows)


class WindowCompleteSensor(BaseSensorOperator):
    """Waits until the windows are complete: `window`, or those of the DAG run as for `LandWindowOperator`."""

    template_fields: Sequence[str] = ("feed", "sluice_conn_id", "project", "window")

    def __init__(
        self,
        *,
        feed: str,
        window: str | None = None,
        sluice_conn_id: str = SluiceHook.default_conn_name,
        project: str | None = None,
        deferrable: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.feed, self.window, self.sluice_conn_id, self.project = feed, window, sluice_conn_id, project
        self.deferrable = deferrable

    def poke(self, context: Context) -> bool:
        """Returns whether the windows are complete."""
        return is_complete(*self._resolve(context))

    def execute(self, context: Context) -> None:
        """Wait, in the triggerer if `deferrable`. Raises AirflowException with the remedy."""
        try:
            project, feed, windows = self._resolve(context)
            if not self.deferrable:
                super().execute(context)
            elif not is_complete(project, feed, windows):
                self.log.info("waiting for %s of %s", ", ".join(map(show_window, windows)), feed)
                trigger = WindowTrigger(feed, windows, project, poll=self.poke_interval)
                self.defer(trigger=trigger, method_name="execute_complete")
        except SluiceError as error:
            raise as_airflow_error(error) from None

    def execute_complete(self, context: Context, event: dict[str, Any]) -> None:
        """End the task. Raises AirflowFailException for the trigger's error."""
        if event["error"]:
            raise as_airflow_error(UsageError(event["error"]))

    def _resolve(self, context: Context) -> tuple[str, str, list[int]]:
        project = SluiceHook(self.sluice_conn_id, self.project).get_conn()
        feed = project.readable_feed(self.feed)
        request = build_request(feed, self.window, context)
        return str(project.root), feed.name, [*list_requested(feed, request)]
