"""The encoding of each column is chosen by its first rows, and all later rows read back unchanged."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.feed.sections import LandingSettings
from sluice.pipelines.landing.writer import SAMPLE_ROWS, choose_options
from tests.examples import scale_examples

SETTINGS = LandingSettings()
ROWS = range(2 * SAMPLE_ROWS)


def write_column(values: list[Any], kind: pa.DataType) -> set[str]:
    """Write a column with these values. Returns the encodings of its values."""
    table = pa.table({"c": pa.array(values, kind)})
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, **choose_options(table, SETTINGS)) as writer:
        writer.write_table(table)
    file = pq.ParquetFile(sink.getvalue())
    assert file.read()["c"].to_pylist() == values
    return set(file.metadata.row_group(0).column(0).encodings) - {"RLE"}  # RLE encodes the levels


@pytest.mark.parametrize("kind", [pa.string(), pa.binary()])
@pytest.mark.parametrize(
    ("of", "encodings"),
    [
        pytest.param(lambda i: f"c-{i * 7919 % 2000}", {"PLAIN", "RLE_DICTIONARY"}, id="repeated"),
        pytest.param(lambda i: f"order-{i:09}", {"DELTA_BYTE_ARRAY"}, id="numbered"),
        pytest.param(lambda i: f"{hash((i, 1)):x}", {"PLAIN"}, id="at random"),
        pytest.param(lambda i: f"{i:09}" + "x" * 400, {"PLAIN"}, id="long"),
    ],
)
def test_text_encodings_by_content(kind: pa.DataType, of: Any, encodings: set[str]) -> None:
    values = [of(i) if pa.types.is_string(kind) else of(i).encode() for i in ROWS]
    assert write_column(values, kind) == encodings


def test_changing_numbers_are_delta_encoded_and_others_plain() -> None:
    assert write_column(list(ROWS), pa.int64()) == {"DELTA_BINARY_PACKED"}
    assert write_column([7 for _ in ROWS], pa.int32()) == {"PLAIN"}
    assert write_column([None for _ in ROWS], pa.int32()) == {"PLAIN"}


def test_numbers_have_a_page_index_that_readers_use_to_skip_pages() -> None:
    table = pa.table({"offset": pa.array(ROWS, pa.int64()), "value": pa.array([b"%0200d" % i for i in ROWS])})
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, **choose_options(table, SETTINGS)) as writer:
        writer.write_table(table)
    columns = [pq.ParquetFile(sink.getvalue()).metadata.row_group(0).column(i) for i in range(2)]
    assert [(c.has_offset_index, c.has_column_index) for c in columns] == [(True, True), (True, False)]


def test_bloom_filters_of_columns_and_members_exclude_values() -> None:
    """DuckDB, which reads them by itself, excludes the file for values that are not in it."""
    names = [f"{hash((i, 3)):x}" for i in ROWS]
    struct = pa.StructArray.from_arrays([pa.array(names), pa.array([i % 2 == 0 for i in ROWS])], ["name", "even"])
    table = pa.table({"name": names, "after": struct, "even": [True for _ in ROWS], "other": names})
    chosen = LandingSettings(bloom_filters=("name", "after.name", "after.even", "even", "absent", "after"))
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/part.parquet"
        with pq.ParquetWriter(path, table.schema, **choose_options(table, chosen)) as writer:
            writer.write_table(table)
        of = duckdb.sql(f"select path_in_schema, bloom_filter_offset from parquet_metadata('{path}')").fetchall()
        assert [name for name, offset in of if offset is not None] == ["name", "after, name"]
        for column, value, excludes in (("name", "x", True), ("name", names[7], False)):
            probe = duckdb.sql(
                f"select bloom_filter_excludes from parquet_bloom_probe('{path}', '{column}', '{value}')"
            )
            assert probe.fetchall() == [(excludes,)]
        assert duckdb.sql(f"select after.name from '{path}' where after.name = '{names[7]}'").fetchall() == [
            (names[7],)
        ]
    assert "bloom_filter_options" not in choose_options(table, SETTINGS)


def test_few_rows_are_plain() -> None:
    assert write_column(["a", "a"], pa.string()) == {"PLAIN"}
    assert write_column([None], pa.string()) == {"PLAIN"}


@settings(max_examples=scale_examples(25))
@given(
    first=st.lists(st.one_of(st.none(), st.text(max_size=12)), min_size=1, max_size=3),
    after=st.lists(st.one_of(st.none(), st.text(max_size=30)), max_size=200),
)
def test_later_values_read_back_under_any_encoding(
    tmp_path_factory: pytest.TempPathFactory, first: list[str | None], after: list[str | None]
) -> None:
    file = Path(tmp_path_factory.mktemp("parts")) / "part.parquet"
    begin = [(first * SAMPLE_ROWS)[i] for i in range(SAMPLE_ROWS)]
    groups = [pa.table({"c": pa.array(values, pa.string())}) for values in (begin, after) if values]
    with pq.ParquetWriter(file, groups[0].schema, **choose_options(groups[0], SETTINGS)) as writer:
        for group in groups:
            writer.write_table(group)
    assert [c for (c,) in duckdb.sql(f"SELECT c FROM '{file}'").fetchall()] == begin + after
