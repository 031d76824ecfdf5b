"""OAuth tokens by client credentials: an OIDC endpoint signs them, and a real broker verifies them with its keys.

The broker also takes passwords by PLAIN and SCRAM-SHA-256; the other brokers of the tests do not.
"""

from __future__ import annotations

import base64
import json
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from kafka import KafkaAdminClient
from kafka.admin import ScramMechanism, UserScramCredentialUpsertion
from kafka.net.sasl.oauth import AbstractTokenProvider

from sluice.pipelines.errors import FeedError, KafkaUnavailable, NotAuthorized, SluiceError
from sluice.pipelines.feed.kafka_section import KafkaSettings
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.feed.rights import rights_of
from sluice.resources.kafka.cluster.cluster import KafkaCluster
from sluice.resources.kafka.connection import oauth
from sluice.resources.kafka.connection.oauth import ClientCredentials
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.secured import Authority, grant
from tests.integration.support import commit_feed, read_rows, run
from tests.resources.kafka.tools import produce

SECRET = "s3same+/="
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"


def _encode_base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class Issuer:
    """A small OIDC provider: `/token` and `/keys`. `life`: a token's life in seconds; `broken`: its kind of fault."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.key = rsa.generate_private_key(65537, 2048)
        self.life, self.broken, self.issued, self.requests = 300, "", 0, 0
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.send(self, 200, {"keys": [issuer.export_key()]})

            def do_POST(self) -> None:
                form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                issuer.send(self, *issuer.answer(self.headers["Authorization"], form))

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.address = f"http{'s' if tls else ''}://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    @staticmethod
    def send(handler: BaseHTTPRequestHandler, code: int, body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(code)
        handler.send_header("Content-Length", str(len(data)))
        if 300 <= code < 400:
            handler.send_header("Location", "http://127.0.0.1:9/elsewhere")
        handler.end_headers()
        handler.wfile.write(data)

    def export_key(self) -> dict[str, str]:
        numbers = self.key.public_key().public_numbers()
        n, e = (_encode_base64(v.to_bytes((v.bit_length() + 7) // 8)) for v in (numbers.n, numbers.e))
        return {"kty": "RSA", "kid": "one", "alg": "RS256", "use": "sig", "n": n, "e": e}

    def answer(self, login: str, form: dict[str, list[str]]) -> tuple[int, Any]:
        self.requests += 1
        match self.broken:
            case "down":
                return 503, {}
            case "page":
                return 200, b"<html>log in</html>"
            case "deep":
                return 200, b"[" * 60_000
            case "deep refusal":
                return 401, b"[" * 60_000
            case "long life":
                return 200, b'{"access_token": "t", "expires_in": 1' + b"0" * 400 + b"}"
            case "no life":
                return 200, b'{"access_token": "t", "expires_in": NaN}'
            case "moved":
                return 302, {}
        credentials = base64.b64decode(login.removeprefix("Basic ")).decode()
        if credentials != "ingest:s3same%2B%2F%3D" or form["grant_type"] != ["client_credentials"]:
            return 401, {"error": "invalid_client"}
        if form.get("scope", ["kafka"]) != ["kafka"]:
            return 400, {"error": "invalid_scope"}
        self.issued += 1
        return 200, {"access_token": self.make_token(), "expires_in": self.life, "token_type": "Bearer"}

    def make_token(self) -> str:
        now = int(time.time())
        claims = {"sub": "ingest", "aud": "kafka", "iss": "test", "iat": now, "exp": now + self.life}
        body = ".".join(_encode_base64(json.dumps(part).encode()) for part in ({"alg": "RS256", "kid": "one"}, claims))
        return f"{body}.{_encode_base64(self.key.sign(body.encode(), padding.PKCS1v15(), hashes.SHA256()))}"


def test_server_without_http_is_reported_as_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oauth, "_PAUSE", 0.0)

    def send_greeting(listening: socket.socket) -> None:
        for _ in range(3):
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"SSH-2.0-other\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=send_greeting, args=[listening], daemon=True).start()
        provider = ClientCredentials(f"http://127.0.0.1:{listening.getsockname()[1]}/token", "ingest", SECRET)
        with pytest.raises(KafkaUnavailable, match="does not answer: BadStatusLine"):
            provider.token()


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    with closing(Issuer()) as local_issuer:
        yield local_issuer


@pytest.fixture(autouse=True)
def sound(issuer: Issuer) -> None:
    issuer.life, issuer.broken = 300, ""


def make_provider(issuer: Issuer, **other: Any) -> ClientCredentials:
    # Tokens are cached by endpoint: with another path, each test asks for a new one.
    settings = {"endpoint": f"{issuer.address}/{time.monotonic_ns()}", "client_id": "ingest", "client_secret": SECRET}
    return ClientCredentials(**settings | other)


def test_token_is_reused_until_it_expires(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    later = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later[0], sleep=lambda seconds: None)
    monkeypatch.setattr(oauth, "time", clock)
    provider, before = make_provider(issuer), issuer.issued
    assert provider.token() == provider.token()
    assert issuer.issued == before + 1
    issuer.life = 1000
    short = make_provider(issuer)
    first = short.token()
    issuer.broken = "down"
    later[0], before = 850, issuer.requests
    assert short.token() == short.token() == first  # its endpoint is down, and it is still valid
    assert issuer.requests == before + 1  # connections would wait for each request
    later[0] = 1100
    with pytest.raises(KafkaUnavailable):
        short.token()
    issuer.broken, before = "", issuer.issued
    assert short.token()
    assert issuer.issued == before + 1


@pytest.mark.parametrize(
    ("broken", "other", "kind", "says"),
    [
        ("down", {}, KafkaUnavailable, "HTTP 503"),
        ("page", {}, NotAuthorized, "gives no token"),
        ("deep", {}, NotAuthorized, "gives no token"),
        ("deep refusal", {}, NotAuthorized, "HTTP 401"),
        ("long life", {}, NotAuthorized, "gives no token"),
        ("no life", {}, NotAuthorized, "gives no token"),
        ("moved", {}, NotAuthorized, "HTTP 302"),
        ("", {"client_secret": "wrong"}, NotAuthorized, "check sasl_oauth_client_id"),
        ("", {"scope": "other"}, NotAuthorized, "set `sasl_oauth_scope`"),
        ("", {"endpoint": "http://127.0.0.1:9/token"}, KafkaUnavailable, "does not answer"),
        ("", {"endpoint": "http://idp.example/token"}, FeedError, "is not https"),
        ("", {"endpoint": "https://idp.example:port/token"}, FeedError, "is not an address"),
        ("", {"endpoint": "https://[idp/token"}, FeedError, "is not an address"),
        ("", {"endpoint": "https:///token"}, FeedError, "is not an address"),
        ("", {"endpoint": "https://idp..example/token"}, FeedError, "is not an address"),
    ],
)
def test_each_token_failure_has_its_error(
    issuer: Issuer, broken: str, other: dict[str, str], kind: type[SluiceError], says: str
) -> None:
    issuer.broken = broken
    with pytest.raises(kind) as caught:
        make_provider(issuer, **other).token()
    assert says in str(caught.value)
    assert "s3same" not in str(caught.value)
    assert caught.value.remedy


def test_http_proxy_is_not_used_for_plain_http_endpoint(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies of the environment are used only for https, which they cannot read."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert make_provider(issuer).token()


@pytest.mark.parametrize("host", ["127.0.0.1", "login.example"])
def test_https_endpoint_with_custom_ca_is_verified(tmp_path: Path, host: str) -> None:
    authority, other = Authority.new(), Authority.new()
    key, certificate = authority.issue("login", timedelta(days=1), [host])
    files = {"ca": authority.certificate_pem(), "other": other.certificate_pem(), "own": key + certificate}
    for name, pem in files.items():
        (tmp_path / f"{name}.pem").write_bytes(pem)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "own.pem")
    with closing(Issuer(tls)) as issuer:
        with pytest.raises(NotAuthorized, match="not believed: unable to get local issuer") as caught:
            make_provider(issuer, cafile=str(tmp_path / "other.pem")).token()
        assert "sasl_oauth_cafile" in caught.value.remedy
        provider = make_provider(issuer, cafile=str(tmp_path / "ca.pem"))
        if host == "127.0.0.1":
            assert provider.token().count(".") == 2
            return
        with pytest.raises(NotAuthorized, match="certificate is not valid for") as caught:
            provider.token()
        assert "as its certificate names it" in caught.value.remedy


class Tokens(AbstractTokenProvider):
    """Stands for a user's class: tokens of the issuer, without its endpoint."""

    issuer: Issuer

    def token(self) -> str:
        return self.issuer.make_token()


@pytest.fixture(scope="module")
def broker(issuer: Issuer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalKafka]:
    """A broker that takes passwords of three mechanisms and the issuer's tokens, over TLS."""
    keys = f"{issuer.address}/keys"
    listener, package = "listener.name.sasl_ssl", "org.apache.kafka.common.security.oauthbearer"
    settings = {
        f"{listener}.sasl.enabled.mechanisms": "SCRAM-SHA-512,SCRAM-SHA-256,OAUTHBEARER,PLAIN,AWS_MSK_IAM",
        f"{listener}.scram-sha-256.sasl.jaas.config": f"{SCRAM} required;",
        f"{listener}.oauthbearer.sasl.server.callback.handler.class": f"{package}.OAuthBearerValidatorCallbackHandler",
        f"{listener}.oauthbearer.sasl.jaas.config": f"{package}.OAuthBearerLoginModule required;",
        f"{listener}.plain.sasl.jaas.config": f'{PLAIN} required user_ingest="{SECRET}";',
        # The broker offers MSK's own mechanism, which is not in Kafka, and refuses each login.
        f"{listener}.aws_msk_iam.sasl.jaas.config": f"{PLAIN} required;",
        "sasl.oauthbearer.jwks.endpoint.url": keys,
        "sasl.oauthbearer.expected.audience": "kafka",
    }
    root = tmp_path_factory.mktemp("oauth")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("JDK_JAVA_OPTIONS", f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={keys}")
        with LocalKafka(root, keep=False, secure=True, settings=settings) as kafka:
            with KafkaAdminClient(bootstrap_servers=kafka.bootstrap, **kafka.client()) as admin:
                credentials = UserScramCredentialUpsertion("ingest", ScramMechanism.SCRAM_SHA_256, SECRET)
                admin.alter_user_scram_credentials([credentials])
            yield kafka


PASSWORD = {"sasl_plain_username": "ingest", "sasl_plain_password": SECRET}
CLIENT = {"sasl_oauth_client_id": "ingest", "sasl_oauth_client_secret": SECRET, "sasl_oauth_scope": "kafka"}
LOGINS = {
    "SCRAM-SHA-256": PASSWORD,
    "PLAIN": PASSWORD,
    "OAUTHBEARER": {**CLIENT, "sasl_oauth_token_endpoint": "/token"},
    "OAUTHBEARER by a class": {"sasl_oauth_token_provider": "company_tokens:Tokens"},
}


def build_login(login: str, broker: LocalKafka, issuer: Issuer) -> dict[str, str]:
    """Returns the section `kafka:` of a feed."""
    assert broker.secured is not None
    own = {k: f"{issuer.address}{v}" if v.startswith("/") else v for k, v in LOGINS[login].items()}
    tls = {"security_protocol": "SASL_SSL", "ssl_cafile": str(broker.secured.ca)}
    return {"bootstrap": broker.bootstrap, "sasl_mechanism": login.partition(" ")[0], **tls, **own}


@pytest.mark.kafka
@pytest.mark.parametrize("login", LOGINS)
def test_feed_lands_and_commits_by_each_login(
    broker: LocalKafka,
    issuer: Issuer,
    tmp_path: Path,
    fresh_topic: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    login: str,
) -> None:
    monkeypatch.setitem(sys.modules, "company_tokens", sys.modules[__name__])
    monkeypatch.setattr(Tokens, "issuer", issuer, raising=False)
    topic = fresh_topic(cluster=broker, name="logins")
    produce(broker, topic, 50, **broker.client())
    path = tmp_path / "feeds" / "orders.yaml"
    path.parent.mkdir()
    section = json.dumps(build_login(login, broker, issuer))
    path.write_text(f"kafka: {section}\ntopics: {topic}\nstart: earliest\ngroup: g-{topic}\n")
    feed = load_feed(path, {})
    assert SECRET not in repr(feed)
    grant(broker, [r for r in rights_of(feed) if not r.optional], "ingest")
    run(feed).check()
    assert len(read_rows(feed)) == 50
    commit_feed(feed)
    with KafkaAdminClient(bootstrap_servers=broker.bootstrap, **broker.client()) as admin:
        (committed,) = admin.list_group_offsets(feed.group)[feed.group].values()
    assert committed.offset == 50
    files = [p for p in tmp_path.rglob("*") if p.is_file() and p != path]
    assert [p for p in files if SECRET.encode() in p.read_bytes()] == []


@pytest.mark.kafka
@pytest.mark.parametrize("login", ["SCRAM-SHA-256", "PLAIN"])
def test_wrong_password_is_refused(broker: LocalKafka, issuer: Issuer, login: str) -> None:
    settings = KafkaSettings.model_validate(build_login(login, broker, issuer) | {"sasl_plain_password": "guessed"})
    with closing(KafkaCluster(settings)) as cluster, pytest.raises(NotAuthorized) as caught:
        cluster.cluster_id()
    assert "SASL_AUTHENTICATION_FAILED" in str(caught.value)
    assert "guessed" not in str(caught.value)


@pytest.mark.kafka
def test_token_of_another_key_is_refused(broker: LocalKafka, issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(issuer, "key", rsa.generate_private_key(65537, 2048))  # the broker does not know this one
    login = build_login("OAUTHBEARER", broker, issuer) | {"sasl_oauth_token_endpoint": f"{issuer.address}/other"}
    with closing(KafkaCluster(KafkaSettings.model_validate(login))) as cluster, pytest.raises(NotAuthorized) as caught:
        cluster.cluster_id()
    assert "token" in caught.value.remedy


@pytest.mark.kafka
def test_login_by_iam_without_credentials_names_the_remedy(
    broker: LocalKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert broker.secured is not None
    login = {"security_protocol": "SASL_SSL", "ssl_cafile": str(broker.secured.ca), "sasl_mechanism": "AWS_MSK_IAM"}
    settings = KafkaSettings.model_validate({"bootstrap": broker.bootstrap, **login})
    with closing(KafkaCluster(settings)) as cluster, pytest.raises(NotAuthorized, match="no credentials") as caught:
        cluster.cluster_id()
    assert "aws sts get-caller-identity" in caught.value.remedy
