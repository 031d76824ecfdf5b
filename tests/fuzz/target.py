"""A fuzz target: a reader of bytes from outside, its inputs, and its guarantees.

Every input ends in a result or in an error that the reader documents; `Target.run` raises anything else. The process
survives, and exceeds neither its time limit nor its memory limit.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.fuzz.mutation import mutate_bytes

CORPUS = Path(__file__).parent / "corpus"
SECONDS = 20
"""Limit of CPU time for one input, far above the need of any."""

Mutate = Callable[[Random, bytes, Sequence[bytes]], bytes]


@dataclass(frozen=True)
class Target:
    """`run` reads one input and returns its outcome in a word. The process may grow by `more_mib`."""

    name: str
    seeds: Callable[[], Sequence[bytes]]
    run: Callable[[bytes], str]
    mutate: Mutate = mutate_bytes
    more_mib: int = 1024
    variants: int = 1
    """The number of inputs that `run` makes from the one passed to it."""

    @property
    def corpus_file(self) -> Path:
        """The file of kept inputs: those that reach all branches, and those of earlier findings."""
        return CORPUS / f"{self.name}.jsonl"

    def load_corpus(self) -> list[bytes]:
        """Return seeds and kept inputs."""
        return list(dict.fromkeys([*self.seeds(), *load(self.corpus_file)]))


def load(path: Path) -> list[bytes]:
    """Return the inputs in a file, one per line."""
    if not path.exists():
        return []
    return [base64.b64decode(json.loads(line)["input"]) for line in path.read_text().splitlines()]


def format_line(data: bytes, why: str) -> str:
    """Return an input as a line of such a file, with the reason for keeping it."""
    return json.dumps({"why": why, "input": base64.b64encode(data).decode()}) + "\n"
