"""Decides whether a batch as a whole meets its contract. Uses proven receipts, before anything is published.

A batch that fails a critical expectation stays staged and planned, and no offset moves. The next run takes it over.
Under the same contract it reads nothing from Kafka again and decides anew; under another contract it reads again.
"""

from __future__ import annotations

from collections.abc import Sequence

from sluice.pipelines.contract.catalogue import text
from sluice.pipelines.contract.results import ExpectationOutcome, Result, contract_results
from sluice.pipelines.errors import Breach, ContractBroken
from sluice.pipelines.ledger import Batch, Ledger
from sluice.pipelines.model.receipts import Receipt
from sluice.pipelines.ports import Lake
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.util.units import many
from sluice.pipelines.validation.volume import earlier_rows
from sluice.pipelines.validation.whole import hold_whole

_SAID = 20


def check_contract(
    shape: Shape, ledger: Ledger, batch: Batch, receipts: Sequence[Receipt], lake: Lake, failed: int = 0
) -> tuple[Result, ...]:
    """The results of the expectations about whole batches, for the batch's proven receipts.

    `failed` is the number of slices without a receipt. Raises ContractBroken when a critical expectation fails, unless
    it judges each row by itself.
    """
    if shape.contract is None or not receipts:
        return ()
    earlier = earlier_rows(ledger.read(), batch.request, batch.id)
    results = hold_whole(shape, receipts, lake, earlier)
    broken = [o for o in contract_results(shape.contract, receipts, results) if o.refuses]
    if not broken:
        return results
    lines = [_line(o) for o in broken[:_SAID]]
    lines += [f"… and {len(broken) - _SAID} more"] if len(broken) > _SAID else []
    lines += [f"{many(failed, 'slice')} of it failed, and what they hold is not counted"] if failed else []
    raise ContractBroken(
        f"batch {batch.id} is not what the contract expects; nothing of it is published:\n    " + "\n    ".join(lines),
        remedy="look at its rows with `sluice peek TOPIC:PARTITION:OFFSET`; mend "
        f"feeds/{ledger.feed}.contract.json, or what produces the records, and run again: what was read is kept as "
        "long as the contract is the same",
        breaches=[_breach(o) for o in broken],
    )


def _breach(o: ExpectationOutcome) -> Breach:
    return Breach("contract", _line(o), o.expectation.type, o.unexpected, o.checked, o.first)


def _line(o: ExpectationOutcome) -> str:
    details = [f"observed {o.observed}"] if o.observed else []
    if o.unexpected:
        details += [f"{o.unexpected:,} of {o.checked:,} rows are not so ({o.share:.2%})"]
        details += [f"the first at {', '.join(o.first)}"] if o.first else []
    return f"{text(o.expectation)}: {', '.join(details) or 'it is not so'}"
