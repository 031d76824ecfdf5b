"""The local lake on a real file system, in addition to `test_both_lakes`: rivals, full disks, stray paths."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.pipelines.errors import LakeFull, LakeUnavailable, Retryable, Terminal, Unknown
from sluice.resources.lake import local_lake
from sluice.resources.lake.local_lake import LocalLake
from tests.resources.kafka.tools import wait_until


@pytest.fixture
def lake(tmp_path: Path) -> LocalLake:
    return LocalLake(tmp_path / "a" / "lake")


def list_files(lake: LocalLake) -> list[str]:
    """Returns every file below the root, including temporary ones."""
    return sorted(str(p.relative_to(lake.root)) for p in lake.root.rglob("*") if not p.is_dir())


def test_folder_is_not_a_file(lake: LocalLake) -> None:
    lake.put("folder/file", b"")
    assert lake.size("folder") is None
    with pytest.raises(Terminal):
        lake.get("folder")


def test_links_and_unfinished_files_are_not_listed(lake: LocalLake) -> None:
    lake.put("a", b"")
    (lake.root / ".tmp-left-over").write_bytes(b"")
    (lake.root / ".tmp-folder").mkdir()
    (lake.root / ".tmp-folder" / "x").write_bytes(b"")
    (lake.root / "link").symlink_to(lake.root / "a")
    assert list(lake.list("")) == ["a"]


def test_show_creates_a_hard_link(lake: LocalLake) -> None:
    lake.put("staging/p", b"rows")
    lake.show("staging/p", "data/p")
    assert os.stat(lake.locate("data/p")).st_nlink == 2


def test_remove_deletes_empty_folders_and_is_idempotent(lake: LocalLake) -> None:
    lake.put("staging/7/a/p", b"")
    lake.put("staging/8/q", b"")
    lake.remove("staging/7/a/p")
    lake.remove("staging/7/a/p")
    assert not (lake.root / "staging" / "7").exists()
    assert list(lake.list("staging")) == ["staging/8/q"]
    lake.remove("staging/8/q")
    assert lake.root.is_dir()


@pytest.mark.parametrize("path", [".tmp-x", "a/.tmp-x/b"])
def test_paths_of_unfinished_files_are_refused(lake: LocalLake, path: str) -> None:
    with pytest.raises(Terminal, match="no path inside the lake"):
        lake.put(path, b"")


def test_link_out_of_the_lake_is_refused_and_link_inside_is_allowed(lake: LocalLake, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    lake.put("inside/x", b"1")
    (lake.root / "out").symlink_to(outside)
    (lake.root / "file").symlink_to(outside / "secret")
    (lake.root / "in").symlink_to(lake.root / "inside")
    calls: list[Callable[[], object]] = [
        lambda: lake.get("out/secret"),
        lambda: lake.get("file"),
        lambda: lake.put("out/new", b""),
    ]
    for call in calls:
        with pytest.raises(Terminal, match="symbolic link"):
            call()
    with pytest.raises(Terminal):
        list(lake.list("out"))
    assert lake.get("in/x") == b"1"
    assert sorted(os.listdir(outside)) == ["secret"]


def test_folder_in_use_that_becomes_a_link_out_of_the_lake_is_refused(lake: LocalLake, tmp_path: Path) -> None:
    lake.put("a/b/x", b"1")
    assert lake.get("a/b/x") == b"1"
    (lake.root / "a").rename(tmp_path / "outside")
    (lake.root / "a").symlink_to(tmp_path / "outside")

    def is_refused() -> bool:
        with suppress(Terminal):
            lake.get("a/b/x")
            return False
        return True

    wait_until(is_refused)  # a folder is checked once a second
    with pytest.raises(Terminal, match="symbolic link"):
        lake.put("a/b/new", b"")
    assert not (tmp_path / "outside/b/new").exists()


def test_too_long_name_and_file_in_place_of_folder_are_errors(lake: LocalLake) -> None:
    with pytest.raises(Terminal, match="x" * 300):
        lake.put("x" * 300, b"")
    lake.put("file", b"")
    with pytest.raises(Terminal):
        lake.put_if_absent("file/below", b"")
    with pytest.raises(Terminal):
        lake.put(".", b"")
    assert list_files(lake) == ["file"]


def test_uri_and_file_locations_of_the_lake(lake: LocalLake) -> None:
    assert lake.uri == lake.root.as_uri()
    assert lake.locate("data/p") == f"{lake.root}/data/p"


RIVAL = """
import sys
from pathlib import Path
from sluice.resources.lake.local_lake import LocalLake
lake, me = LocalLake(Path(sys.argv[1])), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
for i in range(200):
    if lake.put_if_absent(f"log/{i:020}.json", (me * 5000).encode()):
        print(i, flush=True)
    whole = lake.get(f"log/{i:020}.json")
    assert whole is not None and len(whole) == 5000 and len(set(whole)) == 1, "seen half written"
    if i % 7 == int(me):
        lake.put(f"busy/{me}", b"x")
        lake.remove(f"busy/{me}")
"""


def test_one_rival_process_wins_each_number_and_readers_get_whole_entries(lake: LocalLake) -> None:
    rivals = [
        subprocess.Popen(
            [sys.executable, "-c", RIVAL, str(lake.root), str(me)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for me in range(3)
    ]  # fmt: skip
    for rival in rivals:
        assert rival.stdout is not None
        assert rival.stdout.readline() == "ready\n"
    for rival in rivals:
        assert rival.stdin is not None
        rival.stdin.write("go\n")
        rival.stdin.flush()
    won = [list(map(int, rival.communicate(timeout=120)[0].split())) for rival in rivals]
    assert [rival.returncode for rival in rivals] == [0, 0, 0]
    assert sorted(i for wins in won for i in wins) == list(range(200))
    for me, wins in enumerate(won):
        assert all(lake.get(f"log/{i:020}.json") == str(me).encode() * 5000 for i in wins)
    assert list_files(lake) == [f"log/{i:020}.json" for i in range(200)]


KILLED = """
import os, signal, sys
from pathlib import Path
from sluice.resources.lake import local_lake
if sys.argv[2] == "put_if_absent":
    local_lake._link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    local_lake.LocalLake(Path(sys.argv[1])).put_if_absent("d/x", b"whole")
with local_lake.LocalLake(Path(sys.argv[1])).create("d/x") as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("during", ["put_if_absent", "create"])
def test_killed_writer_leaves_only_a_hidden_temporary_file(lake: LocalLake, during: str) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(lake.root), during], check=False)
    assert ended.returncode == -signal.SIGKILL
    (remaining,) = list_files(lake)
    assert Path(remaining).name.startswith(local_lake.TEMPORARY)
    assert list(lake.list("")) == []
    assert lake.put_if_absent("d/x", b"whole")
    assert list(lake.list("")) == ["d/x"]


TOGETHER = """
import os, signal, sys
from pathlib import Path
from sluice.resources.lake import local_lake
link, kill_at = local_lake._link, int(sys.argv[2])
def linked(temporary, place):
    if place.name == f"{kill_at:03}":
        os.kill(os.getpid(), signal.SIGKILL)
    return link(temporary, place)
local_lake._link = linked
local_lake.LocalLake(Path(sys.argv[1])).put_each_if_absent({f"d/{i:03}": b"whole" * 1000 for i in range(100)})
"""


@pytest.mark.parametrize("at", [0, 1, 99])
def test_killed_writer_of_several_files_leaves_only_whole_files(lake: LocalLake, at: int) -> None:
    ended = subprocess.run([sys.executable, "-c", TOGETHER, str(lake.root), str(at)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert list(lake.list("")) == [f"d/{i:03}" for i in range(at)]
    rest = {f"d/{i:03}": b"whole" * 1000 for i in range(100)}
    assert lake.put_each_if_absent(rest) == {f"d/{i:03}" for i in range(at, 100)}
    assert all(lake.get(path) == data for path, data in rest.items())


def test_put_syncs_contents_before_names_and_names_before_returning(
    lake: LocalLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, link, place_of = os.fsync, os.link, os.path.realpath
    durable, links = set[str](), list[str]()

    def sync_and_record(handle: int) -> None:
        sync(handle)
        durable.add(place_of(f"/proc/self/fd/{handle}"))

    def link_and_record(source: object, target: object, **kwargs: object) -> None:
        assert str(source) in durable, "a name of a file that a crash may empty"
        link(source, target, **kwargs)  # type: ignore[arg-type]
        links.append(str(target))
        durable.discard(os.path.dirname(str(target)))

    monkeypatch.setattr(os, "fsync", sync_and_record)
    monkeypatch.setattr(os, "link", link_and_record)
    put = {f"{folder}/{i}": b"x" for folder in ("a", "b/c") for i in range(80)}
    assert lake.put_each_if_absent(put) == put.keys()
    assert sorted(links) == sorted(f"{lake.root}/{path}" for path in put)
    assert {f"{lake.root}/a", f"{lake.root}/b/c", f"{lake.root}/b", f"{lake.root}"} <= durable


def test_put_of_several_files_without_disk_space_creates_no_file(small_disk: Path) -> None:
    lake = LocalLake(small_disk)
    with pytest.raises(LakeFull, match="no room in the lake for d/"):
        lake.put_each_if_absent({f"d/{i}": os.urandom(100_000) for i in range(20)})
    assert list_files(lake) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 1 MiB. Skips if this user may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs takes root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_is_reported_and_leaves_no_new_file(small_disk: Path) -> None:
    lake = LocalLake(small_disk)
    lake.put("x", b"before")
    big = os.urandom(2 << 20)
    for write in (lambda: lake.put("x", big), lambda: lake.put_if_absent("y", big)):
        with pytest.raises(LakeFull, match="no room"):
            write()
    with pytest.raises(LakeFull), lake.create("z") as file:
        file.write(big)
    with pytest.raises(LakeFull), lake.create("z") as file:
        pq.write_table(pa.table({"x": [big]}), file)
    assert list_files(lake) == ["x"]
    assert lake.get("x") == b"before"
    lake.put("x", b"after")
    assert lake.get("x") == b"after"


def test_full_disk_during_buffered_writes_is_reported(small_disk: Path) -> None:
    lake = LocalLake(small_disk)
    with pytest.raises(LakeFull), lake.create("z") as file:  # noqa: PT012 - any of the writes may be the one
        for _ in range(1 << 12):
            file.write(b"x" * 1000)
    assert list_files(lake) == []


LIMITED = """
import resource, sys
from pathlib import Path
from sluice.pipelines.errors import LakeFull
from sluice.resources.lake.local_lake import LocalLake
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
lake = LocalLake(Path(sys.argv[1]))
for write in (lake.put, lake.put_if_absent):
    try:
        write("x", b"x" * 2000)
    except LakeFull as error:
        print(error.message)
with lake.create("y") as file:
    file.write(b"y" * 1000)
"""


def test_file_size_limit_counts_as_full_disk(lake: LocalLake) -> None:
    output = subprocess.run(
        [sys.executable, "-c", LIMITED, str(lake.root)], capture_output=True, text=True, check=True
    ).stdout
    assert output.count("no room in the lake for x") == 2
    assert list_files(lake) == ["y"]


def test_show_copies_across_file_systems(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir()
    lake = LocalLake(tmp_path)
    lake.put("lake/staging/p", b"rows")
    for _ in range(2):
        lake.show("lake/staging/p", "disk/data/p")
        assert lake.get("disk/data/p") == b"rows"
    assert list_files(LocalLake(small_disk)) == ["data/p"]
    lake.put("lake/staging/big", os.urandom(2 << 20))
    with pytest.raises(LakeFull):
        lake.show("lake/staging/big", "disk/data/big")
    assert list_files(LocalLake(small_disk)) == ["data/p"]


def test_read_only_disk_is_a_terminal_error(small_disk: Path) -> None:
    lake = LocalLake(small_disk)
    lake.put("x", b"")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(Terminal, match="mount it writable"):
        lake.put("x", b"1")


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, LakeFull),
        (errno.EDQUOT, LakeFull),
        (errno.EIO, LakeUnavailable),
        (errno.ESTALE, Retryable),
        (errno.EMFILE, Retryable),
        (errno.EACCES, Terminal),
    ],
)
def test_os_errors_map_to_sluice_errors(
    lake: LocalLake, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    for write in (lambda: lake.put("x", b""), lambda: lake.put_if_absent("x", b"")):
        with pytest.raises(kind):
            write()


def test_existing_entry_that_may_not_be_durable_is_unknown(lake: LocalLake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.put("log/0", b"")  # so that the folder is there, and only its new entry is to be made durable
    sync = os.fsync

    def refuse_folders(handle: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(handle)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    with pytest.raises(Unknown):
        lake.put_if_absent("log/1", b"entry")
    assert lake.get("log/1") == b"entry"


@pytest.mark.parametrize("answer", [errno.EEXIST, errno.EIO])
def test_lost_response_to_own_link_counts_as_success(
    lake: LocalLake, monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    """Over NFS a repeated LINK finds its own result, which the file's link count reveals."""
    link = os.link

    def link_and_lose_the_answer(*args: object, **kwargs: object) -> None:
        link(*args, **kwargs)  # type: ignore[arg-type]
        raise OSError(answer, os.strerror(answer))

    monkeypatch.setattr(os, "link", link_and_lose_the_answer)
    assert lake.put_if_absent("log/1", b"ours")
    assert list_files(lake) == ["log/1"]


def test_file_system_without_links_is_refused_for_the_ledger(lake: LocalLake, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(Terminal, match="needs a file system with hard links"):
        lake.put_if_absent("log/1", b"")
    lake.put("staging/p", b"rows")
    lake.show("staging/p", "data/p")
    assert list_files(lake) == ["data/p", "staging/p"]


@pytest.mark.parametrize(("link", "says"), [(False, "lsattr"), (True, "needs a file system with hard links")])
def test_permission_error_remedy_depends_on_the_attempted_operation(
    lake: LocalLake, monkeypatch: pytest.MonkeyPatch, link: bool, says: str
) -> None:
    """An immutable folder accepts no file and FAT no link, with the same error number."""

    def refuse(*names: object, **_: object) -> None:
        second = (None, str(names[1])) if link else ()
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(names[0]), *second)

    monkeypatch.setattr(*((os, "link") if link else (local_lake, "_Draining")), refuse)
    with pytest.raises(Terminal) as caught:
        lake.put_if_absent("log/1", b"")
    assert says in caught.value.remedy


def test_large_file_written_in_pieces_of_any_size_is_complete(lake: LocalLake) -> None:
    pieces = [bytes([i % 251]) * (i * i * 997 % 700_000) for i in range(40)]
    with lake.create("data/large") as file:
        for piece in pieces:
            file.write(piece)
    assert lake.get("data/large") == b"".join(pieces)
    assert lake.size("data/large") > 8 << 20


# -- remains of killed processes


def test_unfinished_writes_are_listed_with_age_and_can_be_discarded(lake: LocalLake, tmp_path: Path) -> None:
    lake.put("log/1.json", b"1")
    begun = lake.root / "log" / ".tmp-00ff"
    begun.write_bytes(b"half")
    alone = lake.root / "staging" / "7" / "a" / ".tmp-1"
    alone.parent.mkdir(parents=True)
    alone.touch()
    os.utime(alone, (0, 0))
    ((name, age),) = lake.list_unfinished("log")
    assert (name, age < 3_600_000) == ("log/.tmp-00ff", True)
    ((old, older),) = lake.list_unfinished("staging")
    assert older > 50 * 365 * 86_400_000
    for unfinished in (name, old, old):
        lake.discard(unfinished)
    assert list(lake.list_unfinished("log")) == list(lake.list_unfinished("nowhere")) == []
    assert not (lake.root / "staging").exists(), "folders that become empty are removed too"
    assert list(lake.list("")) == ["log/1.json"]


def test_folder_without_its_file_is_an_unfinished_write(lake: LocalLake) -> None:
    """A process that was killed before it wrote its file leaves empty folders."""
    lake.put("staging/8/a/x", b"1")
    (lake.root / "staging" / "7" / "a" / "data").mkdir(parents=True)
    ((name, age),) = lake.list_unfinished("staging")
    assert (name, age < 3_600_000) == ("staging/7/a/data/", True)
    for _ in range(2):
        lake.discard(name)
    assert list(lake.list_unfinished("staging")) == []
    assert not (lake.root / "staging" / "7").exists()
    lake.discard("staging/8/a/")
    assert lake.get("staging/8/a/x") == b"1", "a folder that is not empty stays"


def test_failed_write_leaves_no_folder(lake: LocalLake) -> None:
    with pytest.raises(ValueError, match="stop"), lake.create("staging/7/a/x"):
        raise ValueError("stop")
    assert list(lake.root.iterdir()) == []


def test_only_unfinished_writes_can_be_discarded(lake: LocalLake) -> None:
    lake.put("log/1.json", b"1")
    for name in ("log/1.json", "../.tmp-1", "log"):
        with pytest.raises(Terminal):
            lake.discard(name)
    assert lake.get("log/1.json") == b"1"


def test_write_with_discarded_temporary_file_fails_as_unavailable(lake: LocalLake) -> None:
    def write() -> None:
        with lake.create("data/part") as file:
            file.write(b"half")
            for name, _ in list(lake.list_unfinished("data")):
                lake.discard(name)

    with pytest.raises(LakeUnavailable):
        write()
    assert list(lake.list("")) == []
