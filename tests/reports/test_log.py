"""The log of reports matches the tests: each row's test exists, and each report has one row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
REPORT = re.compile(r"[\w.-]+/[\w.-]+#\d+")
VERDICTS = ("right", "was wrong", "wrong")


def read_rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield (report, module, test, verdict) of each row of the log."""
    module = ""
    for line in (HERE / "README.md").read_text().splitlines():
        if theme := re.match(r"Tests in `(test_\w+\.py)`", line):
            module = f"tests/reports/{theme[1]}"
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and cells[0] not in ("report", "---"):
            path, _, test = cells[2].rpartition("::")
            yield cells[0], path or module, test, cells[3]


ROWS = list(read_rows())


def test_each_report_has_one_row() -> None:
    reports = [report for report, *_ in ROWS]
    assert sorted(reports) == sorted(set(reports))


@pytest.mark.parametrize(("report", "module", "test", "verdict"), ROWS, ids=[r[0] for r in ROWS])
def test_row_names_an_existing_test(report: str, module: str, test: str, verdict: str) -> None:
    text = (ROOT / module).read_text()
    assert f"def test_{test}(" in text
    assert module not in (str(p.relative_to(ROOT)) for p in HERE.glob("*.py")) or report in text
    assert verdict.split(":")[0] in VERDICTS


def test_reports_in_the_tests_have_rows() -> None:
    reports = {r for path in HERE.glob("test_*.py") for r in REPORT.findall(path.read_text())}
    assert reports <= {report for report, *_ in ROWS}
