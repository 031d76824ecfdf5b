"""A lake's folder may have any name: no reader takes it for a pattern, nor a column's name for SQL."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.publishing.published_files import File
from sluice.reading import Windows, _escape_glob
from sluice.resources.lake import open_store
from tests.stores import Store

EVIL = '"; drop table t; --'
FOLDERS = ["*", "a?", "[ab]", "{a,b}", "~", "a b", "x'y\"z", "$(id)", "s3:", "%2e%2e", "a\\b"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_exactly_the_named_files_are_read(tmp_path: Path, folder: str) -> None:
    (tmp_path / "feeds").mkdir()
    (tmp_path / "feeds" / "orders.yaml").write_text("kafka: {bootstrap: '127.0.0.1:9'}\ntopics: t\nstart: earliest\n")
    feed = load_feed(tmp_path / "feeds" / "orders.yaml", {})
    for name, value in ((folder, 1), ("a", 2), ("b", 3), ("ab", 4)):
        (tmp_path / name).mkdir(exist_ok=True)
        table = pa.table({EVIL: pa.array([value], pa.int64()), "t": pa.array([0], pa.timestamp("ms"))})
        pq.write_table(table, tmp_path / name / "x.parquet")
    address = str(tmp_path / folder / "x.parquet")
    digest = hashlib.sha256(Path(address).read_bytes()).hexdigest()
    file = File(0, PartKind.LANDED, address, "x.parquet", "t", 0, 0, 1, 1, 1, digest)
    windows = Windows(feed, (0,), PartKind.LANDED, (file,), table.schema)
    assert windows.arrow().column(EVIL).to_pylist() == [1]
    assert windows.polars().collect()[EVIL].to_list() == [1]
    with duckdb.connect() as db:
        relation = windows.duckdb(db)
        assert (relation.columns, relation.project("columns(*)").fetchall()[0][0]) == ([EVIL, "t"], 1)


@pytest.mark.parametrize("folder", FOLDERS)
def test_pattern_characters_are_escaped_for_hadoop(folder: str) -> None:
    """Spark takes paths for Hadoop's glob patterns; the pattern without its backslashes is the path."""
    assert re.sub(r"\\(.)", r"\1", _escape_glob(folder)) == folder
    assert not re.search(r"(?<!\\)[*?\[\]{}]", _escape_glob(folder).replace("\\\\", ""))


def test_bucket_keys_that_are_not_paths_are_ignored(s3_store: Store) -> None:
    """S3 accepts any key; listings for maintenance return only objects that can be read and removed."""
    lake, client = open_store(s3_store.make_address(), s3_store.settings), s3_store.open_client()
    lake.put("a/x", b"")
    above = lake.locate("a").removeprefix(f"s3://{s3_store.bucket}/")
    for name in ("/y", "../y", "b/../../../y", "./y", "b//y", "folder/"):
        client.put_object(Bucket=s3_store.bucket, Key=f"{above}/{name}")
    client.create_multipart_upload(Bucket=s3_store.bucket, Key=f"{above}/../y")
    assert list(lake.list("a")) == ["a/x"]
    assert list(lake.list_unfinished("a")) == []
