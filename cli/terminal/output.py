"""The output: tables and words for people, or one JSON document for programs.

Promises: with `--json`, stdout carries exactly one JSON document (one a line if a command follows something), whatever
libraries and child processes print (their stdout becomes stderr). Notes and progress go to stderr, moving ones only if
it is a terminal. Text from outside (topics, paths, messages of brokers) cannot move the cursor or write markup.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TextIO, TypeVar

from rich.console import Console, Group, RenderableType
from rich.text import Text

from sluice.cli.terminal import process
from sluice.cli.terminal.text_layout import Facts, Flowing, TextTable, Whole, count, wrap
from sluice.pipelines.errors import Failed, NotYet, Refused, SluiceError, UsageError
from sluice.pipelines.util import logs
from sluice.pipelines.util.documents import to_document, to_json
from sluice.pipelines.util.units import escape_unprintable, show_about

if TYPE_CHECKING:
    from sluice.pipelines.model.receipts import Progress, Reporter

WIDE = 160
"""The width if stdout is not a terminal: tables in a pipe are not cut to the width of a screen."""

SHOWN_ROWS = 40
"""How many rows of a table people see; `--json` has all."""

log = logging.getLogger(logs.OURS)
_C = TypeVar("_C", bound="str | Text")


class CommandOutput:
    """The output of one command. With `documents`, output for people is dropped and documents are written there."""

    def __init__(self, documents: TextIO | None = None) -> None:
        self._documents = documents
        self._out = _make_console(sys.stdout)
        self._err = _make_console(sys.stderr)

    @property
    def json(self) -> bool:
        return self._documents is not None

    @property
    def width(self) -> int:
        return self._out.width

    @property
    def height(self) -> int:
        """The lines of the screen; of a usual one if stdout is not a terminal."""
        return self._out.height if self._out.is_terminal else SHOWN_ROWS

    @property
    def unheard(self) -> bool:
        """Returns True if the reader of the output has closed it."""
        return process.unheard((self._documents or sys.stdout).fileno(), sys.stderr.fileno())

    def show(self, *what: RenderableType) -> None:
        """Print to stdout, for people. Without items, prints nothing."""
        if what and not self.json:
            self._out.print(*map(_to_renderable, what), sep="\n", soft_wrap=True)

    def lines(self, lines: Iterable[str]) -> None:
        """Print lines to stdout, for people and pipes, without wrapping."""
        if not self.json:
            sys.stdout.writelines(f"{line}\n" for line in lines)
            sys.stdout.flush()

    def markdown(self, text: str) -> None:
        """Print a page: formatted on a terminal, as Markdown in a pipe."""
        if self.fancy and not self.json:
            from rich.markdown import Markdown

            self._out.print(Markdown(text))
        else:
            self.lines(text.splitlines())

    @property
    def fancy(self) -> bool:
        """Returns True if stdout is a terminal with Unicode."""
        return self._out.is_terminal and self._out.encoding.lower().startswith("utf")

    def print_document(self, result: object = MappingProxyType({}), /, **more: object) -> None:
        """Print a result, with more keys, as a JSON document on one line. Does nothing without --json."""
        if self._documents is not None:
            document = to_document(result) | {name.removesuffix("_"): to_json(value) for name, value in more.items()}
            text = json.dumps(document, ensure_ascii=False, default=str)
            self._documents.write(text if text.isprintable() else "".join(map(_in_json, text)))
            self._documents.write("\n")
            self._documents.flush()

    def note(self, text: str, style: str = "dim") -> None:
        """Print a progress note to stderr."""
        if logs.as_json():
            log.info("%s", text)
            return
        self._tell(Text(safe(text), style=style))

    def fail(self, error: SluiceError) -> None:
        """Print the message and the remedy to stderr."""
        if logs.as_json():
            fields = {"error": type(error).__name__, "remedy": error.remedy}
            log.error("%s", error.message, extra={"about": fields})
            return
        word = "refused" if isinstance(error, Refused) else "not yet" if isinstance(error, NotYet) else "error"
        head = Text(f"{word}: ", style="bold red" if word == "error" else "bold yellow")
        self._tell(head.append(Text(safe(error.message), style="not bold default")))
        if error.remedy:
            self._tell(Text.assemble(("  → ", "bold"), safe(error.remedy)))

    def _tell(self, text: Text) -> None:
        """Print to stderr, wrapped on a terminal."""
        lines = wrap(text, self._err.width) if self._err.is_terminal else [text]
        self._err.print(*lines, sep="\n", soft_wrap=True)

    @property
    def interactive(self) -> bool:
        """True if a person can answer a question."""
        return not self.json and self._err.is_terminal and sys.stdin.isatty()

    def confirm(self, question: str) -> None:
        """Ask before a change. Raises UsageError without a terminal, and Failed unless the answer is yes."""
        if not self.interactive:
            raise UsageError(f"not confirmed: {question}", remedy="add --yes, or preview it with --dry-run")
        self._err.print(Text(f"{safe(question)} [y/N] ", style="bold"), end="", soft_wrap=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise Failed("not confirmed: nothing was changed", remedy="answer y to continue")

    def traceback(self) -> None:
        self._err.print_exception()

    @contextlib.contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Show a spinner on a terminal while the block runs."""
        if not self._err.is_terminal:
            yield
            return
        with self._err.status(Text(text, style="dim"), spinner="dots"):
            yield

    @contextlib.contextmanager
    def progress(self) -> Iterator[Reporter]:
        """Show reported progress in a moving line, on a terminal only. It vanishes with the block."""
        if not self._err.is_terminal:
            yield lambda progress: None
            return
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as ProgressBars

        stage, counts = "{task.description:<14}", TextColumn("{task.fields[counted]}", markup=False)
        columns = [TextColumn(stage, style="dim", markup=False), BarColumn(bar_width=24), counts, TimeElapsedColumn()]
        if self._err.width < _NARROW:
            columns = [TextColumn("{task.description}", style="dim", markup=False), counts]
        # A descriptor of its own: during a run, the usual ones belong to its log.
        # rich must not replace stdout and stderr either: a command may print results while the line moves.
        with (
            os.fdopen(os.dup(2), "w", encoding="utf-8") as own,
            ProgressBars(
                SpinnerColumn("dots"),
                *columns,
                console=_make_console(own),
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            ) as bars,
        ):
            task = bars.add_task("starting", total=None, counted="")
            pace = Pace(time.monotonic)

            def update(progress: Progress) -> None:
                text = f"{progress.stage} {progress.note}".strip()
                counted = f"{count(progress.done)} of {count(progress.total)}" if progress.total else ""
                counted, total = counted + pace.describe(progress), progress.total or None
                bars.update(task, description=text, completed=progress.done, total=total, counted=counted)

            yield update


_NARROW = 80
"""Columns of a terminal below which progress is text only: the rate and the time left would not fit next to a bar."""


class Pace:
    """The rate of a stage since it began, and the time that is left at this rate."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._stage, self._before, self._began = clock, "", 0, 0.0

    def describe(self, progress: Progress) -> str:
        """`, 5,200/s, 40 s left`; empty as long as a stage has no rate."""
        if progress.stage != self._stage or progress.done < self._before:
            self._stage, self._before, self._began = progress.stage, progress.done, self._clock()
        done, seconds = progress.done - self._before, self._clock() - self._began
        if seconds < 1 or not done or progress.done >= progress.total:
            return ""
        remaining = show_about(round(1000 * seconds * (progress.total - progress.done) / done))
        return f", {done / seconds:,.0f}/s, {remaining} left"


def _make_console(stream: TextIO) -> Console:
    width = None if stream.isatty() or "COLUMNS" in os.environ else WIDE
    return Console(file=stream, width=width, markup=False, emoji=False, highlight=False)


@contextlib.contextmanager
def claimed_stdout() -> Iterator[TextIO]:
    """The real stdout, for documents only: until the block ends, descriptor 1 is stderr, also for children."""
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(real), "w", encoding="utf-8") as documents:
            yield documents
    finally:
        sys.stdout.flush()
        os.dup2(real, 1)
        os.close(real)


def safe(text: str) -> str:
    """Escape control characters, which a terminal would obey."""
    return escape_unprintable(text, "\n")


def _in_json(c: str) -> str:
    """Escape a control character for JSON, which itself escapes only those below space."""
    return c if c.isprintable() else json.dumps(c)[1:-1]


# -- how things look


def heading(text: str, note: str = "") -> Text:
    """A title over a block."""
    line = Text("\n").append(safe(text), style="bold")
    return line.append(f"  {safe(note)}", style="dim") if note else line


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str | Text]], right: str = "", optional: str = ""
) -> TextTable:
    """Returns a plain table.

    `right`: columns aligned right; `optional`: columns to drop first on a narrow screen. Both by their first words.
    """
    return TextTable(columns, [[_to_cell(c) for c in row] for row in rows], right.split(), optional.split())


def limit_rows(rows: Sequence[Sequence[_C]], total: int | None = None) -> list[Sequence[_C | str]]:
    """Returns the first rows of a table, and a line with the number of the others (of `total`, default: all rows)."""
    first: list[Sequence[_C | str]] = [*rows[:SHOWN_ROWS]]
    more = (len(rows) if total is None else total) - len(first)
    return [*first, (f"… {more} more", *[""] * (len(rows[0]) - 1))] if more else first


def facts(*pairs: tuple[str, str | Text]) -> Facts:
    """Names and values, one a line."""
    return Facts([(safe(name), _to_cell(value)) for name, value in pairs])


def indent(*lines: str) -> RenderableType:
    """Returns an indented, dim block of lines."""
    return Group(*(Flowing(Text(f"  {safe(line)}", style="dim")) for text in lines for line in text.splitlines()))


def _to_renderable(item: RenderableType) -> RenderableType:
    text = Text(safe(item)) if isinstance(item, str) else item
    return Flowing(text) if isinstance(text, Text) else text


def _to_cell(value: str | Text) -> Text:
    return value if isinstance(value, Text) else Text(safe(value))


def copyable(line: str) -> Whole:
    """Returns a line to copy and run, never wrapped."""
    return Whole(Text(f"    {safe(line)}"))


def good(text: str) -> Text:
    return Text.assemble(("✓ ", "bold green"), safe(text))


def bad(text: str) -> Text:
    return Text.assemble(("✗ ", "bold red"), safe(text))


def warn(text: str) -> Text:
    return Text.assemble(("! ", "bold yellow"), safe(text))


def remedy(error: SluiceError) -> Text:
    """Formats a remedy for the line below its error."""
    return Text(safe(f"  → {error.remedy}"), style="dim")


def format_error(error: SluiceError, where: str = "") -> list[Text]:
    """Returns the error and, below it, its remedy."""
    return [bad(f"{where}{error.message}"), *([remedy(error)] if error.remedy else [])]


def format_dry_run(text: str = "nothing was changed") -> Text:
    """Returns the last line of a preview."""
    return Text(f"  A dry run: {text}.", style="bold")


def work(text: str) -> Text:
    """Returns a line for something in progress."""
    return Text.assemble(("▶ ", "bold cyan"), safe(text))
