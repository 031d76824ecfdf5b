"""Tokens for SASL/OAUTHBEARER: the client credentials of OAuth 2.0 against an OIDC token endpoint (KIP-768).

Promises: a token is requested when the first connection needs one, is shared by every connection of this process, and
is renewed after four fifths of its life; while the endpoint is down the old token is used until it expires. Every wait
has an end, an answer is bounded, redirects are not followed, and the secret travels over https, or on loopback. No
error contains a token or the secret.
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
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from kafka.net.sasl.oauth import AbstractTokenProvider

from sluice.pipelines.errors import FeedError, KafkaUnavailable, NotAuthorized, SluiceError
from sluice.pipelines.feed.kafka_section import has_address

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


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


_tokens: dict[Credentials, _Token] = {}
_asking = threading.Lock()


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
        with _asking:
            token, now = _tokens.get(self._credentials), time.monotonic()
            if token and now < token.fresh_until:
                return token.text
            valid = token if token and now < token.ends else None
            token = _renew(self._credentials, valid) if valid else _ask(self._credentials)
            _tokens[self._credentials] = token
            return token.text


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
    return _read(_answer(credentials), began, credentials)


def _answer(credentials: Credentials) -> bytes:
    form = {"grant_type": "client_credentials"} | ({"scope": credentials.scope} if credentials.scope else {})
    parts = (urllib.parse.quote(part, safe="") for part in (credentials.client_id, credentials.secret))
    login = base64.b64encode(":".join(parts).encode()).decode()
    headers = {"Authorization": f"Basic {login}", "Accept": "application/json"}
    request = urllib.request.Request(credentials.endpoint, urllib.parse.urlencode(form).encode(), headers)
    try:
        tls = ssl.create_default_context(cafile=credentials.cafile or None)
    except OSError as error:
        raise FeedError(
            f"kafka.sasl_oauth_cafile: cannot be read as certificates: {error.strerror}",
            remedy="name a file of PEM certificates",
        ) from None
    # A proxy of the environment would read the secret on its way to http://localhost.
    secure = urllib.parse.urlsplit(credentials.endpoint).scheme == "https"
    proxies = urllib.request.ProxyHandler(None if secure else {})
    opener = urllib.request.build_opener(_NoRedirect(), urllib.request.HTTPSHandler(context=tls), proxies)
    try:
        with opener.open(request, timeout=_SECONDS) as answer:
            body: bytes = answer.read(_MAX_BYTES + 1)
            return body
    except urllib.error.HTTPError as error:
        reason = ""
        with error, suppress(OSError, http.client.HTTPException):  # the status alone says enough
            reason = _reason(error.read(_MAX_BYTES))
        raise _refusal(error.code, reason, credentials) from None
    except (OSError, http.client.HTTPException) as error:
        raise _silence(error, credentials) from None


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
    reason = getattr(error, "reason", error)
    if isinstance(reason, ssl.SSLCertVerificationError):
        authority = "set `sasl_oauth_cafile` in the feed's `kafka:` section to a file with the certificate of its CA"
        advice = f"write the address in {_ENDPOINT} as its certificate names it"
        return NotAuthorized(
            f"the certificate of the token endpoint {_shown(credentials)} is not believed: {reason.verify_message}",
            remedy=advice if reason.verify_code in _OTHER_HOST else authority,
        )
    why = getattr(reason, "strerror", None) or (reason if isinstance(reason, OSError | str) else type(reason).__name__)
    return KafkaUnavailable(
        f"the token endpoint {_shown(credentials)} does not answer: {why}",
        remedy=f"check {_ENDPOINT} in the feed, and that it can be reached from here and from where tasks run",
    )


def _read(answer: bytes, began: float, credentials: Credentials) -> _Token:
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


def _shown(credentials: Credentials) -> str:
    """Return the address without parts that could be secret."""
    where = urllib.parse.urlsplit(credentials.endpoint)
    return f"{where.scheme}://{where.hostname}{f':{where.port}' if where.port else ''}{where.path}"
