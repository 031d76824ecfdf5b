"""`examples/read_lake.py` reads each lake as `sluice.read` does, or refuses as it does; the specification is complete.

The example follows docs/lake-format.md and imports nothing of Sluice.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pyarrow as pa
import pytest
from hypothesis import given, settings

from sluice import reading
from sluice import testing as sluice_testing
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.ledger import entries
from sluice.pipelines.ledger.entries import (
    CORRECTED_FORMAT,
    NEWEST_FORMATS,
    Boundaries,
    Entry,
    GapEntry,
    OriginItem,
)
from sluice.pipelines.maintenance.expiry import RetireRequest, expire
from sluice.pipelines.model.kafka import Range, Tail
from sluice.pipelines.model.plans import OffsetRange, Plan, Request, Task, name_in_json
from sluice.pipelines.model.receipts import Counts, Owner, Part, PartKind, Receipt, SharedFile
from sluice.pipelines.operating.acceptance import AcceptEvent, accept_log, accept_lost
from tests.checker import test_understood
from tests.checker.ledger import parse_entry
from tests.checker.planted import ONE, ZERO, Sound
from tests.examples import scale_examples
from tests.pipelines import landed_world
from tests.pipelines.batch.test_batch import PARTITIONS
from tests.pipelines.landed_world import HOUR, START, A, B, split_offsets
from tests.pipelines.maintenance.test_erasure import erase

ROOT = Path(__file__).parents[1]
EXAMPLE, PAGE = ROOT / "examples" / "read_lake.py", ROOT / "docs" / "lake-format.md"
LAKES = ROOT / "tests" / "pipelines" / "ledger" / "lakes"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("read_lake", EXAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Rows = list[dict[str, Any]] | None


def read_by_example(example: ModuleType, feed: Feed, window: int, kind: str) -> Rows:
    """Returns the rows; None if the example refuses."""
    end = feed.window.end_of(window)
    try:
        return sort(list(example.read_window(Path(feed.lake), feed.stored, window, end, kind, feed.output)))
    except ValueError:
        return None


def read_by_sluice(feed: Feed, window: int, kind: str) -> Rows:
    try:
        return sort([reading.of_feed(feed, window, kind=kind).arrow()])
    except SluiceError:
        return None


def sort(tables: list[pa.Table]) -> list[dict[str, Any]]:
    """Returns the rows of tables, without nulls: older files lack columns."""
    rows = ({k: v for k, v in row.items() if v is not None} for table in tables for row in table.to_pylist())
    return sorted(
        rows, key=lambda r: (r.get("partition", r.get("kafka_partition")), r.get("offset", r.get("kafka_offset")))
    )


def compare(example: ModuleType, feed: Feed, folder: Path) -> list[int]:
    """Compare both readers for all windows around the boundaries. Returns the numbers of rows of complete ones."""
    feed = feed.model_copy(update={"lake": str(folder)})
    feed = feed.model_copy(update={"outputs": tuple(o.model_copy(update={"lake": str(folder)}) for o in feed.outputs)})
    times = {t for path in folder.glob("_sluice/*/log/*.json") for t in list_times(parse_entry(path.read_bytes()))}
    numbers = list[int]()
    for window in sorted({w for t in times for w in (feed.window.before(t), feed.window.start_of(t)) if w >= 0}):
        for kind in PartKind:
            for dataset in (
                feed.datasets if kind is PartKind.LANDED else (*feed.datasets, *((feed,) if feed.split else ()))
            ):
                theirs, ours = read_by_example(example, dataset, window, kind), read_by_sluice(dataset, window, kind)
                assert theirs == ours, (window, dataset.output, kind)
                numbers += [] if ours is None else [len(ours)]
    return numbers


def list_times(entry: dict[str, Any]) -> Iterator[int]:
    items = entry.get("items", ()) if entry["kind"] in ("boundary", "origin") else ()
    for item in items:
        yield from item.get("times", (item["opens"],) if item.get("opens") is not None else ())


@pytest.mark.parametrize("name", sorted(p.name for p in LAKES.iterdir()))
def test_lakes_of_earlier_releases_are_read(example: ModuleType, name: str) -> None:
    numbers = compare(example, load_feed(LAKES / name / "orders.yaml", {}), LAKES / name / "lake")
    assert sum(numbers) > 10


def land_plain(world: landed_world.World) -> None:
    world.land(*split_offsets(A, 10), *split_offsets(B, 25), bad=1)


def land_and_compact(world: landed_world.World) -> None:
    land_plain(world)
    world.compact()


def land_and_expire(world: landed_world.World) -> None:
    land_plain(world)
    expire(world.reopen_ledger(), world.lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness)


def land_and_erase(world: landed_world.World) -> None:
    land_and_compact(world)
    erase(world, {A: (Range(3, 9), Range(96, 104)), B: (Range(120, 121),)})
    world.compact()


def lose_entries(world: landed_world.World) -> None:
    world.land(*split_offsets(A, 25))
    ledger = world.reopen_ledger()
    ledger.append(lambda s: GapEntry(next=s.number + 5, evidence=(), reason="restored"))
    world.ledger = world.reopen_ledger()
    world.land(*split_offsets(B, 25))


@pytest.mark.parametrize("shares", [False, True], ids=["", "shared"])
@pytest.mark.parametrize("act", [land_plain, land_and_compact, land_and_expire, land_and_erase, lose_entries])
def test_rewritten_lakes_are_read(
    example: ModuleType,
    tmp_path: Path,
    act: Callable[[landed_world.World], None],
    shares: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the lakes with shared files, all entries are compressed."""
    monkeypatch.setattr(entries, "PACKED_FROM", 0 if shares else entries.PACKED_FROM)
    world = landed_world.World(tmp_path, shares=shares)
    act(world)
    folder = test_understood.write_files(world.lake.files, tmp_path / "lake").root
    assert sum(compare(example, world.feed, folder)) >= 100


@pytest.mark.parametrize("event", [AcceptEvent.RECREATED, AcceptEvent.TRUNCATED, None])
def test_lakes_with_losses_and_other_lives_are_read(
    example: ModuleType, tmp_path: Path, event: AcceptEvent | None
) -> None:
    sound = Sound(tmp_path)
    sound.grow()
    if event is None:
        sound.produce(ZERO, 6)
        sound.world.topic.log_start = 21
        accept_lost(sound.world.feed, sound.world.make_ports(), "retention")
    elif event is AcceptEvent.RECREATED:
        sound.world.topic.topic_id, sound.world.topic.batches = "id-2", {tp: [] for tp in PARTITIONS}
    else:
        sound.world.topic.batches[ZERO].pop()
    if event:
        accept_log(sound.world.feed, sound.world.make_ports(), event, "a test")
        sound.name_prefix = "q"
        sound.produce(ZERO, 2)
        sound.produce(ONE, 1)
    sound.land()
    assert sum(compare(example, sound.world.feed, sound.write_lake().root)) > 5


@settings(max_examples=scale_examples(30))
@given(history=test_understood.histories, shared=...)
def test_lakes_of_random_histories_are_read(
    example: ModuleType, tmp_path_factory: pytest.TempPathFactory, history: Any, shared: bool
) -> None:
    random = test_understood.RandomHistory(tmp_path_factory.mktemp("any"), *history, shared=shared)
    compare(example, random.sound.world.feed, random.sound.write_lake().root)


def test_outputs_of_a_split_feed_are_read(example: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "feeds" / "orders.yaml"
    path.parent.mkdir()
    split = "{by: {field: kind}, into: {a: {schema: {n: int64}}, b: {schema: {n: int64}}}, tombstones: all}"
    path.write_text(f"kafka: {{bootstrap: 'a:1'}}\ntopics: orders\nstart: earliest\nformat: json\nsplit: {split}\n")
    values = [b'{"kind": "a", "n": 1}', None, b'{"kind": "b", "n": 2}', b'{"kind": "b", "n": "x"}', b"no json"]
    lake = tmp_path / "lake"
    for _ in range(2):
        sluice_testing.land(path, [sluice_testing.Message(v) for v in values], lake=lake, environ={})
    assert sum(compare(example, load_feed(path, {}), lake)) == 2 * (
        4 + 1 + 2
    )  # landed, quarantined of `b`, quarantined of the feed


def test_the_command_lists_rows_without_sluice(tmp_path: Path) -> None:
    path = tmp_path / "feeds" / "orders.yaml"
    path.parent.mkdir()
    path.write_text("kafka: {bootstrap: 'a:1'}\ntopics: orders\nstart: earliest\nformat: json\nschema: {n: int64}\n")
    lake = tmp_path / "lake"
    sluice_testing.land(path, [sluice_testing.Message(b'{"n": 1}')] * 3, lake=lake, environ={})
    words = [sys.executable, "-I", EXAMPLE, lake, "orders", "2026-01-01T00:00", "2026-01-01T01:00"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert [json.loads(line)["n"] for line in done.stdout.splitlines()] == [1, 1, 1]
    refused = subprocess.run([*words[:-2], "2026-01-01T01:00", "2026-01-01T02:00"], capture_output=True, check=False)
    assert b"not complete" in refused.stderr


def test_the_example_is_short_and_imports_pyarrow_alone() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 150
    imported = {n.module for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)} | {
        a.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import) for a in n.names
    }
    assert {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names} == {"pyarrow.parquet"}


@pytest.mark.parametrize("damage", ["hole", "kind", "format", "replaced", "file", "packed kind"])
def test_damaged_lakes_are_refused(example: ModuleType, tmp_path: Path, damage: str) -> None:
    world = landed_world.World(tmp_path)
    land_plain(world)
    folder = test_understood.write_files(world.lake.files, tmp_path / "lake").root
    log = sorted((folder / "_sluice" / "orders" / "log").iterdir())
    entry = json.loads(log[-1].read_bytes())
    match damage:
        case "hole":
            log[2].unlink()
        case "kind":
            log[-1].write_text(json.dumps(entry | {"kind": "leap"}))
        case "packed kind":
            line = json.dumps(entry | {"kind": "leap"}).encode()
            head = {"follows": entry["follows"], "format": 9, "kind": "leap", "number": entry["number"]}
            head |= {"packed": b64encode(zlib.compress(line)).decode(), "size": len(line)}
            log[-1].write_text(json.dumps(head, separators=(",", ":")))
        case "format":
            log[-1].write_text(json.dumps(entry | {"format": 4}))
        case "replaced":
            log[-2].write_bytes(log[-2].read_bytes() + b" ")
        case "file":
            for path in folder.glob("data/orders/**/*.parquet"):
                path.unlink()
    feed = world.feed.model_copy(update={"lake": str(folder)})
    assert read_by_example(example, feed, START, PartKind.LANDED) is None
    if damage == "replaced":
        return
    assert read_by_sluice(feed, START, PartKind.LANDED) is None


# -- the page


def read_table(heading: str) -> dict[str, list[str]]:
    """Returns the rows of the first table below a heading of the page, by their first cell."""
    section = re.split(rf"^#+ {heading}$", PAGE.read_text(), flags=re.MULTILINE)[1].partition("\n##")[0]
    rows = [[c.strip() for c in line.strip("|").split(" | ")] for line in section.splitlines() if line.startswith("| ")]
    return {row[0].strip("`"): row for row in rows[1:]}


def list_words(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def test_the_page_has_all_kinds_of_entries_with_formats_and_fields() -> None:
    table = read_table("Entries")
    assert {kind: int(row[1]) for kind, row in table.items()} == dict(NEWEST_FORMATS)
    common = list_words("".join(row[0] for row in read_table("The ledger").values()))
    parts = {"key", "range", "offset", "leaves", "enters", "origin"}
    for model in get_args(Entry):
        kind = model.model_fields["kind"].default
        nested = {"origin": OriginItem, "boundary": Boundaries}.get(kind)
        names = {*model.model_fields, *(nested.model_fields if nested else ())}
        documented = list_words(table[kind][2]) | common
        assert names - documented == set(), kind
        assert documented - names - parts == set(), kind


@pytest.mark.parametrize(
    ("heading", "values"),
    [
        ("Receipts", (Receipt, Counts, Part, SharedFile, Tail)),
        ("Plans", (Plan, Request, Task, OffsetRange, Owner)),
    ],
)
def test_the_page_names_each_field_of_receipts_and_plans(heading: str, values: tuple[Any, ...]) -> None:
    section = re.split(rf"^### {heading}$", PAGE.read_text(), flags=re.MULTILINE)[1].partition("\n##")[0]
    names = {name_in_json(f.name) for of in values for f in fields(of)} - {"elsewhere"}
    assert names - list_words(section) == set()


def test_the_example_reads_all_formats_but_corrected_types(example: ModuleType) -> None:
    assert NEWEST_FORMATS | {"schema": CORRECTED_FORMAT - 1} == example.NEWEST  # type: ignore[operator]
