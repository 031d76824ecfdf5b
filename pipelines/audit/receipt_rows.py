"""Receipts as rows of numbers: the sums of an audit, and its proofs of each receipt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sluice.pipelines.model.kafka import Key
from sluice.pipelines.model.ranges import Range
from sluice.pipelines.model.receipts import Counts, Receipt

COUNTS = tuple(Counts.__dataclass_fields__)
PROOFS = ("looked", "hashed", "compared")
"""Times (seconds since the epoch, or NEVER) at which the receipt and its files were checked, their bytes hashed, and
their records compared with Kafka."""
COLUMNS = ("number", "key", "start", "end", *COUNTS, "relanded", "mended", "rows", "bytes", "parts", *PROOFS)
SUMMED = (*COUNTS, "relanded", "mended", "bytes")
"""Columns that are summed for each partition."""
NEVER = -1
_AT = {name: i for i, name in enumerate(COLUMNS)}


class Row(NamedTuple):
    """A receipt of the publish entry `number`: its slice and the number of landed records."""

    number: int
    key: Key
    range: Range
    landed: int


class Rows:
    """An immutable table of receipts. `keys` are sorted; the column `key` holds indexes into them. `tags` identify the
    receipts' parts in sequence. `table` is stored by column, because few columns of many rows are read at a time."""

    __slots__ = ("keys", "table", "tags")

    def __init__(self, keys: Sequence[Key], table: Any, tags: Any) -> None:
        self.keys, self.table, self.tags = tuple(keys), np.asfortranarray(table), tags

    @classmethod
    def of(cls, receipts: Sequence[tuple[int, Receipt]], tag: Callable[[str], int], proofs: Sequence[int]) -> Rows:
        """Build rows from receipts, each with its entry number. `tag` maps a part's path to its tag."""
        keys = sorted({r.slice.key for _, r in receipts})
        indexes = {key: i for i, key in enumerate(keys)}
        table = np.array([_row(n, indexes[r.slice.key], r, proofs) for n, r in receipts], np.int64)
        tags = np.array([tag(p.path) for _, r in receipts for p in r.parts], np.uint64)
        return cls(keys, table.reshape(-1, len(COLUMNS)), tags)

    def __len__(self) -> int:
        return len(self.table)

    def column(self, name: str) -> Any:
        return self.table[:, _AT[name]]

    @property
    def owners(self) -> Any:
        """The row of each tag."""
        return np.repeat(np.arange(len(self)), self.column("parts"))

    def where(self, mask: Any) -> Rows:
        """Returns the rows that the mask selects."""
        return Rows(self.keys, self.table.T[:, mask].T, self.tags[mask[self.owners]])

    def plus(self, other: Rows) -> Rows:
        keys = sorted({*self.keys, *other.keys})
        tables = [r._with_keys(keys) for r in (self, other)]
        return Rows(keys, np.concatenate([t.T for t in tables], axis=1).T, np.concatenate([self.tags, other.tags]))

    def _with_keys(self, keys: Sequence[Key]) -> Any:
        indexes = {key: i for i, key in enumerate(keys)}
        table, at = self.table.copy("K"), np.array([indexes[k] for k in self.keys] or [0], np.int64)
        table[:, _AT["key"]] = at[table[:, _AT["key"]]]
        return table

    def in_order(self) -> Rows:
        """Returns the rows sorted by partition and offset, which compresses best."""
        order = np.lexsort((self.column("number"), self.column("start"), self.column("key")))
        begins = np.cumsum(self.column("parts")) - self.column("parts")
        parts = self.column("parts")[order]
        positions = np.repeat(begins[order] - (np.cumsum(parts) - parts), parts) + np.arange(len(self.tags))
        return Rows(self.keys, self.table.T[:, order].T, self.tags[positions])

    def named(self) -> list[Row]:
        columns = (self.column(n).tolist() for n in ("number", "key", "start", "end", "landed"))
        return [Row(n, self.keys[k], Range(a, b), landed) for n, k, a, b, landed in zip(*columns, strict=True)]

    def marked(self, proof: str, rows: Iterable[Row], at: int) -> Rows:
        """Returns a copy in which `rows` have the proof at time `at`."""
        marked = set(rows)
        near = self._of({r.number for r in marked})
        mine = [r in marked for r in self.where(near).named()]
        table = self.table.copy("K")
        table[np.flatnonzero(near)[np.array(mine, bool)], _AT[proof]] = at
        return Rows(self.keys, table, self.tags)

    def _of(self, numbers: set[int]) -> Any:
        """Returns a mask of the rows of these entries."""
        return np.isin(self.column("number"), np.array(sorted(numbers), np.int64))

    def also(self, before: Rows, at: int) -> Rows:
        """Returns a copy with earlier proofs of unchanged rows that were checked again at `at`."""
        anew = self.column("looked") == at
        old = before.where(before._of(set(self.column("number")[anew].tolist())))
        by_part = dict(zip(old._whole(), old._proofs(), strict=True))
        table, positions = self.table.copy("K"), [_AT[p] for p in PROOFS]
        for i, what in zip(np.flatnonzero(anew).tolist(), self.where(anew)._whole(), strict=True):
            if (proofs := by_part.get(what)) is not None:
                table[i, positions] = np.maximum(table[i, positions], proofs)
        return Rows(self.keys, table, self.tags)

    def _whole(self) -> list[tuple[Row, bytes]]:
        ends = np.cumsum(self.column("parts")).tolist()
        tags = (self.tags[a:b].tobytes() for a, b in zip([0, *ends], ends, strict=False))
        return list(zip(self.named(), tags, strict=True))

    def _proofs(self) -> Any:
        return self.table[:, [_AT[p] for p in PROOFS]]

    # -- added up

    def totals(self, *names: str) -> dict[Key, dict[str, int]]:
        """Returns the sums of the columns by partition; `files` counts files."""
        sums = {n: np.zeros(len(self.keys), np.int64) for n in (*names, "files")}
        for n in names:
            np.add.at(sums[n], self.column("key"), self.column(n))
        of = self.column("key")[self.owners]
        order = np.lexsort((self.tags, of))
        first = np.ones(len(order), bool)
        of, tags = of[order], self.tags[order]
        first[1:] = (of[1:] != of[:-1]) | (tags[1:] != tags[:-1])
        np.add.at(sums["files"], of[first], 1)
        return {k: {n: int(column[i]) for n, column in sums.items()} for i, k in enumerate(self.keys)}

    def spans(self) -> dict[Key, int]:
        """Returns the number of offsets in the receipts' slices by partition."""
        sums = np.zeros(len(self.keys), np.int64)
        np.add.at(sums, self.column("key"), self.column("end") - self.column("start"))
        return dict(zip(self.keys, sums.tolist(), strict=True))


def _row(number: int, key: int, r: Receipt, proofs: Sequence[int]) -> tuple[int, ...]:
    counts = (getattr(r.counts, name) for name in COUNTS)
    again = sum(x.span for x in r.relanded), sum(x.span for x in r.mended)
    sizes = sum(p.rows for p in r.parts), sum(p.bytes for p in r.parts), len(r.parts)
    return number, key, r.slice.start, r.slice.end, *counts, *again, *sizes, *proofs
