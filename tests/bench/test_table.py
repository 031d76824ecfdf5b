"""The cost of a batch on an old table: the figures come from a real table that grows as reported."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyiceberg")
pytest.importorskip("deltalake")

from bench import table


def test_a_table_grows_and_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "BATCH", 4)
    monkeypatch.setattr(table, "STAGED", 2)
    report = table.run(tmp_path, lambda text: None, [1, 5])
    for grown in (report.grown["Iceberg"], report.grown["Delta"]):
        assert [(t.snapshots, t.files) for t in grown] == [(1, 10), (5, 44)]
        assert {*grown[0].seconds} == {"look", "add 4 files", "list all files"}
    assert not [*tmp_path.iterdir()]
