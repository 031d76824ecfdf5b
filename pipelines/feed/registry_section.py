"""How a feed reaches its schema registry: one that speaks Confluent's REST API, or AWS Glue's."""

from __future__ import annotations

import re
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator

from sluice.pipelines.feed.settings import Count, Duration, LocalFile, Settings, Text

_URL = re.compile(r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:/[A-Za-z0-9._~/-]*)?")
_GLUE = re.compile(r"glue://([a-z]{2}(?:-[a-z]+)+-[0-9]+)/([A-Za-z0-9_.$#-]{1,255})")
_CCOMPAT = re.compile(r"(.*/apis)/ccompat/v[0-9]+")
Secret = Annotated[SecretStr, Field(min_length=1)]


def _url(text: str) -> str:
    if not _URL.fullmatch(text) and not _GLUE.fullmatch(text):
        raise ValueError("is neither an address such as https://registry.example:8081 nor glue://REGION/REGISTRY")
    return text.rstrip("/")


class RegistrySettings(Settings):
    """The registry's address, and how to log in: `username` and `password`, or a `token`; certificates for TLS. AWS
    Glue's is glue://REGION/REGISTRY; who logs in there, AWS's own settings say.

    `subject` and `version` name the schema that `sluice schema pull` takes: the newest of the subject, unless a version
    is given. A request may take `timeout` (ms).
    """

    url: Annotated[Text, AfterValidator(_url)]
    username: Text | None = None
    password: Secret | None = None
    token: Secret | None = None
    ssl_cafile: LocalFile | None = None
    ssl_certfile: LocalFile | None = None
    ssl_keyfile: LocalFile | None = None
    subject: Text | None = None
    version: Count | None = None
    timeout: Duration = 10_000

    @property
    def glue(self) -> tuple[str, str] | None:
        """The region and the registry's name, if it is AWS Glue's."""
        match = _GLUE.fullmatch(self.url)
        return (match[1], match[2]) if match else None

    @property
    def apicurio(self) -> str:
        """The path of Apicurio's own API, if the address is that of its compatible one; else empty."""
        match = _CCOMPAT.fullmatch(urlsplit(self.url).path)
        return f"{match[1]}/registry" if match else ""

    @model_validator(mode="after")
    def _aws_logs_in(self) -> Self:
        own = ("username", "password", "token", "ssl_cafile", "ssl_certfile", "ssl_keyfile")
        if self.glue and any(getattr(self, name) is not None for name in own):
            raise ValueError("has a login or certificates, and AWS Glue takes those of AWS's own settings")
        return self

    @model_validator(mode="after")
    def _one_login(self) -> Self:
        if (self.username is None) is not (self.password is None):
            raise ValueError("needs username and password together")
        if self.token and self.username:
            raise ValueError("has a token, and username and password: leave one out")
        if self.url.startswith("http:") and (self.ssl_cafile or self.ssl_certfile):
            raise ValueError("has ssl_… settings, which nothing reads unless url begins with https:")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ValueError("has ssl_keyfile, which needs ssl_certfile")
        return self

    def __repr_args__(self) -> Any:
        return [(k, v) for k, v in super().__repr_args__() if v is not None]
