"""PyIceberg's files on Google Cloud Storage and Azure, read and written by the lake's own client.

PyIceberg's own readers of these stores support fewer credentials, and retry for minutes. Errors are those of files, as
from PyArrow: PermissionError, FileNotFoundError, and OSError if the store did not answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pyiceberg.io import FileIO, InputFile, OutputFile

from sluice.pipelines.errors import LakeFull, LakeUnavailable, NotAuthorized, SetupError, Unknown
from sluice.pipelines.feed.stores import StoreSettings, scheme
from sluice.resources.lake import open_client
from sluice.resources.lake.store_client import NotThere, find_writer
from sluice.resources.lake.streams import ObjectReader, Upload

SETTINGS = "sluice.store"
"""The property with the lake's settings; their text has no secrets."""

Answer = TypeVar("Answer")


def build_properties(settings: StoreSettings) -> dict[str, Any]:
    """Returns the properties of a catalog whose files are reached by these settings."""
    return {"py-io-impl": f"{__name__}.{StoreFiles.__name__}", SETTINGS: settings}


class StoreFiles(FileIO):  # type: ignore[misc, unused-ignore]
    """The files of all buckets or containers of one account."""

    def new_input(self, location: str) -> StoreFile:
        return StoreFile(location, self.properties[SETTINGS])

    def new_output(self, location: str) -> StoreFile:
        return StoreFile(location, self.properties[SETTINGS])

    def delete(self, location: Any) -> None:
        file = self.new_input(location if isinstance(location, str) else location.location)
        file.request(file.client.remove)


class StoreFile(InputFile, OutputFile):  # type: ignore[misc, unused-ignore]
    """An object by its address."""

    def __init__(self, location: str, settings: Any) -> None:
        super().__init__(location)
        if not scheme(location):
            raise SetupError(f"{location} is not in the lake's store", remedy="give the catalog a warehouse there")
        self.client = open_client(location, settings)
        self._key = location.removeprefix(f"{self.client.home.root}/")

    def request(self, ask: Callable[[str], Answer]) -> Answer:
        with _translate_errors(self.location):
            return ask(self._key)

    def __len__(self) -> int:
        return self.request(self.client.head).size

    def exists(self) -> bool:
        return self.request(lambda key: find_writer(self.client, key)) is not None

    def open(self, seekable: bool = True) -> Any:
        return self.request(lambda key: Input(self.client, key))

    def create(self, overwrite: bool = False) -> Any:
        if not overwrite and self.exists():
            raise FileExistsError(self.location)
        return Output(self.client, self._key)

    def to_input_file(self) -> StoreFile:
        return self


class Input(ObjectReader):
    """An object that is read."""

    def read(self, size: int | None = -1, /) -> bytes:
        with _translate_errors(self._key):
            return super().read(size)


class Output(Upload):
    """An object that appears when the stream is closed, unless the block failed."""

    def close(self) -> None:
        if not self.closed:
            try:
                with _translate_errors(self._key):
                    self.finish()
            finally:
                super().close()

    def __exit__(self, kind: Any, *error: object) -> None:
        if kind is None:
            return self.close()
        self.abort()
        super(Upload, self).close()


@contextmanager
def _translate_errors(name: str) -> Iterator[None]:
    try:
        yield
    except NotThere:
        failure: OSError = FileNotFoundError(name)
    except NotAuthorized as error:
        failure = PermissionError(error.message)
    except (LakeUnavailable, LakeFull, Unknown) as error:
        failure = OSError(error.message)
    else:
        return
    raise failure from None
