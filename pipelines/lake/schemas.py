"""Writers' schemas, stored in the lake next to the ledger, so that records decode without their registry.

Guarantee: a schema is stored before a record that it wrote lands. A number always means the same schema within a
context: registries promise that, and stored schemas are overwritten only by those of another context. After one failure
or refusal of the registry, a process does not request from it again during a landing.
"""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from typing import Any

from sluice.pipelines.errors import Failed, LedgerCorrupt, RegistryForbidden, RegistryUnavailable, SluiceError
from sluice.pipelines.lake.paths import schema_path
from sluice.pipelines.ports import Lake, Registry
from sluice.pipelines.records.rows.value_reader import UnusableSchema
from sluice.pipelines.records.rows.wire_format import Named, RegisteredSchema
from sluice.pipelines.records.shape import prepare_schema
from sluice.pipelines.util.units import sanitize

MOST_UNKNOWN = 1000
"""The number of unknown schemas after which a task fails."""

_MOST_FAILED = 100
_failed: dict[str, SluiceError] = {}
"""The errors of registries that are not requested again, by landing. A process runs many tasks of one landing."""


class KeptSchemas:
    """`WriterSchemas` of one feed: from the lake, or from the registry, whose response is stored first.

    Without a registry, only stored schemas are known. `types` are the accepted types of schemas (none: all). A stored
    schema of another `context` of the registry is looked up again.
    """

    def __init__(
        self,
        lake: Lake,
        feed: str,
        registry: Registry | None = None,
        *,
        keep: bool = True,
        types: tuple[str, ...] = (),
        context: str = "",
    ) -> None:
        self._context = context
        self._lake, self._feed, self._registry, self._keep, self._types = lake, feed, registry, keep, types
        self._known: dict[Named, RegisteredSchema | None] = {}
        self._own = secrets.token_hex(8)  # of this one and its copies in tasks

    def texts(self, id: Named) -> tuple[str, ...] | None:
        """Returns the texts of a schema, with those that it refers to first; None for an unknown number.

        Raises UnusableSchema for a schema that can read no record, RegistryUnavailable, RegistryForbidden, and Failed
        after too many unknown numbers.
        """
        if id not in self._known:
            self._known[id] = self.find(id)
        schema = self._known[id]
        if schema is None:
            return None
        if self._types and schema.type not in self._types:
            raise UnusableSchema("", f"is a schema of type {sanitize(schema.type)}")
        return prepare_schema(schema).texts

    def find(self, id: Named) -> RegisteredSchema | None:
        """Returns the schema of that number, and stores it."""
        path = schema_path(self._feed, id)
        content = self._lake.get(path)
        if content is not None:
            stored, context = _parse(content, path)
            if self._registry is None or context == self._context:
                return stored
        if self._registry is None:
            return None
        unknown = sum(k is None for k in self._known.values())
        if unknown >= MOST_UNKNOWN:
            raise Failed(
                f"feed {self._feed}: records name more than {unknown} schemas that the registry does not know",
                remedy="inspect some: sluice peek; they may have another wire format, or come from another registry",
            )
        schema = self._ask(self._registry, id)
        if schema is not None:
            with suppress(UnusableSchema):  # stored unchanged; its readers get the error
                schema = prepare_schema(schema)
        if schema is not None and self._keep:
            self.keep(schema)
        return schema

    def _ask(self, registry: Registry, id: Named) -> RegisteredSchema | None:
        """Returns the registry's response. After a failure it is not requested again, unless nothing is stored."""
        if failed := _failed.get(self._own):
            raise type(failed)(failed.message, remedy=failed.remedy)
        try:
            return registry.schema(id)
        except (RegistryUnavailable, RegistryForbidden) as error:
            if self._keep:
                while len(_failed) >= _MOST_FAILED:
                    del _failed[next(iter(_failed))]
                _failed[self._own] = type(error)(error.message, remedy=error.remedy)
            raise

    def keep(self, schema: RegisteredSchema) -> None:
        """Store a schema from the registry."""
        document: dict[str, Any] = {"id": schema.id, "type": schema.type, "texts": schema.texts, "names": schema.names}
        if self._context:
            document["context"] = self._context
        path, data = schema_path(self._feed, schema.id), json.dumps(document).encode() + b"\n"
        if (stored := self._lake.get(path)) is not None and _parse(stored, path)[1] != self._context:
            self._lake.put(path, data)
        else:
            self._lake.put_if_absent(path, data)


def _parse(data: bytes, path: str) -> tuple[RegisteredSchema, str]:
    """Returns a stored schema, and the context of its number."""
    try:
        document = json.loads(data)
        id, kind, texts, names = document["id"], document["type"], document["texts"], document.get("names", [])
        sound = isinstance(id, int | str) and isinstance(kind, str)
        if sound and texts and all(isinstance(t, str) for t in (*texts, *names)):
            return RegisteredSchema(id, kind, tuple(texts), names=tuple(names)), str(document.get("context", ""))
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise LedgerCorrupt(
        f"{path} is not a schema file of Sluice",
        remedy="restore this file from a backup of the lake, or remove it while the registry has the schema",
    )
