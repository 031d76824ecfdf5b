"""kafka-python's connections with our own receive path: bytes go from the socket into their frame, once.

kafka-python reads 4 KiB at a time and copies each byte five times before its caller sees it; at the rates of a fetch
that costs more than decoding. Promises: an answer of any size is received in place; records in it are views; an invalid
answer (length, order, content) closes the connection. Every socket is closed, also one that never became a connection,
which kafka-python leaves to the garbage collector.
"""

from __future__ import annotations

import io
import re
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from kafka import errors as kafka_errors
from kafka.errors import KafkaError
from kafka.net.compat import KafkaNetClient
from kafka.net.inet import KafkaNetSocket
from kafka.net.manager import KafkaConnectionManager
from kafka.net.selector import NetworkSelector
from kafka.net.transport import KafkaSSLTransport, KafkaTCPTransport

from sluice.resources.kafka.connection import sasl  # noqa: F401 - registers our logins
from sluice.resources.kafka.protocol import messages
from sluice.resources.kafka.protocol.kafka_errors import Untrusted

T = TypeVar("T")
_HEADER_BYTES = 64  # more than any response header holds
_SMALL = 64 << 10


class Closing(KafkaConnectionManager):  # type: ignore[misc]
    """kafka-python's connection manager, connecting our way."""

    plain, secure = KafkaTCPTransport, KafkaSSLTransport

    def __init__(self, net: Any, **configs: Any) -> None:
        super().__init__(net, **configs)
        self._transports: list[Any] = []

    async def _build_transport(self, node: Any, timeout_at: float | None = None) -> Any:
        sock = await self._connect_socket(node, timeout_at)
        with _closed_unless_done(sock):
            transport = self._make_transport(sock, node.host)  # TLS wraps it in another socket
        with _closed_unless_done(transport._sock):
            await _shake_hands(transport, self.config["ssl_certfile"] or "")
        self._transports = [*self._open(), transport]
        return transport

    async def _connect_socket(self, node: Any, timeout_at: float | None) -> Any:
        """Return a socket to the first of the node's addresses that accepts. Raises KafkaConnectionError."""
        opened: Any = KafkaNetSocket(self.config["proxy_url"])
        failed = kafka_errors.KafkaConnectionError("DNS Resolution failure")
        try:
            resolved = opened.dns_lookup(node.host, node.port)
        except UnicodeError:  # no host can have this name
            raise failed from None
        for family, kind, protocol, _, address in resolved:
            sock = opened.socket(family, kind, protocol)
            try:
                with _closed_unless_done(sock):
                    sock.setblocking(False)
                    for option in self.config["socket_options"]:
                        sock.setsockopt(*option)
                    return await opened.sock_connect(self._net, sock, address, timeout_at=timeout_at)
            except kafka_errors.KafkaTimeoutError:
                raise kafka_errors.KafkaConnectionError("Connection timed out") from None
            except kafka_errors.KafkaConnectionError as error:
                failed = error
            except OSError as error:
                failed = kafka_errors.KafkaConnectionError(f"unable to connect: {error}")
        raise failed

    def _make_transport(self, sock: Any, host: str) -> Any:
        if not self.ssl_enabled:
            return self.plain(self._net, sock, host=host)
        settings = {key: value for key, value in self.config.items() if key.startswith("ssl_")}
        return self.secure(self._net, sock, host=host, **settings)

    def abandon(self) -> None:
        """Close every connection at once, with writes pending or not; pending requests fail."""
        for transport in self._open():
            transport._close()

    def close_sockets(self) -> None:
        """Close the sockets of connections with unsent data, once the loop has ended."""
        for transport in self._open():
            transport._sock.close()
            transport._sock = None

    def _open(self) -> list[Any]:
        return [transport for transport in self._transports if transport._sock is not None]


@contextmanager
def _closed_unless_done(sock: Any) -> Iterator[None]:
    """Close the socket on any error, also when everything ends while a coroutine waits inside the block."""
    try:
        yield
    except BaseException:
        sock.close()
        raise


async def _shake_hands(transport: Any, certificate: str) -> None:
    """Do the TLS handshake, if there is one. Raises Untrusted, KafkaConnectionError."""
    try:
        await transport.handshake()
    except (OSError, ValueError, KafkaError) as error:
        raise _meaning(error, certificate, "Handshake failed: ") from None


def _meaning(error: Exception, certificate: str, doing: str = "") -> KafkaError:
    """Return the meaning of a socket's error, with or without TLS. `certificate`: our own file, if any."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Untrusted(f"{doing}{error}", error.verify_code)
    alert = (error.reason or "") if isinstance(error, ssl.SSLError) else ""
    if re.search("ALERT.*(CERTIFICATE|UNKNOWN_CA)", alert):
        what = (
            "refuses this client's certificate" if certificate else "asks for a certificate, and this client has none"
        )
        return Untrusted(f"the broker {what}: {error}", certificate=certificate)
    return kafka_errors.KafkaConnectionError(f"{doing}{error}")


class _Receiving:
    """A mixin that replaces the reading of kafka-python's transports."""

    _net: Any
    _sock: Any
    _protocol: Any
    _read: bool
    _closed: bool

    async def _read_from_sock(self) -> None:
        connection = self._protocol
        connection.parser.receive_bytes = _ResponseParser(connection.parser)
        frame = _ResponseFrame(connection.config["receive_message_max_bytes"])
        while self._read and not self._closed:
            await self._net.wait_read(self._sock)
            try:
                while self._next_frame(connection, frame):
                    # The waiting task goes first: a broker that refuses a login gives its reason, then hangs up.
                    await self._net.sleep(0)
            except KafkaError as error:
                self.abort(error=error)  # type: ignore[attr-defined]
            except OSError as error:
                certificate = getattr(self, "ssl_config", {}).get("ssl_certfile") or ""
                self.abort(error=_meaning(error, certificate))  # type: ignore[attr-defined]

    def _next_frame(self, connection: Any, frame: _ResponseFrame) -> bool:
        """Receive up to the end of a frame and hand that over; return False when the socket is empty."""
        while not self._closed:
            try:
                received = self._sock.recv_into(frame.room)
            except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            if not received:
                raise kafka_errors.KafkaConnectionError("the broker closed the connection")
            self.last_read = time.monotonic()
            if (response := frame.advance(received)) is not None:
                connection.data_received(response)
                return True
        return False


class _Transport(_Receiving, KafkaTCPTransport):  # type: ignore[misc]
    pass


class _TLSTransport(_Receiving, KafkaSSLTransport):  # type: ignore[misc]
    pass


class Manager(Closing):
    """A `Closing` whose connections receive into their response's own buffer."""

    plain, secure = _Transport, _TLSTransport


class ClosingClient(KafkaNetClient):  # type: ignore[misc]
    """The network client of kafka-python's own clients, connecting our way. Pass it as their `kafka_client`."""

    def __init__(self, **configs: Any) -> None:
        net = NetworkSelector(**configs)
        super().__init__(net, Closing(net, **configs), **configs)

    def close(self, node_id: int | str | None = None) -> None:
        super().close(node_id)
        if node_id is None:
            self._manager.close_sockets()


def client_of(kind: Callable[..., T], **settings: Any) -> T:
    """Return one of kafka-python's own clients, connecting our way.

    One that finds no broker raises, and leaves thread and sockets behind: they are closed here.
    """
    clients: list[ClosingClient] = []

    def behind(**configs: Any) -> ClosingClient:
        clients.append(ClosingClient(**configs))
        return clients[0]

    try:
        return kind(**settings, kafka_client=behind)
    except BaseException:
        for client in clients:
            client.close()
        raise


class _ResponseFrame:
    """A response being received: four bytes of length, then that many bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._start()

    def _start(self) -> None:
        self._head = bytearray(4)
        self._view = memoryview(self._head)
        self._at = 0
        self._in_body = False

    @property
    def room(self) -> memoryview:
        return self._view[self._at :]

    def advance(self, count: int) -> memoryview | None:
        """Record `count` bytes written into `room`; return the frame if it is complete."""
        self._at += count
        if self._at < len(self._view):
            return None
        if self._in_body:
            response = self._view
            self._start()
            return response
        size = int.from_bytes(self._head, "big", signed=True)
        if not 4 <= size <= self._limit:
            raise kafka_errors.InvalidReceiveError(f"what answers speaks no Kafka, or sends {size:,} bytes at once")
        self._view, self._at, self._in_body = _make_buffer(size), 0, True
        return None


def _make_buffer(size: int) -> memoryview:
    if size < _SMALL:
        return memoryview(bytearray(size))
    import numpy as np  # late: a process that fetches no records needs none

    # Not zeroed, unlike a bytearray: every byte is about to be written.
    return np.empty(size, np.uint8).data


class _ResponseParser:
    """Replaces kafka-python's `receive_bytes`: a whole frame in, (correlation id, response) out."""

    def __init__(self, parser: Any) -> None:
        self._requests = parser.in_flight_requests

    def __call__(self, frame: memoryview) -> list[tuple[int, Any]]:
        if not self._requests:
            raise kafka_errors.CorrelationIdError("a response without a request")
        request = self._requests.popleft()
        response = request.get_response_class()
        head = io.BytesIO(frame[:_HEADER_BYTES])
        correlation_id = response.parse_header(head).correlation_id
        if correlation_id != request.correlation_id:
            raise kafka_errors.CorrelationIdError("answers out of order")
        return [(correlation_id, self._body(request, response, frame, head.tell()))]

    def _body(self, request: Any, response: Any, frame: memoryview, at: int) -> Any:
        if request.request_api_key == messages.FETCH_API:
            return messages.read_fetch(frame, at, request.request_api_version)
        try:
            return response.decode(frame[at:])
        except Exception as error:  # generated code: struct.error, IndexError, UnicodeDecodeError, …
            raise kafka_errors.KafkaProtocolError("an answer that cannot be read") from error
