"""Parses recorded output of Kafka's own tools, version 4.3.1, hostile bytes included."""

from __future__ import annotations

import base64
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.checker import facts
from tests.checker.facts import EvidenceError, Log
from tests.checker.tools import choose_replicas, parse_batches, parse_committed_offsets, parse_consumed

BATCH = (
    "baseOffset: {} lastOffset: {} count: {} baseSequence: 0 lastSequence: 1 producerId: {} producerEpoch: 0 "
    "partitionLeaderEpoch: 2 isTransactional: {} isControl: {} deleteHorizonMs: OptionalLong.empty position: 0 "
    "CreateTime: 1795299795972 size: 121 magic: 2 compresscodec: none crc: 488119304 isvalid: true\n"
)
RECORD = "| offset: {} CreateTime: 1795299795972 keySize: 4 valueSize: 16 sequence: 0 headerKeys: {}\n"
MARKER = "[] endTxnMarker: {} coordinatorEpoch: 0"


def format_batches(*batches: tuple[int, int, int, str | None]) -> bytes:
    """Format transactional batches, each (base, last, producer, marker), as DumpLogSegments prints them."""
    out = "Dumping /data/a.b-c-0/00000000000000000000.log\nLog starting offset: 0\n"
    for base, last, producer, marker in batches:
        out += BATCH.format(base, last, last - base + 1, producer, "true", "true" if marker else "false")
        headers = MARKER.format(marker) if marker else "[h]"
        out += "".join(RECORD.format(o, headers) for o in range(base, last + 1))
    return out.encode()


def test_batches_and_markers_of_a_segment_are_parsed() -> None:
    batches = list(
        parse_batches(format_batches((0, 1, 7, None), (2, 2, 7, "COMMIT"), (3, 4, 8, None), (5, 5, 8, "ABORT")))
    )
    assert [b["offsets"] for b in batches] == [[0, 1], [2], [3, 4], [5]]
    assert [b["control"] for b in batches] == [None, "COMMIT", None, "ABORT"]
    assert batches[0]["leader_epoch"] == 2
    assert batches[0]["transactional"]


def test_header_that_looks_like_a_record_is_detected() -> None:
    hostile = format_batches((0, 1, 7, None)).replace(
        b"[h]", b"[h\n| offset: 9 CreateTime: 1 keySize: 1 valueSize: 1 sequence: 0 headerKeys: []", 1
    )
    with pytest.raises(EvidenceError, match="the batch at 0 has 2 records"):
        list(parse_batches(hostile))


def test_compacted_batch_without_records_is_parsed() -> None:
    empty = BATCH.format(4, 9, 0, 7, "false", "false").encode()
    assert [(b["base"], b["last"], b["offsets"]) for b in parse_batches(empty)] == [(4, 9, [])]


def test_offset_classes_are_derived_from_markers(tmp_path: Path) -> None:
    text = format_batches((0, 1, 7, None), (2, 3, 8, None), (4, 4, 8, "ABORT"), (5, 5, 7, "COMMIT"), (6, 7, 9, None))
    partition = {"topic": "t", "partition": 0, "topic_id": "id"}
    dump = facts.write_lines(
        tmp_path / "log", [partition | {"log_start": 1, "cluster": "c"}, *(partition | b for b in parse_batches(text))]
    )
    log: Log = facts.read_logs(None, dump)["t", 0]
    assert log.classes == {0: "data", 1: "data", 2: "aborted", 3: "aborted", 4: "control", 5: "control"} | {
        6: "open",
        7: "open",
    }
    assert (log.find_last_stable_offset(True), log.find_last_stable_offset(False)) == (6, 8)
    assert log.list_visible(True) == {1}
    assert log.list_visible(False) == {1, 2, 3, 6, 7}


def format_key(kind: int, partition: int = 0) -> str:
    return f'{{"type":"{kind}","data":{{"group":"g:1,x","topic":"a.b-c","partition":{partition}}}}}'


def format_committed(offset: int, metadata: str = "") -> str:
    return (
        f'{{"version":"4","data":{{"offset":{offset},"leaderEpoch":0,"metadata":"{metadata}","commitTimestamp":17}}}}'
    )


@pytest.mark.parametrize("complete", [1, 2, 3])
def test_replica_that_retention_shortened_least_is_read(tmp_path: Path, complete: int) -> None:
    """The followers have deleted the segment of offsets 28 to 35, which the leader still serves."""
    for broker in (1, 2, 3):
        folder = tmp_path / str(broker) / "t-0"
        folder.mkdir(parents=True)
        for start, end in ((28, 36), (36, 40)) if broker == complete else ((36, 40),):
            header = struct.pack(">qiibIhi", start, 49, 0, 2, 0, 0, end - start - 1)
            (folder / f"{start:020}.log").write_bytes(header.ljust(61, b"\0"))
    chosen = choose_replicas([tmp_path / str(broker) for broker in (1, 2, 3)], {"t"})[("t", 0)]
    assert chosen.folder == tmp_path / str(complete) / "t-0"
    assert (chosen.start, chosen.end) == (28, 40)


def test_committed_offsets_take_effect_with_their_transaction() -> None:
    def format_batch(
        base: int, producer: int, content: str, transactional: str = "true", control: str = "false"
    ) -> str:
        head = BATCH.format(base, base, 1, producer, transactional, control)
        return head + RECORD.format(base, content)

    mark = '{\\"sluice\\":\\"abc\\",\\"n\\":4,\\"i\\":\\"id\\"}'
    text = (
        format_batch(0, 7, f"[] key: {format_key(1)} payload: {format_committed(5, mark)}")
        + format_batch(1, 8, f"[] key: {format_key(1)} payload: {format_committed(9)}")
        + format_batch(2, -1, f"[] key: {format_key(1)} payload: {format_committed(3, 'x payload: y')}", "false")
        + format_batch(3, 8, MARKER.format("ABORT"), control="true")
        + format_batch(4, 7, MARKER.format("COMMIT"), control="true")
        + format_batch(5, -1, f"[] key: {format_key(2)} payload: {{}}", "false")
        + format_batch(6, -1, f"[] key: {format_key(1)} payload: <DELETE>", "false")
    )
    commits = list(parse_committed_offsets(3, text.encode()))
    assert [(c["offset"], c["at"]) for c in commits] == [(3, "3:2"), (5, "3:0"), (None, "3:6")]
    assert commits[0]["group"] == "g:1,x"
    last = facts.Committed(commits[1]["group"], ("a.b-c", 0), 5, commits[1]["metadata"], 17, "3:0")
    assert last.mark == ("abc", 4, "id")


def test_consumed_record_is_parsed_byte_for_byte() -> None:
    row = parse_consumed(
        "t", [b"CreateTime:17", b"Partition:2", b"Offset:7", b"h:x\n<H>n:<N>", b"k\t0", b"\xff\x00\n"], b"<H>", b"<N>"
    )
    assert (row["timestamp"], row["partition"], row["offset"]) == (17, 2, 7)
    assert base64.b64decode(row["value"]) == b"\xff\x00\n"
    assert [(base64.b64decode(h), null) for h, null in row["headers"]] == [(b"h:x\n", False), (b"n:", True)]


def test_nulls_and_missing_headers_are_parsed() -> None:
    row = parse_consumed(
        "t", [b"NO_TIMESTAMP", b"Partition:2", b"Offset:7", b"NO_HEADERS", b"<N>", b"<N>"], b"<H>", b"<N>"
    )
    assert (row["timestamp"], row["headers"], row["key"], row["value"]) == (None, [], None, None)


@pytest.mark.parametrize(
    "value",
    [
        b'{"producer": "p-1", "sequence": 7}',
        b"producer=p-1 sequence=7 and more",
        b'{"producer":"p-1","sequence":7,"x":1',
    ],
)
def test_producer_and_sequence_are_read_from_record(value: bytes) -> None:
    assert facts.find_value_id(None, value) == ("p-1", 7)
    assert facts.find_value_id(value, None) == ("p-1", 7)


def test_producer_notes_are_read_and_duplicates_refused(tmp_path: Path) -> None:
    common = {"producer": "p", "topic": "t", "partition": 0, "outcome": "acknowledged"}
    lines: list[dict[str, Any]] = [
        common | {"sequence": 0, "offset": 4, "transaction": "a"},
        common | {"sequence": 1, "offset": 5, "transaction": "b"},
        common | {"sequence": 2, "offset": 6},
        {"transaction": "a", "ended": "committed"},
    ]
    path = facts.write_lines(tmp_path / "produced", lines)
    with path.open("a") as file:
        file.write('{"producer": "p", "sequ')
    sent = facts.read_produced([path])
    assert [s.certain for s in sent.values()] == [True, False, True]
    assert sent["p", 1].ended == "unknown"
    facts.write_lines(path, lines[:1] * 2)
    with pytest.raises(EvidenceError, match="more than once"):
        facts.read_produced([path])
