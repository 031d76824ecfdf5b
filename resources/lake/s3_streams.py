"""Objects as streams: an upload that appears when it is finished, and a file that is read by ranges.

Promises: uploads hold at most the memory that the settings give a process, regardless of the number and size of
objects;
the rest waits in unnamed files of the machine's temporary folder. A reader holds two blocks, and sees one content from
beginning to end.
"""

from __future__ import annotations

import io
import os
import secrets
import tempfile
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from threading import Lock
from typing import Any, BinaryIO

from sluice.pipelines.errors import LakeFull, LakeUnavailable, SluiceError, Unknown
from sluice.resources.lake.s3_client import Block, Bucket, NotThere, OutOfRange, Taken

WRITE_ID = "sluice-write"
"""The key in an object's own metadata for the id of the write that made it."""
GROW_EVERY = 1000
"""After this many parts, the next ones are twice as large, so that 10,000 parts, S3's limit, hold any object."""
UPLOADS = 4
"""How many parts a process sends at once."""


def new_write() -> str:
    return secrets.token_hex(8)


def written_by(bucket: Bucket, key: str) -> str | None:
    """The id of the write that made the object; None if there is no object. Raises the error that hides it."""
    try:
        return str(bucket.call("head_object", key).get("Metadata", {}).get(WRITE_ID, ""))
    except NotThere:
        return None


# -- writing


class _Memory:
    """The bytes that wait for upload in this process."""

    def __init__(self) -> None:
        self._lock, self._held = Lock(), 0

    def take(self, size: int, limit: int) -> bool:
        with self._lock:
            if self._held + size > limit:
                return False
            self._held += size
            return True

    def give(self, size: int) -> None:
        with self._lock:
            self._held -= size


_memory = _Memory()


@lru_cache(maxsize=1)
def _pool(_process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(UPLOADS, "sluice-s3")


class _PartBuffer:
    """Bytes that wait: in memory while there is room, then on disk."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self.file: BinaryIO = io.BytesIO()
        self.bytes = 0
        self._spilled = False

    def write(self, data: memoryview) -> None:
        if not self._spilled:
            if _memory.take(len(data), self._limit):
                self._held += len(data)
            else:
                self._spill()
        self.file.write(data)
        self.file.flush()  # a full disk fails here, in the writer that caused it
        self.bytes += len(data)

    def _spill(self) -> None:
        memory, self.file, self._spilled = self.file, tempfile.TemporaryFile(), True  # noqa: SIM115 - `close` does it
        memory.seek(0)
        while block := memory.read(1 << 20):
            self.file.write(block)
        self._release()

    def _release(self) -> None:
        _memory.give(self._held)
        self._held = 0

    def close(self) -> None:
        self._release()
        with suppress(OSError):  # bytes that found no room are tried once more, and nobody wants them now
            self.file.close()


class Upload(io.RawIOBase):
    """An object on its way: a small one is one put, a larger one a multipart upload. End it by `finish` or `abort`."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._bucket, self._key, self._write = bucket, key, new_write()
        self._id = ""
        self._part = self._fresh()
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
            room = self._part_size() - self._part.bytes
            try:
                self._part.write(rest[:room])
            except OSError as error:
                raise LakeFull(
                    f"no space on this machine for data to be uploaded to {self._key}: {error.strerror}",
                    remedy="free space in the temporary folder (TMPDIR), or lower the number of tasks",
                ) from error
            rest = rest[room:]
            if self._part.bytes >= self._part_size():
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
        self._part.close()

    def _fresh(self) -> _PartBuffer:
        return _PartBuffer(self._bucket.settings.buffer_bytes)

    def _part_size(self) -> int:
        return int(self._bucket.settings.part_bytes) << (self._sent // GROW_EVERY)

    def _send(self) -> None:
        """Hand the part over; wait while two are under way, so that a slow store slows down the writer."""
        if not self._id:
            fields = {"Metadata": {WRITE_ID: self._write}, **self._bucket.written_with}
            self._id = self._bucket.call("create_multipart_upload", self._key, **fields)["UploadId"]
        part, self._part, self._sent = self._part, self._fresh(), self._sent + 1
        sending = _pool(os.getpid()).submit(self._upload, self._sent, part)
        sending.add_done_callback(lambda _: part.close())
        self._under_way.append(sending)
        self._collect(2)

    def _upload(self, number: int, part: _PartBuffer) -> dict[str, Any]:
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
        """Find out what happened if nobody answered, or if the upload is gone: this process may have completed it."""
        upload, self._id = self._id, ""
        try:
            ours = written_by(self._bucket, self._key) == self._write
        except SluiceError as unread:
            raise Unknown(
                f"no answer confirmed whether {self._key} is complete in the lake ({unread.message})",
                remedy="run again: the existing file is checked first",
            ) from error
        if not ours:
            self._id = upload
            raise self._discard_error() if isinstance(error, NotThere) else error

    def _discard_error(self) -> LakeUnavailable:
        return LakeUnavailable(
            f"the upload of {self._key} was ended by somebody else",
            remedy="run again; `sluice repair` may have done it",
        )


# -- reading

TAIL = 64 << 10
"""Read first: Parquet's footer is there."""
AHEAD = (256 << 10, 8 << 20)
"""The least that one read fetches, and the most that is fetched ahead of a sequential reader."""
AT_ONCE = 16 << 20


class ObjectReader(io.RawIOBase):
    """An object as a seekable file. Raises NotThere when it is made, LakeUnavailable if the object was replaced."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._bucket, self._key = bucket, key
        try:
            self._tail = bucket.fetch(key, f"-{TAIL}")
        except OutOfRange:
            self._tail = Block(0, b"", 0, "")
        self._block, self._size = self._tail, self._tail.size
        self._position, self._ahead = 0, AHEAD[0]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning of the file")
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        """Exactly this many bytes; fewer only at the end."""
        remaining = max(0, self._size - self._position)
        wanted = remaining if size is None or size < 0 else min(size, remaining)
        pieces = []
        while wanted:
            piece = self._at(self._position, wanted)
            pieces.append(piece)
            self._position += len(piece)
            wanted -= len(piece)
        return b"".join(pieces)

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, into: Any, /) -> int:
        view = memoryview(into).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def _at(self, position: int, wanted: int) -> memoryview:
        """Some bytes from that position on, at least one."""
        for block in (self._block, self._tail):
            if block.start <= position < block.start + len(block.data):
                return memoryview(block.data)[position - block.start :][:wanted]
        self._block = self._fetch(position, wanted)
        return memoryview(self._block.data)[:wanted]

    def _fetch(self, position: int, wanted: int) -> Block:
        goes_on = position == self._block.start + len(self._block.data)
        self._ahead = min(2 * self._ahead, AHEAD[1]) if goes_on else AHEAD[0]
        end = min(position + min(max(wanted, self._ahead), AT_ONCE), self._tail.start)
        try:
            return self._bucket.fetch(self._key, f"{position}-{end - 1}", self._tail.etag)
        except (Taken, NotThere, OutOfRange):
            raise LakeUnavailable(
                f"{self._key} was replaced or removed while it was read",
                remedy="run again: the ledger decides which files count",
            ) from None
