"""Protection of fields before rows are written: rules by path, and the schema that they leave.

A path names a field by its columns' names, whatever their case: `email`, `user.ip`, `lines.sku`, `tags.color` in a map.
`_key` is a record's key, and `_headers.NAME` a header. As a segment, `*` stands for any names: in front or in between
also for none, at the end for at least one; within a name, for any characters. A rule applies to all that its field
holds. The topmost rule wins, of equal ones a path without `*`, then the first.

A hash is HMAC-SHA-256, as 64 hex digits. Keys are secrets: only their identifiers are spelled, compared and stored.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from pydantic import SecretStr

from sluice.pipelines.schema.schema import Field, Kind, Schema, Type

RAW_KEY, HEADERS = "_key", "_headers"
QUARANTINE = "_quarantine"
"""Names whole records that do not fit. Without a rule, their values are dropped."""
LEAST_KEY = 16
"""The least bytes of a key for hashes."""


class Action(StrEnum):
    """How a value is protected: it is left out, replaced by its keyed hash or by its last characters, or encrypted."""

    DROP = "drop"
    ENCRYPT = "encrypt"
    HMAC = "hmac"
    KEEP_LAST = "keep_last"


@dataclass(frozen=True, slots=True)
class Rule:
    """How a field's values are protected. `key_id` identifies the key of a hash or cipher, and does not reveal it.
    `key` is None if only the identifier is known."""

    action: Action
    keep: int = 0
    key_id: str = ""
    key: SecretStr | None = field(default=None, compare=False)

    @classmethod
    def of_key(cls, key: SecretStr, action: Action = Action.HMAC) -> Rule:
        """Returns the rule that hashes, or encrypts, by this key."""
        digest = hmac.digest(key.get_secret_value().encode(), b"sluice: identifier of a key", "sha256")
        return cls(action, key_id=digest.hex()[:16], key=key)

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Returns the rule that is spelled like this, without its key. Raises ValueError."""
        action, _, argument = text.partition(" ")
        match Action(action):
            case Action.KEEP_LAST:
                return cls(Action.KEEP_LAST, keep=int(argument))
            case kind:
                return cls(kind, key_id=argument)

    def __str__(self) -> str:
        argument = self.keep if self.action is Action.KEEP_LAST else self.key_id
        return f"{self.action} {argument}".strip()


DROPPED = Rule(Action.DROP)


@dataclass(frozen=True)
class Protection:
    """The rules of a feed, by the patterns of their paths. It is pickled with a task's work, keys included."""

    rules: tuple[tuple[str, Rule], ...]

    def to_texts(self) -> dict[str, str]:
        """Patterns and rules as text, with the identifiers of keys."""
        return {pattern: str(rule) for pattern, rule in self.rules}

    @classmethod
    def parse(cls, texts: Mapping[str, str]) -> Protection:
        """Returns the protection of these texts, without keys. Raises ValueError."""
        return cls(tuple((pattern, Rule.parse(text)) for pattern, text in texts.items()))

    @property
    def fingerprint(self) -> str:
        """16 hex digits, the same for equal rules and keys."""
        return hashlib.sha256(json.dumps(list(self.to_texts().items())).encode()).hexdigest()[:16]

    @property
    def lacks_keys(self) -> bool:
        """Returns whether the key of a hash or cipher is unknown."""
        return any(rule.key_id and rule.key is None for _, rule in self.rules)

    @property
    def seal(self) -> Rule | None:
        """The rule that encrypts quarantined records; None if their values are dropped."""
        rule = dict(self.rules).get(QUARANTINE)
        return rule if rule and rule.action is Action.ENCRYPT else None

    def with_keys(self, other: Protection | None) -> Protection:
        """Returns the same rules with the keys of `other`, as far as it has them."""
        keys = {rule.key_id: rule.key for _, rule in other.rules} if other else {}
        return Protection(tuple((p, replace(rule, key=rule.key or keys.get(rule.key_id))) for p, rule in self.rules))

    def with_places(self, columns: Schema | None) -> Protection:
        """Returns the same rules, for the places in records of columns that are at paths or in headers."""
        placed = [f for f in columns.fields if f.path or f.header is not None] if columns else []
        record_paths = {f.name.lower(): _find_record_path(f, "") for f in placed}
        moved = [(record_paths.get(pattern.lower(), pattern), rule) for pattern, rule in self.rules]
        by_name = ((path, self.find(name)) for name, path in record_paths.items())
        return Protection((*moved, *((p, rule) for p, rule in by_name if rule and p not in dict(moved))))

    @cached_property
    def _compiled(self) -> Sequence[tuple[re.Pattern[str], Rule]]:
        ordered = sorted(self.rules, key=lambda r: "*" in r[0])
        return [(_compile_pattern(pattern), rule) for pattern, rule in ordered]

    @cached_property
    def _known(self) -> dict[str, Rule | None]:
        return {}

    def find(self, path: str) -> Rule | None:
        """Returns the rule of a path, in lower case; None without one."""
        if path not in self._known:
            if len(self._known) > 1 << 16:  # paths may come from records
                self._known.clear()
            self._known[path] = next((rule for pattern, rule in self._compiled if pattern.fullmatch(path)), None)
        return self._known[path]

    def find_header(self, name: str) -> Rule | None:
        """Returns the rule of a header; None without one."""
        return self.find(HEADERS) or self.find(extend_path(HEADERS, name))

    @cached_property
    def hints(self) -> tuple[str, ...]:
        """Returns texts; each field with a rule has one of them in its name, in any case. Empty if a rule has none."""
        segments = [[s for s in _split_pattern(pattern) if s.strip("*")] for pattern, _ in self.rules]
        if not all(segments):
            return ()
        return tuple(max(names[-1].split("*"), key=len) for names in segments)


def extend_path(path: str, name: str) -> str:
    """The path of a member, in lower case."""
    return f"{path}.{name.lower()}" if path else name.lower()


def _split_pattern(pattern: str) -> list[str]:
    return pattern.lower().replace("[]", "").replace("{}", ".*").split(".")


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    """Returns the expression that matches whole paths. Names within maps are `*` there, and match each name."""
    *before, last = _split_pattern(pattern)
    parts = [r"(?:.+\.)?" if s == "*" else rf"(?:{_match_name(s)}|\*)\." for s in before]
    return re.compile("".join(parts) + (".+" if last == "*" else _match_name(last)), re.DOTALL)


def _match_name(segment: str) -> str:
    return "[^.]*".join(map(re.escape, segment.split("*")))


@dataclass(frozen=True, slots=True)
class ProtectedField:
    """A field as records have it, and as it lands (None: not at all).

    `rule` applies to its values, or to all values in it. `members` are those of a struct, the element of a list, or the
    value of a map. `paths` are its path in records and its path in columns.
    """

    own: Field
    landed: Field | None
    rule: Rule | None
    members: tuple[ProtectedField, ...]
    paths: tuple[str, str]

    @property
    def is_changed(self) -> bool:
        """Returns whether values of the field may land in another way than they are."""
        kinds = (Kind.MAP, Kind.JSON)
        return self.rule is not None or self.own.type.kind in kinds or any(m.is_changed for m in self.members)


def find_rule(protection: Protection, paths: tuple[str, str]) -> Rule | None:
    """Returns the rule of a field by its path in columns, or else by its path in records."""
    return protection.find(paths[1]) or protection.find(paths[0])


def protect_schema(columns: Schema, protection: Protection, keys: Collection[str] = ()) -> tuple[ProtectedField, ...]:
    """Returns the columns as they are protected. `keys` names those that records' keys make: the rule of `_key` is
    theirs, too."""
    of_key, protection = protection.find(RAW_KEY), protection.with_places(columns)
    return tuple(_protect(f, ("", ""), of_key if f.name in keys else None, protection) for f in columns.fields)


def _find_record_path(f: Field, parent: str) -> str:
    """The path of a field in records, without indices of lists; that of a header for a column of one."""
    if f.header is not None:
        return extend_path(HEADERS, f.header)
    return ".".join(s for s in f.path if isinstance(s, str)).lower() or extend_path(parent, f.json_name)


def strip_places(columns: Schema) -> Schema:
    """Returns the columns without their places in records."""
    return Schema(tuple(replace(f, path=(), header=None) for f in columns.fields))


def get_landed_columns(protected: Sequence[ProtectedField]) -> Schema:
    """Returns the schema of landed rows."""
    return Schema(tuple(p.landed for p in protected if p.landed))


def _protect(f: Field, parent: tuple[str, str], inherited: Rule | None, protection: Protection) -> ProtectedField:
    paths = (_find_record_path(f, parent[0]), extend_path(parent[1], f.name)) if f.name else parent
    outer = (protection.find(paths[0][:at]) for at, c in enumerate(paths[0]) if c == "." and f.path)
    rule = find_rule(protection, paths) or next(filter(None, outer), inherited)
    if rule and rule.action is Action.DROP:
        return ProtectedField(f, None, rule, (), paths)
    kind = f.type.kind
    if not f.type.fields:
        string = rule is not None and kind is not Kind.JSON
        return ProtectedField(f, replace(f, type=Type(Kind.STRING)) if string else f, rule, (), paths)
    inside = (f"{paths[0]}.*", f"{paths[1]}.*") if kind is Kind.MAP else paths
    members = tuple(_protect(m, inside, rule, protection) for m in f.type.fields)
    landed = tuple(m.landed for m in members if m.landed)
    column = replace(f, type=replace(f.type, fields=landed)) if landed else None
    return ProtectedField(f, column, rule if column else DROPPED, members if column else (), paths)


def find_unmatched(protected: Sequence[ProtectedField], protection: Protection) -> Iterator[str]:
    """Yields the patterns without `*` that match nothing."""
    fields = {path: p.own.type.kind for p in _walk(protected) for path in p.paths}
    for pattern, _ in protection.rules:
        path = ".".join(_split_pattern(pattern))
        if "*" in path or path in fields or path in (RAW_KEY, HEADERS, QUARANTINE) or path.startswith(f"{HEADERS}."):
            continue
        above = (path[:at] for at, c in enumerate(path) if c == ".")
        if not any(fields.get(p) in (Kind.MAP, Kind.JSON) for p in above):
            yield pattern


def covers_path(protected: Sequence[ProtectedField], protection: Protection, path: str) -> bool:
    """Returns whether a rule covers a path in records, in lower case: that of the value, or of an object around it."""
    paths = [path[:at] for at, c in enumerate(f"{path}.") if c == "." and at]
    ruled = {p.paths[0] for p in _walk(protected) if p.rule}
    return any(p in ruled or protection.find(p) is not None for p in paths)


def _walk(protected: Sequence[ProtectedField]) -> Iterator[ProtectedField]:
    for p in protected:
        yield p
        yield from _walk(p.members)
