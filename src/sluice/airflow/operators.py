"""The operators: `LandWindowOperator` lands windows of a feed and commits, `CommitOperator` commits alone.

Promises: those of `sluice run`. A task that is killed, cleared or started twice reads and publishes nothing twice: the
ledger decides, and a task that meets another run fails with that run's name and retries. A task of a complete window
succeeds, so that the readers behind it run after a retry, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sluice import running
from sluice.airflow.hooks import (
    AirflowSkipException,
    BaseOperator,
    BaseOperatorLink,
    Context,
    SluiceHook,
    XCom,
    as_airflow_error,
    build_request,
    make_asset,
    name_run,
)
from sluice.pipelines.committing.commit import CommitStatus
from sluice.pipelines.errors import SluiceError, WindowOpen
from sluice.pipelines.lake import paths
from sluice.pipelines.status.batch_facts import BatchFacts
from sluice.resources.lake import open_lake
from sluice.resources.open_ports import open_ports
from sluice.running import RunOptions, RunResult

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.model.plans import Request

_REPORT = "batch_report"
"""The XCom with the place of the newest batch's report."""
_EVENT = ("feed", "outcome", "windows", "records", "files", "offsets", "report")
"""The keys of the outcome that an asset event has."""


class BatchReportLink(BaseOperatorLink):
    """The batch's report, as a link of the task."""

    name = "Batch report"

    def get_link(self, operator: BaseOperator, *, ti_key: Any) -> str:
        """Returns the address of the report; empty if the task landed nothing."""
        return str(XCom.get_value(ti_key=ti_key, key=_REPORT) or "")


class _FeedOperator(BaseOperator):
    """A task that works on a feed of a project."""

    template_fields: Sequence[str] = ("feed", "sluice_conn_id", "project")

    def __init__(
        self,
        *,
        feed: str,
        sluice_conn_id: str = SluiceHook.default_conn_name,
        project: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.feed, self.sluice_conn_id, self.project = feed, sluice_conn_id, project
        self._is_running = False

    def _load_feed(self) -> Feed:
        return SluiceHook(self.sluice_conn_id, self.project).get_conn().feed(self.feed)

    def on_kill(self) -> None:
        """End the run as Ctrl-C does: its tasks are cancelled, and the next run continues."""
        if self._is_running:
            self._is_running = False
            raise KeyboardInterrupt


class LandWindowOperator(_FeedOperator):
    """Lands the pending part of windows, publishes them, and commits. Returns the outcome.

    `window` is the start of a window, such as `2026-11-20T14`; by default the DAG run's partition key, or the windows
    of its data interval. Map several: `.partial(feed=…).expand(window=[…])`. While the window's grace period lasts, the
    task is deferred. `replace` lands the windows again. With `commit=False`, a `CommitOperator` commits. With
    `skip_when_complete`, a task with nothing pending is skipped, and makes no asset event.
    """

    template_fields: Sequence[str] = (*_FeedOperator.template_fields, "window", "replace")
    operator_extra_links = (BatchReportLink(),)
    ui_color = "#d5e8f5"

    def __init__(
        self,
        *,
        window: str | None = None,
        replace: bool | str = False,
        commit: bool = True,
        skip_when_complete: bool = False,
        **kwargs: Any,
    ) -> None:
        if "outlets" not in kwargs:
            conn_id = kwargs.get("sluice_conn_id", SluiceHook.default_conn_name)
            kwargs["outlets"] = [make_asset(kwargs["feed"], conn_id)]
        super().__init__(**kwargs)
        self.window, self.replace, self.commit = window, replace, commit
        self.skip_when_complete = skip_when_complete
        self._result: RunResult | None = None

    def execute_again(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Land after the grace period."""
        return self.execute(context)

    def execute(self, context: Context) -> dict[str, Any]:
        """Land. Raises the run's error with its remedy, AirflowSkipException with `skip_when_complete`."""
        self._is_running = True
        context["ti"].xcom_push(key=_REPORT, value="")  # Airflow logs an error for a link without its XCom
        try:
            feed = self._load_feed()
            request = build_request(feed, self.window, context, replace=str(self.replace).lower() == "true")
            options = RunOptions(run_id=name_run(context), commit=self.commit)
            result = running.run_feed(feed, request, open_ports, running.log_stages(self.log), options)
        except SluiceError as error:
            raise as_airflow_error(error) from None
        finally:
            self._is_running = False
        self._result = result
        return self._finish(context, feed, request, result)

    def _finish(self, context: Context, feed: Feed, request: Request, result: RunResult) -> dict[str, Any]:
        outcome = build_outcome(feed, request, result)
        if outcome["report"]:
            context["ti"].xcom_push(key=_REPORT, value=outcome["report"])
        if result.open_windows and isinstance(result.error, WindowOpen | None):
            self._wait(feed, request)
        if result.error:
            raise as_airflow_error(result.error) from None
        if result.uncommitted or result.table:
            self.log.warning("%s", result.uncommitted or result.table)
        if outcome["outcome"] == "complete":
            message = f"{request} of {feed.name} was complete before"
            if self.skip_when_complete:
                raise AirflowSkipException(message)
            self.log.info("%s", message)
        for asset in self.outlets:
            event = context["outlet_events"][asset]
            event.extra = {k: outcome[k] for k in _EVENT}
            if hasattr(event, "add_partitions"):  # Airflow 3.2
                event.add_partitions(outcome["windows"])
        return outcome

    def _wait(self, feed: Feed, request: Request) -> None:
        """Defer the task until the last requested window is past its grace period."""
        from sluice.airflow.sensors import WindowTrigger

        ends = (request.until or feed.window.end_of(request.window or 0)) + feed.window.grace
        self.log.info("waiting until %s, the end of the grace period", datetime.fromtimestamp(ends / 1000, UTC))
        self.defer(trigger=WindowTrigger(feed.name, at=ends / 1000), method_name="execute_again")

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        """Returns topics and rows of the landing, for Airflow's OpenLineage provider."""
        from airflow.providers.openlineage.extractors import OperatorLineage

        from sluice.resources.observe import lineage

        if self._result is None or self._result.landed is None:
            return OperatorLineage()
        inputs, outputs = lineage.list_datasets(self._load_feed(), self._result.landed)
        return OperatorLineage(inputs=inputs, outputs=outputs)


class CommitOperator(_FeedOperator):
    """Commits the frontier of a feed: everything that has landed without a gap. Returns the committed offsets."""

    def execute(self, context: Context) -> dict[str, Any]:
        """Commit. Raises the error with its remedy."""
        self._is_running = True
        try:
            feed = self._load_feed()
            done = running.commit_feed(feed, open_ports, running.log_stages(self.log), name_run(context))
        except SluiceError as error:
            raise as_airflow_error(error) from None
        finally:
            self._is_running = False
        moved = {str(m.key): m.after for m in done.offsets}
        return {"feed": feed.name, "status": str(done.status), "offsets": moved}


def build_outcome(feed: Feed, request: Request, result: RunResult) -> dict[str, Any]:
    """Returns the JSON document of a run for XCom: sums of its batches, and the place of the newest batch's report.

    `outcome` is `landed`, or `complete` if nothing was pending.
    """
    facts = BatchFacts([r for b in result.batches for r in b.receipts])
    published = [b.batch for b in result.batches if b.number is not None]
    committed = result.committed
    was_pending = result.batches or (committed and committed.status is CommitStatus.COMMITTED)
    return {
        "feed": feed.name,
        "outcome": "landed" if was_pending else "complete",
        "run": result.run_id,
        "windows": [*map(feed.window.name, running.list_requested(feed, request))],
        "records": facts.counts.landed,
        "quarantined": facts.counts.quarantined,
        "offsets": facts.counts.total,
        "files": facts.files,
        "bytes": facts.bytes,
        "batches": published,
        "committed": {str(m.key): m.after for m in committed.offsets} if committed else {},
        "report": open_lake(feed).locate(paths.batch_page_path(feed.stored, published[-1])) if published else "",
    }
