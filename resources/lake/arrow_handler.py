"""Objects of a store as a file system of Arrow, which only reads files by name: the ledger names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import pyarrow as pa
from pyarrow.fs import FileInfo, FileSelector, FileSystemHandler, FileType

from sluice.resources.lake.store_client import NotThere, StoreClient
from sluice.resources.lake.streams import ObjectReader


class ArrowFiles(FileSystemHandler):  # type: ignore[misc]
    """The files of a bucket, by `bucket/key`. Raises FileNotFoundError, and the errors of the lake."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArrowFiles) and other._client == self._client

    def __ne__(self, other: object) -> bool:
        return not self == other

    def get_type_name(self) -> str:
        return "sluice"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: Sequence[str]) -> list[FileInfo]:
        return [self._describe(path) for path in paths]

    def _describe(self, path: str) -> FileInfo:
        try:
            return FileInfo(path, FileType.File, size=self._client.head(_remove_bucket(path)).size)
        except NotThere:
            return FileInfo(path, FileType.NotFound)

    def open_input_file(self, path: str) -> Any:
        try:
            return pa.PythonFile(ObjectReader(self._client, _remove_bucket(path)), mode="r")
        except NotThere:
            raise FileNotFoundError(path) from None

    open_input_stream = open_input_file

    def get_file_info_selector(self, selector: FileSelector) -> NoReturn:
        raise NotImplementedError("files are read by name")

    def _refuse(self, *_: Any) -> NoReturn:
        raise NotImplementedError("the lake is only read")

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = _refuse
    move = copy_file = open_output_stream = open_append_stream = _refuse


def _remove_bucket(path: str) -> str:
    return path.partition("/")[2]
