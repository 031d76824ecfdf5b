"""What goes wrong with a lake: a disk that is full or read-only, rights that are taken away; a store on a bad day.

Of a folder: the lake lies in a small file system of its own (`mounted`), which nothing else has a part in. Of S3: what
requests a run makes (`REQUESTS`), what can become of one (`FAULTS`), and which of these meet with this seed (`drawn`).
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

from sluice.pipelines.feed.stores import SECTIONS, scheme
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
def mounted(place: Path, size: str = "64m") -> Iterator[None]:
    """A file system in memory at the place. Raises OSError where this machine does not allow that."""
    place.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={size},nr_inodes={INODES}", "sluice-faults", str(place))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True, capture_output=True)


def _mount(*arguments: str) -> None:
    ran = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise OSError(errno.EPERM, ran.stderr.strip())


def _device(field: Field) -> Path:
    """Where the lake's own file system is mounted."""
    place = Path(field.feed().lake)
    found = next((p for p in (place, *place.parents) if p.is_mount()), Path("/"))
    assert found != Path("/"), f"{place} lies in no file system of its own"
    return found


@contextmanager
def disk_full(field: Field) -> Iterator[None]:
    """No byte fits on the lake's disk."""
    with filled_up(field, _device(field), "the lake's disk"):
        yield


@contextmanager
def filled_up(field: Field, place: Path, what: str) -> Iterator[None]:
    """No byte fits on the file system that is mounted at the place."""
    ballast = place / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    field.account.did(f"{what} was filled up")
    try:
        yield
    finally:
        ballast.unlink()
        field.account.did("there is room again")


@contextmanager
def no_inodes(field: Field) -> Iterator[None]:
    """There is room for bytes, and for no more files or folders."""
    ballast = _device(field) / "ballast"
    ballast.mkdir()
    with suppress(OSError):
        for number in range(INODES):
            (ballast / str(number)).touch()
    field.account.did("the lake's disk was filled up with empty files")
    try:
        yield
    finally:
        for one in ballast.iterdir():
            one.unlink()
        ballast.rmdir()
        field.account.did("there is room for files again")


@contextmanager
def read_only(field: Field) -> Iterator[None]:
    """The lake's file system was mounted again, for reading. Nobody may be writing at that moment."""
    device = str(_device(field))
    _mount("-o", "remount,ro", device)
    field.account.did("the lake's file system is read-only")
    try:
        yield
    finally:
        _mount("-o", "remount,rw", device)
        field.account.did("it is writable again")


@contextmanager
def rights_taken(field: Field) -> Iterator[None]:
    """Nobody may write into the lake's folders any more, but for root: let runs be `without_privileges`."""
    folders = [Path(at) for at, _, _ in os.walk(field.feed().lake)]
    for folder in folders:
        folder.chmod(0o555)
    field.account.did("the right to write was taken from the lake's folders")
    try:
        yield
    finally:
        for folder in folders:
            if folder.is_dir():
                folder.chmod(0o755)
        field.account.did("it was given back")


@contextmanager
def read_all_the_time(field: Field) -> Iterator[None]:
    """Somebody reads the ledger again and again. AssertionError when an entry was not whole once."""
    ended, broken, folder = threading.Event(), set(), field.folder

    def read() -> None:
        while not ended.wait(0.05):
            try:
                folder.entries()
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


def without_privileges(field: Field) -> Running:
    """A run for which the rights of files count, whoever starts it."""
    field.feed()
    field.runs += 1
    path, out = field.root / "feeds" / f"{field.name}.yaml", field.root / f"run-{field.runs}.out"
    dropped = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    return Running.alone([*dropped, sys.executable, "-m", "tests.faults.runner", str(path)], out, field.environment)


def ledger_loses(field: Field, count: int, *, note: bool) -> None:
    """The newest entries are gone, that many; and with them the note of the newest number, unless it is kept."""
    lake = open_lake(field.feed())
    for path in list(lake.list(paths.log_folder(field.name)))[-count:]:
        lake.remove(path)
    if not note:
        lake.remove(paths.tip_path(field.name))
    field.account.did(f"the ledger lost its newest {count} entries" + ("" if note else ", and the note beside it"))


# -- a store


ACCESS = {
    "s3": {"region": REGION, "access_key_id": "local", "secret_access_key": "local", "part_bytes": "5MiB"},
    "azure": {"account": ACCOUNT, "account_key": KEY},
    "gcs": {"token": "emulator"},
}


def in_store(field: Field, endpoint: str, **settings: Any) -> Field:
    """Returns the feed with its store at the endpoint, and these settings. On S3, large parts go in pieces."""
    section = SECTIONS[scheme(field.settings["lake"])]
    access = {"endpoint": endpoint, "retries": 1, **ACCESS[section], **settings}
    inside = ", ".join(f"{k}: '{v}'" for k, v in access.items())
    return field.with_settings(**{section: f"{{{inside}}}"}, landing="{compression: none}")


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
"""Of a run, as `METHOD /path?query`."""
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
"""What no trying again helps against."""
BODIES = {"a listing", "a reading", "the beginning of an upload", "the end of an upload", "a copy"}
"""What is answered with a body, which can break off."""


def drawn(field: Field) -> Sequence[tuple[str, str]]:
    """(request, fault): this seed's half of all that there are; the other half is its neighbour's."""
    pairs = [(r, f) for r in list_requests(field) for f in FAULTS if f != "answered in half" or r in BODIES]
    random.Random((SEED + 1) // 2).shuffle(pairs)
    return pairs[SEED % 2 :: 2]


def rule(request: str, fault: str, times: int = 1, late: float = 0) -> Rule:
    """`late`: seconds, for an answer that comes when nobody waits any more."""
    return Rule(REQUESTS[request], times=times, seconds=late, **FAULTS[fault])


@contextmanager
def store_away(field: Field, store: Proxy, after: int = 0) -> Iterator[None]:
    """Nobody answers any more, from so many requests on."""
    store.rules = [Rule(".", "pass", times=after), Rule(".", "reset", times=-1)]
    field.account.did(f"{after} requests from now the store goes away")
    try:
        yield
    finally:
        store.rules = []
        field.account.did("the store is back")
