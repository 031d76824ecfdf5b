"""What Dagster says of contracts and schemas, window by window: over made-up edges, with counts that are known."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.definitions_load_context import DefinitionsLoadContext, DefinitionsLoadType
from dagster._utils.test.definitions import scoped_reconstruction_metadata

from sluice.assets.events.ledger_view import Judged, LedgerView
from sluice.assets.factory import build
from sluice.assets.instance.instance import open_instance
from sluice.assets.specs.asset_specs import landed_key, quarantined_key
from sluice.pipelines.errors import ContractBroken, QuarantineExceeded, SchemaDrifted
from sluice.pipelines.model.plans import OffsetRange, Request
from sluice.pipelines.model.receipts import Drift, DriftKind, Tally
from tests.assets.world import FEED, P0, P1, World, cells, checks, hour, in_hour, windows

LANDED, QUARANTINED = landed_key("orders"), quarantined_key("orders")
DAY = "2024-05-01T"
TYPED = FEED + "format: json\nschema: {n: int64}\n"
WARN, ERROR = dg.AssetCheckSeverity.WARN, dg.AssetCheckSeverity.ERROR


def expectation(what: str, severity: str = "critical", **kwargs: Any) -> dict[str, Any]:
    return {"type": f"expect_{what}", "kwargs": kwargs, "severity": severity}


NULLS = expectation("column_values_to_not_be_null", "warning", column="key")
OFFSETS = expectation("column_values_to_be_between", column="offset", min_value=0, max_value=1000)
KNOWN = expectation("column_values_to_be_between", "info", column="partition", min_value=0, max_value=0)
ROWS = expectation("table_row_count_to_be_between", min_value=1)
ALL = (NULLS, OFFSETS, KNOWN, ROWS)


def agree(world: World, *expectations: Mapping[str, Any]) -> None:
    """Give the feed a contract."""
    suite = {"name": "orders", "expectations": list(expectations), "meta": {"great_expectations_version": "1.24.0"}}
    (world.project.feeds_folder / "orders.contract.json").write_text(json.dumps(suite))


def tallied(*unexpected: int) -> Any:
    """Each offset range says so: of its rows, the first ones break the contract's row expectations, in its order."""

    def says(s: OffsetRange) -> tuple[tuple[Tally, ...], tuple[Drift, ...]]:
        first = (tuple(range(s.start, s.start + min(n, 3))) for n in unexpected)
        return tuple(Tally(i, s.span, n, f) for i, (n, f) in enumerate(zip(unexpected, first, strict=True))), ()

    return says


def groups(world: World) -> set[str]:
    graph = build(world.project).resolve_asset_graph()
    return {key.name for key in graph.get_check_keys_for_assets({LANDED})} - {
        "window_complete",
        "window_boundaries",
        "no_gaps",
        "feed_health",
    }


def said(instance: dg.DagsterInstance, run: str, name: str, at: int = 0) -> dg.AssetCheckEvaluation:
    return checks(instance, run, name)[f"{DAY}0{at}:00"]


# -- what there is to see


def test_each_group_of_expectations_is_a_check(world: World) -> None:
    assert groups(world) == set()
    agree(world, *ALL)
    assert groups(world) == {"contract_completeness", "contract_numeric", "contract_volume"}
    definition = build(world.project).resolve_assets_def(LANDED)
    numeric = next(c for c in definition.check_specs if c.name == "contract_numeric")
    assert not numeric.blocking
    assert "- offset is between 0 and 1,000 (critical)" in (numeric.description or "")
    assert "(info)" in (numeric.description or "")


def test_a_typed_feed_has_the_check_of_its_schema(root: Path) -> None:
    world = World(root, {"orders": TYPED})
    assert groups(world) == {"schema_drift"}


def test_a_raw_feed_with_a_contract_can_quarantine(world: World) -> None:
    assert QUARANTINED not in build(world.project).resolve_asset_graph().get_all_asset_keys()
    agree(world, *ALL)
    graph = build(world.project).resolve_asset_graph()
    assert QUARANTINED in graph.get_all_asset_keys()
    assert "violate the contract" in (graph.get(QUARANTINED).description or "")


# -- a window's run


def test_what_rows_broke_shows_in_their_group(world: World, instance: dg.DagsterInstance) -> None:
    agree(world, *ALL)
    world.engine.bad, world.engine.why = (
        2,
        ("contract", "out_of_bounds", OFFSETS["type"], "offset", "should be between"),
    )
    world.engine.says = tallied(5, 2, 1)
    run = world.run(in_hour(0)).run_id

    nulls = said(instance, run, "contract_completeness")
    assert (nulls.passed, nulls.severity) == (False, WARN)
    assert nulls.description == "key is not null: broken by 10 of 50 rows (20.00%)"
    (row,) = cells(nulls.metadata["expectations"].value)
    assert row == {
        "expectation": "key is not null", "severity": "warning", "result": "broken: published",
        "observed": "50 rows", "unexpected": 10, "share": "20.00%", "examples": "orders:0:0, orders:0:1, orders:0:2",
    }  # fmt: skip
    assert (nulls.metadata["unexpected"].value, nulls.metadata["unexpected_share"].value) == (10, 0.2)
    assert "show_rows" not in nulls.metadata

    numeric = said(instance, run, "contract_numeric")
    assert (numeric.passed, numeric.severity) == (False, WARN)
    assert "4 of 50 rows (8.00%), quarantined" in (numeric.description or "")
    assert [(r["severity"], r["result"], r["unexpected"]) for r in cells(numeric.metadata["expectations"].value)] == [
        ("critical", "broken: quarantined", 4),
        ("info", "broken: recorded", 2),
    ]
    assert numeric.metadata["show_rows"].value == "sluice quarantine show orders --window 2024-05-01T00:00"

    volume = said(instance, run, "contract_volume")
    assert volume.passed
    assert volume.description == "1 expectation met by 50 rows"
    assert cells(volume.metadata["expectations"].value)[0]["observed"] == "46 rows"


def test_info_fails_no_check(world: World, instance: dg.DagsterInstance) -> None:
    agree(world, KNOWN)
    world.engine.says = tallied(7)
    found = said(instance, world.run(in_hour(0)).run_id, "contract_numeric")
    assert found.passed
    assert "recorded: partition is" in (found.description or "")
    assert found.metadata["unexpected"].value == 14


def test_a_landed_window_has_numbers_to_plot(world: World, instance: dg.DagsterInstance) -> None:
    agree(world, *ALL)
    world.engine.bad, world.engine.why = (
        2,
        ("contract", "out_of_bounds", OFFSETS["type"], "offset", "should be between"),
    )
    world.engine.says = tallied(5, 2, 1)
    world.run(in_hour(0))
    landed, kept_out = (windows(instance, key)[f"{DAY}00:00"] for key in (LANDED, QUARANTINED))
    assert (landed["unexpected"], landed["unexpected_share"]) == (16, round(16 / 150, 6))
    assert landed["quarantined_share"] == 0.08
    assert [c.name for c in landed["dagster/column_schema"].columns][:2] == ["key", "value"]
    assert cells(kept_out["reasons"]) == [
        {"stage": "contract", "reason": "out_of_bounds", "expectation": OFFSETS["type"], "field": "offset", "rows": 4}
    ]


# -- other windows


def test_a_catch_up_tells_of_every_window_that_it_completes(world: World, instance: dg.DagsterInstance) -> None:
    agree(world, NULLS)
    world.engine.says = tallied(1)
    run = world.run().run_id
    found = checks(instance, run, "contract_completeness")
    assert [(w, e.passed) for w, e in found.items()] == [
        *((f"{DAY}0{h}:00", False) for h in range(4)),
        (f"{DAY}04:00", True),
    ]
    assert found[f"{DAY}04:00"].description == "nothing landed"
    assert found[f"{DAY}03:00"].metadata["unexpected"].value == 2


def test_a_window_is_judged_once(world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    agree(world, *ALL)
    world.engine.says = tallied(5, 2, 1)
    judged, judge = list[int](), LedgerView._judge

    def counted(books: LedgerView, window: int) -> Sequence[Judged]:
        judged.append(window)
        return judge(books, window)

    monkeypatch.setattr(LedgerView, "_judge", counted)
    world.run(in_hour(0))
    assert sorted(judged) == [hour(0), hour(4)], "that one, and the quiet one, which is whole"


def test_windows_that_dead_runs_left_are_judged_by_the_next(world: World, instance: dg.DagsterInstance) -> None:
    agree(world, NULLS)
    world.engine.says = tallied(1)
    world.land_unrecorded(in_hour(0))
    first = checks(instance, world.run(in_hour(1)).run_id, "contract_completeness")
    assert {p: e.passed for p, e in first.items() if p != f"{DAY}04:00"} == dict.fromkeys(
        [f"{DAY}00:00", f"{DAY}01:00"], False
    )
    world.engine.says = tallied(0)
    world.land_unrecorded(replaced(0))
    second = checks(instance, world.run(in_hour(2)).run_id, "contract_completeness")
    assert second[f"{DAY}00:00"].passed


def test_a_window_is_judged_by_the_contract_that_it_was_held_against(
    world: World, instance: dg.DagsterInstance
) -> None:
    agree(world, OFFSETS, NULLS)
    world.engine.says = tallied(0, 3)
    world.land_unrecorded(in_hour(0))
    before = world.session().feed("orders").contract
    agree(world, NULLS)
    world.engine.says = tallied(1)
    world.run(in_hour(1))
    after = world.session().feed("orders").contract
    assert before is not None
    assert after is not None

    books = world.books()
    first, second = (books.read_judged(hour(h)) for h in range(2))
    assert [(j.outcome.unexpected, j.contract) for j in first] == [(0, before.hash), (6, before.hash)]
    assert [(j.outcome.unexpected, j.contract) for j in second] == [(2, after.hash)]


def test_a_window_that_landed_under_two_contracts_shows_both(world: World, instance: dg.DagsterInstance) -> None:
    agree(world, NULLS)
    world.engine.says = tallied(1)
    world.land_unrecorded(in_hour(0, (P0,)))
    agree(world, NULLS, ROWS)
    world.engine.says = tallied(2)
    run = world.run(in_hour(0)).run_id
    found = said(instance, run, "contract_completeness")
    assert [r["unexpected"] for r in cells(found.metadata["expectations"].value)] == [1, 2]
    assert len(found.metadata["contract"].value.split(", ")) == 2
    assert cells(said(instance, run, "contract_volume").metadata["expectations"].value)[0]["observed"] == "25 rows"


def test_rows_that_landed_before_there_was_a_contract_are_judged_by_none(
    world: World, instance: dg.DagsterInstance
) -> None:
    world.land_unrecorded(in_hour(0))
    agree(world, NULLS)
    world.engine.says = tallied(1)
    run = world.run(in_hour(0)).run_id
    found = said(instance, run, "contract_completeness")
    assert found.passed
    assert found.description == "no expectation of this group applied to these rows"


def test_what_landed_again_is_judged_by_the_newer_batch(world: World, instance: dg.DagsterInstance) -> None:
    agree(world, expectation("table_row_count_to_be_between", "warning", min_value=90))
    run = world.run(in_hour(0)).run_id
    assert not said(instance, run, "contract_volume").passed
    agree(world, expectation("table_row_count_to_be_between", "warning", min_value=40))
    again = world.run(replaced(0)).run_id
    found = said(instance, again, "contract_volume")
    assert found.passed
    assert len(cells(found.metadata["expectations"].value)) == 1


def replaced(number: int) -> Request:
    return replace(in_hour(number), replace=True)


def test_a_run_has_the_checks_that_the_code_location_loaded(world: World, instance: dg.DagsterInstance) -> None:
    agree(world, OFFSETS)
    loaded = {"sluice/checks": json.dumps({"orders/landed": ["contract_completeness"]})}
    with scoped_reconstruction_metadata(loaded):
        assert groups(world) == {"contract_completeness"}
        job = build(world.project, world.session()).resolve_job_def("land_orders")
        run = job.execute_in_process(partition_key=f"{DAY}00:00", instance=instance)
    removed = said(instance, run.run_id, "contract_completeness")
    assert removed.passed
    assert "Reload definitions" in (removed.description or "")
    observed = [r.asset_observation for r in instance.fetch_observations(LANDED, limit=9).records]
    texts = {k: v.value for o in observed if o for k, v in o.metadata.items()}
    assert texts == {"contract_numeric": "passed: 1 expectation met by 50 rows"}


@pytest.mark.parametrize("first", [(), (NULLS,)])
def test_what_a_code_location_loads_reaches_its_runs(world: World, first: tuple[dict[str, Any], ...]) -> None:
    """As Dagster does it: the definitions of a run are made with what those of the location left."""
    if first:
        agree(world, *first)
    context = DefinitionsLoadContext(DefinitionsLoadType.INITIALIZATION)
    with DefinitionsLoadContext.scoped(context):
        before = groups(world)
    agree(world, OFFSETS, ROWS)
    assert groups(world) == {"contract_numeric", "contract_volume"}
    with scoped_reconstruction_metadata(context.get_pending_reconstruction_metadata()):
        assert groups(world) == before


# -- the schema


def test_drift_warns_with_fields_and_places(root: Path) -> None:
    world = World(root, {"orders": TYPED})
    new = Drift(DriftKind.NEW, "colour", 3, 4, "string")
    world.engine.says = lambda s: ((), (new,) if s.tp == P1 and s.start == 0 else ())
    run = world.run().run_id
    with open_instance(world.project) as instance:
        first, second = (said(instance, run, "schema_drift", h) for h in range(2))
        landed = windows(instance, LANDED)
    assert (first.passed, first.severity) == (False, WARN)
    assert first.description == "colour (string) is not in the schema, 3 records"
    assert cells(first.metadata["drift"].value) == [
        {"field": "colour", "is": "new", "type": "string", "records": 3, "first": "orders:1:4"}
    ]
    assert (first.metadata["new_fields"].value, first.metadata["wrong_fields"].value) == (1, 0)
    assert first.metadata["dagster/column_schema"].value.columns[0].name == "n"
    assert (second.passed, second.description) == (True, "all records match the schema")
    assert [landed[f"{DAY}0{h}:00"]["new_fields"] for h in range(2)] == [1, 0]


# -- a batch that must not be published


def test_a_refused_batch_is_an_error_in_its_group(world: World, instance: dg.DagsterInstance) -> None:
    agree(world, NULLS, expectation("table_row_count_to_be_between", min_value=90))
    outcome = world.run(in_hour(0))
    assert isinstance(outcome.error, ContractBroken)
    found = said(instance, outcome.run_id, "contract_volume")
    assert (found.passed, found.severity) == (False, ERROR)
    assert "nothing was published" in (found.description or "")
    assert "observed 50 rows" in cells(found.metadata["breaches"].value)[0]["what"]
    assert found.metadata["remedy"].value == outcome.error.remedy
    assert checks(instance, outcome.run_id, "contract_completeness") == {}
    assert list(windows(instance, LANDED)) == ["2024-05-01T04:00"], "the hour in which nothing happened"

    agree(world, NULLS, expectation("table_row_count_to_be_between", min_value=40))
    world.engine.says = tallied(0)
    world.bury()
    again = world.run(in_hour(0))
    assert again.exit_code == 0
    assert said(instance, again.run_id, "contract_volume").passed


def test_too_many_quarantined_rows_are_an_error_in_their_group(root: Path) -> None:
    world = World(root, {"orders": FEED + "policies: {quarantine_limit: {share: 0.01, at_least: 1}}\n"})
    agree(world, *ALL)
    world.engine.bad, world.engine.why = (
        2,
        ("contract", "out_of_bounds", OFFSETS["type"], "offset", "should be between"),
    )
    outcome = world.run(in_hour(0))
    assert isinstance(outcome.error, QuarantineExceeded)
    with open_instance(world.project) as instance:
        found = said(instance, outcome.run_id, "contract_numeric")
    assert (found.passed, found.severity) == (False, ERROR)
    (row,) = cells(found.metadata["breaches"].value)
    assert (row["unexpected"], row["rows"], row["stage"]) == (4, 50, "contract")
    assert row["examples"].startswith("orders:0:23")


def test_drift_that_the_feed_does_not_take_is_an_error_of_the_schema(root: Path) -> None:
    world = World(root, {"orders": TYPED + "policies: {on_drift: fail}\n"})
    world.engine.says = lambda s: ((), (Drift(DriftKind.WRONG, "n", 2, s.start),))
    outcome = world.run(in_hour(0))
    assert isinstance(outcome.error, SchemaDrifted)
    with open_instance(world.project) as instance:
        found = said(instance, outcome.run_id, "schema_drift")
    assert (found.passed, found.severity) == (False, ERROR)
    assert cells(found.metadata["breaches"].value)[0]["examples"] == "orders:0:0"


@pytest.mark.parametrize("count", [60])
def test_a_long_contract_is_cut_in_the_description(world: World, count: int) -> None:
    agree(world, *(expectation("column_values_to_be_between", column="offset", min_value=i) for i in range(count)))
    definition = build(world.project).resolve_assets_def(LANDED)
    numeric = next(c for c in definition.check_specs if c.name == "contract_numeric")
    assert (numeric.description or "").endswith("- … and 10 more")
