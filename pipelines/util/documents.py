"""Serializes results to JSON documents: the fields of dataclasses, named tuples and ledger items are the keys.

A field's annotation changes its part of the document:

    Flat[T]      the fields of the value, as keys of its holder; null if it is None
    AsText[T]    the text of the value, or the texts of its items
    Instant      a time in ms since 1970, as ISO 8601
    Internal[T]  no part of the document
    Derived[T]   a property, as a key after the fields

A trailing underscore is no part of a key: `from_` is `from`.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum, auto
from functools import cache
from pathlib import PurePath
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

from sluice.pipelines.errors import SluiceError
from sluice.pipelines.util.units import show_instant

T = TypeVar("T")


class Mark(Enum):
    """How a value is serialized, other than by its type."""

    FLAT = auto()
    TEXT = auto()
    INSTANT = auto()
    INTERNAL = auto()
    DERIVED = auto()


Flat = Annotated[T, Mark.FLAT]
AsText = Annotated[T, Mark.TEXT]
Instant = Annotated[int, Mark.INSTANT]
Internal = Annotated[T, Mark.INTERNAL]
Derived = Annotated[T, Mark.DERIVED]


def to_document(value: Any) -> dict[str, Any]:
    """Returns a result as a JSON-ready dict: a dataclass, a named tuple, a mapping or an error."""
    if isinstance(value, SluiceError):
        return value.fields()
    if isinstance(value, Mapping):
        return {str(key): to_json(v) for key, v in value.items()}
    document = dict[str, Any]()
    for entry in _list_entries(value.__class__):
        content = getattr(value, entry.name)
        if not entry.is_flat:
            document[entry.key] = to_json(content, entry.marks)
        else:
            flat = dict.fromkeys(entry.keys) if content is None else to_document(content)
            document |= {key: v for key, v in flat.items() if v is not None or key not in document}
    return document


def to_json(value: Any, marks: Collection[Mark] = ()) -> Any:
    """Returns a value as JSON has it: enums by value, paths as text, tuples as lists, named ones, too, unless flat."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_json(v, marks) for key, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset) and not (marks and hasattr(value, "_fields")):
        return [to_json(v, marks) for v in value]
    has_fields = is_dataclass(value) or hasattr(type(value), "model_fields")
    if isinstance(value, SluiceError) or Mark.FLAT in marks or (has_fields and Mark.TEXT not in marks):
        return to_document(value)
    if isinstance(value, Enum):
        return value.value
    if Mark.INSTANT in marks:
        return show_instant(value)
    return str(value) if Mark.TEXT in marks or isinstance(value, PurePath) else value


def read_hints(of: type, types: Mapping[str, Any] = MappingProxyType({})) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of a dataclass or named tuple that may be in documents, with their types.

    `types` are those that modules import for type checkers only; without them, these count as Any.
    """
    names = _Names(types)
    for c in reversed(of.__mro__):
        names |= vars(sys.modules[c.__module__])
    hints = get_type_hints(of, localns=names, include_extras=True)
    own: Iterable[str] = (
        getattr(of, "_fields", None) or getattr(of, "model_fields", None) or [f.name for f in fields(of)]
    )
    yield from ((name, hints[name]) for name in own)
    for name, member in {name: member for c in reversed(of.__mro__) for name, member in vars(c).items()}.items():
        getter = getattr(member, "fget", None) or getattr(member, "func", None)  # a property, also a cached one
        if getter is not None:
            hint = get_type_hints(getter, localns=names, include_extras=True).get("return")
            if Mark.DERIVED in list_marks(hint):
                yield name, hint


def list_marks(hint: Any) -> Iterator[Mark]:
    """Yields the marks anywhere in a type."""
    yield from (m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Mark))
    for part in get_args(hint):
        yield from list_marks(part)


class _Names(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, Any)


class _Entry(NamedTuple):
    """An attribute that is in documents, with the marks anywhere in its type. `keys` are those of a flat value."""

    name: str
    key: str
    is_flat: bool
    marks: frozenset[Mark]
    keys: tuple[str, ...]


@cache
def _list_entries(of: Any) -> tuple[_Entry, ...]:
    entries = list[_Entry]()
    for name, hint in read_hints(of):
        if Mark.INTERNAL not in (own := getattr(hint, "__metadata__", ())):
            keys = tuple(_list_keys(hint)) if (is_flat := Mark.FLAT in own) else ()
            entries.append(_Entry(name, name.removesuffix("_"), is_flat, frozenset(list_marks(hint)), keys))
    return tuple(entries)


def _list_keys(hint: Any) -> Iterator[str]:
    """Yields the keys of a flat value of this type, which are null without it. Errors have none then."""
    for part in get_args(hint) or (hint,):
        if get_args(part):
            yield from _list_keys(part)
        elif is_dataclass(part) or hasattr(part, "_fields"):
            for entry in _list_entries(part):
                yield from entry.keys if entry.is_flat else (entry.key,)
