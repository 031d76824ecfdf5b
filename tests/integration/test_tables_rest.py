"""Tables in real REST catalogs, over S3: they equal the ledger, also with concurrent and foreign writers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
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
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.open_ports import open_table, open_tables
from tests import rest_catalog, spark_reader
from tests.integration.support import FeedProject, run
from tests.integration.test_current import Customers, build_change, build_row
from tests.pipelines.landed_world import HOUR, START, A, B, World, split_offsets
from tests.stores import Store
from tests.table_readers import IcebergReader, get_iceberg_access

RunCatalog = Callable[[str, Path], AbstractContextManager[str]]
"""Runs a catalog over the lake at this address, with files in this folder; yields its own address."""


@pytest.fixture(
    params=[pytest.param("reference", marks=pytest.mark.slow), pytest.param("nessie", marks=pytest.mark.soak)]
)
def run_catalog(request: pytest.FixtureRequest, s3_store: Store) -> RunCatalog:
    pytest.importorskip("pyiceberg")
    find, run = {
        "reference": (rest_catalog.fetch_reference, rest_catalog.run_reference),
        "nessie": (rest_catalog.find_jar, rest_catalog.run_nessie),
    }[request.param]
    if (program := find()) is None:
        pytest.skip("this catalog is not installed: see tests/rest_catalog.py")
    return lambda lake, folder: run(program, s3_store, lake, folder)


def test_a_table_in_a_rest_catalog(
    run_catalog: RunCatalog, s3_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyiceberg.catalog import load_catalog
    from pyiceberg.catalog.rest import RestCatalog

    lines = s3_store.build_feed_settings()
    with run_catalog(lines["lake"], tmp_path) as uri:
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


@pytest.mark.slow
def test_history_and_current_rows_in_the_reference_catalog(
    kafka: LocalKafka,
    fresh_topic: Callable[..., str],
    s3_store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each change is in history once, also after a lost answer. Readers get their credentials from the catalog."""
    pytest.importorskip("pyiceberg")
    from pyiceberg.catalog.rest import RestCatalog

    if (jars := rest_catalog.fetch_reference()) is None:
        pytest.skip("this catalog is not installed: see tests/rest_catalog.py")
    lines = s3_store.build_feed_settings()
    with rest_catalog.run_reference(jars, s3_store, lines["lake"], tmp_path) as uri:
        catalog = {"type": "rest", "uri": uri}
        table = {"iceberg": {"name": "db.customers", "catalog": catalog}, "current": "db.customers_now"}
        project = FeedProject(tmp_path, kafka, fresh_topic())
        customers = Customers(project, "{format: debezium, key: [id]}", table=json.dumps(table), **lines)
        access = catalog | {"s3.endpoint": s3_store.settings.endpoint or "", "s3.path-style-access": "true"}
        history, current = (IcebergReader(f"db.{name}", access) for name in ("customers", "customers_now"))

        def read() -> tuple[dict[Any, Any], list[str]]:
            changes = history.read_rows(history.list_snapshots()[-1], ("kafka_offset", "op"))
            return dict(current.read_rows(current.list_snapshots()[-1], ("id", "name"))), [op for _, op in changes]

        ada, bea = build_row(1, "Ada"), build_row(2, "Bea")
        customers.produce(build_change("c", None, ada), build_change("c", None, bea))
        run(customers.feed)
        customers.sync()
        assert read() == ({1: "Ada", 2: "Bea"}, ["c", "c"])
        commit_table, lost = RestCatalog.commit_table, list[str]()

        def commit_without_answer(self: Any, table: Any, *arguments: Any) -> Any:
            """Lose the first answer about each table."""
            answer, name = commit_table(self, table, *arguments), table.name()[-1]
            if name not in lost:
                lost.append(name)
                raise ConnectionResetError("no answer")
            return answer

        monkeypatch.setattr(RestCatalog, "commit_table", commit_without_answer)
        customers.produce(build_change("u", ada, ada | {"name": "Ada L."}), build_change("d", bea, None))
        customers.produce(({"id": 2}, None))
        run(customers.feed)
        customers.sync()
        assert sorted(lost)[:2] == ["customers", "customers_now"]
        assert read() == ({1: "Ada L."}, ["c", "c", "u", "d", None])
        assert customers.sync().commits == 0
        with current.open_catalog() as reader:
            table = reader.load_table("db.customers_now")
        marks = [int(s.summary.additional_properties["sluice.mark"]) for s in table.metadata.snapshots]
        assert marks == sorted(set(marks))
        assert table.io.properties["s3.session-token"] == rest_catalog.VENDED
        if spark_reader.PYTHON in os.environ:
            own = access | {"io-impl": "org.apache.iceberg.aws.s3.S3FileIO", "client.region": s3_store.settings.region}
            (tmp_path / "rest.json").write_text(json.dumps(own))
            with spark_reader.Session("rest", tmp_path) as spark:
                changed = "SELECT kafka_offset, op FROM sluice.db.customers WHERE op <> 'c' AND kafka_offset >= 2"
                assert sorted(spark.read_rows(changed)) == [(2, "u"), (3, "d")]
                assert spark.read_rows("SELECT id, name FROM sluice.db.customers_now WHERE id < 9") == [(1, "Ada L.")]
