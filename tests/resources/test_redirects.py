"""Servers that redirect, or answer with another server's page: no other host gets a secret, and errors have names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from pydantic import SecretStr

from sluice.pipelines.errors import LakeUnavailable, SluiceError
from sluice.pipelines.feed.kafka_section import RegistrySettings
from sluice.pipelines.feed.project_files import NotifySettings
from sluice.pipelines.feed.stores import AzureSettings, GcsSettings, S3Settings, StoreSettings
from sluice.resources.kafka.connection import oauth
from sluice.resources.lake import open_client
from sluice.resources.lake.store_client import StoreClient
from sluice.resources.observe import notifications, prometheus
from sluice.resources.registry import confluent
from sluice.resources.tables import iceberg

STORED = {"ETag": '"e"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
PAGE = b"<html><body>Please log in</body></html>"
SECRET = "canary"


class Server:
    """Answers each request alike, and records its requests: method, path, headers and body."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.requests: list[str] = []
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                requests.append(f"{self.command} {self.path}\n{self.headers}\n{sent!r}")
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value.replace("PATH", self.path.partition("?")[0]))
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(b"" if self.command == "HEAD" else body)

            do_PUT = do_POST = do_HEAD = do_DELETE = do_GET

            def log_message(self, *_: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.port = self.http.server_address[1]


@contextmanager
def serve(status: int, headers: dict[str, str], body: bytes = b"") -> Iterator[Server]:
    server = Server(status, headers, body)
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()


@pytest.fixture
def elsewhere() -> Iterator[Server]:
    """Another host, to which requests are redirected."""
    with serve(200, STORED | {"Content-Type": "application/json"}, b"{}") as server:
        yield server


def open_store(kind: str, port: int) -> StoreClient:
    limits: dict[str, Any] = {"endpoint": f"http://127.0.0.1:{port}", "read_timeout_ms": 2000, "retries": 0}
    keys = ("access_key_id", "secret_access_key", "session_token")
    stores: dict[str, tuple[str, StoreSettings]] = {
        "s3": ("s3", S3Settings(region="eu-west-1", **{k: SecretStr(SECRET) for k in keys}, **limits)),
        "gs": ("gs", GcsSettings(token=SecretStr(SECRET), **limits)),
        "az": ("az", AzureSettings(account="account", account_key=SecretStr("Y2FuYXJ5"), **limits)),
    }
    scheme, settings = stores[kind]
    return open_client(f"{scheme}://bucket/lake", settings)


REQUESTS: dict[str, Callable[[StoreClient], object]] = {
    "fetch": lambda store: store.fetch("key"),
    "put": lambda store: store.put("key", b"data", "write"),
    "head": lambda store: store.head("key"),
    "list": lambda store: list(store.list_below("")),
}


@pytest.mark.parametrize("status", [301, 302, 307, 308])
@pytest.mark.parametrize("kind", ["s3", "gs", "az"])
def test_store_that_redirects_gives_no_secret_away(kind: str, status: int, elsewhere: Server) -> None:
    with serve(status, {"Location": f"http://localhost:{elsewhere.port}PATH"}) as front:
        store = open_store(kind, front.port)
        for request in REQUESTS.values():
            with suppress(SluiceError):
                request(store)
    assert not any(SECRET in request or "Authorization" in request for request in elsewhere.requests)
    assert kind != "s3" or elsewhere.requests == []
    assert len(front.requests) < 20


@pytest.mark.parametrize("body", [b"", PAGE], ids=["empty", "page"])
@pytest.mark.parametrize("request_", [*REQUESTS])
def test_page_of_another_server_is_unavailable(request_: str, body: bytes) -> None:
    """An empty listing would be a feed that has not begun, and a write would count."""
    with serve(200, {"Content-Type": "text/html"}, body) as front, pytest.raises(LakeUnavailable, match="no answer"):
        REQUESTS[request_](open_store("s3", front.port))


SENDERS: dict[str, Callable[[str], object]] = {
    "catalog": lambda url: iceberg.IcebergTable(
        "shop.orders", {"type": "rest", "uri": url, "credential": f"sluice:{SECRET}"}, {}
    ).look(),
    "catalog token": lambda url: iceberg.IcebergTable(
        "shop.orders", {"type": "rest", "uri": url, "token": SECRET}, {}
    ).look(),
    "token endpoint": lambda url: oauth.ClientCredentials(url, "sluice", SECRET).token(),
    "registry": lambda url: confluent.RegistryClient(
        RegistrySettings(url=url, username="sluice", password=SecretStr(SECRET))
    ).version("orders"),
    "webhook": lambda url: notifications.notify(
        NotifySettings(webhook=SecretStr(f"{url}/{SECRET}")), "title", [notifications.Alert("line")]
    ),
    "push gateway": lambda url: prometheus.push([], prometheus.Gateway(url, "sluice")),
}


@pytest.mark.parametrize("status", [302, 307])
@pytest.mark.parametrize("sender", [*SENDERS])
def test_other_servers_that_redirect_get_no_second_request(
    sender: str, status: int, elsewhere: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (oauth, confluent):
        monkeypatch.setattr(module, "_PAUSE", 0.0)
    with serve(status, {"Location": f"http://localhost:{elsewhere.port}/"}) as front:
        with pytest.raises(SluiceError) as caught:
            SENDERS[sender](f"http://127.0.0.1:{front.port}")
        assert front.requests
    assert elsewhere.requests == []
    assert SECRET not in f"{caught.value} {caught.value.remedy}"
