"""The lake in a local or mounted folder: every write is seen whole or not at all, and survives a crash.

A write goes to a `.tmp-…` file in the target's folder, is fsynced, then linked (put_if_absent) or renamed (put,
create) into place, and the folder is fsynced. Only killed processes leave `.tmp-…` files; `unfinished` lists them.
A path that would leave the root, by `..` or by a symbolic link, is refused.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedWriter, FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, cast

from sluice.pipelines.errors import LakeFull, LakeUnavailable, ProofFailed, SluiceError, Terminal, Unknown
from sluice.pipelines.ports import Stat
from sluice.pipelines.util.parallel import map_parallel

TEMPORARY = ".tmp-"
_STRAY = re.compile(rf"(^|/)(\.{{0,2}}(/|\Z)|{re.escape(TEMPORARY)})|\0")
"""What no path in the lake has: an empty name, `.`, `..`, a `.tmp-…` or a NUL."""
_HANDED_BYTES = 4 << 20
"""While a file is written, this many bytes at a time are handed to the disk."""
_TOGETHER = 64
"""The most files that one call writes at once: each is open until it is durable, and a process may open 1,024."""
_PATIENCE = 0.002
"""Seconds for which one thread alone waits for files that the disk has begun with already: it is mostly short."""
_CHECKED = 1.0
"""Seconds for which a folder that no link leads to is not checked again: for a ledger of small files, the checks of
each name above a file were a tenth of the CPU."""
_FOLDERS = 4096
"""The most folders that are remembered as checked."""
_RACES = 100
"""How often a folder may vanish (another process removes it as empty) before this process has put something in it."""

_checked: dict[str, float] = {}
"""When a folder's path was checked for links, of the monotonic clock."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_LATER = {errno.ENOENT, errno.EIO, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT}
_LATER |= {errno.ENOLCK, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EHOSTDOWN, errno.ENOTCONN}
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}
_RIGHTS = "give this user the right to read and write there"
_REMEDIES = {
    errno.EACCES: _RIGHTS,
    errno.EROFS: "the file system is read-only: mount it writable, or name another lake",
    errno.ENAMETOOLONG: "give the lake a shorter path",
} | dict.fromkeys(_CANNOT_LINK, "the ledger needs a file system with hard links: name a lake on another")


class LocalLake:
    """`ports.Lake` below the folder `root`, which the first write makes. Safe across processes, picklable."""

    copies = False

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))

    @property
    def uri(self) -> str:
        return self.root.as_uri()

    def locate(self, path: str) -> str:
        return self._inside(path)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Create the file; False if it exists. Of several writers exactly one gets True.

        Raises Unknown if it exists now but could not be made durable.
        """
        return bool(self._put_together([(path, data)]))

    def put_each_if_absent(self, files: Mapping[str, bytes]) -> frozenset[str]:
        todo = list(files.items())
        groups = (todo[at : at + _TOGETHER] for at in range(0, len(todo), _TOGETHER))
        return frozenset([path for group in groups for path in self._put_together(group)])

    def _put_together(self, files: Sequence[tuple[str, bytes]]) -> list[str]:
        """Those of the paths that were not taken. All files are durable before one has its name, all names before the
        answer. The disk takes everything at once, and each folder once."""
        written, won = list[tuple[str, Path, Path, BufferedWriter]](), dict[str, Path]()
        with ExitStack() as stack:
            for path, data in files:
                target = self._place(path)
                with _translating_errors(path):
                    if target.exists():
                        continue
                    temporary, file = _temporary(target)
                    stack.callback(_discard, temporary, file)
                    file.write(data)
                    file.flush()
                    if len(files) > 1:
                        cast(_Draining, file.raw).hand_over()
                written.append((path, target, temporary, file))
            map_parallel(_make_durable, [(path, file) for path, _, _, file in written], patience=_PATIENCE)
            for path, target, temporary, _ in written:
                with _translating_errors(path):
                    if _link(temporary, target):
                        won[path] = target
        for folder, path in {target.parent: path for path, target in won.items()}.items():
            try:
                _sync(folder)
            except OSError as error:
                raise Unknown(
                    f"{path} stands in the lake, but may not survive a crash: {error.strerror}",
                    remedy="check the disk, then run again: the ledger is read back first",
                ) from error
        return [*won]

    def put(self, path: str, data: bytes) -> None:
        with _translating_errors(path), self.create(path) as file:
            file.write(data)

    def get(self, path: str) -> bytes | None:
        target = self._inside(path)
        try:
            with open(target, "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _meaning(error, path) from error

    def list(self, prefix: str, after: str = "") -> Iterator[str]:
        """Files below `prefix`, in the order of their whole paths, without links and `.tmp-…` files."""
        above = prefix.strip("/")
        folder = self._inside(above) if above else str(self.root)
        return _walk(folder, f"{above}/" if above else "", after)

    def folders(self, prefix: str) -> Iterator[str]:
        """Also empty ones, without links."""
        try:
            with os.scandir(self._place(prefix.strip("/"))) as entries:
                return iter(sorted(e.name for e in entries if e.is_dir(follow_symlinks=False)))
        except (FileNotFoundError, NotADirectoryError):
            return iter(())
        except OSError as error:
            raise _meaning(error, prefix) from error

    def stats(self, prefix: str, after: str = "") -> Iterator[Stat]:
        for path in self.list(prefix, after):
            try:  # no block of its own: an audit asks this of every file that there is
                status = os.lstat(f"{self.root}/{path}")
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise _meaning(error, path) from error
            yield Stat(path, status.st_size, f"{status.st_ino:x}-{status.st_ctime_ns:x}")

    def size(self, path: str) -> int | None:
        target = self._inside(path)
        try:
            status = os.stat(target)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _meaning(error, path) from error
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        """A file that appears, durable, when the block ends. A write that finds no room raises LakeFull."""
        target = self._place(path)
        with _translating_errors(path):
            temporary, file = _temporary(target)
        try:
            with _translating_errors(path, only=_FULL):
                yield file
            with _translating_errors(path):
                _finish(file)
                _move(temporary, target)
        except BaseException:
            _discard(temporary, file)
            self._prune(temporary)
            raise

    def open(self, path: str) -> BinaryIO:
        target = self._place(path)
        with _translating_errors(path):
            try:
                return target.open("rb")
            except (FileNotFoundError, NotADirectoryError):
                pass
        raise FileNotFoundError(errno.ENOENT, "the file is not in the lake", path)

    def show(self, source: str, target: str) -> None:
        """Hard-link the file, or copy it where links cannot reach.

        Raises FileNotFoundError without a source, ProofFailed if something else is at the target.
        """
        origin, destination = self._place(source), self._place(target)
        with _translating_errors(target):
            for _ in range(_RACES):
                if not origin.is_file():
                    break
                with suppress(FileNotFoundError):
                    _make_folder(destination.parent)
                    _show(origin, destination)
                    return _sync(destination.parent)
        raise FileNotFoundError(errno.ENOENT, "the file is not in the lake", source)

    def remove(self, path: str) -> None:
        """Remove the file, and the folders that this leaves empty."""
        target = self._place(path)
        with _translating_errors(path), suppress(FileNotFoundError, NotADirectoryError):
            target.unlink()
        self._prune(target)

    def _prune(self, path: Path) -> None:
        with suppress(OSError):  # a folder that is not empty, or in use, stays
            for folder in path.relative_to(self.root).parents:
                if folder.name:
                    (self.root / folder).rmdir()

    def list_unfinished(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yields `.tmp-…` files below the folder, and empty folders of unwritten files (with a trailing `/`). Each
        comes with the time (ms) since its last write."""
        for folder, inner, names in os.walk(self._place(prefix)):
            above = Path(folder).relative_to(self.root)
            begun = sorted(n for n in names if n.startswith(TEMPORARY))
            if not (inner or names):
                yield from _age_of(Path(folder), f"{above}/")
            for name in begun:
                yield from _age_of(Path(folder) / name, str(above / name))

    def discard(self, name: str) -> None:
        above, _, last = name.rpartition("/")
        if last and not last.startswith(TEMPORARY):
            raise Terminal(f"{ascii(name)[:300]} is no unfinished write", remedy="this is a bug; nothing was removed")
        folder = self._place(above) / last
        if last:
            with _translating_errors(name), suppress(FileNotFoundError, NotADirectoryError):
                folder.unlink()
        self._prune(folder if last else folder / "gone")

    def _place(self, path: str) -> Path:
        return Path(self._inside(path))

    def _inside(self, path: str) -> str:
        """The path below the root. Checked before each call, its folders once a second; a swap after the check is not
        detected. Text: a ledger is read by dozens of names, and a Path costs as much as the checks."""
        inside = os.path.join(self.root, "")
        with suppress(UnicodeEncodeError):
            os.fsencode(path)
            if not _STRAY.search(path) and (
                not self._leads_over_link(path) or os.path.join(os.path.realpath(inside + path), "").startswith(inside)
            ):
                return inside + path
        raise Terminal(
            f"{ascii(path)[:300]} is no path inside the lake {self.root}",
            remedy="look for `..`, an absolute path, or a symbolic link that leads out of the lake",
        )

    def _leads_over_link(self, path: str) -> bool:
        """Returns whether the root or a name below it is a symbolic link. If not, nothing needs resolving, which
        would stat every folder above the lake, too."""
        full, now = f"{self.root}/{path}", time.monotonic()
        folder = os.path.dirname(full)
        if now - _checked.get(folder, -_CHECKED) < _CHECKED:
            return os.path.islink(full)
        names = accumulate(path.split("/"), "{}/{}".format, initial=str(self.root))
        if any(map(os.path.islink, names)):
            return True
        if len(_checked) >= _FOLDERS:
            _checked.clear()
        _checked[folder] = now
        return False


@contextmanager
def _translating_errors(path: str, only: set[int] | None = None) -> Iterator[None]:
    """Turn an OSError (of the kinds in `only`) into the lake's error for it."""
    try:
        yield
    except OSError as error:
        if only is not None and error.errno not in only:
            raise
        raise _meaning(error, path) from error


def _meaning(error: OSError, path: str) -> SluiceError:
    why = f"{path}: {error.strerror or type(error).__name__}"
    if error.errno in _FULL:
        return LakeFull(
            f"no room in the lake for {why}",
            remedy="free space or raise the quota, then run again; nothing half written is visible",
        )
    if error.errno in _LATER:
        return LakeUnavailable(f"the lake did not take or give {why}", remedy="run again; if it stays, check the disk")
    remedy = _REMEDIES.get(error.errno or 0, "check what stands at that path in the lake, and its permissions")
    if error.errno == errno.EPERM and error.filename2 is None:  # not of a link: the folder is immutable, or append-only
        remedy = f"{_RIGHTS} (lsattr shows whether the folder is immutable)"
    return Terminal(f"the lake refused {why}", remedy=remedy)


def _age_of(path: Path, name: str) -> Iterator[tuple[str, int]]:
    with suppress(FileNotFoundError):  # it has ended since
        yield name, max(0, int((time.time() - path.lstat().st_mtime) * 1000))


def _temporary(target: Path) -> tuple[Path, BufferedWriter]:
    """Create an empty file in the folder of `target`, and the folder if it is missing."""
    for _ in range(_RACES):
        temporary = target.with_name(TEMPORARY + secrets.token_hex(8))
        with suppress(FileNotFoundError):
            return temporary, BufferedWriter(_Draining(temporary, "xb"))
        _make_folder(target.parent)
    raise FileNotFoundError(errno.ENOENT, "its folder vanishes again and again", str(target))


class _Draining(FileIO):
    """File flushed to disk during writing, so that the final fsync is short."""

    _written = _handed = 0

    def write(self, data: Any) -> int:
        count = super().write(data)
        self._written += count
        if self._written - self._handed >= _HANDED_BYTES:
            self.hand_over()
        return count

    def hand_over(self) -> None:
        """Start writeback of the bytes written since the last call."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # only advice: Linux starts writing the pages it may drop
                os.posix_fadvise(self.fileno(), self._handed, self._written - self._handed, os.POSIX_FADV_DONTNEED)
            self._handed = self._written


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir()
    _sync(folder.parent)


def _finish(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _discard(temporary: Path, file: BinaryIO) -> None:
    with suppress(OSError):  # closing flushes, which may fail once more
        file.close()
    _drop(temporary)


def _drop(temporary: Path) -> None:
    with suppress(OSError):
        temporary.unlink()


def _move(temporary: Path, target: Path) -> None:
    try:
        temporary.replace(target)
    except OSError:
        _drop(temporary)
        raise
    _sync(target.parent)


def _link(temporary: Path, target: Path) -> bool:
    """Returns whether this process put the file there. On NFS an error may hide success; the link count shows it."""
    try:
        target.hardlink_to(temporary)
    except OSError as error:
        if temporary.stat().st_nlink > 1:
            return True
        if not isinstance(error, FileExistsError):
            raise
        return False
    return True


def _make_durable(written: tuple[str, BinaryIO]) -> None:
    path, file = written
    with _translating_errors(path):
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make the folder's entries durable, if its file system can."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def _show(origin: Path, target: Path) -> None:
    try:
        target.hardlink_to(origin)
    except FileExistsError:
        if not target.samefile(origin) and target.stat().st_size != origin.stat().st_size:
            raise ProofFailed(
                f"{target.name} is visible already, with another size than the staged file",
                remedy="another writer wrote into the lake's data folder: move that file away and run again",
            ) from None
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        _copy(origin, target)


def _copy(origin: Path, target: Path) -> None:
    temporary, file = _temporary(target)
    try:
        with origin.open("rb") as source:
            shutil.copyfileobj(source, file, 1 << 20)
        _finish(file)
    except BaseException:
        _discard(temporary, file)
        raise
    _move(temporary, target)


def _walk(folder: str, above: str, after: str) -> Iterator[str]:
    lowest = after.removeprefix(above).partition("/")[0] if after.startswith(above) else ""
    for name in _names(folder, above, lowest):
        path = above + name
        if name.endswith("/"):
            if path > after or after.startswith(path):
                yield from _walk(f"{folder}/{name}", path, after)
        elif path > after:
            yield path


def _names(folder: str, above: str, lowest: str) -> list[str]:
    """Sorted names in a folder, but for most of those below `lowest`. Names of folders end in `/`, so that whole paths
    are in order, too."""
    with _translating_errors(above), suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        later = (e for e in entries if e.name >= lowest or lowest.startswith(e.name)) if lowest else entries
        shown_entries = [e for e in later if not e.name.startswith(TEMPORARY)]
        folders = [f"{e.name}/" for e in shown_entries if e.is_dir(follow_symlinks=False)]
        return sorted(folders + [e.name for e in shown_entries if e.is_file(follow_symlinks=False)])
    return []
