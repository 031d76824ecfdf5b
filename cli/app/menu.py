"""The help of `sluice` and its groups: everyday commands first, the others by purpose."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

SECTIONS = {
    "Daily": ("init", "run", "status", "audit", "ui"),
    "Inspect": ("plan", "files", "table", "wait", "explain", "peek", "report", "doctor", "metrics"),
    "Data rules": ("feeds", "contract", "quarantine", "schema"),
    "Maintain": ("accept", "repair", "unstick", "compact", "expire", "prune"),
    "Kafka": ("offsets", "groups", "acls", "republish", "kafka", "produce"),
    "More": ("docs", "demo", "completion", "pack"),
}
"""A command that is in none of them is shown under the last."""


class Group(TyperGroup):
    """A group of commands, whose help has each one's sentence whole, however narrow the terminal is."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        self._section(formatter, "Commands", self._shown(ctx))

    def _shown(self, ctx: Any) -> dict[str, Any]:
        return {name: c for name in self.list_commands(ctx) if (c := self.get_command(ctx, name)) and not c.hidden}

    @staticmethod
    def _section(formatter: Any, title: str, commands: dict[str, Any], widest: int = 0) -> None:
        rows = [(name.ljust(widest), c.get_short_help_str(200)) for name, c in commands.items()]
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


class Menu(Group):
    """The group of all commands, whose help has them in sections."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = self._shown(ctx)
        listed = {name for names in SECTIONS.values() for name in names}
        last = [*SECTIONS][-1]
        sections = SECTIONS | {last: (*SECTIONS[last], *(name for name in commands if name not in listed))}
        widest = max(map(len, commands), default=0)
        for title, names in sections.items():
            self._section(formatter, title, {name: commands[name] for name in names if name in commands}, widest)
