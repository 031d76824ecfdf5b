"""A pack: one archive of exactly the Python packages that Spark's executors need, made of this environment.

    sluice-pack-<hash>.tar.gz     packages, to be unpacked and put on PYTHONPATH; no interpreter

Executors need a Python of the same minor version on the same kind of machine, and nothing else. The hash is over
Sluice's own files, the names and releases of all that they import, Python's minor version and the platform: packs of
one environment have one name, are made once for a user, and serve every project. The pack has the compiled loops.
Promises: a pack appears whole, and its own packages suffice for all imports of tasks.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from sluice.pipelines.errors import SetupError
from sluice.pipelines.model.receipts import Progress, Reporter
from sluice.pipelines.records.compiled import library
from sluice.pipelines.util.locks import locking
from sluice.resources.lake import CLIENTS

STAGE = "pack"
_LAYOUT = 1
"""Part of the hash: it changes when packs are made differently."""
_CLIENTS = {client for client in CLIENTS.values() if importlib.util.find_spec(client.package)}
"""Stores' clients whose packages are installed here; without one, executors need it no more than we do."""
_STORES = sorted({client.package for client in _CLIENTS})
_PROTOBUF = {
    name: module
    for name, module in (("protobuf", "google.protobuf.descriptor_pb2"), ("grpcio-tools", "grpc_tools.protoc"))
    if any(metadata.distributions(name=name))
}
"""Installed packages of the extra `protobuf`, and its modules: tasks compile new schemas at first use."""
_ROOTS = (
    *_STORES,
    *_PROTOBUF,
    *(("gssapi",) if find_spec("gssapi") else ()),
    *("cramjam", "crc32c", "kafka-python", "numpy", "pyarrow", "pydantic", "pyyaml"),
)
"""The imports of Sluice's tasks; their requirements are found."""
_PACKAGE = Path(__file__).parents[2]
_ROOMS = ("pipelines", "resources")
"""The parts of Sluice that executors may import: no commands, and nothing of Dagster's."""
_IMPORTED = (
    "sluice.resources.spark.executor",
    "sluice.pipelines.landing.task",
    "sluice.pipelines.records.json.format",
    "sluice.pipelines.records.contract_rows.contract_format",
    "sluice.pipelines.records.avro.format",
    "sluice.pipelines.records.protobuf.format",
    "sluice.resources.kafka.fetch.fetch",
    *_PROTOBUF.values(),
    "sluice.resources.lake.object_lake",
    *sorted({f"sluice.resources.lake.{client.module}" for client in _CLIENTS}),
    *(("sluice.resources.registry.glue", "boto3") if "boto3" in _STORES else ()),
)
# Tests, headers, sources of compiled modules and stubs are for building and typing; the large libraries are of parts
# of Arrow that no task imports. Of AWS, tasks use S3, Glue and the services that issue credentials.
_LEFT_OUT = re.compile(
    r"""(^|/)(tests?|testing|include|__pycache__)/ | \.(pyc|pyi|pxd|pxi|pyx|h|hpp|c|cc|cpp|a|cmake|f2py_f2cmap)$
    | ^pyarrow/(src|vendored/tests)/
    | ^pyarrow/(lib)?_?(arrow_flight|gandiva|arrow_s3|flight|orc|s3fs|gcsfs|azurefs|hdfs|cuda)[._]
    | ^numpy/(f2py|distutils|doc)/ | ^numba/(cuda|pycc)/ | ^boto3/(data|examples)/
    | ^botocore/data/(?!s3/|glue/|sts/|sso/|sso-oidc/|signin/|[^/]+$)
    | \.dist-info/(?!METADATA$)""",
    re.VERBOSE,
)
_COPIES = re.compile(r"^pyarrow/libarrow_python\.so(\.\d+\.\d+\.\d+)?$")
"""Copies of libarrow_python.so.NNNN, by which libraries load it. pyarrow 18 has no number."""
_NOT_CODE = re.compile(r"(^|/)(__pycache__|\..*)(/|$)|\.(pyc|pyi)$")
_BLOCK = 4 << 20
_KEPT = 3
"""Packs that stay in the cache: the last ones used."""
_IN_USE = 21_600.0
"""Seconds for which others stay after their last use, besides those of processes at work: Spark sends the file to
executors that come later."""
_own_packs: dict[Path, BinaryIO] = {}
"""The packs that this process has used, locked until it ends."""
_MAKING = "making-"


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack on this machine's disk. `bytes`: the archive's size; `unpacked`: that of its files."""

    path: Path
    digest: str
    bytes: int
    unpacked: int
    distributions: tuple[str, ...]
    """Names and releases, such as `numpy 2.4.6`."""
    created: bool
    """True if it was made just now."""


@dataclass(frozen=True, slots=True)
class _PackedFile:
    """A file of this environment, and its path in the pack."""

    path: str
    source: Path


def pack(report: Reporter = lambda progress: None, modules: Sequence[str] = ()) -> Pack:
    """Return the pack of this environment, made if it is not there yet. Raises SetupError.

    `modules` are the user's own, packed with their packages' requirements. The first time takes about half a minute.
    Of several processes that want the same pack at once, one makes it
    and the others wait.
    """
    theirs = [_Module.of(name) for name in sorted({name.partition(".")[0] for name in modules})]
    distributions = _distributions((*_ROOTS, *(root for module in theirs for root in module.roots)))
    ours = [*_ours(), *(file for module in theirs for file in module.files)]
    digest = _digest(distributions, ours)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice" / "packs"
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # packs are locked while they are in use
    path = folder / f"sluice-pack-{digest}.tar.gz"
    created = False
    with locking(folder / "lock"):
        if not path.exists():
            _make(distributions, ours, path, report, (*_IMPORTED, *modules))
            created = True
        os.utime(path)
        _mark_in_use(path)
        _forget(folder)
    names = tuple(f"{d.metadata['Name']} {d.version}" for d in distributions.values())
    unpacked = int(_notes(path).read_text() or 0) if _notes(path).exists() else 0
    return Pack(path, digest, path.stat().st_size, unpacked, names, created)


def _mark_in_use(path: Path) -> None:
    """Keep the pack until this process ends."""
    if path not in _own_packs:
        _own_packs[path] = path.open("rb")
        fcntl.flock(_own_packs[path], fcntl.LOCK_SH)


def _notes(path: Path) -> Path:
    """Return the path of the file next to a pack that holds the size of its files."""
    return path.with_name(path.name.removesuffix(".tar.gz") + ".size")


def _is_in_use(path: Path) -> bool:
    """Returns whether a process uses the pack."""
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _forget(folder: Path) -> None:
    """Remove old packs and leftovers of killed processes. The caller holds the lock, so none is being made."""
    for unfinished in folder.glob(f"{_MAKING}*/"):
        shutil.rmtree(unfinished, ignore_errors=True)
    packs = sorted(folder.glob("sluice-pack-*.tar.gz"), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in packs[_KEPT:]:
        if time.time() - old.stat().st_mtime < _IN_USE or _is_in_use(old):
            continue
        old.unlink(missing_ok=True)
        _notes(old).unlink(missing_ok=True)


# -- contents


def _distributions(roots: Iterable[str] = _ROOTS) -> dict[str, metadata.Distribution]:
    """Return the imports of tasks and their requirements, by normalized name. Raises SetupError."""
    distributions: dict[str, metadata.Distribution] = {}
    queue = deque(roots)
    while queue:
        name = _normal(queue.popleft())
        if name in distributions:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if name in map(_normal, _ROOTS):
                raise SetupError(
                    f"{name} is not installed here", remedy="install Sluice with its dependencies"
                ) from None
            continue  # it is for another Python or system, else it would be here
        distributions[name] = distribution
        queue += _requires(distribution)
    return dict(sorted(distributions.items()))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _requires(distribution: metadata.Distribution) -> list[str]:
    # A requirement is a text such as `urllib3<3,>=1.25 ; python_version >= "3.10"`.
    return [
        re.split(r"[\s<>=!~;\[(]", line.strip(), maxsplit=1)[0]
        for line in distribution.requires or ()
        if "extra ==" not in line.replace("  ", " ")
    ]


def _ours() -> list[_PackedFile]:
    """Return Sluice's own files, from an installation or a checkout with links, and their compiled loops."""
    root = _PACKAGE
    files = [
        _PackedFile(f"sluice/{p.name}", p) for p in sorted(root.iterdir()) if p.suffix == ".py" or p.name == "py.typed"
    ]
    for room in _ROOMS:
        for folder, folders, names in os.walk(root / room, followlinks=True):
            folders.sort()
            at = Path(folder)
            path = f"sluice/{at.relative_to(root).as_posix()}"
            files += [_PackedFile(f"{path}/{n}", at / n) for n in sorted(names) if n.endswith((".py", ".json"))]
    return files


@dataclass(frozen=True, slots=True)
class _Module:
    """A module or package of the user's: its distributions, and files outside any.

    Such files come from a checkout or a project's folder.
    """

    roots: tuple[str, ...]
    files: tuple[_PackedFile, ...]

    @classmethod
    def of(cls, name: str) -> _Module:
        """Return the module of that name, which contains no dot. Raises SetupError."""
        spec = find_spec(name)
        folders = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
        alone = Path(spec.origin) if spec and spec.has_location and spec.origin and not folders else None
        if not folders and alone is None:
            raise SetupError(
                f"there is no module {name} here to be packed",
                remedy="install it into this environment, or put its folder on PYTHONPATH",
            )
        owners = [metadata.distribution(d) for d in dict.fromkeys(metadata.packages_distributions().get(name, ()))]
        if owners and all(_holds(d, name) for d in owners):
            return cls(tuple(d.metadata["Name"] for d in owners), ())
        required = tuple(name for d in owners for name in _requires(d))
        files = [_PackedFile(alone.name, alone)] if alone else []
        for folder in folders:
            paths = (p for p in sorted(folder.rglob("*")) if p.is_file())
            inside = ((f"{name}/{p.relative_to(folder).as_posix()}", p) for p in paths)
            files += [_PackedFile(at, p) for at, p in inside if not _NOT_CODE.search(at)]
        return cls(required, tuple(files))


def _holds(distribution: metadata.Distribution, name: str) -> bool:
    """Return whether the module's files belong to the distribution; an editable installation only names their
    folder."""
    files = (PurePosixPath(f) for f in distribution.files or ())
    return any(f.parts[0] == name or str(f) == f"{name}.py" for f in files)


def _theirs(distribution: metadata.Distribution) -> list[_PackedFile]:
    if distribution.files is None:
        raise SetupError(
            f"{distribution.metadata['Name']} does not list its files",
            remedy="install it by pip or uv, or name an archive of your own: `spark: {environment: PATH}`",
        )
    names = [str(PurePosixPath(f)) for f in distribution.files]
    if any(n.startswith("pyarrow/libarrow_python.so.") for n in names):
        names = [n for n in names if not _COPIES.search(n)]
    inside = sorted(n for n in names if not n.startswith(("..", "/")) and not _LEFT_OUT.search(n))
    files = [_PackedFile(n, Path(str(distribution.locate_file(n)))) for n in inside]
    return [f for f in files if f.source.is_file()]


def _digest(distributions: dict[str, metadata.Distribution], ours: list[_PackedFile]) -> str:
    content = {
        "layout": _LAYOUT,
        "python": sys.version_info[:2],
        "platform": sysconfig.get_platform(),
        "distributions": {name: d.version for name, d in distributions.items()},
        "files": {f.path: hashlib.sha256(f.source.read_bytes()).hexdigest() for f in ours},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


# -- build


def _make(
    distributions: dict[str, metadata.Distribution],
    ours: list[_PackedFile],
    path: Path,
    report: Reporter,
    imported: Iterable[str],
) -> None:
    report(Progress(STAGE, note="what executors need, once for this version of Sluice"))
    with tempfile.TemporaryDirectory(prefix=_MAKING, dir=path.parent) as scratch:
        stage = Path(scratch, "stage")
        loops = [p for p in (library.find_library(),) if p]
        folder = f"sluice/{library.LOOPS.relative_to(_PACKAGE).as_posix()}"
        packed = [_PackedFile(f"{folder}/{p.name}", p) for p in loops]
        for file in [*ours, *packed, *(f for d in distributions.values() for f in _theirs(d))]:
            target = stage / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.source, target)
        _prove(stage, imported)
        files = [p for p in sorted(stage.rglob("*")) if p.is_file()]
        size = sum(p.stat().st_size for p in files)
        archive = Path(scratch, "archive")
        with archive.open("wb") as out:
            _write(files, stage, out, lambda done: report(Progress(STAGE, done, size)))
        _notes(path).write_text(str(size))
        archive.rename(path)


def _prove(stage: Path, imported: Iterable[str]) -> None:
    """Compile the remaining files inside the pack, and do the imports of tasks from nothing else."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "PYTHON"))}
    environment |= {"PYTHONPATH": str(stage), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    imports = "; ".join(f"import {module}" for module in imported)
    # Bytecode by its source's hash, unchecked: unpacking changes the files' times.
    compiled = ["compileall", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash", "-s", str(stage), str(stage)]
    for command in (["-m", *compiled], ["-c", imports]):
        alone = [sys.executable, "-S", *command]
        process = subprocess.run(alone, env=environment, cwd=stage, capture_output=True, text=True, check=False)
        if process.returncode:
            why = (process.stderr or process.stdout).strip().rpartition("\n")[2]
            raise SetupError(
                f"the environment cannot be packed: {why}",
                remedy="reinstall Sluice, or name an archive of your own: `spark: {environment: PATH}`",
            )


def _write(files: list[Path], stage: Path, out: io.BufferedWriter, report: Callable[[int], None]) -> None:
    done = 0
    with _Squeezed(out) as squeezed, tarfile.open(fileobj=squeezed, mode="w|", format=tarfile.GNU_FORMAT) as tar:
        for path in files:
            info = tarfile.TarInfo(path.relative_to(stage).as_posix())
            info.size, info.mode, info.mtime = path.stat().st_size, 0o644, 1 << 30
            with path.open("rb") as source:
                tar.addfile(info, source)
            done += info.size
            report(done)


class _Squeezed(io.RawIOBase):
    """gzip in blocks that all cores compress in parallel: a file of several members, which every gzip reads."""

    def __init__(self, out: io.BufferedWriter) -> None:
        self._out, self._buffer = out, bytearray()
        self._cores = os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(self._cores, "sluice-pack")
        self._waiting: deque[Future[bytes]] = deque()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        self._buffer += data
        while len(self._buffer) >= _BLOCK:
            self._submit(bytes(self._buffer[:_BLOCK]))
            del self._buffer[:_BLOCK]
        return len(data)

    def _submit(self, block: bytes) -> None:
        self._waiting.append(self._pool.submit(gzip.compress, block, 6, mtime=0))
        while len(self._waiting) > 2 * self._cores:
            self._out.write(self._waiting.popleft().result())

    def close(self) -> None:
        if not self.closed:
            self._submit(bytes(self._buffer))
            while self._waiting:
                self._out.write(self._waiting.popleft().result())
            self._pool.shutdown()
        super().close()


@cache
def python() -> str:
    """Return the name under which executors find the interpreter that they need."""
    return f"python{sys.version_info[0]}.{sys.version_info[1]}"
