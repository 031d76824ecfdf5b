"""What errors say of the pages in docs/: a wheel holds them, and `sluice docs` opens them."""

from __future__ import annotations


def page(name: str) -> str:
    """The command that opens a page: `page("feeds")` for docs/feeds.md."""
    return f"sluice docs {name}"
