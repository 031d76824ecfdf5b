"""Texts that must be nowhere, or in one place, and the search for them in each byte that a project wrote."""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import json
import secrets
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_STEM = "nightjar"
"""How each canary begins: a word in no name of a test, which would be in paths."""


class Canaries:
    """Makes unique texts, and remembers them."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def take(self) -> str:
        self.texts.append(f"{_STEM}{secrets.token_hex(8)}")
        return self.texts[-1]

    def make_value(self, **other: Any) -> bytes:
        """A record's value with a canary in each protected field, and unknown fields at several depths."""
        own = {
            "id": 1,
            "email": f"{self.take()}@example.com",
            "user": {"ip": self.take(), "name": self.take(), "ssn": self.take(), "more": {"SSN": self.take()}},
            "card": f"{self.take()}1234",
            "lines": [{"sku": "a", "ssn": self.take()}, {"sku": "b", "other": [{"ssn": {"deep": self.take()}}]}],
            "tags": {"ssn": self.take(), "token": self.take(), "color": "red"},
            "payload": {"a": [{"ssn": self.take(), "token": [self.take(), {"x": self.take()}]}]},
            "plain": "visible-text",
            "unknown": {"ssn": self.take(), "token": self.take(), "kept": "visible-extra"},
            "ssn": self.take(),
        }
        return json.dumps(own | other).replace('"SSN"', '"\\u0053SN"').encode()

    def make_headers(self) -> list[tuple[str, bytes]]:
        secret = [("auth", self.take().encode()), ("X-User", self.take().encode())]
        return [*secret, ("trace", b"visible-header")]

    def make_key(self) -> bytes:
        return self.take().encode()

    def list_forms(self) -> Iterator[bytes]:
        """How a canary may be written: as text, in hex, and in base64 at each of its three beginnings."""
        for text in self.texts:
            yield from (text.encode(), text.encode().hex().encode(), text.encode().hex().upper().encode())
            for before in (b"", b"x", b"xx"):
                encoded = base64.b64encode(before + text.encode() + b"xx")
                yield encoded[4 : 4 * (len(text) // 3)]


def find_canaries(contents: Iterable[tuple[str, bytes]], forms: Iterable[bytes]) -> set[str]:
    """The names of contents with the forms that they have.

    Forms share few beginnings. A content with none of them, as nearly all, is read once for each beginning.
    """
    forms = [*forms]
    beginnings = {form[:6] for form in forms}
    return {
        f"{name}: {form!r}"
        for name, data in contents
        if any(beginning in data for beginning in beginnings)
        for form in forms
        if form in data
    }


def read_everything(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Each file with all that is compressed in it: columns of Parquet, cells of databases, documents."""
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        data = path.read_bytes()
        yield str(path), data
        for inflate in (gzip.decompress, zlib.decompress, _inflate_zstd):
            try:
                yield f"{path} inflated", inflate(data)
            except Exception:  # noqa: BLE001 - it is not compressed like this
                continue
        if data.startswith(b"PAR1"):
            yield f"{path} rows", read_parquet(data)
        if data.startswith(b"Obj\x01"):
            yield f"{path} entries", read_avro(data)
        if data.startswith(b"SQLite format 3"):
            yield from read_cells(path)


def read_parquet(data: bytes) -> bytes:
    """All cells of the file, its metadata and its statistics."""
    file = pq.ParquetFile(io.BytesIO(data))
    texts = [repr(file.metadata.to_dict()), repr(file.schema), repr(file.read().to_pylist())]
    return "\n".join(texts).encode()


def read_avro(data: bytes) -> bytes:
    """The inflated blocks of an Avro file. Each ends with the marker at the file's end, and begins with two numbers."""
    out = []
    for block in data.split(data[-16:]):
        for first in range(2, min(len(block), 20)):
            with contextlib.suppress(zlib.error):
                out.append(zlib.decompress(block[first:], -zlib.MAX_WBITS))
                break
    return b"\n".join(out)


def read_cells(path: Path) -> Iterator[tuple[str, bytes]]:
    with sqlite3.connect(path) as db:
        for (name,) in db.execute("select name from sqlite_master where type = 'table'").fetchall():
            for row in db.execute(f'select * from "{name}"'):
                for cell in row:
                    data = cell.encode() if isinstance(cell, str) else cell if isinstance(cell, bytes) else b""
                    yield f"{path} {name}", data
                    if data.startswith(b"x"):
                        try:
                            yield f"{path} {name}", zlib.decompress(data)
                        except zlib.error:
                            continue


def _inflate_zstd(data: bytes) -> bytes:
    return pa.decompress(data, 1 << 24, "zstd").to_pybytes() if data.startswith(b"\x28\xb5\x2f\xfd") else b""
