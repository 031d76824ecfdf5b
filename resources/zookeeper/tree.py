"""A connection to ZooKeeper, to read and write a group's tree. The only module that imports kazoo.

Promises: nothing is connected before the first request; every wait has an end; kazoo's errors are raised as ours. The
end of a session is reported at once to its user, and its ephemeral nodes are never taken for ours again: the next
session is another one.
"""

from __future__ import annotations

import importlib
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from sluice.pipelines.errors import NotAuthorized, Refused, SetupError, Unknown, ZooKeeperUnavailable
from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.pipelines.util import extras
from sluice.pipelines.util.units import join_first
from sluice.resources.zookeeper import layout
from sluice.resources.zookeeper.layout import Consumer

SESSION_SECONDS = 12.0
CONNECT_SECONDS = 15.0
_ASK_SECONDS = 15.0
_AGAIN_SECONDS = 0.2
_AT_ONCE = 500
"""Requests in flight at once."""
_TRANSACTION_BYTES = 512 << 10
"""Limit on a transaction: a server refuses requests of a megabyte (jute.maxbuffer)."""


@dataclass(frozen=True, slots=True)
class StoredOffset:
    """A partition's offset as stored in ZooKeeper.

    The versions of its node and of our mark's change with every write of any client; None if there is no node.
    """

    committed: CommittedOffset | None = None
    version: int | None = None
    mark_version: int | None = None


class Changed(Exception):
    """A transaction was refused and had no effect: a node that it depends on has changed, at `path`."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path}: {what}")
        self.path, self.what = path, what


_Answer = TypeVar("_Answer")
Operation = tuple[str, str, bytes, int]
"""An operation of a transaction: `set`, `create`, `ephemeral`, `delete` or `check`; the path, the data, the version."""


class Tree:
    """The part of ZooKeeper below `connect`'s chroot.

    `on_lost` is called once, from a thread of the connection, when our session has ended or may have.
    """

    def __init__(self, connect: str, session: float = SESSION_SECONDS, patience: float = CONNECT_SECONDS) -> None:
        self.address = connect
        self._session = session
        self._patience = patience
        self._client: Any = None
        self._lock = threading.Lock()
        # The connection's thread must never wait for the holder of the other lock: that one waits for the thread.
        self._timing = threading.Lock()
        self._timer: threading.Timer | None = None
        self.on_lost: Callable[[], None] = lambda: None

    def close(self) -> None:
        """End the session: its ephemeral nodes are deleted at once."""
        with self._lock:
            client, self._client = self._client, None
        with self._timing:
            self._stop_timer()
        if client is not None:
            client.remove_listener(self._listen)
            client.stop()
            client.close()

    # -- reading

    def children(self, path: str) -> list[str]:
        """Return the names below the path, sorted; none if the path does not exist."""
        no_node = _kazoo().exceptions.NoNodeError

        def ask(client: Any) -> list[str]:
            try:
                return sorted(client.get_children_async(path).get(timeout=_ASK_SECONDS))
            except no_node:
                return []

        return self._ask(f"looking at {path}", ask)

    def exists(self, path: str) -> bool:
        return self._ask(f"looking at {path}", lambda c: c.exists_async(path).get(timeout=_ASK_SECONDS) is not None)

    def read(self, paths: Iterable[str]) -> dict[str, tuple[bytes, Any]]:
        """Return data and status of the nodes that exist. Many are requested at once."""
        every = list(paths)
        nodes: dict[str, tuple[bytes, Any]] = {}
        for begin in range(0, len(every), _AT_ONCE):
            chunk = every[begin : begin + _AT_ONCE]
            nodes |= self._ask("reading nodes", partial(_nodes, chunk))
        return nodes

    def offsets(self, group: str, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, StoredOffset]:
        """Return the stored offset of each partition.

        Raises Refused, which names every node that holds no offset: an old tool has half written the tree.
        """
        wanted = list(partitions)
        at = {tp: layout.offset_path(group, tp) for tp in wanted}
        marks = {tp: layout.mark_path(group, tp) for tp in wanted}
        # A mark is read before its offset: if a writer replaces it in between, ours is only too old, and is ignored.
        marked = self.read(marks.values())
        nodes = self.read(at.values())
        out, bad = {}, []
        for tp in wanted:
            mark, node = marked.get(marks[tp]), nodes.get(at[tp])
            mark_version = mark[1].version if mark else None
            if node is None:
                out[tp] = StoredOffset(mark_version=mark_version)
                continue
            data, stat = node
            if (offset := layout.parse_offset(data)) is None:
                bad.append(tp)
                continue
            ours = mark is not None and mark[1].mzxid == stat.mzxid
            committed = layout.parse_mark(offset, mark[0]) if mark and ours else CommittedOffset(offset)
            out[tp] = StoredOffset(committed, stat.version, mark_version)
        if bad:
            raise _unreadable(group, {tp: nodes[at[tp]][0] for tp in bad}, at)
        return out

    def with_offsets(self, group: str) -> list[TopicPartition]:
        """Return every partition with an offset node of the group, sorted. Names that are no partitions are left
        out."""
        root = f"{layout.group_path(group)}/offsets"
        names = ((t, p) for t in self.children(root) for p in self.children(f"{root}/{t}"))
        return sorted(TopicPartition(t, int(p)) for t, p in names if p.isascii() and p.isdigit())

    def consumers(self, group: str) -> list[Consumer]:
        """Return all registered consumers, sorted by id."""
        root = layout.ids_path(group)
        nodes = self.read(f"{root}/{name}" for name in self.children(root))
        return [layout.parse_consumer(path.rpartition("/")[2], data) for path, (data, _) in sorted(nodes.items())]

    def owners(self, group: str, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, str]:
        """Return the stream that owns each partition, for owned partitions."""
        at = {layout.owner_path(group, tp): tp for tp in partitions}
        return {at[path]: data.decode(errors="replace") for path, (data, _) in self.read(at).items()}

    def ensure(self, paths: Iterable[str]) -> None:
        """Create the missing nodes, with their parents."""
        wanted = sorted(set(paths))
        there = self.read(wanted)
        for path in wanted:
            if path not in there:
                self._ask(f"making {path}", partial(_make, path))

    # -- writing

    def transact(self, operations: Iterable[Operation], doing: str) -> None:
        """Execute all operations or none.

        Raises Changed if a node is not as the operations expect it, and Unknown if no answer came: read back.
        """
        kazoo = _kazoo()
        requested = list(operations)
        with self._asking(doing, unknown=True) as client:
            transaction = client.transaction()
            for kind, path, data, version in requested:
                match kind:
                    case "set":
                        transaction.set_data(path, data, version=version)
                    case "create" | "ephemeral":
                        transaction.create(path, data, ephemeral=kind == "ephemeral")
                    case "delete":
                        transaction.delete(path, version=version)
                    case _:
                        transaction.check(path, version)
            results = transaction.commit_async().get(timeout=_ASK_SECONDS)
        for (_, path, _, _), result in zip(requested, results, strict=True):
            # The operations other than the failed one are "rolled back" or "inconsistent": they carry no reason.
            if isinstance(result, kazoo.exceptions.NoAuthError):
                raise NotAuthorized(f"{doing}: ZooKeeper lets us not write {path}", remedy="allow it to write there")
            if isinstance(result, Exception) and not isinstance(
                result, kazoo.exceptions.RolledBackError | kazoo.exceptions.RuntimeInconsistency
            ):
                raise Changed(path, _KINDS.get(type(result).__name__, type(result).__name__))

    # -- the connection

    def _ask(self, doing: str, call: Callable[[Any], _Answer]) -> _Answer:
        """Return the answer to a repeatable request; retry for a while if a connection or session breaks."""
        until = time.monotonic() + self._patience
        while True:
            try:
                with self._asking(doing) as client:
                    return call(client)
            except ZooKeeperUnavailable:
                if time.monotonic() > until:
                    raise
                time.sleep(_AGAIN_SECONDS)

    @contextmanager
    def _asking(self, doing: str, *, unknown: bool = False) -> Iterator[Any]:
        """Yield the connected client; raise kazoo's errors as ours. `unknown`: as one that leaves the outcome open."""
        kazoo = _kazoo()
        client = self._connect()
        lost = (
            kazoo.exceptions.ConnectionLoss,
            kazoo.exceptions.ConnectionClosedError,
            kazoo.exceptions.SessionExpiredError,
            kazoo.exceptions.OperationTimeoutError,
            kazoo.handlers.threading.KazooTimeoutError,
        )
        try:
            yield client
        except lost as error:
            why = f"{doing}: ZooKeeper at {self.address} did not answer ({type(error).__name__})"
            if unknown:
                raise Unknown(why, remedy="nothing is lost: read back whether it was done") from None
            raise ZooKeeperUnavailable(why, remedy="see whether it runs, and try again") from None
        except kazoo.exceptions.NoAuthError as error:
            raise NotAuthorized(
                f"{doing}: ZooKeeper refuses ({type(error).__name__})", remedy="its ACLs do not let us in"
            ) from None
        except kazoo.exceptions.KazooException as error:
            raise ZooKeeperUnavailable(
                f"{doing}: ZooKeeper at {self.address} answers {type(error).__name__}", remedy="see its log"
            ) from None

    def _connect(self) -> Any:
        kazoo = _kazoo()
        with self._lock:
            if self._client is None:
                client = kazoo.client.KazooClient(hosts=self.address, timeout=self._session)
                client.add_listener(self._listen)
                try:
                    with warnings.catch_warnings(action="ignore"):  # about a missing chroot: we report it ourselves
                        client.start(timeout=self._patience)
                    _check_chroot(client, self.address)
                except (kazoo.handlers.threading.KazooTimeoutError, kazoo.exceptions.KazooException, OSError):
                    client.remove_listener(self._listen)
                    client.stop()
                    client.close()
                    raise ZooKeeperUnavailable(
                        f"no ZooKeeper answers at {self.address}",
                        remedy="see whether it runs there, and whether `offsets.connect` in the feed is its address",
                    ) from None
                except BaseException:
                    client.remove_listener(self._listen)
                    client.stop()
                    client.close()
                    raise
                self._client = client
            return self._client

    def _listen(self, state: Any) -> None:
        """Report the session as lost after a third of its time without a connection.

        The server counts from our last message, which may be a third of the session ago or more: another third without
        a connection counts as lost, before the server may give our nodes away.
        """
        with self._timing:
            self._stop_timer()
            if state == "SUSPENDED":
                self._timer = threading.Timer(self._session / 3, lambda: self.on_lost())
                self._timer.daemon = True
                self._timer.start()
        if state == "LOST":
            self.on_lost()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_KINDS = {
    "NoNodeError": "it is gone",
    "NodeExistsError": "somebody made it",
    "BadVersionError": "somebody wrote it",
}


def chunks(by_partition: Mapping[TopicPartition, list[Operation]]) -> Iterator[list[Operation]]:
    """Yield the operations in transactions that a server accepts, nearly always one.

    Those of a partition stay together.
    """
    chunk: list[Operation] = []
    size = 0
    for operations in by_partition.values():
        more = sum(100 + len(path) + len(data) for _, path, data, _ in operations)
        if chunk and size + more > _TRANSACTION_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk += operations
        size += more
    if chunk:
        yield chunk


def writes(
    group: str, offsets: Mapping[TopicPartition, CommittedOffset], stored: Mapping[TopicPartition, StoredOffset]
) -> dict[TopicPartition, list[Operation]]:
    """Return the operations that write each offset and its mark, conditional on the stored versions."""
    out: dict[TopicPartition, list[Operation]] = {}
    for tp, committed in offsets.items():
        before = stored.get(tp, StoredOffset())
        at, mark = layout.offset_path(group, tp), layout.mark_path(group, tp)
        out[tp] = [
            _put(at, layout.dump_offset(committed.offset), before.version),
            _put(mark, layout.dump_mark(committed), before.mark_version),
        ]
    return out


def _put(path: str, data: bytes, version: int | None) -> Operation:
    return ("create", path, data, -1) if version is None else ("set", path, data, version)


def _make(path: str, client: Any) -> None:
    client.ensure_path_async(path).get(timeout=_ASK_SECONDS)


def _nodes(paths: Iterable[str], client: Any) -> dict[str, tuple[bytes, Any]]:
    no_node = _kazoo().exceptions.NoNodeError
    nodes = {}
    for path, answer in [(path, client.get_async(path)) for path in paths]:
        with suppress(no_node):
            nodes[path] = answer.get(timeout=_ASK_SECONDS)
    return nodes


def _check_chroot(client: Any, address: str) -> None:
    if client.chroot and client.exists_async("/").get(timeout=_ASK_SECONDS) is None:
        raise SetupError(
            f"ZooKeeper at {address} has no {client.chroot}",
            remedy="`offsets.connect` names the folder that the old consumers' zookeeper.connect names, or none",
        )


def _unreadable(group: str, bad: Mapping[TopicPartition, bytes], at: Mapping[TopicPartition, str]) -> Refused:
    examples = [f"{at[tp]} holds {_shown(data)}" for tp, data in sorted(bad.items())]
    first = min(bad)
    return Refused(
        f"group {group} has no offset where one should be; {join_first(examples, 5, between='; ')}",
        remedy="write the right number there, or delete the node: Sluice then goes on from its ledger",
        topic=first.topic,
        partition=first.partition,
    )


def _shown(data: bytes) -> str:
    text = ascii(data[:40].decode(errors="replace"))
    return text + ("…" if len(data) > 40 else "") if data else "nothing"


def _kazoo() -> Any:
    """Import kazoo, an extra: only needed if a feed keeps its offsets in ZooKeeper."""
    with extras.name_missing():
        for name in ("client", "exceptions", "handlers.threading"):
            importlib.import_module(f"kazoo.{name}")
    return importlib.import_module("kazoo")
