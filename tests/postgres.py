"""A PostgreSQL server of one's own, on a socket in a folder of its own: it listens on no port."""

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

from tests.resources.kafka.tools import until

_PLACES = ("/usr/lib/postgresql/*/bin", "/opt/homebrew/opt/postgresql*/bin", "/usr/local/pgsql/bin")
_QUICK = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "max_connections=300")
_numbers = itertools.count(1)


def programs() -> Path | None:
    """The folder of the newest `postgres` and `initdb` on this machine."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    places = (p for place in _PLACES for p in Path("/").glob(place.lstrip("/")) if (p / "initdb").exists())
    return max(places, default=None)


@dataclass(frozen=True)
class Postgres:
    """A server that runs; `folder` has its socket."""

    folder: Path
    user: str = "dagster"

    def database(self, template: str = "template1") -> str:
        """A new database, as a copy of the template; its name."""
        name = f"dagster_{next(_numbers)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def execute(self, statement: str, database: str = "postgres") -> None:
        with closing(psycopg2.connect(host=str(self.folder), user=self.user, dbname=database)) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(statement)

    def address(self, database: str) -> str:
        """What infra/dagster.yaml takes from the environment."""
        return f"postgresql:///{database}?host={self.folder}&user={self.user}"

    def storage(self, database: str) -> str:
        """Lines of a `dagster.yaml`, as Dagster's documentation has them."""
        lines = ("storage:", "  postgres:", "    postgres_db:", f"      username: {self.user}", "      hostname: ''")
        return "\n".join((*lines, f"      db_name: {database}", f"      params: {{host: {self.folder}}}", ""))


@contextmanager
def started(found: Path) -> Iterator[Postgres]:
    """A server by the programs in that folder. Root, which PostgreSQL refuses, starts it as the user `postgres`."""
    folder = Path(tempfile.mkdtemp(prefix="pg-"))  # short: a socket's path has 107 bytes at most
    user = pwd.getpwnam("postgres") if os.geteuid() == 0 else None
    if user:
        os.chown(folder, user.pw_uid, user.pw_gid)
    who = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": ()} if user else {}
    made = Postgres(folder)
    quick = [word for setting in _QUICK for word in ("-c", setting)]
    try:
        initdb = [found / "initdb", "-D", folder / "data", "-U", made.user, "-A", "trust", "-E", "UTF8", "--no-sync"]
        subprocess.run([*initdb, "--locale=C"], cwd=folder, check=True, capture_output=True, **who)  # type: ignore[call-overload]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(  # type: ignore[call-overload]
                [found / "postgres", "-D", folder / "data", "-k", folder, "-c", "listen_addresses=", *quick],
                cwd=folder,
                stdout=log,
                stderr=log,
                **who,
            )
        try:
            until(lambda: _answers(made) or _ended(server, folder / "log"), 60)
            yield made
        finally:
            server.terminate()
            server.wait(30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _answers(server: Postgres) -> bool:
    try:
        server.execute("SELECT 1")
    except psycopg2.OperationalError:
        return False
    return True


def _ended(server: subprocess.Popen[bytes], log: Path) -> bool:
    assert server.poll() is None, log.read_text(errors="replace")
    return False
