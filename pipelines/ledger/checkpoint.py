"""A fold of the ledger up to a number, in one file: a cache that keeps reading cheap.

Partitions are listed once, in a table; everything else refers to them by index. Data that grows with a feed's age
(finished batches, boundaries, publications by window, superseded ranges) is packed in columns: some bytes per window
for all partitions, and about two bytes per boundary. Common data of partitions is stored once: the times of boundaries,
and the numbers of superseding entries. A checkpoint that does not parse is ignored: an older one or the log is read.

In text, a column stores differences in planes of bytes of one weight, without empty upper planes: this compresses well
and is fast to read. The first byte is the number of planes, with the flag `_SIGNED` if a difference is negative.
Formerly there were always eight planes, and the first byte was zlib's.
"""

from __future__ import annotations

import base64
import json
import operator
import struct
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from itertools import accumulate
from typing import Any

from pydantic import TypeAdapter

from sluice.pipelines.lake.paths import FORMER_PREFIX, PREFIX, FolderPrefix
from sluice.pipelines.ledger.batches import COLUMNS, Batch, Batches, BatchHistory
from sluice.pipelines.ledger.columns import (
    MOST,
    NONE,
    Pins,
    Published,
    Superseded,
    inflate,
)
from sluice.pipelines.ledger.entries import OriginItem
from sluice.pipelines.ledger.fold import NO_PINS, State
from sluice.pipelines.model.kafka import Key, Range, Tail
from sluice.pipelines.model.plans import Request

FORMAT, ERASED_FORMAT = 7, 8
"""A Sluice that knows another format only ignores it, and folds the log. The second is that of a fold with erased
offsets, or with holds: an older Sluice that began there would not stop at their entries, and could land the records
again, or expire windows on hold."""

_BATCHES: TypeAdapter[list[Batch]] = TypeAdapter(list[Batch])
_REQUESTS: TypeAdapter[list[Request]] = TypeAdapter(list[Request])
_HOLDS: TypeAdapter[dict[int, tuple[int | None, int | None]]] = TypeAdapter(dict[int, tuple[int | None, int | None]])
_SIGNED, _WHOLE = 16, (1 << 64) - 1
SHORT = 4096
"""Columns up to this length are read without numpy, whose import takes longer."""
_ACCOUNTED = ("landed", "lost", "skipped", "retired")
_ERASED = ("erased", "erasing")


def dump(state: State) -> bytes:
    """Returns the state as packed JSON, from which `load` restores an equal one."""
    return zlib.compress(dump_state(state), 1)


def dump_state(state: State) -> bytes:
    """Returns the JSON in a checkpoint. `load` accepts it, too."""
    # Two dozen fields are by partition. Each refers to a partition by its place in `keys`, and what grows with a feed's
    # age is packed: a checkpoint is read by each command.
    import numpy as np

    keys = sorted(state.origins)
    index, times = {key: i for i, key in enumerate(keys)}, np.array(state.boundary_times, np.int64)
    past = state.batches.past
    return json.dumps(
        {
            # The older format where that is enough: another Sluice on the same lake may not know the newer one yet.
            "format": ERASED_FORMAT if state.erased or state.holds else FORMAT,
            "number": state.number,
            "head": state.head,
            "ledger_id": state.ledger_id,
            "cluster": state.cluster,
            "first_window": state.first_window,
            "folder_prefix": state.folder_prefix,
            "corrected": state.corrected,
            "last_mark": state.last_mark,
            "shapes": list(state.shapes.items()),
            "schemas": [[name, list(columns.items())] for name, columns in state.schemas.items()],
            "table": list(state.table.items()),
            "evolved": list(state.evolved.items()),
            "void": state.void,
            "gaps": state.gaps,
            "ahead": _by_index(state.ahead, index),
            "ended": _by_index(state.ended, index),
            "taken": list(state.taken.items()),
            "holds": state.holds,
            "replaced": list(state.replaced.items()),
            "keys": keys,
            "current": [index[k] for k in state.current.values() if k in index],
            "origins": [state.origins[k].model_dump(exclude={"key"}) for k in keys],
            "batches": _BATCHES.dump_python(list(state.batches.held.values()), mode="json", by_alias=True),
            "past": {"requests": _REQUESTS.dump_python(past.requests, mode="json"), "columns": pack(past.columns)},
            **{name: _by_index(getattr(state, name), index) for name in (*_ACCOUNTED, *_ERASED)},
            "commits": _by_index(state.commits, index),
            "intents": _by_index(state.intents, index, sorted),
            "moved": _by_index(state.moved, index),
            "superseded": _dump_superseded(state, index),
            "epochs": _by_index(state.epochs, index),
            "tails": _by_index(state.tails, index, astuple),
            "floors": _by_index(state.floors, index),
            "published_in": {"columns": pack([state.published_in.windows, state.published_in.numbers])},
            # Partitions share nearly all boundary times, so these are stored once; a partition has its offsets at them.
            "boundaries": _dump_pins({index[k]: p for k, p in state.boundaries.items() if k in index and p}, times),
            "boundary_times": pack([state.boundary_times]),
            "by_marker": pack([state.by_marker.keys(), state.by_marker.values()]),
            "against": pack([state.against.keys(), state.against.values()]),
        },
        separators=(",", ":"),
    ).encode()


def load(data: bytes) -> State | None:
    """Returns the state in a checkpoint; None if the data is not a checkpoint of a known format."""
    try:
        raw = json.loads(data if data[:1] == b"{" else inflate(data, MOST))
        return _state(raw) if raw["format"] in (FORMAT, ERASED_FORMAT) else None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, zlib.error):
        return None


def _state(raw: dict[str, Any]) -> State:
    # Each fault raises: a damaged cache must not become a state, and `load` makes an error mean "no checkpoint".
    # So numbers pass through `operator.index`, texts through `_check_text`, and columns are counted (`strict=True`).
    keys = [_build_key(*k) for k in raw["keys"]]
    origins = {k: OriginItem(key=k, **item) for k, item in zip(keys, raw["origins"], strict=True)}
    times = unpack_all(raw["boundary_times"], 1)[0]
    by_marker, against = (
        {int(t): int(n) for t, n in zip(*unpack_all(raw[name], 2), strict=True)} if name in raw else {}
        for name in ("by_marker", "against")  # checkpoints of earlier builds lack the second
    )
    boundaries = _load_boundaries(raw["boundaries"], times, keys)
    return State(
        number=raw["number"],
        head=_check_text(raw.get("head", "")),
        ledger_id=raw["ledger_id"],
        cluster=raw["cluster"],
        corrected=raw.get("corrected", -1),
        first_window=raw["first_window"],
        folder_prefix=_prefix(raw["folder_prefix"]),
        last_mark=raw["last_mark"],
        shapes=dict(raw["shapes"]),
        schemas={name: dict(columns) for name, columns in raw["schemas"]},
        table=dict(raw["table"]),
        evolved=dict(raw["evolved"]),
        void=tuple(raw["void"]),
        gaps=tuple((int(number), int(after)) for number, after in raw.get("gaps", ())),
        ahead=_by_key(raw.get("ahead", []), keys, int),
        ended=_by_key(raw["ended"], keys, operator.index),
        taken={_check_text(ledger): operator.index(number) for ledger, number in raw.get("taken", ())},
        holds=_HOLDS.validate_python(raw.get("holds", {})),
        replaced={_check_text(path): operator.index(number) for path, number in raw["replaced"]},
        origins=origins,
        current={keys[i].tp: keys[i] for i in raw["current"]},
        batches=Batches(_BATCHES.validate_python(raw["batches"]), _load_past(raw["past"])),
        **{name: _by_key(raw[name], keys, _load_ranges) for name in _ACCOUNTED},
        **{name: _by_key(raw.get(name, []), keys, _load_ranges) for name in _ERASED},
        commits=_by_key(raw["commits"], keys, int),
        intents=_by_key(raw["intents"], keys, frozenset),
        moved=_by_key(raw["moved"], keys, int),
        superseded=_load_superseded(raw["superseded"], keys, boundaries),
        epochs=_by_key(raw["epochs"], keys, tuple),
        tails=_by_key(raw.get("tails", []), keys, lambda fields: Tail(*map(operator.index, fields))),
        floors=_by_key(raw["floors"], keys, tuple),
        published_in=Published(*map(_to_array, unpack_all(raw["published_in"]["columns"], 2))),
        boundaries=boundaries,
        boundary_times=tuple(times.tolist()),
        by_marker=by_marker,
        against=against,
    )


def _prefix(value: Any) -> FolderPrefix:
    if value == PREFIX:
        return PREFIX
    if value == FORMER_PREFIX:
        return FORMER_PREFIX
    raise ValueError("no prefix that we know")


def _check_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a path is text")
    return value


# -- columns


def pack(columns: Iterable[Iterable[int]]) -> list[str]:
    """Returns each column of 64-bit numbers as text."""
    import numpy as np

    return [_pack(np.array(c if isinstance(c, array | np.ndarray) else [*c], np.int64)) for c in columns]


def _pack(column: Any) -> str:
    import numpy as np

    steps = np.diff(column.astype("<i8"), prepend=np.int64(0))
    signed = bool((steps < 0).any())
    if signed:  # alternating: 0, -1, 1, -2, …
        steps = (steps << 1) ^ (steps >> 63)
    count = (int(steps.view("<u8").max(initial=0)).bit_length() + 7) // 8 or 1
    planes = steps.view(np.uint8).reshape(-1, 8)[:, :count].T.tobytes()
    return base64.b64encode(bytes([count | (_SIGNED if signed else 0)]) + zlib.compress(planes, 6)).decode()


def unpack_all(texts: Sequence[str], count: int) -> list[Any]:
    """Returns `count` columns."""
    if len(texts) != count:
        raise ValueError("not as many columns as there are")
    return [unpack(text) for text in texts]


def unpack(text: str, limit: int = MOST) -> Any:
    """Returns the column: an array, or a numpy array if it is long."""
    data = base64.b64decode(text)
    count, signed = data[0] & ~_SIGNED, bool(data[0] & _SIGNED)
    planes = inflate(data[1:], limit)
    if not 0 < count <= 8 or len(planes) % count:
        raise ValueError("not a column")
    length = len(planes) // count
    if length <= SHORT:
        wide = bytearray(8 * length)
        for i in range(count):
            wide[i::8] = planes[i * length : (i + 1) * length]
        numbers = struct.unpack(f"<{length}Q", wide)
        sums = accumulate((n >> 1) ^ -(n & 1) for n in numbers) if signed else accumulate(numbers)
        return array("q", [((n - NONE) & _WHOLE) + NONE for n in sums])
    import numpy as np

    size = 4 if count <= 4 else 8
    steps = np.zeros(length, f"<u{size}")
    for i, plane in enumerate(np.frombuffer(planes, np.uint8).reshape(count, -1)):
        steps |= plane.astype(steps.dtype) << steps.dtype.type(8 * i)
    if signed:
        steps = (steps >> 1) ^ (~(steps & 1) + 1)
        return np.cumsum(steps.view(f"<i{size}"), dtype=np.int64)
    return np.cumsum(steps if size == 4 else steps.view(np.int64), dtype=np.int64)


def cut(column: Sequence[int], counts: Sequence[int]) -> Iterator[Sequence[int]]:
    """Cut the column into pieces of these lengths. Raises ValueError if they do not add up to its length."""
    ends = list(accumulate(map(operator.index, counts)))
    if (ends[-1] if ends else 0) != len(column) or any(n < 0 for n in counts):
        raise ValueError("not as many as announced")
    return (column[end - n : end] for end, n in zip(ends, counts, strict=True))


def _load_past(raw: dict[str, Any]) -> BatchHistory:
    columns = unpack_all(raw["columns"], len(COLUMNS))
    requests = _REQUESTS.validate_python(raw["requests"])
    indexes = columns[COLUMNS.index("request")].tolist()
    if len({len(c) for c in columns}) != 1 or not all(0 <= i < len(requests) for i in indexes):
        raise ValueError("not one value for each batch")
    return BatchHistory(map(_to_array, columns), requests)


def _dump_superseded(state: State, index: Mapping[Key, int]) -> dict[str, Any]:
    """Returns numbers, starts and ends of the superseded ranges of each partition as columns.

    `starts` and `ends` are usually indexes of boundaries in the partition; other offsets are stored as −1 − offset.
    """
    import numpy as np

    columns = dict[int, tuple[Any, ...]]()
    for key, s in state.superseded.items():
        if key in index:
            boundary_offsets = np.array(state.boundaries.get(key, NO_PINS).offsets, np.int64)
            columns[index[key]] = (
                np.array(s.numbers, np.int64),
                _to_positions(boundary_offsets, s.starts),
                _to_positions(boundary_offsets, s.ends),
            )
    # Equal columns are stored once: windows are merged for many partitions at once, and boundaries are indexes.
    once = dict[tuple[bytes, ...], int]()
    like = [once.setdefault(tuple(c.tobytes() for c in of), len(once)) for of in columns.values()]
    unique = [[np.frombuffer(of[n], np.int64) for of in once] for n in range(3)]
    return {
        "keys": list(columns),
        "like": like,
        "counts": [len(c) for c in unique[0]],
        "columns": pack(_join(c) for c in unique),
    }


def _to_positions(boundary_offsets: Any, offsets: array[int]) -> Any:
    """Returns the index of each offset in the sorted boundary offsets, or −1 − offset if it is missing."""
    import numpy as np

    wanted = np.array(offsets, np.int64)
    if not len(boundary_offsets):
        return -1 - wanted
    at = np.minimum(np.searchsorted(boundary_offsets, wanted), len(boundary_offsets) - 1)
    return np.where(boundary_offsets[at] == wanted, at, -1 - wanted)


def _from_positions(boundary_offsets: Any, positions: Any) -> array[int]:
    """Returns the offsets that `_to_positions` converted. Raises IndexError for an invalid index."""
    out, there = -1 - positions, positions >= 0
    out[there] = boundary_offsets[positions[there]]
    return _to_array(out)


def _join(columns: Sequence[Any]) -> Any:
    import numpy as np

    return np.concatenate(columns) if columns else np.empty(0, np.int64)


def _load_superseded(raw: dict[str, Any], keys: Sequence[Key], pins: Mapping[Key, Pins]) -> dict[Key, Superseded]:
    pieces = zip(*(cut(c, raw["counts"]) for c in unpack_all(raw["columns"], 3)), strict=True)
    once = [(_to_array(numbers), starts, ends) for numbers, starts, ends in pieces]
    largest = [max(max(c.tolist(), default=-1) for c in bounds) for _, *bounds in once]
    out = {}
    for i, which in zip(raw["keys"], raw["like"], strict=True):
        numbers, *bounds = once[operator.index(which)]
        offsets = pins[keys[i]].offsets if keys[i] in pins else NO_PINS.offsets
        if largest[which] >= len(offsets):
            raise ValueError("index beyond the boundaries")
        out[keys[i]] = Superseded.unread(numbers, partial(_load_bounds, offsets, *bounds))
    return out


def _load_bounds(boundary_offsets: array[int], starts: Any, ends: Any) -> tuple[array[int], array[int]]:
    import numpy as np

    offsets = np.array(boundary_offsets, np.int64)
    return _from_positions(offsets, np.asarray(starts)), _from_positions(offsets, np.asarray(ends))


def _by_index(
    values: Mapping[Key, Any], index: Mapping[Key, int], shape: Callable[[Any], Any] = lambda v: v
) -> list[list[Any]]:
    return [[index[k], shape(v)] for k, v in values.items() if k in index]


def _by_key(pairs: list[list[Any]], keys: list[Key], shape: Callable[[Any], Any]) -> dict[Key, Any]:
    return {keys[i]: shape(v) for i, v in pairs}


def _build_key(topic: str, partition: int, incarnation: str) -> Key:
    """Build a key. Raises TypeError for parts of the wrong type: the key would not sort."""
    if not (isinstance(topic, str) and isinstance(incarnation, str)):
        raise TypeError("a topic and an incarnation are text")
    return Key(topic, operator.index(partition), incarnation)


def _load_ranges(raw: list[list[int]]) -> tuple[Range, ...]:
    return tuple(Range(operator.index(start), operator.index(end)) for start, end in raw)


def _dump_pins(pins_by_time: Mapping[int, Pins], times: Any) -> dict[str, Any]:
    """Returns millions of boundaries in a few bytes each. `times` are those of all partitions.

    `keys` and `counts` are the partitions and their numbers of boundaries. Indexes into the times are usually
    consecutive from `begins` on; if this is -1, they are in the first column. `offsets` has each partition's first
    offset, and the second column the increments of all partitions in sequence.
    """
    import numpy as np

    positions = [np.searchsorted(times, pins.times) for pins in pins_by_time.values()]
    begins = [int(p[0]) if int(p[-1]) - int(p[0]) == len(p) - 1 else -1 for p in positions]
    others = [p for p, begin in zip(positions, begins, strict=True) if begin < 0]
    gained, since = list[Any](), 0
    for pins in pins_by_time.values():
        offsets = np.array(pins.offsets, np.int64)
        gained.append(offsets - offsets[0] + since)
        since = int(gained[-1][-1])
    return {
        "keys": list(pins_by_time),
        "counts": [len(p) for p in positions],
        "begins": begins,
        "offsets": [p.offsets[0] for p in pins_by_time.values()],
        "columns": pack([_join(others), _join(gained)]),
    }


def _load_boundaries(raw: dict[str, Any], times: Any, keys: Sequence[Key]) -> dict[Key, Pins]:
    counts, begins = raw["counts"], raw["begins"]
    positions, gained = (unpack(text, 8 * sum(counts)) for text in raw["columns"])
    explicit = cut(positions, [n for n, begin in zip(counts, begins, strict=True) if begin < 0])
    out: dict[Key, Pins] = {}
    alike: dict[tuple[int, int], array[int]] = {}
    rows = zip(raw["keys"], counts, begins, raw["offsets"], cut(gained, counts), strict=True)
    for i, count, begin, first, column in rows:
        if begin < 0:
            at = array("q", [times[position] for position in next(explicit)])
        elif (at := alike.get((begin, count))) is None:  # type: ignore[assignment]
            at = alike[begin, count] = _to_array(times[begin : begin + count])
        if len(at) != count or not count:
            raise ValueError("not as many boundaries as announced")
        shift = operator.index(first) - int(column[0])
        values: Any = column
        shifted = [n + shift for n in values] if isinstance(values, array) else values + shift
        out[keys[i]] = Pins(at, _to_array(shifted))
    return out


def _to_array(column: Any) -> array[int]:
    if isinstance(column, array | list):
        return array("q", column)
    out = array("q")
    out.frombytes(column.astype("q").tobytes())
    return out
