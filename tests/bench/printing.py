"""Views of the bench as a terminal shows them."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console, RenderableType


def print_view(view: Iterable[RenderableType], width: int) -> str:
    """Return the view's text at this width, with single spaces for all white space."""
    text = io.StringIO()
    Console(file=text, width=width).print(*view, sep="\n")
    return " ".join(text.getvalue().split())
