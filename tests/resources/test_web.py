"""Exchanges with servers that drip end by their deadline, with the error of the caller."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from urllib.request import Request

import pytest
from pydantic import SecretStr

from sluice.pipelines.errors import (
    CatalogUnavailable,
    Failed,
    KafkaUnavailable,
    LakeUnavailable,
    RegistryUnavailable,
    SluiceError,
)
from sluice.pipelines.feed.kafka_section import RegistrySettings
from sluice.pipelines.feed.project_files import EmailSettings, MailSecurity, NotifySettings
from sluice.pipelines.feed.stores import AzureSettings, GcsSettings, S3Settings, StoreSettings
from sluice.resources import web
from sluice.resources.kafka.connection import oauth
from sluice.resources.lake import open_client
from sluice.resources.lake.store_client import StoreClient
from sluice.resources.observe import lineage, notifications, prometheus
from sluice.resources.registry import confluent, glue
from sluice.resources.tables import iceberg
from tests.drip import dripping

WAITS = ["headers", "body", "body without length", "continue"]
SECONDS = 0.3


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        *((oauth, name) for name in ("_SECONDS", "_PAUSE")),
        *((notifications, name) for name in ("WEB_SECONDS", "MAIL_SECONDS")),
        *((confluent, "_PAUSE"), (prometheus, "PUSH_SECONDS"), (lineage, "EMIT_SECONDS")),
    ):
        monkeypatch.setattr(module, name, SECONDS)


@pytest.mark.parametrize("script", WAITS)
def test_request_to_a_dripping_server_ends(script: str) -> None:
    with dripping(script) as port, pytest.raises(TimeoutError, match="no complete answer"):
        web.send(Request(f"http://127.0.0.1:{port}/"), seconds=SECONDS, max_bytes=1000)


def test_connection_after_the_deadline_is_closed() -> None:
    """An open one would be an error here, where it is collected."""
    with dripping("headers") as port, web.Deadline(0.2) as deadline:
        deadline._timer.join()
        with pytest.raises(TimeoutError, match="no complete answer"):
            deadline.connect(("127.0.0.1", port))


def test_body_is_bounded() -> None:
    with dripping("endless") as port:
        answer = web.send(Request(f"http://127.0.0.1:{port}/"), seconds=60, max_bytes=1000)
    assert (answer.status, len(answer.body)) == (200, 1001)


def test_other_schemes_are_refused() -> None:
    with pytest.raises(OSError, match="unknown url type: file"):
        web.send(Request("file:///etc/passwd"), seconds=1, max_bytes=1000)


@pytest.mark.parametrize("script", WAITS)
def test_token_endpoint_that_drips_is_unavailable(script: str) -> None:
    with dripping(script) as port, pytest.raises(KafkaUnavailable, match="no complete answer"):
        oauth.ClientCredentials(f"http://127.0.0.1:{port}/token", "ingest", "s3cr3t").token()


def test_connections_share_the_failure_of_a_dripping_token_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, waiting = [], threading.Barrier(4)
    send = oauth._once

    def count(credentials: oauth.Credentials) -> Any:
        requests.append(credentials)
        return send(credentials)

    monkeypatch.setattr(oauth, "_once", count)
    failures: list[SluiceError] = []

    def connect(provider: oauth.ClientCredentials) -> None:
        waiting.wait()
        with pytest.raises(KafkaUnavailable) as caught:
            provider.token()
        failures.append(caught.value)

    with dripping("headers") as port:
        provider = oauth.ClientCredentials(f"http://127.0.0.1:{port}/token", "ingest", "s3cr3t")
        threads = [threading.Thread(target=connect, args=[provider]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(failures) == 4
    assert len(requests) == oauth._TRIES


@pytest.mark.parametrize("script", ["headers", "continue"])
def test_webhook_that_drips_does_not_answer(script: str) -> None:
    with dripping(script) as port:
        settings = NotifySettings(webhook=SecretStr(f"http://127.0.0.1:{port}/hook"))
        with pytest.raises(Failed, match=r"the webhook does not answer \(TimeoutError\)"):
            notifications.notify(settings, "title", [notifications.Alert("line")])


@pytest.mark.parametrize("security", [MailSecurity.NONE, MailSecurity.STARTTLS, MailSecurity.TLS])
def test_mail_server_that_drips_takes_no_letter(security: MailSecurity) -> None:
    with dripping("greeting") as port:
        mail = EmailSettings(server="127.0.0.1", port=port, security=security, sender="a@b", to=["c@d"])
        with pytest.raises(Failed, match="the mail server takes no letter"):
            notifications.notify(NotifySettings(email=mail), "title", [notifications.Alert("line")])


@pytest.mark.parametrize("script", WAITS)
def test_registry_that_drips_is_unavailable(script: str) -> None:
    with dripping(script) as port, pytest.raises(RegistryUnavailable, match="no answer in time"):
        confluent.RegistryClient(RegistrySettings(url=f"http://127.0.0.1:{port}", timeout="1s")).version("orders")


@pytest.mark.parametrize("script", ["headers", "continue"])
def test_push_gateway_that_drips_takes_no_figures(script: str) -> None:
    pytest.importorskip("prometheus_client")
    with dripping(script) as port, pytest.raises(Failed, match="no complete answer"):
        prometheus.push([], prometheus.Gateway(f"http://127.0.0.1:{port}", "sluice"))


@pytest.mark.parametrize("script", WAITS)
def test_lineage_receiver_that_drips_costs_a_warning(script: str, caplog: pytest.LogCaptureFixture) -> None:
    client = pytest.importorskip("openlineage.client")
    from openlineage.client.event_v2 import Job, Run, RunEvent, RunState

    job, run = Job(namespace="sluice", name="orders"), Run(runId="01890000-0000-7000-8000-000000000000")
    with dripping(script) as port:
        receiver = client.OpenLineageClient(url=f"http://127.0.0.1:{port}")
        now = "2026-01-01T00:00:00Z"
        lineage._emit(receiver, lambda: RunEvent(RunState.START, now, run, job, producer="urn:sluice"))
    assert "the event was not sent to OpenLineage" in caplog.text


@pytest.mark.parametrize("script", ["headers", "body", "continue"])
@pytest.mark.parametrize("cloud", ["gs", "az"])
def test_cloud_store_that_drips_is_unavailable(script: str, cloud: str) -> None:
    with dripping(script) as port:
        limits: dict[str, Any] = {"endpoint": f"http://127.0.0.1:{port}", "read_timeout_ms": 300, "retries": 0}
        settings: StoreSettings = GcsSettings(token=SecretStr("t"), **limits)
        if cloud == "az":
            settings = AzureSettings(account="account", account_key=SecretStr("YWFh"), **limits)
        with pytest.raises(LakeUnavailable):
            open_client(f"{cloud}://bucket/lake", settings).fetch("key")


def open_bucket(port: int, **more: Any) -> StoreClient:
    keys = {"access_key_id": SecretStr("key"), "secret_access_key": SecretStr("secret"), "region": "eu-west-1"}
    limits = {"endpoint": f"http://127.0.0.1:{port}", "read_timeout_ms": 300, "retries": 0}
    return open_client("s3://lake", S3Settings(**{**keys, **limits, **more}))


@pytest.mark.parametrize("script", WAITS)
@pytest.mark.parametrize("request_", ["fetch", "put", "list"])
def test_s3_that_drips_is_unavailable(script: str, request_: str) -> None:
    with dripping(script) as port:
        bucket = open_bucket(port)
        requests: dict[str, Callable[[], Any]] = {
            "fetch": lambda: bucket.fetch("key"),
            "put": lambda: bucket.put("key", b"x" * 1_000_000, "write"),
            "list": lambda: list(bucket.list_below("")),
        }
        with pytest.raises(LakeUnavailable):
            requests[request_]()


def test_body_that_takes_longer_than_the_time_out_is_whole() -> None:
    with dripping("steady") as port:
        assert len(open_bucket(port, read_timeout_ms=2000).fetch("key").data) == 491_520


def test_time_between_reads_counts_for_headers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(web, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"0123456789")
        line = web._Line(ours, 1.0)
        for body in (True, False):
            line.expect(body=body)
            now[0] += 100
            with nullcontext() if body else pytest.raises(TimeoutError, match="no complete answer within 1 s"):
                assert line.recv_into(bytearray(5)) == 5


def test_glue_that_drips_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(glue, "TRIES", 1)
    client = glue.GlueClient(RegistrySettings(url="glue://eu-west-1/shop", timeout="1s"))
    with dripping("headers") as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL_GLUE", f"http://127.0.0.1:{port}")
        with pytest.raises(RegistryUnavailable):
            client.subjects()


@pytest.mark.parametrize("script", WAITS)
def test_rest_catalog_that_drips_is_unavailable(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iceberg, "CATALOG_SECONDS", SECONDS)
    with dripping(script) as port:
        table = iceberg.IcebergTable(
            "shop.orders", {"type": "rest", "uri": f"http://127.0.0.1:{port}", "token": "t"}, {}
        )
        with pytest.raises(CatalogUnavailable, match="does not answer"):
            table.look()
