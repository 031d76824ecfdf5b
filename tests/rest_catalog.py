"""A real REST catalog of Iceberg: Nessie's server, on loopback and in memory, over an S3 store.

Its jar comes from Maven, and runs on Java 21 or later, from JAVA_HOME if that is set:

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

from tests.resources.kafka.tools import wait_until
from tests.stores import Store

JAR = "SLUICE_TEST_NESSIE"
WAREHOUSE = "tables"
_JAR_PATTERN = "repository/org/projectnessie/nessie/nessie-quarkus/*/nessie-quarkus-*-runner.jar"


def find_jar() -> Path | None:
    """Returns the path of the server's jar; None without it or without Java."""
    if shutil.which(_find_java()) is None:
        return None
    path = os.environ.get(JAR)
    return Path(path) if path else max((Path.home() / ".m2").glob(_JAR_PATTERN), default=None)


def _find_java() -> str:
    home = os.environ.get("JAVA_HOME")
    return f"{home}/bin/java" if home else "java"


@contextmanager
def run_server(program: Path, store: Store, lake: str, folder: Path) -> Iterator[str]:
    """Run the server until the block ends, and yield its address. It keeps tables' metadata below the lake."""
    port, management_port = _find_free_port(), _find_free_port()
    s = store.settings
    options = "nessie.catalog.service.s3.default-options"
    properties: dict[str, object] = {
        "quarkus.http.host": "127.0.0.1",
        "quarkus.http.port": port,
        "quarkus.management.host": "127.0.0.1",
        "quarkus.management.port": management_port,
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
        properties |= {
            f"{options}.access-key": "urn:nessie-secret:quarkus:store",
            "store.name": s.access_key_id.get_secret_value(),
            "store.secret": s.secret_access_key.get_secret_value(),
        }
    flags = [f"-D{name}={value}" for name, value in properties.items() if value is not None]
    command = [_find_java(), "-Xmx512m", *flags, "-jar", str(program)]
    with (folder / "nessie.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            wait_until(
                lambda: process.poll() is not None or _is_answering(f"http://127.0.0.1:{port}/iceberg/v1/config"), 300
            )
            assert process.poll() is None, (folder / "nessie.log").read_text()[-4000:]
            yield f"http://127.0.0.1:{port}/iceberg"
        finally:
            process.terminate()
            process.wait(60)


def _is_answering(address: str) -> bool:
    try:
        with urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
