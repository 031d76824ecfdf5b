"""`make fuzz`: every target in turn, round after round, until the time is up. Findings are added to the corpus.

make fuzz ARGS="--minutes 10 --target records --seed 3 --checked"
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.hunt import TARGETS
from tests.fuzz.processes import ROOT, run_hunts
from tests.fuzz.target import CORPUS, format_line, load

_ROUND = 30.0
LOOPS = ROOT / ".venv" / "checked-loops"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make fuzz", description="Inputs from outside that are wrong, by the million."
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--checked", action="store_true", help="check every index of the compiled loops")
    options = parser.parse_args()
    names = options.target or [n for n in TARGETS if n != "bombs"]
    os.nice(10)
    return _run_rounds(names, options.seed, time.monotonic() + 60 * options.minutes, LOOPS if options.checked else None)


def _run_rounds(names: list[str], seed: int, until: float, checked: Path | None) -> int:
    inputs, spent, findings = Counter[str](), dict.fromkeys(names, 0.0), 0
    while (remaining := until - time.monotonic()) > 1:
        for name in names:
            seconds = min(_ROUND, max(remaining / len(names), 1))
            began = time.monotonic()
            outcome = run_hunts(name, seed=seed, seconds=seconds, checked=checked)
            inputs[name] += outcome.inputs
            spent[name] += time.monotonic() - began
            rate = inputs[name] / spent[name]
            print(f"{name:>13} {inputs[name]:>12,} inputs {rate:>8,.0f}/s {outcome.peak_mib:>6,} MiB", flush=True)
            for _, data, report in outcome.findings:
                findings += 1
                _keep(name, data, report)
            if time.monotonic() > until:
                break
        seed += 1
    print(f"{sum(inputs.values()):,} inputs, {findings} findings")
    return 1 if findings else 0


def _keep(name: str, data: bytes, report: str) -> None:
    corpus_file = CORPUS / f"{name}.jsonl"
    print(f"\n{name}: {report}\n", flush=True)
    if data not in load(corpus_file):
        with corpus_file.open("a") as file:
            file.write(
                format_line(data, report.strip().splitlines()[-1][:120] if report.strip() else "it ended the process")
            )


if __name__ == "__main__":
    sys.exit(main())
