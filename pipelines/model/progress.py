"""Progress of long work, as values, and the callable that receives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sluice.pipelines.model.receipts import Met


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a batch is.

    `stage` is the stage's name; `done` of `total` offsets are done where the stage counts them. `met` is another run's
    batch that was just taken over, given up or left; the last report about a batch holds.
    """

    stage: str
    done: int = 0
    total: int = 0
    note: str = ""
    met: Met | None = None


Reporter = Callable[[Progress], None]
