"""A private PostgreSQL server on a socket in its own folder; it listens on no port."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg2

from tests.resources.kafka.tools import wait_until

_PATTERNS = ("/usr/lib/postgresql/*/bin", "/opt/homebrew/opt/postgresql*/bin", "/usr/local/pgsql/bin")
_QUICK = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "max_connections=300")
_numbers = itertools.count(1)


def find_programs() -> Path | None:
    """Returns the folder of the newest `postgres` and `initdb` on this machine."""
    if initdb := shutil.which("initdb"):
        return Path(initdb).resolve().parent
    folders = (p for pattern in _PATTERNS for p in Path("/").glob(pattern.lstrip("/")) if (p / "initdb").exists())
    return max(folders, default=None)


@dataclass(frozen=True)
class Postgres:
    """A running server; `folder` has its socket."""

    folder: Path
    user: str = "dagster"

    def create_database(self, template: str = "template1") -> str:
        """Create a database as a copy of the template, and return its name."""
        name = f"dagster_{next(_numbers)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def execute(self, statement: str, database: str = "postgres") -> None:
        with closing(psycopg2.connect(host=str(self.folder), user=self.user, dbname=database)) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(statement)

    def build_address(self, database: str) -> str:
        """Returns the URL that infra/dagster.yaml takes from the environment."""
        return f"postgresql:///{database}?host={self.folder}&user={self.user}"

    def render_storage(self, database: str) -> str:
        """Returns the storage section of a `dagster.yaml`, as in Dagster's documentation."""
        lines = ("storage:", "  postgres:", "    postgres_db:", f"      username: {self.user}", "      hostname: ''")
        return "\n".join((*lines, f"      db_name: {database}", f"      params: {{host: {self.folder}}}", ""))


@contextmanager
def run_server(programs: Path) -> Iterator[Postgres]:
    """Run a server with the programs in that folder. PostgreSQL refuses root, which runs it as the user `postgres`."""
    folder = Path(tempfile.mkdtemp(prefix="pg-"))  # short: a socket's path has 107 bytes at most
    user = pwd.getpwnam("postgres") if os.geteuid() == 0 else None
    if user:
        os.chown(folder, user.pw_uid, user.pw_gid)
    identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": ()} if user else {}
    postgres = Postgres(folder)
    quick = [word for setting in _QUICK for word in ("-c", setting)]
    try:
        initdb = [
            programs / "initdb",
            "-D",
            folder / "data",
            "-U",
            postgres.user,
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-sync",
        ]
        subprocess.run([*initdb, "--locale=C"], cwd=folder, check=True, capture_output=True, **identity)  # type: ignore[call-overload]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(  # type: ignore[call-overload]
                [programs / "postgres", "-D", folder / "data", "-k", folder, "-c", "listen_addresses=", *quick],
                cwd=folder,
                stdout=log,
                stderr=log,
                **identity,
            )
        try:
            wait_until(lambda: _is_answering(postgres) or _has_ended(server, folder / "log"), 60)
            yield postgres
        finally:
            server.terminate()
            server.wait(30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_answering(server: Postgres) -> bool:
    try:
        server.execute("SELECT 1")
    except psycopg2.OperationalError:
        return False
    return True


def _has_ended(server: subprocess.Popen[bytes], log: Path) -> bool:
    assert server.poll() is None, log.read_text(errors="replace")
    return False
