"""Where a run can be killed or stopped, by name: before and after each of its effects, as "before publish".

The first time it gets there, or as often as a number says: "after show 2", with half of the parts visible.
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
    "schema",  # entries, but for those said otherwise
    "origin",
    "boundary",
    "plan",
    "take over",
    "stage",  # a part appears in staging; before that it stands there under a temporary name
    "receipt",
    "publish",
    "show",  # a part appears where readers look
    "clean",  # a staged file goes
    "manifest",
    "declare",  # the note of which windows have theirs
    "checkpoint",
    "farewell",  # the run's heartbeat goes
)
PACKING = ("pack",)
"""A segment of old entries appears. A run of the runner packs only when it is to be killed there."""
COMMITTING = ("join", "intent", "record", "leave")
TRANSACTIONAL = ("init", "begin", "offsets", "end")
LETTERS = ("post", "letters")
PLAIN = ("plain",)
ZOOKEEPER = ("register", "nodes")
"""Transactions of ZooKeeper: a run comes to own its partitions; offsets and marks are written."""
_TRANSACTIONS = {"registering": "register", "committing": "nodes"}


def both(*effects: str) -> tuple[str, ...]:
    """The points around each effect, in order."""
    return tuple(f"{when} {effect}" for effect in effects for when in ("before", "after"))


NAMES = both(*LANDING, *PACKING, *COMMITTING, *TRANSACTIONAL, *LETTERS, *PLAIN)
"""Those of any feed; a feed with offsets in ZooKeeper has its own besides."""


@contextmanager
def planted(point: str, sign: signal.Signals = signal.SIGKILL, lake: type = LocalLake) -> Iterator[None]:
    """Send this process the signal exactly there. `lake`: what the feed's lake is."""
    trap = _Trap(point, sign)
    with ExitStack() as stack:
        for name in ("put_if_absent", "put", "show", "remove"):
            stack.enter_context(patch.object(lake, name, trap.around(name, getattr(lake, name))))
        stack.enter_context(patch.object(lake, "create", trap.creating(lake.create)))  # type: ignore[attr-defined]
        stack.enter_context(patch.object(local_lake, "_link", trap.linking(local_lake._link)))
        stack.enter_context(patch.object(Wire, "send", trap.sending(Wire.send)))
        stack.enter_context(patch.object(Tree, "transact", trap.transacting(Tree.transact)))
        yield


class _Trap:
    def __init__(self, point: str, sign: signal.Signals) -> None:
        name, _, number = point.rpartition(" ") if point[-1].isdigit() else (point, "", "1")
        self._when, _, self._effect = name.partition(" ")
        if name not in {*NAMES, *both(*ZOOKEEPER)}:
            raise ValueError(f"no such point: {point}")
        self._sign, self._nth, self._count = sign, int(number), itertools.count(1)

    def strike(self, when: str, effect: str | None) -> None:
        if (when, effect) == (self._when, self._effect) and next(self._count) == self._nth:
            os.kill(os.getpid(), self._sign)

    def around(self, method: str, call: Any) -> Any:
        def trapped(lake: object, path: str, *args: Any) -> Any:
            effect = _effect(method, path, *args)
            self.strike("before", effect)
            answer = call(lake, path, *args)
            self.strike("after", effect)
            return answer

        return trapped

    def linking(self, call: Any) -> Any:
        """Of the files that a local lake makes durable together, each gets its name by itself."""

        def trapped(temporary: Path, place: Path) -> bool:
            path = str(place)
            effect = "manifest" if paths.manifest_window(path[path.rfind("_sluice/") :]) else None
            self.strike("before", effect)
            won: bool = call(temporary, place)
            self.strike("after", effect)
            return won

        return trapped

    def creating(self, call: Any) -> Any:
        @contextmanager
        def trapped(lake: object, path: str) -> Iterator[Any]:
            effect = "stage" if paths.staged_batch(path) is not None else None
            with call(lake, path) as file:
                yield file
                self.strike("before", effect)
            self.strike("after", effect)

        return trapped

    def transacting(self, call: Any) -> Any:
        def trapped(tree: Tree, operations: Any, doing: str) -> None:
            effect = _TRANSACTIONS.get(doing.partition(" ")[0])
            self.strike("before", effect)
            call(tree, operations, doing)
            self.strike("after", effect)

        return trapped

    def sending(self, call: Any) -> Any:
        async def trapped(wire: Wire, node: Any, request: Any, seconds: float | None = None) -> Any:
            effect = _REQUESTS.get(type(request).name)
            if effect == "end" and not request.committed:
                effect = None  # it gives a transaction up
            self.strike("before", effect)
            answer = await call(wire, node, request, seconds)
            self.strike("after", effect)
            return answer

        return trapped


def _effect(method: str, path: str, *args: Any) -> str | None:
    """What a call upon the lake effects; None for what is no point."""
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
    kind = json.loads(args[0])["kind"]
    return str(_ENTRIES.get(kind, kind))
