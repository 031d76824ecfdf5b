"""Every type × every reader × every filter, over what the real pipeline landed, in tables of both formats and as files.

`make readers` runs all of it, with engines in environments of their own. `make test` runs an offset range: the readers
that are here, two values of each type. `measured.json` is what each reader cannot, and docs/reading.md shows it; `make
readers HOW=write` writes both.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.readers import literals
from tests.readers.landed import Landed, landed, sets_of
from tests.readers.readers import ELSEWHERE, HERE, Answer, Read, Reader, Spark
from tests.readers.values import Query, leaves, queries

Cannot = dict[str, dict[str, str]]
"""By type and operation: `fails` (an error) or `wrong` (other rows)."""

HOW = os.environ.get("SLUICE_TEST_READERS", "")
"""Empty for the offset range; `all`; or `write`, to write what was measured."""
MOST = None if HOW else 2
MEASURED, PAGE = Path(__file__).with_name("measured.json"), Path(__file__).parents[2] / "docs" / "reading.md"
BEGIN, END = "<!-- readers -->\n", "<!-- /readers -->"


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Landing:
    return Landing(tmp_path_factory.mktemp("readers"))


class Landing:
    """Each set lands once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.of = functools.cache(self._of)

    def _of(self, store: str, name: str) -> Landed:
        return landed(self._root / store / name, store, name)


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
def test_a_filter_finds_its_rows(reader: Reader, places: Landing) -> None:
    found: Cannot = {}
    for name in sets_of(reader.store):
        place = places.of(reader.store, name)
        asked = [q for c in place.columns for leaf in leaves(c) for q in queries(leaf, MOST)]
        answers, read = reader.ask(place, asked)
        _add(found, _of_filters(reader, asked, answers))
        _add(found, _of_reading(place, read))
    known = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    key = f"{reader.store}: {reader.name}"
    if HOW == "write":
        MEASURED.write_text(json.dumps(dict(sorted({**known, key: found}.items())), indent=1, sort_keys=True) + "\n")
    elif HOW:
        assert found == known.get(key), "make readers HOW=write takes it into the docs"
    else:
        new = {
            t: {op: v for op, v in ops.items() if known.get(key, {}).get(t, {}).get(op) != v}
            for t, ops in found.items()
        }
        assert not {t: ops for t, ops in new.items() if ops}


def _of_filters(reader: Reader, asked: list[Query], answers: list[Answer]) -> Cannot:
    out: Cannot = {}
    for query, answer in zip(asked, answers, strict=True):
        if answer is None or answer == query.expected(nan_is_largest=reader.nan_is_largest):
            continue
        ops = out.setdefault(_label(query), {})
        if ops.get(query.operation) != "wrong":
            ops[query.operation] = "fails" if isinstance(answer, str) else "wrong"
    return out


def _label(query: Query) -> str:
    numbers = [v for v in query.values if isinstance(v, float) and v - v != 0]
    special = " NaN" if any(v != v for v in numbers) else " infinity" if numbers else ""
    return f"{query.leaf.type}{special}"


def _of_reading(place: Landed, read: Read) -> Cannot:
    out: Cannot = {}
    for column in place.columns:
        rows = read[column.name]
        if rows != {n: literals.expected(column.type, v) for n, v in enumerate(column.rows)}:
            out[column.type] = {"reading": "fails" if isinstance(rows, str) else "wrong"}
    return out


def _add(found: Cannot, more: Cannot) -> None:
    for text, ops in more.items():
        found.setdefault(text, {}).update(ops)


# -- the page


def test_the_page_shows_what_was_measured() -> None:
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    right = before + BEGIN + _table(json.loads(MEASURED.read_text())) + END + after
    if HOW == "write":
        PAGE.write_text(right)
    assert page == right or HOW == "write"


def _table(measured: Mapping[str, Cannot]) -> str:
    rows = ["| store | reader | all types and filters, but |", "|---|---|---|"]
    for reader in sorted((*HERE, *ELSEWHERE), key=lambda r: (r.store, r.name.lower())):
        found = measured.get(f"{reader.store}: {reader.name}")
        if found is not None:
            rows.append(f"| {reader.store} | {reader.name} | {_words(reader, found)} |")
    return "\n" + "\n".join(rows) + "\n\n"


def _words(reader: Reader, found: Cannot) -> str:
    groups: dict[str, list[str]] = {}
    for text, ops in sorted(found.items()):
        by = {v: [op for op, verdict in ops.items() if verdict == v] for v in ("fails", "wrong")}
        said = [f"{_joined(ops)} {'fail' if v == 'fails' else 'find **wrong rows**'}" for v, ops in by.items() if ops]
        groups.setdefault("; ".join(said), []).append(f"`{text}`")
    lines = [f"{', '.join(types)}: {said}" for said, types in groups.items()]
    return ". ".join([*([reader.lacks] if reader.lacks else []), *lines]) or "—"


def _joined(operations: list[str]) -> str:
    order = ("=", "<", ">=", "in", "is null", "reading")
    some = sorted(operations, key=order.index)
    return "all" if len(some) == len(order) else ", ".join(f"`{op}`" if op != "reading" else op for op in some)
