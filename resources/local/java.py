"""Java on this machine: which `java` we run, and jars fetched once by the Ivy that pyspark carries.

Promises: `find_java` returns a Java of at least 17 or raises one clear error. `jars` returns a folder that is
complete: it appears by a rename, is shared by all processes of the user and is never half filled.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.pipelines.errors import SetupError
from sluice.pipelines.util import extras
from sluice.pipelines.util.locks import check_ours, is_ours, locking, protect

if TYPE_CHECKING:
    from sluice.pipelines.model.receipts import Reporter

MINIMUM = 17
INSTALL_HINT = (
    f"install a Java runtime {MINIMUM} or newer (Debian: apt-get install openjdk-17-jre-headless; "
    "macOS: brew install openjdk@17) or point JAVA_HOME at one"
)
_PLACES = (
    "/usr/lib/jvm/*",
    "/opt/java*",
    "/opt/homebrew/opt/openjdk*",
    "/usr/local/opt/openjdk*",
    "/Library/Java/JavaVirtualMachines/*/Contents/Home",
    "~/.sdkman/candidates/java/*",
)
# Lines with Ivy's errors.
_TELLING = re.compile(r":: \S+#.*not found|FAILED|failed|Server access|xception")

_POLL = 0.1  # seconds between two reports of a download

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Artifact:
    """A jar on Maven Central with its dependencies, less the modules named in `without` (`org:name`)."""

    org: str
    name: str
    version: str
    without: tuple[str, ...] = ()


def find_java() -> Path:
    """The `java` executable to run: from JAVA_HOME, the PATH or the usual folders, the first of at least 17.

    Raises SetupError, naming what to install, when there is none.
    """
    if java := find_newer(MINIMUM):
        return java
    raise SetupError(f"no Java {MINIMUM} or newer on this machine", remedy=INSTALL_HINT)


@functools.cache
def find_newer(minimum: int) -> Path | None:
    """The first `java` of at least this major version, where `find_java` looks; None when there is none."""
    there = (c for c in _candidates() if c.is_file())
    return next((c for c in there if (_read_release(c) or major(c)) >= minimum), None)


def java_home() -> Path:
    """The home folder of `find_java()`, as Spark wants it in JAVA_HOME."""
    return find_java().resolve().parent.parent


def _candidates() -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home, "bin", "java")
    if on_path := shutil.which("java"):
        yield Path(on_path)
    for folder in map(os.path.expanduser, _PLACES):
        yield from sorted(Path("/").glob(folder.lstrip("/") + "/bin/java"))


def _read_release(java: Path) -> int:
    """Returns the major version by the `release` file of its home (JEP 223); 0 without one for this machine."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        text = (java.resolve().parent.parent / "release").read_text()
        entries = dict(re.findall(r'^(\w+)="([^"]*)"$', text, re.MULTILINE))
        if (entries.get("OS_NAME"), entries.get("OS_ARCH")) == (platform.system(), platform.machine()):
            return int(entries["JAVA_VERSION"].partition(".")[0])
    return 0


def major(java: Path) -> int:
    """The major version that this executable reports; 0 when it is no working Java."""
    try:
        process = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    # Java 8 calls itself 1.8: its major reads as 1, which is just as well too old.
    match = re.search(r'version "(\d+)', process.stderr)
    return int(match[1]) if match else 0


def spark_jars() -> Path:
    """The folder of jars in the installed pyspark, found without importing it."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise extras.build_missing_error("pyspark")
    return Path(spec.origin).parent / "jars"


def jars(name: str, artifacts: Sequence[Artifact], report: Reporter = lambda progress: None) -> Path:
    """A folder with the jars of `artifacts` and all they need, fetched from Maven Central once for each user.

    It lives under XDG_CACHE_HOME (else ~/.cache) as `sluice/<name>-<digest of the request>`. Concurrent
    callers wait for one fetch. While it downloads, `report` gets the files and megabytes. Raises SetupError with
    Ivy's own words when something cannot be fetched.
    """
    request = "\n".join(
        (
            '<ivy-module version="2.0"><info organisation="sluice" module="jars"/>',
            '<configurations><conf name="default"/></configurations><dependencies>',
            *map(_dependency, artifacts),
            "</dependencies></ivy-module>",
        )
    )
    folder = cache() / f"{name}-{hashlib.sha256(request.encode()).hexdigest()[:8]}"
    if folder.is_dir():
        return check_ours(folder)
    folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with locking(folder.with_name(folder.name + ".lock")):
        if not folder.is_dir():
            log.info("fetching %s from Maven Central, once for this user", name)
            _fetch(name, request, artifacts, folder, report)
    return check_ours(folder)


@dataclass(frozen=True)
class SharedClasses:
    """The classes of a program as its first run left them in an archive: later starts take half the CPU (JEP 350).

    `made` is where a run that finds no archive leaves one when it ends in order; `keep` puts it where the next ones
    look. A JVM silently ignores an archive of other classes or another Java.
    """

    jars: Path
    main: str
    unfinished: Path

    @property
    def archive(self) -> Path | None:
        """Complete archive for these jars, this program and this Java; a truncated one would crash the JVM."""
        archives = self.jars.parent.glob(self._name("*"))
        return next((p for p in archives if p.name == self._name(p.stat().st_size) and is_ours(p)), None)

    @property
    def options(self) -> tuple[str, ...]:
        """For the `java` that runs the program."""
        archive = self.archive
        how = f"-XX:SharedArchiveFile={archive}" if archive else f"-XX:ArchiveClassesAtExit={self.unfinished}"
        return how, "-Xlog:cds=off", "-Xlog:cds+dynamic=off"

    def keep(self) -> None:
        """After a run that ended in order. Does nothing where that run left none."""
        if self.unfinished.exists():
            archive = self.jars.with_name(self._name(self.unfinished.stat().st_size))
            unfinished = archive.with_name(f".{archive.name}.{os.getpid()}-{threading.get_ident()}")
            shutil.move(self.unfinished, unfinished)  # perhaps from another file system
            unfinished.replace(archive)

    def _name(self, size: int | str) -> str:
        java = find_java().resolve()
        key = hashlib.sha256(f"{java} {java.stat().st_mtime_ns}".encode()).hexdigest()[:8]
        return f"{self.jars.name}-{self.main.rpartition('.')[2]}-{key}.{size}.jsa"


def cache() -> Path:
    """Returns this user's folder for files that are made or fetched once."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice"


def _dependency(artifact: Artifact) -> str:
    excluded = (module.split(":", 1) for module in artifact.without)
    return (
        f'<dependency org="{artifact.org}" name="{artifact.name}" rev="{artifact.version}" conf="default->default">'
        + "".join(f'<exclude org="{org}" module="{name}"/>' for org, name in excluded)
        + "</dependency>"
    )


def _fetch(name: str, request: str, artifacts: Sequence[Artifact], folder: Path, report: Reporter) -> None:
    from sluice.pipelines.model.receipts import Progress  # late: each run on Spark waits for this module's imports

    with tempfile.TemporaryDirectory(prefix=folder.name + ".", dir=folder.parent) as scratch:
        Path(scratch, "ivy.xml").write_text(request)

        def report_download() -> None:
            with contextlib.suppress(FileNotFoundError):  # Ivy renames complete files
                sizes = [path.stat().st_size for path in Path(scratch, "cache").rglob("*.*")]
                report(Progress(f"downloading {name}", note=f"{len(sizes)} files, {sum(sizes) / 1e6:.1f} MB"))

        code, output = _ivy(scratch, report_download)
        if code:  # completed files are kept, and a public server may fail one request in a hundred
            code, output = _ivy(scratch, report_download)
        missing = [a for a in artifacts if not Path(scratch, "jars", f"{a.name}-{a.version}.jar").is_file()]
        if code or missing:
            lines = output.splitlines()
            excerpt = [line.strip() for line in lines if _TELLING.search(line)][:12] or lines[-12:]
            raise SetupError(
                "\n".join([f"could not fetch {name} from Maven Central", *excerpt]),
                remedy="check the network and repeat (a proxy goes into JAVA_TOOL_OPTIONS)",
            )
        protect(Path(scratch, "jars"))
        os.rename(Path(scratch, "jars"), folder)


def _ivy(scratch: str, poll: Callable[[], None]) -> tuple[int, str]:
    """Run Ivy, calling `poll` ten times a second. Return its exit code and output."""
    command = [
        *(str(find_java()), "-cp", f"{spark_jars()}/*", "org.apache.ivy.Main"),
        *("-ivy", "ivy.xml", "-cache", "cache", "-confs", "default"),
        *("-retrieve", "jars/[artifact]-[revision](-[classifier]).[ext]"),
    ]
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(command, cwd=scratch, stdout=output, stderr=subprocess.STDOUT) as process:
            try:
                while process.poll() is None:
                    poll()
                    time.sleep(_POLL)
            finally:
                process.kill()  # if we were interrupted
        output.seek(0)
        return process.returncode, output.read()


if __name__ == "__main__":
    try:
        print(find_java())
    except SetupError as error:
        sys.exit(str(error))
