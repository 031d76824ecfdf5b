"""The ledger: an append-only numbered log of JSON entries in the lake, and the state that it folds to (DESIGN §4).

`entries` says what can be written, `fold` what it all means, `log` how an entry gets its number.
"""

from sluice.pipelines.ledger.entries import Entry
from sluice.pipelines.ledger.fold import Batch, BatchStatus, State
from sluice.pipelines.ledger.log import Appended, Ledger

__all__ = ["Appended", "Batch", "BatchStatus", "Entry", "Ledger", "State"]
