"""`sluice schema` without requests to a registry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Sluice

FEED = """kafka: {bootstrap: 'localhost:9092'}
topics: [orders]
start: earliest
format: FORMAT
schema_file: schemas/order
registry: {url: 'http://127.0.0.1:9'}
"""
PROTO = 'syntax = "proto3"; message Order { string id = 1; MORE }'
AVRO = '{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "string"}MORE]}'
FORMATS = {"protobuf": (PROTO, "int32 items = 2;"), "avro": (AVRO, ', {"name": "items", "type": "int"}')}


def write_feed(project: Path, format_: str) -> Path:
    """Write a feed of the format. Return the file of the schema that is to be registered next."""
    text, more = FORMATS[format_]
    (project / "feeds" / "orders.yaml").write_text(FEED.replace("FORMAT", format_))
    (project / "schemas").mkdir()
    (project / "schemas" / "order").write_text(text.replace("MORE", ""))
    (project / "next").write_text(text.replace("MORE", more))
    return project / "next"


@pytest.mark.parametrize("format_", sorted(FORMATS))
def test_schema_diff_accepts_an_unregistered_schema_file(project: Path, sluice: Sluice, format_: str) -> None:
    file = write_feed(project, format_)
    ran: Any = sluice("schema", "diff", "orders", "--file", str(file), "--json")
    document = json.loads(ran.out)
    assert (ran.code, document["file"]) == (1, str(file))
    assert document["changes"] == [{"column": "items", "now": None, "then": "int32 not null"}]
    assert sluice("schema", "diff", "orders", "--file", str(project / "schemas" / "order")).code == 0


@pytest.mark.parametrize(("text", "message"), [("message", "makes no columns: "), (None, "cannot be read")])
def test_invalid_or_missing_schema_file_is_reported(
    project: Path, sluice: Sluice, text: str | None, message: str
) -> None:
    file = write_feed(project, "protobuf")
    file.write_text(text) if text else file.unlink()
    ran: Any = sluice("schema", "diff", "orders", "--file", str(file))
    assert ran.code == 2
    assert message in ran.err


def test_empty_registry_section_takes_its_url_from_the_environment(
    project: Path, sluice: Sluice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `sluice demo` writes it. Without the section, records would have been read as if they named no schema."""
    write_feed(project, "protobuf")
    path = project / "feeds" / "orders.yaml"
    path.write_text(path.read_text().rpartition("registry:")[0] + "registry:            # the project's own\n")
    ran: Any = sluice("schema", "show", "orders")
    assert (ran.code, "registry.url" in ran.err) == (2, True)
    monkeypatch.setenv("SCHEMA_REGISTRY_URL", "http://127.0.0.1:9")
    ran = sluice("schema", "show", "orders")
    assert "wire format  confluent" in ran.out
    assert "registry     http://127.0.0.1:9" in ran.out
