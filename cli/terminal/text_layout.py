"""How text and tables fit on a screen: words stay whole, commands stay in one piece, tables give columns up.

Promises: no word is cut and no command is broken, so that a command copied from a narrow screen runs. A line is wider
than the screen only if one word, or one command, is. A table that is too wide first wraps prose, then leaves out its
least important columns, with a note, then breaks each row into several lines.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

if TYPE_CHECKING:
    from sluice.pipelines.model.kafka import Key

_COMMAND = re.compile(r"\bsluice [a-z][^`;\n]*?(?=\s{2,}|[`;)\n]|$)")
_GAP = 2
_INDENT = 2
_PROSE = 28
"""The least width, in characters, that prose keeps."""


def wrap(text: Text, width: int, hang: int | None = None) -> list[Text]:
    """The text in lines of at most `width` columns, as far as words and commands allow.

    Further lines are indented by `hang`; without it, a little deeper than the first line.
    """
    return [piece for line in text.split("\n", allow_blank=True) for piece in _split_pieces(line, width, hang)]


def _split_pieces(line: Text, width: int, hang: int | None) -> Iterator[Text]:
    plain = line.plain
    if line.cell_len <= width:
        yield line
        return
    start = len(plain) - len(plain.lstrip())
    indent = Text(" " * (start + _INDENT if hang is None else hang))
    commands = [m.span() for m in _COMMAND.finditer(plain)]
    ends = [m.start() for m in re.finditer(r"(?<=\S) +(?=\S)", plain[start:])]
    breaks = [start + e for e in ends if not any(a < start + e < b for a, b in commands)]
    at, room = 0, width
    while line[at:].cell_len > room:
        after = [b for b in breaks if b > at]
        fits = [b for b in after if line[at:b].cell_len <= room]
        if not after:
            break
        end = (fits or after[:1])[-1]
        yield _indent(line[at:end], indent if at else None)
        at = end + len(plain[end:]) - len(plain[end:].lstrip())
        room = width - len(indent.plain)
    yield _indent(line[at:], indent if at else None)


def _indent(line: Text, indent: Text | None) -> Text:
    return indent + line if indent else line


@dataclass(frozen=True)
class Flowing:
    """Text that wraps between words."""

    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from wrap(self.text, options.max_width)


@dataclass(frozen=True)
class Whole:
    """A line that is never broken."""

    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.text


@dataclass(frozen=True)
class Facts:
    """Names and values, one a line; a long value goes on below its beginning."""

    pairs: Sequence[tuple[str, Text]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        column = _INDENT + max((Text(name).cell_len for name, _ in self.pairs), default=0) + _GAP
        for name, value in self.pairs:
            label = Text(" " * _INDENT).append(name, style="dim")
            for line in wrap(value, max(_PROSE, options.max_width - column), 0):
                yield label + Text(" " * (column - label.cell_len)) + line
                label = Text()


@dataclass(frozen=True)
class TextTable:
    """Columns with a dim head. `right`: those set flush right, numbers; `least`: those that go first where there is no
    room, the least important one first. All by their first words."""

    names: Sequence[str]
    rows: Sequence[Sequence[Text]]
    right: Sequence[str] = ()
    optional: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [self._column(i) for i in range(len(self.names))]
        visible, hidden = self._shown(columns, options.max_width)
        lines = _build_lines(visible, options.max_width)
        for number in range(len(self.rows) + 1):
            for indent, line in lines:
                yield from _build_row(line, number, indent)
        if hidden:
            yield Text(f"  not shown on {options.max_width} columns: {', '.join(hidden)}", style="dim")

    def _column(self, i: int) -> _TextColumn:
        name = self.names[i]
        cells = (Text(name, style="dim"), *(row[i] for row in self.rows))
        return _TextColumn(name, cells, number=name.partition(" ")[0] in self.right)

    def _shown(self, columns: Sequence[_TextColumn], width: int) -> tuple[list[_TextColumn], list[str]]:
        """Returns the columns for rows of one line, and the names of omitted ones; all columns if none fit."""
        remaining, hidden = list(columns), list[str]()
        for word in ("", *self.optional):
            hidden += [c.name for c in remaining if word and c.name.partition(" ")[0] == word]
            remaining = [c for c in remaining if c.name not in hidden]
            if _measure_least(remaining) <= width:
                return remaining, hidden
        return list(columns), []


class _TextColumn:
    """One column: its name and its cells, the head first, with its preferred and its least width."""

    def __init__(self, name: str, cells: tuple[Text, ...], *, number: bool) -> None:
        self.name, self.cells, self.number = name, cells, number
        self.wants = max(line.cell_len for c in cells for line in c.split("\n", allow_blank=True))
        words = max((Text(w).cell_len for c in cells for w in c.plain.split()), default=0)
        self.needs = self.wants if number else min(self.wants, max(words, _PROSE))


def _measure_least(columns: Sequence[_TextColumn]) -> int:
    return _INDENT + sum(c.needs for c in columns) + _GAP * (len(columns) - 1)


Line = Sequence[tuple["_TextColumn", int]]
"""Columns of one line, with their widths."""


def _build_lines(columns: Sequence[_TextColumn], width: int) -> list[tuple[int, Line]]:
    """The lines of a row, each with its indent: one, or as many as the columns need one after the other."""
    groups: list[list[_TextColumn]] = [[]]
    indent = _INDENT
    for column in columns:
        if groups[-1] and indent - _INDENT + _measure_least([*groups[-1], column]) > width:
            groups.append([])
            indent = 2 * _INDENT
        groups[-1].append(column)
    indents = [_INDENT if i == 0 else 2 * _INDENT for i in range(len(groups))]
    return [(n, _compute_widths(group, width - n)) for n, group in zip(indents, groups, strict=True)]


def _compute_widths(columns: Sequence[_TextColumn], room: int) -> Line:
    """The width of each column: the preferred one, or less if there is no room, taken from the widest first."""
    widths = [c.wants for c in columns]
    excess = sum(widths) + _GAP * (len(widths) - 1) - room
    while excess > 0:
        slack = [(w, i) for i, w in enumerate(widths) if w > columns[i].needs]
        if not slack:
            break
        widths[max(slack)[1]] -= 1
        excess -= 1
    return list(zip(columns, widths, strict=True))


def _build_row(line: Line, number: int, indent: int) -> Iterator[Text]:
    """The lines of one row (0: the head), without blanks at their ends."""
    cells = [wrap(column.cells[number], width, 0) for column, width in line]
    for pieces in zip_longest(*cells, fillvalue=Text()):
        out = Text(" " * indent)
        for piece, (column, width) in zip(pieces, line, strict=True):
            pad = " " * (width - piece.cell_len)
            out += Text(pad) + piece if column.number else piece + Text(pad)
            out.append(" " * _GAP)
        out.rstrip()
        if out.plain:
            yield out


def count(n: int | None) -> str:
    return "–" if n is None else f"{n:,}"


def size(n: float) -> str:
    """Bytes, to three digits: `1.23 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < _NEXT_UNIT:
            return f"{n:.3g} {unit}" if unit != "B" else f"{n:.0f} B"
        n /= 1000
    return f"{n:,.3g} TB"


_NEXT_UNIT = 999.5
"""From this share on, three digits are not enough."""


def format_percent(share: float) -> str:
    """A share of a whole, to two digits or more: `0.012 %`, `3.4 %`, `100 %`."""
    value = 100 * share
    if 0 < value < _SMALLEST:
        return f"under {_SMALLEST} %"
    return f"{value:.0f} %" if value >= 10 else f"{value:.2g} %"


_SMALLEST = 0.001


def seconds(s: float) -> str:
    return f"{s:.1f} s" if s < 120 else f"{int(s // 60)} min {int(s % 60)} s"


def rate(n: float, s: float, unit: str = "records") -> str:
    return f"{n / s:,.0f} {unit}/s" if s > 0 else "–"


def label_partitions(keys: Iterable[Key]) -> dict[Key, str]:
    """The partitions' names in a table. If two incarnations of a partition are listed, names include them."""
    listed = list(keys)
    several = Counter(k.tp for k in dict.fromkeys(listed))
    return {k: f"{k} (topic id {k.life})" if several[k.tp] > 1 else str(k) for k in listed}
