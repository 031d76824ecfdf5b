"""A republish judged by what Kafka's console consumer saw of the old topic and of the new one, and by the map's files.

Records are told apart by what is in them: whoever makes the old topic gives each another time. No Sluice here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.checker.facts import EvidenceError

Place = tuple[int, int]
"""Partition and offset."""


@dataclass(frozen=True)
class Went:
    """What the map says of one record."""

    old: Place
    new: Place


def seen(rows: Iterable[Mapping[str, Any]], topic: str) -> dict[Place, tuple[Any, ...]]:
    """What is in each record of a topic, of what `tools.scan` wrote."""
    return {
        (r["partition"], r["offset"]): (r["key"], r["value"], r["timestamp"], json.dumps(r["headers"]))
        for r in rows
        if r["topic"] == topic and "offset" in r
    }


def went(folder: Path, topic: str, to: str) -> list[Went]:
    """The map of a finished republish, from its folder in the lake. Raises EvidenceError where it is not finished."""
    done = folder / "done.json"
    if not done.is_file():
        raise EvidenceError(f"{folder} holds no finished republish")
    found = []
    for name in json.loads(done.read_bytes())["files"]:
        for r in pq.read_table(folder / "map" / name).to_pylist():
            if (r["topic"], r["to_topic"]) != (topic, to):
                raise EvidenceError(f"{name} names {r['topic']} and {r['to_topic']}")
            found.append(Went((r["partition"], r["offset"]), (r["to_partition"], r["to_offset"])))
    return found


def broken(
    old: Mapping[Place, tuple[Any, ...]],
    new: Mapping[Place, tuple[Any, ...]],
    moved: Sequence[Went],
    asked: Collection[Place],
    *,
    kept: bool,
) -> list[str]:
    """What is wrong; nothing: each record asked for is there once, whole, in order, and the map says where.

    `kept`: each must be in the partition of its old number.
    """
    by_content = {content: place for place, content in old.items()}
    if len(by_content) < len(old):
        raise EvidenceError("two records of the old topic cannot be told apart")
    found, first, newest = list[str](), dict[Place, Place](), dict[tuple[int, int], int]()
    for place, content in sorted(new.items()):
        came = by_content.get(content)
        if came is None:
            found.append(f"{place} is no record of the old topic: {content}")
            continue
        if came not in asked:
            found.append(f"{came} was not asked for, and is at {place}")
        if came in first:
            found.append(f"{came} is there twice, at {first[came]} and {place}")
            continue
        first[came] = place
        if kept and came[0] != place[0]:
            found.append(f"{came} is in another partition, at {place}")
        way = (came[0], place[0])
        if came[1] < newest.get(way, -1):
            found.append(f"{came} is at {place}, behind a later record of its old partition")
        newest[way] = max(came[1], newest.get(way, -1))
    found += [f"{place} is not there" for place in sorted(asked) if place not in first]
    told = {w.old: w.new for w in moved}
    if len(told) < len(moved):
        found.append("the map names an old record twice")
    found += [f"the map says of {o} that it is at {n}, and it is at {first.get(o)}" for o, n in sorted(told.items())
              if first.get(o) != n]  # fmt: skip
    found += [f"the map does not say where {o} is" for o in sorted(first) if o not in told]
    return found
