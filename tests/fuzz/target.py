"""What is fuzzed: a reader of bytes from outside, what is fed to it, and what it promises.

Every input ends in a result or in an error that the reader documents; `Target.run` raises anything else. The process
lives, and needs neither more time nor more memory than its bounds.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.fuzz.mutation import mutated

CORPUS = Path(__file__).parent / "corpus"
SECONDS = 20
"""Of a processor's time that one input may take: far more than any needs."""

Mutate = Callable[[Random, bytes, Sequence[bytes]], bytes]


@dataclass(frozen=True)
class Target:
    """`run` takes one input and says in a word what came of it; `more_mib` is what the process may grow by."""

    name: str
    seeds: Callable[[], Sequence[bytes]]
    run: Callable[[bytes], str]
    mutate: Mutate = mutated
    more_mib: int = 1024
    variants: int = 1
    """So many inputs does `run` make of the one that it is given."""

    @property
    def kept(self) -> Path:
        """The inputs that are kept: those that reach all branches, and those that found something."""
        return CORPUS / f"{self.name}.jsonl"

    def corpus(self) -> list[bytes]:
        """Seeds and kept inputs."""
        return list(dict.fromkeys([*self.seeds(), *load(self.kept)]))


def load(path: Path) -> list[bytes]:
    """The inputs in a file, a line each."""
    if not path.exists():
        return []
    return [base64.b64decode(json.loads(line)["input"]) for line in path.read_text().splitlines()]


def line(data: bytes, why: str) -> str:
    """An input as a line of such a file, with why it is kept."""
    return json.dumps({"why": why, "input": base64.b64encode(data).decode()}) + "\n"
