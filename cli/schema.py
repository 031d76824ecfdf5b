"""`sluice schema`: the schema that a feed reads by, beside what its registry has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer
from rich.console import RenderableType

from sluice.cli.session import FeedName, Session, command
from sluice.cli.terminal import bad, facts, good, heading, table
from sluice.pipelines.vocabulary.errors import SchemaChanged, UsageError

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.feed.load import SchemaAsked
    from sluice.pipelines.records.reader import Reader
    from sluice.pipelines.schema.schema import Schema
    from sluice.pipelines.vocabulary.registered import RegisteredSchema

group = typer.Typer(help="The schemas that feeds read by, and those of their registries.", no_args_is_help=True)


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

    $ sluice schema pull orders
    """
    from sluice.resources.registry import file_of, reader_of, registered

    asked = _asked(session, feed)
    with session.terminal.working("asking the registry"):
        found = registered(asked)
    reader = reader_of(found, asked)
    asked.schema_file.parent.mkdir(parents=True, exist_ok=True)
    asked.schema_file.write_text(file_of(found, asked) + "\n")
    said = f"{asked.schema_file}: {found.subject}, version {found.version}, schema {found.id}"
    session.terminal.show(good(said))
    document = {"feed": feed, "schema_file": str(asked.schema_file), "columns": reader.columns.texts()}
    session.terminal.document(document | _version(found))


@command(group)
def diff(session: Session, feed: FeedName) -> int:
    """Show what the registry's schema would change about a feed's columns. Changes nothing.

    Exit 0 when nothing would change; 1 when columns would; 3 when rows would not be one table with what has landed.

    $ sluice schema diff orders
    """
    from sluice.resources.registry import reader_of, registered

    found, asked = _read(session.feed(feed)), _asked(session, feed)
    with session.terminal.working("asking the registry"):
        there = registered(asked)
    after = reader_of(there, asked)
    old = found.reader.columns.texts() if found.reader else {}
    changes = _changes(old, after.columns.texts())
    refused = _refusal(found, after.columns)
    now, then = _expected(found.reader), _expected(after)
    dropped, added = [e for e in now if e not in then], [e for e in then if e not in now]
    note = f"{there.subject}, version {there.version}, schema {there.id}, beside {found.schema_file}"
    shown: RenderableType = table(("column", "now", "then"), [(n, a, b) for n, a, b in changes])
    session.terminal.show(heading(feed, note), shown if changes else good("the columns are the same"))
    session.terminal.show(*(f"  expects no more: {e}" for e in dropped), *(f"  expects then: {e}" for e in added))
    if refused:
        session.terminal.show(bad(refused.message))
    columns = [{"column": n, "now": a or None, "then": b or None} for n, a, b in changes]
    refusal = {"refused": refused.message if refused else None}
    expects = {"expects": {"added": added, "dropped": dropped}}
    session.terminal.document({"feed": feed, "changes": columns} | expects | refusal | _version(there))
    return refused.exit_code if refused else int(bool(changes or added or dropped))


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
    from sluice.resources.lakes import open_lake

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
