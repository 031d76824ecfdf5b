"""Registered schemas, and the prefix of a record's bytes that identifies one. Light: no Arrow.

A feed declares the wire format of its records; nothing is guessed from bytes. docs/formats.md has the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sluice.pipelines.errors import RegistryUnavailable

AVRO, JSON, PROTOBUF = "AVRO", "JSON", "PROTOBUF"


@dataclass(frozen=True, slots=True)
class RegisteredSchema:
    """A schema of the registry with its references.

    `id` is its number or GUID, `type` AVRO, PROTOBUF or JSON. The last of `texts` is the schema; its references precede
    it, each after its own, and `names` are their names in the schema. `subject` and `version` are empty and 0 if the
    registry was queried by number.
    """

    id: int | str
    type: str
    texts: tuple[str, ...]
    subject: str = ""
    version: int = 0
    names: tuple[str, ...] = ()


def build_unavailable_error(url: str, why: str) -> RegistryUnavailable:
    """The error about a registry that does not answer."""
    return RegistryUnavailable(
        f"the schema registry {url} cannot be asked: {why}",
        remedy="nothing was landed by guess; run again when it answers",
    )


class WireFormat(StrEnum):
    """Where a record names the schema that it was written by."""

    CONFLUENT = "confluent"
    """A zero byte, and the schema's number in the registry, in four bytes, the highest first."""
    CONFLUENT_HEADERS = "confluent_headers"
    """Nothing before it. The record's header `__value_schema_id` has a zero byte and the number, or a byte 1 and the
    schema's GUID."""
    APICURIO = "apicurio"
    """A zero byte, and the schema's number in the registry, in eight bytes."""
    APICURIO3 = "apicurio3"
    """A zero byte, and the number in four bytes, as in CONFLUENT; but Protobuf's messages are named as in APICURIO."""
    APICURIO_HEADERS = "apicurio_headers"
    """Nothing before it. A header of `APICURIO_IDS` has one of the schema's two numbers, in eight bytes."""
    GLUE = "glue"
    """AWS Glue's: a byte 3, a byte 0 (5: what follows is compressed by zlib), and the UUID of the schema's version."""
    BARE = "bare"
    """Nothing: all records are written by the feed's own schema."""


PREFIX = {WireFormat.CONFLUENT: 5, WireFormat.APICURIO: 9, WireFormat.APICURIO3: 5, WireFormat.GLUE: 18}
"""The bytes before a record's own."""


def prefix(wire: WireFormat, id: int) -> bytes:
    """The bytes before a record by the schema of that number. Not for Glue, whose schemas have no numbers."""
    if wire in (WireFormat.BARE, *IN_HEADERS):
        return b""
    return b"\0" + id.to_bytes(PREFIX[wire] - 1, "big")


NUMBERED = frozenset({WireFormat.CONFLUENT, WireFormat.APICURIO3})
"""Those with the number in four bytes before a record."""
CONFLUENTS = frozenset({WireFormat.CONFLUENT, WireFormat.CONFLUENT_HEADERS})
"""Those of Confluent's serializers."""
ID_HEADER, KEY_ID_HEADER = "__value_schema_id", "__key_schema_id"
"""The headers that name the schemas of a value and of a key."""
IN_HEADERS = frozenset({WireFormat.CONFLUENT_HEADERS, WireFormat.APICURIO_HEADERS})
"""Those with the number in a header."""
APICURIO_IDS = {"contentId": "apicurio.value.contentId", "globalId": "apicurio.value.globalId"}
"""Apicurio's headers of a value, by the kind of number. A record may have both: the first of these counts."""
APICURIO_MESSAGE = "apicurio.protobuf.type"
"""Apicurio's header with the short name of a Protobuf message."""
KEY_HEADERS = {
    KEY_ID_HEADER: ID_HEADER,
    **{name.replace(".value.", ".key."): name for name in APICURIO_IDS.values()},
    f"{APICURIO_MESSAGE}.key": APICURIO_MESSAGE,
}
"""The headers about a key → those that say the same about a value."""

NO_HEADER = 70
"""The code of a record that does not name its schema as the wire format does."""
NOT_INFLATED = 87
"""The code of a record that zlib does not inflate, or only to more than it may have."""
UNNAMED = "it does not name its schema as the feed's wire_format has it"
UNZIPPED = "zlib does not inflate it, or to more than it may have"

Named = int | str
"""A schema's number in its registry, or its GUID; Apicurio's numbers in headers with their kind: `contentId-7`."""


def reference(name: str) -> bytes:
    """The prefix of a Protobuf record by Apicurio's serializers: a message whose first field names the record's."""
    own = name.rpartition(".")[2].encode()
    inside = b"\x0a" + varint(len(own)) + own
    return varint(len(inside)) + inside


def varint(number: int) -> bytes:
    """A number that is not below 0, as Protobuf has it: seven bits in each byte, the lowest first."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])
