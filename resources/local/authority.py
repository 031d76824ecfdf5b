"""A certificate authority of our own, for the local Kafka: it makes keys and certificates, X.509 in PEM.

Keys are on the curve P-256. `cryptography` is imported when it is needed, which costs a tenth of a second.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING

from sluice.pipelines.errors import SetupError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

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
