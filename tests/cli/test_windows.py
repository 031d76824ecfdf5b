"""Windows in commands: plan, run, wait, files, and the strip of `sluice status`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sluice.cli.daily import run, status
from sluice.cli.inspect import files, plan, wait
from sluice.cli.shared import window_text
from sluice.cli.terminal.output import CommandOutput
from sluice.pipelines.errors import PartUnreadable, UsageError, WindowIncomplete, WindowOpen
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.model.kafka import CommittedOffset, Key, OpenTransaction, Range
from sluice.pipelines.status.window_state import PendingPart, Standing, WindowStanding
from sluice.pipelines.util.units import show_window
from sluice.testing.group import MemoryGroups
from tests.assets.world import P0, P1, World, at_hour, in_hour
from tests.cli.conftest import BodyResult, Invoke, WorldSession, run_body

DAY = "2024-05-01"


def format_hour(number: int) -> str:
    return f"{DAY}T{number:02}"


def read_states(document: dict[str, Any]) -> dict[str, str]:
    """Return the state of each window by its hour."""
    (feed,) = document["feeds"]
    return {w["window"].partition("T")[2]: w["state"] for w in feed["windows"]}


# -- plan and refusals


def test_plan_lists_runs_for_one_window_and_for_several(invoke: Invoke) -> None:
    one = invoke(plan.plan, "orders", window=[format_hour(1)])
    assert (one.code, one.document["request"], one.document["offsets"]) == (0, f"window {DAY}T01:00", 50)
    ranges = [s for t in one.document["tasks"] for s in t["offset_ranges"]]
    assert {(s["start"], s["end"]) for s in ranges} == {(25, 50)}
    several = invoke(plan.plan, "orders", start=format_hour(1), end=format_hour(4), only=["orders:0"])
    assert [(p["request"], p["offsets"]) for p in several.document["plans"]] == [
        (f"window {DAY}T0{h}:00 of orders:0", 25) for h in (1, 2, 3)
    ]
    assert "3 runs, in sequence" in several.text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"window": [f"{DAY}T01:30"]}, f"begins at {DAY}T01:00"),
        ({"window": ["hour 14"]}, "is not a window"),
        ({"window": ["2024-13-01"]}, "the calendar"),
        ({"window": [format_hour(6)]}, "it can be landed from 2024-05-01T07:10:00Z on"),
        ({"window": ["2040-01-01"]}, "is not closed yet"),
        ({"start": format_hour(6)}, "is not closed yet"),
        ({"start": format_hour(3), "end": format_hour(3)}, "no window between"),
        ({"start": format_hour(1), "end": f"{DAY}T02:20"}, f"begins at {DAY}T02:00"),
        ({"end": format_hour(3)}, "--to without --from"),
        ({"window": [format_hour(1)], "start": format_hour(1)}, "together"),
        ({"window": [format_hour(1)], "offsets": ["orders:0:1-2"]}, "--offsets together with windows"),
        ({"only": ["orders:0"], "offsets": ["orders:0:1-2"]}, "--offsets together with --only"),
    ],
)
def test_invalid_window_options_are_refused(options: dict[str, Any], says: str, world: World) -> None:
    for body, feed in ((plan.plan, "orders"), (run.run, ["orders"])):
        with pytest.raises((UsageError, WindowOpen)) as refused:
            run_body(body, WorldSession(CommandOutput(), world.project.root, False, world), feed, **options)
        assert says in str(refused.value)
    assert world.lake.files == {}


def test_window_before_the_first_window_is_refused(world: World, invoke: Invoke) -> None:
    world.run(in_hour(1))
    for body in (files.files, wait.wait):
        window: Any = "2024-04-30T23" if body is wait.wait else ["2024-04-30T23"]
        with pytest.raises(UsageError, match="before the feed's first window") as error:
            invoke(body, "orders", window=window)
        assert "sluice run orders --window 2024-04-30T23:00" in error.value.remedy
    with pytest.raises(UsageError, match="Kafka holds no record"):
        invoke(plan.plan, "orders", window=["2024-04-30T23"])
    result = invoke(run.run, ["orders"], window=["2024-04-30T23"], text=False)
    assert (result.code, result.run["error"]) == (2, "UsageError")


# -- pending


def read_open_windows(outcome: BodyResult) -> Any:
    """Return the open windows of the only feed."""
    (feed,) = outcome.document["feeds"]
    return feed["open_windows"]


OPEN_WINDOWS = {"window": f"{DAY}T05:00", "windows": 2, "lands_from": f"{DAY}T06:10:00Z"}
STAYS = f"window {DAY}T05:00 and 1 later one are still open: it can be landed from {DAY}T06:10:00Z on"


@pytest.mark.parametrize(
    "options",
    [
        {"start": format_hour(3), "end": format_hour(7)},
        {"start": format_hour(3), "end": format_hour(7), "per_run": 5},
        {"start": format_hour(3), "end": format_hour(7), "replace": True},
        {"window": [format_hour(5), format_hour(3), format_hour(6), format_hour(4)]},
    ],
)
def test_settled_windows_land_and_open_windows_are_named(options: dict[str, Any], world: World, invoke: Invoke) -> None:
    """`sluice run orders --from 3 --to 7`, a few minutes after six."""
    world.at(6, minutes=5)
    planned = invoke(plan.plan, "orders", **options)
    assert (planned.code, planned.document["open_windows"]) == (0, OPEN_WINDOWS)
    assert sum(p["offsets"] for p in planned.document["plans"]) == 50
    result = invoke(run.run, ["orders"], **options)
    assert (result.code, read_open_windows(result)) == (0, OPEN_WINDOWS)
    assert sum(b["landed"] for r in result.runs for b in r["batches"]) == 50
    assert STAYS in result.text
    assert f"by hand: sluice run orders --window {DAY}T05:00" in result.text


def test_closed_window_lands_and_open_window_is_reported(world: World, invoke: Invoke) -> None:
    world.at(6, minutes=5)
    result = invoke(run.run, ["orders"], window=[format_hour(1), format_hour(5)])
    assert (result.code, result.run["window"]["state"]) == (0, "landed")
    assert read_open_windows(result) == OPEN_WINDOWS | {"windows": 1}
    assert read_open_windows(invoke(run.run, ["orders"], window=[format_hour(1)], text=False)) is None


def test_windows_up_to_a_distant_end_are_not_enumerated(world: World, invoke: Invoke) -> None:
    """Windows that do not exist yet are never listed one by one."""
    result = invoke(run.run, ["orders"], start=format_hour(3), end="9999-12-31")
    assert result.code == 0
    assert read_open_windows(result)["windows"] > 60_000_000


def test_open_window_raises_a_separate_error_with_exit_code_75(world: World, invoke: Invoke) -> None:
    world.at(6, minutes=5)
    for options in (
        {"window": [format_hour(5)]},
        {"start": format_hour(5)},
        {"start": format_hour(5), "end": format_hour(6)},
    ):
        with pytest.raises(WindowOpen, match="is not closed yet") as refused:
            invoke(run.run, ["orders"], **options)
        assert (refused.value.exit_code, refused.value.fields()["error"]) == (75, "WindowOpen")


# -- run


def test_run_reports_a_complete_window(invoke: Invoke) -> None:
    result = invoke(run.run, ["orders"], window=[format_hour(2)])
    assert result.code == 0
    assert result.run["batches"][0]["landed"] == 50
    assert result.run["window"] == {
        "window": f"{DAY}T02:00", "state": "landed", "empty": False, "offsets": 50, "accounted": 50,
        "batch": None, "pending": [], "lost": 0, "unseen": [],
    }  # fmt: skip
    assert f"window {DAY}T02:00 is complete" in result.text


def test_run_of_several_windows_continues_after_a_failed_window(world: World, invoke: Invoke) -> None:
    world.cluster.hold(P1, 60)
    result = invoke(run.run, ["orders"], start=format_hour(1), end=format_hour(5))
    assert (result.code, result.document["exit_code"]) == (75, 75)
    by_hour = {r["window"]["window"][-5:]: r for r in result.runs}
    assert {h: r["window"]["state"] for h, r in by_hour.items()} == {
        "01:00": "landed",
        "02:00": "held",
        "03:00": "held",
        "04:00": "landed",
    }, "nothing was produced in the last one"
    assert by_hour["02:00"]["error"] == "WindowHeld"
    pending = {o["partition"]: o for o in by_hour["02:00"]["window"]["pending"]}
    row = {"topic": "orders", "partition": 1, "topic_id": "id-1"}
    assert pending == {1: row | {"ranges": [[50, 75]], "held_at": 60, "held_by": None}}
    assert "orders:1 lacks [50, 75), held at 60 by an open transaction" in result.text
    assert by_hour["02:00"]["batches"][0]["landed"] == 25, "the other partition has landed"


def test_invalid_request_ends_a_run_of_several_windows(invoke: Invoke) -> None:
    """The first window is known only after a request to Kafka."""
    result = invoke(run.run, ["orders"], start="2024-04-30T22", end=format_hour(2), text=False)
    assert (result.code, len(result.runs)) == (2, 1)
    assert "Kafka holds no record" in result.runs[0]["message"]


def test_several_windows_are_landed_in_one_run(invoke: Invoke) -> None:
    result = invoke(run.run, ["orders"], start=format_hour(0), end=format_hour(4), per_run=3)
    first, second = result.runs
    assert [r["request"] for r in (first, second)] == [
        f"windows {DAY}T00:00 to {DAY}T03:00",
        f"windows {DAY}T03:00 to {DAY}T04:00",
    ]
    assert [b["landed"] for b in first["batches"]] == [150]
    assert "1 of 2, the rest in about" in result.text
    assert "nothing landed" in result.text, "the second time"


def test_landing_again_replaces_the_files(world: World, invoke: Invoke) -> None:
    world.run(in_hour(1))
    before = set(world.lake.list("data/orders"))
    preview = invoke(plan.plan, "orders", window=[format_hour(1)], replace=True)
    assert set(preview.document["replaces"]) == before
    assert f"replacing {len(before)} files" in preview.text
    result = invoke(run.run, ["orders"], window=[format_hour(1)], replace=True, text=False)
    assert result.run["batches"][0]["replaced_files"] == len(before)
    assert not before & set(world.lake.list("data/orders"))


def test_skipped_offsets_are_named_with_the_command_that_lands_them(
    world: World, invoke: Invoke, capfd: pytest.CaptureFixture[str]
) -> None:
    result = invoke(run.run, ["orders"], skip_to=f"{DAY}T01:00:00Z", reason="test data", only=["orders:0"], text=False)
    assert result.run["skipped"] == [{"topic": "orders", "partition": 0, "topic_id": "id-1", "start": 0, "end": 25}]
    before = world.state()
    run_body(
        run.run,
        WorldSession(CommandOutput(), world.project.root, False, world),
        ["orders"],
        skip_to="latest",
        reason="test data",
    )
    assert "to land it anyway: sluice run orders --offsets orders:1:" in capfd.readouterr().out
    assert before.skipped != world.state().skipped


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"skip_to": "latest"}, "needs a reason"),
        ({"skip_to": "yesterday", "reason": "x"}, "is not an ISO time"),
        ({"skip_to": "latest", "reason": "x", "window": [format_hour(1)]}, "together with windows"),
        ({"reason": "x"}, "--reason without --skip-to"),
        ({"replace": True}, "--replace without a range"),
    ],
)
def test_skipping_and_replacing_need_complete_options(options: dict[str, Any], says: str, invoke: Invoke) -> None:
    with pytest.raises(UsageError, match=says):
        invoke(run.run, ["orders"], **options)


def test_limits_split_a_request_into_runs(world: World, invoke: Invoke) -> None:
    feed = world.project.feeds_folder / "orders.yaml"
    feed.write_text(feed.read_text() + "limits: {records: 30}\n")
    result = invoke(run.run, ["orders"], window=[format_hour(1)], text=False)
    runs = result.runs
    assert [r["left"] for r in runs] == [20, 0]
    assert (result.code, runs[-1]["window"]["state"]) == (0, "landed")


# -- wait, files


def test_wait_ends_when_the_window_is_complete_or_the_time_is_up(world: World, invoke: Invoke) -> None:
    late = invoke(wait.wait, "orders", window=format_hour(2), timeout="0s")
    assert (late.code, late.document["complete"], late.document["state"]) == (75, False, "pending")
    assert (late.document["error"], late.document["exit_code"]) == ("WindowIncomplete", 75)
    assert f"{DAY}T02:00 is not complete after 0s" in late.document["message"]
    world.run(in_hour(2))
    result = invoke(wait.wait, "orders", window=format_hour(2), timeout="0s")
    assert (result.code, result.document["complete"], result.document["state"]) == (0, True, "landed")
    assert "is complete" in result.text


def test_wait_depends_on_readable_files_and_not_on_the_manifest(world: World, invoke: Invoke) -> None:
    world.run(in_hour(2))
    hour = [p for p in world.lake.files if p.startswith("data/") and "window_hour=02" in p]
    parts = {p: world.lake.files.pop(p) for p in hour}
    (manifest,) = [p for p in world.lake.files if "/windows/" in p and "T0200" in p]
    del world.lake.files[manifest]
    with pytest.raises(PartUnreadable, match="is missing"):
        invoke(wait.wait, "orders", window=format_hour(2), timeout="0s", text=False)
    world.lake.files.update(parts)
    assert invoke(wait.wait, "orders", window=format_hour(2), timeout="0s", text=False).document["complete"]


def test_files_are_listed_one_per_line(world: World, invoke: Invoke) -> None:
    world.run(in_hour(1))
    result = invoke(files.files, "orders", window=[format_hour(1)])
    lines = result.text.splitlines()
    assert sorted(lines) == sorted(world.lake.locate(p) for p in world.lake.files if p.startswith("data/"))
    assert [f["address"] for f in result.document["files"]] == lines
    first = result.document["files"][0]
    assert (first["partition"], first["start"], first["end"], first["rows"], len(first["sha256"])) == (
        0,
        25,
        50,
        25,
        64,
    )
    assert (result.document["rows"], result.document["windows"]) == (50, [f"{DAY}T01:00"])
    assert invoke(files.files, "orders", window=[format_hour(1)], quarantine=True, text=False).document["files"] == []


def test_files_of_an_incomplete_window_need_the_partial_option(world: World, invoke: Invoke) -> None:
    world.engine.failing.add(P1)
    world.run(in_hour(1))
    with pytest.raises(WindowIncomplete) as refused:
        invoke(files.files, "orders", window=[format_hour(1)])
    assert refused.value.exit_code == 75
    there = invoke(files.files, "orders", start=format_hour(1), end=format_hour(3), partial=True, text=False).document
    assert [f["partition"] for f in there["files"]] == [0]
    with pytest.raises(UsageError, match="no window"):
        invoke(files.files, "orders")


# -- status


def _held(world: World) -> None:
    world.cluster.hold(P0, 60)
    world.run(in_hour(3))


def test_transaction_that_blocks_a_window_is_named(world: World, invoke: Invoke) -> None:
    world.cluster.hold(P0, 60)
    world.cluster.open[P0] = OpenTransaction(60, 4711, 2, at_hour(3), "payments-7")
    result = invoke(run.run, ["orders"], window=[format_hour(3)])
    by = "transaction 'payments-7' of producer 4711, last written 2024-05-01T03:00:00Z"
    assert result.code == 75
    message = result.run["message"]
    assert message == f"orders:0: the window ends at 100, but {by} (3 h ago) holds the last stable offset at 60"
    assert result.run["remedy"].endswith(
        "kafka-transactions.sh --bootstrap-server 127.0.0.1:9 --command-config FILE abort --topic orders"
        " --partition 0 --start-offset 60"
    )
    assert f"held at 60 by {by}" in " ".join(invoke(status.status, "orders").text.split())


def _failed(world: World) -> None:
    world.engine.failing.add(P1)
    world.run(in_hour(3))


def _partial(world: World) -> None:
    world.run(in_hour(3, only=(P0,)))


@pytest.mark.parametrize(
    ("prepare", "state", "strip"),
    [(_held, "held", "#oHH#.."), (_failed, "failed", "#oox#.."), (_partial, "partial", "#oo+#..")],
)
def test_strip_shows_the_state_of_each_window(
    prepare: Callable[[World], None], state: str, strip: str, world: World, invoke: Invoke
) -> None:
    world.run(in_hour(0))
    prepare(world)
    result = invoke(status.status, "orders")
    states = read_states(result.document)
    assert (states["00:00"], states["01:00"], states["03:00"], states["05:00"]) == (
        "landed",
        "pending",
        state,
        "not closed",
    )
    assert f"  2024-05-01  {' '.join(strip)}" in result.text
    assert f"{strip.count(strip[3])} {state}" in result.text
    assert f"window {DAY}T03:00" in result.text, "and a line says why"
    assert strip in invoke(status.status).text


def test_a_partial_window_names_the_command_that_completes_it(world: World, invoke: Invoke) -> None:
    _partial(world)
    assert f"to complete it: sluice run orders --window {DAY}T03:00" in invoke(status.status, "orders").text


def test_an_hour_without_records_is_empty_and_not_missing(world: World, invoke: Invoke) -> None:
    answer = invoke(run.run, ["orders"])
    assert answer.code == 0
    answer = invoke(status.status, "orders")
    (feed,) = answer.document["feeds"]
    assert [w["window"] for w in feed["windows"] if w["empty"]] == [f"{DAY}T04:00"]
    assert "(1 empty)" in answer.text
    answer = invoke(run.run, ["orders"], window=[format_hour(4)])
    assert f"window {DAY}T04:00 is complete and empty: no record arrived in it" in answer.text


def test_offsets_of_another_committer_that_replace_start_are_reported(world: World, invoke: Invoke) -> None:
    world.group.offsets[P0] = CommittedOffset(5, metadata="")
    note = "is not used in 1 of 2 partitions: group"
    remedy = "give the feed a group of its own: `group: NAME` in feeds/orders.yaml"
    for body, feed in ((plan.plan, "orders"), (run.run, ["orders"])):
        answer = invoke(body, feed, text=False)
        document = answer.run if body is run.run else answer.document
        assert note in document["start_not_used"]
        assert remedy in document["start_not_used"]


def test_status_lists_newest_windows_and_no_window_before_the_first_run(world: World, invoke: Invoke) -> None:
    before = invoke(status.status, "orders")
    assert before.document["feeds"][0]["windows"] == []
    world.run()
    result = invoke(status.status, "orders", last=2)
    assert [w["window"] for w in result.document["feeds"][0]["windows"]] == [
        show_window(at_hour(5)),
        show_window(at_hour(6)),
    ]


# -- layout


@pytest.mark.parametrize(("minutes", "width"), [(60, 60), (60, 120), (15, 60), (1, 60), (1440, 60)])
def test_a_strip_fits_the_screen(minutes: int, width: int) -> None:
    settings, length = WindowSettings(length=f"{minutes}m"), minutes * 60_000
    standings = [WindowStanding(at_hour(0) + i * length, Standing.LANDED, 1, 1, ()) for i in range(48)]
    lines = list(window_text.calendar(standings, settings, fancy=True, width=width))
    assert max(len(line.plain.rstrip()) for line in lines) <= width
    assert "".join(line.plain for line in lines[:-1]).count("■") == 48


def test_active_window_is_neither_done_nor_failed() -> None:
    pending = (PendingPart(Key("orders", "id-1", 0), (Range(0, 9),)),)
    at_work = WindowStanding(at_hour(1), Standing.RUNNING, 0, 9, pending, 31, window=f"{format_hour(1)}:00")
    assert window_text.verdict(at_work).plain.startswith(f"▶ window {format_hour(1)}:00: batch 31 is active")
    assert window_text.verdict(replace(at_work, state=Standing.FAILED)).plain.startswith("✗ window")


def test_runs_over_several_windows_report_quarantined_records(
    world: World, groups: MemoryGroups, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    world.engine.bad = 2
    session = WorldSession(CommandOutput(), world.project.root, False, world, groups)
    assert run_body(run.run, session, ["orders"], start=format_hour(1), end=format_hour(3)) == 0
    out = capfd.readouterr().out
    assert out.count("4 in quarantine") == 2
    assert "landed       92 records in 2 runs" in out
    assert "quarantined  8 records (8 %): sluice quarantine list orders" in out
