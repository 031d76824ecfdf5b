"""A table whose catalog is a real REST catalog, over S3: it is what the ledger says, whoever comes between."""

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
from sluice.resources.lake.s3_lake import S3Lake
from sluice.resources.open_ports import open_table, open_tables
from tests import rest_catalog
from tests.pipelines.landed_world import HOUR, START, A, B, World, pieces
from tests.stores import Store
from tests.table_readers import iceberg_access

pytestmark = pytest.mark.soak


def test_a_table_in_a_rest_catalog(s3_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyiceberg")
    from pyiceberg.catalog import load_catalog
    from pyiceberg.catalog.rest import RestCatalog

    program = rest_catalog.jar()
    if program is None:
        pytest.skip("no Nessie here: tests/rest_catalog.py says where it comes from")
    lines = s3_store.lines()
    with rest_catalog.started(program, s3_store, lines["lake"], tmp_path) as uri:
        catalog = f"{{type: rest, uri: '{uri}', warehouse: {rest_catalog.WAREHOUSE}}}"
        more = "".join(f"{k}: {v}\n" for k, v in lines.items())
        world = World(
            tmp_path,
            f"{more}table: {{iceberg: {{name: db.orders, catalog: {catalog}}}}}\n",
            lake=S3Lake(lines["lake"], s3_store.settings),
        )

        def bring_up(**how: Any) -> Synced:
            with open_tables(world.feed, world.lake) as tables:
                return sync(world.fresh_ledger(), world.lake, tables, **how)

        def read() -> Any:
            given = {"type": "rest", "uri": uri, "warehouse": rest_catalog.WAREHOUSE}
            return load_catalog("reader", **given, **iceberg_access(s3_store))

        def offsets() -> list[tuple[int, int]]:
            rows = read().load_table("db.orders").scan().to_arrow()
            return sorted(zip(*rows.select(["partition", "offset"]).to_pydict().values(), strict=True))

        def newest() -> tuple[str, int]:
            """The operation and the rows of the newest snapshot: Nessie shows no other."""
            said = read().load_table("db.orders").current_snapshot().summary
            return said.operation.value, int(said["total-records"])

        every = [(p, o) for p in (0, 1) for o in range(200)]
        world.land(*pieces(A, 20))
        assert bring_up().added == 10
        assert (newest(), offsets()) == (("append", 200), every[:200])

        # two publishers at once, and an answer that is lost
        world.land(*pieces(B, 50))
        with closing(open_table(world.feed, world.lake)) as slow:
            commit, met = slow.commit, list[Synced]()

            def between(change: TableChange) -> int:
                if not met:
                    met.append(bring_up())
                return commit(change)

            monkeypatch.setattr(slow, "commit", between)
            assert sync(world.fresh_ledger(), world.lake, FeedTables(slow)).added == 0
        assert met[0].added == 4
        assert (newest(), offsets()) == (("append", 400), every)
        world.compact()
        done = RestCatalog.commit_table

        def silent(*given: Any, **named: Any) -> Any:
            monkeypatch.setattr(RestCatalog, "commit_table", done)
            done(*given, **named)
            raise ConnectionResetError("no answer")

        monkeypatch.setattr(RestCatalog, "commit_table", silent)
        bring_up()
        assert (newest(), offsets()) == (("replace", 400), every)
        expire(world.ledger, world.lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness)
        assert bring_up().removed == 2
        late = [o for o in every if o[1] >= 100]
        assert (newest(), offsets()) == (("delete", 200), late)

        told = read().load_table("db.orders_windows").scan().to_arrow()
        assert [w.timestamp() * 1000 for w in told["window_start"].to_pylist()] == [START + HOUR]

        # somebody else writes to it, and it is fixed
        found = read().load_table("db.orders")
        found.append(found.scan().to_arrow().slice(0, 3))
        with pytest.raises(TableDiffers, match="1 file in it is not of the feed"):
            bring_up()
        bring_up(repair=True)
        assert offsets() == late
        with closing(open_table(world.feed, world.lake)) as table:
            ledger = world.fresh_ledger()
            assert compare(ledger, world.lake, table, table.look(), ledger.read()).same
    with pytest.raises(CatalogUnavailable, match="does not answer"):
        bring_up()
