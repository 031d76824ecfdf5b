"""A schema as the arrays that the loop `scan` reads: nodes, names, hash tables of names, levels."""

from __future__ import annotations

from typing import Any

import numpy as np

from sluice.pipelines.records.columns.nodes import SchemaNode, make_room
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.json import scan
from sluice.pipelines.records.json.columns import get_json_kind
from sluice.pipelines.records.json.scan import ScanTables
from sluice.pipelines.schema.schema import Kind


def make_tables(nodes: tuple[SchemaNode, ...]) -> ScanTables:
    """The arrays for these nodes, with room for one block."""
    table = np.zeros((len(nodes), scan.NODE_FIELDS), np.int64)
    names = bytearray()
    lookups: list[Array] = []
    follows: list[Array] = []
    for n in nodes:
        row = table[n.index]
        row[scan.SHAPE] = get_json_kind(n.type).shape
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
    # Arrays begin small, and grow where a block needs more.
    room = make_room(nodes)
    state = np.zeros(scan.SLOTS, np.int64)
    state[scan.MOST_OUT], state[scan.STEPS] = room[0], -1
    tables = ScanTables(
        nodes=table,
        # Names are compared by words of eight bytes, which may reach beyond the last one.
        names=np.frombuffer(bytes(names) + bytes(8), np.uint8).copy(),
        lookup=np.concatenate(lookups),
        follow=np.concatenate(follows),
        spans=np.empty(0, np.int64),
        counts=np.zeros(len(room), np.int64),
        room=room,
        saved=np.zeros(len(room), np.int64),
        stack=np.zeros(2 * (scan.MOST_DEPTH + 1), np.int64),
        nest=np.zeros(scan.MOST_DEPTH, np.uint8),
        scratch=np.zeros(scan.LONGEST_KEY, np.uint8),
        trail=np.zeros(scan.TRAIL_FIELDS * (len(nodes) + scan.MOST_UNKNOWN), np.int64),
        steps=np.zeros((len(nodes) + scan.MOST_UNKNOWN + 1, scan.NODE_FIELDS), np.int64),
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
