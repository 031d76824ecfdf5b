"""The moving progress of a run on a terminal: the stage, and while landing, how many of all offsets are done."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from sluice.cli.terminal.number_format import count

if TYPE_CHECKING:
    from sluice.pipelines.model.receipts import Progress


class Moving:
    """A line that shows the last reported stage; it vanishes afterwards."""

    def __init__(self, console: Console) -> None:
        self._bars = Bars(
            SpinnerColumn("dots"),
            TextColumn("{task.description:<14}", style="dim", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[counted]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bars.add_task("starting", total=None, counted="")

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        text = f"{progress.stage} {progress.note}".strip()
        counted = f"{count(progress.done)} of {count(progress.total)}" if progress.total else ""
        self._bars.update(
            self._task, description=text, completed=progress.done, total=progress.total or None, counted=counted
        )
