"""`python -m tests.checker`: gathers evidence from Kafka, or reads gathered evidence, and checks the invariants.

Exit codes: 0 all decided invariants hold, 1 an invariant is broken, 2 the evidence cannot be read.
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
    options = build_parser().parse_args(arguments)
    settings = Settings(options.group, options.healed, None if options.skew_ms < 0 else options.skew_ms)
    try:
        with tempfile.TemporaryDirectory() as spare:
            lake = (
                fetch_s3(options.lake, Path(spare), options.s3_endpoint)
                if "://" in options.lake
                else Path(options.lake)
            )
            folder = Folder(lake, options.feed)
            verdict = check(folder, collect_evidence(options, folder, options.keep or Path(spare)), settings)
    except EvidenceError as e:
        print(f"not decided: {e}", file=sys.stderr)
        return 2
    print(json.dumps(verdict.to_document(), indent=1) if options.json else verdict)
    return 0 if verdict.holds else 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.checker", description=__doc__)
    parser.add_argument("--lake", required=True, help="the lake: a folder, or s3://bucket/prefix")
    parser.add_argument("--s3-endpoint", help="where that bucket is, if not at Amazon")
    parser.add_argument("--feed", required=True)
    parser.add_argument("--produced", type=Path, action="append", help="what producers logged (JSON lines)")
    parser.add_argument("--bootstrap", help="scan the feed's topics by Kafka's console consumer")
    parser.add_argument("--scan", type=Path, help="or take this scan")
    parser.add_argument("--log-dirs", type=Path, action="append", help="dump segments in these folders of brokers")
    parser.add_argument("--log", type=Path, help="or take this dump of segments")
    parser.add_argument("--offsets", type=Path, help="and this dump of __consumer_offsets")
    parser.add_argument("--hands", type=Path, help="committed offsets that were moved by hand (JSON lines)")
    parser.add_argument("--observed", type=Path, help="entries of the ledger as others saw them (JSON lines)")
    parser.add_argument("--group", help="whose committed offsets (default: those with the ledger's mark)")
    parser.add_argument("--healed", action="store_true", help="faults are over, and runs went on to the end")
    parser.add_argument("--skew-ms", type=int, default=5000, help="how far clocks may differ; -1: compare none")
    parser.add_argument("--topic", action="append", help="a topic of the feed that the ledger may not know yet")
    parser.add_argument("--jars", type=Path, help="the folder of Kafka's jars (default: the local cluster's)")
    parser.add_argument("--keep", type=Path, help="keep the evidence in this folder")
    parser.add_argument("--json", action="store_true")
    return parser


def collect_evidence(options: argparse.Namespace, folder: Folder, keep: Path) -> Evidence:
    uses_kafka = options.bootstrap or options.log_dirs
    java = tools.Java(options.jars) if options.jars else tools.Java.of_local_kafka() if uses_kafka else None
    evidence = Evidence()
    if java:
        evidence = gather(folder, java, keep, options.bootstrap, options.log_dirs or (), options.topic or ())
    if options.scan or options.log:
        evidence.logs = facts.read_logs(options.scan, options.log)
    if options.offsets:
        evidence.offsets = facts.read_committed_offsets(options.offsets)
    evidence.produced = facts.read_produced(options.produced) if options.produced else None
    evidence.hands = facts.read_manual_commits(options.hands) if options.hands else ()
    evidence.observed = facts.read_observed(options.observed) if options.observed else ()
    return evidence


if __name__ == "__main__":
    sys.exit(main())
