"""A lake in a dict, with hooks before calls and counts of requests."""

from __future__ import annotations

import io
import threading
from bisect import bisect_left, insort
from collections import Counter, UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, BinaryIO, Self

from sluice.pipelines.errors import Unknown
from sluice.pipelines.ports import Stat

PAGE = 1000
"""Names in one response of a store."""


class Files(UserDict[str, bytes]):
    """Files by path, sorted, so that a folder of a large lake is located by bisection."""

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        self.data = dict(files or {})
        self._paths = sorted(self.data)

    def __setitem__(self, path: str, data: bytes) -> None:
        if path not in self.data:
            insort(self._paths, path)
        self.data[path] = data

    def __delitem__(self, path: str) -> None:
        del self.data[path]
        del self._paths[bisect_left(self._paths, path)]

    def __ior__(self, other: Any) -> Self:  # type: ignore[override, misc]
        self.update(other)
        return self

    def __copy__(self) -> Files:
        return Files(self.data)

    def below(self, prefix: str, after: str = "") -> list[str]:
        """Returns the paths below the folder that are greater than `after`, in order."""
        folder = prefix.rstrip("/") + "/"
        first, last = bisect_left(self._paths, max(folder, after)), bisect_left(self._paths, folder[:-1] + "0")
        return [p for p in self._paths[first:last] if p > after]


class MemoryLake:
    """`ports.Lake` in memory. Tests may read and change `files`.

    `before` has hooks by method name. A hook is called with the path before the method acts; it may raise, or change
    the lake like a concurrent writer. The hook of `create` is called at the end of the block, before the file appears.
    `requests` counts the requests to a store.
    """

    uri = "memory://"
    copies = False

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        self._files = Files(files)
        self._lock = threading.RLock()
        self.before: dict[str, Callable[[str], None]] = {}
        self.lose_answer_of: set[str] = set()
        """Paths whose next `put_if_absent` takes effect, but raises Unknown."""
        self.begun: dict[str, int] = {}
        """Unfinished writes, with the time (ms) since their last progress."""
        self.requests: Counter[str] = Counter()

    @property
    def files(self) -> Files:
        return self._files

    @files.setter
    def files(self, files: Mapping[str, bytes]) -> None:
        self._files = files if isinstance(files, Files) else Files(files)

    def write(self, path: str, data: bytes | None) -> None:
        """Write a file, or remove it if `data` is None. All changes pass through here, after `before`."""
        with self._lock:
            if data is None:
                self._files.pop(path, None)
            else:
                self._files[path] = bytes(data)

    def _before(self, call: str, path: str) -> None:
        if hook := self.before.get(call):
            hook(path)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        self._before("put_if_absent", path)
        self.requests["put"] += 1
        with self._lock:
            if path in self._files:
                return False
            self.write(path, data)
        if path in self.lose_answer_of:
            self.lose_answer_of.remove(path)
            raise Unknown(f"no answer for {path}")
        return True

    def put_each_if_absent(self, files: Mapping[str, bytes]) -> frozenset[str]:
        return frozenset([path for path, data in files.items() if self.put_if_absent(path, data)])

    def put(self, path: str, data: bytes) -> None:
        self._before("put", path)
        self.requests["put"] += 1
        self.write(path, data)

    def get(self, path: str) -> bytes | None:
        self._before("get", path)
        self.requests["get"] += 1
        return self._files.get(path)

    def list(self, prefix: str, after: str = "") -> Iterator[str]:
        self._before("list", prefix)
        paths = self._files.below(prefix, after)
        self.requests["list"] += 1 + len(paths) // PAGE
        return iter(paths)

    def folders(self, prefix: str) -> Iterator[str]:
        above = prefix.rstrip("/") + "/"
        below = (path.removeprefix(above) for path in self.list(prefix))
        return iter(sorted({path.split("/")[0] for path in below if "/" in path}))

    def stats(self, prefix: str, after: str = "") -> Iterator[Stat]:
        files = [(path, self._files.get(path, b"")) for path in self.list(prefix, after)]
        return (Stat(path, len(data), blake2b(data, digest_size=8).hexdigest()) for path, data in files)

    def size(self, path: str) -> int | None:
        self._before("size", path)
        self.requests["head"] += 1
        return len(self._files[path]) if path in self._files else None

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        sink = io.BytesIO()
        yield sink
        self._before("create", path)
        self.requests["put"] += 1
        self.write(path, sink.getvalue())

    def open(self, path: str) -> BinaryIO:
        self._before("open", path)
        self.requests["get"] += 1
        if path not in self._files:
            raise FileNotFoundError(path)
        return io.BytesIO(self._files[path])

    def show(self, source: str, target: str) -> None:
        self._before("show", target)
        self.requests["put"] += 1
        if source not in self._files:
            raise FileNotFoundError(source)
        self.write(target, self._files[source])

    def remove(self, path: str) -> None:
        self._before("remove", path)
        self.requests["delete"] += 1
        self.write(path, None)

    def list_unfinished(self, prefix: str) -> Iterator[tuple[str, int]]:
        folder = prefix.rstrip("/") + "/"
        return iter(sorted((p, age) for p, age in self.begun.items() if p.startswith(folder)))

    def discard(self, name: str) -> None:
        self.begun.pop(name, None)

    def locate(self, path: str) -> str:
        return self.uri + path
