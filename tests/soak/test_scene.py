"""`make soak MINUTES=…`: the endurance scene, from the first record to the last verdict.

A round of faults, upkeep and readers; then healing, quiet, and the checker over some feeds; again and again. A line of
progress each minute. At the end every feed is judged, and every slope. The folder stays: build/soak.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import dagster as dg
import pytest

from tests.faults.account import SEED
from tests.soak import judgement
from tests.soak.commands import Commands, Weather
from tests.soak.faults import Chaos
from tests.soak.feeds import FEEDS, SENSOR
from tests.soak.journal import MOST_FINDINGS, Journal
from tests.soak.readers import Readers
from tests.soak.samples import Sampler
from tests.soak.site import Site, check_feeds, open_site
from tests.soak.upkeep import SCHEDULER_PAUSE, UPKEEP_PAUSE, Scheduler, Upkeep
from tests.soak.verdicts import Checks, plan_round, sum_counts
from tests.soak.writers import Writers
from tests.stores import Store

pytestmark = [pytest.mark.soak, pytest.mark.kafka]

MINUTES = float(os.environ.get("SLUICE_SOAK_MINUTES") or 30)
ROUND = 7 * 60
"""Seconds of faults between two checks."""
CHECKED = 3
"""Feeds of each round."""
DEAD_SECONDS, BEGUN_SECONDS = 900, 1
OTHER_SCHEDULER = re.compile(r"(\.PlanBusy|^\w+): .* is at work: run \w+ without a scheduler .* lives")
BUILD = Path(__file__).parents[2] / "build" / "soak"


class Gate:
    """Lets turns through while it is open. Closing it waits for those at work."""

    def __init__(self) -> None:
        self._turns, self._is_open = 0, True
        self._changed = threading.Condition()

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._is_open)
            self._turns += 1
        try:
            yield
        finally:
            with self._changed:
                self._turns -= 1
                self._changed.notify_all()

    @contextmanager
    def close(self) -> Iterator[None]:
        with self._changed:
            self._is_open = False
            self._changed.wait_for(lambda: self._turns == 0)
        try:
            yield
        finally:
            with self._changed:
                self._is_open = True
                self._changed.notify_all()


class Scene:
    """The concurrent actors of the scene, and their coordination."""

    def __init__(self, site: Site, journal: Journal) -> None:
        self.site, self.journal, self.gate = site, journal, Gate()
        self.weather, self.ended = Weather(), threading.Event()
        self.commands = Commands(site, self.weather)
        notes = site.project.parent / "notes"
        self.writers = Writers(site.arena.kafka.bootstrap, notes, SEED, site.numbers, journal)
        self.scheduler = Scheduler(self.commands, self._draw("scheduler"))
        self.upkeep = Upkeep(self.commands, self._draw("upkeep"), self.ended)
        self.readers = Readers(self.commands, self.writers, self._draw("readers"))
        self.chaos = Chaos(site, self.commands, self.weather, self._draw("faults"))
        self.checks = Checks(self.commands, self.writers, self.readers, self.upkeep)
        self.sampler = Sampler(site)
        self._explained = set[str]()

    def play(self, minutes: float) -> None:
        """Run the scene for its duration, then judge every feed."""
        end, number = time.monotonic() + 60 * minutes, 0
        with ExitStack() as stack:
            stack.enter_context(self.writers.run())
            stack.enter_context(self._repeat("samples", self._sample, lambda: 0, gated=False))
            self.commands.run("run", "--all", "--no-dagster")  # ledgers exist before the first fault
            self.site.switch_on()
            self.site.deployment.start_sensor(SENSOR)
            with ExitStack() as turns:
                pauses = {"scheduler": SCHEDULER_PAUSE, "upkeep": UPKEEP_PAUSE}
                for name, step in (("scheduler", self.scheduler.run_some), ("upkeep", self._do_upkeep)):
                    pause = self._draw(f"pauses of {name}")
                    turns.enter_context(
                        self._repeat(name, step, lambda pause=pause, name=name: pause.uniform(*pauses[name]))
                    )
                turns.enter_context(self._repeat("faults", self.chaos.play_fault, lambda: 1))
                while time.monotonic() < end and len(self.journal.findings) < MOST_FINDINGS:
                    self.ended.wait(max(0.0, min(ROUND, end - time.monotonic())))
                    self._check(plan_round(number, CHECKED))
                    number += 1
            self._check([f.name for f in FEEDS], goes_on=False)

    def _draw(self, of: str) -> random.Random:
        return random.Random(f"{SEED} {of}")

    def _do_upkeep(self) -> None:
        self.upkeep.do_one()
        self.readers.query_one()

    def _check(self, names: list[str], *, goes_on: bool = True) -> None:
        """Heal, settle, and judge some feeds while nothing else is at work."""
        self.chaos.ended.set()
        with self.gate.close():
            self.site.heal()
            self._await_ticks()
            self.site.switch_off()
            self._explain_failures()
            self.checks.check_feeds(names)
            if goes_on:
                self.site.switch_on()
        self.chaos.ended.clear()

    def _await_ticks(self) -> None:
        """Wait until the schedules' ticks have ended each run whose process was killed; a finding if they do not."""
        end = time.monotonic() + DEAD_SECONDS
        while dead := self.commands.run("unstick", "--dry-run").document.get("ended"):
            if time.monotonic() > end:
                self.journal.fail(f"no tick ended runs that were killed: {dead}")
                self.commands.run("unstick")
                return
            self.ended.wait(20)

    def _explain_failures(self) -> None:
        """Report each failed run of Dagster that had begun, without a fault at that time, as a finding.

        A busy code server starts no run in time: such a run ends when it begins, and another one follows. A feed
        that a live run of the other scheduler lands is refused.
        """
        for run in self.site.list_runs(dg.DagsterRunStatus.FAILURE):
            if run["runId"] in self._explained or not run["startTime"] or not run["endTime"]:
                continue
            self._explained.add(run["runId"])
            faults = self.weather.list_faults(run["startTime"], run["endTime"])
            errors = self.site.list_errors(run["runId"])
            refused = errors and all(OTHER_SCHEDULER.search(error) for error in errors)
            text = f"{run['jobName']} {run['runId']} by {'; '.join(errors) or 'no step'}"
            self.journal.note("failed run", f"{text}, during: {', '.join(faults)}")
            if not faults and not refused and run["endTime"] - run["startTime"] > BEGUN_SECONDS:
                self.journal.fail(f"run {text} failed without a fault")

    @contextmanager
    def _repeat(
        self, name: str, step: Callable[[], None], pause: Callable[[], float], *, gated: bool = True
    ) -> Iterator[None]:
        """Run a thread that repeats a step until the block ends; an exception is a finding."""
        over = threading.Event()

        def take_steps() -> None:
            while not over.is_set():
                try:
                    if gated:
                        with self.gate.turn():
                            if over.is_set():
                                return
                            step()
                    else:
                        step()
                except Exception as error:  # noqa: BLE001 - the scene goes on and fails at its end
                    self.journal.fail(f"{name}: {type(error).__name__}: {error}")
                over.wait(pause() if gated else 60 - time.time() % 60)

        thread = threading.Thread(target=take_steps, name=name, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(1200)

    def _sample(self) -> None:
        line = self.sampler.measure()
        self.journal.sample(line)
        self.journal.print_line(self.describe(line["lag"], line["processes"]))

    def describe(self, lag: dict[str, float], processes: dict[str, dict[str, float]]) -> str:
        """Returns a line of progress."""
        journal = self.journal
        behind = sum(n > 0 for n in lag.values())
        holds = sum(v.holds for v in self.checks.verdicts)
        memory = " ".join(f"{name} {p['memory']:.0f}" for name, p in processes.items())
        return (
            f"{journal.minutes:6.1f} min  {behind} feeds behind by {sum(lag.values()):,.0f}; "
            f"{journal.count('fault')} faults, {journal.count('command')} commands, {self.readers.rows:,} rows read; "
            f"checker: {holds} of {len(self.checks.verdicts)} hold; {len(journal.findings)} findings; MiB: {memory}"
        )


# kafka-python, which the scene's own admin clients use, leaves the socket of a refused connection open.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_soak_has_no_findings_and_no_growth(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, s3_store.environment[name])
    folder = BUILD / f"{SEED}-{time.strftime('%m%d-%H%M%S')}"
    folder.mkdir(parents=True)

    print_line = partial(print, flush=True)
    journal = Journal(folder, print_line)
    print_line(f"\nsoak of {MINUTES:g} minutes, seed {SEED}: {folder}")
    with open_site(folder, s3_store, SEED, journal) as site:
        check_feeds(site)
        print_line(f"{journal.minutes:6.1f} min  {len(FEEDS)} feeds, and everything runs")
        scene = Scene(site, journal)
        scene.play(MINUTES)
    print_line(f"{sum_counts(scene.checks.verdicts):,} records compared with the log")
    growing = judgement.judge_folder(folder, print_line)
    assert (journal.findings, growing) == ([], [])
