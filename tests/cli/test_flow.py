"""Layout on narrow screens: words and commands are not broken, and tables drop columns."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console, RenderableType
from rich.text import Text

from sluice.cli.terminal.output import facts, table
from sluice.cli.terminal.text_layout import Flowing, wrap

pytestmark = pytest.mark.usefixtures("default_engine")

WORD = st.text("abcde-:.12", min_size=1, max_size=30)
CELL = st.lists(WORD, max_size=6).map(" ".join)


def render_lines(renderable: RenderableType, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable, soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@given(st.lists(st.tuples(CELL, WORD, CELL, WORD, CELL), max_size=4), st.sampled_from([60, 80, 120]))
@example([("a.very.long.topic-name.of.the.whole.market:12", "123,456", "", "1", "one two three four")], 60)
def test_table_breaks_no_word_and_fits_the_screen(rows: list[tuple[str, ...]], width: int) -> None:
    lines = render_lines(table(("name", "lag", "what", "rows", ""), rows, right="lag rows"), width)
    assert max(map(len, lines)) <= width
    words = [word for line in lines for word in line.split()]
    assert sorted(words) == sorted(
        [*["name", "lag", "what", "rows"], *(w for row in rows for c in row for w in c.split())]
    )


def test_table_omits_and_names_least_important_columns() -> None:
    rows = [("orders", "1" * 20, "2" * 20, "3" * 20)]
    lines = render_lines(table(("feed", "a", "b", "c"), rows, optional="b c"), 60)
    assert lines == [
        f"  feed    a{' ' * 19}  c",
        f"  orders  {'1' * 20}  {'3' * 20}",
        "  not shown on 60 columns: b",
    ]
    assert render_lines(table(("feed", "a", "b", "c"), rows, optional="b c"), 80)[1].endswith("3" * 20)


def test_table_without_optional_columns_wraps_its_rows() -> None:
    name = "a.very.long.topic-name.of.the.whole.market:12"
    lines = render_lines(table(("partition", "frontier", "lag"), [(name, "123,456", "78")], right="frontier lag"), 60)
    assert lines == [
        "  partition                                      frontier",
        "    lag",
        f"  {name}   123,456",
        "     78",
    ]


COMMAND = "sluice run orders --window 2026-11-20T14:00 --only orders:3 --replace"


@pytest.mark.parametrize("width", [20, 60, 80])
@pytest.mark.parametrize(
    "text",
    [
        f"  → land it again, which takes a while and replaces what is there: {COMMAND}",
        f"! what is meant by it is told below\n  → {COMMAND}   begins again, and says so in some more words",
        f"when it is right, run `{COMMAND}` again; and go on with the others until nothing is pending",
    ],
)
def test_command_is_never_split_across_lines(text: str, width: int) -> None:
    lines = render_lines(Flowing(Text(text)), width)
    assert any(COMMAND in line for line in lines)
    assert all(len(line) <= width for line in lines if COMMAND not in line)
    assert re.sub(r"\s+", " ", " ".join(lines)) == re.sub(r"\s+", " ", text.rstrip()).replace("\n", " ")
    assert any(COMMAND in line for line in render_lines(facts(("way out", text)), width))


def test_wrapped_lines_are_indented_and_keep_their_style() -> None:
    first, second = wrap(Text.assemble(("✗ ", "bold red"), "one two three"), 9)
    assert (first.plain, second.plain) == ("✗ one two", "  three")
    assert first.spans[0].style == "bold red"
