"""Bundles JSON Schemas into one: referenced schemas become definitions, by the name of the reference."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sluice.pipelines.records.json.schema_document import load_json
from sluice.pipelines.records.rows.value_reader import UnusableSchema


def bundle_texts(texts: Sequence[str], names: Sequence[str]) -> str:
    """The last of the texts, as JSON for people, with the others in it. Raises UnusableSchema."""
    root = load_json(texts[-1])
    if names and not isinstance(root, dict):
        raise UnusableSchema("", "is no object")
    for name, text in zip(names, texts, strict=False):
        document = load_json(text)
        key = "definitions" if "definitions" in root else "$defs"
        root.setdefault(key, {})[name] = document | {"$id": name} if isinstance(document, dict) else document
    return json.dumps(root, indent=2, ensure_ascii=False)
