"""Declares options of commands, inside of `Annotated`.

Until = Annotated[str | None, option("--until", "END", "The end, exclusive.")]
DryRun = Annotated[bool, flag("--dry-run", "Preview the changes without making them.")]
"""

from __future__ import annotations

from typing import Any

import typer


def option(name: str, metavar: str, text: str, *, show_default: bool | str = False, **more: Any) -> Any:
    """Return an option with a value. Its help shows a default only if that is given, in words or by True."""
    return typer.Option(name, metavar=metavar, help=text, show_default=show_default, **more)


def flag(name: str, text: str, **more: Any) -> Any:
    """Return an option without a value."""
    return typer.Option(name, metavar=" ", help=text, **more)
