"""`sluice compact` and `sluice expire`: their texts, documents and exit codes, and the files that readers get."""

from __future__ import annotations

import io
import re
from contextlib import nullcontext
from typing import Any

import pytest

from sluice.cli.daily import audit, status
from sluice.cli.inspect import explain, files, wait
from sluice.cli.maintain import compact, expire
from sluice.cli.terminal.output import CommandOutput
from sluice.pipelines.errors import Failed, UsageError, WindowIncomplete, WindowOpen, WindowRetired
from sluice.pipelines.model.plans import AskedRange, Request, RequestKind
from sluice.pipelines.util.units import show_window
from tests.assets.world import P1, World, at_hour
from tests.cli.conftest import Invoke, WorldSession, run_body

DAY = "2024-05-01"


@pytest.fixture
def landed(world: World) -> World:
    world.land_in_pieces()
    return world


# -- compact


def test_dry_run_reports_merge_and_changes_nothing(landed: World, invoke: Invoke) -> None:
    before = dict(landed.lake.files)
    result = invoke(compact.compact, "orders", dry_run=True)
    assert landed.lake.files == before
    assert result.code == 0
    assert (result.document["files"], result.document["files_after"], result.document["bytes_after"]) == (20, 2, None)
    assert [w["window"] for w in result.document["windows"]] == [f"{DAY}T00:00", f"{DAY}T01:00"]
    assert "A dry run: nothing was changed. 20 files would become 2." in result.text


def test_compaction_reports_merged_files_and_bytes(landed: World, invoke: Invoke) -> None:
    result = invoke(compact.compact, "orders", window=[f"{DAY}T01"], text=False)
    (batch,) = result.document["batches"]
    assert (result.document["files"], result.document["files_after"]) == (10, 1)
    assert 0 < result.document["bytes_after"] < result.document["bytes"]
    assert [w["window"] for w in result.document["windows"]] == [f"{DAY}T01:00"]
    rest = invoke(compact.compact, "orders", start=f"{DAY}T00", end=f"{DAY}T02", text=False)
    assert (rest.document["files"], rest.document["batches"] > [batch]) == (10, True)
    again = invoke(compact.compact, "orders")
    assert (again.code, again.document["batches"]) == (0, [])
    assert "nothing to merge" in again.text
    listed = invoke(files.files, "orders", window=[f"{DAY}T01"], text=False).document
    assert (len({f["address"] for f in listed["files"]}), listed["rows"]) == (1, 50)
    assert invoke(audit.audit, "orders", hashes=True).code == 0


def test_merged_windows_are_printed_as_text(landed: World, invoke: Invoke, capfd: pytest.CaptureFixture[str]) -> None:
    run_body(compact.compact, WorldSession(CommandOutput(), landed.project.root, False, landed), "orders")
    out = capfd.readouterr().out
    assert "20 files became 2" in out
    assert f"{DAY}T00:00" in out


def test_skipped_incomplete_windows_are_named(landed: World, invoke: Invoke) -> None:
    landed.engine.failing.add(P1)
    for start in (50, 55):
        landed.land_unrecorded(Request(RequestKind.OFFSETS, (AskedRange("orders", 0, start, start + 5),)))
    result = invoke(compact.compact, "orders", dry_run=True)
    assert result.document["incomplete"] == [f"{DAY}T02:00"]
    assert f"skipped, not complete: {DAY}T02:00" in result.text


@pytest.mark.parametrize("options", [{"window": [f"{DAY}T01:30"]}, {"window": [f"{DAY}T06"]}, {"end": f"{DAY}T02"}])
def test_invalid_windows_are_refused(options: dict[str, Any], landed: World, invoke: Invoke) -> None:
    with pytest.raises((UsageError, WindowOpen)):
        invoke(compact.compact, "orders", **options)


# -- expire


def test_expiry_needs_a_reason_and_a_confirmation(landed: World, invoke: Invoke) -> None:
    before = dict(landed.lake.files)
    result = invoke(expire.expire, "orders", before=f"{DAY}T01", dry_run=True)
    assert landed.lake.files == before
    assert (result.document["applied"], result.document["files"], result.document["rows"]) == (False, 10, 50)
    assert [w["window"] for w in result.document["windows"]] == [f"{DAY}T00:00"]
    assert "A dry run: nothing was changed." in result.text
    with pytest.raises(UsageError, match="--reason"):
        invoke(expire.expire, "orders", before=f"{DAY}T01", yes=True)
    with pytest.raises(UsageError, match="not confirmed: Retire these windows of orders, and remove 10 files"):
        invoke(expire.expire, "orders", before=f"{DAY}T01", reason="kept for an hour")
    assert landed.lake.files == before


@pytest.mark.parametrize(("answer", "files"), [("y\n", 10), ("n\n", 20), ("", 20)])
def test_expiry_prompts_for_confirmation_on_a_terminal(
    landed: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], answer: str, files: int
) -> None:
    monkeypatch.setattr(CommandOutput, "interactive", True)
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    with nullcontext() if files == 10 else pytest.raises(Failed, match="nothing was changed"):
        expire.expire(
            WorldSession(CommandOutput(), landed.project.root, False, landed), "orders", f"{DAY}T01", "kept for an hour"
        )
    output = capfd.readouterr()
    assert "Retire these windows of orders, and remove 10 files? [y/N]" in output.err
    assert output.out.count("in all") == 1
    assert sum(path.startswith("data/") and path.endswith(".parquet") for path in landed.lake.files) == files


def test_commands_report_expired_window_as_retired(landed: World, invoke: Invoke) -> None:
    result = invoke(expire.expire, "orders", before=f"{DAY}T01", reason="kept for an hour", yes=True)
    assert (result.document["applied"], result.document["removed_files"]) == (True, 10)
    assert "no landed rows before that time" in result.text, "the second time"
    for body, window in ((files.files, [f"{DAY}T00"]), (wait.wait, f"{DAY}T00")):
        with pytest.raises(WindowRetired, match=f"window {DAY}T00:00 .* was retired on .* by .*: kept for an hour"):
            invoke(body, "orders", window=window)
    assert invoke(files.files, "orders", window=[f"{DAY}T00"], partial=True, text=False).document["files"] == []
    assert len(invoke(files.files, "orders", window=[f"{DAY}T01"], text=False).document["files"]) == 10
    account = invoke(audit.audit, "orders")
    assert account.code == 0
    assert [p["retired"] for p in account.document["partitions"]] == [25, 25]
    assert "retired" in account.text
    explained = invoke(explain.explain, "orders", "orders:0:3", text=False).document
    assert explained["class"] == "retired"
    assert re.fullmatch(
        r"landed once, in the range \[0, 25\); retired on .* by .*: kept for an hour", explained["text"]
    )
    stands = invoke(status.status, "orders")
    states = {w["window"]: w["state"] for w in stands.document["feeds"][0]["windows"]}
    assert (states[f"{DAY}T00:00"], states[f"{DAY}T01:00"]) == ("retired", "landed")
    assert "- 1 retired" in stands.text


def test_expiry_boundary_can_be_a_duration(landed: World, invoke: Invoke) -> None:
    result = invoke(expire.expire, "orders", before="5h", dry_run=True, text=False)
    assert result.document["before"] == show_window(at_hour(1))


@pytest.mark.parametrize(
    ("before", "error", "says"),
    [
        (f"{DAY}T01:30", UsageError, "begins at"),
        (f"{DAY}T06", UsageError, f"the nearest end of a window before it is {DAY}T05:00"),
        ("last week", UsageError, "is not a window"),
        (f"{DAY}T03", WindowIncomplete, f"sluice run orders --window {DAY}T02:00"),
    ],
)
def test_expiry_is_refused_for_invalid_boundary_or_pending_window(
    before: str, error: type[Exception], says: str, landed: World, invoke: Invoke
) -> None:
    with pytest.raises(error) as refused:
        invoke(expire.expire, "orders", before=before, reason="test", yes=True)
    assert says in str(refused.value)
    assert landed.state().retired == {}
