"""How far long work is, as values, and who is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sluice.pipelines.vocabulary.receipts import Met


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a batch is: a stage's name, and offsets done of all where it counts. `met`: another run's batch that was
    just taken over, given up or left; what is said last of a batch holds."""

    stage: str
    done: int = 0
    total: int = 0
    note: str = ""
    met: Met | None = None


Reporter = Callable[[Progress], None]
