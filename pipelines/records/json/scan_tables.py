"""A schema as the arrays that the compiled loops read: nodes, names, hash tables of names, levels.

Nodes are numbered breadth first, so that the children of a struct follow one another. Node 0 is the record itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.json import scan
from sluice.pipelines.records.json.scan import ScanTables
from sluice.pipelines.schema.schema import Field, Kind, Schema, Type, path_below

BLOCK_SLOTS = 1 << 16
"""About how many spans a block of rows takes: few enough to stay in the processor's caches until they are filled."""
BLOCK_ROWS = (64, 8192)
MOST_SLOTS = 1 << 22
"""The most spans that the lists and maps of one level may take in one record."""

_SHAPES = {
    **dict.fromkeys((Kind.STRING, Kind.BINARY, Kind.DATE, Kind.TIMESTAMP), scan.TEXT),
    Kind.BOOL: scan.TRUTH,
    Kind.JSON: scan.ANYTHING,
    Kind.STRUCT: scan.STRUCT,
    Kind.LIST: scan.LIST,
    Kind.MAP: scan.MAP,
}


@dataclass(frozen=True, slots=True)
class SchemaNode:
    """A place in the schema.

    `path` is its readable name: `lines[].sku`, `tags{}`. `level` is the list or map that it lies in, counted from 0
    for the record; `inner` is the level of its own elements. `children` are the numbers of the nodes below it.
    `name` is its name in records.
    """

    index: int
    type: Type
    path: str
    level: int
    inner: int
    children: tuple[int, ...]
    required: bool = False
    name: str = ""


def find_holder(nodes: tuple[SchemaNode, ...], level: int) -> int:
    """The list or map that opens a level."""
    return next(n.index for n in nodes if n.inner == level and n.inner != n.level)


@dataclass(slots=True)
class _Growing:
    """A node while its children are still counted."""

    source: Field
    path: str
    level: int
    inner: int = 0
    children: list[int] = field(default_factory=list)


def make_nodes(schema: Schema) -> tuple[SchemaNode, ...]:
    """All nodes of a schema, breadth first."""
    queue = [_Growing(Field("", Type(Kind.STRUCT, fields=schema.fields)), "", 0)]
    levels = 1
    for node in queue:
        t = node.source.type
        node.inner = node.level
        if t.kind in (Kind.LIST, Kind.MAP):
            node.inner, levels = levels, levels + 1
        for child in _list_children(t):
            node.children.append(len(queue))
            queue.append(_Growing(child, path_below(node.path, t.kind, child.name), node.inner))
    return tuple(
        SchemaNode(i, g.source.type, g.path, g.level, g.inner, tuple(g.children), g.source.required, g.source.json_name)
        for i, g in enumerate(queue)
    )


def _list_children(t: Type) -> Iterator[Field]:
    if t.kind is Kind.MAP:
        yield Field("", Type(Kind.STRING), required=True)
    yield from t.fields


def make_tables(nodes: tuple[SchemaNode, ...]) -> ScanTables:
    """The arrays for these nodes, with room for one block."""
    table = np.zeros((len(nodes), scan.NODE_FIELDS), np.int64)
    names = bytearray()
    lookups: list[Array] = []
    follows: list[Array] = []
    for n in nodes:
        row = table[n.index]
        row[scan.SHAPE] = _SHAPES.get(n.type.kind, scan.NUMBER)
        row[scan.LEVEL], row[scan.INNER], row[scan.REQUIRED] = n.level, n.inner, n.required
        row[scan.CHILD], row[scan.COUNT] = n.children[0] if n.children else 0, len(n.children)
        _name(row, names, n.name)
        if n.type.kind is Kind.STRUCT:
            children = [nodes[c] for c in n.children]
            row[scan.DEMANDS] = any(c.required for c in children)
            row[scan.LOOKUP_AT], row[scan.FOLLOW_AT] = sum(map(len, lookups)), sum(map(len, follows))
            # A hash table of the members' names, and for each member the one that followed it in an earlier record.
            lookups.append(_lookup([c.name.encode() for c in children]))
            row[scan.LOOKUP_MASK] = len(lookups[-1]) - 1
            follows.append(np.full(len(children) + 1, -1, np.int32))
    levels = 1 + max(n.inner for n in nodes)
    # A block's spans fit into the processor's cache; lists begin with room for two elements a row, and grow.
    rows = min(max(BLOCK_SLOTS // len(nodes), BLOCK_ROWS[0]), BLOCK_ROWS[1])
    room = np.full(levels, 2 * rows, np.int64)
    room[0] = rows
    state = np.zeros(scan.SLOTS, np.int64)
    state[scan.MOST_OUT], state[scan.STEPS] = rows, -1
    tables = ScanTables(
        nodes=table,
        # Names are compared by words of eight bytes, which may reach beyond the last one.
        names=np.frombuffer(bytes(names) + bytes(8), np.uint8).copy(),
        lookup=np.concatenate(lookups),
        follow=np.concatenate(follows),
        spans=np.empty(0, np.int64),
        counts=np.zeros(levels, np.int64),
        room=room,
        saved=np.zeros(levels, np.int64),
        stack=np.zeros(2 * (scan.MOST_DEPTH + 1), np.int64),
        nest=np.zeros(scan.MOST_DEPTH, np.uint8),
        scratch=np.zeros(scan.LONGEST_KEY, np.uint8),
        trail=np.zeros(2 * len(nodes), np.int64),
        steps=np.zeros((len(nodes) + 1, scan.NODE_FIELDS), np.int64),
        template=np.zeros(scan.TEMPLATE_BYTES, np.uint8),
        state=state,
    )
    return with_room(tables, room)


def with_room(t: ScanTables, room: Array) -> ScanTables:
    """The same tables with empty slots: `room` gives the number of elements of each level."""
    sizes = room[t.nodes[:, scan.LEVEL]]
    t.nodes[:, scan.BASE] = np.cumsum(sizes) - sizes
    t.counts[:] = 0
    t.state[scan.OUT] = 0
    return t._replace(spans=np.zeros(int(sizes.sum()), np.int64), room=room)


def count_elements(nodes: tuple[SchemaNode, ...], level: int) -> int:
    """How many elements of one level a record may have."""
    return MOST_SLOTS // sum(n.level == level for n in nodes)


def _name(row: Any, names: bytearray, name: str) -> None:
    text = name.encode() + b'"'
    row[scan.NAME_AT], row[scan.NAME_SIZE] = len(names), len(text)
    first = text[:8]
    row[scan.NAME_WORD] = int.from_bytes(first.ljust(8, b"\0"), "little", signed=True)
    row[scan.NAME_MASK] = int.from_bytes((b"\xff" * len(first)).ljust(8, b"\0"), "little", signed=True)
    names += text


def _lookup(names: list[bytes]) -> Array:
    """Open addressing by FNV-1a, at most half full."""
    size = 1 << (2 * len(names)).bit_length()
    table = np.full(size, -1, np.int32)
    for slot, name in enumerate(names):
        at = _hash_name(name) & (size - 1)
        while table[at] >= 0:
            at = (at + 1) & (size - 1)
        table[at] = slot
    return table


def _hash_name(name: bytes) -> int:
    h = 0xCBF29CE484222325
    for b in name:
        h = ((h ^ b) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return h ^ (h >> 32)
