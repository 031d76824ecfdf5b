"""Tables in stores, one with an Iceberg catalog in PostgreSQL: rows appear once after landing, merging and retiring."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import polars
import pytest

from sluice.pipelines.lake.paths import is_ignored
from sluice.pipelines.maintenance.expiry import RetireRequest, expire
from sluice.pipelines.tables.sync import sync
from sluice.pipelines.tables.table_windows import FeedTables
from sluice.resources.lake import open_store
from sluice.resources.open_ports import open_table, open_tables
from tests import postgres
from tests.clouds import ACCOUNT, KEY, CloudStore
from tests.pipelines.landed_world import HOUR, START, A, B, World, split_offsets
from tests.stores import Store
from tests.table_readers import get_delta_access, get_iceberg_access


def test_iceberg_table_on_s3_with_postgresql_catalog_has_each_row_once(s3_store: Store, tmp_path: Path) -> None:
    pytest.importorskip("pyiceberg")
    from pyiceberg.catalog import load_catalog

    programs = postgres.find_programs()
    if programs is None:
        pytest.skip("no PostgreSQL here: infra/postgres.sh installs one")
    with postgres.run_server(programs) as server:
        uri = f"postgresql+psycopg2://{server.user}@/{server.create_database()}?host={server.folder}"
        lines = s3_store.build_feed_settings()
        table = f"table: {{iceberg: {{name: db.orders, catalog: {{type: sql, uri: '{uri}'}}}}}}\n"
        settings = "".join(f"{k}: {v}\n" for k, v in lines.items()) + table
        world = World(tmp_path, settings, lake=open_store(lines["lake"], s3_store.settings))
        lake = world.lake

        def bring_up() -> tuple[int, int]:
            with closing(open_table(world.feed, lake)) as table:
                done = sync(world.reopen_ledger(), lake, FeedTables(table))
            return done.added, done.removed

        world.land(*split_offsets(A, 20), *split_offsets(B, 50))
        assert bring_up() == (14, 0)
        world.compact()
        assert bring_up() == (4, 14)
        expire(world.ledger, lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness)
        assert bring_up() == (0, 2)
        properties = {"type": "sql", "uri": uri, "warehouse": f"{lines['lake']}/tables"}
        with closing(load_catalog("sluice", **properties, **get_iceberg_access(s3_store))) as catalog:
            orders = catalog.load_table("db.orders")
            rows = orders.scan(selected_fields=("partition", "offset")).to_arrow()
            assert sorted(rows.column("offset").to_pylist()) == sorted([*range(100, 200)] * 2)
            first = orders.metadata.snapshots[0].snapshot_id
            assert orders.scan(snapshot_id=first).to_arrow().num_rows == 400, "time travel finds every file"
            assert "secret" not in str(orders.metadata.properties).lower()


def bring_up(world: World, expire_before: int | None = None) -> tuple[int, int]:
    """Sync the table with the ledger. Returns the numbers of added and removed files."""
    with open_tables(world.feed, world.lake) as tables:
        done = sync(world.reopen_ledger(), world.lake, tables, expire_before=expire_before)
    return done.added, done.removed


def sync_after_changes(world: World) -> None:
    """Land, merge and retire rows, and sync the table after each step."""
    world.land(*split_offsets(A, 20), *split_offsets(B, 50))
    assert bring_up(world) == (14, 0)
    world.compact()
    assert bring_up(world) == (4, 14)
    expire(world.ledger, world.lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness)
    assert bring_up(world) == (0, 2)
    world.check()


@pytest.mark.parametrize("kind", ["s3", "azure", "google"])
def test_delta_table_on_a_store_has_each_row_once(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    store: Store | CloudStore = request.getfixturevalue(f"{kind}_store")
    lines = store.build_feed_settings()
    world = World(
        tmp_path,
        "".join(f"{k}: {v}\n" for k, v in lines.items()) + "table: {delta: {}}\n",
        lake=open_store(lines["lake"], store.settings),
    )
    sync_after_changes(world)
    access = store.delta_access if isinstance(store, CloudStore) else get_delta_access(store)

    def read_offsets(version: int | None = None) -> list[int]:
        orders = deltalake.DeltaTable(f"{lines['lake']}/data/orders", version, storage_options=access)
        return sorted(orders.to_pyarrow_table(columns=["offset"]).column("offset").to_pylist())

    def count_by_polars() -> int:
        scan = polars.scan_delta(f"{lines['lake']}/data/orders", storage_options=access)
        return scan.filter(polars.col("offset") >= 150).select("offset").collect().height

    assert read_offsets() == sorted([*range(100, 200)] * 2)
    assert len(read_offsets(1)) == 400, "time travel finds every file"
    windows = deltalake.DeltaTable(f"{lines['lake']}/tables/orders_windows", storage_options=access)
    assert windows.to_pyarrow_table().num_rows == 1
    bring_up(world, expire_before=world.now + (1 << 40))
    assert read_offsets() == sorted([*range(100, 200)] * 2)
    assert len([p for p in world.list_files() if not is_ignored(p)]) == 2
    assert count_by_polars() == 100


@pytest.mark.parametrize("scheme", ["az", "abfss", "gs"])
def test_iceberg_table_on_azure_and_google_has_each_row_once(
    scheme: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    pytest.importorskip("pyiceberg")
    from pyiceberg.catalog import load_catalog

    from sluice.resources.tables.iceberg_files import build_properties

    store: CloudStore = request.getfixturevalue("google_store" if scheme == "gs" else "azure_store")
    lines, uri = store.build_feed_settings(), f"sqlite:///{tmp_path}/catalog.db"
    if scheme == "abfss":
        lines["lake"] = lines["lake"].replace("az://lake", f"abfss://lake@{ACCOUNT}.dfs.core.windows.net")
    table = f"table: {{iceberg: {{name: db.orders, catalog: {{type: sql, uri: '{uri}'}}}}}}\n"
    settings = "".join(f"{k}: {v}\n" for k, v in lines.items()) + table
    world = World(tmp_path, settings, lake=open_store(lines["lake"], store.settings))
    sync_after_changes(world)
    files = build_properties(store.settings) if scheme != "gs" else store.pyiceberg_access
    with closing(load_catalog("sluice", type="sql", uri=uri, **files)) as catalog:
        orders = catalog.load_table("db.orders")
        if scheme == "gs":  # by PyArrow's client
            scan = orders.scan(row_filter="offset >= 150", selected_fields=("offset",)).to_arrow()
            assert scan.num_rows == 100
        else:  # by Polars' client
            lazy = polars.scan_iceberg(orders, storage_options=store.delta_access, reader_override="native")
            assert lazy.filter(polars.col("offset") >= 150).select("offset").collect().height == 100
        first = orders.metadata.snapshots[0].snapshot_id
        assert orders.scan(snapshot_id=first).to_arrow().num_rows == 400, "time travel finds every file"
        assert KEY not in str(orders.metadata) + repr(catalog.properties if scheme != "gs" else "")
    bring_up(world, expire_before=world.now + (1 << 40))
    assert len([p for p in world.list_files() if not is_ignored(p)]) == 2
