"""Conditions in SQL: the rows that pass, and invalid conditions."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from sluice.pipelines.errors import UsageError
from sluice.pipelines.republishing import row_filter
from sluice.pipelines.republishing.row_filter import Condition

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("country", pa.dictionary(pa.int8(), pa.string())),
        ("value", pa.binary()),
        ("stamp", pa.timestamp("ms", "UTC")),
    ]
)
ROWS = pa.RecordBatch.from_pylist(
    [
        {"id": n, "country": ("DE", None, "FR")[n % 3], "value": b'{"n": %d}' % n, "stamp": 1_700_000_000_000 + n}
        for n in range(100)
    ],
    schema=SCHEMA,
)


def filter_ids(sql: str) -> list[int]:
    with Condition(sql) as condition:
        condition.check(SCHEMA)
        return [n for rows in condition.filter(iter([ROWS, ROWS.slice(90)])) for n in rows.column("id").to_pylist()]


def test_matching_rows_pass_in_order() -> None:
    assert filter_ids("id >= 95") == [*range(95, 100), *range(95, 100)]
    assert filter_ids("country = 'DE' and id < 10") == [0, 3, 6, 9]
    assert filter_ids("country is null and id < 5") == [1, 4]
    assert filter_ids("stamp >= '2023-11-14T22:13:20.098Z'") == [98, 99, 98, 99]
    assert filter_ids("(decode(value)->>'$.n')::int in (7, 8)") == [7, 8]
    assert filter_ids("false") == []


@pytest.mark.parametrize(
    "sql",
    [
        "id",
        "nope > 1",
        "true, false",
        "",
        "id > 1; drop table x",
        "true) union select 1 --",
        "true order by id",
        "count(*) > 1",
        "row_number() over () < 3",
        "unnest([true, false])",
        "id > (select max(id) from rows)",
        "exists (from secret)",
        "?",
    ],
)
def test_invalid_row_condition_is_refused(sql: str) -> None:
    secret = ROWS  # noqa: F841 - a variable is no table
    with pytest.raises(UsageError, match="--where"):
        filter_ids(sql)


def test_condition_cannot_access_files_network_or_settings(tmp_path: Path) -> None:
    file = tmp_path / "secret.csv"
    file.write_text("a\n1\n")
    for sql in (
        f"exists (from read_csv('{file}'))",
        f"exists (from '{file}')",
        f"(select count(*) from read_text('{file}')) > 0",
        f"(select count(*) from glob('{tmp_path}/*')) > 0",
        "exists (from read_parquet('http://127.0.0.1:1/x.parquet'))",
        "exists (from read_csv('s3://bucket/x.csv'))",
        "getenv('HOME') is not null",
        "exists (select * from sniff_csv('/etc/passwd'))",
    ):
        with pytest.raises(UsageError, match="--where"):
            filter_ids(sql)


def test_conversion_error_does_not_show_the_value() -> None:
    assert filter_ids("try_cast(country as int) = 1") == []
    with pytest.raises(UsageError, match="ConversionException for some row") as refused:
        filter_ids("country::int = 1")
    assert "DE" not in str(refused.value)


def test_slow_condition_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_filter, "SECONDS", 0.2)
    with pytest.raises(UsageError, match="takes more than"):
        filter_ids("(select count(*) from range(100000000000)) > 0")
