"""Tables under faults: publishers killed around commits and two at a time, catalogs without rights, foreign tables,
missing files. `test_table_stores` has the faults of stores.

PyIceberg or deltalake, and DuckDB, read the table. It is compared with the landed rows; no code of Sluice judges it.
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
from tests.faults.publishers import Course, Outcome, kill_at_exit
from tests.pipelines.landed_world import A, B, split_offsets

pytestmark = pytest.mark.faults


@pytest.fixture(params=["iceberg", "delta"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def local(kind: str, tmp_path: Path) -> Course:
    """A table with rows in a folder."""
    course = Course(tmp_path, kind)
    course.grow(*split_offsets(A, 100))
    course.bring_up()
    return course


# -- killed


def test_publishers_killed_at_any_moment_leave_each_row_once(kind: str, tmp_path: Path) -> None:
    """Two at a time, while batches land and files are merged."""
    chance, course = random.Random(SEED), Course(tmp_path, kind)
    for number in range(12):
        for key in (A, B):
            course.grow(*split_offsets(key, 10, number * 50, number * 50 + 50))
        if number == 6:
            course.compact()
        rivals = [course.start_publisher().go() for _ in range(2)]
        with kill_at_exit(*rivals):
            time.sleep(chance.uniform(0.0, 1.5))
        course.check()
    course.bring_up()
    course.check(complete=True, newest=1000)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_publisher_killed_around_its_commit(when: str, local: Course) -> None:
    for number in range(1, 4):
        local.add_pending(number)
        assert local.publish(when).killed
        local.check()
    local.bring_up()


# -- a catalog in a database


def test_catalog_that_denies_access_or_is_unreachable_is_reported(tmp_path: Path) -> None:
    if (programs := postgres.find_programs()) is None:
        pytest.skip("no PostgreSQL here: infra/postgres.sh installs one")
    with postgres.run_server(programs) as server:
        name = server.create_database()
        server.execute("CREATE ROLE publisher LOGIN")
        uri = f"postgresql+psycopg2://publisher@/{name}?host={server.folder}"
        course = Course(tmp_path, "iceberg", uri=uri)
        course.grow(*split_offsets(A, 100))
        _expect_denied(course.publish())
        server.execute("GRANT CREATE ON SCHEMA public TO publisher", name)
        course.bring_up()
        before = course.find_newest()
        course.grow(*split_offsets(B, 100))
        for right in ("SELECT", "UPDATE"):
            server.execute(f"ALTER TABLE iceberg_tables OWNER TO {server.user}", name)
            server.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON iceberg_tables TO publisher", name)
            server.execute(f"REVOKE {right} ON iceberg_tables FROM publisher", name)
            _expect_denied(course.publish())
        server.execute("GRANT ALL ON iceberg_tables TO publisher", name)
        assert course.find_newest() == before
        server.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        outcome = course.publish()
        assert (outcome.error, "does not answer" in outcome.message) == ("CatalogUnavailable", True), outcome
        server.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        course.bring_up()


def _expect_denied(outcome: Outcome) -> None:
    assert (outcome.error, "refuses us: permission denied" in outcome.message) == ("NotAuthorized", True), outcome


# -- foreign tables and changes


def test_foreign_table_of_the_same_name_is_refused(kind: str, tmp_path: Path) -> None:
    """A partitioned table with another schema, which Sluice did not create."""
    from deltalake import write_deltalake
    from pyiceberg.catalog import load_catalog
    from pyiceberg.transforms import IdentityTransform

    course, rows = Course(tmp_path, kind), pa.table({"offset": ["text"], "region": ["north"]})
    if kind == "iceberg":
        catalog = load_catalog("sluice", type="sql", uri=course.uri, warehouse=f"{course.address}/tables")
        catalog.create_namespace("db")
        table = catalog.create_table("db.orders", rows.schema)
        with table.update_spec() as spec:
            spec.add_field("region", IdentityTransform())
        table.append(rows)
        catalog.close()
    else:
        write_deltalake(f"{course.address}/data/orders", rows, partition_by=["region"])
    course.grow(*split_offsets(A, 100))
    before = course.find_newest()
    outcome = course.publish()
    assert (outcome.error, "belongs to an unknown writer" in outcome.message) == ("TableDiffers", True), outcome
    assert course.publish("", True).error == "TableDiffers", "nor does a repair touch it"
    assert course.find_newest() == before


@pytest.mark.parametrize("what", ["renamed", "dropped", "partitioned"])
def test_table_schema_is_changed_by_another_writer(what: str, tmp_path: Path) -> None:
    """Each row is there once, or the publisher refuses the table with an error."""
    from pyiceberg.transforms import IdentityTransform

    course = Course(tmp_path, "iceberg")
    course.grow(*split_offsets(A, 100))
    course.bring_up()
    table = course.load_iceberg()
    if what == "partitioned":
        with table.update_spec() as spec:
            spec.add_field("partition", IdentityTransform())
    else:
        with table.update_schema(allow_incompatible_changes=True) as schema:
            if what == "renamed":
                schema.rename_column("value", "worth")
            else:
                schema.delete_column("value")
    course.grow(*split_offsets(B, 100))
    outcome = course.publish()
    assert outcome.error in ("", "TableRefused", "TableDiffers"), outcome
    course.check(complete=not outcome.error)


# -- missing files


def test_missing_part_is_reported_and_nothing_is_added(local: Course) -> None:
    before = local.find_newest()
    local.grow(*split_offsets(B, 100))
    part = next(p for p in Path(local.address, "data").rglob("orders-1-*.parquet"))
    hidden = part.rename(local.root / "hidden")
    outcome = local.publish()
    assert (outcome.error, f"{part.name} is missing" in outcome.message) == ("PartUnreadable", True), outcome
    assert local.find_newest() == before
    hidden.rename(part)
    local.bring_up()


@pytest.mark.parametrize("which", [0, -1])
def test_metadata_file_of_the_table_is_missing(which: int, local: Course) -> None:
    """A publisher names the file if it needs it. Rows of a lost newest version are added again."""
    patterns = {"iceberg": "tables/db/orders/metadata/*.avro", "delta": "data/orders/_delta_log/*.json"}
    local.grow(*split_offsets(B, 100))
    files = sorted(Path(local.address).glob(patterns[local.kind]), key=lambda p: (p.stat().st_mtime_ns, p.name))
    hidden = files[which].rename(local.root / "hidden")
    outcome = local.publish()
    assert (outcome.error, "is missing or broken" in outcome.message) in (("TableDiffers", True), ("", False)), outcome
    if not files[which].exists():
        hidden.rename(files[which])
    local.bring_up()
