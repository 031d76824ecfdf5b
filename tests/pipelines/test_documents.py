"""Values as JSON documents."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import MappingProxyType

from sluice.pipelines.model.kafka import Key, Range
from sluice.pipelines.model.receipts import Drift, DriftKind
from sluice.pipelines.util.documents import document_of

DRIFT = Drift(DriftKind.NEW, "coupon", 3, 17)


def test_document_without_names_has_all_fields_in_order() -> None:
    assert document_of(DRIFT) == {"kind": "new", "field": "coupon", "records": 3, "first": 17, "type": ""}
    assert json.dumps(document_of(DRIFT)) == json.dumps(asdict(DRIFT))


def test_names_select_attributes_and_paths_in_given_order() -> None:
    document = document_of(DRIFT, "first kind sort=kind.name")
    assert list(document.items()) == [("first", 17), ("kind", "new"), ("sort", "NEW")]


def test_properties_and_nested_values_are_serialized() -> None:
    assert document_of(Key("orders", 1, "id#2"), "topic partition topic_id") == {
        "topic": "orders",
        "partition": 1,
        "topic_id": "id",
    }

    class Holder:
        ranges = (Range(0, 3),)
        drift = MappingProxyType({"a": DRIFT})
        missing = None

    assert document_of(Holder(), "ranges missing drift") == {
        "ranges": [[0, 3]],
        "missing": None,
        "drift": {"a": document_of(DRIFT)},
    }
