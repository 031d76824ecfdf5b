"""`sluice quarantine`: what it prints, its documents and exit codes, and what Dagster and readers get of a replay."""

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
from tests.assets.world import FEED, MadeUpEngine, World, versions, windows
from tests.cli.conftest import Tell
from tests.pipelines.landed_world import decoded

DAY = "2024-05-01"
STRICT = {"id": "int64 not null", "amount": "int32"}
WIDER = {"id": "int64 not null", "amount": "int64"}
LARGE = 1 << 40


class JsonEngine(MadeUpEngine):
    """Each fifth record's amount is too large; offset 7 holds what a terminal would obey."""

    def _build_range(self, job: Job, s: OffsetRange) -> Outcome:
        values = [self.value(o) for o in range(s.start, s.end)]
        rows = decoded(np.arange(s.start, s.end))
        rows = rows.set_column(rows.schema.get_field_index("value"), "value", pa.array(values, pa.binary()))
        (made,) = job.shape.format().convert(s, rows)
        parts = self._written(job, s, PartKind.LANDED, made.landed)
        assert made.quarantined is not None
        parts += self._written(job, s, PartKind.QUARANTINED, quarantine_rows(made.quarantined, job.batch, ""))
        counts = Counts(made.landed.num_rows, made.quarantined.num_rows)
        return Receipt(s, s.end, counts, parts, job.attempt, format=job.shape.name)

    def value(self, offset: int) -> bytes:
        if offset == 7:
            return b"\x1b[2J\xff not JSON " + b"x" * 5000
        return json.dumps({"id": offset, "amount": LARGE if offset % 5 == 0 else offset}).encode()


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path, {"orders": _said(STRICT)})
    world.engine = JsonEngine(world.lake)
    return world


@pytest.fixture
def landed(world: World) -> World:
    """All of it, told to Dagster; then the feed was fixed."""
    assert world.run().exit_code == 0
    (world.project.feeds_folder / "orders.yaml").write_text(_said(WIDER))
    return world


def _said(schema: dict[str, str]) -> str:
    more = "format: json\npolicies: {quarantine_limit: {share: 1.0}}\n"
    return f"{FEED}{more}schema: {json.dumps(schema)}\n"


# -- list and show


def test_what_is_in_quarantine_by_reason_and_by_window(landed: World, tell: Tell) -> None:
    told = tell(quarantine.list_, "orders")
    assert (told.code, told.document["records"]) == (0, 42)
    first = told.document["held"][0]
    assert (first["reason"], first["field"], first["records"], first["first"]) == (
        "out_of_range",
        "amount",
        10,
        "orders:0:0",
    )
    assert (first["window"], first["share"]) == (f"{DAY}T00:00", 0.2)
    assert [w["quarantined"] for w in told.document["windows"]] == [12, 10, 10, 10]
    assert "amount: out_of_range" in told.text
    assert "invalid_utf8" in told.text or "not_json" in told.text
    some = tell(quarantine.list_, "orders", start=f"{DAY}T01", end=f"{DAY}T03", text=False).document
    assert [w["window"] for w in some["windows"]] == [f"{DAY}T01:00", f"{DAY}T02:00"]
    with pytest.raises(UsageError):
        tell(quarantine.list_, "orders", window=[f"{DAY}T01:30"])


def test_records_are_shown_so_that_no_terminal_obeys_them(landed: World, tell: Tell) -> None:
    told = tell(quarantine.show, "orders", offset=["orders:0:7"], number=10)
    assert "\x1b" not in told.text
    assert "\\x1b[2J\\xff not JSON" in told.text
    assert "bytes more" in told.text
    (row,) = told.document["records"]
    assert base64.b64decode(row["value"]).startswith(b"\x1b[2J\xff")
    assert (row["offset"], row["window"], row["stage"], row["batch"]) == (7, f"{DAY}T00:00", "decode", 3)
    assert row["headers"] == [{"key": "h", "value": base64.b64encode(b"7").decode()}]


def test_so_many_samples_as_are_asked_for(landed: World, tell: Tell) -> None:
    told = tell(quarantine.show, "orders", field=["amount"], number=3)
    assert [r["offset"] for r in told.document["records"]] == [0, 5, 10]
    assert "amount: out_of_range: too large for int32" in told.text
    none = tell(quarantine.show, "orders", reason=["nothing_like_that"], number=3)
    assert (none.code, none.document["records"]) == (0, [])
    assert "no quarantined record of orders matches" in none.text


# -- replay


def test_a_dry_run_says_what_would_land_and_touches_nothing(landed: World, tell: Tell) -> None:
    before = dict(landed.lake.files)
    told = tell(quarantine.replay, "orders", dry_run=True)
    assert landed.lake.files == before
    assert (told.code, told.document["tried"], told.document["landed"], told.document["stay"]) == (0, 42, 40, 2)
    assert told.document["kinds"][0]["reason"] == "out_of_range"
    assert "A dry run: nothing was changed. 40 records would land." in told.text
    assert "Reasons of records that still do not fit" in told.text


def test_what_was_re_landed_is_told_to_dagster_and_closes_the_account(landed: World, tell: Tell) -> None:
    with open_instance(landed.project) as instance:
        before = versions(instance, landed_key("orders"), f"{DAY}T01:00")
    told = tell(quarantine.replay, "orders", window=[f"{DAY}T01"], text=False)
    (batch,) = told.document["batches"]
    assert (told.code, told.document["landed"]) == (0, 10)
    with open_instance(landed.project) as instance:
        after = versions(instance, landed_key("orders"), f"{DAY}T01:00")
        assert after[: len(before)] == before
        assert f"/{batch}/" in after[-1]
        assert versions(instance, landed_key("orders"), f"{DAY}T02:00")[-1] == before[-1]
        assert windows(instance, quarantined_key("orders"))[f"{DAY}T01:00"]
    committed = landed.state().commits
    assert landed.run().exit_code == 0, "a commit does not miss it"
    assert landed.state().commits == committed
    listed = tell(quarantine.list_, "orders", text=False).document
    assert [(w["quarantined"], w["relanded"]) for w in listed["windows"]] == [(12, 0), (0, 10), (10, 0), (10, 0)]
    account = tell(audit.audit, "orders", hashes=True)
    assert account.code == 0
    assert [p["relanded"] for p in account.document["partitions"]] == [5, 5]
    assert "10 of the landed records had been in quarantine, 0 of them fixed" in account.text
    assert "re-landed by batch" in tell(explain.explain, "orders", "orders:0:25").text
    assert tell(files.files, "orders", window=[f"{DAY}T01"], text=False).document["rows"] == 50
    again = tell(quarantine.replay, "orders", window=[f"{DAY}T01"])
    assert (again.code, again.document["tried"]) == (0, 0)
    assert "no quarantined record matches" in again.text


def test_a_replay_needs_no_dagster(landed: World, tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dagster", None)  # as where it is not installed
    monkeypatch.delitem(sys.modules, "sluice.assets.events.landed_metadata")
    monkeypatch.delattr(events, "landed_metadata")
    replay = tell(quarantine.replay, "orders", window=[f"{DAY}T01"], text=False)
    assert (replay.code, replay.document["landed"]) == (0, 10)


def test_a_replay_for_people(landed: World, tell: Tell, capfd: pytest.CaptureFixture[str]) -> None:
    from sluice.cli.terminal.output import CommandOutput
    from tests.cli.conftest import Over, run_body

    fixes = landed.project.root / "fixes.py"
    fixes.write_text("def fix(record):\n    if record.offset % 2:\n        1 / 0\n    return {'id': record.offset}\n")
    session = Over(CommandOutput(), landed.project.root, False, landed)
    assert run_body(quarantine.replay, session, "orders", fix=f"{fixes}:fix") == 0
    out = capfd.readouterr().out
    assert "20 records re-landed, 20 of them fixed" in out
    assert "ZeroDivisionError at fixes.py:3" in out


def test_ranges_that_are_left_alone_are_named_and_refuse(landed: World, tell: Tell) -> None:
    (landed.project.feeds_folder / "orders.yaml").write_text(_said({"id": "int64 not null"}))
    told = tell(quarantine.replay, "orders", dry_run=True)
    assert (told.code, len(told.document["unfit"])) == (3, 8)
    assert "was skipped: column amount is not in the schema any more" in told.text
    (landed.project.feeds_folder / "orders.yaml").write_text(_said(WIDER))
    receipts = [
        r.offset_range for r in landed.books().list_receipts(landed.books().complete and min(landed.books().complete))
    ]
    _reserve(landed, receipts[0])
    told = tell(quarantine.replay, "orders", dry_run=True)
    assert (told.code, [b["window"] for b in told.document["busy"]]) == (3, [f"{DAY}T00:00"])
    (other,) = told.document["other_batches"]
    assert (other["owner_is"], other["ways"]) == ("alive", [])
    landed.liveness.dead.add("rival")
    told = tell(quarantine.replay, "orders")
    (other,) = told.document["other_batches"]
    give_up = f"sluice repair orders --abandon {other['batch']}"
    assert (told.code, other["owner_is"], other["ways"]) == (3, "dead", ["sluice run orders", give_up])
    assert f"→ {give_up}   gives it up" in told.text


def _reserve(world: World, s: OffsetRange) -> None:
    from sluice.pipelines.ledger.entries import PlanEntry
    from sluice.pipelines.model.kafka import Isolation
    from sluice.pipelines.model.plans import Plan, Request, Task

    asked = Request(RequestKind.CATCH_UP)
    plan = Plan("orders", world.cluster.id, asked, Isolation.READ_COMMITTED, (Task(0, 1, (s,)),))
    world.ledger().append(lambda state: PlanEntry(plan=plan, hash=plan.hash, owner=owner("rival")))


def test_a_fix_function_that_is_none_is_a_mistake_of_the_caller(landed: World, tell: Tell) -> None:
    before = dict(landed.lake.files)
    wrong = landed.project.root / "wrong.py"
    wrong.write_text("import json\n\nraise ValueError('no')\n")
    with pytest.raises(UsageError, match=r"wrong\.py, line 3: ValueError: no"):
        tell(quarantine.replay, "orders", fix=f"{wrong}:fix")
    assert landed.lake.files == before
