"""Whether records of a writer's message can be read as the feed's, and what only the writer has.

Protobuf's wire does not say types: a number written as `sint32` is another one read as `int32`. So the writer's and
the feed's fields of one number must be of types that read each other's bytes alike. Source: "Updating A Message Type"
in Protobuf's language guide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sluice.pipelines.records.protobuf.schema import Meaning, ProtoField, ProtoKind, ProtoMessage, is_repeated, kind_of

_ALIKE = (
    {ProtoKind.INT32, ProtoKind.UINT32, ProtoKind.INT64, ProtoKind.UINT64, ProtoKind.BOOL, ProtoKind.ENUM},
    {ProtoKind.SINT32, ProtoKind.SINT64},
    {ProtoKind.STRING, ProtoKind.BYTES},
    {ProtoKind.FIXED32, ProtoKind.SFIXED32},
    {ProtoKind.FIXED64, ProtoKind.SFIXED64},
)
Unknown = Callable[[ProtoMessage, int, str], None]
"""Told of a field that only the writer has: the feed's message that it is in, its number, its name."""


class Incompatible(ValueError):
    """Records of the writer's message cannot be read as the feed's: the place, and why."""


def compare(writer: Any, reader: ProtoMessage, unknown: Unknown, path: str = "") -> None:
    """Compare a writer's descriptor with the feed's message. Raises Incompatible."""
    own = {f.number: f for f in reader.fields}
    if reader.meaning is Meaning.JSON:
        return
    for w in writer.fields:
        r = own.get(w.number)
        if r is None:
            unknown(reader, w.number, w.name)
            continue
        where = f"{path}.{r.name}" if path else r.name
        _check(w, r, where)
        if r.message is not None and w.message_type is not None:
            compare(w.message_type, r.message, unknown, where)


def _check(w: Any, r: ProtoField, where: str) -> None:
    kind, group = kind_of(w)
    same = kind is r.kind and group == r.group
    alike = any(kind in a and r.kind in a for a in _ALIKE)
    if not (same or alike):
        raise Incompatible(f"{where}: {kind} was written, and {r.kind} is read")
    if r.message is not None:
        _check_messages(w.message_type, r.message, where)
    scalar = r.message is None and r.kind not in (ProtoKind.STRING, ProtoKind.BYTES)
    if is_repeated(w) and not r.repeated and scalar:
        raise Incompatible(f"{where}: a list was written, and one value is read")


def _check_messages(w: Any, r: ProtoMessage, where: str) -> None:
    """Messages of other names read each other's fields, unless one of them means more than a struct."""
    more = r.meaning in (Meaning.TIME, Meaning.WRAPPER, Meaning.JSON)
    if (more or w.full_name.startswith("google.protobuf.")) and w.full_name != r.name:
        raise Incompatible(f"{where}: {w.full_name} was written, and {r.name} is read")
