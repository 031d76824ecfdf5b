"""Turns pydantic's errors into problems that a user can fix: file, key, problem, remedy. Never a value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from sluice.pipelines.errors import FeedError, docs_command
from sluice.pipelines.feed.kafka_section import KAFKA_OWNED
from sluice.pipelines.feed.sections import MOVED_KEYS
from sluice.pipelines.feed.stores import EXAMPLES
from sluice.pipelines.feed.yaml_file import FileProblem, locate_keys
from sluice.pipelines.schema.schema import SchemaError
from sluice.pipelines.util.units import sanitize

_WHERE = (
    "write host:port, several with commas between; where a feed names none, the project's local Kafka serves: "
    "sluice kafka start"
)
_REGISTRY = "write its address; where a feed names none, the project's local one serves: sluice kafka start --registry"
_PROTECTED = (
    f'write `drop`, {{keep_last: 4}} or {{hmac: "${{file:PATH}}"}}, with a key as `openssl rand -hex 32` makes it;'
    f" {docs_command('protection')} says more"
)
NAMES = "lower-case letters, digits and _, starting with a letter, at most 64"
"""The rule for names of feeds."""
_REMEDIES = {
    "feed": NAMES,
    "start": "choose earliest, latest, a time such as 2026-11-20T00:00:00Z, a look-back such as 7d, or fail",
    "kafka": f"{docs_command('security')} has the settings of each way to log in",
    "kafka.bootstrap": _WHERE,
    "kafka.sasl_oauth_token_endpoint": "leave it out; sasl_oauth_client_id and sasl_oauth_client_secret log in",
    "registry.url": _REGISTRY,
    "url": _REGISTRY,  # of a section that is read alone
    "schedule": "write own, or a name that several feeds share, such as hourly: lower-case letters, digits and _",
    "offsets": "write {store: zookeeper, connect: host:2181/chroot}, or {connect: …, dual_commit: true} for both",
    "offsets.connect": "write host:port, several with commas between, and a chroot if there is one: host:2181/kafka",
    "commit": "choose transactional, plain or none; with offsets in ZooKeeper plain or none",
    "lake": f"name a folder, or {EXAMPLES}",
    "spark.master": "leave the token out, and set SPARK_CONNECT_AUTHENTICATE_TOKEN in the environment",
    "spark.conf": "write it without a secret; other settings may have values from files",
    "s3": f'{docs_command("feeds")}, "A lake on S3"',
    "gcs": f'{docs_command("feeds")}, "A lake on Google Cloud or Azure"',
    "azure": f'{docs_command("feeds")}, "A lake on Google Cloud or Azure"',
    "dead_letters": "name a topic for them alone, and leave `commit` at transactional",
    "table": f"write {{iceberg: {{name: db.orders}}}} or {{delta: {{}}}}; {docs_command('tables')} says more",
    "table.delta": "write {delta: {}}: it needs no settings",
    "table.iceberg": "write {iceberg: {name: db.orders}}",
    "table.iceberg.name": "write namespace.table, such as db.orders: letters, digits and _",
    "table.iceberg.catalog": "write PyIceberg's properties of it, such as {type: rest, uri: …}, or its name there",
    "table.quarantine": "write true to create a table for quarantined records, too",
    "table.keep_snapshots": "write a time such as 5d, or 0s to keep the newest snapshot alone",
    "topics": "write a topic, a list of topics, or {include: [patterns], exclude: [patterns]}",
}


_SECTION = "is not a section of keys and values"
_PLAIN = {
    "model_type": _SECTION,
    "model_attributes_type": _SECTION,
    "dict_type": _SECTION,
    "list_type": "is not a list",
    "bool_type": "is neither true nor false",
    "bool_parsing": "is neither true nor false",
    "string_type": "should be text; a number goes in quotes",
    "string_too_short": "is empty",
    "too_short": "is empty",
}
"""What pydantic's kinds of errors mean, in words about a file."""

_NEVER_BY_ITSELF = {
    "policies.on_recreated": "leave it out: a topic created again is refused until `sluice accept … recreated`",
    "policies.on_truncated": "leave it out: a log that was cut is refused until `sluice accept … truncated`",
}
"""Decisions that a feed file cannot make. 0.1.0 had these keys, with `refuse` as the only value."""


_KEYS_ELSEWHERE = {
    "feed": "name dataset id",
    "bootstrap": "bootstrap_servers brokers broker servers hosts address",
    "topics": "topic subject subscribe topic_name",
    "group": "group_id consumer_group consumer_group_id",
    "start": "auto_offset_reset starting_offsets offset_reset from",
    "schema": "columns fields types",
    "format": "value_format type encoding",
    "registry": "schema_registry",
    "lake": "output path destination sink target storage location",
    "window": "interval every period",
    "dead_letters": "dlq dead_letter_queue dead_letter",
    "table": "tables",
}
_ELSEWHERE = {word: key for key, words in _KEYS_ELSEWHERE.items() for word in words.split()}
"""Names of our keys in other tools, each with ours."""


def problems_of(error: ValueError, model: type[BaseModel]) -> tuple[FileProblem, ...]:
    """The problems in pydantic's error, without the values in it."""
    if not isinstance(error, ValidationError):
        return (FileProblem("", "cannot be validated", docs_command("feeds")),)
    details = error.errors(include_url=False, include_input=False)
    return tuple(p for d in details if d["type"] != "default_factory_not_called" for p in _problems(d, model))


def _problems(detail: ErrorDetails, model: type[BaseModel]) -> Iterator[FileProblem]:
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, SchemaError):
        yield from (FileProblem(sanitize(f"schema.{p.place}".strip(".")), p.what, p.remedy) for p in cause.problems)
    else:
        yield _problem(detail, model)


def _problem(detail: ErrorDetails, model: type[BaseModel]) -> FileProblem:
    path = [sanitize(str(part)) for part in detail["loc"]]
    key = ".".join(p for i, p in enumerate(path) if (i, p) != (1, "names"))  # how a TopicFilter holds exact names
    if detail["type"] == "extra_forbidden":
        if path[0] == "kafka" and path[-1] in KAFKA_OWNED:
            return FileProblem(key, "is not for a feed to set", KAFKA_OWNED[path[-1]])
        if key in _NEVER_BY_ITSELF:
            return FileProblem(key, "is not for a feed to set", _NEVER_BY_ITSELF[key])
        keys = [f.alias or n for n, f in _section(model, path[:-1]).model_fields.items() if not f.exclude]
        current = {k: MOVED_KEYS.get(".".join([*path[:-1], k]), k) for k in keys}
        name = path[-1].replace(".", "_").replace("-", "_").lower()
        ours = _ELSEWHERE.get(name, "")
        near = [ours] if ours in keys else get_close_matches(name, current, n=1)
        here = [k for k in current.values() if "." not in k] or current.values()
        hint = f"did you mean `{current[near[0]]}`?" if near else f"known here: {', '.join(here) or 'nothing'}"
        return FileProblem(key, "is unknown", hint)
    if (key, detail["type"]) == ("kafka", "missing"):
        key = "kafka.bootstrap"
    message = detail["msg"].removeprefix("Value error, ")
    what = "is missing" if detail["type"] == "missing" else _PLAIN.get(detail["type"], message)
    what = "is not a feed's name" if (key, detail["type"]) == ("feed", "string_pattern_mismatch") else what
    what, cause = what.replace("Input should", "should"), detail.get("ctx", {}).get("error")
    own = ".".join(path[3:]) if path[:2] == ["split", "into"] else key
    remedy = str(getattr(cause, "remedy", "")) or _REMEDIES.get(own, _PROTECTED if path[:1] == ["protect"] else "")
    return FileProblem(key, what[:1].lower() + what[1:], remedy)


def _section(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel]:
    """The model of the mapping at `path`."""
    within_mapping = False
    for part in path:
        if within_mapping:
            within_mapping = False
            continue  # a name that the file chooses
        field = next(f for n, f in model.model_fields.items() if part in (n, f.alias))
        model = next(
            t
            for t in (field.annotation, *get_args(field.annotation))
            if isinstance(t, type) and issubclass(t, BaseModel)
        )
        within_mapping = get_origin(field.annotation) is dict
    return model


def raise_problems(problems: Sequence[tuple[str, FileProblem]], keys: str = "feeds") -> NoReturn:
    """Raise one FeedError for all problems, each given with its file. `keys`: the page that lists the files' keys.

    A problem in a YAML file begins with FILE:LINE:COLUMN of its key.
    """
    by_file: dict[str, list[str]] = {}
    for file, p in problems:
        by_file.setdefault(file, []).append(p.key)
    located = {(f, k): f + at for f, ks in by_file.items() for k, at in zip(ks, locate_keys(Path(f), ks), strict=True)}
    lines = [f"{located[file, p.key]}: {p.key}: {p.what}" if p.key else f"{file}: {p.what}" for file, p in problems]
    if len(problems) == 1:
        raise FeedError(lines[0], remedy=problems[0][1].remedy)
    remedies = [f" ({p.remedy})" if p.remedy else "" for _, p in problems]
    listing = "".join(f"\n  {line}{remedy}" for line, remedy in zip(lines, remedies, strict=True))
    raise FeedError(
        f"{len(problems)} problems in files:{listing}", remedy=f"fix them; {docs_command(keys)} lists every key"
    )
