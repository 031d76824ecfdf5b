"""The forecasts of `sluice status`: its text and its document."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.cli.daily import status
from sluice.cli.rules import quarantine
from sluice.pipelines.batch.survey import open_ledger
from sluice.pipelines.errors import QuarantineExceeded
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.ledger.entries import PlanEntry
from sluice.pipelines.model.kafka import BrokerConfig, Configs, Isolation, OpenTransaction, TopicConfig
from sluice.pipelines.model.plans import OffsetRange, Plan, Task
from sluice.pipelines.model.receipts import Owner
from sluice.pipelines.operating.feed_status import FeedStatus
from sluice.pipelines.operating.findings import Finding
from sluice.pipelines.status.outlook import Outlook
from sluice.pipelines.status.window_state import Standing, WindowStanding
from sluice.testing.engine import owner
from tests.assets.world import CATCH_UP, HOUR, P0, P1, World, at_hour, in_hour
from tests.cli.conftest import FEED, Invoke, Sluice

DAY = 24 * HOUR


def test_status_reports_lag_in_time_rates_and_catch_up_time(world: World, invoke: Invoke) -> None:
    world.land_unrecorded(in_hour(0))
    result = invoke(status.status, "orders")
    (feed,) = result.document["feeds"]
    outlook = feed["outlook"]
    assert feed["lag"] == 150
    assert outlook["lag_seconds"] == pytest.approx(5 * 3600, abs=120)
    assert [p["lag_seconds"] for p in feed["partitions"]] == [outlook["lag_seconds"]] * 2
    assert outlook["landing"] > 0
    assert outlook["catch_up_seconds"] > 0
    assert (outlook["at_risk"], feed["losses"], outlook["falls_behind"]) == ([], [], False)
    assert "150 offsets behind, the oldest 5 h old" in result.text
    assert "of landing" in result.text
    assert "5 h" in invoke(status.status).text


def test_project_of_retired_feeds_is_not_empty(tmp_path: Path, sluice: Sluice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "feeds").mkdir()
    (tmp_path / "feeds" / "orders.yaml").write_text(f"retired: true\n{FEED}")
    assert "no feeds but 1 retired one: sluice feeds list" in sluice("status").out


def test_unreadable_topic_settings_are_reported_with_the_grant_command(world: World, invoke: Invoke) -> None:
    world.cluster.settings = Configs(denied=("orders",))
    result = invoke(status.status, "orders")
    assert result.document["feeds"][0]["outlook"]["settings_denied"] == ["orders"]
    assert result.text.count("how long orders keeps its records may not be asked") == 1
    assert "--operation DescribeConfigs --topic orders" in " ".join(result.text.split())


def test_records_at_risk_come_first_with_the_command(world: World, invoke: Invoke) -> None:
    world.cluster.settings = Configs({"orders": TopicConfig(retention_ms=9 * HOUR)})
    world.land_unrecorded(in_hour(0))
    result = invoke(status.status, "orders")
    first, second = result.document["feeds"][0]["outlook"]["at_risk"]
    assert (first["partition"], first["ranges"], first["setting"]) == (0, [[25, 38]], "retention.ms 9h")
    assert first["deleted_from"] == "2024-05-01T10:00:00Z"
    assert second["partition"] == 1
    assert "✗ orders:0 [25, 38) will begin to be deleted in about 3 h 5" in result.text
    assert "landing takes about " in result.text
    assert result.text.index("will begin to be deleted") < result.text.index("partition  origin")
    overview = invoke(status.status).text
    assert "✗ orders: orders:0 [25, 38)" in overview
    assert "sluice run orders" in overview
    assert "then ranges of 1 more partition" in overview
    assert overview.index("will begin to be deleted") < overview.index("uncommitted")


def test_lost_records_are_reported_with_a_remedy(world: World, invoke: Invoke) -> None:
    world.land_unrecorded(in_hour(0))
    world.cluster.states[P1] = replace(world.cluster.states[P1], log_start=60)
    result = invoke(status.status, "orders")
    (lost,) = result.document["feeds"][0]["losses"]
    assert (lost["error"], lost["start"], lost["end"]) == ("OffsetsLost", 25, 60)
    assert "✗ orders:1: offsets [25, 60) are gone from Kafka" in result.text
    assert "sluice accept orders lost" in result.text
    assert "lost records" in invoke(status.status).text


def test_production_faster_than_landing_is_reported(world: World, invoke: Invoke) -> None:
    world.land_unrecorded(in_hour(0))
    for tp in (P0, P1):
        world.cluster.write(tp, [at_hour(5)] * 4_000_000)
    result = invoke(status.status, "orders")
    assert result.document["feeds"][0]["outlook"]["falls_behind"]
    assert "never, at these rates" in result.text


def test_records_blocked_by_a_transaction_are_reported(world: World, invoke: Invoke) -> None:
    world.land_unrecorded()
    world.grow(1, 130)
    world.cluster.hold(P1, 100)
    world.cluster.open[P1] = OpenTransaction(100, 77, 3, last_written=at_hour(6), name="billing-7")
    result = invoke(status.status, "orders")
    assert "caught up; 30 more are not stable" in result.text
    assert "orders:1 is held at offset 100 by transaction 'billing-7' of producer 77" in result.text
    assert "30 offsets cannot land yet" in " ".join(result.text.split())
    assert "abort --topic orders --partition 1 --start-offset 100" in " ".join(result.text.split())
    assert result.document["feeds"][0]["partitions"][1]["unstable"] == 30
    (held_back,) = result.document["feeds"][0]["held_back"]
    assert (held_back["offsets"], held_back["overdue"]) == (30, False)
    assert held_back["transaction"]["name"] == "billing-7"
    assert "30 held back" in invoke(status.status).text
    assert "caught up" not in invoke(status.status).text
    world.at(8)
    hangs = invoke(status.status, "orders")
    (hanging,) = hangs.document["feeds"][0]["held_back"]
    assert hanging["overdue"]
    assert "kafka-transactions.sh" in hanging["remedy"]
    assert "held at offset 100 by transaction 'billing-7'" in hangs.text
    assert "held back" in invoke(status.status).text


def plan_batch(world: World, who: Owner) -> None:
    """Land an hour, and plan a batch of this owner, whose last heartbeat is 7 s old."""
    world.land_unrecorded(in_hour(0))
    plan = Plan("orders", world.cluster.id, CATCH_UP, Isolation.READ_COMMITTED, (Task(0, 1, (_build_range(),)),))
    feed = world.make_session().feed("orders")
    with world.open_ports(feed) as ports:
        open_ledger(feed, ports).append(lambda state: PlanEntry(plan=plan, hash=plan.hash, owner=who))
        world.liveness.heartbeats[who.token] = ports.clock() - 7_000


def test_live_batch_shows_the_last_heartbeat_of_the_owner(world: World, invoke: Invoke) -> None:
    plan_batch(world, replace(owner(run="run-123456789"), pid=77))
    result = invoke(status.status, "orders")
    (live,) = result.document["feeds"][0]["live_batches"]
    assert 7 <= live["heartbeat_seconds"] < 60
    assert (live["owner"]["pid"], live["offsets"]) == (77, 10)
    assert "(catch-up) is at work: run run-1234 (pid 77 on host) lives: set by the test" in result.text
    assert (live["verdict"]["life"], live["ways"]) == ("alive", [])


def test_live_batch_of_a_dead_run_is_reported_with_remedies(world: World, invoke: Invoke) -> None:
    """The heartbeat of a killed run remains. `status` judged by it alone, and contradicted `repair`."""
    who = owner(run="run-123456789")
    plan_batch(world, who)
    world.liveness.dead = {who.token}
    result = invoke(status.status, "orders")
    (live,) = result.document["feeds"][0]["live_batches"]
    give_up = f"sluice repair orders --abandon {live['id']}"
    assert live["verdict"] == {"life": "dead", "why": "set by the test"}
    assert [command for command, _ in live["ways"]] == ["sluice run orders", give_up]
    assert f"batch {live['id']} (catch-up) is unfinished, and run run-1234 (pid 1 on host) is dead" in result.text
    assert f"`{give_up}` gives it up" in result.text
    assert "left by a dead run" in invoke(status.status).text
    world.liveness.suspects = {who.token}
    assert invoke(status.status, "orders").document["feeds"][0]["live_batches"][0]["verdict"]["life"] == "not known yet"
    assert "by a run that may be dead" in invoke(status.status).text


def test_refused_batch_is_not_attributed_to_a_dead_run(world: World, invoke: Invoke) -> None:
    limit = "policies: {quarantine_limit: {share: 0.01, at_least: 1}}\n"
    feed = world.project.feeds_folder / "orders.yaml"
    feed.write_text(feed.read_text() + limit)
    world.engine.bad, world.engine.keeps_staging = 2, True
    assert isinstance(world.run(in_hour(0)).error, QuarantineExceeded)
    (batch,) = world.state().live()
    world.bury()

    result = invoke(status.status, "orders")
    assert f"✗ batch {batch.id} was refused and stays staged: 4 of 50 records (8.0%) do not fit" in result.text
    for way in ("sluice quarantine list orders", "sluice run orders", f"sluice repair orders --abandon {batch.id}"):
        assert way in result.text
    assert "is dead" not in result.text
    assert f"✗ window 2024-05-01T00:00: refused batch {batch.id}" in result.text
    (live,) = result.document["feeds"][0]["live_batches"]
    assert live["refused"]["error"] == "QuarantineExceeded"
    assert "batch refused" in invoke(status.status).text
    listed = invoke(quarantine.list_, "orders")
    assert listed.document["records"] == 0
    (staged,) = listed.document["staged"]
    assert (staged["batch"], staged["records"], len(staged["held"])) == (batch.id, 4, 1)
    assert f"Staged by batch {batch.id}, not published" in listed.text

    feed.write_text(feed.read_text().replace(limit, ""))
    mended = invoke(status.status, "orders")
    assert mended.document["feeds"][0]["live_batches"][0]["refused"] is None
    assert "was refused" not in mended.text
    assert "dead" in mended.text


def _build_range() -> OffsetRange:
    return OffsetRange("orders", 0, "id-1", 30, 40)


def test_expiring_committed_offsets_are_reported_with_nothing_to_do(world: World, invoke: Invoke) -> None:
    broker = BrokerConfig(offsets_retention=12 * HOUR, transactional_id_expiration=7 * DAY)
    world.cluster.settings = Configs({"orders": TopicConfig(compacts=True)}, broker)
    world.run()
    result = invoke(status.status, "orders")
    outlook = result.document["feeds"][0]["outlook"]
    assert [e["setting"] for e in outlook["expires"]] == [
        "offsets.retention.minutes 12h",
        "transactional.id.expiration.ms 7d",
    ]
    assert outlook["compacted"] == ["orders"]
    assert "committed offsets of group sluice-orders: kept for about 11 h more" in result.text
    assert "nothing to do" in result.text
    assert "transactional id" not in result.text, "that is far away"
    assert "compacted" in result.text


KINDS = list(status.LABELS)[:12]


def _make_statuses() -> dict[str, FeedStatus]:
    """Returns 50 feeds: feed 10 has two severe findings, 24 others one of 12 kinds each, and 25 are healthy."""
    statuses = {}
    for i in range(50):
        findings = [Finding(f"{KINDS[i % 12]} x", f"trouble {i} " * 30, f"remedy {i}", severe=i % 2 == 0)][: i < 25]
        findings += [Finding("cluster", "another Kafka", "accept it", severe=True)] if i == 10 else []
        windows = tuple(WindowStanding(hour * HOUR, Standing.LANDED, 1, 1) for hour in range(24))
        statuses[f"f{i:02}"] = FeedStatus(
            f"f{i:02}", (), (), None, None, WindowSettings(), windows, outlook=Outlook(0), findings=tuple(findings)
        )
    return statuses


@pytest.mark.parametrize(("columns", "lines"), [(60, 24), (80, 24), (120, 40)])
def test_fifty_feeds_fit_one_screen_and_the_worst_come_first(
    columns: int, lines: int, world: World, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses = _make_statuses()
    source = (world.project.root / "feeds" / "orders.yaml").read_text()
    (world.project.root / "feeds" / "orders.yaml").unlink()
    for name in statuses:
        (world.project.root / "feeds" / f"{name}.yaml").write_text(source)
    monkeypatch.setattr(status, "try_read_status", lambda open_ports, feed, last: statuses[feed.name])
    for name, value in {"COLUMNS": columns, "LINES": lines, "FORCE_COLOR": 1, "NO_COLOR": 1}.items():
        monkeypatch.setenv(name, str(value))

    def show(everything: bool) -> list[str]:
        text = invoke(status.status, everything=everything).text
        return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]

    screen = show(everything=False)
    rows = [line.split()[0] for line in screen if re.match(r"  f\d\d ", line)]
    assert len(screen) < lines
    assert max(map(len, screen)) <= columns
    assert rows[0] == "f10"
    assert rows == sorted(
        rows, key=lambda n: (-sum(f.severe for f in statuses[n].findings), -len(statuses[n].findings), n)
    )
    assert all(any(status.LABELS[kind] in line for line in screen) for kind in KINDS)
    assert "25 healthy feeds: sluice status --all lists them" in " ".join(" ".join(screen).split())
    assert len({line.split()[0] for line in show(everything=True) if re.match(r"  f\d\d ", line)}) == 50
