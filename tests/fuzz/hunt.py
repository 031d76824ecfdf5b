"""Targets in a process of their own: their kept inputs, then new ones made of them, as many or as long as asked.

    python -m tests.fuzz.hunt TARGET … --seed 7 --inputs 1000 [--seconds 60] [--now FILE]

A line of JSON for each finding, and one at the end of each target. An input that ends the process, takes too long or
takes too much memory stands in the file NOW.
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

PLACES = {
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


def target(name: str) -> Target:
    """The target of that name; only its readers are imported."""
    module, _, attribute = PLACES[name].partition(".")
    found = import_module(f"tests.fuzz.targets.{module}")
    if guard := getattr(found, "guard", None):
        guard()
    return getattr(found, attribute)  # type: ignore[no-any-return]


class Hunt:
    """Inputs one after another, each in a file while it is at work."""

    def __init__(self, found: Target, now: Path | None) -> None:
        self.target, self.done, self.said = found, 0, Counter[str]()
        self.findings: list[bytes] = []
        self._seen: set[tuple[object, ...]] = set()
        self._now: mmap.mmap | None = None
        if now:
            with now.open("wb+") as file:
                file.truncate(_ROOM)
                self._now = mmap.mmap(file.fileno(), _ROOM)

    def run(self, data: bytes) -> None:
        """One input, in the time that it may take. A finding is printed once for each place in the code."""
        if self._now:
            self._now[: 4 + len(data)] = len(data).to_bytes(4, "little") + data
        signal.setitimer(signal.ITIMER_PROF, SECONDS if self._now else 0)
        try:
            self.said[self.target.run(data)] += 1
        except MemoryError:
            raise
        except BaseException as error:  # a panic of Rust is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            self._finding(data, error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        self.done += 1

    def _finding(self, data: bytes, error: BaseException) -> None:
        at = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)][-1]
        if (key := (type(error), at)) in self._seen:
            return
        self._seen.add(key)
        self.findings.append(data)
        told = "".join(traceback.format_exception(error))[-3000:]
        print(json.dumps({"input": b64encode(data).decode(), "error": repr(error)[:300], "told": told}), flush=True)


def hunt(found: Target, seed: int, inputs: int, seconds: float, now: Path | None = None) -> Hunt:
    """The corpus first, then mutants: `inputs` of them, or for so many seconds where that is not 0."""
    corpus = found.corpus()
    work, random = Hunt(found, now), Random(f"{found.name} {seed}")
    for data in corpus:
        work.run(data)
    until = time.monotonic() + seconds if seconds else float("inf")
    kept, most = list(corpus), len(corpus) + inputs
    while (seconds or work.done < most) and time.monotonic() < until:
        before = len(work.said)
        data = found.mutate(random, random.choice(kept), corpus)
        work.run(data)
        # What says something new is worth changing further.
        if len(work.said) > before and len(kept) < len(corpus) + _KEPT:
            kept.append(data)
    return work


def _bound_memory(more_mib: int) -> None:
    """From here on the process gets no more memory than this beyond what it has mapped."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + (more_mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", choices=PLACES, nargs="+")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inputs", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--now", type=Path)
    asked = parser.parse_args()
    faulthandler.enable()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for name in asked.targets:
        print(json.dumps({"begins": name}), flush=True)
        found = target(name)
        _bound_memory(found.more_mib)
        work = hunt(found, asked.seed, asked.inputs, asked.seconds, asked.now)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(json.dumps({"done": work.done * found.variants, "peak_mib": peak, "said": work.said.most_common(20)}))


if __name__ == "__main__":
    main()
