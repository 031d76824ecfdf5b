"""Batches that break their contract as a whole, end to end over logs in memory.

None of their rows becomes visible and no offset moves; the rows that were read stay staged, and the result of every
expectation is recorded.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.batch.result import BatchResult
from sluice.pipelines.contract.catalogue import ExpectationOutcome, Result, contract_results, enough
from sluice.pipelines.errors import ContractBroken, QuarantineExceeded
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.ledger.entries import CommitEntry, PublishEntry
from sluice.pipelines.model.plans import OffsetRange, Request, RequestKind
from sluice.pipelines.model.receipts import Counts, Receipt, Tally
from sluice.pipelines.ports import Ports
from sluice.pipelines.records.shape import RAW
from sluice.pipelines.validation.batch_expectations import check_contract, count_earlier_rows
from sluice.testing.cluster import MemoryFetcher
from sluice.testing.engine import MemoryEngine
from sluice.testing.logs import LogBatch, LogRecord
from tests.pipelines.batch.test_batch import HOUR, PARTITIONS, START, World

CATCH_UP = Request(RequestKind.CATCH_UP)
MEAN = "expect_column_mean_to_be_between"
Expectation = dict[str, Any]


def make_expectation(type_: str, severity: str = "critical", **kwargs: Any) -> Expectation:
    return {"type": type_, "kwargs": kwargs, "severity": severity}


MEAN_OF_N = make_expectation(MEAN, column="n", max_value=10)


class Shop(World):
    """Orders in JSON, in one partition, under the contract that the feed's folder has when the feed is loaded."""

    def __init__(self, folder: Path, *expectations: Expectation, policies: str = "{}") -> None:
        self.folder, self.fetchers = folder, list[MemoryFetcher]()
        (folder / "orders.yaml").write_text(
            "kafka: {bootstrap: 'a:1'}\ntopics: orders\nstart: earliest\nformat: json\n"
            f"schema: {{n: int32, s: string}}\npolicies: {policies}\n"
        )
        self.fix(*expectations, first=True)
        super().__init__(self.load())

    def load(self) -> Feed:
        return load_feed(self.folder / "orders.yaml", {})

    def fix(self, *expectations: Expectation, first: bool = False) -> None:
        suite = {"name": "orders", "expectations": expectations}
        (self.folder / "orders.contract.json").write_text(json.dumps(suite))
        if not first:
            self.feed = self.load()

    def order(self, *numbers: Any) -> None:
        """Write a record for each number; None writes a tombstone, and a string is the value itself."""
        values = [n if n is None else n.encode() if isinstance(n, str) else b'{"n":%d,"s":"x"}' % n for n in numbers]
        records = tuple(LogRecord(b"k", v, START + i) for i, v in enumerate(values))
        self.topic.batches[PARTITIONS[0]].append(LogBatch(records))

    def make_ports(self, drops: frozenset[int] = frozenset()) -> Ports:
        return replace(super().make_ports(drops), engine=MemoryEngine(self.lake, self.open_fetcher, self.feed.landing))

    def open_fetcher(self) -> MemoryFetcher:
        self.fetchers.append(self.topic.make_fetcher())
        return self.fetchers[-1]

    @property
    def read(self) -> int:
        """The number of offsets that were read from Kafka."""
        return sum(s.span for fetcher in self.fetchers for ranges in fetcher.read for s in ranges)

    def list_visible(self) -> list[str]:
        return [*self.lake.list("data/orders"), *self.lake.list("quarantine/orders")]

    def list_published(self) -> list[PublishEntry]:
        entries = (self.ledger.entry(n) for n in range(self.ledger.read().number))
        return [e for e in entries if isinstance(e, PublishEntry)]


def expect_refusal(shop: Shop, batches: int = 1) -> str:
    """Check that a catch-up is refused, has no visible effect, and leaves these staged. Returns the error's text."""
    before, frontier = shop.list_visible(), shop.ledger.read().frontiers()
    with pytest.raises(ContractBroken) as caught:
        shop.land(CATCH_UP).check()
    assert shop.list_visible() == before
    state = shop.ledger.read()
    assert all(at == frontier.get(key, 0) for key, at in state.frontiers().items())
    assert len(state.live()) == batches
    assert not any(isinstance(shop.ledger.entry(n), CommitEntry) for n in range(state.number))
    assert caught.value.exit_code == 3
    return str(caught.value)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (MEAN_OF_N, "the mean of n is at most 10: observed 25"),
        (
            make_expectation("expect_column_values_to_be_unique", column="s"),
            "3 of 3 rows are not so (100.00%), the first at orders",
        ),
        (
            make_expectation("expect_table_row_count_to_be_between", min_value=4),
            "the number of rows is at least 4: observed 3 rows",
        ),
        (
            make_expectation("expect_column_values_to_be_between", column="n", max_value=20, mostly=0.5),
            "2 of 3 rows are not so (66.67%), the first at orders:0:1, orders:0:2",
        ),
    ],
)
def test_batch_that_breaks_contract_stays_staged_and_is_not_read_again(
    tmp_path: Path, broken: Expectation, message: str
) -> None:
    shop = Shop(tmp_path, make_expectation("expect_column_max_to_be_between", column="n", max_value=99), broken)
    shop.order(5, 30, 40)
    assert message in expect_refusal(shop)
    assert shop.read == 3
    expect_refusal(shop)
    assert shop.read == 3, "the second run adopts the receipts of the first"
    shop.fix(make_expectation("expect_column_max_to_be_between", column="n", max_value=99))
    shop.land(CATCH_UP).check()
    assert shop.read == 6, "another contract: read again"
    assert len(shop.list_visible()) == 1
    assert audit(shop.ledger, shop.lake, hashes=True).problems == ()  # type: ignore[arg-type]


def test_error_names_only_broken_critical_expectations(tmp_path: Path) -> None:
    shop = Shop(
        tmp_path,
        MEAN_OF_N,
        make_expectation("expect_column_min_to_be_between", column="n", max_value=10),
        make_expectation("expect_column_median_to_be_between", column="n", max_value=11),
        make_expectation("expect_column_sum_to_be_between", "warning", column="n", max_value=1),
    )
    shop.order(5, 30, 40)
    message = expect_refusal(shop)
    assert [line.split(":")[0].strip() for line in message.splitlines()[1:-1]] == [
        "the mean of n is at most 10",
        "the median of n is at most 11",
    ]
    assert "feeds/orders.contract.json" in message


def test_batch_with_broken_warnings_is_published_with_results(tmp_path: Path) -> None:
    shop = Shop(
        tmp_path,
        make_expectation(MEAN, "warning", column="n", max_value=10),
        make_expectation("expect_column_max_to_be_between", "info", column="n", max_value=10),
        make_expectation("expect_column_min_to_be_between", column="n", max_value=10),
        make_expectation("expect_column_values_to_be_between", "warning", column="n", max_value=20),
    )
    shop.order(5, 30, 40)
    shop.land(CATCH_UP).check()
    (entry,) = shop.list_published()
    assert entry.results == (Result(0, False, "25"), Result(1, False, "40"), Result(2, True, "5"))
    assert shop.feed.contract is not None
    outcomes = contract_results(shop.feed.contract, entry.receipts, entry.results)
    assert [(o.passed, o.checked, o.unexpected, o.first) for o in outcomes] == [
        (False, 0, 0, ()),
        (False, 0, 0, ()),
        (True, 0, 0, ()),
        (False, 3, 2, ("orders:0:1", "orders:0:2")),
    ]
    assert not any(o.refuses for o in outcomes)


def test_row_count_is_compared_with_previous_batches(tmp_path: Path) -> None:
    window = {"constraint_fn": "mean", "parameter_name": "least", "range": 2, "strict": False}
    windows = [window | {"offset": {"positive": 0, "negative": 0.5}}]
    minimum = {"$PARAMETER": "least"}
    shop = Shop(tmp_path, make_expectation("expect_table_row_count_to_be_between", min_value=minimum, windows=windows))
    for rows in (10, 10):
        shop.order(*range(rows))
        shop.land(CATCH_UP).check()
    assert "no history yet" in shop.list_published()[1].results[0].observed
    shop.order(*range(4))
    assert "observed 4 rows" in expect_refusal(shop)
    shop.order(5)
    assert "observed 4 rows" in expect_refusal(shop, batches=2), "newer records are a batch of their own"


def test_batches_are_compared_with_batches_of_same_kind(tmp_path: Path) -> None:
    shop = Shop(tmp_path, make_expectation("expect_table_row_count_to_be_between", max_value=99))
    landed: list[tuple[BatchResult, ...]] = []
    for request in (CATCH_UP, CATCH_UP, replace(CATCH_UP, only=(PARTITIONS[0],)), CATCH_UP):
        shop.order(1, 2)
        landed.append(shop.land(request).batches)
    shop.now += 3 * HOUR
    state = shop.ledger.read()
    last = landed[-1][0].batch
    assert count_earlier_rows(state, CATCH_UP, last) == [2, 2]
    assert count_earlier_rows(state, replace(CATCH_UP, replace=True), last) == [2, 2]
    single = landed[2][0]
    assert count_earlier_rows(state, single.plan.request, single.batch) == []
    assert count_earlier_rows(state, single.plan.request, last) == [2]
    assert count_earlier_rows(state, Request(RequestKind.WINDOW), last) == []


def test_quarantine_limit_decides_if_every_record_is_bad(tmp_path: Path) -> None:
    shop = Shop(tmp_path, MEAN_OF_N, policies="{quarantine_limit: {at_most: 2}}")
    shop.order("{", '{"n":"one"}', '{"n":1e99}')
    with pytest.raises(QuarantineExceeded, match=r"3 of 3 records \(100\.0%\)"):
        shop.land(CATCH_UP).check()
    assert shop.list_visible() == []
    (tmp_path / "orders.yaml").write_text((tmp_path / "orders.yaml").read_text().replace("at_most: 2", "at_most: 3"))
    shop.feed = shop.load()
    shop.land(CATCH_UP).check()
    assert shop.read == 3
    (entry,) = shop.list_published()
    assert entry.results == (Result(0, True, "no rows"),)


def test_check_does_nothing_without_contract() -> None:
    nobody: Any = object()
    assert check_contract(RAW, nobody, nobody, [make_receipt(0, "")], nobody) == ()


# -- results, over one batch or several


def make_receipt(start: int, contract: str, *tallies: Tally) -> Receipt:
    s = OffsetRange("orders", 0, "id-1", start, start + 10)
    return Receipt(s, s.end, Counts(landed=10), (), "a", format=f"json abc contract {contract}", tallies=tallies)


def test_outcomes_are_summed_over_batches(tmp_path: Path) -> None:
    shop = Shop(
        tmp_path,
        make_expectation("expect_column_values_to_be_between", column="n", max_value=20),
        make_expectation("expect_column_values_to_be_between", column="n", max_value=30, mostly=0.9),
        MEAN_OF_N,
        make_expectation(MEAN, "warning", column="n", max_value=11),
    )
    contract = shop.feed.contract
    assert contract is not None
    receipts = [
        make_receipt(0, contract.hash, Tally(0, 10, 1, (4,)), Tally(1, 10, 1, (4,))),
        make_receipt(10, contract.hash, Tally(0, 10), Tally(1, 10, 2, (11, 12))),
        make_receipt(20, "another", Tally(0, 10, 10, (20,))),
    ]
    results = [Result(2, False, "12"), Result(2, True, "9")]
    outcomes = contract_results(contract, receipts, results)
    first, second, third, fourth = contract.expectations
    assert outcomes == [
        ExpectationOutcome(first, False, "", 20, 1, ("orders:0:4",)),
        ExpectationOutcome(second, False, "", 20, 3, ("orders:0:4", "orders:0:11", "orders:0:12")),
        ExpectationOutcome(third, False, "12"),
    ]
    assert fourth not in [o.expectation for o in outcomes], "it has no result"
    assert [o.quarantines for o in outcomes] == [True, False, False]
    assert [o.refuses for o in outcomes] == [False, True, True]
    assert outcomes[1].share == 0.15


def test_shares_are_compared_as_in_great_expectations() -> None:
    assert enough(0, 0, 1)
    assert enough(3, 1, 2 / 3)
    assert not enough(10, 1, 0.91)
    assert enough(1000, 1, 0.999)
