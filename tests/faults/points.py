"""The points at which a run can be killed or stopped: before and after each of its effects, such as "before publish".

A number chooses the occurrence: "after show 2" leaves half of the parts visible. The default is the first.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sluice.pipelines.lake import paths
from sluice.resources.kafka.connection.connections import Wire
from sluice.resources.lake import local_lake
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.zookeeper.tree import Tree

_ENTRIES = {"own": "take over", "commit": "record"}
_REQUESTS = {
    "JoinGroupRequest": "join",
    "InitProducerIdRequest": "init",
    "AddPartitionsToTxnRequest": "post",
    "ProduceRequest": "letters",
    "AddOffsetsToTxnRequest": "begin",
    "TxnOffsetCommitRequest": "offsets",
    "EndTxnRequest": "end",
    "OffsetCommitRequest": "plain",
    "LeaveGroupRequest": "leave",
}

LANDING = (
    "schema",  # effects are ledger entries unless a comment says otherwise
    "origin",
    "boundary",
    "plan",
    "take over",
    "stage",  # a part appears in staging; before that it has a temporary name
    "receipt",
    "publish",
    "show",  # a part becomes visible to readers
    "clean",  # a staged file is removed
    "manifest",
    "declare",  # the list of windows that have a manifest
    "checkpoint",
    "farewell",  # the run's heartbeat is removed
)
PACKING = ("pack",)
"""A segment of old entries appears. The runner packs only for a point of packing."""
COMMITTING = ("join", "intent", "record", "leave")
TRANSACTIONAL = ("init", "begin", "offsets", "end")
LETTERS = ("post", "letters")
PLAIN = ("plain",)
TABLES = ("table",)
"""A commit to a table: that of rows, or of complete windows."""
ZOOKEEPER = ("register", "nodes")
"""ZooKeeper transactions: a run registers as owner of its partitions; offsets and marks are written."""
_TRANSACTIONS = {"registering": "register", "committing": "nodes"}


def list_points(*effects: str) -> tuple[str, ...]:
    """Returns the points around each effect, in order."""
    return tuple(f"{when} {effect}" for effect in effects for when in ("before", "after"))


NAMES = list_points(*LANDING, *PACKING, *COMMITTING, *TRANSACTIONAL, *LETTERS, *PLAIN, *TABLES)
"""The points of any feed. A feed with offsets in ZooKeeper has additional ones."""


@contextmanager
def interrupt_at(point: str, signum: signal.Signals = signal.SIGKILL, lake: type = LocalLake) -> Iterator[None]:
    """Send this process the signal at the point. `lake` is the class of the feed's lake."""
    trap = _Trap(point, signum)
    with ExitStack() as stack:
        for name in ("put_if_absent", "put", "show", "remove"):
            stack.enter_context(patch.object(lake, name, trap.wrap_call(name, getattr(lake, name))))
        stack.enter_context(patch.object(lake, "create", trap.wrap_create(lake.create)))  # type: ignore[attr-defined]
        stack.enter_context(patch.object(local_lake, "_link", trap.wrap_link(local_lake._link)))
        stack.enter_context(patch.object(Wire, "send", trap.wrap_send(Wire.send)))
        stack.enter_context(patch.object(Tree, "transact", trap.wrap_transact(Tree.transact)))
        if point.split()[1] in TABLES:
            from deltalake import DeltaTable
            from pyiceberg.catalog.sql import SqlCatalog

            for library, commit in ((DeltaTable, "create_write_transaction"), (SqlCatalog, "commit_table")):
                stack.enter_context(patch.object(library, commit, trap.wrap_commit(getattr(library, commit))))
        yield


class _Trap:
    def __init__(self, point: str, signum: signal.Signals) -> None:
        name, _, number = point.rpartition(" ") if point[-1].isdigit() else (point, "", "1")
        self._when, _, self._effect = name.partition(" ")
        if name not in {*NAMES, *list_points(*ZOOKEEPER)}:
            raise ValueError(f"unknown point: {point}")
        self._signum, self._nth, self._count = signum, int(number), itertools.count(1)

    def trigger(self, when: str, effect: str | None) -> None:
        if (when, effect) == (self._when, self._effect) and next(self._count) == self._nth:
            os.kill(os.getpid(), self._signum)

    def wrap_call(self, method: str, call: Any) -> Any:
        def wrapper(lake: object, path: str, *args: Any) -> Any:
            effect = _find_effect(method, path, *args)
            self.trigger("before", effect)
            answer = call(lake, path, *args)
            self.trigger("after", effect)
            return answer

        return wrapper

    def wrap_link(self, call: Any) -> Any:
        """Wrap the link of each file: a local lake makes several durable together."""

        def wrapper(temporary: Path, target: Path) -> bool:
            path = str(target)
            effect = "manifest" if paths.manifest_window(path[path.rfind("_sluice/") :]) else None
            self.trigger("before", effect)
            won: bool = call(temporary, target)
            self.trigger("after", effect)
            return won

        return wrapper

    def wrap_create(self, call: Any) -> Any:
        @contextmanager
        def wrapper(lake: object, path: str) -> Iterator[Any]:
            effect = "stage" if paths.staged_batch(path) is not None else None
            with call(lake, path) as file:
                yield file
                self.trigger("before", effect)
            self.trigger("after", effect)

        return wrapper

    def wrap_commit(self, call: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.trigger("before", "table")
            answer = call(*args, **kwargs)
            self.trigger("after", "table")
            return answer

        return wrapper

    def wrap_transact(self, call: Any) -> Any:
        def wrapper(tree: Tree, operations: Any, doing: str) -> None:
            effect = _TRANSACTIONS.get(doing.partition(" ")[0])
            self.trigger("before", effect)
            call(tree, operations, doing)
            self.trigger("after", effect)

        return wrapper

    def wrap_send(self, call: Any) -> Any:
        async def wrapper(wire: Wire, node: Any, request: Any, seconds: float | None = None) -> Any:
            effect = _REQUESTS.get(type(request).name)
            if effect == "end" and not request.committed:
                effect = None  # it aborts a transaction
            self.trigger("before", effect)
            answer = await call(wire, node, request, seconds)
            self.trigger("after", effect)
            return answer

        return wrapper


def _find_effect(method: str, path: str, *args: Any) -> str | None:
    """Returns the effect of a call to the lake, None where no point is."""
    if method == "show":
        return method
    if method == "put":
        if path.endswith("/declared.json"):
            return "declare"
        if paths.segment_numbers(path):
            return "pack"
        return "receipt" if paths.parse_receipt_path(path) else "checkpoint" if paths.checkpoint_number(path) else None
    if method == "remove":
        return "clean" if paths.staged_batch(path) is not None else "farewell" if paths.owner_token(path) else None
    if paths.manifest_window(path):
        return "manifest"
    kind = json.loads(args[0]).get("kind")  # a table's note has none
    return kind and str(_ENTRIES.get(kind, kind))
