"""kafka-python's logins by a Kerberos ticket and by AWS's IAM, with errors of ours that name the command to type.

Promises: each login reads the ticket or credentials anew, so that renewed ones count at once. Errors repeat Kerberos'
own words, which name principals and files, and never a key, ticket or token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kafka.errors import KafkaConfigurationError
from kafka.net.sasl import register_sasl_mechanism
from kafka.net.sasl.gssapi import SaslMechanismGSSAPI
from kafka.net.sasl.msk import SaslMechanismAwsMskIam

from sluice.pipelines.errors import KafkaUnavailable, NotAuthorized, SetupError
from sluice.pipelines.util.extras import install, require

_CLOCK = "set the clocks of this machine, the KDC and the brokers by NTP (timedatectl): they may differ by five minutes"
_REALM = "name the realm and its KDC in /etc/krb5.conf, or in the file that KRB5_CONFIG names"
_SERVICE = (
    "name the brokers' principal SERVICE/HOST@REALM in the feed's `kafka:` section: SERVICE by"
    " sasl_kerberos_service_name, HOST by sasl_kerberos_domain_name or the names in `bootstrap`; a broker lists it by:"
    " klist -k KEYTAB"
)
_TICKET = (
    "get a ticket where the run and its tasks log in: kinit -k -t KEYTAB PRINCIPAL; or set KRB5_CLIENT_KTNAME to the"
    " keytab there, which gets and renews tickets by itself"
)
_REMEDIES = {
    -1765328377: _SERVICE,  # KRB5KDC_ERR_S_PRINCIPAL_UNKNOWN
    -1765328347: _CLOCK,  # KRB5KRB_AP_ERR_SKEW
    -1765328351: _CLOCK,  # KRB5KRB_AP_ERR_TKT_NYV
    -1765328250: _REALM,  # KRB5_CONFIG_CANTOPEN
    -1765328249: _REALM,  # KRB5_CONFIG_BADFORMAT
    -1765328230: _REALM,  # KRB5_REALM_UNKNOWN
    -1765328160: _REALM,  # KRB5_CONFIG_NODEFREALM
    -1765328164: _REALM,  # KRB5_REALM_CANT_RESOLVE
}
"""By MIT's minor codes; all others are about the ticket."""
_NO_KDC = -1765328228  # KRB5_KDC_UNREACH
_CONTEXT_EXPIRED = 12 << 16  # GSS_S_CONTEXT_EXPIRED


class Kerberos(SaslMechanismGSSAPI):  # type: ignore[misc]
    """kafka-python's mechanism. Raises SetupError without the package, NotAuthorized, KafkaUnavailable."""

    def __init__(self, **config: Any) -> None:
        with _explain_failures():
            super().__init__(**config)

    def receive(self, auth_bytes: bytes) -> None:
        with _explain_failures():
            super().receive(auth_bytes)

    def auth_details(self) -> str:
        with _explain_failures():
            return str(super().auth_details())


@contextmanager
def _explain_failures() -> Iterator[None]:
    """Raise errors of Kerberos as ours."""
    try:
        from gssapi.exceptions import GSSError
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError):
            compiled = "it is compiled with MIT's headers: apt-get install gcc libkrb5-dev"
            raise SetupError("gssapi is not installed", remedy=f"{install('kerberos')}; {compiled}") from None
        raise SetupError(f"gssapi cannot be loaded: {error}", remedy="apt-get install libgssapi-krb5-2") from None
    try:
        yield
    except GSSError as error:
        minor = (error.min_code + (1 << 31)) % (1 << 32) - (1 << 31)
        expired = error.maj_code == _CONTEXT_EXPIRED  # within the login; the minor code is none of Kerberos'
        texts = error.get_all_statuses(error.maj_code if expired else error.min_code, expired)
        message = f"no login by Kerberos: {'; '.join(texts)}"
    else:
        return
    if minor == _NO_KDC:
        raise KafkaUnavailable(message, remedy=f"start the KDC, or {_REALM}")
    raise NotAuthorized(message, remedy=_REMEDIES.get(minor, _TICKET))


class MskIam(SaslMechanismAwsMskIam):  # type: ignore[misc]
    """kafka-python's mechanism. Raises SetupError without botocore, NotAuthorized."""

    def __init__(self, **config: Any) -> None:
        require("botocore")
        super().__init__(**config)

    def _build_client(self) -> Any:
        try:
            return super()._build_client()
        except KafkaConfigurationError:
            missing = "AWS's settings name no region"
        except AttributeError:  # of the credentials, which are None
            missing = "there are no credentials of AWS"
        except Exception as error:  # noqa: BLE001 - botocore's are of many kinds, and may quote an answer
            missing = f"no credentials of AWS: {type(error).__name__}"
        remedy = (
            "set AWS_DEFAULT_REGION, and AWS_PROFILE or other credentials of AWS where the run and its tasks log in; to"
            " see them: aws sts get-caller-identity"
        )
        raise NotAuthorized(f"no login by AWS's IAM: {missing}", remedy=remedy)


register_sasl_mechanism("GSSAPI", Kerberos, overwrite=True)
register_sasl_mechanism("AWS_MSK_IAM", MskIam, overwrite=True)
