"""Writers' schemas, kept in the lake beside the ledger, so that records decode long after their registry is gone.

Guarantee: a schema is kept before a record that it wrote lands. A number means the same schema for ever; registries
promise that, and what is kept is never written again. A landing that a registry once did not answer, or refused, does
not ask it again: each process finds out by itself, once.
"""

from __future__ import annotations

import json
import secrets
from contextlib import suppress

from sluice.pipelines.errors import Failed, LedgerCorrupt, RegistryForbidden, RegistryUnavailable, SluiceError
from sluice.pipelines.lake.paths import schema_path
from sluice.pipelines.model.registered_schema import RegisteredSchema
from sluice.pipelines.ports import Lake, Registry
from sluice.pipelines.records.formats import prepared
from sluice.pipelines.records.rows.value_reader import UnusableSchema
from sluice.pipelines.records.rows.wire_format import Named
from sluice.pipelines.util.units import safe_text

MOST_UNKNOWN = 1000
"""Numbers that the registry may not know, until a task asks for no more."""

_MOST_FAILED = 100
_failed: dict[str, SluiceError] = {}
"""Why a registry is not asked any more, by who asked it. A process carries out many tasks of one landing."""


class KeptSchemas:
    """`WriterSchemas` of one feed: from the lake, else from the registry, whose answer is kept first.

    Without a registry, what is not kept is not known. `types` are those of its schemas that count (none: all).
    """

    def __init__(
        self,
        lake: Lake,
        feed: str,
        registry: Registry | None = None,
        *,
        keep: bool = True,
        types: tuple[str, ...] = (),
    ) -> None:
        self._lake, self._feed, self._registry, self._keep, self._types = lake, feed, registry, keep, types
        self._known: dict[Named, RegisteredSchema | None] = {}
        self._own = secrets.token_hex(8)  # of this one and its copies in tasks

    def texts(self, id: Named) -> tuple[str, ...] | None:
        """The texts of a schema, the last, after all that it refers to; None where there is none of that number.

        Raises UnusableSchema for one that can read no record, RegistryUnavailable, RegistryForbidden, and Failed after
        too many numbers that nobody knows.
        """
        if id not in self._known:
            self._known[id] = self.find(id)
        schema = self._known[id]
        if schema is None:
            return None
        if self._types and schema.type not in self._types:
            raise UnusableSchema("", f"is a schema of type {safe_text(schema.type)}")
        return prepared(schema).texts

    def find(self, id: Named) -> RegisteredSchema | None:
        """The schema of that number, kept from here on."""
        path = schema_path(self._feed, id)
        content = self._lake.get(path)
        if content is not None:
            return _parsed(content, path)
        if self._registry is None:
            return None
        unknown = sum(k is None for k in self._known.values())
        if unknown >= MOST_UNKNOWN:
            raise Failed(
                f"feed {self._feed}: records name more than {unknown} schemas that the registry does not know",
                remedy="look at some: sluice peek; they may have another wire format, or come from another registry",
            )
        schema = self._ask(self._registry, id)
        if schema is not None:
            with suppress(UnusableSchema):  # kept as it came; whoever reads by it learns why it cannot
                schema = prepared(schema)
        if schema is not None and self._keep:
            self.keep(schema)
        return schema

    def _ask(self, registry: Registry, id: Named) -> RegisteredSchema | None:
        """The registry's answer. One that failed is not asked again, unless nothing is kept."""
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
        """Keep a schema that the registry told."""
        document = {"id": schema.id, "type": schema.type, "texts": schema.texts, "names": schema.names}
        self._lake.put_if_absent(schema_path(self._feed, schema.id), json.dumps(document).encode() + b"\n")


def _parsed(data: bytes, path: str) -> RegisteredSchema:
    try:
        document = json.loads(data)
        id, kind, texts, names = document["id"], document["type"], document["texts"], document.get("names", [])
        sound = isinstance(id, int | str) and isinstance(kind, str)
        if sound and texts and all(isinstance(t, str) for t in (*texts, *names)):
            return RegisteredSchema(id, kind, tuple(texts), names=tuple(names))
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise LedgerCorrupt(
        f"{path} is not a schema as Sluice keeps it",
        remedy="restore this file from a backup of the lake, or remove it while the registry has the schema",
    )
