"""A clock that tests set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class MemoryClock:
    """`ports.Clock`: `now` is ms since the epoch. Each call first adds `step`."""

    now: int = 0
    step: int = 0

    def __call__(self) -> int:
        self.now += self.step
        return self.now
