"""All commands of `sluice`, by section. A process imports the modules of the commands that it was called with."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer

from sluice.cli.app.invocation import CommandGroup

SECTIONS = {
    "Daily": ("init", "run", "status", "check", "audit", "ui"),
    "Inspect": ("plan", "files", "table", "dbt", "wait", "explain", "peek", "report", "doctor", "metrics"),
    "Data rules": ("feeds", "contract", "quarantine", "schema"),
    "Maintain": ("accept", "repair", "unstick", "compact", "expire", "hold", "erase", "prune"),
    "Kafka": ("offsets", "groups", "acls", "republish", "kafka", "produce"),
    "More": ("docs", "demo", "completion", "pack"),
}
"""Commands by section. Any other command is shown in the last section."""


class Menu(CommandGroup):
    """The group of all commands. Its help lists them in sections."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = self._shown(ctx)
        listed = {name for names in SECTIONS.values() for name in names}
        last = [*SECTIONS][-1]
        sections = SECTIONS | {last: (*SECTIONS[last], *(name for name in commands if name not in listed))}
        widest = max(map(len, commands), default=0)
        for title, names in sections.items():
            self._section(formatter, title, {name: commands[name] for name in names if name in commands}, widest)


_FOLDERS = dict(zip(SECTIONS, ("daily", "inspect", "rules", "maintain", "kafka", "more"), strict=True))
_MODULES = {"kafka": ("local",), "offsets": ("offsets", "offsets_migrate")}
"""The modules of commands that are not in a module of their name."""


def _tell_version(requested: bool) -> None:
    if requested:
        import platform

        from sluice import __version__

        print(f"sluice {__version__} (Python {platform.python_version()}, {platform.system()} {platform.machine()})")
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", help="Show the version, and exit.", is_eager=True, callback=_tell_version)
]


def _common(version: _Version = False) -> None: ...


def build_app(*names: str) -> typer.Typer:
    """Return the application with these commands. Without names, or with an unknown one, it has all commands."""
    app = typer.Typer(
        name="sluice",
        cls=Menu,
        help="Land Kafka topics as Parquet, hour by hour, and prove that nothing is missing.",
        epilog="sluice COMMAND --help has examples. "
        "Exit codes: 0 done · 1 failed · 2 usage or configuration · 3 refused to protect data · "
        "75 not yet, retry later",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    app.callback()(_common)
    folders = {command: _FOLDERS[title] for title, commands in SECTIONS.items() for command in commands}
    for name in names if names and {*names} <= {*folders} else folders:
        for module in _MODULES.get(name, (name,)):
            importlib.import_module(f"sluice.cli.{folders[name]}.{module}").register(app)
    return app
