"""The lake in an object store: each file is one complete object.

The ledger relies on conditional writes: of several writers exactly one gets True. If the answer is "taken", an earlier
try of ours may have written the object and lost its answer; the write id tells. Before a process writes its first
entry, the store must pass a test of these promises: a store that answered "created" twice, listings that lag, or a
clock that is off are refused. A store that passes gets a note, by which later processes know it. Files are staged in
bounded memory or on disk, and made visible by copies within the store.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import compress
from typing import BinaryIO, cast

from sluice.pipelines.errors import LakeUnavailable, ProofFailed, SetupError, SluiceError, Terminal, Unknown
from sluice.pipelines.ports import Stat
from sluice.pipelines.util.parallel import map_parallel
from sluice.resources.lake.store_client import (
    NotKnown,
    NotThere,
    StoreClient,
    compute_lead,
    describe_lead,
)
from sluice.resources.lake.streams import ObjectReader, make_write_id

_KEY_BYTES = 1024
MAX_SKEW_S = 300
PROBE_NOTE = "_sluice/.probe.json"
PROBE_FOLDER = "_sluice/.probe/"
PROBE_RESULT = json.dumps({"format": 1, "conditional_writes": True, "fresh_listings": True}).encode()
"""The note of a store that passed."""

_checked_lakes: set[tuple[object, ...]] = set()


class ObjectLake:
    """`ports.Lake` below an address. Safe across processes and threads; picklable; opens nothing itself."""

    copies = True

    def __init__(self, address: str, client: StoreClient) -> None:
        self.uri = address
        self.client = client
        self._prefix = client.home.prefix

    def locate(self, path: str) -> str:
        return f"{self.client.home.root}/{self._key(path)}"

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Create the object; False if it exists. Of several writers exactly one gets True.

        Raises Unknown if no answer came, SetupError if the store cannot promise it.
        """
        key, write = self._key(path), make_write_id()
        # Each lake is probed once in a process, before its first write that must be the only one.
        lake = (os.getpid(), self.uri, self.client.settings.endpoint)
        if lake not in _checked_lakes:
            self._probe()
            _checked_lakes.add(lake)
        try:
            return self.client.create(key, bytes(data), write)
        except LakeUnavailable as error:
            raise Unknown(
                f"no answer confirmed whether {path} was created in the lake: {error.message}",
                remedy="run again: the ledger is read back first",
            ) from error

    def put_each_if_absent(self, files: Mapping[str, bytes]) -> frozenset[str]:
        created = map_parallel(lambda path: self.put_if_absent(path, files[path]), tuple(files), patience=0)
        return frozenset(compress(files, created))

    def put(self, path: str, data: bytes) -> None:
        self.client.put(self._key(path), bytes(data), make_write_id())

    def get(self, path: str) -> bytes | None:
        key = self._key(path)
        with suppress(NotThere):
            return self.client.fetch(key).data
        return None

    def list(self, prefix: str, after: str = "") -> Iterator[str]:
        """Objects below `prefix`, in the order of their keys, without other tools' folder objects and keys that are not
        paths."""
        return (stat.path for stat in self.stats(prefix, after))

    def stats(self, prefix: str, after: str = "") -> Iterator[Stat]:
        above = prefix.strip("/")
        folder = f"{self._key(above)}/" if above else self._prefix
        for one in self.client.list_below(folder, self._prefix + after if after else ""):
            if is_path(path := one.path.removeprefix(self._prefix)):
                yield Stat(path, one.size, one.tag)

    def folders(self, prefix: str) -> Iterator[str]:
        return filter(is_path, self.client.list_folders(f"{self._key(prefix.strip('/'))}/"))

    def size(self, path: str) -> int | None:
        return self._find_size(self._key(path))

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        """An object that appears when the block ends. Raises Unknown if no answer confirmed it."""
        upload = self.client.open_upload(self._key(path))
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
            return cast(BinaryIO, ObjectReader(self.client, key))
        raise FileNotFoundError(errno.ENOENT, "the file is not in the lake", path)

    def show(self, source: str, target: str) -> None:
        """Copy the object within the store.

        Raises FileNotFoundError without a source, ProofFailed if something else is at the target.
        """
        origin, key = self._key(source), self._key(target)
        there, here = self._find_size(key), self._find_size(origin)
        if here is None:
            raise FileNotFoundError(errno.ENOENT, "the file is not in the lake", source)
        if there is None or there == 0 < here:  # on Azure a copy that goes on is an empty object
            try:
                there = self.client.copy(origin, key, here)
            except NotThere:
                raise FileNotFoundError(errno.ENOENT, "the file is not in the lake", source) from None
        if there != here:
            raise ProofFailed(
                f"{target} is visible already, with another size than the staged file",
                remedy="another writer wrote into the lake's data folder: move that file away and run again",
            )

    def remove(self, path: str) -> None:
        with suppress(NotThere):
            self.client.remove(self._key(path))

    def list_unfinished(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Unfinished uploads below the folder, each with the time (ms, by the store's clock) since its newest part."""
        for key, upload, age in self.client.list_uploads(f"{self._key(prefix.strip('/'))}/"):
            if is_path(path := key.removeprefix(self._prefix)):
                yield f"{path}#{upload}", age

    def discard(self, name: str) -> None:
        path, _, upload = name.rpartition("#")
        if not path or not upload:
            raise Terminal(f"{ascii(name)[:300]} is no unfinished write", remedy="this is a bug; nothing was removed")
        with suppress(NotThere):
            self.client.end_upload(self._key(path), upload)

    def _key(self, path: str) -> str:
        with suppress(UnicodeEncodeError):
            key = self._prefix + path
            if len(key.encode()) > _KEY_BYTES:
                raise Terminal(
                    f"{path[:300]}… is too long a name for the store", remedy="give the lake a shorter prefix"
                )
            if is_path(path):
                return key
        raise Terminal(
            f"{ascii(path)[:300]} is no path inside the lake {self.uri}",
            remedy="look for `..`, an empty name, or a slash at the beginning or the end",
        )

    def _find_size(self, key: str) -> int | None:
        with suppress(NotThere):
            return self.client.head(key).size
        return None

    # -- the test of the store's promises

    @property
    def _note_id(self) -> str:
        """The write id of the probe's note: a note that was copied with the lake from another store has another."""
        return hashlib.sha256(f"{self.uri} {self.client.settings.endpoint}".encode()).hexdigest()[:16]

    def is_tested(self) -> bool:
        """Returns whether a process has tested this store, by its note. Raises SetupError for a clock that is off."""
        with suppress(NotThere):
            head = self.client.head(self._prefix + PROBE_NOTE)
            if self.client.DATES_ANSWERS:
                _check_clock(head.time)
            return head.writer == self._note_id
        return False

    def _probe(self) -> None:
        """Test the promises of the store, unless the note of a test exists. Raises as `_check_store`.

        Where only objects tell the time, each process writes the note again, which also shows that they can be
        replaced.
        """
        note = self._prefix + PROBE_NOTE
        if not self.is_tested():
            key = f"{self._prefix}{PROBE_FOLDER}{secrets.token_hex(8)}"
            try:
                self._check_conditions(key)
                _check_clock(self.client.head(key).time)
                self._check_listing(key)
            except BaseException:
                with suppress(SluiceError, NotThere):
                    self.client.remove(key)
                raise
            self.client.remove(key)
            self.client.put(note, PROBE_RESULT, self._note_id)
        elif not self.client.DATES_ANSWERS:
            self.client.put(note, PROBE_RESULT, self._note_id)
            _check_clock(self.client.head(note).time)

    def _check_conditions(self, key: str) -> None:
        """Of two writes that create the same object, the second must be refused."""
        client = self.client
        with suppress(NotKnown):
            created = client.create(key, b"first", make_write_id())
            if created and not client.create(key, b"second", make_write_id()) and client.fetch(key).data == b"first":
                return
        raise SetupError(
            f"the store of {client.home.root} does not honour conditional writes (If-None-Match): two runs could write "
            "the same ledger entry",
            remedy="use a store that does (Amazon S3, MinIO, Ceph, R2 of today), or a lake in a folder",
        )

    def _check_listing(self, key: str) -> None:
        """An object that was just written must be in a listing that begins before it."""
        folder = key.rpartition("/")[0] + "/"
        if not any(one.path == key for one in self.client.list_below(folder, key[:-1])):
            raise SetupError(
                f"the store of {self.client.home.root} does not list new objects: a reader could miss ledger entries",
                remedy="use a store whose listings are consistent, or a lake in a folder",
            )


def is_path(name: str) -> bool:
    """Returns whether the key names something inside the lake, also when it is read as a folder's path."""
    return not any(p in ("", ".", "..") or "\0" in p for p in name.split("/"))


def _check_clock(time: datetime | None) -> None:
    """Raises SetupError if this machine's clock differs too much from the store's."""
    if abs(ahead := compute_lead(time)) > MAX_SKEW_S:
        raise SetupError(
            f"{describe_lead(ahead)} of the store's: windows would be closed by a wrong time",
            remedy="set this machine's clock (NTP), then run again",
        )
