"""Each refusal between a real secured broker and the client is a distinct error with its own remedy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.errors import KafkaUnavailable, NotAuthorized, SluiceError
from sluice.resources.kafka.cluster.cluster import KafkaCluster
from sluice.resources.kafka.connection.connection_settings import KafkaAddress
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.secured import ADMIN, USER, Secured

pytestmark = pytest.mark.kafka


@pytest.fixture
def guard(secured: LocalKafka) -> Iterator[Secured]:
    assert secured.secured is not None
    return secured.secured


def expect_refusal(address: str, **settings: Any) -> SluiceError:
    with closing(KafkaCluster(KafkaAddress(address, settings))) as cluster, pytest.raises(SluiceError) as caught:
        cluster.cluster_id()
    print(f"\n{type(caught.value).__name__}: {caught.value}")
    return caught.value


def test_wrong_password_is_reported(secured: LocalKafka) -> None:
    error = expect_refusal(secured.bootstrap, **secured.client(USER) | {"sasl_plain_password": "guessed"})
    assert isinstance(error, NotAuthorized)
    assert "check the user's name and password" in error.remedy
    assert "guessed" not in str(error)


def test_disabled_sasl_mechanism_is_reported(secured: LocalKafka) -> None:
    error = expect_refusal(secured.bootstrap, **secured.client(USER) | {"sasl_mechanism": "SCRAM-SHA-256"})
    assert isinstance(error, NotAuthorized)
    assert "set `sasl_mechanism`" in error.remedy


def test_unknown_ca_is_reported(secured: LocalKafka, tmp_path: Path) -> None:
    stranger = Secured(tmp_path / "secure")
    stranger.prepare([], "")
    error = expect_refusal(secured.bootstrap, **secured.client(USER) | {"ssl_cafile": str(stranger.ca)})
    assert isinstance(error, KafkaUnavailable)
    assert "set `ssl_cafile`" in error.remedy


def test_missing_client_certificate_is_reported(secured: LocalKafka, guard: Secured) -> None:
    error = expect_refusal(secured.certificate_bootstrap, security_protocol="SSL", ssl_cafile=str(guard.ca))
    assert isinstance(error, NotAuthorized)
    assert "this listener asks for a certificate: set `ssl_certfile`" in error.remedy


def test_client_certificate_of_other_ca_is_reported(secured: LocalKafka, guard: Secured, tmp_path: Path) -> None:
    stranger = Secured(tmp_path / "secure")
    stranger.prepare([], "")
    settings = stranger.client(USER, by_certificate=True) | {"ssl_cafile": str(guard.ca)}
    error = expect_refusal(secured.certificate_bootstrap, **settings)
    assert isinstance(error, NotAuthorized)
    assert "signed by a CA that is in the brokers' truststore" in error.remedy


def test_expired_client_certificate_is_reported(secured: LocalKafka, guard: Secured) -> None:
    guard.issue_user("late", lifetime=timedelta(hours=-1))
    error = expect_refusal(secured.certificate_bootstrap, **guard.client("late", by_certificate=True))
    assert isinstance(error, NotAuthorized)
    assert "it expired on" in error.remedy


def test_expired_or_mismatched_broker_certificate_is_reported(secured: LocalKafka, guard: Secured) -> None:
    """Only the listener for passwords gets the certificates: brokers still reach each other."""
    short = guard.issue_broker(1, lifetime=timedelta(seconds=15), name="short.pem")
    elsewhere = guard.issue_broker(1, hosts=["kafka.example"], name="elsewhere.pem")
    try:
        secured.reload_certificate(1, elsewhere, ["sasl_ssl"])
        error = expect_refusal(secured.bootstrap, **secured.client(USER))
        assert isinstance(error, KafkaUnavailable)
        assert "advertised.listeners as their certificates" in error.remedy
        secured.reload_certificate(1, short, ["sasl_ssl"])
        time.sleep(16)
        error = expect_refusal(secured.bootstrap, **secured.client(USER))
        assert isinstance(error, KafkaUnavailable)
        assert "renew the brokers' certificates" in error.remedy
    finally:
        secured.reload_certificate(1, guard.broker_file(1), ["sasl_ssl"])
    with closing(KafkaCluster(KafkaAddress(secured.bootstrap, secured.client(ADMIN)))) as cluster:
        assert cluster.cluster_id()


def test_plaintext_connection_to_tls_listener_is_reported(secured: LocalKafka) -> None:
    error = expect_refusal(secured.bootstrap, bootstrap_timeout_ms=500)
    assert isinstance(error, KafkaUnavailable)
    assert "`security_protocol`" in error.remedy
