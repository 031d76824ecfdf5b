"""The offsets of an old consumers' group, from the transaction log of the ZooKeeper server that kept them.

The server writes every change there before it answers anybody, in order: so this is what took effect, whoever wrote it,
and whether or not the writer heard of it. Format: org.apache.zookeeper.server.persistence.FileTxnLog, 3.9.
"""

from __future__ import annotations

import itertools
import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.checker.facts import TP, Committed, EvidenceError

_MAGIC, _VERSION = b"ZKLG", 2
_FILE = struct.Struct(">4siq")
_ENTRY, _HEADER, _INT = struct.Struct(">qi"), struct.Struct(">qiqqi"), struct.Struct(">i")
_CREATES, _DELETES, _SET, _MULTI, _ERROR = frozenset({1, 15, 19, 21}), frozenset({2, 20}), 5, 14, -1
"""Types: create, create2, createContainer, createTTL; delete, deleteContainer; setData; multi; error."""


class Write(NamedTuple):
    """A node that was made, written (data) or removed (None), by transaction `zxid` at `time` (ms)."""

    zxid: int
    time: int
    path: str
    data: bytes | None


def writes(folder: Path) -> Iterator[Write]:
    """Everything that took effect, in order; `folder` is the server's dataDir. Raises EvidenceError for what is no
    log. The end of a file that a killed server did not finish took no effect."""
    logs = sorted((folder / "version-2").glob("log.*"), key=lambda p: int(p.suffix[1:], 16))
    seen = 0
    for path in logs:
        for zxid, made in _entries(path.read_bytes(), path):
            if zxid > seen:  # a server that started again may write its last transaction into a new file
                seen = zxid
                yield from made


def offsets(folder: Path, group: str) -> tuple[Committed, ...]:
    """Each offset that the group ever had there, with what Sluice keeps beside it where one transaction wrote both."""
    found: list[Committed] = []
    for zxid, together in itertools.groupby(writes(folder), lambda w: w.zxid):
        made = list(together)
        marks = {tp: w.data for tp, w in _of(made, group, "sluice")}
        for tp, w in _of(made, group, "offsets"):
            if w.data == b"":
                continue  # a node that an old tool makes before it writes
            offset = int(w.data) if w.data is not None else None
            found.append(Committed(group, tp, offset, _metadata(marks.get(tp)), w.time, f"zxid {zxid:#x}"))
    return tuple(found)


def _of(made: Iterable[Write], group: str, kind: str) -> Iterator[tuple[TP, Write]]:
    place = re.compile(rf"/consumers/{re.escape(group)}/{kind}/([^/]+)/([0-9]+)")
    for w in made:
        if found := place.fullmatch(w.path):
            yield (found[1], int(found[2])), w


def _metadata(mark: bytes | None) -> str:
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(mark or b"")["metadata"])
    return ""


def _entries(text: bytes, path: Path) -> Iterator[tuple[int, list[Write]]]:
    magic, version, _ = _FILE.unpack_from(text)
    if (magic, version) != (_MAGIC, _VERSION):
        raise EvidenceError(f"{path} is no log of a ZooKeeper that is known here")
    at = _FILE.size
    while at + _ENTRY.size <= len(text):
        checksum, size = _ENTRY.unpack_from(text, at)
        body = text[at + _ENTRY.size : at + _ENTRY.size + size]
        at += _ENTRY.size + size + 1
        if size <= 0 or zlib.adler32(body) != checksum or text[at - 1 : at] != b"B":
            return  # zeros to the end of the file, or what a kill cut off
        _, _, zxid, time, kind = _HEADER.unpack_from(body)
        yield zxid, [Write(zxid, time, *made) for made in _made(kind, body[_HEADER.size :])]


def _made(kind: int, record: bytes) -> Iterator[tuple[str, bytes | None]]:
    if kind == _MULTI:
        together = list(_together(record))
        if not any(inner == _ERROR for inner, _ in together):  # with one of them, nothing of it took effect
            for inner, sub in together:
                yield from _made(inner, sub)
    elif kind in _CREATES or kind == _SET:
        path, at = _buffer(record, 0)
        yield path.decode(), _buffer(record, at)[0]
    elif kind in _DELETES:
        yield _buffer(record, 0)[0].decode(), None


def _together(record: bytes) -> Iterator[tuple[int, bytes]]:
    """The types and records of a transaction of several operations."""
    (count,) = _INT.unpack_from(record)
    at = _INT.size
    for _ in range(count):
        (inner,) = _INT.unpack_from(record, at)
        sub, at = _buffer(record, at + _INT.size)
        yield inner, sub


def _buffer(record: bytes, at: int) -> tuple[bytes, int]:
    (size,) = _INT.unpack_from(record, at)
    begin = at + _INT.size
    end = begin + max(size, 0)  # −1: none
    return record[begin:end], end
