"""The offsets of an old consumer group, from the transaction log of the ZooKeeper server that stored them.

The server writes every change to this log, in order, before it answers. So the log holds the changes that took effect,
from all writers, acknowledged or not. Format: org.apache.zookeeper.server.persistence.FileTxnLog, 3.9.
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
    """A node that transaction `zxid` created, wrote (data) or deleted (None) at `time` (ms)."""

    zxid: int
    time: int
    path: str
    data: bytes | None


def read_writes(folder: Path) -> Iterator[Write]:
    """Yield the writes that took effect, in order; `folder` is the server's dataDir.

    Skips an incomplete entry of a killed server. Raises EvidenceError for a file that is no log.
    """
    logs = sorted((folder / "version-2").glob("log.*"), key=lambda p: int(p.suffix[1:], 16))
    last = 0
    for path in logs:
        for zxid, written in _read_entries(path.read_bytes(), path):
            if zxid > last:  # a restarted server may write its last transaction to the new file again
                last = zxid
                yield from written


def read_offsets(folder: Path, group: str) -> tuple[Committed, ...]:
    """Returns each offset that the group ever committed, with Sluice's mark if the same transaction wrote it."""
    commits: list[Committed] = []
    for zxid, of_transaction in itertools.groupby(read_writes(folder), lambda w: w.zxid):
        written = list(of_transaction)
        marks = {tp: w.data for tp, w in _filter_writes(written, group, "sluice")}
        for tp, w in _filter_writes(written, group, "offsets"):
            if w.data == b"":
                continue  # a node that an old tool creates before it writes
            offset = int(w.data) if w.data is not None else None
            commits.append(Committed(group, tp, offset, _parse_metadata(marks.get(tp)), w.time, f"zxid {zxid:#x}"))
    return tuple(commits)


def _filter_writes(written: Iterable[Write], group: str, kind: str) -> Iterator[tuple[TP, Write]]:
    pattern = re.compile(rf"/consumers/{re.escape(group)}/{kind}/([^/]+)/([0-9]+)")
    for w in written:
        if match := pattern.fullmatch(w.path):
            yield (match[1], int(match[2])), w


def _parse_metadata(mark: bytes | None) -> str:
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(mark or b"")["metadata"])
    return ""


def _read_entries(data: bytes, path: Path) -> Iterator[tuple[int, list[Write]]]:
    magic, version, _ = _FILE.unpack_from(data)
    if (magic, version) != (_MAGIC, _VERSION):
        raise EvidenceError(f"{path} is no log of a ZooKeeper that is known here")
    at = _FILE.size
    while at + _ENTRY.size <= len(data):
        checksum, size = _ENTRY.unpack_from(data, at)
        body = data[at + _ENTRY.size : at + _ENTRY.size + size]
        at += _ENTRY.size + size + 1
        if size <= 0 or zlib.adler32(body) != checksum or data[at - 1 : at] != b"B":
            return  # zeros to the end of the file, or an entry that a kill cut off
        _, _, zxid, time, kind = _HEADER.unpack_from(body)
        yield zxid, [Write(zxid, time, *write) for write in _parse_record(kind, body[_HEADER.size :])]


def _parse_record(kind: int, record: bytes) -> Iterator[tuple[str, bytes | None]]:
    if kind == _MULTI:
        operations = list(_split_multi(record))
        if not any(inner == _ERROR for inner, _ in operations):  # after an error no operation took effect
            for inner, sub in operations:
                yield from _parse_record(inner, sub)
    elif kind in _CREATES or kind == _SET:
        path, at = _read_buffer(record, 0)
        yield path.decode(), _read_buffer(record, at)[0]
    elif kind in _DELETES:
        yield _read_buffer(record, 0)[0].decode(), None


def _split_multi(record: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the type and record of each operation of a multi transaction."""
    (count,) = _INT.unpack_from(record)
    at = _INT.size
    for _ in range(count):
        (inner,) = _INT.unpack_from(record, at)
        sub, at = _read_buffer(record, at + _INT.size)
        yield inner, sub


def _read_buffer(record: bytes, at: int) -> tuple[bytes, int]:
    (size,) = _INT.unpack_from(record, at)
    begin = at + _INT.size
    end = begin + max(size, 0)  # −1: none
    return record[begin:end], end
