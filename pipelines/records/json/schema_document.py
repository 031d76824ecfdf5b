"""A JSON Schema document, and each schema in it with its references followed and its compositions written out. Light.

Drafts 4, 6, 7, 2019-09 and 2020-12. A document is input from outside: its text, its depth and the work for it are
bounded, and a schema that holds itself is refused by name. Places are JSON pointers, such as `#/properties/a/items`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import unquote

from sluice.pipelines.records.rows.value_reader import UnusableSchema

MOST_TEXT = 1 << 20
"""Characters of a schema's text."""
MOST_DEPTH = 64
MOST_VISITS = 20_000
"""Schemas that are looked at, each as often as it is used."""
_DEFINITIONS = ("$defs", "definitions")
_UNIONS = ("anyOf", "oneOf")
_NAMES = ("$id", "id")
NOTES = frozenset(
    (
        *("$schema", "$id", "id", "$comment", "$vocabulary", "$anchor", "$defs", "definitions"),
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"),
        *("contentMediaType", "contentSchema"),
    )
)
"""Keywords that change nothing about which values a schema allows."""
REFUSED = frozenset(
    (
        *("patternProperties", "propertyNames", "minProperties", "maxProperties"),
        *("dependencies", "dependentRequired", "dependentSchemas", "if", "then", "else", "not"),
        *("minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains"),
        *("prefixItems", "additionalItems", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef"),
    )
)
"""Keywords that say what neither columns nor a contract can hold."""
_SAYING_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "minItems": (0,),
    "uniqueItems": (False,),
    "minProperties": (0,),
    "additionalItems": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "patternProperties": ({},),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "propertyNames": (True, {}),
}


class Said(NamedTuple):
    """The value of a keyword, its place, and the places that references led to on the way there."""

    value: Any
    place: str
    above: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Node:
    """One schema: its keywords but for notes, and whether null is allowed beside what they allow.

    `refused` are errors for its own keywords that neither columns nor a contract can hold.
    """

    place: str
    said: Mapping[str, Said]
    or_null: bool = False
    refused: tuple[UnusableSchema, ...] = ()

    def __contains__(self, keyword: str) -> bool:
        return keyword in self.said

    def get(self, keyword: str) -> Any:
        """What the keyword says; None if it is not there."""
        found = self.said.get(keyword)
        return None if found is None else found.value

    def place_of(self, keyword: str) -> str:
        return self.said[keyword].place


class Document:
    """A parsed document. Schemas in it that have a `$id` are documents within it."""

    def __init__(self, text: str) -> None:
        self._root = loaded(text)
        self._visits = 0
        self._named = {name: (place, node) for name, place, node in _identified(self._root, "#", 0)}
        said = self._root.get("$schema", "") if isinstance(self._root, Mapping) else ""
        self._old = any(f"draft-0{n}" in str(said) for n in (3, 4, 6, 7))

    def root(self) -> Node:
        """The schema of a whole value."""
        return self.node(self._root, "#", ())

    def node(self, given: Any, place: str, above: tuple[str, ...]) -> Node:
        """The schema at a place. `above` are the places that references led to on the way there."""
        self._visits += 1
        if self._visits > MOST_VISITS or len(above) > MOST_DEPTH or place.count("/") > 4 * MOST_DEPTH:
            raise UnusableSchema(place, "is nested too deeply, or holds too much")
        if given is True:
            return Node(place, {})
        if not isinstance(given, Mapping):
            raise UnusableSchema(place, "allows no value" if given is False else "is no schema")
        said: dict[str, Said] = {}
        refused: list[UnusableSchema] = []
        for keyword, value in given.items():
            here = f"{place}/{_escaped(keyword)}"
            if keyword in REFUSED and value not in _SAYING_NOTHING.get(keyword, ()):
                refused.append(UnusableSchema(here, "has no counterpart in columns or a contract"))
            if keyword not in NOTES and keyword not in REFUSED:
                said[keyword] = _said(keyword, value, here, above)
        return self._composed(Node(place, said, refused=tuple(refused)))

    def within(self, node: Node, keyword: str, name: str | None = None) -> Node:
        """The schema that a keyword holds; for `properties`, the one of that name."""
        found: Said = node.said[keyword] if name is None else node.said[keyword].value[name]
        return self.node(found.value, found.place, found.above)

    def _composed(self, node: Node) -> Node:
        """The schema without references, `allOf`, and unions with null."""
        parts, or_null = list[Node](), False
        if "$ref" in node:
            parts.append(self._referred(node.said["$ref"]))
            if self._old:
                return parts[0]
        if "allOf" in node:
            value, place, above = node.said["allOf"]
            parts += [self.node(v, f"{place}/{i}", above) for i, v in enumerate(_schemas(value, place))]
        for keyword in _UNIONS:
            if keyword in node:
                other, null = self._union(node.said[keyword])
                or_null |= null
                parts += [other] if other else []
        own = {k: v for k, v in node.said.items() if k not in ("$ref", "allOf", *_UNIONS)}
        for part in parts:
            own = _merged(own, part)
            or_null |= part.or_null
        refused = (*node.refused, *(error for part in parts for error in part.refused))
        return Node(node.place, own, or_null, refused)

    def _referred(self, said: Said) -> Node:
        name, place, above = said
        if not isinstance(name, str):
            raise UnusableSchema(place, "is no reference")
        to, found = self._found(name, place)
        if to in above:
            raise UnusableSchema(place, f"leads to {to}, which holds itself: it is recursive, and a table is not")
        return self.node(found, to, (*above, to))

    def _found(self, name: str, place: str) -> tuple[str, Any]:
        """Where a reference leads, and what is there."""
        document, _, pointer = name.partition("#")
        if not document:
            around = [v for v in self._named.values() if place.startswith(f"{v[0]}/")]
            to, found = max(around, key=lambda v: len(v[0]), default=("#", self._root))
        elif document in self._named:
            to, found = self._named[document]
        else:
            ends = [v for k, v in self._named.items() if k.rpartition("/")[2] == document.rpartition("/")[2]]
            if len(ends) != 1:
                raise UnusableSchema(place, f"leads to {_shown(name)}, which is not in this file")
            to, found = ends[0]
        if pointer and not pointer.startswith("/"):
            raise UnusableSchema(place, f"leads to {_shown(name)}, an anchor; write a pointer such as #/$defs/…")
        for part in pointer.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                raise UnusableSchema(place, f"leads to {_shown(name)}, which is not there")
            to = _below(to, key)
        return to, found

    def _union(self, said: Said) -> tuple[Node | None, bool]:
        """What a union allows besides null, and whether it allows null."""
        value, place, above = said
        branches = [self.node(v, f"{place}/{i}", above) for i, v in enumerate(_schemas(value, place))]
        others = [b for b in branches if not _only_null(b)]
        null = len(others) < len(branches)
        refused = [error for b in branches for error in b.refused]
        if refused:
            raise UnusableSchema.of_all(refused)
        if len(others) > 1 and all(set(b.said) <= {"const", "enum", "type"} and _values(b) is not None for b in others):
            values = [v for b in others for v in _values(b) or ()]
            return Node(place, {"enum": Said(values, place)}), null
        if len(others) > 1:
            raise UnusableSchema(place, "allows values of several kinds; a column has one type")
        return (others[0] if others else None), null


def loaded(text: str) -> Any:
    """The JSON of a schema's text. Raises UnusableSchema."""
    if len(text) > MOST_TEXT:
        raise UnusableSchema("", f"is longer than {MOST_TEXT} characters")
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False).encode()
        return found
    except RecursionError:
        raise UnusableSchema("", "is nested too deeply") from None
    except UnicodeEncodeError:
        raise UnusableSchema("", "has half of a surrogate pair, which is not a character") from None
    except ValueError:
        raise UnusableSchema("", "is not JSON") from None


def _identified(node: Any, place: str, depth: int) -> Iterator[tuple[str, str, Any]]:
    """The schemas that have names of their own, with their places."""
    if not isinstance(node, Mapping) or depth > MOST_DEPTH:
        return
    for key in _NAMES:
        if isinstance(name := node.get(key), str) and not name.startswith("#"):
            yield name.partition("#")[0], place, node
    for key in _DEFINITIONS:
        if isinstance(inside := node.get(key), Mapping):
            for name, found in inside.items():
                yield from _identified(found, _below(f"{place}/{key}", name), depth + 1)


def _said(keyword: str, value: Any, place: str, above: tuple[str, ...]) -> Said:
    """What a keyword says; of properties, each with its place."""
    if keyword != "properties":
        return Said(value, place, above)
    if not isinstance(value, Mapping):
        raise UnusableSchema(place, "is no object")
    return Said({name: Said(v, _below(place, name), above) for name, v in value.items()}, place, above)


def _schemas(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise UnusableSchema(place, "is no list of schemas")
    return value


def _only_null(node: Node) -> bool:
    return node.get("type") == "null" or _values(node) == [None]


def _values(node: Node) -> list[Any] | None:
    """The values that a schema allows by name."""
    if "const" in node:
        return [node.get("const")]
    found = node.get("enum")
    return found if isinstance(found, list) else None


def _merged(own: Mapping[str, Said], part: Node) -> dict[str, Said]:
    """What two schemas say together. Properties and what is required add up; else both must say the same."""
    out = dict(own)
    for keyword, said in part.said.items():
        if keyword not in out or out[keyword].value == said.value:
            out.setdefault(keyword, said)
        elif keyword == "required" and isinstance(said.value, list) and isinstance(out[keyword].value, list):
            out[keyword] = Said([*out[keyword].value, *said.value], said.place)
        elif keyword == "properties":
            out[keyword] = Said(_merged(out[keyword].value, Node("", said.value)), said.place)
        else:
            raise UnusableSchema(said.place, "says something else than the schema that it is composed with")
    return out


def _below(place: str, name: str) -> str:
    return f"{place}/{_escaped(name)}"


def _escaped(name: str) -> str:
    return _shown(name.replace("~", "~0").replace("/", "~1"))


def _shown(name: str) -> str:
    return name if name.isprintable() and len(name) <= 200 else "a name that cannot be shown"
