"""`make fuzz`: every target in turn, round after round, until the time is up; what is found goes into the corpus.

make fuzz ARGS="--minutes 10 --target records --seed 3 --checked"
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.hunt import PLACES
from tests.fuzz.processes import ROOT, hunt
from tests.fuzz.target import CORPUS, line, load

_ROUND = 30.0
LOOPS = ROOT / ".venv" / "checked-loops"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make fuzz", description="Inputs from outside that are wrong, by the million."
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--target", choices=PLACES, action="append")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--checked", action="store_true", help="check every index of the compiled loops")
    asked = parser.parse_args()
    names = asked.target or [n for n in PLACES if n != "bombs"]
    os.nice(10)
    return _rounds(names, asked.seed, time.monotonic() + 60 * asked.minutes, LOOPS if asked.checked else None)


def _rounds(names: list[str], seed: int, until: float, checked: Path | None) -> int:
    inputs, spent, findings = Counter[str](), dict.fromkeys(names, 0.0), 0
    while (left := until - time.monotonic()) > 1:
        for name in names:
            seconds = min(_ROUND, max(left / len(names), 1))
            began = time.monotonic()
            found = hunt(name, seed=seed, seconds=seconds, checked=checked)
            inputs[name] += found.inputs
            spent[name] += time.monotonic() - began
            rate = inputs[name] / spent[name]
            print(f"{name:>13} {inputs[name]:>12,} inputs {rate:>8,.0f}/s {found.peak_mib:>6,} MiB", flush=True)
            for _, data, told in found.findings:
                findings += 1
                _keep(name, data, told)
            if time.monotonic() > until:
                break
        seed += 1
    print(f"{sum(inputs.values()):,} inputs, {findings} findings")
    return 1 if findings else 0


def _keep(name: str, data: bytes, told: str) -> None:
    kept = CORPUS / f"{name}.jsonl"
    print(f"\n{name}: {told}\n", flush=True)
    if data not in load(kept):
        with kept.open("a") as file:
            file.write(line(data, told.strip().splitlines()[-1][:120] if told.strip() else "it ended the process"))


if __name__ == "__main__":
    sys.exit(main())
