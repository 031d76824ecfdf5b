"""Contract and schema checks in Dagster, by window, over an in-memory feed with known counts."""

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
from tests.assets.world import (
    FEED,
    P0,
    P1,
    World,
    at_hour,
    in_hour,
    read_cells,
    read_checks,
    read_windows,
    resolve_landing,
)

LANDED, QUARANTINED = landed_key("orders"), quarantined_key("orders")
DAY = "2024-05-01T"
TYPED = FEED + "format: json\nschema: {n: int64}\n"
WARN, ERROR = dg.AssetCheckSeverity.WARN, dg.AssetCheckSeverity.ERROR


def build_expectation(what: str, severity: str = "critical", **kwargs: Any) -> dict[str, Any]:
    return {"type": f"expect_{what}", "kwargs": kwargs, "severity": severity}


NULLS = build_expectation("column_values_to_not_be_null", "warning", column="key")
OFFSETS = build_expectation("column_values_to_be_between", column="offset", min_value=0, max_value=1000)
KNOWN = build_expectation("column_values_to_be_between", "info", column="partition", min_value=0, max_value=0)
ROWS = build_expectation("table_row_count_to_be_between", min_value=1)
ALL = (NULLS, OFFSETS, KNOWN, ROWS)


def agree(world: World, *expectations: Mapping[str, Any]) -> None:
    """Give the feed a contract."""
    suite = {"name": "orders", "expectations": list(expectations), "meta": {"great_expectations_version": "1.24.0"}}
    (world.project.feeds_folder / "orders.contract.json").write_text(json.dumps(suite))


def build_tallies(*unexpected: int) -> Any:
    """Returns an observer by which the first rows of each range break the contract's row expectations, in order."""

    def observe(s: OffsetRange) -> tuple[tuple[Tally, ...], tuple[Drift, ...]]:
        first = (tuple(range(s.start, s.start + min(n, 3))) for n in unexpected)
        return tuple(Tally(i, s.span, n, f) for i, (n, f) in enumerate(zip(unexpected, first, strict=True))), ()

    return observe


def list_check_names(world: World) -> set[str]:
    graph = build(world.project).resolve_asset_graph()
    return {key.name for key in graph.get_check_keys_for_assets({LANDED})} - {
        "window_complete",
        "window_boundaries",
        "no_gaps",
        "feed_health",
    }


def read_window_check(instance: dg.DagsterInstance, run: str, name: str, at: int = 0) -> dg.AssetCheckEvaluation:
    return read_checks(instance, run, name)[f"{DAY}0{at}:00"]


# -- the checks of a feed


def test_each_group_of_expectations_is_a_check(world: World) -> None:
    assert list_check_names(world) == set()
    agree(world, *ALL)
    assert list_check_names(world) == {"contract_completeness", "contract_numeric", "contract_volume"}
    definition = build(world.project).resolve_assets_def(LANDED)
    numeric = next(c for c in definition.check_specs if c.name == "contract_numeric")
    assert not numeric.blocking
    assert "- offset is between 0 and 1,000 (critical)" in (numeric.description or "")
    assert "(info)" in (numeric.description or "")


def test_typed_feed_has_schema_drift_check(root: Path) -> None:
    world = World(root, {"orders": TYPED})
    assert list_check_names(world) == {"schema_drift"}


def test_raw_feed_with_contract_has_quarantine_asset(world: World) -> None:
    assert QUARANTINED not in build(world.project).resolve_asset_graph().get_all_asset_keys()
    agree(world, *ALL)
    graph = build(world.project).resolve_asset_graph()
    assert QUARANTINED in graph.get_all_asset_keys()
    assert "violate the contract" in (graph.get(QUARANTINED).description or "")


# -- a window's run


def break_all(world: World) -> None:
    """Agree on all expectations, which the records of the world break, two of them critically."""
    agree(world, *ALL)
    world.engine.bad, world.engine.refusal = (
        2,
        ("contract", "out_of_bounds", OFFSETS["type"], "offset", "should be between"),
    )
    world.engine.observe = build_tallies(5, 2, 1)


def test_violations_are_reported_in_check_of_their_group(world: World, instance: dg.DagsterInstance) -> None:
    break_all(world)
    run = world.run(in_hour(0)).run_id

    nulls = read_window_check(instance, run, "contract_completeness")
    assert (nulls.passed, nulls.severity) == (False, WARN)
    assert nulls.description == "key is not null: broken by 10 of 50 rows (20.00%)"
    (row,) = read_cells(nulls.metadata["expectations"].value)
    assert row == {
        "expectation": "key is not null", "severity": "warning", "result": "broken: published",
        "observed": "50 rows", "unexpected": 10, "share": "20.00%", "examples": "orders:0:0, orders:0:1, orders:0:2",
    }  # fmt: skip
    assert (nulls.metadata["unexpected"].value, nulls.metadata["unexpected_share"].value) == (10, 0.2)
    assert "show_rows" not in nulls.metadata

    numeric = read_window_check(instance, run, "contract_numeric")
    assert (numeric.passed, numeric.severity) == (False, WARN)
    assert "4 of 50 rows (8.00%), quarantined" in (numeric.description or "")
    assert [
        (r["severity"], r["result"], r["unexpected"]) for r in read_cells(numeric.metadata["expectations"].value)
    ] == [
        ("critical", "broken: quarantined", 4),
        ("info", "broken: recorded", 2),
    ]
    assert numeric.metadata["show_rows"].value == "sluice quarantine show orders --window 2024-05-01T00:00"

    volume = read_window_check(instance, run, "contract_volume")
    assert volume.passed
    assert volume.description == "1 expectation met by 50 rows"
    assert read_cells(volume.metadata["expectations"].value)[0]["observed"] == "46 rows"


def test_info_expectation_does_not_fail_its_check(world: World, instance: dg.DagsterInstance) -> None:
    agree(world, KNOWN)
    world.engine.observe = build_tallies(7)
    evaluation = read_window_check(instance, world.run(in_hour(0)).run_id, "contract_numeric")
    assert evaluation.passed
    assert "recorded: partition is" in (evaluation.description or "")
    assert evaluation.metadata["unexpected"].value == 14


def test_landed_window_has_numeric_metadata_for_plots(world: World, instance: dg.DagsterInstance) -> None:
    break_all(world)
    world.run(in_hour(0))
    landed, kept_out = (read_windows(instance, key)[f"{DAY}00:00"] for key in (LANDED, QUARANTINED))
    assert (landed["unexpected"], landed["unexpected_share"]) == (16, round(16 / 150, 6))
    assert landed["quarantined_share"] == 0.08
    assert [c.name for c in landed["dagster/column_schema"].columns][:2] == ["key", "value"]
    assert read_cells(kept_out["reasons"]) == [
        {"stage": "contract", "reason": "out_of_bounds", "expectation": OFFSETS["type"], "field": "offset", "rows": 4}
    ]


# -- other windows


def test_catch_up_evaluates_check_of_every_completed_window(world: World, instance: dg.DagsterInstance) -> None:
    agree(world, NULLS)
    world.engine.observe = build_tallies(1)
    run = world.run().run_id
    evaluations = read_checks(instance, run, "contract_completeness")
    assert [(w, e.passed) for w, e in evaluations.items()] == [
        *((f"{DAY}0{h}:00", False) for h in range(4)),
        (f"{DAY}04:00", True),
    ]
    assert evaluations[f"{DAY}04:00"].description == "nothing landed"
    assert evaluations[f"{DAY}03:00"].metadata["unexpected"].value == 2


def test_each_window_is_evaluated_once_in_a_run(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    agree(world, *ALL)
    world.engine.observe = build_tallies(5, 2, 1)
    judged, judge = list[int](), LedgerView._judge

    def count_and_judge(view: LedgerView, window: int) -> Sequence[Judged]:
        judged.append(window)
        return judge(view, window)

    monkeypatch.setattr(LedgerView, "_judge", count_and_judge)
    world.run(in_hour(0))
    assert sorted(judged) == [at_hour(0), at_hour(4)], "that one, and the quiet one, which is whole"


def test_windows_of_dead_runs_are_evaluated_by_next_run(world: World, instance: dg.DagsterInstance) -> None:
    agree(world, NULLS)
    world.engine.observe = build_tallies(1)
    world.land_unrecorded(in_hour(0))
    first = read_checks(instance, world.run(in_hour(1)).run_id, "contract_completeness")
    assert {p: e.passed for p, e in first.items() if p != f"{DAY}04:00"} == dict.fromkeys(
        [f"{DAY}00:00", f"{DAY}01:00"], False
    )
    world.engine.observe = build_tallies(0)
    world.land_unrecorded(make_replace_request(0))
    second = read_checks(instance, world.run(in_hour(2)).run_id, "contract_completeness")
    assert second[f"{DAY}00:00"].passed


def test_window_is_evaluated_by_contract_in_force_when_landed(world: World, instance: dg.DagsterInstance) -> None:
    agree(world, OFFSETS, NULLS)
    world.engine.observe = build_tallies(0, 3)
    world.land_unrecorded(in_hour(0))
    before = world.make_session().feed("orders").contract
    agree(world, NULLS)
    world.engine.observe = build_tallies(1)
    world.run(in_hour(1))
    after = world.make_session().feed("orders").contract
    assert before is not None
    assert after is not None

    view = world.open_ledger_view()
    first, second = (view.read_judged(at_hour(h)) for h in range(2))
    assert [(j.outcome.unexpected, j.contract) for j in first] == [(0, before.hash), (6, before.hash)]
    assert [(j.outcome.unexpected, j.contract) for j in second] == [(2, after.hash)]


def test_window_landed_under_two_contracts_shows_both_contracts(world: World, instance: dg.DagsterInstance) -> None:
    agree(world, NULLS)
    world.engine.observe = build_tallies(1)
    world.land_unrecorded(in_hour(0, (P0,)))
    agree(world, NULLS, ROWS)
    world.engine.observe = build_tallies(2)
    run = world.run(in_hour(0)).run_id
    evaluation = read_window_check(instance, run, "contract_completeness")
    assert [r["unexpected"] for r in read_cells(evaluation.metadata["expectations"].value)] == [1, 2]
    assert len(evaluation.metadata["contract"].value.split(", ")) == 2
    assert (
        read_cells(read_window_check(instance, run, "contract_volume").metadata["expectations"].value)[0]["observed"]
        == "25 rows"
    )


def test_rows_landed_before_contract_existed_are_not_evaluated(world: World, instance: dg.DagsterInstance) -> None:
    world.land_unrecorded(in_hour(0))
    agree(world, NULLS)
    world.engine.observe = build_tallies(1)
    run = world.run(in_hour(0)).run_id
    evaluation = read_window_check(instance, run, "contract_completeness")
    assert evaluation.passed
    assert evaluation.description == "no expectation of this group applied to these rows"


def test_window_landed_again_is_evaluated_by_newer_batch(world: World, instance: dg.DagsterInstance) -> None:
    agree(world, build_expectation("table_row_count_to_be_between", "warning", min_value=90))
    run = world.run(in_hour(0)).run_id
    assert not read_window_check(instance, run, "contract_volume").passed
    agree(world, build_expectation("table_row_count_to_be_between", "warning", min_value=40))
    again = world.run(make_replace_request(0)).run_id
    evaluation = read_window_check(instance, again, "contract_volume")
    assert evaluation.passed
    assert len(read_cells(evaluation.metadata["expectations"].value)) == 1


def make_replace_request(number: int) -> Request:
    return replace(in_hour(number), replace=True)


def test_run_has_checks_loaded_by_code_location(world: World, instance: dg.DagsterInstance) -> None:
    agree(world, OFFSETS)
    loaded = {"sluice/checks": json.dumps({"orders/landed": ["contract_completeness"]})}
    with scoped_reconstruction_metadata(loaded):
        assert list_check_names(world) == {"contract_completeness"}
        job = resolve_landing(build(world.project, world.make_session()))
        run = job.execute_in_process(partition_key=f"{DAY}00:00", instance=instance)
    removed = read_window_check(instance, run.run_id, "contract_completeness")
    assert removed.passed
    assert "Reload definitions" in (removed.description or "")
    observed = [r.asset_observation for r in instance.fetch_observations(LANDED, limit=9).records]
    texts = {k: v.value for o in observed if o for k, v in o.metadata.items()}
    assert texts == {"contract_numeric": "passed: 1 expectation met by 50 rows"}


@pytest.mark.parametrize("first", [(), (NULLS,)])
def test_checks_loaded_by_code_location_reach_its_runs(world: World, first: tuple[dict[str, Any], ...]) -> None:
    """Dagster builds a run's definitions with the reconstruction metadata of its code location."""
    if first:
        agree(world, *first)
    context = DefinitionsLoadContext(DefinitionsLoadType.INITIALIZATION)
    with DefinitionsLoadContext.scoped(context):
        before = list_check_names(world)
    agree(world, OFFSETS, ROWS)
    assert list_check_names(world) == {"contract_numeric", "contract_volume"}
    with scoped_reconstruction_metadata(context.get_pending_reconstruction_metadata()):
        assert list_check_names(world) == before


# -- the schema


def test_drift_warning_lists_fields_and_first_offsets(root: Path) -> None:
    world = World(root, {"orders": TYPED})
    new = Drift(DriftKind.NEW, "colour", 3, 4, "string")
    world.engine.observe = lambda s: ((), (new,) if s.tp == P1 and s.start == 0 else ())
    run = world.run().run_id
    with open_instance(world.project) as instance:
        first, second = (read_window_check(instance, run, "schema_drift", h) for h in range(2))
        landed = read_windows(instance, LANDED)
    assert (first.passed, first.severity) == (False, WARN)
    assert first.description == "colour (string) is not in the schema, 3 records"
    assert read_cells(first.metadata["drift"].value) == [
        {"field": "colour", "is": "new", "type": "string", "records": 3, "first": "orders:1:4"}
    ]
    assert (first.metadata["new_fields"].value, first.metadata["wrong_fields"].value) == (1, 0)
    assert first.metadata["dagster/column_schema"].value.columns[0].name == "n"
    assert (second.passed, second.description) == (True, "all records match the schema")
    assert [landed[f"{DAY}0{h}:00"]["new_fields"] for h in range(2)] == [1, 0]


# -- a batch that must not be published


def test_refused_batch_is_an_error_in_check_of_its_group(world: World, instance: dg.DagsterInstance) -> None:
    agree(world, NULLS, build_expectation("table_row_count_to_be_between", min_value=90))
    outcome = world.run(in_hour(0))
    assert isinstance(outcome.error, ContractBroken)
    evaluation = read_window_check(instance, outcome.run_id, "contract_volume")
    assert (evaluation.passed, evaluation.severity) == (False, ERROR)
    assert "nothing was published" in (evaluation.description or "")
    (row,) = read_cells(evaluation.metadata["breaches"].value)
    assert "observed 50 rows" in row["reason"]
    assert (row["unexpected"], row["rows"]) == ("", ""), "no row by itself is unexpected"
    assert evaluation.metadata["remedy"].value == outcome.error.remedy
    assert list(read_checks(instance, outcome.run_id, "contract_completeness")) == ["2024-05-01T04:00"]
    assert list(read_windows(instance, LANDED)) == ["2024-05-01T04:00"], "the hour in which nothing happened"

    agree(world, NULLS, build_expectation("table_row_count_to_be_between", min_value=40))
    world.engine.observe = build_tallies(0)
    world.bury()
    again = world.run(in_hour(0))
    assert again.exit_code == 0
    assert read_window_check(instance, again.run_id, "contract_volume").passed


def test_exceeded_quarantine_limit_is_an_error_in_check_of_its_group(root: Path) -> None:
    world = World(root, {"orders": FEED + "policies: {quarantine_limit: {share: 0.01, at_least: 1}}\n"})
    agree(world, *ALL)
    world.engine.bad, world.engine.refusal = (
        2,
        ("contract", "out_of_bounds", OFFSETS["type"], "offset", "should be between"),
    )
    outcome = world.run(in_hour(0))
    assert isinstance(outcome.error, QuarantineExceeded)
    with open_instance(world.project) as instance:
        evaluation = read_window_check(instance, outcome.run_id, "contract_numeric")
    assert (evaluation.passed, evaluation.severity) == (False, ERROR)
    (row,) = read_cells(evaluation.metadata["breaches"].value)
    assert (row["unexpected"], row["rows"], row["stage"]) == ("4", "50", "contract")
    assert row["examples"].startswith("orders:0:23")


def test_refused_drift_is_an_error_of_schema_check(root: Path) -> None:
    world = World(root, {"orders": TYPED + "policies: {on_drift: fail}\n"})
    world.engine.observe = lambda s: ((), (Drift(DriftKind.WRONG, "n", 2, s.start),))
    outcome = world.run(in_hour(0))
    assert isinstance(outcome.error, SchemaDrifted)
    with open_instance(world.project) as instance:
        evaluation = read_window_check(instance, outcome.run_id, "schema_drift")
    assert (evaluation.passed, evaluation.severity) == (False, ERROR)
    assert read_cells(evaluation.metadata["breaches"].value)[0]["examples"] == "orders:0:0"


@pytest.mark.parametrize("count", [60])
def test_long_contract_is_truncated_in_check_description(world: World, count: int) -> None:
    agree(
        world, *(build_expectation("column_values_to_be_between", column="offset", min_value=i) for i in range(count))
    )
    definition = build(world.project).resolve_assets_def(LANDED)
    numeric = next(c for c in definition.check_specs if c.name == "contract_numeric")
    assert (numeric.description or "").endswith("- … and 10 more")


def test_windows_land_next_to_a_refused_one(root: Path) -> None:
    """As a schedule requests them, one run for each hour, and as a catch-up does."""
    world = World(root, {"orders": TYPED + "policies: {on_drift: fail}\n"})
    world.engine.observe = lambda s: ((), (Drift(DriftKind.WRONG, "n", 2, s.start),) if s.window == at_hour(0) else ())
    assert isinstance(world.run(in_hour(0)).error, SchemaDrifted)
    world.bury()
    assert world.run(in_hour(1)).exit_code == 0
    outcome = world.run()
    assert isinstance(outcome.error, SchemaDrifted)
    with open_instance(world.project) as instance:
        assert f"{DAY}00:00" not in read_windows(instance, LANDED)
        assert {f"{DAY}0{hour}:00" for hour in (1, 2, 3)} <= set(read_windows(instance, LANDED))
