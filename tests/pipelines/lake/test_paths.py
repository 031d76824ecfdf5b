"""Paths in the lake: deterministic, distinct for distinct inputs, and parsed back to their inputs."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipelines.lake import paths
from sluice.pipelines.model.kafka import encode_topic
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.records.rows.row_format import landed_schema, offset_column
from sluice.pipelines.schema.schema import SchemaError, parse_schema

HOUR = 3_600_000
topics = st.text("abAB01._-", min_size=1, max_size=30).filter(lambda t: t not in (".", ".."))
offsets = st.integers(0, 1 << 62)
ranges = st.builds(OffsetRange, topics, st.integers(0, 1 << 31), st.just("id"), offsets, offsets)


def test_every_path_of_a_batch() -> None:
    s = OffsetRange("Orders.v1", 3, "id", 100, 250)
    assert paths.log_path("sales", 7) == "_sluice/sales/log/00000000000000000007.json"
    assert paths.checkpoint_path("sales", 7) == "_sluice/sales/checkpoints/00000000000000000007.json"
    assert paths.owner_path("sales", "t0k") == "_sluice/sales/owners/t0k.json"
    assert paths.staging_folder("sales", 12) == "_sluice/sales/staging/12"
    assert paths.receipt_path("sales", 12, "a-1", s) == (
        "_sluice/sales/staging/12/a-1/~orders.v1-3-100-250.receipt.json"
    )
    name = paths.part_name(s, 12)
    assert name == "~orders.v1-3-100-250-b12.parquet"
    assert paths.part_name(s, 12, 2) == "~orders.v1-3-100-250-b12-2.parquet"
    assert paths.part_path("sales", PartKind.LANDED, "", name) == f"data/sales/{name}"
    assert paths.part_path("sales", PartKind.QUARANTINED, "", name) == f"quarantine/sales/{name}"
    staged = paths.staged_path("sales", 12, "a-1", PartKind.LANDED, "date=2026-11-20/hour=14", name)
    assert staged == f"_sluice/sales/staging/12/a-1/data/date=2026-11-20/hour=14/{name}"


def test_windows_are_days_and_hours_in_utc() -> None:
    start = 1_795_183_200_000  # 2026-11-20T14:00:00Z
    new, old = paths.PREFIX, paths.FORMER_PREFIX
    assert paths.window_folder(start, HOUR, new) == "kafka_window_date=2026-11-20/kafka_window_hour=14"
    assert paths.window_folder(start, HOUR, old) == "date=2026-11-20/hour=14"
    assert paths.window_folder(None, 24 * HOUR, new) == "kafka_window_date=__HIVE_DEFAULT_PARTITION__"
    assert paths.window_folder(None, 24 * HOUR, old) == "date=__HIVE_DEFAULT_PARTITION__"
    above = "_sluice/sales/windows"
    assert paths.window_path("sales", start, HOUR) == f"{above}/2026-11/2026-11-20T1400-1h.json"
    assert paths.window_path("sales", start + HOUR // 4, HOUR // 4) == f"{above}/2026-11/2026-11-20T1415-15m.json"
    assert paths.former_window_path("sales", start, HOUR) == f"{above}/2026-11-20T1400-1h.json"
    assert paths.window_folder(start + HOUR // 4, HOUR // 4, old) == "date=2026-11-20/hour=14/minute=15"
    assert paths.window_folder(0, 24 * HOUR, old) == "date=1970-01-01"


@given(
    st.none() | st.integers(0, 253_402_300_799_999),
    st.sampled_from((HOUR // 4, HOUR, 24 * HOUR)),
    st.sampled_from((paths.PREFIX, paths.FORMER_PREFIX)),
)
def test_a_window_folder_is_recognized_by_its_own_keys_only(
    window: int | None, length: int, prefix: paths.FolderPrefix
) -> None:
    folder = paths.window_folder(window, length, prefix)
    assert paths.prefix_of(folder) == prefix
    assert tuple(level.partition("=")[0] for level in folder.split("/")) == paths.folder_keys(length, prefix)
    others = [(n, p) for n in (HOUR // 4, HOUR, 24 * HOUR) for p in (paths.PREFIX, paths.FORMER_PREFIX)]
    assert [o for o in others if paths.is_window_folder(folder, *o)] == [(length, prefix)]


@pytest.mark.parametrize("length", [HOUR // 4, HOUR, 24 * HOUR])
def test_no_column_of_a_feed_can_have_the_name_of_a_folder_key(length: int) -> None:
    for key in paths.folder_keys(length, paths.PREFIX):
        assert key not in landed_schema(None).names + landed_schema(parse_schema({"a": "int64"})).names
        with pytest.raises(SchemaError):
            parse_schema({key.upper(): "int64"})


def test_manifests_and_reports_are_recognized_with_and_without_level() -> None:
    start = 1_795_183_200_000
    for make_path in (paths.window_path, paths.former_window_path):
        assert paths.manifest_window(make_path("sales", start, HOUR)) == (start, HOUR)
    assert paths.manifest_window("_sluice/sales/windows/2026-10/2026-11-20T1400-1h.json") is None
    assert paths.batch_page_path("sales", 43_801) == "_sluice/sales/reports/43/43801.html"
    assert paths.batch_page_path("sales", 7, "abc") == "_sluice/sales/reports/0/7-abc.html"
    for page in (paths.batch_page_path, paths.former_batch_page_path):
        assert paths.page_batch(page("sales", 43_801)) == 43_801
        assert paths.page_batch(page("sales", 43_801, "abc")) == 43_801


@given(ranges, st.integers(0, 1 << 40), st.integers(0, 1000))
def test_part_name_contains_its_range(s: OffsetRange, batch: int, sequence: int) -> None:
    name = paths.part_name(s, batch, sequence)
    expected = paths.PartName(encode_topic(s.topic), s.partition, s.start, s.end, batch, sequence)
    assert paths.parse_part(f"data/sales/date=2026-11-20/hour=14/{name}") == expected


@given(st.tuples(ranges, st.integers(0, 99)), st.tuples(ranges, st.integers(0, 99)))
def test_different_ranges_have_different_names(one: tuple[OffsetRange, int], other: tuple[OffsetRange, int]) -> None:
    names = [paths.part_name(s, batch).lower() for s, batch in (one, other)]
    assert (names[0] == names[1]) == (one == other)


@given(ranges, st.integers(0, 1 << 40))
def test_staged_files_are_distinguished(s: OffsetRange, batch: int) -> None:
    receipt = paths.receipt_path("sales", batch, "a-1", s)
    part = paths.staged_path("sales", batch, "a-1", PartKind.LANDED, "", paths.part_name(s, batch))
    assert paths.parse_receipt_path(receipt) == paths.name_range(s)
    assert paths.parse_receipt_path(part) is None
    assert paths.staged_batch(receipt) == paths.staged_batch(part) == batch


@given(st.integers(0, 10**20 - 1))
def test_numbers_of_entries_sort_as_names(number: int) -> None:
    assert paths.log_number(paths.log_path("sales", number)) == number
    assert paths.checkpoint_number(paths.checkpoint_path("sales", number)) == number


@pytest.mark.parametrize("path", ["data/sales/x.parquet", "a-1-2-3.parquet", "a-1-2-3-b4.parquet.tmp", "", "a-b"])
def test_foreign_names_are_not_recognized(path: str) -> None:
    assert paths.parse_part(path) is None
    assert paths.staged_batch(path) is None
    assert paths.parse_receipt_path(path) is None
    assert paths.log_number(path) is None


def test_the_offset_column_of_raw_and_typed_feeds() -> None:
    assert offset_column(pa.schema([("offset", pa.int64())])) == "offset"
    assert offset_column(pa.schema([("offset", pa.string()), ("kafka_offset", pa.int64())])) == "kafka_offset"


def test_roots_contain_every_visible_part() -> None:
    assert paths.visible_roots("sales") == ("data/sales", "quarantine/sales")
