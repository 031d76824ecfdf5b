"""A table in a real REST catalog, over S3: it equals the ledger, also with concurrent and foreign writers."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.errors import CatalogUnavailable, TableDiffers
from sluice.pipelines.maintenance.expiry import RetireRequest, expire
from sluice.pipelines.model.tables import TableChange
from sluice.pipelines.tables.check import compare
from sluice.pipelines.tables.sync import Synced, sync
from sluice.pipelines.tables.table_windows import FeedTables
from sluice.resources.lake import open_store
from sluice.resources.open_ports import open_table, open_tables
from tests import rest_catalog
from tests.pipelines.landed_world import HOUR, START, A, B, World, split_offsets
from tests.stores import Store
from tests.table_readers import get_iceberg_access

pytestmark = pytest.mark.soak


def test_a_table_in_a_rest_catalog(s3_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyiceberg")
    from pyiceberg.catalog import load_catalog
    from pyiceberg.catalog.rest import RestCatalog

    program = rest_catalog.find_jar()
    if program is None:
        pytest.skip("no Nessie here: tests/rest_catalog.py says where it comes from")
    lines = s3_store.build_feed_settings()
    with rest_catalog.run_server(program, s3_store, lines["lake"], tmp_path) as uri:
        catalog = f"{{type: rest, uri: '{uri}', warehouse: {rest_catalog.WAREHOUSE}}}"
        settings = "".join(f"{k}: {v}\n" for k, v in lines.items())
        world = World(
            tmp_path,
            f"{settings}table: {{iceberg: {{name: db.orders, catalog: {catalog}}}}}\n",
            lake=open_store(lines["lake"], s3_store.settings),
        )

        def bring_up(**options: Any) -> Synced:
            with open_tables(world.feed, world.lake) as tables:
                return sync(world.reopen_ledger(), world.lake, tables, **options)

        def read() -> Any:
            properties = {"type": "rest", "uri": uri, "warehouse": rest_catalog.WAREHOUSE}
            return load_catalog("reader", **properties, **get_iceberg_access(s3_store))

        def read_offsets() -> list[tuple[int, int]]:
            rows = read().load_table("db.orders").scan().to_arrow()
            return sorted(zip(*rows.select(["partition", "offset"]).to_pydict().values(), strict=True))

        def read_newest_snapshot() -> tuple[str, int]:
            """Read the operation and the row count of the newest snapshot, the only one that Nessie shows."""
            summary = read().load_table("db.orders").current_snapshot().summary
            return summary.operation.value, int(summary["total-records"])

        positions = [(p, o) for p in (0, 1) for o in range(200)]
        world.land(*split_offsets(A, 20))
        assert bring_up().added == 10
        assert (read_newest_snapshot(), read_offsets()) == (("append", 200), positions[:200])

        # two concurrent publishers, and a lost answer
        world.land(*split_offsets(B, 50))
        with closing(open_table(world.feed, world.lake)) as slow_table:
            commit, concurrent = slow_table.commit, list[Synced]()

            def sync_and_commit(change: TableChange) -> int:
                if not concurrent:
                    concurrent.append(bring_up())
                return commit(change)

            monkeypatch.setattr(slow_table, "commit", sync_and_commit)
            assert sync(world.reopen_ledger(), world.lake, FeedTables(slow_table)).added == 0
        assert concurrent[0].added == 4
        assert (read_newest_snapshot(), read_offsets()) == (("append", 400), positions)
        world.compact()
        commit_table = RestCatalog.commit_table

        def commit_without_answer(*arguments: Any, **keywords: Any) -> Any:
            monkeypatch.setattr(RestCatalog, "commit_table", commit_table)
            commit_table(*arguments, **keywords)
            raise ConnectionResetError("no answer")

        monkeypatch.setattr(RestCatalog, "commit_table", commit_without_answer)
        bring_up()
        assert (read_newest_snapshot(), read_offsets()) == (("replace", 400), positions)
        expire(world.ledger, world.lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness)
        assert bring_up().removed == 2
        remaining = [o for o in positions if o[1] >= 100]
        assert (read_newest_snapshot(), read_offsets()) == (("delete", 200), remaining)

        windows = read().load_table("db.orders_windows").scan().to_arrow()
        assert [w.timestamp() * 1000 for w in windows["window_start"].to_pylist()] == [START + HOUR]

        # a foreign writer, and the repair
        orders = read().load_table("db.orders")
        orders.append(orders.scan().to_arrow().slice(0, 3))
        with pytest.raises(TableDiffers, match="1 file in it is not of the feed"):
            bring_up()
        bring_up(repair=True)
        assert read_offsets() == remaining
        with closing(open_table(world.feed, world.lake)) as table:
            ledger = world.reopen_ledger()
            assert compare(ledger, world.lake, table, table.look(), ledger.read()).same
    with pytest.raises(CatalogUnavailable, match="does not answer"):
        bring_up()
