"""How a feed reaches a lake on S3 or a compatible store: address, access, encryption, time-outs.

boto3 finds missing settings by itself: region, endpoint and credentials, in its environment variables, its
files and the machine's role.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from sluice.pipelines.feed.sections import LocalFile, Millis, Secret, Settings, Size, Text, number

MIB = 1 << 20
_ADDRESS = re.compile(r"s3://([A-Za-z0-9][A-Za-z0-9._-]{1,254})((?:/[^/]+)*)/?")
_ENDPOINT = re.compile(r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?/?")


def s3_address(text: str) -> str:
    """The address `s3://bucket` or `s3://bucket/prefix`, without a slash at the end. Raises ValueError."""
    match = _ADDRESS.fullmatch(text)
    if match is None or any(part in (".", "..") for part in match[2].split("/")):
        raise ValueError("is not s3://bucket/prefix")
    return text.rstrip("/")


def bucket_and_prefix(address: str) -> tuple[str, str]:
    """The bucket and the prefix in an address from `s3_address`. The prefix is empty or ends in a slash."""
    bucket, _, prefix = address.removeprefix("s3://").partition("/")
    return bucket, f"{prefix}/" if prefix else ""


def _endpoint(text: str) -> str:
    if not _ENDPOINT.fullmatch(text):
        raise ValueError("is not an address such as https://s3.example:9000")
    return text.rstrip("/")


def _tags(tags: dict[str, str]) -> dict[str, str]:
    """Check the number and length of tags against the limits of S3. Raises ValueError."""
    if len(tags) > 10 or any(not 1 <= len(k) <= 128 or len(v) > 256 for k, v in tags.items()):
        raise ValueError("has more than 10 tags, or one that is too long")
    return tags


class S3Settings(Settings):
    """Access to the bucket.

    `retries` count per request. One upload request carries `part_bytes`. At most `buffer_bytes` wait for upload in a
    process's memory; the rest waits on its disk.
    """

    endpoint: Annotated[Text, AfterValidator(_endpoint)] | None = None
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

    connect_timeout_ms: Millis = 5_000
    read_timeout_ms: Millis = 60_000
    retries: Annotated[int, BeforeValidator(number), Field(ge=0, le=100)] = 8
    part_bytes: Annotated[Size, Field(ge=5 * MIB, le=1024 * MIB)] = 8 * MIB
    buffer_bytes: Size = 64 * MIB

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

    def __repr_args__(self) -> Any:
        return [(k, v) for k, v in super().__repr_args__() if v not in (None, {})]
