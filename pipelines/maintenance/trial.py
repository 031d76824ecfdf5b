"""The counted outcome of trying quarantined records again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sluice.pipelines.quarantine.limit import QuarantineKind


@dataclass(slots=True)
class Trial:
    """The outcome of trying records. By the kind they were refused as: how many were tried and how many fit. Then why
    the others do not, with the first of each; how many the mending function left alone, how many of these fit as they
    are, and what went wrong in it.
    """

    tried: Counter[QuarantineKind] = field(default_factory=Counter)
    fit: Counter[QuarantineKind] = field(default_factory=Counter)
    why: dict[QuarantineKind, tuple[int, str]] = field(default_factory=dict)
    mended: int = 0
    left: int = 0
    left_fit: int = 0
    botched: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, other: Trial) -> None:
        self.tried += other.tried
        self.fit += other.fit
        for mine, more in ((self.why, other.why), (self.botched, other.botched)):
            for key, (records, first) in more.items():
                count_first(mine, key, records, first)
        self.mended += other.mended
        self.left += other.left
        self.left_fit += other.left_fit


def count_first(into: dict[Any, tuple[int, str]], key: Any, records: int, first: str) -> None:
    entry = into.get(key, (0, first))
    into[key] = (entry[0] + records, entry[1])


def total(trials: Iterable[Trial]) -> Trial:
    out = Trial()
    for trial in trials:
        out.add(trial)
    return out
