"""How to reach a cluster: a feed's settings as keywords for the connections in `connections`.

Promises: every bound that matters (frame size, back-off, timeouts) is set here explicitly, since kafka-python's clients
differ in their defaults. Secrets pass through to the connection and never into a repr.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sluice.pipelines.errors import FeedError
from sluice.pipelines.feed.kafka_section import CLIENT_ID
from sluice.pipelines.feed.rights import Grantee, principal_of

_SHOWN = ("security_protocol", "sasl_mechanism", "client_id", "client_dns_lookup", "ssl_check_hostname")
FILES = ("ssl_cafile", "ssl_certfile", "ssl_keyfile", "ssl_crlfile")


class KafkaAccess(Protocol):
    """Settings of a feed's Kafka that the resources need (implemented by `feed.kafka_section.KafkaSettings`)."""

    @property
    def bootstrap(self) -> str:
        """`host:port,host:port`."""
        ...

    def client_settings(self) -> dict[str, Any]:
        """Return kafka-python's settings for security, timeouts and back-off, with secrets in plain text."""
        ...


@dataclass(frozen=True)
class KafkaAddress:
    """An address and kafka-python's client settings, without a feed. Pickles whole; its repr masks secrets."""

    bootstrap: str
    client: Mapping[str, Any] = field(default_factory=dict)

    def client_settings(self) -> dict[str, Any]:
        return dict(self.client)

    def __repr__(self) -> str:
        settings = {k: v if k in _SHOWN or k.endswith(("_ms", "_bytes")) else "***" for k, v in self.client.items()}
        return f"KafkaAddress({self.bootstrap!r}, {settings})"


@dataclass(frozen=True)
class Connecting:
    """Settings with which `connections` opens connections. Times in seconds; `options` are kafka-python's keywords,
    with secrets in plain text."""

    bootstrap: str
    options: dict[str, Any] = field(repr=False)
    bootstrap_seconds: float
    request_seconds: float

    @property
    def client_id(self) -> str:
        return str(self.options["client_id"])

    @property
    def grantee(self) -> Grantee:
        """Our identity at the brokers, for those who grant rights."""
        return Grantee(principal_of(self.options), self.bootstrap)


def connecting(access: KafkaAccess, answer_bytes: int) -> Connecting:
    """Return the settings of `access` with our own bounds; `answer_bytes`: the largest answer that a broker may
    send. Raises FeedError if a file of theirs is missing."""
    client = access.client_settings()
    for name in FILES:
        if (path := client.get(name)) and not os.path.isfile(path):
            raise FeedError(f"kafka.{name}: {path} is no file", remedy="write or mount it, or correct the path")
    options = {
        "client_id": CLIENT_ID,
        "request_timeout_ms": 30_000,
        "reconnect_backoff_ms": 50,
        "reconnect_backoff_max_ms": 1_000,
        "socket_connection_setup_timeout_ms": 5_000,
        "socket_connection_setup_timeout_max_ms": 10_000,
        **client,
        "bootstrap_servers": access.bootstrap.split(","),
        "receive_message_max_bytes": answer_bytes,
        # Requests of different purposes share a connection; each purpose bounds its own requests in flight.
        "max_in_flight_requests_per_connection": 1_000,
        "socket_options": _socket_options(client),
    }
    return Connecting(
        bootstrap=access.bootstrap,
        options=options,
        bootstrap_seconds=options.get("bootstrap_timeout_ms", 10_000) / 1000,
        request_seconds=options["request_timeout_ms"] / 1000,
    )


def _socket_options(client: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, option in (("receive_buffer_bytes", socket.SO_RCVBUF), ("send_buffer_bytes", socket.SO_SNDBUF)):
        if name in client:
            options.append((socket.SOL_SOCKET, option, client[name]))
    return options
