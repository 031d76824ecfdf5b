"""The table of fault courses names each promise that was broken or not decided."""

from __future__ import annotations

from typing import Any

from tests.faults.table import format_fault_rows

EVERY = list(range(1, 15))


def record_course(fault: str, decided: list[int] = EVERY, **broken: str) -> dict[str, Any]:
    counts = {"clean runs": 3, "runs killed": 1, "checked": {"records compared with the log": 1200}}
    return {
        "fault": fault,
        "decided": decided,
        "broken": {n.removeprefix("i"): why for n, why in broken.items()},
        **counts,
    }


def test_row_lists_courses_and_outcomes_of_runs() -> None:
    rows = list(
        format_fault_rows(
            [
                record_course("broker_killed[read]"),
                record_course("broker_killed[commit]") | {"normal_s": 2, "first_after_s": 3},
            ]
        )
    )
    assert rows[2] == "| broker killed | 2 | 6/0/2 | 2,400 | 1.5× |"
    assert rows[-1] == "| **all** | 2 | 6/0/2 | 2,400 | 1.5× |"


def test_broken_or_undecided_promises_are_named() -> None:
    undecided = [n for n in EVERY if n != 6]
    rows = list(format_fault_rows([record_course("a", i2="an offset has two rows"), record_course("b", undecided)]))
    assert [row.split(" | ")[1] for row in rows[2:4]] == ["1, **broken: no duplicates**", "1, in order: 0"]
    assert rows[-1].startswith("| **all** | 2, **broken: no duplicates**, in order: 1 |")
