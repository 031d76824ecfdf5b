"""A file of the lake as a listing shows it."""

from __future__ import annotations

from typing import NamedTuple


class Stat(NamedTuple):
    """`tag` is another as soon as the file's bytes are others. It is empty where a store does not tell."""

    path: str
    size: int
    tag: str
