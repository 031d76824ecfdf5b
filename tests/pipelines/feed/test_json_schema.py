"""JSON Schemas accept every feed file of the repository, and refuse wrong files as the parser does."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from sluice.cli.more import demo
from sluice.pipelines.errors import FeedError
from sluice.pipelines.feed.json_schema import MODELS, build_schema, describe_keys
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.feed.project_files import load_fleet, load_notify
from tests.test_docs import OTHERS, find_blocks

ROOT = Path(__file__).parents[3]
FOLDERS = (ROOT / "feeds", *(ROOT / "examples").rglob("feeds"))
FILES = sorted(p for folder in FOLDERS for p in folder.glob("*.yaml"))
MINIMUM = {"topics": "orders", "start": "earliest", "kafka": {"bootstrap": "127.0.0.1:9"}}


@cache
def make_validator(kind: str) -> Draft202012Validator:
    return Draft202012Validator(build_schema(kind))


def check(kind: str, keys: Any) -> list[str]:
    """Returns the places of the schema's errors."""
    return sorted({e.json_path for e in make_validator(kind).iter_errors(keys)})


@pytest.mark.parametrize("kind", MODELS)
def test_schema_is_valid(kind: str) -> None:
    Draft202012Validator.check_schema(build_schema(kind))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.parent.parent.name)
def test_every_feed_file_of_the_repository_passes(path: Path) -> None:
    assert check("feed", yaml.safe_load(path.read_text())) == []


@pytest.mark.parametrize("text", list(find_blocks("yaml")))
def test_every_feed_of_the_docs_passes(text: str) -> None:
    keys = yaml.safe_load(text.replace('"${', '"x${'))
    if OTHERS & {*keys}:
        return
    assert check("feed", {"topics": "orders", "start": "earliest"} | keys) == []


def test_documented_keys_are_in_the_schema_and_old_places_deprecated() -> None:
    schema = build_schema("feed")
    assert {"topics", "kafka", "tuning", "feed"} <= {*schema["properties"]}
    assert {"reader", "key_reader", "contract"}.isdisjoint(schema["properties"])
    assert schema["required"] == ["topics", "start"]
    assert schema["$defs"]["FetchSettings"]["properties"]["active_slices"]["deprecated"]
    assert "deprecated" not in schema["properties"]["tuning"]["anyOf"][0]["properties"]["active_ranges"]
    assert {"url", "token", "subject"} <= {*schema["$defs"]["RegistrySettings"]["properties"]}


def test_keys_have_the_comments_of_the_page() -> None:
    schema = build_schema("feed")
    describe_keys(schema, (ROOT / "docs/feeds.md").read_text())
    tuning = schema["properties"]["tuning"]["anyOf"][0]["properties"]
    assert schema["properties"]["lake"]["description"] == "a folder, relative to the project, or s3://bucket/prefix"
    assert tuning["range_bytes"]["description"] == "planned size of one offset range"
    assert schema["$defs"]["QuarantineLimit"]["properties"]["at_most"]["description"].startswith("records, whatever")
    assert schema["$defs"]["WindowSettings"]["properties"]["length"]["description"].startswith("divides an hour")
    Draft202012Validator.check_schema(schema)


WRONG = [
    ({"topic": "orders"}, "$"),
    ({"topics": 5}, "$.topics"),
    ({"start": ["earliest"]}, "$.start"),
    ({"format": "xml"}, "$.format"),
    ({"window": {"length": 5}}, "$.window"),
    ({"window": {"hours": "1h"}}, "$.window"),
    ({"kafka": {"bootstrap": "127.0.0.1:9", "security_protocol": "TLS"}}, "$.kafka"),
    ({"kafka": {"bootstrap": "127.0.0.1:9", "group_id": "x"}}, "$.kafka"),
    ({"tuning": {"max_tasks": 0}}, "$.tuning"),
    ({"tuning": {"task_bytes": "much"}}, "$.tuning"),
    ({"policies": {"quarantine_limit": {"share": 2}}}, "$.policies"),
    ({"table": {"iceberg": {}}}, "$.table"),
    ({"s3": {"sse": "none"}}, "$.s3"),
]


@pytest.mark.parametrize(("keys", "where"), WRONG)
def test_a_wrong_feed_file_fails_in_both(keys: dict[str, Any], where: str, tmp_path: Path) -> None:
    feed = MINIMUM | keys
    assert check("feed", feed) == [where]
    path = tmp_path / "feeds" / "orders.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(feed))
    with pytest.raises(FeedError):
        load_feed(path, {})


RIGHT = [
    {"window": "15m"},
    {"window": {"settle": "1m"}},
    {"limits": {"task_bytes": 5}},
    {"limits": {"records": "${RECORDS}"}, "isolation": "${ISOLATION:-read_committed}"},
    {"registry": None, "lake": None},
    {"spark": {"conf": {"spark.executor.cores": 2, "spark.x": True}}, "s3": {"tags": {"team": 5}}},
    {"table": {"iceberg": {"name": "db.orders", "catalog": "prod"}}},
    {"topics": {"include": ["a.*"], "exclude": []}},
    {"start": "7d", "alerts": {"lag": "2h"}, "tuning": {"task_bytes": "64 MiB", "spark_start_timeout": "90s"}},
]


@pytest.mark.parametrize("keys", RIGHT)
def test_a_right_feed_file_passes_in_both(keys: dict[str, Any], tmp_path: Path) -> None:
    feed = MINIMUM | keys
    assert check("feed", feed) == []
    path = tmp_path / "feeds" / "orders.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(feed))
    load_feed(path, {"RECORDS": "5"})


@pytest.mark.parametrize("kind", ["fleet", "notify"])
def test_files_of_the_project(kind: str, tmp_path: Path) -> None:
    right = {
        "fleet": {"feeds_at_once": 2, "deadline": "20m"},
        "notify": {"webhook": "${file:/run/hook}", "email": {"server": "mail", "sender": "a@b", "to": ["c@d"]}},
    }[kind]
    assert check(kind, right) == []
    assert check(kind, right | {"nothing": 1}) == ["$"]
    load = load_fleet if kind == "fleet" else load_notify
    (tmp_path / f"{kind}.yaml").write_text("nothing: 1")
    with pytest.raises(FeedError):
        load(tmp_path, {})


def test_the_feed_of_the_demo_passes() -> None:
    text = demo._FEED_FILE.format(feed="orders", columns=demo._COLUMNS)
    lake = demo._LAKE_LINES.format(lake="s3://demo/lake", endpoint="http://127.0.0.1:9", region="local")
    assert check("feed", yaml.safe_load(text + lake)) == []
