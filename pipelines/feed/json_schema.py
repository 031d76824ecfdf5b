"""JSON Schemas of feed files, `fleet.yaml` and `notify.yaml`, from the models that read them.

A schema has each key with its type and default, for editors and checks before a deployment. It accepts the parser's
files, except numbers in quotes. Rules over several keys are the parser's alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue
from pydantic_core import CoreSchema

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.project_files import FleetSettings, NotifySettings
from sluice.pipelines.feed.sections import TUNING
from sluice.pipelines.util.units import show_duration

DIALECT = "https://json-schema.org/draft/2020-12/schema"


MODELS: dict[str, type[BaseModel]] = {"feed": Feed, "fleet": FleetSettings, "notify": NotifySettings}
_VARIABLE = {"type": "string", "pattern": r"\$\{.+\}"}
_NOTHING = {"type": "null"}
_FROM_ELSEWHERE = {"feed", "kafka", "bootstrap", "url"}
"""Required keys of the models whose values may come from the file's name or from the environment."""
_TEXT = {"type": "string"}
_SHORT_FORMS: dict[str, list[dict[str, Any]]] = {
    "topics": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}],
    "window": [_TEXT],
    "catalog": [_TEXT],
}
"""Values that a key may have instead of a section."""
_OF_ANY_VALUES = {"catalog", "conf", "tags"}
"""Sections with any keys, whose values the parser turns into text."""
_KEYWORDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
"""What pydantic calls the bounds of a number that it reads by a function of ours."""


class _Generator(GenerateJsonSchema):
    def handle_invalid_for_json_schema(self, schema: CoreSchema, error_info: str) -> JsonSchemaValue:
        return {}  # a key of the program, not of the file

    def generate(self, schema: CoreSchema, mode: JsonSchemaMode = "validation") -> JsonSchemaValue:
        text = json.dumps(super().generate(schema, mode)).replace(r"\\z", "$")  # the end, as ECMA 262 spells it
        return {"$schema": DIALECT, **json.loads(text)}


def build_schema(kind: str) -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of the files of that kind, a key of `MODELS`."""
    model = MODELS[kind]
    schema = model.model_json_schema(schema_generator=_Generator)
    sections = {m.__name__: m for m in _list_sections(model)}
    parts: dict[str, Any] = schema.pop("$defs", {})
    if own := parts.pop(model.__name__, None):  # a model with fields of its own kind
        schema = {"$schema": DIALECT, **own}
    parts = {n: p for n, p in parts.items() if n in sections or "enum" in p}
    for name, part in {model.__name__: schema, **parts}.items():
        if name in sections:
            _adapt(part, sections[name])
        else:
            part.update(anyOf=[{"enum": part.pop("enum")}, _VARIABLE])
    if model is Feed:
        schema["properties"]["tuning"] = _build_tuning(schema["properties"], parts)
        window = parts["WindowSettings"]["properties"]
        window["settle"] = {**window["grace"], "deprecated": True}
    text = str([schema, *parts.values()])
    used = {n: p for n, p in parts.items() if f"#/$defs/{n}'" in text}
    return {**schema, "title": f"Sluice: {kind}", **({"$defs": used} if used else {})}


def _list_sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yields the model and those of the sections in it."""
    yield model
    for field in model.model_fields.values():
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if not field.exclude and isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _list_sections(kind)


def _adapt(part: dict[str, Any], model: type[BaseModel]) -> None:
    """Let a section take variables, keys without values, and short forms."""
    properties = part.setdefault("properties", {})
    required = [k for k in part.pop("required", ()) if k not in _FROM_ELSEWHERE]
    for name, field in model.model_fields.items():
        key = field.alias or name
        value = properties.pop(key, {})
        if field.exclude:
            continue
        default = value.pop("default", None)
        if isinstance(default, int) and "pattern" in value:
            default = show_duration(default)
        properties[key] = {} if isinstance(default, dict) or default is None else {"default": default}
        properties[key]["anyOf"] = [*_SHORT_FORMS.get(key, ()), *_list_values(value)]
        if key in _OF_ANY_VALUES:
            scalars = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}
            properties[key]["anyOf"] = [*_SHORT_FORMS.get(key, ()), scalars]
        if key not in required:
            properties[key]["anyOf"].append(_NOTHING)
    if required:
        part["required"] = required


def _list_values(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the schemas of a key's values, and that of a variable if the key holds more than free text."""
    value.pop("title", None)
    choices = [v for v in value.get("anyOf", [value]) if v not in ({}, _NOTHING)]
    values = [{_KEYWORDS.get(k, k): v for k, v in choice.items()} for choice in choices]
    yield from values
    if any(v.get("type") not in (None, "object", "array") and v != _TEXT for v in values):
        yield _VARIABLE


def _build_tuning(properties: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """Returns the section `tuning`. The former places of its keys become deprecated."""
    tuning = {}
    for key, old in TUNING.items():
        section, _, name = old.partition(".")
        reference = next(v["$ref"] for v in properties[section]["anyOf"] if "$ref" in v)
        former = parts[reference.rpartition("/")[2]]["properties"]
        tuning[key] = former[name]
        former[name] = {**former[name], "deprecated": True}
    properties["compaction"]["deprecated"] = True
    return {"anyOf": [{"type": "object", "properties": tuning, "additionalProperties": False}, _NOTHING]}


_COMMENTED = re.compile(r"^( *)([a-z_0-9]+):(?: .*?)?(?: +# (.*))?$")


def describe_keys(schema: dict[str, Any], page: str) -> None:
    """Add the comments of the example of all keys in docs/feeds.md to the schema, as descriptions."""
    example = page.partition("\n## Every key\n")[2].partition("```yaml\n")[2].partition("```")[0]
    path: list[tuple[int, str]] = []
    for line in example.splitlines():
        if match := _COMMENTED.match(line):
            indent = len(match[1])
            path = [*(p for p in path if p[0] < indent), (indent, match[2])]
            if match[3] and (key := _find_key(schema, [name for _, name in path])):
                key["description"] = match[3]


def _find_key(schema: dict[str, Any], path: list[str]) -> dict[str, Any] | None:
    """Returns the schema of the key at that path of a feed file."""
    section: dict[str, Any] = schema
    for name in path:
        values = [schema["$defs"][v["$ref"].rpartition("/")[2]] if "$ref" in v else v for v in section.get("anyOf", ())]
        holder = next((v for v in (section, *values) if name in v.get("properties", {})), None)
        if holder is None:
            return None
        section = holder["properties"][name]
    return section
