"""Liveness of runs, set by tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from sluice.pipelines.model.receipts import Life, Owner, Verdict


@dataclass
class MemoryLiveness:
    """`ports.Liveness` in memory. Owners live unless their token is in `dead`; `suspects` need watching."""

    dead: set[str] = field(default_factory=set)
    suspects: set[str] = field(default_factory=set)
    beaten: list[str] = field(default_factory=list)
    beats: dict[str, int] = field(default_factory=dict)
    """Time of the last heartbeat by token (ms)."""
    lake_owners: list[Owner] = field(default_factory=list)
    """Owners with a heartbeat in the lake."""

    @contextmanager
    def beat(self, owner: Owner) -> Iterator[None]:
        self.beaten.append(owner.token)
        yield

    def judge(self, owners: Iterable[Owner], *, watch: bool = True) -> Mapping[str, Verdict]:
        return {o.token: Verdict(self.life(o.token, watch), "set by the test") for o in owners}

    def life(self, token: str, watch: bool) -> Life:
        """Returns the state of the owner with this token."""
        if token in self.suspects:
            return (Life.DEAD if token in self.dead else Life.ALIVE) if watch else Life.UNKNOWN
        return Life.DEAD if token in self.dead else Life.ALIVE

    def owners(self) -> tuple[Owner, ...]:
        return tuple(self.lake_owners)

    def last_beat(self, owner: Owner) -> int | None:
        return self.beats.get(owner.token)


def owner(token: str = "token-1", run: str = "run-1") -> Owner:
    """Returns the owner of a batch: the process of a run."""
    return Owner(token, run, "host", 1, 0)
