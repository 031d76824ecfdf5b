"""Makes tables forget files that a sync took out: the snapshots that name them, and the bounds of their values.

An entry of a file that was taken out stays in the newest snapshot, with the file's bounds, until the next one. So an
empty snapshot comes first. Files of metadata that no snapshot names any longer are removed. Before that, a note has
their addresses, from which the next call continues after a crash.
"""

from __future__ import annotations

import json

from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.receipts import Reporter
from sluice.pipelines.model.tables import TableChange, TableOperation
from sluice.pipelines.ports import Lake
from sluice.pipelines.tables.sync import Synced, sync
from sluice.pipelines.tables.table_windows import FeedTables
from sluice.pipelines.util.units import DAY


def drop_history(
    ledger: Ledger, lake: Lake, tables: FeedTables, now: int, report: Reporter = lambda progress: None
) -> Synced:
    """Bring the tables up to the ledger, and let all snapshots but the newest expire, with their files.

    Raises as `sync`, and TableMoved when another publisher commits at the same time. Idempotent.
    """
    sync(ledger, lake, tables, report)
    note = paths.get_forgetting_path(ledger.feed, tables.rows.output)
    pending = {*json.loads(lake.get(note) or b"[]")}
    for table in tables.all:
        head = table.look()
        if head is not None and head.snapshot is not None and (metadata := table.list_metadata()):
            pending |= metadata
            lake.put(note, json.dumps(sorted(pending)).encode())
            table.commit(TableChange(TableOperation.APPEND, head.mark, (), (), {}, {}))
    done = sync(ledger, lake, tables, report, expire_before=now + DAY)
    if pending:
        existing = [table for table in tables.all if table.look() is not None]
        retained = {address for table in existing for address in table.list_metadata()}
        existing[0].remove_metadata(pending - retained)
        lake.remove(note)
    return done
