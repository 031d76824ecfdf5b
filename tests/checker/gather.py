"""Gathers the evidence about one feed from a running Kafka, after all writers have stopped. The fault suite uses it."""

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
    """Scan the topics with a consumer if `bootstrap` is given, and dump the brokers' segments; files go to `keep`.

    Covers the topics in the ledger and `topics`. Raises EvidenceError when a tool fails.
    """
    entries = folder.read_entries().values()
    topics = {*topics, *(item["key"][0] for entry in entries for item in _list_origins(entry))}
    committed_only = all(e["plan"]["isolation"] == "read_committed" for e in entries if e["kind"] == "plan")
    folders, offsets = list(log_dirs), None
    dump = None
    if folders:
        with ThreadPoolExecutor(2) as pool:
            log_dump = pool.submit(tools.dump, java, folders, topics, keep / "log.jsonl")
            offsets_dump = pool.submit(tools.dump_offsets, java, folders, keep / "offsets.jsonl")
        dump, offsets = log_dump.result(), facts.read_committed_offsets(offsets_dump.result())
    scan = _scan(java, bootstrap, topics, keep, dump, committed_only) if bootstrap else None
    return Evidence(facts.read_logs(scan, dump), None, offsets)


def _list_origins(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the origins of partitions that the entry sets."""
    origins: list[dict[str, Any]] = entry.get({"origin": "items", "take": "origins"}.get(entry["kind"], ""), [])
    return origins


def _scan(java: Java, bootstrap: str, topics: set[str], keep: Path, dump: Path | None, committed_only: bool) -> Path:
    """Scan until as many records were consumed as the segments hold; `check` compares them."""
    expected = {tp: log.list_visible(committed_only) or () for tp, log in facts.read_logs(None, dump).items()}
    return tools.scan(java, bootstrap, topics, keep / "scan.jsonl", committed_only=committed_only, expected=expected)


def gather_local(kafka: LocalKafka, folder: Folder, keep: Path, topics: Iterable[str] = ()) -> Evidence:
    """Gather the evidence about a feed on a local cluster; its files stay in `keep`."""
    status = kafka.status()
    data = [status.root / f"node-{broker.id}" / "data" for broker in status.brokers]
    return gather(folder, Java.of_local_kafka(kafka), keep, kafka.bootstrap, data, topics)


def check_local(
    kafka: LocalKafka,
    folder: Folder,
    keep: Path,
    produced: Iterable[Path] = (),
    settings: Settings = Settings(),  # noqa: B008
    hands: Iterable[tuple[TP, int | None]] = (),
    observed: Iterable[tuple[int, str]] = (),
    topics: Iterable[str] = (),
) -> Verdict:
    """Gather the evidence about a feed on a local cluster, and check it. Its files stay in `keep`."""
    evidence = gather_local(kafka, folder, keep, topics)
    evidence.produced = facts.read_produced(produced) if (produced := list(produced)) else None
    evidence.hands, evidence.observed = tuple(hands), tuple(observed)
    return check(folder, evidence, settings)


def list_writes(folder: Folder) -> tuple[tuple[int, str], ...]:
    """Returns (number, write) of each ledger entry, for a later comparison with the ledger."""
    return tuple((number, entry["write"]) for number, entry in folder.read_entries().items())
