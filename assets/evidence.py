"""Dagster's event log as evidence: what may be committed has a stored materialization of `<feed>/landed`.

A batch's materialization carries the data version `<ledger>/<batch>/<plan hash>`, by which the event log finds it.
A run that ended between the publish entry and its materialization leaves a gap; `roll_forward` fills it from the
ledger, with the same metadata, and `demand` refuses to go on while there is one.
"""

from __future__ import annotations

from collections.abc import Iterable

import dagster as dg

from sluice.assets import metadata
from sluice.pipelines.errors import Failed
from sluice.pipelines.ledger import Batch, BatchStatus, Ledger, State
from sluice.pipelines.ports import Lake

_VERSION = "dagster/data_version"


def landed_key(feed: str) -> dg.AssetKey:
    return dg.AssetKey([feed, "landed"])


def committed_key(feed: str) -> dg.AssetKey:
    return dg.AssetKey([feed, "committed"])


def batch_version(state: State, batch: Batch) -> str:
    """The data version of a batch's materialization."""
    return f"{state.ledger_id}/{batch.id}/{batch.hash}"


def reconciled_version(state: State) -> str:
    """The data version of `<feed>/committed`: up to which ledger number the event log is known to be whole."""
    return f"{state.ledger_id}/{state.number - 1}"


def materialization(
    feed: str, ledger: Ledger, state: State, batch: Batch, lake: Lake, why: str = ""
) -> dg.AssetMaterialization:
    """The event that says what the batch landed."""
    return dg.AssetMaterialization(
        landed_key(feed),
        description=why or None,
        metadata=metadata.of_batch(feed, ledger, state, batch, lake),
        tags={_VERSION: batch_version(state, batch)},
    )


def missing(instance: dg.DagsterInstance, feed: str, state: State) -> list[Batch]:
    """Published batches that the event log does not know, of those published since `<feed>/committed` last stood."""
    return [b for b in _since(state, _reconciled(instance, feed, state)) if not _known(instance, feed, state, b)]


def roll_forward(instance: dg.DagsterInstance, feed: str, ledger: Ledger, state: State, lake: Lake) -> list[int]:
    """Store the materializations that earlier runs left out; the batches' ids. Idempotent."""
    left_out = missing(instance, feed, state)
    for batch in left_out:
        why = (
            f"rolled forward: {batch.owner.describe()} published batch {batch.id} and ended before it was recorded here"
        )
        instance.report_runless_asset_event(materialization(feed, ledger, state, batch, lake, why))
    return [b.id for b in left_out]


def demand(instance: dg.DagsterInstance, feed: str, state: State) -> None:
    """Raises Failed while any batch that a commit would cover has no stored materialization."""
    if left_out := missing(instance, feed, state):
        raise Failed(
            f"Dagster's event log holds no materialization of {feed}/landed for batch "
            + ", ".join(str(b.id) for b in left_out[:10]),
            remedy="see that Dagster's storage takes events, then run again: nothing was committed",
        )


def _since(state: State, reconciled: int | None) -> Iterable[Batch]:
    for batch in state.batches.values():
        if batch.status is not BatchStatus.PUBLISHED or batch.published is None:
            continue
        if batch.published > (state.last_mark if reconciled is None else reconciled):
            yield batch


def _reconciled(instance: dg.DagsterInstance, feed: str, state: State) -> int | None:
    """The ledger number in the last `<feed>/committed`; None when there is none of this ledger."""
    event = instance.get_latest_materialization_event(committed_key(feed))
    said = event.asset_materialization if event else None
    ledger, _, number = ((said.tags or {}).get(_VERSION, "") if said else "").partition("/")
    return int(number) if ledger == state.ledger_id and number.isdigit() else None


def _known(instance: dg.DagsterInstance, feed: str, state: State, batch: Batch) -> bool:
    return bool(instance.get_event_tags_for_asset(landed_key(feed), {_VERSION: batch_version(state, batch)}))
