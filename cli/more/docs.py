"""`sluice docs`: the pages of the documentation, as the installed release has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Annotated

import typer

from sluice.cli.app.invocation import Session, command
from sluice.cli.terminal.output import table
from sluice.pipelines.errors import UsageError

_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)


def register(app: typer.Typer) -> None:
    command(app)(docs)


def _names(incomplete: str) -> list[str]:
    return [page.name.removesuffix(".md") for page in _pages() if page.name.startswith(incomplete)]


def docs(
    session: Session,
    page: Annotated[
        str | None, typer.Argument(metavar="[PAGE]", help="A page; without it: which there are.", autocompletion=_names)
    ] = None,
) -> None:
    """Read a page of the documentation, as this release has it.

    Errors name pages in this way. In a pipe it is the page's Markdown.

    $ sluice docs
    $ sluice docs feeds | less
    $ sluice docs operating | grep -n -A3 held
    """
    pages = {each.name.removesuffix(".md"): each for each in _pages()}
    if page is None:
        titles = {name: _title(each.read_text("utf-8")) for name, each in pages.items()}
        session.terminal.show(table(("page", "about"), [*titles.items()]))
        session.terminal.document({"pages": titles})
        return
    name = page.removeprefix("docs/").removesuffix(".md")
    if name not in pages:
        near = get_close_matches(name, pages, 1, 0.3)
        raise UsageError(
            f"no page {name!r}",
            remedy=f"sluice docs {near[0]}" if near else f"pages: {', '.join(pages)}",
        )
    text = pages[name].read_text("utf-8")
    session.terminal.markdown(text)
    session.terminal.document({"page": name, "text": text})


def _pages() -> Iterator[Traversable]:
    """The folder of the pages in the package: a link to docs/ in a checkout, files in a wheel."""
    folder = resources.files("sluice") / "docs"
    yield from sorted((page for page in folder.iterdir() if page.name.endswith(".md")), key=lambda page: page.name)


def _title(text: str) -> str:
    match = _TITLE.search(text)
    return match[1] if match else ""
