"""`sluice prune`: removes logs of old runs, which Dagster keeps indefinitely."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app.invocation import Session, command
from sluice.cli.app.parameters import option
from sluice.cli.options.request_options import DryRun
from sluice.cli.terminal.output import good, heading
from sluice.cli.terminal.text_layout import size
from sluice.pipelines.errors import UsageError
from sluice.pipelines.model.receipts import Progress
from sluice.pipelines.util.units import many, parse_duration, show_instant

if TYPE_CHECKING:
    from sluice.assets.instance.storage import RunLog


def register(app: typer.Typer) -> None:
    command(app)(prune)


def prune(
    session: Session,
    older: Annotated[
        str, option("--older", "TIME", "Minimum age of runs since their end, such as 30d.", show_default=True)
    ] = "30d",
    dry_run: DryRun = False,
) -> None:
    """Remove the logs of old runs from Dagster's history.

    Dagster keeps the log of every run, and the output of its steps, indefinitely. Partitions, checks, metadata and the
    list of runs stay; the page of an old run is empty. Lake, ledger and Kafka are not changed.

    It needs a Dagster home with SQLite, the default of Sluice. Run it once a day, by cron or a timer.

    $ sluice prune --dry-run
    $ sluice prune --older 7d
    """
    from sluice.assets.instance.instance import open_instance
    from sluice.assets.instance.storage import old_logs, remove

    now = datetime.now(UTC).timestamp() * 1000
    before = max(0, int(now - _parse_span(older)))
    old: list[RunLog] = []
    with open_instance(session.project) as instance, session.terminal.progress() as meter:
        meter(Progress("find old runs"))
        for log in old_logs(instance, session.project, datetime.fromtimestamp(before / 1000, UTC)):
            if not dry_run:
                remove(instance, log)
            old.append(log)
            meter(Progress("check" if dry_run else "remove", note=f"{many(len(old), 'run')}"))
    session.terminal.show(*view(old, before, dry_run=dry_run))
    session.terminal.print_document(
        dry_run=dry_run, before=show_instant(before), runs=old, bytes=sum(r.bytes for r in old)
    )


def _parse_span(text: str) -> int:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise UsageError(f"--older {text!r} {error}", remedy="use a time span such as 30d or 12h") from None


# -- for people


def view(old: list[RunLog], before: int, *, dry_run: bool) -> list[RenderableType]:
    title = heading("Logs of old runs", "dry run: nothing changes" if dry_run else "")
    if not old:
        return [title, good(f"no run that ended before {show_instant(before)} has a log")]
    runs = f"{many(len(old), 'run')} that ended before {show_instant(before)}: {size(sum(r.bytes for r in old))}"
    if dry_run:
        return [title, Text(f"to be removed: the logs of {runs}")]
    return [title, good(f"removed: the logs of {runs}")]
