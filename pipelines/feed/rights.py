"""The rights in Kafka (ACLs) that a feed needs, by operation. The only table of them.

Docs, errors, `sluice acls` and the local Kafka's grants all come from here; a test grants exactly these on a real
broker and takes each away in turn. READ and WRITE imply DESCRIBE, as in Kafka.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from sluice.pipelines.feed.sections import CommitMode, OffsetStore

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.feed.kafka_section import KafkaSettings


class Operation(StrEnum):
    """An operation, by Kafka's name."""

    READ = "READ"
    WRITE = "WRITE"
    CREATE = "CREATE"
    DESCRIBE = "DESCRIBE"
    DESCRIBE_CONFIGS = "DESCRIBE_CONFIGS"


class ResourceKind(StrEnum):
    """A resource, by the option of `kafka-acls`."""

    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional-id"
    CLUSTER = "cluster"


class NamePattern(StrEnum):
    """The reach of a name: one resource, or all that begin with it."""

    LITERAL = "literal"
    PREFIXED = "prefixed"


ANY = "*"
"""The literal name that means every resource of a kind."""


@dataclass(frozen=True, slots=True)
class Right:
    """One operation on one resource. `need` is its purpose, `instead` the setting that avoids it. Without an
    `optional` one the feed still lands."""

    operation: Operation
    kind: ResourceKind
    name: str
    need: str
    pattern: NamePattern = NamePattern.LITERAL
    optional: bool = False
    instead: str = ""

    @property
    def what(self) -> str:
        """The resource in words: `topic orders`, `topics orders-…`."""
        kind = self.kind.replace("-", " ")
        if self.kind is ResourceKind.CLUSTER:
            return "the cluster"
        if self.name == ANY:
            return f"all {kind}s"
        return f"{kind}s {self.name}…" if self.pattern is NamePattern.PREFIXED else f"{kind} {self.name}"

    def __str__(self) -> str:
        return f"{self.operation} on {self.what}"

    def covers(self, kind: ResourceKind, name: str) -> bool:
        """Returns whether it covers that resource."""
        if self.kind is not kind:
            return False
        if self.pattern is NamePattern.PREFIXED:
            return name.startswith(self.name)
        return self.name in (name, ANY) or kind is ResourceKind.CLUSTER


CLUSTER = "kafka-cluster"
"""What Kafka calls the cluster as a resource."""


def rights_of(feed: Feed) -> tuple[Right, ...]:
    """Returns the rights of the feed's principal, required first. A common prefix covers topics of patterns."""
    return (*_list_required(feed), *_optional(feed))


def _list_required(feed: Feed) -> Iterable[Right]:
    for name, pattern in _topics(feed):
        yield Right(Operation.READ, ResourceKind.TOPIC, name, "to read records, and to commit their offsets", pattern)
    match feed.commit:
        case _ if feed.offsets.store is OffsetStore.ZOOKEEPER:
            pass  # the group is not in Kafka
        case CommitMode.NONE:
            yield Right(
                Operation.DESCRIBE, ResourceKind.GROUP, feed.group, "to read the committed offsets of the group"
            )
        case mode:
            yield Right(Operation.READ, ResourceKind.GROUP, feed.group, "to join the group and commit for it")
            if mode is CommitMode.TRANSACTIONAL:
                need, instead = "to commit in a transaction", "set `commit: plain` in the feed"
                key = feed.transactional_id
                yield Right(Operation.WRITE, ResourceKind.TRANSACTIONAL_ID, key, need, instead=instead)
    if feed.dead_letters:
        yield Right(Operation.WRITE, ResourceKind.TOPIC, feed.dead_letters.topic, "to send dead letters")


def _optional(feed: Feed) -> Iterable[Right]:
    for name, pattern in _topics(feed):
        need = "to warn before retention deletes pending records"
        yield Right(Operation.DESCRIBE_CONFIGS, ResourceKind.TOPIC, name, need, pattern, optional=True)
    need = "to warn before the group's offsets expire"
    yield Right(Operation.DESCRIBE_CONFIGS, ResourceKind.CLUSTER, CLUSTER, need, optional=True)
    need = "to balance tasks by bytes, and to name open transactions of others"
    yield Right(Operation.DESCRIBE, ResourceKind.CLUSTER, CLUSTER, need, optional=True)


def rights_to_produce(topics: Iterable[str], transactional_id: str | None = None) -> tuple[Right, ...]:
    """Returns the rights for sending records to the topics."""
    sent = [Right(Operation.WRITE, ResourceKind.TOPIC, name, "to send records") for name in topics]
    if transactional_id is None:
        return tuple(sent)
    need, instead = "to send in transactions", "leave --transactional out"
    return *sent, Right(Operation.WRITE, ResourceKind.TRANSACTIONAL_ID, transactional_id, need, instead=instead)


def rights_to_republish(topic: str, name: str, *, all_of: bool = False) -> tuple[Right, ...]:
    """Returns the rights to send landed records to the topic, under one republish's name or all that begin so."""
    write, names = "to send records", NamePattern.PREFIXED if all_of else NamePattern.LITERAL
    return (
        Right(Operation.WRITE, ResourceKind.TOPIC, topic, write),
        Right(Operation.READ, ResourceKind.TOPIC, topic, "to keep how far it is with the records"),
        Right(Operation.READ, ResourceKind.GROUP, name, "to keep how far it is with the records", names),
        Right(Operation.WRITE, ResourceKind.TRANSACTIONAL_ID, name, "to send each record once", names),
    )


def rights_to_create(topics: Iterable[str]) -> tuple[Right, ...]:
    """Returns the rights for creating the topics."""
    return tuple(Right(Operation.CREATE, ResourceKind.TOPIC, name, "to create it") for name in topics)


def rights_to_commit(group: str, topics: Iterable[str]) -> tuple[Right, ...]:
    """Returns the rights for committing offsets of the topics for a group."""
    read = [Right(Operation.READ, ResourceKind.TOPIC, name, "to commit its offsets") for name in sorted(topics)]
    return Right(Operation.READ, ResourceKind.GROUP, group, "to commit for it"), *read


def right_to_see(group: str) -> Right:
    """Returns the rights for describing a group."""
    return Right(Operation.DESCRIBE, ResourceKind.GROUP, group, "to see its members and where it stands")


def _topics(feed: Feed) -> Sequence[tuple[str, NamePattern]]:
    if feed.topics.names:
        return [(name, NamePattern.LITERAL) for name in feed.topics.names]
    prefixes = sorted({_prefix(pattern) for pattern in feed.topics.include} or {""})
    if "" in prefixes:
        return [(ANY, NamePattern.LITERAL)]
    shortest = [p for p in prefixes if not any(p != other and p.startswith(other) for other in prefixes)]
    return [(prefix, NamePattern.PREFIXED) for prefix in shortest]


_LITERAL = re.compile(r"(?:[A-Za-z0-9_-]|\\\.)*")


def _prefix(pattern: str) -> str:
    """Returns the longest known prefix of all names that the regular expression matches; it may be empty."""
    if "|" in pattern:
        return ""
    match = _LITERAL.match(pattern)
    literal, rest = (match[0], pattern[match.end() :]) if match else ("", pattern)
    prefix = literal.replace("\\.", ".")
    return prefix[:-1] if rest[:1] in tuple("*?{") else prefix


@dataclass(frozen=True, slots=True)
class Grantee:
    """The grantee: the principal, and the addresses of its Kafka."""

    principal: str
    bootstrap: str

    def remedy(self, rights: Sequence[Right]) -> str:
        """How the rights are granted, or done without, in one sentence."""
        instead = [f"; or {r.instead}" for r in rights if r.instead]
        what = " and ".join(dict.fromkeys(map(str, rights)))
        mapped = (
            " (or to the name that the brokers' ssl.principal.mapping.rules map it to)" if "=" in self.principal else ""
        )
        return f"grant {what} to {self.principal}{mapped}: {'; '.join(self.commands(rights))}{''.join(instead)}"

    def commands(self, rights: Iterable[Right]) -> list[str]:
        """Lines to paste, one for each resource: Kafka's own `kafka-acls` that adds the rights."""
        by_resource: dict[tuple[ResourceKind, str, NamePattern], list[Operation]] = {}
        for right in rights:
            by_resource.setdefault((right.kind, right.name, right.pattern), []).append(right.operation)
        return [self._command(*resource, operations) for resource, operations in by_resource.items()]

    def _command(self, kind: ResourceKind, name: str, pattern: NamePattern, operations: Sequence[Operation]) -> str:
        words = ["kafka-acls", "--bootstrap-server", self.bootstrap, "--command-config", "admin.properties", "--add"]
        words += ["--allow-principal", self.principal]
        for operation in operations:
            words += ["--operation", operation.replace("_", " ").title().replace(" ", "")]
        words += [f"--{kind}"] if kind is ResourceKind.CLUSTER else [f"--{kind}", name]
        words += ["--resource-pattern-type", pattern] if pattern is NamePattern.PREFIXED else []
        return shlex.join(words)


def principal_of(client: Mapping[str, Any]) -> str:
    """Return the Kafka principal of these kafka-python settings; `User:NAME` if they do not show it.

    The principal of a certificate is its subject, unless the brokers' ssl.principal.mapping.rules map it to another;
    that of a Kerberos ticket is its first part, unless sasl.kerberos.principal.to.local.rules do.
    """
    if user := client.get("sasl_plain_username"):
        return f"User:{user}"
    if client.get("security_protocol") == "SSL" and (file := client.get("ssl_certfile")):
        return f"User:{_subject(file) or 'NAME'}"
    if client.get("sasl_mechanism") == "GSSAPI":
        return f"User:{_read_ticket_holder() or 'NAME'}"
    return "User:NAME" if client.get("security_protocol", "PLAINTEXT") != "PLAINTEXT" else "User:ANONYMOUS"


def grantee(kafka: KafkaSettings) -> Grantee:
    """Return the principal of a feed's settings, and its bootstrap address."""
    names = {"security_protocol", "sasl_mechanism", "sasl_plain_username", "ssl_certfile"}
    return Grantee(principal_of(kafka.model_dump(exclude_none=True, include=names)), kafka.bootstrap)


def _read_ticket_holder() -> str:
    """Return the first part of the principal in this process's Kerberos ticket; empty without a valid one."""
    with contextlib.suppress(Exception):  # ImportError, GSSError
        from gssapi import Credentials

        return re.split("[/@]", str(Credentials(usage="initiate").name))[0]
    return ""


def _subject(file: str) -> str:
    """Return the subject of the certificate in the file, as Java writes it; empty if unreadable."""
    from cryptography import x509

    with contextlib.suppress(OSError, ValueError), open(file, "rb") as pem:
        return x509.load_pem_x509_certificates(pem.read())[0].subject.rfc4514_string()
    return ""
