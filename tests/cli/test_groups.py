"""`sluice groups` and `sluice offsets` with ports in memory: their texts, documents and exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.cli.kafka import groups as groups_command
from sluice.cli.kafka import offsets
from sluice.pipelines.committing.commit import CommitSettings, commit
from sluice.pipelines.errors import IncarnationChanged, NotAuthorized, UsageError
from sluice.pipelines.feed.sections import CommitMode, OnGroupMoved
from sluice.pipelines.model.consumer_groups import GroupView
from sluice.pipelines.model.kafka import BrokerConfig, CommittedOffset, Configs, TopicPartition
from sluice.testing.cluster import partition
from sluice.testing.group import MemoryGroups, member
from tests.assets.world import FEED, P0, P1, World
from tests.cli.conftest import Invoke, Sluice

GROUP = "sluice-orders"


@pytest.fixture
def landed(world: World) -> World:
    """A world with both partitions landed and committed up to 100; the log of one ends at 150."""
    world.land_unrecorded()
    commit(world.open_ledger(), world.group, CommitSettings(CommitMode.TRANSACTIONAL, "t", OnGroupMoved.REFUSE))
    world.grow(0, 150)
    return world


def by_partition(document: dict[str, Any], key: str) -> dict[int, Any]:
    return {o["partition"]: o[key] for o in document["offsets"]}


# -- groups


def test_list_shows_state_protocol_and_feed_of_each_group(landed: World, groups: MemoryGroups, invoke: Invoke) -> None:
    groups.members["modern"], groups.kinds["modern"] = (member(),), "consumer"
    groups.others["a\x1b[31mb"] = {P0: CommittedOffset(1)}
    result = invoke(groups_command.list_)
    assert [(g["group"], g["kind"], g["state"], g["feed"]) for g in result.document["groups"]] == [
        ("a\x1b[31mb", "classic", "Empty", None),
        ("modern", "consumer", "Stable", None),
        (GROUP, "classic", "Empty", "orders"),
    ]
    assert "\x1b[31m" not in result.text
    assert "consumer (KIP-848)" in result.text
    assert "coordinator assigns" in result.text
    assert result.document["not_there"] == []


def test_list_names_feeds_without_a_group_and_groups_with_members(
    world: World, groups: MemoryGroups, invoke: Invoke
) -> None:
    result = invoke(groups_command.list_, feed="orders")
    assert result.document["not_there"] == [{"group": GROUP, "feed": "orders", "remedy": ""}]
    assert "does not exist yet" in result.text
    groups.members[GROUP] = (member(),)
    assert f"has members: sluice groups describe {GROUP}" in invoke(groups_command.list_).text


def test_list_does_not_report_a_hidden_group_as_missing(
    world: World, groups: MemoryGroups, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny_view(group: str) -> GroupView:
        raise NotAuthorized(f"describing group {group}", remedy="grant DESCRIBE on the group")

    monkeypatch.setattr(groups, "view", deny_view)
    result = invoke(groups_command.list_, feed="orders")
    assert result.document["not_there"] == []
    assert result.document["hidden"] == [{"group": GROUP, "feed": "orders", "remedy": "grant DESCRIBE on the group"}]
    assert "does not exist yet" not in result.text
    assert "not visible: grant DESCRIBE on the group" in result.text


def test_describe_shows_offsets_with_origin_and_expiry(landed: World, groups: MemoryGroups, invoke: Invoke) -> None:
    landed.cluster.settings = Configs(broker=BrokerConfig(offsets_retention=7 * 86_400_000))
    landed.group.offsets[P1] = CommittedOffset(40, metadata="by\x07 hand")
    deleted = TopicPartition("deleted", 0)
    landed.group.offsets[deleted] = CommittedOffset(5)
    result = invoke(groups_command.describe, GROUP)
    rows = {(o["topic"], o["partition"]): o for o in result.document["offsets"]}
    assert (rows["orders", 0]["committed"], rows["orders", 0]["log_end"], rows["orders", 0]["lag"]) == (100, 150, 50)
    assert rows["orders", 0]["put_there_by"].startswith("commit, entry ")
    assert (rows["orders", 1]["commit"]["metadata"], rows["orders", 1]["wanted"]) == ("by\x07 hand", True)
    assert (rows["deleted", 0]["log_end"], rows["deleted", 0]["lag"], rows["deleted", 0]["wanted"]) == (
        None,
        None,
        False,
    )
    emptied_at = landed.open_ledger().entry(landed.state().last_mark).at
    assert result.document["expiry"] == {
        "counted_from": "empty",
        "retention_ms": 604_800_000,
        "not_before": emptied_at + 604_800_000,
    }
    assert "not before 2024-05-08" in result.text
    assert "\x07" not in result.text


def test_partitions_are_wanted_if_one_of_several_patterns_matches(landed: World, invoke: Invoke) -> None:
    path = landed.project.feeds_folder / "orders.yaml"
    path.write_text(path.read_text().replace("topics: orders", "topics: {include: [orders, refunds]}"))
    assert by_partition(invoke(groups_command.describe, GROUP).document, "wanted") == {0: True, 1: True}


def test_describe_names_members_that_own_partitions_of_the_feed(
    landed: World, groups: MemoryGroups, invoke: Invoke
) -> None:
    pairs = [TopicPartition("orders", n) for n in (0, 1)] + [TopicPartition("other", 3)]
    groups.members[GROUP] = (member("loader", *pairs, instance="static-1"), member("idle"))
    result = invoke(groups_command.describe)
    assert result.document["members"][0]["instance_id"] == "static-1"
    assert result.document["members"][0]["partitions"][2] == {"topic": "other", "partition": 3}
    assert by_partition(result.document, "held_by") == {0: "loader-1", 1: "loader-1", 3: "loader-1"}
    assert "loader at 10.0.0.7 holds orders:0-1, other:3; idle at 10.0.0.7 holds nothing" in result.text
    assert "kept while it has members" in result.text


def test_describe_explains_effect_of_foreign_members_on_runs(
    landed: World, groups: MemoryGroups, invoke: Invoke
) -> None:
    groups.members[GROUP] = (member("loader"),)
    assert "Landing continues; the first run after they leave commits" in invoke(groups_command.describe).text
    groups.kinds[GROUP] = "zookeeper"
    text = " ".join(invoke(groups_command.describe).text.split())
    assert "Runs land nothing until old consumers leave" in text
    assert "Landing continues" not in text
    groups.kinds[GROUP] = "consumer"
    text = " ".join(invoke(groups_command.describe).text.split())
    assert "members of the classic protocol may be in it" in text


def test_committing_run_is_not_reported_as_a_foreign_member(
    landed: World, groups: MemoryGroups, invoke: Invoke
) -> None:
    groups.members[GROUP] = (member("sluice"),)
    assert "a run of orders is committing" in invoke(groups_command.describe).text
    assert invoke(offsets.show, "orders").code == 0


def test_forged_offset_metadata_is_only_displayed(landed: World, invoke: Invoke) -> None:
    ledger = landed.state().ledger_id
    landed.group.offsets[P0] = CommittedOffset(1, metadata=f'{{"sluice": "{ledger}", "moved": -7}}')
    landed.group.offsets[P1] = CommittedOffset(1, metadata=f'{{"sluice": "{"x" * 5000}", "moved": 1}}')
    result = invoke(groups_command.describe)
    assert by_partition(result.document, "put_there_by") == {
        0: "by hand, entry -7, which is not in the ledger",
        1: f"by hand of another ledger ({'x' * 20}, entry 1)",
    }


@pytest.mark.parametrize(
    ("name", "message", "remedy"),
    [
        ("orders", f"no group orders; the group of feed orders is {GROUP}", f"sluice groups describe {GROUP}"),
        ("sluice-order", "there is no group sluice-order", f"did you mean {GROUP}?"),
        ("zzz", "there is no group zzz", "see sluice groups list"),
    ],
)
def test_describe_rejects_a_missing_group(landed: World, invoke: Invoke, name: str, message: str, remedy: str) -> None:
    with pytest.raises(UsageError) as error:
        invoke(groups_command.describe, name)
    assert error.value.message == message
    assert remedy in error.value.remedy


def test_groups_require_feed_option_if_feeds_use_two_clusters(sluice: Sluice, project: Path) -> None:
    (project / "feeds" / "other.yaml").write_text(
        FEED.replace(":9\n", ":10\n").replace("topics", "feed: other\ntopics")
    )
    for words in (("groups", "list"), ("groups", "describe"), ("groups", "describe", "any")):
        result = sluice(*words)
        assert result.code == 2, result.err
        assert "--feed NAME" in result.err


# -- offsets show


def test_show_reports_position_and_lag_of_each_partition(landed: World, invoke: Invoke) -> None:
    result = invoke(offsets.show, "orders")
    assert result.code == 0
    assert by_partition(result.document, "stands") == {0: "at the frontier", 1: "at the frontier"}
    assert by_partition(result.document, "lag") == {0: 50, 1: 0}


def test_show_exits_like_the_commit_and_names_remedies(landed: World, invoke: Invoke) -> None:
    landed.group.offsets[P1] = CommittedOffset(40)
    result = invoke(offsets.show, "orders")
    assert result.code == 3
    assert by_partition(result.document, "stands") == {0: "at the frontier", 1: "moved by somebody"}
    assert by_partition(result.document, "expected") == {0: 100, 1: 100}
    assert "sluice offsets reset orders --to-frontier" in result.text
    assert "sluice accept orders moved --reason" in result.text
    assert "--adopt" not in result.text
    landed.group.offsets |= {P0: CommittedOffset(140), P1: CommittedOffset(140)}
    text = invoke(offsets.show, "orders").text
    assert "sluice accept orders moved --adopt --only orders:0 --reason" in text, "the other log ends before"


def test_show_predicts_no_refusal_for_offsets_the_next_run_lands(landed: World, invoke: Invoke) -> None:
    landed.group.offsets[P0] = CommittedOffset(150)
    result = invoke(offsets.show, "orders")
    assert (result.code, by_partition(result.document, "stands")[0]) == (0, "moved by somebody")
    assert "will be refused" not in result.text
    assert "to the next batch" in " ".join(result.text.split())
    landed.group.offsets[P0] = CommittedOffset(149)
    assert invoke(offsets.show, "orders").code == 3


def test_show_names_feed_start_before_the_first_plan(world: World, invoke: Invoke) -> None:
    world.group.offsets[P0] = CommittedOffset(30)
    result = invoke(offsets.show, "orders")
    assert "not landed yet: the feed begins here" in result.text
    assert "not landed yet: begins at `start: 2024-05-01T00:00:00Z`" in result.text
    assert world.lake.files == {}


def test_show_names_members_that_block_the_commit(landed: World, groups: MemoryGroups, invoke: Invoke) -> None:
    groups.members[GROUP] = (member("loader", P0),)
    assert invoke(offsets.show, "orders").code == 0, "there is nothing to commit"
    landed.land_unrecorded()
    result = invoke(offsets.show, "orders")
    assert result.code == 3
    assert "loader at 10.0.0.7: no commit until they leave" in result.text


# -- offsets reset


def test_reset_dry_run_changes_nothing(landed: World, invoke: Invoke) -> None:
    before, offsets_before = dict(landed.lake.files), dict(landed.group.offsets)
    result = invoke(offsets.reset, "orders", to_earliest=True, only=["orders:1"], dry_run=True)
    assert (result.code, result.document["applied"], result.document["entry"]) == (0, False, None)
    assert by_partition(result.document, "after") == {1: 0}
    assert "A dry run: nothing was changed" in result.text
    assert "1 other partition left as it is" in result.text
    assert "reads from its ledger's frontier" in result.text
    assert "sluice run orders --offsets orders:1:0-" in result.text
    assert (landed.lake.files, landed.group.offsets) == (before, offsets_before)


def test_reset_moves_offsets_and_is_recorded(landed: World, invoke: Invoke) -> None:
    result = invoke(offsets.reset, "orders", shift=-10, yes=True, reason="ticket 7", text=False)
    assert (result.code, result.document["applied"]) == (0, True)
    entry = landed.open_ledger().entry(result.document["entry"])
    assert getattr(entry, "reason", None) == "ticket 7"
    assert {tp: c.offset for tp, c in landed.group.offsets.items()} == {P0: 90, P1: 90}
    again = invoke(offsets.reset, "orders", to_frontier=True, yes=True)
    assert f"recorded as entry {landed.state().number - 1} of the ledger of orders" in again.text
    entry = landed.open_ledger().entry(again.document["entry"])
    assert getattr(entry, "reason", None) == "sluice offsets reset to frontier"


def test_reset_without_a_terminal_needs_yes(landed: World, invoke: Invoke) -> None:
    before = dict(landed.lake.files)
    with pytest.raises(UsageError, match=r"not confirmed: Move 2 offsets of group sluice-orders\?"):
        invoke(offsets.reset, "orders", shift=-10)
    assert (landed.lake.files, landed.group.offsets[P0].offset) == (before, 100)


def test_reset_beyond_the_frontier_is_refused_even_in_a_dry_run(landed: World, invoke: Invoke) -> None:
    for how in ("dry_run", "yes"):
        result = invoke(offsets.reset, "orders", to_latest=True, **{how: True})
        assert (result.code, result.document["applied"]) == (3, False)
        assert result.document["problem"]["error"] == "Refused"
        assert "--skip-to latest" in result.document["problem"]["remedy"]
        assert "50 beyond the frontier" in result.text
    assert landed.group.offsets[P0].offset == 100


def test_reset_accepts_times_windows_and_durations(landed: World, invoke: Invoke) -> None:
    result = invoke(offsets.reset, "orders", to_time="2024-05-01T01:00:00Z", dry_run=True)
    assert by_partition(result.document, "after") == {0: 25, 1: 25}
    window = invoke(offsets.reset, "orders", to_time="2024-05-01T01", dry_run=True)
    assert window.document["offsets"] == result.document["offsets"]
    ago = invoke(offsets.reset, "orders", by_duration="1s", dry_run=True)
    assert by_partition(ago.document, "note")[1] == "no record since: the end"


def test_offsets_before_a_time_are_listed(landed: World, invoke: Invoke) -> None:
    result = invoke(offsets.before, "orders", "2024-05-01T01")
    assert by_partition(result.document, "offset") == {0: 25, 1: 25}
    late = invoke(offsets.before, "orders", "2030-01-01T00", only=["orders:1"])
    assert by_partition(late.document, "note") == {1: "no record since: the end"}


def test_diff_compares_with_a_file_and_rejects_unknown_names(landed: World, invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "offsets.csv"
    invoke(offsets.export, "orders", file=file, text=False)
    same = invoke(offsets.diff, "orders", str(file))
    assert (same.code, same.document["same"]) == (0, True)
    landed.group.offsets[P1] = CommittedOffset(40)
    result = invoke(offsets.diff, "orders", str(file))
    assert (result.code, by_partition(result.document, "other")) == (1, {0: 100, 1: 100})
    assert "60 ahead" in result.text
    with pytest.raises(UsageError, match="is neither a file nor a group"):
        invoke(offsets.diff, "orders", "nobody")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"to_earliest": True, "to_latest": True},
        {"shift": 1, "to_offset": 1},
        {"to_time": "soon"},
        {"by_duration": "soon"},
        {"to_earliest": True, "only": ["orders:7"]},
        {"to_earliest": True, "only": ["orders"]},
        {"to_file": Path("missing.csv")},
        {"to_file": Path(".")},
    ],
)
def test_invalid_reset_options_are_rejected(landed: World, invoke: Invoke, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        invoke(offsets.reset, "orders", yes=True, **options)
    assert landed.group.offsets[P0].offset == 100


def test_recreated_topic_is_shown_as_another_log_and_reset_is_refused(landed: World, invoke: Invoke) -> None:
    landed.cluster.states[P0] = partition(topic_id="another")
    assert by_partition(invoke(offsets.show, "orders").document, "stands")[0] == "another log"
    with pytest.raises(IncarnationChanged):
        invoke(offsets.reset, "orders", to_earliest=True, yes=True)
    assert invoke(offsets.reset, "orders", to_earliest=True, only=["orders:1"], yes=True, text=False).code == 0


def test_reset_of_a_feed_without_commits_mentions_the_commit_setting(landed: World, invoke: Invoke) -> None:
    path = landed.project.feeds_folder / "orders.yaml"
    path.write_text(path.read_text() + "commit: none\n")
    landed.group.offsets[P0] = CommittedOffset(3)
    assert invoke(offsets.show, "orders").code == 0
    result = invoke(offsets.reset, "orders", to_earliest=True, dry_run=True)
    assert "commit: none" in result.text
    assert "the next commit" not in result.text


# -- export and import


def test_import_restores_exported_offsets(landed: World, invoke: Invoke, tmp_path: Path) -> None:
    landed.group.offsets[P1] = CommittedOffset(40)
    file = tmp_path / "offsets.csv"
    assert invoke(offsets.export, "orders").text == "orders,0,100\norders,1,40\n"
    invoke(offsets.export, "orders", file=file, text=False)
    with pytest.raises(UsageError, match="File exists"):
        invoke(offsets.export, "orders", file=file)
    landed.group.offsets.clear()
    result = invoke(offsets.import_, "orders", file, yes=True, text=False)
    assert (result.code, result.document["applied"]) == (0, True)
    assert {tp: c.offset for tp, c in landed.group.offsets.items()} == {P0: 100, P1: 40}
    only = invoke(offsets.import_, "orders", file, only=["orders:1"], dry_run=True)
    assert by_partition(only.document, "after") == {1: 40}


def test_feed_starts_at_imported_offsets_of_another_consumer(
    world: World, groups: MemoryGroups, invoke: Invoke, tmp_path: Path
) -> None:
    groups.others["legacy"] = {P0: CommittedOffset(30), P1: CommittedOffset(70)}
    file = tmp_path / "legacy.csv"
    invoke(offsets.export, "orders", file=file, other="legacy", text=False)
    result = invoke(offsets.import_, "orders", file, yes=True, text=False)
    assert result.document["entry"] is None, "a feed without a ledger has nothing to note"
    world.land_unrecorded()
    assert {k.tp: o.offset for k, o in world.state().origins.items()} == {P0: 30, P1: 70}


def test_other_group_is_moved_without_an_entry_unless_a_feed_owns_it(
    landed: World, groups: MemoryGroups, invoke: Invoke
) -> None:
    groups.others["legacy"] = {P0: CommittedOffset(30)}
    number = landed.state().number
    result = invoke(offsets.reset, "orders", to_latest=True, group="legacy", yes=True)
    assert (result.document["feed"], result.document["entry"], landed.state().number) == (None, None, number)
    assert groups.others["legacy"][P0].offset == 150
    assert "ledger" not in result.text
    (landed.project.feeds_folder / "second.yaml").write_text(FEED.replace("topics", "group: legacy\ntopics"))
    with pytest.raises(UsageError, match="group legacy belongs to feed second"):
        invoke(offsets.reset, "orders", to_latest=True, group="legacy")


def test_import_rejects_a_too_large_file(landed: World, invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "large.csv"
    with file.open("wb") as sparse:
        sparse.truncate((16 << 20) + 1)
    with pytest.raises(UsageError, match="larger than 16 MiB"):
        invoke(offsets.import_, "orders", file)


def test_reset_accepts_signed_and_huge_numbers_and_rejects_text(sluice: Sluice, project: Path) -> None:
    for words in (["--shift", "-5"], ["--shift", "+5"], ["--to-offset", "9" * 40]):
        result = sluice("offsets", "reset", "orders", *words)
        assert (result.code, "no broker" in result.err or "refused" in result.err) == (1, True), result.err
    assert sluice("offsets", "reset", "orders", "--shift", "x").code == 2
