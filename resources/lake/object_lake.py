"""A lake in an object store: each file is one complete object. Its subclasses know how a store takes requests."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import compress
from typing import Any, BinaryIO, cast

from sluice.pipelines.errors import LakeUnavailable, ProofFailed, SetupError, Terminal, Unknown
from sluice.pipelines.feed.stores import StoreSettings, place
from sluice.pipelines.ports import Stat
from sluice.pipelines.util.parallel import map_parallel
from sluice.resources.lake.streams import NotThere, ObjectReader, Objects, make_write_id

_KEY_BYTES = 1024
MAX_SKEW_S = 300
PROBE_NOTE = "_sluice/.probe.json"
PROBE_FOLDER = "_sluice/.probe/"
PROBE_RESULT = json.dumps({"format": 1, "conditional_writes": True, "fresh_listings": True}).encode()
"""The note of a store that passed."""

_checked_lakes: set[tuple[object, ...]] = set()


class ObjectLake(ABC):
    """`ports.Lake` below an address. Safe across processes and threads; picklable; opens nothing itself."""

    bucket: Objects
    copies = True

    def __init__(self, address: str, settings: StoreSettings) -> None:
        self.uri = address
        self.place = place(address)
        self._prefix = self.place.prefix
        self.settings = settings

    def locate(self, path: str) -> str:
        return f"{self.place.root}/{self._key(path)}"

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Create the object; False if it exists. Of several writers exactly one gets True.

        Raises Unknown if no answer came, SetupError if the store cannot promise it.
        """
        key, write = self._key(path), make_write_id()
        self._check_store()
        try:
            return self._create(key, data, write)
        except LakeUnavailable as error:
            raise Unknown(
                f"no answer confirmed whether {path} was created in the lake: {error.message}",
                remedy="run again: the ledger is read back first",
            ) from error

    def put_each_if_absent(self, files: Mapping[str, bytes]) -> frozenset[str]:
        created = map_parallel(lambda path: self.put_if_absent(path, files[path]), tuple(files), patience=0)
        return frozenset(compress(files, created))

    def get(self, path: str) -> bytes | None:
        key = self._key(path)
        with suppress(NotThere):
            return self.bucket.fetch(key).data
        return None

    def list(self, prefix: str, after: str = "") -> Iterator[str]:
        """Objects below `prefix`, in the order of their keys, without other tools' folder objects and keys that are not
        paths."""
        return (stat.path for stat in self.stats(prefix, after))

    def size(self, path: str) -> int | None:
        return self._find_size(self._key(path))

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        """An object that appears when the block ends. Raises Unknown if no answer confirmed it."""
        upload = self._upload(self._key(path))
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
        there, here = self._find_size(key), self._find_size(origin)
        if here is None:
            raise FileNotFoundError(errno.ENOENT, "the file is not in the lake", source)
        if there is None or there == 0 < here:  # on Azure a copy that goes on is an empty object
            try:
                there = self._copy(origin, key, here)
            except NotThere:
                raise FileNotFoundError(errno.ENOENT, "the file is not in the lake", source) from None
        if there != here:
            raise ProofFailed(
                f"{target} is visible already, with another size than the staged file",
                remedy="another writer wrote into the lake's data folder: move that file away and run again",
            )

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

    @abstractmethod
    def stats(self, prefix: str, after: str = "") -> Iterator[Stat]: ...

    def _check_store(self) -> None:
        """Check each lake once in a process. Raises SetupError for a store, or a clock, that would lose or double
        data."""
        lake = (os.getpid(), self.uri, self.settings.endpoint)
        if lake not in _checked_lakes:
            self._probe()
            _checked_lakes.add(lake)

    @property
    def _note_id(self) -> str:
        """The write id of the probe's note: a note that was copied with the lake from another store has another."""
        return hashlib.sha256(f"{self.uri} {self.settings.endpoint}".encode()).hexdigest()[:16]

    @abstractmethod
    def is_tested(self) -> bool:
        """Returns whether a process has tested this store, by its note. Raises SetupError for a clock that is off."""

    @abstractmethod
    def _probe(self) -> None:
        """Test the promises of the store, unless the note of a test exists. Raises as `_check_store`."""

    @abstractmethod
    def _create(self, key: str, data: bytes, write: str) -> bool:
        """Returns whether this write created the object. If its answer was lost, a second try returns "taken".

        Raises LakeUnavailable if no answer came.
        """

    @abstractmethod
    def _find_size(self, key: str) -> int | None: ...

    @abstractmethod
    def _upload(self, key: str) -> Any:
        """A writable stream with `finish` and `abort`."""

    @abstractmethod
    def _copy(self, origin: str, key: str, size: int) -> int:
        """Copy the object of that size, and return the size of the copy."""


def is_path(name: str) -> bool:
    """Returns whether the key names something inside the lake, also when it is read as a folder's path."""
    return not any(p in ("", ".", "..") or "\0" in p for p in name.split("/"))


def check_skew(ahead: float) -> None:
    """Raises SetupError if this machine's clock differs too much from the store's."""
    if abs(ahead) > MAX_SKEW_S:
        raise SetupError(
            f"{describe_skew(ahead)} of the store's: windows would be closed by a wrong time",
            remedy="set this machine's clock (NTP), then run again",
        )


def describe_skew(seconds: float) -> str:
    amount, way = round(abs(seconds)), "ahead" if seconds > 0 else "behind"
    return f"this machine's clock is {amount // 60} min {amount % 60} s {way}"


def build_conditions_error(root: str) -> SetupError:
    return SetupError(
        f"the store of {root} does not honour conditional writes (If-None-Match): two runs could write "
        "the same ledger entry",
        remedy="use a store that does (Amazon S3, MinIO, Ceph, R2 of today), or a lake in a folder",
    )


def build_listing_error(root: str) -> SetupError:
    return SetupError(
        f"the store of {root} does not list new objects: a reader could miss ledger entries",
        remedy="use a store whose listings are consistent, or a lake in a folder",
    )
