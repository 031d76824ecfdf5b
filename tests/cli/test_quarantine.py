"""`sluice quarantine`: its text, documents and exit codes, and the effects of a replay in Dagster and the lake."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sluice.assets import events
from sluice.assets.instance.instance import open_instance
from sluice.assets.specs.asset_specs import landed_key, quarantined_key
from sluice.cli.daily import audit
from sluice.cli.inspect import explain, files
from sluice.cli.rules import quarantine
from sluice.pipelines.errors import UsageError
from sluice.pipelines.model.plans import OffsetRange, RequestKind
from sluice.pipelines.model.receipts import Counts, Outcome, PartKind, Receipt
from sluice.pipelines.ports import Job
from sluice.pipelines.records.rows.row_format import quarantine_rows
from sluice.testing.engine import owner
from tests.assets.world import FEED, MadeUpEngine, World, list_versions, read_windows
from tests.cli.conftest import Invoke
from tests.pipelines.landed_world import make_records

DAY = "2024-05-01"
STRICT = {"id": "int64 not null", "amount": "int32"}
WIDER = {"id": "int64 not null", "amount": "int64"}
LARGE = 1 << 40


class JsonEngine(MadeUpEngine):
    """An engine whose every fifth record has too large an amount; offset 7 has terminal escape sequences."""

    def _build_range(self, job: Job, s: OffsetRange) -> Outcome:
        values = [self.make_value(o) for o in range(s.start, s.end)]
        rows = make_records(np.arange(s.start, s.end))
        rows = rows.set_column(rows.schema.get_field_index("value"), "value", pa.array(values, pa.binary()))
        (converted,) = job.shape.format().convert(s, rows)
        parts = self._write_parts(job, s, PartKind.LANDED, converted.landed)
        assert converted.quarantined is not None
        parts += self._write_parts(job, s, PartKind.QUARANTINED, quarantine_rows(converted.quarantined, job.batch, ""))
        counts = Counts(converted.landed.num_rows, converted.quarantined.num_rows)
        return Receipt(s, s.end, counts, parts, job.attempt, format=job.shape.name)

    def make_value(self, offset: int) -> bytes:
        if offset == 7:
            return b"\x1b[2J\xff not JSON " + b"x" * 5000
        return json.dumps({"id": offset, "amount": LARGE if offset % 5 == 0 else offset}).encode()


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path, {"orders": _format_feed(STRICT)})
    world.engine = JsonEngine(world.lake)
    return world


@pytest.fixture
def landed(world: World) -> World:
    """A world with all records landed and reported to Dagster; the schema was fixed afterwards."""
    assert world.run().exit_code == 0
    (world.project.feeds_folder / "orders.yaml").write_text(_format_feed(WIDER))
    return world


def _format_feed(schema: dict[str, str]) -> str:
    more = "format: json\npolicies: {quarantine_limit: {share: 1.0}}\n"
    return f"{FEED}{more}schema: {json.dumps(schema)}\n"


# -- list and show


def test_list_counts_quarantined_records_by_reason_and_window(landed: World, invoke: Invoke) -> None:
    result = invoke(quarantine.list_, "orders")
    assert (result.code, result.document["records"]) == (0, 42)
    first = result.document["held"][0]
    assert (first["reason"], first["field"], first["records"], first["first"]) == (
        "out_of_range",
        "amount",
        10,
        "orders:0:0",
    )
    assert (first["window"], first["share"]) == (f"{DAY}T00:00", 0.2)
    assert [w["quarantined"] for w in result.document["windows"]] == [12, 10, 10, 10]
    assert "amount: out_of_range" in result.text
    assert "invalid_utf8" in result.text or "not_json" in result.text
    filtered = invoke(quarantine.list_, "orders", start=f"{DAY}T01", end=f"{DAY}T03", text=False).document
    assert [w["window"] for w in filtered["windows"]] == [f"{DAY}T01:00", f"{DAY}T02:00"]
    with pytest.raises(UsageError):
        invoke(quarantine.list_, "orders", window=[f"{DAY}T01:30"])


def test_records_are_shown_without_terminal_escapes(landed: World, invoke: Invoke) -> None:
    result = invoke(quarantine.show, "orders", offset=["orders:0:7"], number=10)
    assert "\x1b" not in result.text
    assert "\\x1b[2J\\xff not JSON" in result.text
    assert "bytes more" in result.text
    (row,) = result.document["records"]
    assert base64.b64decode(row["value"]).startswith(b"\x1b[2J\xff")
    assert (row["offset"], row["window"], row["stage"], row["batch"]) == (7, f"{DAY}T00:00", "decode", 3)
    assert row["headers"] == [{"key": "h", "value": base64.b64encode(b"7").decode()}]


def test_show_returns_the_requested_number_of_samples(landed: World, invoke: Invoke) -> None:
    result = invoke(quarantine.show, "orders", field=["amount"], number=3)
    assert [r["offset"] for r in result.document["records"]] == [0, 5, 10]
    assert "amount: out_of_range: too large for int32" in result.text
    none = invoke(quarantine.show, "orders", reason=["nothing_like_that"], number=3)
    assert (none.code, none.document["records"]) == (0, [])
    assert "no quarantined record of orders matches" in none.text


# -- replay


def test_replay_dry_run_counts_records_to_land_and_changes_nothing(landed: World, invoke: Invoke) -> None:
    before = dict(landed.lake.files)
    result = invoke(quarantine.replay, "orders", dry_run=True)
    assert landed.lake.files == before
    assert (result.code, result.document["tried"], result.document["landed"], result.document["stay"]) == (0, 42, 40, 2)
    assert result.document["kinds"][0]["reason"] == "out_of_range"
    assert "A dry run: nothing was changed. 40 records would land." in result.text
    assert "Reasons of records that still do not fit" in result.text


def test_replayed_records_are_reported_to_dagster_and_the_audit_passes(landed: World, invoke: Invoke) -> None:
    with open_instance(landed.project) as instance:
        before = list_versions(instance, landed_key("orders"), f"{DAY}T01:00")
    result = invoke(quarantine.replay, "orders", window=[f"{DAY}T01"], text=False)
    (batch,) = result.document["batches"]
    assert (result.code, result.document["landed"]) == (0, 10)
    with open_instance(landed.project) as instance:
        after = list_versions(instance, landed_key("orders"), f"{DAY}T01:00")
        assert after[: len(before)] == before
        assert f"/{batch}/" in after[-1]
        assert list_versions(instance, landed_key("orders"), f"{DAY}T02:00")[-1] == before[-1]
        assert read_windows(instance, quarantined_key("orders"))[f"{DAY}T01:00"]
    committed = landed.state().commits
    assert landed.run().exit_code == 0, "a commit does not miss it"
    assert landed.state().commits == committed
    listed = invoke(quarantine.list_, "orders", text=False).document
    assert [(w["quarantined"], w["relanded"]) for w in listed["windows"]] == [(12, 0), (0, 10), (10, 0), (10, 0)]
    account = invoke(audit.audit, "orders", hashes=True)
    assert account.code == 0
    assert [p["relanded"] for p in account.document["partitions"]] == [5, 5]
    assert "10 of the landed records had been in quarantine, 0 of them fixed" in account.text
    assert "re-landed by batch" in invoke(explain.explain, "orders", "orders:0:25").text
    assert invoke(files.files, "orders", window=[f"{DAY}T01"], text=False).document["rows"] == 50
    again = invoke(quarantine.replay, "orders", window=[f"{DAY}T01"])
    assert (again.code, again.document["tried"]) == (0, 0)
    assert "no quarantined record matches" in again.text


def test_a_replay_needs_no_dagster(landed: World, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dagster", None)  # as where it is not installed
    monkeypatch.delitem(sys.modules, "sluice.assets.events.landed_metadata")
    monkeypatch.delattr(events, "landed_metadata")
    replay = invoke(quarantine.replay, "orders", window=[f"{DAY}T01"], text=False)
    assert (replay.code, replay.document["landed"]) == (0, 10)


def test_replay_prints_fixed_records_and_errors_of_the_fix(
    landed: World, invoke: Invoke, capfd: pytest.CaptureFixture[str]
) -> None:
    from sluice.cli.terminal.output import CommandOutput
    from tests.cli.conftest import WorldSession, run_body

    fixes = landed.project.root / "fixes.py"
    fixes.write_text("def fix(record):\n    if record.offset % 2:\n        1 / 0\n    return {'id': record.offset}\n")
    session = WorldSession(CommandOutput(), landed.project.root, False, landed)
    assert run_body(quarantine.replay, session, "orders", fix=f"{fixes}:fix") == 0
    out = capfd.readouterr().out
    assert "20 records re-landed, 20 of them fixed" in out
    assert "ZeroDivisionError at fixes.py:3" in out


def test_replay_names_skipped_ranges_and_exits_with_3(landed: World, invoke: Invoke) -> None:
    (landed.project.feeds_folder / "orders.yaml").write_text(_format_feed({"id": "int64 not null"}))
    result = invoke(quarantine.replay, "orders", dry_run=True)
    assert (result.code, len(result.document["unfit"])) == (3, 8)
    assert "was skipped: column amount is no longer in the schema" in result.text
    (landed.project.feeds_folder / "orders.yaml").write_text(_format_feed(WIDER))
    receipts = [
        r.offset_range
        for r in landed.open_ledger_view().list_receipts(
            landed.open_ledger_view().complete and min(landed.open_ledger_view().complete)
        )
    ]
    _reserve(landed, receipts[0])
    result = invoke(quarantine.replay, "orders", dry_run=True)
    assert (result.code, [b["window"] for b in result.document["busy"]]) == (3, [f"{DAY}T00:00"])
    (other,) = result.document["other_batches"]
    assert (other["verdict"]["life"], other["ways"]) == ("alive", [])
    landed.liveness.dead.add("rival")
    result = invoke(quarantine.replay, "orders")
    (other,) = result.document["other_batches"]
    give_up = f"sluice repair orders --abandon {other['batch']}"
    assert (result.code, other["verdict"]["life"], [command for command, _ in other["ways"]]) == (
        3,
        "dead",
        ["sluice run orders", give_up],
    )
    assert f"→ {give_up}   gives it up" in result.text


def _reserve(world: World, s: OffsetRange) -> None:
    from sluice.pipelines.ledger.entries import PlanEntry
    from sluice.pipelines.model.kafka import Isolation
    from sluice.pipelines.model.plans import Plan, Request, Task

    request = Request(RequestKind.CATCH_UP)
    plan = Plan("orders", world.cluster.id, request, Isolation.READ_COMMITTED, (Task(0, 1, (s,)),))
    world.open_ledger().append(lambda state: PlanEntry(plan=plan, hash=plan.hash, owner=owner("rival")))


def test_invalid_fix_function_is_a_usage_error(landed: World, invoke: Invoke) -> None:
    before = dict(landed.lake.files)
    wrong = landed.project.root / "wrong.py"
    wrong.write_text("import json\n\nraise ValueError('no')\n")
    with pytest.raises(UsageError, match=r"wrong\.py, line 3: ValueError: no"):
        invoke(quarantine.replay, "orders", fix=f"{wrong}:fix")
    assert landed.lake.files == before
