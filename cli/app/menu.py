"""All commands of `sluice`, by section. A process imports the modules of the commands that it was called with."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer

from sluice.cli.app.invocation import CommandGroup

MENU = {
    "Daily": {
        "init": "Write a feed file for a topic, from a sample of its records.",
        "run": "Land pending offsets, publish them, and commit.",
        "status": "Show the progress of the feeds, those with problems first.",
        "check": "Show whether a window is complete, and why it has duplicates.",
        "audit": "Prove that every offset is accounted for.",
        "ui": "Open Dagster's UI on this project, until Ctrl-C.",
    },
    "Inspect": {
        "plan": "Preview a run: offsets, tasks and brokers.",
        "files": "List the files of a window.",
        "table": "Update and check a feed's Iceberg or Delta table.",
        "dbt": "Describe feeds for dbt.",
        "wait": "Wait until a window is complete, or all windows of a day.",
        "explain": "Show where a record landed, or why it did not.",
        "peek": "Show records in Kafka.",
        "report": "Print the address of a page: of a window, of a batch or of all feeds.",
        "doctor": "Check the machine, the project, Kafka, the lake and Spark, and report problems with their remedies.",
        "metrics": "Export metrics of the feeds for Prometheus.",
    },
    "Data rules": {
        "feeds": "List and check the feeds of this project.",
        "contract": "Propose or try a contract: the rules for a feed's rows.",
        "quarantine": "Count, show and land records that did not fit the schema or the contract.",
        "schema": "Show, fetch and compare the schemas of feeds and of their registries.",
    },
    "Maintain": {
        "accept": "Accept an event in Kafka or the ledger that stops runs.",
        "repair": "Clean up after dead runs.",
        "unstick": "Mark dead runs as failed in Dagster.",
        "compact": "Merge the small files of complete windows.",
        "expire": "Retire the rows of old windows, and remove their files.",
        "hold": "Keep windows from being expired or erased, such as for a lawsuit; without --reason, list the holds.",
        "erase": "Erase records: from landed files, quarantine, tables with their older snapshots, and reports.",
        "prune": "Remove the logs of old runs from Dagster's history.",
    },
    "Kafka": {
        "offsets": "Show, move, save and restore the committed offsets of a feed's group.",
        "groups": "Show the consumer groups of a feed's Kafka.",
        "acls": "Print the Kafka ACLs that a feed needs, and the commands that grant them.",
        "republish": "Send landed rows back to Kafka, each once and in order.",
        "kafka": "Start and stop a local Apache Kafka (KRaft) for this project.",
        "produce": "Send sample order events into a feed's topics.",
    },
    "More": {
        "docs": "Read a page of the documentation of this release.",
        "demo": "Land an hour of events from a local Kafka, then the rest, and audit it.",
        "completion": "Print a script for tab completion of commands, feeds, windows and topics.",
        "pack": "Build the archive of Python packages that Spark's executors need.",
    },
}
"""Commands by section, with the first sentence of their help: `sluice --help` imports none of them."""


class Menu(CommandGroup):
    """The group of all commands. Its help lists them in sections."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        widest = max(len(name) for texts in MENU.values() for name in texts)
        for title, texts in MENU.items():
            self._section(formatter, title, texts, widest)


_FOLDERS = dict(zip(MENU, ("daily", "inspect", "rules", "maintain", "kafka", "more"), strict=True))
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
    folders = {command: _FOLDERS[title] for title, commands in MENU.items() for command in commands}
    for name in names if names and {*names} <= {*folders} else folders:
        for module in _MODULES.get(name, (name,)):
            importlib.import_module(f"sluice.cli.{folders[name]}.{module}").register(app)
    return app
