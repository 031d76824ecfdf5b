"""Sends lines for people to a webhook, by e-mail and to a command. Neither addresses nor answers are shown."""

from __future__ import annotations

import json
import smtplib
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from email.message import EmailMessage
from email.utils import formatdate
from html import escape
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.parse import quote
from urllib.request import Request

from sluice.pipelines.errors import Failed
from sluice.pipelines.feed.project_files import EmailSettings, MailSecurity, NotifySettings
from sluice.pipelines.util.units import escape_unprintable
from sluice.resources import web

WEB_SECONDS = 10.0
MAIL_SECONDS = 20.0
COMMAND_SECONDS = 15.0


class Alert(NamedTuple):
    """A line, and the `key` of its finding, by which pagers recognize it; lines without one reach no pager."""

    text: str
    key: str = ""
    severe: bool = False
    ended: bool = False


def notify(settings: NotifySettings, title: str, alerts: Sequence[Alert]) -> None:
    """Send the alerts to all receivers of the settings at once. One after the other, slow ones could take the minute
    after which Dagster ends a sensor's tick. Raises Failed, which names the receivers that failed."""
    title, alerts = _clean(title), [a._replace(text=_clean(a.text)) for a in alerts]
    lines = [a.text for a in alerts]
    with ThreadPoolExecutor(3) as threads:
        posted = threads.submit(_post, settings, title, alerts)
        mailed = threads.submit(_mail, settings.email, title, lines)
        ran = threads.submit(_run, settings, lines)
    failed = [why for way in (posted, mailed, ran) if (why := way.result())]
    if failed:
        raise Failed("; ".join(failed), remedy="see notify.yaml; the next look sends them again")


def _clean(text: str) -> str:
    """Returns one line without characters that a receiver would obey; Slack takes 4,000."""
    return escape_unprintable(" ".join(text.encode("utf-8", "replace").decode().split()))[:_LONGEST]


_LONGEST = 3000


def _post(settings: NotifySettings, title: str, alerts: Sequence[Alert]) -> str:
    """Post to each service. Of one, the first request that fails ends the others."""
    return "; ".join(filter(None, (_post_all(name, make(settings, title, alerts)) for name, make in WEBHOOKS.items())))


def _post_all(name: str, requests: Iterator[Request]) -> str:
    try:
        for request in requests:
            answer = web.send(request, seconds=WEB_SECONDS)
            if not 200 <= answer.status < 300:
                return f"{name} answers {answer.status}"
    except (OSError, ValueError, HTTPException) as error:  # whose text may hold the address
        return f"{name} does not answer ({type(error).__name__})"
    return ""


def _build_request(url: str, document: Mapping[str, Any], **headers: str) -> Request:
    return Request(url, json.dumps(document).encode(), {"Content-Type": "application/json"} | headers)


def _tell_chat(settings: NotifySettings, title: str, alerts: Sequence[Alert]) -> Iterator[Request]:
    if settings.webhook:
        # Slack interprets text in angle brackets, such as mentions of everybody; none is intended here.
        text = escape("\n".join([title, *(f"• {a.text}" for a in alerts)]), quote=False)
        yield _build_request(settings.webhook.get_secret_value(), {"text": text})


def _page_pagerduty(settings: NotifySettings, title: str, alerts: Sequence[Alert]) -> Iterator[Request]:
    """Yields Events API v2: an event that triggers or resolves the incident of the finding's key."""
    if not (pager := settings.pagerduty):
        return
    for a in (a for a in alerts if a.key):
        key = {"routing_key": pager.key.get_secret_value(), "dedup_key": f"{title} {a.key}"[:255]}
        severity = "critical" if a.severe else "warning"
        payload = {"summary": a.text[:1024], "source": title.rstrip(":"), "severity": severity}
        event = {"event_action": "resolve"} if a.ended else {"event_action": "trigger", "payload": payload}
        yield _build_request(pager.url or "https://events.pagerduty.com/v2/enqueue", key | event)


def _page_opsgenie(settings: NotifySettings, title: str, alerts: Sequence[Alert]) -> Iterator[Request]:
    """Yields the Alert API: an alert by its alias, or the request that closes it."""
    if not (pager := settings.opsgenie):
        return
    url, key = pager.url or "https://api.opsgenie.com/v2/alerts", f"GenieKey {pager.key.get_secret_value()}"
    for a in (a for a in alerts if a.key):
        alias, source = f"{title} {a.key}"[:512], title.rstrip(":")
        alert = {"message": a.text[:130], "description": a.text[:15_000], "priority": "P1" if a.severe else "P3"}
        path = f"/{quote(alias, safe='')}/close?identifierType=alias" if a.ended else ""
        document = {"source": source} | ({} if a.ended else {"alias": alias, **alert})
        yield _build_request(url + path, document, Authorization=key)


WEBHOOKS: Mapping[str, Callable[[NotifySettings, str, Sequence[Alert]], Iterator[Request]]] = {
    "the webhook": _tell_chat,
    "PagerDuty": _page_pagerduty,
    "Opsgenie": _page_opsgenie,
}
"""Makes the requests of each service."""


def _mail(settings: EmailSettings | None, title: str, lines: Sequence[str]) -> str:
    """One letter to all. It is sent if one of them takes it."""
    if settings is None:
        return ""
    try:
        letter = EmailMessage()
        letter["From"], letter["To"] = settings.sender, ", ".join(settings.to)
        letter["Subject"], letter["Date"] = title.rstrip(":"), formatdate(localtime=True)
        letter.set_content("".join(f"{line}\n" for line in lines))
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
