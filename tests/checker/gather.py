"""Evidence of one feed from a running Kafka, once nothing is written any more: what the fault suite calls."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.checker import facts, tools
from tests.checker.facts import TP, Evidence
from tests.checker.invariants import Settings, Verdict, check
from tests.checker.lake import Folder
from tests.checker.tools import Java

if TYPE_CHECKING:
    from sluice.resources.local.local_kafka import LocalKafka


def gather(
    folder: Folder,
    java: Java,
    keep: Path,
    bootstrap: str | None = None,
    log_dirs: Iterable[Path] = (),
    topics: Iterable[str] = (),
) -> Evidence:
    """Scan by the consumer where `bootstrap` is given, dump what lies in the brokers' folders; files go to `keep`.

    Of the topics that the ledger knows, and of `topics`. Raises EvidenceError when a tool fails.
    """
    entries = folder.entries().values()
    topics = {*topics, *(item["key"][0] for entry in entries for item in _list_origins(entry))}
    committed = all(e["plan"]["isolation"] == "read_committed" for e in entries if e["kind"] == "plan")
    folders, offsets = list(log_dirs), None
    log = None
    if folders:
        with ThreadPoolExecutor(2) as pool:
            dumped = pool.submit(tools.dump, java, folders, topics, keep / "log.jsonl")
            committed_to = pool.submit(tools.dump_offsets, java, folders, keep / "offsets.jsonl")
        log, offsets = dumped.result(), facts.committed(committed_to.result())
    scan = _scan(java, bootstrap, topics, keep, log, committed) if bootstrap else None
    return Evidence(facts.logs(scan, log), None, offsets)


def _list_origins(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns where partitions begin by this entry."""
    begins: list[dict[str, Any]] = entry.get({"origin": "items", "take": "origins"}.get(entry["kind"], ""), [])
    return begins


def _scan(java: Java, bootstrap: str, topics: set[str], keep: Path, log: Path | None, committed: bool) -> Path:
    """With as many records as the segments hold; that they are the same ones is for `check` to say."""
    expected = {tp: held.visible(committed) or () for tp, held in facts.logs(None, log).items()}
    return tools.scan(java, bootstrap, topics, keep / "scan.jsonl", committed=committed, expected=expected)


def gather_local(kafka: LocalKafka, folder: Folder, keep: Path, topics: Iterable[str] = ()) -> Evidence:
    """Gather the evidence about a feed on a local cluster. It stays in `keep`."""
    status = kafka.status()
    data = [status.root / f"node-{broker.id}" / "data" for broker in status.brokers]
    return gather(folder, Java.of_local_kafka(kafka), keep, kafka.bootstrap, data, topics)


def checked(
    kafka: LocalKafka,
    folder: Folder,
    keep: Path,
    produced: Iterable[Path] = (),
    settings: Settings = Settings(),  # noqa: B008
    hands: Iterable[tuple[TP, int | None]] = (),
    observed: Iterable[tuple[int, str]] = (),
    topics: Iterable[str] = (),
) -> Verdict:
    """Everything about a feed on a local cluster, decided. Evidence stays in `keep`."""
    found = gather_local(kafka, folder, keep, topics)
    found.produced = facts.produced(produced) if (produced := list(produced)) else None
    found.hands, found.observed = tuple(hands), tuple(observed)
    return check(folder, found, settings)


def seen(folder: Folder) -> tuple[tuple[int, str], ...]:
    """The ledger's entries as they stand now, to be held against it later: (number, write)."""
    return tuple((number, entry["write"]) for number, entry in folder.entries().items())
