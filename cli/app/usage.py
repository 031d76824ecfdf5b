"""Errors of the command line: the problem, and the words to type instead."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperGroup

from sluice.pipelines.errors import UsageError

_PREVIEW = {"--dry-run", "--dryrun", "--preview"}
_PREVIEWS = {
    "run": "preview it with: sluice plan FEED",
    "plan": "leave it out: sluice plan changes nothing",
    "sync": "preview it with: sluice table status FEED",
}
"""Commands without `--dry-run`, each with the way to preview it."""
_COMMON = {"--project", "--json", "--debug", "--log-format"}
_WINDOW = r"\d{4}-\d\d-\d\d\S*"


def describe_usage(error: Any) -> UsageError:
    """Return typer's error as one of ours."""
    context = getattr(error, "ctx", None)
    if context is None:
        return UsageError(_get_message(error), remedy="see sluice --help")
    option = getattr(error, "option_name", "")
    advice = _find_option_advice(context, option) if option else _find_argument_advice(error, context)
    message = f"No such option: {option}" if option and advice else _get_message(error)
    see = f"see {context.command_path} --help"
    return UsageError(message, remedy=f"{advice}; {see}" if advice else see)


def is_window(text: str) -> bool:
    """Return whether the text begins like a window: with a date."""
    return bool(re.fullmatch(_WINDOW, text))


def _get_message(error: Any) -> str:
    return " ".join(error.format_message().replace(": Value error, ", ": ").split())


def _find_option_advice(context: Any, option: str) -> str:
    """Return the words to use instead of an unknown option; empty if typer's message says enough."""
    command, path = context.command, context.command_path
    if isinstance(command, TyperGroup):
        return f"write it behind a command: {path} COMMAND {option}" if option in _COMMON else ""
    if option in _PREVIEW:
        return _PREVIEWS.get(command.name, "")
    arguments = _list_arguments(context)
    if option.lstrip("-").upper() in (a.strip("[].") for a in arguments):
        return f"write {path} {' '.join(arguments)}, without {option}"
    return ""


def _find_argument_advice(error: Any, context: Any) -> str:
    """Return the arguments to type, if there are too many or too few; or the option for a window."""
    message, path = _get_message(error), context.command_path
    if isinstance(context.command, TyperGroup) or "argument" not in message.split("'")[0]:
        return ""
    has_window = any("--window" in p.opts for p in context.command.params)
    if has_window and (window := re.search(rf"\(({_WINDOW})\)", message)):
        return f"a window is an option: --window {window[1]}"
    return f"write {' '.join((path, *_list_arguments(context)))}"


def _list_arguments(context: Any) -> list[str]:
    return [piece for piece in context.command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
