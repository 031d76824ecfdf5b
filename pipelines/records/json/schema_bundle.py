"""One JSON Schema of several: what a schema refers to, as definitions in it, each by the name that refers to it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sluice.pipelines.records.json.schema_document import loaded
from sluice.pipelines.records.rows.value_reader import UnusableSchema


def bundled(texts: Sequence[str], names: Sequence[str]) -> str:
    """The last of the texts, as JSON for people, with the others in it. Raises UnusableSchema."""
    root = loaded(texts[-1])
    if names and not isinstance(root, dict):
        raise UnusableSchema("", "is no object")
    for name, text in zip(names, texts, strict=False):
        found = loaded(text)
        key = "definitions" if "definitions" in root else "$defs"
        root.setdefault(key, {})[name] = found | {"$id": name} if isinstance(found, dict) else found
    return json.dumps(root, indent=2, ensure_ascii=False)
