"""Tables in a store on a bad day: publishers killed at each write, answers lost, requests refused, others in between.

The table is read by PyIceberg or deltalake, and by DuckDB, and held against what landed; nothing of ours judges it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyiceberg")
pytest.importorskip("deltalake")

from tests.faults.account import SEED
from tests.faults.publishers import Course, ending
from tests.pipelines.landed_world import A, B, pieces
from tests.resources.lake.s3_faults import Proxy, Rule
from tests.stores import Store

pytestmark = pytest.mark.faults

OF_TABLE = "(_delta_log|metadata)"
WRITES = rf"^(PUT|POST) .*{OF_TABLE}"
READS = rf"^GET .*({OF_TABLE}.*(json|avro)|list-type.*{OF_TABLE})"
STEPS = {"iceberg": range(1 + SEED % 3, 100, 3), "delta": range(1, 100)}
"""Which writes of a publisher something happens to, until it makes no more. Of Iceberg, each seed has a third."""
FEWEST = {"iceberg": 5, "delta": 1}
"""A publisher makes more writes than these."""
PARTS = r"^GET .*data/orders/.*-b\d+\.parquet"


@pytest.fixture(params=["iceberg", "delta"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def remote(kind: str, s3_store: Store, store: Proxy, tmp_path: Path) -> Course:
    """A table in a store, with something in it."""
    course = Course(tmp_path, kind, s3_store, store)
    course.grow(*pieces(A, 100))
    course.bring_up()
    return course


@pytest.mark.parametrize("when", ["refuse", "lose"])
def test_a_publisher_killed_at_each_write_to_the_store(when: str, remote: Course, store: Proxy) -> None:
    """Before the store sees it, and once it has done it. What is pending: merged files, and new ones."""
    for number in STEPS[remote.kind]:
        remote.add_pending(number)
        publisher = remote.publisher()
        with ending(publisher):
            killed = Rule(WRITES, when, then=publisher.kill)
            store.rules[:] = [Rule(WRITES, "pass", number - 1), killed]
            ended = publisher.go().ended()
        store.rules.clear()
        assert ended.killed is (killed.times == 0), ended
        remote.check()
        if killed.times:
            break
    assert number > FEWEST[remote.kind]
    remote.bring_up()


# -- a store on a bad day


@pytest.mark.parametrize("how", ["lose", "reset", "cut"])
def test_each_request_about_the_table_meets_a_bad_network(how: str, remote: Course, store: Proxy) -> None:
    """Whether the publisher asks again or gives up, nothing is there twice, and the next one adds what is pending."""
    every = OF_TABLE if how != "reset" else WRITES
    for number in STEPS[remote.kind] if how == "reset" else range(1 + SEED % 9, 200, 9):
        remote.add_pending(number)
        broken = Rule(every, how)
        store.rules[:] = [Rule(every, "pass", number - 1), broken]
        ended = remote.publish()
        store.rules.clear()
        assert ended.error in ("", "Unknown", "CatalogUnavailable", "LakeUnavailable"), ended
        remote.check()
        if broken.times:
            break
    assert number > FEWEST[remote.kind]
    remote.bring_up()


@pytest.mark.parametrize("requests", [READS, WRITES, PARTS], ids=["reads", "writes", "parts"])
def test_a_store_that_refuses_us_is_named(requests: str, remote: Course, store: Proxy) -> None:
    before = remote.newest()
    remote.grow(*pieces(B, 100))
    store.rules[:] = [Rule(requests, "refuse", -1, 403, "AccessDenied", "no")]
    asked = len(store.seen)
    ended = remote.publish()
    store.rules.clear()
    assert (ended.error, "refuses us" in ended.said or "forbids" in ended.said) == ("NotAuthorized", True), ended
    assert len(store.seen) - asked < 60, "it does not ask again and again"
    assert remote.newest() == before
    remote.bring_up()


@pytest.mark.parametrize("requests", [READS, WRITES, PARTS], ids=["reads", "writes", "parts"])
def test_a_store_that_is_away_is_waited_for_by_the_next_run(requests: str, remote: Course, store: Proxy) -> None:
    before = remote.newest()
    remote.grow(*pieces(B, 100))
    store.rules[:] = [Rule(requests, "refuse", -1)]
    ended = remote.publish()
    store.rules.clear()
    assert ended.error in ("CatalogUnavailable", "Unknown", "LakeUnavailable"), ended
    assert remote.newest() == before
    remote.bring_up()


@pytest.mark.parametrize("what", ["property", "rows"])
def test_somebody_else_commits_at_each_write(what: str, remote: Course, store: Proxy) -> None:
    """A property changes no row: the publisher decides again. Rows of others are named, and taken out by name."""
    for number in STEPS[remote.kind]:
        remote.add_pending(number)
        between = Rule(WRITES, "pass", then=lambda: _interfere(remote, what))
        store.rules[:] = [Rule(WRITES, "pass", number - 1), between]
        ended = remote.publish()
        store.rules.clear()
        if between.times:
            break
        if what == "rows":
            ended = ended if ended.error else remote.publish()
            assert (ended.error, "not of the feed" in ended.said) == ("TableDiffers", True), ended
            remote.bring_up("", True, newest=1)
        else:
            assert ended.error in ("", "Unknown"), ended
            remote.check()
    assert number > FEWEST[remote.kind]
    remote.bring_up(newest=1 if what == "rows" else 4)


def _interfere(course: Course, what: str) -> None:
    from deltalake import write_deltalake

    table = course.iceberg() if course.kind == "iceberg" else course.delta()
    if what == "property" and course.kind == "iceberg":
        with table.transaction() as change:
            change.set_properties({"owner": "somebody"})
    elif what == "property":
        table.alter.set_table_properties({"owner": "somebody"}, raise_if_not_exists=False)
    elif course.kind == "iceberg":
        table.append(table.scan(limit=3).to_arrow())
    else:
        write_deltalake(table, table.to_pyarrow_table().slice(0, 3), mode="append")
