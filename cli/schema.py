"""`sluice schema`: the Avro schema that a feed reads by, beside what its registry has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer
from rich.console import RenderableType

from sluice.cli.session import FeedName, Session, command
from sluice.cli.terminal import bad, facts, good, heading, table
from sluice.pipelines.vocabulary.errors import Failed, SchemaChanged, UsageError

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.feed.load import AvroAsked
    from sluice.pipelines.schema.schema import Schema
    from sluice.pipelines.vocabulary.registered import RegisteredSchema

group = typer.Typer(help="The Avro schemas of feeds, and those of their registries.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="schema")


@command(group)
def show(session: Session, feed: FeedName) -> None:
    """Show the columns that a feed's Avro schema makes. Opens no connection.

    $ sluice schema show orders
    """
    found = _avro(session.feed(feed))
    rows = list((found.columns.texts() if found.columns else {}).items())
    session.terminal.show(
        heading(feed, "the columns of its schema_file"),
        facts(*_source(found)),
        table(("column", "type"), rows),
    )
    document = {"feed": feed, "schema_file": found.schema_file, "columns": dict(rows)}
    session.terminal.document(document | {"registry": found.registry.url if found.registry else None})


@command(group)
def pull(session: Session, feed: FeedName) -> None:
    """Write the schema that the registry has for a feed into the feed's schema_file.

    The newest version of registry.subject, or registry.version of it. Without a subject it is TOPIC-value, for a feed
    of one topic. What the schema refers to is written into it. Columns change from the next run on: see `diff` first.

    $ sluice schema pull orders
    """
    from sluice.pipelines.records.avro.merged import merged

    asked = _asked(session, feed)
    with session.terminal.working("asking the registry"):
        found = _registered(asked)
    reader = _reader(found)
    asked.schema_file.parent.mkdir(parents=True, exist_ok=True)
    asked.schema_file.write_text(merged(found.texts) + "\n")
    said = f"{asked.schema_file}: {found.subject}, version {found.version}, schema {found.id}"
    session.terminal.show(good(said))
    document = {"feed": feed, "schema_file": str(asked.schema_file), "columns": reader.texts()}
    session.terminal.document(document | _version(found))


@command(group)
def diff(session: Session, feed: FeedName) -> int:
    """Show what the registry's schema would change about a feed's columns. Changes nothing.

    Exit 0 when nothing would change; 1 when columns would; 3 when rows would not be one table with what has landed.

    $ sluice schema diff orders
    """
    found, asked = _avro(session.feed(feed)), _asked(session, feed)
    with session.terminal.working("asking the registry"):
        there = _registered(asked)
    before, after = found.columns, _reader(there)
    old = before.texts() if before else {}
    changes = _changes(old, after.texts())
    refused = _refusal(found, after)
    note = f"{there.subject}, version {there.version}, schema {there.id}, beside {found.schema_file}"
    shown: RenderableType = table(("column", "now", "then"), [(n, a, b) for n, a, b in changes])
    session.terminal.show(heading(feed, note), shown if changes else good("the columns are the same"))
    if refused:
        session.terminal.show(bad(refused.message))
    columns = [{"column": n, "now": a or None, "then": b or None} for n, a, b in changes]
    refusal = {"refused": refused.message if refused else None}
    session.terminal.document({"feed": feed, "changes": columns} | refusal | _version(there))
    return refused.exit_code if refused else int(bool(changes))


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Columns that would come, go or change: the name, the type now, the type then."""
    names = dict.fromkeys((*before, *after))
    return [(n, before.get(n, ""), after.get(n, "")) for n in names if before.get(n) != after.get(n)]


def _refusal(feed: Feed, columns: Schema) -> SchemaChanged | None:
    """Why rows of the registry's schema would not be one table with what has landed."""
    from sluice.pipelines.ledger import Ledger
    from sluice.pipelines.planning.shapes import check_one_table
    from sluice.resources.edges import now
    from sluice.resources.lakes import open_lake

    state = Ledger.offline(open_lake(feed), feed.name, now).read()
    try:
        check_one_table(feed, replace(feed.shape, columns=columns), state)
    except SchemaChanged as error:
        return error
    return None


def _avro(feed: Feed) -> Feed:
    if feed.avro is None:
        raise UsageError(f"feed {feed.name} is not `format: avro`", remedy="its columns are in the feed's file")
    return feed


def _source(feed: Feed) -> list[tuple[str, str]]:
    wire = str(feed.avro.wire) if feed.avro else ""
    found = [("schema_file", feed.schema_file or ""), ("wire format", wire)]
    return [*found, *([("registry", feed.registry.url)] if feed.registry else [])]


def _asked(session: Session, feed: str) -> AvroAsked:
    """What the feed's file says of its registry, though its schema_file may not be there yet."""
    from sluice.pipelines.feed.load import avro_asked

    return avro_asked(session.project.feeds_folder / f"{feed}.yaml", session.project.environ())


def _registered(asked: AvroAsked) -> RegisteredSchema:
    from sluice.pipelines.vocabulary.registered import AVRO
    from sluice.resources.registry import RegistryClient

    found = RegistryClient(asked.registry).version(asked.subject, asked.registry.version)
    if found is None:
        version = f"version {asked.registry.version} of " if asked.registry.version else ""
        raise Failed(
            f"the schema registry {asked.registry.url} has no {version}subject {asked.subject}",
            remedy="name another: registry: {subject: …}",
        )
    if found.type != AVRO:
        raise Failed(
            f"subject {asked.subject}, version {found.version}, is {found.type}, and not Avro",
            remedy="name another subject, or version",
        )
    return found


def _reader(found: RegisteredSchema) -> Schema:
    """The columns of a registered schema. Raises Failed where it makes none."""
    from sluice.pipelines.records.avro.reader import AvroReader, WireFormat
    from sluice.pipelines.vocabulary.units import safe_text

    try:
        return AvroReader(found.texts, WireFormat.CONFLUENT).columns
    except ValueError as error:
        raise Failed(
            f"subject {found.subject}, version {found.version}, makes no columns: {safe_text(str(error))}",
            remedy="write a schema_file of your own, with the fields that can be columns",
        ) from None


def _version(found: RegisteredSchema) -> dict[str, Any]:
    return {"subject": found.subject, "version": found.version, "id": found.id}
