"""Tokens for SASL/OAUTHBEARER: the client credentials of OAuth 2.0 against an OIDC token endpoint (KIP-768).

Promises: a token is requested when the first connection needs one, is shared by every connection of this process, and
is renewed after four fifths of its life; while the endpoint is down the old token is used until it expires. Each of
three requests ends after 10 s in total, and connections that waited for them share their failure; an answer is bounded,
redirects are not followed, and the secret travels over https, or on loopback. No error contains a token or the secret.
"""

from __future__ import annotations

import base64
import http.client
import json
import math
import re
import ssl
import threading
import time
import urllib.parse
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from urllib.request import Request

from kafka.net.sasl.oauth import AbstractTokenProvider

from sluice.pipelines.errors import FeedError, KafkaUnavailable, NotAuthorized, SluiceError
from sluice.pipelines.feed.kafka_section import has_address
from sluice.resources import web

_SECONDS = 10.0
_MAX_BYTES = 64 << 10
_FRESH = 0.8  # the share of its life after which a token is renewed
_TRIES = 3
_PAUSE = 0.5
_RENEW_AGAIN = 30.0
_LIFETIME = 300.0  # seconds, if the endpoint gives no lifetime
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
_ENDPOINT = "kafka.sasl_oauth_token_endpoint"
_OTHER_HOST = (62, 64)
"""OpenSSL's codes for a certificate of another host name or address."""


@dataclass(frozen=True)
class Credentials:
    """A client and its token endpoint. `cafile`: the CA of the endpoint's certificate; empty: the system's trusted
    CAs."""

    endpoint: str
    client_id: str
    secret: str = field(repr=False)
    scope: str = ""
    cafile: str = ""


@dataclass(frozen=True)
class _Token:
    text: str = field(repr=False)
    fresh_until: float
    ends: float


_tokens: dict[Credentials, _Token] = {}
_failures: dict[Credentials, tuple[float, SluiceError]] = {}
"""The last failure for each client, and when it was: connections that waited for a request share its outcome."""
_asking: dict[Credentials, threading.Lock] = {}


class ClientCredentials(AbstractTokenProvider):  # type: ignore[misc]
    """kafka-python's token provider. Raises FeedError for an endpoint that would see the secret in plain text."""

    def __init__(self, endpoint: str, client_id: str, client_secret: str, scope: str = "", cafile: str = "") -> None:
        super().__init__()
        credentials = Credentials(endpoint, client_id, client_secret, scope, cafile)
        if not has_address(credentials.endpoint):
            raise FeedError(f"{_ENDPOINT}: is not an address", remedy="write https://HOST:PORT/PATH")
        where = urllib.parse.urlsplit(credentials.endpoint)
        if where.scheme != "https" and not (where.scheme == "http" and where.hostname in _LOOPBACK):
            raise FeedError(f"{_ENDPOINT}: is not https", remedy="write https://…; the secret would travel in plain")
        self._credentials = credentials

    def token(self) -> str:
        """Return a token that is valid now. Raises NotAuthorized, KafkaUnavailable."""
        credentials, came = self._credentials, time.monotonic()
        token = _tokens.get(credentials)
        if token and came < token.fresh_until:
            return token.text
        asking = _asking.setdefault(credentials, threading.Lock())
        if token and came < token.ends:
            if not asking.acquire(blocking=False):
                return token.text  # another connection renews it
        else:
            asking.acquire()
        try:
            token, now = _tokens.get(credentials), time.monotonic()
            if token and now < token.fresh_until:
                return token.text
            failed, failure = _failures.get(credentials, (0.0, None))
            if failure and failed > came:
                raise copy(failure)  # of the request that this connection waited for
            valid = token if token and now < token.ends else None
            token = _tokens[credentials] = _renew(credentials, valid) if valid else _ask(credentials)
            return token.text
        except SluiceError as error:
            _failures[credentials] = time.monotonic(), error
            raise
        finally:
            asking.release()


def _renew(credentials: Credentials, token: _Token) -> _Token:
    """Request another token once; without an answer, keep this one for a while: connections wait for it."""
    try:
        return _once(credentials)
    except SluiceError:
        if (now := time.monotonic()) >= token.ends:
            raise
        return replace(token, fresh_until=min(now + _RENEW_AGAIN, token.ends))


def _ask(credentials: Credentials) -> _Token:
    """Request a token, several times if the endpoint does not answer."""
    for _ in range(_TRIES - 1):
        with suppress(KafkaUnavailable):
            return _once(credentials)
        time.sleep(_PAUSE)
    return _once(credentials)


def _once(credentials: Credentials) -> _Token:
    began = time.monotonic()
    answer = _answer(credentials)
    try:
        document = json.loads(answer) if len(answer) <= _MAX_BYTES else {}
        text, life = document["access_token"], float(document.get("expires_in") or _LIFETIME)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        text, life = "", 0.0
    if not isinstance(text, str) or not _TOKEN.fullmatch(text) or not 0 < life < math.inf:
        raise NotAuthorized(
            f"what answers at {_shown(credentials)} gives no token",
            remedy=f"check {_ENDPOINT} in the feed: the token endpoint of the OIDC provider's configuration",
        )
    return _Token(text, began + life * _FRESH, began + life)


def _answer(credentials: Credentials) -> bytes:
    form = {"grant_type": "client_credentials"} | ({"scope": credentials.scope} if credentials.scope else {})
    parts = (urllib.parse.quote(part, safe="") for part in (credentials.client_id, credentials.secret))
    login = base64.b64encode(":".join(parts).encode()).decode()
    headers = {"Authorization": f"Basic {login}", "Accept": "application/json"}
    try:
        tls = ssl.create_default_context(cafile=credentials.cafile or None)
    except OSError as error:
        raise FeedError(
            f"kafka.sasl_oauth_cafile: cannot be read as certificates: {error.strerror}",
            remedy="name a file of PEM certificates",
        ) from None
    # A proxy of the environment would read the secret on its way to http://localhost.
    secure = urllib.parse.urlsplit(credentials.endpoint).scheme == "https"
    try:
        request = Request(credentials.endpoint, urllib.parse.urlencode(form).encode(), headers)
        answer = web.send(request, seconds=_SECONDS, max_bytes=_MAX_BYTES, tls=tls, proxies=None if secure else {})
    except (OSError, http.client.HTTPException) as error:
        raise _silence(error, credentials) from None
    if not 200 <= answer.status < 300:
        raise _refusal(answer.status, _reason(answer.body), credentials)
    return answer.body


def _reason(body: bytes) -> str:
    """Return OAuth's error code (RFC 6749); empty if there is none."""
    try:
        reason = json.loads(body)["error"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return reason if isinstance(reason, str) and re.fullmatch(r"[a-z_]{1,40}", reason) else ""


def _refusal(code: int, reason: str, credentials: Credentials) -> SluiceError:
    text = f"the token endpoint {_shown(credentials)} refuses: HTTP {code}{', ' if reason else ''}{reason}"
    if code >= 500 or code == 429:
        return KafkaUnavailable(text, remedy="repeat when it is well again")
    if reason == "invalid_scope":
        return NotAuthorized(text, remedy="set `sasl_oauth_scope` in the feed's `kafka:` section to one it knows")
    if code in (400, 401, 403):
        remedy = "check sasl_oauth_client_id and sasl_oauth_client_secret in the feed's `kafka:` section"
        return NotAuthorized(text, remedy=f"{remedy}, and that the client may use the grant client_credentials")
    return NotAuthorized(text, remedy=f"check {_ENDPOINT} in the feed: the token endpoint's own address, no other")


def _silence(error: OSError | http.client.HTTPException, credentials: Credentials) -> SluiceError:
    if isinstance(error, ssl.SSLCertVerificationError):
        authority = "set `sasl_oauth_cafile` in the feed's `kafka:` section to a file with the certificate of its CA"
        advice = f"write the address in {_ENDPOINT} as its certificate names it"
        return NotAuthorized(
            f"the certificate of the token endpoint {_shown(credentials)} is not believed: {error.verify_message}",
            remedy=advice if error.verify_code in _OTHER_HOST else authority,
        )
    why = getattr(error, "strerror", None) or (error if isinstance(error, OSError) else type(error).__name__)
    return KafkaUnavailable(
        f"the token endpoint {_shown(credentials)} does not answer: {why}",
        remedy=f"check {_ENDPOINT} in the feed, and that it can be reached from here and from where tasks run",
    )


def _shown(credentials: Credentials) -> str:
    """Return the address without parts that could be secret."""
    where = urllib.parse.urlsplit(credentials.endpoint)
    return f"{where.scheme}://{where.hostname}{f':{where.port}' if where.port else ''}{where.path}"
