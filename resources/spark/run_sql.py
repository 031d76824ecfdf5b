"""A report's SQL, run by Spark over one complete window.

The table of the feed's name is exactly the window's rows, by the ledger. Times are in UTC. The result comes back whole:
a report is what is left of a window, not the window again (Spark's `spark.driver.maxResultSize` bounds it).
"""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa

from sluice.pipelines.errors import Failed
from sluice.pipelines.feed.sql_report import Report
from sluice.reading import Windows
from sluice.resources.spark import engine, spark_errors


def ask(report: Report, windows: Windows) -> pa.Table:
    """The report's result. Raises Failed with what Spark says of it, SetupError without Spark."""
    session = engine.session(windows.feed.spark).newSession()
    session.conf.set("spark.sql.session.timeZone", "UTC")
    begin, end = windows.starts[0], windows.starts[-1] + windows.feed.window.length
    try:
        windows.spark(session).createOrReplaceTempView(report.feed)
        return session.sql(report.sql, args={"window_start": _time(begin), "window_end": _time(end)}).toArrow()
    except Exception as error:  # noqa: BLE001 - Spark has no common error over classic, Py4J and Connect
        raise Failed(
            f"report {report.name} failed: {spark_errors.cause(error)}",
            remedy=f"mend reports/{report.name}.sql, then run it again for this window",
        ) from None


def _time(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)
