"""`sluice completion`: scripts for tab completion of commands, feeds, windows and topics."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from sluice.cli.app.completers import VARIABLE
from sluice.cli.app.invocation import Session, command


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def register(app: typer.Typer) -> None:
    command(app)(completion)


def completion(
    session: Session,
    shell: Annotated[Shell, typer.Argument(metavar="bash|zsh|fish", help="The shell.", show_default=False)],
) -> None:
    """Print a script for tab completion of commands, feeds, windows and topics.

    Add the line of your shell to its start file: ~/.bashrc, ~/.zshrc or ~/.config/fish/config.fish. Completion
    contacts Kafka only for `init --topic`, for at most 1.5 seconds.

    $ eval "$(sluice completion bash)"
    $ eval "$(sluice completion zsh)"
    $ sluice completion fish | source
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    script = get_completion_script(prog_name="sluice", complete_var=VARIABLE, shell=shell.value)
    session.terminal.lines(script.splitlines())
    session.terminal.print_document(shell=shell, script=script)
