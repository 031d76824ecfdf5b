"""`sluice schema`: the schema that a feed reads by, beside what its registry has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from sluice.cli.app.invocation import FeedName, Session, command
from sluice.cli.app.menu import Group
from sluice.cli.terminal.output import bad, facts, good, heading, table
from sluice.pipelines.errors import Failed, SchemaChanged, UsageError
from sluice.pipelines.util.units import safe_text

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.feed.load import SchemaAsked
    from sluice.pipelines.model.registered_schema import RegisteredSchema
    from sluice.pipelines.records.rows.value_reader import Reader
    from sluice.pipelines.schema.schema import Schema

group = typer.Typer(
    cls=Group, help="The schemas that feeds read by, and those of their registries.", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="schema")


@command(group)
def show(session: Session, feed: FeedName) -> None:
    """Show the columns that a feed's schema_file makes. Opens no connection.

    $ sluice schema show orders
    """
    found = _read(session.feed(feed))
    rows = list((found.columns.texts() if found.columns else {}).items())
    expected = _expected(found.reader)
    session.terminal.show(
        heading(feed, "the columns of its schema_file"),
        facts(*_source(found)),
        table(("column", "type"), rows),
        *(
            ["", "  what it expects of rows, as part of the contract", *(f"    {e}" for e in expected)]
            if expected
            else []
        ),
    )
    document = {"feed": feed, "schema_file": found.schema_file, "columns": dict(rows), "expects": expected}
    session.terminal.document(document | {"registry": found.registry.url if found.registry else None})


@command(group)
def pull(session: Session, feed: FeedName) -> None:
    """Write the schema that the registry has for a feed into the feed's schema_file.

    The newest version of registry.subject, or registry.version of it. Without a subject it is TOPIC-value, for a feed
    of one topic. What the schema refers to is written into it. Columns change from the next run on: see `diff` first.
    One that makes no columns is named with all of its faults; it is written, for you to edit, where there is no file.

    $ sluice schema pull orders
    """
    from sluice.resources.registry.confluent import reader_of, registered

    asked = _asked(session, feed)
    with session.terminal.working("asking the registry"):
        found = registered(asked)
    try:
        reader = reader_of(found, asked)
    except Failed as error:
        raise _to_be_edited(error, found, asked) from None
    _write(found, asked)
    said = f"{asked.schema_file}: {found.subject}, version {found.version}, schema {found.id}"
    session.terminal.show(good(said))
    document = {"feed": feed, "schema_file": str(asked.schema_file), "columns": reader.columns.texts()}
    session.terminal.document(document | _version(found))


def _write(found: RegisteredSchema, asked: SchemaAsked) -> None:
    from sluice.resources.registry.confluent import file_of

    asked.schema_file.parent.mkdir(parents=True, exist_ok=True)
    asked.schema_file.write_text(file_of(found, asked) + "\n")


def _to_be_edited(error: Failed, found: RegisteredSchema, asked: SchemaAsked) -> Failed:
    """The error, after the schema was written as it is where no file would be lost and a person can edit it."""
    from sluice.pipelines.records.rows.value_reader import UnusableSchema

    try:
        if asked.schema_file.exists():
            return Failed(error.message, remedy=f"{error.remedy}; {asked.schema_file} stays as it is")
        _write(found, asked)
    except UnusableSchema:  # it is not even one file
        return error
    remedy = f"it is in {asked.schema_file}: take these out of it, then sluice feeds check"
    return Failed(error.message, remedy=remedy)


Candidate = Annotated[
    Path | None,
    typer.Option(
        "--file",
        metavar="FILE",
        help="Instead of the registry's: a schema that nobody registered yet.",
        show_default=False,
    ),
]


@command(group)
def diff(session: Session, feed: FeedName, file: Candidate = None) -> int:
    """Show what the registry's schema would change about a feed's columns. Changes nothing.

    Exit 0 when nothing would change; 1 when columns would; 3 when rows would not be one table with what has landed.

    $ sluice schema diff orders
    $ sluice schema diff orders --file next.avsc
    """
    found = _read(session.feed(feed))
    after, note, about = _of_file(found, file) if file else _of_registry(session, feed)
    old = found.reader.columns.texts() if found.reader else {}
    changes = _changes(old, after.columns.texts())
    refused = _refusal(found, after.columns)
    now, then = _expected(found.reader), _expected(after)
    dropped, added = [e for e in now if e not in then], [e for e in then if e not in now]
    shown: RenderableType = table(("column", "now", "then"), [(n, a, b) for n, a, b in changes])
    session.terminal.show(
        heading(feed, f"{note}, beside {found.schema_file}"), shown if changes else good("the columns are the same")
    )
    session.terminal.show(*(f"  expects no more: {e}" for e in dropped), *(f"  expects then: {e}" for e in added))
    if refused:
        session.terminal.show(bad(refused.message))
    columns = [{"column": n, "now": a or None, "then": b or None} for n, a, b in changes]
    refusal = {"refused": refused.message if refused else None}
    expects = {"expects": {"added": added, "dropped": dropped}}
    session.terminal.document({"feed": feed, "changes": columns} | expects | refusal | about)
    return refused.exit_code if refused else int(bool(changes or added or dropped))


def _of_registry(session: Session, feed: str) -> tuple[Reader, str, dict[str, Any]]:
    """What reads by the registry's schema, and which one that is, in words and as a document."""
    from sluice.resources.registry.confluent import reader_of, registered

    asked = _asked(session, feed)
    with session.terminal.working("asking the registry"):
        there = registered(asked)
    return reader_of(there, asked), f"{there.subject}, version {there.version}, schema {there.id}", _version(there)


def _of_file(feed: Feed, file: Path) -> tuple[Reader, str, dict[str, Any]]:
    """The same for a schema in a file."""
    from sluice.pipelines.records.formats import READERS
    from sluice.pipelines.records.rows.value_reader import UnusableSchema
    from sluice.pipelines.records.rows.wire_format import WireFormat

    made = READERS[feed.format]
    try:
        texts = made.read(file.read_text("utf-8"), file.parent, feed.message or "")
        return made.make(texts, feed.reader.wire if feed.reader else WireFormat.BARE), str(file), {"file": str(file)}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read ({type(error).__name__})", remedy="name a file in UTF-8") from None
    except ValueError as error:
        what = error.text if isinstance(error, UnusableSchema) else safe_text(str(error))
        raise UsageError(f"{file} makes no columns: {what}", remedy="sluice docs formats") from None


def _expected(reader: Reader | None) -> list[str]:
    """What a schema expects of rows beyond types, in sentences."""
    from sluice.pipelines.contract.catalogue import text

    return [text(e) for e in reader.expectations] if reader else []


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Columns that would come, go or change: the name, the type now, the type then."""
    names = dict.fromkeys((*before, *after))
    return [(n, before.get(n, ""), after.get(n, "")) for n in names if before.get(n) != after.get(n)]


def _refusal(feed: Feed, columns: Schema) -> SchemaChanged | None:
    """Why rows of the registry's schema would not be one table with what has landed."""
    from sluice.pipelines.ledger import Ledger
    from sluice.pipelines.planning.shapes import check_one_table
    from sluice.resources.clock import now
    from sluice.resources.lake.open_lake import open_lake

    state = Ledger.offline(open_lake(feed), feed.name, now).read()
    try:
        check_one_table(feed, replace(feed.shape, columns=columns), state)
    except SchemaChanged as error:
        return error
    return None


def _read(feed: Feed) -> Feed:
    if feed.reader is None:
        raise UsageError(f"feed {feed.name} has no schema_file", remedy="its columns are in the feed's file")
    return feed


def _source(feed: Feed) -> list[tuple[str, str]]:
    wire = str(feed.reader.wire) if feed.reader else ""
    found = [("schema_file", feed.schema_file or ""), ("wire format", wire)]
    return [*found, *([("registry", feed.registry.url)] if feed.registry else [])]


def _asked(session: Session, feed: str) -> SchemaAsked:
    """What the feed's file says of its registry, though its schema_file may not be there yet."""
    from sluice.pipelines.feed.load import schema_asked

    return schema_asked(session.project.feeds_folder / f"{feed}.yaml", session.project.environ())


def _version(found: RegisteredSchema) -> dict[str, Any]:
    return {"subject": found.subject, "version": found.version, "id": found.id}
