"""S3, or any store with its API, through boto3: conditional writes by `If-None-Match: *`, uploads and large copies by
parts.

Each process makes its clients once and shares them among its threads.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, lru_cache, partial
from mmap import mmap
from threading import RLock
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import urlencode, urlsplit

from botocore import exceptions as boto
from botocore.parsers import ResponseParserError
from pydantic import SecretStr
from urllib3.exceptions import HTTPError

from sluice.pipelines.errors import LakeFull, LakeUnavailable, NotAuthorized, SetupError, SluiceError, Terminal
from sluice.pipelines.feed.stores import S3Settings
from sluice.pipelines.model.health import Diagnosis, report_ok
from sluice.pipelines.ports import Stat
from sluice.pipelines.util import logs
from sluice.pipelines.util.parallel import AT_ONCE
from sluice.resources.lake.store_client import (
    KEEPS,
    Block,
    Head,
    NotKnown,
    NotThere,
    OutOfRange,
    Signal,
    StoreClient,
    Taken,
    compute_lead,
    describe_lead,
    find_writer,
    parse_date,
)
from sluice.resources.lake.streams import PartBuffer, Upload
from sluice.resources.web import limit_client

if TYPE_CHECKING:
    from pyarrow.fs import S3FileSystem

WRITE_ID = "sluice-write"
"""The key in an object's own metadata for the id of the write that made it."""
UPLOADS = 4
"""How many parts a process sends at once."""
COPIED_AT_ONCE = 5 << 30
"""S3's limit for one copy: a larger object is copied by ranges."""
COPY_RANGE = 512 << 20
_log = logging.getLogger(f"{logs.OURS}.lake")
_CONNECTIONS = AT_ONCE * AT_ONCE
"""The most idle connections that a client keeps: enough for calls within calls, such as feeds and their entries."""
_WARNED_ATTEMPT = 3
"""The attempt at a request whose failure is logged: about three seconds after the first."""
_FAILURES = (boto.ClientError, boto.BotoCoreError, ResponseParserError)
_ANSWERS = {"get_object": "ETag", "head_object": "ETag", "put_object": "ETag", "upload_part": "ETag",
            "create_multipart_upload": "UploadId", "list_objects_v2": "Name"}  # fmt: skip
"""A field that each answer has. Any page with status 200, such as a proxy's, would pass for an empty one."""
Answer = TypeVar("Answer")
_ACCESS = ("endpoint", "region", "path_style", "ca_bundle", "profile", "access_key_id", "secret_access_key",
           "session_token", "connect_timeout_ms", "read_timeout_ms", "retries")  # fmt: skip


@dataclass(frozen=True)
class S3Client(StoreClient):
    """Requests to one bucket: every answer is a value, a signal, or a named error of ours."""

    settings: S3Settings
    DATES_ANSWERS = True
    GRANTS: ClassVar = {
        "list": "s3:ListBucket on the bucket",
        "read": "s3:GetObject below the prefix",
        "write": "s3:PutObject below the prefix",
        "remove": "s3:DeleteObject below the prefix",
        "end uploads": "s3:AbortMultipartUpload below the prefix",
        "list uploads": "s3:ListBucketMultipartUploads on the bucket",
    }

    def create(self, key: str, data: bytes, write: str) -> bool:
        try:
            self.put(key, data, write, IfNoneMatch="*")
        except Taken:
            return find_writer(self, key) == write
        return True

    def put(self, key: str, data: Any, write: str, **condition: str) -> None:
        self.send("put_object", key, data, Metadata={WRITE_ID: write}, **condition, **self.written_with)

    def fetch(self, key: str, span: str = "", etag: str = "") -> Block:
        parameters = {"Range": f"bytes={span}"} if span else {}
        parameters |= {"IfMatch": etag} if etag else {}

        def whole() -> Block:  # an answer that breaks off is requested again
            answer = self.call("get_object", key, **parameters)
            data = answer["Body"].read()
            span, _, size = answer.get("ContentRange", "").removeprefix("bytes ").partition("/")
            start = int(span.partition("-")[0]) if size else 0
            return Block(start, data, int(size) if size else len(data), answer["ETag"])

        try:
            return self._again(whole, lambda error: isinstance(error, boto.BotoCoreError))
        except boto.BotoCoreError as error:
            raise self._translate(error, key) from error

    def head(self, key: str) -> Head:
        answer = self.call("head_object", key)
        writer = answer.get("Metadata", {}).get(WRITE_ID, "")
        return Head(int(answer["ContentLength"]), answer.get("ETag", ""), writer, _date(answer))

    def list_below(self, folder: str, after: str = "") -> Iterator[Stat]:
        for page in self.pages("list_objects_v2", Prefix=folder, **({"StartAfter": after} if after else {})):
            for one in page.get("Contents", ()):
                yield Stat(one["Key"], int(one.get("Size", 0)), one.get("ETag", ""))

    def list_folders(self, folder: str) -> Iterator[str]:
        for page in self.pages("list_objects_v2", Prefix=folder, Delimiter="/"):
            for one in page.get("CommonPrefixes", ()):
                yield one["Prefix"].removeprefix(folder).rstrip("/")

    def copy(self, origin: str, key: str, size: int) -> int:
        parameters: dict[str, Any] = {"CopySource": {"Bucket": self.home.bucket, "Key": origin}}
        if size > COPIED_AT_ONCE:
            self._copy_by_ranges(key, size, parameters)
            return size
        tagged = {"TaggingDirective": "REPLACE"} if self.settings.tags else {}
        self.call("copy_object", key, **parameters, **tagged, **self.written_with)
        return size

    def _copy_by_ranges(self, key: str, size: int, parameters: dict[str, Any]) -> None:
        upload = self.call("create_multipart_upload", key, **self.written_with)["UploadId"]
        parameters |= {"UploadId": upload}

        def one(number: int) -> dict[str, Any]:
            start = (number - 1) * COPY_RANGE
            span = {"CopySourceRange": f"bytes={start}-{min(start + COPY_RANGE, size) - 1}", "PartNumber": number}
            answer = self.call("upload_part_copy", key, **parameters, **span)
            return {"PartNumber": number, "ETag": answer["CopyPartResult"]["ETag"]}

        try:
            with ThreadPoolExecutor(UPLOADS, "sluice-s3-copy") as pool:
                parts = list(pool.map(one, range(1, -(-size // COPY_RANGE) + 1)))
            try:
                self.complete_upload(key, upload, parts)
            except NotThere:  # an earlier try, whose answer was lost, may have completed it
                if self.head(key).size != size:
                    raise
        except BaseException:
            with suppress(SluiceError, NotThere):
                self.end_upload(key, upload)
            raise

    def remove(self, key: str) -> None:
        self.call("delete_object", key)

    def open_upload(self, key: str) -> Upload:
        return MultipartUpload(self, key)

    def list_uploads(self, folder: str) -> Iterator[tuple[str, str, int]]:
        for page in self.pages("list_multipart_uploads", Prefix=folder):
            now = _date(page) or datetime.now(UTC)
            for one in page.get("Uploads", ()):
                with suppress(NotThere):  # it has ended since
                    parts = self.pages("list_parts", Key=one["Key"], UploadId=one["UploadId"])
                    times = (part["LastModified"] for page in parts for part in page.get("Parts", ()))
                    newest = max(times, default=one["Initiated"])
                    age = (now - max(newest, one["Initiated"])).total_seconds()
                    yield one["Key"], one["UploadId"], max(0, int(age * 1000))

    def complete_upload(self, key: str, upload: str, parts: list[dict[str, Any]]) -> None:
        self.call("complete_multipart_upload", key, UploadId=upload, MultipartUpload={"Parts": parts})

    def end_upload(self, key: str, upload: str) -> None:
        self.call("abort_multipart_upload", key, UploadId=upload)

    def measure_lead(self, folder: str) -> float | None:
        with suppress(SluiceError):
            return compute_lead(_date(self.call("list_objects_v2", "", Prefix=folder, MaxKeys=1)))
        return None

    def list_attempts(self) -> Mapping[str, Callable[[str], object]]:
        return {
            "read": self.fetch,
            "write": lambda key: self.call("upload_part", key, PartNumber=1, Body=b"", UploadId="none"),
            "remove": lambda key: self.call("delete_object", key, IfMatch='"none"'),
            "end uploads": lambda key: self.end_upload(key, "none"),
            "list uploads": lambda key: self.call("list_multipart_uploads", "", Prefix=key, MaxUploads=1),
        }

    def check_retention(self, key: str) -> Iterator[Diagnosis]:
        with suppress(SluiceError):  # no run needs the right to see it
            if self.call("get_bucket_versioning", "").get("Status") == "Enabled":
                yield report_ok("versioning", f"the bucket {KEEPS}")

    def open_filesystem(self) -> S3FileSystem:
        """Returns Arrow's file system for paths `bucket/key`: it reads in parallel, outside Python.

        It uses boto3's endpoint, region and credentials of this moment. Raises NotAuthorized, SetupError.
        """
        from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem  # late: only readers use it

        settings, meta, credentials = self.settings, self.client.meta, self.credentials
        endpoint = urlsplit(meta.endpoint_url)
        elsewhere = {"scheme": endpoint.scheme, "endpoint_override": endpoint.netloc}
        return S3FileSystem(
            access_key=credentials.access_key,
            secret_key=credentials.secret_key,
            session_token=credentials.token,
            region=meta.region_name,
            connect_timeout=settings.connect_timeout_ms / 1000,
            request_timeout=settings.read_timeout_ms / 1000,
            retry_strategy=AwsStandardS3RetryStrategy(max_attempts=settings.retries + 1),
            tls_ca_file_path=settings.ca_bundle,
            force_virtual_addressing=settings.path_style is False,
            **({} if endpoint.netloc.endswith(".amazonaws.com") else elsewhere),
        )

    def build_delta_options(self) -> dict[str, str]:
        meta, credentials = self.client.meta, self.credentials
        options = {
            "aws_endpoint_url": meta.endpoint_url,
            "aws_region": meta.region_name,
            "aws_access_key_id": credentials.access_key,
            "aws_secret_access_key": credentials.secret_key,
            "aws_session_token": credentials.token,
            "aws_conditional_put": "etag",
            "aws_virtual_hosted_style_request": "true" if self.settings.path_style is False else "false",
            "allow_http": "true" if meta.endpoint_url.startswith("http://") else "false",
            "connect_timeout": f"{self.settings.connect_timeout_ms}ms",
            "timeout": f"{self.settings.read_timeout_ms}ms",
            "max_retries": str(self.settings.retries),
        }
        return {k: v for k, v in options.items() if v}

    def build_iceberg_options(self) -> dict[str, str]:
        meta, credentials = self.client.meta, self.credentials
        options = {
            "s3.endpoint": meta.endpoint_url,
            "s3.region": meta.region_name,
            "s3.access-key-id": credentials.access_key,
            "s3.secret-access-key": credentials.secret_key,
            "s3.session-token": credentials.token,
            "s3.connect-timeout": str(self.settings.connect_timeout_ms / 1000),
            "s3.request-timeout": str(self.settings.read_timeout_ms / 1000),
            "s3.force-virtual-addressing": "true" if self.settings.path_style is False else None,
        }
        return {k: v for k, v in options.items() if v}

    # -- requests

    @property
    def client(self) -> Any:
        return self._make_client(_client)

    @property
    def credentials(self) -> Any:
        """The credentials that boto3 finds now, as `access_key`, `secret_key`, `token`. Raises NotAuthorized."""
        answer = self._make_client(_session).get_credentials()
        if answer is None:
            raise self._translate(boto.NoCredentialsError(), "")
        return answer.get_frozen_credentials()

    def _make_client(self, make: Callable[[int, Access], Any]) -> Any:
        access = tuple((n, getattr(self.settings, n)) for n in _ACCESS)
        try:
            with _making:
                return make(os.getpid(), access)
        except (boto.BotoCoreError, ValueError) as error:
            raise self._translate(error, "") from error

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
        except _FAILURES as error:
            raise self._translate(error, key) from error

    def _ask(self, operation: str, parameters: dict[str, Any]) -> Any:
        if isinstance(body := parameters.get("Body"), mmap):
            body.seek(0)
        try:
            return _check_answer(operation, getattr(self.client, operation)(Bucket=self.home.bucket, **parameters))
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
        pages = iter(self.client.get_paginator(operation).paginate(Bucket=self.home.bucket, **parameters))
        while True:
            try:
                page = next(pages, None)
                if page is not None:
                    _check_answer(operation, page)
            except _FAILURES as error:
                raise self._translate(error, parameters.get("Prefix", "")) from error
            if page is None:
                return
            yield page

    def send(self, operation: str, key: str, body: Any, **parameters: Any) -> Any:
        """`call` with a body (bytes or `mmap`) and its checksum, of the kind that every store knows."""
        digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        return self.call(operation, key, Body=body, ContentMD5=digest, **parameters)

    def _translate(self, error: Exception, key: str) -> SluiceError:
        """Returns expected failures as signals, all others as named errors."""
        where = f"{self.home.root}/{key}" if key else self.home.root
        if not isinstance(error, boto.ClientError):
            return _explain_silence(error, where, self.mask(str(error)))
        code = _code(error)
        signal = _SIGNALS.get(_status(error)) or _SIGNALS.get(code)
        if signal and code != "NoSuchBucket":
            message = f"{self.home.root}/{key}: the store answered {code}"
            return signal(message, remedy="check s3.endpoint, and the bucket's name in `lake`")
        if code in _EXPIRED:  # the next client looks for renewed credentials
            _client.cache_clear()
            _session.cache_clear()
        return _translate_refusal(error, where, self.mask(error.response.get("Error", {}).get("Message", "")))


class MultipartUpload(Upload):
    """An object on its way: a small one is one put, a larger one a multipart upload."""

    _client: S3Client

    def __init__(self, client: S3Client, key: str) -> None:
        super().__init__(client, key)
        self._id = ""
        self._sent = self._bytes = 0
        self._under_way: deque[Future[dict[str, Any]]] = deque()
        self._etags: list[dict[str, Any]] = []

    def tell(self) -> int:
        return self._bytes

    def write(self, data: Any, /) -> int:
        """Take all bytes. Raises the error of an earlier part, and LakeFull if the machine's disk has no room."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest:
            room = self._part_size - self._part.bytes
            self._part.write(rest[:room])
            rest = rest[room:]
            if self._part.bytes >= self._part_size:
                self._send()
        self._bytes += size
        return size

    def finish(self) -> None:
        if not self._id:
            return super().finish()
        if self._part.bytes:
            self._send()
        self._collect(0)
        try:
            self._client.complete_upload(self._key, self._id, self._etags)
        except (LakeUnavailable, NotThere) as error:  # if the upload is gone, this process may have completed it
            if not self._is_written(error):
                if isinstance(error, NotThere):
                    raise self._discard_error() from error
                raise

    def abort(self) -> None:
        for sending in self._under_way:
            sending.cancel()
        for sending in self._under_way:
            with suppress(BaseException):
                sending.result()
        super().abort()
        if self._id:
            with suppress(SluiceError, NotThere):
                self._client.end_upload(self._key, self._id)

    @property
    def _part_size(self) -> int:
        return choose_part_size(self._client.settings.part_bytes, self._sent)

    def _send(self) -> None:
        """Hand the part over; wait while two are under way, so that a slow store slows down the writer."""
        if not self._id:
            fields = {"Metadata": {WRITE_ID: self._write}, **self._client.written_with}
            self._id = self._client.call("create_multipart_upload", self._key, **fields)["UploadId"]
        part, self._part, self._sent = self._part, self._make_part(), self._sent + 1
        sending = _pool(os.getpid()).submit(self._upload, self._sent, part)
        sending.add_done_callback(lambda _: part.close())
        self._under_way.append(sending)
        self._collect(2)

    def _upload(self, number: int, part: PartBuffer) -> dict[str, Any]:
        parameters = {"PartNumber": number, "UploadId": self._id}
        try:
            answer = self._client.send("upload_part", self._key, part.view(), **parameters)
        except NotThere:
            raise self._discard_error() from None
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def _collect(self, limit: int) -> None:
        while len(self._under_way) > limit:
            self._etags.append(self._under_way.popleft().result())

    def _discard_error(self) -> LakeUnavailable:
        return LakeUnavailable(
            f"the upload of {self._key} was ended by somebody else",
            remedy="run again; `sluice repair` may have done it",
        )


def choose_part_size(first: int, sent: int) -> int:
    """Returns the bytes of the next part after that many. Parts grow, so that 10,000, S3's limit, hold any object."""
    return first << (sent // 1000)


@lru_cache(maxsize=1)
def _pool(_process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(UPLOADS, "sluice-s3")


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
    client.meta.events.register("before-call.s3.HeadBucket", _end_redirects)
    return client


def _when_again(retries: int, attempts: int, response: Any, caught_exception: Exception | None, **_: Any) -> Any:
    """Seconds until botocore shall try a request again; None: it shall not.

    It tries as often as the settings say. By itself, botocore would give up sooner on a bad day: all requests of a
    process share a quota of some 35 tries.
    """
    error = caught_exception or boto.ClientError(response[1], "")
    if attempts > retries or not _may_pass(error):
        return None
    if attempts == _WARNED_ATTEMPT:
        what = type(error).__name__ if caught_exception else f"status {_status(error)}"
        text = "a request to the lake's S3 failed %d times (%s); %d more attempts"
        _log.warning(text, attempts, what, retries + 1 - attempts)
    return patience(attempts)


def _may_pass(error: Exception) -> bool:
    if not isinstance(error, boto.ClientError):
        return isinstance(_explain_silence(error, "", ""), LakeUnavailable)
    code, status = _code(error), _status(error)
    expected = status < 300 or status in _SIGNALS or code in _SIGNALS or code in _CONFLICTS
    return not expected and isinstance(_translate_refusal(error, "s3://bucket", ""), LakeUnavailable)


def _plain(access: Access) -> dict[str, Any]:
    return {k: v.get_secret_value() if isinstance(v, SecretStr) else v for k, v in access}


def pause(attempt: int) -> None:
    """Wait before a retry: exponential, at most 5 seconds, with full jitter."""
    time.sleep(random.random() * min(0.1 * 2**attempt, 5.0))


def patience(attempts: int) -> float:
    """Returns the seconds until a retry: exponential, at most 20, with full jitter."""
    return random.random() * min(2.0 ** (attempts - 1), 20.0)


def _check_answer(operation: str, answer: Any) -> Any:
    """Returns the answer. Raises ResponseStreamingError for one that no store gives: a write may have happened."""
    if (field := _ANSWERS.get(operation)) and field not in answer:
        raise boto.ResponseStreamingError(error=f"no {field}: another server's page?")
    return answer


def _end_redirects(context: Mapping[str, Any], **_: Any) -> None:
    """Keep botocore from following a redirect of its own question for a bucket's region, without end."""
    context["s3_redirect"]["redirected"] = True


def _is_transient(error: Exception) -> bool:
    """Returns whether the request failed by a conflict with another one, or by an answer that broke off."""
    if isinstance(error, boto.ClientError):
        return _code(error) in _CONFLICTS
    return isinstance(error, boto.ResponseStreamingError)


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


def _translate_refusal(error: boto.ClientError, where: str, detail: str) -> SluiceError:
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
            f"the store refused {where}: {describe_lead(compute_lead(_date(error.response)))} of its own",
            remedy="set this machine's clock (NTP), then run again",
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
        headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        region = headers.get("x-amz-bucket-region") or error.response.get("Error", {}).get("Region")
        return SetupError(
            f"the bucket of {where} is in another region ({message})",
            remedy=f"set s3.region to {region or 'the region of the bucket'}",
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


def _explain_silence(error: Exception, where: str, detail: str) -> SluiceError:
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
            return SetupError(
                f"{where}: no trust in the endpoint: {detail}", remedy="name its CA in s3.ca_bundle, or have it renewed"
            )
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


def _date(answer: Mapping[str, Any]) -> datetime | None:
    return parse_date(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", ""))
