"""Each planted fault makes exactly its invariant fail, with the right coordinates (invariant 15)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.pipelines.batch.result import Skip
from sluice.pipelines.ledger import Ledger, log, segments
from sluice.testing.logs import ABORT
from tests.checker.facts import EvidenceError
from tests.checker.planted import ONE, ZERO, Sound, hash_plan, land_again, measure_file, pack, request_range

Where = dict[str, Any]
Plant = Callable[[Sound], None]


@pytest.fixture
def sound(tmp_path: Path) -> Sound:
    feed = Sound(tmp_path)
    feed.grow()
    return feed


def without(row: int) -> Callable[[pa.Table], pa.Table]:
    return lambda t: pa.concat_tables([t.slice(0, row), t.slice(row + 1)])


def with_value(row: int, value: bytes, **others: Any) -> Callable[[pa.Table], pa.Table]:
    def change(t: pa.Table) -> pa.Table:
        for name, new in {"value": value, **others}.items():
            items = t.column(name).to_pylist()
            items[row] = new
            at = t.schema.get_field_index(name)
            t = t.set_column(at, t.schema.field(name), pa.array(items, t.schema.field(name).type))
        return t

    return change


def with_row(row: int, offset: int) -> Callable[[pa.Table], pa.Table]:
    """Insert a copy of the preceding row, at another offset."""

    def change(t: pa.Table) -> pa.Table:
        more = with_value(0, b"more", offset=offset)(t.slice(row - 1, 1))
        return pa.concat_tables([t.slice(0, row), more, t.slice(row)])

    return change


# The first batch's rows in partition 0 have the offsets 0-5, 10, 11; 6 and 9 are markers, 7 and 8 were aborted.
# The names of the faults below are the ids of the tests.


def loss(s: Sound) -> None:
    s.change_rows(10, without(6), landed=-1, compacted=1)


def loss_below_the_log(s: Sound) -> None:
    loss(s)
    s.world.topic.log_start = 12


def lost_by_name(s: Sound) -> None:
    s.append("loss", reason="said so", ranges=[{"key": ["orders", 0, "id-1"], "range": [18, 20]}])
    s.produce(ZERO, 2)


def replaced_in_part(s: Sound) -> None:
    """Land an offset range again without its end."""
    number, i = s.find_receipt(15)
    receipt = s.write_lake().read_entries()[number]["receipts"][i]
    plan = s.append_plan((15, 17), kind="offsets", replaces=[p["path"] for p in receipt["parts"]])
    path = receipt["parts"][0]["path"].replace(f"-18-b{number - 1}", f"-17-b{plan}")
    table = pq.read_table(s.root / receipt["parts"][0]["path"]).slice(0, 2).replace_schema_metadata(None)
    pq.write_table(table, s.root / path)
    part = (
        receipt["parts"][0] | {"path": path, "name": path.rpartition("/")[2], "rows": 2} | measure_file(s.root / path)
    )
    again = receipt | {"slice": receipt["slice"] | {"end": 17}, "parts": [part]}
    again["counts"] = again["counts"] | {"landed": 2}
    s.append("publish", batch=plan, token="planted", receipts=[again], failures=[], results=[])


def missing_file(s: Sound) -> None:
    number, i = s.find_receipt(15)
    (s.root / s.write_lake().read_entries()[number]["receipts"][i]["parts"][0]["path"]).unlink()


def duplicate(s: Sound) -> None:
    assert land_again(s.write_lake()) == (0, 15)


def aborted_landed(s: Sound) -> None:
    s.change_rows(7, with_row(6, 7), landed=1, aborted=-1)


def control_landed(s: Sound) -> None:
    s.change_rows(9, with_row(6, 9), landed=1, control=-1)


def wrong_bytes(s: Sound) -> None:
    s.change_rows(10, with_value(6, b"forged"))


def wrong_header(s: Sound) -> None:
    s.change_rows(11, with_value(7, json.dumps({"producer": "p0", "sequence": 9}).encode(), headers=None))


def written_again(s: Sound) -> None:
    """Write the same rows as other bytes."""
    number, i = s.find_receipt(12)
    path = s.root / s.write_lake().read_entries()[number]["receipts"][i]["parts"][0]["path"]
    pq.write_table(pq.read_table(path), path, compression="none")


def nobody_sent_it(s: Sound) -> None:
    s.change_rows(4, with_value(4, b'{"producer": "p9", "sequence": 4}'))
    s.world.topic.log_start = 12


def aborted_by_its_producer(s: Sound) -> None:
    value_id = ("p0", 12)
    s.sent[value_id] = replace(s.sent[value_id], ended="aborted", transaction="t-x")


def another_partition(s: Sound) -> None:
    s.sent["p0", 3] = replace(s.sent["p0", 3], tp=("orders", 1), outcome="unknown")


def swap_values(s: Sound) -> None:
    def swap(t: pa.Table) -> pa.Table:
        a, b = (t.column("value")[i].as_py() for i in (2, 3))
        return with_value(3, a)(with_value(2, b)(t))

    s.change_rows(2, swap)


def reorder(s: Sound) -> None:
    s.change_rows(2, lambda t: pa.concat_tables([t.slice(0, 2), t.slice(3, 1), t.slice(2, 1), t.slice(4)]))


def leave_gap_in_plan(s: Sound) -> None:
    s.produce(ZERO, 8)
    s.append_plan((18, 20), (22, 24))


def overlap_ranges(s: Sound) -> None:
    s.produce(ZERO, 8)
    s.append_plan((18, 21), (20, 22))


def overlap_plans(s: Sound) -> None:
    s.produce(ZERO, 8)
    s.append_plan((18, 21))
    s.append_plan((20, 22), kind="offsets")


def forget_range(s: Sound) -> None:
    s.produce(ZERO, 4)
    s.produce(ONE, 4, "aborted")
    s.land()
    (number,) = s.list_numbers("publish")[-1:]
    at = next(
        i for i, r in enumerate(s.write_lake().read_entries()[number]["receipts"]) if r["slice"]["partition"] == 1
    )
    s.rewrite(number, lambda e: e["receipts"].pop(at))


def early_manifest(s: Sound) -> None:
    path = sorted((s.write_lake().root / "_sluice" / "orders" / "windows").rglob("*.json"))[-1]
    manifest = json.loads(path.read_bytes())
    manifest["boundaries"][0]["end"] = 25
    path.write_text(json.dumps(manifest))


def cut_first_window(s: Sound) -> None:
    path = sorted((s.write_lake().root / "_sluice" / "orders" / "windows").rglob("*.json"))[0]
    manifest = json.loads(path.read_bytes())
    manifest["boundaries"][0]["start"] = 2
    path.write_text(json.dumps(manifest))


def boundary_back(s: Sound) -> None:
    (number,) = s.list_numbers("boundary")[-1:]
    s.rewrite(number, lambda e: e["items"][0].update(offsets=[9]))


def wrong_count(s: Sound) -> None:
    s.change_rows(12, lambda t: t, compacted=1)


def wrong_rows(s: Sound) -> None:
    s.change_rows(12, lambda t: t, landed=-1, quarantined=1)


def wrong_class(s: Sound) -> None:
    s.change_rows(2, lambda t: t, aborted=-1, control=1)


def append_intent(s: Sound, offset: int) -> str:
    """Append an intent for partition 0; returns the mark of its commit."""
    number = s.append("intent", offsets=[{"key": ["orders", 0, "id-1"], "offset": offset}])
    return json.dumps({"sluice": s.write_lake().read_entries()[0]["write"], "n": number, "i": "id-1"})


def early_commit(s: Sound) -> None:
    s.produce(ZERO, 4)
    s.add_committed(ZERO, 20, append_intent(s, 20))


def early_commit_without_mark(s: Sound) -> None:
    s.add_committed(ZERO, 20)


def early_commit_in_the_ledger(s: Sound) -> None:
    s.append("commit", mode="plain", mark=14, offsets=[{"key": ["orders", 0, "id-1"], "offset": 19}])


def committed_before_published(s: Sound) -> None:
    s.offsets[4] = s.offsets[4]._replace(time=s.offsets[4].time - 3_600_000)


def backward_commit(s: Sound) -> None:
    s.add_committed(ZERO, 15, append_intent(s, 15))


def over_another_ledger(s: Sound) -> None:
    s.offsets[4] = s.offsets[4]._replace(metadata='{"sluice":"another","n":3,"i":"id-1"}')
    s.add_committed(ZERO, 18, append_intent(s, 18))


def backward_commit_after_expiry(s: Sound) -> None:
    s.offsets.append(s.offsets[4]._replace(offset=None, metadata=""))
    backward_commit(s)


def another_plan_content(s: Sound) -> None:
    s.rewrite(7, lambda e: e["plan"]["request"].update(replace=True))


def another_name(s: Sound) -> None:
    number, i = s.find_receipt(12)
    part = s.write_lake().read_entries()[number]["receipts"][i]["parts"][0]
    renamed = part["path"].replace("-12-15-", "-12-16-")
    shutil.move(s.root / part["path"], s.root / renamed)
    s.rewrite(number, lambda e: e["receipts"][i]["parts"][0].update(path=renamed))


def another_layout(s: Sound) -> None:
    number, i = s.find_receipt(12)
    part = s.write_lake().read_entries()[number]["receipts"][i]["parts"][0]
    moved = part["path"].replace("kafka_window_", "")
    (s.root / moved).parent.mkdir(parents=True)
    shutil.move(s.root / part["path"], s.root / moved)
    s.rewrite(number, lambda e: e["receipts"][i]["parts"][0].update(path=moved))


def foreign_file(s: Sound) -> None:
    (s.write_lake().root / "data" / "orders" / "stray.parquet").write_bytes(b"x")


def replaced_file_stays(s: Sound) -> None:
    number, i = s.find_receipt(15)
    path = s.root / s.write_lake().read_entries()[number]["receipts"][i]["parts"][0]["path"]
    content = path.read_bytes()
    s.land(request_range(15, 18, again=True))
    s.write_lake()
    path.write_bytes(content)


def second_creator(s: Sound) -> None:
    """Replace a plan by another with the same number and offset ranges, and its correct hash."""

    def change_plan(e: Where) -> None:
        e["plan"]["request"]["only"] = [["orders", 0], ["orders", 1]]
        e["hash"] = hash_plan(e["plan"])

    s.rewrite(7, change_plan)


def another_was_seen(s: Sound) -> None:
    s.write_lake()
    s.observed = [(8, "another")]


def entry_removed(s: Sound) -> None:
    s.write_lake()
    s.get_entry_path(15).unlink()
    s.observed = [(15, "gone")]


def number_used_again(s: Sound) -> None:
    """Lose the newest entries, and continue with a number below one that was used."""
    number = s.append("gap", **GAP, next=len(s.write_lake().read_entries()) + 1)
    s.observed = [(number, "lost"), (number + 1, "lost, too")]


def lost_entries_had_committed_more(s: Sound) -> None:
    number = s.append("gap", **GAP, next=len(s.write_lake().read_entries()) + 5)
    s.add_committed(ZERO, 20, s.offsets[4].metadata.replace('"n":14', f'"n":{number + 1}'))


GAP: Where = {"evidence": [], "ledger": "", "committed": [], "reason": "planted"}


def mark_of_nothing(s: Sound) -> None:
    s.offsets[4] = s.offsets[4]._replace(metadata=s.offsets[4].metadata.replace('"n":14', '"n":99'))


def another_cluster(s: Sound) -> None:
    s.rewrite(13, lambda e: e.update(cluster="cluster-2"))


def another_topic_id(s: Sound) -> None:
    s.write_lake()
    s.world.topic.topic_id = "id-2"


def beyond_the_log(s: Sound) -> None:
    s.append_plan((18, 20))


def open_when_planned(s: Sound) -> None:
    s.produce(ZERO, 1)
    s.produce(ZERO, 1, "open")
    s.append_plan((18, 20))


def not_landed(s: Sound) -> None:
    s.write_lake()
    s.produce(ONE, 2)


def not_committed(s: Sound) -> None:
    s.offsets.pop(4)


def drop_commits(s: Sound) -> None:
    s.offsets.clear()


def move_boundary(s: Sound, offset: int, *by: str) -> None:
    """Pin the newest boundary of partition 0 to another offset than 15, flagged as `by`."""
    (number,) = s.list_numbers("boundary")[-1:]
    s.rewrite(number, lambda e: e["items"][0].update(offsets=[offset], **dict.fromkeys(by, e["items"][0]["times"])))


def boundary_too_low(s: Sound) -> None:
    move_boundary(s, 13)


def boundary_too_high(s: Sound) -> None:
    move_boundary(s, 17)


def boundary_too_high_by_the_clock(s: Sound) -> None:
    move_boundary(s, 17, "by_clock")


def boundary_searched_for_in_vain(s: Sound) -> None:
    move_boundary(s, 17, "by_marker")


def decide_boundary_against_a_stamp(s: Sound) -> None:
    move_boundary(s, 17, "against")


def markers_taken_for_records(s: Sound) -> None:
    """Let a transactional producer lag, and Kafka answer look-ups by time with markers."""
    s.world.topic.takes_markers = True
    for minutes in (30, 20):
        s.produce(ZERO, 2, "committed", lag=minutes * 60_000)
    s.land()


def forged_copy(s: Sound) -> None:
    """Write a segment in which an entry differs from the log's."""
    pack(s.write_lake(), 0, 8, {3: (s.write_lake().read_entry(3) or b"").replace(b'"run":', b'"nur":')})


def copy_left_out(s: Sound) -> None:
    pack(s.write_lake(), 0, 4)
    pack(s.write_lake(), 4, 8).rename(s.write_lake().root / "_sluice/orders/segments" / f"{4:020d}-{9:020d}.json")


BROKEN: list[tuple[int, Plant, Where]] = [
    (1, loss, {"offset": 10, "number": 3}),
    (1, loss_below_the_log, {"offset": 10, "producer": "p0", "sequence": 8}),
    (1, lost_by_name, {"offset": 18}),
    (1, replaced_in_part, {"offset": 17}),
    (2, duplicate, {"offset": 15}),
    (3, aborted_landed, {"offset": 7, "row": 6}),
    (3, control_landed, {"offset": 9, "row": 6}),
    (3, wrong_bytes, {"offset": 10, "row": 6}),
    (3, wrong_header, {"offset": 11, "row": 7}),
    (3, written_again, {"offset": 12, "number": 8}),
    (3, nobody_sent_it, {"offset": 4}),
    (3, aborted_by_its_producer, {"offset": 14, "producer": "p0", "sequence": 12}),
    (3, another_partition, {"offset": 3, "producer": "p0", "sequence": 3}),
    (3, swap_values, {"offset": 2, "row": 2}),
    (4, leave_gap_in_plan, {"offset": 20}),
    (4, overlap_ranges, {"offset": 20}),
    (4, overlap_plans, {"offset": 20}),
    (4, forget_range, {"partition": 1, "offset": 9}),
    (4, early_manifest, {"offset": 18}),
    (4, cut_first_window, {"offset": 1}),
    (4, boundary_back, {"offset": 9}),
    (5, wrong_count, {"offset": 12, "number": 8}),
    (5, wrong_rows, {"offset": 12, "number": 8}),
    (5, wrong_class, {"offset": 0, "number": 3}),
    (6, reorder, {"offset": 2, "row": 3}),
    (7, early_commit, {"offset": 20, "number": 16}),
    (7, early_commit_without_mark, {"offset": 20, "at": "0:6"}),
    (7, early_commit_in_the_ledger, {"offset": 19, "number": 16}),
    (7, committed_before_published, {"offset": 18, "number": 14}),
    (8, backward_commit, {"offset": 15, "number": 16}),
    (8, over_another_ledger, {"offset": 18, "number": 16}),
    (8, backward_commit_after_expiry, {"offset": 15, "number": 16}),
    (9, another_plan_content, {"number": 7}),
    (9, another_name, {"offset": 12}),
    (18, another_layout, {"offset": 12}),
    (10, foreign_file, {"path": "data/orders/stray.parquet"}),
    (11, second_creator, {"offset": 12, "number": 7}),
    (11, another_was_seen, {"number": 8}),
    (11, entry_removed, {"number": 15}),
    (11, mark_of_nothing, {"number": 99}),
    (11, number_used_again, {"number": 17}),
    (11, forged_copy, {"number": 3}),
    (11, copy_left_out, {}),
    (12, another_cluster, {"number": 13}),
    (13, beyond_the_log, {"offset": 20}),
    (13, open_when_planned, {"offset": 20}),
    (16, boundary_too_low, {"offset": 13, "number": 11}),
    (16, boundary_too_high, {"offset": 15, "number": 11}),
    (16, boundary_too_high_by_the_clock, {"offset": 15, "number": 11}),
    (16, boundary_searched_for_in_vain, {"offset": 15, "number": 11}),
    (16, decide_boundary_against_a_stamp, {"offset": 15, "number": 11}),
    (16, markers_taken_for_records, {"offset": 21}),
]


@pytest.mark.parametrize(("invariant", "plant", "where"), BROKEN, ids=[p.__name__ for _, p, _ in BROKEN])
def test_planted_fault_breaks_only_its_invariant(sound: Sound, invariant: int, plant: Plant, where: Where) -> None:
    plant(sound)
    verdict = sound.check(healed=False)
    assert set(verdict.first) == {invariant}, str(verdict)
    first = dict(verdict.first[invariant].where)
    assert first | where == first, str(verdict)
    assert first.get("topic", "orders") == "orders"


ONCE_HEALED: list[tuple[int, Plant, Where]] = [
    (1, missing_file, {"offset": 15}),
    (7, lost_entries_had_committed_more, {"offset": 20}),
    (10, replaced_file_stays, {}),
    (12, another_topic_id, {"topic": "orders"}),
    (14, not_landed, {"partition": 1, "offset": 9}),
    (14, not_committed, {"partition": 0, "offset": 18}),
    (14, drop_commits, {"partition": 0, "offset": 18}),
]


@pytest.mark.parametrize(("invariant", "plant", "where"), ONCE_HEALED, ids=[p.__name__ for _, p, _ in ONCE_HEALED])
def test_fault_that_remains_after_healing_is_detected(sound: Sound, invariant: int, plant: Plant, where: Where) -> None:
    assert set(sound.check().first) == set()
    plant(sound)
    verdict = sound.check()
    assert invariant in verdict.first, str(verdict)
    first = dict(verdict.first[invariant].where)
    assert first | where == first, str(verdict)


def test_entry_in_place_of_another_is_detected(sound: Sound) -> None:
    """As a wrong restore leaves it: both entries are valid, and each stands where it was not written."""
    assert sound.check().counts["chained entries"] == len(sound.write_lake().read_entries())
    first, second = (sound.get_entry_path(n) for n in sound.list_numbers("commit")[:2])
    content = first.read_bytes(), second.read_bytes()
    second.write_bytes(content[0])
    first.write_bytes(content[1])
    assert 11 in sound.check(chained=False).first


# -- unusual but correct feeds


def test_lost_entries_recorded_in_a_gap_entry_are_accepted(sound: Sound) -> None:
    """The last commit's entry is missing; the one in its place names it as lost, and numbers continue above it."""
    (*_, last) = sound.list_numbers("commit")
    write = sound.write_lake().read_entries()[last]["write"]
    sound.get_entry_path(last).unlink()
    assert sound.append("gap", **GAP, next=last + 3) == last
    sound.observed = [(last, write), (last + 2, "seen")]
    verdict = sound.check()
    assert verdict.holds, str(verdict)
    assert verdict.counts["entries that were seen and are named as lost"] == 2


@pytest.mark.parametrize(("number", "holds"), [(3, True), (2, False)])
def test_group_takeover_is_accepted_up_to_recorded_mark(sound: Sound, number: int, holds: bool) -> None:
    """A takeover covers marks up to the accepted number only."""
    marks = [{"ledger": "another", "number": number}]
    sound.append("take", marks=marks, committed=[], origins=[], begin="start", reason="planted")
    over_another_ledger(sound)
    assert sound.check(healed=False).holds is holds


def test_correct_feed_passes_and_no_invariant_is_undecided(sound: Sound) -> None:
    verdict = sound.check()
    assert verdict.holds, str(verdict)
    assert set(verdict.decided) == {*range(1, 15), 16, 19, 20}
    assert verdict.undecided == {}
    assert verdict.counts["records compared with the log"] == 19


def test_sluice_segments_are_read_and_other_segments_are_ignored(sound: Sound, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker reads the product's segments with its own reader, and ignores a segment of another log."""
    monkeypatch.setattr(segments, "ENTRIES", 4)
    monkeypatch.setattr(log, "CHECKPOINT_EVERY", 1)
    fresh = Ledger(sound.world.lake, "orders", lambda: 0)  # type: ignore[arg-type]
    count = fresh.pack()
    assert count == 3
    verdict = sound.check()
    assert verdict.holds, str(verdict)
    assert verdict.counts["entries in segments"] == 4 * count
    pack(sound.write_lake(), 0, 4, {3: b"{}"})
    verdict = sound.check()
    assert verdict.holds, str(verdict)
    assert verdict.counts["segments of another log"] == 1


def test_invariants_without_evidence_are_undecided(sound: Sound) -> None:
    bare = replace(sound.collect_evidence(), logs={}, produced=None, offsets=None)
    verdict = sound.check(bare)
    assert verdict.holds
    assert {1, 3, 7, 8, 13, 14} <= set(verdict.undecided)


def test_range_landed_again_is_accepted(sound: Sound) -> None:
    sound.land(request_range(12, 14, again=True))
    assert sound.check().holds, str(sound.check())


def test_explicitly_skipped_offsets_are_accepted(sound: Sound) -> None:
    sound.produce(ZERO, 6)
    sound.land(skip=Skip(None, "a test"))
    sound.commit()
    assert sound.check().holds, str(sound.check())


def test_partial_batch_and_batch_closing_its_hole_are_accepted(sound: Sound) -> None:
    sound.produce(ZERO, 6)
    sound.produce(ONE, 2, "aborted")
    sound.land(drops=frozenset([0]))
    assert sound.check(healed=False).holds
    sound.land()
    sound.commit()
    assert sound.check().holds, str(sound.check())


def test_landed_rows_expired_from_log_are_accepted(sound: Sound) -> None:
    sound.world.topic.log_start = 13
    verdict = sound.check()
    assert verdict.holds, str(verdict)
    assert verdict.counts["rows that the log no longer holds"] == 14


def test_feed_behind_an_open_transaction_is_accepted(sound: Sound) -> None:
    sound.produce(ZERO, 2)
    sound.produce(ZERO, 2, "open")
    sound.world.topic.open_at[ZERO] = 20
    sound.produce(ZERO, 2)
    sound.land()
    sound.commit()
    assert sound.check().holds, str(sound.check())
    sound.world.topic.end_transaction(ZERO, ABORT, sound.world.now)


def test_manually_moved_offsets_are_accepted_only_if_declared(sound: Sound) -> None:
    sound.add_committed(ZERO, 3)
    assert set(sound.check(healed=False).first) == {8}
    sound.hands.append((tuple(ZERO), 3))  # type: ignore[arg-type]
    sound.add_committed(ZERO, 18, sound.offsets[4].metadata)
    assert sound.check().holds, str(sound.check())


def test_lagging_transactional_producer_is_accepted(sound: Sound) -> None:
    for minutes in (30, 20):
        sound.produce(ZERO, 2, "committed", lag=minutes * 60_000)
    sound.land()
    sound.commit()
    verdict = sound.check()
    assert verdict.holds, str(verdict)


def test_out_of_order_records_at_searched_boundary_are_accepted(sound: Sound) -> None:
    sound.produce(ZERO, 1)
    sound.produce(ZERO, 2, lag=3_600_000)
    sound.produce(ZERO, 1)
    sound.land()
    sound.commit()
    (number,) = sound.list_numbers("boundary")[-1:]
    sound.rewrite(number, lambda e: e["items"][0].update(offsets=[21], by_marker=e["items"][0]["times"]))
    assert 16 not in sound.check().first
    sound.rewrite(number, lambda e: e["items"][0].update(by_marker=[]))
    assert 16 in sound.check().first


def test_contradicting_evidence_is_refused(sound: Sound) -> None:
    evidence = sound.collect_evidence()
    records = evidence.logs["orders", 0].records
    assert records is not None
    del records[17]
    with pytest.raises(EvidenceError, match="orders:0: offset 17 is seen by the segments only"):
        sound.check(evidence)
