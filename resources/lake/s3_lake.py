"""The lake in a bucket on S3, or on any store with its API: each file is one complete object.

The ledger relies on conditional writes (`If-None-Match: *`): of several writers exactly one gets True. If the answer is
"taken", an earlier try of ours may have written the object and lost its answer; the write id tells. Before a process
writes its first entry, `_probe` tests these promises: a store that answered "created" twice, listings that lag, or
a clock that is off are refused. A store that passes gets a note, which later processes read in one request. Parts are
staged by multipart uploads in bounded memory and made visible by copies within the store. `unfinished` lists multipart
uploads that never ended.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sluice.pipelines.errors import SluiceError, Terminal
from sluice.pipelines.feed.s3_section import S3Settings
from sluice.pipelines.feed.stores import place
from sluice.pipelines.ports import Stat
from sluice.resources.lake.object_lake import (
    PROBE_FOLDER,
    PROBE_NOTE,
    PROBE_RESULT,
    ObjectLake,
    build_conditions_error,
    build_listing_error,
    check_skew,
    is_path,
)
from sluice.resources.lake.s3_client import Bucket, date, skew
from sluice.resources.lake.s3_streams import UPLOADS, WRITE_ID, Upload, written_by
from sluice.resources.lake.streams import NotKnown, NotThere, Taken

if TYPE_CHECKING:
    from pyarrow.fs import S3FileSystem

COPIED_AT_ONCE = 5 << 30
"""S3's limit for one copy: a larger object is copied by ranges."""
COPY_RANGE = 512 << 20


class S3Lake(ObjectLake):
    """The lake below `s3://bucket/prefix`."""

    def __init__(self, address: str, settings: S3Settings) -> None:
        super().__init__(address, settings)
        self.bucket: Bucket = Bucket(self.place.bucket, settings)

    def is_tested(self) -> bool:
        with suppress(NotThere):
            answer = self.bucket.call("head_object", self._prefix + PROBE_NOTE)
            check_skew(skew(answer))
            return bool(answer.get("Metadata", {}).get(WRITE_ID) == self._note_id)
        return False

    def _probe(self) -> None:
        if self.is_tested():
            return
        bucket, key = self.bucket, f"{self._prefix}{PROBE_FOLDER}{secrets.token_hex(8)}"
        try:
            check_skew(skew(_check_condition(bucket, key)))
            _check_sight(bucket, key)
        finally:
            with suppress(SluiceError, NotThere):
                bucket.call("delete_object", key)
        fields = {"Metadata": {WRITE_ID: self._note_id}, **bucket.written_with}
        bucket.send("put_object", self._prefix + PROBE_NOTE, PROBE_RESULT, **fields)

    def _create(self, key: str, data: bytes, write: str) -> bool:
        return create(self.bucket, key, data, write)

    def put(self, path: str, data: bytes) -> None:
        self.bucket.send("put_object", self._key(path), bytes(data), **self.bucket.written_with)

    def folders(self, prefix: str) -> Iterator[str]:
        folder = f"{self._key(prefix.strip('/'))}/"
        for page in self.bucket.pages("list_objects_v2", Prefix=folder, Delimiter="/"):
            for one in page.get("CommonPrefixes", ()):
                if is_path(name := one["Prefix"].removeprefix(folder).rstrip("/")):
                    yield name

    def stats(self, prefix: str, after: str = "") -> Iterator[Stat]:
        above = prefix.strip("/")
        folder = f"{self._key(above)}/" if above else self._prefix
        parameters = {"StartAfter": self._prefix + after} if after else {}
        for page in self.bucket.pages("list_objects_v2", Prefix=folder, **parameters):
            for one in page.get("Contents", ()):
                if is_path(path := one["Key"].removeprefix(self._prefix)):
                    yield Stat(path, int(one.get("Size", 0)), one.get("ETag", ""))

    def _find_size(self, key: str) -> int | None:
        with suppress(NotThere):
            return int(self.bucket.call("head_object", key)["ContentLength"])
        return None

    def _upload(self, key: str) -> Upload:
        return Upload(self.bucket, key)

    def _copy(self, origin: str, key: str, size: int) -> int:
        parameters: dict[str, Any] = {"CopySource": {"Bucket": self.bucket.name, "Key": origin}}
        if size > COPIED_AT_ONCE:
            self._copy_by_ranges(key, size, parameters)
            return size
        tagged = {"TaggingDirective": "REPLACE"} if self.bucket.settings.tags else {}
        self.bucket.call("copy_object", key, **parameters, **tagged, **self.bucket.written_with)
        return size

    def _copy_by_ranges(self, key: str, size: int, parameters: dict[str, Any]) -> None:
        upload = self.bucket.call("create_multipart_upload", key, **self.bucket.written_with)["UploadId"]
        parameters |= {"UploadId": upload}

        def one(number: int) -> dict[str, Any]:
            start = (number - 1) * COPY_RANGE
            span = {"CopySourceRange": f"bytes={start}-{min(start + COPY_RANGE, size) - 1}", "PartNumber": number}
            answer = self.bucket.call("upload_part_copy", key, **parameters, **span)
            return {"PartNumber": number, "ETag": answer["CopyPartResult"]["ETag"]}

        try:
            with ThreadPoolExecutor(UPLOADS, "sluice-s3-copy") as pool:
                parts = {"Parts": list(pool.map(one, range(1, -(-size // COPY_RANGE) + 1)))}
            try:
                self.bucket.call("complete_multipart_upload", key, UploadId=upload, MultipartUpload=parts)
            except NotThere:  # an earlier try, whose answer was lost, may have completed it
                if self._find_size(key) != size:
                    raise
        except BaseException:
            with suppress(SluiceError, NotThere):
                self.bucket.call("abort_multipart_upload", key, UploadId=upload)
            raise

    def remove(self, path: str) -> None:
        with suppress(NotThere):
            self.bucket.call("delete_object", self._key(path))

    def list_unfinished(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Multipart uploads below the folder, each with the time (ms, by the store's clock) since its newest part."""
        for page in self.bucket.pages("list_multipart_uploads", Prefix=f"{self._key(prefix.strip('/'))}/"):
            now = date(page)
            for one in page.get("Uploads", ()):
                if not is_path(one["Key"].removeprefix(self._prefix)):
                    continue
                with suppress(NotThere):  # it has ended since
                    newest = max(self._parts_of(one["Key"], one["UploadId"]), default=one["Initiated"])
                    age = (now - max(newest, one["Initiated"])).total_seconds()
                    yield f"{one['Key'].removeprefix(self._prefix)}#{one['UploadId']}", max(0, int(age * 1000))

    def _parts_of(self, key: str, upload: str) -> Iterator[datetime]:
        for page in self.bucket.pages("list_parts", Key=key, UploadId=upload):
            yield from (part["LastModified"] for part in page.get("Parts", ()))

    def discard(self, name: str) -> None:
        path, _, upload = name.rpartition("#")
        if not path or not upload:
            raise Terminal(f"{ascii(name)[:300]} is no unfinished write", remedy="this is a bug; nothing was removed")
        with suppress(NotThere):
            self.bucket.call("abort_multipart_upload", self._key(path), UploadId=upload)


def create(bucket: Bucket, key: str, data: bytes, write: str) -> bool:
    """Returns whether this write created the object. If its answer was lost, a second try returns "taken".

    Raises LakeUnavailable if no answer came.
    """
    try:
        fields = {"Metadata": {WRITE_ID: write}, **bucket.written_with}
        bucket.send("put_object", key, bytes(data), IfNoneMatch="*", **fields)
    except Taken:
        return written_by(bucket, key) == write
    return True


def _check_condition(bucket: Bucket, key: str) -> Any:
    """Of two writes that create the same object, the second must be refused. Returns the answer to the first."""
    try:
        first = bucket.send("put_object", key, _FIRST, IfNoneMatch="*", **bucket.written_with)
        bucket.send("put_object", key, _SECOND, IfNoneMatch="*", **bucket.written_with)
    except Taken:
        if bucket.fetch(key).data == _FIRST:
            return first
    except NotKnown:
        pass
    raise build_conditions_error(f"s3://{bucket.name}")


def _check_sight(bucket: Bucket, key: str) -> None:
    """An object that was just written must be there for every reader, and in a listing that begins before it."""
    folder = key.rpartition("/")[0] + "/"
    pages = bucket.pages("list_objects_v2", Prefix=folder, StartAfter=key[:-1])
    listed = any(one["Key"] == key for page in pages for one in page.get("Contents", ()))
    if not listed:
        raise build_listing_error(f"s3://{bucket.name}")


_FIRST, _SECOND = b"first", b"second"


def open_filesystem(address: str, settings: S3Settings) -> S3FileSystem:
    """Returns Arrow's file system for paths `bucket/key`: it reads in parallel, outside Python.

    It uses boto3's endpoint, region and credentials of this moment. Raises NotAuthorized, SetupError.
    """
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem  # late: only readers use it

    bucket = Bucket(place(address).bucket, settings)
    client, credentials = bucket.client, bucket.credentials
    endpoint = urlsplit(client.meta.endpoint_url)
    elsewhere = {"scheme": endpoint.scheme, "endpoint_override": endpoint.netloc}
    return S3FileSystem(
        access_key=credentials.access_key,
        secret_key=credentials.secret_key,
        session_token=credentials.token,
        region=client.meta.region_name,
        connect_timeout=settings.connect_timeout_ms / 1000,
        request_timeout=settings.read_timeout_ms / 1000,
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=settings.retries + 1),
        tls_ca_file_path=settings.ca_bundle,
        force_virtual_addressing=settings.path_style is False,
        **({} if endpoint.netloc.endswith(".amazonaws.com") else elsewhere),
    )
