"""The files of receipts in staging, and files whose folder got a level by time in a newer Sluice.

A receipt has a file of its own. Receipts of offset ranges that share files are in one file, because they count together
or not at all: readers get all of them or none. A task of many ranges writes all receipts of a second into one file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress

from pydantic import TypeAdapter, ValidationError

from sluice.pipelines.lake import paths
from sluice.pipelines.model.plans import to_json
from sluice.pipelines.model.receipts import Receipt
from sluice.pipelines.ports import Lake

_ONE_OR_MANY: TypeAdapter[Receipt | tuple[Receipt, ...]] = TypeAdapter(Receipt | tuple[Receipt, ...])


def build_path(feed: str, batch: int, receipts: Sequence[Receipt]) -> str:
    """Returns the path of a file of these receipts of one attempt. Offset ranges that share files must all be given."""
    first = min(receipts, key=lambda r: (r.offset_range.topic, r.offset_range.partition, r.offset_range.start))
    alone = len(receipts) == 1 and not any(p.shared for p in first.parts)
    return (paths.receipt_path if alone else paths.receipts_path)(feed, batch, first.attempt, first.offset_range)


def put(feed: str, batch: int, receipts: Sequence[Receipt], lake: Lake) -> None:
    """Write receipts of one attempt into a file in staging. Raises LakeUnavailable, LakeFull."""
    path = build_path(feed, batch, receipts)
    lake.put(path, to_json(receipts if paths.holds_several(path) else receipts[0]).encode())


def read(path: str, lake: Lake) -> tuple[Receipt, ...]:
    """Returns the unchecked receipts in the file at `path`; none if it has other content."""
    try:
        receipts = _ONE_OR_MANY.validate_json(lake.get(path) or b"")
    except ValidationError:
        return ()
    return (receipts,) if isinstance(receipts, Receipt) else receipts


def read_finished(lake: Lake, feed: str, batch: int, read_receipts: dict[str, frozenset[str]]) -> frozenset[str]:
    """The names of the ranges that have a receipt in the batch's staging. `read_receipts`: the names read by earlier
    calls, by path."""
    receipt_paths = [path for path in lake.list(paths.staging_folder(feed, batch)) if paths.parse_receipt_path(path)]
    for path in receipt_paths:
        if path not in read_receipts:
            read_receipts[path] = frozenset(_read_names(path, lake))
    return frozenset().union(*(read_receipts[path] for path in receipt_paths))


def read_partial(lake: Lake, feed: str, batch: int, token: str) -> dict[str, int]:
    """Returns the done offsets of unfinished ranges, by name, as tasks of the owner with this `token` have noted."""
    prefix, done = paths.attempt_folder(feed, batch, token), dict[str, int]()
    for path in lake.list(paths.staging_folder(feed, batch)):
        if path.startswith(prefix) and path.endswith(f"/{paths.PROGRESS}"):
            with suppress(ValueError, TypeError, AttributeError):
                done |= json.loads(lake.get(path) or b"{}")
    return done


def _read_names(path: str, lake: Lake) -> Iterable[str]:
    if paths.holds_several(path):
        return (paths.name_range(r.offset_range) for r in read(path, lake))
    return filter(None, (paths.parse_receipt_path(path),))


def find_manifest(lake: Lake, feed: str, window: int, length: int) -> str | None:
    """Where the manifest of the window stands; None where there is none."""
    return _find_first(
        lake, (path_of(feed, window, length) for path_of in (paths.window_path, paths.former_window_path))
    )


def find_batch_page(lake: Lake, feed: str, batch: int, attempt: str = "") -> str | None:
    """Where the report of a batch, or of an attempt that was not published, stands; None where there is none."""
    path_functions = (paths.batch_page_path, paths.former_batch_page_path)
    return _find_first(lake, (path_of(feed, batch, attempt) for path_of in path_functions))


def _find_first(lake: Lake, candidates: Iterable[str]) -> str | None:
    return next((path for path in candidates if lake.size(path) is not None), None)
