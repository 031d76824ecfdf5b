"""`sluice acls`: the rights in Kafka that a feed needs, and the commands that grant them."""

from __future__ import annotations

from typing import Annotated

import typer

from sluice.cli.app.invocation import FeedName, Session, command
from sluice.cli.terminal.output import copyable, heading, table
from sluice.pipelines.errors import UsageError


def register(app: typer.Typer) -> None:
    command(app)(acls)


def acls(
    session: Session,
    feed: FeedName,
    principal: Annotated[
        str | None,
        typer.Option(metavar="User:NAME", help="The principal to grant to.", show_default="the feed's login"),
    ] = None,
    republish: Annotated[
        str | None,
        typer.Option(metavar="TOPIC", help="Also the rights to republish to this topic.", show_default=False),
    ] = None,
) -> None:
    """Print the Kafka ACLs that a feed needs, and the commands that grant them.

    It opens no connection: the rights follow from the feed. The kafka-acls commands need an administrator's login in
    admin.properties. For the project's secured local Kafka, use sluice kafka grant '*'.

    $ sluice acls orders
    $ sluice acls orders --principal User:ingest --json
    $ sluice acls orders --republish orders-again
    """
    from sluice.pipelines.feed.rights import Grantee, grantee, rights_of, rights_to_republish

    definition = session.feed(feed)
    rights = rights_of(definition)
    if republish:
        rights = rights_to_republish(republish, f"sluice-republish-{feed}-", all_of=True)
    if principal is not None and not all(principal.partition(":")):
        raise UsageError(f"{principal!r} is not a principal", remedy=f"write --principal User:{principal.strip(':')}")
    # Without --principal, the one by which the feed logs in.
    who = Grantee(principal, definition.kafka.bootstrap) if principal else grantee(definition.kafka)
    rows = [
        (r.operation, r.kind.replace("-", " "), f"{r.name}…" if r.pattern == "prefixed" else r.name, r.need)
        for r in rights
    ]
    # A right that only improves messages may be refused by an administrator.
    needed, helpful = ([r for r in rights if r.optional is optional] for optional in (False, True))
    session.terminal.show(
        heading(f"Feed {feed}", f"commit: {definition.commit}, as {who.principal}"),
        table(("right", "on", "name", "what for"), rows),
        heading("Required"),
        *map(copyable, who.commands(needed)),
        *([heading("Recommended, for warnings and explanations")] if helpful else []),
        *map(copyable, who.commands(helpful)),
    )
    session.terminal.print_document(
        feed=feed,
        principal=who.principal,
        rights=rights,
        commands={"required": who.commands(needed), "optional": who.commands(helpful)},
    )
