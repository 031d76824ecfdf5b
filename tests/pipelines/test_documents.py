"""Results as JSON documents."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from functools import cached_property
from pathlib import PurePosixPath
from types import MappingProxyType

import pytest
from pydantic import SecretStr

from sluice.pipelines.errors import OffsetsLost
from sluice.pipelines.ledger.entries import KeyOffset
from sluice.pipelines.model.kafka import Key, Range, TopicPartition
from sluice.pipelines.model.receipts import Drift, DriftKind
from sluice.pipelines.util.documents import AsText, Derived, Flat, Instant, Internal, to_document, to_json

DRIFT = Drift(DriftKind.NEW, "coupon", 3, 17)
KEY = Key("orders", 1, "id#2")


class Level(IntEnum):
    LOW = 1


@dataclass(frozen=True, slots=True)
class Part:
    key: Flat[Key]
    offsets: Range


@dataclass(frozen=True)
class Result:
    part: Flat[Part]
    from_: AsText[TopicPartition]
    at: Instant
    began: Instant | None
    days: tuple[Instant, ...]
    former: tuple[Flat[Key], ...]
    later: tuple[Flat[Key], ...] | None
    ranges: AsText[tuple[Range, ...]]
    secret: Internal[str]
    error: Flat[OffsetsLost | None] = None

    @property
    def sum(self) -> Derived[int]:
        return 3

    @cached_property
    def level(self) -> Derived[Level]:
        return Level.LOW

    @property
    def other(self) -> int:
        return 4


RESULT = Result(Part(KEY, Range(0, 3)), KEY.tp, 1_000, None, (0, 1_000), (KEY,), None, (Range(0, 3),), "s3cr3t")


def test_fields_are_keys_in_order() -> None:
    assert to_document(DRIFT) == {"kind": "new", "field": "coupon", "records": 3, "first": 17, "type": ""}
    assert json.dumps(to_document(DRIFT)) == json.dumps(asdict(DRIFT))


def test_annotations_change_parts_of_a_document() -> None:
    assert to_document(RESULT) == {
        "topic": "orders",
        "partition": 1,
        "topic_id": "id",
        "offsets": [0, 3],
        "from": "orders:1",
        "at": "1970-01-01T00:00:01Z",
        "began": None,
        "days": ["1970-01-01T00:00:00Z", "1970-01-01T00:00:01Z"],
        "former": [{"topic": "orders", "partition": 1, "topic_id": "id"}],
        "later": None,
        "ranges": ["[0, 3)"],
        "sum": 3,
        "level": 1,
    }


def test_subclass_has_the_annotations_of_its_base() -> None:
    @dataclass(frozen=True)
    class Further(Result):
        more: int = 1

    assert to_document(Further(**{f.name: getattr(RESULT, f.name) for f in fields(RESULT)})) == {
        **to_document(RESULT),
        "more": 1,
    }


def test_ledger_items_and_errors_are_serialized_by_field() -> None:
    assert to_document(KeyOffset(key=KEY, offset=7)) == {
        "topic": "orders",
        "partition": 1,
        "topic_id": "id",
        "offset": 7,
    }
    error = OffsetsLost("gone", remedy="accept it", topic="orders")
    assert to_json([error]) == [{"error": "OffsetsLost", "message": "gone", "remedy": "accept it", "topic": "orders"}]


@pytest.mark.parametrize(
    ("value", "document"),
    [
        ((Range(0, 3),), [[0, 3]]),
        (MappingProxyType({1: DRIFT}), {"1": to_document(DRIFT)}),
        (PurePosixPath("/lake"), "/lake"),
        (frozenset({2}), [2]),
        (True, True),
        (None, None),
        (0.5, 0.5),
    ],
)
def test_values_are_serialized_by_their_type(value: object, document: object) -> None:
    assert to_json(value) == document


def test_secret_is_masked() -> None:
    assert "s3cr3t" not in json.dumps(to_json({"password": SecretStr("s3cr3t")}), default=str)
