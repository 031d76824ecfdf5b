"""Targets in a separate process: kept inputs first, then mutants of them, up to a number or for a time.

    python -m tests.fuzz.hunt TARGET … --seed 7 --inputs 1000 [--seconds 60] [--now FILE]

Prints a line of JSON for each finding, and one at the end of each target. The file NOW holds the current input: the
last one if the process ends, takes too long or takes too much memory.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import mmap
import resource
import signal
import time
import traceback
from base64 import b64encode
from collections import Counter
from importlib import import_module
from pathlib import Path
from random import Random

from tests.fuzz.target import SECONDS, Target

TARGETS = {
    "records": "records.RECORDS",
    "loops": "records.LOOPS",
    "codecs": "codec.CODECS",
    "bombs": "codec.BOMBS",
    "typed": "typed.TYPED",
    "typed-values": "typed.TYPED_VALUES",
    "avro": "avro.AVRO",
    "avro-schemas": "avro_schemas.AVRO_SCHEMAS",
    "protobuf": "protobuf.PROTOBUF",
    "protobuf-schemas": "protobuf_schemas.PROTOBUF_SCHEMAS",
    "json-schemas": "json_schemas.JSON_SCHEMAS",
    "ledger": "lake.LEDGER",
    "checkpoints": "lake.CHECKPOINTS",
    "documents": "lake.DOCUMENTS",
    "names": "lake.NAMES",
    "feeds": "file.FEEDS",
    "contracts": "file.CONTRACTS",
    "offsets": "file.OFFSETS",
    "fetch": "kafka.FETCH",
    "frames": "kafka.FRAMES",
    "metadata": "kafka.METADATA",
}
_ROOM = 64 << 20
_KEPT = 500


def load_target(name: str) -> Target:
    """Return the target of this name; only its readers are imported."""
    module, _, attribute = TARGETS[name].partition(".")
    imported = import_module(f"tests.fuzz.targets.{module}")
    if guard := getattr(imported, "guard", None):
        guard()
    return getattr(imported, attribute)  # type: ignore[no-any-return]


class Hunt:
    """Runs inputs one after another; a file holds the current one."""

    def __init__(self, target: Target, now: Path | None) -> None:
        self.target, self.done, self.outcomes = target, 0, Counter[str]()
        self.findings: list[bytes] = []
        self._seen: set[tuple[object, ...]] = set()
        self._now: mmap.mmap | None = None
        if now:
            with now.open("wb+") as file:
                file.truncate(_ROOM)
                self._now = mmap.mmap(file.fileno(), _ROOM)

    def run(self, data: bytes) -> None:
        """Run one input within the time limit. A finding is printed once for each place in the code."""
        if self._now:
            self._now[: 4 + len(data)] = len(data).to_bytes(4, "little") + data
        signal.setitimer(signal.ITIMER_PROF, SECONDS if self._now else 0)
        try:
            self.outcomes[self.target.run(data)] += 1
        except MemoryError:
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            self._report_finding(data, error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        self.done += 1

    def _report_finding(self, data: bytes, error: BaseException) -> None:
        at = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)][-1]
        if (key := (type(error), at)) in self._seen:
            return
        self._seen.add(key)
        self.findings.append(data)
        trace = "".join(traceback.format_exception(error))[-3000:]
        print(json.dumps({"input": b64encode(data).decode(), "error": repr(error)[:300], "told": trace}), flush=True)


def run_hunt(target: Target, seed: int, inputs: int, seconds: float, now: Path | None = None) -> Hunt:
    """Run the corpus, then mutants: `inputs` of them, or for `seconds` unless that is 0."""
    corpus = target.load_corpus()
    work, random = Hunt(target, now), Random(f"{target.name} {seed}")
    for data in corpus:
        work.run(data)
    until = time.monotonic() + seconds if seconds else float("inf")
    pool, limit = list(corpus), len(corpus) + inputs
    while (seconds or work.done < limit) and time.monotonic() < until:
        before = len(work.outcomes)
        data = target.mutate(random, random.choice(pool), corpus)
        work.run(data)
        # An input with a new outcome is worth mutating further.
        if len(work.outcomes) > before and len(pool) < len(corpus) + _KEPT:
            pool.append(data)
    return work


def _limit_memory(more_mib: int) -> None:
    """Limit the memory of the process to this much above its present mappings."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (more_mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", choices=TARGETS, nargs="+")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inputs", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--now", type=Path)
    options = parser.parse_args()
    faulthandler.enable()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for name in options.targets:
        print(json.dumps({"begins": name}), flush=True)
        target = load_target(name)
        _limit_memory(target.more_mib)
        work = run_hunt(target, options.seed, options.inputs, options.seconds, options.now)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(
            json.dumps({"done": work.done * target.variants, "peak_mib": peak, "said": work.outcomes.most_common(20)})
        )


if __name__ == "__main__":
    main()
