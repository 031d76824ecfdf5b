"""Output: no control characters on terminals, and one JSON document with `--json`."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.cli.app.invocation import Harmless
from sluice.cli.shared import outlook_text
from sluice.cli.terminal.output import CommandOutput, Pace, facts, safe, table
from sluice.cli.terminal.text_layout import format_percent, size
from sluice.pipelines.errors import Refused, UsageError
from sluice.pipelines.model.receipts import Progress
from sluice.pipelines.status.outlook import Outlook


@given(st.text())
def test_safe_text_has_no_terminal_escapes(text: str) -> None:
    harmless = safe(text)
    assert all(c.isprintable() or c == "\n" for c in harmless)
    harmless.encode("utf-8")


def test_safe_text_keeps_printable_text() -> None:
    assert safe("Grüße – 你好\n→") == "Grüße – 你好\n→"
    assert safe("\x1b[2Jx\r\x07\ud800") == r"\x1b[2Jx\r\x07\ud800"


def test_markup_in_values_is_shown_literally(capfd: pytest.CaptureFixture[str]) -> None:
    terminal = CommandOutput()
    terminal.show(table(("topic", "n"), [("[red]orders[/red] :smile:", "1")]), facts(("path", "\x1b[31m[b]x")))
    terminal.fail(UsageError("[bold]no[/bold]", remedy="[/]"))
    out, err = capfd.readouterr()
    assert "[red]orders[/red] :smile:" in out
    assert r"\x1b[31m[b]x" in out
    assert err == "error: [bold]no[/bold]\n  → [/]\n"


def test_plain_lines_are_shown_literally(capfd: pytest.CaptureFixture[str]) -> None:
    CommandOutput().show("  [red]x\x1b[2J\x9b2J\ud800")
    assert capfd.readouterr().out == "  [red]x\\x1b[2J\\x9b2J\\ud800\n"


@given(st.text(st.characters()))
def test_document_is_json_without_terminal_escapes(text: str) -> None:
    documents = io.StringIO()
    CommandOutput(documents).print_document({text: [text]})
    assert json.loads(documents.getvalue()) == {text: [text]}
    assert documents.getvalue().rstrip("\n").isprintable()
    documents.getvalue().encode("utf-8")


def test_log_lines_of_libraries_have_no_terminal_escapes() -> None:
    record = logging.LogRecord("kafka", logging.WARNING, "x", 1, "member %s", ("\x1b[2Jé",), None)
    assert Harmless("%(name)s %(message)s").format(record) == "kafka member \\x1b[2Jé"


def test_refusal_is_printed_as_refused_and_not_as_error(capfd: pytest.CaptureFixture[str]) -> None:
    CommandOutput().fail(Refused("two\nlines", remedy="wait"))
    assert capfd.readouterr().err == "refused: two\nlines\n  → wait\n"


SPEAKS = """
import subprocess
from sluice.cli.terminal.output import CommandOutput, claimed_stdout
with claimed_stdout() as documents:
    terminal = CommandOutput(documents)
    print("a library speaks")
    subprocess.run(["echo", "a child speaks"], check=True)
    terminal.show("a table")
    terminal.print_document({"topic": "grüße", "n": 1})
print("afterwards")
"""


def test_with_json_only_the_document_is_on_stdout() -> None:
    done = subprocess.run([sys.executable, "-c", SPEAKS], capture_output=True, encoding="utf-8", check=True)
    document, rest = done.stdout.splitlines()
    assert json.loads(document) == {"topic": "grüße", "n": 1}
    assert rest == "afterwards"
    assert sorted(done.stderr.splitlines()) == ["a child speaks", "a library speaks"]


def test_progress_is_silent_if_stderr_is_not_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    terminal = CommandOutput()
    with terminal.working("asking"), terminal.progress() as meter:
        from sluice.pipelines.model.receipts import Progress

        meter(Progress("land", 1, 2))
    assert capfd.readouterr() == ("", "")


PROGRESS = """
import time
from sluice.cli.terminal.output import CommandOutput
from sluice.pipelines.model.receipts import Progress

with CommandOutput().progress() as meter:
    meter(Progress("land", 0, 3_000_000))
    time.sleep(1.1)  # a rate is of a second at least
    meter(Progress("land", 293_434, 3_000_000))
    time.sleep(0.3)  # the line is drawn ten times a second
"""


@pytest.mark.parametrize("width", [60, 120])
def test_progress_has_rate_and_time_left_in_narrow_terminals(width: int) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", PROGRESS], stderr=theirs, env=environ)
    os.close(theirs)
    text = ""
    with suppress(OSError):  # the end of a terminal
        while data := os.read(ours, 4096):
            text += data.decode(errors="replace")
    os.close(ours)
    assert process.wait(120) == 0
    assert re.search(r"293,434 of 3,000,000, [0-9,]+/s, [0-9]+ s left", text), text
    assert "…" not in text
    assert ("━" in text) == (width == 120)


def test_shares_and_sizes_have_no_exponents() -> None:
    shares = (0, 1e-7, 0.00012, 0.034, 0.5, 0.996, 1)
    assert [format_percent(s) for s in shares] == ["0 %", "under 0.001 %", "0.012 %", "3.4 %", "50 %", "100 %", "100 %"]
    assert [size(n) for n in (999_499, 999_600, 9.996e8)] == ["999 kB", "1 MB", "1 GB"]


def test_sizes_are_formatted_with_units() -> None:
    assert [size(n) for n in (0, 999, 1000, 1_234_567, 5e13)] == ["0 B", "999 B", "1 kB", "1.23 MB", "50 TB"]


def test_pace_has_rate_and_time_left_of_the_current_stage() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])

    def describe(at: float, stage: str, done: int, total: int = 0) -> str:
        now[0] = at
        return pace.describe(Progress(stage, done, total))

    assert describe(0, "land", 0, 1000) == ""
    assert describe(2, "land", 100, 1000) == ", 50/s, 18 s left"
    assert describe(30, "publish", 1000, 1000) == ""
    assert describe(60, "land", 500, 1000) == "", "another batch: no rate yet"
    assert describe(70, "land", 510, 1000) == ", 1/s, 8 min left"
    assert describe(80, "land", 1000, 1000) == ""
    assert describe(90, "read", 0) + describe(99, "read", 50) == "", "a stage without a total"


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (0, "0 offsets/s"),
        (8.5e-5, "7.3 offsets/day"),
        (0.02, "1.2 offsets/min"),
        (2.5, "2.5 offsets/s"),
        (1e4, "10,000 offsets/s"),
    ],
)
def test_rates_have_a_readable_unit(rate: float, text: str) -> None:
    ((_, words),) = outlook_text.pace(Outlook(0, production=rate))
    assert words == f"{text} produced"
