"""The guarantees of every lake: atomic writes, one creator, complete listings, no paths outside the lake."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.pipelines.errors import ProofFailed, Terminal
from sluice.pipelines.ports import Lake
from sluice.resources.lake import open_store
from sluice.resources.lake.local_lake import LocalLake
from tests.clouds import CloudStore
from tests.stores import Store

_numbers = itertools.count()


@pytest.fixture(params=["local", "s3", "azure", "google"])
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Lake]]:
    """Returns a function that creates an empty lake, for each kind of lake."""
    if request.param == "local":
        yield lambda: LocalLake(tmp_path / f"lake-{next(_numbers)}" / "of" / "ours")
        return
    if request.param == "s3":
        store: Store = request.getfixturevalue("s3_store")
        yield lambda: open_store(store.make_address(), store.settings)
        return
    cloud: CloudStore = request.getfixturevalue(f"{request.param}_store")
    yield lambda: open_store(cloud.make_address(), cloud.settings)


@pytest.fixture
def lake(fresh: Callable[[], Lake]) -> Lake:
    return fresh()


def list_files(lake: Lake) -> list[str]:
    return [p for p in lake.list("") if not p.startswith("_sluice/.probe")]


def test_put_if_absent_creates_once(lake: Lake) -> None:
    assert lake.put_if_absent("_sluice/f/log/1.json", b"one")
    assert not lake.put_if_absent("_sluice/f/log/1.json", b"two")
    assert not lake.put_if_absent("_sluice/f/log/1.json", b"one"), "equal bytes are not the same write"
    assert lake.get("_sluice/f/log/1.json") == b"one"
    assert list_files(lake) == ["_sluice/f/log/1.json"]


def test_put_each_if_absent_creates_each_file_once(lake: Lake) -> None:
    lake.put("_sluice/f/windows/2026-11/7.json", b"before")
    put = {f"_sluice/f/windows/2026-1{i % 2}/{i}.json": str(i).encode() * 300 for i in range(150)}
    assert lake.put_each_if_absent(put) == put.keys() - {"_sluice/f/windows/2026-11/7.json"}
    assert list_files(lake) == sorted(put)
    there = put | {"_sluice/f/windows/2026-11/7.json": b"before"}
    assert {path: lake.get(path) for path in put} == there
    assert lake.put_each_if_absent(dict.fromkeys(put, b"again")) == frozenset()
    assert lake.put_each_if_absent({}) == frozenset()
    assert {path: lake.get(path) for path in put} == there
    assert list(lake.list_unfinished("_sluice")) == []


def test_put_replaces(lake: Lake) -> None:
    lake.put("x", b"1")
    lake.put("x", b"22")
    assert (lake.get("x"), lake.size("x")) == (b"22", 2)
    assert list_files(lake) == ["x"]


def test_missing_file_has_no_content_and_no_size(lake: Lake) -> None:
    lake.put("folder/file", b"")
    assert (lake.get("folder/file"), lake.size("folder/file")) == (b"", 0)
    for path in ("nothing", "nothing/below", "folder/file/below"):
        assert lake.get(path) is None
        assert lake.size(path) is None
        with pytest.raises(FileNotFoundError):
            lake.open(path)
        lake.remove(path)
    assert lake.size("folder") is None


def test_created_file_appears_when_the_block_ends(lake: Lake) -> None:
    with lake.create("data/part.parquet") as file:
        pq.write_table(pa.table({"x": range(1000)}), file)
        assert lake.get("data/part.parquet") is None
        assert list_files(lake) == []
    with lake.open("data/part.parquet") as file:
        assert pq.read_table(file).num_rows == 1000
    assert list_files(lake) == ["data/part.parquet"]
    with lake.create("empty") as file:
        pass
    assert lake.get("empty") == b""


@pytest.mark.parametrize("stop", [RuntimeError, KeyboardInterrupt])
def test_create_leaves_nothing_when_the_block_raises(lake: Lake, stop: type[BaseException]) -> None:
    lake.put("x", b"before")
    for written in (b"half", bytes(12 << 20)):  # on S3 the second one has already begun its upload
        with pytest.raises(stop), lake.create("x") as file:  # noqa: PT012 - the block is the test
            file.write(written)
            raise stop
    assert list_files(lake) == ["x"]
    assert lake.get("x") == b"before"
    lake.put("_sluice/f/x", b"")
    assert list(lake.list_unfinished("_sluice/f")) == []


def test_file_is_read_from_any_position(lake: Lake) -> None:
    data = b"".join(i.to_bytes(4, "big") for i in range(500_000))
    lake.put("x", data)
    with lake.open("x") as file:
        assert file.read() == data
        assert file.read(1) == b""
        for at, size in ((0, 10), (1_999_990, 100), (700_001, 600_000), (1_300_001, 5), (3, 0), (2_000_100, 1)):
            assert file.seek(at) == at
            assert file.read(size) == data[at : at + size]
        assert file.seek(-4, 2) == 1_999_996
        assert file.read() == data[-4:]
        file.seek(0)
        assert b"".join(iter(lambda: file.read(70_001), b"")) == data


def test_list_is_in_path_order_and_starts_after_a_path(lake: Lake) -> None:
    paths = ["a", "a-b/x", "a.b", "d/1", "d/2/y", "d/2/z", "d/3", "d2", "d/10"]
    for path in paths:
        lake.put(path, b"")
    assert list(lake.list("")) == sorted(paths)
    assert list(lake.list("d")) == list(lake.list("d/")) == ["d/1", "d/10", "d/2/y", "d/2/z", "d/3"]
    assert list(lake.list("d", after="d/10")) == ["d/2/y", "d/2/z", "d/3"]
    assert list(lake.list("d", after="d/2/y")) == ["d/2/z", "d/3"]
    assert list(lake.list("nothing")) == list(lake.list("a")) == []


def test_folders_lists_direct_subfolders_only(lake: Lake) -> None:
    for path in ["a", "d/1", "d/x/2", "d/x/y/3", "d/w-1/4", "d/w.1/5", "e/6"]:
        lake.put(path, b"")
    assert list(lake.folders("d")) == list(lake.folders("d/")) == ["w-1", "w.1", "x"]
    assert list(lake.folders("e")) == list(lake.folders("nothing")) == list(lake.folders("a")) == []


NAMES = st.text("ab-./", min_size=1, max_size=5).filter(
    lambda p: all(part not in ("", ".", "..") for part in p.split("/"))
)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.sets(NAMES, max_size=6), NAMES)
def test_list_matches_sorted_paths(fresh: Callable[[], Lake], names: set[str], after: str) -> None:
    lake = fresh()
    there: set[str] = set()
    for name in names:
        if not any(name.startswith(f"{o}/") or o.startswith(f"{name}/") for o in there):
            lake.put(name, b"")
            there.add(name)
    assert list(lake.list("", after)) == sorted(n for n in there if n > after)


def test_show_is_idempotent_and_needs_its_source(lake: Lake) -> None:
    lake.put("staging/p", b"rows")
    lake.show("staging/p", "data/date=2026-11-20/p")
    lake.show("staging/p", "data/date=2026-11-20/p")
    assert lake.get("data/date=2026-11-20/p") == b"rows"
    lake.remove("staging/p")
    assert list_files(lake) == ["data/date=2026-11-20/p"]
    with pytest.raises(FileNotFoundError):
        lake.show("staging/p", "data/date=2026-11-20/p")


def test_show_does_not_replace_a_different_file(lake: Lake) -> None:
    lake.put("staging/p", b"rows")
    lake.put("data/p", b"other rows")
    with pytest.raises(ProofFailed):
        lake.show("staging/p", "data/p")
    assert lake.get("data/p") == b"other rows"


def test_remove_is_idempotent(lake: Lake) -> None:
    lake.put("staging/7/a/p", b"")
    lake.put("staging/8/q", b"")
    lake.remove("staging/7/a/p")
    lake.remove("staging/7/a/p")
    assert list(lake.list("staging")) == ["staging/8/q"]


@pytest.mark.parametrize(
    "path", ["", "/", "/etc/passwd", "..", "../x", "a/../../x", "a/./b", "a//b", "a/", "nul\0", "\ud800"]
)
def test_path_outside_the_lake_is_refused_by_every_call(lake: Lake, path: str) -> None:
    lake.put("a/b", b"")
    calls: list[Callable[[], object]] = [
        lambda: lake.put(path, b""),
        lambda: lake.put_if_absent(path, b""),
        lambda: lake.put_each_if_absent({"b": b"", path: b""}),
        lambda: lake.get(path),
        lambda: lake.size(path),
        lambda: lake.open(path),
        lambda: lake.remove(path),
        lambda: lake.locate(path),
        lambda: lake.show(path, "b"),
        lambda: lake.show("a/b", path),
        lambda: lake.create(path).__enter__(),
    ]
    for call in calls:
        with pytest.raises(Terminal, match="no path inside the lake"):
            call()


def test_too_long_name_is_an_error(lake: Lake) -> None:
    with pytest.raises(Terminal, match="x" * 200):
        lake.put("x" * 1100, b"")
    assert list_files(lake) == []


def test_discard_of_a_finished_file_is_refused(lake: Lake) -> None:
    lake.put("d/x", b"whole")
    with pytest.raises(Terminal):
        lake.discard("d/x")
    assert list_files(lake) == ["d/x"]


def test_pickled_lake_reads_the_same_files(lake: Lake) -> None:
    lake.put("p", b"here")
    other = pickle.loads(pickle.dumps(lake))
    assert (other.get("p"), other.locate("p"), other.uri) == (b"here", lake.locate("p"), lake.uri)
