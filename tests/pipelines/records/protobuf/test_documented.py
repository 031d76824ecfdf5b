"""Protobuf types land as docs/formats.md documents them, and as Google's library writes and reads them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf import json_format

from sluice.pipelines.records.protobuf.schema import ProtoKind, get_kind
from tests.pipelines.records.json.rows import FIRST, by_offset
from tests.pipelines.records.protobuf.rows import convert, make_message_class, make_reader, normalize, read_by_google

DOCS = (Path(__file__).parents[4] / "docs" / "formats.md").read_text().split("## Protobuf")[1].split("\n## ")[0]
CASES = re.findall(r"^\| `(.+?)` \| `(.+)` \| `(.+)` \|$", DOCS, re.MULTILINE)
HELPERS = "message Line { string sku = 1; }\nenum Status { NONE = 0; PAID = 1; }\n"
IMPORTS = "".join(
    f'import "google/protobuf/{name}.proto";\n'
    for name in ("timestamp", "duration", "wrappers", "struct", "any", "empty")
)


def make_text(field: str) -> str:
    end = "" if field.endswith("}") else ";"
    return f'syntax = "proto3";\n{IMPORTS}{HELPERS}message R {{ {field}{end} }}'


@pytest.mark.parametrize(("field", "value", "lands"), CASES)
def test_documented_type_lands_as_documented(field: str, value: str, lands: str) -> None:
    reader = make_reader(make_text(field), "R")
    column = reader.columns.fields[0]
    assert (column.name, column.text) == ("x", lands)
    kind = make_message_class(reader.texts[-1])
    record = json_format.Parse(
        f'{{"x": {value}}}', kind(), descriptor_pool=kind.DESCRIPTOR.file.pool
    ).SerializeToString()
    landed, quarantined, drift = convert(reader, [record])
    assert (quarantined, [d for d in drift if d.field == "x"]) == (None, [])
    row = normalize(by_offset(landed, "kafka_offset")[FIRST]["x"], column.type)
    expected = read_by_google(kind, record)
    assert row is not None
    assert expected is not None
    assert row == expected["x"]


def test_documented_table_has_every_type() -> None:
    kinds = {
        get_kind(make_message_class(make_reader(make_text(f), "R").texts[-1]).DESCRIPTOR.fields[0])[0]
        for f, _, _ in CASES
    }
    assert kinds == set(ProtoKind)
