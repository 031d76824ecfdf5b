"""Judges a republish by the records of the old and the new topic in Kafka's console consumer, and by the map's files.

Records are identified by their content: the tests give each record of the old topic another timestamp. Uses no code of
Sluice.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.checker.facts import EvidenceError

Position = tuple[int, int]
"""Partition and offset."""


@dataclass(frozen=True)
class MapEntry:
    """A record's positions in the old and the new topic, by the map."""

    old: Position
    new: Position


def collect_contents(rows: Iterable[Mapping[str, Any]], topic: str) -> dict[Position, tuple[Any, ...]]:
    """Returns the content of each record of a topic in the lines of `tools.scan`."""
    return {
        (r["partition"], r["offset"]): (r["key"], r["value"], r["timestamp"], json.dumps(r["headers"]))
        for r in rows
        if r["topic"] == topic and "offset" in r
    }


def read_map(folder: Path, topic: str, to: str) -> list[MapEntry]:
    """Read the map of a finished republish from its folder in the lake. Raises EvidenceError if it is not finished."""
    done = folder / "done.json"
    if not done.is_file():
        raise EvidenceError(f"{folder} holds no finished republish")
    entries = []
    for name in json.loads(done.read_bytes())["files"]:
        for r in pq.read_table(folder / "map" / name).to_pylist():
            if (r["topic"], r["to_topic"]) != (topic, to):
                raise EvidenceError(f"{name} names {r['topic']} and {r['to_topic']}")
            entries.append(MapEntry((r["partition"], r["offset"]), (r["to_partition"], r["to_offset"])))
    return entries


def find_problems(
    old: Mapping[Position, tuple[Any, ...]],
    new: Mapping[Position, tuple[Any, ...]],
    entries: Sequence[MapEntry],
    requested: Collection[Position],
    *,
    same_partition: bool,
) -> list[str]:
    """Returns the problems; none if each requested record is there once, complete, in order, and mapped correctly.

    `same_partition`: each record must be in the partition of its old number.
    """
    by_content = {content: position for position, content in old.items()}
    if len(by_content) < len(old):
        raise EvidenceError("two records of the old topic have the same content")
    problems, new_positions, newest = list[str](), dict[Position, Position](), dict[tuple[int, int], int]()
    for position, content in sorted(new.items()):
        origin = by_content.get(content)
        if origin is None:
            problems.append(f"{position} is no record of the old topic: {content}")
            continue
        if origin not in requested:
            problems.append(f"{origin} was not asked for, and is at {position}")
        if origin in new_positions:
            problems.append(f"{origin} is there twice, at {new_positions[origin]} and {position}")
            continue
        new_positions[origin] = position
        if same_partition and origin[0] != position[0]:
            problems.append(f"{origin} is in another partition, at {position}")
        route = (origin[0], position[0])
        if origin[1] < newest.get(route, -1):
            problems.append(f"{origin} is at {position}, behind a later record of its old partition")
        newest[route] = max(origin[1], newest.get(route, -1))
    problems += [f"{position} is not there" for position in sorted(requested) if position not in new_positions]
    positions = {w.old: w.new for w in entries}
    if len(positions) < len(entries):
        problems.append("the map names an old record twice")
    problems += [
        f"the map says of {o} that it is at {n}, and it is at {new_positions.get(o)}"
        for o, n in sorted(positions.items())
        if new_positions.get(o) != n
    ]
    problems += [f"the map does not say where {o} is" for o in sorted(new_positions) if o not in positions]
    return problems
