"""Parses JSON Schema documents: references followed, compositions written out, several documents bundled. Light.

Drafts 4, 6, 7, 2019-09 and 2020-12. A document is input from outside: its text, its depth and the work for it are
bounded, and a recursive schema is refused by name. Paths are JSON pointers, such as `#/properties/a/items`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from urllib.parse import unquote

from sluice.pipelines.records.rows.value_reader import UnusableSchema

MOST_TEXT = 1 << 20
"""Characters of a schema's text."""
MOST_DEPTH = 64
MOST_VISITS = 20_000
"""Limit of visited schemas; each counts as often as it is used."""
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


class Keyword(NamedTuple):
    """The value of a keyword, its place, and the places that references led to on the way there."""

    value: Any
    place: str
    above: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Subschema:
    """One schema: its keywords without annotations.

    `or_null` is whether it allows null, by all that it is composed of; None if it has neither types nor values.
    `refused` are errors for its own keywords that neither columns nor a contract can hold.
    """

    place: str
    keywords: Mapping[str, Keyword]
    or_null: bool | None = None
    refused: tuple[UnusableSchema, ...] = ()

    def __contains__(self, keyword: str) -> bool:
        return keyword in self.keywords

    def get(self, keyword: str) -> Any:
        """Returns the value of the keyword; None if absent."""
        entry = self.keywords.get(keyword)
        return None if entry is None else entry.value

    def place_of(self, keyword: str) -> str:
        return self.keywords[keyword].place


class Document:
    """A parsed document. Schemas in it that have a `$id` are documents within it."""

    def __init__(self, text: str) -> None:
        self._root = load_json(text)
        self._visits = 0
        self._named = {name: (path, node) for name, path, node in _list_identified(self._root, "#", 0)}
        dialect = self._root.get("$schema", "") if isinstance(self._root, Mapping) else ""
        self._old = any(f"draft-0{n}" in str(dialect) for n in (3, 4, 6, 7))

    def root(self) -> Subschema:
        """The schema of a whole value."""
        return self.node(self._root, "#", ())

    def node(self, spelled: Any, path: str, above: tuple[str, ...]) -> Subschema:
        """The schema at a place. `above` are the places that references led to on the way there."""
        self._visits += 1
        if self._visits > MOST_VISITS or len(above) > MOST_DEPTH or path.count("/") > 4 * MOST_DEPTH:
            raise UnusableSchema(path, "is nested too deeply, or holds too much")
        if spelled is True:
            return Subschema(path, {})
        if not isinstance(spelled, Mapping):
            raise UnusableSchema(path, "allows no value" if spelled is False else "is no schema")
        keywords: dict[str, Keyword] = {}
        refused: list[UnusableSchema] = []
        for keyword, value in spelled.items():
            here = f"{path}/{_escape_name(keyword)}"
            if keyword in REFUSED and value not in _SAYING_NOTHING.get(keyword, ()):
                refused.append(UnusableSchema(here, "has no counterpart in columns or a contract"))
            if keyword not in NOTES and keyword not in REFUSED:
                keywords[keyword] = _make_keyword(keyword, value, here, above)
        return self._merge_all_of(Subschema(path, keywords, refused=tuple(refused)))

    def within(self, node: Subschema, keyword: str, name: str | None = None) -> Subschema:
        """The schema that a keyword holds; for `properties`, the one of that name."""
        entry: Keyword = node.keywords[keyword] if name is None else node.keywords[keyword].value[name]
        return self.node(entry.value, entry.place, entry.above)

    def _merge_all_of(self, node: Subschema) -> Subschema:
        """The schema without references, `allOf`, and unions with null. Null is allowed if no part forbids it."""
        parts, nulls = list[Subschema](), [_is_null_allowed(node)]
        if "$ref" in node:
            parts.append(self._resolve_reference(node.keywords["$ref"]))
            if self._old:
                return parts[0]
        if "allOf" in node:
            value, path, above = node.keywords["allOf"]
            parts += [self.node(v, f"{path}/{i}", above) for i, v in enumerate(_list_schemas(value, path))]
        for keyword in _UNIONS:
            if keyword in node:
                parts.append(self._union(node.keywords[keyword], only_one=keyword == "oneOf"))
        own = {k: v for k, v in node.keywords.items() if k not in ("$ref", "allOf", *_UNIONS)}
        for part in parts:
            own = _merge_keywords(own, part)
        nulls = [null for null in (*nulls, *(part.or_null for part in parts)) if null is not None]
        refused = (*node.refused, *(error for part in parts for error in part.refused))
        return Subschema(node.place, own, all(nulls) if nulls else None, refused)

    def _resolve_reference(self, reference: Keyword) -> Subschema:
        name, path, above = reference
        if not isinstance(name, str):
            raise UnusableSchema(path, "is no reference")
        to, target = self._find_target(name, path)
        if to in above:
            raise UnusableSchema(path, f"leads to {to}, which holds itself: it is recursive, and a table is not")
        return self.node(target, to, (*above, to))

    def _find_target(self, name: str, path: str) -> tuple[str, Any]:
        """Returns the position of a reference's target, and the target."""
        document, _, pointer = name.partition("#")
        if not document:
            around = [v for v in self._named.values() if path.startswith(f"{v[0]}/")]
            to, target = max(around, key=lambda v: len(v[0]), default=("#", self._root))
        elif document in self._named:
            to, target = self._named[document]
        else:
            ends = [v for k, v in self._named.items() if k.rpartition("/")[2] == document.rpartition("/")[2]]
            if len(ends) != 1:
                raise UnusableSchema(path, f"leads to {_format_name(name)}, which is not in this file")
            to, target = ends[0]
        if pointer and not pointer.startswith("/"):
            raise UnusableSchema(path, f"leads to {_format_name(name)}, an anchor; write a pointer such as #/$defs/…")
        for part in pointer.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            elif isinstance(target, Mapping) and key in target:
                target = target[key]
            else:
                raise UnusableSchema(path, f"leads to {_format_name(name)}, which is not there")
            to = _extend_path(to, key)
        return to, target

    def _union(self, entry: Keyword, *, only_one: bool) -> Subschema:
        """Returns the types that a union allows. With `only_one`, a value of two branches is not allowed."""
        value, path, above = entry
        branches = [self.node(v, f"{path}/{i}", above) for i, v in enumerate(_list_schemas(value, path))]
        others = [b for b in branches if not (b.get("type") in ("null", ["null"]) or _list_values(b) == [None])]
        nulls = [b.or_null for b in branches if b.or_null is not None]
        null = (sum(nulls) == 1 if only_one else any(nulls)) if nulls else None
        refused = [error for b in branches for error in b.refused]
        if refused:
            raise UnusableSchema.of_all(refused)
        if len(others) > 1 and all(
            set(b.keywords) <= {"const", "enum", "type"} and _list_values(b) is not None for b in others
        ):
            values = [v for b in others for v in _list_values(b) or () if v is not None]
            if only_one:  # True is not 1 in JSON
                values = [
                    v
                    for v in values
                    if sum(v == other and isinstance(v, bool) == isinstance(other, bool) for other in values) == 1
                ]
            if not values and not null:
                raise UnusableSchema(path, "allows no value")
            return Subschema(path, {"enum": Keyword(values, path)}, null)
        if len(others) > 1:
            raise UnusableSchema(path, "allows values of several kinds; a column has one type")
        return replace(others[0] if others else branches[0], or_null=null)


def load_json(text: str) -> Any:
    """The JSON of a schema's text. Raises UnusableSchema."""
    if len(text) > MOST_TEXT:
        raise UnusableSchema("", f"is longer than {MOST_TEXT} characters")
    try:
        document = json.loads(text)
        json.dumps(document, ensure_ascii=False).encode()
        return document
    except RecursionError:
        raise UnusableSchema("", "is nested too deeply") from None
    except UnicodeEncodeError:
        raise UnusableSchema("", "has half of a surrogate pair, which is not a character") from None
    except ValueError:
        raise UnusableSchema("", "is not JSON") from None


def _list_identified(node: Any, path: str, depth: int) -> Iterator[tuple[str, str, Any]]:
    """The schemas that have names of their own, with their places."""
    if not isinstance(node, Mapping) or depth > MOST_DEPTH:
        return
    for key in _NAMES:
        if isinstance(name := node.get(key), str) and not name.startswith("#"):
            yield name.partition("#")[0], path, node
    for key in _DEFINITIONS:
        if isinstance(inside := node.get(key), Mapping):
            for name, inner in inside.items():
                yield from _list_identified(inner, _extend_path(f"{path}/{key}", name), depth + 1)


def _make_keyword(keyword: str, value: Any, path: str, above: tuple[str, ...]) -> Keyword:
    """Returns the value of a keyword; of properties, each with its position."""
    if keyword != "properties":
        return Keyword(value, path, above)
    if not isinstance(value, Mapping):
        raise UnusableSchema(path, "is no object")
    return Keyword({name: Keyword(v, _extend_path(path, name), above) for name, v in value.items()}, path, above)


def _list_schemas(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise UnusableSchema(path, "is no list of schemas")
    return value


def _is_null_allowed(node: Subschema) -> bool | None:
    """Returns whether the schema's own types and values allow null; None if it has neither."""
    kinds, values = node.get("type"), _list_values(node)
    allowed = [] if kinds is None else ["null" in kinds if isinstance(kinds, list) else kinds == "null"]
    allowed += [] if values is None else [None in values]
    return all(allowed) if allowed else None


def _list_values(node: Subschema) -> list[Any] | None:
    """The values that a schema allows by name."""
    if "const" in node:
        return [node.get("const")]
    values = node.get("enum")
    return values if isinstance(values, list) else None


def _merge_keywords(own: Mapping[str, Keyword], part: Subschema) -> dict[str, Keyword]:
    """Merges two schemas. Properties and required names add up; other keywords must be equal."""
    out = dict(own)
    for keyword, entry in part.keywords.items():
        if keyword not in out or out[keyword].value == entry.value:
            out.setdefault(keyword, entry)
        elif keyword == "required" and isinstance(entry.value, list) and isinstance(out[keyword].value, list):
            out[keyword] = Keyword([*out[keyword].value, *entry.value], entry.place)
        elif keyword == "properties":
            out[keyword] = Keyword(_merge_keywords(out[keyword].value, Subschema("", entry.value)), entry.place)
        else:
            raise UnusableSchema(entry.place, "says something else than the schema that it is composed with")
    return out


def _extend_path(path: str, name: str) -> str:
    return f"{path}/{_escape_name(name)}"


def _escape_name(name: str) -> str:
    return _format_name(name.replace("~", "~0").replace("/", "~1"))


def _format_name(name: str) -> str:
    return name if name.isprintable() and len(name) <= 200 else "a name that cannot be shown"


def bundle_texts(texts: Sequence[str], names: Sequence[str]) -> str:
    """Returns the last of the texts as readable JSON, with the others in it. Raises UnusableSchema."""
    root = load_json(texts[-1])
    if names and not isinstance(root, dict):
        raise UnusableSchema("", "is no object")
    for name, text in zip(names, texts, strict=False):
        document = load_json(text)
        key = "definitions" if "definitions" in root else "$defs"
        root.setdefault(key, {})[name] = document | {"$id": name} if isinstance(document, dict) else document
    return json.dumps(root, indent=2, ensure_ascii=False)
