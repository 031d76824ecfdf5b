"""The search for Java, which skips old versions, and downloads of jars, which are complete or leave nothing."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.pipelines.errors import SetupError
from sluice.pipelines.model.receipts import Progress
from sluice.resources.local import java, local_kafka


@pytest.fixture(autouse=True)
def unknown_java() -> Iterator[None]:
    """Forgets the Java that another test found."""
    java.find_newer.cache_clear()
    yield
    java.find_newer.cache_clear()


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder for Java installations on a machine that has none."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path" / "bin"))
    monkeypatch.setattr(java, "_PLACES", (str(tmp_path / "jvm" / "*"),))
    return tmp_path


def make_fake_java(home: Path, version: str) -> Path:
    path = home / "bin" / "java"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n")
    path.chmod(0o755)
    return path


def test_missing_java_error_names_the_package_to_install(bare_machine: Path) -> None:
    with pytest.raises(SetupError, match="no Java 17") as caught:
        java.find_java()
    assert "openjdk-17-jre-headless" in caught.value.remedy


@pytest.mark.parametrize("old", ["1.8.0_402", "11.0.22", "16.0.1", "nonsense"])
def test_too_old_java_is_skipped(bare_machine: Path, monkeypatch: pytest.MonkeyPatch, old: str) -> None:
    monkeypatch.setenv("JAVA_HOME", str(bare_machine / "old"))
    make_fake_java(bare_machine / "old", old)
    make_fake_java(bare_machine / "path", old)
    good = make_fake_java(bare_machine / "jvm" / "temurin", "21.0.2")
    assert java.find_java() == good


def test_release_file_of_this_machine_spares_the_start_of_a_jvm(bare_machine: Path) -> None:
    runs_not = make_fake_java(bare_machine / "path", "nonsense")
    write_release(bare_machine / "path", platform.machine())
    assert java.find_java() == runs_not


def test_release_file_for_another_machine_is_not_believed(bare_machine: Path) -> None:
    make_fake_java(bare_machine / "path", "nonsense")
    write_release(bare_machine / "path", "s390")
    good = make_fake_java(bare_machine / "jvm" / "temurin", "21.0.2")
    assert java.find_java() == good


def write_release(home: Path, machine: str) -> None:
    (home / "release").write_text(
        f'JAVA_VERSION="17.0.15"\nOS_ARCH="{machine}"\nOS_NAME="{platform.system()}"\nSOURCE=""\n'
    )


def test_java_home_precedes_path(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = make_fake_java(bare_machine / "path", "17.0.15")
    assert java.find_java() == on_path
    java.find_newer.cache_clear()
    at_home = make_fake_java(bare_machine / "home", "25")
    monkeypatch.setenv("JAVA_HOME", str(bare_machine / "home"))
    assert java.find_java() == at_home
    assert java.java_home() == bare_machine / "home"


def test_missing_java_home_folder_is_skipped(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(bare_machine / "gone"))
    on_path = make_fake_java(bare_machine / "path", "17")
    assert java.find_java() == on_path


def test_failed_download_is_quoted_and_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort=9")
    reports = list[Progress]()
    with pytest.raises(SetupError, match=r"org\.example#nothing;1\.0"):
        java.jars("nothing", [java.Artifact("org.example", "nothing", "1.0")], reports.append)
    assert {progress.stage for progress in reports} == {"downloading nothing"}
    assert all(re.fullmatch(r"\d+ files, \d+\.\d MB", progress.note) for progress in reports)
    assert [path.suffix for path in (tmp_path / "sluice").iterdir()] == [".lock"]


def test_program_starts_with_a_missing_or_damaged_class_archive(tmp_path: Path) -> None:
    """It prints only its version: a damaged archive is ignored silently."""
    jars = tmp_path / "jars"
    jars.symlink_to(java.jars(f"kafka-{local_kafka.VERSION}", local_kafka.ARTIFACTS))
    classes = java.SharedClasses(jars, "org.apache.kafka.tools.GetOffsetShell", tmp_path / "made.jsa")

    def run() -> tuple[int, str, str]:
        command = [java.find_java(), *classes.options, "-cp", f"{jars}/*", classes.main, "--version"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout.split()[0], done.stderr

    result = run()
    assert result[:2] == (0, local_kafka.VERSION)
    classes.keep()
    archive = classes.archive
    assert archive
    assert any(str(archive) in option for option in classes.options)
    assert run() == result
    classes.keep()  # that run wrote none
    archive_bytes = archive.read_bytes()
    for bad in (b"", bytes(len(archive_bytes)), archive_bytes[:-5000]):
        archive.unlink()
        archive.write_bytes(bad)
        assert run() == result
    classes.keep()
    assert classes.archive
    assert run() == result
