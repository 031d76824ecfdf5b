"""The lake in memory: order of names, counters, and hooks."""

from __future__ import annotations

from contextlib import suppress

import pytest

from sluice.pipelines.errors import Unknown
from sluice.testing.lake import MemoryLake


def test_memory_lake_lists_by_folder_in_order_and_counts_requests() -> None:
    lake = MemoryLake()
    for path in ("a/2", "a/1", "ab/1", "a/1/x"):
        assert lake.put_if_absent(path, b"")
    assert not lake.put_if_absent("a/1", b"other")
    assert list(lake.list("a")) == ["a/1", "a/1/x", "a/2"]
    assert list(lake.list("a", "a/1")) == ["a/1/x", "a/2"]
    lake.remove("a/1")
    assert list(lake.list("a/")) == ["a/1/x", "a/2"]
    assert (lake.requests["put"], lake.requests["list"]) == (5, 3), "a put that is refused is asked, too"


def test_files_of_the_memory_lake_can_be_changed_directly() -> None:
    lake = MemoryLake({"a/2": b"2"})
    lake.files["a/1"] = b"1"
    lake.files |= {"a/3": b"3"}
    del lake.files["a/2"]
    assert list(lake.list("a")) == ["a/1", "a/3"]
    lake.files.clear()
    assert list(lake.list("a")) == []
    lake.files = {"b/1": b""}
    assert list(lake.list("b")) == ["b/1"]
    assert MemoryLake(lake.files).files == lake.files


def test_hook_runs_before_the_effect() -> None:
    lake = MemoryLake()
    lake.before["put_if_absent"] = lambda path: lake.put(path, b"a rival's")
    assert not lake.put_if_absent("a", b"mine")
    assert lake.get("a") == b"a rival's"


def test_put_each_if_absent_puts_files_one_by_one() -> None:
    lake = MemoryLake({"b": b"before"})
    lake.lose_answer_of.add("c")
    with pytest.raises(Unknown):
        lake.put_each_if_absent({"a": b"1", "b": b"2", "c": b"3", "d": b"4"})
    assert lake.files == {"a": b"1", "b": b"before", "c": b"3"}
    assert lake.put_each_if_absent({"c": b"", "d": b"4"}) == {"d"}


def test_put_with_a_lost_response_has_taken_effect() -> None:
    lake = MemoryLake()
    lake.lose_answer_of.add("a")
    with pytest.raises(Unknown):
        lake.put_if_absent("a", b"mine")
    assert not lake.put_if_absent("a", b"again")
    assert lake.files == {"a": b"mine"}


def test_file_does_not_appear_when_its_block_raises() -> None:
    lake = MemoryLake()
    with suppress(ValueError), lake.create("a") as file:
        file.write(b"x")
        raise ValueError("half way")
    assert lake.size("a") is None
