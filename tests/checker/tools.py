"""Evidence from Kafka itself, by Kafka's own Java tools: what a consumer sees, and what is in the brokers' folders.

`scan` runs the console consumer, `dump` and `dump_offsets` run DumpLogSegments. Separators of the console consumer are
drawn at random for each scan, so that no record's bytes can be taken for the tool's; keys and values come back exactly.
Of several brokers' folders the replica with the newest leader epoch is read, and of these the longest.
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

from tests.checker.facts import TP, EvidenceError, base, write_lines

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
    """How Kafka's tools are run: the folder of their jars, the `java` to do it, and the file of properties by which
    they log in where brokers ask who comes."""

    jars: Path
    java: str = "java"
    login: Path | None = None

    @classmethod
    def of_local_kafka(cls, cluster: LocalKafka | None = None) -> Java:
        """The jars that the local cluster runs on; its administrator, where it has one."""
        from sluice.resources.local import java, local_kafka

        login = cluster.secured.java_properties() if cluster and cluster.secured else None
        return cls(java.jars(f"kafka-{local_kafka.VERSION}", local_kafka.ARTIFACTS), str(java.find_java()), login)

    def reaching(self, bootstrap: str) -> tuple[str, ...]:
        """The options of a tool that asks brokers."""
        login = ("--command-config", str(self.login)) if self.login else ()
        return "--bootstrap-server", bootstrap, *login

    def run(self, tool: str, *arguments: str, seconds: float = 600) -> bytes:
        """What the tool prints. Raises EvidenceError when it fails."""
        from sluice.resources.local.java import SharedClasses  # how Java starts; what it prints is Kafka's alone

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
            # A JVM that passes over its archive says nothing of it: what is printed is evidence.
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
    committed: bool = True,
    expected: Mapping[TP, Collection[int]] | None = None,
    idle_ms: int = 15_000,
) -> Path:
    """Every record of the topics that a consumer sees, to `out`; it reads until nothing came for `idle_ms`, or until it
    has as many of a topic as the `expected` offsets are: whoever knows those compares them, too.
    """
    found: list[dict[str, Any]] = []
    for topic in sorted(set(topics)):
        with ThreadPoolExecutor(2) as pool:
            starts, ends = pool.map(lambda time, topic=topic: _ends(java, bootstrap, topic, time), _ENDS)
        rows: list[dict[str, Any]] = []
        if any(ends[tp] > starts[tp] for tp in ends):
            enough = sum(o >= starts[tp] for tp in starts for o in (expected or {}).get(tp, ()))
            rows += _consumed(java, bootstrap, topic, committed, idle_ms, enough)
            if len(rows) != enough:  # retention may have been faster
                starts = _ends(java, bootstrap, topic, "earliest")
        found += [{"topic": t, "partition": p, "log_start": starts[t, p], "log_end": ends[t, p]} for t, p in ends]
        found += rows
    return write_lines(out, found)


_ENDS = ("earliest", "latest")


def _ends(java: Java, bootstrap: str, topic: str, time: str) -> dict[TP, int]:
    pattern = re.escape(topic).replace("\\-", "-")
    said = java.run(_OFFSETS, *java.reaching(bootstrap), "--topic", pattern, "--time", time).decode().split()
    rows = (line.rsplit(":", 2) for line in said)
    return {(t, int(p)): int(offset or 0) for t, p, offset in rows if t == topic}


def _consumed(
    java: Java, bootstrap: str, topic: str, committed: bool, idle_ms: int, enough: int
) -> Iterator[dict[str, Any]]:
    line, column, header, null = (f"<{c}-{secrets.token_hex(16)}>" for c in "lchn")
    shown = dict.fromkeys(("timestamp", "partition", "offset", "headers", "key", "value"), "true")
    settings = {f"print.{name}": on for name, on in shown.items()} | {
        "key.separator": column,
        "line.separator": line,
        "headers.separator": header,
        "null.literal": null,
    }
    said = java.run(
        *(_CONSOLE, *java.reaching(bootstrap), "--topic", topic, "--from-beginning"),
        *(("--max-messages", str(enough)) if enough else ()),
        *("--isolation-level", "read_committed" if committed else "read_uncommitted", "--timeout-ms", str(idle_ms)),
        *(word for name, value in settings.items() for word in ("--formatter-property", f"{name}={value}")),
    )
    for row in said.split(line.encode())[:-1]:
        yield consumed_row(topic, row.split(column.encode()), header.encode(), null.encode())


def consumed_row(topic: str, columns: Sequence[bytes], header: bytes, null: bytes) -> dict[str, Any]:
    """A line of the console consumer, cut at its separators, as evidence."""
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
        "key": None if key == null else base(key),
        "value": None if value == null else base(value),
        "headers": [[base(p.removesuffix(null)), p.endswith(null)] for p in pairs],
    }


# -- in the brokers' folders


class Replica(NamedTuple):
    """One broker's copy of a partition; how new it is comes first: the newest leader knows of its own election."""

    elected: int
    leader_epoch: int
    end: int
    folder: Path
    segments: tuple[Path, ...]
    topic_id: str


def dump(java: Java, folders: Iterable[Path], topics: Iterable[str], out: Path) -> Path:
    """Every batch of the topics' segments, to `out`."""
    wanted, found = set(topics), list[dict[str, Any]]()
    chosen = dict(sorted(_chosen(folders, wanted).items()))
    printed = _segments(java, chosen, "--deep-iteration")
    for (topic, partition), replica in chosen.items():
        place = {"topic": topic, "partition": partition, "topic_id": replica.topic_id}
        found.append(place | {"log_start": _log_start(replica, topic, partition), "cluster": _cluster(replica)})
        found += (place | batch for batch in parse_batches(printed[topic, partition]))
    return write_lines(out, found)


def dump_offsets(java: Java, folders: Iterable[Path], out: Path) -> Path:
    """Every committed offset that took effect, in order, to `out`: those of a transaction at its COMMIT."""
    chosen = dict(sorted(_chosen(folders, {"__consumer_offsets"}).items()))
    printed = _segments(java, chosen, "--offsets-decoder")
    return write_lines(out, (row for (_, partition), said in printed.items() for row in _effective(partition, said)))


def _segments(java: Java, chosen: Mapping[TP, Replica], how: str) -> dict[TP, bytes]:
    """What DumpLogSegments prints of each partition, by one run of it."""
    of = {str(segment).encode(): tp for tp, replica in chosen.items() for segment in replica.segments}
    found = dict.fromkeys(chosen, b"")
    if not of:
        return found
    printed = java.run(_SEGMENTS, how, "--files", ",".join(p.decode() for p in of))
    for part in re.split(rb"^Dumping (?=/)", printed, flags=re.M)[1:]:
        path, _, said = part.partition(b"\n")
        if path not in of:
            raise EvidenceError(f"DumpLogSegments speaks of {path!r}, which it was not asked for")
        found[of[path]] += said
    return found


def _chosen(folders: Iterable[Path], topics: Collection[str]) -> dict[TP, Replica]:
    """The newest replica of each partition of the topics. The others are not read: a broker may hold many."""
    found: dict[TP, Replica] = {}
    for place in (p for folder in folders for p in sorted(folder.resolve().iterdir()) if p.is_dir()):
        name = _FOLDER.fullmatch(place.name)
        if name and name[1] in topics and (replica := _replica(place)):
            tp = (name[1], int(name[2]))
            found[tp] = max(found.get(tp, replica), replica)
    return found


def _replica(folder: Path) -> Replica | None:
    segments = tuple(sorted(folder.glob("[0-9]*.log")))
    if not segments:
        return None
    epoch, end = max(_tail(s) for s in segments)
    metadata = folder / "partition.metadata"
    said = re.search(r"topic_id: (\S+)", metadata.read_text()) if metadata.exists() else None
    return Replica(_elected(folder), epoch, end, folder, segments, said[1] if said else "")


def _elected(folder: Path) -> int:
    """The newest leader epoch that this replica knows (KIP-101's checkpoint)."""
    checkpoint = folder / "leader-epoch-checkpoint"
    rows = checkpoint.read_text().split("\n")[2:] if checkpoint.exists() else []
    return max((int(row.split()[0]) for row in rows if row.strip()), default=-1)


def _tail(segment: Path) -> tuple[int, int]:
    """The leader epoch of the segment's last whole batch and the offset after it (KIP-98's batch header)."""
    epoch, end, at = -1, int(segment.stem), 0
    data = segment.read_bytes()
    while at + 61 <= len(data):
        start, size, leader_epoch, _, _, _, delta = struct.unpack_from(">qiibIhi", data, at)
        if size <= 0 or at + 12 + size > len(data):
            break
        epoch, end, at = leader_epoch, start + delta + 1, at + 12 + size
    return epoch, end


def _log_start(replica: Replica, topic: str, partition: int) -> int:
    checkpoint = replica.folder.parent / "log-start-offset-checkpoint"
    rows = [line.rsplit(" ", 2) for line in checkpoint.read_text().splitlines()[2:]] if checkpoint.exists() else []
    said = [int(offset) for t, p, offset in rows if (t, int(p)) == (topic, partition)]
    return max([*said, int(replica.segments[0].stem)])


def _cluster(replica: Replica) -> str:
    said = re.search(r"^cluster\.id=(.+)$", (replica.folder.parent / "meta.properties").read_text(), re.M)
    return said[1].replace("\\", "") if said else ""


def parse_batches(printed: bytes) -> Iterator[dict[str, Any]]:
    """The batches that DumpLogSegments printed, with the offsets of their records. Raises EvidenceError."""
    batch: dict[str, Any] = {}
    counted = 0
    for line in printed.split(b"\n"):
        if head := _BATCH.match(line):
            if batch:
                yield _whole(batch, counted)
            batch, counted = _head(head), int(head[3])
        elif batch and (record := _RECORD.match(line)):
            batch["offsets"].append(int(record[1]))
            if marker := _MARKER.search(record[2]):
                batch["control"] = marker[1].decode()
    if batch:
        yield _whole(batch, counted)


def _head(found: re.Match[bytes]) -> dict[str, Any]:
    first, last, _, producer, epoch, leader_epoch, transactional, control, time, valid = found.groups()
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


def _whole(batch: dict[str, Any], counted: int) -> dict[str, Any]:
    offsets = batch["offsets"]
    inside = all(batch["base"] <= o <= batch["last"] for o in offsets) and offsets == sorted(set(offsets))
    if not inside or counted not in (len(offsets), -1):
        raise EvidenceError(f"the batch at {batch['base']} has {counted} records, and {offsets} were printed")
    return batch


def _effective(coordinator: int, printed: bytes) -> Iterator[dict[str, Any]]:
    """Committed offsets in the order in which readers began to see them."""
    pending: dict[int, list[dict[str, Any]]] = {}
    batch: dict[str, Any] = {}
    for line in printed.split(b"\n"):
        if head := _BATCH.match(line):
            batch = _head(head)
        elif batch and (record := _RECORD.match(line)):
            if marker := _MARKER.search(record[2]):
                ended = pending.pop(batch["producer"], [])
                yield from ended if marker[1] == b"COMMIT" else ()
            elif (said := _committed(line, f"{coordinator}:{int(record[1])}")) is not None:
                if batch["transactional"]:
                    pending.setdefault(batch["producer"], []).append(said)
                else:
                    yield said


def _committed(line: bytes, at: str) -> dict[str, Any] | None:
    """What a record of `__consumer_offsets` says; None for one about a group's members."""
    text = line.decode(errors="replace")
    if '{"type":' not in text:
        return None
    decoder = json.JSONDecoder()
    start = text.index('{"type":')
    key, end = decoder.raw_decode(text, start)
    if key["type"] not in ("0", "1"):
        return None
    place = {n: key["data"][n] for n in ("group", "topic", "partition")}
    rest = text[end:].strip().removeprefix("payload: ")
    if not rest.startswith("{"):
        return place | {"offset": None, "metadata": "", "time": 0, "at": at}
    data = decoder.raw_decode(rest)[0]["data"]
    return place | {
        "offset": data["offset"],
        "metadata": data["metadata"],
        "time": data["commitTimestamp"],
        "at": at,
    }
