"""The ledger: an append-only, numbered log of JSON entries in the lake, and its fold.

Design: docs/developers/design/ledger.md

It is the only source of truth for planned, landed, lost and committed offsets. It uses the lake through its port and
does not know Kafka. Read `entries` (the kinds of entry) first, then `fold` (their combined meaning), then `log` (the
numbering of entries). `account` counts offsets by class. `marks` and `tip` detect lost entries; `checkpoint`,
`columns`, `batches` and `segments` keep reading fast.
"""

from sluice.pipelines.ledger.batches import Batch, BatchStatus
from sluice.pipelines.ledger.entries import Entry
from sluice.pipelines.ledger.fold import State
from sluice.pipelines.ledger.log import Appended, Ledger

__all__ = ["Appended", "Batch", "BatchStatus", "Entry", "Ledger", "State"]
