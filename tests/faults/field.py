"""A feed under faults: its topic and producers, its runs, and the checker's verdict."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
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
from tests.checker.gather import check_local, list_writes
from tests.checker.invariants import NAMES, Settings, Verdict
from tests.checker.lake import Folder, fetch_s3
from tests.clouds import fetch_cloud
from tests.faults.account import SEED, Account
from tests.faults.arena import Arena, read_json_lines
from tests.faults.producers import run_transactions, run_verifiable_producer
from tests.faults.runner import SIGNAL, ForkedRun
from tests.integration.support import SLUICE
from tests.resources.kafka.tools import is_stable, wait_until

REPOSITORY = Path(__file__).parents[2]
TRIES = 20
HEALED = Settings(healed=True)
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Run:
    """The end of a run: the exit `code`, negative for a signal; the JSON `lines` of its output; its duration."""

    code: int
    lines: tuple[dict[str, Any], ...]
    seconds: float
    stderr: str

    @property
    def clean(self) -> bool:
        return self.code == 0

    @property
    def error(self) -> str | None:
        """The name of the error's class."""
        return self._failure["error"] if self._failure else None

    @property
    def _failure(self) -> dict[str, Any] | None:
        return next((line for line in self.lines if "error" in line), None)

    def expect_error(self, *kinds: type[SluiceError], mentions: str = "") -> None:
        """Assert that the run, or some of its offset ranges, failed with one of these errors.

        The error must have a remedy and no traceback; message or remedy must contain `mentions`.
        """
        failure = self._failure or {}
        assert self.code == 1, self
        assert issubclass(getattr(errors, failure["error"]), (*kinds, BatchIncomplete)), self
        assert failure["remedy"], self
        assert mentions in f"{failure['message']} → {failure['remedy']}", self
        assert "Traceback" not in self.stderr, self.stderr

    @property
    def summary(self) -> str:
        if self.clean:
            records = sum(map(_count_records, self.lines))
            return f"landed {records:,} records and committed, in {self.seconds:.1f} s"
        if self.code < 0:
            return f"was ended by {signal.Signals(-self.code).name} after {self.seconds:.1f} s"
        failure = self._failure
        reason = f"{failure['error']}: {failure['message'].splitlines()[0][:160]}" if failure else self.stderr[-400:]
        return f"failed after {self.seconds:.1f} s with {reason}"


def _add_runs(lines: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the lines, each document of `sluice run` followed by its runs."""
    for line in lines:
        yield line
        feeds = line.get("feeds", ())
        for feed in feeds if isinstance(feeds, list) else ():
            yield from feed.get("runs", ()) if isinstance(feed, dict) else ()


def _count_records(line: Mapping[str, Any]) -> int:
    """Returns the number of landed records in a line of the runner or a document of `sluice run`."""
    batches = line.get("batches", ())
    return int(line.get("records", 0)) + sum(b["landed"] for b in batches if isinstance(b, dict))


class Running:
    """A run in a separate process."""

    def __init__(self, process: subprocess.Popen[bytes] | ForkedRun, out: Path) -> None:
        self.process, self._out, self._began = process, out, time.monotonic()

    @classmethod
    def spawn(cls, command: Sequence[str], out: Path, environment: dict[str, str] | None = None) -> Running:
        """Start a command in a new session, as from a terminal."""
        with out.open("wb") as sink, out.with_suffix(".err").open("wb") as stderr:
            process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=stderr,
                cwd=REPOSITORY,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        return cls(process, out)

    @property
    def is_stopped(self) -> bool:
        """True while SIGSTOP has the process stopped."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def wait(self, seconds: float = 300) -> Run:
        """Wait for the end. A run that exceeds the time is killed: AssertionError with its output."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"a run did not end within {seconds} s: {list(read_json_lines(self._out))}") from None
        stderr = self._out.with_suffix(".err").read_text(errors="replace")
        return Run(code, tuple(_add_runs(read_json_lines(self._out))), time.monotonic() - self._began, stderr)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


@dataclass
class Field:
    """One feed on the arena's cluster. `settings` are its feed file's lines.

    `foreign_commits` are offsets that other clients committed to the feed's group.
    """

    arena: Arena
    root: Path
    topic: str
    partitions: int
    account: Account
    settings: dict[str, Any] = field(default_factory=dict)
    foreign_commits: list[tuple[TP, int | None]] = field(default_factory=list)
    notes: list[Path] = field(default_factory=list)
    observed_entries: list[tuple[int, str]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    """Additional environment variables of its runs."""
    runs: int = 0
    name: str = "orders"
    fields: list[dict[str, Any]] = field(default_factory=list)
    """Fields that are added to the values of transactions and of the history, in turn."""

    @classmethod
    def create(cls, arena: Arena, root: Path, account: Account, partitions: int = 3, **more: Any) -> Self:
        """Create a feed over a new, empty topic."""
        topic = f"{re.sub(r'[^a-z0-9]+', '-', account.fault)[:60]}-{next(_numbers)}"
        arena.create(topic, partitions, first=next(_numbers))
        return cls(arena, root, topic, partitions, account, **more)

    @property
    def group(self) -> str:
        return f"g-{self.topic}"

    def write_feed(self) -> Feed:
        """Write the feed file and load it."""
        path = self.root / "feeds" / f"{self.name}.yaml"
        path.parent.mkdir(exist_ok=True)
        kafka = f"{{bootstrap: '{self.arena.proxied_bootstrap}'}}"
        lines = {"kafka": kafka, "topics": self.topic, "start": "earliest", "group": self.group, **self.settings}
        draft = path.with_suffix(".new")  # a run that has just started may be reading it
        draft.write_text("".join(f"{k}: {v}\n" for k, v in lines.items()))
        draft.replace(path)
        return load_feed(path, {})

    @property
    def folder(self) -> Folder:
        """The lake's files."""
        return self._fetch_lake("")

    def _fetch_lake(self, below: str) -> Folder:
        """Returns the files below a path of the lake. Environment variables have a store's address and keys."""
        lake = self.write_feed().lake
        if scheme(lake):
            fetch = fetch_s3 if lake.startswith("s3://") else fetch_cloud
            return Folder(fetch(lake, Path(tempfile.mkdtemp(dir=self.root)), below=below), self.name)
        return Folder(Path(lake), self.name)

    @contextmanager
    def run_producers(self, rate: int = 200) -> Iterator[None]:
        """Run Kafka's producer and transactions inside the block. Faults do not stop them."""
        plain, transactional = self.add_notes("plain"), self.add_notes("tied")
        with ExitStack() as stack:
            stack.enter_context(run_verifiable_producer(self.arena, self.topic, plain, rate))
            stack.enter_context(
                run_transactions(self.arena, self.topic, self.partitions, transactional, SEED, self.fields)
            )
            yield

    def add_notes(self, kind: str) -> Path:
        """Returns a new file for a producer's notes on the outcome of each record."""
        path = self.root / f"{self.name}-{kind}-{len(self.notes)}.jsonl"
        self.notes.append(path)
        return path

    # -- runs

    def start(self, point: str = "", environment: dict[str, str] | None = None) -> Running:
        """Start a run that is killed at the point, if there is one."""
        self.write_feed()
        self.runs += 1
        path = self.root / "feeds" / f"{self.name}.yaml"
        out = self.root / f"run-{self.runs}.out"
        environment = {**self.environment, **(environment or {})}
        return Running(ForkedRun([str(path), *([point] if point else [])], out, environment), out)

    def start_paused(self, point: str, environment: dict[str, str] | None = None) -> Running:
        """Start a run and wait until SIGSTOP stops it at the point. The caller sends SIGCONT."""
        running = self.start(point, {**(environment or {}), SIGNAL: "SIGSTOP"})
        wait_until(lambda: running.process.poll() is not None or running.is_stopped, 300)
        assert running.process.poll() is None, f"it never came to the point {point}: {running.wait()}"
        self.account.log(f"a run stands {point}")
        return running

    def start_cli(self, *arguments: str, environment: dict[str, str] | None = None) -> Running:
        """Start `sluice run` on the feed as users do, with Dagster and Spark."""
        self.write_feed()
        self.runs += 1
        command = [*SLUICE, "run", self.name, "--project", str(self.root), "--json", *arguments]
        return Running.spawn(command, self.root / f"run-{self.runs}.out", environment)

    def run(self, point: str = "") -> Run:
        """Run to the end and log the outcome."""
        return self.wait_for_run(self.start(point), about=f"a run ({point})" if point else "a run")

    def wait_for_run(self, running: Running, seconds: float = 300, about: str = "a run") -> Run:
        run = running.wait(seconds)
        self.observed_entries += list_writes(self._fetch_lake(f"_sluice/{self.name}/log/"))
        self.account.count("runs")
        self.account.count("clean runs" if run.clean else "runs killed" if run.code < 0 else "runs failed")
        self.account.log(f"{about} {run.summary}")
        return run

    def run_baseline(self, runs: int = 2) -> None:
        """Run without faults. The last run's duration is the baseline for others."""
        for _ in range(runs):
            run = self.run()
            assert run.clean, run
        self.account.record_duration("normal_s", run.seconds)

    def run_until_clean(self) -> Run:
        """Run until a run is clean. Records the duration of the first run and of all of them."""
        began, first = time.monotonic(), None
        for _ in range(TRIES):
            run = self.run()
            first = first or run
            if run.clean:
                self.account.record_duration("first_after_s", first.seconds)
                self.account.record_duration("clean_after_s", time.monotonic() - began)
                return run
        raise AssertionError(
            f"no clean run in {TRIES} after everything was healed; the last one {run.summary}\n{run.stderr}"
        )

    # -- the end

    def verify(
        self,
        settings: Settings = HEALED,
        undecided: Iterable[int] = (),
        topics: Iterable[str] = (),
    ) -> Verdict:
        """Land all stable records, then assert that the checker finds nothing broken and decides every invariant."""
        self.wait_until_stable()
        self.run_until_clean_unmeasured()
        evidence = self.root / "evidence"
        verdict = check_local(
            self.arena.kafka,
            self.folder,
            evidence,
            self.notes,
            settings,
            self.foreign_commits,
            self.observed_entries,
            topics,
        )
        self.account.record_verdict(verdict)
        assert verdict.holds, str(verdict)
        assert set(NAMES) - set(verdict.decided) <= set(undecided), str(verdict)
        return verdict

    def run_until_clean_unmeasured(self) -> None:
        for _ in range(TRIES):
            if (run := self.wait_for_run(self.start())).clean:
                return
        raise AssertionError(f"no clean run at the end; the last one {run.summary}\n{run.stderr}")

    def wait_until_stable(self) -> None:
        """Wait until no transaction is open. Abandoned ones time out."""
        wait_until(lambda: is_stable(self.arena.kafka, self.topic), 120)

    def with_settings(self, **settings: Any) -> Field:
        return replace(self, settings={**self.settings, **settings})
