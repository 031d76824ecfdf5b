"""Every block of every page: feeds are read, commands fit the command line, Python compiles, JSON and SQL parse.

Complete runs on pages are tested elsewhere: README and the tutorial in tests/test_readme.py, docs/reading.md in
tests/integration/test_reading.py, docs/testing.md in tests/testing/test_page.py.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from sluice.cli.main import build_app
from sluice.pipelines.feed.json_schema import build_schema
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.feed.sections import TUNING, Settings

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[a-z]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S)
MINIMUM = {"topics": "orders", "start": "earliest", "kafka": {"bootstrap": "127.0.0.1:9"}}
OTHERS = {"load_from", "attributes", "expectations"}
"""Keys of YAML that is no feed: a workspace, a component of Dagster's, a contract."""
PLACEHOLDERS = {"COMMAND", "…", "..."}
"""Placeholders for a command on a page."""


def find_blocks(*languages: str) -> Iterator[Any]:
    for page in PAGES:
        for match in _FENCE.finditer(page.read_text()):
            if match["language"] in languages:
                line = page.read_text().count("\n", 0, match.start()) + 1
                yield pytest.param(match["text"], id=f"{page.stem}:{line}")


def find_shell_lines() -> Iterator[Any]:
    """Yield each `sluice …` of a shell block, without comments, pipes and `&&`."""
    for block in find_blocks("sh", "console", "bash"):
        text = re.sub(r"\\\n\s*", " ", str(block.values[0]))
        prompted = re.findall(r"^\$ (.*)$", text, re.M)
        for line in prompted or text.splitlines():
            for command in re.split(r"\s(?:&&|\|\|?|;)\s", line):
                words = shlex.split(command, comments=True)
                if words[:1] == ["sluice"] and not PLACEHOLDERS & {*words}:
                    yield pytest.param(words[1:], id=f"{block.id} {' '.join(words[1:4])}")


SCHEMAS = {
    "avro": '{"type": "array", "items": "int"}',
    "protobuf": 'syntax = "proto3"; package acme; message Order { int32 x = 1; }',
    "json_schema": '{"type": "object", "properties": {"a": {"type": "string"}}}',
}


def test_pages_name_the_wheel_without_its_version() -> None:
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", *(ROOT / "infra").rglob("*.md"), ROOT / "infra/image/Containerfile"]
    assert not [page for page in pages if re.search(r"kafka_sluice-\d", page.read_text())]


@pytest.mark.parametrize("text", list(find_blocks("yaml")))
def test_feed_examples_are_valid(text: str, tmp_path: Path) -> None:
    """A part of a feed file is completed with the required keys of a feed."""
    keys = yaml.safe_load(re.sub(r"\$\{[^}]*\}", "staging-environment-1", text))
    if OTHERS & {*keys}:
        return
    kafka = MINIMUM["kafka"] | (keys.get("kafka") or {})  # type: ignore[operator]
    feed = MINIMUM | keys | {"kafka": kafka}
    if "schema" in keys:
        feed.setdefault("format", "json")
    path = tmp_path / "feeds" / f"{feed.get('feed', 'orders')}.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(feed))
    outputs = (keys.get("split") or {}).get("into") or {}
    for section in (keys, keys.get("key") or {}, *({"format": keys.get("format")} | o for o in outputs.values())):
        if section.get("schema_file"):
            (tmp_path / section["schema_file"]).parent.mkdir(exist_ok=True)
            (tmp_path / section["schema_file"]).write_text(SCHEMAS[section["format"]])
    load_feed(path, {})


@cache
def build_command() -> Any:
    """Returns the command line, built once for all mentions."""
    return typer.main.get_command(build_app())


@pytest.mark.parametrize("words", list(find_shell_lines()))
def test_command_examples_are_valid(words: list[str]) -> None:
    command = build_command()
    context = None
    while hasattr(command, "commands") and words and words[0] in command.commands:
        context = command.context_class(command, info_name=words[0], parent=context)
        command, words = command.commands[words[0]], words[1:]
    if not {"--help", "-h", "--version"} & {*words}:
        assert not hasattr(command, "commands"), f"no command {words}"
        command.make_context("sluice", list(words), parent=context, resilient_parsing=False)


def list_mentions() -> Iterator[Any]:
    """Yield each `sluice …` in the text of a page, or in an indented block."""
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = _FENCE.sub("", page.read_text())
        mentioned = [
            *re.findall(r"(?<!`)`(sluice\s[^`]+)`(?!`)", text),
            *re.findall(r"^ {4}(?:\$ )?(sluice .*)$", text, re.M),
        ]
        for mention in dict.fromkeys(" ".join(re.sub(r"[…|#].*", "", m, flags=re.S).split()) for m in mentioned):
            yield pytest.param(mention.split()[1:], id=f"{page.stem} {mention}")


@pytest.mark.parametrize("words", list(list_mentions()))
def test_commands_in_text_exist_with_their_options(words: list[str]) -> None:
    command = build_command()
    while hasattr(command, "commands") and words and words[0] not in PLACEHOLDERS:
        assert words[0].startswith("-") or words[0] in command.commands, words
        if words[0].startswith("-"):
            break
        command, words = command.commands[words[0]], words[1:]
    options = {option for p in command.params for option in (*p.opts, *p.secondary_opts)} | {
        "--help",
        "-h",
        "--version",
    }
    plain = [word.strip("[](),.;").partition("=")[0] for word in words]
    assert [word for word in plain if word.startswith("-") and word.strip("-") and word not in options] == []


@pytest.mark.parametrize("text", list(find_blocks("python")))
def test_python_examples_compile(text: str) -> None:
    compile(text, "page", "exec")


@pytest.mark.parametrize("text", list(find_blocks("json")))
def test_json_examples_parse(text: str) -> None:
    json.loads(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_wrap_at_120_characters(page: Path) -> None:
    text = _FENCE.sub("", re.sub(r"<!-- results -->.*<!-- /results -->", "", page.read_text(), flags=re.S))
    unbreakable = re.compile(r"\s*(\||\!\[|<|    |`[^`]*`.?$)")  # lines that cannot be wrapped
    long_lines = [line for line in text.splitlines() if len(line) > 120 and not unbreakable.match(line)]
    assert not long_lines, f"{len(long_lines)} lines: {long_lines[0]}"


@pytest.mark.parametrize(
    "page",
    [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs/developers/design").glob("*.md"))],
    ids=lambda page: page.stem,
)
def test_files_named_by_pages_exist(page: Path) -> None:
    paths = re.findall(r"`((?:pipelines|resources|assets|cli|tests|infra)/[\w/.]*)`", page.read_text())
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_picture_is_on_a_page_and_every_photo_is_taken_by_the_script() -> None:
    """A photo is a PNG of the running product. Other pictures are drawings."""
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "infra" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    pictures = {path.name for path in (ROOT / "docs").rglob("images/*")}
    used = {name for page in PAGES for name in re.findall(r"images/([\w.-]+)", page.read_text())}
    assert pictures == used
    photos = {*script.PAGES, *script.REFUSED, *script.AGAIN}
    assert {name for name in pictures if name.endswith(".png")} == photos


def test_comment_of_mkdocs_names_the_site_folder() -> None:
    lines = (ROOT / "mkdocs.yml").read_text().splitlines()
    (folder,) = (line.removeprefix("site_dir: ") for line in lines if line.startswith("site_dir: "))
    assert f"builds it into {folder}." in lines[0]


def _import_site() -> Any:
    spec = importlib.util.spec_from_file_location("sluice_site", ROOT / "infra" / "site.py")
    assert spec
    assert spec.loader
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    return site


def test_site_keeps_each_version_and_latest_is_the_newest(tmp_path: Path) -> None:
    pages, folder = tmp_path / "site", tmp_path / "all"
    for version in ("0.9.0", "v0.10.0", "v0.9.1"):
        pages.mkdir()
        (pages / "index.html").write_text(version)
        folder.mkdir(exist_ok=True)
        _import_site().add_version(pages, folder, version)
        shutil.rmtree(pages)
    assert [(e["version"], e["aliases"]) for e in json.loads((folder / "versions.json").read_text())] == [
        ("0.10", ["latest"]),
        ("0.9", []),
    ]
    texts = {name: (folder / name / "index.html").read_text() for name in ("0.9", "0.10", "latest")}
    assert texts == {"0.9": "v0.9.1", "0.10": "v0.10.0", "latest": "v0.10.0"}


def test_every_key_of_the_parser_is_documented() -> None:
    site = _import_site()
    documented_keys = {line.split("`")[1] for line in site.render_keys().splitlines() if line.startswith("| `")}
    in_files_of_their_own = {"sluice.pipelines.feed.project_files"}
    modules = {s: s.__module__ for s in Settings.__subclasses__()}
    sections = [
        s for s, m in modules.items() if m.startswith("sluice.pipelines.feed.") and m not in in_files_of_their_own
    ]
    assert len(sections) > 15
    for section in sections:
        for name, field in section.model_fields.items():
            key = field.alias or name
            documented = any(n == key or n.endswith(f".{key}") for n in documented_keys)
            tuned = any(old.endswith(f".{key}") and f"tuning.{new}" in documented_keys for new, old in TUNING.items())
            assert field.exclude or documented or tuned or key in SECTIONS, key
    moved = {old.partition(".")[0] for old in TUNING.values()}
    assert {n.partition(".")[0] for n in documented_keys} | {
        "iceberg",
        "delta",
        "quarantine_limit",
        "by",
        "into",
    } | moved >= SECTIONS
    assert {"kafka.bootstrap", "registry.url", "key.schema_file", "table.iceberg.name"} <= documented_keys


SECTIONS = {
    "kafka",
    "registry",
    "key",
    "protect",
    "changes",
    "split",
    "by",
    "into",
    "s3",
    "gcs",
    "azure",
    "window",
    "offsets",
    "dead_letters",
    "landing",
    "compaction",
    "table",
} | {*("limits", "policies", "alerts", "fetch", "spark", "iceberg", "delta", "quarantine_limit")}
"""Keys of a feed file that have keys of their own."""


def test_feeds_page_lists_the_keys_of_every_section() -> None:
    """The generated table lists sections that the example omits, from the schema of the models."""
    schema = build_schema("feed")["$defs"]
    sections = {
        "registry": "RegistrySettings",
        "key": "KeySettings",
        "changes": "ChangesSettings",
        "split": "SplitSettings",
        "split.by": "SplitBy",
        "split.into": "OutputSettings",
        "table": "TableSettings",
        "table.iceberg": "IcebergSettings",
    }
    rows = [f"| `{s}` | {', '.join(f'`{k}`' for k in schema[d]['properties'])} |" for s, d in sections.items()]
    expected = "\n".join(["| section | keys |", "|---|---|", *rows])
    page = (ROOT / "docs/feeds.md").read_text()
    assert [k for k in schema["KafkaSettings"]["properties"] if f"`{k}`" not in page and k != "bootstrap"] == []
    listed = page.partition("<!-- keys: generated, see tests/test_docs.py -->\n")[2].partition("\n<!-- /keys -->")[0]
    assert listed == expected
