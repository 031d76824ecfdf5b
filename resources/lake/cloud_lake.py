"""The lake on Google Cloud Storage or Azure: each file is one complete object, written by one request.

The ledger relies on conditional writes (`x-goog-if-generation-match: 0`, `If-None-Match: *`): of several writers
exactly one gets True. If the answer is "taken", an earlier try of ours may have written the object and lost its answer;
the write id tells. Before a process writes its first entry, the store must pass a test of these promises. A part waits
in bounded memory or on disk and is sent as one request, so that nothing unfinished can remain; it is made visible by a
copy within the store.
"""

from __future__ import annotations

import io
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sluice.pipelines.errors import LakeUnavailable, SluiceError, Terminal
from sluice.pipelines.feed.stores import StoreSettings, place
from sluice.pipelines.ports import Stat
from sluice.resources.lake.cloud_client import Container, measure_skew
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
from sluice.resources.lake.streams import NotThere, PartBuffer, is_written, make_write_id

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

LARGEST = {"az": 5000 << 20, "abfss": 5000 << 20}
"""Bytes that one request writes on Azure."""


class CloudLake(ObjectLake):
    """The lake below `gs://bucket/prefix`, `az://container/prefix` or `abfss://…`."""

    def __init__(self, address: str, settings: StoreSettings) -> None:
        super().__init__(address, settings)
        self.bucket: Container = Container(self.place, settings)

    def put(self, path: str, data: bytes) -> None:
        self.bucket.put(self._key(path), bytes(data), make_write_id())

    def folders(self, prefix: str) -> Iterator[str]:
        return filter(is_path, self.bucket.list_folders(f"{self._key(prefix.strip('/'))}/"))

    def stats(self, prefix: str, after: str = "") -> Iterator[Stat]:
        above = prefix.strip("/")
        folder = f"{self._key(above)}/" if above else self._prefix
        stats = (s for s in self._list_stats(folder, self._begin(above, after)) if s.path > after)
        return iter(sorted(stats)) if self.bucket.on_azure else stats

    def _begin(self, above: str, after: str) -> str:
        """Returns the key after which the store lists; empty for all keys.

        With a hierarchical namespace Azure sorts by folder: keys are in order only within one folder.
        """
        flat = after.rpartition("/")[0] == above
        return self._prefix + after if after and (flat or not self.bucket.on_azure) else ""

    def _list_stats(self, folder: str, begin: str) -> Iterator[Stat]:
        for one in self.bucket.list_below(folder, begin):
            key, size = one["path"], one["size"]
            path = key.removeprefix(self._prefix)
            if not key.startswith(folder) or not is_path(path):
                continue
            if size or self._find_size(key) is not None:  # an empty one may be another tool's folder
                yield Stat(path, size, str(one["e_tag"] or "").strip('"'))

    def remove(self, path: str) -> None:
        with suppress(NotThere):
            self.bucket.remove(self._key(path))

    def list_unfinished(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yields nothing: each object is written by one request, which creates it or leaves nothing."""
        self._key(prefix.strip("/"))
        return iter(())

    def discard(self, name: str) -> None:
        raise Terminal(f"{ascii(name)[:300]} is no unfinished write", remedy="this is a bug; nothing was removed")

    def _create(self, key: str, data: bytes, write: str) -> bool:
        return self.bucket.create(key, bytes(data), write)

    def _find_size(self, key: str) -> int | None:
        with suppress(NotThere):
            return int(self.bucket.read_meta(key)["size"])
        return None

    def _upload(self, key: str) -> Upload:
        return Upload(self.bucket, key, LARGEST.get(self.place.scheme, 5 << 40))

    def _copy(self, origin: str, key: str, size: int) -> int:
        """Copy, and wait: Azure may answer before the copy is done, and shows an empty object until then."""
        self.bucket.copy(origin, key)
        until = time.monotonic() + self.bucket.settings.read_timeout_ms / 1000
        while (there := self._find_size(key)) == 0 < size and time.monotonic() < until:
            time.sleep(0.2)
        if there == 0 < size:
            with suppress(SluiceError, NotThere):
                self.bucket.remove(key)
            raise LakeUnavailable(f"the store did not finish the copy to {key}", remedy="run again")
        return there or 0

    def is_tested(self) -> bool:
        return self.bucket.find_writer(self._prefix + PROBE_NOTE) == self._note_id

    def _probe(self) -> None:
        """Also refuses a store in which objects cannot be replaced: each process writes the note again."""
        note = self._prefix + PROBE_NOTE
        if not self.is_tested():
            key = f"{self._prefix}{PROBE_FOLDER}{secrets.token_hex(8)}"
            try:
                self._check_conditions(key)
                self._check_listing(key)
            except BaseException:
                with suppress(SluiceError, NotThere):
                    self.bucket.remove(key)
                raise
            self.bucket.remove(key)
        self.bucket.put(note, PROBE_RESULT, self._note_id)
        check_skew(measure_skew(self.bucket.read_meta(note)))

    def _check_conditions(self, key: str) -> None:
        """Of two writes that create the same object, the second must be refused."""
        first = self.bucket.create(key, b"first", make_write_id())
        if not first or self.bucket.create(key, b"second", make_write_id()) or self.bucket.fetch(key).data != b"first":
            raise build_conditions_error(self.place.root)

    def _check_listing(self, key: str) -> None:
        """An object that was just written must be in a listing that begins before it."""
        folder = key.rpartition("/")[0] + "/"
        if not any(one["path"] == key for one in self.bucket.list_below(folder, key[:-1])):
            raise build_listing_error(self.place.root)


class Upload(io.RawIOBase):
    """An object on its way, which `finish` sends as one request."""

    def __init__(self, bucket: Container, key: str, largest: int) -> None:
        self._bucket, self._key, self._largest, self._write = bucket, key, largest, make_write_id()
        self._part = PartBuffer(bucket.settings.buffer_bytes, key)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._part.bytes

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        if self._part.bytes + len(view) > self._largest:
            raise Terminal(
                f"{self._key} is larger than the {self._largest >> 20} MiB that the store takes",
                remedy="lower landing.file_size in the feed",
            )
        self._part.write(view)
        return len(view)

    def finish(self) -> None:
        """Make the object appear. Raises Unknown if no answer confirmed it."""
        try:
            self._bucket.put(self._key, self._part.view(), self._write)
        except LakeUnavailable as error:
            if not is_written(self._key, self._write, self._bucket.find_writer, error):
                raise
        finally:
            self._part.close()

    def abort(self) -> None:
        self._part.close()


def open_filesystem(address: str, settings: StoreSettings) -> FileSystem:
    """Returns a file system for Arrow with paths `bucket/key`, which reads through the lake's client.

    Arrow's own file systems support fewer credentials, and retry for 15 minutes.
    """
    from pyarrow.fs import PyFileSystem  # late: only readers use it

    from sluice.resources.lake.arrow_handler import ArrowFiles

    return PyFileSystem(ArrowFiles(Container(place(address), settings)))
