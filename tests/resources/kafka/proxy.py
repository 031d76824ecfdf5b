"""A man in the middle between clients and one broker: passes on, loses, delays, holds or cuts; speaks TLS if asked."""

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
    """Listens on loopback. `lose` says of how many requests, by API key, the answer is to be lost.

    Such a request reaches the broker, its answer reaches nobody, and the connection is cut. `delay` seconds pass before
    each answer is given. `hold` lets nothing through either way, connections stay, or `only` requests with these API
    keys (of one `client` id), which the broker does not see yet; `held` are those that wait. `mute` lets all requests
    through, held ones included, and holds the answers. `cut` ends all and takes no new one. `seen` counts requests by
    API key.
    """

    def __init__(self, folder: Path, broker: Callable[[], tuple[str, int]]) -> None:
        self.lose: dict[int, int] = {}
        self.seen: Counter[int] = Counter()
        self.delay = 0.0
        self._flowing, self._answering, self._refuses = threading.Event(), threading.Event(), False
        self._flowing.set()
        self._answering.set()
        self._only: frozenset[int] = frozenset()
        self._client = b""
        self._held: list[int] = []
        self._clients: set[socket.socket] = set()
        self.certificate = folder / "ca.pem"
        self._broker = broker
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(_self_signed(folder, self.certificate))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.heal()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def hold(self, *only: int, client: str = "") -> None:
        self._only, self._client = frozenset(only), client.encode()
        self._flowing.clear()

    def mute(self) -> None:
        self._answering.clear()
        self._flowing.set()

    @property
    def held(self) -> tuple[int, ...]:
        """The API keys of the requests that wait at this moment."""
        return tuple(self._held)

    def cut(self) -> None:
        self._refuses = True
        for client in list(self._clients):
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def heal(self) -> None:
        """Pass on everything again, what was held included."""
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
        with suppress(OSError), closing(client), self._known(client):
            if client.recv(1, socket.MSG_PEEK)[:1] == bytes([_TLS_HANDSHAKE]):
                client = self._tls.wrap_socket(client, server_side=True)
            # One request at a time, as a broker serves a connection: which answer is whose is plain.
            with closing(client), closing(socket.create_connection(self._broker())) as broker:
                for request in _frames(client):
                    (key,) = struct.unpack_from(">h", request, 4)
                    self.seen[key] += 1
                    self._pass(key, _client(request))
                    broker.sendall(request)
                    answer = next(_frames(broker), b"")
                    time.sleep(self.delay)
                    self._answering.wait()
                    if not self._only:
                        self._flowing.wait()
                    if lost := bool(self.lose.get(key)):
                        self.lose[key] -= 1
                    if lost or not answer:
                        return
                    client.sendall(answer)

    def _pass(self, key: int, client: bytes) -> None:
        """Wait while requests of this kind are held."""
        held = not self._only or (key in self._only and self._client in (b"", client))
        if not self._flowing.is_set() and held:
            self._held.append(key)
            self._flowing.wait()
            self._held.remove(key)

    @contextmanager
    def _known(self, client: socket.socket) -> Iterator[None]:
        self._clients.add(client)
        try:
            yield
        finally:
            self._clients.discard(client)


def _client(request: bytes) -> bytes:
    """The client id in a request's header."""
    (size,) = struct.unpack_from(">h", request, 12)
    return request[14 : 14 + max(size, 0)]


def _frames(source: socket.socket) -> Iterator[bytes]:
    """Whole requests or answers, their length included."""
    while head := _exactly(source, 4):
        yield head + _exactly(source, int.from_bytes(head, "big"))


def _exactly(source: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        more = source.recv(min(count - len(data), 1 << 16))
        if not more:
            return b""
        data += more
    return bytes(data)


def _self_signed(folder: Path, certificate: Path, host: str = "127.0.0.1", days: int = 1) -> Path:
    """A file with key and certificate for an IP address that holds for so many days; the certificate alone in
    `certificate`."""
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
