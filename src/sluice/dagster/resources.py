"""Feeds in assets of other code: a resource, and the specs and the I/O manager of another code location."""

# No `from __future__ import annotations` here: Dagster reads the annotations of resources themselves, not as text.

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

import sluice
from sluice.assets.runs.run_session import RunSession, as_failure
from sluice.assets.specs.asset_specs import AssetOf
from sluice.assets.steps.input_rows import load_rows
from sluice.dagster.definitions import FeedTranslator, Folder, find_feeds, read_specs
from sluice.pipelines.errors import SluiceError, UsageError
from sluice.pipelines.model.receipts import PartKind
from sluice.resources.project import Project

if TYPE_CHECKING:
    from sluice.pipelines.operating.check_window import WindowCheck
    from sluice.pipelines.operating.feed_status import FeedStatus
    from sluice.reading import When, Windows
    from sluice.running import RunResult

IO_MANAGER = "sluice_io_manager"
"""The resource key of `SluiceIOManager`."""

_FEED, _KIND = "sluice/feed", "sluice/kind"
"""Metadata of a spec: the feed, and the kind of its rows."""
_FEEDS = "The folder `feeds/` or its parent. By default: `$SLUICE_PROJECT`, or the current folder or one above it."


class SluiceResource(dg.ConfigurableResource["SluiceResource"]):
    """Read, check and land feeds in assets and ops.

        @dg.asset
        def volume(sluice: SluiceResource):
            return sluice.read("orders", "2026-11-20T14").rows

    Errors of Sluice are raised as they are, with a `remedy`.
    """

    feeds: str | None = Field(default=None, description=_FEEDS)

    def read(self, feed: str, window: "When", *, to: "When | None" = None, kind: str = "landed") -> "Windows":
        """Returns complete windows, as `sluice.read`."""
        return sluice.read(feed, window, to=to, kind=kind, project=self._root)

    def check(self, feed: str, window: "When | None" = None, *, key: Sequence[str] = ()) -> "WindowCheck":
        """Check a window, as `sluice.check`."""
        return sluice.check(feed, window, key=key, project=self._root)

    def status(self, feed: str, *, windows: int = 24) -> "FeedStatus":
        """Returns the status of a feed, as `sluice.status`."""
        return sluice.status(feed, windows=windows, project=self._root)

    def run(
        self, feeds: str | Iterable[str], windows: "When | None" = None, *, to: "When | None" = None
    ) -> "dict[str, RunResult]":
        """Land and commit feeds in this process, as `sluice.run`. A feed's error is in its result."""
        return sluice.run(feeds, windows, to=to, project=self._root)

    @property
    def _root(self) -> str:
        return str(_find_project(self.feeds).root)


class SluiceIOManager(dg.ConfigurableIOManager):
    """Loads rows of feeds in another code location, by specs of `feed_spec`. It stores nothing.

    The input's annotation decides about the type: `pandas.DataFrame`, `polars.DataFrame` or `LazyFrame`,
    `pyarrow.Table` or `dataset.Dataset`, `duckdb.DuckDBPyRelation`, `pyspark.sql.DataFrame`, or a dict of one of these
    by partition key. Without one it is `sluice.reading.Windows`.
    """

    feeds: str | None = Field(default=None, description=_FEEDS)

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        raise dg.Failure("SluiceIOManager only loads rows", metadata={"remedy": "store results with another one"})

    def load_input(self, context: dg.InputContext) -> Any:
        """Returns the rows of the input's windows. Raises dagster.Failure, also for a window that is not complete."""
        try:
            session = RunSession(_find_project(self.feeds))
            upstream = context.upstream_output
            metadata = (upstream.definition_metadata if upstream else None) or {}
            if _FEED not in metadata:
                raise UsageError(f"input `{context.name}` is no feed's asset", remedy="its spec is made by `feed_spec`")
        except SluiceError as error:
            raise as_failure(error) from error
        return load_rows(context, session, metadata[_FEED], metadata[_KIND])


def feed_spec(
    name: str,
    feeds: Folder,
    *,
    kind: str = "landed",
    translator: FeedTranslator | None = None,
    io_manager_key: str = IO_MANAGER,
) -> dg.AssetSpec:
    """Returns the spec of a feed's `landed` or `quarantined` asset, for a code location that only depends on it.

        orders = sluice.dagster.feed_spec("orders", "feeds")

        @dg.asset(ins={"rows": dg.AssetIn(orders.key)}, partitions_def=orders.partitions_def)
        def revenue(rows: pandas.DataFrame): ...

        defs = dg.Definitions([orders, revenue], resources={"sluice_io_manager": SluiceIOManager()})

    `translator` is that of the feed's own code location. Raises FeedError and UsageError.
    """
    if kind not in (PartKind.LANDED, PartKind.QUARANTINED):
        raise UsageError(f"{kind!r} is no kind of rows", remedy=f"one of {', '.join(PartKind)}")
    specs, windows = read_specs(find_feeds(feeds), name, translator)
    spec = specs.landed if kind == AssetOf.LANDED else specs.quarantined
    spec = spec.replace_attributes(partitions_def=windows)
    return spec.merge_attributes(metadata={_FEED: name, _KIND: kind}).with_io_manager_key(io_manager_key)


def _find_project(feeds: str | None) -> Project:
    return Project.find() if feeds is None else find_feeds(feeds)
