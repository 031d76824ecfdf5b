"""What secures the local Kafka: a CA, certificates, users, and the brokers' and clients' settings for them.

Promises: no listener is without TLS, none without authentication; clients without a right are refused. Secrets are
made here, random, in files that only their owner reads, and reaches no process's arguments. Certificates are X.509
in
PEM, which kafka-python and Java both read; Python makes them, since Java's keytool gives no private key away as PEM.

In the folder `secure/` of a cluster: `ca.pem` and `ca.key`; `broker-<id>.pem` (key and certificate, for Java); of each
user `<user>.pem`, `<user>.key`, `<user>.password`, and `<user>.properties` for Kafka's Java tools; `login.json`.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from sluice.pipelines.errors import SetupError
from sluice.resources.local.authority import Authority, left
from sluice.resources.local.properties import HOST, Node, written

ADMIN, USER = "admin", "sluice"
USERS = (ADMIN, USER)
"""`admin` may do everything, `sluice` what it is granted. Both log in by password or by certificate."""
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
        """By which feeds log in that say nothing of it: kafka-python's settings for the user `sluice`, as JSON."""
        return self.folder / "login.json"

    def prepare(self, brokers: Sequence[int], addresses: str, anew: bool = False) -> None:
        """Make what is missing, and certificates anew that end within a month, or all. Raises SetupError."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if not self.ca.exists():
            authority = Authority.new()
            self._write("ca.key", authority.key_pem())
            self._write("ca.pem", authority.certificate_pem())
        for user in USERS:
            if not self._path(user, "password").exists():
                self._write(f"{user}.password", secrets.token_urlsafe(24))
            if anew or self._ends_soon(f"{user}.pem"):
                self.issue_user(user)
            self._write(f"{user}.properties", written(self._for_java(user, addresses)))
        self._write(self.login.name, json.dumps(self.client(USER)))
        for broker in brokers:
            if anew or self._ends_soon(f"broker-{broker}.pem"):
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
            # Named for each listener too: brokers load a certificate anew where its listener's setting is set again.
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
