"""The files of a lake: the ledger's entries as raw JSON, Parquet files by pyarrow. Uses no code of Sluice."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tests.checker.facts import EvidenceError, Record
from tests.checker.ledger import parse_entry

_NUMBER = re.compile(r"([0-9]{20})\.json")
_SEGMENT = re.compile(r"([0-9]{20})-([0-9]{20})\.json")


@dataclass(frozen=True)
class Rows:
    """The rows of a Parquet file, in the file's order; `typed` are the typed columns of each row, if any."""

    records: tuple[Record, ...]
    partitions: tuple[tuple[str, int], ...]
    typed: tuple[dict[str, Any], ...]
    has_value: bool
    metadata: dict[str, str]
    reasons: tuple[str, ...] = ()
    """Why each record is in quarantine."""
    tombstones: tuple[bool, ...] = ()
    """Of typed rows: whether the record has no value."""

    @property
    def offsets(self) -> list[int]:
        return [r.offset for r in self.records]

    def slice(self, first: int, rows: int) -> Rows:
        """Returns one offset range's rows of a shared file."""
        own = slice(first, first + rows)
        records, partitions, typed = (x[own] for x in (self.records, self.partitions, self.typed))
        reasons, tombstones = self.reasons[own], self.tombstones[own]
        return Rows(records, partitions, typed, self.has_value, self.metadata, reasons, tombstones)


@dataclass(frozen=True)
class Segment:
    """An object with copies of old entries. `name_range` is from its name, `end` from its header."""

    path: str
    name_range: tuple[int, int]
    end: int
    entries: dict[int, bytes]


@dataclass(frozen=True)
class Folder:
    """A feed's files in a lake's folder."""

    root: Path
    feed: str

    def read_entries(self) -> dict[int, dict[str, Any]]:
        """Returns the ledger's entries by number. Raises EvidenceError for a file that is no entry."""
        entries = {}
        for path in sorted((self.root / "_sluice" / self.feed / "log").glob("*.json")):
            if not (match := _NUMBER.fullmatch(path.name)):
                raise EvidenceError(f"{path} is no entry of a ledger")
            try:
                entries[int(match[1])] = parse_entry(path.read_bytes())
            except ValueError as e:
                raise EvidenceError(f"{path} is not JSON: {e}") from None
        return entries

    def read_entry(self, number: int) -> bytes | None:
        """Returns the bytes of the entry; None if it does not exist."""
        path = self.root / "_sluice" / self.feed / "log" / f"{number:020d}.json"
        return path.read_bytes() if path.is_file() else None

    def read_segments(self) -> Iterator[Segment]:
        """Yield the segments: a line of JSON, then the bytes of the entries, compressed together with zlib.

        Raises EvidenceError for a file that is no segment.
        """
        for path in sorted((self.root / "_sluice" / self.feed / "segments").glob("*.json")):
            try:
                first, end = map(int, _SEGMENT.fullmatch(path.name).groups())  # type: ignore[union-attr]
                head, _, body = zlib.decompress(path.read_bytes()).partition(b"\n")
                header, entries, at = json.loads(head), dict[int, bytes](), 0
                if header["format"] != 1 or hashlib.sha256(body).hexdigest() != header["sha256"]:
                    raise ValueError("its bytes are not those that it announces")
                for number, size in header["entries"]:
                    entries[number] = body[at : at + size]
                    at += size
                if at != len(body):
                    raise ValueError("there is more in it than it announces")
            except (ValueError, LookupError, TypeError, AttributeError, zlib.error) as e:
                raise EvidenceError(f"{path} is no segment of a ledger: {e}") from None
            yield Segment(str(path.relative_to(self.root)), (first, end), header["end"], entries)

    def read_manifests(self) -> dict[str, dict[str, Any]]:
        folder = self.root / "_sluice" / self.feed / "windows"
        return {str(p.relative_to(self.root)): json.loads(p.read_bytes()) for p in sorted(folder.rglob("*.json"))}

    def list_staged_receipts(self) -> Iterator[dict[str, Any]]:
        """Yield the receipts in staging, each with its path as `from`."""
        for path in sorted((self.root / "_sluice" / self.feed / "staging").glob("*/*/*.receipt*.json")):
            content = json.loads(path.read_bytes())
            for receipt in content if isinstance(content, list) else [content]:
                yield receipt | {"from": str(path.relative_to(self.root))}

    def list_visible(self) -> set[str]:
        """Returns the paths of all files that readers may find. Excludes temporary files of killed writes, and logs of
        Delta tables of the feed, or of an output."""
        roots = [self.root / kind / self.feed for kind in ("data", "quarantine")]
        files = [(root, p) for root in roots for p in root.rglob("*") if p.is_file() and not p.name.startswith(".tmp-")]
        return {str(p.relative_to(self.root)) for root, p in files if "_delta_log" not in p.relative_to(root).parts[:2]}

    def get_size(self, path: str) -> int | None:
        file = self.root / path
        return file.stat().st_size if file.is_file() else None

    def hash_file(self, path: str) -> str:
        with (self.root / path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def read_rows(self, path: str) -> Rows:
        """Read a file. Raises EvidenceError if it is not Parquet, or lacks the columns of records' coordinates."""
        try:
            with pq.ParquetFile(self.root / path) as file:
                return _convert_rows(file.read())
        except (OSError, pa.ArrowException, KeyError) as e:
            raise EvidenceError(f"{path} cannot be read: {e}") from None


def _convert_rows(table: pa.Table) -> Rows:
    prefix = "kafka_" if "kafka_offset" in table.column_names else ""
    has_value = "value" in table.column_names and not prefix

    def read_column(name: str) -> list[Any]:
        return table.column(prefix + name).to_pylist() if prefix + name in table.column_names else [None] * len(table)

    times = pc.cast(table.column(f"{prefix}timestamp"), pa.timestamp("ms", "UTC")).cast(pa.int64()).to_pylist()
    values = table.column("value").to_pylist() if has_value else [None] * len(table)
    headers = [_convert_headers(h) for h in read_column("headers")]
    records = zip(read_column("offset"), times, read_column("key"), values, headers, strict=True)
    typed = [n for n in table.column_names if prefix and not n.startswith(prefix)]
    metadata = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items() if k.startswith(b"sluice.")}
    return Rows(
        tuple(Record(*r) for r in records),
        tuple(zip(read_column("topic"), read_column("partition"), strict=True)),
        tuple(table.select(typed).to_pylist()) if typed else (),
        has_value,
        metadata,
        tuple(table.column("reason").to_pylist()) if has_value and "reason" in table.column_names else (),
        tuple(table.column("kafka_tombstone").to_pylist()) if "kafka_tombstone" in table.column_names else (),
    )


def _convert_headers(pairs: list[dict[str, Any]] | None) -> tuple[tuple[bytes, bool], ...]:
    return tuple((p["key"].encode() + b":" + (p["value"] or b""), p["value"] is None) for p in pairs or ())


def fetch_s3(uri: str, into: Path, endpoint: str | None = None, below: str = "") -> Path:
    """Download the lake at `s3://bucket/prefix`, or only the path `below` in it, into a folder; returns the folder.

    boto3 finds the credentials.
    """
    import boto3  # not at the top: a local lake does not need it

    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    above, root = f"{prefix.rstrip('/')}/" if prefix else "", into / "lake"
    client = boto3.client("s3", endpoint_url=endpoint)
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=above + below):
        for item in page.get("Contents", ()):
            path = root / item["Key"].removeprefix(above)
            if not path.resolve().is_relative_to(root.resolve()):
                raise EvidenceError(f"{item['Key']!r} leaves the lake")
            path.parent.mkdir(parents=True, exist_ok=True)
            client.download_file(bucket, item["Key"], str(path))
    return root


def format_part_name(topic: str, partition: int, start: int, end: int, batch: int, sequence: int) -> str:
    """Returns the only name that docs/lake-format.md allows for a part."""
    suffix = f"-{sequence}" if sequence else ""
    return f"{encode_topic(topic)}-{partition}-{start}-{end}-b{batch}{suffix}.parquet"


def format_shared_name(topic: str, partition: int, start: int, end: int, batch: int) -> str:
    """Returns the only name allowed for a file that offset ranges share; `start` and `end` are the first range's."""
    return f"{encode_topic(topic)}-{partition}-{start}-{end}-b{batch}-shared.parquet"


def encode_topic(topic: str) -> str:
    signs = [
        "~~" if c == "-" else f"~{c.lower()}" if c.isupper() or (not i and c in "._") else c
        for i, c in enumerate(topic)
    ]
    if sum(map(len, signs)) <= 160:
        return "".join(signs)
    tail = "~1" + hashlib.sha256(topic.encode()).hexdigest()
    while sum(map(len, signs)) > 160 - len(tail):
        signs.pop()
    return "".join(signs) + tail
