"""Reads feed files. Problems raise one FeedError, which names each file, key and remedy, and never quotes a value."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sluice.pipelines.contract.expectation import Contract
from sluice.pipelines.contract.suite import CONTRACT, ContractError, read_contract
from sluice.pipelines.errors import FeedError, docs_command
from sluice.pipelines.feed.changes_section import ChangeFormat, build_envelope
from sluice.pipelines.feed.feed import LEVEL, Feed, Level, build_unmatched_error, is_of_raw
from sluice.pipelines.feed.kafka_section import RegistrySettings
from sluice.pipelines.feed.problems import NAMES, problems_of, raise_problems
from sluice.pipelines.feed.project_files import load_fleet
from sluice.pipelines.feed.sections import (
    BOOTSTRAP,
    LOCAL_KAFKA,
    LOCAL_LOGIN,
    LOCAL_REGISTRY,
    MOVED_KEYS,
    REGISTRY,
    TUNING,
    UNKNOWN_KAFKA,
    RecordFormat,
)
from sluice.pipelines.feed.split_section import SplitSettings
from sluice.pipelines.feed.yaml_file import FileProblem, YamlError, parse_yaml, read_yaml
from sluice.pipelines.model.receipts import ENGINE, EngineKind
from sluice.pipelines.records.rows.split_rule import Otherwise
from sluice.pipelines.records.rows.value_reader import KEY_PREFIX, KeyReader, Reader, UnusableSchema
from sluice.pipelines.records.rows.wire_format import CONFLUENTS, WireFormat
from sluice.pipelines.records.shape import READERS
from sluice.pipelines.schema.protection import find_unmatched
from sluice.pipelines.schema.schema import Schema, SchemaError, parse_field
from sluice.pipelines.util.units import sanitize

_KEY = re.compile(r"\bfeed[\"']?\s*:")
_NO_NAME = FileProblem("", "has a name that no feed can have", f"rename it, or write `feed:` in it: {NAMES}")


def load_feed(
    path: Path, environ: Mapping[str, str], optional: Container[str] = (), folder: Path | None = None
) -> Feed:
    """Returns the feed in the file, with the contract in the file next to it, if there is one. Raises FeedError.

    Relative paths in it count from the parent of `folder`, or of the file's folder. Variables are filled in from
    `environ`, and `${file:PATH}` from files as they are now: a secret that was changed serves from the next load on. A
    section in `optional` is left out as a whole if something is missing that it is to be filled from.
    """
    result = _load(path, environ, optional, folder)
    if isinstance(result, Feed):
        return result
    raise_problems(result)


def list_feed_files(folder: Path) -> list[Path]:
    """Returns the `*.yaml` and `*.yml` files in the folder and below, sorted, without hidden files and folders."""
    return _list_visible(folder, ".yaml", ".yml")


def _list_visible(folder: Path, *endings: str) -> list[Path]:
    files = (p for p in folder.rglob("*") if p.name.endswith(endings))
    return sorted(p for p in files if not any(part.startswith(".") for part in p.relative_to(folder).parts))


def find_feed_file(folder: Path, name: str) -> Path:
    """Returns the file of that feed, in the folder or below; without one, the path of a new file.

    A file names its feed by the key `feed`, or else by its own name, which also finds unreadable files.
    """
    usual = folder / f"{name}.yaml"
    if usual.exists() and _read_name(usual) == name:
        return usual
    likely_first = sorted(list_feed_files(folder), key=lambda path: path.name != usual.name)
    return next((path for path in likely_first if _read_name(path) == name), usual)


def _read_name(path: Path) -> str:
    try:
        text = path.read_text("utf-8")
        data = parse_yaml(text) if _KEY.search(text) else None
    except (OSError, UnicodeDecodeError, YamlError):
        return path.stem
    return str(data.get("feed") or path.stem) if isinstance(data, dict) else path.stem


def load_feeds(folder: Path, environ: Mapping[str, str]) -> dict[str, Feed]:
    """Returns every feed of the folder's files, by name. Raises one FeedError with all problems of all files."""
    if not folder.is_dir():
        raise FeedError(f"no folder {folder}", remedy="run in the project's folder, where feeds/ is, or name it")
    feeds: dict[str, tuple[Path, Feed]] = {}
    problems = _orphans(folder)
    for path in list_feed_files(folder):
        result = _load(path, environ, folder=folder)
        if isinstance(result, tuple):
            problems += result
            continue
        problems += [(str(path), p) for p in clashes(result, feeds.values())]
        feeds.setdefault(result.name, (path, result))
    if problems:
        raise_problems(problems)
    return {name: feed for name, (_, feed) in feeds.items()}


def _load(
    path: Path, environ: Mapping[str, str], optional: Container[str] = (), folder: Path | None = None
) -> Feed | tuple[tuple[str, FileProblem], ...]:
    result = _read(path, environ, optional, (folder or path.resolve().parent).resolve().parent)
    if not isinstance(result, Feed):
        return tuple((str(path), p) for p in result)
    if not result.outputs:
        return _under_contract(result, path.with_suffix(CONTRACT))
    outputs, problems = list[Feed](), list[tuple[str, FileProblem]]()
    if (own := path.with_suffix(CONTRACT)).exists():
        names = ", ".join(f"{d.dataset}{CONTRACT}" for d in result.outputs)
        what = "is the contract of a feed with `split`, which has no rows of its own"
        problems.append((str(own), FileProblem("", what, f"give each output its own: {names}")))
    for output in result.outputs:
        loaded = _under_contract(output, path.with_suffix(f".{output.output}{CONTRACT}"))
        if isinstance(loaded, Feed):
            outputs.append(loaded)
        else:
            problems += loaded
    return tuple(problems) or result.model_copy(update={"outputs": tuple(outputs)})


def _under_contract(feed: Feed, path: Path) -> Feed | tuple[tuple[str, FileProblem], ...]:
    try:
        contract = read_contract(path, feed.columns, feed.shape.column_rules)
    except ContractError as error:
        return tuple((str(path), FileProblem(p.place, p.what, p.remedy)) for p in error.problems)
    own = feed.reader.expectations if feed.reader else ()
    keys = feed.key_reader.expectations if feed.key_reader else ()
    expectations = (*own, *keys, *(contract.expectations if contract else ()))
    both = Contract(tuple(replace(e, place=position) for position, e in enumerate(expectations)))
    return feed.model_copy(update={"contract": both}) if expectations else feed


def _orphans(folder: Path) -> list[tuple[str, FileProblem]]:
    """Contract files without a feed. Somebody believes that these contracts hold. Copies of others that do are
    left by a killed rename."""
    problems, contracts = [], [path for path in _list_visible(folder, CONTRACT) if path.is_file()]
    holding = {p.read_bytes() for p in contracts if p.with_name(f"{p.name.partition('.')[0]}.yaml").exists()}
    for path in contracts:
        feed, _, output = path.name.removesuffix(CONTRACT).partition(".")
        feed_file = path.parent / f"{feed}.yaml"
        outputs = list_outputs(feed_file) if output else ()
        if not feed_file.exists() and path.read_bytes() in holding:
            continue
        if not feed_file.exists():
            problem = FileProblem("", f"has no {feed}.yaml in its folder", "name it as the feed's file")
            problems.append((str(path), problem))
        elif output and output not in outputs:
            remedy = f"name it FEED{CONTRACT}, or FEED.OUTPUT{CONTRACT}; outputs: {', '.join(outputs) or 'none'}"
            problems.append((str(path), FileProblem("", "is the contract of no rows", remedy)))
    return problems


def list_outputs(path: Path) -> tuple[str, ...]:
    """The names of the outputs in a feed file; none if it has no `split`, or cannot be read."""
    try:
        data = parse_yaml(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, YamlError):
        return ()
    split = data.get("split") if isinstance(data, dict) else None
    into = split.get("into") if isinstance(split, dict) else None
    return tuple(map(str, into)) if isinstance(into, dict) else ()


def _read(
    path: Path, environ: Mapping[str, str], optional: Container[str], root: Path
) -> Feed | tuple[FileProblem, ...]:
    if not path.exists():
        near = ", ".join(sorted(p.name for p in path.parent.glob("*.yaml"))[:10])
        return (
            FileProblem(
                "", "does not exist", f"feeds there: {near}" if near else f"create it; see {docs_command('feeds')}"
            ),
        )
    if path.suffix != ".yaml":
        return (FileProblem("", "does not end in .yaml", "rename it"),)
    try:
        read = read_yaml(path, environ, root, optional)
    except YamlError as error:
        return error.problems
    data = {"feed": path.stem} | read.data
    data["engine"] = _choose_engine(data, environ, None if "spark" in optional else root)
    # A command that asks no Kafka loads the feed though an environment variable of `kafka:` is missing.
    if "kafka" in read.left_out:
        data["kafka"] = {"bootstrap": UNKNOWN_KAFKA}
    if "contract" in data:
        return (FileProblem("contract", "is unknown", f"a contract is a file of its own, {path.stem}{CONTRACT}"),)
    if secret := read.filled_from_files & {"schema_file", "key.schema_file"}:
        what, remedy = "has a value from a file, which errors would show", "write the path itself"
        return tuple(FileProblem(key, what, remedy) for key in secret)
    # Keys of `tuning` are checked, and named in problems, in the section that has them.
    tuned = move_tuning(data)
    if isinstance(tuned, tuple):
        return tuned
    data = tuned
    context = {"root": root, "filled_from_files": read.filled_from_files}
    if "registry" in read.empty and (str(data.get("format")) in READERS or "key" in data):
        data["registry"] = {}  # a section, though nothing is in it: the project's own
    # An address in the feed file comes before that of the environment.
    if isinstance(registry := data.get("registry"), dict) and (default_url := _known_registry(environ)):
        data["registry"] = {"url": default_url} | registry
    if data.get("split") is not None:
        result = _split(reaching_kafka(data, environ), root, context)
    else:
        result = _read_rows(reaching_kafka(data, environ), root, context)
    if isinstance(result, Feed):
        return result
    if "feed" not in read.data:
        result = tuple(_NO_NAME if p.key == "feed" else p for p in result)
    # Problems name the keys as the file spells them.
    spellings = {TUNING[key]: f"tuning.{key}" for key in read.data.get("tuning", {})}
    return tuple(replace(p, key=spellings.get(p.key, p.key)) for p in result)


_OF_OUTPUTS = ("format", "schema_file", "wire_format", "message", "key")
"""Keys of a feed with `split` that hold for each of its outputs which has no value of its own."""


def _split(data: dict[str, Any], root: Path, context: dict[str, Any]) -> Feed | tuple[FileProblem, ...]:
    """Returns a feed with `split`, whose outputs are feeds of their own schema, or the problems."""
    own_keys = {key: value for key, value in data.items() if key not in _OF_OUTPUTS}
    feed = _validate(own_keys, context | {LEVEL: Level.SPLIT})
    if not isinstance(feed, Feed) or feed.split is None:
        return feed
    common = {k: v for k, v in data.items() if k not in _NOT_OF_OUTPUTS}
    outputs, problems = list[Feed](), list[FileProblem]()
    for name in feed.split.into:
        own = {k: v for k, v in data["split"]["into"][name].items() if k != "values"}
        output = _read_rows(common | own, root, context | {LEVEL: Level.OUTPUT})
        if isinstance(output, Feed):
            output = output.model_copy(update={"output": name})
            problems += (p for other in outputs if (p := _find_table_clash(output, other)))
            outputs.append(output)
        else:
            problems += (replace(p, key=f"split.into.{name}.{p.key}".rstrip(".")) for p in output)
    problems = problems or [*_find_unroutable(feed.split, outputs)]
    problems = problems or [*_find_unprotected(feed, outputs)]
    return tuple(problems) or feed.model_copy(update={"outputs": tuple(outputs)})


def _find_unroutable(split: SplitSettings, outputs: Sequence[Feed]) -> Iterator[FileProblem]:
    """Yields the problem of records whose format lacks the value that chooses an output."""
    if split.by.path and (unread := [o.output for o in outputs if o.format not in _OF_FIELDS]):
        remedy = "split by a header, or give the outputs `format: json` or `json_schema`"
        yield FileProblem("split.by", f"names a field of JSON, and {', '.join(unread)} has another format", remedy)
    if not split.by.by_message:
        return
    forms = {o.format for o in outputs}
    wires = {o.reader.wire if o.reader else WireFormat.BARE for o in outputs}
    if len(forms) > 1 or WireFormat.BARE in wires:
        what = "is the name of a record's message, which schemas of one format in a registry have"
        yield FileProblem("split.by", what, f"give all outputs one `format` of {', '.join(READERS)}, and a `registry`")
    elif forms == {RecordFormat.PROTOBUF} and not wires <= CONFLUENTS:
        what = f"is the name of a Protobuf message, which is not known under `wire_format: {min(wires)}`"
        yield FileProblem("split.by", what, "split by a header")


def _find_unprotected(feed: Feed, outputs: Sequence[Feed]) -> Iterator[FileProblem]:
    """Yields the problems of rules that no output can follow, or raw records could not."""
    protection = feed.shape.protection
    if protection is None or feed.split is None:
        return
    fields = [p for output in outputs for p in output.shape.protected or ()]
    if wrong := next(find_unmatched(fields, protection), ""):
        error = build_unmatched_error(wrong, fields)
        yield FileProblem("protect", str(error), error.remedy)
    of_values = [path for path in feed.protect if not is_of_raw(path)]
    if feed.split.otherwise is Otherwise.RAW and of_values:
        what = f"is `raw`, whose values have no fields, with a rule for {sanitize(of_values[0])} in `protect`"
        yield FileProblem("split.otherwise", what, "use `quarantine` or `drop`")


_NOT_OF_OUTPUTS = ("split", "schema", "table", "description", "descriptions")
_OF_FIELDS = (RecordFormat.JSON, RecordFormat.JSON_SCHEMA)


def _read_rows(data: dict[str, Any], root: Path, context: dict[str, Any]) -> Feed | tuple[FileProblem, ...]:
    """Returns a feed of one dataset, or the problems."""
    changes, schema = data.get("changes"), data.get("schema")
    if isinstance(changes, dict) and changes.get("format") == ChangeFormat.DEBEZIUM and isinstance(schema, dict):
        data = {"format": RecordFormat.JSON} | data
        if data["format"] == RecordFormat.JSON:
            data["schema"] = build_envelope(schema, changes.get("key"))
    if str(data.get("format")) in READERS:
        reader = _with_reader(data, root)
        if isinstance(reader, FileProblem):
            return (reader,)
        data = reader
    if "key" in data:
        reader = _with_key(data, root)
        if isinstance(reader, FileProblem):
            return (reader,)
        data = reader
    return _validate(data, context)


def _choose_engine(data: Mapping[str, Any], environ: Mapping[str, str], root: Path | None) -> Any:
    """Returns the engine that the environment names, else the feed.

    A feed that names none runs on Spark if it configures Spark, else on the engine of the project in `root`. Raises
    FeedError.
    """
    if chosen := environ.get(ENGINE) or data.get("engine"):
        return chosen
    spark = data.get("spark")
    configures_spark = isinstance(spark, dict) and bool(spark.get("master") or spark.get("conf"))
    return EngineKind.SPARK if configures_spark or root is None else load_fleet(root, environ).engine


def list_deprecated_keys(path: Path) -> dict[str, str]:
    """Returns the deprecated keys of a valid feed file, each with the key that replaces it."""
    data = parse_yaml(path.read_text())
    keys = {f"{section}.{key}" for section, values in data.items() if isinstance(values, dict) for key in values}
    return {old_key: new for old_key, new in MOVED_KEYS.items() if old_key in keys}


def move_tuning(data: Mapping[str, Any]) -> dict[str, Any] | tuple[FileProblem, ...]:
    """Returns a feed file's data with the keys of `tuning` at their places in `Feed`, or the problems."""
    tuning = data.get("tuning", {})
    if not isinstance(tuning, dict):
        return (FileProblem("tuning", "is not a section of keys and values", docs_command("feeds")),)
    moved = {key: value for key, value in data.items() if key != "tuning"}
    problems = []
    for key, value in tuning.items():
        if key not in TUNING:
            near = get_close_matches(key, TUNING, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(TUNING)}"
            problems.append(FileProblem(sanitize(f"tuning.{key}"), "is unknown", hint))
            continue
        section, _, name = TUNING[key].partition(".")
        settings = moved.get(section, {})
        if not isinstance(settings, dict):
            continue  # validation reports the section
        if name in settings:
            problem = f"has a value in {TUNING[key]} too"
            problems.append(FileProblem(f"tuning.{key}", problem, f"remove {TUNING[key]}"))
        moved[section] = settings | {name: value}
    return tuple(problems) or moved


def group_tuning(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a feed's document with the keys of `tuning` in that section, as a feed file has them."""
    grouped: dict[str, Any] = {key: dict(v) if isinstance(v, dict) else v for key, v in document.items()}
    tuning = {}
    for key, old_key in TUNING.items():
        section, _, name = old_key.partition(".")
        if name in grouped.get(section, {}):
            tuning[key] = grouped[section].pop(name)
    return {key: value for key, value in grouped.items() if value != {} or document[key] == {}} | {"tuning": tuning}


@dataclass(frozen=True, slots=True)
class SchemaAsked:
    """Format and registry of a feed file, and the path of its schema. `subject` is never empty."""

    format: str
    registry: RegistrySettings
    schema_file: Path
    subject: str
    message: str = ""


def schema_asked(folder: Path, feed: str, environ: Mapping[str, str]) -> SchemaAsked:
    """Returns the schema that a feed file requests; its schema_file may be missing. Raises FeedError."""
    path, root = find_feed_file(folder, feed), folder.resolve().parent
    if not path.exists():
        raise FeedError(f"{path} does not exist", remedy="name a feed of this project")
    try:
        data = read_yaml(path, environ, root).data
    except YamlError as error:
        raise_problems([(str(path), p) for p in error.problems])
    # Not loaded as a feed: its schema_file may not be there yet, and this is for the command that fetches it.
    registry, name, topics = data.get("registry") or {}, data.get("schema_file"), data.get("topics")
    format_ = str(data.get("format"))
    if format_ not in READERS or not isinstance(registry, dict) or not isinstance(name, str):
        formats = f"`format: {'` or `'.join(READERS)}`"
        raise FeedError(
            f"{path.name} has no {formats} with `registry` and `schema_file`", remedy=docs_command("formats")
        )
    default_url = _known_registry(environ)
    try:
        settings = RegistrySettings.model_validate(
            ({"url": default_url} if default_url else {}) | registry, context={"root": root}
        )
    except ValueError as error:
        problems = problems_of(error, RegistrySettings)
        raise_problems([(str(path), replace(p, key=f"registry.{p.key}".rstrip("."))) for p in problems])
    topic = topics[0] if isinstance(topics, list) and len(topics) == 1 else topics
    usual = topic if settings.glue else f"{topic}-value"
    # By Confluent's and Glue's convention, a subject is named after its only topic.
    subject = settings.subject or (usual if isinstance(topic, str) else None)
    if subject is None:
        raise FeedError(f"{path.name} reads several topics", remedy="name the subject: registry: {subject: …}")
    message = data.get("message")
    return SchemaAsked(format_, settings, root / Path(name), subject, message if isinstance(message, str) else "")


def _known_registry(environ: Mapping[str, str]) -> str | None:
    return environ.get(REGISTRY) or environ.get(LOCAL_REGISTRY)


def _with_reader(data: dict[str, Any], root: Path) -> dict[str, Any] | FileProblem:
    """Returns the data of a feed with its reader and columns, or the problem of its schema's file."""
    pull = f"sluice schema pull {sanitize(str(data['feed']))}"
    reader = _reader(data, root, _usual_wire(data), "", pull)
    if not isinstance(reader, Reader):
        return reader or data  # validation reports the problem
    own = data.get("schema", {})
    if not isinstance(own, dict):
        return data | {"reader": reader}  # validation reports the problem
    if problem := _check_placed(own, reader.columns):
        return problem
    return data | {"reader": reader, "schema": reader.columns.texts() | own}


def _check_placed(own: Mapping[Any, Any], columns: Schema) -> FileProblem | None:
    """Returns the problem of columns next to a schema_file that are neither copies of its fields nor headers."""
    what, remedy = "is no column `at` a path of the schema_file, nor of a `header`", "the file has all other columns"
    in_file = {f.name for f in columns.fields}
    for name, text in own.items():
        with contextlib.suppress(SchemaError):  # validation reports what does not parse
            f = parse_field(str(name), text)
            if name in in_file or not (f.header is not None or (f.path and f.path[0] in in_file)):
                return FileProblem(sanitize(f"schema.{name}"), what, remedy)
    return None


def _with_key(data: dict[str, Any], root: Path) -> dict[str, Any] | FileProblem:
    """Returns the data of a feed with the reader of its keys, and their columns."""
    key, columns = data["key"], data.get("schema")
    if not isinstance(key, dict) or str(key.get("format")) not in READERS or not isinstance(columns, dict):
        return data
    reader = _reader(key, root, _usual_wire(data), "key.", "")
    if not isinstance(reader, Reader):
        return reader or data
    key_reader = KeyReader(reader)
    own = {f.name: f.text for f in key_reader.columns}
    if clash := {n.casefold() for n in own} & {str(n).casefold() for n in columns}:
        problem = f"has a field whose column, {sanitize(min(clash))}, the value has too"
        return FileProblem("key", problem, f"keys' columns begin with {KEY_PREFIX}: rename the value's")
    return data | {"key_reader": key_reader, "schema": columns | own}


def _usual_wire(data: Mapping[str, Any]) -> str:
    """The wire format of a feed whose file names none."""
    if "registry" not in data:
        return WireFormat.BARE
    registry = data["registry"]
    glue = isinstance(registry, dict) and str(registry.get("url")).startswith("glue:")
    return WireFormat.GLUE if glue else WireFormat.CONFLUENT


def _reader(settings: dict[str, Any], root: Path, usual: str, section: str, pull: str) -> Reader | FileProblem | None:
    """Returns the reader by the schema_file, or its problem; None if validation will report other settings."""
    name, wire = settings.get("schema_file"), settings.get("wire_format") or usual
    message = settings.get("message") or ""
    if not isinstance(name, str) or wire not in [*WireFormat] or not isinstance(message, str):
        return None
    path = root / Path(name)
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        what, remedy = f"names {path}, which does not exist", f"write it{f', or: {pull}' if pull else ''}"
        return FileProblem(f"{section}schema_file", what, remedy)
    except (OSError, ValueError):  # a name that no file can have, bytes that are not UTF-8
        what, remedy = f"names {sanitize(str(path))}, which cannot be read", "check its rights and its encoding"
        return FileProblem(f"{section}schema_file", what, remedy)
    try:
        form = READERS[settings["format"]]
        return form.make(form.read(text, path.parent, message), WireFormat(wire))
    except SchemaError as error:
        what, remedy = sanitize(str(error.problems[0])), error.problems[0].remedy
    except UnusableSchema as error:
        what, remedy = error.text, docs_command("formats")
    return FileProblem(f"{section}schema_file", what, remedy)


def reaching_kafka(data: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns a feed file's data with Kafka's address from the environment, if the file has none.

    Adds the login to the local Kafka, if that is secured and the file has no settings of security.
    """
    kafka, default = data.get("kafka", {}), environ.get(BOOTSTRAP) or environ.get(LOCAL_KAFKA)
    if not isinstance(kafka, dict):
        return data
    if default and kafka.get("bootstrap") is None:
        data = data | {"kafka": kafka | {"bootstrap": default}}
    login = environ.get(LOCAL_LOGIN)
    if (
        login
        and "security_protocol" not in kafka
        and "kafka" in data
        and data["kafka"].get("bootstrap") == environ.get(LOCAL_KAFKA)
    ):
        data = data | {"kafka": json.loads(Path(login).read_text()) | data["kafka"]}
    return data


def _validate(data: dict[str, Any], context: dict[str, Any]) -> Feed | tuple[FileProblem, ...]:
    feed: Feed | None = None
    problems: tuple[FileProblem, ...] = ()
    try:
        feed = Feed.model_validate(data, context=context)
    except ValueError as error:
        problems = problems_of(error, Feed)
    return feed or problems


def clashes(feed: Feed, others: Iterable[tuple[Path, Feed]]) -> tuple[FileProblem, ...]:
    """Returns the problems of names and tables that the feed shares with other feeds, given with their files."""
    return tuple(p for path, other in others if (p := _clash(feed, other, path)))


def _clash(feed: Feed, other: Feed, path: Path) -> FileProblem | None:
    if other.name == feed.name:
        return FileProblem("feed", f"is `{feed.name}` in {path} too", "give each feed a name of its own")
    if {other.name, other.stored} & {feed.name, feed.stored}:
        what = f"`{feed.stored}` is a name of feed `{other.name}` in {path} too: they would share a ledger"
        return FileProblem("stored_as", what, "give each feed a name of its own")
    if other.kafka.bootstrap == feed.kafka.bootstrap != UNKNOWN_KAFKA:
        if other.group == feed.group:
            rule = "each feed commits for a group of its own"
            return FileProblem("group", f"is shared with feed `{other.name}`", rule)
        if other.transactional_id == feed.transactional_id:
            return FileProblem("transactional_id", f"is shared with feed `{other.name}`", "they would fence each other")
    return next((p for a in feed.table_feeds for b in other.table_feeds if (p := _find_table_clash(a, b))), None)


def _find_table_clash(mine: Feed, theirs: Feed) -> FileProblem | None:
    """Returns the problem of a table that two feeds, or outputs, would have."""
    if not (both := _tables(mine) & _tables(theirs)):
        return None
    return FileProblem(
        f"{f'split.into.{mine.output}.' if mine.output else ''}table.iceberg.name",
        f"`{min(both)[1]}` would be a table of feed `{mine.dataset}` and of feed `{theirs.dataset}`",
        f"give each feed a table of its own; its windows and quarantine get their own: {docs_command('tables')}",
    )


def _tables(feed: Feed) -> set[tuple[str, str]]:
    """The tables that the feed or output keeps in catalogs, each as its catalog and its name."""
    iceberg = feed.table.iceberg if feed.table else None
    return {(iceberg.where, name) for name in feed.table.names} if feed.table and iceberg else set()


def find_output(feed: Feed, output: str) -> Feed:
    """Returns the feed as that output of it sees it; the feed itself without one. Raises FeedError."""
    if not output:
        return feed
    if dataset := next((d for d in feed.datasets if d.output == output), None):
        return dataset
    names = ", ".join(d.dataset for d in feed.datasets)
    raise FeedError(f"feed {feed.name} has no output {output!r}", remedy=f"datasets of this feed: {names}")


def choose_feed(name: str, feeds: Mapping[str, Feed]) -> Feed | None:
    """Returns the feed of that name, or the renamed one whose ledger and messages still have it."""
    return feeds.get(name) or next((f for f in feeds.values() if f.stored == name), None)


def demand_feed(name: str, feed: Feed) -> Feed:
    """Returns the feed. Raises FeedError for an output of it, which is not run by itself."""
    if feed.output:
        raise FeedError(
            f"{name} is an output of feed {feed.name}, which is planned, landed and committed as one",
            remedy=f"name the feed: {feed.name}",
        )
    return feed
