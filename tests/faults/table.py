"""The tables of faults and promises of docs/developers/faults.md, from what `make faults` kept.

python -m tests.faults.table .sluice/faults/seed-*.jsonl            prints them
python -m tests.faults.table --write .sluice/faults/seed-*.jsonl    puts them between their marks on that page

One is of landing, one of republishing, which has a judge of its own. What nothing was kept of stays as it is.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.checker.facts import lines

PROMISES: Mapping[str, tuple[int, ...]] = {
    "nothing lost": (1, 4, 5),
    "nothing twice": (2, 9),
    "nothing made up": (3, 13),
    "in order": (6,),
    "never committed ahead, nor back": (7, 8),
    "one writer, files as listed": (10, 11),
    "one log": (12,),
    "goes on when healed": (14,),
}
PAGE = Path(__file__).parents[2] / "docs/developers/faults.md"
Record = Mapping[str, Any]
_ENDS = ("clean", "failed", "killed")
_RUNS = "/".join(_ENDS)


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m tests.faults.table", description=__doc__)
    made.add_argument("kept", type=Path, nargs="+")
    made.add_argument("--write", action="store_true")
    given = made.parse_args(arguments)
    records = [r for path in given.kept for r in lines(path)]
    back = [r for r in records if "republish" in r["fault"]]
    for mark, some, made_of in (
        ("faults", [r for r in records if r not in back], table),
        ("republish", back, way_back),
    ):
        text = "\n".join(made_of(some)) + "\n"
        if some and given.write:
            begin, end = f"<!-- {mark} -->\n", f"<!-- /{mark} -->"
            head, rest = PAGE.read_text().split(begin)
            PAGE.write_text(head + begin + text + end + rest.split(end)[1])
        elif some:
            print(text, end="")
    return 0


def table(records: Sequence[Record]) -> Iterator[str]:
    """Yields a row for each fault: its courses, how runs ended, compared rows, and the promises that held."""
    yield f"| fault | courses | {_RUNS} | rows compared | next run |"
    yield "|---|--:|--:|--:|--:|"
    for name, found in _by_fault(records, r"\[.*").items():
        yield f"| {name} | " + " | ".join(_cells(found)) + " |"
    yield f"| **all** | {' | '.join(_cells(records))} |"


def way_back(records: Sequence[Record]) -> Iterator[str]:
    """The same of republishing: in how many courses its judge held, and the next run went on."""
    yield f"| fault | courses | {_RUNS} | records compared | each once, whole, in order, as mapped |"
    yield "|---|--:|--:|--:|--:|"
    for name, found in _by_fault(records, r"[][]").items():
        yield f"| {name} | {' | '.join([*_amounts(found), _judged(found)])} |"
    yield f"| **all** | {' | '.join([*_amounts(records), _judged(records)])} |"


def _by_fault(records: Iterable[Record], without: str) -> dict[str, list[Record]]:
    """Records by the fault's name, in words; `without`: what of it is no word."""
    found: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        found[re.sub(without, " ", record["fault"]).replace("_", " ").strip()].append(record)
    return found


def _judged(found: Iterable[Record]) -> str:
    """In how many courses the judge found nothing wrong; **broken** where it did."""
    judged = [r["wrong"] for r in found if "wrong" in r]
    return "**broken**" if any(judged) else str(len(judged))


def _amounts(found: Sequence[Record]) -> Iterator[str]:
    yield str(len(found))
    yield "/".join(f"{_sum(found, f'runs {kind}' if kind != 'clean' else 'clean runs'):,}" for kind in _ENDS)
    yield f"{sum(r.get('checked', {}).get('records compared with the log', 0) for r in found):,}"


def _cells(found: Sequence[Record]) -> Iterator[str]:
    courses, *amounts = _amounts(found)
    yield ", ".join([courses, *_exceptions(found)])
    yield from amounts
    ratios = [r["first_after_s"] / r["normal_s"] for r in found if r.get("normal_s") and "first_after_s" in r]
    yield f"{statistics.median(ratios):.1f}×" if ratios else ""


def _exceptions(records: Sequence[Record]) -> Iterator[str]:
    """Yields each promise that was broken, or that the checker could not decide in every course."""
    for name, numbers in PROMISES.items():
        decided = [r for r in records if set(numbers) <= set(r.get("decided", ()))]
        if any(str(n) in r["broken"] for r in decided for n in numbers):
            yield f"**broken: {name}**"
        elif len(decided) < len(records):
            yield f"{name}: {len(decided)}"


def _sum(found: Iterable[Record], what: str) -> int:
    return sum(r.get(what, 0) for r in found)


if __name__ == "__main__":
    raise SystemExit(main())
