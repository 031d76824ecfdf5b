"""A real REST catalog of Iceberg: Nessie's server, on loopback and in memory, over a store that speaks S3.

Its one file comes from Maven, and runs on Java 21 or later, that of JAVA_HOME where it is set:

    mvn dependency:get -Dtransitive=false -Dartifact=org.projectnessie.nessie:nessie-quarkus:0.99.0:jar:runner
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tests.resources.kafka.tools import until
from tests.stores import Store

JAR = "SLUICE_TEST_NESSIE"
WAREHOUSE = "tables"
_FOUND = "repository/org/projectnessie/nessie/nessie-quarkus/*/nessie-quarkus-*-runner.jar"


def jar() -> Path | None:
    """The server's file, if it and a Java are here."""
    if shutil.which(_java()) is None:
        return None
    named = os.environ.get(JAR)
    return Path(named) if named else max((Path.home() / ".m2").glob(_FOUND), default=None)


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    return f"{home}/bin/java" if home else "java"


@contextmanager
def started(program: Path, store: Store, lake: str, folder: Path) -> Iterator[str]:
    """The server's address, while the block lasts; it keeps tables' metadata below the lake."""
    port, other = _free(), _free()
    s = store.settings
    options = "nessie.catalog.service.s3.default-options"
    said: dict[str, object] = {
        "quarkus.http.host": "127.0.0.1",
        "quarkus.http.port": port,
        "quarkus.management.host": "127.0.0.1",
        "quarkus.management.port": other,
        "quarkus.log.file.enable": "false",
        "nessie.version.store.type": "IN_MEMORY",
        "nessie.catalog.default-warehouse": WAREHOUSE,
        f"nessie.catalog.warehouses.{WAREHOUSE}.location": f"{lake}/tables",
        f"{options}.endpoint": s.endpoint,
        f"{options}.region": s.region,
        f"{options}.path-style-access": "true",
        f"{options}.request-signing-enabled": "false",
    }
    if s.access_key_id and s.secret_access_key:
        said |= {
            f"{options}.access-key": "urn:nessie-secret:quarkus:store",
            "store.name": s.access_key_id.get_secret_value(),
            "store.secret": s.secret_access_key.get_secret_value(),
        }
    flags = [f"-D{name}={value}" for name, value in said.items() if value is not None]
    command = [_java(), "-Xmx512m", *flags, "-jar", str(program)]
    with (folder / "nessie.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            until(lambda: process.poll() is not None or _answers(f"http://127.0.0.1:{port}/iceberg/v1/config"), 300)
            assert process.poll() is None, (folder / "nessie.log").read_text()[-4000:]
            yield f"http://127.0.0.1:{port}/iceberg"
        finally:
            process.terminate()
            process.wait(60)


def _answers(address: str) -> bool:
    try:
        with urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def _free() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
