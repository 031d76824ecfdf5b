"""The tables of faults and promises of docs/developers/faults.md, from the reports of `make faults`.

python -m tests.faults.table .sluice/faults/seed-*.jsonl            prints them
python -m tests.faults.table --write .sluice/faults/seed-*.jsonl    writes them between their marks on that page

One table is of landing, one of republishing, which has a separate judge. A table without reports stays unchanged.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.checker.facts import read_lines

PROMISES: Mapping[str, tuple[int, ...]] = {
    "nothing lost": (1, 4, 5),
    "no duplicates": (2, 9),
    "nothing invented": (3, 13),
    "in order": (6,),
    "commits never ahead or back": (7, 8),
    "one writer, files as listed": (10, 11),
    "one log": (12,),
    "continues once healed": (14,),
}
PAGE = Path(__file__).parents[2] / "docs/developers/faults.md"
Record = Mapping[str, Any]
_ENDS = ("clean", "failed", "killed")
_RUNS = "/".join(_ENDS)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.table", description=__doc__)
    parser.add_argument("kept", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    records = [r for path in options.kept for r in read_lines(path)]
    republishes = [r for r in records if "republish" in r["fault"]]
    for mark, group, format_rows in (
        ("faults", [r for r in records if r not in republishes], format_fault_rows),
        ("republish", republishes, format_republish_rows),
    ):
        text = "\n".join(format_rows(group)) + "\n"
        if group and options.write:
            begin, end = f"<!-- {mark} -->\n", f"<!-- /{mark} -->"
            head, rest = PAGE.read_text().split(begin)
            PAGE.write_text(head + begin + text + end + rest.split(end)[1])
        elif group:
            print(text, end="")
    return 0


def format_fault_rows(records: Sequence[Record]) -> Iterator[str]:
    """Yields a row for each fault: courses, ends of runs, compared rows, and the promises that held."""
    yield f"| fault | courses | {_RUNS} | rows compared | next run |"
    yield "|---|--:|--:|--:|--:|"
    for name, courses in _group_by_fault(records, r"\[.*").items():
        yield f"| {name} | " + " | ".join(_format_cells(courses)) + " |"
    yield f"| **all** | {' | '.join(_format_cells(records))} |"


def format_republish_rows(records: Sequence[Record]) -> Iterator[str]:
    """Yields a row for each fault of republishing: courses, ends of runs, compared records, and the judge's verdict."""
    yield f"| fault | courses | {_RUNS} | records compared | each once, whole, in order, as mapped |"
    yield "|---|--:|--:|--:|--:|"
    for name, courses in _group_by_fault(records, r"[][]").items():
        yield f"| {name} | {' | '.join([*_format_amounts(courses), _count_judged(courses)])} |"
    yield f"| **all** | {' | '.join([*_format_amounts(records), _count_judged(records)])} |"


def _group_by_fault(records: Iterable[Record], without: str) -> dict[str, list[Record]]:
    """Group records by the fault's name in words, sorted. The pattern `without` matches the rest of the name."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[re.sub(without, " ", record["fault"]).replace("_", " ").strip()].append(record)
    return dict(sorted(groups.items()))


def _count_judged(courses: Iterable[Record]) -> str:
    """Returns the number of courses that the judge accepted, or **broken**."""
    judged = [r["wrong"] for r in courses if "wrong" in r]
    return "**broken**" if any(judged) else str(len(judged))


def _format_amounts(records: Sequence[Record]) -> Iterator[str]:
    yield str(len(records))
    yield "/".join(f"{_sum(records, f'runs {kind}' if kind != 'clean' else 'clean runs'):,}" for kind in _ENDS)
    yield f"{sum(r.get('checked', {}).get('records compared with the log', 0) for r in records):,}"


def _format_cells(records: Sequence[Record]) -> Iterator[str]:
    courses, *amounts = _format_amounts(records)
    yield ", ".join([courses, *_list_exceptions(records)])
    yield from amounts
    ratios = [r["first_after_s"] / r["normal_s"] for r in records if r.get("normal_s") and "first_after_s" in r]
    yield f"{statistics.median(ratios):.1f}×" if ratios else ""


def _list_exceptions(records: Sequence[Record]) -> Iterator[str]:
    """Yields each promise that was broken, or that the checker could not decide in every course."""
    for name, numbers in PROMISES.items():
        decided = [r for r in records if set(numbers) <= set(r.get("decided", ()))]
        if any(str(n) in r["broken"] for r in decided for n in numbers):
            yield f"**broken: {name}**"
        elif len(decided) < len(records):
            yield f"{name}: {len(decided)}"


def _sum(records: Iterable[Record], name: str) -> int:
    return sum(r.get(name, 0) for r in records)


if __name__ == "__main__":
    raise SystemExit(main())
