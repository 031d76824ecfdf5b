"""Finds the header or field whose values tell several shapes of a topic's records apart.

Pure functions over a sample. The features of a record are the names in its row, down to `_LEVELS` levels, with the kind
of the value where that differs between records. A discriminator is chosen by description length: the bits of all
records' features if each value has frequencies of its own, plus the bits of these frequencies. Many values that explain
little cost more than they save.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import combinations
from math import log2
from typing import Any

import numpy as np

from sluice.pipelines.operating.envelopes import Envelope, Path, SampledRecord, get_value
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.schema.inference import is_data_text, list_words

_LEVELS, _MOST_FEATURES = 3, 2000
_MOST_VALUES, _MOST_OUTPUTS = 100, 40
"""Of more values each is data; of more frequent ones, no file of a feed would be readable."""
LEAST_RECORDS, LEAST_SHARE = 5, 0.005
"""A rarer value gets no output, a rarer feature counts for no shape."""
_MOST_REST = 0.1
"""The share of records that may have a rare value, or none."""
_EXPLAINED = 0.5
"""The share of the features' bits that a discriminator saves."""
_ALIKE, _ALIKE_KINDS, _PART = 0.5, 0.67, 0.25
"""Shapes of which fewer names are common differ. Where only the names of an object within the row differ, these are at
least `_PART` of all."""
_TIED = 0.05
_KIND_WORDS = frozenset(["type", "event", "kind", "name", "message", "action", "entity", "topic", "table", "class"])
"""Words of fields that hold the kind of a whole record."""
_KINDS = {type(None): "null", bool: "boolean", str: "text", list: "array", dict: "object"}
_KINDS |= dict.fromkeys((int, float, Decimal), "number")
Feature = tuple[Path, str]


@dataclass(frozen=True, slots=True)
class Discriminator:
    """A header, or the path of a field, by whose value records are split.

    `counts` are the records by value, the most frequent first, of values that are frequent enough for outputs.
    """

    header: str
    path: Path
    counts: Mapping[str, int]

    @property
    def names_kinds(self) -> bool:
        """Returns whether the name is that of a record's kind; `payment_type` is not."""
        if self.header:
            return not _KIND_WORDS.isdisjoint(list_words(self.header))
        return _KIND_WORDS.issuperset(list_words(self.path[-1]))

    def get_value(self, record: SampledRecord) -> str | None:
        return record.headers.get(self.header) if self.header else _spell(get_value(record.value, self.path))


def find_discriminator(records: Sequence[SampledRecord], envelope: Envelope) -> Discriminator | None:
    """The best one; None if no value tells shapes apart."""
    present = [r for r in records if r.value != "tombstone"]
    names, matrix = _list_features(present, envelope)
    total = _measure_bits(matrix, [np.ones(len(present), bool)]) if names else 0.0
    scores = list[tuple[float, Discriminator]]()
    for candidate in _list_candidates(present, envelope) if total else ():
        values = np.array([candidate.get_value(r) for r in present], object)
        groups = [values == value for value in candidate.counts]
        rest = ~np.any(groups, axis=0)
        bits = _measure_bits(matrix, [*groups, rest] if rest.any() else groups)
        regular = [{f for f, share in zip(names, matrix[g].mean(axis=0), strict=True) if share >= 0.5} for g in groups]
        if bits <= (1 - _EXPLAINED) * total and any(
            _differ(a, b, candidate, envelope) for a, b in combinations(regular, 2)
        ):
            scores.append((bits, candidate))
    shortest = min((bits for bits, _ in scores), default=0.0)
    tied = [candidate for bits, candidate in scores if bits <= shortest + _TIED * total]
    return min(tied, key=lambda c: (not c.names_kinds, not c.header, len(c.path), len(c.counts), c.path), default=None)


def _list_candidates(records: Sequence[SampledRecord], envelope: Envelope) -> Iterator[Discriminator]:
    """Headers and scalar fields of few values, which nearly all records have."""
    counts, dead = defaultdict[tuple[str, Path], Counter[str | None]](Counter), set[Path]()
    skipped = envelope.rows if envelope.database else ()
    for record in records:
        for name, text in record.headers.items():
            counts[name, ()][text] += 1
        for path, value in _walk(record.value):
            if path not in dead:
                values = counts["", path]
                values[_spell(value)] += 1
                if len(values) > _MOST_VALUES or any(path[: len(row)] == row for row in skipped):
                    dead.add(path)
    limit = max(LEAST_RECORDS, LEAST_SHARE * len(records))
    for (header, path), values in counts.items():
        frequent = {v: n for v, n in values.most_common() if v and n >= limit and _is_usable(v, 1000)}
        is_data = 2 * sum(map(is_data_text, frequent)) > len(frequent)
        is_spelled = all(_is_usable(name, 300) for name in path or (header,))
        is_usual = sum(frequent.values()) >= (1 - _MOST_REST) * len(records)
        if 1 < len(frequent) <= _MOST_OUTPUTS and path not in dead and is_usual and is_spelled and not is_data:
            yield Discriminator(header, path, frequent)


def _is_usable(text: str, length: int) -> bool:
    """Returns whether a feed file takes the text."""
    return 0 < len(text) <= length and text.isprintable() and "\ufffd" not in text


def _spell(value: Any) -> str | None:
    """The text by which a split compares the value; None for null and for values that are no kinds."""
    match value:
        case bool():
            return "true" if value else "false"
        case str() | int():
            return str(value)
    return None


def _walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The values of an object and of those in it, with their paths."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield (*path, name), inner
        if isinstance(inner, dict) and len(path) + 1 < _LEVELS:
            yield from _walk(inner, (*path, name))


def _list_features(records: Sequence[SampledRecord], envelope: Envelope) -> tuple[list[Feature], Array]:
    """Returns the features, and for each record a row of truth values, one for each feature."""
    kinds = [
        {path: _KINDS[type(v)] for path, v in _walk(row)} | {(): ""} if row is not None else dict[Path, str]()
        for row in (envelope.get_row(r.value) for r in records)
    ]
    counts = Counter((path, kind) for of in kinds for path, kind in of.items())
    limit = max(LEAST_RECORDS, LEAST_SHARE * len(records))
    variants = Counter(path for (path, kind), n in counts.items() if kind != "null" and n >= limit)
    features = Counter[Feature]()
    for (path, kind), n in counts.items():
        if variants[path] <= 1 or kind != "null":
            features[path, kind if variants[path] > 1 else ""] += n
    columns = {f: i for i, (f, n) in enumerate(features.most_common(_MOST_FEATURES)) if n >= limit}
    matrix = np.zeros((len(records), len(columns)), bool)
    for row, of in enumerate(kinds):
        chosen = (columns.get((path, kind if variants[path] > 1 else "")) for path, kind in of.items())
        matrix[row, [i for i in chosen if i is not None]] = True
    return list(columns), matrix


def _measure_bits(matrix: Array, groups: Sequence[Array]) -> float:
    """The description length of the features if each group of records has frequencies of its own."""
    bits = 0.0
    for group in groups:
        records = int(group.sum())
        p = matrix[group].mean(axis=0)
        p = p[(p > 0) & (p < 1)]
        bits -= records * float((p * np.log2(p) + (1 - p) * np.log2(1 - p)).sum())
        bits += 0.5 * log2(records) * matrix.shape[1]
    return bits


def _differ(a: set[Feature], b: set[Feature], by: Discriminator, envelope: Envelope) -> bool:
    """Returns whether two shapes, by the features of most of their records, are of different kinds.

    Their rows are, or an object in both that the discriminator is not a part of, if its name tells kinds.
    """
    is_kind, either = by.names_kinds or bool(by.header), a | b
    if ((), "") not in a & b:
        return True
    for holder in {path[:-1] for path, _ in either if path}:
        own = {f for f in either if f[0] and f[0][:-1] == holder}
        common = len(own & a & b)
        if common > (_ALIKE_KINDS if is_kind else _ALIKE) * len(own):
            continue
        at = (*envelope.at, *holder)
        in_both = any(path == holder for path, _ in a) and any(path == holder for path, _ in b)
        part = len(own) - common >= _PART * len(either)
        if not holder or (is_kind and in_both and part and by.path[: len(at)] != at):
            return True
    return False
