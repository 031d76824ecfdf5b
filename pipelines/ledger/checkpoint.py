"""A fold of the ledger up to a number, in one file: it keeps reading cheap and is never needed for truth.

Partitions are named once, in a table; everything else refers to them by index. A checkpoint that does not parse is
ignored: an older one, or the log itself, does the job.
"""

from __future__ import annotations

import base64
import json
import operator
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from sluice.pipelines.ledger.entries import OriginItem
from sluice.pipelines.ledger.fold import Batch, State
from sluice.pipelines.ledger.pins import Pins
from sluice.pipelines.vocabulary.kafka import Key
from sluice.pipelines.vocabulary.ranges import Range

FORMAT = 1
WITH_GAPS = 2
"""The format for a ledger that lost entries. A Sluice that does not know gaps ignores it."""

_BATCHES: TypeAdapter[list[Batch]] = TypeAdapter(list[Batch])
_ACCOUNTED = ("landed", "lost", "skipped", "retired")


def dump(state: State) -> bytes:
    """The state as JSON; `load` gives an equal one."""
    keys = sorted(state.origins)
    index = {key: i for i, key in enumerate(keys)}
    return json.dumps(
        {
            "format": WITH_GAPS if state.gaps else FORMAT,
            "number": state.number,
            "ledger_id": state.ledger_id,
            "cluster": state.cluster,
            "first_window": state.first_window,
            "last_mark": state.last_mark,
            "shapes": list(state.shapes.items()),
            "schemas": [[name, list(columns.items())] for name, columns in state.schemas.items()],
            "table": list(state.table.items()),
            "evolved": list(state.evolved.items()),
            "void": state.void,
            "gaps": state.gaps,
            "ahead": _by_index(state.ahead, index),
            "replaced": sorted(state.replaced),
            "keys": keys,
            "current": [index[k] for k in state.current.values() if k in index],
            "origins": [_origin(state.origins[k]) for k in keys],
            "batches": _BATCHES.dump_python(list(state.batches.values()), mode="json"),
            **{name: _by_index(getattr(state, name), index) for name in _ACCOUNTED},
            "commits": _by_index(state.commits, index),
            "intents": _by_index(state.intents, index, sorted),
            "moved": _by_index(state.moved, index),
            "superseded": _by_index(state.superseded, index),
            "epochs": _by_index(state.epochs, index),
            "floors": _by_index(state.floors, index),
            "published_in": [[w, n] for w, n in state.published_in.items()],
            "boundaries": _pins(state, index),
            "boundary_times": state.boundary_times,
            "by_marker": list(state.by_marker.items()),
        },
        separators=(",", ":"),
    ).encode()


def load(data: bytes) -> State | None:
    """The state in a checkpoint; None for anything that is not one of this format."""
    try:
        raw = json.loads(data)
        return _state(raw) if raw["format"] in (FORMAT, WITH_GAPS) else None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, zlib.error):
        return None


def _state(raw: dict[str, Any]) -> State:
    keys = [_key(*k) for k in raw["keys"]]
    origins = {k: OriginItem(key=k, **item) for k, item in zip(keys, raw["origins"], strict=True)}
    return State(
        number=raw["number"],
        ledger_id=raw["ledger_id"],
        cluster=raw["cluster"],
        first_window=raw["first_window"],
        last_mark=raw["last_mark"],
        shapes=dict(raw["shapes"]),
        schemas={name: dict(columns) for name, columns in raw["schemas"]},
        table=dict(raw["table"]),
        evolved=dict(raw["evolved"]),
        void=tuple(raw["void"]),
        gaps=tuple((int(number), int(after)) for number, after in raw.get("gaps", ())),
        ahead=_by_key(raw.get("ahead", []), keys, int),
        replaced=frozenset(raw["replaced"]),
        origins=origins,
        current={keys[i].tp: keys[i] for i in raw["current"]},
        batches={b.id: b for b in _BATCHES.validate_python(raw["batches"])},
        **{name: _by_key(raw[name], keys, _ranges) for name in _ACCOUNTED},
        commits=_by_key(raw["commits"], keys, int),
        intents=_by_key(raw["intents"], keys, frozenset),
        moved=_by_key(raw["moved"], keys, int),
        superseded=_by_key(raw["superseded"], keys, _numbered_ranges),
        epochs=_by_key(raw["epochs"], keys, tuple),
        floors=_by_key(raw["floors"], keys, tuple),
        published_in={w: tuple(n) for w, n in raw["published_in"]},
        boundaries=_boundaries(raw["boundaries"], raw["boundary_times"], keys),
        boundary_times=tuple(raw["boundary_times"]),
        by_marker=dict(raw.get("by_marker", ())),  # older checkpoints lack it
    )


def _origin(item: OriginItem) -> dict[str, Any]:
    return item.model_dump(exclude={"key"})


def _by_index(
    values: Mapping[Key, Any], index: Mapping[Key, int], shape: Callable[[Any], Any] = lambda v: v
) -> list[list[Any]]:
    return [[index[k], shape(v)] for k, v in values.items() if k in index]


def _by_key(pairs: list[list[Any]], keys: list[Key], shape: Callable[[Any], Any]) -> dict[Key, Any]:
    return {keys[i]: shape(v) for i, v in pairs}


def _key(topic: str, partition: int, incarnation: str) -> Key:
    """Raises TypeError for parts of the wrong type: such a key would not sort."""
    if not (isinstance(topic, str) and isinstance(incarnation, str)):
        raise TypeError("a topic and an incarnation are text")
    return Key(topic, operator.index(partition), incarnation)


def _range(start: int, end: int) -> Range:
    return Range(operator.index(start), operator.index(end))


def _ranges(raw: list[list[int]]) -> tuple[Range, ...]:
    return tuple(_range(*r) for r in raw)


def _numbered_ranges(raw: list[Any]) -> tuple[tuple[int, Range], ...]:
    return tuple((operator.index(number), _range(*r)) for number, r in raw)


def _pins(state: State, index: Mapping[Key, int]) -> dict[str, Any]:
    """Millions of boundaries in a few bytes each.

    `keys` and `counts` say which partitions have how many. `places` (indexes into `boundary_times`) and `offsets` hold
    those of all partitions, one after the other, packed as differences.
    """
    held = {index[k]: pins for k, pins in state.boundaries.items() if k in index and pins}
    times = np.array(state.boundary_times, np.int64)
    places = [np.searchsorted(times, pins.times) for pins in held.values()]
    offsets = [np.array(pins.offsets, np.int64) for pins in held.values()]
    return {
        "keys": list(held),
        "counts": [len(p) for p in places],
        "places": _pack(places),
        "offsets": _pack(offsets),
    }


def _pack(columns: Sequence[Any]) -> str:
    whole = np.concatenate(columns) if columns else np.empty(0)
    steps = np.diff(whole.astype("<i8"), prepend=0)
    return base64.b64encode(zlib.compress(steps.tobytes(), 1)).decode()


def _unpack(text: str, counts: Sequence[int]) -> Iterator[array[int]]:
    size = 8 * sum(counts)
    data = zlib.decompressobj().decompress(base64.b64decode(text), size + 1)  # never more than was announced
    if len(data) != size:
        raise ValueError("not as many boundaries as announced")
    steps = np.frombuffer(data, "<i8")
    for column in np.split(np.cumsum(steps), np.cumsum(counts)[:-1]):
        yield array("q", column.astype(np.int64).tobytes())


def _boundaries(raw: dict[str, Any], times: Sequence[int], keys: Sequence[Key]) -> dict[Key, Pins]:
    counts, known = raw["counts"], np.array(times, np.int64)
    if not counts:
        return {}
    columns = zip(raw["keys"], _unpack(raw["places"], counts), _unpack(raw["offsets"], counts), strict=True)
    return {keys[i]: Pins(array("q", known[np.asarray(at)].tobytes()), offsets) for i, at, offsets in columns}
