"""Adds up how records differ from the schema, over an offset range and over a batch, and applies the policy that
refuses it.

Guarantee: counts are exact. At most `MOST_FIELDS` fields of a kind have a name; further ones are counted together under
`OTHERS`, so that no topic makes receipts large. Names are printable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sluice.pipelines.errors import Breach, SchemaDrifted
from sluice.pipelines.model.receipts import Drift, DriftKind, PartKind, Receipt
from sluice.pipelines.util.units import many

if TYPE_CHECKING:
    from sluice.pipelines.feed.sections import Policies

MOST_FIELDS = 64
OTHERS = "…"
"""The name of all further fields together."""
_SAID = 10


class Drifts:
    """Adds up the drift of one offset range, by kind and field."""

    def __init__(self) -> None:
        self._found: dict[tuple[DriftKind, str], Drift] = {}
        self._typed = 0

    def add(self, drifts: Iterable[Drift], typed: int) -> None:
        """Add what some records showed. `typed` is how many of them had a value that fits the schema."""
        self._typed += typed
        for drift in drifts:
            key = self._place(drift)
            renamed = Drift(drift.kind, key[1], drift.records, drift.first, drift.type)
            self._found[key] = self._found[key] + renamed if key in self._found else renamed

    def _place(self, drift: Drift) -> tuple[DriftKind, str]:
        key = (drift.kind, drift.field)
        if key in self._found or sum(kind is drift.kind for kind, _ in self._found) < MOST_FIELDS:
            return key
        return (drift.kind, OTHERS)

    @property
    def all(self) -> tuple[Drift, ...]:
        """All drift, sorted by kind and field. A field is missing if no record that fits has it."""
        drifts = (d for _, d in sorted(self._found.items()))
        return tuple(d for d in drifts if d.kind is not DriftKind.MISSING or d.records == self._typed)


def sum_drift(receipts: Sequence[Receipt]) -> tuple[Drift, ...]:
    """The drift of several offset ranges together, sorted by kind and field.

    A field is missing if it is missing in every range that landed rows, of a split feed in the field's output.
    `first` is the smallest of the offsets of all partitions.
    """
    drifts: dict[tuple[DriftKind, str], Drift] = {}
    ranges: dict[tuple[DriftKind, str], int] = {}
    for drift in (d for r in receipts for d in r.drift):
        key = (drift.kind, drift.field)
        drifts[key] = drifts[key] + drift if key in drifts else drift
        ranges[key] = ranges.get(key, 0) + 1
    landing = Counter({"": sum(r.counts.landed > 0 for r in receipts)})
    landing.update(o for r in receipts for o in {p.output for p in r.of(PartKind.LANDED)} if o)
    outputs = {k: output if (output := k[1].partition("/")[0]) in landing else "" for k in drifts}
    retained = (k for k in sorted(drifts) if k[0] is not DriftKind.MISSING or ranges[k] == landing[outputs[k]])
    return tuple(drifts[k] for k in retained)


def check_drift(receipts: Sequence[Receipt], policies: Policies) -> None:
    """Raises SchemaDrifted if records differ from the schema and `on_drift` is `fail`."""
    from sluice.pipelines.feed.sections import OnDrift  # imported late: a module that only reports drift loads no feed

    if policies.on_drift is not OnDrift.FAIL:
        return
    drifts = [d for d in sum_drift(receipts) if d.kind is not DriftKind.MISSING]
    if not drifts:
        return
    lines = "".join(f"\n    {describe_drift(d)}, the first at {_find_first(d, receipts)}" for d in drifts[:_SAID])
    more = f"\n    and {len(drifts) - _SAID} more" if len(drifts) > _SAID else ""
    raise SchemaDrifted(
        f"records differ from the schema, and the feed has `on_drift: fail`; nothing is published:{lines}{more}",
        remedy="name these fields in the feed's schema, or take them in with `policies.on_drift: extra` or `evolve`, "
        "and run again: records already read are reused unless the schema changes",
        breaches=[Breach("schema", describe_drift(d), "", d.records, 0, (_find_first(d, receipts),)) for d in drifts],
    )


_WORDS = {
    DriftKind.NEW: "is not in the schema",
    DriftKind.MISSING: "is in no record",
    DriftKind.WIDENED: "does not fit its type",
    DriftKind.WRONG: "is of another type",
    DriftKind.OUT_OF_RANGE: "is out of range",
    DriftKind.INEXACT: "has more digits than its type holds",
    DriftKind.MALFORMED: "is not written as its type has it",
    DriftKind.UNLISTED: "is none of the enum's values",
    DriftKind.UNROUTED: "leads to no output",
}


def describe_drift(drift: Drift) -> str:
    """Returns one line: the field, a type that would fit, how it differs, and in how many records."""
    name = "further fields" if drift.field == OTHERS else drift.field.removeprefix("/")
    type_text = f" ({drift.type})" if drift.type else ""
    return f"{name}{type_text} {_WORDS[drift.kind]}, {many(drift.records, 'record')}"


def _find_first(drift: Drift, receipts: Sequence[Receipt]) -> str:
    """The place of the first such record, in the order of the receipts."""
    at = ((r.offset_range.tp, d) for r in receipts for d in r.drift if (d.kind, d.field) == (drift.kind, drift.field))
    tp, offset = next(at)
    return f"{tp}:{offset.first}"
