"""Faults of a lake: a full or read-only disk, revoked rights, a store that fails requests.

A folder's lake lies in a small, separate file system (`mount_tmpfs`). For stores: the requests that a run makes
(`REQUESTS`), the faults of a request (`FAULTS`), and the combinations of a seed (`draw_faults`).
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sluice.pipelines.feed.stores import STORES, scheme
from sluice.pipelines.lake import paths
from sluice.resources.lake import open_lake
from sluice.resources.local.local_s3 import REGION
from tests.checker.facts import EvidenceError
from tests.clouds import ACCOUNT, KEY
from tests.faults.account import SEED
from tests.faults.field import Field, Running
from tests.resources.lake.s3_faults import Proxy, Rule

# -- a folder

INODES = 4096


@contextmanager
def mount_tmpfs(folder: Path, size: str = "64m") -> Iterator[None]:
    """Mount a file system in memory at the folder. Raises OSError where this machine does not permit it."""
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={size},nr_inodes={INODES}", "sluice-faults", str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def _mount(*arguments: str) -> None:
    result = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        raise OSError(errno.EPERM, result.stderr.strip())


def _find_mount(field: Field) -> Path:
    """Returns the mount point of the lake's file system."""
    lake = Path(field.write_feed().lake)
    mount = next((p for p in (lake, *lake.parents) if p.is_mount()), Path("/"))
    assert mount != Path("/"), f"{lake} lies in no file system of its own"
    return mount


@contextmanager
def fill_disk(field: Field) -> Iterator[None]:
    """Fill the lake's disk to the last byte."""
    with fill_file_system(field, _find_mount(field), "the lake's disk"):
        yield


@contextmanager
def fill_file_system(field: Field, folder: Path, name: str) -> Iterator[None]:
    """Fill the file system that is mounted at the folder to the last byte. `name` is for the log."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    field.account.log(f"{name} was filled up")
    try:
        yield
    finally:
        ballast.unlink()
        field.account.log("there is room again")


@contextmanager
def use_up_inodes(field: Field) -> Iterator[None]:
    """Use up the inodes of the lake's disk. It has room for bytes, but not for more files or folders."""
    ballast = _find_mount(field) / "ballast"
    ballast.mkdir()
    with suppress(OSError):
        for number in range(INODES):
            (ballast / str(number)).touch()
    field.account.log("the lake's disk was filled up with empty files")
    try:
        yield
    finally:
        for file in ballast.iterdir():
            file.unlink()
        ballast.rmdir()
        field.account.log("there is room for files again")


@contextmanager
def make_read_only(field: Field) -> Iterator[None]:
    """Remount the lake's file system read-only. No process may be writing at that moment."""
    device = str(_find_mount(field))
    _mount("-o", "remount,ro", device)
    field.account.log("the lake's file system is read-only")
    try:
        yield
    finally:
        _mount("-o", "remount,rw", device)
        field.account.log("it is writable again")


@contextmanager
def revoke_write(field: Field) -> Iterator[None]:
    """Revoke the right to write to the lake's folders. Root keeps it: use `start_without_privileges`."""
    folders = [Path(path) for path, _, _ in os.walk(field.write_feed().lake)]
    for folder in folders:
        folder.chmod(0o555)
    field.account.log("the right to write was taken from the lake's folders")
    try:
        yield
    finally:
        for folder in folders:
            if folder.is_dir():
                folder.chmod(0o755)
        field.account.log("it was given back")


@contextmanager
def read_ledger_continuously(field: Field) -> Iterator[None]:
    """Read the ledger repeatedly inside the block. AssertionError if an entry was ever incomplete."""
    ended, broken, folder = threading.Event(), set(), field.folder

    def read() -> None:
        while not ended.wait(0.05):
            try:
                folder.read_entries()
            except EvidenceError as error:
                broken.add(str(error))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert not broken, broken


def start_without_privileges(field: Field) -> Running:
    """Start a run that is subject to file permissions, even for root."""
    field.write_feed()
    field.runs += 1
    path, out = field.root / "feeds" / f"{field.name}.yaml", field.root / f"run-{field.runs}.out"
    dropped = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    return Running.spawn([*dropped, sys.executable, "-m", "tests.faults.runner", str(path)], out, field.environment)


def lose_newest_entries(field: Field, count: int, *, note: bool) -> None:
    """Delete the `count` newest entries, and without `note` also the note of the newest number."""
    lake = open_lake(field.write_feed())
    for path in list(lake.list(paths.log_folder(field.name)))[-count:]:
        lake.remove(path)
    if not note:
        lake.remove(paths.tip_path(field.name))
    field.account.log(
        f"the ledger lost its newest {count} entries" + ("" if note else ", and the note of the newest number")
    )


# -- a store


ACCESS = {
    "s3": {"region": REGION, "access_key_id": "local", "secret_access_key": "local", "part_bytes": "5MiB"},
    "azure": {"account": ACCOUNT, "account_key": KEY},
    "gcs": {"token": "emulator"},
}


def with_store(field: Field, endpoint: str, **settings: Any) -> Field:
    """Returns the feed with its store at the endpoint, and these settings. On S3, large parts go in pieces."""
    section = STORES[scheme(field.settings["lake"])].section
    access = {"endpoint": endpoint, "retries": 1, **ACCESS[section], **settings}
    text = ", ".join(f"{k}: '{v}'" for k, v in access.items())
    return field.with_settings(**{section: f"{{{text}}}"}, landing="{compression: none}")


def list_requests(field: Field) -> list[str]:
    """Returns the names of the requests that a run makes to its store: only S3 has uploads of several requests."""
    on_s3 = field.settings["lake"].startswith("s3:")
    return [name for name in REQUESTS if on_s3 or "upload" not in name]


REQUESTS = {
    "a ledger entry": r"^PUT \S+/log/",
    "a staged file": r"^PUT \S+/staging/[^?]+$",
    "the beginning of an upload": r"^POST \S+\?uploads",
    "a part of an upload": r"^PUT \S+partNumber=",
    "the end of an upload": r"^POST \S+uploadId=",
    "a copy": r"^PUT (?!\S*/staging/)\S+/data/",
    "a deletion": r"^(DELETE |POST \S+comp=batch)",
    "a listing": r"^GET \S+(list-type=|comp=list)",
    "a reading": r"^GET [^?]+$",
    "a size": r"^HEAD ",
}
"""Patterns of a run's requests, as `METHOD /path?query`."""
FAULTS: dict[str, dict[str, Any]] = {
    "503": {"how": "refuse", "status": 503, "code": "SlowDown"},
    "500": {"how": "refuse", "status": 500, "code": "InternalError"},
    "429": {"how": "refuse", "status": 429, "code": "TooManyRequests"},
    "cut off on its way": {"how": "reset"},
    "done, and nobody answered": {"how": "lose"},
    "answered in half": {"how": "cut"},
    "done when nobody waits any more": {"how": "slow"},
}
REFUSALS: dict[str, dict[str, Any]] = {
    "forbidden": {"how": "refuse", "status": 403, "code": "AccessDenied"},
    "expired": {"how": "refuse", "status": 400, "code": "ExpiredToken"},
    "refused": {"how": "refuse", "status": 401, "code": "AuthenticationFailed"},
    "full": {"how": "refuse", "status": 507, "code": "QuotaExceeded"},
}
"""Refusals that persist through retries."""
BODIES = {"a listing", "a reading", "the beginning of an upload", "the end of an upload", "a copy"}
"""Requests whose answers have a body, which can break off."""


def draw_faults(field: Field) -> Sequence[tuple[str, str]]:
    """Returns half of all (request, fault) pairs. The next or previous seed has the other half."""
    pairs = [(r, f) for r in list_requests(field) for f in FAULTS if f != "answered in half" or r in BODIES]
    random.Random((SEED + 1) // 2).shuffle(pairs)
    return pairs[SEED % 2 :: 2]


def build_rule(request: str, fault: str, times: int = 1, late: float = 0) -> Rule:
    """Returns the rule for a fault. `late`: the delay of a late answer in seconds."""
    return Rule(REQUESTS[request], times=times, seconds=late, **FAULTS[fault])


@contextmanager
def take_store_away(field: Field, store: Proxy, after: int = 0) -> Iterator[None]:
    """Reset all connections to the store after `after` more requests."""
    store.rules = [Rule(".", "pass", times=after), Rule(".", "reset", times=-1)]
    field.account.log(f"{after} requests from now the store goes away")
    try:
        yield
    finally:
        store.rules = []
        field.account.log("the store is back")
