"""Every type × every reader × every filter, over rows of the real pipeline, in tables of both formats and as files.

`make readers` runs all combinations, with engines in separate environments. `make test` runs a sample: the readers in
this environment, two values of each type. `measured.json` records the failures of each reader, and docs/reading.md
shows them; `make readers HOW=write` writes both.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.readers import literals
from tests.readers.landed import LandedSet, land_set, list_sets
from tests.readers.readers import ELSEWHERE, HERE, Answer, ReadColumns, Reader, Spark
from tests.readers.values import Query, build_queries, list_leaves

Failures = dict[str, dict[str, str]]
"""By type and operation: `fails` (an error) or `wrong` (other rows)."""

HOW = os.environ.get("SLUICE_TEST_READERS", "")
"""Empty for the sample; `all`; or `write`, to write the measured failures to the file and the page."""
LIMIT = None if HOW else 2
MEASURED, PAGE = Path(__file__).with_name("measured.json"), Path(__file__).parents[2] / "docs" / "reading.md"
BEGIN, END = "<!-- readers -->\n", "<!-- /readers -->"


@pytest.fixture(scope="module")
def landed_sets(tmp_path_factory: pytest.TempPathFactory) -> LandedSets:
    return LandedSets(tmp_path_factory.mktemp("readers"))


class LandedSets:
    """The landed sets; each lands once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.get = functools.cache(self._land)

    def _land(self, store: str, name: str) -> LandedSet:
        return land_set(self._root / store / name, store, name)


READERS = [
    *HERE,
    *(
        pytest.param(
            r,
            marks=[
                *([pytest.mark.spark] if isinstance(r, Spark) else []),
                pytest.mark.skipif(not HOW or r.python is None, reason="only `make readers` starts it"),
            ],
        )
        for r in ELSEWHERE
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS, ids=lambda r: f"{r.store}-{r.name}")
def test_filter_returns_its_rows(reader: Reader, landed_sets: LandedSets) -> None:
    failures: Failures = {}
    for name in list_sets(reader.store):
        landed_set = landed_sets.get(reader.store, name)
        queries = [q for c in landed_set.columns for leaf in list_leaves(c) for q in build_queries(leaf, LIMIT)]
        answers, columns = reader.ask(landed_set, queries)
        _merge(failures, _check_filters(reader, queries, answers))
        _merge(failures, _check_reading(landed_set, columns))
    recorded = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    key = f"{reader.store}: {reader.name}"
    if HOW == "write":
        MEASURED.write_text(
            json.dumps(dict(sorted({**recorded, key: failures}.items())), indent=1, sort_keys=True) + "\n"
        )
    elif HOW:
        assert failures == recorded.get(key), "make readers HOW=write takes it into the docs"
    else:
        new = {
            t: {op: v for op, v in ops.items() if recorded.get(key, {}).get(t, {}).get(op) != v}
            for t, ops in failures.items()
        }
        assert not {t: ops for t, ops in new.items() if ops}


def _check_filters(reader: Reader, queries: list[Query], answers: list[Answer]) -> Failures:
    failures: Failures = {}
    for query, answer in zip(queries, answers, strict=True):
        if answer is None or answer == query.find_rows(nan_is_largest=reader.nan_is_largest):
            continue
        ops = failures.setdefault(_label(query), {})
        if ops.get(query.operation) != "wrong":
            ops[query.operation] = "fails" if isinstance(answer, str) else "wrong"
    return failures


def _label(query: Query) -> str:
    numbers = [v for v in query.values if isinstance(v, float) and v - v != 0]
    special = " NaN" if any(v != v for v in numbers) else " infinity" if numbers else ""
    return f"{query.leaf.type}{special}"


def _check_reading(landed_set: LandedSet, columns: ReadColumns) -> Failures:
    failures: Failures = {}
    for column in landed_set.columns:
        rows = columns[column.name]
        if rows != {n: literals.normalize(column.type, v) for n, v in enumerate(column.rows)}:
            failures[column.type] = {"reading": "fails" if isinstance(rows, str) else "wrong"}
    return failures


def _merge(failures: Failures, more: Failures) -> None:
    for text, ops in more.items():
        failures.setdefault(text, {}).update(ops)


# -- the page


def test_page_matches_measured_results() -> None:
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    right = before + BEGIN + _format_table(json.loads(MEASURED.read_text())) + END + after
    if HOW == "write":
        PAGE.write_text(right)
    assert page == right or HOW == "write"


def _format_table(recorded: Mapping[str, Failures]) -> str:
    rows = ["| store | reader | all types and filters, but |", "|---|---|---|"]
    for reader in sorted((*HERE, *ELSEWHERE), key=lambda r: (r.store, r.name.lower())):
        failures = recorded.get(f"{reader.store}: {reader.name}")
        if failures is not None:
            rows.append(f"| {reader.store} | {reader.name} | {_describe_failures(reader, failures)} |")
    return "\n" + "\n".join(rows) + "\n\n"


def _describe_failures(reader: Reader, failures: Failures) -> str:
    groups: dict[str, list[str]] = {}
    for text, ops in sorted(failures.items()):
        by_verdict = {v: [op for op, verdict in ops.items() if verdict == v] for v in ("fails", "wrong")}
        phrases = [
            f"{_join_operations(ops)} {'fail' if v == 'fails' else 'find **wrong rows**'}"
            for v, ops in by_verdict.items()
            if ops
        ]
        groups.setdefault("; ".join(phrases), []).append(f"`{text}`")
    lines = [f"{', '.join(types)}: {phrases}" for phrases, types in groups.items()]
    return ". ".join([*([reader.lacks] if reader.lacks else []), *lines]) or "—"


def _join_operations(operations: list[str]) -> str:
    order = ("=", "<", ">=", "in", "is null", "reading")
    ordered = sorted(operations, key=order.index)
    return "all" if len(ordered) == len(order) else ", ".join(f"`{op}`" if op != "reading" else op for op in ordered)
