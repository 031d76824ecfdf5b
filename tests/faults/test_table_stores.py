"""Tables in a store under faults: publishers killed at each write, lost answers, refused requests, foreign commits.

PyIceberg or deltalake, and DuckDB, read the table. It is compared with the landed rows; no code of Sluice judges it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyiceberg")
pytest.importorskip("deltalake")

from tests.faults.account import SEED
from tests.faults.publishers import Course, kill_at_exit
from tests.pipelines.landed_world import A, B, split_offsets
from tests.resources.lake.s3_faults import Proxy, Rule
from tests.stores import Store

pytestmark = pytest.mark.faults

OF_TABLE = "(_delta_log|metadata)"
WRITES = rf"^(PUT|POST) .*{OF_TABLE}"
READS = rf"^GET .*({OF_TABLE}.*(json|avro)|list-type.*{OF_TABLE})"
STEPS = {"iceberg": range(1 + SEED % 3, 100, 3), "delta": range(1, 100)}
"""The numbers of the writes with a fault, up to the publisher's last. For Iceberg, each seed has a third."""
FEWEST = {"iceberg": 5, "delta": 1}
"""The minimum number of a publisher's writes, exclusive."""
PARTS = r"^GET .*data/orders/.*-b\d+\.parquet"


@pytest.fixture(params=["iceberg", "delta"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def remote(kind: str, s3_store: Store, store: Proxy, tmp_path: Path) -> Course:
    """A table with rows in a store."""
    course = Course(tmp_path, kind, s3_store, store)
    course.grow(*split_offsets(A, 100))
    course.bring_up()
    return course


@pytest.mark.parametrize("when", ["refuse", "lose"])
def test_a_publisher_killed_at_each_write_to_the_store(when: str, remote: Course, store: Proxy) -> None:
    """Before the store receives the write, and after it. Merged and new files are pending."""
    for number in STEPS[remote.kind]:
        remote.add_pending(number)
        publisher = remote.start_publisher()
        with kill_at_exit(publisher):
            rule = Rule(WRITES, when, then=publisher.kill)
            store.rules[:] = [Rule(WRITES, "pass", number - 1), rule]
            outcome = publisher.go().wait()
        store.rules.clear()
        assert outcome.killed is (rule.times == 0), outcome
        remote.check()
        if rule.times:
            break
    assert number > FEWEST[remote.kind]
    remote.bring_up()


# -- store faults


@pytest.mark.parametrize("how", ["lose", "reset", "cut"])
def test_network_fails_at_each_request_about_the_table(how: str, remote: Course, store: Proxy) -> None:
    """If the publisher retries or gives up, no row is there twice, and the next one adds pending rows."""
    pattern = OF_TABLE if how != "reset" else WRITES
    for number in STEPS[remote.kind] if how == "reset" else range(1 + SEED % 9, 200, 9):
        remote.add_pending(number)
        rule = Rule(pattern, how)
        store.rules[:] = [Rule(pattern, "pass", number - 1), rule]
        outcome = remote.publish()
        store.rules.clear()
        assert outcome.error in ("", "Unknown", "CatalogUnavailable", "LakeUnavailable"), outcome
        remote.check()
        if rule.times:
            break
    assert number > FEWEST[remote.kind]
    remote.bring_up()


@pytest.mark.parametrize("requests", [READS, WRITES, PARTS], ids=["reads", "writes", "parts"])
def test_store_that_denies_access_is_reported(requests: str, remote: Course, store: Proxy) -> None:
    before = remote.find_newest()
    remote.grow(*split_offsets(B, 100))
    store.rules[:] = [Rule(requests, "refuse", -1, 403, "AccessDenied", "no")]
    requests_before = len(store.requests)
    outcome = remote.publish()
    store.rules.clear()
    assert (outcome.error, "refuses us" in outcome.message or "forbids" in outcome.message) == (
        "NotAuthorized",
        True,
    ), outcome
    assert len(store.requests) - requests_before < 60, "it does not ask again and again"
    assert remote.find_newest() == before
    remote.bring_up()


@pytest.mark.parametrize("requests", [READS, WRITES, PARTS], ids=["reads", "writes", "parts"])
def test_next_run_publishes_after_an_unreachable_store(requests: str, remote: Course, store: Proxy) -> None:
    before = remote.find_newest()
    remote.grow(*split_offsets(B, 100))
    store.rules[:] = [Rule(requests, "refuse", -1)]
    outcome = remote.publish()
    store.rules.clear()
    assert outcome.error in ("CatalogUnavailable", "Unknown", "LakeUnavailable"), outcome
    assert remote.find_newest() == before
    remote.bring_up()


@pytest.mark.parametrize("what", ["property", "rows"])
def test_foreign_commit_at_each_write(what: str, remote: Course, store: Proxy) -> None:
    """After a change of a property the publisher retries. Foreign rows fail it, until a repair removes them."""
    for number in STEPS[remote.kind]:
        remote.add_pending(number)
        rule = Rule(WRITES, "pass", then=lambda: _commit_foreign_change(remote, what))
        store.rules[:] = [Rule(WRITES, "pass", number - 1), rule]
        outcome = remote.publish()
        store.rules.clear()
        if rule.times:
            break
        if what == "rows":
            outcome = outcome if outcome.error else remote.publish()
            assert (outcome.error, "not of the feed" in outcome.message) == ("TableDiffers", True), outcome
            remote.bring_up("", True, newest=1)
        else:
            assert outcome.error in ("", "Unknown"), outcome
            remote.check()
    assert number > FEWEST[remote.kind]
    remote.bring_up(newest=1 if what == "rows" else 4)


def _commit_foreign_change(course: Course, what: str) -> None:
    from deltalake import write_deltalake

    table = course.load_iceberg() if course.kind == "iceberg" else course.load_delta()
    if what == "property" and course.kind == "iceberg":
        with table.transaction() as change:
            change.set_properties({"owner": "somebody"})
    elif what == "property":
        table.alter.set_table_properties({"owner": "somebody"}, raise_if_not_exists=False)
    elif course.kind == "iceberg":
        table.append(table.scan(limit=3).to_arrow())
    else:
        write_deltalake(table, table.to_pyarrow_table().slice(0, 3), mode="append")
