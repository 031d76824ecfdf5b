"""What mends it that brokers refuse us, or that we refuse them: rights, logins, certificates. One remedy for each."""

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
    """The rights that a broker misses: those of `rights` on the kind of resource that it names, and on the topic."""
    kind = _KINDS.get(error, ResourceKind.CLUSTER)
    required = [r for r in rights if not r.optional]
    lacking = [
        r for r in required if (r.covers(kind, topic) if topic and kind is ResourceKind.TOPIC else r.kind is kind)
    ]
    if lacking or (kind is ResourceKind.CLUSTER and required):
        return lacking or required  # Kafka asks for the cluster where rights on a topic would do
    name = topic if kind is ResourceKind.TOPIC and topic else CLUSTER if kind is ResourceKind.CLUSTER else "NAME"
    return [Right(_LEAST.get(kind, Operation.READ), kind, name, "")]


def login(error: BaseException) -> str:
    """What mends it that brokers let nobody in by this login."""
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
    """What mends it that brokers do not take our certificate, in that file; empty: we have shown none.

    Brokers say no more than that (of an expired one, too), so the file is looked at.
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
    """When the certificate in the file ended, if it has."""
    from cryptography import x509

    with suppress(OSError, ValueError), open(certificate, "rb") as pem:
        ends = x509.load_pem_x509_certificates(pem.read())[0].not_valid_after_utc
        return ends if ends < datetime.now(UTC) else None
    return None


def of_broker(code: int, bootstrap: str) -> str:
    """What mends it that we do not believe a broker's certificate, for OpenSSL's reason `code`."""
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
