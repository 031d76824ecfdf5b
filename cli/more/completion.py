"""`sluice completion`: the script with which a shell completes commands, feeds, windows and topics."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

import typer

from sluice.cli.app.invocation import Session, command

VARIABLE = "_SLUICE_COMPLETE"


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def register(app: typer.Typer) -> None:
    command(app)(completion)


def prepare() -> None:
    """Let typer answer a shell that asks what fits. Elsewhere this costs nothing."""
    if VARIABLE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()


def completion(
    session: Session, shell: Annotated[Shell, typer.Argument(help="Your shell.", show_default=False)]
) -> None:
    """Print what makes Tab complete commands, feeds, windows and topics.

    Put the line for your shell into its start file: ~/.bashrc, ~/.zshrc or ~/.config/fish/config.fish. Tab asks Kafka
    only for `init --topic`, and for a second and a half at most.

    $ eval "$(sluice completion bash)"
    $ eval "$(sluice completion zsh)"
    $ sluice completion fish | source
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    script = get_completion_script(prog_name="sluice", complete_var=VARIABLE, shell=shell.value)
    session.terminal.lines(script.splitlines())
    session.terminal.print_document({"shell": shell.value, "script": script})
