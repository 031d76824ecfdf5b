"""The choice of a broker and the errors for those that do not answer, with fake brokers that die and fall silent."""

from __future__ import annotations

import gc
import socket
import ssl
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
from kafka.protocol.metadata import ApiVersionsRequest, ApiVersionsResponse, MetadataRequest, MetadataResponse

from sluice.pipelines.errors import FeedError, KafkaUnavailable, NotAuthorized, SluiceError
from sluice.pipelines.feed.kafka_section import KafkaSettings
from sluice.pipelines.feed.rights import Grantee
from sluice.resources.kafka.cluster.cluster import KafkaCluster
from sluice.resources.kafka.connection import connections
from sluice.resources.kafka.connection.connection_settings import KafkaAddress
from sluice.resources.kafka.connection.connections import Wire
from sluice.resources.kafka.protocol.kafka_errors import Untrusted, explain
from sluice.resources.local import events
from tests.resources.kafka.proxy import Proxy, _read_frames, _write_certificate

_VERSIONS = {ApiVersionsRequest.API_KEY: 3, MetadataRequest.API_KEY: 12}
MEMBERS = (1, 2, 3)


class StandIn:
    """A fake broker that answers ApiVersions and Metadata; `ports`: the ports of its cluster's brokers."""

    def __init__(self, ports: dict[int, int]) -> None:
        self._ports = ports
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._server.getsockname()
        self.requests = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client:
            for frame in _read_frames(client):
                key, _, correlation = struct.unpack_from(">hhi", frame, 4)
                reply = struct.pack(">i", correlation) + self._answer(key)
                client.sendall(struct.pack(">i", len(reply)) + reply)

    def _answer(self, key: int) -> bytes:
        version = _VERSIONS[key]
        if key == ApiVersionsRequest.API_KEY:
            versions = [
                ApiVersionsResponse.ApiVersion(api_key=k, min_version=0, max_version=v) for k, v in _VERSIONS.items()
            ]
            return bytes(
                ApiVersionsResponse(version=version, error_code=0, api_keys=versions, throttle_time_ms=0).encode()
            )
        self.requests += 1
        broker = MetadataResponse.MetadataResponseBroker
        brokers = [broker(node_id=n, host="127.0.0.1", port=port, rack=None) for n, port in self._ports.items()]
        response = MetadataResponse(
            version=version, throttle_time_ms=0, brokers=brokers, cluster_id="stand-in", controller_id=1, topics=[]
        )
        return b"\x00" + bytes(response.encode())


@pytest.fixture
def brokers(tmp_path) -> Iterator[dict[int, Proxy]]:
    """Three fake brokers of one cluster, each behind a proxy that can cut or hold its connections."""
    ports: dict[int, int] = {}
    with ExitStack() as stack:
        stand_ins = {n: stack.enter_context(closing(StandIn(ports))) for n in MEMBERS}
        proxies = {
            n: stack.enter_context(closing(Proxy(tmp_path, lambda at=one.address: at))) for n, one in stand_ins.items()
        }
        ports |= {n: proxy.port for n, proxy in proxies.items()}
        yield proxies


@contextmanager
def open_wire(brokers: dict[int, Proxy], **client: int) -> Iterator[Wire]:
    with closing(Wire(make_address(brokers, **client))) as link:
        yield link


def make_address(brokers: dict[int, Proxy], **client: int) -> KafkaAddress:
    return KafkaAddress(",".join(f"127.0.0.1:{proxy.port}" for proxy in brokers.values()), client)


def ask(wire: Wire) -> str:
    return wire.run("asking", wire.layout, ()).cluster_id


def test_request_to_any_broker_falls_back_when_first_is_down(brokers):
    """Metadata lists a dead broker until its session has ended."""
    brokers[2].cut()
    for _ in range(12):
        with open_wire(brokers) as link:
            assert [ask(link) for _ in range(3)] == ["stand-in"] * 3


def test_request_to_any_broker_falls_back_when_two_are_silent(brokers):
    with open_wire(brokers, request_timeout_ms=1500) as link:
        for _ in range(9):
            ask(link)
        brokers[1].hold()
        brokers[2].hold()
        assert [ask(link) for _ in range(5)] == ["stand-in"] * 5


def test_slow_broker_is_not_abandoned(brokers):
    """Each answer takes longer than the time after which a second broker is asked as well."""
    with open_wire(brokers, request_timeout_ms=3000) as link:
        ask(link)
        for proxy in brokers.values():
            proxy.delay = 1.3
        assert ask(link) == "stand-in"


def test_error_names_each_unreachable_broker_and_its_cause(brokers):
    with open_wire(
        brokers, request_timeout_ms=900, socket_connection_setup_timeout_ms=300, bootstrap_timeout_ms=300
    ) as link:
        ask(link)
        for n in (1, 2):
            brokers[n].cut()
            brokers[n].close()
        brokers[3].hold()
        with pytest.raises(KafkaUnavailable, match="no broker answers") as caught:
            ask(link)
        for n, proxy in brokers.items():
            assert f"broker {n} at 127.0.0.1:{proxy.port}: " in caught.value.message
        assert "connection refused" in caught.value.message
        assert "did not answer in time" in caught.value.message


def test_moved_brokers_are_rediscovered_through_bootstrap_addresses(tmp_path):
    """KIP-899: all known brokers are gone; the one at the bootstrap address knows others."""
    ports: dict[int, int] = {}
    with (
        closing(StandIn(ports)) as entrance,
        closing(StandIn(ports)) as new,
        closing(Proxy(tmp_path, lambda: entrance.address)) as old,
        closing(Wire(KafkaAddress(f"127.0.0.1:{entrance.address[1]}"))) as link,
    ):
        ports[7] = old.port
        ask(link)
        old.cut()
        del ports[7]
        ports[8] = new.address[1]
        with pytest.raises(KafkaUnavailable, match="broker 7"):
            ask(link)
        assert ask(link) == "stand-in"
        assert new.requests == 1


def test_request_waits_for_restart_of_all_brokers(brokers):
    with closing(KafkaCluster(make_address(brokers))) as cluster:
        cluster.cluster_id()
        for proxy in brokers.values():
            proxy.cut()
        again = threading.Timer(1, lambda: [proxy.heal() for proxy in brokers.values()])
        again.start()
        assert cluster.cluster_id() == "stand-in"
        again.join()


def test_unreachable_address_does_not_block_other_addresses(brokers):
    brokers[1].cut()
    brokers[2].hold()
    with open_wire(brokers, bootstrap_timeout_ms=900, socket_connection_setup_timeout_ms=500) as link:
        assert ask(link) == "stand-in"


def test_request_does_not_wait_for_endless_throttle(brokers, monkeypatch):
    """A byte rate of 1 makes a broker demand a pause of days."""
    monkeypatch.setattr(connections, "MOST_THROTTLED", 0.2)
    with open_wire(brokers) as link:
        ask(link)
        link.run("connecting", link.reach, 1)
        link._manager._conns[1].pause("throttle")
        with pytest.raises(KafkaUnavailable, match=r"broker 1 .*THROTTLING"):
            link.run("asking", link.layout, (), 1)


def test_error_of_request_to_chosen_broker_names_the_broker(brokers):
    with open_wire(brokers, request_timeout_ms=300) as link:
        ask(link)
        brokers[2].cut()
        brokers[2].close()
        brokers[3].hold()
        lost = "(connection refused|closed the connection)"
        for n, why in ((2, lost), (2, "connection refused"), (3, "did not answer in time")):
            with pytest.raises(KafkaUnavailable, match=f"broker {n} at 127.0.0.1:{brokers[n].port}: .*{why}"):
                link.run("asking", link.layout, (), n)
        with pytest.raises(KafkaUnavailable, match="broker 9 is not there"):
            link.run("asking", link.layout, (), 9)


# -- sockets


@pytest.fixture
def unclosed() -> Iterator[list[str]]:
    """Fails the test if a socket was garbage-collected without being closed."""
    leaks: list[str] = []
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        yield leaks
        gc.collect()
        leaks += [str(w.message) for w in caught if "socket" in str(w.message)]
        assert leaks == []


def _expect_failure(address: KafkaAddress, kind: type[SluiceError], says: str) -> None:
    with closing(KafkaCluster(address)) as cluster, pytest.raises(kind, match=says):
        cluster.cluster_id()


@pytest.mark.usefixtures("unclosed")
def test_a_refused_connection_leaves_no_socket_open():
    _expect_failure(
        KafkaAddress(f"127.0.0.1:{_find_closed_port()}", {"bootstrap_timeout_ms": 300}), KafkaUnavailable, "refused"
    )


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_invalid_host_name_does_not_block_other_addresses(brokers, host):
    port = brokers[1].port
    with closing(Wire(KafkaAddress(",".join([f"{host}:{port}"] * 9 + [f"127.0.0.1:{port}"])))) as link:
        assert ask(link) == "stand-in"


@pytest.mark.usefixtures("unclosed")
def test_invalid_address_is_an_error_each_time():
    with closing(KafkaCluster(KafkaAddress("localhost:port"))) as cluster:
        for _ in range(2):
            with pytest.raises(FeedError, match="cannot use"):
                cluster.cluster_id()


@pytest.mark.usefixtures("unclosed")
def test_refused_producer_leaves_no_socket_open(monkeypatch):
    monkeypatch.setattr(events, "_PATIENCE", {"request_timeout_ms": 500, "bootstrap_timeout_ms": 500})
    kafka, mix = KafkaSettings(bootstrap=f"127.0.0.1:{_find_closed_port()}"), events.Mix(1)
    with pytest.raises(KafkaUnavailable):
        events.topics_of(kafka)
    with pytest.raises(KafkaUnavailable):
        events.send(kafka, events.orders(mix, 1, 0, 1), mix, events.SendOptions(("orders",)))


def _find_closed_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return server.getsockname()[1]


@pytest.mark.usefixtures("unclosed")
@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:{}", "http://127.0.0.1:{}"])
def test_a_refusing_proxy_leaves_no_socket_open(proxy: str):
    settings = {"bootstrap_timeout_ms": 300, "proxy_url": proxy.format(_find_closed_port())}
    _expect_failure(KafkaAddress("127.0.0.1:9", settings), KafkaUnavailable, "refused")


@pytest.mark.usefixtures("unclosed")
def test_invalid_certificate_file_leaves_no_socket_open(tmp_path):
    (tmp_path / "ca.pem").write_text("nothing of the kind")
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        settings = {"security_protocol": "SSL", "ssl_cafile": str(tmp_path / "ca.pem")}
        _expect_failure(
            KafkaAddress(f"127.0.0.1:{server.getsockname()[1]}", settings), FeedError, "no start line|NO_CERT|X509"
        )


@pytest.mark.usefixtures("unclosed")
@pytest.mark.parametrize("protocol", ["SSL", "PLAINTEXT"])
def test_interrupted_connect_leaves_no_socket_open(protocol: str):
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        settings = {"security_protocol": protocol, "bootstrap_timeout_ms": 60_000}
        cluster = KafkaCluster(KafkaAddress(f"127.0.0.1:{server.getsockname()[1]}", settings))
        asking = threading.Thread(target=_ask, args=(cluster,))
        asking.start()
        client, _ = server.accept()  # it has connected, and gets no answer
        with client:
            client.recv(1)
            cluster.close()
            asking.join()


def _ask(cluster: KafkaCluster) -> None:
    with suppress(KafkaUnavailable):
        cluster.cluster_id()


# -- certificates


@pytest.mark.usefixtures("unclosed")
@pytest.mark.parametrize(
    ("host", "days", "trusted", "says", "remedy"),
    [
        ("127.0.0.1", 1, False, "self-signed certificate", "set `ssl_cafile` in the feed's `kafka:` section"),
        ("127.0.0.1", -1, True, "certificate has expired", "renew the brokers' certificates"),
        ("127.0.0.2", 1, True, "IP address mismatch", "as their certificates do"),
    ],
)
def test_rejected_broker_certificate_error_has_a_remedy(
    tmp_path: Path, host: str, days: int, trusted: bool, says: str, remedy: str
):
    authority = tmp_path / "ca.pem"
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(_write_certificate(tmp_path, authority, host, days))
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        threading.Thread(target=_accept_handshakes, args=(server, tls), daemon=True).start()
        where = f"127.0.0.1:{server.getsockname()[1]}"
        cafile = {"ssl_cafile": str(authority)} if trusted else {}
        with (
            closing(KafkaCluster(KafkaAddress(where, {"security_protocol": "SSL", **cafile}))) as cluster,
            pytest.raises(KafkaUnavailable, match=says) as caught,
        ):
            cluster.cluster_id()
        assert remedy in caught.value.remedy
        assert "listens" not in caught.value.remedy
        server.shutdown(socket.SHUT_RDWR)


def _accept_handshakes(server: socket.socket, tls: ssl.SSLContext) -> None:
    with suppress(OSError):
        while True:
            client, _ = server.accept()
            with client, suppress(OSError), tls.wrap_socket(client, server_side=True) as secure:
                secure.recv(1)


def test_refused_client_certificate_error_points_to_ssl_certfile():
    error = explain(Untrusted("the broker asks for a certificate"), Grantee("User:u", "k:9093"), "asking")
    assert isinstance(error, NotAuthorized)
    assert "ssl_certfile" in error.remedy
