"""Spark's JVM with an archive of its classes, which is used where it fits and never required."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sluice.pipelines.feed.sections import SparkSettings
from sluice.pipelines.util import scratch
from sluice.pipelines.util.locks import locking
from sluice.resources.spark import engine, jvm


@pytest.fixture(scope="module")
def archive() -> jvm.Archive:
    assert jvm.prepare()
    existing = jvm.find_archive()
    assert existing
    return existing


def run_and_read_command(settings: SparkSettings) -> str:
    """Run a Spark job and return the command line of its JVM."""
    spark = engine.context(settings)
    try:
        assert spark.parallelize(range(2), 2).mapPartitions(lambda rows: [sum(rows)]).collect() == [0, 1]
        process = engine._jvm_process()
        assert process
        return Path(f"/proc/{process.pid}/cmdline").read_text()
    finally:
        spark.stop()
        engine._forget_jvm()


@pytest.mark.spark
def test_jvm_starts_from_the_archive_with_pyspark_options(archive: jvm.Archive) -> None:
    command = run_and_read_command(SparkSettings(master="local[2,3]"))
    assert str(archive.classes) in command
    assert "--add-opens=java.base/java.nio=ALL-UNNAMED" in command
    assert "org.apache.spark.launcher" not in command


@pytest.mark.spark
def test_jvm_without_archive_starts_as_in_pyspark(
    archive: jvm.Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "SharedArchiveFile" not in run_and_read_command(SparkSettings(master="local[2,3]"))


def test_unresponsive_jvm_is_ended(archive: jvm.Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = "-agentlib:jdwp=transport=dt_socket,server=y,suspend=y,address=127.0.0.1:0"
    recipe = json.loads(archive.arguments.read_text())
    hanging = jvm.Archive(tmp_path)
    hanging.arguments.write_text(json.dumps({**recipe, "arguments": [*recipe["arguments"], waits]}))
    monkeypatch.setattr(jvm, "_ANSWER", 3.0)
    launched = jvm.Launch(hanging)
    assert launched.connect() is None
    with launched.output as output:
        output.seek(0)
        assert b"Listening for transport" in output.read(), "it waits for a debugger"
    assert not any(str(hanging.classes) in command for command in list_commands())


_BEGINS = """
import os, signal, sys
from sluice.resources.spark import jvm
jvm.begin()
(launch,) = jvm._begun
os.kill(launch._process.pid, signal.SIGSTOP)
print(launch._process.pid, flush=True)
if "killed" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["ended", "killed"])
def test_no_jvm_outlives_a_process_that_ends_while_it_starts(
    archive: jvm.Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The next process does not remove the folder of a killed one before its JVM has ended, too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-c", _BEGINS, end]
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    pid = int(subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=False).stdout)
    if end == "killed":
        ending = os.pidfd_open(pid)
        assert scratch.clear() == []
        os.kill(pid, signal.SIGCONT)
        assert select.select([ending], [], [], 60)[0], "it did not end with its driver"
        os.close(ending)
        scratch.clear()
    else:
        assert not Path(f"/proc/{pid}").exists()
    assert [*tmp_path.iterdir()] == []


def list_commands() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield path.read_text()


def test_failed_archive_is_retried_a_day_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not jvm.is_prepared()
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert not jvm.prepare()
    assert jvm.is_prepared()
    (marker,) = (tmp_path / "sluice").glob("*.failed")
    os.utime(marker, (0, 0))
    assert not jvm.is_prepared()


def test_truncated_archive_is_ignored(archive: jvm.Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    copied = tmp_path / "sluice" / archive.folder.name
    shutil.copytree(archive.folder, copied)
    assert jvm.find_archive() == jvm.Archive(copied)
    (copied / "classes.jsa").chmod(0o600)
    with (copied / "classes.jsa").open("r+b") as file:
        file.truncate(1 << 20)
    assert jvm.find_archive() is None


@pytest.mark.parametrize("changed", ["", "arguments.json", "classes.jsa", ".."])
def test_archive_that_another_user_may_change_is_not_used(
    archive: jvm.Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    copied = tmp_path / "sluice" / archive.folder.name
    shutil.copytree(archive.folder, copied)
    assert jvm.find_archive() == jvm.Archive(copied)
    (copied / changed).chmod(0o777)
    assert jvm.find_archive() is None


def test_custom_jvm_settings_use_the_pyspark_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jvm.fits({"spark.task.cpus": "1"})
    assert not jvm.fits({"spark.driver.memory": "2g"})
    assert not jvm.fits({"spark.jars": "more.jar"})
    monkeypatch.setenv("SPARK_CONF_DIR", "/etc/spark")
    assert not jvm.fits({})


def test_archive_is_not_created_twice_concurrently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jvm, "_make", lambda folder: pytest.fail("another process makes it"))
    target = jvm._place()
    target.parent.mkdir()
    with locking(target.with_name(target.name + ".lock")):
        assert not jvm.prepare(wait=False)
        command = [sys.executable, "-m", "sluice.resources.spark.jvm", "--idle"]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 1


def test_background_process_is_not_repeated_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: commands.append(command))
    jvm.prepare_in_background()
    assert [c[1:] for c in commands] == [["-m", "sluice.resources.spark.jvm", "--idle"]]
    jvm._failure_path(jvm._place()).parent.mkdir(exist_ok=True)
    jvm._failure_path(jvm._place()).touch()
    jvm.prepare_in_background()
    assert len(commands) == 1


def test_archive_of_removed_jars_is_deleted_with_the_next_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    outdated = tmp_path / "sluice" / "spark-jvm-000000000000"
    outdated.mkdir(parents=True)
    (outdated / "arguments.json").write_text(json.dumps({"jars": str(tmp_path / "nowhere")}))
    unfinished = jvm._place().with_name(jvm._place().name + ".killed")
    unfinished.mkdir()
    monkeypatch.setattr(jvm, "_TRAINING", 0.01)
    assert not jvm.prepare()  # the training takes longer
    assert not outdated.exists()
    assert not unfinished.exists()
    assert jvm.is_prepared()  # so the attempt is not repeated
