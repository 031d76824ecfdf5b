"""Translates errors of Kafka and kafka-python into Sluice's errors.

Promises: every error that leaves this package is one of `sluice.pipelines.errors`, names the bootstrap address, gives a
remedy, and holds no secret: of a remote error it repeats only the name and the broker's own message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

from kafka import errors as kafka_errors
from kafka.errors import BrokerResponseError, KafkaError, RetriableError

from sluice.pipelines.errors import (
    BrokerTooOld,
    CommitFenced,
    CorruptBatch,
    FeedError,
    KafkaUnavailable,
    NotAuthorized,
    SluiceError,
    UnknownTopic,
    UnsupportedBatch,
)
from sluice.pipelines.feed.rights import CLUSTER, Grantee, Operation, ResourceKind, Right

_NO_LOGIN = (
    kafka_errors.SaslAuthenticationFailedError,
    kafka_errors.UnsupportedSaslMechanismError,
    kafka_errors.IllegalSaslStateError,
)
_FENCED = (
    kafka_errors.ProducerFencedError,
    kafka_errors.InvalidProducerEpochError,
    kafka_errors.InvalidProducerIdMappingError,
    kafka_errors.InvalidTxnStateError,
    kafka_errors.IllegalGenerationError,
    kafka_errors.UnknownMemberIdError,
    kafka_errors.FencedInstanceIdError,
    kafka_errors.RebalanceInProgressError,
)
_TIMED_OUT = (kafka_errors.KafkaTimeoutError, kafka_errors.RequestTimedOutError)
_SILENT = "it did not answer in time"
_PASSING = (
    kafka_errors.UnknownError,
    kafka_errors.BrokerNotAvailableError,
    kafka_errors.UnknownBrokerIdError,
)
_UNKNOWN_TOPIC = (
    kafka_errors.UnknownTopicOrPartitionError,
    kafka_errors.UnknownTopicIdError,
    kafka_errors.InvalidTopicError,
)


class AnswerLost(RetriableError):  # type: ignore[misc]
    """The request was sent and no answer came: it may have taken effect or not."""


class BrokerNotReached(RetriableError):  # type: ignore[misc]
    """The request was not sent: the broker cannot be reached now."""


class Untrusted(KafkaError):  # type: ignore[misc]
    """One side does not trust the other's certificate.

    With OpenSSL's reason `code`, the broker's; if that is 0, ours: the file `certificate`, empty if we have none.
    """

    def __init__(self, message: str, code: int = 0, certificate: str = "") -> None:
        super().__init__(message)
        self.code, self.certificate = code, certificate


class NoRecordsReturned(RetriableError):  # type: ignore[misc]
    """The leader returned neither records nor an error for offsets that it must have."""

    def __init__(self) -> None:
        super().__init__(
            "the leader has these offsets, and returned no records: tiered storage is slow, or they are gone"
        )


class NoAddress(RetriableError):  # type: ignore[misc]
    """No bootstrap address answered."""


def error_of(code: int) -> type[KafkaError] | None:
    """Return the error for a broker's code; None for 0."""
    return None if code == 0 else kafka_errors.for_code(code)


def is_passing(error: BaseException | type[BaseException]) -> bool:
    """Return whether the same request may succeed a little later: a leader moves, a connection breaks, a server fails
    briefly."""
    kind = error if isinstance(error, type) else type(error)
    return issubclass(kind, (RetriableError, *_PASSING))


def is_hopeless(error: BaseException) -> bool:
    """Return whether reconnecting cannot help: the login, a certificate or the broker's age is the cause."""
    wrong = (*_NO_LOGIN, Untrusted, kafka_errors.AuthorizationError, kafka_errors.UnsupportedVersionError, ValueError)
    return isinstance(error, wrong) or (isinstance(error, OSError) and not isinstance(error, ConnectionError))


class Location(NamedTuple):
    """The topic, partition and offsets that an error names; None for those that it does not."""

    topic: str | None = None
    partition: int | None = None
    start: int | None = None
    end: int | None = None


NOWHERE = Location()


def explain(
    error: BaseException, client: Grantee, doing: str, where: Location = NOWHERE, *, rights: Sequence[Right] = ()
) -> SluiceError:
    """Return `error`, raised by `doing` ("reading orders:3"), as one of ours with its location.

    `client`: our principal and address. `rights`: needed by the work, if more than to read the topic.
    """
    if isinstance(error, SluiceError):
        return error
    kind, remedy = _verdict(error, client, rights, where.topic)
    return kind(f"{doing}: {error_text(error)} (Kafka at {client.bootstrap})", remedy=remedy, **where._asdict())


def error_text(error: BaseException | type[BaseException]) -> str:
    """Return the error in a few words: the broker's name and description, or the connection's message."""
    kind: Any = error if isinstance(error, type) else type(error)
    if issubclass(kind, _TIMED_OUT) and isinstance(error, BaseException) and error.args:
        return _SILENT  # kafka-python's clock ran out, not the broker's
    if issubclass(kind, BrokerResponseError) and kind.description:
        return f"{kind.message}: {kind.description.rstrip('.')}"
    if isinstance(error, ValueError):
        return "a setting that kafka-python cannot use"  # its text may repeat the setting
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    message = ", ".join(str(arg) for arg in error.args) if isinstance(error, BaseException) else ""
    if errno_text := re.fullmatch(r"(\d+) E[A-Z]+", message):  # how kafka-python reports a failed connect
        return os.strerror(int(errno_text[1])).lower()
    return re.sub(r"^\[Errno \d+\] ", "", message) or str(kind.__name__).removesuffix("Error")


def error_name(error: BaseException | type[BaseException]) -> str:
    """Return the error as it is counted: Kafka's name for it (`NOT_LEADER_FOR_PARTITION`), or the fate of a request."""
    kind: Any = error if isinstance(error, type) else type(error)
    if issubclass(kind, BrokerResponseError) and kind.description:
        return str(kind.message)
    return {AnswerLost: "no answer", BrokerNotReached: "not reached"}.get(kind) or str(kind.__name__)


def _verdict(
    error: BaseException, client: Grantee, rights: Sequence[Right], topic: str | None
) -> tuple[type[SluiceError], str]:
    bootstrap = client.bootstrap
    match error:
        # The order counts: the last cases are of wider classes.
        case kafka_errors.AuthorizationError():
            remedy = client.remedy(list_missing_rights(type(error), rights, topic))
            granted = _here(bootstrap, "grants feeds their rights by: sluice kafka grant '*'")
            return NotAuthorized, f"{remedy}{granted}"
        case _ if isinstance(error, _NO_LOGIN):
            return NotAuthorized, describe_login(error)
        case kafka_errors.UnsupportedVersionError():
            return BrokerTooOld, "Sluice needs brokers of Apache Kafka 2.8 or newer"
        case _ if isinstance(error, _UNKNOWN_TOPIC):
            return UnknownTopic, "check the topic's name, and that this client may DESCRIBE it"
        case _ if isinstance(error, _FENCED):
            return CommitFenced, "nothing is lost; the next run commits again"
        case kafka_errors.CorruptRecordError():
            return CorruptBatch, "see the broker's log; another replica may hold the batch whole"
        case kafka_errors.UnsupportedCompressionTypeError():
            return UnsupportedBatch, "the topic holds a codec that this version of the protocol does not carry"
        case Untrusted():
            if error.code:
                return KafkaUnavailable, describe_certificate_failure(error.code, bootstrap)
            return NotAuthorized, describe_client_certificate(error.certificate)
        # Errors that no broker can mend: files that are missing, addresses that do not parse.
        case OSError() | ValueError() if is_hopeless(error):
            return (
                FeedError,
                "check the feed's `kafka:` section: bootstrap, files of certificate and key, password, proxy_url",
            )
        # The leader sent no bytes below its own end: tiered storage took too long, or records are missing.
        case NoRecordsReturned():
            return KafkaUnavailable, (
                "with tiered storage, raise the brokers' remote.fetch.max.wait.ms (or, if they have a quota,"
                " remote.log.manager.fetch.max.bytes.per.second), and repeat; without, compare the leader's log with"
                " other replicas (kafka-dump-log)"
            )
        case NoAddress():
            return KafkaUnavailable, (
                f"check that a broker listens at {bootstrap} and is reachable from here, and that `security_protocol`"
                f" in the feed's `kafka:` section is the listener's protocol{_local(bootstrap)}"
            )
        case _:
            return (
                KafkaUnavailable,
                f"check that brokers run and are reachable at {bootstrap}, and repeat{_local(bootstrap)}",
            )


def _local(bootstrap: str) -> str:
    return _here(bootstrap, "is started by: sluice kafka start")


def _here(bootstrap: str, what: str) -> str:
    """Return a hint if all addresses are on this machine: the project's own Kafka may be meant."""
    hosts = {address.rpartition(":")[0] for address in bootstrap.split(",")}
    return f"; the local Kafka of a project {what}" if hosts <= _LOOPBACK else ""


_LOOPBACK = {"127.0.0.1", "localhost", "[::1]"}


_KINDS = {
    kafka_errors.TopicAuthorizationFailedError: ResourceKind.TOPIC,
    kafka_errors.GroupAuthorizationFailedError: ResourceKind.GROUP,
    kafka_errors.TransactionalIdAuthorizationFailedError: ResourceKind.TRANSACTIONAL_ID,
}
_LEAST = {ResourceKind.TRANSACTIONAL_ID: Operation.WRITE, ResourceKind.CLUSTER: Operation.DESCRIBE}


def list_missing_rights(error: type[BaseException], rights: Sequence[Right], topic: str | None) -> list[Right]:
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


def describe_login(error: BaseException) -> str:
    """Return the remedy for a login that brokers refuse."""
    if isinstance(error, kafka_errors.SaslAuthenticationFailedError):
        if "GSSAPI" in str(error):  # in the broker's text
            return (
                "compare the clocks of this machine and the brokers (timedatectl), and the version of the key that the"
                " KDC uses (kvno SERVICE/HOST) with that in the brokers' keytab (klist -k KEYTAB); the brokers' log"
                " says more with -Dsun.security.krb5.debug=true"
            )
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
        "set `sasl_mechanism` in the feed's `kafka:` section to one that this listener offers: see the brokers'"
        " setting sasl.enabled.mechanisms"
    )


def describe_client_certificate(certificate: str) -> str:
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


def describe_certificate_failure(code: int, bootstrap: str) -> str:
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
