"""The places of a schema, numbered, and the room that a block of rows has in each.

Nodes are numbered breadth first, so that the children of a struct follow one another. Node 0 is the record itself.

A node outside of lists and maps has a slot for each row. The children of a list or map have one for each of its
elements, with all rows' elements one after another: a *level*.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.schema.schema import Field, Kind, Schema, Type, join_path

BLOCK_SLOTS = 1 << 16
"""About how many slots a block of rows takes: few enough to stay in the processor's caches until columns have them."""
BLOCK_ROWS = (64, 8192)
MOST_SLOTS = 1 << 22
"""The most slots that the lists and maps of one level may take in one record."""


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
        key = [Field("", Type(Kind.STRING), required=True)] if t.kind is Kind.MAP else []
        for child in (*key, *t.fields):
            node.children.append(len(queue))
            queue.append(_Growing(child, join_path(node.path, t.kind, child), node.inner))
    return tuple(
        SchemaNode(i, g.source.type, g.path, g.level, g.inner, tuple(g.children), g.source.required, g.source.json_name)
        for i, g in enumerate(queue)
    )


def find_holder(nodes: tuple[SchemaNode, ...], level: int) -> int:
    """The list or map that opens a level."""
    return next(n.index for n in nodes if n.inner == level and n.inner != n.level)


def make_room(nodes: tuple[SchemaNode, ...]) -> Array:
    """Returns how many elements of each level a block has slots for at first: at level 0 its rows."""
    rows = min(max(BLOCK_SLOTS // len(nodes), BLOCK_ROWS[0]), BLOCK_ROWS[1])
    # Lists begin with room for two elements a row, and grow.
    room = np.full(1 + max(n.inner for n in nodes), 2 * rows, np.int64)
    room[0] = rows
    return room


def grow_room(nodes: tuple[SchemaNode, ...], room: Array, level: int) -> Array | None:
    """Room for twice the elements of a level; None when it has all that a record may take."""
    maximum = MOST_SLOTS // sum(n.level == level for n in nodes)
    if room[level] >= maximum:
        return None
    more = room.copy()
    more[level] = min(2 * room[level], maximum)
    return more
