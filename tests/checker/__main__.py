"""`python -m tests.checker`: gather evidence from Kafka, or take what was gathered, and decide.

Exit codes: 0 all that could be decided holds, 1 something is broken, 2 the evidence cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.checker import facts, tools
from tests.checker.facts import Evidence, EvidenceError
from tests.checker.invariants import Settings, check
from tests.checker.lake import Folder


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    folder = Folder(given.lake, given.feed)
    settings = Settings(given.group, given.healed, None if given.skew_ms < 0 else given.skew_ms)
    try:
        with tempfile.TemporaryDirectory() as spare:
            verdict = check(folder, _evidence(given, folder, given.keep or Path(spare)), settings)
    except EvidenceError as e:
        print(f"not decided: {e}", file=sys.stderr)
        return 2
    print(json.dumps(verdict.document(), indent=1) if given.json else verdict)
    return 0 if verdict.holds else 1


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.checker", description=__doc__)
    made.add_argument("--lake", type=Path, required=True, help="the lake's folder")
    made.add_argument("--feed", required=True)
    made.add_argument("--produced", type=Path, action="append", help="what producers logged (JSON lines)")
    made.add_argument("--bootstrap", help="scan the feed's topics by Kafka's console consumer")
    made.add_argument("--scan", type=Path, help="or take this scan")
    made.add_argument("--log-dirs", type=Path, action="append", help="dump segments in these folders of brokers")
    made.add_argument("--log", type=Path, help="or take this dump of segments")
    made.add_argument("--offsets", type=Path, help="and this dump of __consumer_offsets")
    made.add_argument("--hands", type=Path, help="committed offsets that were moved by hand (JSON lines)")
    made.add_argument("--observed", type=Path, help="entries of the ledger as others saw them (JSON lines)")
    made.add_argument("--group", help="whose committed offsets (default: those with the ledger's mark)")
    made.add_argument("--healed", action="store_true", help="faults are over, and runs went on to the end")
    made.add_argument("--skew-ms", type=int, default=5000, help="how far clocks may differ; -1: compare none")
    made.add_argument("--jars", type=Path, help="the folder of Kafka's jars (default: the local cluster's)")
    made.add_argument("--keep", type=Path, help="keep the evidence in this folder")
    made.add_argument("--json", action="store_true")
    return made


def _evidence(given: argparse.Namespace, folder: Folder, keep: Path) -> Evidence:
    entries = folder.entries()
    plans = [e["plan"] for e in entries.values() if e["kind"] == "plan"]
    topics = {i["key"][0] for e in entries.values() if e["kind"] == "origin" for i in e["items"]}
    committed = all(p["isolation"] == "read_committed" for p in plans)
    needs = given.bootstrap or given.log_dirs
    java = tools.Java(given.jars) if given.jars else tools.Java.of_local_kafka() if needs else None
    scan, log, offsets = given.scan, given.log, given.offsets
    if java and given.bootstrap:
        scan = tools.scan(java, given.bootstrap, topics, keep / "scan.jsonl", committed=committed)
    if java and given.log_dirs:
        log = tools.dump(java, given.log_dirs, topics, keep / "log.jsonl")
        offsets = tools.dump_offsets(java, given.log_dirs, keep / "offsets.jsonl")
    return Evidence(
        logs=facts.logs(scan, log),
        produced=facts.produced(given.produced) if given.produced else None,
        offsets=facts.committed(offsets) if offsets else None,
        hands=facts.hands(given.hands) if given.hands else (),
        observed=facts.observed(given.observed) if given.observed else (),
    )


if __name__ == "__main__":
    sys.exit(main())
