"""Sends lines for people to a webhook and to a command. Neither the address nor what a server answers is ever shown."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from html import escape
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from sluice.pipelines.feed.notify import NotifySettings
from sluice.pipelines.vocabulary.errors import Failed

WEB_SECONDS = 10.0
COMMAND_SECONDS = 15.0


def notify(settings: NotifySettings, title: str, lines: Sequence[str]) -> None:
    """Send the lines wherever the settings say; both ways are tried. Raises Failed, which names those that failed."""
    failed = [why for why in (_post(settings, title, lines), _run(settings, lines)) if why]
    if failed:
        raise Failed("; ".join(failed), remedy="see notify.yaml; the next look sends them again")


def _post(settings: NotifySettings, title: str, lines: Sequence[str]) -> str:
    if settings.webhook is None:
        return ""
    # Slack obeys what is in angle brackets, such as a call of everybody; nothing here is meant so.
    text = escape("\n".join([title, *(f"• {line}" for line in lines)]), quote=False)
    body = json.dumps({"text": text}).encode()
    try:
        asked = Request(settings.webhook.get_secret_value(), body, {"Content-Type": "application/json"})
        with urlopen(asked, timeout=WEB_SECONDS):
            return ""
    except HTTPError as error:
        error.close()
        return f"the webhook answers {error.code}"
    except (OSError, ValueError) as error:
        return f"the webhook does not answer ({type(error).__name__})"


def _run(settings: NotifySettings, lines: Sequence[str]) -> str:
    if settings.command is None:
        return ""
    program = settings.command[0]
    try:
        done = subprocess.run(
            settings.command,
            input="".join(f"{line}\n" for line in lines),
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"{program} did not end within {COMMAND_SECONDS:.0f} s"
    except OSError as error:
        return f"{program} cannot be run: {error.strerror}"
    return f"{program} ended with {done.returncode}" if done.returncode else ""
