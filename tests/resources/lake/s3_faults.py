"""A proxy in front of an object store that injects the faults of networks and stores.

The first rule that matches a request and is not used up is applied; other requests are passed on unchanged. All
requests are recorded.
"""

from __future__ import annotations

import http.client
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any
from urllib.parse import unquote


@dataclass
class Rule:
    """A fault for requests whose `METHOD /path?query` matches, applied `times` times (-1: always).

    `how`: `refuse` (the store never gets the request), `lose` (the store carries it out, the client gets no answer),
    `reset` (the connection is cut in the middle of the request's body), `cut` (in the middle of the answer's body),
    `ignore` (conditions are removed), `skew` (the answer's date is moved by `seconds`), `slow` (the store gets the
    request `seconds` late), `add` (the answer gets additional `headers`). `then` is called before the answer.
    """

    match: str
    how: str
    times: int = 1
    status: int = 503
    code: str = "SlowDown"
    message: str = "as asked for"
    seconds: float = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    then: Callable[[], None] = lambda: None

    def is_match(self, line: str) -> bool:
        return self.times != 0 and re.search(self.match, unquote(line)) is not None


@dataclass
class Proxy:
    endpoint: str
    rules: list[Rule] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def take(self, line: str) -> Rule | None:
        with self.lock:
            self.requests.append(line)
            for rule in self.rules:
                if rule.is_match(line):
                    rule.times -= 1
                    return rule
        return None


@contextmanager
def run_proxy(upstream: str) -> Iterator[Proxy]:
    """Run a proxy on loopback in front of the endpoint."""
    handler = type("Proxied", (Handler,), {"upstream": upstream.removeprefix("http://")})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    handler.proxy = proxy = Proxy(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream = ""
    proxy: Proxy | None = None

    def log_message(self, *_: Any) -> None: ...

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client has gone
            super().handle()

    def _handle_any(self) -> None:
        rule = self.proxy.take(f"{self.command} {self.path}") if self.proxy else None
        chunked = "chunked" in self.headers.get("Transfer-Encoding", "")
        length = int(self.headers.get("Content-Length") or 0)
        if rule and rule.how == "reset":
            self.rfile.read(1 if chunked else length // 2)
            return self._cut_off()
        body = b"".join(self._read_chunks()) if chunked else self.rfile.read(length)
        if rule and rule.how == "slow":
            time.sleep(rule.seconds)
        if rule and rule.how == "refuse":
            rule.then()
            if "comp=batch" in self.path and rule.status in (403, 409):
                return self._refuse_each(rule, body)
            text = (
                rule.message.encode()
                if rule.status == 200
                else f"<Error><Code>{rule.code}</Code><Message>{rule.message}</Message></Error>".encode()
            )
            return self._answer(rule.status, {"Content-Type": "application/xml"}, text)
        if rule and rule.how == "ignore":
            del self.headers["If-None-Match"], self.headers["x-goog-if-generation-match"]
        status, headers, data = self._ask_upstream(body)
        if rule:
            rule.then()
        if rule and rule.how == "lose":
            return self._cut_off()
        if rule and rule.how == "skew":
            then = parsedate_to_datetime(headers["Date"]).timestamp() + rule.seconds
            headers["Date"] = formatdate(then, usegmt=True)
        if rule:
            headers |= rule.headers
        self._answer(status, headers, data, cut=bool(rule and rule.how == "cut"))

    def _refuse_each(self, rule: Rule, body: bytes) -> None:
        """Answer an Azure batch with a refusal of each request in it."""
        cut = body.split(b"\r\n", 1)[0]
        numbers = re.findall(rb"Content-ID: (\d+)", body)
        part = b"%b\r\nContent-Type: application/http\r\nContent-ID: %b\r\n\r\nHTTP/1.1 %d %b\r\n"
        part += b"x-ms-error-code: %b\r\n\r\n\r\n"
        parts = [part % (cut, n, rule.status, rule.message.encode(), rule.code.encode()) for n in numbers]
        kind = f"multipart/mixed; boundary={cut.decode().removeprefix('--')}"
        self._answer(202, {"Content-Type": kind}, b"".join(parts) + cut + b"--")

    def _read_chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():  # trailers
            pass

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle_any

    def _ask_upstream(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.upstream, timeout=30)
        ours = ("expect", "connection", "transfer-encoding")
        passed = {k: v for k, v in self.headers.items() if k.lower() not in ours}
        connection.request(self.command, self.path, body, passed)
        answer = connection.getresponse()
        data = answer.read()
        headers = {k: v for k, v in answer.getheaders() if k.lower() not in ("connection", "transfer-encoding")}
        connection.close()
        return answer.status, headers, data

    def _answer(self, status: int, headers: dict[str, str], data: bytes, cut: bool = False) -> None:
        if self.command != "HEAD":
            headers = {k: v for k, v in headers.items() if k.lower() != "content-length"}
            headers["Content-Length"] = str(len(data))
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self._cut_off()

    def _cut_off(self) -> None:
        """Reset the connection instead of closing it in order."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True
