"""How the records of a piece differ from their schema: unknown fields, and values that do not fit.

Nothing is read of records that fit and have no unknown fields. Counts are exact. Types are
found by trying them on the values themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from sluice.pipelines.model.receipts import Drift, DriftKind
from sluice.pipelines.records.columns.loops import OUT_OF_RANGE
from sluice.pipelines.records.columns.nodes import SchemaNode
from sluice.pipelines.records.columns.pieces import RefusedRecords
from sluice.pipelines.records.columns.spans import ODD, SIZE_BITS
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.json import fill, scan, unknown
from sluice.pipelines.records.json.columns import make_column
from sluice.pipelines.schema.schema import MOST_NAME, Encoding, Kind, Type, path_below
from sluice.pipelines.schema.wider import MOST_DIGITS, SIGNED, UNSIGNED, holds, join_texts

OTHERS = "…"
"""The name under which further fields are counted when there are too many."""
_KINDS = {
    unknown.BOOL: "bool",
    unknown.INT: "int64",
    unknown.FLOAT: "float64",
    unknown.BIG: "json",
    unknown.TEXT: "string",
    unknown.NESTED: "json",
}
_FAULTS = (scan.WRONG_TYPE, OUT_OF_RANGE, fill.INEXACT, fill.NO_TIME, fill.NO_BASE64, fill.NO_NUMBER)
_WIDENING = {OUT_OF_RANGE: DriftKind.OUT_OF_RANGE, fill.INEXACT: DriftKind.INEXACT}


@dataclass(frozen=True, slots=True)
class NewFields:
    """Fields of a piece's rows that the schema does not name.

    `firsts` holds, for each row, the index in `called` of its first field in a struct that allows no others: −1 for
    none, and an index beyond the end for a field without a name of its own. `called` are their paths.
    """

    drift: tuple[Drift, ...]
    firsts: Array
    called: tuple[str, ...]

    @property
    def has_refused(self) -> bool:
        """True if any row has a field that its struct does not allow."""
        return bool((self.firsts >= 0).any())


class UnknownFields:
    """Finds fields that a schema does not name, in piece after piece. In structs of the paths `closed` none is allowed;
    of all structs, if `closed` is None."""

    def __init__(self, nodes: Sequence[SchemaNode], tables: scan.ScanTables, closed: Collection[str] | None) -> None:
        self._nodes, self._tables, self._names = nodes, tables, unknown.no_names()
        self._closed = np.array([closed is None or n.path in closed for n in nodes], np.uint8)
        self._nested = any(n.type.kind is Kind.STRUCT for n in nodes[1:])

    def of(self, extra: pa.Array, offsets: Array) -> NewFields | None:
        """The fields in the column `_extra` of rows with these offsets; None when there are none."""
        if extra.null_count == len(extra):
            return None
        names = self._names
        names.used[0], names.usage[:] = 0, 0
        names.usage[:, unknown.LAST] = -1
        firsts = np.empty(len(extra), np.int32)
        _, ends, data = extra.buffers()
        ends = np.frombuffer(ends, np.int32)[: len(extra) + 1]
        unknown.collect_names(np.frombuffer(data, np.uint8), ends, self._tables, self._closed, names, firsts)
        called = tuple(map(self._format_path, range(int(names.used[0]))))
        rows = [(name, names.usage[i]) for i, name in enumerate(called)]
        if names.usage[unknown.MOST_NAMES, unknown.COUNT]:
            rows.append((OTHERS, names.usage[unknown.MOST_NAMES]))
        return NewFields(tuple(_make_drift(name, usage, offsets) for name, usage in rows), firsts, called)

    def _format_path(self, slot: int) -> str:
        begin, usage = slot * unknown.MOST_BYTES, self._names.usage[slot]
        name = escape_name(bytes(self._names.text[begin : begin + usage[unknown.SIZE]]))
        # A dot of a name is no step of a path.
        return path_below(
            self._nodes[usage[unknown.NODE]].path, Kind.STRUCT, name.replace(".", "\\.") if self._nested else name
        )


def _make_drift(name: str, usage: Array, offsets: Array) -> Drift:
    types = join_texts(*(t for bit, t in _KINDS.items() if usage[unknown.KINDS] & bit))
    return Drift(DriftKind.NEW, name, int(usage[unknown.COUNT]), int(offsets[usage[unknown.FIRST]]), types)


def escape_name(name: bytes) -> str:
    """Returns a foreign name for display: unprintable characters are escaped, and long names are cut."""
    text = name.decode("utf-8", "backslashreplace").replace("\\", "\\\\")
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return escaped if len(escaped) <= MOST_NAME else escaped[:MOST_NAME] + "…"


def find_misfits(
    nodes: Sequence[SchemaNode], refused: RefusedRecords, values: pa.Array, offsets: Array
) -> Iterator[Drift]:
    """Fields whose values made records be refused. `values` and `offsets` are the whole chunk's."""
    _, ends, data = values.buffers()
    ends, data = np.frombuffer(ends, np.int32).astype(np.int64), np.frombuffer(data or b"", np.uint8)
    of_schema = np.isin(refused.codes, _FAULTS) & (refused.nodes >= 0) & (refused.positions >= 0)
    pairs = np.unique(np.stack([refused.codes[of_schema], refused.nodes[of_schema]], 1), axis=0)
    for code, node in pairs.tolist():
        rows = np.flatnonzero(of_schema & (refused.codes == code) & (refused.nodes == node))
        chosen = refused.rows[rows]
        group = _Misfits(data, ends[chosen] + refused.positions[rows], ends[chosen + 1], offsets[chosen])
        yield from _diagnose_group(nodes[node], code, group)


@dataclass(frozen=True, slots=True)
class _Misfits:
    """The values that one field refused for one reason: where they begin, where their records end, and the offsets."""

    data: Array
    starts: Array
    ends: Array
    offsets: Array

    def only(self, chosen: Array) -> _Misfits:
        return _Misfits(self.data, self.starts[chosen], self.ends[chosen], self.offsets[chosen])

    def spans(self, *, texts: bool) -> Array:
        ends = np.empty(len(self.starts), np.int64)
        unknown.spans_at(self.data, self.starts, self.ends, texts, ends)
        return ends

    def drift(self, kind: DriftKind, field: str, type_: str) -> Iterator[Drift]:
        if len(self.offsets):
            yield Drift(kind, field, len(self.offsets), int(self.offsets.min()), type_)


def _diagnose_group(node: SchemaNode, code: int, group: _Misfits) -> Iterator[Drift]:
    if code not in _WIDENING:
        kind = DriftKind.WRONG if code == scan.WRONG_TYPE else DriftKind.MALFORMED
        yield from group.drift(kind, node.path, _find_type(group, code))
        return
    if node.type.kind is Kind.DECIMAL and node.type.encoding is not Encoding.BASE64:
        fitting, wide = _find_wider_decimal(node.type, group)
    else:
        fitting, wide = _find_wider(node.type, _list_wider(node.type, code), group)
    yield from group.only(fitting).drift(DriftKind.WIDENED, node.path, wide)
    yield from group.only(~fitting).drift(
        _WIDENING[code], node.path, "string" if node.type.kind is Kind.TIMESTAMP else "float64"
    )


def _find_type(group: _Misfits, code: int) -> str:
    """The type that would hold values of another kind than their field's."""
    if code != scan.WRONG_TYPE:
        return "string"
    heads = group.data[group.starts]
    digits = group.only((heads == 0x2D) | ((heads >= 0x30) & (heads <= 0x39)))
    odd = digits.spans(texts=False) >> (2 * SIZE_BITS) & 3 == ODD  # the kind includes the sign bit
    kinds = {
        "string": heads == 0x22,
        "bool": (heads == 0x74) | (heads == 0x66),
        "json": (heads == 0x7B) | (heads == 0x5B),
        "float64": odd,
        "int64": ~odd,
    }
    return join_texts(*(t for t, there in kinds.items() if there.any()))


def _list_wider(t: Type, code: int) -> list[Type]:
    """Wider types to try, the likeliest first."""
    if t.kind is Kind.TIMESTAMP:
        return [Type(t.kind, unit="us")] if t.unit == "ms" else []
    if code == fill.INEXACT or t.kind is Kind.FLOAT32:
        wider = [Type(Kind.FLOAT64)]
    else:
        wider = [Type(k) for k in ((*UNSIGNED, *SIGNED) if t.kind in UNSIGNED else SIGNED)]
    wider = [replace(w, encoding=t.encoding) for w in wider if t.encoding is None or w.kind is not Kind.FLOAT64]
    return [w for w in wider if w != t and holds(w, t)]


def _find_wider(t: Type, candidates: Sequence[Type], group: _Misfits) -> tuple[Array, str]:
    """Which values some wider type holds (as booleans), and the smallest type that holds all of these."""
    remaining = np.ones(len(group.starts), np.bool_)
    spans, taken = group.spans(texts=t.kind is Kind.TIMESTAMP or t.encoding is Encoding.TEXT), [str(t)]
    for wide in candidates:
        positions = np.flatnonzero(remaining)
        if not len(positions):
            break
        faults = make_column(SchemaNode(0, wide, "", 0, 0, ()), len(positions)).append(group.data, spans[positions])
        fitting = np.ones(len(positions), np.bool_)
        fitting[faults.items] = False
        remaining[positions[fitting]] = False
        taken += [str(wide)] if fitting.any() else []
    return ~remaining, join_texts(*taken)


def _find_wider_decimal(t: Type, group: _Misfits) -> tuple[Array, str]:
    integral, scale = np.empty(len(group.starts), np.int64), np.empty(len(group.starts), np.int64)
    unknown.digits_of(group.data, group.starts, group.ends, integral, scale)
    integral, scale = np.maximum(integral, t.precision - t.scale), np.maximum(scale, t.scale)
    fitting = integral + scale <= MOST_DIGITS
    if not fitting.any():
        return fitting, ""
    integers, digits = int(scale[fitting].max()), int(integral[fitting].max())
    if digits + integers > MOST_DIGITS:  # each alone would have room, not all together
        fitting &= scale == t.scale
        integers, digits = t.scale, int(integral[fitting].max(initial=0))
    wide = replace(t, precision=digits + integers, scale=integers)
    return fitting, str(wide) if fitting.any() else ""
