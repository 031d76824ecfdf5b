"""Servers with certificates of another host or of yesterday, or without TLS, get no secret; each is a named error."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
from pydantic import SecretStr

from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed.kafka_section import RegistrySettings
from sluice.pipelines.feed.project_files import NotifySettings
from sluice.pipelines.feed.stores import AzureSettings, GcsSettings, S3Settings
from sluice.resources.kafka.cluster.cluster import KafkaCluster
from sluice.resources.kafka.connection import oauth
from sluice.resources.kafka.connection.connection_settings import KafkaAddress
from sluice.resources.lake import open_client
from sluice.resources.local.secured import Secured
from sluice.resources.observe import notifications
from sluice.resources.registry import confluent
from sluice.resources.tables import iceberg

SECRET = "canary"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
CASES = ["wrong host", "expired", "plaintext", "plaintext after the handshake"]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Secured:
    secured = Secured(tmp_path_factory.mktemp("tls") / "secure")
    secured.prepare([], "")
    secured.issue_broker(1, name="plaintext after the handshake")
    secured.issue_broker(1, hosts=["kafka.example"], name="wrong host")
    secured.issue_broker(1, lifetime=timedelta(hours=-1), name="expired")
    return secured


@contextmanager
def serve(authority: Secured, case: str) -> Iterator[tuple[int, list[bytes]]]:
    """Run the server of a case. Yields its port and the received data."""
    received: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        with suppress(OSError), connection, connection.dup() as plain:
            if case == "plaintext":
                received.append(connection.recv(4096))
            else:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(authority.folder / case)
                with context.wrap_socket(connection, server_side=True) as secure:
                    if not case.endswith("handshake"):
                        received.append(secure.recv(4096))
            plain.sendall(ANSWER)

    def accept_all() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=[listening.accept()[0]], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept_all, daemon=True).start()
        yield listening.getsockname()[1], received
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)


def open_senders(port: int, ca: str) -> dict[str, Callable[[], object]]:
    url, secret = f"https://127.0.0.1:{port}", SecretStr(SECRET)
    limits: dict[str, Any] = {"endpoint": url, "read_timeout_ms": 2000, "retries": 0}
    s3 = S3Settings(region="r", ca_bundle=ca, access_key_id=secret, secret_access_key=secret, **limits)
    google, azure = (
        GcsSettings(token=secret, **limits),
        AzureSettings(account="account", sas_token=SecretStr(f"sig={SECRET}"), **limits),
    )
    registry = RegistrySettings(url=url, username="u", password=secret, ssl_cafile=ca, timeout="1s")  # type: ignore[arg-type]
    login = {"sasl_mechanism": "PLAIN", "sasl_plain_username": "u", "sasl_plain_password": SECRET}
    kafka = login | {"security_protocol": "SASL_SSL", "ssl_cafile": ca, "bootstrap_timeout_ms": 500}
    webhook = NotifySettings(webhook=SecretStr(f"{url}/{SECRET}"))
    catalog = {"type": "rest", "uri": url, "credential": f"u:{SECRET}"}
    return {
        "broker": lambda: KafkaCluster(KafkaAddress(f"127.0.0.1:{port}", kafka)).cluster_id(),
        "registry": lambda: confluent.RegistryClient(registry).version("orders"),
        "token endpoint": lambda: oauth.ClientCredentials(url, "u", SECRET, cafile=ca).token(),
        "webhook": lambda: notifications.notify(webhook, "title", [notifications.Alert("line")]),
        "S3": lambda: open_client("s3://bucket/lake", s3).fetch("key"),
        "Google Cloud": lambda: open_client("gs://bucket/lake", google).fetch("key"),
        "Azure": lambda: open_client("az://bucket/lake", azure).fetch("key"),
        "catalog": lambda: iceberg.IcebergTable("shop.orders", catalog, {}).look(),
    }


@pytest.mark.parametrize("case", CASES)
def test_server_without_a_valid_certificate_gets_no_secret(
    authority: Secured, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.setenv(name, str(authority.ca))
    for module in (oauth, confluent):
        monkeypatch.setattr(module, "_PAUSE", 0.0)
    with serve(authority, case) as (port, received):
        for name, send in open_senders(port, str(authority.ca)).items():
            with pytest.raises(SluiceError) as caught:
                send()
            assert SECRET not in f"{caught.value} {caught.value.remedy}", name
        assert not any(SECRET.encode() in data for data in received)
