"""`sluice dbt`: the feeds of a project as sources of dbt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.app import completers
from sluice.cli.app.invocation import Session, command, make_group
from sluice.cli.app.parameters import option
from sluice.cli.terminal.output import good
from sluice.pipelines.errors import UsageError
from sluice.pipelines.util.units import many

group = make_group(
    "Describe feeds for dbt.", "sluice dbt sources", "sluice dbt sources orders --output models/sources.yml"
)


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="dbt")


@command(group, name="sources")
def print_sources(
    session: Session,
    feeds: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FEED",
            help="Names of feeds; all without any.",
            show_default=False,
            autocompletion=completers.complete_feeds,
        ),
    ] = None,
    database: Annotated[str | None, option("--database", "NAME", "dbt's database of Iceberg tables.")] = None,
    output: Annotated[Path | None, option("--output", "FILE", "Replace this file.")] = None,
) -> None:
    """Print a sources.yml of feeds and outputs for dbt. Opens no connection.

    Tables have columns with types and descriptions, tests from the schema and the contract, and freshness: dbt's
    freshness passes if the newest window that is due is complete. Feeds without a table are files for dbt-duckdb.
    Expectations without an equal test in dbt are listed in comments.

    $ sluice dbt sources
    $ sluice dbt sources orders github --output models/sources.yml
    $ sluice dbt sources --database lake
    """
    import yaml

    from sluice.pipelines.operating.dbt_sources import describe_sources, list_untested

    chosen = [session.feed(n) for n in dict.fromkeys(feeds)] if feeds else [*session.project.feeds().values()]
    if not chosen:
        raise UsageError(f"no feed in {session.project.feeds_folder}", remedy="sluice init")
    document = describe_sources(chosen, database)
    # Comments name what dbt does not test, so that green tests are not taken for the whole contract.
    untested = {d.dataset: texts for feed in chosen for d in feed.datasets if (texts := list_untested(d))}
    lines = ["# By `sluice dbt sources`. Do not edit: it is written again after changes of feeds."]
    lines += [f"# {name}, not tested: {one}" for name, texts in untested.items() for one in texts]
    # Keys stay in the order in which a person would write them.
    lines += yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120).splitlines()
    if output is None:
        session.terminal.lines(lines)
    else:
        try:
            output.write_text("\n".join(lines) + "\n", "utf-8")
        except OSError as error:
            raise UsageError(f"{output} cannot be written: {error.strerror}", remedy="name another file") from None
        tables = sum(len(source["tables"]) for source in document["sources"])
        session.terminal.show(good(f"{many(tables, 'table')} in {output}"))
    session.terminal.print_document(file=output, sources=document["sources"], untested=untested)
