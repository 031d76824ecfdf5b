"""Replay lands quarantined records that fit today's feed in their places, and leaves the others unchanged.

This holds for damaged files, rival runs and a crash at any write.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.pipelines.audit.audit import audit, list_live_receipts
from sluice.pipelines.audit.explain_offset import explain
from sluice.pipelines.errors import LakeUnavailable, PartUnreadable, PlanBusy, ProofFailed, SchemaChanged
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.lake import paths
from sluice.pipelines.landing.sharing import Sharing, UnwrittenRange
from sluice.pipelines.landing.writer import PartRole, PartTarget
from sluice.pipelines.ledger import BatchStatus
from sluice.pipelines.ledger.account import OffsetClass
from sluice.pipelines.maintenance import replay as replaying
from sluice.pipelines.maintenance import sorter
from sluice.pipelines.maintenance.fixers import Fixer, Record
from sluice.pipelines.maintenance.replay import Replayed, find, foresee_replay, replay
from sluice.pipelines.model.kafka import Range
from sluice.pipelines.model.plans import RequestKind
from sluice.pipelines.model.receipts import Counts, Drift, DriftKind, PartKind, Receipt
from sluice.pipelines.planning.schema_changes import declare
from sluice.pipelines.publishing import published_files as reading
from sluice.pipelines.publishing.publish import publish, roll_forward
from sluice.pipelines.quarantine.limit import QuarantineKind
from sluice.pipelines.quarantine.listing import Filter, Listing, listing
from sluice.pipelines.records.rows.row_format import quarantine_rows
from sluice.testing.engine import owner
from tests.pipelines.landed_world import FEED, HOUR, START, A, B, Died, World, crash_after, make_records, split_offsets

STRICT = {"id": "int64 not null", "amount": "int32", "name": "string"}
WIDER = {**STRICT, "amount": "int64", "more": "string"}
LARGE = 1 << 40
ALL = Filter()


class Typed(World):
    """The same partitions with JSON records: every tenth amount is too large, every seventh value is no JSON."""

    def __init__(self, root: Path, more: str = "", by_time: bool = False) -> None:
        super().__init__(root, _dump_schema(STRICT) + more, by_time)
        self.root, self.more = root, more

    def write_feed(self, schema: Mapping[str, str], more: str = "") -> None:
        """Rewrite the feed's file with this schema, and load it."""
        (self.root / "feeds" / "orders.yaml").write_text(FEED + _dump_schema(schema) + self.more + more)
        self.feed = load_feed(self.root / "feeds" / "orders.yaml", {})

    def land(self, *ranges: Any, bad: int = 0, gaps: int = 1) -> None:
        declare(self.feed, self.ledger)
        super().land(*ranges, bad=bad, gaps=gaps)

    def make_value(self, offset: int) -> bytes:
        if offset % 7 == 3:
            return b"no %d" % offset
        amount = LARGE + offset if offset % 10 == 5 else offset
        return json.dumps({"id": offset, "amount": amount, "name": f"n{offset}"}).encode()

    def land_range(self, s: Any, batch: int, plan_hash: str, bad: int, gaps: int) -> Receipt:
        offsets = np.arange(s.start, s.end, gaps)
        rows = make_records(offsets)
        values = pa.array([self.make_value(o) for o in offsets.tolist()], pa.binary())
        rows = rows.set_column(rows.schema.get_field_index("value"), "value", values)
        form, parts, counts = self.feed.shape.format(), (), Counts(compacted=s.span - len(offsets))
        for piece in form.convert(s, rows):
            parts += self.write(s, batch, plan_hash, PartKind.LANDED, piece.landed)
            counts += Counts(landed=piece.landed.num_rows)
            if piece.quarantined is not None:
                refused = quarantine_rows(piece.quarantined, batch, form.contract)
                parts += self.write(s, batch, plan_hash, PartKind.QUARANTINED, refused)
                counts += Counts(quarantined=refused.num_rows)
        drift = (Drift(DriftKind.WRONG, "amount", 1, s.start),)
        return Receipt(s, s.end, counts, parts, "a", input_bytes=s.span, format=self.feed.shape.name, drift=drift)

    def land_together(self, *ranges: Any) -> None:
        """Land a batch whose offset ranges share files."""
        declare(self.feed, self.ledger)
        planned = [self.build_range(*r) for r in ranges]
        batch = self.plan(planned)
        target = PartTarget("orders", batch, self.ledger.plan(batch).hash, "a", planned[0])
        sharing = Sharing(planned, self.feed.landing, self.lake, target)  # type: ignore[arg-type]
        for s in planned:
            offsets = np.arange(s.start, s.end)
            records = make_records(offsets)
            values = pa.array([self.make_value(o) for o in offsets.tolist()], pa.binary())
            records = records.set_column(records.schema.get_field_index("value"), "value", values)
            (piece,) = self.feed.shape.format().convert(s, records)
            refused = piece.quarantined and quarantine_rows(piece.quarantined, batch, "")
            counts = Counts(landed=piece.landed.num_rows, quarantined=refused.num_rows if refused else 0)
            rows = {PartRole(PartKind.LANDED): [piece.landed]}
            rows |= {PartRole(PartKind.QUARANTINED): [refused]} if refused else {}
            sharing.take(UnwrittenRange(Receipt(s, s.end, counts, (), "a", format=self.feed.shape.name), rows))
        sharing.finish()
        publish(self.ledger, batch, owner("landing"), sharing.pop_landed(), [])
        roll_forward(self.ledger, self.lake, "orders")  # type: ignore[arg-type]

    def replay(self, selection: Filter = ALL, fix: Any = None, by: str = "replaying") -> Replayed:
        fixer = Fixer(fix, __file__) if fix else None
        try:
            return replay(self.feed, self.ports, selection, fixer, owner(by, "replay"), lambda progress: None)
        finally:
            self.liveness.dead.add(by)

    def preview(self, selection: Filter = ALL, fix: Any = None) -> Replayed:
        return foresee_replay(
            self.feed, self.ports, selection, Fixer(fix, __file__) if fix else None, lambda progress: None
        )

    def list_quarantined(self, selection: Filter = ALL) -> Listing:
        return listing(self.reopen_ledger(), self.lake, selection, self.feed.window)  # type: ignore[arg-type]

    def list_positions(self, kind: PartKind = PartKind.LANDED) -> list[tuple[int, int]]:
        """Returns partition and offset of each row that readers get, in their order."""
        names = ["kafka_partition", "kafka_offset"] if kind is PartKind.LANDED else ["partition", "offset"]
        windows = (START, START + HOUR)
        files = reading.list_files(self.feed, self.lake, windows, kind)  # type: ignore[arg-type]
        tables = [pq.read_table(self.lake.open(f.path), columns=names).to_pydict() for f in files]
        return [position for t in tables for position in zip(*(t[n] for n in names), strict=True)]

    def find_path(self, root: str, start: int, partition: int = 0) -> str:
        """Returns the visible file of the offset range that starts at this offset."""
        (path,) = (p for p in self.list_files() if p.startswith(root) and f"/orders-{partition}-{start}-" in p)
        return path

    def list_receipts(self) -> list[Receipt]:
        ledger = self.reopen_ledger()
        return list_live_receipts(ledger, ledger.read())


def _dump_schema(schema: Mapping[str, str]) -> str:
    return f"format: json\nschema: {json.dumps(dict(schema))}\n"


@pytest.fixture
def world(tmp_path: Path) -> Typed:
    return Typed(tmp_path)


def list_large(offsets: Sequence[int] = range(200)) -> list[int]:
    return [o for o in offsets if o % 10 == 5 and o % 7 != 3]


def list_broken(offsets: Sequence[int] = range(200)) -> list[int]:
    return [o for o in offsets if o % 7 == 3]


# -- rows


def test_records_that_fit_the_fixed_schema_land_in_place_and_others_stay(world: Typed) -> None:
    world.land(*split_offsets(A, 50), *split_offsets(B, 100))
    before = world.read_rows()
    state, manifests = world.state(), list(world.lake.list(paths.manifest_folder("orders")))
    refused = {(r["partition"], r["offset"]): r for r in world.read_rows(PartKind.QUARANTINED).to_pylist()}
    world.write_feed(WIDER)
    done = world.replay()
    world.check()
    assert world.list_positions() == [(p, o) for h in (0, 100) for p in (0, 1) for o in range(h, h + 100) if o % 7 != 3]
    rows = world.read_rows().to_pylist()
    assert [(r["id"], r["amount"], r["name"], r["more"]) for r in rows] == [
        (o, LARGE + o if o % 10 == 5 else o, f"n{o}", None) for o in (r["kafka_offset"] for r in rows)
    ]
    unchanged = [r for r in rows if r["kafka_offset"] not in list_large()]
    assert [{k: v for k, v in r.items() if k != "more"} for r in unchanged] == before.to_pylist()
    assert world.read_rows(PartKind.QUARANTINED).to_pylist() == [
        refused[p, o] for h in (0, 100) for p in (0, 1) for o in list_broken(range(h, h + 100))
    ], "with their bytes, their batch and their reason"
    assert {r.format for r in world.list_receipts()} == {world.feed.shape.name}
    for r in world.list_receipts():
        s = r.offset_range
        assert r.relanded == tuple(Range(o, o + 1) for o in list_large(range(s.start, s.end)))
        assert (r.mended, r.drift) == ((), (Drift(DriftKind.WRONG, "amount", 1, s.start),))
        assert r.counts.landed + r.counts.quarantined == s.span
    after = world.state()
    assert (after.frontiers(), after.commits, after.boundaries) == (state.frontiers(), state.commits, state.boundaries)
    assert list(world.lake.list(paths.manifest_folder("orders"))) == manifests
    assert list(world.lake.list(paths.staging_root("orders"))) == []
    assert (done.outcome.fit.total(), done.trial.tried.total()) == (
        2 * len(list_large()),
        2 * len(list_large() + list_broken()),
    )
    assert world.replay().done == ()


def test_replayed_file_has_schema_and_metadata_of_a_landed_file(world: Typed) -> None:
    world.land((A, 0, 100), *split_offsets(B, 100))
    world.write_feed(WIDER)
    world.land((A, 100, 200))
    fresh = {k: pq.ParquetFile(world.lake.open(world.find_path(k, 100))).schema for k in ("data", "quarantine")}
    world.replay(Filter(windows=frozenset({START})))
    for kind, schema in fresh.items():
        file = pq.ParquetFile(world.lake.open(world.find_path(kind, 0)))
        assert file.schema.equals(schema)
        metadata = {k.decode(): v.decode() for k, v in file.metadata.metadata.items()}
        assert metadata["sluice.range"] == "orders:0:0-100"


def test_rows_laid_out_by_record_time_land_in_their_folders(tmp_path: Path) -> None:
    world = Typed(tmp_path, "landing: {layout: record_time}\n", by_time=True)
    world.land(*split_offsets(A, 100), *split_offsets(B, 100))
    world.write_feed(WIDER)
    assert len(world.replay().done) == 4
    world.check()
    assert sorted(world.list_positions()) == [(p, o) for p in (0, 1) for o in range(200) if o % 7 != 3]
    for path in (p for p in world.list_files() if p.startswith("data")):
        rows = pq.read_table(world.lake.open(path), columns=["kafka_timestamp"]).column(0).cast(pa.int64())
        hours = {t // HOUR * HOUR for t in rows.to_pylist()}
        assert [paths.window_folder(h, HOUR, world.folder_prefix) for h in hours] == [
            paths.folder_of(path, "orders", PartKind.LANDED)
        ]


@pytest.mark.parametrize(
    ("selection", "offsets"),
    [
        (Filter(windows=frozenset({START + HOUR})), list_large(range(100, 200))),
        (Filter(reasons=("out_of_range",)), list_large()),
        (Filter(reasons=("not_json",)), []),
        (Filter(fields=("amount", "name")), list_large()),
        (Filter(fields=("name",)), []),
        (Filter(expectations=("expect_column_values_to_be_between",)), []),
        (Filter(places=((A.tp, 15), (A.tp, 125), (B.tp, 15), (A.tp, 16))), [15, 125]),
    ],
)
def test_only_selected_records_are_replayed(world: Typed, selection: Filter, offsets: list[int]) -> None:
    world.land(*split_offsets(A, 50), *split_offsets(B, 100))
    before = set(world.list_positions())
    world.write_feed(WIDER)
    world.replay(selection)
    world.check()
    here = {o for p, o in set(world.list_positions()) - before if p == 0}
    assert here == set(offsets)
    assert set(world.list_positions(PartKind.QUARANTINED)) == {(p, o) for p in (0, 1) for o in range(200)} - set(
        world.list_positions()
    )


def test_dry_run_reports_the_same_result_and_writes_nothing(world: Typed) -> None:
    world.land(*split_offsets(A, 50), *split_offsets(B, 100))
    world.write_feed(WIDER)
    files = dict(world.lake.files)
    foreseen = world.preview()
    assert world.lake.files == files
    done = world.replay()
    assert foreseen.trial == done.trial
    assert [c.offset_range for c, _ in foreseen.done] == [c.offset_range for c, _ in done.done]
    assert foreseen.outcome.fit == {
        QuarantineKind("schema", "out_of_range", None, "amount", "too large for int32"): 2 * len(list_large())
    }
    ((kind, (records, first)),) = foreseen.trial.why.items()
    assert (kind.reason, records, first) == ("not_json", 2 * len(list_broken()), "orders:0:3")


def test_quarantined_record_gets_new_reason_when_its_range_is_rewritten(world: Typed) -> None:
    world.land(*split_offsets(A, 100), *split_offsets(B, 100))
    refused = {r["offset"]: r for r in world.read_rows(PartKind.QUARANTINED).to_pylist()}
    world.write_feed({**WIDER, "name": "string", "other": "string not null"})
    assert world.replay().done == ()
    assert {r["offset"]: r for r in world.read_rows(PartKind.QUARANTINED).to_pylist()} == refused

    def fix_one(record: Record) -> bytes | None:
        return b'{"id": 3, "other": "x"}' if record.offset == 3 else record.value

    world.replay(fix=fix_one)
    now = {r["offset"]: r for r in world.read_rows(PartKind.QUARANTINED, windows=(START,), partitions=(0,)).to_pylist()}
    assert (now[15]["reason"], now[15]["field"], now[15]["batch"]) == ("missing", "other", refused[15]["batch"])
    assert now[10] == refused[10] | {k: now[10][k] for k in ("partition", "key", "headers", "timestamp")}
    world.check()


def test_rows_that_would_lose_data_under_current_schema_stay_unchanged(world: Typed) -> None:
    world.land(*split_offsets(A, 100), *split_offsets(B, 100))
    world.write_feed({"id": "int64 not null", "amount": "int64"})
    before = world.read_rows()
    done = world.replay()
    assert done.done == ()
    assert {why for _, why in done.candidates.unfit} == {"column name is no longer in the schema"}
    assert len(done.candidates.unfit) == 4
    assert world.read_rows().equals(before)
    world.write_feed({**WIDER, "id": "string"})
    for ask in (world.preview, world.replay):
        with pytest.raises(SchemaChanged, match="id is string, and has landed as int64"):
            ask()


@pytest.mark.parametrize("selection", [Filter(places=((A.tp, 5),)), Filter(windows=frozenset({START}))])
def test_rows_in_the_same_file_as_fitting_records_lose_nothing(world: Typed, selection: Filter) -> None:
    world.land_together((A, 5, 6), (B, 0, 5))  # of A nothing landed, of B nothing in quarantine will fit
    world.land((A, 0, 5), (A, 6, 15), (B, 5, 15))
    world.land((A, 15, 100), (A, 100, 200), (B, 15, 100), (B, 100, 200))
    before = world.read_rows()
    world.write_feed({"id": "int64 not null", "amount": "int64"})
    done = world.replay(selection)
    assert (1, "column name is no longer in the schema") in [(s.partition, why) for s, why in done.candidates.unfit]
    assert done.done == ()
    assert world.read_rows().equals(before)
    world.write_feed(WIDER)
    assert {(c.offset_range.start, c.offset_range.end) for c, _ in world.replay(selection).done} >= {(5, 6), (0, 5)}
    assert (0, 5) in world.list_positions()
    world.check()


def test_replay_drops_nothing_when_feed_drops_undecodable_records(world: Typed) -> None:
    world.land(*split_offsets(A, 100), *split_offsets(B, 100))
    world.write_feed(WIDER, "policies: {on_undecodable: drop}\n")
    assert len(world.replay().done) == 4
    assert sorted(world.list_positions(PartKind.QUARANTINED)) == [(p, o) for p in (0, 1) for o in list_broken()]
    world.check()


# -- contracts


def expect_between(maximum: int, severity: str = "critical") -> dict[str, Any]:
    kwargs = {"column": "id", "min_value": 0, "max_value": maximum}
    return {"type": "expect_column_values_to_be_between", "kwargs": kwargs, "severity": severity}


def write_contract(world: Typed, *expectations: dict[str, Any]) -> None:
    suite = {"name": "orders", "expectations": expectations, "meta": {"great_expectations_version": "1.24.1"}}
    (world.root / "feeds" / "orders.contract.json").write_text(json.dumps(suite))
    world.write_feed(STRICT)


def test_rows_land_after_contract_fix_with_tallies_of_current_contract(world: Typed) -> None:
    write_contract(world, expect_between(150), expect_between(120, "warning"))
    world.land(*split_offsets(A, 100), *split_offsets(B, 100))
    good = [o for o in range(200) if o not in list_large() + list_broken()]
    assert [o for p, o in world.list_positions() if p == 0] == [o for o in good if o <= 150]
    reasons = {h.kind.expectation: h.records for h in world.list_quarantined().held if h.kind.stage == "contract"}
    assert reasons == {"expect_column_values_to_be_between": 2 * len([o for o in good if o > 150])}
    before = [r.tallies for r in world.list_receipts()]
    assert world.replay().done == ()
    write_contract(world, expect_between(180))
    done = world.replay(Filter(expectations=("expect_column_values_to_be_between",)))
    world.check()
    assert [o for p, o in world.list_positions() if p == 0] == [o for o in good if o <= 180]
    (why,) = [(k.reason, n) for k, (n, _) in done.trial.why.items()]
    assert why[1] == 2 * len([o for o in good if o > 180])
    for r in world.list_receipts():
        mine = [o for o in good if r.offset_range.start <= o < r.offset_range.end]
        assert world.feed.contract is not None
        if world.feed.contract.hash in r.format:
            ((checked, unexpected),) = [(t.checked, t.unexpected) for t in r.tallies]
            assert (checked, unexpected) == (len(mine), len([o for o in mine if o > 180]))
        else:
            assert r.offset_range.end <= 100, "nothing of it was quarantined by the contract"
            assert r.tallies in before
    quarantined = world.read_rows(PartKind.QUARANTINED, windows=(START + HOUR,), partitions=(0,)).to_pylist()
    hashes = {r["contract"] for r in quarantined if r["stage"] == "contract"}
    assert hashes == {world.feed.contract.hash if world.feed.contract else None}, "they were tried today"


def test_unselected_rows_still_count_in_contract_tallies(world: Typed) -> None:
    write_contract(world, expect_between(150))
    world.land(*split_offsets(A, 100), *split_offsets(B, 100))
    write_contract(world, expect_between(160))
    world.replay(Filter(places=((A.tp, 151),)))
    world.check()
    (r,) = [r for r in world.list_receipts() if r.relanded]
    good = [o for o in range(100, 200) if o not in list_large() + list_broken()]
    assert [(t.checked, t.unexpected) for t in r.tallies] == [(len(good), len([o for o in good if o > 160]))]
    assert r.counts.quarantined == len([o for o in range(100, 200) if o not in good or o > 150]) - 1


# -- fix functions


def test_fixed_records_land_and_are_recorded_as_fixed(world: Typed) -> None:
    world.land(*split_offsets(A, 100), *split_offsets(B, 100))
    records: list[Record] = []

    def fix(record: Record) -> Any:
        records.append(record)
        if record.reason != "not_json":
            return None
        assert record.value is not None
        return {"id": int(record.value.split()[1]), "name": "mended"}

    done = world.replay(fix=fix)
    world.check()
    assert sorted(world.list_positions(PartKind.QUARANTINED)) == [(p, o) for p in (0, 1) for o in list_large()]
    rows = {r["kafka_offset"]: r for r in world.read_rows(partitions=(0,)).to_pylist()}
    assert (rows[3]["id"], rows[3]["name"], rows[3]["kafka_key"]) == (3, "mended", b"k3")
    assert (done.trial.left, done.trial.mended) == (2 * len(list_large()), 2 * len(list_broken()))
    for r in world.list_receipts():
        assert (
            r.mended
            == r.relanded
            == tuple(Range(o, o + 1) for o in list_broken(range(r.offset_range.start, r.offset_range.end)))
        )
    first = records[0]
    assert (first.offset, first.value, first.key, first.headers) == (3, b"no 3", b"k3", (("h", b"3"),))
    assert (first.topic, first.partition, first.stage, first.reason) == ("orders", 0, "decode", "not_json")
    assert first.timestamp == START + 3 * 7919 % 5 * HOUR


@pytest.mark.parametrize(
    ("answer", "landed"),
    [
        (b'{"id": 1}', True),
        ('{"id": 1}', True),
        ({"id": 1}, True),
        ({"amount": 1}, False),
        (b"still no JSON", False),
        ("\ud800", False),
        ({"id": float("nan")}, False),
        ({"id": {1, 2}}, False),
        ([1], False),
        (7, False),
        (None, False),
    ],
)
def test_fix_function_result_lands_or_record_stays_quarantined(world: Typed, answer: Any, landed: bool) -> None:
    world.land(*split_offsets(A, 100), *split_offsets(B, 100))
    before = world.read_rows(PartKind.QUARANTINED)
    done = world.replay(Filter(places=((A.tp, 3),)), lambda record: answer)
    assert len(done.done) == landed
    assert ((0, 3) in world.list_positions()) is landed
    if not landed:
        assert world.read_rows(PartKind.QUARANTINED).equals(before)
    world.check()


def test_errors_of_fix_function_are_counted_and_replay_continues(world: Typed) -> None:
    world.land(*split_offsets(A, 100), *split_offsets(B, 100))

    def fix(record: Record) -> Any:
        if record.offset % 2:
            raise KeyError("a secret")
        if record.offset == 10:
            raise SystemExit
        if record.offset == 24:
            return 7
        return {"id": record.offset}

    done = world.replay(Filter(windows=frozenset({START})), fix)
    errors = {error.partition(" at ")[0]: (n, first) for error, (n, first) in done.trial.botched.items()}
    odd = [o for o in range(100) if o % 2 and (o in list_large() or o in list_broken())]
    assert errors == {
        "KeyError": (2 * len(odd), f"orders:0:{odd[0]}"),
        "SystemExit": (2, "orders:0:10"),
        "returned int": (2, "orders:0:24"),
    }
    assert "secret" not in str(done.trial)
    assert all("test_replay.py:" in error for error in done.trial.botched if not error.startswith("returned"))
    assert {o for p, o in world.list_positions() if p == 0 and o < 100} >= {38, 52}
    world.check()


def test_value_unchanged_by_fix_function_is_not_recorded_as_fixed(world: Typed) -> None:
    world.land(*split_offsets(A, 100), *split_offsets(B, 100))
    world.write_feed(WIDER)
    world.replay(fix=lambda record: record.value)
    assert all(r.relanded and not r.mended for r in world.list_receipts())
    world.check()


def test_large_fixed_values_are_converted_a_few_at_a_time(world: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    from sluice.pipelines.maintenance import fixers

    monkeypatch.setattr(sorter, "FIXED_BYTES", 100)
    monkeypatch.setattr(fixers, "MOST_BYTES", 1000)
    world.land(*split_offsets(A, 100), *split_offsets(B, 100))
    done = world.replay(fix=lambda r: {"id": r.offset, "name": "x" * (5000 if r.offset == 10 else 60)})
    assert sorted(world.list_positions(PartKind.QUARANTINED)) == [(0, 10), (1, 10)]
    assert list(done.trial.botched.values()) == [(2, "orders:0:10")]
    world.check()


# -- repeated, and with other operations


def test_relanded_offsets_survive_replays_and_compaction(world: Typed) -> None:
    world.land(*split_offsets(A, 50), *split_offsets(B, 100))
    world.write_feed(WIDER)
    world.replay()
    world.replay(fix=lambda r: {"id": r.offset})
    assert world.list_positions(PartKind.QUARANTINED) == []
    assert all("quarantine" not in p for p in world.list_files())
    both = {
        r.offset_range.start: (r.relanded, r.mended) for r in world.list_receipts() if r.offset_range.partition == 0
    }
    for start, (relanded, mended) in both.items():
        here = range(start, start + 50)
        assert [o for r in relanded for o in range(*r)] == sorted(list_large(here) + list_broken(here))
        assert [o for r in mended for o in range(*r)] == list_broken(here)
    assert world.compact().merged
    world.check()
    merged = [r for r in world.list_receipts() if r.offset_range.partition == 0]
    assert [o for r in merged for x in r.relanded for o in range(*x)] == sorted(list_large() + list_broken())
    assert [o for r in merged for x in r.mended for o in range(*x)] == list_broken()
    assert [d.records for d in merged[0].drift] == [2]
    listed = world.list_quarantined()
    assert listed.held == ()
    assert [(w.relanded, w.fixed, w.quarantined) for w in listed.windows] == [
        (
            2 * len([o for o in list_large() + list_broken() if o // 100 == h]),
            2 * len([o for o in list_broken() if o // 100 == h]),
            0,
        )
        for h in (0, 1)
    ]


def test_explain_reports_relanded_record_and_former_quarantine_reason(world: Typed) -> None:
    world.land(*split_offsets(A, 50), *split_offsets(B, 100))
    world.write_feed(WIDER)
    world.replay()
    (batch,) = {b.id for b in world.state().batches.values() if b.request.kind is RequestKind.REPLAY}
    for _ in range(2):
        explanation = explain(world.reopen_ledger(), world.lake, A.tp, 15)  # type: ignore[arg-type]
        assert explanation.class_ is OffsetClass.LANDED
        assert f"re-landed by batch {batch}" in explanation.text
        assert "it was quarantined by batch 3: amount: out_of_range: too large for int32" in explanation.text
        plain = explain(world.reopen_ledger(), world.lake, A.tp, 16)  # type: ignore[arg-type]
        assert "re-landed" not in plain.text
        world.compact()
    world.replay(fix=lambda r: {"id": r.offset})
    explanation = explain(world.reopen_ledger(), world.lake, A.tp, 3)  # type: ignore[arg-type]
    assert "fixed" in explanation.text
    assert "not_json" in explanation.text


def test_records_skipped_by_fix_function_get_their_current_reason(world: Typed) -> None:
    """Fixed records have their offset range rewritten; the others in it get the reason that they have today."""
    world.land(*split_offsets(A, 100), *split_offsets(B, 100))
    world.write_feed({**WIDER, "name": "string", "other": "string not null"})

    def fix(record: Record) -> Any:
        return {"id": 1, "other": "mended"} if record.reason == "not_json" else None

    done = world.replay(fix=fix)
    world.check()
    stay = world.read_rows(PartKind.QUARANTINED).to_pylist()
    assert {(r["reason"], r["field"]) for r in stay} == {("missing", "other")}
    assert (done.trial.left, done.trial.left_fit) == (len(stay), 0)
    assert {str(h.kind) for h in world.list_quarantined().held} == {"other: missing"}


def test_fitting_records_skipped_by_fix_function_are_counted(world: Typed) -> None:
    world.land(*split_offsets(A, 100), *split_offsets(B, 100))
    world.write_feed({**WIDER, "name": "string"})
    done = world.replay(fix=lambda record: None)
    assert (done.batches, done.trial.fit.total()) == ((), 0)
    assert (done.trial.left, done.trial.left_fit) == (2 * len(list_large() + list_broken()), 2 * len(list_large()))


def test_quarantined_records_are_counted_by_reason(world: Typed) -> None:
    world.land(*split_offsets(A, 50), *split_offsets(B, 100))
    listed = world.list_quarantined()
    top = listed.held[0]
    assert (top.start, top.kind.reason, top.kind.stage, top.first) == (
        START + HOUR,
        "not_json",
        "decode",
        "orders:0:101",
    )
    assert sum(h.records for h in listed.held) == 2 * len(list_large() + list_broken())
    refused = list_large() + list_broken()
    assert [(w.window, w.quarantined, w.relanded) for w in listed.windows] == [
        (world.feed.window.name(START + h * HOUR), 2 * len([o for o in refused if o // 100 == h]), 0) for h in (0, 1)
    ]
    assert world.list_quarantined(Filter(reasons=("nothing",))).held == ()


# -- rivals


def test_replay_is_refused_while_another_replay_is_live(world: Typed) -> None:
    world.land(*split_offsets(A, 50), *split_offsets(B, 100))
    world.write_feed(WIDER)
    rival = world.plan([world.build_range(B, 0, 100)], RequestKind.REPLAY, by="rival")
    with pytest.raises(PlanBusy, match=f"batch {rival} .*replay of quarantined records"):
        world.replay()
    assert world.preview().busy == {START: rival}
    world.liveness.dead.add("rival")
    assert len(world.replay().done) == 6
    assert world.state().batches[rival].status is BatchStatus.ABANDONED
    world.check()


def test_replay_fails_when_another_replay_lands_the_records_meanwhile(
    world: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.land((A, 0, 100))
    world.write_feed(WIDER)
    check_source = replaying.check_source

    def check_and_overtake(lake: Any, feed: str, part: Any) -> None:
        check_source(lake, feed, part)
        monkeypatch.setattr(replaying, "check_source", check_source)
        world.replay(by="another")

    monkeypatch.setattr(replaying, "check_source", check_and_overtake)
    with pytest.raises(LakeUnavailable, match="were merged"):
        world.replay()
    world.check()


def test_replay_does_not_create_a_ledger(world: Typed) -> None:
    """A ledger that begins without a request to Kafka would never know its cluster."""
    world.lake.files.clear()
    assert world.replay().done == ()
    assert world.lake.files == {}


def test_ranges_reserved_by_another_batch_are_skipped_and_reported(world: Typed) -> None:
    world.land(*split_offsets(A, 50), *split_offsets(B, 100))
    world.write_feed(WIDER)
    rival = world.plan([world.build_range(A, 60, 70)], by="replacing")
    done = world.replay()
    assert done.busy == {START: rival}
    assert len(done.done) == 5
    world.check()


# -- failures


@pytest.mark.slow
def test_a_crash_at_any_write_leaves_every_record_exactly_once(tmp_path: Path) -> None:
    landed = Typed(tmp_path)
    landed.land((A, 0, 100), (A, 100, 200), *split_offsets(B, 100))
    landed.write_feed(WIDER)
    before, files = {kind: sorted(landed.list_positions(kind)) for kind in PartKind}, landed.list_files()
    crashed, at = 0, 0
    while crashed == at:
        world = landed.fork()
        with contextlib.suppress(Died), crash_after(world.lake, at):
            world.replay(Filter(windows=frozenset({START})))
            at -= 1
        crashed, at = crashed + 1, at + 1
        roll_forward(world.reopen_ledger(), world.lake, "orders")  # type: ignore[arg-type]
        world.check()
        now = {kind: sorted(world.list_positions(kind)) for kind in PartKind}
        published = any(r.relanded for r in world.list_receipts())
        assert (now == before and world.list_files() == files) is not published
        assert sorted(now[PartKind.LANDED] + now[PartKind.QUARANTINED]) == [(p, o) for p in (0, 1) for o in range(200)]
        world.replay(by="next")
        assert sorted(world.list_positions()) == [(p, o) for p in (0, 1) for o in range(200) if o % 7 != 3]
        assert list(world.lake.list(paths.staging_root("orders"))) == []
        noted = {paths.relanded_batch(p) for p in world.lake.list(paths.relanded_folder("orders"))}
        assert {world.state().batches[b].status for b in noted if b} == {BatchStatus.PUBLISHED}
        world.check()
    assert crashed > 12, "every write was tried"


@pytest.mark.parametrize("damage", ["flip", "gone"])
@pytest.mark.parametrize("kind", ["data", "quarantine"])
def test_missing_or_modified_part_is_never_used(damage: str, kind: str, world: Typed) -> None:
    world.land(*split_offsets(A, 100), *split_offsets(B, 100))
    world.write_feed(WIDER)
    candidates = find(world.feed, world.ports, world.reopen_ledger(), Filter(), None)  # type: ignore[arg-type]
    path = world.find_path(kind, 0)
    data = world.lake.files.pop(path)
    if damage == "flip":
        world.lake.files[path] = data[:100] + bytes([data[100] ^ 1]) + data[101:]
    with pytest.raises((ProofFailed, PartUnreadable), match=path):
        world.replay()
    assert (world.state().live(), len(candidates.fitting)) == ((), 4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"relanded": (Range(8, 9),), "mended": (Range(8, 9),)}, ""),
        ({"relanded": (Range(3, 4),)}, "I2: .*holds offset 3, which was re-landed"),
        ({"relanded": (Range(8, 9),), "mended": (Range(9, 10),)}, "I5: .*repaired records were never re-landed"),
        ({"relanded": (Range(98, 101),)}, "I5: .*3 re-landed records are not among"),
    ],
)
def test_audit_checks_relanded_and_fixed_offsets_of_receipts(world: Typed, changes: dict[str, Any], says: str) -> None:
    world.land((A, 100, 200), *split_offsets(B, 100))
    s = world.build_range(A, 0, 100)
    batch = world.plan([s])
    plan = world.ledger.plan(batch)
    publish(
        world.ledger, batch, owner("landing"), [replace(world.land_range(s, batch, plan.hash, 0, 1), **changes)], []
    )
    roll_forward(world.ledger, world.lake, "orders")  # type: ignore[arg-type]
    report = audit(world.reopen_ledger(), world.lake)  # type: ignore[arg-type]
    assert len(report.problems) == bool(says)
    assert all(re.search(says, str(p)) for p in report.problems)
