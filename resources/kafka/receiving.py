"""kafka-python's connections, receiving our way: bytes go from the socket into the frame that they belong to, once.

kafka-python reads 4 KiB at a time and copies each byte five times before its caller sees it; at the rates of a fetch
that costs more than decoding. Promises: an answer of any size is received in place; records in it are views; what
cannot be an answer (length, order, content) closes the connection.
"""

from __future__ import annotations

import io
import ssl
import time
from typing import Any

import numpy as np
from kafka import errors as kafka_errors
from kafka.errors import KafkaError
from kafka.net.manager import KafkaConnectionManager
from kafka.net.transport import KafkaSSLTransport, KafkaTCPTransport

from sluice.resources.kafka import messages

_HEADER_BYTES = 64  # more than any response header holds


class Manager(KafkaConnectionManager):  # type: ignore[misc]
    """kafka-python's connections, with our way of receiving."""

    async def _build_transport(self, node: Any, timeout_at: float | None = None) -> Any:
        transport = await super()._build_transport(node, timeout_at=timeout_at)
        transport.__class__ = _TLSTransport if isinstance(transport, KafkaSSLTransport) else _Transport
        return transport


class _Receiving:
    """Mixed into kafka-python's transports, in place of its reading."""

    _net: Any
    _sock: Any
    _protocol: Any
    _read: bool
    _closed: bool

    async def _read_from_sock(self) -> None:
        connection = self._protocol
        connection.parser.receive_bytes = _Parser(connection.parser)
        frame = _Frame(connection.config["receive_message_max_bytes"])
        while self._read and not self._closed:
            await self._net.wait_read(self._sock)
            try:
                while self._next_frame(connection, frame):
                    # Whoever waited for it goes first: a broker that refuses a login says why, then hangs up.
                    await self._net.sleep(0)
            except KafkaError as error:
                self.abort(error=error)  # type: ignore[attr-defined]
            except OSError as error:
                self.abort(error=kafka_errors.KafkaConnectionError(str(error)))  # type: ignore[attr-defined]

    def _next_frame(self, connection: Any, frame: _Frame) -> bool:
        """Take what the socket holds, up to the end of a frame, and hand that over; false when the socket is empty."""
        while not self._closed:
            try:
                received = self._sock.recv_into(frame.room)
            except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            if not received:
                raise kafka_errors.KafkaConnectionError("the broker closed the connection")
            self.last_read = time.monotonic()
            if (whole := frame.filled(received)) is not None:
                connection.data_received(whole)
                return True
        return False


class _Transport(_Receiving, KafkaTCPTransport):  # type: ignore[misc]
    pass


class _TLSTransport(_Receiving, KafkaSSLTransport):  # type: ignore[misc]
    pass


class _Frame:
    """A response under way: four bytes of length, then as many as they say."""

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

    def filled(self, count: int) -> memoryview | None:
        """`count` bytes were written into `room`; the frame when that was its end."""
        self._at += count
        if self._at < len(self._view):
            return None
        if self._in_body:
            whole = self._view
            self._start()
            return whole
        size = int.from_bytes(self._head, "big", signed=True)
        if not 4 <= size <= self._limit:
            raise kafka_errors.InvalidReceiveError(f"what answers speaks no Kafka, or sends {size:,} bytes at once")
        # Not zeroed, unlike a bytearray: every byte is about to be written.
        self._view, self._at, self._in_body = np.empty(size, np.uint8).data, 0, True
        return None


class _Parser:
    """In place of kafka-python's `receive_bytes`: a whole frame in, (correlation id, response) out."""

    def __init__(self, parser: Any) -> None:
        self._requests = parser.in_flight_requests

    def __call__(self, frame: memoryview) -> list[tuple[int, Any]]:
        if not self._requests:
            raise kafka_errors.CorrelationIdError("an answer that nobody asked for")
        asked = self._requests.popleft()
        response = asked.get_response_class()
        head = io.BytesIO(frame[:_HEADER_BYTES])
        correlation_id = response.parse_header(head).correlation_id
        if correlation_id != asked.correlation_id:
            raise kafka_errors.CorrelationIdError("answers out of order")
        return [(correlation_id, self._body(asked, response, frame, head.tell()))]

    def _body(self, asked: Any, response: Any, frame: memoryview, at: int) -> Any:
        if asked.request_api_key == messages.FETCH_API:
            return messages.read_fetch(frame, at, asked.request_api_version)
        try:
            return response.decode(frame[at:])
        except Exception as error:  # generated code: struct.error, IndexError, UnicodeDecodeError, …
            raise kafka_errors.KafkaProtocolError("an answer that cannot be read") from error
