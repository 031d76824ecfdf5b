"""The lake's folder as files: the ledger's entries as raw JSON, and Parquet files by pyarrow. No Sluice here."""

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

from tests.checker.facts import EvidenceError, Seen

_NUMBER = re.compile(r"([0-9]{20})\.json")
_SEGMENT = re.compile(r"([0-9]{20})-([0-9]{20})\.json")


@dataclass(frozen=True)
class Rows:
    """What a Parquet file holds: records in the file's order, `typed` columns of each where there are any."""

    records: tuple[Seen, ...]
    places: tuple[tuple[str, int], ...]
    typed: tuple[dict[str, Any], ...]
    has_value: bool
    about: dict[str, str]

    @property
    def offsets(self) -> list[int]:
        return [r.offset for r in self.records]

    def some(self, first: int, rows: int) -> Rows:
        """Rows of a file that offset ranges share."""
        records, places, typed = (x[first : first + rows] for x in (self.records, self.places, self.typed))
        return Rows(records, places, typed, self.has_value, self.about)


@dataclass(frozen=True)
class Segment:
    """An object with copies of old entries, by number: what it is named, and what it holds."""

    path: str
    named: tuple[int, int]
    end: int
    entries: dict[int, bytes]


@dataclass(frozen=True)
class Folder:
    """A feed's files in a lake's folder."""

    root: Path
    feed: str

    def entries(self) -> dict[int, dict[str, Any]]:
        """The ledger's entries by number. Raises EvidenceError for what is no entry."""
        found = {}
        for path in sorted((self.root / "_sluice" / self.feed / "log").glob("*.json")):
            if not (name := _NUMBER.fullmatch(path.name)):
                raise EvidenceError(f"{path} is no entry of a ledger")
            try:
                found[int(name[1])] = json.loads(path.read_bytes())
            except ValueError as e:
                raise EvidenceError(f"{path} is not JSON: {e}") from None
        return found

    def said(self, number: int) -> bytes | None:
        """The bytes of the entry of that number; None if it does not stand."""
        path = self.root / "_sluice" / self.feed / "log" / f"{number:020d}.json"
        return path.read_bytes() if path.is_file() else None

    def segments(self) -> Iterator[Segment]:
        """The copies of old entries: one line of JSON, then the bytes of entry after entry, all of it by zlib. Raises
        EvidenceError for what is no segment."""
        for path in sorted((self.root / "_sluice" / self.feed / "segments").glob("*.json")):
            try:
                first, end = map(int, _SEGMENT.fullmatch(path.name).groups())  # type: ignore[union-attr]
                head, _, rest = zlib.decompress(path.read_bytes()).partition(b"\n")
                told, entries, at = json.loads(head), dict[int, bytes](), 0
                if told["format"] != 1 or hashlib.sha256(rest).hexdigest() != told["sha256"]:
                    raise ValueError("its bytes are not those that it announces")
                for number, size in told["entries"]:
                    entries[number] = rest[at : at + size]
                    at += size
                if at != len(rest):
                    raise ValueError("there is more in it than it announces")
            except (ValueError, LookupError, TypeError, AttributeError, zlib.error) as e:
                raise EvidenceError(f"{path} is no segment of a ledger: {e}") from None
            yield Segment(str(path.relative_to(self.root)), (first, end), told["end"], entries)

    def manifests(self) -> dict[str, dict[str, Any]]:
        place = self.root / "_sluice" / self.feed / "windows"
        return {str(p.relative_to(self.root)): json.loads(p.read_bytes()) for p in sorted(place.rglob("*.json"))}

    def staged(self) -> Iterator[dict[str, Any]]:
        """The receipts that stand in staging."""
        for path in sorted((self.root / "_sluice" / self.feed / "staging").glob("*/*/*.receipt*.json")):
            told = json.loads(path.read_bytes())
            for receipt in told if isinstance(told, list) else [told]:
                yield receipt | {"from": str(path.relative_to(self.root))}

    def list_visible(self) -> set[str]:
        """The paths of all files that readers may find; what a killed write left under a temporary name is none."""
        roots = [self.root / kind / self.feed for kind in ("data", "quarantine")]
        files = (p for root in roots for p in root.rglob("*") if p.is_file() and not p.name.startswith(".tmp-"))
        return {str(p.relative_to(self.root)) for p in files}

    def size(self, path: str) -> int | None:
        place = self.root / path
        return place.stat().st_size if place.is_file() else None

    def sha256(self, path: str) -> str:
        with (self.root / path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def rows(self, path: str) -> Rows:
        """Raises EvidenceError for a file that is not readable Parquet with a record's coordinates."""
        try:
            with pq.ParquetFile(self.root / path) as file:
                return _rows(file.read())
        except (OSError, pa.ArrowException, KeyError) as e:
            raise EvidenceError(f"{path} cannot be read: {e}") from None


def _rows(table: pa.Table) -> Rows:
    prefix = "kafka_" if "kafka_offset" in table.column_names else ""
    has_value = "value" in table.column_names and not prefix

    def column(name: str) -> list[Any]:
        return table.column(prefix + name).to_pylist() if prefix + name in table.column_names else [None] * len(table)

    times = pc.cast(table.column(f"{prefix}timestamp"), pa.timestamp("ms", "UTC")).cast(pa.int64()).to_pylist()
    values = table.column("value").to_pylist() if has_value else [None] * len(table)
    headers = [_headers(h) for h in column("headers")]
    records = zip(column("offset"), times, column("key"), values, headers, strict=True)
    own = [n for n in table.column_names if prefix and not n.startswith(prefix)]
    about = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items() if k.startswith(b"sluice.")}
    return Rows(
        tuple(Seen(*r) for r in records),
        tuple(zip(column("topic"), column("partition"), strict=True)),
        tuple(table.select(own).to_pylist()) if own else (),
        has_value,
        about,
    )


def _headers(pairs: list[dict[str, Any]] | None) -> tuple[tuple[bytes, bool], ...]:
    return tuple((p["key"].encode() + b":" + (p["value"] or b""), p["value"] is None) for p in pairs or ())


def fetch_s3(uri: str, into: Path, endpoint: str | None = None, below: str = "") -> Path:
    """The lake at `s3://bucket/prefix`, what is below a path of it, as a folder in `into`; credentials as boto3 finds
    them."""
    import boto3  # only here: a local lake needs none of it

    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    above, root = f"{prefix.rstrip('/')}/" if prefix else "", into / "lake"
    client = boto3.client("s3", endpoint_url=endpoint)
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=above + below):
        for item in page.get("Contents", ()):
            place = root / item["Key"].removeprefix(above)
            if not place.resolve().is_relative_to(root.resolve()):
                raise EvidenceError(f"{item['Key']!r} leaves the lake")
            place.parent.mkdir(parents=True, exist_ok=True)
            client.download_file(bucket, item["Key"], str(place))
    return root


def part_name(topic: str, partition: int, start: int, end: int, batch: int, sequence: int) -> str:
    """The only name that docs/developers/design/layout.md allows for a part, by the encoding of topics as it is
    documented.
    """
    suffix = f"-{sequence}" if sequence else ""
    return f"{encoded(topic)}-{partition}-{start}-{end}-b{batch}{suffix}.parquet"


def shared_name(topic: str, partition: int, start: int, end: int, batch: int) -> str:
    """The only name for a file that offset ranges share, by the first of them."""
    return f"{encoded(topic)}-{partition}-{start}-{end}-b{batch}-shared.parquet"


def encoded(topic: str) -> str:
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
