"""Security of the local Kafka: a CA, certificates, users, and the brokers' and clients' settings for them.

Promises: no listener is without TLS, none without authentication; clients without a right are refused. Secrets are
made here, random, in files that only their owner reads, and reaches no process's arguments. Certificates are X.509
in PEM with keys on P-256, made by `cryptography`, which is imported on first use (0.1 s): Java's keytool exports no
private key as PEM.

In the folder `secure/` of a cluster: `ca.pem` and `ca.key`; `broker-<id>.pem` (key and certificate, for Java); of each
user `<user>.pem`, `<user>.key`, `<user>.password`, and `<user>.properties` for Kafka's Java tools; `login.json`.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sluice.pipelines.errors import SetupError
from sluice.pipelines.feed.rights import Right
from sluice.resources.local.properties import HOST, Node, to_text

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

ADMIN, USER = "admin", "sluice"
USERS = (ADMIN, USER)
"""`admin` may do everything, `sluice` has granted rights only. Both log in by password or by certificate."""
_BROKER = "broker"
MECHANISM = "SCRAM-SHA-512"
LIFETIME = timedelta(days=397)
_TOO_OLD = timedelta(days=30)
LISTENERS = ("sasl_ssl", "ssl", "controller")
"""For passwords, for certificates, and for controllers."""


@dataclass(frozen=True)
class Secured:
    """The folder `secure/` of a cluster."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def login(self) -> Path:
        """The login of feeds without their own: kafka-python's settings for the user `sluice`, as JSON."""
        return self.folder / "login.json"

    def prepare(self, brokers: Sequence[int], addresses: str, renew: bool = False) -> None:
        """Create missing files, and renew certificates that expire within a month, or all. Raises SetupError."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if not self.ca.exists():
            authority = Authority.new()
            self._write("ca.key", authority.key_pem())
            self._write("ca.pem", authority.certificate_pem())
        for user in USERS:
            if not self._path(user, "password").exists():
                self._write(f"{user}.password", secrets.token_urlsafe(24))
            if renew or self._ends_soon(f"{user}.pem"):
                self.issue_user(user)
            self._write(f"{user}.properties", to_text(self._for_java(user, addresses)))
        self._write(self.login.name, json.dumps(self.client(USER)))
        for broker in brokers:
            if renew or self._ends_soon(f"broker-{broker}.pem"):
                self.issue_broker(broker)

    def issue_user(self, user: str, lifetime: timedelta = LIFETIME) -> None:
        """A new key and certificate for a user."""
        key, certificate = self._authority().issue(user, lifetime, hosts=())
        self._write(f"{user}.key", key)
        self._write(f"{user}.pem", certificate)

    def issue_broker(
        self, broker: int, lifetime: timedelta = LIFETIME, hosts: Sequence[str] = ("localhost", HOST), name: str = ""
    ) -> Path:
        """A new key and certificate for a broker, in the file `name` (its own: the one that it starts with)."""
        key, certificate = self._authority().issue(_BROKER, lifetime, hosts)
        return self._write(name or self.broker_file(broker).name, key + certificate)

    def broker_file(self, broker: int) -> Path:
        """A broker's key and certificate."""
        return self.folder / f"broker-{broker}.pem"

    def password(self, user: str = USER) -> str:
        """Raises SetupError."""
        return self._read(f"{user}.password").decode()

    def section(self, addresses: str, project: Path, by_certificate: bool = False) -> list[str]:
        """The lines of a feed's section `kafka:` for the user `sluice`; files are named from the project's folder."""
        settings = self.client(USER, by_certificate)
        if not by_certificate:
            settings["sasl_plain_password"] = f"${{file:{self._from(project, self._path(USER, 'password'))}}}"
        files = {k: self._from(project, Path(v)) for k, v in settings.items() if k.endswith("file")}
        return [
            "kafka:",
            *(f"  {k}: {json.dumps(v)}" for k, v in {"bootstrap": addresses, **settings, **files}.items()),
        ]

    @staticmethod
    def _from(project: Path, path: Path) -> str:
        return str(path.relative_to(project) if path.is_relative_to(project) else path)

    def client(self, user: str, by_certificate: bool = False) -> dict[str, Any]:
        """kafka-python's settings for a user, by password or by certificate. They hold the password."""
        if by_certificate:
            return {
                "security_protocol": "SSL",
                "ssl_cafile": str(self.ca),
                "ssl_certfile": str(self._path(user, "pem")),
                "ssl_keyfile": str(self._path(user, "key")),
            }
        return {
            "security_protocol": "SASL_SSL",
            "sasl_mechanism": MECHANISM,
            "sasl_plain_username": user,
            "sasl_plain_password": self.password(user),
            "ssl_cafile": str(self.ca),
        }

    def scram_arguments(self) -> Path:
        """A file of StorageTool's arguments that make the users: so their passwords stand on no command line."""
        lines = [f"{MECHANISM}=[name={user},password={self.password(user)}]" for user in USERS]
        return self._write("scram.arguments", "".join(f"--add-scram\n{line}\n" for line in lines))

    def listeners(self, node: SecuredNode) -> dict[str, str]:
        """The server properties of one node. Paths are relative to its folder, a sibling of `secure/`."""
        keystore = f"../{self.folder.name}/broker-{node.id}.pem"
        ours = f"SASL_SSL://{HOST}:{node.port},SSL://{HOST}:{node.certificate_port}"
        return {
            "listeners": f"{ours},CONTROLLER://{HOST}:{node.controller_port}",
            "advertised.listeners": ours,
            "listener.security.protocol.map": "SASL_SSL:SASL_SSL,SSL:SSL,CONTROLLER:SSL",
            "inter.broker.listener.name": "SSL",
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": f"../{self.folder.name}/ca.pem",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": keystore,
            # Named for each listener too: brokers load a certificate again where its listener's setting is set again.
            **{f"listener.name.{listener}.ssl.keystore.location": keystore for listener in LISTENERS},
            "ssl.client.auth": "required",
            "listener.name.sasl_ssl.ssl.client.auth": "none",
            "ssl.principal.mapping.rules": "RULE:^CN=([^,]+).*$/$1/",
            "listener.name.sasl_ssl.sasl.enabled.mechanisms": MECHANISM,
            f"listener.name.sasl_ssl.{MECHANISM.lower()}.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "false",
            "super.users": f"User:{_BROKER};User:{ADMIN}",
        }

    def _for_java(self, user: str, addresses: str) -> dict[str, str]:
        login = "org.apache.kafka.common.security.scram.ScramLoginModule required"
        return {
            "bootstrap.servers": addresses,
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": MECHANISM,
            "sasl.jaas.config": f'{login} username="{user}" password="{self.password(user)}";',
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.ca),
        }

    def java_properties(self, user: str = ADMIN) -> Path:
        """Returns the path of the file for `--command-config` of Kafka's Java tools."""
        return self._path(user, "properties")

    def _authority(self) -> Authority:
        return Authority.read(self._read("ca.key"), self._read("ca.pem"))

    def _ends_soon(self, name: str) -> bool:
        path = self.folder / name
        return not path.exists() or left(path.read_bytes()) < _TOO_OLD

    def _path(self, user: str, ending: str) -> Path:
        return self.folder / f"{user}.{ending}"

    def _read(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise SetupError(
                f"{self.folder / name} of the secured local Kafka cannot be read: {error.strerror}",
                remedy=f"put it back; or remove {self.folder.parent}, with all data in it, and start it again",
            ) from None

    def _write(self, name: str, content: str | bytes) -> Path:
        """Replace a file whole; only we may read it."""
        path = self.folder / name
        partial = path.with_name(f"{name}.{os.getpid()}.partial")
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
        os.replace(partial, path)
        return path


class SecuredNode(Node, Protocol):
    """A node whose clients may also come by certificate, on a port of its own."""

    @property
    def certificate_port(self) -> int: ...


def reload_settings(keystore: Path, listeners: Sequence[str]) -> dict[str, str]:
    """The dynamic settings by which a broker's listeners load their certificate from that file."""
    return {f"listener.name.{listener}.ssl.keystore.location": str(keystore) for listener in listeners}


_LIFETIME = timedelta(days=3650)
_SKEW = timedelta(hours=1)  # clocks differ


@dataclass(frozen=True)
class Authority:
    """A certificate authority, for this cluster alone."""

    key: EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def new(cls) -> Authority:
        from cryptography import x509

        key = _new_key()
        name = _make_name(f"local Kafka's CA {secrets.token_hex(4)}")
        builder = _builder(name, name, key, _LIFETIME).add_extension(x509.BasicConstraints(True, 0), critical=True)
        return cls(key, _sign(builder, key))

    @classmethod
    def read(cls, key: bytes, certificate: bytes) -> Authority:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        private_key = load_pem_private_key(key, None)
        if not isinstance(private_key, EllipticCurvePrivateKey):
            raise SetupError("the CA's key of the local Kafka is not one of ours", remedy="remove the cluster's folder")
        return cls(private_key, x509.load_pem_x509_certificate(last_certificate(certificate)))

    def issue(self, name: str, lifetime: timedelta, hosts: Sequence[str]) -> tuple[bytes, bytes]:
        """A new key and its certificate, both PEM. A certificate of a lifetime below zero has ended already."""
        from cryptography import x509
        from cryptography.x509.oid import ExtendedKeyUsageOID as Usage

        key = _new_key()
        builder = _builder(_make_name(name), self.certificate.subject, key, lifetime)
        builder = builder.add_extension(x509.BasicConstraints(False, None), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([Usage.CLIENT_AUTH, Usage.SERVER_AUTH]), critical=False)
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False
        )
        if hosts:
            names = x509.SubjectAlternativeName([_host(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        return _key_pem(key), _certificate_pem(_sign(builder, self.key))

    def key_pem(self) -> bytes:
        return _key_pem(self.key)

    def certificate_pem(self) -> bytes:
        return _certificate_pem(self.certificate)


def left(pem: bytes) -> timedelta:
    """How long the last certificate in the PEM text is still valid."""
    from cryptography import x509

    return x509.load_pem_x509_certificate(last_certificate(pem)).not_valid_after_utc - datetime.now(UTC)


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, lifetime: timedelta
) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + lifetime) - _SKEW)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _sign(builder: x509.CertificateBuilder, key: EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography.hazmat.primitives import hashes

    return builder.sign(key, hashes.SHA256())


def _make_name(name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    return key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())


def _certificate_pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def last_certificate(pem: bytes) -> bytes:
    """The last certificate in a file that may hold a key, too."""
    return pem[pem.rindex(b"-----BEGIN CERTIFICATE-----") :]


class AdministeredKafka(Protocol):
    """The local Kafka, for changes of rights by its administrator."""

    @property
    def bootstrap(self) -> str: ...

    @property
    def secured(self) -> Secured | None: ...

    def client(self) -> dict[str, Any]: ...


def grant(kafka: AdministeredKafka, rights: Iterable[Right], user: str = USER) -> None:
    """Give the user the rights. Raises SetupError for a plain cluster, KafkaUnavailable."""
    _change_rights(kafka, rights, user, lambda admin, acls: admin.create_acls(acls)["failed"])


def revoke(kafka: AdministeredKafka, rights: Iterable[Right], user: str = USER) -> None:
    """Take the rights from the user; those that it does not have are passed over."""
    _change_rights(kafka, rights, user, lambda admin, acls: [error for _, _, error in admin.delete_acls(acls)])


def _change_rights(
    kafka: AdministeredKafka, rights: Iterable[Right], user: str, change: Callable[[Any, list[Any]], Iterable[Any]]
) -> None:
    """`change` returns the error classes of Kafka's answer, which is a success for every right without one."""
    # Late, since commands only ask for addresses: the client takes 0.3 s to import.
    from kafka import KafkaAdminClient
    from kafka.admin import ACL, ACLOperation, ACLPermissionType, ACLResourcePatternType, ResourcePattern, ResourceType
    from kafka.errors import KafkaError, NoError

    from sluice.resources.kafka.connection.connection_settings import KafkaAddress, connecting
    from sluice.resources.kafka.connection.zero_copy_transport import client_of
    from sluice.resources.kafka.protocol.kafka_errors import explain

    if kafka.secured is None:
        raise SetupError("this local Kafka has no users and asks for no rights", remedy="everybody may do everything")
    acls = [
        ACL(
            f"User:{user}",
            "*",
            ACLOperation[right.operation],
            ACLPermissionType.ALLOW,
            ResourcePattern(ResourceType[right.kind.name], right.name, ACLResourcePatternType[right.pattern.name]),
        )
        for right in rights
    ]
    access = KafkaAddress(kafka.bootstrap, kafka.client())
    try:
        client = client_of(KafkaAdminClient, bootstrap_servers=access.bootstrap, **access.client_settings())
        with closing(client):
            # Kafka answers for each right; the first refusal ends the change, and a repeated grant changes nothing.
            for error in change(client, acls):
                if error is not NoError:
                    raise error()
    except (KafkaError, OSError) as error:
        raise explain(error, connecting(access, 1).grantee, f"changing the rights of {user}") from None
