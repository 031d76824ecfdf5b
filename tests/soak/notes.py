"""The producers' notes of a topic, for readers: which rows a query must return, and which it may."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Position = tuple[int, int]
"""Partition and offset."""


@dataclass(frozen=True)
class Expected:
    """Places of rows by the notes. `certain`: acknowledged and committed, and selected. `refused`: no row may be there.

    A row elsewhere is of a value whose producer got no answer.
    """

    certain: frozenset[Position]
    refused: frozenset[Position]


def read_notes(
    paths: Iterable[Path],
    within: Callable[[Position], bool],
    keep: Callable[[dict[str, Any]], bool],
    *,
    committed: bool,
) -> Expected:
    """Returns the positions of rows `within` some offsets that `keep` selects.

    `committed`: the feed reads committed records only.
    """
    lines = [line for path in paths for line in _parse(path)]
    ended = {line["transaction"]: line["ended"] for line in lines if "ended" in line}
    certain, refused = set[Position](), set[Position]()
    for line in lines:
        if "sequence" not in line:
            continue
        end = ended.get(line["transaction"], "unknown") if line["transaction"] and committed else "committed"
        if line["offset"] is None or end == "unknown":
            continue
        position = (line["partition"], line["offset"])
        if not within(position):
            continue
        fits = end != "aborted" and line["fits"] and keep(line)
        (certain if fits else refused).add(position)
    return Expected(frozenset(certain), frozenset(refused))


def _parse(path: Path) -> Iterator[dict[str, Any]]:
    text = path.read_bytes()
    for line in text[: text.rfind(b"\n") + 1].splitlines():
        yield json.loads(line)
