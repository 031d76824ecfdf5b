"""Changes of a feed's schema over time. Every shape is in the ledger before its first rows land.

Guarantee: new rows form one table with all rows that landed before, in Arrow, DuckDB and Spark. A column keeps its name
and its type, or gets a type that holds all of its old values. Any other change is refused before anything is read.
Under `on_drift: evolve`, columns also come from the records; the ledger's newest state decides, under the same rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sluice.pipelines.contract.suite import recall
from sluice.pipelines.errors import SchemaChanged
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import OnDrift
from sluice.pipelines.feed.table_section import names_fit
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.entries import (
    COPIES_FORMAT,
    CORRECTED_FORMAT,
    FOLDERS_FORMAT,
    FORMAT,
    PLACED_FORMAT,
    READER_FORMAT,
    RENAMED_FORMAT,
    SPLIT_FORMAT,
    PublishEntry,
    SchemaEntry,
    SchemaSource,
    ShapeText,
    SplitText,
)
from sluice.pipelines.model.receipts import Drift, DriftKind, Receipt
from sluice.pipelines.planning.windows import find_boundary
from sluice.pipelines.records.rows.split_rule import SplitRule, Tombstones
from sluice.pipelines.records.rows.value_reader import KeyReader, Reader
from sluice.pipelines.records.shape import SPLIT, Shape, Split
from sluice.pipelines.schema.layout import make_layout
from sluice.pipelines.schema.protection import Action, Protection, strip_places
from sluice.pipelines.schema.schema import (
    Field,
    Kind,
    Schema,
    SchemaError,
    SchemaProblem,
    Type,
    has_places,
    has_sources,
    parse_field,
    parse_schema,
    path_below,
)
from sluice.pipelines.schema.wider import RAW_TYPES, holds, one_table, parse_type
from sluice.pipelines.util.units import join_first, many
from sluice.pipelines.validation.drift import OTHERS, sum_drift

MOST_EVOLVED = 200
"""The number of columns, and members of structs, that records may add. Further fields stay in `_extra`."""
_SAID = 5


def find_shape(feed: Feed, state: State) -> Shape:
    """Returns the shape of the feed's records: from its files, and from columns that records added in the ledger.

    A field of the feed's schema has the feed's type, or the wider type that its records needed, at every depth. Where
    only a schema explains the bytes, it has the feed's.
    """
    shape = feed.shape
    if shape.split:
        return _replace_outputs(shape, {o.output: find_shape(o, state) for o in feed.outputs})
    evolved = select_output(state.evolved, feed.output) if feed.output else state.evolved
    if shape.columns is None or not evolved or not (shape.reader is None or shape.reader.evolves):
        return shape
    fields = list(shape.columns.fields)
    if not _is_bound(shape):
        fields = [
            replace(f, type=_widen(f.type, parse_type(evolved[f.name]))) if f.name in evolved else f for f in fields
        ]
    added = (parse_field(name, text) for name, text in evolved.items() if _is_addable(shape, name, text))
    added = (Field(f.name, f.type) for f in added if not f.path and f.header is None)
    return _with_columns(feed, shape, Schema((*fields, *_select_new(fields, added))))


def _replace_outputs(shape: Shape, shapes: Mapping[str, Shape]) -> Shape:
    """The shape of a split feed with these shapes of its outputs."""
    return replace(shape, split=replace(shape.split, shapes=shapes)) if shape.split else shape


def _is_bound(shape: Shape) -> bool:
    """Returns whether only a schema explains the bytes of values."""
    return shape.reader is not None and shape.reader.asks


def _is_addable(shape: Shape, name: str, type_text: str) -> bool:
    """Returns whether records may add this field. A schema of Avro has no type for JSON, which is several types."""
    return not _is_bound(shape) or (name.isascii() and name.isidentifier() and type_text != Kind.JSON)


def _select_new(own: Sequence[Field], fields: Iterable[Field]) -> list[Field]:
    """The fields that `own` has neither by their names, in any case, nor by their names in records."""
    names, sources = {f.name.casefold() for f in own}, {f.json_name for f in own}
    return [f for f in fields if f.name.casefold() not in names and f.json_name not in sources]


def _with_columns(feed: Feed, shape: Shape, columns: Schema) -> Shape:
    """The shape with these columns, of which the feed's own may be some."""
    base = Schema(_own_part(columns.fields, feed.columns.fields)) if feed.columns else columns
    of_json = not _is_bound(shape)
    return replace(shape, columns=columns, base=base if of_json and not shape.closed and base != columns else None)


def _own_part(fields: Sequence[Field], own: Sequence[Field]) -> tuple[Field, ...]:
    """The fields without those that `own` does not have, at every depth."""
    there = {f.name: f.type.fields for f in own}
    return tuple(
        replace(f, type=replace(f.type, fields=_own_part(f.type.fields, there[f.name])))
        for f in fields
        if f.name in there
    )


def _widen(own: Type, evolved: Type) -> Type:
    """The feed's type, with those parts of it widened that records have widened, and members that they have added."""
    if own.kind is not evolved.kind or own.kind not in (Kind.STRUCT, Kind.LIST, Kind.MAP):
        wider = holds(evolved, own) and not holds(own, evolved)
        return replace(evolved, encoding=own.encoding) if wider else own
    there = {f.name: f.type for f in evolved.fields}
    fields = [replace(f, type=_widen(f.type, there.get(f.name, f.type))) for f in own.fields]
    fields += [replace(f, required=False) for f in _select_new(fields, evolved.fields)]
    return replace(own, fields=tuple(fields))


def find_newest_name(state: State) -> str | None:
    """The name of the newest shape in the ledger; None when there is none."""
    return next(reversed(state.shapes), None)


def find_columns(feed: Feed, state: State) -> Schema | None:
    """The columns that a reader of the feed finds: the newest shape's in the ledger, or else the feed file's."""
    last = find_newest_name(state)
    if last is None:
        return feed.landed_columns
    columns = state.schemas[last]
    if feed.output:
        columns = select_output(columns, feed.output)
        return parse_schema(columns) if columns and columns != RAW_TYPES else feed.landed_columns
    return None if last.startswith(("raw", SPLIT)) else parse_schema(columns)


def select_output(columns: Mapping[str, str], output: str) -> dict[str, str]:
    """The columns of one output, of those that a split feed's shape names as `output/column`."""
    own = f"{output}/"
    return {name.removeprefix(own): text for name, text in columns.items() if name.startswith(own)}


def names_former_key(feed: Feed) -> bool:
    """Returns whether a column is named like a key of the folders of old ledgers."""
    former = paths.folder_keys(0, paths.FORMER_PREFIX)
    return any(f.name.casefold() in former for f in (feed.columns.fields if feed.columns else ()))


def describe_overridden(feed: Feed, state: State) -> str:
    """A sentence for columns named like a key of the feed's folders, with the remedy; empty without such columns."""
    keys = paths.folder_keys(feed.window.length, state.folder_prefix)
    columns = {**spell_columns(find_shape(feed, state)), **state.table}
    names = [n for n in columns if n.casefold() in keys]
    if not names:
        return ""
    label = f"{many(len(names), 'column')} named like a key of this feed's folders ({', '.join(names)})"
    return (
        f"{label}: tools that read the folder data/{feed.name} take the folder's value for the record's, or fail"
        " → read the files by `sluice files`, sluice.read or a table, or turn Hive partitions off;"
        " the folders of a new feed have other keys"
    )


def shape_named(ledger: Ledger, state: State, name: str, keys: Protection | None = None) -> Shape | None:
    """The shape of that name, as receipts carry it; None when the ledger does not know it.

    Its protection has those of `keys`: the ledger has identifiers of keys only.
    """
    number = state.shapes.get(name)
    entry = ledger.entry(number) if number is not None else None
    if not isinstance(entry, SchemaEntry):
        return None
    if (split := entry.split) is None:
        return _parse_shape(entry, keys)
    rule = SplitRule(split.values, split.header, split.path, split.otherwise, split.by_message, split.tombstones)
    outputs = {output: _parse_shape(text, keys) for output, text in split.outputs}
    return replace(_parse_shape(entry, keys), columns=None, split=Split(rule, outputs))


def find_protection(ledger: Ledger, state: State, name: str) -> Protection | None:
    """Returns the protection of the shape of that name, as `shape_named`. Its entry is only read if the name contains
    `protect`, or if it is a split shape's, which does not show its protection."""
    shape = shape_named(ledger, state, name) if " protect " in name or name.startswith(f"{SPLIT} ") else None
    return shape.protection if shape else None


def _parse_shape(text: ShapeText, keys: Protection | None) -> Shape:
    columns = parse_schema(text.columns) if text.columns is not None else None
    contract = recall(text.contract) if text.contract else None
    reader = text.source.reader() if text.source else None
    key = KeyReader(text.key.reader()) if text.key else None
    base = parse_schema(text.base) if text.base is not None else None
    protection = Protection.parse(text.protect).with_keys(keys) if text.protect else None
    return Shape(columns, contract, text.dropping, text.closed, reader, key, base, protection)


def declare(feed: Feed, ledger: Ledger) -> Shape:
    """The shape that records become from here on. Writes it to the ledger if it is new. Raises SchemaChanged."""
    shape = feed.shape

    def decide(state: State) -> SchemaEntry | None:
        nonlocal shape
        shape = find_shape(feed, state)
        if find_newest_name(state) == shape.name:
            return None
        table = find_corrected_table(feed, shape, ledger, state)
        entry = _build_entry(feed, shape, _describe_change(ledger, state, shape), state.folder_prefix)
        return entry if table is None else entry.model_copy(update={"format": CORRECTED_FORMAT, "table": table})

    ledger.append(decide)
    return shape


def find_corrected_table(feed: Feed, shape: Shape, ledger: Ledger, state: State) -> dict[str, str] | None:
    """Returns the columns of remaining rows for a shape that only former rows do not fit; for others None.

    Raises SchemaChanged, also while a batch with rows of the former type may be live.
    """
    try:
        check_one_table(feed, shape, state)
    except SchemaChanged as error:
        published = ((n, e) for n, e in ledger.entries() if isinstance(e, PublishEntry))
        remaining = [r for n, e in published for r in state.receipts(n, e) if r.counts.landed_rows]
        names, table = {r.format for r in remaining}, dict[str, str]()
        for name in (n for n in state.shapes if n in names):
            table = one_table(table, state.schemas[name])
        check_one_table(feed, shape, replace(state, table=table), remaining)
        if live := state.live():
            remedy = f"finish or abandon it first, with the former schema: sluice repair {feed.name}"
            raise SchemaChanged(f"{error.message}\n    and batch {live[0].id} is live", remedy=remedy) from None
        return table
    return None


def preview_protection(feed: Feed, ledger: Ledger, state: State) -> str:
    """Returns how the next rows will be protected in another way than the newest; empty if nothing changes."""
    last = find_newest_name(state)
    before = shape_named(ledger, state, last) if last else None
    changes = describe_protection(before.protection, feed.shape.protection) if before else []
    return f"{'; '.join(changes)}; landed rows stay as they are" if changes else ""


def check_one_table(feed: Feed, shape: Shape, state: State, remaining: Sequence[Receipt] = ()) -> None:
    """Raises SchemaChanged when rows of the shape would not form one table with all landed rows.

    The remedy names the windows of the `remaining` rows whose type does not fit.
    """
    last = find_newest_name(state)
    if state.table and last and last.startswith(SPLIT) != (shape.split is not None):
        was = "without `split`" if shape.split else "with `split`"
        raise SchemaChanged(
            f"feed {feed.name} has landed {was}, and its hours would become others",
            remedy="give the feed its former form, or land the topics as a new feed",
        )
    try:
        for own in shape.datasets.values():
            _ = make_layout(own.columns) if own.columns else None
    except SchemaProblem as problem:  # a copy of a column that records have widened
        raise SchemaChanged(f"feed {feed.name}: {problem}", remedy=problem.remedy) from None
    columns = spell_columns(shape)
    problems = list(_find_problems(columns, state.table))
    if not problems:
        return
    lines = "".join(f"\n    {text}" for text, _ in problems[:_SAID])
    more = f"\n    and {len(problems) - _SAID} more" if len(problems) > _SAID else ""
    raise SchemaChanged(
        f"feed {feed.name}: new rows would not form one table with the landed ones:{lines}{more}",
        remedy=f"{problems[0][1]}; or land it as a new feed{_format_correction(feed, columns, state, remaining)}",
    )


def _format_correction(feed: Feed, columns: Mapping[str, str], state: State, remaining: Sequence[Receipt]) -> str:
    """Returns the commands after which no row has another type than these columns; empty if there are none.

    A column that records added cannot be left out.
    """
    types = {name: parse_type(text) for name, text in columns.items() if name not in state.evolved}
    misfits, closed, others = dict[str, None](), set[int](), list[str]()
    for receipt in remaining:
        old, r = state.schemas[receipt.format], receipt.offset_range
        names = [n for n, t in types.items() if n in old and not holds(t, parse_type(old[n]))]
        misfits |= dict.fromkeys(names)
        if names and state.current.get(r.tp) == r.key:
            if r.window is None or find_boundary(state, r.key, feed.window.end_of(r.window)) is None:
                others.append(f"--offsets {r.key}:{r.start}-{r.end}")
            else:
                closed.add(feed.window.start_of(r.window))
    name, expiry = feed.window.name, "; rows that Kafka no longer has keep the old type until they expire"
    options = [*(f"--from {name(start)} --to {name(end)}" for start, end in feed.window.join(closed)), *others]
    if not options:
        return expiry if misfits else ""
    commands = join_first((f"sluice run {feed.name} {o} --replace" for o in options), _SAID, "; and {:,} more", "; ")
    until = ", with `on_drift: extra`" if feed.policies.on_drift is OnDrift.EVOLVE else ""
    return (
        f"; to correct a type: leave {', '.join(misfits)} out{until}, land the rows of the old type again, add it, and"
        f" land them once more: {commands}{expiry}"
    )


def spell_columns(shape: Shape) -> Mapping[str, str]:
    """Column names and types, as a schema spells them: of raw rows Kafka's, of a split feed those of all outputs."""
    if shape.split:
        return shape.split.columns
    return RAW_TYPES if shape.landed_columns is None else shape.landed_columns.texts()


def _find_problems(columns: Mapping[str, str], table: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields a message and a remedy for each column that does not fit the landed rows."""
    standing = {name.casefold(): name for name in table}
    for name, text in columns.items():
        old = standing.get(name.casefold())
        if old is None:
            continue
        if old != name:
            message = f"{name} differs by case only from {old}, which has landed"
            yield message, f"give {name} another name, or the old one ({old})"
        elif not holds(parse_type(text), parse_type(table[name])):
            message = f"{name} is {text}, and has landed as {table[name]}, which {text} does not hold"
            remedy = f"give {name} its old type ({table[name]}) or a wider one, or give the new field another name"
            yield message, remedy


def _build_entry(feed: Feed, shape: Shape, reason: str, folder_prefix: paths.FolderPrefix) -> SchemaEntry:
    if shape.split:
        rule = shape.split.rule
        split = SplitText(
            outputs=tuple((output, ShapeText(**_spell_shape(of))) for output, of in shape.split.shapes.items()),
            values=dict(rule.outputs),
            header=rule.header,
            path=rule.path,
            by_message=rule.by_message,
            otherwise=rule.otherwise,
            tombstones=rule.tombstones,
        )
        evolved = {
            f"{o.output}/{name}": text
            for o in feed.outputs
            for name, text in _find_evolved(o, shape.split.shapes[o.output])
        }
        document = _spell_shape(shape) | {"columns": shape.split.columns, "split": split}
        # A Sluice that does not copy tombstones would lose those copies without noticing: it must refuse the entry.
        format = SPLIT_FORMAT if rule.tombstones is Tombstones.OTHERWISE else COPIES_FORMAT
        return SchemaEntry(format=format, evolved=evolved, reason=reason, folder_prefix=folder_prefix, **document)
    document = _spell_shape(shape)
    fields = shape.columns.fields if shape.columns else ()
    # The oldest format that can say it: earlier versions of Sluice keep reading ledgers without newer features.
    newest = PLACED_FORMAT if has_places(fields) else RENAMED_FORMAT if has_sources(fields) else None
    usual = FOLDERS_FORMAT if folder_prefix else READER_FORMAT if shape.reader or shape.key else FORMAT
    return SchemaEntry(
        format=PLACED_FORMAT if shape.protection else newest or usual,
        evolved=dict(_find_evolved(feed, shape)),
        reason=reason,
        folder_prefix=folder_prefix,
        **document,
    )


def _find_evolved(feed: Feed, shape: Shape) -> Iterator[tuple[str, str]]:
    """Yields the columns of the shape that the feed's file does not have with this type."""
    own = feed.columns.texts() if feed.columns else {}
    columns = shape.columns.texts() if shape.columns else {}
    yield from ((name, text) for name, text in columns.items() if own.get(name) != text)


def _spell_shape(shape: Shape) -> dict[str, Any]:
    """The fields of a `ShapeText`."""
    landed = shape.landed_columns if shape.protection else None
    return {
        "shape": shape.name,
        "columns": shape.columns.texts() if shape.columns else None,
        "contract": shape.contract.text if shape.contract else "",
        "dropping": shape.dropping,
        "closed": shape.closed,
        "source": _build_source(shape.reader),
        "key": _build_source(shape.key.reader if shape.key else None),
        "base": shape.base.texts() if shape.base else None,
        "protect": shape.protection.to_texts() if shape.protection else None,
        "landed": strip_places(landed).texts() if landed else None,
    }


def _build_source(reader: Reader | None) -> SchemaSource | None:
    return SchemaSource(format=reader.format, texts=reader.texts, wire=reader.wire) if reader else None


def _describe_change(ledger: Ledger, state: State, shape: Shape) -> str:
    """Returns a description of the change."""
    last = find_newest_name(state)
    before = shape_named(ledger, state, last) if last else None
    if before is None:
        return "the first"
    columns = (spell_columns(replace(s, protection=None)) for s in (before, shape))
    changes = [*_list_changed_columns(*columns)]
    contracts = [s.contract.hash if s.contract else "" for s in (before, shape)]
    changes += ["contract changed"] if contracts[0] != contracts[1] else []
    policies = [(s.dropping, s.closed) for s in (before, shape)]
    changes += ["policies changed"] if policies[0] != policies[1] else []
    changes += ["schema_file changed"] if before.reader != shape.reader else []
    changes += ["key changed"] if before.key != shape.key else []
    changes += describe_protection(before.protection, shape.protection)
    changes += ["added columns no longer refuse values"] if not changes and shape.base and not before.base else []
    return "; ".join(changes) or "the order of its columns"


def describe_protection(before: Protection | None, after: Protection | None) -> list[str]:
    """Returns how the protection of rows changed, field by field; empty if it did not."""
    old, new = (dict(p.rules) if p else {} for p in (before, after))
    changes = []
    for path in dict.fromkeys((*old, *new)):
        was, now = old.get(path), new.get(path)
        if was == now:
            continue
        rekeyed = was and now and was.action is now.action is Action.HMAC
        kinds = [str(r.action) if r else "no protection" for r in (was, now)]
        change = "another key: hashes before and after do not join" if rekeyed else " to ".join(kinds)
        changes.append(f"protect {path}: {change}")
    return changes


def _list_changed_columns(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    yield from (f"added {name} ({text})" for name, text in after.items() if name not in before)
    yield from (f"dropped {name} ({text})" for name, text in before.items() if name not in after)
    yield from (f"{n}: {before[n]} to {t}" for n, t in after.items() if n in before and before[n] != t)


# -- columns from records


def evolve(feed: Feed, ledger: Ledger, receipts: Sequence[Receipt]) -> None:
    """Under `on_drift: evolve`, write a shape to the ledger that takes in the drift of a published batch."""
    drifts = [d for d in sum_drift(receipts) if d.type and d.kind in (DriftKind.NEW, DriftKind.WIDENED)]
    if feed.policies.on_drift is not OnDrift.EVOLVE or not drifts:
        return

    def decide(state: State) -> SchemaEntry | None:
        shape = find_shape(feed, state)
        if shape.split is None:
            grown = _grow(feed, shape, drifts, state.table)
        else:
            shapes = dict(shape.split.shapes)
            for output in feed.outputs:
                own = f"{output.output}/"
                mine = [replace(d, field=d.field.removeprefix(own)) for d in drifts if d.field.startswith(own)]
                table = select_output(state.table, output.output)
                shapes[output.output] = _grow(output, shapes[output.output], mine, table)
            grown = _replace_outputs(shape, shapes)
        if grown.name == shape.name:
            return None
        return _build_entry(feed, grown, _describe_change(ledger, state, grown), state.folder_prefix)

    ledger.append(decide)


def _grow(feed: Feed, shape: Shape, drifts: Sequence[Drift], table: Mapping[str, str]) -> Shape:
    """The shape of a feed's or an output's rows, with as much of the drift as it can take in."""
    if shape.columns is None:
        return shape
    own = _count(feed.columns.fields) if feed.columns else 0
    columns = evolve_schema(
        shape.columns,
        (
            d
            for d in drifts
            if d.field != OTHERS and (d.kind is not DriftKind.NEW or _is_addable(shape, d.field, d.type))
        ),
        table,
        MOST_EVOLVED - (_count(shape.columns.fields) - own),
        partial(names_fit, feed.table),
        partial(_protect_columns, shape),
    )
    return _with_columns(feed, shape, columns)


def _count(fields: Iterable[Field]) -> int:
    """Returns the number of fields, including nested ones."""
    return sum(1 + _count(f.type.fields) for f in fields)


def evolve_schema(
    columns: Schema,
    drifts: Iterable[Drift],
    table: Mapping[str, str],
    max_fields: int,
    fits: Callable[[Schema, Schema], bool] = lambda before, after: True,
    land: Callable[[Schema], Schema] = lambda columns: columns,
) -> Schema:
    """The schema, with as much of the drift as it can take in, stay one table, and still `fits`. Adds at most
    `max_fields` fields. `land` returns the columns of landed rows."""
    begun = _count(columns.fields)
    for drift in drifts:
        grown = columns
        if drift.kind is DriftKind.WIDENED:
            grown = _grow_if_sound(columns, _build_widening(drift), table, land)
        elif _count(columns.fields) - begun < max_fields:
            grown = _grow_if_sound(columns, _build_addition(drift), table, land)
        columns = grown if fits(columns, grown) else columns
    return columns


def _protect_columns(shape: Shape, columns: Schema) -> Schema:
    return replace(shape, columns=columns).landed_columns or columns


def _grow_if_sound(
    columns: Schema,
    change: Callable[[Schema], Mapping[str, str]],
    table: Mapping[str, str],
    land: Callable[[Schema], Schema],
) -> Schema:
    try:
        after = parse_schema(change(columns))
    except SchemaError:  # a name that cannot be a column's, or that readers would take for another
        return columns
    sound = not any(_find_problems(land(after).texts(), one_table(table, land(columns).texts())))
    return after if sound else columns


def _build_addition(drift: Drift) -> Callable[[Schema], Mapping[str, str]]:
    def grown(columns: Schema) -> Mapping[str, str]:
        if "\\" in drift.field:  # it may stand for what cannot be printed, or for a dot
            return columns.texts()
        inside = {f.name: _with_member(f, f.name, drift).text for f in columns.fields}
        there = drift.field in inside or inside != columns.texts()
        return inside if there else {**inside, drift.field: drift.type}

    return grown


def _with_member(f: Field, path: str, drift: Drift) -> Field:
    """The field with the member that drift has found in it, or below it."""
    if f.type.kind is Kind.STRUCT and drift.field.startswith(f"{path}."):
        name = drift.field.removeprefix(f"{path}.")
        if "." not in name and all(m.name != name for m in f.type.fields):
            return replace(f, type=replace(f.type, fields=(*f.type.fields, Field(name, parse_type(drift.type)))))
    members = tuple(_with_member(m, path_below(path, f.type.kind, m.name), drift) for m in f.type.fields)
    return replace(f, type=replace(f.type, fields=members))


def _build_widening(drift: Drift) -> Callable[[Schema], Mapping[str, str]]:
    return lambda columns: {f.name: _widen_field(f, f.name, drift).text for f in columns.fields}


def _widen_field(f: Field, path: str, drift: Drift) -> Field:
    """Returns the field, or one below it, with the type that holds the values of the drift."""
    if path == drift.field:
        wide = parse_type(drift.type)
        return replace(f, type=replace(wide, encoding=f.type.encoding)) if holds(wide, f.type) else f
    members = tuple(_widen_field(m, path_below(path, f.type.kind, m.name), drift) for m in f.type.fields)
    return replace(f, type=replace(f.type, fields=members))
