"""A report's SQL over real Spark: exactly the window's rows, in UTC; errors in the SQL are one line."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.pipelines.errors import Failed
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sql_report import Report
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.publishing.published_files import File
from sluice.pipelines.records.rows.row_format import RawFormat
from sluice.pipelines.schema.arrays import plain
from sluice.reading import Windows, run_report

pytestmark = pytest.mark.spark

HOUR = 3_600_000
START = 400_000 * HOUR
SQL = """-- feed: orders
SELECT date_format(date_trunc('HOUR', ts), 'HH') AS hour, currency, count(*) AS orders, sum(amount) AS revenue
FROM orders WHERE ts >= :window_start AND ts < :window_end GROUP BY ALL ORDER BY currency
"""


def make_feed() -> Feed:
    settings = {"feed": "orders", "kafka": {"bootstrap": "127.0.0.1:9"}, "topics": "orders", "start": "earliest"}
    return Feed.model_validate(settings, context={"root": Path("/")})


def make_windows(folder: Path) -> Windows:
    table = pa.table(
        {
            "ts": pa.array([START + 1, START + 2, START + 3, START + HOUR], pa.timestamp("ms", "UTC")),
            "amount": [Decimal(n) for n in (1, 2, 3, 4)],
            "currency": ["EUR", "USD", "EUR", "EUR"],
        }
    )
    path = folder / "a [1].parquet"
    pq.write_table(table, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    file = File(START, PartKind.LANDED, str(path), "", "orders", 0, 0, 4, 4, path.stat().st_size, digest)
    return Windows(make_feed(), (START,), PartKind.LANDED, (file,), table.schema)


def test_report_runs_sql_over_a_window(tmp_path: Path) -> None:
    result = run_report(Report("revenue", "orders", SQL, ""), make_windows(tmp_path))
    hour = datetime.fromtimestamp(START / 1000, UTC).strftime("%H")
    assert [list(row.values()) for row in result.to_pylist()] == [[hour, "EUR", 2, 4], [hour, "USD", 1, 2]]


def test_window_without_rows_has_the_columns_of_the_feed() -> None:
    nothing = Windows(make_feed(), (START,), PartKind.LANDED, (), plain(RawFormat.schema))
    result = run_report(Report("keys", "orders", "-- feed: orders\nSELECT key, offset FROM orders", ""), nothing)
    assert (result.num_rows, result.schema.names) == (0, ["key", "offset"])


def test_sql_error_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"report typo failed: .*curency") as failed:
        run_report(Report("typo", "orders", "-- feed: orders\nSELECT curency FROM orders", ""), make_windows(tmp_path))
    assert "reports/typo.sql" in failed.value.remedy
    assert len(failed.value.message.splitlines()) == 1
