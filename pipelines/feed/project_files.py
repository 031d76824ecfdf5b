"""Optional files next to the feeds: `fleet.yaml` (docs/many-feeds.md) and `notify.yaml` (docs/operating.md)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from sluice.pipelines.feed.problems import problems_of, raise_problems
from sluice.pipelines.feed.sections import Count, Duration, Settings, Text, number
from sluice.pipelines.feed.yaml_file import YamlError, read_yaml
from sluice.pipelines.model.receipts import EngineKind, Scheduler
from sluice.pipelines.util.units import HOUR, MINUTE

S = TypeVar("S", bound=Settings)


def load_optional(folder: Path, name: str, kind: type[S], environ: Mapping[str, str], page: str) -> S:
    """The settings in that file of the folder, or those without one. `page`: the one that lists its keys. Raises
    FeedError."""
    path = folder / name
    if not path.exists():
        return kind()
    try:
        return kind.model_validate(read_yaml(path, environ, folder).data)
    except YamlError as error:
        problems = error.problems
    except ValueError as error:
        problems = problems_of(error, kind)
    raise_problems([(str(path), p) for p in problems], page)  # not in a handler: a context would quote the file


FLEET = "fleet.yaml"
"""The name of the file, in the project's folder."""


def _lasting(ms: int) -> int:
    if ms < 1000:
        raise ValueError("should be a second or more")
    return ms


_Time = Annotated[Duration, AfterValidator(_lasting)]


class FleetSettings(Settings):
    """The project's scheduler and engine, and limits of a run over many feeds. Durations in ms.

    `scheduler` starts the project's runs: without `dagster`, `sluice run` does not load Dagster. `engine` runs the
    tasks of feeds that name none.
    `feeds_at_once` feeds are at work at the same time, `per_kafka` of them with one Kafka. Feeds that have not begun
    `deadline` after the run did are left to the next one. A feed's step that takes longer than `feed_time` is ended. A
    tick asks for `windows` windows of a feed at most. A feed that is far behind begins no other batch `catch_up` after
    it began, and continues in the next run.
    """

    scheduler: Scheduler = Scheduler.DAGSTER
    engine: EngineKind = EngineKind.SPARK
    feeds_at_once: Count = 4
    per_kafka: Count = 4
    deadline: _Time = 50 * MINUTE
    feed_time: _Time = HOUR
    windows: Count = 1000
    catch_up: Duration = 10 * MINUTE


def load_fleet(folder: Path, environ: Mapping[str, str]) -> FleetSettings:
    """The settings in the folder's file, or those without one. Raises FeedError."""
    return load_optional(folder, FLEET, FleetSettings, environ, "many-feeds")


NOTIFY = "notify.yaml"
"""The name of the file, in the project's folder."""


def _check_web_text(address: str) -> str:
    if not address.startswith(("https://", "http://")):
        raise ValueError("is no http:// or https:// address")
    return address


def _check_web_address(address: SecretStr) -> SecretStr:
    _check_web_text(address.get_secret_value())
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


class PagerSettings(Settings):
    """The key of an integration, and its address where it is another than the service's usual one."""

    key: Annotated[SecretStr, Field(min_length=1)]
    url: Annotated[Text, AfterValidator(_check_web_text)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _accept_key(cls, value: object) -> object:
        return {"key": value} if isinstance(value, str) else value


class NotifySettings(Settings):
    """`webhook` gets `{"text": …}`, as Slack takes it; the address is a secret, since it suffices to post there.
    `pagerduty` and `opsgenie` get an alert for each finding, and its end.
    `email` goes through a mail server. `command` is a program and its arguments, and gets the lines on its stdin.
    Without any of them, nothing is sent."""

    webhook: Annotated[SecretStr, AfterValidator(_check_web_address)] | None = None
    pagerduty: PagerSettings | None = None
    opsgenie: PagerSettings | None = None
    email: EmailSettings | None = None
    command: Annotated[tuple[Text, ...], Field(min_length=1)] | None = None


def load_notify(folder: Path, environ: Mapping[str, str]) -> NotifySettings:
    """The settings in the folder's file, or those without one. Raises FeedError."""
    return load_optional(folder, NOTIFY, NotifySettings, environ, "operating")
