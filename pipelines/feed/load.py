"""Reads feed files. Problems raise one FeedError, which names each file, key and remedy, and never quotes a value."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sluice.pipelines.contract.suite import CONTRACT, ContractError, read_contract
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.problems import problems_of, raise_problems
from sluice.pipelines.feed.registry import RegistrySettings
from sluice.pipelines.feed.sections import BOOTSTRAP, LOCAL_KAFKA, LOCAL_LOGIN, LOCAL_REGISTRY, REGISTRY, RecordFormat
from sluice.pipelines.feed.yaml_file import FileProblem, YamlError, read_yaml
from sluice.pipelines.records.avro.reader import AvroReader, WireFormat
from sluice.pipelines.records.avro.schema import AvroSchemaError
from sluice.pipelines.schema.schema import SchemaError
from sluice.pipelines.vocabulary.errors import FeedError
from sluice.pipelines.vocabulary.pages import page
from sluice.pipelines.vocabulary.units import safe_text

UNKNOWN = "unknown.invalid:9"
"""Kafka's address in a feed that was loaded without the section `kafka`."""


def load_feed(path: Path, environ: Mapping[str, str], optional: Container[str] = ()) -> Feed:
    """The feed in the file, with the contract in the file beside it, if there is one. Raises FeedError.

    Relative paths in it count from the parent of the file's folder. Variables are filled in from `environ`, and
    `${file:PATH}` from files as they are now: a secret that was changed serves from the next load on. A section in
    `optional` is left out as a whole if something is missing that it is to be filled from.
    """
    found = _load(path, environ, optional)
    if isinstance(found, Feed):
        return found
    raise_problems(found)


def load_feeds(folder: Path, environ: Mapping[str, str]) -> dict[str, Feed]:
    """Every feed in the folder's `*.yaml` files, by name. Raises one FeedError with all problems of all files."""
    if not folder.is_dir():
        raise FeedError(f"no folder {folder}", remedy="run in the project's folder, where feeds/ is, or name it")
    feeds: dict[str, tuple[Path, Feed]] = {}
    problems = _orphans(folder)
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".yaml", ".yml") and not p.name.startswith(".")):
        found = _load(path, environ)
        if isinstance(found, tuple):
            problems += found
            continue
        problems += [(str(path), p) for p in _clashes(found, feeds)]
        feeds.setdefault(found.name, (path, found))
    if problems:
        raise_problems(problems)
    return {name: feed for name, (_, feed) in feeds.items()}


def _load(
    path: Path, environ: Mapping[str, str], optional: Container[str] = ()
) -> Feed | tuple[tuple[str, FileProblem], ...]:
    found = _read(path, environ, optional)
    if isinstance(found, Feed):
        return _under_contract(found, path.with_suffix(CONTRACT))
    return tuple((str(path), p) for p in found)


def _under_contract(feed: Feed, path: Path) -> Feed | tuple[tuple[str, FileProblem], ...]:
    try:
        contract = read_contract(path, feed.columns)
    except ContractError as error:
        return tuple((str(path), FileProblem(p.place, p.what, p.remedy)) for p in error.problems)
    return feed.model_copy(update={"contract": contract}) if contract else feed


def _orphans(folder: Path) -> list[tuple[str, FileProblem]]:
    """Contract files without a feed. Somebody believes that these contracts hold."""
    found = sorted(p for p in folder.glob(f"*{CONTRACT}") if not p.name.startswith("."))
    names = [(p, f"{p.name.removesuffix(CONTRACT)}.yaml") for p in found]
    missing = [(p, name) for p, name in names if not (folder / name).exists()]
    return [(str(p), FileProblem("", f"has no {name} beside it", "name it as the feed's file")) for p, name in missing]


def _read(path: Path, environ: Mapping[str, str], optional: Container[str]) -> Feed | tuple[FileProblem, ...]:
    if not path.exists():
        near = ", ".join(sorted(p.name for p in path.parent.glob("*.yaml"))[:10])
        return (
            FileProblem("", "does not exist", f"feeds there: {near}" if near else f"create it; see {page('feeds')}"),
        )
    if path.suffix != ".yaml":
        return (FileProblem("", "does not end in .yaml", "rename it"),)
    root = path.resolve().parent.parent
    try:
        read = read_yaml(path, environ, root, optional)
    except YamlError as error:
        return error.problems
    data = {"feed": path.stem} | read.data
    if "kafka" in read.left_out:
        data["kafka"] = {"bootstrap": UNKNOWN}
    if "contract" in data:
        return (FileProblem("contract", "is unknown", f"a contract is a file of its own, {path.stem}{CONTRACT}"),)
    context = {"root": root, "filled_from_files": read.filled_from_files}
    if isinstance(data.get("registry", 0), dict | None) and (known := _known_registry(environ)):
        data["registry"] = {"url": known} | (data["registry"] or {})
    if data.get("format") == RecordFormat.AVRO:
        found = _with_avro(data, root)
        if isinstance(found, FileProblem):
            return (found,)
        data = found
    return _validate(reaching_kafka(data, environ), context)


@dataclass(frozen=True, slots=True)
class AvroAsked:
    """What an Avro feed's file says of its registry, and where its schema belongs. `subject` is never empty."""

    registry: RegistrySettings
    schema_file: Path
    subject: str


def avro_asked(path: Path, environ: Mapping[str, str]) -> AvroAsked:
    """The same for a feed whose schema_file need not be there yet. Raises FeedError."""
    root = path.resolve().parent.parent
    if not path.exists():
        raise FeedError(f"{path} does not exist", remedy="name a feed of this project")
    try:
        data = read_yaml(path, environ, root).data
    except YamlError as error:
        raise_problems([(str(path), p) for p in error.problems])
    said, name, topics = data.get("registry") or {}, data.get("schema_file"), data.get("topics")
    if data.get("format") != RecordFormat.AVRO or not isinstance(said, dict) or not isinstance(name, str):
        raise FeedError(f"{path.name} has no `format: avro` with `registry` and `schema_file`", remedy=page("formats"))
    known = _known_registry(environ)
    try:
        settings = RegistrySettings.model_validate(({"url": known} if known else {}) | said, context={"root": root})
    except ValueError as error:
        found = problems_of(error, RegistrySettings)
        raise_problems([(str(path), replace(p, key=f"registry.{p.key}".rstrip("."))) for p in found])
    named = topics[0] if isinstance(topics, list) and len(topics) == 1 else topics
    subject = settings.subject or (f"{named}-value" if isinstance(named, str) else None)
    if subject is None:
        raise FeedError(f"{path.name} reads several topics", remedy="name the subject: registry: {subject: …}")
    return AvroAsked(settings, root / Path(name), subject)


def _known_registry(environ: Mapping[str, str]) -> str | None:
    return environ.get(REGISTRY) or environ.get(LOCAL_REGISTRY)


def _with_avro(data: dict[str, Any], root: Path) -> dict[str, Any] | FileProblem:
    """The data of an Avro feed with its reader and columns, or what is wrong with its schema's file."""
    name, wire = data.get("schema_file"), data.get("wire_format", "confluent" if "registry" in data else "bare")
    if "schema" in data:
        return FileProblem("schema", "is for JSON", "the columns of an Avro feed are its schema's: name a schema_file")
    if not isinstance(name, str) or wire not in [*WireFormat]:
        return data  # validation says what is wrong
    path = root / Path(name)
    try:
        reader = AvroReader((path.read_text("utf-8"),), WireFormat(wire))
    except FileNotFoundError:
        return FileProblem(
            "schema_file",
            f"names {path}, which does not exist",
            f"write it, or: sluice schema pull {safe_text(str(data['feed']))}",
        )
    except (OSError, UnicodeDecodeError):
        return FileProblem("schema_file", f"names {path}, which cannot be read", "check its rights and its encoding")
    except SchemaError as error:
        first = error.problems[0]
        return FileProblem("schema_file", f"{safe_text(str(first))}", first.remedy)
    except AvroSchemaError as error:
        return FileProblem("schema_file", safe_text(str(error)), page("formats"))
    return data | {"avro": reader, "schema": reader.columns.texts()}


def reaching_kafka(data: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The feed file's data with Kafka's address, from the environment if the file names none, and with a login to the
    local Kafka if that one is secured and the file says nothing of security."""
    kafka, known = data.get("kafka", {}), environ.get(BOOTSTRAP) or environ.get(LOCAL_KAFKA)
    if not isinstance(kafka, dict):
        return data
    if known and kafka.get("bootstrap") is None:
        data = data | {"kafka": kafka | {"bootstrap": known}}
    login = environ.get(LOCAL_LOGIN)
    if login and "security_protocol" not in kafka and _local(data, environ):
        data = data | {"kafka": json.loads(Path(login).read_text()) | data["kafka"]}
    return data


def _local(data: dict[str, Any], environ: Mapping[str, str]) -> bool:
    return "kafka" in data and data["kafka"].get("bootstrap") == environ.get(LOCAL_KAFKA)


def _validate(data: dict[str, Any], context: dict[str, Any]) -> Feed | tuple[FileProblem, ...]:
    found: Feed | None = None
    problems: tuple[FileProblem, ...] = ()
    try:
        found = Feed.model_validate(data, context=context)
    except ValueError as error:
        problems = problems_of(error, Feed)
    return found or problems


def _clashes(feed: Feed, others: Mapping[str, tuple[Path, Feed]]) -> tuple[FileProblem, ...]:
    """What this feed shares with another and must not: a name, or on one Kafka a group or transactional id."""
    out = []
    for path, other in others.values():
        if other.name == feed.name:
            out.append(FileProblem("feed", f"is `{feed.name}` in {path.name} too", "give each feed a name of its own"))
        elif other.kafka.bootstrap == feed.kafka.bootstrap and other.group == feed.group:
            out.append(
                FileProblem("group", f"is shared with feed `{other.name}`", "each feed commits for a group of its own")
            )
        elif other.kafka.bootstrap == feed.kafka.bootstrap and other.transactional_id == feed.transactional_id:
            out.append(
                FileProblem("transactional_id", f"is shared with feed `{other.name}`", "they would fence each other")
            )
    return tuple(out)
