"""A feed under fire: its topic and producers, the runs over it, and what the checker says in the end."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from sluice.pipelines import errors
from sluice.pipelines.errors import BatchIncomplete, SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.feed.stores import scheme
from tests.checker.facts import TP
from tests.checker.gather import checked, seen
from tests.checker.invariants import NAMES, Settings, Verdict
from tests.checker.lake import Folder, fetch_s3
from tests.clouds import fetch_cloud
from tests.faults.account import SEED, Account
from tests.faults.arena import Arena, words
from tests.faults.producers import transactions, verifiable
from tests.faults.runner import SIGNAL, Forked
from tests.resources.kafka.tools import is_stable, until

REPOSITORY = Path(__file__).parents[2]
SLUICE = (sys.executable, "-c", "import sys; from sluice.cli.entry import main; sys.exit(main())")
TRIES = 20
HEALED = Settings(healed=True)
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Run:
    """How a run ended: `code` as the process's, negative for a signal; what it said; how long it took."""

    code: int
    said: tuple[dict[str, Any], ...]
    seconds: float
    noise: str

    @property
    def clean(self) -> bool:
        return self.code == 0

    @property
    def error(self) -> str | None:
        """The class of what it failed with."""
        return self._failed["error"] if self._failed else None

    @property
    def _failed(self) -> dict[str, Any] | None:
        return next((line for line in self.said if "error" in line), None)

    def stopped_by(self, *kinds: type[SluiceError], says: str = "") -> None:
        """AssertionError unless it ended with one of these errors, or offset ranges of it did, told as errors are
        told.
        """
        failed = self._failed or {}
        assert self.code == 1, self
        assert issubclass(getattr(errors, failed["error"]), (*kinds, BatchIncomplete)), self
        assert failed["remedy"], self
        assert says in f"{failed['message']} → {failed['remedy']}", self
        assert "Traceback" not in self.noise, self.noise

    @property
    def told(self) -> str:
        if self.clean:
            records = sum(map(_records, self.said))
            return f"landed {records:,} records and committed, in {self.seconds:.1f} s"
        if self.code < 0:
            return f"was ended by {signal.Signals(-self.code).name} after {self.seconds:.1f} s"
        failed = self._failed
        why = f"{failed['error']}: {failed['message'].splitlines()[0][:160]}" if failed else self.noise[-400:]
        return f"failed after {self.seconds:.1f} s with {why}"


def _add_runs(lines: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The lines, each document of `sluice run` followed by its runs."""
    for line in lines:
        yield line
        feeds = line.get("feeds", ())
        for feed in feeds if isinstance(feeds, list) else ():
            yield from feed.get("runs", ()) if isinstance(feed, dict) else ()


def _records(line: Mapping[str, Any]) -> int:
    """How many records landed by what a run said: a line of the runner, or the document of `sluice run`."""
    batches = line.get("batches", ())
    return int(line.get("records", 0)) + sum(b["landed"] for b in batches if isinstance(b, dict))


class Running:
    """A run in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes] | Forked, out: Path) -> None:
        self.process, self._out, self._began = process, out, time.monotonic()

    @classmethod
    def alone(cls, command: Sequence[str], out: Path, environment: dict[str, str] | None = None) -> Running:
        """A command in a session of its own, as in a terminal of its own."""
        with out.open("wb") as sink, out.with_suffix(".err").open("wb") as noise:
            process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=noise,
                cwd=REPOSITORY,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        return cls(process, out)

    def said(self, what: str) -> dict[str, Any] | None:
        """The first line of this kind that it has said by now."""
        return next((line for line in words(self._out) if line.get("what") == what), None)

    @property
    def asleep(self) -> bool:
        """Whether it stands still, stopped by SIGSTOP."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def wait(self, seconds: float = 300) -> Run:
        """Its end. One that does not come to it in time is killed: AssertionError with what it said."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"a run did not end within {seconds} s: {list(words(self._out))}") from None
        noise = self._out.with_suffix(".err").read_text(errors="replace")
        return Run(code, tuple(_add_runs(words(self._out))), time.monotonic() - self._began, noise)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


@dataclass
class Field:
    """One feed on the arena's cluster. `settings` are its feed file's lines, `hands` the commits that others make."""

    arena: Arena
    root: Path
    topic: str
    partitions: int
    account: Account
    settings: dict[str, Any] = field(default_factory=dict)
    hands: list[tuple[TP, int | None]] = field(default_factory=list)
    notes: list[Path] = field(default_factory=list)
    observed: list[tuple[int, str]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    """Of its runs, besides what they inherit."""
    runs: int = 0
    name: str = "orders"

    @classmethod
    def fresh(cls, arena: Arena, root: Path, account: Account, partitions: int = 3, **more: Any) -> Self:
        """Over a topic of its own, nothing produced yet."""
        topic = f"{re.sub(r'[^a-z0-9]+', '-', account.fault)[:60]}-{next(_numbers)}"
        arena.create(topic, partitions, first=next(_numbers))
        return cls(arena, root, topic, partitions, account, **more)

    @property
    def group(self) -> str:
        return f"g-{self.topic}"

    def feed(self) -> Feed:
        """The feed as its file says now."""
        path = self.root / "feeds" / f"{self.name}.yaml"
        path.parent.mkdir(exist_ok=True)
        kafka = f"{{bootstrap: '{self.arena.behind}'}}"
        lines = {"kafka": kafka, "topics": self.topic, "start": "earliest", "group": self.group, **self.settings}
        written = path.with_suffix(".new")  # a run that was started a moment ago may be reading it
        written.write_text("".join(f"{k}: {v}\n" for k, v in lines.items()))
        written.replace(path)
        return load_feed(path, {})

    @property
    def folder(self) -> Folder:
        """The lake as files."""
        return self._brought("")

    def _brought(self, below: str) -> Folder:
        """Returns the files below a path of the lake. Variables have a store's address and keys."""
        lake = self.feed().lake
        if scheme(lake):
            fetch = fetch_s3 if lake.startswith("s3://") else fetch_cloud
            return Folder(fetch(lake, Path(tempfile.mkdtemp(dir=self.root)), below=below), self.name)
        return Folder(Path(lake), self.name)

    @contextmanager
    def producing(self, rate: int = 200) -> Iterator[None]:
        """Kafka's producer and transactions, while the block lasts; they go on through whatever happens."""
        plain, tied = self.noted("plain"), self.noted("tied")
        with ExitStack() as stack:
            stack.enter_context(verifiable(self.arena, self.topic, plain, rate))
            stack.enter_context(transactions(self.arena, self.topic, self.partitions, tied, SEED))
            yield

    def noted(self, kind: str) -> Path:
        """Where a producer notes what became of what it sent."""
        path = self.root / f"{self.name}-{kind}-{len(self.notes)}.jsonl"
        self.notes.append(path)
        return path

    # -- runs

    def start(self, point: str = "", environment: dict[str, str] | None = None) -> Running:
        """A run in a process of its own, to be killed at the point if one is named."""
        self.feed()
        self.runs += 1
        path = self.root / "feeds" / f"{self.name}.yaml"
        out = self.root / f"run-{self.runs}.out"
        environment = {**self.environment, **(environment or {})}
        return Running(Forked([str(path), *([point] if point else [])], out, environment), out)

    def paused(self, point: str, environment: dict[str, str] | None = None) -> Running:
        """A run that was stopped (SIGSTOP) at the point: wait for its end, once it was sent SIGCONT."""
        running = self.start(point, {**(environment or {}), SIGNAL: "SIGSTOP"})
        until(lambda: running.process.poll() is not None or running.asleep, 300)
        assert running.process.poll() is None, f"it never came to the point {point}: {running.wait()}"
        self.account.did(f"a run stands {point}")
        return running

    def start_cli(self, *arguments: str, environment: dict[str, str] | None = None) -> Running:
        """`sluice run` on the feed, as its users start it: with Dagster and Spark."""
        self.feed()
        self.runs += 1
        command = [*SLUICE, "run", self.name, "--project", str(self.root), "--json", *arguments]
        return Running.alone(command, self.root / f"run-{self.runs}.out", environment)

    def run(self, point: str = "") -> Run:
        """A run, to its end, told."""
        return self.ended(self.start(point), about=f"a run ({point})" if point else "a run")

    def ended(self, running: Running, seconds: float = 300, about: str = "a run") -> Run:
        ran = running.wait(seconds)
        self.observed += seen(self._brought(f"_sluice/{self.name}/log/"))
        self.account.count("runs")
        self.account.count("clean runs" if ran.clean else "runs killed" if ran.code < 0 else "runs failed")
        self.account.did(f"{about} {ran.told}")
        return ran

    def normal(self, runs: int = 2) -> None:
        """Runs while nothing is wrong; the last one is what others are measured against."""
        for _ in range(runs):
            ran = self.run()
            assert ran.clean, ran
        self.account.measured("normal_s", ran.seconds)

    def recovered(self) -> Run:
        """Runs until one is clean; how long the first one after the fault took, and all of them, is kept."""
        began, first = time.monotonic(), None
        for _ in range(TRIES):
            ran = self.run()
            first = first or ran
            if ran.clean:
                self.account.measured("first_after_s", first.seconds)
                self.account.measured("clean_after_s", time.monotonic() - began)
                return ran
        raise AssertionError(
            f"no clean run in {TRIES} after everything was healed; the last one {ran.told}\n{ran.noise}"
        )

    # -- the end

    def proven(
        self,
        settings: Settings = HEALED,
        undecided: Iterable[int] = (),
        topics: Iterable[str] = (),
    ) -> Verdict:
        """The last run over everything that is stable, and the checker's verdict: nothing broken, all decided."""
        self.settled()
        self.recovered_quietly()
        evidence = self.root / "evidence"
        verdict = checked(
            self.arena.kafka, self.folder, evidence, self.notes, settings, self.hands, self.observed, topics
        )
        self.account.checked(verdict)
        assert verdict.holds, str(verdict)
        assert set(NAMES) - set(verdict.decided) <= set(undecided), str(verdict)
        return verdict

    def recovered_quietly(self) -> None:
        for _ in range(TRIES):
            if (ran := self.ended(self.start())).clean:
                return
        raise AssertionError(f"no clean run at the end; the last one {ran.told}\n{ran.noise}")

    def settled(self) -> None:
        """Wait until no transaction is open: those that nobody ended time out."""
        until(lambda: is_stable(self.arena.kafka, self.topic), 120)

    def with_settings(self, **settings: Any) -> Field:
        return replace(self, settings={**self.settings, **settings})
