"""HTTP requests, and connections of other protocols, with one deadline for the whole exchange.

A socket's own time-out restarts with each byte: a server that drips headers or a body, or repeats `100 Continue`,
would never reach it. Clients of urllib3 (boto3, requests) have a deadline for headers, and a lowest speed for bodies.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException, HTTPMessage
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.parse import urljoin, urlsplit

SLOWEST = 16 << 10
"""Bytes a second: the lowest speed of bodies in clients of urllib3."""


class Deadline:
    """A context that shuts down its connections after a number of seconds. A block that fails later than that raises
    TimeoutError instead of OSError and HTTPException; one that succeeds may `check`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lines: list[socket.socket] = []
        self._late = threading.Event()
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True

    def __enter__(self) -> Deadline:
        self._timer.start()
        return self

    def __exit__(self, _: Any, error: BaseException | None, *__: Any) -> None:
        self._timer.cancel()
        self._timer.join()  # it must not shut down a descriptor that was closed and used again
        for line in self._lines:
            line.close()
        if isinstance(error, OSError | HTTPException):
            self.check()

    def check(self) -> None:
        """Raise TimeoutError after the deadline: an answer without a length looks complete when it is cut."""
        if self._late.is_set():
            raise TimeoutError(f"no complete answer within {self._seconds:g} s") from None

    def connect(self, address: tuple[str, int], *_: Any) -> socket.socket:
        """Return a connection, as `socket.create_connection` does."""
        line = socket.create_connection(address, self._seconds)
        self._lines.append(line.dup())  # usable while TLS wraps the original, or a response outlives it
        if self._late.is_set():
            line.close()
        self.check()
        return line

    def _cut(self) -> None:
        self._late.set()
        for line in self._lines:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)


class Answer(NamedTuple):
    """A response; `body` has at most one byte more than was allowed."""

    status: int
    headers: HTTPMessage
    body: bytes


def send(
    request: urllib.request.Request,
    *,
    seconds: float,
    max_bytes: int = 0,
    tls: ssl.SSLContext | None = None,
    proxies: dict[str, str] | None = None,
) -> Answer:
    """Send the request and return its answer, of any status. Redirects are not followed.

    `max_bytes`: of the body; 0 reads none. `proxies`: by scheme; None takes those of the environment. Raises
    TimeoutError after the seconds in total, OSError, HTTPException, ValueError.
    """
    opener = urllib.request.OpenerDirector()
    with Deadline(seconds) as deadline:
        for handler in (urllib.request.ProxyHandler(proxies), _Handler(deadline, tls), urllib.request.UnknownHandler()):
            opener.add_handler(handler)
        try:
            with opener.open(request, timeout=seconds) as response:
                received = response.read(max_bytes + 1) if max_bytes else b""
        except URLError as error:
            raise error.reason if isinstance(error.reason, OSError) else error from None
        deadline.check()
        return Answer(response.status, response.headers, received)


class _Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler, urllib.request.HTTPErrorProcessor):
    """Opens connections within a deadline and returns responses of any status."""

    def __init__(self, deadline: Deadline, tls: ssl.SSLContext | None) -> None:
        urllib.request.HTTPSHandler.__init__(self, context=tls)
        self._deadline = deadline

    def do_open(self, http_class: Any, req: urllib.request.Request, **options: Any) -> Any:
        def make(host: str, **arguments: Any) -> Any:
            connection = http_class(host, **arguments)
            connection._create_connection = self._deadline.connect
            return connection

        return super().do_open(make, req, **options)

    http_response = https_response = lambda self, request, response: response


def limit_client(client: Any, seconds: float) -> None:
    """Limit the connections of a client of boto3, which has no public way to its pools."""
    pools = client._endpoint.http_session._pool_classes_by_scheme
    pools.update(_limit_pools(pools, seconds))


def limit_session(session: Any, seconds: float) -> Any:
    """Return a subclass of requests' `Session` that limits its connections, except those through proxies."""

    def get_adapter(self: Any, url: str) -> Any:
        adapter = session.get_adapter(self, url)
        adapter.poolmanager.pool_classes_by_scheme = _limit_pools(adapter.poolmanager.pool_classes_by_scheme, seconds)
        return adapter

    def get_redirect_target(self: Any, answer: Any) -> str | None:
        target = session.get_redirect_target(self, answer)
        own, other = urlsplit(answer.url), urlsplit(urljoin(answer.url, target or ""))
        return target if own[:2] == other[:2] else None  # a token request's body has the secret

    return type("Session", (session,), {"get_adapter": get_adapter, "get_redirect_target": get_redirect_target})


def _limit_pools(pools: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return urllib3's pools, by scheme, with connections that raise TimeoutError: if the headers of an answer take
    longer than the seconds, or a body, either way, waits that long beyond its time at `SLOWEST`."""
    return {
        scheme: pool if issubclass(pool.ConnectionCls, _LimitedConnection)
        else type("Limited", (pool,), {"ConnectionCls": type("Limited", (_LimitedConnection, pool.ConnectionCls),
                                                              {"seconds": seconds})})
        for scheme, pool in pools.items()
    }  # fmt: skip


class _LimitedConnection:
    """The limits of a connection; `_line` is its socket."""

    sock: Any = property(
        lambda self: self._line, lambda self, plain: setattr(self, "_line", plain and _Line(plain, self.seconds))
    )

    def getresponse(self) -> Any:
        line, response = self.sock, super().getresponse()  # type: ignore[misc]
        line.expect(body=True)
        return response


class _Line:
    """A connected socket that limits the time of its reads and writes. Pauses between reads of a body do not count."""

    def __init__(self, plain: Any, seconds: float) -> None:
        self._plain, self._seconds = plain, seconds
        plain.settimeout(seconds)  # for a TLS handshake

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def expect(self, *, body: bool) -> None:
        self._body, self._rest, self._last = body, self._seconds, time.monotonic()

    def makefile(self, *arguments: Any) -> Any:
        self.expect(body=False)  # each answer has a file of its own
        file = self._plain.makefile(*arguments)
        getattr(file, "raw", file)._sock = self  # it reads by `recv_into`
        return file

    def recv_into(self, buffer: Any) -> int:
        start = time.monotonic() if self._body else self._last
        self._plain.settimeout(max(self._rest, 0.001))
        received = int(self._plain.recv_into(buffer))
        self._last = time.monotonic()
        self._rest = min(self._rest - self._last + start + self._body * received / SLOWEST, self._seconds)
        if self._rest <= 0:
            raise TimeoutError(f"no complete answer within {self._seconds:g} s")
        return received

    def sendall(self, data: Any) -> None:
        self._plain.settimeout(self._seconds + len(data) / SLOWEST)
        self._plain.sendall(data)
