"""HTML made of elements, so that outside text is never markup: all that is not `Html` is escaped and made harmless.

Harmless means: control characters, characters that change the direction of text, and halves of surrogate pairs are
shown as escapes, and long text is cut.

Plots are inline SVG without text except titles: they stretch to the available width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from sluice.pipelines.util.units import escape_unprintable

LONGEST = 1200
"""Maximum length of a text, in characters."""
CELL = 200
"""Characters of a value."""
_FEW = 5
"""Columns that fit on a phone next to bars."""
_VOID = frozenset({"meta", "br", "rect", "line"})


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
    return escape_unprintable(text, "\n")


def readable(data: bytes, limit: int = CELL) -> str:
    """Bytes as text, with escapes for those that are not UTF-8."""
    text = data[: 4 * limit + 4].decode("utf-8", "backslashreplace").replace("\n", "\\n")
    return cut(text, limit)


POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def page(title: str, header: Html, sections: Iterable[Html], note: str) -> str:
    """The whole file."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        Html(f"<style>{CSS}</style>"),
    )
    body = tag("body", header, tag("main", *sections), tag("footer", note))
    return "<!DOCTYPE html>\n" + tag("html", head, body, lang="en") + "\n"


def render_tiles(figures: Iterable[Sequence[str]]) -> Html:
    """Large figures, each with its label: two texts, or one that begins with the figure."""
    pairs = (f.partition(" ")[::2] if isinstance(f, str) else f for f in figures)
    return tag(
        "div", *(tag("div", tag("b", f), tag("span", label), class_="tile") for f, label in pairs), class_="tiles"
    )


VALUES = "This file holds values of records: share it as you would share the data. It needs no network."


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


_HEIGHT = 100


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its meaning, its height, and a class of the style sheet that colours it."""

    label: str
    height: float
    kind: str = ""
    text: str = ""

    @property
    def title(self) -> str:
        return f"{self.label}: {self.text or number(self.height)}"


def upright(title: str, bars: Sequence[Bar], ends: Sequence[str], top: str = "") -> Html:
    """Returns vertical bars with labels below, from left to right. `top` labels the highest bar."""
    highest = max((b.height for b in bars), default=0) or 1
    drawn = [_column(i, bar, highest) for i, bar in enumerate(bars)]
    drawing = tag(
        "svg",
        tag("title", title),
        *drawn,
        viewBox=f"0 0 {10 * max(len(bars), 1)} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=title,
        class_="plot",
    )
    axis = tag("div", *(tag("span", e) for e in ends), class_="axis", aria_hidden="true")
    return tag("div", tag("div", top, class_="top", aria_hidden="true"), drawing, axis, class_="chart")


def _column(index: int, bar: Bar, highest: float) -> Html:
    height = max(_HEIGHT * bar.height / highest, 1.5) if bar.height > 0 else 0
    kind = f"b {bar.kind}".strip()
    x, y = 10 * index + 0.7, _HEIGHT - height
    drawn = tag("rect", x=f"{x:g}", y=f"{y:.4g}", width="8.6", height=f"{height:.4g}", class_=kind)
    return tag("g", tag("title", bar.title), drawn)


def lying(parts: Sequence[tuple[float, str]], longest: float) -> Html:
    """A bar in a table's cell, next to its number: pieces (length, class) one after the other."""
    at, drawn = 0.0, []
    for length, kind in parts:
        width = max(100 * length / longest, 0.6) if length > 0 and longest else 0
        if width:
            drawn.append(
                tag("rect", x=f"{at:.4g}", y="0", width=f"{width:.4g}", height="10", class_=f"b {kind}".strip())
            )
        at += width
    return tag("svg", *drawn, viewBox="0 0 100 10", preserveAspectRatio="none", class_="bar", aria_hidden="true")


CSS = """
:root{color-scheme:light dark;--bg:#f5f6f8;--card:#fff;--ink:#1b2230;--soft:#5d6879;--line:#e2e6ec;--track:#edf0f4;
--bar:#4f83e3;--now:#1d4fb5;--good:#177245;--goodbg:#e3f4ea;--warn:#8f5a00;--warnbg:#fdf1d8;--bad:#b3261e;--badbg:#fce8e6;
--reject:#d9534a;--hidden:#a8b1bf;--other:#8a96a8}
@media (prefers-color-scheme:dark){:root{--bg:#0e1218;--card:#161c25;--ink:#e5e9f0;--soft:#98a4b5;--line:#28313e;
--track:#212936;--bar:#5f93f0;--now:#a9c7ff;--good:#6fd29c;--goodbg:#12301f;--warn:#f0bf62;--warnbg:#33270c;--bad:#ff8f86;
--badbg:#3a1715;--reject:#ef6a61;--hidden:#566274;--other:#6c7889}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,Arial,
sans-serif;font-variant-numeric:tabular-nums;-webkit-text-size-adjust:100%}
main,header,footer{max-width:1080px;margin:0 auto;padding:0 20px}
header{padding-top:28px}
.brand{color:var(--soft);font-size:13px;letter-spacing:.02em}
h1{font-size:26px;line-height:1.25;margin:2px 0 10px;font-weight:650;overflow-wrap:anywhere}
h2{font-size:18px;margin:0 0 2px;font-weight:650}
h3{font-size:14px;margin:0;font-weight:650;overflow-wrap:anywhere}
p{margin:6px 0}
a{color:inherit}
.note,.soft{color:var(--soft)}
.note{font-size:13.5px;margin:0 0 12px;max-width:80ch}
.pill{display:inline-block;border-radius:99px;padding:2px 11px;font-size:13px;font-weight:600;white-space:nowrap}
.good{color:var(--good)}.warn{color:var(--warn)}.bad{color:var(--bad)}
.pill.good{background:var(--goodbg)}.pill.warn{background:var(--warnbg)}.pill.bad{background:var(--badbg)}
.pill.info{background:var(--track);color:var(--soft)}
.why{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--badbg);border-left:4px solid var(--bad);
border-radius:6px;padding:10px 14px;margin:12px 0;font-size:14px}
.why.warn{background:var(--warnbg);border-color:var(--warn);color:inherit}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;margin:14px 0 4px;font-size:13.5px}
nav a{color:var(--soft);text-decoration:none;border-bottom:1px solid var(--line)}
nav a:hover,nav a:focus{color:var(--ink);border-color:currentColor}
.tiles{display:flex;flex-wrap:wrap;gap:1px;background:var(--line);
border:1px solid var(--line);border-radius:10px;overflow:hidden;margin:14px 0}
.verdict .pill{margin-right:5px}
.tile{background:var(--card);padding:11px 14px;flex:1 1 130px}
.tile b{display:block;font-size:21px;line-height:1.3;font-weight:650}
.tile span{color:var(--soft);font-size:13px}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:18px 20px;margin:16px 0}
.scroll{overflow-x:auto;position:relative;margin:8px 0}
table{border-collapse:collapse;width:100%;font-size:13.5px}
caption{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
th,td{text-align:left;padding:5px 14px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:500;color:var(--soft);font-size:12.5px;white-space:nowrap}
tr>:last-child{padding-right:0}
tbody tr:last-child td{border-bottom:0}
td.n,th.n{text-align:right;white-space:nowrap}
.p{white-space:nowrap}
.any{overflow-wrap:anywhere}
code,.mono{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}
code,bdi{overflow-wrap:anywhere}
.sample{display:block;background:var(--track);border-radius:6px;padding:6px 9px;margin:4px 0;white-space:pre-wrap}
mark{background:var(--reject);color:#fff;border-radius:2px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:3px 18px;margin:0;font-size:13.5px}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
svg{display:block}
.bar{width:100%;min-width:70px;height:11px;margin-top:5px;background:var(--track);border-radius:3px;overflow:hidden}
.plot{width:100%;height:104px;border-bottom:1px solid var(--line)}
.b{fill:var(--bar)}.b.reject{fill:var(--reject)}.b.hidden{fill:var(--hidden)}.b.now{fill:var(--now)}.b.other{fill:var(--other)}
.b.t0{fill:#4f83e3}.b.t1{fill:#2aa198}.b.t2{fill:#e0a030}.b.t3{fill:#9a6bd1}.b.t4{fill:#d9534a}.b.t5{fill:#5aa454}
.b.t6{fill:#c76a9d}.b.t7{fill:#8a96a8}
g:hover>.b{opacity:.72}
.chart{margin:8px 0}
.axis{display:flex;justify-content:space-between;gap:10px;color:var(--soft);font-size:12px;margin-top:3px}
.top{color:var(--soft);font-size:12px;min-height:1em;margin-bottom:3px}
.cards{display:grid;align-items:start;grid-template-columns:repeat(auto-fill,minmax(300px,1fr));gap:14px}
.card{border:1px solid var(--line);border-radius:8px;padding:12px 14px;min-width:0}
.card .stats{color:var(--soft);font-size:12.5px;margin:2px 0 6px}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:8px 28px}
.two>*{min-width:0}
.legend{display:flex;flex-wrap:wrap;gap:3px 16px;font-size:12.5px;color:var(--soft);margin:4px 0 8px}
.legend svg{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px;vertical-align:-1px}
details{margin-top:8px}
summary{cursor:pointer;color:var(--soft);font-size:13px}
.g{width:22%}
.wide .g{width:12%}.card .g{width:18%}.card .bar{min-width:40px}.card td:first-child{min-width:7.5em}
.kind{margin-top:12px}.kind .soft{font-size:13px}
td code{white-space:nowrap}td .any code{white-space:normal}
.feed{display:grid;grid-template-columns:180px max-content 1fr;gap:2px 16px;align-items:start;padding:3px 0;
font-size:13.5px}.feed b{overflow-wrap:anywhere}.feed details,.feed p{margin:0;overflow-wrap:anywhere;min-width:0}
.feed summary,.line summary{color:inherit;white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
.line{margin:0;font-size:13.5px;overflow-wrap:anywhere}
.feed:target{background:var(--track)}.cells{display:flex;gap:2px;width:384px}.c{flex:1;height:19px;border-radius:3px}
.legend .c{display:inline-block;width:11px;height:11px;margin-right:6px;vertical-align:-1px}
a.c:hover,a.c:focus{outline:2px solid}
.c.landed{background:#2f9e63}.c.landed-with-losses{background:linear-gradient(135deg,#2f9e63 50%,var(--reject) 50%)}
.c.from-the-origin-on{background:linear-gradient(135deg,#2f9e63 50%,var(--hidden) 50%)}
.c.retired{background:var(--hidden)}
.c.partial{background:linear-gradient(135deg,#2f9e63 50%,#e0a030 50%)}.c.held{background:#9a6bd1}
.c.running{background:var(--bar)}
.c.pending{background:#e0a030}.c.failed{background:var(--reject)}.c.not-closed{box-shadow:inset 0 0 0 1px var(--hidden)}
.c.unknown{background:repeating-linear-gradient(45deg,var(--hidden) 0 2px,var(--track) 2px 5px)}
footer{color:var(--soft);font-size:12.5px;padding:6px 20px 40px}
@media (max-width:560px){main,header,footer{padding-left:12px;padding-right:12px}section{padding:14px 13px}
h1{font-size:22px}.tile{padding:9px 11px}.bar{min-width:20px}th,td{padding-right:8px}table{font-size:12.5px}
th,th.n{white-space:normal;vertical-align:bottom;font-size:12px}.g{width:14%}.many .g,#rows .legend{display:none}
.feed{grid-template-columns:minmax(0,1fr);padding:6px 0}.cells{width:auto}
.tile b{font-size:18px}dl{grid-template-columns:1fr}
dd{margin-bottom:6px}.cards{grid-template-columns:1fr}
.wide thead{display:none}.wide tr{display:block;border-bottom:1px solid var(--line);padding:9px 0}
.wide td,.wide td.n{display:block;border:0;padding:1px 0;text-align:left;white-space:normal}.wide td:empty{display:none}
.wide td.n{display:inline-block;margin-right:16px}.wide .g{width:auto}
.wide td:first-child{float:left;margin-right:9px}.wide td code{white-space:normal}
.wide td[data-k]::before{content:attr(data-k) " ";color:var(--soft);font-size:12px}}
@media print{:root{--bg:#fff;--card:#fff}body{font-size:11pt}main,header,footer{max-width:none;padding:0}
nav{display:none}section{border:0;padding:0;margin:18pt 0}
.card,tr,.chart,.tiles{break-inside:avoid}h2,h3{break-after:avoid}
.scroll{overflow:visible}details::details-content{content-visibility:visible;display:block;height:auto}
svg,.pill,.why,.bar{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""
