"""The ledger: an append-only, numbered log of JSON entries in the lake, and its fold (docs/design/ledger.md).

It is the only truth about what a feed planned, landed, lost and committed; every other room asks it. It knows the lake
by its port and nothing of Kafka. Open `entries` first, which says what can be written; then `fold`, which says what the
entries mean together; then `log`, which gives an entry its number. `marks` and `tip` notice that entries are gone,
`checkpoint`, `pins`, `batches` and `superseded` keep reading fast.
"""

from sluice.pipelines.ledger.batches import Batch, BatchStatus
from sluice.pipelines.ledger.entries import Entry
from sluice.pipelines.ledger.fold import State
from sluice.pipelines.ledger.log import Appended, Ledger

__all__ = ["Appended", "Batch", "BatchStatus", "Entry", "Ledger", "State"]
