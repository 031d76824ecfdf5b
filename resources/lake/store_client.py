"""The requests of a lake to its object store.

Each store implements `StoreClient` in a file of its own, which `resources/lake/__init__.py` names by its scheme.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pydantic import SecretStr

from sluice.pipelines.errors import Terminal
from sluice.pipelines.feed.stores import Place, StoreSettings
from sluice.pipelines.model.health import Diagnosis
from sluice.pipelines.ports import Stat

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

    from sluice.resources.lake.streams import Upload


KEEPS = "keeps replaced and removed objects until a lifecycle rule removes them"


class Signal(Terminal):
    """An answer that its caller expects. A caller that does not expect it has met a store with a fault."""


class NotThere(Signal): ...


class Taken(Signal):
    """The condition of the request does not hold: an object exists, or another one than expected."""


class OutOfRange(Signal): ...


class NotKnown(Signal):
    """The store does not know the requested operation."""


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes of an object from `start` on, its size, and the tag of exactly that content."""

    start: int
    data: bytes
    size: int
    etag: str


class Head(NamedTuple):
    """An object's description. `writer` is the id of the write that made it, `time` the store's time of the answer, or
    of that write; None if unknown."""

    size: int
    tag: str
    writer: str
    time: datetime | None


@dataclass(frozen=True)
class StoreClient(ABC):
    """One bucket or container. Picklable, safe across threads and processes; opens nothing before the first request.

    Guarantees: a permanent failure is raised at once, with its remedy. A transient one is retried up to `retries`
    times, and is then LakeUnavailable. No error contains a secret.
    """

    home: Place
    settings: StoreSettings

    LARGEST: ClassVar[int] = 5 << 40
    """Bytes of the largest object."""
    GRANTS: ClassVar[Mapping[str, str]]
    """What grants each right."""
    DATES_ANSWERS: ClassVar[bool] = False
    """Whether the time of a `head` is that of the answer."""

    @abstractmethod
    def create(self, key: str, data: bytes, write: str) -> bool:
        """Create the object. Returns False if the key is taken; a write of this id, whose answer was lost, made it.

        Raises LakeUnavailable if no answer came, NotKnown if the store cannot do it.
        """

    @abstractmethod
    def put(self, key: str, data: Any, write: str) -> None:
        """Create or replace the object by these bytes or this `mmap`."""

    @abstractmethod
    def fetch(self, key: str, span: str = "", etag: str = "") -> Block:
        """The object, or the `span` of it (as after `bytes=`), only if its content has that tag.

        Raises NotThere, Taken, OutOfRange.
        """

    @abstractmethod
    def head(self, key: str) -> Head:
        """Raises NotThere."""

    @abstractmethod
    def list_below(self, folder: str, after: str = "") -> Iterator[Stat]:
        """Objects below the folder and after that key, in the order of keys. A folder ends in a slash, or is empty."""

    @abstractmethod
    def list_folders(self, folder: str) -> Iterable[str]:
        """The names of the folders directly below the folder."""

    @abstractmethod
    def copy(self, origin: str, key: str, size: int) -> int:
        """Copy the object of that size within the store, and return the size of the copy. Raises NotThere."""

    @abstractmethod
    def remove(self, key: str) -> None:
        """Raises NotThere."""

    @abstractmethod
    def open_upload(self, key: str) -> Upload: ...

    def list_uploads(self, folder: str) -> Iterator[tuple[str, str, int]]:
        """Unfinished uploads below the folder, each with its key, its id and the time (ms) since its newest part."""
        return iter(())

    def end_upload(self, key: str, upload: str) -> None:
        """Remove the parts of an unfinished upload. Raises NotThere."""
        raise NotThere(f"{key} has no unfinished upload", remedy="this is a bug; nothing was removed")

    # -- for `sluice doctor`

    @abstractmethod
    def measure_lead(self, folder: str) -> float | None:
        """Returns how many seconds this machine's clock is ahead of the store's; None if the store does not say."""

    @abstractmethod
    def list_attempts(self) -> Mapping[str, Callable[[str], object]]:
        """Requests that need a right of `GRANTS` each. For a key without an object they change nothing."""

    def check_credentials(self) -> Iterator[Diagnosis]:
        """Check the credentials as far as their own text shows."""
        return iter(())

    def check_retention(self, key: str) -> Iterator[Diagnosis]:
        """Check the settings that keep replaced and removed objects, by an object that may exist."""
        return iter(())

    # -- for other libraries

    def open_filesystem(self) -> FileSystem:
        """Returns a file system for Arrow with paths `bucket/key`, which reads through this client."""
        from pyarrow.fs import PyFileSystem  # late: only readers use it

        from sluice.resources.lake.arrow_handler import ArrowFiles

        return PyFileSystem(ArrowFiles(self))

    @abstractmethod
    def build_delta_options(self) -> dict[str, str]:
        """The options by which deltalake reaches the store."""

    def build_iceberg_options(self) -> dict[str, str]:
        """The properties by which PyIceberg's own files reach the store; empty: they are read through this client."""
        return {}

    def mask(self, text: str) -> str:
        """The message of the other side or a library, on one line, without anything secret."""
        for _, value in self.settings:
            if isinstance(value, SecretStr):
                text = text.replace(value.get_secret_value(), "**********")
        return "".join(c if c.isprintable() else " " for c in text).strip()[:300]


def find_writer(client: StoreClient, key: str) -> str | None:
    """The id of the write that made the object; None if there is no object. Raises the error that hides it."""
    try:
        return client.head(key).writer
    except NotThere:
        return None


def parse_date(text: str) -> datetime | None:
    """The time of a `Date` header; None if it is no time."""
    try:
        return parsedate_to_datetime(text).astimezone(UTC)
    except (ValueError, TypeError):
        return None


def compute_lead(time: datetime | None) -> float:
    """By how many seconds this machine's clock is ahead of the store's; 0 if the store does not say.

    Accurate to about a second plus the time that the answer took.
    """
    return (datetime.now(UTC) - time).total_seconds() if time else 0.0


def describe_lead(seconds: float) -> str:
    amount, way = round(abs(seconds)), "ahead" if seconds > 0 else "behind"
    return f"this machine's clock is {amount // 60} min {amount % 60} s {way}"
