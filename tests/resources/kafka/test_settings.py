"""Settings and errors: default bounds, hidden secrets, and an error with a remedy for each failure."""

from __future__ import annotations

import pickle
import socket
import threading
from contextlib import closing

import pytest
from kafka import errors as kafka_errors

from sluice.pipelines import errors
from sluice.pipelines.errors import KafkaUnavailable
from sluice.pipelines.feed.rights import Grantee
from sluice.resources.kafka.cluster.cluster import KafkaCluster
from sluice.resources.kafka.connection.connection_settings import KafkaAddress, connecting
from sluice.resources.kafka.connection.connections import Wire
from sluice.resources.kafka.protocol.kafka_errors import AnswerLost, Location, explain, is_passing

SECRETS = {
    "sasl_plain_username": "ali",
    "sasl_plain_password": "sesame",
    "ssl_password": "sesame",
    "proxy_url": "socks5://ali:sesame@proxy:1080",
    "request_timeout_ms": 5000,
    "receive_buffer_bytes": 1 << 20,
}


def test_address_survives_pickling_and_masks_its_secrets():
    address = KafkaAddress("a:1,b:2", SECRETS)
    assert pickle.loads(pickle.dumps(address)) == address
    for text in (repr(address), str(address), repr(connecting(address, 1))):
        assert "sesame" not in text
        assert "ali" not in text
    assert "5000" in repr(address)


def test_every_limit_is_set_and_user_settings_win():
    plain, custom = connecting(KafkaAddress("a:1,b:2"), 7), connecting(KafkaAddress("a:1", SECRETS), 7)
    assert plain.options["bootstrap_servers"] == ["a:1", "b:2"]
    assert plain.options["receive_message_max_bytes"] == 7
    assert (plain.client_id, plain.bootstrap_seconds, plain.request_seconds) == ("sluice", 10.0, 30.0)
    assert custom.request_seconds == 5.0
    assert (socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20) in custom.options["socket_options"]


def test_missing_certificate_file_is_named():
    with pytest.raises(errors.FeedError, match=r"kafka.ssl_cafile: /nowhere/ca.pem is no file"):
        connecting(KafkaAddress("a:1", {"ssl_cafile": "/nowhere/ca.pem"}), 7)


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (
            kafka_errors.TopicAuthorizationFailedError(),
            errors.NotAuthorized,
            "grant READ on topic t to User:u: kafka",
        ),
        (kafka_errors.TransactionalIdAuthorizationFailedError(), errors.NotAuthorized, "WRITE on transactional id"),
        (kafka_errors.ClusterAuthorizationFailedError(), errors.NotAuthorized, "cluster"),
        (kafka_errors.SaslAuthenticationFailedError("no"), errors.NotAuthorized, "password"),
        (kafka_errors.IncompatibleBrokerVersion("no Metadata v10"), errors.BrokerTooOld, "2.8"),
        (kafka_errors.UnknownTopicOrPartitionError(), errors.UnknownTopic, "name"),
        (kafka_errors.ProducerFencedError(), errors.CommitFenced, "next run"),
        (kafka_errors.IllegalGenerationError(), errors.CommitFenced, "next run"),
        (kafka_errors.CorruptRecordError(), errors.CorruptBatch, "replica"),
        (kafka_errors.UnsupportedCompressionTypeError(), errors.UnsupportedBatch, "codec"),
        (kafka_errors.KafkaConnectionError("111 ECONNREFUSED"), errors.KafkaUnavailable, "connection refused"),
        (
            kafka_errors.KafkaConnectionError("[Errno 104] Connection reset by peer"),
            errors.KafkaUnavailable,
            ": Connection",
        ),
        (AnswerLost("cut"), errors.KafkaUnavailable, "reachable at host:1"),
        (FileNotFoundError(2, "No such file or directory"), errors.FeedError, "No such file"),
        (ValueError("Unable to parse proxy_url: sesame"), errors.FeedError, "proxy_url"),
    ],
)
def test_kafka_errors_map_to_sluice_errors_with_remedies(error, kind, says):
    ours = explain(error, Grantee("User:u", "host:1"), "reading t:0", Location("t", 0, 5))
    assert type(ours) is kind
    assert says in str(ours)
    assert ours.message.startswith("reading t:0: ")
    assert "host:1" in ours.message
    assert ours.remedy
    assert (ours.topic, ours.partition, ours.start) == ("t", 0, 5)
    assert "sesame" not in str(ours)


def test_sluice_errors_are_unchanged():
    ours = errors.GroupHeld("held")
    assert explain(ours, Grantee("User:u", "host:1"), "joining") is ours


def test_retriable_errors_are_distinguished_from_final_errors():
    assert is_passing(kafka_errors.NotLeaderForPartitionError)
    assert is_passing(AnswerLost())
    assert is_passing(kafka_errors.UnknownError())
    assert not is_passing(kafka_errors.TopicAuthorizationFailedError())
    assert not is_passing(kafka_errors.OffsetOutOfRangeError())


@pytest.mark.parametrize("reply", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\x00\x00\x00", b""])
def test_server_with_non_kafka_responses_is_unavailable(reply):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    client.recv(1000)
                    client.sendall(reply)

        threading.Thread(target=answer, daemon=True).start()
        address = KafkaAddress(f"127.0.0.1:{server.getsockname()[1]}", {"bootstrap_timeout_ms": 300})
        with closing(KafkaCluster(address)) as cluster, pytest.raises(KafkaUnavailable, match="no broker answers"):
            cluster.topics()
        server.shutdown(socket.SHUT_RDWR)


def test_silent_server_is_unavailable():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = KafkaAddress(f"127.0.0.1:{server.getsockname()[1]}", {"bootstrap_timeout_ms": 300})
        with closing(KafkaCluster(address)) as cluster, pytest.raises(KafkaUnavailable, match="no broker answers"):
            cluster.topics()


def test_no_connection_is_open_before_the_first_request_or_after_close():
    before = threading.active_count()
    wire = Wire(KafkaAddress("127.0.0.1:1", {"bootstrap_timeout_ms": 100}))
    assert threading.active_count() == before
    assert not wire.alive
    with pytest.raises(KafkaUnavailable):
        wire.run("asking", wire.layout, None)
    assert wire.alive
    wire.close()
    wire.close()
    assert not wire.alive
    with pytest.raises(KafkaUnavailable, match="closed"):
        wire.run("asking", wire.layout, None)
