"""Who is alive, as a test says it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from sluice.pipelines.model.receipts import Life, Owner, Verdict


@dataclass
class MemoryLiveness:
    """`ports.Liveness` in memory. Owners live until their token is in `dead`; of `suspects` only watching tells."""

    dead: set[str] = field(default_factory=set)
    suspects: set[str] = field(default_factory=set)
    beaten: list[str] = field(default_factory=list)
    beats: dict[str, int] = field(default_factory=dict)
    """By token, when it was heard of last (ms)."""
    known: list[Owner] = field(default_factory=list)
    """The owners with a beat in the lake."""

    @contextmanager
    def beat(self, owner: Owner) -> Iterator[None]:
        self.beaten.append(owner.token)
        yield

    def judge(self, owners: Iterable[Owner], *, watch: bool = True) -> Mapping[str, Verdict]:
        return {o.token: Verdict(self.life(o.token, watch), "so it was said") for o in owners}

    def life(self, token: str, watch: bool) -> Life:
        """How the owner of that token stands."""
        if token in self.suspects:
            return (Life.DEAD if token in self.dead else Life.ALIVE) if watch else Life.UNKNOWN
        return Life.DEAD if token in self.dead else Life.ALIVE

    def owners(self) -> tuple[Owner, ...]:
        return tuple(self.known)

    def last_beat(self, owner: Owner) -> int | None:
        return self.beats.get(owner.token)


def owner(token: str = "token-1", run: str = "run-1") -> Owner:
    """Who works on a batch: a run's process."""
    return Owner(token, run, "host", 1, 0)
