"""Full names of records' messages, by the registered schemas that the records name: subjects of record-name strategies.

An Avro record has the name of its schema, a Protobuf record that of its message, a record of JSON Schema the `title`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.avro.schema import parse
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.protobuf.schema import find_message, parse_descriptor
from sluice.pipelines.records.rows.value_reader import UnusableSchema, WriterSchemas
from sluice.pipelines.records.rows.wire_format import UNNAMED, WireFormat
from sluice.pipelines.records.rows.writer_schema_lookup import Opener
from sluice.pipelines.schema.arrays import as_mask

_MOST_KNOWN = 10_000


def _read_title(texts: Sequence[str]) -> str:
    document = json.loads(texts[-1])
    title = document.get("title") if isinstance(document, dict) else None
    return title if isinstance(title, str) else ""


_NAMES: dict[str, Callable[[tuple[str, ...]], str]] = {
    "avro": lambda texts: parse(texts).name,
    "json_schema": _read_title,
}


@dataclass(frozen=True, slots=True)
class NamedRecords:
    """The names of a chunk's records: `names[codes]`, None for tombstones. A code below 0 is one of a record that has
    none, for the reason `problems[-1 - code]`.
    """

    names: list[str | None]
    codes: Array
    problems: list[str]


class MessageNames:
    """Reads the names of one feed's records, which have this format and wire format. Not safe for two threads."""

    def __init__(self, form: str, wire: WireFormat, writers: WriterSchemas | None) -> None:
        self._form, self._writers, self._opener = form, writers, Opener(wire)
        self._known: dict[tuple[int, bytes], tuple[str, str]] = {}

    def read(self, chunk: pa.RecordBatch) -> NamedRecords:
        """Returns the names. Raises a SluiceError when the registry is out of reach."""
        schemas = self._opener.schemas(chunk)
        behind, which = [b""], np.zeros(chunk.num_rows, np.int64)
        if self._form == "protobuf":
            behind, which = self._opener.behind(chunk)
        pairs, codes = np.unique(np.stack([schemas, which], axis=1), axis=0, return_inverse=True)
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        names, problems, own = list[str | None]([None]), list[str](), list[int]()
        for schema, at in pairs.tolist():
            name, problem = self._find(schema, behind[at])
            own.append(len(names) if name else -1 - len(problems))
            (names if name else problems).append(name or problem)
        values = chunk.column(chunk.schema.get_field_index("value"))
        by_record = np.array(own, np.int64)[codes.reshape(-1)]
        return NamedRecords(names, np.where(as_mask(values.is_null()), 0, by_record), problems)

    def _find(self, schema: int, behind: bytes) -> tuple[str, str]:
        """The name, or the reason that there is none."""
        if schema < 0:
            return "", UNNAMED
        if (schema, behind) not in self._known:
            self._known[schema, behind] = self._learn(schema, behind)
        return self._known[schema, behind]

    def _learn(self, schema: int, behind: bytes) -> tuple[str, str]:
        number = self._opener.name(schema)
        try:
            texts = self._writers.texts(number) if self._writers else None
            if texts is None:
                return "", f"the registry has no schema {number}"
            name = self._find_message(texts, behind) if self._form == "protobuf" else _NAMES[self._form](texts)
        except UnusableSchema:
            return "", f"the schema {number} cannot be used"
        return name, "" if name else f"the schema {number} names no message"

    def _find_message(self, texts: tuple[str, ...], behind: bytes) -> str:
        from sluice.pipelines.records.protobuf.format import list_indexes, parse_path

        path = parse_path(behind)
        message = find_message(parse_descriptor(texts[-1])[0], list_indexes(path)) if path > 0 else None
        return str(message.full_name) if message is not None else ""
