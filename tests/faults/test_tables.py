"""Tables under faults: publishers killed around commits and two at a time, catalogs without rights, tables of another
make, files that are gone. `test_table_stores` has what happens in a store.

The table is read by PyIceberg or deltalake, and by DuckDB, and held against what landed; nothing of ours judges it.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pyarrow as pa
import pytest

pytest.importorskip("pyiceberg")
pytest.importorskip("deltalake")

from tests import postgres
from tests.faults.account import SEED
from tests.faults.publishers import Course, Ended, ending
from tests.pipelines.landed_world import A, B, pieces

pytestmark = pytest.mark.faults


@pytest.fixture(params=["iceberg", "delta"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def local(kind: str, tmp_path: Path) -> Course:
    """A table in a folder, with something in it."""
    course = Course(tmp_path, kind)
    course.grow(*pieces(A, 100))
    course.bring_up()
    return course


# -- killed


def test_publishers_killed_at_any_moment_leave_each_row_once(kind: str, tmp_path: Path) -> None:
    """Two at a time, while batches land and files are merged under them."""
    chance, course = random.Random(SEED), Course(tmp_path, kind)
    for number in range(12):
        for key in (A, B):
            course.grow(*pieces(key, 10, number * 50, number * 50 + 50))
        if number == 6:
            course.compact()
        rivals = [course.publisher().go() for _ in range(2)]
        with ending(*rivals):
            time.sleep(chance.uniform(0.0, 1.5))
        course.check()
    course.bring_up()
    course.check(whole=True, newest=1000)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_publisher_killed_around_its_commit(when: str, local: Course) -> None:
    for number in range(1, 4):
        local.add_pending(number)
        assert local.publish(when).killed
        local.check()
    local.bring_up()


# -- a catalog in a database


def test_a_catalog_without_rights_or_away_is_named(tmp_path: Path) -> None:
    if (found := postgres.programs()) is None:
        pytest.skip("no PostgreSQL here: infra/postgres.sh installs one")
    with postgres.started(found) as server:
        name = server.database()
        server.execute("CREATE ROLE publisher LOGIN")
        uri = f"postgresql+psycopg2://publisher@/{name}?host={server.folder}"
        course = Course(tmp_path, "iceberg", uri=uri)
        course.grow(*pieces(A, 100))
        _refused(course.publish())
        server.execute("GRANT CREATE ON SCHEMA public TO publisher", name)
        course.bring_up()
        before = course.newest()
        course.grow(*pieces(B, 100))
        for right in ("SELECT", "UPDATE"):
            server.execute(f"ALTER TABLE iceberg_tables OWNER TO {server.user}", name)
            server.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON iceberg_tables TO publisher", name)
            server.execute(f"REVOKE {right} ON iceberg_tables FROM publisher", name)
            _refused(course.publish())
        server.execute("GRANT ALL ON iceberg_tables TO publisher", name)
        assert course.newest() == before
        server.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        ended = course.publish()
        assert (ended.error, "does not answer" in ended.said) == ("CatalogUnavailable", True), ended
        server.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        course.bring_up()


def _refused(ended: Ended) -> None:
    assert (ended.error, "refuses us: permission denied" in ended.said) == ("NotAuthorized", True), ended


# -- others


def test_a_table_of_another_make_under_that_name_is_left_alone(kind: str, tmp_path: Path) -> None:
    """Another schema, and partitions; nobody's of ours made it."""
    from deltalake import write_deltalake
    from pyiceberg.catalog import load_catalog
    from pyiceberg.transforms import IdentityTransform

    course, rows = Course(tmp_path, kind), pa.table({"offset": ["text"], "region": ["north"]})
    if kind == "iceberg":
        catalog = load_catalog("sluice", type="sql", uri=course.uri, warehouse=f"{course.address}/tables")
        catalog.create_namespace("db")
        made = catalog.create_table("db.orders", rows.schema)
        with made.update_spec() as spec:
            spec.add_field("region", IdentityTransform())
        made.append(rows)
        catalog.close()
    else:
        write_deltalake(f"{course.address}/data/orders", rows, partition_by=["region"])
    course.grow(*pieces(A, 100))
    before = course.newest()
    ended = course.publish()
    assert (ended.error, "belongs to nobody that Sluice knows" in ended.said) == ("TableDiffers", True), ended
    assert course.publish("", True).error == "TableDiffers", "nor does a repair touch it"
    assert course.newest() == before


@pytest.mark.parametrize("what", ["renamed", "dropped", "partitioned"])
def test_our_table_whose_shape_somebody_changed(what: str, tmp_path: Path) -> None:
    """Each row is there once, or the table takes nothing more and says why."""
    from pyiceberg.transforms import IdentityTransform

    course = Course(tmp_path, "iceberg")
    course.grow(*pieces(A, 100))
    course.bring_up()
    table = course.iceberg()
    if what == "partitioned":
        with table.update_spec() as spec:
            spec.add_field("partition", IdentityTransform())
    else:
        with table.update_schema(allow_incompatible_changes=True) as schema:
            if what == "renamed":
                schema.rename_column("value", "worth")
            else:
                schema.delete_column("value")
    course.grow(*pieces(B, 100))
    ended = course.publish()
    assert ended.error in ("", "TableRefused"), ended
    course.check(whole=not ended.error)


# -- files that are gone


def test_a_part_that_vanished_is_named_and_nothing_is_added(local: Course) -> None:
    before = local.newest()
    local.grow(*pieces(B, 100))
    part = next(p for p in Path(local.address, "data").rglob("orders-1-*.parquet"))
    hidden = part.rename(local.root / "hidden")
    ended = local.publish()
    assert (ended.error, f"{part.name} is missing" in ended.said) == ("PartUnreadable", True), ended
    assert local.newest() == before
    hidden.rename(part)
    local.bring_up()


@pytest.mark.parametrize("which", [0, -1])
def test_a_file_that_describes_the_table_vanished(which: int, local: Course) -> None:
    """A publisher names it if it needs it. Where the newest version is one less now, what it had is added again."""
    described = {"iceberg": "tables/db/orders/metadata/*.avro", "delta": "data/orders/_delta_log/*.json"}
    local.grow(*pieces(B, 100))
    some = sorted(Path(local.address).glob(described[local.kind]), key=lambda p: (p.stat().st_mtime_ns, p.name))
    hidden = some[which].rename(local.root / "hidden")
    ended = local.publish()
    assert (ended.error, "is missing or broken" in ended.said) in (("TableDiffers", True), ("", False)), ended
    if not some[which].exists():
        hidden.rename(some[which])
    local.bring_up()
