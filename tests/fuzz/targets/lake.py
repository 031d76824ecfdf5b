"""Files of a lake, written by anyone with access to it: ledgers, checkpoints, receipts, heartbeats, manifests, and
names of files.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from unittest.mock import patch

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.audit.strict_audit import _stands_right
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.lake import paths
from sluice.pipelines.landing.proof import read_receipts
from sluice.pipelines.ledger import Ledger, State, checkpoint
from sluice.pipelines.ledger import entries as ledger_entries
from sluice.pipelines.ledger.entries import (
    AbandonEntry,
    AcceptEntry,
    CommitEntry,
    Entering,
    IntentEntry,
    KeyOffset,
    KeyRange,
    LossEntry,
    MovedEntry,
    OriginItem,
    OwnEntry,
    RetireEntry,
    SchemaEntry,
    SkipEntry,
)
from sluice.pipelines.model.kafka import Key, Range, decode_topic
from sluice.pipelines.model.plans import RequestKind, to_json
from sluice.pipelines.model.receipts import PartKind, Tally
from sluice.pipelines.planning.schema_changes import find_columns, shape_named
from sluice.pipelines.publishing.publish import roll_forward
from sluice.resources import liveness
from sluice.testing.engine import owner
from sluice.testing.lake import MemoryLake
from tests.fuzz.mutation import mutate_bytes, mutate_json
from tests.fuzz.target import Target
from tests.pipelines.landed_world import HOUR, START, A, B, World

_LOG = paths.log_folder("orders")
_COLUMNS = {"id": "int64 not null", "l": "list<struct<a:string>>", "d": "decimal(12,2)"}
_CONTRACT = '[{"kwargs":{"column":"id"},"severity":"critical","type":"expect_column_values_to_not_be_null"}]'


@cache
@patch.object(ledger_entries, "PACKED_FROM", 900)
def _make_world() -> World:
    """Build a lake with an entry of each kind; the large ones are compressed."""
    world = World(Path(tempfile.mkdtemp()))
    entries = [
        SchemaEntry(shape="raw", columns=None),
        SchemaEntry(shape="json-1", columns=_COLUMNS, contract=_CONTRACT, evolved={"d": "decimal(12,2)"}),
        IntentEntry(offsets=(KeyOffset(key=A, offset=50),)),
        CommitEntry(mode="transactional", mark=4, offsets=(KeyOffset(key=A, offset=50),)),
        LossEntry(ranges=(KeyRange(key=A, range=Range(100, 110)),), reason="gone"),
        SkipEntry(ranges=(KeyRange(key=B, range=Range(100, 120)),), reason="not wanted"),
        MovedEntry(offsets=(KeyOffset(key=B, offset=7),), reason="by hand"),
        RetireEntry(
            before=START, ranges=(KeyRange(key=B, range=Range(0, 10)),), parts=("data/orders/x",), reason="old"
        ),
    ]
    world.land((A, 0, 100), bad=2)
    world.land((B, 0, 100), gaps=2)
    for e in entries:
        world.ledger.append(lambda s, e=e: e)  # type: ignore[misc]
    live = world.plan([world.build_range(A, 110, 150)], RequestKind.WINDOW)
    abandoned = world.plan([world.build_range(B, 120, 150)])
    enters = OriginItem(key=Key("orders", 1, "id-2"), offset=0, committed=3, why="recreated")
    for e in (
        OwnEntry(batch=live, owner=owner("another")),
        AbandonEntry(batch=abandoned, reason="no more"),
        AcceptEntry(event="recreated", items=(Entering(leaves=B, enters=enters),), reason="so be it"),
    ):
        world.ledger.append(lambda s, e=e: e)  # type: ignore[misc]
    return world


# -- ledgers: a line is an entry


def _make_ledger_seeds() -> list[bytes]:
    files = _make_world().lake.files
    return [b"".join(files[p] for p in sorted(files) if p.startswith(_LOG))]


def _mutate_lines(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    lines = data.split(b"\n")
    for _ in range(1 << random.randrange(2)):
        at = random.randrange(len(lines))
        match random.randrange(8):
            case 0:
                lines[at : at + 1] = []
            case 1:
                lines[at:at] = [random.choice(lines)] if lines else []
            case _:
                lines[at : at + 1] = [mutate_json(random, line, others) for line in lines[at : at + 1]]
        lines = lines or [b""]
    return b"\n".join(lines)


def _run_ledger(data: bytes) -> str:
    lake = MemoryLake()
    lake.files = {p: d for p, d in _make_world().lake.files.items() if not p.startswith(_LOG)}
    for number, line in enumerate(data.rstrip(b"\n").split(b"\n")):
        lake.files[paths.log_path("orders", number)] = line
    ledger = Ledger(lake, "orders", lambda: START + 9 * HOUR)
    try:
        state = ledger.read()
    except SluiceError as error:
        return _check_error(error)
    _query_state(state, ledger)
    return _repair_and_audit(ledger, lake)


def _check_error(error: SluiceError) -> str:
    assert "/log/" in error.message or "ledger of feed orders" in error.message
    return type(error).__name__


def _query_state(state: State, ledger: Ledger) -> None:
    """Make the queries that commands make of a state."""
    # Partitions without an origin are in no checkpoint.
    reloaded = checkpoint.load(checkpoint.dump(state))
    assert reloaded is not None
    assert (reloaded.number, reloaded.frontiers()) == (state.number, state.frontiers())
    assert checkpoint.dump(reloaded) == checkpoint.dump(state)
    for key in state.known():
        state.holes(key)
        state.list_reserved(key)
    for batch in state.batches.values():
        assert batch.owner.describe()
    for name in state.shapes:
        shape_named(ledger, state, name)
    find_columns(_make_world().feed, state)


def _repair_and_audit(ledger: Ledger, lake: MemoryLake) -> str:
    """Roll the ledger forward and audit it; return the outcome of each."""
    outcomes = []
    for act in (lambda: roll_forward(ledger, lake, "orders"), lambda: audit(ledger, lake)):
        try:
            act()  # type: ignore[no-untyped-call]
            outcomes.append("done")
        except SluiceError as error:
            outcomes.append(type(error).__name__)
    return " ".join(outcomes)


# -- checkpoints


def _make_checkpoint_seeds() -> list[bytes]:
    return [checkpoint.dump_state(_make_world().state())]


def _run_checkpoint(data: bytes) -> str:
    state = checkpoint.load(data)
    if state is None:
        return "passed over"
    lake = MemoryLake()
    lake.files = dict(_make_world().lake.files)
    lake.put(paths.checkpoint_path("orders", _make_world().state().number), data)
    try:
        Ledger(lake, "orders", lambda: 1).read().frontiers()
    except SluiceError as error:
        return type(error).__name__
    return "a state"


# -- receipts, heartbeats, manifests: one document each, read in turn


def _make_document_seeds() -> list[bytes]:
    world = _make_world()
    receipts = [r for n, e in world.reopen_ledger().entries() if e.kind == "publish" for r in e.receipts]
    more = replace(receipts[0], tallies=(Tally(0, 100, 2, (1, 2)),), relanded=(Range(3, 4),), timings={"wait": 3})
    heartbeat = {"run": "r", "host": "h", "pid": 7, "started": 3, "at": 5, "machine": liveness.machine()}
    manifests = [d for p, d in world.lake.files.items() if "/windows/" in p]
    documents = [to_json(r).encode() for r in (*receipts, more)]
    return [*documents, json.dumps(heartbeat).encode(), *manifests, _CONTRACT.encode(), b"{}"]


def _run_document(data: bytes) -> str:
    world = _make_world()
    lake = MemoryLake()
    locations = [
        paths.receipt_path("orders", 5, "a", world.build_range(A, 0, 100)),
        paths.owner_path("orders", "token"),
        paths.window_path("orders", START, HOUR),
    ]
    for path in locations:
        lake.put(path, data)
    receipts = read_receipts(locations[0], lake)
    liveness._stamp(data), liveness._owner(locations[1], data), liveness._process_gone(data)
    problems = list(_stands_right(lake, locations[2], _read_state()))
    return f"{len(receipts)} {[p.invariant for p in problems]}"


@cache
def _read_state() -> State:
    return _make_world().state()


# -- names


def _make_name_seeds() -> list[bytes]:
    files = list(_make_world().lake.files)
    more = [
        "_sluice/orders/owners/t.json",
        "_sluice/orders/relanded/3/a-0-1-2.parquet",
        "a.b",
        "data/x/a%2Fb-0-1-2-b3-4.parquet",
    ]
    return [p.encode() for p in (*files, *more)]


def _run_name(data: bytes) -> str:
    """Parse a name of at most 1,024 bytes, the limit of S3; no store allows more."""
    path = data[:1024].decode("utf-8", "surrogateescape")
    parsed = [
        paths.log_number(path),
        paths.checkpoint_number(path),
        paths.staged_batch(path),
        paths.manifest_window(path),
        paths.owner_token(path),
        paths.relanded_batch(path),
        paths.parse_receipt_path(path),
        part := paths.parse_part(path),
    ]
    paths.folder_of(path, "orders", PartKind.LANDED)
    for text in {path, part.topic if part else ""}:
        with suppress(ValueError):
            decode_topic(text)
    return " ".join(str(i) for i, f in enumerate(parsed) if f is not None)


LEDGER = Target("ledger", _make_ledger_seeds, _run_ledger, _mutate_lines)
CHECKPOINTS = Target("checkpoints", _make_checkpoint_seeds, _run_checkpoint, mutate_json)
DOCUMENTS = Target("documents", _make_document_seeds, _run_document, mutate_json)
NAMES = Target("names", _make_name_seeds, _run_name, mutate_bytes)
