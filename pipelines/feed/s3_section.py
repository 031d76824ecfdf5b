"""How a feed reaches a lake on S3 or a compatible store: address, access, encryption, time-outs.

boto3 finds missing settings by itself: region, endpoint and credentials, in its environment variables, its
files and the machine's role.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from sluice.pipelines.feed.sections import LocalFile, Secret, Size, Text
from sluice.pipelines.feed.stores import MIB, StoreSettings


def _tags(tags: dict[str, str]) -> dict[str, str]:
    """Check the number and length of tags against the limits of S3. Raises ValueError."""
    if len(tags) > 10 or any(not 1 <= len(k) <= 128 or len(v) > 256 for k, v in tags.items()):
        raise ValueError("has more than 10 tags, or one that is too long")
    return tags


class S3Settings(StoreSettings):
    """Access to the bucket. One upload request carries `part_bytes`."""

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
