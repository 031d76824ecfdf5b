"""Serializes values to JSON documents: attributes by name, instead of dicts written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import Any


def document_of(value: Any, names: str = "") -> dict[str, Any]:
    """Returns a document of a value's attributes, in this order; without `names` of all fields of a dataclass.

    `names` are separated by spaces: a key (`rows`), or a key and the path of its attribute (`run=owner.run`).
    """
    pairs = (name.partition("=") for name in names.split()) if names else ((f.name, "", "") for f in fields(value))
    return {key: to_json_value(attrgetter(path or key)(value)) for key, _, path in pairs}


def to_json_value(value: Any) -> Any:
    """Returns a value as JSON has it: enums by value, dataclasses by field, tuples and named tuples as lists."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return document_of(value)
    if isinstance(value, Mapping):
        return {str(key): to_json_value(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(v) for v in value]
    return value
