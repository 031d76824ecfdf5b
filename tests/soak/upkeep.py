"""An operator's cron: the second scheduler, compaction, expiry, audits, tables, republishes.

The second scheduler runs `sluice run` without Dagster over all feeds or some, independently of Dagster's own.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sluice.pipelines import errors
from sluice.pipelines.util.units import MINUTE, show_window
from tests.soak.commands import Commands, Done
from tests.soak.feeds import BY_NAME, FEEDS, SoakFeed

EXPIRY = "40m"
"""Age of the rows that are retired."""
PRUNE = "30m"
SCHEDULER_PAUSE, UPKEEP_PAUSE = (50, 130), (10, 40)
"""Seconds between two commands."""
_TRIES = 12


@dataclass
class Scheduler:
    """The second scheduler."""

    commands: Commands
    draw: random.Random

    def run_some(self) -> None:
        """Run over all feeds, some, or one; the last by Dagster, at times."""
        luck = self.draw.random()
        if luck < 0.55:
            self.commands.run("run", "--all", "--no-dagster", killable=True)
        elif luck < 0.85:
            pattern = self.draw.choice(["raw_*", "json_*", "avro_*", "*_local", "*_orders", "*e*"])
            self.commands.run("run", pattern, "--no-dagster", killable=True)
        else:
            self.commands.run("run", self.draw.choice(FEEDS).name, killable=True)


@dataclass
class Upkeep:
    """An operator's commands, one after the other."""

    commands: Commands
    draw: random.Random
    ended: threading.Event = field(default_factory=threading.Event)
    republished: dict[str, int] = field(default_factory=dict)
    """Records that were sent, by window."""
    open_republish: str = ""
    """A window whose republish has not ended yet."""
    sequence: int = 0
    """The last one whose records were erased."""

    def do_one(self) -> None:
        """One step of upkeep, drawn."""
        self.draw.choice(_STEPS)(self)

    def _pick(self) -> SoakFeed:
        return self.draw.choice(FEEDS)

    def _compact(self) -> None:
        self.commands.run("compact", self._pick().name)

    def _expire(self) -> None:
        expected = (errors.UsageError,)  # nothing has landed yet, or no window has ended
        name = self._pick().name
        self.commands.run("expire", name, "--before", EXPIRY, "--reason", "soak", "--yes", expected=expected)

    def _audit(self) -> None:
        self.commands.run("audit", self._pick().name)

    def _check_table(self) -> None:
        name = self.draw.choice([f for f in FEEDS if f.table]).name
        self.commands.run("table", "sync", name)

    def _prune(self) -> None:
        if self.commands.site.postgres is None:
            self.commands.run("prune", "--older", PRUNE)

    def _repair(self) -> None:
        self.commands.run("repair", self._pick().name, accepted=(0, 1))

    def _look(self) -> None:
        words = self.draw.choice([("status",), ("quarantine", "list", "json_orders"), ("feeds", "check", "--offline")])
        self.commands.run(*words)

    def _land_again(self) -> None:
        feed = self._pick()
        window = show_window(pick_window(feed, self.draw))
        expected = (errors.Refused, errors.UsageError)  # retired, before the feed began, or shared with others
        self.commands.run("run", feed.name, "--window", window, "--replace", "--no-dagster", expected=expected)

    def erase(self, killable: bool = True) -> None:
        """Erase the landed records with the next sequences, of any producer."""
        (feed,) = (f for f in FEEDS if f.erases)
        first = self.sequence + 1
        self.sequence += self.draw.randint(10, 40)
        words = ("--where", f"sequence between {first} and {self.sequence}", "--reason", "soak", "--yes")
        self.commands.run("erase", feed.name, *words, accepted=(0, 1), killable=killable)

    def _republish(self) -> None:
        """Send a window of the source again, until it is sent and the audit of it is clean."""
        target = next(f for f in FEEDS if f.source)
        source = BY_NAME[target.source]
        window = self.open_republish or show_window(pick_window(source, self.draw))
        if window in self.republished:
            return
        if self.commands.run("files", source.name, "--window", window, expected=(errors.UsageError,)).code:
            return
        for _ in range(_TRIES):
            self.open_republish = window
            done = self._send(source, target, window)
            if done.is_clean:
                self.open_republish = ""
                self.republished[window] = int(done.document["records_in_all"])
                self.commands.run("audit", source.name, "--republished", str(done.document["id"]))
                return
            if any(issubclass(getattr(errors, e["error"]), errors.UsageError) for e in done.errors):
                self.open_republish = ""
                return
            if self.ended.wait(5):
                return

    def _send(self, source: SoakFeed, target: SoakFeed, window: str) -> Done:
        words = ("republish", source.name, "--topic", target.topic, "--window", window, "--keep-partitions", "--yes")
        return self.commands.run(*words, killable=True)


def pick_window(feed: SoakFeed, draw: random.Random) -> int:
    """Returns the start of one of the windows that closed some minutes ago (ms)."""
    length = feed.window * MINUTE
    now = int(time.time() * 1000)
    return now - now % length - draw.randint(2, 6) * length


_STEPS: tuple[Callable[[Upkeep], None], ...] = (
    Upkeep._compact,
    Upkeep._compact,
    Upkeep._expire,
    Upkeep._expire,
    Upkeep._audit,
    Upkeep._audit,
    Upkeep._check_table,
    Upkeep._prune,
    Upkeep._repair,
    Upkeep._look,
    Upkeep._land_again,
    Upkeep.erase,
    Upkeep.erase,
    Upkeep._republish,
    Upkeep._republish,
)
