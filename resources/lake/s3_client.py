"""One bucket, through boto3: every answer is a value, one of four small signals, or a named error of ours.

Promises: a failure that cannot pass is raised at once and names the way out. A failure that may pass is tried again, as
often as the settings say, and is then LakeUnavailable. No error contains a secret. Each process makes its clients once
and shares them among its threads; nothing is opened before the first request.
"""

from __future__ import annotations

import base64
import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cached_property, lru_cache, partial
from io import IOBase
from threading import RLock
from typing import Any, BinaryIO, NoReturn, TypeVar
from urllib.parse import urlencode

from botocore import exceptions as boto
from botocore.parsers import ResponseParserError
from pydantic import SecretStr
from urllib3.exceptions import HTTPError

from sluice.pipelines.errors import LakeFull, LakeUnavailable, NotAuthorized, SetupError, SluiceError, Terminal
from sluice.pipelines.feed.s3_section import S3Settings
from sluice.pipelines.util.parallel import AT_ONCE
from sluice.resources.lake.object_lake import describe_skew
from sluice.resources.lake.streams import Block, NotKnown, NotThere, OutOfRange, Signal, Taken
from sluice.resources.web import limit_client

_CONNECTIONS = AT_ONCE * AT_ONCE
"""The most idle connections that a client keeps: enough for calls within calls, such as feeds and their entries."""
Answer = TypeVar("Answer")
_ACCESS = ("endpoint", "region", "path_style", "ca_bundle", "profile", "access_key_id", "secret_access_key",
           "session_token", "connect_timeout_ms", "read_timeout_ms", "retries")  # fmt: skip


@dataclass(frozen=True)
class Bucket:
    """Requests to one bucket. Picklable: a client is made where it is needed."""

    name: str
    settings: S3Settings

    @property
    def client(self) -> Any:
        return self._make_client(_client)

    @property
    def credentials(self) -> Any:
        """The credentials that boto3 finds now, as `access_key`, `secret_key`, `token`. Raises NotAuthorized."""
        answer = self._make_client(_session).get_credentials()
        if answer is None:
            raise self._meaning(boto.NoCredentialsError(), "")
        return answer.get_frozen_credentials()

    def _make_client(self, make: Callable[[int, Access], Any]) -> Any:
        access = tuple((n, getattr(self.settings, n)) for n in _ACCESS)
        try:
            with _making:
                return make(os.getpid(), access)
        except (boto.BotoCoreError, ValueError) as error:
            raise self._meaning(error, "") from error

    @cached_property
    def written_with(self) -> Mapping[str, str]:
        """The arguments of every write for encryption and tags."""
        s = self.settings
        fields = {"ServerSideEncryption": s.sse, "SSEKMSKeyId": s.kms_key, "Tagging": urlencode(s.tags)}
        return {k: v for k, v in fields.items() if v}

    def call(self, operation: str, key: str, **parameters: Any) -> Any:
        """The answer. Raises a Signal, or the error that the failure means.

        If two writes conflict, or the answer breaks off, tries again.
        """
        location = {"Key": key} if key else {}
        try:
            return self._again(lambda: self._ask(operation, location | parameters), _is_transient)
        except boto.ClientError as error:
            self._raise(error, key)
        except (boto.BotoCoreError, ResponseParserError) as error:
            raise self._meaning(error, key) from error

    def _ask(self, operation: str, parameters: dict[str, Any]) -> Any:
        if isinstance(body := parameters.get("Body"), IOBase):
            body.seek(0)
        try:
            return getattr(self.client, operation)(Bucket=self.name, **parameters)
        except HTTPError as error:  # botocore passes it on if the body of a refused `get_object` breaks off
            raise boto.ResponseStreamingError(error=error) from error

    def _again(self, ask: Callable[[], Answer], passing: Callable[[Exception], bool]) -> Answer:
        """The answer. A request is tried again while it fails in a way that may pass, as often as the settings say."""
        for attempt in range(self.settings.retries):
            try:
                return ask()
            except (boto.ClientError, boto.BotoCoreError) as error:
                if not passing(error):
                    raise
            pause(attempt)
        return ask()

    def pages(self, operation: str, **parameters: Any) -> Iterator[Any]:
        """The pages of an answer, each requested when it is needed."""
        pages = iter(self.client.get_paginator(operation).paginate(Bucket=self.name, **parameters))
        while True:
            try:
                page = next(pages, None)
            except boto.ClientError as error:
                self._raise(error, parameters.get("Prefix", ""))
            except (boto.BotoCoreError, ResponseParserError) as error:
                raise self._meaning(error, parameters.get("Prefix", "")) from error
            if page is None:
                return
            yield page

    def fetch(self, key: str, span: str = "", etag: str = "") -> Block:
        """The object, or the `span` of it (as after `bytes=`), only if its content has that tag.

        Raises NotThere, Taken, OutOfRange. If an answer breaks off, asks again.
        """
        parameters = {"Range": f"bytes={span}"} if span else {}
        parameters |= {"IfMatch": etag} if etag else {}

        def whole() -> Block:
            answer = self.call("get_object", key, **parameters)
            return _block(answer, answer["Body"].read())

        try:
            return self._again(whole, lambda error: isinstance(error, boto.BotoCoreError))
        except boto.BotoCoreError as error:
            raise self._meaning(error, key) from error

    def send(self, operation: str, key: str, body: bytes | BinaryIO, **parameters: Any) -> Any:
        """`call` with a body and its checksum, of the kind that every store knows."""
        digest = base64.b64encode(_digest(body)).decode()
        return self.call(operation, key, Body=body, ContentMD5=digest, **parameters)

    def _raise(self, error: boto.ClientError, key: str) -> NoReturn:
        """Raise expected failures as signals, all others as named errors."""
        code, status = _code(error), _status(error)
        signal = _SIGNALS.get(status) or _SIGNALS.get(code)
        if signal and code != "NoSuchBucket":
            message = f"s3://{self.name}/{key}: the store answered {code}"
            raise signal(message, remedy="check s3.endpoint, and the bucket's name in `lake`") from error
        if code in _EXPIRED:
            _forget()
        raise self._meaning(error, key) from error

    def _meaning(self, error: Exception, key: str) -> SluiceError:
        where = f"s3://{self.name}/{key}" if key else f"s3://{self.name}"
        if isinstance(error, boto.ClientError):
            return _refusal(error, where, self._mask(error.response.get("Error", {}).get("Message", "")))
        return _no_answer(error, where, self._mask(str(error)))

    def _mask(self, text: str) -> str:
        """The message of the other side or a library, on one line, without anything secret."""
        for _, value in self.settings:
            if isinstance(value, SecretStr):
                text = text.replace(value.get_secret_value(), "**********")
        return "".join(c if c.isprintable() else " " for c in text)[:300]


_making = RLock()
Access = tuple[tuple[str, Any], ...]


@lru_cache(maxsize=16)
def _session(_process: int, access: Access) -> Any:
    import boto3  # imported late: a local lake needs no boto3

    s = _plain(access)
    return boto3.Session(
        s["access_key_id"],
        s["secret_access_key"],
        s["session_token"],
        region_name=s["region"],
        profile_name=s["profile"],
    )


@lru_cache(maxsize=16)
def _client(process: int, access: Access) -> Any:
    from botocore.config import Config

    s = _plain(access)
    path_style = s["path_style"] if s["path_style"] is not None else s["endpoint"] is not None
    config = Config(
        connect_timeout=s["connect_timeout_ms"] / 1000,
        read_timeout=s["read_timeout_ms"] / 1000,
        retries={"mode": "standard", "total_max_attempts": 1},  # `_when_again` does it
        s3={"addressing_style": "path" if path_style else "auto"},
        max_pool_connections=_CONNECTIONS,
        tcp_keepalive=True,
        # Trailing checksums are known to few stores besides Amazon's; what we send goes with its Content-MD5.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_extra="sluice",
    )
    client = _session(process, access).client("s3", endpoint_url=s["endpoint"], config=config, verify=s["ca_bundle"])
    limit_client(client, s["read_timeout_ms"] / 1000)
    client.meta.events.register_first("needs-retry.s3", partial(_when_again, s["retries"]))
    return client


def _when_again(retries: int, attempts: int, response: Any, caught_exception: Exception | None, **_: Any) -> Any:
    """Seconds until botocore shall try a request again; None: it shall not.

    It tries as often as the settings say. By itself, botocore would give up sooner on a bad day: all requests of a
    process share a quota of some 35 tries.
    """
    error = caught_exception or boto.ClientError(response[1], "")
    if attempts > retries or not _may_pass(error):
        return None
    return patience(attempts)


def _may_pass(error: Exception) -> bool:
    if not isinstance(error, boto.ClientError):
        return isinstance(_no_answer(error, "", ""), LakeUnavailable)
    code, status = _code(error), _status(error)
    expected = status < 300 or status in _SIGNALS or code in _SIGNALS or code in _CONFLICTS
    return not expected and isinstance(_refusal(error, "s3://bucket", ""), LakeUnavailable)


def _plain(access: Access) -> dict[str, Any]:
    return {k: v.get_secret_value() if isinstance(v, SecretStr) else v for k, v in access}


def _forget() -> None:
    """Drop the client, so that the next one looks for renewed credentials."""
    _client.cache_clear()
    _session.cache_clear()


def pause(attempt: int) -> None:
    """Wait before a retry: exponential, at most 5 seconds, with full jitter."""
    time.sleep(random.random() * min(0.1 * 2**attempt, 5.0))


def patience(attempts: int) -> float:
    """Returns the seconds until a retry: exponential, at most 20, with full jitter."""
    return random.random() * min(2.0 ** (attempts - 1), 20.0)


def _digest(body: bytes | BinaryIO) -> bytes:
    digest = hashlib.md5(usedforsecurity=False)
    if isinstance(body, bytes):
        digest.update(body)
        return digest.digest()
    body.seek(0)
    while block := body.read(1 << 20):
        digest.update(block)
    return digest.digest()


def _is_transient(error: Exception) -> bool:
    """Returns whether the request failed by a conflict with another one, or by an answer that broke off."""
    if isinstance(error, boto.ClientError):
        return _code(error) in _CONFLICTS
    return isinstance(error, boto.ResponseStreamingError)


def _block(answer: Mapping[str, Any], data: bytes) -> Block:
    span, _, size = answer.get("ContentRange", "").removeprefix("bytes ").partition("/")
    start = int(span.partition("-")[0]) if size else 0
    return Block(start, data, int(size) if size else len(data), answer["ETag"])


# -- meaning of failures

_CONFLICTS = {"ConditionalRequestConflict", "OperationAborted"}
_SIGNALS: Mapping[int | str, type[Signal]] = {
    404: NotThere, "NoSuchKey": NotThere, "NoSuchUpload": NotThere, 412: Taken, 416: OutOfRange,
    501: NotKnown, "NotImplemented": NotKnown,
}  # fmt: skip
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "RequestExpired"}
_LATER = {"SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "Throttling", "ThrottlingException",
          "TooManyRequests", "TooManyRequestsException", "RequestLimitExceeded", "BandwidthLimitExceeded",
          "RequestThrottled", *_CONFLICTS}  # fmt: skip
_FULL = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"}
_REGION = {"PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "InvalidRegionName",
           "IllegalLocationConstraintException"}  # fmt: skip
_UNKNOWN_KEYS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidClientTokenId"}


def _refusal(error: boto.ClientError, where: str, detail: str) -> SluiceError:
    """The error for a refusal, by the store's own code."""
    code, status = _code(error), _status(error)
    message = f"{code}: {detail}" if detail else code
    if code == "NoSuchBucket":
        bucket = where.split("/")[2]
        return SetupError(
            f"there is no bucket {bucket}",
            remedy=f"create it (aws s3 mb s3://{bucket}), or fix `lake` and `s3.endpoint` in the feed",
        )
    # S3 refuses requests whose time differs by more than 15 minutes, and names both times.
    if code == "RequestTimeTooSkewed":
        return SetupError(
            f"the store refused {where}: {_apart(error)}", remedy="set this machine's clock (NTP), then run again"
        )
    # Full disks are 5xx of some stores, too: no retry makes room.
    if code in _LATER or status == 429 or (status >= 500 and code not in _FULL and status != 507):
        return LakeUnavailable(
            f"the store is busy or unavailable for {where} ({message})",
            remedy="run again; if it stays, raise tuning.s3_retries or ask the operators of the store",
        )
    if code in _FULL or status == 507:
        return LakeFull(f"no room in the lake for {where} ({message})", remedy="free space or raise the quota")
    # The request was signed for a region: the answer names the bucket's own.
    if code in _REGION or status == 301:
        return SetupError(
            f"the bucket of {where} is in another region ({message})",
            remedy=f"set s3.region to {_region(error) or 'the region of the bucket'}",
        )
    if code in _EXPIRED:
        return NotAuthorized(
            f"the credentials for {where} have expired ({message})", remedy="renew them, then run again"
        )
    if code in _UNKNOWN_KEYS:
        return NotAuthorized(
            f"the store does not know these credentials ({message})",
            remedy="check s3.profile, s3.access_key_id or the environment: boto3 looks in the order of its own chain",
        )
    if code.startswith("KMS.") or code == "KMSAccessDenied":
        return NotAuthorized(
            f"the key that encrypts {where} refused ({message})", remedy="check s3.kms_key and its policy"
        )
    # All other 401 and 403 are missing rights.
    if status in (401, 403):
        return NotAuthorized(
            f"the store forbids {where} ({message})",
            remedy="grant s3:GetObject, PutObject, DeleteObject, AbortMultipartUpload below the prefix, and "
            "s3:ListBucket, ListBucketMultipartUploads on the bucket",
        )
    return Terminal(
        f"the lake refused {where} ({message})",
        remedy="check s3.endpoint, and look the code up where the store is documented",
    )


def _no_answer(error: Exception, where: str, detail: str) -> SluiceError:
    """Returns the error for a request without a response, or one that was never sent."""
    match error:
        case boto.NoCredentialsError() | boto.PartialCredentialsError() | boto.CredentialRetrievalError():
            return NotAuthorized(
                f"no credentials for {where}: {detail}",
                remedy="give s3.profile, or keys, or let boto3 find them (environment, ~/.aws, the machine's role)",
            )
        case boto.SSOError() | boto.TokenRetrievalError() | boto.UnauthorizedSSOTokenError():
            return NotAuthorized(f"no token for {where}: {detail}", remedy="sign in again (aws sso login)")
        case boto.SSLError():
            return SetupError(f"{where}: no trust in the endpoint: {detail}", remedy="name its CA in s3.ca_bundle")
        case boto.HTTPClientError() | boto.ConnectionError() | boto.IncompleteReadError():
            return LakeUnavailable(
                f"no answer for {where}: {detail}",
                remedy="run again; if it stays, check s3.endpoint, the network and tuning.s3_read_timeout_ms",
            )
        case ResponseParserError():
            return SetupError(f"what answers for {where} does not speak S3", remedy="check s3.endpoint in the feed")
        case _:
            return SetupError(f"{where} cannot be asked for: {detail}", remedy="check the feed's `s3` section")


def _code(error: boto.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", "")) or str(_status(error))


def _status(error: boto.ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _region(error: boto.ClientError) -> str:
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return str(headers.get("x-amz-bucket-region") or error.response.get("Error", {}).get("Region", ""))


def _apart(error: boto.ClientError) -> str:
    return f"{describe_skew(skew(error.response))} of its own"


def date(answer: Mapping[str, Any]) -> datetime:
    """When the store answered, by its own clock; by this machine's if it does not say."""
    text = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        return parsedate_to_datetime(text).astimezone(UTC)
    except (ValueError, TypeError):
        return datetime.now(UTC)


def skew(answer: Mapping[str, Any]) -> float:
    """By how many seconds this machine's clock is ahead of the store's; about 0 if the store does not say.

    Accurate to about a second plus the time that the answer took.
    """
    return (datetime.now(UTC) - date(answer)).total_seconds()
