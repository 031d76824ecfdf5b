"""`sluice feeds`: the project's feed files and the problems in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from sluice.cli.app import completers
from sluice.cli.app.invocation import FeedName, Session, command, make_group
from sluice.cli.options.request_options import Yes
from sluice.cli.terminal.output import format_dry_run, format_error, good, heading, table, warn
from sluice.pipelines.errors import Failed, SluiceError, UsageError, choose_exit_code
from sluice.pipelines.util.documents import Flat
from sluice.pipelines.util.units import many

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed


class FileKind(StrEnum):
    """The files that have a schema."""

    FEED = "feed"
    FLEET = "fleet"
    NOTIFY = "notify"


group = make_group("List and check the feeds of this project.", "sluice feeds list", "sluice feeds check")


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="feeds")


@command(group, name="list")
def list_(session: Session) -> int:
    """List all feeds. Opens no connection.

    $ sluice feeds list
    """
    files = session.files
    rows = [
        (
            f"{f.name} (retired)" if f.retired else f.name,
            str(f.topics),
            f.group,
            str(f.start),
            str(f.isolation),
            str(f.commit),
            _contract(f),
            f.lake,
        )
        for f in files.every.values()
    ]
    names = ("feed", "topics", "group", "start", "isolation", "commit", "contract", "lake")
    session.terminal.show(
        table(names, rows, optional="contract isolation commit")
        if rows
        else f"no feed in {session.project.feeds_folder}"
    )
    session.terminal.show(*(line for e in files.broken.values() for line in format_error(e)))
    session.terminal.print_document(
        feeds=[_build_document(f) for f in files.every.values()],
        broken=[BrokenFile(path, error) for path, error in files.broken.items()],
    )
    return choose_exit_code(files.broken.values())


@dataclass(frozen=True, slots=True)
class BrokenFile:
    file: Path
    error: Flat[SluiceError]


@command(group)
def check(
    session: Session,
    offline: Annotated[bool, typer.Option("--offline", help="Skip schema registries.")] = False,
) -> int:
    """Check all feed files, fleet.yaml and notify.yaml, and list every problem. Exit 2 if there are any.

    For a feed with a registry, it also compares the columns of the registry's schema and of the schema_file. If a
    registry does not answer, or lacks the schema, the exit code is that error's. --offline skips registries.

    It warns about columns that have the name of an old partition key of the feed's lake.

    $ sluice feeds check
    $ sluice feeds check --offline
    """
    feeds = session.project.feeds()
    session.project.fleet()
    session.project.notify()
    folder = session.project.feeds_folder
    lines = [f"{many(len(feeds), 'feed')} in {folder}: {', '.join(feeds) or 'none'}"]
    lines += [f"{name}: a contract of {_contract(feed)}" for name, feed in feeds.items() if feed.contract]
    session.terminal.show(*map(good, lines))
    session.terminal.show(*(warn(f"{name}: {note}") for name, note in _list_overridden(feeds, offline).items()))
    registered = [f for f in feeds.values() if f.reader and f.registry and not offline]
    with session.terminal.working("querying schema registries"):
        results = {feed.name: _compare_schema(session, feed) for feed in registered}
    errors = [note for note in results.values() if isinstance(note, SluiceError)]
    for name, note in results.items():
        where = f"{name}: "
        session.terminal.show(*(format_error(note, where) if isinstance(note, SluiceError) else [good(where + note)]))
    schemas = {n: s if isinstance(s, SluiceError) else {"said": s} for n, s in results.items()}
    session.terminal.print_document(feeds=list(feeds), schemas=schemas)
    return choose_exit_code(errors)


def _list_overridden(feeds: Mapping[str, Feed], offline: bool) -> dict[str, str]:
    """By feed, which columns tools that read its folder override. With `offline`, of local lakes only."""
    from sluice.pipelines.planning.schema_changes import names_former_key
    from sluice.reading import list_overridden

    local = {name: feed for name, feed in feeds.items() if not (offline and feed.store is not None)}
    return {n: note for n, f in local.items() if names_former_key(f) and (note := list_overridden(f))}


def _compare_schema(session: Session, feed: Feed) -> str | SluiceError:
    """Compares the registry's schema with the feed's schema_file."""
    from sluice.pipelines.feed.load import schema_asked
    from sluice.resources.registry.confluent import find_registered, reader_of

    try:
        request = schema_asked(session.project.feeds_folder, feed.name, session.project.environ())
        there = find_registered(request)
    except SluiceError as error:
        return error
    try:
        columns = reader_of(there, request).columns
    except Failed as error:
        return f"{error.message}; the feed reads by its schema_file"
    version = f"{there.subject}, version {there.version}"
    if feed.reader and columns == feed.reader.columns:
        return f"{version}, has the columns of its schema_file"
    return f"{version}, has other columns than its schema_file: sluice schema diff {feed.name}"


@command(group)
def rename(
    session: Session,
    feed: FeedName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new name.", show_default=False)],
    yes: Yes = False,
) -> None:
    """Give a feed another name. It is a preview without --yes.

    Its file and contracts get the name. Its ledger, consumer group and folders in the lake keep the former one, by the
    key stored_as, so rows, offsets, history and the current hour stay whole. Commands accept both names. Dagster and
    Airflow see a new feed: turn its schedule on.

    $ sluice feeds rename orders sales
    $ sluice feeds rename orders sales --yes
    """
    from sluice.pipelines.operating.rename_feed import plan_rename

    definition, project = session.feed(feed), session.project
    path = project.find_feed_file(definition.name)
    planned = plan_rename(definition, path, name, session.files.every, project.root)
    if yes:
        planned.carry_out()
    moves = {planned.target: planned.path, **planned.contracts}
    session.terminal.show(
        heading(f"Rename of {planned.feed} to {name}", f"ledger, group {planned.group} and folders in the lake stay"),
        *(Text(f"  {old} → {new.name}") for new, old in moves.items()),
        Text(f"  with stored_as: {planned.stored_as}"),
        *(warn(f"{p} has the name {planned.feed}, too: change it there") for p in planned.mentions),
        good(f"renamed; next: sluice check {name}") if yes else format_dry_run("nothing was changed; add --yes"),
    )
    session.terminal.print_document(planned, applied=yes)


@command(group, name="move-topic")
def move_topic(
    session: Session,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.", show_default=False)],
    source: Annotated[
        str,
        typer.Argument(metavar="FROM", help="The feed.", show_default=False, autocompletion=completers.complete_feeds),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TO", help="A feed, or a new name.", show_default=False, autocompletion=completers.complete_feeds
        ),
    ],
    yes: Yes = False,
) -> None:
    """Move a topic to another feed, which lands it from then on. It is a preview without --yes.

    The other feed begins at the offsets up to which the first one has landed, so no record is lost or lands twice.
    Landed rows stay where they are: read, files, audit and explain of the first feed show them, and its windows are
    complete without the rest. A new feed gets the settings and contracts of the first. Without another topic, the first
    one is retired. It is refused while offsets of closed windows are pending. A command that was killed is continued by
    the same command.

    $ sluice feeds move-topic clicks orders web
    $ sluice feeds move-topic clicks orders web --yes
    """
    from sluice.pipelines.feed.load import load_feed
    from sluice.pipelines.operating import move_topic

    files, project = session.files, session.project
    first, feeds = files.feed(source), files.every
    into = files.feed(target) if target in feeds or project.find_feed_file(target).exists() else target
    environ = project.environ()

    def load(path: Path) -> Feed:
        return load_feed(path, environ, folder=project.feeds_folder)

    second, texts = move_topic.edit_files(topic, first, into, feeds, project.find_feed_file, load)
    with session.open_ports(first) as of_first, session.open_ports(second) as of_second:
        move = move_topic.plan_move(topic, first, second, of_first, texts)
        if yes:
            move = move_topic.carry_out(move, first, of_first, of_second)
    session.terminal.show(
        heading(f"Move of {topic} from {move.source} to {move.target}", f"rows of {move.source} stay"),
        *(Text(f"  {at.key}: from offset {at.offset} on") for at in move.seam[:SHOWN]),
        *([Text(f"  … {many(len(move.seam) - SHOWN, 'more partition')}")] if move.seam[SHOWN:] else []),
        *(Text(f"  {'new' if path in move.new else 'change'}: {path}") for path in move.files),
        *([Text(f"  {move.source} has no other topic and is retired")] if first.topics.names == (topic,) else []),
        Text(f"  group {move.group} keeps its offsets of {topic}: monitors of that group show a lag there"),
        good(f"moved; reload Dagster's code location; next: sluice run {move.target}")
        if yes
        else format_dry_run("nothing was changed; add --yes"),
    )
    session.terminal.print_document(move, files=[*move.files], applied=yes)


SHOWN = 10
"""Partitions in a list of a move."""


@command(group)
def retire(
    session: Session,
    feed: FeedName,
    undo: Annotated[bool, typer.Option("--undo", metavar=" ", help="Let a retired feed land again.")] = False,
    yes: Yes = False,
) -> None:
    """Let a feed land no more. It is a preview without --yes.

    Its file gets `retired: true`. Runs of all feeds, schedules, sensors, alerts, status, reports and metrics pass over
    it, and Dagster and Airflow show it no more. Its rows, ledger and offsets stay: files, read, audit, explain and
    maintenance take its name. --undo lets it continue where it ended, if Kafka still has the records.

    $ sluice feeds retire orders
    $ sluice feeds retire orders --yes
    $ sluice feeds retire orders --undo --yes
    """
    from sluice.pipelines.operating import rename_feed

    definition = session.feed(feed)
    if definition.retired is not undo:
        raise UsageError(
            f"feed {definition.name} is {'' if definition.retired else 'not '}retired", remedy="see: sluice feeds list"
        )
    if yes:
        with session.open_ports(definition) as ports:
            rename_feed.retire(
                session.project.find_feed_file(definition.name), ports.lake, definition, retired=not undo
            )
    ends = f"group {definition.group}, ledger and rows stay"
    session.terminal.show(
        heading(f"{'Return' if undo else 'Retirement'} of {definition.name}", ends),
        good(f"{'it lands' if undo else 'it lands nothing'} from now on; reload Dagster's code location")
        if yes
        else format_dry_run("nothing was changed; add --yes"),
    )
    session.terminal.print_document(feed=definition.name, retired=not undo, applied=yes)


@command(group, name="schema")
def print_schema(
    session: Session,
    kind: Annotated[FileKind, typer.Option("--kind", help="feed, fleet or notify.")] = FileKind.FEED,
) -> None:
    """Print the JSON Schema of feed files, fleet.yaml or notify.yaml, for editors and CI.

    It has every key with its type and default. Rules over several keys are in sluice feeds check alone.

    $ sluice feeds schema > feed.schema.json
    $ sluice feeds schema --kind fleet
    """
    from sluice.pipelines.feed.json_schema import build_schema, describe_keys

    document = build_schema(kind)
    if kind is FileKind.FEED:
        describe_keys(document, (resources.files("sluice") / "docs" / "feeds.md").read_text("utf-8"))
    session.terminal.lines(json.dumps(document, indent=2).splitlines())
    session.terminal.print_document(document)


def _contract(feed: Feed) -> str:
    return many(len(feed.contract.expectations), "expectation") if feed.contract else ""


def _build_document(feed: Feed) -> Mapping[str, Any]:
    """Returns the whole feed and the size of its contract. The feed masks its secrets itself."""
    from sluice.pipelines.feed.load import group_tuning

    rules = feed.contract
    contract = {"contract": {"expectations": len(rules.expectations), "hash": rules.hash}} if rules else {}
    return group_tuning(feed.model_dump(mode="json", by_alias=True, exclude_none=True)) | contract
