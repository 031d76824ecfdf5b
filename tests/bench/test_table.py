"""The cost of a batch on an old table: the figures come from a real table that grows as reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

pytest.importorskip("pyiceberg")
pytest.importorskip("deltalake")

from bench import table


def test_a_table_grows_and_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "BATCH", 4)
    monkeypatch.setattr(table, "STAGED", 2)
    monkeypatch.setattr(table, "ROWS", 1000)
    monkeypatch.setattr(table, "CHANGES", 100)
    rows = list[int]()
    monkeypatch.setattr(table._CurrentRows, "_write", _count_rows(table._CurrentRows._write, rows))
    report = table.run(tmp_path, lambda text: None, [1, 5])
    for grown in (report.grown["Iceberg"], report.grown["Delta"]):
        assert [(t.snapshots, t.files) for t in grown] == [(1, 10), (5, 44)]
        assert {*grown[0].seconds} == {"look", "add 4 files", "list all files"}
    assert (report.folded.rows, report.folded.changes, report.folded.buckets) == (1000, 100, 1)
    assert rows == [1000, 1000, 100, 1000], "landed, folded, landed, folded"
    assert not [*tmp_path.iterdir()]


def _count_rows(write: Callable[..., None], counts: list[int]) -> Callable[..., None]:
    def count_and_write(self: object, path: str, rows: pa.Table) -> None:
        counts.append(rows.num_rows)
        write(self, path, rows)

    return count_and_write
