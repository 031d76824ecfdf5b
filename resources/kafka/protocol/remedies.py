"""Remedies for refused connections: rights, logins, certificates. One remedy for each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

from kafka import errors as kafka_errors

from sluice.pipelines.feed.rights import CLUSTER, Operation, ResourceKind, Right

_KINDS = {
    kafka_errors.TopicAuthorizationFailedError: ResourceKind.TOPIC,
    kafka_errors.GroupAuthorizationFailedError: ResourceKind.GROUP,
    kafka_errors.TransactionalIdAuthorizationFailedError: ResourceKind.TRANSACTIONAL_ID,
}
_LEAST = {ResourceKind.TRANSACTIONAL_ID: Operation.WRITE, ResourceKind.CLUSTER: Operation.DESCRIBE}


def missing(error: type[BaseException], rights: Sequence[Right], topic: str | None) -> list[Right]:
    """Return the rights that a broker misses: those of `rights` on the kind of resource in the error, and on the
    topic."""
    kind = _KINDS.get(error, ResourceKind.CLUSTER)
    required = [r for r in rights if not r.optional]
    lacking = [
        r for r in required if (r.covers(kind, topic) if topic and kind is ResourceKind.TOPIC else r.kind is kind)
    ]
    if lacking or (kind is ResourceKind.CLUSTER and required):
        return lacking or required  # Kafka names the cluster although rights on a topic would do
    name = topic if kind is ResourceKind.TOPIC and topic else CLUSTER if kind is ResourceKind.CLUSTER else "NAME"
    return [Right(_LEAST.get(kind, Operation.READ), kind, name, "")]


def login(error: BaseException) -> str:
    """Return the remedy for a login that brokers refuse."""
    if isinstance(error, kafka_errors.SaslAuthenticationFailedError):
        return (
            "check the user's name and password (or its token) in the feed's `kafka:` section; that the brokers know"
            " the user for this `sasl_mechanism` (kafka-configs --describe --entity-type users); and that the password"
            " was not changed"
        )
    if isinstance(error, kafka_errors.IllegalSaslStateError):
        return (
            "this listener wants no login: set `security_protocol` in the feed's `kafka:` section to PLAINTEXT (or SSL)"
            " and leave out sasl_…, or name in `bootstrap` a listener that wants one"
        )
    return (
        "set `sasl_mechanism` in the feed's `kafka:` section to one that this listener offers: what the brokers'"
        " setting sasl.enabled.mechanisms says"
    )


def of_client(certificate: str) -> str:
    """Return the remedy for brokers that refuse our certificate, in that file; empty: we presented none.

    Brokers give no further reason (nor for an expired one), so the file is inspected.
    """
    if not certificate:
        return (
            "this listener asks for a certificate: set `ssl_certfile` and `ssl_keyfile` in the feed's `kafka:` section"
            " to one that the brokers trust"
        )
    if (ended := _expiry(certificate)) is not None:
        return f"renew the certificate in `ssl_certfile` of the feed's `kafka:` section: it expired on {ended:%Y-%m-%d}"
    return (
        "have the certificate in `ssl_certfile` of the feed's `kafka:` section signed by a CA that is in the brokers'"
        " truststore, or add its CA there; the brokers' log says more"
    )


def _expiry(certificate: str) -> datetime | None:
    """Return the expiry of the certificate in the file, if it has expired."""
    from cryptography import x509

    with suppress(OSError, ValueError), open(certificate, "rb") as pem:
        ends = x509.load_pem_x509_certificates(pem.read())[0].not_valid_after_utc
        return ends if ends < datetime.now(UTC) else None
    return None


def of_broker(code: int, bootstrap: str) -> str:
    """Return the remedy for a broker's certificate that we do not trust, for OpenSSL's reason `code`."""
    match code:
        case 9 | 10:  # not valid yet, or not any longer
            return "renew the brokers' certificates, or that of their CA; see also that this machine's clock is right"
        case 62 | 63 | 64:  # another host, mail address, IP address
            return (
                f"name the brokers in `bootstrap` ({bootstrap}) and in their advertised.listeners as their certificates"
                " do; `ssl_check_hostname: false` in the feed's `kafka:` section does without"
            )
        case _:
            return (
                "set `ssl_cafile` in the feed's `kafka:` section to a file with the certificate of the CA that signed"
                " the brokers' certificates"
            )
