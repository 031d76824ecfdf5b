"""Object stores for lakes: their addresses, and the settings of a feed by which its store is reached.

Each store's own environment variables, files and machine identities supply missing credentials.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple, Self
from urllib.parse import parse_qs

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from sluice.pipelines.feed.sections import LocalFile, Millis, Secret, Settings, Size, Text, number

MIB = 1 << 20
CLIENT_BYTES = 48 << 20
"""Bytes that a store's client and its connections take in a process."""
SECTIONS = {"s3": "s3", "gs": "gcs", "az": "azure", "abfss": "azure"}
"""Schemes of addresses, and the section of a feed (and the extra) for each."""
EXAMPLES = "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"

_BUCKET, _PREFIX = r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}", r"((?:/[^/]+)*)/?"
_ACCOUNT = r"([a-z0-9]{3,24})\.dfs\.core\.windows\.net"
_SHAPES = {
    "s3": (re.compile(f"s3://({_BUCKET})(){_PREFIX}"), "s3://bucket/prefix"),
    "gs": (re.compile(f"gs://({_BUCKET})(){_PREFIX}"), "gs://bucket/prefix"),
    "az": (re.compile(f"az://({_BUCKET})(){_PREFIX}"), "az://container/prefix"),
    "abfss": (
        re.compile(f"abfss://({_BUCKET})@{_ACCOUNT}{_PREFIX}"),
        "abfss://container@account.dfs.core.windows.net/prefix",
    ),
}
_ENDPOINT = re.compile(r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?/?")


class Place(NamedTuple):
    """A lake in an object store. `prefix` is empty or ends in a slash; `account` is empty unless the address has it."""

    scheme: str
    bucket: str
    prefix: str
    account: str

    @property
    def root(self) -> str:
        """The bucket's own address, without a slash at the end."""
        account = f"@{self.account}.dfs.core.windows.net" if self.account else ""
        return f"{self.scheme}://{self.bucket}{account}"


def scheme(address: str) -> str:
    """The scheme of an object store; empty for a folder."""
    before, separator, _ = address.partition("://")
    return before if separator and before in SECTIONS else ""


def store_address(text: str) -> str:
    """The address of a lake in an object store, without a slash at the end. Raises ValueError."""
    shape, example = _SHAPES[scheme(text)]
    match = shape.fullmatch(text)
    if match is None or any(part in (".", "..") for part in match[3].split("/")):
        raise ValueError(f"is not {example}")
    return text.rstrip("/")


def place(address: str) -> Place:
    """The parts of an address from `store_address`."""
    name = scheme(address)
    authority, _, prefix = address.removeprefix(f"{name}://").partition("/")
    bucket, _, host = authority.partition("@")
    return Place(name, bucket, f"{prefix}/" if prefix else "", host.partition(".")[0])


def _endpoint(text: str) -> str:
    if not _ENDPOINT.fullmatch(text):
        raise ValueError("is not an address such as https://s3.example:9000")
    return text.rstrip("/")


class StoreSettings(Settings):
    """Settings that each store has. `retries` count per request. At most `buffer_bytes` wait for upload in a process's
    memory; the rest waits on its disk."""

    endpoint: Annotated[Text, AfterValidator(_endpoint)] | None = None
    connect_timeout_ms: Millis = 5_000
    read_timeout_ms: Millis = 60_000
    retries: Annotated[int, BeforeValidator(number), Field(ge=0, le=100)] = 8
    buffer_bytes: Size = 64 * MIB

    def __repr_args__(self) -> Any:
        return [(k, v) for k, v in super().__repr_args__() if v not in (None, {})]


class GcsSettings(StoreSettings):
    """Access to a bucket of Google Cloud Storage. Without `service_account` and `token`: the application default
    credentials."""

    service_account: LocalFile | None = None
    token: Secret | None = None
    """An OAuth token, which nothing renews."""


class AzureSettings(StoreSettings):
    """Access to a container of Azure. Without `account_key` and `sas_token`: variables `AZURE_…`, workload identity,
    managed identity or the Azure CLI."""

    account: Annotated[Text, Field(pattern=r"^[a-z0-9]{3,24}\z")] | None = None
    account_key: Secret | None = None
    sas_token: Secret | None = None

    @property
    def token_fields(self) -> dict[str, str]:
        """The fields of the SAS token, such as `sp`, its letters."""
        token = self.sas_token.get_secret_value() if self.sas_token else ""
        return {name: values[0] for name, values in parse_qs(token.lstrip("?")).items()}

    @property
    def token_end(self) -> datetime | None:
        """The end of the SAS token; None if there is none, or a stored access policy has it."""
        with suppress(KeyError, ValueError):
            end = datetime.fromisoformat(self.token_fields["se"])
            return end if end.tzinfo else end.replace(tzinfo=UTC)
        return None

    @model_validator(mode="after")
    def _one_credential(self) -> Self:
        if self.account_key and self.sas_token:
            raise ValueError("has both account_key and sas_token")
        return self
