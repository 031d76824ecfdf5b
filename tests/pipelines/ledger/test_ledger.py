"""The ledger's log and fold: one creator per number, decisions on the state before it, hostile files."""

from __future__ import annotations

import json
import threading
import zlib
from base64 import b64encode
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.errors import LedgerCorrupt, LedgerTooNew, NotAuthorized, OwnershipLost, Unknown
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import BatchStatus, Ledger, checkpoint, entries
from sluice.pipelines.ledger.entries import (
    AbandonEntry,
    AcceptEntry,
    Boundaries,
    BoundaryEntry,
    Entering,
    KeyOffset,
    KeyRange,
    LossEntry,
    MovedEntry,
    OriginEntry,
    OriginItem,
    OwnEntry,
    PlanEntry,
    PublishEntry,
    RetireEntry,
    SchemaEntry,
    SkipEntry,
    dump,
    parse,
)
from sluice.pipelines.ledger.log import CHECKPOINT_BYTES, CHECKPOINT_EVERY, CHECKPOINTS_KEPT
from sluice.pipelines.model.kafka import Isolation, Key, Range
from sluice.pipelines.model.plans import AskedRange, OffsetRange, Plan, Request, RequestKind, Task
from sluice.pipelines.model.receipts import Counts, Owner, Receipt
from sluice.pipelines.publishing.publish import publish
from sluice.testing.engine import owner
from sluice.testing.lake import MemoryLake

KEY = Key("orders", 0, "id-1")


def make_plan(start: int = 0, end: int = 10, replaces: tuple[str, ...] = ()) -> Plan:
    s = OffsetRange("orders", 0, "id-1", start, end)
    return Plan("orders", "c", Request(RequestKind.CATCH_UP), Isolation.READ_COMMITTED, (Task(0, 1, (s,)),), replaces)


def make_receipt(start: int = 0, end: int = 10) -> Receipt:
    return Receipt(OffsetRange("orders", 0, "id-1", start, end), end, Counts(landed=end - start), (), "a")


def begin_ledger(lake: MemoryLake | None = None) -> Ledger:
    ledger = Ledger(lake or MemoryLake(), "orders", lambda: 5, "run", "c")
    item = OriginItem(key=KEY, offset=0, committed=None, why="test")
    ledger.append(lambda s: OriginEntry(items=(item,)))
    return ledger


def append_plan(ledger: Ledger, plan: Plan | None = None, by: Owner | None = None) -> int:
    p = plan or make_plan()
    appended = ledger.append(lambda s: PlanEntry(plan=p, hash=p.hash, owner=by or owner()))
    assert appended is not None
    return appended.number


def test_a_batch_is_planned_then_published_and_the_frontier_follows() -> None:
    ledger = begin_ledger()
    batch = append_plan(ledger)
    assert ledger.read().live()[0].id == batch == 1
    assert ledger.read().frontier(KEY) == 0
    publish(ledger, batch, owner(), [make_receipt()], [])
    state = ledger.read()
    assert state.frontier(KEY) == 10
    assert state.batches[batch].status is BatchStatus.PUBLISHED
    assert state.live() == ()


def test_reservations_of_live_plans_follow_the_ledger() -> None:
    ledger = begin_ledger()
    assert ledger.read().list_reserved(KEY) == ()
    batch = append_plan(ledger)
    append_plan(ledger, make_plan(10, 20))
    assert ledger.read().list_reserved(KEY) == (Range(0, 20),)
    publish(ledger, batch, owner(), [make_receipt()], [])
    assert ledger.read().list_reserved(KEY) == (Range(10, 20),)
    assert ledger.read().list_reserved(Key("orders", 1, "id-1")) == ()


def test_plan_and_publications_of_a_batch_are_read_back() -> None:
    ledger = begin_ledger()
    batch = append_plan(ledger)
    published = publish(ledger, batch, owner(), [make_receipt()], [])
    assert published is not None
    assert ledger.plan(batch) == make_plan()
    assert ledger.publication(published.state.batches[batch]) == published.entry


def test_unexpected_entry_in_place_of_plan_or_publication_is_reported() -> None:
    ledger = begin_ledger()
    number = append_plan(ledger)
    batch = ledger.read().batches[number]
    with pytest.raises(LedgerCorrupt, match="entry 0 is not the plan of batch 0"):
        ledger.plan(0)
    with pytest.raises(LedgerCorrupt, match="entry 0 is not the publish entry of batch 1"):
        ledger.publication(replace(batch, published=0))
    with pytest.raises(LedgerCorrupt, match="entry None is not the publish entry of batch 1"):
        ledger.publication(batch)


def test_batch_by_a_type_that_was_corrected_is_not_published() -> None:
    """Its run declared the former type before another run corrected it."""
    ledger, wrong, right = begin_ledger(), {"id": "int64", "code": "int64"}, {"id": "int64", "code": "string"}
    ledger.append(lambda s: SchemaEntry(shape="wrong", columns=wrong))
    ledger.append(lambda s: SchemaEntry(shape="right", columns=right, format=8, table={"id": "int64"}))
    batch = append_plan(ledger)
    assert ledger.read().table == {"id": "int64", "code": "string"}
    with pytest.raises(OwnershipLost):
        publish(ledger, batch, owner(), [replace(make_receipt(), format="wrong")], [])
    publish(ledger, batch, owner(), [replace(make_receipt(), format="right")], [])
    state = ledger.read()
    assert (state.frontier(KEY), state.table) == (10, right)
    assert checkpoint.load(checkpoint.dump(state)) == state


def of(r: Range, key: Key = KEY) -> tuple[KeyRange, ...]:
    return (KeyRange(key=key, range=r),)


def test_skipped_range_that_lands_counts_as_landed() -> None:
    ledger = begin_ledger()
    ledger.append(lambda s: SkipEntry(ranges=of(Range(0, 30)), reason="test"))
    batch = append_plan(ledger, make_plan(10, 20))
    publish(ledger, batch, owner(), [make_receipt(10, 20)], [])
    state = ledger.read()
    assert state.skipped[KEY] == (Range(0, 10), Range(20, 30))
    assert state.landed[KEY] == (Range(10, 20),)
    assert state.frontier(KEY) == 30


def test_replacement_counts_and_replaced_parts_do_not() -> None:
    ledger = begin_ledger()
    first = publish(ledger, append_plan(ledger), owner(), [make_receipt(0, 5), make_receipt(5, 10)], [])
    again = publish(ledger, append_plan(ledger, make_plan(0, 5, ("data/x",))), owner(), [make_receipt(0, 5)], [])
    assert first is not None
    assert again is not None
    state = ledger.read()
    assert [r.offset_range.range for r in state.receipts(first.number, first.entry)] == [Range(5, 10)]
    assert [r.offset_range.range for r in state.receipts(again.number, again.entry)] == [Range(0, 5)]
    assert state.landed[KEY] == (Range(0, 10),)


def test_retired_ranges_are_accounted_for_and_not_landed() -> None:
    ledger = begin_ledger()
    landed = publish(ledger, append_plan(ledger), owner(), [make_receipt(0, 5), make_receipt(5, 10)], [])
    assert landed is not None
    ledger.append(lambda s: RetireEntry(before=9, ranges=of(Range(0, 5)), parts=("data/x",), reason="old"))
    state = ledger.read()
    assert [r.offset_range.range for r in state.receipts(landed.number, landed.entry)] == [Range(5, 10)]
    assert (state.landed[KEY], state.retired[KEY], state.frontier(KEY)) == ((Range(5, 10),), (Range(0, 5),), 10)
    assert state.replaced == {"data/x": 3}


def test_accepted_log_starts_anew_once() -> None:
    """It abandons the live batches of the former life; a second entry finds no partition in that life."""
    ledger = begin_ledger()
    batch = append_plan(ledger)
    new = KEY._replace(incarnation="id-2")
    entry = AcceptEntry(
        event="recreated",
        items=(Entering(leaves=KEY, enters=OriginItem(key=new, offset=3, committed=7, why="accepted", opens=0)),),
        passed=of(Range(0, 4)),
        reason="test",
    )
    ledger.append(lambda s: entry)
    ledger.append(lambda s: entry.model_copy(update={"passed": of(Range(0, 99))}))
    state = ledger.read()
    assert state.current == {KEY.tp: new}
    assert (state.frontier(new), state.origins[new].committed, state.boundaries[new][0]) == (3, 7, (0, 3))
    assert state.batches[batch].status is BatchStatus.ABANDONED
    assert state.skipped[KEY] == (Range(0, 4),)
    assert state.known() == [new]


def test_manual_moves_are_recorded_until_the_next_commit() -> None:
    ledger = begin_ledger()
    ledger.append(lambda s: MovedEntry(offsets=(KeyOffset(key=KEY, offset=3),), reason="test"))
    assert ledger.read().moved == {KEY: 3}
    state = checkpoint.load(checkpoint.dump(ledger.read()))
    assert state == ledger.read()


def test_ledger_id_is_its_first_write() -> None:
    lake = MemoryLake()
    ledger = begin_ledger(lake)
    first = json.loads(lake.files[paths.log_path("orders", 0)])
    assert ledger.read().ledger_id == first["write"] != ""


def test_publishing_is_idempotent() -> None:
    ledger = begin_ledger()
    batch = append_plan(ledger)
    assert publish(ledger, batch, owner(), [make_receipt()], []) is not None
    assert publish(ledger, batch, owner(), [make_receipt()], []) is None


def test_only_the_current_owner_may_publish() -> None:
    ledger = begin_ledger()
    batch = append_plan(ledger)
    ledger.append(lambda s: OwnEntry(batch=batch, owner=owner("token-2")))
    with pytest.raises(OwnershipLost):
        publish(ledger, batch, owner("token-1"), [make_receipt()], [])
    assert publish(ledger, batch, owner("token-2"), [make_receipt()], [])


def test_an_abandoned_batch_cannot_be_published() -> None:
    ledger = begin_ledger()
    batch = append_plan(ledger)
    ledger.append(lambda s: AbandonEntry(batch=batch, reason="test"))
    with pytest.raises(OwnershipLost, match="abandoned"):
        publish(ledger, batch, owner(), [make_receipt()], [])


def test_a_zombies_publish_entry_is_void_when_folded() -> None:
    """A rival's entry that bypassed the decision has no effect: the fold decides again."""
    ledger = begin_ledger()
    batch = append_plan(ledger)
    ledger.append(lambda s: OwnEntry(batch=batch, owner=owner("token-2")))
    forged = PublishEntry(batch=batch, token="token-1", receipts=(make_receipt(),))
    appended = ledger.append(lambda s: forged)
    assert appended is not None
    state = ledger.read()
    assert state.void == (appended.number,)
    assert state.frontier(KEY) == 0
    assert state.batches[batch].status is BatchStatus.PLANNED


def test_replacing_a_replaced_part_is_void() -> None:
    ledger = begin_ledger()
    first, second = (
        append_plan(ledger, make_plan(replaces=("data/x",))),
        append_plan(ledger, make_plan(replaces=("data/x",))),
    )
    publish(ledger, first, owner(), [make_receipt()], [])
    with pytest.raises(OwnershipLost):
        publish(ledger, second, owner(), [make_receipt()], [])


def test_a_writer_that_lost_the_number_decides_again() -> None:
    lake = MemoryLake()
    ledger, rival = begin_ledger(lake), Ledger(lake, "orders", lambda: 6, "rival", "c")
    numbers: list[int] = []

    def append_rival(path: str) -> None:
        lake.before.clear()
        rival.append(lambda s: LossEntry(ranges=(KeyRange(key=KEY, range=Range(0, 1)),), reason="r"))

    def decide(state: object) -> LossEntry | None:
        numbers.append(state.number)  # type: ignore[attr-defined]
        return LossEntry(ranges=(KeyRange(key=KEY, range=Range(1, 2)),), reason="mine")

    lake.before["put_if_absent"] = append_rival
    appended = ledger.append(decide)
    assert appended is not None
    assert (appended.number, numbers) == (2, [1, 2])


def test_lost_response_is_resolved_by_the_write_id() -> None:
    lake = MemoryLake()
    ledger = begin_ledger(lake)
    lake.lose_answer_of.add(paths.log_path("orders", 1))
    batch = append_plan(ledger)
    assert batch == 1
    assert ledger.read().number == 2


def test_unanswered_write_without_effect_ends_the_run() -> None:
    """A run must not retry endlessly on a store that reads but does not write."""
    lake = MemoryLake()
    ledger, tried = begin_ledger(lake), []

    def refuse(path: str) -> None:
        tried.append(path)
        assert len(tried) < 5, "it retries endlessly"
        raise Unknown("no answer")

    lake.before["put_if_absent"] = refuse
    with pytest.raises(Unknown):
        append_plan(ledger)
    assert (len(tried), ledger.read().number) == (1, 1)


def test_many_writers_give_each_number_one_creator() -> None:
    lake = MemoryLake()
    begin_ledger(lake)
    lock = threading.Lock()
    put = lake.put_if_absent

    def put_guarded(path: str, data: bytes) -> bool:
        with lock:
            return put(path, data)

    lake.put_if_absent = put_guarded  # type: ignore[method-assign]

    def write(i: int) -> None:
        ledger = Ledger(lake, "orders", lambda: i, f"run-{i}", "c")
        for n in range(10):
            entry = LossEntry(ranges=(KeyRange(key=KEY, range=Range(i * 10 + n, i * 10 + n + 1)),), reason=str(i))
            ledger.append(lambda s, entry=entry: entry)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    state = Ledger(lake, "orders", lambda: 0).read()
    assert state.number == 61
    assert state.lost == {KEY: (Range(0, 60),)}


ENTERS_ANOTHER = (
    b'{"format":1,"kind":"accept","event":"","reason":"","items":[{"leaves":["t",0,"i"],"enters":'
    b'{"key":["u",0,"j"],"offset":0,"committed":null,"why":""}}]}'
)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", LedgerCorrupt),
        (b'{"format":1,"kind":"ori', LedgerCorrupt),
        (b"[]", LedgerCorrupt),
        (b"null", LedgerCorrupt),
        (b"\xff\xfe", LedgerCorrupt),
        (b"[" * 100_000, LedgerCorrupt),
        (b'{"format":1,"kind":"origin"}', LedgerCorrupt),
        (
            b'{"format":1,"kind":"origin","items":[{"key":["t",0,"i"],"offset":"x","committed":null,"why":""}]}',
            LedgerCorrupt,
        ),
        (
            b'{"format":1,"kind":"origin","items":[{"key":["t",0,"i"],"offset":9223372036854775808,"committed":0,"why":""}]}',
            LedgerCorrupt,
        ),
        (b'{"format":1,"kind":"boundary","items":[{"key":["t",0,"i"],"times":[1e30],"offsets":[0]}]}', LedgerCorrupt),
        (b'{"format":1,"kind":"boundary","items":[{"key":["t",0,"i"],"times":[2,2],"offsets":[0,0]}]}', LedgerCorrupt),
        (b'{"format":1,"kind":"boundary","items":[{"key":["t",0,"i"],"times":[2,3],"offsets":[0]}]}', LedgerCorrupt),
        (
            b'{"format":1,"kind":"boundary","items":[{"key":["t",0,"i"],"times":[2],"offsets":[0],"by_clock":[3]}]}',
            LedgerCorrupt,
        ),
        (
            b'{"format":1,"kind":"boundary","items":[{"key":["t",0,"i"],"times":[2],"offsets":[0],"by_marker":[3]}]}',
            LedgerCorrupt,
        ),
        (ENTERS_ANOTHER, LedgerCorrupt),
        (b'{"format":1,"kind":"schema","shape":"s","columns":5}', LedgerCorrupt),
        (b'{"format":1,"kind":"schema","shape":"s","columns":[]}', LedgerCorrupt),
        (b'{"format":1,"kind":"schema","shape":"s","columns":[["a","no type"]]}', LedgerCorrupt),
        (b'{"format":1,"kind":"schema","shape":"s","columns":null,"contract":"["}', LedgerCorrupt),
        (b'{"format":1,"kind":"schema","shape":"s","columns":null,"contract":"[{}]"}', LedgerCorrupt),
        (b'{"format":2,"kind":"origin","items":[]}', LedgerTooNew),
        (b'{"format":4,"kind":"boundary","items":[]}', LedgerTooNew),
        (b'{"format":1,"kind":"origin","items":[],"added":null}', LedgerTooNew),
        (
            b'{"format":2,"kind":"boundary","items":[{"key":["t",0,"i"],"times":[2],"offsets":[0],"added":[]}]}',
            LedgerTooNew,
        ),
        (b'{"format":1,"kind":"teleport"}', LedgerTooNew),
    ],
)
def test_a_bad_entry_stops_with_its_name(content: bytes, error: type[Exception]) -> None:
    lake = MemoryLake()
    ledger = begin_ledger(lake)
    path = paths.log_path("orders", 1)
    lake.files[path] = content
    with pytest.raises(error, match="00000000000000000001"):
        ledger.read()
    assert lake.files[path] == content


def test_missing_entry_is_an_error() -> None:
    lake = MemoryLake()
    ledger = begin_ledger(lake)
    append_plan(ledger)
    append_plan(ledger, make_plan(20, 30))
    del lake.files[paths.log_path("orders", 1)]
    with pytest.raises(LedgerCorrupt, match="entry 1 is missing"):
        Ledger(lake, "orders", lambda: 0).read()


@pytest.mark.parametrize(("behind", "reported"), [(70, True), (5, False)])
def test_a_hole_of_a_hundred_entries(behind: int, reported: bool) -> None:
    """A first read from a checkpoint checks beyond the end of the log; an audit reads every existing number."""
    lake = MemoryLake()
    ledger = begin_ledger(lake)
    for i in range(309 + 100 + behind):
        if i == 309:
            Ledger(lake, "orders", lambda: 0).read()
            tip = lake.files[paths.tip_path("orders")]
        append_plan(ledger, make_plan(i * 10, i * 10 + 10))
    lake.files[paths.tip_path("orders")] = tip
    for number in range(310, 410):
        del lake.files[paths.log_path("orders", number)]
    fresh = Ledger(lake, "orders", lambda: 0)
    if reported:
        with pytest.raises(LedgerCorrupt, match="entry 310 is missing"):
            fresh.read()
    else:
        assert fresh.read().number == 310
        with pytest.raises(LedgerCorrupt, match=r"entry 310 is missing \(.*410.json exists\)"):
            audit(fresh, lake)  # type: ignore[arg-type]


def test_reading_resumes_where_it_stopped() -> None:
    lake = MemoryLake()
    reader, writer = Ledger(lake, "orders", lambda: 0), begin_ledger(lake)
    before = reader.read()
    append_plan(writer)
    assert reader.read().number == 2
    assert before.number == 1, "an older state stays as it was"
    assert before.live() == ()


@given(st.integers(0, 10**18), st.integers(1, 10**6), st.text(max_size=20))
def test_entries_survive_the_round_trip(start: int, span: int, reason: str) -> None:
    receipt = replace(make_receipt(start, start + span), timings={"decode": 5})
    for entry in (
        PublishEntry(batch=3, token="t", receipts=(receipt,)),
        LossEntry(
            ranges=(KeyRange(key=KEY, range=Range(start, start + span)),),
            reason=reason.encode("utf-8", "replace").decode(),
        ),
        PlanEntry(plan=make_plan(start, start + span), hash="h", owner=owner()),
    ):
        assert parse(dump(entry), "x") == entry


def test_large_entries_are_compressed_and_read_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    lakes = MemoryLake(), MemoryLake()
    for lake, size in zip(lakes, (1 << 30, 0), strict=True):
        monkeypatch.setattr(entries, "PACKED_FROM", size)
        ledger = begin_ledger(lake)
        for i in range(30):
            append_plan(ledger, make_plan(i * 10, i * 10 + 10))
    plain, compressed = (Ledger(lake, "orders", lambda: 0) for lake in lakes)
    own = {"follows": "", "write": ""}
    assert [e.model_copy(update=own) for _, e in compressed.entries()] == [
        e.model_copy(update=own) for _, e in plain.entries()
    ]
    assert compressed.read().batches == plain.read().batches
    assert Ledger(lakes[1], "orders", lambda: 0).plan(7) == plain.plan(7), "after a checkpoint"
    assert all(d.startswith(b'{"follows":') for p, d in lakes[1].files.items() if "/log/" in p)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"packed": "no base64"}, LedgerCorrupt),
        ({"packed": b64encode(b"no zlib").decode()}, LedgerCorrupt),
        ({"packed": b64encode(zlib.compress(b"{}")[:-2]).decode()}, LedgerCorrupt),
        ({"packed": b64encode(zlib.compress(b"0" * (1 << 24))).decode(), "size": 9}, LedgerCorrupt),
        ({"packed": b64encode(zlib.compress(b"{}")).decode(), "size": 2}, LedgerCorrupt),
        ({"size": 1 << 70}, LedgerCorrupt),
        ({"size": 17}, LedgerCorrupt),
        ({"size": None}, LedgerCorrupt),
        ({"number": 7}, LedgerCorrupt),
        ({"kind": "plan"}, LedgerCorrupt),
        ({"follows": "0" * 64}, LedgerCorrupt),
        ({"follows": 5}, LedgerCorrupt),
        ({"format": 10}, LedgerTooNew),
        ({"later": 1}, LedgerTooNew),
        (
            {"packed": b64encode(zlib.compress(line := b'{"format":1,"kind":"leap"}')).decode(), "size": len(line)},
            LedgerTooNew,
        ),
    ],
)
def test_damaged_compressed_entry_is_reported(
    change: dict[str, Any], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "PACKED_FROM", 0)
    head = json.loads(dump(LossEntry(ranges=(), reason="x", number=3, follows="f" * 64)))
    data = json.dumps(head | change, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(error, match="_sluice/orders/log/3"):
        parse(data, "_sluice/orders/log/3.json")


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_crash_the_reader(data: bytes) -> None:
    with pytest.raises((LedgerCorrupt, LedgerTooNew)):
        parse(data, "x")


def test_a_checkpoint_is_the_fold_and_is_never_needed() -> None:
    lake = MemoryLake()
    ledger = begin_ledger(lake)
    for i in range(checkpoint_every := 300):
        batch = append_plan(ledger, make_plan(i * 10, i * 10 + 10))
        if i % 3:
            publish(ledger, batch, owner(), [make_receipt(i * 10, i * 10 + 10)], [])
    first = Ledger(lake, "orders", lambda: 0).read()
    stand = [p for p in lake.files if "/checkpoints/" in p]
    assert len(stand) == 1 < checkpoint_every
    intact = lake.files[stand[0]]
    for damage in (lake.files[stand[0]], b"", b"{}", b"null", b'{"format":9}', lake.files[stand[0]][:-50]):
        lake.files[stand[0]] = damage
        assert Ledger(lake, "orders", lambda: 0).read() == first
        assert lake.files[stand[0]] == intact, "the read has repaired it"


def test_requests_of_batches_survive_a_checkpoint() -> None:
    ledger = begin_ledger()
    requests = [
        Request(RequestKind.OFFSETS, (AskedRange("orders", 0, 3, 9), AskedRange("a b", 1, 0, 1)), replace=True),
        Request(RequestKind.WINDOW, window=7_200_000, until=10_800_000, only=(KEY.tp,)),
        Request(RequestKind.COMPACT),
    ]
    for i, request in enumerate(requests):
        append_plan(ledger, replace(make_plan(i * 10, i * 10 + 10), request=request))
    state = checkpoint.load(checkpoint.dump(ledger.read()))
    assert state == ledger.read()
    assert [(b.request, b.merges) for b in state.batches.values()] == [(a, a is requests[2]) for a in requests]


def test_large_entries_cause_earlier_checkpoints_and_old_ones_are_removed() -> None:
    lake = MemoryLake()
    ledger = begin_ledger(lake)
    for _ in range(6):
        ledger.append(lambda state: LossEntry(ranges=(), reason="x" * CHECKPOINT_BYTES))
        assert Ledger(lake, "orders", lambda: 0).read() == ledger.read()
    stand = [p for p in lake.files if "/checkpoints/" in p]
    assert len(stand) == CHECKPOINTS_KEPT
    assert stand[-1].endswith(f"{ledger.read().number:020d}.json")


def test_read_only_user_reads_without_writing_a_checkpoint() -> None:
    lake = MemoryLake()
    ledger = begin_ledger(lake)
    for _ in range(CHECKPOINT_EVERY):
        ledger.append(lambda state: LossEntry(ranges=(), reason="x"))

    def refuse(path: str) -> None:
        raise NotAuthorized(f"{path} may not be written")

    lake.before["put"] = refuse
    assert Ledger(lake, "orders", lambda: 0).read() == ledger.read()


def test_boundaries_of_any_partitions_survive_a_checkpoint() -> None:
    ledger = begin_ledger(MemoryLake())
    keys = [Key("other", n, "id-2") for n in range(3)]
    opens = [None, 7_200_000, 3_600_000]
    origins = (OriginItem(key=k, offset=9, committed=None, why="", opens=o) for k, o in zip(keys, opens, strict=True))
    ledger.append(lambda state: OriginEntry(items=tuple(origins)))
    for hour, offset in ((5, 40), (3, 20), (4, 20)):
        times = (hour * 3_600_000,)
        items = tuple(Boundaries(key=k, times=times, offsets=(offset + n,)) for n, k in enumerate(keys[1:]))
        ledger.append(lambda state, items=items: BoundaryEntry(items=items))
    state = ledger.read()
    assert list(state.boundaries[keys[2]]) == [(3_600_000, 9), (10_800_000, 21), (14_400_000, 21), (18_000_000, 41)]
    assert checkpoint.load(checkpoint.dump(state)) == state


def test_a_checkpoint_saves_reading_the_entries_below_it() -> None:
    lake = MemoryLake()
    ledger = begin_ledger(lake)
    for i in range(300):
        append_plan(ledger, make_plan(i * 10, i * 10 + 10))
    expected = Ledger(lake, "orders", lambda: 0).read()
    reads: list[str] = []
    get = lake.get
    lake.get = lambda path: (reads.append(path), get(path))[1]  # type: ignore[method-assign, func-returns-value]
    assert Ledger(lake, "orders", lambda: 0).read() == expected
    assert reads == [paths.tip_path("orders"), paths.checkpoint_path("orders", 301), paths.log_path("orders", 301)]
