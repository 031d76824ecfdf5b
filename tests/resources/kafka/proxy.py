"""A proxy between clients and one broker that loses, delays, holds or cuts; it speaks TLS to clients that do."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

FETCH, LIST_OFFSETS, METADATA, OFFSET_COMMIT, JOIN_GROUP, LEAVE_GROUP, SYNC_GROUP = 1, 2, 3, 8, 11, 13, 14
API_VERSIONS, OFFSET_FOR_LEADER_EPOCH, DESCRIBE_CONFIGS, DESCRIBE_LOG_DIRS = 18, 23, 32, 35
END_TXN, TXN_OFFSET_COMMIT = 26, 28
_TLS_HANDSHAKE = 0x16


class Proxy:
    """A proxy on loopback. `lose`: the number of requests, by API key, whose answers get lost.

    A lost answer: the broker gets the request, the client gets no answer, and the connection is cut. `delay`: seconds
    before each answer is passed on. `hold` keeps connections but stops all traffic, or only requests with the API keys
    `only` (of one `client` id; with `committed`, only fetches of committed records), before the broker gets them.
    `held` lists those. `mute` passes all requests, held ones included, and holds the answers. `cut` ends all
    connections and accepts no new one. `requests` counts requests by API key.
    """

    def __init__(self, folder: Path, broker: Callable[[], tuple[str, int]]) -> None:
        self.lose: dict[int, int] = {}
        self.requests: Counter[int] = Counter()
        self.delay = 0.0
        self._flowing, self._answering, self._refuses = threading.Event(), threading.Event(), False
        self._flowing.set()
        self._answering.set()
        self._only: frozenset[int] = frozenset()
        self._client, self._committed = b"", False
        self._held: list[int] = []
        self._clients: set[socket.socket] = set()
        self.certificate = folder / "ca.pem"
        self._broker = broker
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(_write_certificate(folder, self.certificate))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.heal()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def hold(self, *only: int, client: str = "", committed: bool = False) -> None:
        self._only, self._client, self._committed = frozenset(only), client.encode(), committed
        self._flowing.clear()

    def mute(self) -> None:
        self._answering.clear()
        self._flowing.set()

    @property
    def held(self) -> tuple[int, ...]:
        """The API keys of the requests that are held now."""
        return tuple(self._held)

    def cut(self) -> None:
        self._refuses = True
        for client in list(self._clients):
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def heal(self) -> None:
        """Pass on everything again, including held requests."""
        self.lose, self.delay, self._refuses = {}, 0.0, False
        self._flowing.set()
        self._answering.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                if self._refuses:
                    client.close()
                    continue
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), closing(client), self._track_client(client):
            if client.recv(1, socket.MSG_PEEK)[:1] == bytes([_TLS_HANDSHAKE]):
                client = self._tls.wrap_socket(client, server_side=True)
            # One request at a time, as a broker serves a connection: the next answer belongs to it.
            with closing(client), closing(socket.create_connection(self._broker())) as broker:
                for request in _read_frames(client):
                    (key,) = struct.unpack_from(">h", request, 4)
                    self.requests[key] += 1
                    self._pass(key, request)
                    broker.sendall(request)
                    answer = next(_read_frames(broker), b"")
                    time.sleep(self.delay)
                    self._answering.wait()
                    if not self._only:
                        self._flowing.wait()
                    if lost := bool(self.lose.get(key)):
                        self.lose[key] -= 1
                    if lost or not answer:
                        return
                    client.sendall(answer)

    def _pass(self, key: int, request: bytes) -> None:
        """Wait while requests of this kind are held."""
        waits = not self._only or (key in self._only and self._client in (b"", _read_client_id(request)))
        waits &= not self._committed or key != FETCH or _reads_committed(request)
        if not self._flowing.is_set() and waits:
            self._held.append(key)
            self._flowing.wait()
            self._held.remove(key)

    @contextmanager
    def _track_client(self, client: socket.socket) -> Iterator[None]:
        self._clients.add(client)
        try:
            yield
        finally:
            self._clients.discard(client)


def _read_client_id(request: bytes) -> bytes:
    """Returns the client id in a request's header."""
    (size,) = struct.unpack_from(">h", request, 12)
    return request[14 : 14 + max(size, 0)]


def _reads_committed(request: bytes) -> bool:
    """Returns whether a fetch has the isolation level `read_committed`, in any version from 4 on (KIP-98, KIP-903)."""
    version, size = struct.unpack_from(">h4xh", request, 6)
    tags, replica = 1 if version >= 12 else 0, 4 if version < 15 else 0
    return request[14 + max(size, 0) + tags + replica + 12] == 1


def _read_frames(source: socket.socket) -> Iterator[bytes]:
    """Yield whole requests or answers, their length included."""
    while head := _read_exactly(source, 4):
        yield head + _read_exactly(source, int.from_bytes(head, "big"))


def _read_exactly(source: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        more = source.recv(min(count - len(data), 1 << 16))
        if not more:
            return b""
        data += more
    return bytes(data)


def _write_certificate(folder: Path, certificate: Path, host: str = "127.0.0.1", days: int = 1) -> Path:
    """Write a key and certificate for an IP address, valid for `days`; the certificate alone goes to `certificate`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    begin, end = now - 9 * day, now + days * day
    address: Any = x509.IPAddress(ipaddress.ip_address(host))
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), begin, end)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    both = folder / "server.pem"
    both.write_bytes(private + certificate.read_bytes())
    return both
