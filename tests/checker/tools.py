"""Evidence from Kafka itself, by Kafka's own Java tools: records by a consumer, and the brokers' log segments.

`scan` runs the console consumer, `dump` and `dump_offsets` run DumpLogSegments. The console consumer's separators are
random for each scan, so that no record's bytes can be mistaken for them; keys and values are returned exactly. Of
several brokers' replicas the one with the newest leader epoch is read, and of these the one that ends last and begins
first.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import struct
import subprocess
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.checker.facts import TP, EvidenceError, encode_base64, write_lines

if TYPE_CHECKING:
    from sluice.resources.local.local_kafka import LocalKafka

_CONSOLE = "org.apache.kafka.tools.consumer.ConsoleConsumer"
_OFFSETS = "org.apache.kafka.tools.GetOffsetShell"
_SEGMENTS = "org.apache.kafka.tools.DumpLogSegments"
_FOLDER = re.compile(r"(.+)-([0-9]+)")
_BATCH = re.compile(
    rb"baseOffset: (\d+) lastOffset: (\d+) count: (-?\d+) baseSequence: -?\d+ lastSequence: -?\d+ producerId: (-?\d+) "
    rb"producerEpoch: (-?\d+) partitionLeaderEpoch: (-?\d+) isTransactional: (true|false) isControl: (true|false) "
    rb"deleteHorizonMs: \S+ position: \d+ (?:CreateTime|LogAppendTime|NoTimestampType): (-?\d+) size: \d+ magic: 2 "
    rb"compresscodec: \S+ crc: \d+ isvalid: (true|false)"
)
_RECORD = re.compile(
    rb"\| offset: (\d+) (?:CreateTime|LogAppendTime|NoTimestampType): -?\d+ keySize: -?\d+ valueSize: -?\d+ "
    rb"sequence: -?\d+ headerKeys: \[(.*)"
)
_MARKER = re.compile(rb"endTxnMarker: (COMMIT|ABORT) coordinatorEpoch: -?\d+$")


@dataclass(frozen=True)
class Java:
    """Runs Kafka's tools. `jars`: the folder of their jars; `login`: a file of client properties for secured Kafka."""

    jars: Path
    java: str = "java"
    login: Path | None = None

    @classmethod
    def of_local_kafka(cls, cluster: LocalKafka | None = None) -> Java:
        """Returns the tools of the local cluster's version, logged in as its administrator if it is secured."""
        from sluice.resources.local import java, local_kafka

        login = cluster.secured.java_properties() if cluster and cluster.secured else None
        return cls(java.jars(f"kafka-{local_kafka.VERSION}", local_kafka.ARTIFACTS), str(java.find_java()), login)

    def get_options(self, bootstrap: str) -> tuple[str, ...]:
        """Returns the options with which a tool connects to brokers."""
        login = ("--command-config", str(self.login)) if self.login else ()
        return "--bootstrap-server", bootstrap, *login

    def run(self, tool: str, *arguments: str, seconds: float = 600) -> bytes:
        """Run the tool; returns its output. Raises EvidenceError when it fails."""
        from sluice.resources.local.java import SharedClasses  # only starts Java; the output is Kafka's alone

        options = (
            "-Xmx512m",
            "-XX:TieredStopAtLevel=1",
            "-XX:+UseSerialGC",
            "-Dfile.encoding=UTF-8",
            "-Dsun.stdout.encoding=UTF-8",
        )
        environment = {k: v for k, v in os.environ.items() if k not in ("FAKETIME", "LD_PRELOAD")}
        with tempfile.TemporaryDirectory() as spare:
            classes = SharedClasses(self.jars, tool, Path(spare, "classes.jsa"))
            # The output is evidence, so the JVM must not log that it ignores its class archive.
            shared = (*classes.options, "-Xlog:disable")
            command = (self.java, *options, *shared, "-cp", f"{self.jars}/*", tool, *arguments)
            try:
                done = subprocess.run(command, capture_output=True, timeout=seconds, env=environment, check=False)
            except (OSError, subprocess.TimeoutExpired) as e:
                raise EvidenceError(f"{tool} did not run: {e}") from None
            if done.returncode:
                raise EvidenceError(f"{tool} failed: {done.stderr.decode(errors='replace')[-2000:]}")
            classes.keep()
        return done.stdout


# -- by a consumer


def scan(
    java: Java,
    bootstrap: str,
    topics: Iterable[str],
    out: Path,
    *,
    committed_only: bool = True,
    expected: Mapping[TP, Collection[int]] | None = None,
    idle_ms: int = 15_000,
) -> Path:
    """Write every record of the topics that a consumer sees to `out`.

    The consumer stops after `idle_ms` without a record, or once it has read as many records of a topic as `expected`
    has offsets. Callers that know the offsets compare them, too.
    """
    lines: list[dict[str, Any]] = []
    for topic in sorted(set(topics)):
        with ThreadPoolExecutor(2) as pool:
            starts, ends = pool.map(lambda time, topic=topic: _read_offsets(java, bootstrap, topic, time), _ENDS)
        rows: list[dict[str, Any]] = []
        if any(ends[tp] > starts[tp] for tp in ends):
            enough = sum(o >= starts[tp] for tp in starts for o in (expected or {}).get(tp, ()))
            rows += _consume(java, bootstrap, topic, committed_only, idle_ms, enough)
            if len(rows) != enough:  # retention may have removed records in between
                starts = _read_offsets(java, bootstrap, topic, "earliest")
        lines += [{"topic": t, "partition": p, "log_start": starts[t, p], "log_end": ends[t, p]} for t, p in ends]
        lines += rows
    return write_lines(out, lines)


_ENDS = ("earliest", "latest")


def _read_offsets(java: Java, bootstrap: str, topic: str, time: str) -> dict[TP, int]:
    pattern = re.escape(topic).replace("\\-", "-")
    output = java.run(_OFFSETS, *java.get_options(bootstrap), "--topic", pattern, "--time", time).decode().split()
    rows = (line.rsplit(":", 2) for line in output)
    return {(t, int(p)): int(offset or 0) for t, p, offset in rows if t == topic}


def _consume(
    java: Java, bootstrap: str, topic: str, committed_only: bool, idle_ms: int, enough: int
) -> Iterator[dict[str, Any]]:
    line, column, header, null = (f"<{c}-{secrets.token_hex(16)}>" for c in "lchn")
    fields = dict.fromkeys(("timestamp", "partition", "offset", "headers", "key", "value"), "true")
    properties = {f"print.{name}": on for name, on in fields.items()} | {
        "key.separator": column,
        "line.separator": line,
        "headers.separator": header,
        "null.literal": null,
    }
    output = java.run(
        *(_CONSOLE, *java.get_options(bootstrap), "--topic", topic, "--from-beginning"),
        *(("--max-messages", str(enough)) if enough else ()),
        *(
            "--isolation-level",
            "read_committed" if committed_only else "read_uncommitted",
            "--timeout-ms",
            str(idle_ms),
        ),
        *(word for name, value in properties.items() for word in ("--formatter-property", f"{name}={value}")),
    )
    for row in output.split(line.encode())[:-1]:
        yield parse_consumed(topic, row.split(column.encode()), header.encode(), null.encode())


def parse_consumed(topic: str, columns: Sequence[bytes], header: bytes, null: bytes) -> dict[str, Any]:
    """Convert a line of the console consumer, split at its separators, to evidence."""
    if len(columns) != 6:
        raise EvidenceError(f"the console consumer printed {columns!r}")
    time, partition, offset, headers, key, value = columns
    kind, _, stamp = time.partition(b":")
    pairs = [] if headers == b"NO_HEADERS" else headers.split(header)
    return {
        "topic": topic,
        "partition": int(partition.partition(b":")[2]),
        "offset": int(offset.partition(b":")[2]),
        "timestamp": int(stamp) if kind != b"NO_TIMESTAMP" else None,
        "key": None if key == null else encode_base64(key),
        "value": None if value == null else encode_base64(value),
        "headers": [[encode_base64(p.removesuffix(null)), p.endswith(null)] for p in pairs],
    }


# -- in the brokers' folders


class Replica(NamedTuple):
    """One broker's copy of a partition, with its offsets from `start` to `end`."""

    elected: int
    leader_epoch: int
    end: int
    start: int
    folder: Path
    segments: tuple[Path, ...]
    topic_id: str

    def rank(self) -> tuple[int, ...]:
        """Returns a key that is largest for the replica to read.

        Only the newest leader knows its own election. Retention deletes on each broker separately, so a follower may
        lack records that the leader still serves.
        """
        return self.elected, self.leader_epoch, self.end, -self.start


def dump(java: Java, folders: Iterable[Path], topics: Iterable[str], out: Path) -> Path:
    """Write every batch of the topics' segments to `out`."""
    topic_names, lines = set(topics), list[dict[str, Any]]()
    replicas = dict(sorted(choose_replicas(folders, topic_names).items()))
    dumps = _dump_segments(java, replicas, "--deep-iteration")
    for (topic, partition), replica in replicas.items():
        coordinates = {"topic": topic, "partition": partition, "topic_id": replica.topic_id}
        lines.append(
            coordinates
            | {"log_start": _read_log_start(replica, topic, partition), "cluster": _read_cluster_id(replica)}
        )
        lines += (coordinates | batch for batch in parse_batches(dumps[topic, partition]))
    return write_lines(out, lines)


def dump_offsets(java: Java, folders: Iterable[Path], out: Path) -> Path:
    """Write every committed offset to `out`, in the order of taking effect: those of a transaction at its COMMIT."""
    replicas = dict(sorted(choose_replicas(folders, {"__consumer_offsets"}).items()))
    dumps = _dump_segments(java, replicas, "--offsets-decoder")
    return write_lines(
        out, (row for (_, partition), output in dumps.items() for row in parse_committed_offsets(partition, output))
    )


def _dump_segments(java: Java, replicas: Mapping[TP, Replica], how: str) -> dict[TP, bytes]:
    """Run DumpLogSegments once; returns its output for each partition."""
    partitions = {str(segment).encode(): tp for tp, replica in replicas.items() for segment in replica.segments}
    outputs = dict.fromkeys(replicas, b"")
    if not partitions:
        return outputs
    output = java.run(_SEGMENTS, how, "--files", ",".join(p.decode() for p in partitions))
    for part in re.split(rb"^Dumping (?=/)", output, flags=re.M)[1:]:
        path, _, text = part.partition(b"\n")
        if path not in partitions:
            raise EvidenceError(f"DumpLogSegments speaks of {path!r}, which it was not asked for")
        outputs[partitions[path]] += text
    return outputs


def choose_replicas(folders: Iterable[Path], topics: Collection[str]) -> dict[TP, Replica]:
    """Returns the newest replica of each partition of the topics. Skips other topics: a broker may hold many."""
    replicas: dict[TP, Replica] = {}
    for partition_folder in (p for folder in folders for p in sorted(folder.resolve().iterdir()) if p.is_dir()):
        match = _FOLDER.fullmatch(partition_folder.name)
        if match and match[1] in topics and (replica := _read_replica(partition_folder)):
            tp = (match[1], int(match[2]))
            replicas[tp] = max(replicas.get(tp, replica), replica, key=Replica.rank)
    return replicas


def _read_replica(folder: Path) -> Replica | None:
    segments = tuple(sorted(folder.glob("[0-9]*.log")))
    if not segments:
        return None
    epoch, end = max(_read_tail(s) for s in segments)
    metadata = folder / "partition.metadata"
    match = re.search(r"topic_id: (\S+)", metadata.read_text()) if metadata.exists() else None
    start = int(segments[0].stem)
    return Replica(_read_leader_epoch(folder), epoch, end, start, folder, segments, match[1] if match else "")


def _read_leader_epoch(folder: Path) -> int:
    """Returns the newest leader epoch that the replica knows (KIP-101's checkpoint)."""
    checkpoint = folder / "leader-epoch-checkpoint"
    rows = checkpoint.read_text().split("\n")[2:] if checkpoint.exists() else []
    return max((int(row.split()[0]) for row in rows if row.strip()), default=-1)


def _read_tail(segment: Path) -> tuple[int, int]:
    """Returns the leader epoch of the segment's last complete batch and the offset after it (KIP-98's batch header)."""
    epoch, end, at = -1, int(segment.stem), 0
    data = segment.read_bytes()
    while at + 61 <= len(data):
        start, size, leader_epoch, _, _, _, delta = struct.unpack_from(">qiibIhi", data, at)
        if size <= 0 or at + 12 + size > len(data):
            break
        epoch, end, at = leader_epoch, start + delta + 1, at + 12 + size
    return epoch, end


def _read_log_start(replica: Replica, topic: str, partition: int) -> int:
    checkpoint = replica.folder.parent / "log-start-offset-checkpoint"
    rows = [line.rsplit(" ", 2) for line in checkpoint.read_text().splitlines()[2:]] if checkpoint.exists() else []
    starts = [int(offset) for t, p, offset in rows if (t, int(p)) == (topic, partition)]
    return max([*starts, replica.start])


def _read_cluster_id(replica: Replica) -> str:
    match = re.search(r"^cluster\.id=(.+)$", (replica.folder.parent / "meta.properties").read_text(), re.M)
    return match[1].replace("\\", "") if match else ""


def parse_batches(printed: bytes) -> Iterator[dict[str, Any]]:
    """Parse the batches in the output of DumpLogSegments, with the offsets of their records. Raises EvidenceError."""
    batch: dict[str, Any] = {}
    counted = 0
    for line in printed.split(b"\n"):
        if head := _BATCH.match(line):
            if batch:
                yield _check_batch(batch, counted)
            batch, counted = _parse_batch_header(head), int(head[3])
        elif batch and (record := _RECORD.match(line)):
            batch["offsets"].append(int(record[1]))
            if marker := _MARKER.search(record[2]):
                batch["control"] = marker[1].decode()
    if batch:
        yield _check_batch(batch, counted)


def _parse_batch_header(match: re.Match[bytes]) -> dict[str, Any]:
    first, last, _, producer, epoch, leader_epoch, transactional, control, time, valid = match.groups()
    return {
        "base": int(first),
        "last": int(last),
        "producer": int(producer),
        "epoch": int(epoch),
        "leader_epoch": int(leader_epoch),
        "time": int(time),
        "transactional": transactional == b"true",
        "control": "CONTROL" if control == b"true" else None,
        "offsets": [],
        "valid": valid == b"true",
    }


def _check_batch(batch: dict[str, Any], counted: int) -> dict[str, Any]:
    offsets = batch["offsets"]
    inside = all(batch["base"] <= o <= batch["last"] for o in offsets) and offsets == sorted(set(offsets))
    if not inside or counted not in (len(offsets), -1):
        raise EvidenceError(f"the batch at {batch['base']} has {counted} records, and {offsets} were printed")
    return batch


def parse_committed_offsets(coordinator: int, printed: bytes) -> Iterator[dict[str, Any]]:
    """Parse committed offsets, in the order in which they became visible to readers."""
    pending: dict[int, list[dict[str, Any]]] = {}
    batch: dict[str, Any] = {}
    for line in printed.split(b"\n"):
        if head := _BATCH.match(line):
            batch = _parse_batch_header(head)
        elif batch and (record := _RECORD.match(line)):
            if marker := _MARKER.search(record[2]):
                finished = pending.pop(batch["producer"], [])
                yield from finished if marker[1] == b"COMMIT" else ()
            elif (commit := _parse_committed(line, f"{coordinator}:{int(record[1])}")) is not None:
                if batch["transactional"]:
                    pending.setdefault(batch["producer"], []).append(commit)
                else:
                    yield commit


def _parse_committed(line: bytes, at: str) -> dict[str, Any] | None:
    """Parse a record of `__consumer_offsets`; None for group metadata."""
    text = line.decode(errors="replace")
    if '{"type":' not in text:
        return None
    decoder = json.JSONDecoder()
    start = text.index('{"type":')
    key, end = decoder.raw_decode(text, start)
    if key["type"] not in ("0", "1"):
        return None
    coordinates = {n: key["data"][n] for n in ("group", "topic", "partition")}
    rest = text[end:].strip().removeprefix("payload: ")
    if not rest.startswith("{"):
        return coordinates | {"offset": None, "metadata": "", "time": 0, "at": at}
    data = decoder.raw_decode(rest)[0]["data"]
    return coordinates | {
        "offset": data["offset"],
        "metadata": data["metadata"],
        "time": data["commitTimestamp"],
        "at": at,
    }
