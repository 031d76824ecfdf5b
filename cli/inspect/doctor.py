"""`sluice doctor`: whether all that the feeds need is there and works, line by line. Reads only."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app import completers
from sluice.cli.app.invocation import Session, command
from sluice.cli.app.parameters import flag
from sluice.cli.terminal.output import bad, good, heading, safe, warn
from sluice.pipelines.errors import (
    SetupError,
    SluiceError,
    UsageError,
    check_address_limit,
)
from sluice.pipelines.model.health import (
    Diagnosis,
    Health,
    of_error,
    of_unforeseen,
    report_failure,
    report_ok,
    report_skipped,
    report_warning,
)
from sluice.pipelines.model.receipts import Progress, Scheduler
from sluice.pipelines.util import extras
from sluice.pipelines.util.documents import Internal
from sluice.pipelines.util.units import many

if TYPE_CHECKING:
    from sluice.assets.specs.feed_files import FeedFiles
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.feed.kafka_section import KafkaSettings
    from sluice.resources.project import Project

WRONG = 1
SECONDS = 300.0
"""Time limit of a group beyond those of its checks, and beyond the start of a session of Spark."""


def register(app: typer.Typer) -> None:
    command(app)(doctor)


def doctor(
    session: Session,
    feed: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FEED",
            help="Only what these feeds need.",
            show_default="all feeds",
            autocompletion=completers.complete_feeds,
        ),
    ] = None,
    spark: Annotated[bool, flag("--spark", "Start a Spark session, too: it takes seconds to a minute.")] = False,
) -> int:
    """Check the machine, the project, Kafka, the lake and Spark, and report problems with their remedies.

    It changes nothing, and bounds each check in time. Exit 1 if a check fails.

    $ sluice doctor
    $ sluice doctor orders --spark
    """
    check_address_limit()
    groups = [*_groups(session, feed or [], spark=spark)]
    with session.terminal.progress() as meter:
        _look(groups, lambda done: meter(Progress("looking at", done, len(groups), _under_way(groups))))
    session.terminal.show(*(line for group in groups for line in _view(group)), _sum(groups))
    session.terminal.print_document(healthy=not _count(groups, Health.FAILED), groups=groups)
    return WRONG if _count(groups, Health.FAILED) else 0


@dataclass
class CheckGroup:
    """Checks that run together, for these feeds or for all. `over` is set when they end."""

    title: str
    look: Internal[Callable[[], list[Diagnosis]]]
    feeds: tuple[str, ...] = ()
    seconds: Internal[float] = SECONDS
    checks: list[Diagnosis] = field(default_factory=list)
    over: Internal[threading.Event] = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            self.checks = self.look()
        except SluiceError as error:
            self.checks = [of_error(self.title.lower(), error)]
        except Exception as error:  # noqa: BLE001 - a check that ended so must not count as sound
            self.checks = [of_unforeseen(self.title.lower(), error)]
        finally:
            self.over.set()


def _groups(session: Session, names: Sequence[str], *, spark: bool) -> Iterator[CheckGroup]:
    """Returns the groups of checks: one for each different Kafka, lake and Spark. Raises FeedError."""
    from sluice.resources.health import examine, machine_checks

    try:
        files = session.files
    except UsageError as error:
        if names:
            raise
        outside = of_error("feeds", error)
        yield CheckGroup("This machine", lambda: examine((), machine_checks.CHECKS))
        yield CheckGroup("Project", lambda: [outside])
        return
    every = {*(f.stored for f in files.every.values()), *(path.stem for path in files.broken)}
    files = _only(files, names) if names else files
    yield CheckGroup("This machine", lambda: examine((*files.feeds.values(),), machine_checks.CHECKS))
    project = session.project
    yield CheckGroup(
        f"Project {project.root}",
        lambda: [_check_scheduler(project), *_check_keys(project, files), *_check_dagster(session, files)],
    )
    yield from _of_feeds([*files.feeds.values()], every, spark=spark)


def _only(files: FeedFiles, names: Sequence[str]) -> FeedFiles:
    """These feeds alone, sound or broken. Raises FeedError when there is none of a name."""
    broken = {path: error for path, error in files.broken.items() if path.stem in names}
    stems = {path.stem for path in broken}
    feeds = {name: files.feed(name) for name in names if name not in stems}
    return replace(files, feeds=feeds, broken=broken)


def _check_keys(project: Project, files: FeedFiles) -> list[Diagnosis]:
    """Returns a warning for each feed file with deprecated keys."""
    from sluice.pipelines.feed.load import find_feed_file, list_deprecated_keys

    deprecated = {name: list_deprecated_keys(find_feed_file(project.feeds_folder, name)) for name in files.feeds}
    return [
        report_warning(
            f"{name}: deprecated keys",
            f"{', '.join(keys)}: 0.4.0 refuses them, not before 1 June 2027",
            f"write {', '.join(keys.values())}",
        )
        for name, keys in deprecated.items()
        if keys
    ]


def _check_scheduler(project: Project) -> Diagnosis:
    """Returns the scheduler that the project names, and Airflow's version if it is installed."""
    try:
        scheduler = project.fleet().scheduler
    except SluiceError as error:
        return of_error("scheduler", error)
    version = _find_airflow()
    if not version and scheduler is Scheduler.AIRFLOW:
        return report_ok("scheduler", "airflow, which is not in this environment")
    return report_ok("scheduler", f"{scheduler}; Airflow {version} is installed" if version else scheduler.value)


def _find_airflow() -> str:
    """Returns Airflow's version without importing it; empty if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    for name in ("apache-airflow-core", "apache-airflow"):  # Airflow 3, Airflow 2
        with suppress(PackageNotFoundError):
            return version(name)
    return ""


def _check_dagster(session: Session, files: FeedFiles) -> list[Diagnosis]:
    try:
        with extras.name_missing():
            from sluice.assets.operations.dagster_health import examine_project  # late: it loads Dagster
    except SetupError as error:  # readers need none
        return [
            *(of_error("feeds", e) for e in files.broken.values()),
            report_skipped("Dagster", error.message, error.remedy),
        ]
    return examine_project(session.project, files)


def _check_kafka(settings: KafkaSettings, feeds: tuple[Feed, ...]) -> list[Diagnosis]:
    try:
        with extras.name_missing():
            from sluice.resources.health.kafka_checks import examine_kafka
    except SetupError as error:  # readers need none
        return [report_skipped("Kafka", error.message, error.remedy)]
    return examine_kafka(settings, feeds)


def _of_feeds(feeds: Sequence[Feed], names: Collection[str], *, spark: bool) -> Iterator[CheckGroup]:
    from sluice.pipelines.feed.feed import group_feeds
    from sluice.resources.health.spark_checks import examine_spark

    for of in group_feeds(feeds, lambda f: f.kafka):
        kafka = of[0].kafka
        yield CheckGroup(f"Kafka {kafka.bootstrap}", partial(_check_kafka, kafka, tuple(of)), _list_names(of))
    for of in group_feeds(feeds, lambda f: (f.lake, f.store)):
        yield CheckGroup(f"Lake {of[0].lake}", partial(_check_lake, of, names), _list_names(of))
    for of in group_feeds(feeds, lambda f: f.spark):
        title, seconds = f"Spark {of[0].spark.master or 'local'}", SECONDS + of[0].spark.start_timeout / 1000
        yield CheckGroup(title, partial(examine_spark, of[0], start=spark), _list_names(of), seconds)


def _check_lake(feeds: Sequence[Feed], names: Collection[str]) -> list[Diagnosis]:
    """The lake, and the ledgers in it where it answers. `names` are those of all feed files of the project."""
    from sluice.resources.health.lake_checks import examine_lake

    lake = examine_lake(feeds[0].lake, feeds[0].store)
    if any(one.health is Health.FAILED for one in lake):
        return [*lake, report_skipped("ledger", "not read: see above")]
    try:
        with extras.name_missing():
            from sluice.resources.health.lake_checks import examine_ledgers
    except SetupError as error:  # who only reads has no client of Kafka
        return [*lake, report_skipped("ledger", error.message, error.remedy)]
    return [*lake, *examine_ledgers(feeds, names)]


def _list_names(feeds: Sequence[Feed]) -> tuple[str, ...]:
    return tuple(f.name for f in feeds)


def _look(groups: Sequence[CheckGroup], report: Callable[[int], None]) -> None:
    """Run all groups at once. One that does not end within its time has failed."""
    started = time.monotonic()
    for group in groups:
        # `Thread.start` waits, without a limit, for the thread to begin, which it never does if memory runs out.
        _thread.start_new_thread(group.run, ())
    report(0)
    while waiting := [group for group in groups if not group.over.wait(0.1)]:
        report(len(groups) - len(waiting))
        for group in waiting:
            if time.monotonic() - started > group.seconds:
                text = f"no end within {group.seconds:.0f} s"
                group.checks = [report_failure(group.title.lower(), text, "repeat; if it hangs again, report it")]
                group.over.set()


def _under_way(groups: Sequence[CheckGroup]) -> str:
    return next((g.title for g in groups if not g.over.is_set()), "")


# -- for people

_MARKS: dict[Health, Callable[[str], Text]] = {
    Health.OK: good,
    Health.WARNING: warn,
    Health.FAILED: bad,
    Health.SKIPPED: lambda text: Text.assemble(("– ", "dim"), (safe(text), "dim")),
}


def _view(group: CheckGroup) -> Iterator[RenderableType]:
    yield heading(group.title, ", ".join(group.feeds))
    for one in group.checks:
        yield Text("  ") + _MARKS[one.health](f"{one.title}: {one.found}")
        if one.remedy:
            yield f"    → {one.remedy}"


def _sum(groups: Sequence[CheckGroup]) -> Text:
    wrong, odd = _count(groups, Health.FAILED), _count(groups, Health.WARNING)
    odd_too = f", {many(odd, 'thing')} to check" if odd else ""
    if wrong:
        return Text("\n") + bad(f"{many(wrong, 'thing')} wrong{odd_too}")
    return Text("\n") + (warn(f"nothing is wrong{odd_too}") if odd else good("nothing is wrong"))


def _count(groups: Sequence[CheckGroup], health: Health) -> int:
    return sum(one.health is health for group in groups for one in group.checks)
