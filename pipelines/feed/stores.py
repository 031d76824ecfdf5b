"""Object stores for lakes: their addresses, and the settings of a feed by which its store is reached.

Each store's own environment variables, files and machine identities supply missing credentials. A new store is a class
of settings, a row in `STORES` and a section of the feed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self
from urllib.parse import parse_qs

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from sluice.pipelines.feed.sections import LocalFile, Millis, Secret, Settings, Size, Text, number

MIB = 1 << 20
CLIENT_BYTES = 48 << 20
"""Bytes that a store's client and its connections take in a process."""


def _endpoint(text: str) -> str:
    if not re.fullmatch(r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?/?", text):
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

    VARIABLES: ClassVar[Mapping[str, str]] = {}
    """Settings of an emulator, and the store's own environment variables for them."""

    @classmethod
    def read_environment(cls, variables: Mapping[str, str]) -> dict[str, str]:
        """Returns the settings of `VARIABLES`. An address without a scheme is one of HTTP."""
        settings = {name: variables[variable] for name, variable in cls.VARIABLES.items() if variables.get(variable)}
        if "://" not in (endpoint := settings.get("endpoint", "://")):
            settings["endpoint"] = f"http://{endpoint}"
        return settings


def _tags(tags: dict[str, str]) -> dict[str, str]:
    """Check the number and length of tags against the limits of S3. Raises ValueError."""
    if len(tags) > 10 or any(not 1 <= len(k) <= 128 or len(v) > 256 for k, v in tags.items()):
        raise ValueError("has more than 10 tags, or one that is too long")
    return tags


class S3Settings(StoreSettings):
    """Access to a bucket on S3 or a compatible store. One upload request carries `part_bytes`.

    boto3 finds missing settings by itself: region, endpoint and credentials, in its environment variables, its files
    and the machine's role.
    """

    region: Text | None = None
    path_style: bool | None = None
    """Use `endpoint/bucket/key` instead of `bucket.endpoint/key`. None: do so if the feed names an endpoint."""
    ca_bundle: LocalFile | None = None

    profile: Text | None = None
    access_key_id: Secret | None = None
    secret_access_key: Secret | None = None
    session_token: Secret | None = None

    sse: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    kms_key: Text | None = None
    tags: Annotated[
        dict[str, Annotated[str, BeforeValidator(lambda v: v if isinstance(v, str) else str(v))]], AfterValidator(_tags)
    ] = Field(default_factory=dict)

    part_bytes: Annotated[Size, Field(ge=5 * MIB, le=1024 * MIB)] = 8 * MIB

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.access_key_id is None) is not (self.secret_access_key is None):
            raise ValueError("has only one of access_key_id and secret_access_key")
        if self.session_token and not self.access_key_id:
            raise ValueError("has a session_token without the keys that it belongs to")
        if self.profile and self.access_key_id:
            raise ValueError("has a profile and keys; boto3 would take the keys alone")
        if self.kms_key and not (self.sse or "").startswith("aws:kms"):
            raise ValueError("has a kms_key without `sse: aws:kms`")
        return self


class GcsSettings(StoreSettings):
    """Access to a bucket of Google Cloud Storage. Without `service_account` and `token`: the application default
    credentials."""

    service_account: LocalFile | None = None
    token: Secret | None = None
    """An OAuth token, which nothing renews."""

    VARIABLES: ClassVar = {"endpoint": "STORAGE_EMULATOR_HOST"}

    @classmethod
    def read_environment(cls, variables: Mapping[str, str]) -> dict[str, str]:
        settings = super().read_environment(variables)
        return settings | ({"token": "emulator"} if settings else {})


class AzureSettings(StoreSettings):
    """Access to a container of Azure. Without `account_key` and `sas_token`: variables `AZURE_…`, workload identity,
    managed identity or the Azure CLI."""

    account: Annotated[Text, Field(pattern=r"^[a-z0-9]{3,24}\z")] | None = None
    account_key: Secret | None = None
    sas_token: Secret | None = None

    VARIABLES: ClassVar = {"endpoint": "AZURE_STORAGE_ENDPOINT", "account": "AZURE_STORAGE_ACCOUNT_NAME"}

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


class Store(NamedTuple):
    """A store's section in a feed, its settings, and the authority of its addresses: bucket and account."""

    section: str
    settings: type[StoreSettings]
    example: str
    authority: str = r"([A-Za-z0-9][A-Za-z0-9._-]{1,254})()"


_ABFSS = r"([A-Za-z0-9][A-Za-z0-9._-]{1,254})@([a-z0-9]{3,24})\.dfs\.core\.windows\.net"
STORES = {
    "s3": Store("s3", S3Settings, "s3://bucket/prefix"),
    "gs": Store("gcs", GcsSettings, "gs://bucket/prefix"),
    "az": Store("azure", AzureSettings, "az://container/prefix"),
    "abfss": Store("azure", AzureSettings, "abfss://container@account.dfs.core.windows.net/prefix", _ABFSS),
}
"""By the scheme of their addresses."""
EXAMPLES = "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"


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
    return before if separator and before in STORES else ""


def store_address(text: str) -> str:
    """The address of a lake in an object store, without a slash at the end. Raises ValueError."""
    name = scheme(text)
    match = re.fullmatch(rf"{name}://{STORES[name].authority}((?:/[^/]+)*)/?", text)
    if match is None or any(part in (".", "..") for part in match[3].split("/")):
        raise ValueError(f"is not {STORES[name].example}")
    return text.rstrip("/")


def place(address: str) -> Place:
    """The parts of an address from `store_address`."""
    name = scheme(address)
    authority, _, prefix = address.removeprefix(f"{name}://").partition("/")
    bucket, _, host = authority.partition("@")
    return Place(name, bucket, f"{prefix}/" if prefix else "", host.partition(".")[0])
