"""Sends lines for people to a webhook, by e-mail and to a command. Neither addresses nor answers are shown."""

from __future__ import annotations

import json
import smtplib
import socket
import ssl
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from email.message import EmailMessage
from email.utils import formatdate
from html import escape
from http.client import HTTPException
from urllib.request import Request

from sluice.pipelines.errors import Failed
from sluice.pipelines.feed.project_files import EmailSettings, MailSecurity, NotifySettings
from sluice.resources import web

WEB_SECONDS = 10.0
MAIL_SECONDS = 20.0
COMMAND_SECONDS = 15.0


def notify(settings: NotifySettings, title: str, lines: Sequence[str]) -> None:
    """Send the lines to all receivers of the settings at once. One after the other, slow ones could take the minute
    after which Dagster ends a sensor's tick. Raises Failed, which names the receivers that failed."""
    title, *lines = (" ".join(text.encode("utf-8", "replace").decode().split()) for text in (title, *lines))
    with ThreadPoolExecutor(3) as threads:
        posted = threads.submit(_post, settings, title, lines)
        mailed = threads.submit(_mail, settings.email, title, lines)
        ran = threads.submit(_run, settings, lines)
    failed = [why for way in (posted, mailed, ran) if (why := way.result())]
    if failed:
        raise Failed("; ".join(failed), remedy="see notify.yaml; the next look sends them again")


def _post(settings: NotifySettings, title: str, lines: Sequence[str]) -> str:
    if settings.webhook is None:
        return ""
    # Slack interprets text in angle brackets, such as mentions of everybody; none is intended here.
    text = escape("\n".join([title, *(f"• {line}" for line in lines)]), quote=False)
    body = json.dumps({"text": text}).encode()
    try:
        request = Request(settings.webhook.get_secret_value(), body, {"Content-Type": "application/json"})
        answer = web.send(request, seconds=WEB_SECONDS)
    except (OSError, ValueError, HTTPException) as error:  # whose text may hold the address
        return f"the webhook does not answer ({type(error).__name__})"
    return "" if 200 <= answer.status < 300 else f"the webhook answers {answer.status}"


def _mail(settings: EmailSettings | None, title: str, lines: Sequence[str]) -> str:
    """One letter to all. It is sent if one of them takes it."""
    if settings is None:
        return ""
    try:
        letter = _make_letter(settings, title, lines)
        with web.Deadline(MAIL_SECONDS) as deadline, closing(_mail_server(settings, deadline)) as server:
            if settings.security is MailSecurity.STARTTLS:
                server.starttls(context=ssl.create_default_context())
            if settings.user and settings.password:
                server.login(settings.user, settings.password.get_secret_value())
            server.send_message(letter)
            with suppress(OSError):  # the letter is sent, however the server answers now
                server.quit()
    except smtplib.SMTPResponseException as error:
        return f"the mail server answers {error.smtp_code}"
    except (OSError, ValueError) as error:  # SMTPException is an OSError
        return f"the mail server takes no letter ({type(error).__name__})"
    return ""


def _make_letter(settings: EmailSettings, title: str, lines: Sequence[str]) -> EmailMessage:
    letter = EmailMessage()
    letter["From"], letter["To"] = settings.sender, ", ".join(settings.to)
    letter["Subject"], letter["Date"] = title.rstrip(":"), formatdate(localtime=True)
    letter.set_content("".join(f"{line}\n" for line in lines))
    return letter


def _mail_server(settings: EmailSettings, deadline: web.Deadline) -> smtplib.SMTP:
    class Plain(smtplib.SMTP):
        def _get_socket(self, host: str, port: int, _: float) -> socket.socket:
            return deadline.connect((host, port))

    class Tls(smtplib.SMTP_SSL):
        def _get_socket(self, host: str, port: int, _: float) -> ssl.SSLSocket:
            line = deadline.connect((host, port))
            try:
                return self.context.wrap_socket(line, server_hostname=host)
            except OSError:
                line.close()  # some errors leave it open
                raise

    if settings.security is MailSecurity.TLS:
        return Tls(settings.server, settings.at, context=ssl.create_default_context())
    return Plain(settings.server, settings.at)


def _run(settings: NotifySettings, lines: Sequence[str]) -> str:
    if settings.command is None:
        return ""
    program = settings.command[0]
    try:
        done = subprocess.run(
            settings.command,
            input="".join(f"{line}\n" for line in lines),
            text=True,
            encoding="utf-8",
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
