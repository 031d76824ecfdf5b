"""The lake in a bucket on S3, or on any store with its API: each file is one complete object.

The ledger relies on conditional writes (`If-None-Match: *`): of several writers exactly one gets True. If the answer is
"taken", an earlier try of ours may have written the object and lost its answer; the write id tells. Before a process
writes its first entry, `check_store` tests these promises: a store that answered "created" twice, listings that lag, or
a clock that is off are refused. A store that passes gets a note, which later processes read in one request. Parts are
staged by multipart uploads in bounded memory and made visible by copies within the store. `unfinished` lists multipart
uploads that never ended.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import compress
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import urlsplit

from sluice.pipelines.errors import LakeUnavailable, ProofFailed, SetupError, SluiceError, Terminal, Unknown
from sluice.pipelines.feed.s3_section import S3Settings, bucket_and_prefix
from sluice.pipelines.ports import Stat
from sluice.pipelines.util.parallel import map_parallel
from sluice.resources.lake.s3_client import Bucket, NotKnown, NotThere, Taken, date, skew, told_skew
from sluice.resources.lake.s3_streams import UPLOADS, WRITE_ID, ObjectReader, Upload, new_write, written_by

if TYPE_CHECKING:
    from pyarrow.fs import S3FileSystem

COPIED_AT_ONCE = 5 << 30
"""S3's limit for one copy: a larger object is copied by ranges."""
COPY_RANGE = 512 << 20
_KEY_BYTES = 1024


class S3Lake:
    """`ports.Lake` below `s3://bucket/prefix`. Safe across processes and threads; picklable; opens nothing itself."""

    def __init__(self, address: str, settings: S3Settings) -> None:
        name, self._prefix = bucket_and_prefix(address)
        self.uri, self.settings = address, settings
        self.bucket = Bucket(name, settings)

    def locate(self, path: str) -> str:
        return f"s3://{self.bucket.name}/{self._key(path)}"

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Create the object; False if it exists. Of several writers exactly one gets True.

        Raises Unknown if no answer came, SetupError if the store cannot promise it.
        """
        key, write = self._key(path), new_write()
        check_store(self.bucket, self._prefix)
        try:
            return create(self.bucket, key, data, write)
        except LakeUnavailable as error:
            raise Unknown(
                f"no answer confirmed whether {path} was created in the lake: {error.message}",
                remedy="run again: the ledger is read back first",
            ) from error

    def put_each_if_absent(self, files: Mapping[str, bytes]) -> frozenset[str]:
        created = map_parallel(lambda path: self.put_if_absent(path, files[path]), tuple(files), patience=0)
        return frozenset(compress(files, created))

    def put(self, path: str, data: bytes) -> None:
        self.bucket.send("put_object", self._key(path), bytes(data), **self.bucket.written_with)

    def get(self, path: str) -> bytes | None:
        key = self._key(path)
        with suppress(NotThere):
            return self.bucket.fetch(key).data
        return None

    def list(self, prefix: str, after: str = "") -> Iterator[str]:
        """Objects below `prefix`, in the order of their keys, without other tools' folder objects and keys that are not
        paths."""
        return (stat.path for stat in self.stats(prefix, after))

    def folders(self, prefix: str) -> Iterator[str]:
        folder = f"{self._key(prefix.strip('/'))}/"
        for page in self.bucket.pages("list_objects_v2", Prefix=folder, Delimiter="/"):
            for one in page.get("CommonPrefixes", ()):
                if _is_path(name := one["Prefix"].removeprefix(folder).rstrip("/")):
                    yield name

    def stats(self, prefix: str, after: str = "") -> Iterator[Stat]:
        above = prefix.strip("/")
        folder = f"{self._key(above)}/" if above else self._prefix
        parameters = {"StartAfter": self._prefix + after} if after else {}
        for page in self.bucket.pages("list_objects_v2", Prefix=folder, **parameters):
            for one in page.get("Contents", ()):
                if _is_path(path := one["Key"].removeprefix(self._prefix)):
                    yield Stat(path, int(one.get("Size", 0)), one.get("ETag", ""))

    def size(self, path: str) -> int | None:
        return self._size(self._key(path))

    def _size(self, key: str) -> int | None:
        with suppress(NotThere):
            return int(self.bucket.call("head_object", key)["ContentLength"])
        return None

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        """An object that appears when the block ends. Raises Unknown if no answer confirmed it."""
        upload = Upload(self.bucket, self._key(path))
        try:
            yield cast(BinaryIO, upload)
            upload.finish()
        except Unknown:
            raise  # and nothing is cleaned up
        except BaseException:
            upload.abort()
            raise

    def open(self, path: str) -> BinaryIO:
        """The object, read by ranges. If it is replaced during reading, reads raise LakeUnavailable."""
        key = self._key(path)
        with suppress(NotThere):
            return cast(BinaryIO, ObjectReader(self.bucket, key))
        raise FileNotFoundError(errno.ENOENT, "the file is not in the lake", path)

    def show(self, source: str, target: str) -> None:
        """Copy the object within the store.

        Raises FileNotFoundError without a source, ProofFailed if something else is at the target.
        """
        origin, key = self._key(source), self._key(target)
        there, here = self._size(key), self._size(origin)
        if here is None:
            raise FileNotFoundError(errno.ENOENT, "the file is not in the lake", source)
        if there is not None and there != here:
            raise ProofFailed(
                f"{target} is visible already, with another size than the staged file",
                remedy="another writer wrote into the lake's data folder: move that file away and run again",
            )
        if there is None:
            try:
                self._copy(origin, key, here)
            except NotThere:
                raise FileNotFoundError(errno.ENOENT, "the file is not in the lake", source) from None

    def _copy(self, origin: str, key: str, size: int) -> None:
        parameters: dict[str, Any] = {"CopySource": {"Bucket": self.bucket.name, "Key": origin}}
        if size > COPIED_AT_ONCE:
            self._copy_by_ranges(key, size, parameters)
            return
        tagged = {"TaggingDirective": "REPLACE"} if self.settings.tags else {}
        self.bucket.call("copy_object", key, **parameters, **tagged, **self.bucket.written_with)

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
            self.bucket.call("complete_multipart_upload", key, UploadId=upload, MultipartUpload=parts)
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
                if not _is_path(one["Key"].removeprefix(self._prefix)):
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

    def _key(self, path: str) -> str:
        with suppress(UnicodeEncodeError):
            key = self._prefix + path
            if len(key.encode()) > _KEY_BYTES:
                raise Terminal(f"{path[:300]}… is too long a name for S3", remedy="give the lake a shorter prefix")
            if _is_path(path):
                return key
        raise Terminal(
            f"{ascii(path)[:300]} is no path inside the lake {self.uri}",
            remedy="look for `..`, an empty name, or a slash at the beginning or the end",
        )


def _is_path(name: str) -> bool:
    """Returns whether the key names something inside the lake, also when it is read as a folder's path."""
    return not any(p in ("", ".", "..") or "\0" in p for p in name.split("/"))


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


MAX_SKEW_S = 300
PROBE_NOTE = "_sluice/.probe.json"
PROBE_FOLDER = "_sluice/.probe/"

_checked_lakes: set[tuple[object, ...]] = set()


def check_store(bucket: Bucket, prefix: str) -> None:
    """Check each lake once in a process. Raises SetupError for a store, or a clock, that would lose or double data."""
    lake = (os.getpid(), bucket.settings.endpoint, bucket.name, prefix)
    if lake not in _checked_lakes:
        _probe_store(bucket, prefix)
        _checked_lakes.add(lake)


def _probe_store(bucket: Bucket, prefix: str) -> None:
    with suppress(NotThere):
        return _check_clock(bucket.call("head_object", prefix + PROBE_NOTE))
    key = f"{prefix}{PROBE_FOLDER}{secrets.token_hex(8)}"
    try:
        _check_clock(_check_condition(bucket, key))
        _check_sight(bucket, key)
    finally:
        with suppress(SluiceError, NotThere):
            bucket.call("delete_object", key)
    note = {"format": 1, "conditional_writes": True, "fresh_listings": True}
    bucket.send("put_object", prefix + PROBE_NOTE, json.dumps(note).encode(), **bucket.written_with)


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
    raise SetupError(
        f"the store of s3://{bucket.name} does not honour conditional writes (If-None-Match): two runs could write "
        "the same ledger entry",
        remedy="use a store that does (Amazon S3, MinIO, Ceph, R2 of today), or a lake in a folder",
    )


def _check_sight(bucket: Bucket, key: str) -> None:
    """An object that was just written must be there for every reader, and in a listing that begins before it."""
    folder = key.rpartition("/")[0] + "/"
    pages = bucket.pages("list_objects_v2", Prefix=folder, StartAfter=key[:-1])
    listed = any(one["Key"] == key for page in pages for one in page.get("Contents", ()))
    if not listed:
        raise SetupError(
            f"the store of s3://{bucket.name} does not list new objects: a reader could miss ledger entries",
            remedy="use a store whose listings are consistent, or a lake in a folder",
        )


def _check_clock(answer: Any) -> None:
    ahead = skew(answer)
    if abs(ahead) > MAX_SKEW_S:
        raise SetupError(
            f"{told_skew(ahead)} of the store's: windows would be closed by a wrong time",
            remedy="set this machine's clock (NTP), then run again",
        )


_FIRST, _SECOND = b"first", b"second"


def filesystem(address: str, settings: S3Settings) -> S3FileSystem:
    """Returns Arrow's file system for paths `bucket/key`: it reads in parallel, outside Python.

    It uses boto3's endpoint, region and credentials of this moment. Raises NotAuthorized, SetupError.
    """
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem  # late: only readers use it

    bucket = Bucket(bucket_and_prefix(address)[0], settings)
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
