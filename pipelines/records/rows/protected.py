"""A `Format` that protects fields of another format's rows: the only place where rows become protected.

Promises: rows leave here as they land. Bytes that no schema explains cannot be protected field by field: a quarantined
record has no value, or an encrypted one (`sealed`), and `withheld_bytes` has its size. No reason quotes a value. Equal
values give equal hashes in every feed, window and type, because a hash is that of a value's text (`spell_values`). Each
distinct value of a piece is hashed once.

Contracts are checked before, on the values as they were sent.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.rows.row_format import WITHHELD, Format, Formatted, landed_schema
from sluice.pipelines.schema.arrays import as_mask, boolean_array, text_array
from sluice.pipelines.schema.protection import (
    DROPPED,
    RAW_KEY,
    Action,
    ProtectedField,
    Protection,
    Rule,
    extend_path,
    find_rule,
    get_landed_columns,
)
from sluice.pipelines.schema.schema import EXTRA, KAFKA, Kind, Type, arrow_type

HIDDEN = "****"
"""Stands for all characters that are not kept, however many."""
_MOST_DIGITS = 400
"""Numbers of JSON with a larger exponent are hashed as they are written: no column holds them."""


class ProtectedFormat:
    """Protects the rows of the format `behind`. `columns` are those of a typed feed; None for raw rows.

    With `hides_keys`, rows have no key unless `_key` has a rule: columns that keys make are protected.
    """

    def __init__(
        self, behind: Format, columns: Sequence[ProtectedField] | None, protection: Protection, *, hides_keys: bool
    ) -> None:
        self.schema = behind.schema if columns is None else landed_schema(get_landed_columns(columns))
        self.contract = behind.contract
        self._behind, self._columns, self._protection = behind, columns or (), protection
        self._key = protection.find(RAW_KEY) or (DROPPED if hides_keys else None)
        self._json = _JsonProtector(protection)
        self._extra = {p.own.json_name: p for p in self._columns}

    def convert(self, s: OffsetRange, chunk: pa.RecordBatch) -> Iterator[Formatted]:
        """The other format's pieces, protected."""
        for piece in self._behind.convert(s, chunk):
            refused = None if piece.quarantined is None else self.protect_records(piece.quarantined)
            columns = self._protect_coordinates(piece.landed, KAFKA if self._columns else "")
            for p in self._columns:
                if p.landed:
                    columns[p.own.name] = self._protect_values(columns[p.own.name], p)
            if self._columns:
                columns[EXTRA] = self._json.protect(columns[EXTRA], self._extra, ("", ""), None)
            yield replace(
                piece,
                landed=pa.RecordBatch.from_arrays([columns[name] for name in self.schema.names], schema=self.schema),
                quarantined=refused,
            )

    def protect_records(self, records: pa.RecordBatch, *, for_display: bool = False) -> pa.RecordBatch:
        """Records as they came, with protected keys and headers, and the sizes of their values. With a key for it, the
        value is the encrypted record; else, and if they are only shown, it is null."""
        columns = self._protect_coordinates(records, "")
        sizes = pc.fill_null(pc.binary_length(columns["value"]), 0).cast(WITHHELD.type)
        columns["value"] = pa.nulls(records.num_rows, pa.binary())
        if (seal := self._protection.seal) and not for_display:
            from sluice.pipelines.records.rows.sealed import seal_records

            columns["value"] = seal_records(seal, records)
        schema = records.schema.append(WITHHELD)
        return pa.RecordBatch.from_arrays([*columns.values(), sizes], schema=schema)

    def _protect_coordinates(self, rows: pa.RecordBatch, prefix: str) -> dict[str, pa.Array]:
        """The columns of the rows, with protected keys and headers."""
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))
        key, headers = prefix + "key", prefix + "headers"
        if self._key:
            columns[key] = _apply(self._key, columns[key]).cast(pa.binary())
        values = columns[headers].values
        names, values = values.field(0), values.field(1)
        columns[headers] = self._protect_entries(columns[headers], names, values, values, self._protection.find_header)
        return columns

    def _protect_values(self, array: pa.Array, p: ProtectedField) -> pa.Array:
        """Values of a field, of the type in which it lands. `array` may be part of a longer one."""
        kind = p.own.type.kind
        if not p.is_changed or p.landed is None:
            return array
        if kind is Kind.JSON:
            return self._json.protect(array, _get_members(p), p.paths, p.rule)
        if kind is Kind.STRUCT:
            there = [(i, m, m.landed) for i, m in enumerate(p.members) if m.landed]
            children = [self._protect_values(array.field(i), m) for i, m, _ in there]
            fields = [pa.field(f.name, arrow_type(f.type)) for _, _, f in there]
            nulls = array.is_null() if array.null_count else None
            return pa.StructArray.from_arrays(children, fields=fields, mask=nulls)
        if kind is Kind.LIST:
            offsets, (values,) = _cut(array, array.values)
            return _with_children(array, arrow_type(p.landed.type), offsets, self._protect_values(values, p.members[0]))
        if kind is Kind.MAP:
            values = self._protect_values(array.items, p.members[0])

            def find(name: str) -> Rule | None:
                return find_rule(self._protection, (extend_path(p.paths[0], name), extend_path(p.paths[1], name)))

            return self._protect_entries(array, array.keys, array.items, values, find, p.landed.type)
        return _apply(p.rule or DROPPED, array)

    def _protect_entries(
        self,
        array: pa.Array,
        names: pa.Array,
        before: pa.Array,
        values: pa.Array,
        find: Callable[[str], Rule | None],
        kind: Type | None = None,
    ) -> pa.Array:
        """Lists of names with values, or maps of this type, without dropped entries, with the others protected.

        `values` are protected in the same way under all names. A value that must be text where its type is another one
        is dropped.
        """
        offsets, (names, before, values) = _cut(array, names, before, values)
        # Many entries have few names: rules are looked up once for each name, and applied to all of its values at once.
        encoded = names.dictionary_encode()
        rules = [find(name) for name in encoded.dictionary.to_pylist()]
        codes = encoded.indices.to_numpy(zero_copy_only=False)
        textual = pa.types.is_string(values.type) or pa.types.is_binary(values.type)
        keep = np.ones(len(names), np.bool_)
        for rule in dict.fromkeys(filter(None, rules)):
            mask = np.isin(codes, [n for n, other in enumerate(rules) if other == rule])
            if rule.action is Action.DROP or not textual:
                keep &= ~mask
            else:
                chosen = boolean_array(mask)
                values = pc.replace_with_mask(values, chosen, _apply(rule, before.filter(chosen)).cast(values.type))
        if not keep.all():
            names, values = names.filter(boolean_array(keep)), values.filter(boolean_array(keep))
            # An offset becomes the number of retained entries before it.
            offsets = np.concatenate([[0], np.cumsum(keep)])[offsets]
        lists = arrow_type(kind) if kind else array.type
        entry = pa.struct([lists.key_field, lists.item_field]) if kind else lists.value_type
        entries = pa.StructArray.from_arrays([names, values], fields=list(entry))
        return _with_children(array, lists, offsets, entries)


def protect_records(form: Format, records: pa.RecordBatch, *, for_display: bool = False) -> pa.RecordBatch:
    """Records as they came, as the format would quarantine or show them."""
    return form.protect_records(records, for_display=for_display) if isinstance(form, ProtectedFormat) else records


def _cut(array: pa.Array, *children: pa.Array) -> tuple[Array, list[pa.Array]]:
    """Where the elements of each list begin, and the children that the lists have elements in."""
    if not len(array):
        return np.zeros(1, np.int32), [child.slice(0, 0) for child in children]
    offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]
    return offsets - offsets[0], [child.slice(offsets[0], offsets[-1] - offsets[0]) for child in children]


def _with_children(array: pa.Array, kind: pa.DataType, offsets: Array, values: pa.Array) -> pa.Array:
    """Lists, null where those of `array` are."""
    valid = pa.py_buffer(np.packbits(as_mask(array.is_valid()), bitorder="little")) if array.null_count else None
    ends = pa.py_buffer(np.ascontiguousarray(offsets, np.int32))
    return pa.Array.from_buffers(kind, len(array), [valid, ends], children=[values])


# -- values


def _apply(rule: Rule, values: pa.Array) -> pa.Array:
    """Texts for values, null for nulls. Each distinct value is replaced once."""
    if rule.action is Action.DROP:
        return pa.nulls(len(values), pa.string())
    encoded = values.dictionary_encode()
    texts = spell_values(encoded.dictionary)
    replaced = hash_texts(rule, texts) if rule.action is Action.HMAC else text_array([_hide(rule, t) for t in texts])
    return pa.DictionaryArray.from_arrays(encoded.indices, replaced).dictionary_decode()


def hash_texts(rule: Rule, texts: Sequence[bytes]) -> pa.Array:
    """The keyed hash of each text, as 64 hex digits."""
    if rule.key is None:
        raise ValueError("a rule without its key")
    keyed = hmac.new(rule.key.get_secret_value().encode(), digestmod="sha256")
    digests = []
    for text in texts:
        own = keyed.copy()
        own.update(text)
        digests.append(own.digest())
    data = b"".join(digests).hex().encode()
    ends = np.arange(len(texts) + 1, dtype=np.int32) * np.int32(64)
    return pa.StringArray.from_buffers(len(texts), pa.py_buffer(ends), pa.py_buffer(data))


def _hide(rule: Rule, text: bytes) -> str:
    """The last characters, if at least as many are hidden."""
    characters = text.decode("utf-8", "replace")
    return HIDDEN + (characters[-rule.keep :] if len(characters) >= 2 * rule.keep else "")


def spell_values(values: pa.Array) -> list[bytes]:
    """The text of each value, by which it is hashed; docs/protection.md specifies it. Equal values of different types
    have equal texts. `values` has no nulls."""
    kind = values.type
    if pa.types.is_binary(kind):
        return list(values.to_pylist())
    if pa.types.is_decimal(kind):
        texts = [_spell_number(value) for value in values.to_pylist()]
    elif pa.types.is_floating(kind):
        own = np.float32 if pa.types.is_float32(kind) else np.float64
        floats = (str(own(value)) for value in values.to_pylist())
        texts = [text if text in ("nan", "inf", "-inf") else _spell_number(Decimal(text)) for text in floats]
    elif pa.types.is_timestamp(kind):
        naive = values.cast(pa.int64()).cast(pa.timestamp(kind.unit)).cast(pa.string()).to_pylist()
        texts = [f"{_trim(text).replace(' ', 'T')}Z" for text in naive]
    else:
        texts = values.cast(pa.string()).to_pylist()
    return [text.encode() for text in texts]


def _spell_number(value: Decimal) -> str:
    text = _trim(f"{value:f}")
    return "0" if text == "-0" else text


def _trim(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


# -- JSON

_BLANK = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str, strict=False)
Members = Mapping[str, ProtectedField]
"""Fields by their names in records; under the empty name, the values of a map or the elements of a list."""


def _get_members(p: ProtectedField | None) -> Members:
    if p is None:
        return {}
    element = p.own.type.kind in (Kind.LIST, Kind.MAP)
    return {"" if element else m.own.json_name: m for m in p.members}


class _JsonProtector:
    """Protects values in texts of JSON. What no rule is about stays as it is written."""

    def __init__(self, protection: Protection) -> None:
        self._find = protection
        hints = "|".join(re.escape(hint) for hint in protection.hints)
        self._pattern = rf"(?i){hints}|\\" if hints else ""

    def protect(self, texts: pa.Array, members: Members, paths: tuple[str, str], rule: Rule | None) -> pa.Array:
        """Returns the texts of values at these paths; null for objects that lose all members."""
        if texts.null_count == len(texts):
            return texts
        mask = as_mask(
            pc.match_substring_regex(texts, self._pattern) if self._pattern and not rule else texts.is_valid()
        )
        if not mask.any():
            return texts
        encoded = texts.filter(boolean_array(mask)).dictionary_encode()
        protected = [
            self._protect_value(t, _skip_blanks(t, 0), members, paths, rule)[0] for t in encoded.dictionary.to_pylist()
        ]
        own = np.array([text is not None for text in protected], np.bool_)
        column = text_array([text or "" for text in protected])
        column = pc.if_else(boolean_array(own), column, pa.nulls(len(own), pa.string()))
        return pc.replace_with_mask(texts, boolean_array(mask), column.take(encoded.indices))

    def _protect_value(
        self, text: str, at: int, members: Members, paths: tuple[str, str], rule: Rule | None
    ) -> tuple[str | None, int]:
        """The protected value that begins at `at`, None if nothing is left of it, and where it ends."""
        if text[at] == "{":
            return self._protect_object(text, at, members, paths, rule)
        if text[at] == "[":
            items, end = list[str](), _skip_blanks(text, at + 1)
            while text[end] != "]":
                item, end = self._protect_value(text, end, _get_members(members.get("")), paths, rule)
                items.append("{}" if item is None else item)
                end = _skip_separator(text, end)
            return f"[{','.join(items)}]", end + 1
        value, end = _DECODER.raw_decode(text, at)
        return (text[at:end] if rule is None or value is None else _protect_scalar(rule, text[at:end], value)), end

    def _protect_object(
        self, text: str, at: int, members: Members, paths: tuple[str, str], rule: Rule | None
    ) -> tuple[str | None, int]:
        retained, is_less = list[str](), False
        end = _skip_blanks(text, at + 1)
        while text[end] != "}":
            name, stop = _DECODER.raw_decode(text, end)
            begin = _skip_blanks(text, _skip_blanks(text, stop) + 1)
            p = members.get(name) or members.get("")
            own = p.own.name if p and p.own.name else name
            inside = extend_path(paths[0], name), extend_path(paths[1], own)
            applied = find_rule(self._find, inside) or rule
            if applied and applied.action is Action.DROP:
                value, after = None, _DECODER.raw_decode(text, begin)[1]
            else:
                value, after = self._protect_value(text, begin, _get_members(p), inside, applied)
            if value is None:
                is_less = True
            else:
                retained.append(f"{text[end:stop]}:{value}")
            end = _skip_separator(text, after)
        return (None if is_less and not retained else f"{{{','.join(retained)}}}"), end + 1


def _protect_scalar(rule: Rule, written: str, value: object) -> str:
    """A text, number or truth of JSON as text of JSON."""
    if written[0] == '"':
        spelled = str(value)
    elif isinstance(value, bool):
        spelled = written
    else:
        number = Decimal(written) if len(written) < _MOST_DIGITS else None
        plain = number is not None and number.is_finite() and abs(number.adjusted()) < _MOST_DIGITS
        spelled = _spell_number(number) if number is not None and plain else written
    data = spelled.encode("utf-8", "surrogatepass")
    protected = hash_texts(rule, [data])[0].as_py() if rule.action is Action.HMAC else _hide(rule, data)
    return json.dumps(protected)


def _skip_blanks(text: str, at: int) -> int:
    match = _BLANK.match(text, at)
    return match.end() if match else at


def _skip_separator(text: str, at: int) -> int:
    """The place of the next member or element, or of the end."""
    at = _skip_blanks(text, at)
    return _skip_blanks(text, at + 1) if text[at] == "," else at
