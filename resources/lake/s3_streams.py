"""Uploads to S3, by parts: an object appears when its upload is finished."""

from __future__ import annotations

import io
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from sluice.pipelines.errors import LakeUnavailable, SluiceError
from sluice.resources.lake.s3_client import Bucket
from sluice.resources.lake.streams import NotThere, PartBuffer, is_written, make_write_id

WRITE_ID = "sluice-write"
"""The key in an object's own metadata for the id of the write that made it."""
GROW_EVERY = 1000
"""After this many parts, the next ones are twice as large, so that 10,000 parts, S3's limit, hold any object."""
UPLOADS = 4
"""How many parts a process sends at once."""


def written_by(bucket: Bucket, key: str) -> str | None:
    """The id of the write that made the object; None if there is no object. Raises the error that hides it."""
    try:
        return str(bucket.call("head_object", key).get("Metadata", {}).get(WRITE_ID, ""))
    except NotThere:
        return None


@lru_cache(maxsize=1)
def _pool(_process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(UPLOADS, "sluice-s3")


class Upload(io.RawIOBase):
    """An object on its way: a small one is one put, a larger one a multipart upload. End it by `finish` or `abort`."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._bucket, self._key, self._write = bucket, key, make_write_id()
        self._id = ""
        self._part = self._make_part()
        self._sent = 0
        self._under_way: deque[Future[dict[str, Any]]] = deque()
        self._etags: list[dict[str, Any]] = []
        self._bytes = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._bytes

    def write(self, data: Any, /) -> int:
        """Take all bytes. Raises the error of an earlier part, and LakeFull if the machine's disk has no room."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest:
            room = self._choose_part_size() - self._part.bytes
            self._part.write(rest[:room])
            rest = rest[room:]
            if self._part.bytes >= self._choose_part_size():
                self._send()
        self._bytes += size
        return size

    def finish(self) -> None:
        """Make the object appear. Raises Unknown if no answer confirmed it: then nothing is cleaned up."""
        if not self._id:
            self._put_whole()
            return
        if self._part.bytes:
            self._send()
        self._collect(0)
        self._complete()

    def abort(self) -> None:
        """Leave nothing. `unfinished` finds what cannot be removed now."""
        for sending in self._under_way:
            sending.cancel()
        for sending in self._under_way:
            with suppress(BaseException):
                sending.result()
        self._part.close()
        if self._id:
            with suppress(SluiceError, NotThere):
                self._bucket.call("abort_multipart_upload", self._key, UploadId=self._id)

    def _put_whole(self) -> None:
        fields = {"Metadata": {WRITE_ID: self._write}, **self._bucket.written_with}
        try:
            self._bucket.send("put_object", self._key, self._part.file, **fields)
        except LakeUnavailable as error:
            self._resolve(error)
        finally:
            self._part.close()

    def _make_part(self) -> PartBuffer:
        return PartBuffer(self._bucket.settings.buffer_bytes, self._key)

    def _choose_part_size(self) -> int:
        return int(self._bucket.settings.part_bytes) << (self._sent // GROW_EVERY)

    def _send(self) -> None:
        """Hand the part over; wait while two are under way, so that a slow store slows down the writer."""
        if not self._id:
            fields = {"Metadata": {WRITE_ID: self._write}, **self._bucket.written_with}
            self._id = self._bucket.call("create_multipart_upload", self._key, **fields)["UploadId"]
        part, self._part, self._sent = self._part, self._make_part(), self._sent + 1
        sending = _pool(os.getpid()).submit(self._upload, self._sent, part)
        sending.add_done_callback(lambda _: part.close())
        self._under_way.append(sending)
        self._collect(2)

    def _upload(self, number: int, part: PartBuffer) -> dict[str, Any]:
        parameters = {"PartNumber": number, "UploadId": self._id}
        try:
            return {
                "PartNumber": number,
                "ETag": self._bucket.send("upload_part", self._key, part.file, **parameters)["ETag"],
            }
        except NotThere:
            raise self._discard_error() from None

    def _collect(self, limit: int) -> None:
        while len(self._under_way) > limit:
            self._etags.append(self._under_way.popleft().result())

    def _complete(self) -> None:
        try:
            parts = {"Parts": self._etags}
            self._bucket.call("complete_multipart_upload", self._key, UploadId=self._id, MultipartUpload=parts)
        except (LakeUnavailable, NotThere) as error:
            self._resolve(error)

    def _resolve(self, error: Exception) -> None:
        """Find out the outcome without a response, or if the upload is gone: this process may have completed it."""
        upload, self._id = self._id, ""
        if not is_written(self._key, self._write, partial(written_by, self._bucket), error):
            self._id = upload
            raise self._discard_error() if isinstance(error, NotThere) else error

    def _discard_error(self) -> LakeUnavailable:
        return LakeUnavailable(
            f"the upload of {self._key} was ended by somebody else",
            remedy="run again; `sluice repair` may have done it",
        )
