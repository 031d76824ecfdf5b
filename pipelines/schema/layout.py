"""Where the values of a feed's columns are: the schema to read records by, and the place of each column in its rows.

    columns                                     reading schema
    id: int64                                   id: int64
    repo: string not null at repo.full_name     $.repo: struct<repo: string not null> not null, of the field `repo`
    items: list<struct<sku:string>>             items: list<struct<sku:string>>
    first: string at items[0].sku               (a copy of a part of `items`)
    event: string header X-GitHub-Event         (not of the value)

Objects on the way to a column's values are hidden structs: named `$.` and their path, which no column can be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from sluice.pipelines.schema.schema import Field, Kind, Schema, SchemaProblem, Type, spell_path
from sluice.pipelines.schema.wider import holds

HIDDEN = "$."
"""How the names of hidden structs begin."""
Step = tuple[Kind, str | int]
"""A step into a value: the index of a struct's member or of a list's element, or the key of a map."""
_Tree = dict[str, "Field | _Tree"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a column's values are: the index of a column of the reading schema (−1: in a header) and steps into it.

    `is_copy`: whether another column holds the same values.
    """

    field: Field
    column: int
    steps: tuple[Step, ...] = ()
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """The schema to read values by, and the source of each column, in the order of columns."""

    reading: Schema
    sources: tuple[Source, ...]

    @property
    def is_plain(self) -> bool:
        """Returns whether records have each column as it lands."""
        return all(s.column >= 0 and not s.steps for s in self.sources)

    @property
    def hidden(self) -> tuple[Field, ...]:
        """The columns of the reading schema that are no columns of the feed."""
        return tuple(f for f in self.reading.fields if f.name.startswith(HIDDEN))

    @property
    def own(self) -> tuple[Field, ...]:
        """The columns whose values no other column holds, and that are of the value."""
        return tuple(s.field for s in self.sources if not s.is_copy)


@lru_cache(maxsize=256)
def make_layout(schema: Schema) -> Layout:
    """The layout of a schema. Raises SchemaProblem for a column at a path that leads nowhere."""
    own = [f for f in schema.fields if not f.path and f.header is None]
    tree: _Tree = {f.json_name: f for f in own}
    for f in sorted((f for f in schema.fields if f.path), key=lambda f: len(f.path)):
        _insert(tree, f)
    hidden = (_hide((name,), inside) for name, inside in tree.items() if isinstance(inside, dict))
    reading = (*own, *hidden)
    positions = {f.json_name: n for n, f in enumerate(reading)}
    sources: list[Source] = []
    for f in schema.fields:
        if f.header is not None:
            sources.append(Source(f, -1, is_copy=True))
        else:
            at = positions[str(f.path[0]) if f.path else f.json_name]
            sources.append(_resolve(f, at, reading[at]) if f.path else Source(f, at))
    return Layout(Schema(reading), tuple(sources))


def _insert(tree: _Tree, f: Field) -> None:
    """Put a column into the tree of objects, unless its path leads into another column."""
    for n, step in enumerate(f.path):
        if isinstance(step, int):
            what = f"is an element of {spell_path(f.path[:n])}, which is no column"
            raise SchemaProblem(f.name, what, "add a column for the list, such as `items: list<struct<sku:string>>`")
        inside = tree.setdefault(step, {} if n + 1 < len(f.path) else f)
        if isinstance(inside, Field):
            return
        tree = inside


def _hide(path: tuple[str, ...], inside: Mapping[str, Field | _Tree]) -> Field:
    """The hidden struct of these columns and objects. It is required where a column in it is."""
    members = tuple(
        replace(entry, source=name) if isinstance(entry, Field) else _hide((*path, name), entry)
        for name, entry in inside.items()
    )
    name = HIDDEN + ".".join(step.replace(".", "\\.") for step in path)
    return Field(name, Type(Kind.STRUCT, fields=members), any(f.required for f in members), source=path[-1], path=path)


def _resolve(f: Field, column: int, root: Field) -> Source:
    steps, at = list[Step](), root
    for n, step in enumerate(f.path[1:], 1):
        number = _find_step(at.type, step)
        if number is None:
            what = f"is at {spell_path(f.path)}, and {spell_path(f.path[:n])} is {at.type}"
            remedy = "give the column another path, or land that as a struct, a list of structs or a map"
            raise SchemaProblem(f.name, what, remedy)
        steps.append((at.type.kind, number))
        at = at.type.fields[number if at.type.kind is Kind.STRUCT and isinstance(number, int) else 0]
    is_copy = at.path != f.path
    if is_copy:
        _check_type(f, at.type)
    return Source(f, column, tuple(steps), is_copy)


def _find_step(t: Type, step: str | int) -> str | int | None:
    match t.kind:
        case Kind.STRUCT:
            return next((n for n, f in enumerate(t.fields) if f.json_name == step), None)
        case Kind.LIST:
            return step if isinstance(step, int) else None
        case Kind.MAP:
            return step if isinstance(step, str) else None
    return None


def _check_type(f: Field, there: Type) -> None:
    """Raises SchemaProblem for a copy of another type than its original's, or a wider one."""
    same = f.type == there if f.type.fields or there.fields else holds(f.type, there)
    if not same or f.type.encoding not in (None, there.encoding):
        plain = replace(there, encoding=None)
        what = f"is {f.type}, and another column has {spell_path(f.path)} as {there}"
        raise SchemaProblem(f.name, what, f"write `{plain} at {spell_path(f.path)}`")
