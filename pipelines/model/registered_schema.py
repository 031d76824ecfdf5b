"""A schema as a registry has it."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.pipelines.errors import RegistryUnavailable

AVRO, JSON, PROTOBUF = "AVRO", "JSON", "PROTOBUF"


@dataclass(frozen=True, slots=True)
class RegisteredSchema:
    """`id` is its number in the registry or its GUID, `type` AVRO, PROTOBUF or JSON. The last of `texts` is the schema;
    before it is all that it refers to, each after what it refers to itself, and `names` are what it calls these.
    `subject` and `version` are empty and 0 where the registry was asked by number.
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
