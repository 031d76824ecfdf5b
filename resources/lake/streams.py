"""Objects as streams, for each store: data that waits for upload, and a file that is read by ranges.

Promises: data that waits takes at most the memory that the settings give a process; the rest waits in unnamed files of
the machine's temporary folder. A reader holds two blocks, and sees one content from beginning to end.
"""

from __future__ import annotations

import io
import mmap
import secrets
import tempfile
from contextlib import suppress
from threading import Lock
from typing import Any, BinaryIO

from sluice.pipelines.errors import LakeFull, LakeUnavailable, SluiceError, Terminal, Unknown
from sluice.resources.lake.store_client import Block, NotThere, OutOfRange, StoreClient, Taken, find_writer


def make_write_id() -> str:
    """The id of one write, by which its writer recognizes the object."""
    return secrets.token_hex(8)


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


class PartBuffer:
    """Bytes that wait: in memory while there is room, then on disk."""

    def __init__(self, limit: int, key: str) -> None:
        self._limit, self._key, self._held = limit, key, 0
        self.file: BinaryIO = io.BytesIO()
        self.bytes = 0
        self._spilled = False

    def write(self, data: memoryview) -> None:
        """Raises LakeFull if the machine's disk has no room."""
        try:
            self._write(data)
        except OSError as error:
            raise LakeFull(
                f"no space on this machine for data to be uploaded to {self._key}: {error.strerror}",
                remedy="free space in the temporary folder (TMPDIR), or lower the number of tasks",
            ) from error
        self.bytes += len(data)

    def _write(self, data: memoryview) -> None:
        if not self._spilled:
            if _memory.take(len(data), self._limit):
                self._held += len(data)
            else:
                memory, self.file, self._spilled = self.file, tempfile.TemporaryFile(), True  # noqa: SIM115 - `close` does it
                memory.seek(0)
                while block := memory.read(1 << 20):
                    self.file.write(block)
                self._release()
        self.file.write(data)
        self.file.flush()  # a full disk fails here, in the writer that caused it

    def view(self) -> bytes | mmap.mmap:
        """All bytes, without a copy of those on disk; valid after `close` too."""
        if isinstance(self.file, io.BytesIO):
            return self.file.getvalue()
        return mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)

    def _release(self) -> None:
        _memory.give(self._held)
        self._held = 0

    def close(self) -> None:
        self._release()
        with suppress(OSError):  # close writes the bytes again for which there was no room; they are not needed
            self.file.close()


class Upload(io.RawIOBase):
    """An object on its way, sent as one request. End it by `finish` or `abort`."""

    def __init__(self, client: StoreClient, key: str) -> None:
        self._client, self._key, self._write = client, key, make_write_id()
        self._part = self._make_part()

    def _make_part(self) -> PartBuffer:
        return PartBuffer(self._client.settings.buffer_bytes, self._key)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._part.bytes

    def write(self, data: Any, /) -> int:
        """Take all bytes. Raises Terminal beyond the store's limit, and LakeFull if the machine's disk has no room."""
        view = memoryview(data).cast("B")
        if self._part.bytes + len(view) > self._client.LARGEST:
            raise Terminal(
                f"{self._key} is larger than the {self._client.LARGEST >> 20} MiB that the store takes",
                remedy="lower landing.file_size in the feed",
            )
        self._part.write(view)
        return len(view)

    def finish(self) -> None:
        """Make the object appear. Raises Unknown if no answer confirmed it: then nothing is cleaned up."""
        try:
            self._client.put(self._key, self._part.view(), self._write)
        except LakeUnavailable as error:
            if not self._is_written(error):
                raise
        finally:
            self._part.close()

    def abort(self) -> None:
        """Leave nothing. `list_uploads` finds parts that cannot be removed now."""
        self._part.close()

    def _is_written(self, error: Exception) -> bool:
        """Returns whether this write made the object, after `error` hid its answer. Raises Unknown if it cannot be
        read."""
        try:
            return find_writer(self._client, self._key) == self._write
        except SluiceError as unread:
            raise Unknown(
                f"no answer confirmed whether {self._key} is complete in the lake ({unread.message})",
                remedy="run again: the existing file is checked first",
            ) from error


# -- reading

TAIL = 64 << 10
"""Read first: Parquet's footer is there."""
AHEAD = (256 << 10, 8 << 20)
"""The least that one read fetches, and the most that is fetched ahead of a sequential reader."""
AT_ONCE = 16 << 20


class ObjectReader(io.RawIOBase):
    """An object as a seekable file. Raises NotThere when it is made, LakeUnavailable if the object was replaced."""

    def __init__(self, client: StoreClient, key: str) -> None:
        self._client, self._key = client, key
        try:
            self._tail = client.fetch(key, f"-{TAIL}")
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
            return self._client.fetch(self._key, f"{position}-{end - 1}", self._tail.etag)
        except (Taken, NotThere, OutOfRange):
            raise LakeUnavailable(
                f"{self._key} was replaced or removed while it was read",
                remedy="run again: the ledger decides which files count",
            ) from None
