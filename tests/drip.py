"""Servers on this machine that keep a client waiting: they drip bytes, or repeat an answer that ends nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

_OK = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nETag: "e"\r\n'
_OK += b"Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n"
SCRIPTS = {
    "headers": (_OK + b"X-A: ", b"a"),
    "body": (_OK + b"Content-Length: 60000\r\n\r\n", b" "),
    "body without length": (_OK + b"\r\n", b" "),
    "steady": (_OK + b"Content-Length: 491520\r\n\r\n", b" " * 16384),
    "endless": (_OK + b"\r\n", b" " * 65536),
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "greeting": (b"", b"220-hello\r\n"),
}
"""The first bytes of a server, and those that it repeats."""


@contextmanager
def dripping(script: str) -> Iterator[int]:
    """Run a server until the block ends; yields its port."""
    first, repeated = SCRIPTS[script]
    ended = Event()
    every = {"endless": 0.0, "steady": 0.1}.get(script, 0.02)

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            if first:
                connection.recv(65536)
            connection.sendall(first)
            while not ended.wait(every):
                connection.sendall(repeated)

    def serve_all() -> None:
        with suppress(OSError):
            while True:
                Thread(target=serve, args=[listening.accept()[0]], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        Thread(target=serve_all, daemon=True).start()
        try:
            yield listening.getsockname()[1]
        finally:
            ended.set()
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
