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
from tests.checker.gather import gather
from tests.checker.invariants import Settings, check
from tests.checker.lake import Folder, fetch_s3


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    settings = Settings(given.group, given.healed, None if given.skew_ms < 0 else given.skew_ms)
    try:
        with tempfile.TemporaryDirectory() as spare:
            lake = fetch_s3(given.lake, Path(spare), given.s3_endpoint) if "://" in given.lake else Path(given.lake)
            folder = Folder(lake, given.feed)
            verdict = check(folder, _evidence(given, folder, given.keep or Path(spare)), settings)
    except EvidenceError as e:
        print(f"not decided: {e}", file=sys.stderr)
        return 2
    print(json.dumps(verdict.document(), indent=1) if given.json else verdict)
    return 0 if verdict.holds else 1


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.checker", description=__doc__)
    made.add_argument("--lake", required=True, help="the lake: a folder, or s3://bucket/prefix")
    made.add_argument("--s3-endpoint", help="where that bucket is, if not at Amazon")
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
    made.add_argument("--topic", action="append", help="a topic of the feed that the ledger may not know yet")
    made.add_argument("--jars", type=Path, help="the folder of Kafka's jars (default: the local cluster's)")
    made.add_argument("--keep", type=Path, help="keep the evidence in this folder")
    made.add_argument("--json", action="store_true")
    return made


def _evidence(given: argparse.Namespace, folder: Folder, keep: Path) -> Evidence:
    asking = given.bootstrap or given.log_dirs
    java = tools.Java(given.jars) if given.jars else tools.Java.of_local_kafka() if asking else None
    found = Evidence()
    if java:
        found = gather(folder, java, keep, given.bootstrap, given.log_dirs or (), given.topic or ())
    if given.scan or given.log:
        found.logs = facts.logs(given.scan, given.log)
    if given.offsets:
        found.offsets = facts.committed(given.offsets)
    found.produced = facts.produced(given.produced) if given.produced else None
    found.hands = facts.hands(given.hands) if given.hands else ()
    found.observed = facts.observed(given.observed) if given.observed else ()
    return found


if __name__ == "__main__":
    sys.exit(main())
