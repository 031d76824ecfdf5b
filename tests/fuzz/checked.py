"""The compiled loops with every index checked: also where they read memory without numba's knowledge.

NUMBA_BOUNDSCHECK=1 checks plain indexing. Loads and stores by address (`pipelines/records/compiled/jit.py`) are checked
here: `install` goes before the loops are imported, with a cache of numba's of its own (NUMBA_CACHE_DIR).
"""

from __future__ import annotations

from typing import Any

from sluice.pipelines.records.compiled import jit
from sluice.pipelines.records.compiled.jit import CELLS, inner

_byte, _word, _cell, _item, _put = jit.byte, jit.word, jit.cell, jit.item, jit.put


@inner
def byte(buf: Any, at: int) -> int:
    if at < 0 or at >= buf.size:
        raise IndexError("a byte outside")
    return _byte(buf, at)  # type: ignore[no-any-return]


@inner
def word(buf: Any, at: int) -> int:
    if at < 0 or at + 8 > buf.size:
        raise IndexError("a word outside")
    return _word(buf, at)  # type: ignore[no-any-return]


@inner
def cell(table: Any, row: int, column: int) -> int:
    if row < 0 or row >= table.shape[0] or column < 0 or column >= CELLS:
        raise IndexError("a cell outside")
    return _cell(table, row, column)  # type: ignore[no-any-return]


@inner
def item(numbers: Any, at: int) -> int:
    if at < 0 or at >= numbers.size:
        raise IndexError("an item outside")
    return _item(numbers, at)  # type: ignore[no-any-return]


@inner
def put(numbers: Any, at: int, number: int) -> None:
    if at < 0 or at >= numbers.size:
        raise IndexError("a place outside")
    _put(numbers, at, number)


def install() -> None:
    """From here on modules that import the loads and stores get these."""
    for checked in (byte, word, cell, item, put):
        setattr(jit, checked.__name__, checked)
