"""Real REST catalogs of Iceberg on loopback, over an S3 store: Iceberg's reference server, and Nessie's.

The reference server comes from Maven Central by Ivy, once for each user (94 MB), and keeps its tables in SQLite. It
vends the store's credentials to clients. Nessie keeps them in memory. Its jar runs on Java 21 or later, from JAVA_HOME
if that is set:

    mvn dependency:get -Dtransitive=false -Dartifact=org.projectnessie.nessie:nessie-quarkus:0.99.0:jar:runner
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from sluice.resources.local import java
from tests.resources.kafka.tools import wait_until
from tests.stores import Store

JAR = "SLUICE_TEST_NESSIE"
WAREHOUSE = "tables"
VENDED = "vended"
"""The access key that the reference server vends; moto's server takes any."""
_JAR_PATTERN = "repository/org/projectnessie/nessie/nessie-quarkus/*/nessie-quarkus-*-runner.jar"
_VERSION = "1.10.0"
_OF_SPARK = ("hadoop-client-api-*.jar", "hadoop-client-runtime-*.jar", "slf4j-api-*.jar", "log4j-*.jar")
_IVY = f"""<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">
<info organisation="sluice" module="catalog"/><configurations><conf name="default"/></configurations>
<dependencies defaultconf="default->default">
  <dependency org="org.apache.iceberg" name="iceberg-open-api" rev="{_VERSION}" transitive="false">
    <artifact name="iceberg-open-api" type="jar" m:classifier="test-fixtures"/></dependency>
  <dependency org="org.apache.iceberg" name="iceberg-core" rev="{_VERSION}">
    <artifact name="iceberg-core" type="jar"/>
    <artifact name="iceberg-core" type="jar" m:classifier="tests"/></dependency>
  <dependency org="org.apache.iceberg" name="iceberg-aws" rev="{_VERSION}" transitive="false"/>
  <dependency org="org.apache.iceberg" name="iceberg-aws-bundle" rev="{_VERSION}" transitive="false"/>
  <dependency org="dev.failsafe" name="failsafe" rev="3.3.2" transitive="false"/>
  <dependency org="org.eclipse.jetty" name="jetty-servlet" rev="11.0.26"/>
  <dependency org="org.xerial" name="sqlite-jdbc" rev="3.50.3.0" transitive="false"/>
</dependencies></ivy-module>"""


def fetch_reference() -> Path | None:
    """Returns the folder of the reference server's jars and class; None without a compiler for Java or the jars."""
    source, digest = Path(__file__).with_name("ReferenceCatalog.java"), hashlib.sha256(_IVY.encode()).hexdigest()[:8]
    folder = java.cache() / f"iceberg-rest-{digest}"
    if folder.is_dir():
        return folder
    if (compiler := shutil.which("javac")) is None:
        return None
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=folder.name + ".", dir=folder.parent) as scratch:
        (Path(scratch) / "ivy.xml").write_text(_IVY)
        ivy = [java.find_java(), "-cp", f"{java.spark_jars()}/*", "org.apache.ivy.Main", "-ivy", "ivy.xml"]
        pattern = "jars/[artifact]-[revision](-[classifier]).[ext]"
        fetched = subprocess.run([*ivy, "-cache", "cache", "-retrieve", pattern], cwd=scratch, check=False)
        if fetched.returncode:
            return None
        classes = ["-d", "jars", "-cp", _list_classes(Path(scratch, "jars"))]
        subprocess.run([compiler, *classes, source], cwd=scratch, check=True)
        os.rename(Path(scratch, "jars"), folder)
    return folder


def _list_classes(folder: Path) -> str:
    others = (path for pattern in _OF_SPARK for path in java.spark_jars().glob(pattern))
    return ":".join(map(str, (folder, *folder.glob("*.jar"), *others)))


@contextmanager
def run_reference(jars: Path, store: Store, lake: str, folder: Path) -> Iterator[str]:
    """Run the reference server until the block ends, and yield its address. Metadata of tables is below the lake."""
    port, s = _find_free_port(), store.settings
    properties = {
        "catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
        "uri": f"jdbc:sqlite:{folder}/reference.db",
        "jdbc.schema-version": "V1",
        "warehouse": f"{lake}/tables",
        "io-impl": "org.apache.iceberg.aws.s3.S3FileIO",
        "s3.endpoint": s.endpoint,
        "s3.path-style-access": "true",
        "client.region": s.region,
        "s3.access-key-id": s.access_key_id.get_secret_value() if s.access_key_id else VENDED,
        "s3.secret-access-key": s.secret_access_key.get_secret_value() if s.secret_access_key else VENDED,
        "s3.session-token": VENDED,
        "include-credentials": "true",
    }
    names = {name: "CATALOG_" + name.replace("-", "__").replace(".", "_").upper() for name in properties}
    environment = {names[name]: value for name, value in properties.items() if value}
    command = [str(java.find_java()), "-Xmx512m", "-cp", _list_classes(jars)]
    address = f"http://127.0.0.1:{port}"
    with _run([*command, "org.apache.iceberg.rest.ReferenceCatalog", str(port)], address, folder, environment):
        yield address


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
def run_nessie(program: Path, store: Store, lake: str, folder: Path) -> Iterator[str]:
    """Run Nessie until the block ends, and yield its address. It keeps tables' metadata below the lake."""
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
    address = f"http://127.0.0.1:{port}/iceberg"
    with _run(command, address, folder, {}):
        yield address


@contextmanager
def _run(command: Sequence[str], address: str, folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    file = folder / "catalog.log"
    with file.open("wb") as log:
        own = {k: v for k, v in os.environ.items() if not k.startswith("CATALOG_")} | environment
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=own)
        try:
            wait_until(lambda: process.poll() is not None or _is_answering(f"{address}/v1/config"), 300)
            assert process.poll() is None, file.read_text()[-4000:]
            yield
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
