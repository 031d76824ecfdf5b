"""Locks are private, and waits for them end."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from sluice.pipelines.errors import Failed, SetupError
from sluice.pipelines.util import locks


def test_lock_is_private_also_if_it_was_readable(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch(0o666)
    path.chmod(0o666)
    for lock in (path, tmp_path / "other"):
        with locks.locking(lock):
            assert lock.stat().st_mode & 0o777 == 0o600


def test_wait_for_a_read_only_neighbour_ends_and_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "PATIENCE", 0.2)
    path = tmp_path / "lock"
    path.touch()
    with path.open("rb") as neighbour:
        fcntl.flock(neighbour, fcntl.LOCK_SH)
        with pytest.raises(Failed) as caught, locks.locking(path, required=False):
            pass
        assert str(path) in caught.value.message
        if Path("/proc/locks").exists():
            assert f"process {os.getpid()} holds the lock" in caught.value.message
            assert f"ps -f {os.getpid()}" in caught.value.remedy
        with pytest.raises(BlockingIOError), locks.locking(path, wait=False):
            pass
    with locks.locking(path, wait=False):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_lock_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    os.chown(path, 12345, 12345)
    with pytest.raises(SetupError, match="belongs to another user"), locks.locking(path):
        pass


def test_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"), locks.locking(tmp_path / "lock"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_lock_that_cannot_be_written_is_skipped_unless_required(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "lock"
    with locks.locking(missing, required=False):
        pass
    with pytest.raises(FileNotFoundError), locks.locking(missing):
        pass


def test_folder_that_another_user_may_change_is_refused_until_protected(tmp_path: Path) -> None:
    folder = tmp_path / "jars"
    folder.mkdir()
    (folder / "a.jar").touch()
    assert locks.check_ours(folder) == folder
    for changed in (folder, folder / "a.jar"):
        changed.chmod(0o777)
        with pytest.raises(SetupError, match="other users may change") as caught:
            locks.check_ours(folder)
        assert f"rm -r {folder}" in caught.value.remedy
        locks.protect(folder)
        assert locks.check_ours(folder) == folder
