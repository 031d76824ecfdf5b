"""HTML made of elements, so that outside text is never markup: all that is not `Html` is escaped and made harmless.

Harmless means: control characters, characters that change the direction of text, and halves of surrogate pairs are
shown as escapes, and long text is cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

LONGEST = 1200
"""Maximum length of a text, in characters."""
CELL = 200
"""Characters of a value."""
_FEW = 5
"""Columns that fit on a phone next to bars."""
_VOID = frozenset({"meta", "br", "rect", "line"})
_KEPT = frozenset("\n")


class Html(str):
    """Markup that is safe as it stands."""

    __slots__ = ()


def tag(element: str, /, *inside: str, **attributes: str | float | None) -> Html:
    """An element. In attribute names, `class_` means `class` and `_` means `-`. None leaves an attribute out."""
    attribute_text = "".join(f' {_attribute(k)}="{plain(str(v))}"' for k, v in attributes.items() if v is not None)
    if element in _VOID:
        return Html(f"<{element}{attribute_text}>" if element in ("meta", "br") else f"<{element}{attribute_text}/>")
    return Html(f"<{element}{attribute_text}>{join_html(inside)}</{element}>")


def _attribute(name: str) -> str:
    return name.rstrip("_").replace("_", "-") if name not in ("viewBox", "preserveAspectRatio") else name


def join_html(pieces: Iterable[str]) -> Html:
    """The pieces, one after the other."""
    return Html("".join(p if isinstance(p, Html) else plain(p) for p in pieces))


def plain(text: str, limit: int = LONGEST) -> Html:
    """Text as text."""
    return Html(escape(harmless(cut(text, limit)), quote=True))


def value(text: str, limit: int = CELL) -> Html:
    """A text from outside. Its writing direction does not affect its neighbours."""
    return tag("bdi", cut(text, limit))


def cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + "…"


def harmless(text: str) -> str:
    """The text with escapes in place of invisible characters."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _KEPT else _escape(c) for c in text)


def _escape(c: str) -> str:
    return c.encode("unicode_escape", "backslashreplace").decode("ascii")


def readable(data: bytes, limit: int = CELL) -> str:
    """Bytes as text, with escapes for those that are not UTF-8."""
    text = data[: 4 * limit + 4].decode("utf-8", "backslashreplace").replace("\n", "\\n")
    return cut(text, limit)


# -- tables


def table(
    caption: str,
    columns: Iterable[str],
    rows: Iterable[Iterable[str]],
    right: Iterable[str] = (),
    cards: Iterable[str] | None = None,
) -> Html:
    """A table; `right` names the columns of numbers, those without a name hold bars. Given `cards`, its rows stand as
    cards on a phone, where these columns' cells, and numbers, carry the names of their columns. Otherwise a table of
    many columns leaves out its bars there."""
    names, flush = list(columns), set(right)
    kinds = ["n" if n in flush else None if n else "g" for n in names]
    labels = [n if cards is not None and n in {*cards, *flush} else None for n in names]
    head = tag("tr", *(tag("th", n, scope="col", class_=k) for n, k in zip(names, kinds, strict=True)))
    body = (
        tag(
            "tr", *(tag("td", c, class_=k, data_k=n if c else None) for c, k, n in zip(row, kinds, labels, strict=True))
        )
        for row in rows
    )
    inside = (tag("caption", caption), tag("thead", head), tag("tbody", *body))
    kind = "wide" if cards is not None else "many" if len(names) > _FEW else None
    every = tag("table", *inside, class_=kind)
    return tag("div", every, class_="scroll", tabindex="0", role="region", aria_label=caption)


def section(name: str, title: str, *inside: str, note: str = "") -> Html:
    """A section of the page with its heading. `note` is shown below it."""
    note_tags = [tag("p", note, class_="note")] if note else []
    return tag("section", tag("h2", title), *note_tags, *inside, id=name)


def details(summary: str, *inside: str) -> Html:
    """A part that readers can open."""
    return tag("details", tag("summary", summary), *inside)


def number(n: float | None) -> str:
    """A count."""
    return "–" if n is None else f"{n:,.0f}"


def size(n: float) -> str:
    """Bytes, to three digits: `1.23 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 999.5:  # beyond, three digits do not do
            return f"{n:.0f} B" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:,.3g} TB"


def share(part: float, total: float) -> str:
    """A share in percent. A small one is never shown as 0%, nor a large one as 100%."""
    if not total:
        return "–"
    of = 100 * part / total
    if 0 < of < 0.01:
        return "< 0.01 %"
    return f"{min(of, 99.99) if part < total else of:.2f} %" if 0 < of < 100 else f"{of:.0f} %"
