"""`sluice compact` and `sluice expire`: what they print, their documents and exit codes, and what readers get after."""

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
from tests.assets.world import P0, P1, World, hour
from tests.cli.conftest import Over, Tell, run_body

DAY = "2024-05-01"


@pytest.fixture
def landed(world: World) -> World:
    """The first two hours, five offsets at a time."""
    for start in range(0, 50, 5):
        ranges = tuple(AskedRange(tp.topic, tp.partition, start, start + 5) for tp in (P0, P1))
        world.land_unrecorded(Request(RequestKind.OFFSETS, ranges))
    return world


# -- compact


def test_a_dry_run_says_what_it_would_merge_and_touches_nothing(landed: World, tell: Tell) -> None:
    before = dict(landed.lake.files)
    told = tell(compact.compact, "orders", dry_run=True)
    assert landed.lake.files == before
    assert told.code == 0
    assert (told.document["files"], told.document["files_after"], told.document["bytes_after"]) == (20, 4, None)
    assert [w["window"] for w in told.document["windows"]] == [f"{DAY}T00:00", f"{DAY}T01:00"]
    assert "A dry run: nothing was changed. 20 files would become 4." in told.text


def test_compaction_says_how_much_was_merged(landed: World, tell: Tell) -> None:
    told = tell(compact.compact, "orders", window=[f"{DAY}T01"], text=False)
    (batch,) = told.document["batches"]
    assert (told.document["files"], told.document["files_after"]) == (10, 2)
    assert 0 < told.document["bytes_after"] < told.document["bytes"]
    assert [w["window"] for w in told.document["windows"]] == [f"{DAY}T01:00"]
    rest = tell(compact.compact, "orders", start=f"{DAY}T00", end=f"{DAY}T02", text=False)
    assert (rest.document["files"], rest.document["batches"] > [batch]) == (10, True)
    again = tell(compact.compact, "orders")
    assert (again.code, again.document["batches"]) == (0, [])
    assert "nothing to merge" in again.text
    listed = tell(files.files, "orders", window=[f"{DAY}T01"], text=False).document
    assert (len(listed["files"]), listed["rows"]) == (2, 50)
    assert tell(audit.audit, "orders", hashes=True).code == 0


def test_what_was_merged_for_people(landed: World, tell: Tell, capfd: pytest.CaptureFixture[str]) -> None:
    run_body(compact.compact, Over(CommandOutput(), landed.project.root, False, landed), "orders")
    out = capfd.readouterr().out
    assert "20 files became 4" in out
    assert f"{DAY}T00:00" in out


def test_what_is_left_alone_is_named(landed: World, tell: Tell) -> None:
    landed.engine.failing.add(P1)
    for start in (50, 55):
        landed.land_unrecorded(Request(RequestKind.OFFSETS, (AskedRange("orders", 0, start, start + 5),)))
    told = tell(compact.compact, "orders", dry_run=True)
    assert told.document["incomplete"] == [f"{DAY}T02:00"]
    assert f"skipped, not complete: {DAY}T02:00" in told.text


@pytest.mark.parametrize("options", [{"window": [f"{DAY}T01:30"]}, {"window": [f"{DAY}T06"]}, {"end": f"{DAY}T02"}])
def test_windows_that_are_none_are_refused(options: dict[str, Any], landed: World, tell: Tell) -> None:
    with pytest.raises((UsageError, WindowOpen)):
        tell(compact.compact, "orders", **options)


# -- expire


def test_expiry_needs_a_reason_and_a_confirmation(landed: World, tell: Tell) -> None:
    before = dict(landed.lake.files)
    told = tell(expire.expire, "orders", before=f"{DAY}T01", dry_run=True)
    assert landed.lake.files == before
    assert (told.document["applied"], told.document["files"], told.document["rows"]) == (False, 10, 50)
    assert [w["window"] for w in told.document["windows"]] == [f"{DAY}T00:00"]
    assert "A dry run: nothing was changed." in told.text
    with pytest.raises(UsageError, match="--reason"):
        tell(expire.expire, "orders", before=f"{DAY}T01", yes=True)
    with pytest.raises(UsageError, match="not confirmed: Retire these windows of orders, and remove 10 files"):
        tell(expire.expire, "orders", before=f"{DAY}T01", reason="kept for an hour")
    assert landed.lake.files == before


@pytest.mark.parametrize(("answer", "files"), [("y\n", 10), ("n\n", 20), ("", 20)])
def test_on_a_terminal_expiry_asks(
    landed: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], answer: str, files: int
) -> None:
    monkeypatch.setattr(CommandOutput, "interactive", True)
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    with nullcontext() if files == 10 else pytest.raises(Failed, match="nothing was changed"):
        expire.expire(
            Over(CommandOutput(), landed.project.root, False, landed), "orders", f"{DAY}T01", "kept for an hour"
        )
    said = capfd.readouterr()
    assert "Retire these windows of orders, and remove 10 files? [y/N]" in said.err
    assert said.out.count("in all") == 1
    assert sum(path.startswith("data/") and path.endswith(".parquet") for path in landed.lake.files) == files


def test_what_is_expired_is_gone_and_everybody_says_so(landed: World, tell: Tell) -> None:
    told = tell(expire.expire, "orders", before=f"{DAY}T01", reason="kept for an hour", yes=True)
    assert (told.document["applied"], told.document["removed_files"]) == (True, 10)
    assert "no landed rows before that time" in told.text, "the second time"
    for body, window in ((files.files, [f"{DAY}T00"]), (wait.wait, f"{DAY}T00")):
        with pytest.raises(WindowRetired, match=f"window {DAY}T00:00 .* was retired on .* by .*: kept for an hour"):
            tell(body, "orders", window=window)
    assert tell(files.files, "orders", window=[f"{DAY}T00"], partial=True, text=False).document["files"] == []
    assert len(tell(files.files, "orders", window=[f"{DAY}T01"], text=False).document["files"]) == 10
    account = tell(audit.audit, "orders")
    assert account.code == 0
    assert [p["retired"] for p in account.document["partitions"]] == [25, 25]
    assert "retired" in account.text
    explained = tell(explain.explain, "orders", "orders:0:3", text=False).document
    assert explained["class"] == "retired"
    assert re.fullmatch(
        r"landed once, in the range \[0, 25\); retired on .* by .*: kept for an hour", explained["text"]
    )
    stands = tell(status.status, "orders")
    states = {w["window"]: w["state"] for w in stands.document["feeds"][0]["windows"]}
    assert (states[f"{DAY}T00:00"], states[f"{DAY}T01:00"]) == ("retired", "landed")
    assert "- 1 retired" in stands.text


def test_how_long_windows_are_kept(landed: World, tell: Tell) -> None:
    told = tell(expire.expire, "orders", before="5h", dry_run=True, text=False)
    assert told.document["before"] == show_window(hour(1))


@pytest.mark.parametrize(
    ("before", "error", "says"),
    [
        (f"{DAY}T01:30", UsageError, "begins at"),
        (f"{DAY}T06", UsageError, f"the nearest end of a window before it is {DAY}T05:00"),
        ("last week", UsageError, "is not a window"),
        (f"{DAY}T03", WindowIncomplete, f"sluice run orders --window {DAY}T02:00"),
    ],
)
def test_what_cannot_be_retired_is_refused(
    before: str, error: type[Exception], says: str, landed: World, tell: Tell
) -> None:
    with pytest.raises(error) as refused:
        tell(expire.expire, "orders", before=before, reason="test", yes=True)
    assert says in str(refused.value)
    assert landed.state().retired == {}
