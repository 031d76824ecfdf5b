"""Reads a YAML file strictly: plain data only, bounded, with `${NAME}` filled in from the environment.

Guarantee: no Python objects, tags, anchors or duplicate keys, and bounded size and depth. No error holds what could be
a secret: a value, a line of the file, or a variable's content. A scalar is null, true or false, a number or a string;
dates, octals, `yes` and `no` stay strings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 256 << 10
MAX_DEPTH = 16

_VARIABLE = re.compile(r"\$\$\{|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}]*))?\})?")


@dataclass(frozen=True, slots=True)
class FileProblem:
    """One problem in a file: where (`key`, dotted; empty for the whole file), what is wrong, and what to do."""

    key: str
    what: str
    remedy: str


class YamlError(Exception):
    """The file cannot be used. `problems` holds every problem that was found."""

    def __init__(self, *problems: FileProblem) -> None:
        super().__init__("; ".join(f"{p.key}: {p.what}" for p in problems))
        self.problems = problems


def read_yaml(path: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """The file's mapping. Variables are filled in; keys without a value are left out. Raises YamlError."""
    data = parse_yaml(_read(path))
    if not isinstance(data, dict):
        raise YamlError(FileProblem("", "is not a mapping", "write `key: value` lines"))
    problems: list[FileProblem] = []
    filled: dict[str, Any] = _fill(data, environ, "", problems)
    if problems:
        raise YamlError(*problems)
    return filled


def _read(path: Path) -> str:
    problem = FileProblem("", "cannot be read", "check that it is a file and its permissions")
    try:
        if path.is_file():
            with path.open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
            problem = FileProblem("", f"is larger than {MAX_BYTES >> 10} KiB, or not UTF-8", "split or re-save it")
            if len(raw) <= MAX_BYTES:
                return raw.decode()
    except (OSError, UnicodeDecodeError):
        pass
    raise YamlError(problem)


def parse_yaml(text: str) -> Any:
    """The one document in `text`. Raises YamlError, which names line and column and quotes nothing."""
    # Raised outside the handlers: PyYAML's own errors quote the text, and must not hang on ours as context.
    what, remedy = "is not readable YAML", "put values with special characters in quotes"
    try:
        return yaml.load(text, _Loader)  # a SafeLoader, with less
    except _YamlRefused as refusal:
        what, remedy = refusal.what + _place(refusal.problem_mark), refusal.remedy
    except yaml.MarkedYAMLError as error:
        what += _place(error.problem_mark)
    except (yaml.YAMLError, ValueError, RecursionError):
        pass
    raise YamlError(FileProblem("", what, remedy))


def _place(mark: yaml.Mark | None) -> str:
    return f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""


class _YamlRefused(yaml.MarkedYAMLError):
    def __init__(self, what: str, remedy: str, mark: yaml.Mark) -> None:
        super().__init__(problem_mark=mark)
        self.what, self.remedy = what, remedy


class _Loader(yaml.SafeLoader):
    """A SafeLoader that refuses tags, anchors, duplicate keys and deep nesting, and does not guess as YAML 1.1 does."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML declares it so
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _YamlRefused("has an anchor or alias (& or *)", "write the value out, or quote it", event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise _YamlRefused(
                "is not readable YAML: it has a tag (!)", "leave it out, or quote the value", event.start_mark
            )
        if self.depth > MAX_DEPTH:
            raise _YamlRefused(
                f"is nested deeper than {MAX_DEPTH}", "feeds are flat: remove the nesting", event.start_mark
            )
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise _YamlRefused("has a key that is not a string", "put the key in quotes", key.start_mark)
            if key.value in seen:
                raise _YamlRefused("has the same key twice", "keep one of the two", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


for _tag, _scalar, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]{0,18})", list("-+0123456789")),
    ("float", r"[-+]?(?:0|[1-9][0-9]*)\.[0-9]+(?:[eE][-+]?[0-9]+)?", list("-+0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_scalar})$"), _first)


def _fill(value: Any, environ: Mapping[str, str], key: str, problems: list[FileProblem]) -> Any:
    if isinstance(value, str):
        return _VARIABLE.sub(lambda found: _variable(found, environ, key, problems), value)
    below = f"{key}." if key else ""
    if isinstance(value, list):
        return [_fill(v, environ, f"{below}{i}", problems) for i, v in enumerate(value)]
    if isinstance(value, dict):
        return {k: _fill(v, environ, f"{below}{k}", problems) for k, v in value.items() if v is not None}
    return value


def _variable(found: re.Match[str], environ: Mapping[str, str], key: str, problems: list[FileProblem]) -> str:
    if found[0] == "$${":
        return "${"
    name, default = found[1], found[2]
    if name is None:
        problems.append(
            FileProblem(key, "has a `${` that starts no variable", "write ${NAME} or ${NAME:-default}; $${ for ${")
        )
        return ""
    given = environ.get(name)
    if given is None or (not given and default is not None):
        given = default
    if given is None:
        problems.append(
            FileProblem(key, f"needs the environment variable {name}, which is not set", f"export {name}=…")
        )
    return given or ""
