"""`sluice schema`: shows a feed's schema, and compares it with its registry's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.app.invocation import FeedName, Session, command, make_group
from sluice.cli.app.parameters import option
from sluice.cli.terminal.output import bad, facts, good, heading, table
from sluice.pipelines.errors import UsageError

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.feed.load import SchemaAsked

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
    from sluice.pipelines.operating.compare_schema import list_expected

    reading = _read(session.feed(feed))
    rows = list((reading.columns.texts() if reading.columns else {}).items())
    expected = list_expected(reading.reader)
    session.terminal.show(
        heading(feed, "the columns of its schema_file"),
        facts(
            ("schema_file", reading.schema_file or ""),
            ("wire format", str(reading.reader.wire) if reading.reader else ""),
            *([("registry", reading.registry.url)] if reading.registry else []),
        ),
        table(("column", "type"), rows),
        *(
            ["", "  expectations of the schema, as part of the contract", *(f"    {e}" for e in expected)]
            if expected
            else []
        ),
    )
    session.terminal.print_document(
        feed=feed,
        schema_file=reading.schema_file,
        columns=dict(rows),
        expects=expected,
        registry=reading.registry.url if reading.registry else None,
    )


@command(group)
def pull(session: Session, feed: FeedName) -> None:
    """Write the registry's schema into the feed's schema_file.

    It fetches the newest version of registry.subject, or registry.version of it. The default subject is TOPIC-value,
    for a feed of one topic. References are resolved into the file. Columns change with the next run: compare first with
    sluice schema diff. If the schema makes no columns, all its problems are listed, and it is written only if there is
    no file yet.

    $ sluice schema pull orders
    """
    from sluice.resources.registry.confluent import pull_schema

    request = _request_schema(session, feed)
    with session.terminal.working("querying the registry"):
        newest, reader = pull_schema(request)
    message = f"{request.schema_file}: {newest.subject}, version {newest.version}, schema {newest.id}"
    session.terminal.show(good(message))
    session.terminal.print_document(
        feed=feed,
        schema_file=request.schema_file,
        columns=reader.columns.texts(),
        subject=newest.subject,
        version=newest.version,
        id=newest.id,
    )


Candidate = Annotated[Path | None, option("--file", "FILE", "Compare with this schema instead of the registry's.")]


@command(group)
def diff(session: Session, feed: FeedName, file: Candidate = None) -> int:
    """Compare a feed's columns with those of the registry's schema. Changes nothing.

    Exit 0 if no column changes, 1 if columns change, 3 if new rows would not fit into one table with landed rows.

    $ sluice schema diff orders
    $ sluice schema diff orders --file next.avsc
    """
    from sluice.pipelines.operating.compare_schema import compare_schema, read_schema_file
    from sluice.resources.lake import open_lake
    from sluice.resources.registry.confluent import find_registered, reader_of

    current = _read(session.feed(feed))
    if file:
        after, note, about = read_schema_file(current, file), str(file), dict[str, object](file=file)
    else:
        request = _request_schema(session, feed)
        with session.terminal.working("querying the registry"):
            there = find_registered(request)
        after, about = reader_of(there, request), {"subject": there.subject, "version": there.version, "id": there.id}
        note = f"{there.subject}, version {there.version}, schema {there.id}"
    difference = compare_schema(current, open_lake(current), after)
    refused = difference.refused
    session.terminal.show(
        heading(feed, f"{note}, compared with {current.schema_file}"),
        table(("column", "now", "then"), [(n, now or "", then or "") for n, now, then in difference.changes])
        if difference.changes
        else good("the columns are the same"),
        *(f"  expectation removed: {e}" for e in difference.dropped),
        *(f"  expectation added: {e}" for e in difference.added),
        *([bad(refused.message)] if refused else []),
    )
    session.terminal.print_document(
        feed=feed,
        changes=[change._asdict() for change in difference.changes],
        expects={"added": difference.added, "dropped": difference.dropped},
        refused=refused.message if refused else None,
        **about,
    )
    return difference.exit_code


def _read(feed: Feed) -> Feed:
    if feed.reader is None:
        raise UsageError(
            f"feed {feed.name} has no schema_file", remedy="add schema_file to its feed file, or see its columns there"
        )
    return feed


def _request_schema(session: Session, feed: str) -> SchemaAsked:
    """Returns the registry settings of the feed's file; its schema_file need not exist yet."""
    from sluice.pipelines.feed.load import schema_asked

    return schema_asked(session.project.feeds_folder, feed, session.project.environ())
