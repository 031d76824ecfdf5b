"""`sluice schema`: shows a feed's schema, and compares it with its registry's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from sluice.cli.app.invocation import FeedName, Session, command, make_group
from sluice.cli.terminal.output import bad, facts, good, heading, table
from sluice.pipelines.errors import Failed, SchemaChanged, UsageError
from sluice.pipelines.util.documents import document_of
from sluice.pipelines.util.units import sanitize

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.feed.load import SchemaAsked
    from sluice.pipelines.records.rows.value_reader import Reader
    from sluice.pipelines.records.rows.wire_format import RegisteredSchema
    from sluice.pipelines.schema.schema import Schema

group = make_group(
    "Show, fetch and compare the schemas of feeds and of their registries.",
    "sluice schema show orders",
    "sluice schema diff orders",
    "sluice schema pull orders",
)


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="schema")


@command(group)
def show(session: Session, feed: FeedName) -> None:
    """Show the columns of a feed's schema_file. Opens no connection.

    $ sluice schema show orders
    """
    reading = _read(session.feed(feed))
    rows = list((reading.columns.texts() if reading.columns else {}).items())
    expected = _list_expected(reading.reader)
    session.terminal.show(
        heading(feed, "the columns of its schema_file"),
        facts(*_read_source(reading)),
        table(("column", "type"), rows),
        *(
            ["", "  expectations of the schema, as part of the contract", *(f"    {e}" for e in expected)]
            if expected
            else []
        ),
    )
    document = {"feed": feed, "schema_file": reading.schema_file, "columns": dict(rows), "expects": expected}
    session.terminal.print_document(document | {"registry": reading.registry.url if reading.registry else None})


@command(group)
def pull(session: Session, feed: FeedName) -> None:
    """Write the registry's schema into the feed's schema_file.

    It fetches the newest version of registry.subject, or registry.version of it. The default subject is TOPIC-value,
    for a feed of one topic. References are resolved into the file. Columns change with the next run: compare first with
    sluice schema diff. If the schema makes no columns, all its problems are listed, and it is written only if there is
    no file yet.

    $ sluice schema pull orders
    """
    from sluice.resources.registry.confluent import find_registered, reader_of

    request = _request_schema(session, feed)
    with session.terminal.working("querying the registry"):
        newest = find_registered(request)
    try:
        reader = reader_of(newest, request)
    except Failed as error:
        raise _to_be_edited(error, newest, request) from None
    _write(newest, request)
    message = f"{request.schema_file}: {newest.subject}, version {newest.version}, schema {newest.id}"
    session.terminal.show(good(message))
    document = {"feed": feed, "schema_file": str(request.schema_file), "columns": reader.columns.texts()}
    session.terminal.print_document(document | _build_version(newest))


def _write(newest: RegisteredSchema, request: SchemaAsked) -> None:
    from sluice.resources.registry.confluent import file_of

    request.schema_file.parent.mkdir(parents=True, exist_ok=True)
    request.schema_file.write_text(file_of(newest, request) + "\n")


def _to_be_edited(error: Failed, newest: RegisteredSchema, request: SchemaAsked) -> Failed:
    """Write the invalid schema if there is no file yet, for editing. Returns the error."""
    from sluice.pipelines.records.rows.value_reader import UnusableSchema

    try:
        if request.schema_file.exists():
            return Failed(error.message, remedy=f"{error.remedy}; {request.schema_file} is unchanged")
        _write(newest, request)
    except UnusableSchema:  # it is not even one file
        return error
    remedy = f"it is in {request.schema_file}: remove these parts, then run sluice feeds check"
    return Failed(error.message, remedy=remedy)


Candidate = Annotated[
    Path | None,
    typer.Option(
        "--file",
        metavar="FILE",
        help="Compare with this schema instead of the registry's.",
        show_default=False,
    ),
]


@command(group)
def diff(session: Session, feed: FeedName, file: Candidate = None) -> int:
    """Compare a feed's columns with those of the registry's schema. Changes nothing.

    Exit 0 if no column changes, 1 if columns change, 3 if new rows would not fit into one table with landed rows.

    $ sluice schema diff orders
    $ sluice schema diff orders --file next.avsc
    """
    current = _read(session.feed(feed))
    after, note, about = _of_file(current, file) if file else _of_registry(session, feed)
    old = current.reader.columns.texts() if current.reader else {}
    changes = _list_changes(old, after.columns.texts())
    refused = _build_refusal(current, after.columns)
    now, then = _list_expected(current.reader), _list_expected(after)
    dropped, added = [e for e in now if e not in then], [e for e in then if e not in now]
    rendering: RenderableType = table(("column", "now", "then"), [(n, a, b) for n, a, b in changes])
    session.terminal.show(
        heading(feed, f"{note}, compared with {current.schema_file}"),
        rendering if changes else good("the columns are the same"),
    )
    session.terminal.show(
        *(f"  expectation removed: {e}" for e in dropped), *(f"  expectation added: {e}" for e in added)
    )
    if refused:
        session.terminal.show(bad(refused.message))
    columns = [{"column": n, "now": a or None, "then": b or None} for n, a, b in changes]
    refusal = {"refused": refused.message if refused else None}
    expects = {"expects": {"added": added, "dropped": dropped}}
    session.terminal.print_document({"feed": feed, "changes": columns} | expects | refusal | about)
    return refused.exit_code if refused else int(bool(changes or added or dropped))


def _of_registry(session: Session, feed: str) -> tuple[Reader, str, dict[str, Any]]:
    """Returns the reader of the registry's schema, with that schema in words and as a document."""
    from sluice.resources.registry.confluent import find_registered, reader_of

    request = _request_schema(session, feed)
    with session.terminal.working("querying the registry"):
        there = find_registered(request)
    return (
        reader_of(there, request),
        f"{there.subject}, version {there.version}, schema {there.id}",
        _build_version(there),
    )


def _of_file(feed: Feed, file: Path) -> tuple[Reader, str, dict[str, Any]]:
    """The same for a schema in a file."""
    from sluice.pipelines.records.rows.value_reader import UnusableSchema
    from sluice.pipelines.records.rows.wire_format import WireFormat
    from sluice.pipelines.records.shape import READERS

    reader = READERS[feed.format]
    try:
        texts = reader.read(file.read_text("utf-8"), file.parent, feed.message or "")
        return reader.make(texts, feed.reader.wire if feed.reader else WireFormat.BARE), str(file), {"file": str(file)}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{file} cannot be read ({type(error).__name__})", remedy="choose a readable UTF-8 file"
        ) from None
    except ValueError as error:
        what = error.text if isinstance(error, UnusableSchema) else sanitize(str(error))
        raise UsageError(f"{file} makes no columns: {what}", remedy="sluice docs formats") from None


def _list_expected(reader: Reader | None) -> list[str]:
    """Describes the rules of a schema beyond types."""
    from sluice.pipelines.contract.catalogue import text

    return [text(e) for e in reader.expectations] if reader else []


def _list_changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Columns that would come, go or change: the name, the type now, the type then."""
    names = dict.fromkeys((*before, *after))
    return [(n, before.get(n, ""), after.get(n, "")) for n in names if before.get(n) != after.get(n)]


def _build_refusal(feed: Feed, columns: Schema) -> SchemaChanged | None:
    """Returns the reason why rows of the registry's schema would not fit one table with landed rows."""
    from sluice.pipelines.ledger import Ledger
    from sluice.pipelines.planning.schema_changes import check_one_table
    from sluice.resources.lake import open_lake
    from sluice.resources.liveness import now

    state = Ledger.offline(open_lake(feed), feed.name, now).read()
    try:
        check_one_table(feed, replace(feed.shape, columns=columns), state)
    except SchemaChanged as error:
        return error
    return None


def _read(feed: Feed) -> Feed:
    if feed.reader is None:
        raise UsageError(
            f"feed {feed.name} has no schema_file", remedy="add schema_file to its feed file, or see its columns there"
        )
    return feed


def _read_source(feed: Feed) -> list[tuple[str, str]]:
    wire = str(feed.reader.wire) if feed.reader else ""
    pairs = [("schema_file", feed.schema_file or ""), ("wire format", wire)]
    return [*pairs, *([("registry", feed.registry.url)] if feed.registry else [])]


def _request_schema(session: Session, feed: str) -> SchemaAsked:
    """Returns the registry settings of the feed's file; its schema_file need not exist yet."""
    from sluice.pipelines.feed.load import schema_asked

    return schema_asked(session.project.feeds_folder, feed, session.project.environ())


def _build_version(registered_schema: RegisteredSchema) -> dict[str, Any]:
    return document_of(registered_schema, "subject version id")
