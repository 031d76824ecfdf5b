"""`sluice docs`: the documentation of the installed release."""

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


def _complete_page(incomplete: str) -> list[str]:
    return [name for name in _list_pages() if name.startswith(incomplete)]


def docs(
    session: Session,
    page: Annotated[
        str | None,
        typer.Argument(
            metavar="PAGE", help="Name of a page.", show_default="a list of all pages", autocompletion=_complete_page
        ),
    ] = None,
) -> None:
    """Read a page of the documentation of this release.

    Error messages refer to pages by these names. In a pipe, the output is Markdown.

    $ sluice docs
    $ sluice docs feeds | less
    $ sluice docs developers/design/commit-fence
    """
    pages = _list_pages()
    if page is None:
        matches = {name: _TITLE.search(file.read_text("utf-8")) for name, file in pages.items()}
        titles = {name: match[1] if match else "" for name, match in matches.items()}
        session.terminal.show(table(("page", "title"), [*titles.items()]))
        session.terminal.print_document(pages=titles)
        return
    # As a page is linked in the checkout, on the site or in an error: docs/NAME.md, NAME or a folder's README.
    name = page.removeprefix("docs/").removesuffix(".md").removesuffix("/README")
    if name not in pages:
        near = get_close_matches(name, pages, 1)
        raise UsageError(
            f"no page {name!r} in the documentation",
            remedy=f"read sluice docs {near[0]}" if near else "list all pages: sluice docs",
        )
    text = pages[name].read_text("utf-8")
    session.terminal.markdown(text)
    session.terminal.print_document(page=name, text=text)


def _list_pages() -> dict[str, Traversable]:
    """Returns the pages by name, users' pages first."""
    files = dict(_walk(resources.files("sluice") / "docs"))
    names = sorted(files, key=lambda name: (name.count("/"), name))
    return {name.removesuffix(".md").removesuffix("/README"): files[name] for name in names}


def _walk(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    """Yields the Markdown files below a folder, with their paths."""
    for file in folder.iterdir():
        if file.is_dir():
            yield from _walk(file, f"{prefix}{file.name}/")
        elif file.name.endswith(".md"):
            yield f"{prefix}{file.name}", file
