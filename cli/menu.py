"""What `sluice` shows without arguments: the commands that matter first, and the rest by what it is for."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

SECTIONS = {
    "Every day": ("init", "run", "status", "audit", "ui"),
    "Look closer": ("plan", "files", "wait", "explain", "peek", "report", "doctor", "metrics"),
    "Rules for data": ("feeds", "contract", "quarantine"),
    "Put right": ("accept", "repair", "unstick", "compact", "expire"),
    "Kafka": ("offsets", "groups", "acls", "kafka", "produce"),
    "Around": ("docs", "demo", "completion", "pack", "bench"),
}
"""A command that is in none of them is shown under the last."""


class Menu(TyperGroup):
    """The group of all commands, whose help has them in sections."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        shown = {name: c for name in self.list_commands(ctx) if (c := self.get_command(ctx, name)) and not c.hidden}
        named = {name for names in SECTIONS.values() for name in names}
        last = [*SECTIONS][-1]
        sections = SECTIONS | {last: (*SECTIONS[last], *(name for name in shown if name not in named))}
        widest = max(map(len, shown), default=0)
        for title, names in sections.items():
            rows = [(name.ljust(widest), shown[name].get_short_help_str(200)) for name in names if name in shown]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
