"""Loads landed rows as inputs of other assets, in the type of the input's annotation.

The windows are those of the input's partitions, so partition mappings decide about them. Kafka is not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, get_args, get_origin

import dagster as dg

from sluice.assets.runs.run_session import RunSession, as_failure
from sluice.pipelines.errors import SluiceError, UsageError
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.receipts import PartKind

if TYPE_CHECKING:
    from sluice.reading import Windows

_CONVERSIONS: Mapping[str, Callable[[Windows], Any]] = {
    "sluice.Windows": lambda rows: rows,
    "pandas.DataFrame": lambda rows: rows.pandas(),
    "polars.DataFrame": lambda rows: rows.polars().collect(),
    "polars.LazyFrame": lambda rows: rows.polars(),
    "pyarrow.Table": lambda rows: rows.arrow(),
    "pyarrow.Dataset": lambda rows: rows.dataset(),
    "duckdb.DuckDBPyRelation": lambda rows: rows.duckdb(),
    "pyspark.DataFrame": lambda rows: rows.spark(),
}
"""By package and class of the annotation."""


class LandedRows(dg.IOManager):
    """Loads a feed's landed rows. Landing stores them, not this manager."""

    def __init__(self, session: RunSession, feed: str) -> None:
        self._session, self._feed = session, feed

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Nothing: landing returns no rows."""

    def load_input(self, context: dg.InputContext) -> Any:
        """Returns the rows of the input's windows, as `load_rows`."""
        return load_rows(context, self._session, self._feed)


def load_rows(context: dg.InputContext, session: RunSession, name: str, kind: str = PartKind.LANDED) -> Any:
    """Returns the rows of the input's windows, in the type of its annotation; without one, `sluice.reading.Windows`.

    Several windows are one value. For an annotation `dict[str, …]` they are one each, by partition key.

    Raises dagster.Failure for a window that is not complete, for other annotations, and for an input without partition.
    """
    from sluice.reading import Windows  # late: definitions load without it

    annotation = context.dagster_type.typing_type
    by_key = get_origin(annotation) is dict
    try:
        convert = _find_conversion(context.name, get_args(annotation)[1] if by_key else annotation)
        feed = session.readable_feed(name)
        lake, keys = session.open_lake(feed), _list_keys(context)
        ledger = Ledger(lake, feed.stored, lambda: 0)

        def load(*keys: str) -> Any:
            return convert(Windows.of(feed, ledger, lake, [feed.window.parse_name(k) for k in keys], PartKind(kind)))

        return {key: load(key) for key in keys} if by_key else load(*keys)
    except SluiceError as error:
        raise as_failure(error) from error


def _find_conversion(name: str, annotation: Any) -> Callable[[Windows], Any]:
    if annotation is Any:
        return _CONVERSIONS["sluice.Windows"]
    package = str(getattr(annotation, "__module__", "")).partition(".")[0]
    type_name = f"{package}.{getattr(annotation, '__name__', annotation)}"
    if type_name not in _CONVERSIONS:
        raise UsageError(
            f"input `{name}` has the type {type_name}, which rows are not loaded as",
            remedy=f"annotate it as one of {', '.join(_CONVERSIONS)}, or as dict[str, …] of one",
        )
    return _CONVERSIONS[type_name]


def _list_keys(context: dg.InputContext) -> list[str]:
    keys = list(context.asset_partition_keys) if context.has_asset_partitions else []
    if not keys:
        raise UsageError(
            f"input `{context.name}` has no window",
            remedy="give the asset the feed's `partitions_def`, or the input a partition mapping",
        )
    return keys
