"""A port before one broker that forwards everything and counts the requests by API, as the broker would."""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress

_APIS = {
    0: "Produce",
    1: "Fetch",
    2: "ListOffsets",
    3: "Metadata",
    8: "OffsetCommit",
    9: "OffsetFetch",
    10: "FindCoordinator",
    11: "JoinGroup",
    12: "Heartbeat",
    13: "LeaveGroup",
    14: "SyncGroup",
    15: "DescribeGroups",
    16: "ListGroups",
    18: "ApiVersions",
    22: "InitProducerId",
    23: "OffsetForLeaderEpoch",
    24: "AddPartitionsToTxn",
    25: "AddOffsetsToTxn",
    26: "EndTxn",
    28: "TxnOffsetCommit",
    32: "DescribeConfigs",
    35: "DescribeLogDirs",
    61: "DescribeProducers",
    66: "ListTransactions",
}
_PIECE = 1 << 18


class Counting:
    """Listens on a port of loopback. `broker`: its address, asked for with each connection. `seen`: requests by API
    since the last `reset`; `connections`: how many were made."""

    def __init__(self, broker: Callable[[], tuple[str, int]]) -> None:
        self.seen: Counter[str] = Counter()
        self.connections = 0
        self._broker = broker
        self._lock = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, name="bench-counting", daemon=True).start()

    def reset(self) -> None:
        with self._lock:
            self.seen, self.connections = Counter(), 0

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                with self._lock:
                    self.connections += 1
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), closing(client), closing(socket.create_connection(self._broker())) as broker:
            for one in (client, broker):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_pass_on, args=(broker, client), daemon=True).start()
            while head := _exactly(client, 4):
                request = _exactly(client, int.from_bytes(head, "big"))
                (key,) = struct.unpack_from(">h", request)
                with self._lock:
                    self.seen[_APIS.get(key, f"API {key}")] += 1
                broker.sendall(head + request)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(_PIECE):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


def _exactly(source: socket.socket, count: int) -> bytes:
    """Returns `count` bytes, or none if the connection has ended."""
    data = bytearray()
    while len(data) < count:
        more = source.recv(min(count - len(data), _PIECE))
        if not more:
            return b""
        data += more
    return bytes(data)
