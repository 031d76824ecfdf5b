"""Connections of a feed: to Kafka, and to its schema registry.

Settings of Kafka keep kafka-python's names. The allowed ones and those that Sluice sets itself are
together every setting of its consumer, producer and admin client; a test compares them.
"""

from __future__ import annotations

import importlib
import re
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, SecretStr, StringConstraints, model_validator

from sluice.pipelines.errors import FeedError
from sluice.pipelines.feed.sections import Count, Duration, LocalFile, Millis, Secret, Settings, Size, Text

CLIENT_ID = "sluice"
"""The id by which brokers know our connections, unless the feed has another."""

KAFKA_OWNED = {
    "bootstrap_servers": "write kafka.bootstrap",
    "group_id": "write `group`",
    "group_instance_id": "a static member stays in the group after it has left",
    "auto_offset_reset": "write `start`",
    "isolation_level": "write `isolation`",
    "transactional_id": "write the feed's `transactional_id`",
    "client_rack": "write fetch.rack",
    "fetch_max_bytes": "write tuning.request_bytes",
    "max_partition_fetch_bytes": "write tuning.partition_bytes",
    "socks5_proxy": "write proxy_url",
    "ssl_ciphers": "this kafka-python accepts it and does nothing with it",
    "ssl_context": "it is an object; write ssl_cafile, ssl_certfile, ssl_keyfile",
    "check_crcs": "CRCs are always checked",
    "api_version": "it is negotiated with the broker",
    "allow_auto_create_topics": "reading never creates a topic",
    "exclude_internal_topics": "internal topics are never read",
    **dict.fromkeys(("key_deserializer", "value_deserializer"), "bytes land as they are; see `format`"),
    **dict.fromkeys(
        ("enable_auto_commit", "auto_commit_interval_ms", "default_offset_commit_callback"),
        "the ledger decides which offsets are committed",
    ),
    **dict.fromkeys(
        ("acks", "retries", "enable_idempotence", "max_in_flight_requests_per_connection"),
        "the commit transaction is safe only as it is",
    ),
    **dict.fromkeys(
        ("key_serializer", "value_serializer", "partitioner", "compression_type", "batch_size", "linger_ms"),
        "a feed only reads; its own writes use fixed settings",
    ),
    **dict.fromkeys(
        ("max_request_size", "partition_assignment_strategy", "consumer_timeout_ms", "max_poll_records"),
        "it follows from how Sluice reads and commits",
    ),
    **dict.fromkeys(
        ("heartbeat_interval_ms", "max_poll_interval_ms", "delivery_timeout_ms", "max_block_ms"),
        "it follows from session_timeout_ms and transaction_timeout_ms",
    ),
    **dict.fromkeys(
        (
            "fetch_min_bytes",
            "fetch_max_wait_ms",
            "enable_incremental_fetch_sessions",
            "receive_message_max_bytes",
        ),
        "Sluice fetches by itself; see `fetch`",
    ),
    **dict.fromkeys(
        (
            "metrics_enabled",
            "metric_group_prefix",
            "metric_reporters",
            "metrics_num_samples",
            "metrics_sample_window_ms",
        ),
        "Sluice measures by itself",
    ),
    **dict.fromkeys(("kafka_client", "selector", "socket_options"), "it is an object of the program"),
}
"""Settings of kafka-python that a feed must not set, each with the reason."""


_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
_SASL = ("SASL_PLAINTEXT", "SASL_SSL")
_TLS = ("SSL", "SASL_SSL")
_NOT_FOR_ALL = {"bootstrap", "session_timeout_ms", "transaction_timeout_ms"}


_OURS = "sluice.resources.kafka.connection.oauth:ClientCredentials"
CREDENTIALS = {
    "sasl_oauth_token_endpoint": "endpoint",
    "sasl_oauth_client_id": "client_id",
    "sasl_oauth_client_secret": "client_secret",
    "sasl_oauth_scope": "scope",
    "sasl_oauth_cafile": "cafile",
}
"""Settings of the token provider that comes with Sluice, and what that calls them."""


class KafkaSettings(Settings):
    """Kafka's addresses, and kafka-python's settings for security and time-outs."""

    bootstrap: Annotated[str, StringConstraints(max_length=4000), AfterValidator(lambda text: _addresses(text))]

    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] | None = None
    sasl_mechanism: (
        Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "GSSAPI", "AWS_MSK_IAM"] | None
    ) = None
    sasl_plain_username: Text | None = None
    sasl_plain_password: Secret | None = None
    sasl_kerberos_name: Text | None = None
    sasl_kerberos_service_name: Text | None = None
    sasl_kerberos_domain_name: Text | None = None
    sasl_oauth_token_provider: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*\z")] | None = (
        None
    )
    """`package.module:Class`, called without arguments wherever a client is made."""
    sasl_oauth_token_endpoint: Annotated[Text, AfterValidator(lambda text: _without_login(text))] | None = None
    """Where tokens are asked for by client credentials, instead of a provider of one's own (KIP-768)."""
    sasl_oauth_client_id: Text | None = None
    sasl_oauth_client_secret: Secret | None = None
    sasl_oauth_scope: Text | None = None
    sasl_oauth_cafile: LocalFile | None = None
    ssl_cafile: LocalFile | None = None
    ssl_certfile: LocalFile | None = None
    ssl_keyfile: LocalFile | None = None
    ssl_crlfile: LocalFile | None = None
    ssl_password: Secret | None = None
    ssl_check_hostname: bool | None = None
    proxy_url: Secret | None = None

    client_id: Text | None = None
    client_dns_lookup: Literal["use_all_dns_ips", "resolve_canonical_bootstrap_servers_only"] | None = None
    request_timeout_ms: Millis | None = None
    bootstrap_timeout_ms: Millis | None = None
    connections_max_idle_ms: Millis | None = None
    metadata_max_age_ms: Millis | None = None
    reconnect_backoff_ms: Millis | None = None
    reconnect_backoff_max_ms: Millis | None = None
    retry_backoff_ms: Millis | None = None
    receive_buffer_bytes: Size | None = None
    send_buffer_bytes: Size | None = None

    session_timeout_ms: Millis | None = None
    """How long the coordinator keeps our place in the group after a crash; the brokers bound it."""
    transaction_timeout_ms: Millis | None = None
    """When the coordinator aborts a transaction that we left open; the brokers bound it."""

    @model_validator(mode="after")
    def _secure(self) -> Self:
        protocol = self.security_protocol or "PLAINTEXT"
        if self._has_setting("sasl_") and protocol not in _SASL:
            raise ValueError("has sasl_… settings, which nothing reads unless security_protocol is SASL_SSL")
        if self._has_setting("ssl_") and protocol not in _TLS:
            raise ValueError("has ssl_… settings, which nothing reads unless security_protocol is SSL or SASL_SSL")
        needed = self._list_required() if protocol in _SASL else ()
        missing = [n for n in needed if getattr(self, n) is None]
        if missing:
            raise ValueError(f"needs {' and '.join(missing)} for this security_protocol and sasl_mechanism")
        if self.sasl_mechanism == "AWS_MSK_IAM" and protocol != "SASL_SSL":
            raise ValueError("needs security_protocol SASL_SSL for AWS_MSK_IAM")
        return self

    def _list_required(self) -> tuple[str, ...]:
        """The settings that the mechanism requires."""
        match self.sasl_mechanism:
            case None:
                return ("sasl_mechanism",)
            case "OAUTHBEARER" if self._has_setting("sasl_oauth_c") or self.sasl_oauth_token_endpoint:
                return ("sasl_oauth_token_endpoint", "sasl_oauth_client_id", "sasl_oauth_client_secret")
            case "OAUTHBEARER":
                return ("sasl_oauth_token_provider",)
            case "PLAIN" | "SCRAM-SHA-256" | "SCRAM-SHA-512":
                return ("sasl_plain_username", "sasl_plain_password")
            case _:
                return ()

    def __repr_args__(self) -> Any:
        return [(k, v) for k, v in super().__repr_args__() if v is not None]

    def _has_setting(self, prefix: str) -> bool:
        return any(n.startswith(prefix) for n in self.model_dump(exclude_none=True))

    def client_settings(self) -> dict[str, Any]:
        """Keyword arguments for any kafka-python client, except `bootstrap_servers`.

        The values are plain, secrets too: pass them to a client's constructor and nowhere else. Raises FeedError when
        the token provider that the feed names cannot be made.
        """
        settings = self.model_dump(exclude_none=True, exclude=_NOT_FOR_ALL)
        plain = {k: v.get_secret_value() if isinstance(v, SecretStr) else v for k, v in settings.items()}
        credentials = {name: plain.pop(key) for key, name in CREDENTIALS.items() if key in plain}
        if self.sasl_oauth_token_provider:
            plain["sasl_oauth_token_provider"] = _token_provider(self.sasl_oauth_token_provider, {})
        elif credentials:
            plain["sasl_oauth_token_provider"] = _token_provider(_OURS, credentials)
        return plain

    def producer_settings(self) -> dict[str, Any]:
        """The same as `client_settings`, and the transaction's time-out if the feed gives one."""
        own = {"transaction_timeout_ms": self.transaction_timeout_ms} if self.transaction_timeout_ms else {}
        return self.client_settings() | own


SECRETS = frozenset(name for name, field in KafkaSettings.model_fields.items() if "SecretStr" in str(field.annotation))
"""Settings that no output shows."""


def _addresses(text: str) -> str:
    """The addresses as `host:port,host:port`, without spaces. Raises ValueError."""
    addresses = [a.strip() for a in text.split(",")]
    matches = [_ADDRESS.fullmatch(a) for a in addresses]
    if not all(f and int(f[1]) < 1 << 16 for f in matches):
        raise ValueError("is not an address")
    return ",".join(addresses)


def _token_provider(name: str, settings: dict[str, Any]) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)(**settings)
    except FeedError:
        raise
    except Exception as error:  # noqa: BLE001 - only the type of the user code's error is reported: no token
        kind = type(error).__name__
    raise FeedError(
        f"kafka.sasl_oauth_token_provider: {name} cannot be made ({kind})",
        remedy="name an importable class without arguments, a kafka.net.sasl.oauth.AbstractTokenProvider",
    )


_URL = re.compile(r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:/[A-Za-z0-9._~/-]*)?")
_GLUE = re.compile(r"glue://([a-z]{2}(?:-[a-z]+)+-[0-9]+)/([A-Za-z0-9_.$#-]{1,255})")
_CONTEXT = re.compile(r":\.[^:]*:")
_CCOMPAT = re.compile(r"(.*/apis)/ccompat/v[0-9]+")


def _url(text: str) -> str:
    if not (_URL.fullmatch(text) and has_address(text)) and not _GLUE.fullmatch(text):
        raise ValueError("is neither an address such as https://registry.example:8081 nor glue://REGION/REGISTRY")
    return text.rstrip("/")


def _without_login(url: str) -> str:
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise ValueError("has a user or password, and messages show the address")
    return url


def has_address(url: str) -> bool:
    """Returns whether the host's name and the port of a URL are possible ones."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname and parts.hostname.encode("idna")) and parts.port != 0
    except ValueError:  # UnicodeError is one
        return False


class RegistrySettings(Settings):
    """The registry's address, and how to log in: `username` and `password`, or a `token`; certificates for TLS. AWS
    Glue's is glue://REGION/REGISTRY; who logs in there, AWS's own settings say.

    `subject` and `version` name the schema that `sluice schema pull` takes: the newest of the subject, unless a version
    is given. Its context, as in `:.staging:orders-value`, is the one in which records' numbers are looked up. A request
    may take `timeout` (ms).
    """

    url: Annotated[Text, AfterValidator(_url)]
    username: Text | None = None
    password: Secret | None = None
    token: Secret | None = None
    ssl_cafile: LocalFile | None = None
    ssl_certfile: LocalFile | None = None
    ssl_keyfile: LocalFile | None = None
    subject: Text | None = None
    version: Count | None = None
    timeout: Duration = 10_000

    @property
    def glue(self) -> tuple[str, str] | None:
        """The region and the registry's name, if it is AWS Glue's."""
        match = _GLUE.fullmatch(self.url)
        return (match[1], match[2]) if match else None

    @property
    def context(self) -> str:
        """The context of the subject, such as `:.staging:`; empty for the default one, or the URL's."""
        match = _CONTEXT.match(self.subject or "")
        return match[0] if match else ""

    @property
    def apicurio(self) -> str:
        """The path of Apicurio's own API, if the address is that of its compatible one; else empty."""
        match = _CCOMPAT.fullmatch(urlsplit(self.url).path)
        return f"{match[1]}/registry" if match else ""

    @model_validator(mode="after")
    def _aws_logs_in(self) -> Self:
        own = ("username", "password", "token", "ssl_cafile", "ssl_certfile", "ssl_keyfile")
        if self.glue and any(getattr(self, name) is not None for name in own):
            raise ValueError("has a login or certificates, and AWS Glue takes those of AWS's own settings")
        return self

    @model_validator(mode="after")
    def _one_login(self) -> Self:
        if (self.username is None) is not (self.password is None):
            raise ValueError("needs username and password together")
        if self.token and self.username:
            raise ValueError("has a token, and username and password: leave one out")
        if self.url.startswith("http:") and (self.ssl_cafile or self.ssl_certfile):
            raise ValueError("has ssl_… settings, which nothing reads unless url begins with https:")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ValueError("has ssl_keyfile, which needs ssl_certfile")
        return self

    def __repr_args__(self) -> Any:
        return [(k, v) for k, v in super().__repr_args__() if v is not None]
