"""Merges schemas into one: a referenced schema is written where it is first named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_NAMED = ("record", "error", "enum", "fixed")


def merge_texts(texts: Sequence[str]) -> str:
    """The last of the texts, as JSON for people, with the others in it. They have been parsed (`schema.parse`)."""
    types: dict[str, Any] = {}
    for text in texts[:-1]:
        _collect(json.loads(text), "", types)
    return json.dumps(_inline_types(json.loads(texts[-1]), "", types), indent=2, ensure_ascii=False)


def _full(name: str, space: str) -> str:
    return name if "." in name or not space else f"{space}.{name}"


def _inside(node: Any, space: str) -> str:
    """The namespace inside of a named type."""
    return _full(node["name"], node.get("namespace") or space).rpartition(".")[0]


def _collect(node: Any, space: str, types: dict[str, Any]) -> None:
    """Every named type of a schema that others may refer to, by its full name."""
    if isinstance(node, list):
        for branch in node:
            _collect(branch, space, types)
    elif isinstance(node, dict):
        if node.get("type") in _NAMED:
            types[_full(node["name"], node.get("namespace") or space)] = (node, space)
            space = _inside(node, space)
        for inside in (node.get("type"), node.get("items"), node.get("values"), *node.get("fields", ())):
            _collect(inside, space, types)


def _inline_types(node: Any, space: str, types: dict[str, Any]) -> Any:
    """Returns the schema with each known name's first use replaced by its type; used names are removed."""
    if isinstance(node, str):
        for name in (_full(node, space), node):
            if name in types:
                definition, around = types.pop(name)
                return _inline_types(
                    definition | {"name": name.rpartition(".")[2], "namespace": name.rpartition(".")[0]}, around, types
                )
        return _full(node, space) if "." in node else node
    if isinstance(node, list):
        return [_inline_types(branch, space, types) for branch in node]
    if not isinstance(node, dict):
        return node
    out = dict(node)
    if node.get("type") in _NAMED:
        types.pop(_full(node["name"], node.get("namespace") or space), None)
        space = _inside(node, space)
    else:
        out["type"] = _inline_types(node.get("type"), space, types)
    for key in ("items", "values"):
        if key in node:
            out[key] = _inline_types(node[key], space, types)
    if "fields" in node:
        out["fields"] = [_inline_types(f, space, types) for f in node["fields"]]
    return out
