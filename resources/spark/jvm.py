"""Spark's JVM on this machine, started with its classes laid out in advance (class-data sharing, JEP 350).

    python -m sluice.resources.spark.jvm            make the archive now, for example in an image
    python -m sluice.resources.spark.jvm --idle     the same at low priority, unless another process makes it

Starting Spark loads and checks nine thousand classes out of 280 jars. An archive of them is made once for a user, a
Java and a PySpark, by a Spark that runs one job and ends. It lies under XDG_CACHE_HOME (else ~/.cache), next to the
arguments with which PySpark's launcher, a JVM of its own, had started that Spark: those are reused as well.

Promises: if there is no archive, or it does not fit, or anything other than a feed's own settings changes how Spark
starts (`spark-env.sh`, `spark-defaults.conf`, the environment), the JVM starts as PySpark starts it. An archive appears
whole, by a rename. Java checks each jar's size and time against it and passes over one that does not fit.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from sluice.pipelines.errors import SetupError
from sluice.pipelines.util import scratch
from sluice.pipelines.util.locks import is_ours, locking, protect
from sluice.resources.local import java

FLAGS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Records never pass through this JVM: the full compiler would double the cost of its start and its few short jobs."""
OPTIONS = "spark.driver.extraJavaOptions"
_QUIET = ("-Xshare:auto", "-Xlog:cds=off", "-Xlog:cds+dynamic=off")
_LOOK = 0.01
"""Seconds between checks for the file with the address on which a JVM listens."""
_ANSWER = 120.0
"""Limit in seconds on a JVM's start from the archive, which takes about one of an idle core."""
_OURS = {"SPARK_LOCAL_IP", "SPARK_LOCAL_DIRS", "SPARK_USER", "SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BUFFER_SIZE"}
"""Variables set by us or by PySpark, or irrelevant to a driver on this machine."""
_LAUNCHERS = ("SPARK_", "HADOOP_", "YARN_", "PYSPARK_SUBMIT_ARGS", "PYSPARK_GATEWAY", "JAVA_TOOL_OPTIONS", "_JAVA_")
_OWN = ("spark.driver.", "spark.jars", "spark.files", "spark.submit", "spark.master", "spark.plugins")
_SAME = {"spark.driver.host", "spark.driver.bindAddress", OPTIONS, "spark.master"}
_TRAINING = 120.0
"""Limit in seconds on making an archive, which takes about eight of an idle core."""
_AGAIN = 86_400.0
"""Seconds after which a failed archive is retried: the machine may have been busy."""
_PREFIX, _ARGUMENTS = "spark-jvm-", "arguments.json"
_IDLE = "--idle"


@dataclass(frozen=True, slots=True)
class Archive:
    """A folder with an archive of classes, and how the JVM that made it was started."""

    folder: Path

    @property
    def classes(self) -> Path:
        return self.folder / "classes.jsa"

    @property
    def arguments(self) -> Path:
        return self.folder / _ARGUMENTS

    def command(self) -> list[str]:
        """Return the JVM's command line. Spark's settings follow when its context starts."""
        recipe = json.loads(self.arguments.read_text())
        return [
            *(str(java.java_home() / "bin" / "java"), "-cp", recipe["class_path"], *recipe["arguments"]),
            *(f"-XX:SharedArchiveFile={self.classes}", *_QUIET, f"-Djava.io.tmpdir={scratch.get_root()}"),
            *("org.apache.spark.deploy.SparkSubmit", "pyspark-shell"),
        ]


def find_archive() -> Archive | None:
    """Return this user's archive for the local Java and PySpark, if it was made."""
    with suppress(OSError, ValueError, KeyError, SetupError):
        archive = Archive(_place())
        if not is_ours(archive.folder.parent, archive.folder, archive.classes, archive.arguments):
            return None
        complete = json.loads(archive.arguments.read_text())["bytes"] == archive.classes.stat().st_size
        return archive if complete else None  # a truncated one crashes a JVM
    return None


def fits(conf: Mapping[str, str]) -> bool:
    """Return whether only these settings and our own determine how Spark's JVM starts."""
    variables = (k for k in os.environ if k.startswith(_LAUNCHERS) and k not in _OURS)
    home = java.spark_jars().parent / "conf"
    own = (k for k in conf if k.startswith(_OWN) and k not in _SAME)
    return sys.platform == "linux" and not any(variables) and not home.exists() and not any(own)


class Launch:
    """A JVM that was started by the archive, until PySpark is connected to it.

    A JVM that cannot write its address would never end: it fails before it waits for the end of its stdin, and its
    gateway's threads live on. So its folder stays as long as the JVM, or the JVM is killed first.
    """

    def __init__(self, archive: Archive) -> None:
        """Start the JVM; does not wait for it. Raises OSError, SetupError, ValueError."""
        self.output: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the JVM
        self._folder = tempfile.mkdtemp(dir=scratch.get_root())
        self._address = Path(self._folder, "gateway")
        ours = {"JAVA_HOME": str(java.java_home()), "SPARK_HOME": str(java.spark_jars().parent)}
        ours |= {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_CONNECT_MODE": "0"}
        ours |= {"PYTHONHASHSEED": "0", "PYSPARK_PYTHON": sys.executable}
        self._process = subprocess.Popen(
            archive.command(),
            stdin=subprocess.PIPE,  # when this process ends, however it does, the JVM ends
            stdout=self.output,
            stderr=self.output,
            env=os.environ | ours | {"_PYSPARK_DRIVER_CONN_INFO_PATH": str(self._address)},
            preexec_fn=_deaf,
            pass_fds=[scratch.get_lock()],
        )
        atexit.register(self.end)

    def connect(self) -> Any:
        """Return PySpark's gateway to the JVM; None if it ended, or did not answer."""
        from pyspark.java_gateway import launch_gateway  # while the JVM starts

        until = time.monotonic() + _ANSWER
        while self._process.poll() is None and not self._address.is_file() and time.monotonic() < until:
            time.sleep(_LOOK)
        if not self._address.is_file():
            self.end()
            return None
        data = self._address.read_bytes()  # big-endian numbers; a text after its length
        atexit.unregister(self.end)
        length = int.from_bytes(data[4:8])
        port, secret = int.from_bytes(data[:4]), data[8 : 8 + length].decode()
        shutil.rmtree(self._folder, ignore_errors=True)
        there = {"PYSPARK_GATEWAY_PORT": str(port), "PYSPARK_GATEWAY_SECRET": secret}
        os.environ.update(there)  # PySpark's way to use a JVM that is already running
        try:
            gateway: Any = launch_gateway()  # type: ignore[no-untyped-call]
        finally:
            for name in there:
                del os.environ[name]
        gateway.proc = self._process
        return gateway

    def end(self) -> None:
        """Kill the JVM. Its output stays readable."""
        atexit.unregister(self.end)
        with self._process as process:
            process.kill()


_begun: list[Launch] = []
"""The JVM that `begin` started, until `take` returns it."""


def begin() -> None:
    """Start a JVM by the archive for this process's next local Spark, if it fits. Does not wait; raises nothing."""
    with suppress(OSError, SetupError, ValueError):
        if not _begun and fits({}) and (archive := find_archive()) is not None:
            _begun.append(Launch(archive))


def take(conf: Mapping[str, str]) -> Launch | None:
    """Return the JVM that was begun, or begin one; None if these settings determine how Spark's JVM starts."""
    if not fits(conf) or OPTIONS in conf:
        end()
        return None
    begin()
    return _begun.pop() if _begun else None


def end() -> None:
    """End a JVM that was begun and is not needed."""
    while _begun:
        launch = _begun.pop()
        launch.end()
        launch.output.close()


def _deaf() -> None:
    """Ignore interrupts: they are for this process, and the JVM ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


# -- making it


def is_prepared() -> bool:
    """Return whether the archive is there or cannot be made here: then there is nothing to wait for."""
    with suppress(OSError, SetupError):
        return find_archive() is not None or not fits({}) or _was_given_up(_place())
    return True


def prepare(*, wait: bool = True) -> bool:
    """Make the archive unless it is there; return whether there is one now.

    If it cannot be made, Spark starts as usual, and a later call retries after a day. Without `wait`, do nothing while
    another process makes it.
    """
    if not is_prepared():
        with suppress(OSError):
            folder = _place()
            folder.parent.mkdir(parents=True, exist_ok=True)
            with locking(folder.with_name(folder.name + ".lock"), wait=wait):
                if not is_prepared():
                    _remove_useless(folder)
                    _make(folder)
    return find_archive() is not None


def prepare_in_background() -> None:
    """Make the archive in a process that outlives this one, unless it is there."""
    if not is_prepared():
        with suppress(OSError):
            subprocess.Popen(
                [sys.executable, "-m", "sluice.resources.spark.jvm", _IDLE],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )


def _make(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=folder.name + ".", dir=folder.parent) as scratch:
        built = Path(scratch, "made")
        built.mkdir()
        train = [sys.executable, "-m", "sluice.resources.spark.train_jvm", str(built)]
        try:
            subprocess.run(train, capture_output=True, timeout=_TRAINING, check=True, stdin=subprocess.DEVNULL)
            protect(built)
            os.rename(built, folder)
        except (OSError, subprocess.SubprocessError):
            _failure_path(folder).touch()


def _failure_path(folder: Path) -> Path:
    return folder.with_name(folder.name + ".failed")


def _was_given_up(folder: Path) -> bool:
    with suppress(FileNotFoundError):
        return time.time() - _failure_path(folder).stat().st_mtime < _AGAIN
    return False


def _remove_useless(archive: Path) -> None:
    """Remove archives of jars that are gone, and files of killed processes that were making this archive."""
    for unfinished in archive.parent.glob(f"{archive.name}.*/"):
        shutil.rmtree(unfinished, ignore_errors=True)
    for path in archive.parent.glob(f"{_PREFIX}*/{_ARGUMENTS}"):
        with suppress(OSError, ValueError, KeyError):
            if not Path(json.loads(path.read_text())["jars"]).is_dir():
                shutil.rmtree(path.parent)


def _place() -> Path:
    """Return the path of the archive for this Java and these jars."""
    jars = sorted((e.name, e.stat().st_size, e.stat().st_mtime_ns) for e in os.scandir(java.spark_jars()))
    runs = java.java_home() / "lib" / "server"
    runtime = sorted((e.name, e.stat().st_size, e.stat().st_mtime_ns) for e in os.scandir(runs))
    key = json.dumps([str(java.spark_jars()), jars, str(java.java_home()), runtime, FLAGS, 2])
    return java.cache() / f"{_PREFIX}{hashlib.sha256(key.encode()).hexdigest()[:12]}"


if __name__ == "__main__":
    if _IDLE in sys.argv:
        os.nice(10)
    sys.exit(0 if prepare(wait=_IDLE not in sys.argv) else "Spark's JVM starts without an archive of its classes here")
