"""The docs site: pages of docs/, and the reference from the code, built strictly by Zensical. Nothing is fetched.

    python infra/site.py            builds build/site; exit 1 when a link or an anchor leads nowhere

Pages are copied to build/docs first, so that what is generated never lies among what is written.
"""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "docs"
NAMES = ["-h", "--help"]


def main() -> int:
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES)
    reference = PAGES / "reference"
    reference.mkdir()
    for name, text in (("commands", commands()), ("keys", keys()), ("python", python())):
        (reference / f"{name}.md").write_text(text)
    pages = {page.relative_to(PAGES): page for page in PAGES.rglob("*.md")}
    for name, page in pages.items():
        page.write_text(_for_the_site(page.read_text(), levels=len(name.parts)))
    shown = (ROOT / "mkdocs.yml").read_text()
    if missing := [str(name) for name in pages if str(name) not in shown]:
        print(f"mkdocs.yml: nav lacks {', '.join(missing)}", file=sys.stderr)
        return 1
    zensical = Path(sys.executable).with_name("zensical")
    done = subprocess.run([zensical, "build", "--strict"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr.partition("Traceback")[0], sep="", file=sys.stderr)
    return done.returncode


def _for_the_site(text: str, levels: int) -> str:
    """Replace links that lead `levels` folders up, out of docs/, by their text: the site lacks those files."""
    return re.sub(rf"\[([^\]]*)\]\((?:\.\./){{{levels}}}[^)]*\)", r"\1", text)


# -- commands


def commands() -> str:
    """Every command's help, as `--help` prints it."""
    import typer

    from sluice.cli.main import app

    out = [
        "# Every command",
        "",
        "What `sluice COMMAND --help` prints. [Commands by task](../commands.md) is shorter.",
        "",
    ]
    for path, command, context in _walk(typer.main.get_command(app)):
        out += [
            f"{'#' * (len(path) + 1)} {' '.join(path)}",
            "",
            "```text",
            command.get_help(context).strip(),
            "```",
            "",
        ]
    return "\n".join(out)


def _walk(command: Any, context: Any = None, path: tuple[str, ...] = ("sluice",)) -> Iterator[tuple[Any, Any, Any]]:
    here = command.context_class(
        command, info_name=path[-1], parent=context, terminal_width=100, help_option_names=NAMES
    )
    yield path, command, here
    for name in sorted(getattr(command, "commands", {})):
        if not command.commands[name].hidden:
            yield from _walk(command.commands[name], here, (*path, name))


# -- keys of a feed


def keys() -> str:
    """Every key that a feed file may have, with its default and what the settings' docstring says."""
    from sluice.pipelines.feed.feed import Feed

    out = ["# Every key of a feed", "", "From the code that reads feed files. [Feeds](../feeds.md) explains them.", ""]
    return "\n".join([*out, *_section(Feed, "", "The feed itself")])


def _section(settings: Any, prefix: str, title: str) -> Iterator[str]:
    yield from (f"## {title}", "", inspect.cleandoc(settings.__doc__ or ""), "", "| key | default |", "|---|---|")
    below = []
    for name, field in settings.model_fields.items():
        if field.exclude:
            continue
        key = field.alias or name
        if (section := _settings_of(field.annotation)) is not None:
            below.append((section, f"{prefix}{key}.", f"{prefix}{key}"))
        else:
            yield f"| `{prefix}{key}` | {_default(field)} |"
    yield ""
    for each in below:
        yield from _section(*each)


def _settings_of(annotation: Any) -> Any:
    """The settings that a key holds, also where the key may be left out; None for a key with a plain value."""
    from sluice.pipelines.feed.settings import Settings

    kinds = [annotation, *typing.get_args(annotation)]
    return next((k for k in kinds if inspect.isclass(k) and issubclass(k, Settings)), None)


def _default(field: Any) -> str:
    if field.is_required():
        return "none: it must be there"
    if field.default_factory is not None:
        return "from other keys"
    value = getattr(field.default, "value", field.default)
    return "" if value is None else f"`{value}`"


# -- Python


def python() -> str:
    """The functions of `sluice`, what they return, and every error."""
    import sluice
    from sluice.pipelines import errors
    from sluice.reading import Windows
    from sluice.stream import Stream

    out = ["# Python", "", "`import sluice` is cheap: Arrow and Kafka's client are loaded when they are needed.", ""]
    for name in sluice.__all__:
        found = getattr(sluice, name)
        if inspect.isfunction(found):
            out += [*_documented(f"sluice.{name}", found, "##")]
    for made in (Windows, Stream):
        out += [f"## {made.__name__}", "", _prose(made), ""]
        for name, member in vars(made).items():
            if not name.startswith("_") and inspect.isfunction(member):
                out += [*_documented(f"{made.__name__}.{name}", member, "###")]
    import sluice.dagster as own

    out += ["## sluice.dagster", "", "[Your own Dagster project](../dagster.md) shows how they go together.", ""]
    for name in ("feed_definitions", "feed_assets", "when_complete"):
        out += [*_documented(f"sluice.dagster.{name}", getattr(own, name), "###")]
    for shown in (own.FeedAssets, own.FeedTranslator, own.FeedAsset, own.FeedsComponent):
        out += [f"### sluice.dagster.{shown.__name__}", "", _prose(shown), ""]
    return "\n".join([*out, "## sluice.errors", "", _prose(errors), ""])


def _documented(name: str, function: Any, level: str) -> Iterator[str]:
    yield from (
        f"{level} {name}",
        "",
        "```python",
        f"{name}{inspect.signature(function)}",
        "```",
        "",
        _prose(function),
        "",
    )


def _prose(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
