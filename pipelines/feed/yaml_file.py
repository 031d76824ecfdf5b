"""Reads a YAML file strictly: plain data only, bounded, with `${NAME}` filled in from the environment and
`${file:PATH}` from a file.

Guarantee: no Python objects, tags, anchors or duplicate keys, and bounded size and depth. No error holds what could be
a secret: a value, a line of the file, or the content of a variable or of a file that is filled in. A scalar is null,
true or false, a number or a string; dates, octals, `yes` and `no` stay strings.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer

MAX_BYTES = 256 << 10
MAX_DEPTH = 16
MAX_FILLED_BYTES = 64 << 10
"""How much a file may hold that is filled in."""

_VARIABLE = re.compile(r"\$\$\{|\$\{(?:file:(?!-)([^{}]*)\}|([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}]*))?\})?")


@dataclass(frozen=True, slots=True)
class FileProblem:
    """One problem in a file: its `key` (dotted; empty for the whole file), description and remedy."""

    key: str
    what: str
    remedy: str


class YamlError(Exception):
    """The file cannot be used. `problems` holds every problem that was found."""

    def __init__(self, *problems: FileProblem) -> None:
        super().__init__("; ".join(f"{p.key}: {p.what}" for p in problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class YamlFile:
    """The content of a file. `filled_from_files` are the keys, dotted, whose values hold the content of another file.

    `left_out`: the optional sections that could not be filled in. `empty`: the keys without a value.
    """

    data: dict[str, Any]
    filled_from_files: frozenset[str]
    left_out: frozenset[str] = frozenset()
    empty: frozenset[str] = frozenset()


def read_yaml(path: Path, environ: Mapping[str, str], root: Path, optional: Container[str] = ()) -> YamlFile:
    """The file's mapping, its variables filled in. Keys without a value are left out, and so are keys in `optional`
    whose values cannot be filled in.

    Relative paths in `${file:PATH}` count from `root`. Each call reads these files again. Raises YamlError.
    """
    data = parse_yaml(_read(path))
    if not isinstance(data, dict):
        raise YamlError(FileProblem("", "is not a mapping", "write `key: value` lines"))
    filling = _Filling(environ, root)
    filled: dict[str, Any] = filling.fill(data, "")
    if problems := [p for p in filling.problems if not (p in filling.missing and _section(p) in optional)]:
        raise YamlError(*problems)
    left_out = frozenset(map(_section, filling.missing))
    remaining = {k: v for k, v in filled.items() if k not in left_out}
    empty = frozenset(str(k) for k, v in data.items() if v is None)
    return YamlFile(remaining, frozenset(filling.from_files), left_out, empty)


def _section(problem: FileProblem) -> str:
    return problem.key.partition(".")[0]


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


def locate_keys(path: Path, keys: Iterable[str]) -> list[str]:
    """Returns `:LINE:COLUMN` of each dotted key in the file; of the nearest section around a key that is not there.

    A text is empty without such a section, and for a file that is not readable YAML.
    """
    try:
        root = _Loader(_read(path)).get_single_node() if path.suffix in (".yaml", ".yml") else None
    except (YamlError, yaml.YAMLError, ValueError, RecursionError):
        root = None
    return [_locate(root, key.split(".")) for key in keys]


def _locate(node: yaml.Node | None, parts: list[str]) -> str:
    location = ""
    while parts and node is not None:
        children = _list_children(node)
        # A key may hold dots itself.
        length = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in children), len(parts))
        mark, node = children.get(".".join(parts[:length]), (None, None))
        location = f":{mark.line + 1}:{mark.column + 1}" if mark else location
        parts = parts[length:]
    return location


def _list_children(node: yaml.Node) -> dict[str, tuple[yaml.Mark, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): (key.start_mark, value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return {str(i): (value.start_mark, value) for i, value in enumerate(node.value)}
    return {}


def parse_yaml(text: str) -> Any:
    """The one document in `text`. Raises YamlError with the parser's reason, line and column. It quotes nothing."""
    # Raised outside the handlers: PyYAML's own errors quote the text, and must not hang on ours as context.
    what, remedy = "is not readable YAML", _QUOTE_IT
    try:
        return yaml.load(text, _Loader)  # a SafeLoader, with less
    except _YamlRefused as refusal:
        what, remedy = refusal.what + _place(refusal.problem_mark), refusal.remedy
    except (yaml.scanner.ScannerError, yaml.parser.ParserError, yaml.composer.ComposerError) as error:
        what, remedy = what + _explain(error), _find_remedy(error, text)
    except yaml.reader.ReaderError as error:
        before = text.encode()[: error.position].decode(errors="ignore")
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        what += f": {error.reason} (line {line}, column {column})"
        remedy = "remove the character, or write it as an escape in double quotes"
    except (yaml.YAMLError, ValueError, RecursionError):
        pass
    raise YamlError(FileProblem("", what, remedy))


def _place(mark: yaml.Mark | None) -> str:
    return f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""


_QUOTE_IT = "put values with special characters in quotes"
_UNREADABLE = "cannot start any token"
_REMEDIES = {
    "mapping values are not allowed": "write one `key: value` on a line, indented as the lines around it; quote a value"
    " with `: ` in it",
    "unexpected end of stream": "close the quote",
    "expected ',' or": "close the bracket, and write commas between values",
    "document": "write one document: no `---`, and the first line indented as the others",
    "unknown escape": "write the value in single quotes",
    "'-' indicator": "write a list's lines with `- `, or a mapping's with `key: `, not both",
    "expected key": "indent the keys of a section alike",
}
"""What to do about a reason of libyaml, by a part of its text."""


def _explain(error: yaml.MarkedYAMLError) -> str:
    """libyaml's reason and place. Its texts are constants and hold nothing of the file."""
    reason = f": {(error.problem or '').removeprefix('but ')}{_place(error.problem_mark)}"
    start, stop = error.context_mark, error.problem_mark
    if not start or not stop or not error.context or "document" in error.context or start.line == stop.line:
        return reason
    return f"{reason}, {error.context}{_place(start)}"


def _find_remedy(error: yaml.MarkedYAMLError, text: str) -> str:
    mark, reason = error.problem_mark, error.problem or ""
    if mark and _UNREADABLE in reason:
        line = text.splitlines()[mark.line : mark.line + 1]
        is_tab = bool(line) and line[0][mark.column : mark.column + 1] == "\t"
        return "indent with spaces, not tabs" if is_tab else "put a value that begins with @, ` or % in quotes"
    return next((remedy for part, remedy in _REMEDIES.items() if part in reason), _QUOTE_IT)


class _YamlRefused(yaml.MarkedYAMLError):
    def __init__(self, what: str, remedy: str, mark: yaml.Mark) -> None:
        super().__init__(problem_mark=mark)
        self.what, self.remedy = what, remedy


class _Loader(Composer, yaml.CSafeLoader):
    """A SafeLoader that refuses tags, anchors, duplicate keys and deep nesting, and does not guess as YAML 1.1 does.

    libyaml reads, in a fifth of the time; PyYAML composes, where nodes can be refused.
    """

    def __init__(self, stream: str) -> None:
        yaml.CSafeLoader.__init__(self, stream)
        Composer.__init__(self)

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML declares it so
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
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
        keys: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise _YamlRefused("has a key that is not a string", "put the key in quotes", key.start_mark)
            if key.value in keys:
                raise _YamlRefused("has the same key twice", "keep one of the two", key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep)


for _tag, _scalar, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]{0,18})", list("-+0123456789")),
    ("float", r"[-+]?(?:0|[1-9][0-9]*)\.[0-9]+(?:[eE][-+]?[0-9]+)?", list("-+0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_scalar})$"), _first)


@dataclass(frozen=True)
class _Filling:
    """Fills variables in. `problems`, those of them with something `missing`, and `from_files` grow."""

    environ: Mapping[str, str]
    root: Path
    problems: list[FileProblem] = field(default_factory=list)
    missing: list[FileProblem] = field(default_factory=list)
    from_files: set[str] = field(default_factory=set)

    def fill(self, value: Any, key: str) -> Any:
        if isinstance(value, str):
            return _VARIABLE.sub(lambda match: self._variable(match, key), value)
        below = f"{key}." if key else ""
        if isinstance(value, list):
            return [self.fill(v, f"{below}{i}") for i, v in enumerate(value)]
        if isinstance(value, dict):
            return {k: self.fill(v, f"{below}{k}") for k, v in value.items() if v is not None}
        return value

    def _variable(self, match: re.Match[str], key: str) -> str:
        if match[0] == "$${":
            return "${"
        file, name, default = match.groups()
        if file is not None:
            self.from_files.add(key)
            content = _content_of(self.root, file)
            if isinstance(content, str):
                return content
            self._miss(FileProblem(key, content.what, content.remedy))
            return ""
        if name is None:
            remedy = "write ${NAME}, ${NAME:-default} or ${file:PATH}; $${ for ${"
            self.problems.append(FileProblem(key, "has a `${` that starts no variable", remedy))
            return ""
        value = self.environ.get(name)
        if value is None or (not value and default is not None):
            value = default
        if value is None:
            what = f"needs the environment variable {name}, which is not set"
            self._miss(FileProblem(key, what, f"export {name}=…"))
        return value or ""

    def _miss(self, problem: FileProblem) -> None:
        self.problems.append(problem)
        self.missing.append(problem)


def _content_of(root: Path, file: str) -> str | FileProblem:
    """The whole content of the file, without one newline at its end; or why there is none."""
    if not file.strip():
        return FileProblem("", "has a `${file:}` that names no file", "write ${file:/run/secrets/NAME}")
    if ":-" in file:
        return FileProblem("", "has a `${file:…}` with a default", "a file has none; write ${NAME:-default} for one")
    try:
        path = root / Path(file).expanduser()
        name = f"the file {_show_path(path)}"
        if path.is_dir():
            return FileProblem("", f"needs {name}, which is a folder", "name a file in it")
        if path.exists() and not path.is_file():
            return FileProblem("", f"needs {name}, which is no regular file", "name one that is")
        with path.open("rb") as opened:
            raw = opened.read(MAX_FILLED_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        remedy = "write or mount it, or fix the path; relative paths count from the project's folder"
        return FileProblem("", f"needs {name}, which does not exist", remedy)
    except PermissionError:
        return FileProblem("", f"needs {name}, which this user may not read", "let the user that runs Sluice read it")
    except (OSError, ValueError, RuntimeError):  # an invalid path, or the `~` of an unknown user
        return FileProblem("", f"needs the file {_show_path(file)}, which cannot be read", "fix the path")
    if len(raw) > MAX_FILLED_BYTES:
        return FileProblem("", f"needs {name}, which is larger than {MAX_FILLED_BYTES >> 10} KiB", "name another file")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return FileProblem("", f"needs {name}, which is not UTF-8", "write it again as text")
    text = re.sub(r"\r?\n\Z", "", text)
    return text or FileProblem("", f"needs {name}, which is empty", "write the value into it")


def _show_path(path: Path | str) -> str:
    return "".join(c if c.isprintable() else "�" for c in str(path)[:500])
