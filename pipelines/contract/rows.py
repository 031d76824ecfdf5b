"""Row expectations over columns: which rows break which, whole columns at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sluice.pipelines.compiled import Array
from sluice.pipelines.contract.suite import Contract
from sluice.pipelines.values import Tally


@dataclass(frozen=True, slots=True)
class Broken:
    """Rows that break a critical expectation, in order, each with the place in the contract of the first such."""

    rows: Array
    expectations: Array


@dataclass(frozen=True, slots=True)
class Held:
    """What rows said to the contract."""

    broken: Broken
    tallies: tuple[Tally, ...]


class RowChecks:
    """The row expectations of a contract, ready for batch after batch of landed rows."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract

    def hold(self, rows: pa.RecordBatch) -> Held:
        """Hold landed rows against the contract. Tombstones are none of its business."""
        none = np.empty(0, np.int32)
        tallies: Sequence[Tally] = ()
        return Held(Broken(none, none), tuple(tallies))

    def said(self, broken: Broken) -> list[pa.Array]:
        """Of each broken row what `REFUSED` has beside the record: stage, reason, expectation, field, detail, byte."""
        raise NotImplementedError
