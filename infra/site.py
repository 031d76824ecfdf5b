"""Build the docs site from docs/ and a reference generated from the code, with Zensical. Downloads nothing.

    python infra/site.py                  builds build/site; exits 1 if a link or an anchor is broken
    python infra/site.py FOLDER VERSION   also copies it to FOLDER/X.Y and FOLDER/latest, and lists it in FOLDER's
                                          versions.json, which the selector of versions reads

Pages are copied to build/docs first, so that generated pages stay out of docs/.
"""

from __future__ import annotations

import inspect
import json
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
    contributing = (ROOT / "CONTRIBUTING.md").read_text().replace("](docs/developers/", "](")
    (PAGES / "developers/contributing.md").write_text(contributing)
    reference = PAGES / "reference"
    reference.mkdir()
    for name, text in (("commands", render_commands()), ("keys", render_keys()), ("python", render_python())):
        (reference / f"{name}.md").write_text(text)
    pages = {page.relative_to(PAGES): page for page in PAGES.rglob("*.md")}
    for name, page in pages.items():
        text = page.read_text().replace("../../CONTRIBUTING.md", "contributing.md")
        page.write_text(_drop_outside_links(text, levels=len(name.parts)))
    settings = (ROOT / "mkdocs.yml").read_text()
    if missing := [str(name) for name in pages if str(name) not in settings]:
        print(f"mkdocs.yml: nav lacks {', '.join(missing)}", file=sys.stderr)
        return 1
    zensical = Path(sys.executable).with_name("zensical")
    result = subprocess.run([zensical, "build", "--strict"], cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        print(result.stdout, result.stderr.partition("Traceback")[0], sep="", file=sys.stderr)
    elif sys.argv[1:]:
        folder, version = sys.argv[1:]
        add_version(ROOT / "build" / "site", Path(folder), version)
    return result.returncode


def add_version(site: Path, folder: Path, version: str) -> None:
    """Add the site to the folder of all versions, in place of an earlier patch of it. `latest` is the newest."""
    minor = ".".join(version.removeprefix("v").split(".")[:2])
    listing = folder / "versions.json"
    versions = {entry["version"] for entry in json.loads(listing.read_text())} if listing.exists() else set()
    newest_first = sorted({minor, *versions}, key=lambda v: [*map(int, v.split("."))], reverse=True)
    for name in (minor, "latest") if newest_first[0] == minor else (minor,):
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(site, folder / name)
    entries = [{"version": v, "title": v, "aliases": ["latest"] if v == newest_first[0] else []} for v in newest_first]
    listing.write_text(json.dumps(entries, indent=2) + "\n")
    (folder / "index.html").write_text('<!doctype html><meta http-equiv="refresh" content="0; url=latest/">\n')


def _drop_outside_links(text: str, levels: int) -> str:
    """Replace links that lead `levels` folders up, out of docs/, by their text: the site lacks those files."""
    return re.sub(rf"\[([^\]]*)\]\((?:\.\./){{{levels}}}[^)]*\)", r"\1", text)


# -- commands


def render_commands() -> str:
    """Returns the page with the help of every command."""
    import typer

    from sluice.cli.main import build_app

    out = [
        "# Every command",
        "",
        "Output of `sluice COMMAND --help`. [Commands by task](../commands.md) is shorter.",
        "",
    ]
    for path, command, context in _walk(typer.main.get_command(build_app())):
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
    own_context = command.context_class(
        command, info_name=path[-1], parent=context, terminal_width=100, help_option_names=NAMES
    )
    yield path, command, own_context
    for name in sorted(getattr(command, "commands", {})):
        if not command.commands[name].hidden:
            yield from _walk(command.commands[name], own_context, (*path, name))


# -- keys of a feed


def render_keys() -> str:
    """Returns the page with every key of a feed file, its default and the docstring of its settings."""
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.feed.sections import TUNING

    out = ["# Every key of a feed", "", "Generated from the code. [Feeds](../feeds.md) explains the keys.", ""]
    tuned: dict[str, str] = dict.fromkeys(TUNING.values(), "")
    sections = [*_render_section(Feed, "", "The feed itself", tuned)]
    tuning = [f"| `tuning.{key}` | {tuned[old_key]} |" for key, old_key in TUNING.items()]
    return "\n".join([*out, *sections, "## tuning", "", "| key | default |", "|---|---|", *tuning, ""])


def _render_section(settings: Any, prefix: str, title: str, tuned: dict[str, str]) -> Iterator[str]:
    """Yield the lines of a section and of those below it. The defaults of keys in `tuned` go there."""
    rows, below, has_tuned = [], [], False
    for name, field in settings.model_fields.items():
        if field.exclude:
            continue
        key = field.alias or name
        if (section := _find_settings(field.annotation)) is not None:
            below.append((section, f"{prefix}{key}.", f"{prefix}{key}"))
        elif f"{prefix}{key}" in tuned:
            tuned[f"{prefix}{key}"], has_tuned = _format_default(field), True
        else:
            rows.append(f"| `{prefix}{key}` | {_format_default(field)} |")
    if rows or not has_tuned:
        description = inspect.cleandoc(settings.__doc__ or "")
        yield from (f"## {title}", "", description, "", "| key | default |", "|---|---|", *rows, "")
    for section in below:
        yield from _render_section(*section, tuned)


def _find_settings(annotation: Any) -> Any:
    """Returns the settings class of a key, optional or not, or None for a plain value."""
    from sluice.pipelines.feed.sections import Settings

    kinds = [annotation, *typing.get_args(annotation)]
    return next((k for k in kinds if inspect.isclass(k) and issubclass(k, Settings)), None)


def _format_default(field: Any) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "from other keys"
    value = getattr(field.default, "value", field.default)
    return "" if value is None else f"`{value}`"


# -- Python


def render_python() -> str:
    """Returns the page with the functions of `sluice`, their results, and every error."""
    import sluice
    from sluice.pipelines import errors
    from sluice.reading import Windows
    from sluice.streaming import Stream

    out = ["# Python", "", "`import sluice` is cheap: Arrow and the Kafka client load on first use.", ""]
    for name in sluice.__all__:
        member = getattr(sluice, name)
        if inspect.isfunction(member):
            out += [*_describe_function(f"sluice.{name}", member, "##")]
    for cls in (Windows, Stream):
        out += [f"## {cls.__name__}", "", _read_docstring(cls), ""]
        for name, method in vars(cls).items():
            if not name.startswith("_") and inspect.isfunction(method):
                out += [*_describe_function(f"{cls.__name__}.{name}", method, "###")]
    import sluice.dagster as integration

    out += ["## sluice.dagster", "", "[Your own Dagster project](../dagster.md) shows them in use.", ""]
    for name in ("feed_definitions", "feed_assets", "when_complete"):
        out += [*_describe_function(f"sluice.dagster.{name}", getattr(integration, name), "###")]
    for cls in (
        integration.FeedAssets,
        integration.FeedTranslator,
        integration.FeedAsset,
        integration.FeedsComponent,
    ):
        out += [f"### sluice.dagster.{cls.__name__}", "", _read_docstring(cls), ""]
    return "\n".join([*out, "## sluice.errors", "", _read_docstring(errors), ""])


def _describe_function(name: str, function: Any, level: str) -> Iterator[str]:
    yield from (
        f"{level} {name}",
        "",
        "```python",
        f"{name}{inspect.signature(function)}",
        "```",
        "",
        _read_docstring(function),
        "",
    )


def _read_docstring(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
