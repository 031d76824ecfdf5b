"""The project's `notify.yaml`: where the findings of the sensor go. It may be missing (docs/operating.md)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from sluice.pipelines.feed.optional import load_optional
from sluice.pipelines.feed.settings import Settings, Text, number

NOTIFY = "notify.yaml"
"""The name of the file, in the project's folder."""


def _web_address(address: SecretStr) -> SecretStr:
    if not address.get_secret_value().startswith(("https://", "http://")):
        raise ValueError("is no http:// or https:// address")
    return address


class MailSecurity(StrEnum):
    """How the mail server is spoken to: in TLS from the first byte, after STARTTLS, or plainly."""

    TLS = "tls"
    STARTTLS = "starttls"
    NONE = "none"


_PORTS = {MailSecurity.TLS: 465, MailSecurity.STARTTLS: 587, MailSecurity.NONE: 25}


class EmailSettings(Settings):
    """A mail server and who writes to whom. `none` is for a relay on this machine, and takes no login."""

    server: Text
    port: Annotated[int, BeforeValidator(number), Field(ge=1, le=65535)] | None = None
    security: MailSecurity = MailSecurity.TLS
    user: Text | None = None
    password: Annotated[SecretStr, Field(min_length=1)] | None = None
    sender: Text
    to: Annotated[tuple[Text, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _login(self) -> Self:
        if (self.user is None) != (self.password is None):
            raise ValueError("user and password go together")
        if self.password and self.security is MailSecurity.NONE:
            raise ValueError("a password is never sent without TLS: security must be tls or starttls")
        return self

    @property
    def at(self) -> int:
        """The port, or the usual one."""
        return self.port or _PORTS[self.security]


class NotifySettings(Settings):
    """`webhook` gets `{"text": …}`, as Slack takes it; the address is a secret, since whoever has it may post there.
    `email` goes through a mail server. `command` is a program and its arguments, and gets the lines on its stdin.
    Without any of them, nothing is sent."""

    webhook: Annotated[SecretStr, AfterValidator(_web_address)] | None = None
    email: EmailSettings | None = None
    command: Annotated[tuple[Text, ...], Field(min_length=1)] | None = None


def load_notify(folder: Path, environ: Mapping[str, str]) -> NotifySettings:
    """The settings in the folder's file, or those without one. Raises FeedError."""
    return load_optional(folder, NOTIFY, NotifySettings, environ, "operating")
