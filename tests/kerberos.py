"""A Kerberos realm on loopback: MIT's KDC as a process, with a database, keytabs and configuration in one folder.

Debian's packages have its programs; without them, or without Python's `gssapi`, tests that use it are skipped.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from sluice.resources.local.local_kafka import free_ports

REALM = "SLUICE.TEST"
_PROGRAMS = ("krb5kdc", "kdb5_util", "kadmin.local", "kinit", "kdestroy", "klist")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def require_kerberos() -> None:
    """Skip the calling test if this machine has no KDC, or Python no `gssapi`."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing or find_spec("gssapi") is None:
        pytest.skip(f"no {', '.join(missing) or 'gssapi'} here: infra/kerberos.sh installs a KDC and gssapi")


def find_faketime() -> str:
    """Returns the library that shifts a process's clock; skips the calling test without one."""
    libraries = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    if not libraries:
        pytest.skip("no faketime here: infra/kerberos.sh installs it")
    return str(libraries[0])


@dataclass(frozen=True)
class Realm:
    """The realm in `folder`, whose KDC listens on `port`."""

    folder: Path
    port: int

    @property
    def configuration(self) -> Path:
        return self.folder / "krb5.conf"

    @property
    def variables(self) -> Mapping[str, str]:
        """Variables that make every program of MIT's libraries use this realm."""
        return {
            "KRB5_CONFIG": str(self.configuration),
            "KRB5_KDC_PROFILE": str(self.folder / "kdc.conf"),
            "KRB5RCACHEDIR": str(self.folder),
        }

    def run(self, *command: str, tickets: Path | None = None) -> str:
        """Run one of MIT's programs and return its output; CalledProcessError if it fails."""
        environment = {**os.environ, **self.variables, "PATH": _PATH}
        if tickets:
            environment["KRB5CCNAME"] = f"FILE:{tickets}"
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}"
        return done.stdout

    def add(self, principal: str, name: str = "") -> Path:
        """Add a principal with a random key, and return its keytab."""
        keytab = self.folder / f"{name or principal.partition('/')[0]}.keytab"
        self.run("kadmin.local", "-q", f"addprinc -randkey {principal}@{REALM}")
        self.run("kadmin.local", "-q", f"ktadd -k {keytab} {principal}@{REALM}")
        return keytab

    def get_ticket(self, principal: str, tickets: Path, *options: str) -> None:
        """Get a ticket by the principal's keytab, as the pages advise."""
        keytab = self.folder / f"{principal}.keytab"
        self.run("kinit", *options, "-k", "-t", str(keytab), f"{principal}@{REALM}", tickets=tickets)

    def has_ticket(self, tickets: Path) -> bool:
        """Returns whether the file has a valid ticket."""
        environment = {**os.environ, **self.variables, "PATH": _PATH}
        return subprocess.run(["klist", "-s", f"FILE:{tickets}"], env=environment, check=False).returncode == 0


@contextmanager
def open_realm(folder: Path) -> Iterator[Realm]:
    """Run a KDC in a folder inside the block."""
    ((port, _),) = free_ports(1, 2)
    realm = Realm(folder, port)
    realm.configuration.write_text(
        f"""[libdefaults]
default_realm = {REALM}
dns_lookup_kdc = false
dns_lookup_realm = false
dns_canonicalize_hostname = false
rdns = false
udp_preference_limit = 1
[realms]
{REALM} = {{
  kdc = 127.0.0.1:{port}
}}
"""
    )
    (folder / "kdc.conf").write_text(
        f"""[kdcdefaults]
kdc_listen = ""
kdc_tcp_listen = 127.0.0.1:{port}
[realms]
{REALM} = {{
  database_name = {folder}/principal
  key_stash_file = {folder}/stash
  acl_file = {folder}/acl
  max_life = 10h
  max_renewable_life = 1d
}}
"""
    )
    realm.run("kdb5_util", "create", "-s", "-r", REALM, "-P", secrets.token_urlsafe(16))
    with (folder / "kdc.log").open("wb") as log:
        kdc = subprocess.Popen(
            ["krb5kdc", "-n", "-r", REALM],
            env={**os.environ, **realm.variables, "PATH": _PATH},
            stdout=log,
            stderr=log,
        )
    try:
        yield realm
    finally:
        kdc.kill()
        kdc.wait()
